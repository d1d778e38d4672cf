/* What the tests of the parallel operations share. Each rank computes its shard and, by the same code without a group,
 * the unsharded twin, and compares. A rank returns its first failed check; only the main thread asserts. */
#ifndef PARALLEL_SUPPORT_H
#define PARALLEL_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "parallel/parallel.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return loom_fail(LOOM_ERR_INTERNAL, __VA_ARGS__);                                                          \
    } while (0)

enum { MOST_RANKS = 4 };

typedef struct layout {
    bool sequence_parallel;
    int kind; /* read by the test */
} layout;

/* Runs on 1, 2, 3 and 4 tensor ranks, with and without sequence parallelism. */
static inline void on_all_layouts(loom_rank_function function, int kind) {
    for (int tp = 1; tp <= MOST_RANKS; tp++)
        for (int sp = 0; sp < (tp > 1 ? 2 : 1); sp++) {
            layout at = {sp, kind};
            loom_run_options options = loom_run_options_default();
            options.threads = 1;
            options.timeout = 60;
#if defined(__SANITIZE_THREAD__)
            options.kernels = loom_kernels_reference(); /* a library's GEMM is not instrumented */
#endif
            if (loom_run_local(tp, function, &at, &options))
                fail_msg("tp %d%s: %s", tp, sp ? ", sequence parallel" : "", loom_error_message());
        }
}

/* Numbers in [-2, 2], the same on every rank. */
static inline void fill(float *x, int64_t count, uint32_t seed) {
    uint32_t state = seed * 2654435761u + 1u;
    for (int64_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) * 0x1p-22f - 2.0f;
    }
}

static inline float *numbers(int64_t count, uint32_t seed) {
    float *x = malloc((size_t)(count + 1) * sizeof *x);
    if (x)
        fill(x, count, seed);
    return x;
}

/* The part [first, first + width) of the last axis of [rows, whole]. */
static inline float *columns(const float *x, int64_t rows, int64_t whole, int64_t first, int64_t width) {
    float *part = malloc((size_t)(rows * width + 1) * sizeof *part);
    for (int64_t r = 0; part && r < rows; r++)
        memcpy(part + r * width, x + r * whole + first, (size_t)width * sizeof *part);
    return part;
}

/* A matrix or vector in memory of the test's own, its gradient NaN until it is written. */
static inline loom_status parameter_make(
    loom_parameter *p, const char *name, int64_t rows, int64_t cols, const float *values) {
    int64_t count = rows * (cols ? cols : 1);
    *p = (loom_parameter){.name = name, .dims = cols ? 2 : 1, .shape = {rows, cols ? cols : 1}};
    p->data = malloc((size_t)(count + 1) * sizeof(float));
    p->grad = malloc((size_t)(count + 1) * sizeof(float));
    CHECK(p->data && p->grad, "out of memory");
    memcpy(p->data, values, (size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++)
        p->grad[i] = NAN;
    return LOOM_OK;
}

static inline void parameter_free(loom_parameter *p) {
    free(p->data);
    free(p->grad);
}

static inline loom_status tensor_make(
    loom_rank *rank, int dims, const int64_t *shape, const float *values, loom_tensor **tensor) {
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, dims, shape, tensor));
    memcpy((*tensor)->data, values, (size_t)loom_tensor_count(*tensor) * sizeof(float));
    return LOOM_OK;
}

/* found [rows, width] against columns first… of expected [rows, whole]. A tolerance of 0 asks for the same bits. */
static inline loom_status compare(const char *what, const float *found, int64_t rows, int64_t width,
    const float *expected, int64_t whole, int64_t first, double tolerance) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c++) {
            float a = found[r * width + c], b = expected[r * whole + first + c];
            CHECK(memcmp(&a, &b, sizeof a) == 0 || fabs((double)a - (double)b) <= tolerance,
                "%s: element (%lld, %lld) is %.9g, the unsharded one %.9g (allowed %.3g)", what, (long long)r,
                (long long)c, (double)a, (double)b, tolerance);
        }
    return LOOM_OK;
}

#endif
