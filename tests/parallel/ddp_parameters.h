/* A user's own parameters for tests: one-dimensional, in memory of the test's own. */
#ifndef TESTS_PARALLEL_DDP_PARAMETERS_H
#define TESTS_PARALLEL_DDP_PARAMETERS_H

#include <megaloom/tensor.h>
#include <stdio.h>
#include <stdlib.h>

enum { TEST_PARAMETERS = 16 };

typedef struct test_parameters {
    int64_t count;
    int64_t counts[TEST_PARAMETERS];
    loom_parameter parameters[TEST_PARAMETERS];
    loom_parameter *list[TEST_PARAMETERS];
    float *memory[TEST_PARAMETERS];
    char names[TEST_PARAMETERS][8]; /* "p0", "p1", … */
} test_parameters;

/* Every element is `value`. */
static inline void test_parameters_create(test_parameters *set, const int64_t *counts, int64_t count, float value) {
    *set = (test_parameters){.count = count};
    for (int64_t i = 0; i < count; i++) {
        set->counts[i] = counts[i];
        set->memory[i] = calloc((size_t)counts[i] + 1, sizeof(float));
        for (int64_t e = 0; e < counts[i]; e++)
            set->memory[i][e] = value;
        snprintf(set->names[i], sizeof set->names[i], "p%d", (int)i);
        set->parameters[i] = (loom_parameter){.name = set->names[i],
            .dims = 1,
            .shape = {counts[i], 1},
            .data = set->memory[i],
            .tensor_parallel = true,
            .decay = true,
            .index = i};
        set->list[i] = &set->parameters[i];
    }
}

static inline void test_parameters_destroy(test_parameters *set) {
    for (int64_t i = 0; i < set->count; i++)
        free(set->memory[i]);
}

#endif
