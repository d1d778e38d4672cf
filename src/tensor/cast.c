/* Between dtypes as an operation: where activations of one dtype meet a part of the model that keeps another. The
 * gradient goes back in the dtype of what came in. */
#include "tensor/dtype.h"

static loom_status convert(loom_tape *tape, const loom_tensor *x, loom_dtype dtype, loom_tensor **output) {
    loom_rank *rank = loom_tape_rank(tape);
    int64_t count = loom_tensor_count(x);
    loom_tensor *made;
    LOOM_TRY(loom_tensor_create(rank, dtype, x->dims, x->shape, &made));
    if (dtype == LOOM_F32)
        loom__kernels16(tape, x->dtype)->widen(loom_rank_team(rank), count, x->data, made->data);
    else
        loom__kernels16(tape, dtype)->narrow(loom_rank_team(rank), count, x->data, made->data);
    *output = made;
    return LOOM_OK;
}

static loom_status cast_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    loom_tensor *d_x;
    LOOM_TRY(convert(tape, d_y, *(loom_dtype *)loom_node_state(node), &d_x));
    return loom_tape_give(tape, node, 0, d_x);
}

static const loom_op cast_op = {"cast", cast_input, NULL, NULL};

loom_status loom_cast(loom_tape *tape, loom_tensor *x, loom_dtype dtype, loom_tensor **output) {
    LOOM_TRY(loom__check_dtype(tape, cast_op.name, x));
    LOOM_TRY(loom__check_dtype(tape, cast_op.name, &(loom_tensor){.dtype = dtype}));
    if (x->dtype != dtype && x->dtype != LOOM_F32 && dtype != LOOM_F32)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: cast of %s to %s; what works: by way of F32",
            loom_dtype_name(x->dtype), loom_dtype_name(dtype));
    if (x->dtype == dtype) {
        *output = loom_tensor_retain(x);
        return LOOM_OK;
    }
    LOOM_TRY(loom_tensor_ready(x));
    loom_tensor *y;
    LOOM_TRY(convert(tape, x, dtype, &y));
    loom_node *node;
    loom_status status = loom_tape_record(tape, &cast_op, sizeof x->dtype, (loom_tensor *[]){x}, 1, NULL, 0, y, &node);
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    if (node)
        *(loom_dtype *)loom_node_state(node) = x->dtype;
    *output = y;
    return LOOM_OK;
}
