/* What the files of the local operations share. */
#ifndef TENSOR_OPERATIONS_H
#define TENSOR_OPERATIONS_H

#include <megaloom/tensor.h>

/* 1 + weight, as the norms with a zero-centred weight use it: of the weight's size, owned by the caller. */
loom_status loom__one_plus(loom_tape *tape, const loom_parameter *weight, loom_tensor **factor);

#endif
