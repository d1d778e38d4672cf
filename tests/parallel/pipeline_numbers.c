/* The numbers of training do not depend on how the model is cut over a pipeline, nor on the schedule. */
#include "parallel/pipeline_support.h"

static void must_follow_one_rank(const pipe_case *cases, size_t count) {
    for (size_t i = 0; i < count; i++) {
        pipe_case alone = {.ranks = 1,
            .layers = cases[i].layers,
            .micro = cases[i].micro,
            .global = cases[i].global,
            .dropout = cases[i].dropout,
            .untied = cases[i].untied};
        pipe_result wanted = pipe_run(&alone), found = pipe_run(&cases[i]);
        pipe_must_be_near(&cases[i], &found, &wanted);
    }
}

static void stages_follow_one_rank(void **state) {
    (void)state;
    static const pipe_case cases[] = {
        {.ranks = 2, .pp = 2},
        {.ranks = 2, .pp = 2, .untied = true},
        {.ranks = 2, .pp = 2, .dropout = 0.1},
        {.ranks = 4, .pp = 4},             /* a layer a stage */
        {.ranks = 4, .pp = 4, .micro = 4}, /* two microbatches on four stages */
        {.ranks = 4, .pp = 4, .micro = 8}, /* one */
        {.ranks = 3, .pp = 3, .layers = 5, .first = 1, .last = 1},
        {.ranks = 3, .pp = 3, .layers = 7, .balanced = true},
        {.ranks = 3, .pp = 3, .stages = "E|tttt|L"},
        {.ranks = 6, .pp = 2, .global = 12},        /* data parallel 3 */
        {.ranks = 8, .tp = 2, .pp = 2, .sp = true}, /* data parallel 2 */
        {.ranks = 8, .tp = 2, .pp = 2, .dropout = 0.1, .overlap = true},
    };
    must_follow_one_rank(cases, sizeof cases / sizeof *cases);
}

static void chunks_follow_one_rank(void **state) {
    (void)state;
    static const pipe_case cases[] = {
        {.ranks = 2, .pp = 2, .vpp = 2},
        {.ranks = 2, .pp = 2, .vpp = 2, .dropout = 0.1, .untied = true},
        {.ranks = 2, .pp = 2, .vpp = 2, .group = 4},
        {.ranks = 2, .pp = 2, .vpp = 2, .stages = "E|tt|tt|L"},
        {.ranks = 2, .pp = 2, .vpp = 4, .layers = 8},
        {.ranks = 3, .pp = 3, .vpp = 2, .layers = 6, .global = 9},
        {.ranks = 4, .pp = 4, .vpp = 2, .layers = 8, .overlap = true},
        {.ranks = 8, .tp = 2, .pp = 2, .vpp = 2, .sp = true, .overlap = true},
    };
    must_follow_one_rank(cases, sizeof cases / sizeof *cases);
}

static void the_same_run_again_is_bit_equal(void **state) {
    (void)state;
    static const pipe_case cases[] = {
        {.ranks = 4, .pp = 2, .dropout = 0.1},
        {.ranks = 4, .pp = 2, .vpp = 2, .dropout = 0.1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pipe_result once = pipe_run(&cases[i]), again = pipe_run(&cases[i]);
        pipe_must_be_equal(&cases[i], &again, &once);
    }
}

static void reductions_under_the_backward_change_no_bit(void **state) {
    (void)state;
    static const pipe_case cases[] = {{.ranks = 4, .pp = 2}, {.ranks = 4, .pp = 2, .vpp = 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pipe_case overlapped = cases[i];
        overlapped.overlap = true;
        pipe_result plain = pipe_run(&cases[i]), found = pipe_run(&overlapped);
        pipe_must_be_equal(&overlapped, &found, &plain);
    }
}

static void zero_bubble_is_bit_equal_to_1f1b(void **state) {
    (void)state;
    static const pipe_case cases[] = {
        {.ranks = 1},
        {.ranks = 2, .pp = 2},
        {.ranks = 4, .pp = 4},
        {.ranks = 4, .pp = 4, .micro = 4},
        {.ranks = 3, .pp = 3, .layers = 7, .balanced = true, .global = 3},
        {.ranks = 8, .tp = 2, .pp = 2, .sp = true, .overlap = true, .dropout = 0.1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pipe_case halves = cases[i];
        halves.schedule = "zero-bubble";
        pipe_result plain = pipe_run(&cases[i]), found = pipe_run(&halves);
        pipe_must_be_equal(&halves, &found, &plain);
    }
}

/* bf16 keeps 8 bits of an activation, fp16 11. */
static void activations_travel_in_the_pipeline_dtype(void **state) {
    (void)state;
    static const struct {
        const char *wire;
        double least, most; /* relative difference of the losses */
    } wires[] = {{"fp32", 0, 0}, {"fp16", 1e-9, 1e-3}, {"bf16", 1e-8, 1e-2}};
    pipe_case plain = {.ranks = 2, .pp = 2, .vpp = 2};
    pipe_result wanted = pipe_run(&plain);
    for (size_t i = 0; i < sizeof wires / sizeof *wires; i++) {
        pipe_case c = plain;
        c.wire = wires[i].wire;
        pipe_result found = pipe_run(&c), again = pipe_run(&c);
        double worst = 0;
        pipe_must_be_equal(&c, &again, &found);
        for (int t = 0; t < PIPE_STEPS; t++)
            worst = fmax(worst, fabs(found.loss[t] - wanted.loss[t]) / wanted.loss[t]);
        if (worst < wires[i].least || worst > wires[i].most)
            fail_msg("%s: losses differ by %g from fp32", wires[i].wire, worst);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_follow_one_rank),
        cmocka_unit_test(chunks_follow_one_rank),
        cmocka_unit_test(the_same_run_again_is_bit_equal),
        cmocka_unit_test(reductions_under_the_backward_change_no_bit),
        cmocka_unit_test(zero_bubble_is_bit_equal_to_1f1b),
        cmocka_unit_test(activations_travel_in_the_pipeline_dtype),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
