/* A decoder-only transformer (GPT-2, Llama and its kin) as a module. */
#ifndef MODEL_GPT_H
#define MODEL_GPT_H

#include "nn/layer.h"
#include "spec/huggingface.h"
#include <megaloom/huggingface.h>
#include <megaloom/module.h>
#include <megaloom/safetensors.h>

typedef struct loom__gpt {
    loom_module module;       /* first: what users see */
    loom_model_config config; /* as given, completed at materialize */
    bool initialize;    /* false: created inside megatron_context; parameters stay zero until somebody loads them */
    char *hf_directory; /* where weights come from, or NULL */
    loom_module_environment environment;
    loom__model_spec *spec;
    loom__parameter_set *set;
    loom__layer *layers;
    loom_parameter *word_embeddings, *position_embeddings, *final_norm, *final_norm_bias,
        *output; /* output: tied or own */
    float *cosine, *sine;
    loom_rope_table rope;
    loom_comm
        *replicas; /* tensor ranks that hold a copy of the same key/value group; NULL where groups are not replicated */
} loom__gpt;

/* Shapes only: nothing is allocated for weights until materialize. The configuration is copied; its strings are
 * borrowed. hf_directory (copied) may be NULL. */
loom_status loom__gpt_create(
    const loom_model_config *config, const char *hf_directory, bool initialize, loom_module **module);

/* Whether loom__gpt_create made the module: its context is a loom__gpt. */
bool loom__module_is_gpt(const loom_module *module);

/* The logits [1, b, v/tp] of what follows the last of m's positions, from tokens [b, s] (borrowed for the call). m has
 * a cache and no sequence parallelism, and its positions are those behind the cache's; the tape does not record.
 * Collective over the tensor group. */
loom_status loom__gpt_next_logits(
    const loom__gpt *gpt, loom_tape *tape, loom__microbatch *m, int64_t *tokens, loom_tensor **logits);

/* Reads config.json of a Hugging Face directory into *config (all fields). */
loom_status loom__hf_read_config(const char *directory, loom_model_config *config);
/* Fills the set from the directory's safetensors; every tensor the model needs must be there with the right shape, and
 * none may be there that it does not know, nor a tied head that differs from the embedding. */
loom_status loom__hf_load(const char *directory, loom__parameter_set *set);
/* Describes all tensors of the set, in Hugging Face names and shapes, to a writer. */
loom_status loom__hf_describe(const loom__parameter_set *set, loom_safetensors_writer *writer);
/* Their values or gradients, times factor, in the order of the descriptions. Collective over tp; written where writer
 * is not NULL. */
loom_status loom__hf_write(const loom__parameter_set *set, loom__parameter_array array, loom_comm *tp, float factor,
    loom_safetensors_writer *writer);

/* values = the file tensor, one of those that the parameter is made of, from the parameter's canonical tensor. */
loom_status loom__hf_fill(const loom__model_spec *spec, const loom__parameter_descriptor *descriptor,
    const loom__hf_tensor *tensor, const float *canonical, float *values);
/* The text of a directory's config.json (the caller's: free), and into path (bytes long) its name. */
loom_status loom__hf_read_config_text(const char *directory, char *path, size_t bytes, char **text, size_t *length);

/* Whether the model can be written to `directory`; by the rank that writes. tokenizer: that of the options, opened;
 * NULL where they name none, and on ranks that do not write. */
loom_status loom__hf_save_check(const loom__parameter_set *set, const char *directory,
    const loom_hf_save_options *options, const loom_tokenizer *tokenizer);
/* The set as a Hugging Face directory, written by the rank with `writes`, one of a tensor group. Collective over
 * `world`; `tp` is this rank's tensor group. */
loom_status loom__hf_save(const loom__parameter_set *set, loom_comm *tp, loom_comm *world, bool writes,
    const char *directory, const loom_hf_save_options *options, const loom_tokenizer *tokenizer);

#endif
