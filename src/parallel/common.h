/* What the files of this room share. */
#ifndef PARALLEL_COMMON_H
#define PARALLEL_COMMON_H

#include "parallel/parallel.h"
#include "tensor/dtype.h"

#define KERNELS(tape) loom_rank_kernels(loom_tape_rank(tape))
#define TEAM(tape) loom_rank_team(loom_tape_rank(tape))

static inline int loom__tp_size(const loom_comm *tp) {
    return tp ? loom_comm_size(tp) : 1;
}

/* [s/tp, b, h] of every rank -> [s, b, h]; pending on the output. */
loom_status loom__gather_sequence_start(loom_tape *tape, loom_tensor *x, loom_comm *tp, loom_tensor **full);
/* The sum over tp of x [s, b, h]: whole in place (pending on x itself, returned retained), or this rank's [s/tp, b, h].
 */
loom_status loom__reduce_start(
    loom_tape *tape, loom_tensor *x, loom_comm *tp, bool sequence_parallel, loom_tensor **sum);

#endif
