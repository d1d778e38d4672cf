/* What is the same in every dtype of activations. A value and its gradient have one dtype; weights have that of the
 * activations that they meet; statistics, losses and gradients of parameters are fp32. */
#include "tensor/dtype.h"
#include <stdlib.h>

loom_status loom__check_dtype(const loom_tape *tape, const char *op, const loom_tensor *x) {
    if (!x || x->dtype == LOOM_F32 || loom__kernels16(tape, x->dtype))
        return LOOM_OK;
    if (loom_dtype_is_narrow(x->dtype))
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: %s of %s tensors by the kernels '%s'; what works: F32", op, loom_dtype_name(x->dtype),
            loom_rank_kernels(loom_tape_rank(tape))->name);
    return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: %s of %s tensors; what works: F32, BF16, F16", op,
        loom_dtype_name(x->dtype));
}

loom_status loom__check_same_dtype(const char *op, const loom_tensor *x, const loom_tensor *y) {
    if (!x || !y || x->dtype == y->dtype)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_ARGUMENT, "%s: one input is kept in %s, the other in %s; expected one dtype", op,
        loom_dtype_name(x->dtype), loom_dtype_name(y->dtype));
}

loom_status loom__check_parameter_dtype(const char *op, const loom_tensor *x, const loom_parameter *parameter) {
    if (!parameter || parameter->dtype == x->dtype)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_ARGUMENT, "%s: %s is kept in %s, its input in %s; expected one dtype", op,
        parameter->name, loom_dtype_name(parameter->dtype), loom_dtype_name(x->dtype));
}

loom_status loom__vector(
    loom_tape *tape, const loom_parameter *parameter, float added, loom_tensor **made, const float **values) {
    *made = NULL;
    *values = parameter ? parameter->data : NULL;
    if (!parameter || (parameter->dtype == LOOM_F32 && added == 0))
        return LOOM_OK;
    loom_rank *rank = loom_tape_rank(tape);
    int64_t count = loom_parameter_count(parameter);
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 1, &count, made));
    float *to = loom_tensor_f32(*made);
    if (parameter->dtype != LOOM_F32)
        loom__kernels16(tape, parameter->dtype)->widen(loom_rank_team(rank), count, parameter->data16, to);
    for (int64_t i = 0; i < count; i++)
        to[i] = added + (parameter->dtype == LOOM_F32 ? parameter->data[i] : to[i]);
    *values = to;
    return LOOM_OK;
}

void loom__parameter_narrow(loom_parameter *parameter, loom_dtype dtype, uint16_t *to) {
    int64_t count = loom_parameter_count(parameter);
    for (int64_t i = 0; i < count; i++)
        to[i] = dtype == LOOM_BF16 ? loom_f32_to_bf16(parameter->data[i]) : loom_f32_to_f16(parameter->data[i]);
    free(parameter->memory);
    parameter->memory = NULL;
    parameter->data = NULL;
    parameter->data16 = to;
    parameter->dtype = dtype;
}
