/* Experts with biases compute on any layout what they do on one rank: a bias of the second layer is added once, however
 * many ranks have slices of the expert, and the gradients of biases are those of all rows wherever these are. Gradients
 * of biases of experts and of routers are compared by themselves, beside losses and norms. */
#include "parallel/shared_model.h"

static void biases_are_the_same_on_any_layout(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 2, .experts = 4, .ep = 2, .biases = true},
        {.ranks = 4, .experts = 4, .ep = 4, .biases = true, .dispatcher = "allgather", .coefficient = 1},
        {.ranks = 2, .experts = 3, .etp = 2, .biases = true},
        {.ranks = 4, .experts = 4, .ep = 2, .etp = 2, .biases = true, .dispatcher = "alltoall", .sharded = true},
        {.tp = 2, .sp = true, .experts = 4, .biases = true},
        {.tp = 2, .sp = true, .experts = 4, .etp = 1, .ep = 2, .biases = true},
        {.ranks = 4, .tp = 2, .sp = true, .experts = 4, .ep = 2, .biases = true},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .biases = true, .sharded = true},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .biases = true, .schedule = "zero-bubble"},
        {.cp = 2, .experts = 4, .ep = 2, .biases = true, .full = true},
        {.ranks = 4, .experts = 4, .ep = 2, .mlp_biases = true, .average = true, .sharded = true},
        {.ranks = 4, .tp = 2, .sp = true, .experts = 4, .ep = 2, .learned = true, .biases = true, .freq = 2},
        {.tp = 2, .sp = true, .experts = 4, .biases = true, .fp64 = true, .z = 0.1},
        {.ranks = 2, .experts = 4, .ep = 2, .biases = true, .precision = "bf16-mixed"},
        {.ranks = 2, .experts = 4, .etp = 2, .biases = true, .precision = "bf16-mixed", .sharded = true},
        {.tp = 2, .sp = true, .experts = 4, .biases = true, .precision = "16-mixed"}};
    ALL_EQUAL_ONE_RANK(cases);
}

static void an_expert_cut_over_all_ranks_has_its_biases_once(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 2, .experts = 3, .ep = 2, .extended = true, .biases = true},
        {.ranks = 4, .tp = 2, .sp = true, .experts = 3, .ep = 2, .extended = true, .biases = true, .sharded = true},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .extended = true, .layers = "0111", .biases = true}};
    ALL_EQUAL_ONE_RANK(cases);
}

static void biases_of_shared_experts_are_the_same_on_any_layout(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 2, .experts = 4, .ep = 2, .shared_width = 16, .biases = true},
        {.tp = 2, .sp = true, .experts = 4, .shared_width = 16, .biases = true, .freq = 3, .dropout = 0.1},
        {.ranks = 4,
            .tp = 2,
            .sp = true,
            .experts = 4,
            .ep = 2,
            .shared_width = 16,
            .shared_gate = true,
            .biases = true,
            .sharded = true},
        {.ranks = 4,
            .pp = 2,
            .experts = 4,
            .ep = 2,
            .shared_width = 16,
            .shared_gate = true,
            .biases = true,
            .schedule = "zero-bubble"}};
    ALL_EQUAL_ONE_RANK(cases);
}

static void biases_made_again_are_the_same(void **state) {
    (void)state;
    const shared_case cases[] = {
        {.ranks = 2, .experts = 4, .ep = 2, .experts_again = true, .biases = true, .shared_width = 16},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .experts_again = true, .schedule = "zero-bubble", .biases = true},
        {.cp = 2, .experts = 4, .ep = 2, .experts_again = true, .biases = true, .precision = "bf16-mixed"}};
    ALL_EQUAL_ONE_RANK(cases);
}

/* An expert without a row has a gradient of zeros for its biases, not what lay in the buffer. */
static void biases_of_experts_without_rows_go_along(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 4, .experts = 8, .ep = 4, .starved = true, .biases = true},
        {.ranks = 4, .experts = 8, .ep = 2, .etp = 2, .starved = true, .biases = true, .sharded = true},
        {.ranks = 4, .pp = 2, .experts = 8, .ep = 2, .starved = true, .schedule = "zero-bubble", .biases = true}};
    ALL_EQUAL_ONE_RANK(cases);
}

