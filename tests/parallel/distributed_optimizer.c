/* The distributed optimizer against the plain one on whole models: the same bits of losses, norms and weights, whatever
 * is reduced or gathered meanwhile. */
#include "parallel/pipeline_support.h"

static void must_equal_plain(const pipe_case *cases, size_t count) {
    for (size_t i = 0; i < count; i++) {
        pipe_case plain = cases[i];
        plain.overlap = false;
        pipe_result wanted = pipe_run(&plain);
        for (int variant = 0; variant < 4; variant++) {
            pipe_case sharded = cases[i];
            sharded.sharded = true;
            sharded.overlap = cases[i].overlap || variant > 0;
            sharded.gather = variant > 1;
            sharded.align = variant > 2;
            pipe_result found = pipe_run(&sharded);
            pipe_must_be_equal(&sharded, &found, &wanted);
        }
    }
}

static void shards_over_data_parallel_ranks_change_no_bit(void **state) {
    (void)state;
    static const pipe_case cases[] = {
        {.ranks = 1},
        {.ranks = 2},
        {.ranks = 3, .global = 6},
        {.ranks = 4, .untied = true},
        {.ranks = 4, .average = true, .dropout = 0.1},
    };
    must_equal_plain(cases, sizeof cases / sizeof *cases);
}

static void shards_beside_tensor_parallelism_change_no_bit(void **state) {
    (void)state;
    static const pipe_case cases[] = {
        {.ranks = 4, .tp = 2},
        {.ranks = 4, .tp = 2, .sp = true, .dropout = 0.1},
    };
    must_equal_plain(cases, sizeof cases / sizeof *cases);
}

static void shards_beside_a_pipeline_change_no_bit(void **state) {
    (void)state;
    static const pipe_case cases[] = {
        {.ranks = 4, .pp = 2},
        {.ranks = 4, .pp = 2, .untied = true, .schedule = "zero-bubble"},
        {.ranks = 4, .pp = 2, .vpp = 2, .overlap = true},
        {.ranks = 8, .tp = 2, .pp = 2, .sp = true},
    };
    must_equal_plain(cases, sizeof cases / sizeof *cases);
}

static void several_instances_have_the_bits_of_the_plain_optimizer(void **state) {
    (void)state;
    static const int64_t instances[] = {2, 4};
    pipe_case plain = {.ranks = 4};
    pipe_result wanted = pipe_run(&plain);
    for (size_t i = 0; i < 2; i++)
        for (int variant = 0; variant < 3; variant++) {
            pipe_case c = plain;
            c.sharded = true;
            c.instances = instances[i];
            c.overlap = variant > 0;
            c.gather = variant > 1;
            pipe_result found = pipe_run(&c);
            pipe_must_be_equal(&c, &found, &wanted);
        }
    pipe_case staged = {.ranks = 8, .pp = 2, .untied = true}, shared = staged;
    shared.sharded = shared.overlap = shared.gather = true;
    shared.instances = 2;
    pipe_result all = pipe_run(&staged), found = pipe_run(&shared);
    pipe_must_be_equal(&shared, &found, &all);
}

static void the_pytorch_wrapper_has_the_bits_of_the_plain_optimizer(void **state) {
    (void)state;
    static const pipe_case cases[] = {
        {.ranks = 2}, {.ranks = 3, .global = 6}, {.ranks = 4, .tp = 2, .sp = true}, {.ranks = 4, .pp = 2, .vpp = 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pipe_result wanted = pipe_run(&cases[i]);
        for (int variant = 0; variant < 3; variant++) {
            pipe_case c = cases[i];
            c.pytorch = true;
            c.find_unused = variant == 1;
            c.fixed = variant == 2;
            pipe_result found = pipe_run(&c);
            pipe_must_be_equal(&c, &found, &wanted);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_over_data_parallel_ranks_change_no_bit),
        cmocka_unit_test(shards_beside_tensor_parallelism_change_no_bit),
        cmocka_unit_test(shards_beside_a_pipeline_change_no_bit),
        cmocka_unit_test(several_instances_have_the_bits_of_the_plain_optimizer),
        cmocka_unit_test(the_pytorch_wrapper_has_the_bits_of_the_plain_optimizer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
