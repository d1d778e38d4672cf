/* The arithmetic of reductions, apart from how the inputs came here. */
#ifndef COMM_REDUCE_H
#define COMM_REDUCE_H

#include <megaloom/comm.h>

/* out[i] = the reduction of inputs[0][i], inputs[1][i], …, inputs[members-1][i], for i in [0, count), exactly as
 * <megaloom/comm.h> defines it. out may be one of the inputs, and may not overlap them otherwise. members >= 1. */
void loom__reduce(
    loom_dtype dtype, loom_reduce operation, int members, const void *const *inputs, int64_t count, void *out);

/* True for the dtypes that loom__reduce knows. */
bool loom__reduce_supports(loom_dtype dtype);

#endif
