/* Hugging Face models of the architectures we build: their config.json, and which of their tensor elements each
 * canonical element is. Pure: texts come in as text, tensors as names, shapes and indices. */
#ifndef SPEC_HUGGINGFACE_H
#define SPEC_HUGGINGFACE_H

#include "spec/parameter.h"

enum { LOOM__HF_NAME_MAX = 96 };

/* Reads the text of a config.json into *model: every field that the file decides is set (architecture, sizes,
 * activation, dropouts, …; max_position_embeddings from the file, or its transformers default); run settings
 * (seq_length, make_vocab_size_divisible_by, padded_vocab_size, recompute, replicate_query_groups,
 * padded_vocab_in_softmax, parallel fields) keep their values. Both transformers 4 and 5 spellings. All faults are
 * named at once, with `name` before them: LOOM_ERR_FORMAT for a wrong type or a missing member, LOOM_ERR_UNSUPPORTED
 * for another architecture and for every option that would change the numbers and is not built, also for options nobody
 * here has heard of. *model is written only on success. */
loom_status loom__hf_model_config(const char *name, const char *text, size_t length, loom_model_config *model);

/* One tensor of a Hugging Face file: gpt2 names with their "transformer." prefix. */
typedef struct loom__hf_tensor {
    char name[LOOM__HF_NAME_MAX];
    int dims;
    int64_t shape[2]; /* shape[1] = 1 where dims = 1 */
} loom__hf_tensor;

/* LOOM_OK when the model can be written as a Hugging Face model of its architecture; LOOM_ERR_UNSUPPORTED names what
 * cannot (a gpt2 with rotary positions, …). All functions below check it first. */
loom_status loom__hf_check(const loom__model_spec *spec);

/* Calls tensor(context, tensor) for each Hugging Face tensor that makes up the parameter: three for a llama linear_qkv,
 * one for most. */
typedef loom_status (*loom__hf_tensor_function)(void *context, const loom__hf_tensor *tensor);
loom_status loom__hf_parameter_tensors(const loom__model_spec *spec, const loom__parameter_descriptor *parameter,
    loom__hf_tensor_function tensor, void *context);

/* Calls run(context, canonical_first, count, hf_name, hf_first, hf_stride) for stretches of the canonical tensor, in
 * ascending canonical order and covering it: canonical element canonical_first + i is element hf_first + i*hf_stride
 * (flat, row-major) of tensor hf_name, for i in [0, count). Each Hugging Face element is met exactly once over all
 * parameters, so the same map serves import, export and gradients. */
typedef loom_status (*loom__hf_run)(
    void *context, int64_t canonical_first, int64_t count, const char *hf_name, int64_t hf_first, int64_t hf_stride);
loom_status loom__hf_source_runs(
    const loom__model_spec *spec, const loom__parameter_descriptor *parameter, loom__hf_run run, void *context);

/* The other name under which a file may hold a tensor: without "transformer." for gpt2; NULL where there is none. */
const char *loom__hf_other_name(const loom__model_spec *spec, const char *hf_name);

/* True for a tensor that a file may hold beside the parameters and that carries no information: causal-mask buffers of
 * old gpt2 files, rotary inv_freq of old llama files, the copy of a tied head (whoever reads it sees that it is one).
 */
bool loom__hf_is_ignorable(const loom__model_spec *spec, const char *hf_name);

/* Tokens with a meaning of their own; -1 = none. */
typedef struct loom__hf_token_ids {
    int64_t bos, eos, pad;
} loom__hf_token_ids;

/* The text of a config.json that reads back to the model's configuration and that transformers opens, weights being of
 * `dtype` (LOOM_F32, LOOM_BF16, LOOM_F16), and of a generation_config.json. *text is the caller's: free. */
loom_status loom__hf_config_text(
    const loom__model_spec *spec, loom_dtype dtype, const loom__hf_token_ids *ids, char **text);
loom_status loom__hf_generation_text(const loom__hf_token_ids *ids, char **text);
/* The token ids of a config.json, called `name` in messages. */
loom_status loom__hf_read_token_ids(const char *name, const char *text, size_t length, loom__hf_token_ids *ids);

/* The byte tokenizer's tokenizer.json and tokenizer_config.json; texts as above. Its end of text is token
 * LOOM__HF_BYTE_END. */
enum { LOOM__HF_BYTE_END = 256 };
loom_status loom__hf_byte_tokenizer_text(char **text);
loom_status loom__hf_byte_tokenizer_config_text(int64_t positions, char **text);

#endif
