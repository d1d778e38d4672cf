/* Moving activations between the regions of tensor and sequence parallelism. Since activations are [s, b, h], a shard
 * of the sequence is one contiguous piece, and gathering or scattering it needs no rearrangement. */
#include "parallel/common.h"
#include <stdlib.h>

loom_status loom__gather_sequence_start(loom_tape *tape, loom_tensor *x, loom_comm *tp, loom_tensor **full) {
    int size = loom__group_size(tp);
    LOOM_TRY(loom_tensor_ready(x));
    loom_tensor *made;
    LOOM_TRY(loom_tensor_create(
        loom_tape_rank(tape), x->dtype, 3, (int64_t[]){x->shape[0] * size, x->shape[1], x->shape[2]}, &made));
    int64_t *counts = malloc((size_t)size * sizeof *counts);
    loom_status status = counts ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for a gather");
    for (int i = 0; !status && i < size; i++)
        counts[i] = loom_tensor_count(x);
    if (!status)
        status = loom_all_gather_v_start(tp, x->data, made->data, counts, x->dtype, &made->pending);
    free(counts);
    if (status) {
        loom_tensor_release(made);
        return status;
    }
    made->source = loom_tensor_retain(x);
    *full = made;
    return LOOM_OK;
}

loom_status loom__reduce_start(
    loom_tape *tape, loom_tensor *x, loom_comm *tp, bool sequence_parallel, loom_tensor **sum) {
    int size = loom__group_size(tp);
    if (size == 1) {
        *sum = loom_tensor_retain(x);
        return LOOM_OK;
    }
    if (!sequence_parallel) {
        LOOM_TRY(loom_all_reduce_start(tp, x->data, x->data, loom_tensor_count(x), x->dtype, LOOM_SUM, &x->pending));
        *sum = loom_tensor_retain(x);
        return LOOM_OK;
    }
    if (x->shape[0] % size)
        return loom_fail(LOOM_ERR_CONFIG,
            "sequence parallelism: %lld positions cannot be split over %d tensor ranks; nearest lengths %lld and %lld",
            (long long)x->shape[0], size, (long long)(x->shape[0] / size * size),
            (long long)((x->shape[0] / size + 1) * size));
    loom_tensor *part;
    LOOM_TRY(loom_tensor_create(
        loom_tape_rank(tape), x->dtype, 3, (int64_t[]){x->shape[0] / size, x->shape[1], x->shape[2]}, &part));
    int64_t *counts = malloc((size_t)size * sizeof *counts);
    loom_status status = counts ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for a reduction");
    for (int i = 0; !status && i < size; i++)
        counts[i] = loom_tensor_count(part);
    if (!status)
        status = loom_reduce_scatter_v_start(tp, x->data, part->data, counts, x->dtype, LOOM_SUM, &part->pending);
    free(counts);
    if (status) {
        loom_tensor_release(part);
        return status;
    }
    part->source = loom_tensor_retain(x);
    *sum = part;
    return LOOM_OK;
}
