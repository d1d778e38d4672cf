/* What the kernel tests share: the tables this machine has, the double reference as a table, teams, numbers,
 * comparison.
 *
 * Tolerances. eps = 2^-24 is half a unit in the last place of 1. An fp32 sum of n products of numbers of size m is
 * wrong by at most n eps times the sum of their sizes; in practice the errors are random and stay near sqrt(n) eps. The
 * inputs here have size 1, so an operation of a few dozen roundings and a sum of `terms` terms is given (ROUNDINGS +
 * terms) eps (1 + the largest output), which leaves room for the products of three or four inputs of size 2 that occur
 * in between. */
#ifndef KERNEL_SUPPORT_H
#define KERNEL_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/random.h"
#include "base/team.h"
#include "kernel/ref/ref.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDINGS = 64, TEAMS = 4, TABLES = 4, GUARD = 64 };

static const float guard_value = -12345.5f;

#define KERNEL_NAMES(X)                                                                                                \
    X(gemm)                                                                                                            \
    X(gemm_grouped)                                                                                                    \
    X(bias_add)                                                                                                        \
    X(bias_gradient)                                                                                                   \
    X(add)                                                                                                             \
    X(scale)                                                                                                           \
    X(activation)                                                                                                      \
    X(activation_backward)                                                                                             \
    X(bias_dropout_add)                                                                                                \
    X(dropout_backward)                                                                                                \
    X(exact_sum)                                                                                                       \
    X(has_nonfinite)                                                                                                   \
    X(adamw)                                                                                                           \
    X(sgd)                                                                                                             \
    X(layernorm)                                                                                                       \
    X(layernorm_backward_input)                                                                                        \
    X(layernorm_backward_weight)                                                                                       \
    X(rmsnorm)                                                                                                         \
    X(rmsnorm_backward_input)                                                                                          \
    X(rmsnorm_backward_weight)                                                                                         \
    X(embedding)                                                                                                       \
    X(embedding_backward)                                                                                              \
    X(rope)                                                                                                            \
    X(cross_entropy_local)                                                                                             \
    X(cross_entropy_backward)                                                                                          \
    X(attention_begin)                                                                                                 \
    X(attention_block)                                                                                                 \
    X(attention_merge)                                                                                                 \
    X(attention_finish)                                                                                                \
    X(attention_delta)                                                                                                 \
    X(attention_block_backward)                                                                                        \
    X(attention)

/* The double reference in the shape of a table. */
typedef struct kernels64 {
#define MEMBER(name) __typeof__(loom__ref64_##name) *name;
    KERNEL_NAMES(MEMBER)
#undef MEMBER
} kernels64;

static const kernels64 exact_kernels = {
#define MEMBER(name) .name = loom__ref64_##name,
    KERNEL_NAMES(MEMBER)
#undef MEMBER
};

static const char *const table_names[TABLES] = {"reference", "portable", "avx2", "avx512"};

/* Teams of no, 1, 2 and 3 threads. */
static loom_team *teams[TEAMS];

static inline int start_teams(void **state) {
    (void)state;
    for (int i = 1; i < TEAMS; i++)
        if (loom__team_create(i, NULL, &teams[i]) != LOOM_OK)
            return -1;
    return 0;
}

/* In the reverse order, as each gives the owner's floating-point control word back. */
static inline int stop_teams(void **state) {
    (void)state;
    for (int i = TEAMS - 1; i > 0; i--)
        loom__team_destroy(teams[i]);
    return 0;
}

/* Numbers in [-2, 2], the same in every run. */
static inline void fill(float *x, size_t count, uint32_t seed) {
    uint32_t state = seed * 2654435761u + 1u;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) * 0x1p-22f - 2.0f;
    }
}

static inline void *room_for(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    assert_non_null(memory);
    return memory;
}

static inline float *numbers(size_t count, uint32_t seed) {
    float *x = room_for(count * sizeof *x);
    fill(x, count, seed);
    return x;
}

static inline double *widened(const float *x, size_t count) {
    double *y = room_for(count * sizeof *y);
    for (size_t i = 0; i < count; i++)
        y[i] = (double)x[i];
    return y;
}

static inline double largest_of(const double *x, size_t count) {
    double largest = 0;
    for (size_t i = 0; i < count; i++)
        if (isfinite(x[i]) && fabs(x[i]) > largest)
            largest = fabs(x[i]);
    return largest;
}

/* Every element within `tolerance`; infinities equal; NaN only where NaN is expected. */
static inline void assert_close(
    const char *what, const float *found, const double *expected, size_t count, double tolerance) {
    for (size_t i = 0; i < count; i++) {
        double difference = fabs((double)found[i] - expected[i]);
        bool same = (isnan(expected[i]) && isnan(found[i])) || (isinf(expected[i]) && (double)found[i] == expected[i]);
        if (!same && !(difference <= tolerance))
            fail_msg("%s: element %zu of %zu is %.9g, expected %.9g (difference %.3g, allowed %.3g)", what, i, count,
                (double)found[i], expected[i], difference, tolerance);
    }
}

static inline double tolerance_for(int64_t terms, double largest) {
    return (double)(ROUNDINGS + terms) * 0x1p-24 * (1 + largest);
}

#endif
