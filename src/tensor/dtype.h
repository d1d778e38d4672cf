/* What operations need to work in every dtype of activations: the kernels of a dtype, checks, and vectors of fp32. */
#ifndef TENSOR_DTYPE_H
#define TENSOR_DTYPE_H

#include <megaloom/tensor.h>

/* NULL when the rank's kernels have none of that dtype. */
static inline const loom_kernels16 *loom__kernels16(const loom_tape *tape, loom_dtype dtype) {
    const loom_kernels *kernels = loom_rank_kernels(loom_tape_rank(tape));
    return dtype == LOOM_BF16 ? kernels->bf16 : dtype == LOOM_F16 ? kernels->f16 : NULL;
}

/* Calls kernel `entry` of a dtype that was checked, with the rank's team and the arguments given; what is kept in that
 * dtype is given as void *, so that one line serves all. */
#define LOOM__KERNEL(tape, dtype, entry, ...)                                                                          \
    do {                                                                                                               \
        if ((dtype) == LOOM_F32)                                                                                       \
            loom_rank_kernels(loom_tape_rank(tape))->entry(loom_rank_team(loom_tape_rank(tape)), __VA_ARGS__);         \
        else                                                                                                           \
            loom__kernels16(tape, dtype)->entry(loom_rank_team(loom_tape_rank(tape)), __VA_ARGS__);                    \
    } while (0)

/* Element `index` of the tensor, for arguments of LOOM__KERNEL. */
static inline void *loom__element(const loom_tensor *x, int64_t index) {
    return (char *)x->data + index * (int64_t)loom_dtype_size(x->dtype);
}

/* Whether operation `op` can compute with x; NULL is accepted. */
loom_status loom__check_dtype(const loom_tape *tape, const char *op, const loom_tensor *x);
/* Whether y is kept as x is; NULL is accepted. */
loom_status loom__check_same_dtype(const char *op, const loom_tensor *x, const loom_tensor *y);
loom_status loom__check_parameter_dtype(const char *op, const loom_tensor *x, const loom_parameter *parameter);

/* The values of a weight or bias of a row in fp32, plus `added`. They are the parameter's own where nothing is to be
 * done, with *made NULL; else they lie in *made, which the caller releases. NULL for NULL. */
loom_status loom__vector(
    loom_tape *tape, const loom_parameter *parameter, float added, loom_tensor **made, const float **values);

/* Keeps the values in `to` (loom_parameter_count elements, owned by the caller) from now on, in dtype BF16 or F16,
 * rounded to nearest even, and frees what held them in fp32 (memory); data is NULL then. The parameter must be F32. */
void loom__parameter_narrow(loom_parameter *parameter, loom_dtype dtype, uint16_t *to);

#endif
