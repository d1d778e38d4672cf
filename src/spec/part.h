/* The part of a model that one rank of a pipeline holds: which parameters, in which order. Pure. */
#ifndef SPEC_PART_H
#define SPEC_PART_H

#include "spec/parameter.h"
#include <megaloom/stages.h>

typedef struct loom__part_entry {
    const loom__parameter_descriptor *descriptor; /* of the spec, or the spec's tied_head */
    int64_t canonical; /* number in the spec of the parameter whose values these are: of the word embeddings for a tied
                          head */
    int64_t chunk;     /* of the rank's */
    bool shared_ends;  /* tied word embeddings, on the first and on the last of several stages */
    bool copy;         /* the last stage's: counted and written by the first */
    int64_t buffer_place; /* its place in the gradient buffers: all in reverse order, and experts kept apart behind the
                             others */
} loom__part_entry;

/* Whether the ranks that have the same of an expert are those that have the same of the rest, so that one gradient
 * buffer and one optimizer serve both, as in Megatron-Core without expert parallelism. Where tensors of experts are cut
 * another way Megatron-Core would still reduce them over the wrong ranks; there we keep them apart. */
static inline bool loom__experts_are_among(int64_t tp, int64_t ep, int64_t etp) {
    return ep == 1 && etp == tp;
}

typedef struct loom__part {
    int64_t count;
    loom__part_entry *entries; /* chunk 0's, chunk 1's, …, each in model order; behind them, in the same order, */
    int64_t module_buffers;    /* so many of module buffers, which have no place in a gradient buffer */
    bool experts_among;        /* experts have their places among the others, not a buffer of their own */
} loom__part;

/* Whether the gradient of a parameter has its place in the buffer of experts. */
static inline bool loom__part_is_apart(const loom__part *part, const loom__parameter_descriptor *parameter) {
    return parameter->expert >= 0 && !part->experts_among;
}

/* Of the rank with those chunks, in order of depth, one rank of `stages`; chunks NULL = the whole model. The spec is
 * borrowed for the part's life. Errors: LOOM_ERR_ARGUMENT names a chunk that the model cannot have there. */
loom_status loom__part_create(
    const loom__model_spec *spec, int64_t stages, const loom_stage *chunks, int64_t chunk_count, loom__part **part);
/* Leaves the experts first … first + count - 1 of each layer, and all that is of no expert. */
void loom__part_keep_experts(loom__part *part, int64_t first, int64_t count);
/* Has experts share a gradient buffer with the rest, or keeps them apart, as a new part does. */
void loom__part_place_experts(loom__part *part, bool among);
void loom__part_destroy(loom__part *part); /* NULL is accepted */

#endif
