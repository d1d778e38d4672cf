/* A model as a Hugging Face directory: config.json, generation_config.json and model.safetensors, or shards with
 * model.safetensors.index.json. transformers opens it, and so does loom_gpt_create_from_hf. */
#ifndef MEGALOOM_HUGGINGFACE_H
#define MEGALOOM_HUGGINGFACE_H

#include <megaloom/strategy.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct loom_hf_save_options {
    loom_dtype dtype;        /* LOOM_F32, LOOM_BF16 or LOOM_F16 (rounded to nearest even) */
    int64_t max_shard_bytes; /* of tensors in one file; a larger tensor gets a file of its own */
    const char *source;      /* NULL, or the Hugging Face directory that the model came from: its tokenizer,
                                generation_config.json and token ids go along; borrowed */
    const char *tokenizer;   /* NULL, or where there is no source what loom_tokenizer_open takes: "byte" is written as
                                tokenizer.json, another one is copied with the tokenizer_config.json and
                                special_tokens_map.json beside it; its eod and bos are eos_token_id and bos_token_id;
                                borrowed */
} loom_hf_save_options;
/* fp32, shards of 5 GB, no source, no tokenizer. */
LOOM_API loom_hf_save_options loom_hf_save_options_default(void);

/* Writes the parameters of a module of loom_gpt_create, of all pipeline stages. The same bytes on every layout: whole
 * tensors without the vocabulary's padding rows, a tied head once, in the order of the model. Everything goes to
 * "DIRECTORY.tmp", which takes the place of DIRECTORY at the end, where it stays should that fail. What is there
 * already is replaced only when it is an empty directory or one that this function wrote and nobody has put other files
 * into; it stands at "DIRECTORY.old" meanwhile. Nothing else may be at these two names. Tensor rank 0 of data-parallel
 * rank 0 of the first stage writes, one tensor at a time, so that each rank holds the largest parameter once and the
 * writer twice. options NULL = the defaults. Collective over the world; all ranks fail together.
 *
 * Errors: LOOM_ERR_ARGUMENT (the options; what is at DIRECTORY or beside it; a tokenizer with more tokens than the
 * model has rows), those of loom_tokenizer_open, LOOM_ERR_UNSUPPORTED (what a Hugging Face model of this architecture
 * cannot be), LOOM_ERR_FORMAT (a finite weight that fp16 cannot hold), LOOM_ERR_NUMERIC (a weight that is NaN),
 * LOOM_ERR_IO, LOOM_ERR_MEMORY.
 */
LOOM_API loom_status loom_gpt_save_hf(
    loom_parallel *parallel, const char *directory, const loom_hf_save_options *options);
/* Whether a Hugging Face directory can be put there, by what is there and beside it: LOOM_ERR_ARGUMENT says what is in
 * the way. To be asked before a model is loaded. Not collective. */
LOOM_API loom_status loom_hf_check_output(const char *directory);
/* Whether loom_gpt_save_hf would be refused: to be asked before a long training. Collective over the world. */
LOOM_API loom_status loom_gpt_check_save_hf(
    loom_parallel *parallel, const char *directory, const loom_hf_save_options *options);

#ifdef __cplusplus
}
#endif
#endif
