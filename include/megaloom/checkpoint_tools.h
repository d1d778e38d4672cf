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
    int64_t dropped_objects; /* of IN that are nothing of the model or its optimizer: random states of other programs */
    bool dropped_optimizer;  /* IN had the state of an optimizer, OUT has none */
    char form[32];           /* of the optimizer in OUT: "dp_reshardable", "fully_reshardable", "whole", "none" */
} loom_tool_outcome;

typedef struct loom_reshard_options {
    const char *hf;             /* Hugging Face directory of the model, for a checkpoint without a context; or NULL */
    const char *optimizer_form; /* "dp_reshardable", "fully_reshardable", "whole" (as without the distributed
                                   optimizer), "none"; NULL: what the strategy of the new layout writes */
    loom_tool_progress progress; /* report may be NULL */
} loom_reshard_options;

/* Rewrites the checkpoint at `in` as a run would have written it from the same state, had its configuration been that
 * of the checkpoint's context with `overrides` over it: strategy.*, model.* of the pipeline split, and ranks (not given:
 * as many as keep the data-parallel size). Tensor by tensor and object by object the same bits; padding rows of the
 * vocabulary that are not stored are zero. Errors also: LOOM_ERR_CONFIG for a layout that cannot be, LOOM_ERR_ARGUMENT
 * for a form that is none or an optimizer that is not there. outcome may be NULL. */
LOOM_API loom_status loom_checkpoint_reshard(const char *in, const char *out, const char *const *overrides,
    int64_t override_count, const loom_reshard_options *options, loom_tool_outcome *outcome);

#ifdef __cplusplus
}
#endif
#endif
