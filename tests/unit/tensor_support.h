/* What the tests of the tape share: a rank to run on, numbers, parameters, leaves. A rank returns its first failed
 * check; only the main thread asserts. */
#ifndef TENSOR_SUPPORT_H
#define TENSOR_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <megaloom/tensor.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return loom_fail(LOOM_ERR_INTERNAL, __VA_ARGS__);                                                          \
    } while (0)

/* Runs on one rank with the reference kernels; nothing of the rank's memory may be left in use. */
typedef struct lone_run {
    loom_rank_function function;
    void *argument;
} lone_run;

static inline loom_status run_and_count(loom_rank *rank, void *argument) {
    const lone_run *run = argument;
    LOOM_TRY(run->function(rank, run->argument));
    CHECK(loom_rank_memory(rank).in_use == 0, "%zu bytes are still in use", loom_rank_memory(rank).in_use);
    return LOOM_OK;
}

static inline void must_run(loom_rank_function function, void *argument) {
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.timeout = 60;
    options.kernels = loom_kernels_reference();
    lone_run run = {function, argument};
    if (loom_run_local(1, run_and_count, &run, &options))
        fail_msg("%s", loom_error_message());
}

/* Numbers in [-2, 2], the same in every run. */
static inline void fill(float *x, int64_t count, uint32_t seed) {
    uint32_t state = seed * 2654435761u + 1u;
    for (int64_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) * 0x1p-22f - 2.0f;
    }
}

static inline loom_status make_tensor(
    loom_rank *rank, int dims, const int64_t *shape, const float *values, loom_tensor **tensor) {
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, dims, shape, tensor));
    memcpy((*tensor)->data, values, (size_t)loom_tensor_count(*tensor) * sizeof(float));
    return LOOM_OK;
}

enum { WIDEST = 64 };

/* A trainable vector. */
typedef struct vector {
    loom_parameter parameter;
    float data[WIDEST], grad[WIDEST];
} vector;

static inline void vector_make(vector *v, const char *name, int64_t width, uint32_t seed) {
    *v = (vector){.parameter = {.name = name, .dims = 1, .shape = {width, 1}}};
    fill(v->data, width, seed);
    for (int64_t i = 0; i < WIDEST; i++)
        v->grad[i] = NAN; /* the first contribution must write, not add */
    v->parameter.data = v->data;
    v->parameter.grad = v->grad;
}

#endif
