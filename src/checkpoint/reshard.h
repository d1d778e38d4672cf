/* A reshard plan: which rectangle of which stored chunk goes where, from any layout to any other. Pure arithmetic on
 * what a checkpoint says it holds; reading is up to the caller. */
#ifndef CHECKPOINT_RESHARD_H
#define CHECKPOINT_RESHARD_H

#include "checkpoint/sharded.h"

enum { LOOM__STORED_DIMS = 8 };

typedef struct loom__stored_chunk {
    int64_t offset[LOOM__STORED_DIMS], size[LOOM__STORED_DIMS];
} loom__stored_chunk;

/* A tensor as a checkpoint's index has it; everything is borrowed. */
typedef struct loom__stored_tensor {
    const char *key;
    int dims;
    int64_t shape[LOOM__STORED_DIMS];
    int original_dims; /* of a flattened one: its shape before; 0 for others */
    int64_t original_shape[LOOM__STORED_DIMS];
    int64_t chunk_count;
    const loom__stored_chunk *chunks;
} loom__stored_tensor;

typedef struct loom__stored_state {
    const loom__stored_tensor *tensors;
    int64_t count;
    /* The writer's, whose buckets are computed again; only a dp_reshardable optimizer needs it, else NULL is fine. */
    const loom__sharded_layout *layout;
} loom__stored_state;

/* What of a checkpoint belongs to which parameter of a model. */
typedef struct loom__reshard_source loom__reshard_source;

/* Sorts the tensors of a checkpoint to the parameters of `spec`. Keys may begin with "module."s and may have layers as
 * first axis or in their names; the optimizer may have any form. Only names of `moments` (moments, moment, of
 * loom__sharded_options) count as moments. Vocabularies may be padded otherwise. The spec and the stored state are
 * borrowed for the life of the source. Errors: LOOM_ERR_FORMAT for chunks outside their tensor or over each other, for
 * buckets that the layout does not have, and for flattened tensors that cannot be; LOOM_ERR_ARGUMENT for buckets
 * without a layout; LOOM_ERR_MEMORY. */
loom_status loom__reshard_source_create(const loom__model_spec *spec, const loom__stored_state *stored,
    const loom__sharded_options *options, loom__reshard_source **source);
void loom__reshard_source_destroy(loom__reshard_source *source); /* NULL is accepted */

/* Numbers of stored tensors that are nothing of the model or its optimizer, and of those that are but have another
 * shape; of the latter nothing is ever copied. */
typedef struct loom__reshard_leftover {
    int64_t unexpected_count, misshaped_count;
    const int64_t *unexpected, *misshaped;
} loom__reshard_leftover;
loom__reshard_leftover loom__reshard_source_leftover(const loom__reshard_source *source);

/* Elements [first, first + count) of a rank's local tensor of a parameter, or of an array that belongs to it, are
 * wanted at `at` of the array that the caller fills: all of it, or the part that a sharded optimizer keeps. */
typedef struct loom__reshard_want {
    int array; /* LOOM__STATE_WEIGHT, … */
    int64_t canonical, first, count, at;
} loom__reshard_want;

typedef struct loom__reshard_copy {
    int64_t tensor, chunk; /* stored */
    int64_t want;
    loom__box_copy copy; /* `from` in the chunk as it is stored, row-major; `to` in the caller's array */
} loom__reshard_copy;

typedef struct loom__reshard_plan {
    int64_t count;
    loom__reshard_copy *copies; /* by tensor and chunk, so that each chunk is read once */
    int64_t missing_count;
    int64_t *missing; /* wants of which the checkpoint lacks elements; rows of padding need not be there */
} loom__reshard_plan;

/* The plan of one rank of those that share the wanted parameters, tensor ranks or expert tensor ranks: wants are of
 * experts alone or of none, but where both are shared alike. The padded vocabulary is that of `spec` (the model may be
 * padded otherwise than that of the source). LOOM_ERR_ARGUMENT for a want outside its tensor, LOOM_ERR_MEMORY. */
loom_status loom__reshard_plan_create(const loom__reshard_source *source, const loom__model_spec *spec, int64_t tp,
    int64_t tp_rank, const loom__reshard_want *wants, int64_t count, loom__reshard_plan **plan);
void loom__reshard_plan_destroy(loom__reshard_plan *plan); /* NULL is accepted */

#endif
