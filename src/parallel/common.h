/* What the files of this room share. */
#ifndef PARALLEL_COMMON_H
#define PARALLEL_COMMON_H

#include "comm/comm.h"
#include "parallel/parallel.h"
#include "tensor/dtype.h"
#include <stdlib.h>

#define KERNELS(tape) loom_rank_kernels(loom_tape_rank(tape))
#define TEAM(tape) loom_rank_team(loom_tape_rank(tape))

/* Element c of a row in F32, BF16 or F16. */
static inline float loom__row_get(loom_dtype dtype, const void *row, int64_t c) {
    if (dtype == LOOM_F32)
        return ((const float *)row)[c];
    uint16_t narrow = ((const uint16_t *)row)[c];
    return dtype == LOOM_BF16 ? loom_bf16_to_f32(narrow) : loom_f16_to_f32(narrow);
}

static inline void loom__row_put(loom_dtype dtype, void *row, int64_t c, float value) {
    if (dtype == LOOM_F32)
        ((float *)row)[c] = value;
    else
        ((uint16_t *)row)[c] = dtype == LOOM_BF16 ? loom_f32_to_bf16(value) : loom_f32_to_f16(value);
}

/* NULL is a group of this rank alone. */
static inline int loom__group_size(const loom_comm *group) {
    return group ? loom_comm_size(group) : 1;
}

/* [s/tp, b, h] of every rank -> [s, b, h]; pending on the output. */
loom_status loom__gather_sequence_start(loom_tape *tape, loom_tensor *x, loom_comm *tp, loom_tensor **full);
/* The sum over tp of x [s, b, h]: whole in place (pending on x itself, returned retained), or this rank's [s/tp, b, h].
 */
loom_status loom__reduce_start(
    loom_tape *tape, loom_tensor *x, loom_comm *tp, bool sequence_parallel, loom_tensor **sum);

#endif
