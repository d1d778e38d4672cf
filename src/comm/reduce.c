/* Sums in group order with a wide accumulator. Elements are taken in short runs whose accumulators stay in the first
 * cache; inside a run the members are added one after the other, so every element sees x0 + x1 + … in that order,
 * whatever the length of the run. Groups beyond LOOM_REDUCE_BLOCK keep the sum of the block apart from the total. The
 * plain loops are compiled once for each storage, accumulator and operation, by including this file in itself.
 * Invariant: the first member is copied, not added to zero (which would turn -0 into +0). */
#ifndef NAME
#include "comm/reduce.h"
#include <string.h>

enum { RUN = 1024 };

#define SAME(x) (x)
#define ADDED(a, b) ((a) + (b))
/* A NaN on either side stays; of two equal values (+0 and -0 too) the later member's is taken. */
#define LARGER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))

static int block_size(int left) {
    return left < LOOM_REDUCE_BLOCK ? left : LOOM_REDUCE_BLOCK;
}

#define NAME(part) sum_f32##part
#define STORED float
#define WIDE float
#define LOAD SAME
#define STORE SAME
#define COMBINE ADDED
#include "comm/reduce.c"

#define NAME(part) max_f32##part
#define STORED float
#define WIDE float
#define LOAD SAME
#define STORE SAME
#define COMBINE LARGER
#include "comm/reduce.c"

#define NAME(part) sum_bf16##part
#define STORED uint16_t
#define WIDE float
#define LOAD loom_bf16_to_f32
#define STORE loom_f32_to_bf16
#define COMBINE ADDED
#include "comm/reduce.c"

#define NAME(part) max_bf16##part
#define STORED uint16_t
#define WIDE float
#define LOAD loom_bf16_to_f32
#define STORE loom_f32_to_bf16
#define COMBINE LARGER
#include "comm/reduce.c"

#define NAME(part) sum_f16##part
#define STORED uint16_t
#define WIDE float
#define LOAD loom_f16_to_f32
#define STORE loom_f32_to_f16
#define COMBINE ADDED
#include "comm/reduce.c"

#define NAME(part) max_f16##part
#define STORED uint16_t
#define WIDE float
#define LOAD loom_f16_to_f32
#define STORE loom_f32_to_f16
#define COMBINE LARGER
#include "comm/reduce.c"

#define NAME(part) sum_f64##part
#define STORED double
#define WIDE double
#define LOAD SAME
#define STORE SAME
#define COMBINE ADDED
#include "comm/reduce.c"

#define NAME(part) max_f64##part
#define STORED double
#define WIDE double
#define LOAD SAME
#define STORE SAME
#define COMBINE LARGER
#include "comm/reduce.c"

/* Unsigned, so that a sum beyond 64 bits wraps instead of being undefined. */
#define NAME(part) sum_i64##part
#define STORED uint64_t
#define WIDE uint64_t
#define LOAD SAME
#define STORE SAME
#define COMBINE ADDED
#include "comm/reduce.c"

#define NAME(part) max_i64##part
#define STORED int64_t
#define WIDE int64_t
#define LOAD SAME
#define STORE SAME
#define COMBINE LARGER
#include "comm/reduce.c"

bool loom__reduce_supports(loom_dtype dtype) {
    return dtype == LOOM_F32 || dtype == LOOM_BF16 || dtype == LOOM_F16 || dtype == LOOM_F64 || dtype == LOOM_I64;
}

void loom__reduce(
    loom_dtype dtype, loom_reduce operation, int members, const void *const *inputs, int64_t count, void *out) {
    if (members == 1) {
        if (count > 0 && out != inputs[0])
            memcpy(out, inputs[0], (size_t)count * loom_dtype_size(dtype));
        return;
    }
    void (*run)(int, const void *const *, int64_t, int, void *) = NULL;
    bool sum = operation == LOOM_SUM;
    switch (dtype) {
    case LOOM_F32:
        run = sum ? sum_f32 : max_f32;
        break;
    case LOOM_BF16:
        run = sum ? sum_bf16 : max_bf16;
        break;
    case LOOM_F16:
        run = sum ? sum_f16 : max_f16;
        break;
    case LOOM_F64:
        run = sum ? sum_f64 : max_f64;
        break;
    case LOOM_I64:
        run = sum ? sum_i64 : max_i64;
        break;
    default:
        return; /* callers ask loom__reduce_supports first */
    }
    for (int64_t first = 0; first < count; first += RUN)
        run(members, inputs, first, count - first < RUN ? (int)(count - first) : RUN, out);
}

#else

/* sum[i] = the given members, at most a block of them. */
static void NAME(_block)(int members, const void *const *inputs, int64_t first, int n, WIDE *restrict sum) {
    const STORED *restrict x0 = (const STORED *)inputs[0] + first;
#pragma omp simd
    for (int i = 0; i < n; i++)
        sum[i] = LOAD(x0[i]);
    for (int member = 1; member < members; member++) {
        const STORED *restrict x = (const STORED *)inputs[member] + first;
#pragma omp simd
        for (int i = 0; i < n; i++)
            sum[i] = COMBINE(sum[i], LOAD(x[i]));
    }
}

static void NAME()(int members, const void *const *inputs, int64_t first, int n, void *out) {
    WIDE total[RUN], block[RUN];
    NAME(_block)(block_size(members), inputs, first, n, total);
    for (int begin = LOOM_REDUCE_BLOCK; begin < members; begin += LOOM_REDUCE_BLOCK) {
        NAME(_block)(block_size(members - begin), inputs + begin, first, n, block);
#pragma omp simd
        for (int i = 0; i < n; i++)
            total[i] = COMBINE(total[i], block[i]);
    }
    STORED *y = (STORED *)out + first;
#pragma omp simd
    for (int i = 0; i < n; i++)
        y[i] = STORE(total[i]);
}

#undef NAME
#undef STORED
#undef WIDE
#undef LOAD
#undef STORE
#undef COMBINE

#endif