/* What was dropped gets no bias, and rows that fill up the capacity give nothing: their weight is 0. */
static void room_and_weights_before_the_expert_leave_biases_as_they_are(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 2, .experts = 4, .ep = 2, .capacity = 1, .biases = true},
        {.ranks = 2, .experts = 4, .ep = 2, .capacity = 1, .padded = true, .biases = true, .dispatcher = "allgather"},
        {.ranks = 4,
            .experts = 4,
            .ep = 2,
            .etp = 2,
            .topk = 1,
            .weigh_input = true,
            .score = "sigmoid",
            .biases = true},
        {.ranks = 2,
            .experts = 4,
            .ep = 2,
            .topk = 1,
            .weigh_input = true,
            .pre_softmax = true,
            .capacity = 1,
            .padded = true,
            .biases = true}};
    ALL_EQUAL_ONE_RANK(cases);
    for (int before = 0; before < 2; before++) {
        const shared_case tight = {
            .experts = 4, .topk = 1, .pre_softmax = true, .capacity = 1, .weigh_input = before, .biases = true};
        shared_case padded = tight, c = filled(&tight);
        padded.padded = true;
        shared_result found = run_it(&padded), wanted = run_it(&tight);
        if (compare(&c, &found, &wanted))
            fail_msg("%s", loom_error_message());
    }
}

static void expect_slope(const shared_case *given) {
    shared_case c = *given, less = *given, more = *given;
    less.bias_step = -0.02;
    more.bias_step = 0.02;
    double wanted = (run_it(&more).loss[0] - run_it(&less).loss[0]) / 0.04, found = run_it(&c).slope;
    if (!(fabs(wanted) > 1e-4) || !(fabs(found - wanted) <= 2e-3 * fabs(wanted) + 1e-6))
        fail_msg("%s: by the gradients the loss grows by %.7f, it does by %.7f", c.bias_part, found, wanted);
}

/* Of all experts at once, so that no choice of the router changes. */
static void gradients_of_biases_are_slopes_of_the_loss(void **state) {
    (void)state;
    static const char *const parts[] = {"local_experts.0.linear_fc1.bias", "local_experts.1.linear_fc2.bias",
        "shared_experts.linear_fc1.bias", "shared_experts.linear_fc2.bias", "router.bias"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        for (int gate = 0; gate < 2; gate++)
            expect_slope(&(shared_case){.ranks = 1,
                .experts = 3,
                .topk = 3,
                .score = "sigmoid",
                .shared_width = 16,
                .shared_gate = gate,
                .learned = gate,
                .biases = true,
                .bias_part = parts[i]});
}

static void the_same_holds_on_mpi_ranks(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 2, .experts = 4, .ep = 2, .biases = true, .dispatcher = "alltoall"},
        {.ranks = 4, .experts = 4, .ep = 2, .etp = 2, .sharded = true, .biases = true},
        {.ranks = 4, .tp = 2, .sp = true, .experts = 4, .ep = 2, .biases = true, .shared_width = 16},
        {.cp = 3, .experts = 3, .ep = 3, .biases = true}};
    ALL_EQUAL_ONE_RANK_ON_MPI(cases);
}

int main(int argc, char **argv) {
    const struct CMUnitTest on_mpi[] = {cmocka_unit_test(the_same_holds_on_mpi_ranks)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(biases_are_the_same_on_any_layout),
        cmocka_unit_test(an_expert_cut_over_all_ranks_has_its_biases_once),
        cmocka_unit_test(biases_of_shared_experts_are_the_same_on_any_layout),
        cmocka_unit_test(biases_made_again_are_the_same),
        cmocka_unit_test(biases_of_experts_without_rows_go_along),
        cmocka_unit_test(gradients_of_biases_are_slopes_of_the_loss),
        cmocka_unit_test(room_and_weights_before_the_expert_leave_biases_as_they_are),
    };
    (void)argv;
    return argc > 1 ? cmocka_run_group_tests(on_mpi, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
}
