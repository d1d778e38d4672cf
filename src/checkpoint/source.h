/* What a reshard source is made of. */
#ifndef CHECKPOINT_SOURCE_H
#define CHECKPOINT_SOURCE_H

#include "checkpoint/reshard.h"

/* A rectangle of a parameter's array that lies in a stored chunk. */
typedef struct loom__source_piece {
    int array;
    int64_t canonical, tensor, chunk;
    loom__box box; /* places count from the beginning of the chunk */
} loom__source_piece;

struct loom__reshard_source {
    const loom__model_spec *spec;
    int64_t count, room;
    loom__source_piece *pieces; /* by array, canonical parameter and place */
    int64_t unexpected_count, misshaped_count;
    int64_t *unexpected, *misshaped;
};

#endif
