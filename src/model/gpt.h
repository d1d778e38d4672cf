/* A decoder-only transformer (GPT-2, Llama and its kin) as a module. */
#ifndef MODEL_GPT_H
#define MODEL_GPT_H

#include "nn/layer.h"
#include "spec/huggingface.h"
#include <megaloom/huggingface.h>
#include <megaloom/layout.h>
#include <megaloom/module.h>
#include <megaloom/safetensors.h>

/* One chunk of this rank. */
typedef struct loom__gpt_chunk {
    loom_stage place;
    const loom__layer *layers; /* place.layers of them, among loom__gpt.layers */
} loom__gpt_chunk;

typedef struct loom__gpt {
    loom_module module;              /* first: what users see */
    loom_model_config config;        /* as given, completed at materialize */
    int64_t given_padded_vocab_size; /* 0: it follows from the vocabulary and the tensor ranks */
    bool initialize;    /* false: created inside megatron_context; parameters stay zero until somebody loads them */
    char *hf_directory; /* where weights come from, or NULL */
    loom_module_environment environment; /* its chunks are below */
    loom__model_spec *spec;
    loom__part *part;
    loom__parameter_set *set;
    int64_t chunk_count, layer_count; /* this rank's */
    loom__gpt_chunk *chunks;
    loom__layer *layers;
    /* NULL where no chunk needs them. output: the word embeddings, a copy of them, or a head of its own. */
    loom_parameter *word_embeddings, *position_embeddings, *final_norm, *final_norm_bias, *output;
    float *cosine, *sine;
    loom_rope_table rope;         /* empty without layers */
    loom_comm *context_levels[2]; /* of cp_comm_type a2a+p2p: ranks that exchange heads, and those that make a ring */
    loom_comm
        *replicas; /* tensor ranks that hold a copy of the same key/value group; NULL where groups are not replicated */
} loom__gpt;

/* Shapes only: nothing is allocated for weights until materialize. The configuration is copied; its strings are
 * borrowed. hf_directory (copied) may be NULL. */
loom_status loom__gpt_create(
    const loom_model_config *config, const char *hf_directory, bool initialize, loom_module **module);

/* The module's forward and activation_shape; context is the loom__gpt. */
loom_status loom__gpt_forward(void *context, loom_tape *tape, const loom_forward *forward, loom_tensor **output);
loom_status loom__gpt_activation_shape(void *context, int64_t b, int64_t s, int *dims, int64_t shape[LOOM_MAX_DIMS]);

/* How the model's layers of experts route. */
loom__router_options loom__gpt_router_options(const loom__gpt *gpt, bool training, double own_loss_scale);
/* Ranks that share a sequence; 1 without context parallelism. */
int64_t loom__gpt_context_size(const loom__gpt *gpt);
/* The groups that cp_comm_type takes in any of the model's layers. Collective over them. */
loom_status loom__gpt_make_context_levels(loom__gpt *gpt);
/* What attention in the layers of the chunk needs to know of the others' rows. Collective over them where documents
 * have boundaries. */
loom_status loom__gpt_share_sequence(
    const loom__gpt *gpt, const loom_batch *batch, const loom_stage *chunk, loom__microbatch *microbatch);

/* Whether loom__gpt_create made the module: its context is a loom__gpt. */
bool loom__module_is_gpt(const loom_module *module);

/* The logits [1, count, v/tp] of what follows the tokens number last[0] … last[count - 1], from tokens [m's b] of one
 * position each (borrowed for the call), which are the rows that m's cache reads. No sequence parallelism; the tape
 * does not record. The rank holds the whole model. Collective over the tensor group, and over the expert group where
 * there are experts. */
loom_status loom__gpt_next_logits(const loom__gpt *gpt, loom_tape *tape, loom__microbatch *m, int64_t *tokens,
    const int64_t *last, int64_t count, loom_tensor **logits);

/* Reads config.json of a Hugging Face directory into *config (all fields). */
loom_status loom__hf_read_config(const char *directory, loom_model_config *config);
/* Fills the set from the directory's safetensors, reading no other tensors than the set's; every tensor the whole model
 * needs must be there with the right shape, and none may be there that it does not know, nor a tied head that differs
 * from the embedding. */
loom_status loom__hf_load(const char *directory, loom__parameter_set *set);
/* The weights of a directory, asked for by parameters of the spec, which is borrowed; a directory that loom__hf_load
 * would refuse does not open. Not collective. */
typedef struct loom__hf_weights loom__hf_weights;
loom_status loom__hf_weights_open(const char *directory, const loom__model_spec *spec, loom__hf_weights **weights);
void loom__hf_weights_close(loom__hf_weights *weights); /* NULL is accepted */
/* LOOM_BF16 or LOOM_F16 where all tensors are of it, else LOOM_F32. */
loom_dtype loom__hf_weights_dtype(const loom__hf_weights *weights);
/* canonical [shape of the parameter of that number] */
loom_status loom__hf_weights_read(loom__hf_weights *weights, int64_t number, float *canonical);
/* Describes all tensors of the set's model, in Hugging Face names and shapes, to a writer. */
loom_status loom__hf_describe(const loom__parameter_set *set, loom_safetensors_writer *writer);
/* Their values or gradients, times factor, in the order of the descriptions. Collective over tp and pp; written where
 * writer is not NULL. */
loom_status loom__hf_write(const loom__parameter_set *set, loom__parameter_array array, loom_comm *tp, loom_comm *pp,
    float factor, loom_safetensors_writer *writer);

/* values = the file tensor, one of those that the parameter is made of, from the parameter's canonical tensor. */
loom_status loom__hf_fill(const loom__model_spec *spec, const loom__parameter_descriptor *descriptor,
    const loom__hf_tensor *tensor, const float *canonical, float *values);
/* The text of a directory's config.json (the caller's: free), and into path (bytes long) its name. */
loom_status loom__hf_read_config_text(const char *directory, char *path, size_t bytes, char **text, size_t *length);

/* Whether the model can be written to `directory`; by the rank that writes. tokenizer: that of the options, opened;
 * NULL where they name none, and on ranks that do not write. */
loom_status loom__hf_save_check(const loom__parameter_set *set, const char *directory,
    const loom_hf_save_options *options, const loom_tokenizer *tokenizer);
/* The set's model as a Hugging Face directory, written by the rank with `writes`, one of a tensor and pipeline group.
 * Collective over `world`; `tp` and `pp` are this rank's tensor and pipeline groups. */
loom_status loom__hf_save(const loom__parameter_set *set, loom_comm *tp, loom_comm *pp, loom_comm *world, bool writes,
    const char *directory, const loom_hf_save_options *options, const loom_tokenizer *tokenizer);
/* The same without ranks and without a tokenizer by name: `visit` calls body(argument, number, canonical) for every
 * parameter of the spec, in order. */
typedef loom_status (*loom__hf_visit)(void *context, loom__parameter_body body, void *argument);
loom_status loom__hf_save_visited(const loom__model_spec *spec, loom__hf_visit visit, void *context,
    const char *directory, const loom_hf_save_options *options);

#endif
