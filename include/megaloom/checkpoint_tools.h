/* Checkpoints rewritten without ranks: for another layout, for Hugging Face and back, and the mean of several. Weights
 * and the optimizer's state are taken tensor by tensor, so that memory is bounded by the largest one that is written at
 * once, and nothing is held twice.
 *
 * Every tool writes a new folder OUT: to OUT.tmp, flushed to the disk and renamed at the end; after an error there is
 * no OUT. Nothing here is collective; nothing needs a rank. Errors of all: LOOM_ERR_ARGUMENT where something is at OUT
 * already or OUT is the folder that is read; those of loom_checkpoint_open; LOOM_ERR_NOT_FOUND for a checkpoint that
 * does not hold the whole state of its model, with all names; LOOM_ERR_IO (a full disk), LOOM_ERR_MEMORY. */
#ifndef MEGALOOM_CHECKPOINT_TOOLS_H
#define MEGALOOM_CHECKPOINT_TOOLS_H

#include <megaloom/checkpoint.h>
#include <megaloom/config.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Hears how many of the bytes of a rewritten checkpoint's tensors are written, now and then. */
typedef struct loom_tool_progress {
    void (*report)(void *context, uint64_t done, uint64_t all);
    void *context;
} loom_tool_progress;

/* What a tool did. */
typedef struct loom_tool_outcome {
    int64_t ranks;           /* of the layout that is written */
    int64_t tensors;         /* names that are written */
    uint64_t bytes;          /* of their elements */
    int64_t dropped_objects; /* of IN that OUT does not have, those that hold nothing left out of account: random states
                                of other programs; with "safetensors" all, and the entries of the common state */
    bool dropped_optimizer;  /* IN had the state of an optimizer, OUT has none */
    char form[32];           /* of the optimizer in OUT: "dp_reshardable", "fully_reshardable", "whole", "none" */
} loom_tool_outcome;

typedef struct loom_reshard_options {
    const char *hf;              /* Hugging Face directory of the model, for a checkpoint without a context; or NULL */
    const char *optimizer_form;  /* "dp_reshardable", "fully_reshardable", "whole" (as without the distributed
                                    optimizer), "none"; NULL: what the strategy of the new layout writes */
    loom_tool_progress progress; /* report may be NULL */
} loom_reshard_options;

/* Rewrites the checkpoint at `in` as a run would have written it from the same state, had its configuration been that
 * of the checkpoint's context with `overrides` over it: strategy.*, model.* of the pipeline split, and ranks (not
 * given: as many as keep the data-parallel size). Tensor by tensor and object by object the same bits; padding rows of
 * the vocabulary that are not stored are zero. Errors also: LOOM_ERR_CONFIG for a layout that cannot be and for
 * another precision.precision than that of the weights, LOOM_ERR_ARGUMENT for a form that is none or an optimizer that
 * is not there. outcome may be NULL. */
LOOM_API loom_status loom_checkpoint_reshard(const char *in, const char *out, const char *const *overrides,
    int64_t override_count, const loom_reshard_options *options, loom_tool_outcome *outcome);

typedef struct loom_convert_options {
    const char *to;    /* "hf", "torch_dist", "dcp", "safetensors"; NULL: torch_dist of a Hugging Face directory, hf of
                          anything else */
    const char *hf;    /* of a checkpoint without a context: Hugging Face directory with its config.json; with "hf" also
                          where tokenizer files, generation_config.json and token ids come from; or NULL */
    const char *dtype; /* of weights, "fp32", "bf16", "fp16"; NULL: as they are. Only with "hf" and "torch_dist" */
    int64_t max_shard_bytes; /* of "hf", as in loom_hf_save_options; 0 = its default */
    loom_tool_progress progress;
} loom_convert_options;

/* Rewrites the weights at `in`, a checkpoint or a Hugging Face directory, in another form at `out`:
 * hf          a Hugging Face directory; padding rows of the vocabulary are left out, the optimizer too
 * torch_dist  a checkpoint of one rank with a context, into which tokenizer files and config.json go, so that the way
 *             back has them
 * dcp         what plain torch.distributed.checkpoint reads: all tensors of a checkpoint, the optimizer's too, under
 *             their names, and as objects its objects and the entries of its common state
 * safetensors one file of all tensors of a checkpoint under their names; without objects and common state
 * A Hugging Face directory becomes torch_dist alone. The first two hold no more than the largest parameter twice, the
 * others a block. Errors also: LOOM_ERR_ARGUMENT for a form or dtype that is none, LOOM_ERR_UNSUPPORTED for a model
 * that is not built, those of loom_gpt_save_hf. outcome may be NULL. */
LOOM_API loom_status loom_checkpoint_convert(
    const char *in, const char *out, const loom_convert_options *options, loom_tool_outcome *outcome);

typedef struct loom_average_options {
    const double *weights; /* [count], of which the sum is not 0: shares are weights / sum; NULL: all the same */
    loom_tool_progress progress;
} loom_average_options;

/* Writes the mean of the weights of `count` checkpoints, element by element, computed in double and rounded once to the
 * dtype that they have. All must have the same tensors, of the same shapes and dtypes: LOOM_ERR_ARGUMENT lists every
 * difference; tensors that are no floating-point ones must be the same. The optimizer's state is dropped; objects,
 * common state and context are those of the first. LOOM_ERR_NUMERIC for a mean that
 * is no finite number. Safetensors (a file or a Hugging Face directory) give a file, or a
 * directory with the first one's config.json and tokenizer files; others give torch_dist, cut as the first. outcome may
 * be NULL. */
LOOM_API loom_status loom_checkpoint_average(const char *const *paths, int64_t count, const char *out,
    const loom_average_options *options, loom_tool_outcome *outcome);

#ifdef __cplusplus
}
#endif
#endif
