/* Layers of experts compute what they do on one rank, however experts are shared out and rows travel; experts and whole
 * ranks without a row go along; the losses of the router weigh the same on any layout. */
#include "parallel/shared_model.h"

static void experts_are_shared_out_in_any_way(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 2, .experts = 4, .ep = 2}, {.ranks = 2, .experts = 4, .ep = 2, .topk = 3},
        {.ranks = 4, .experts = 4, .ep = 4, .dispatcher = "allgather"},
        {.ranks = 4, .experts = 6, .ep = 2, .dispatcher = "alltoall"}, {.ranks = 2, .experts = 3, .etp = 2},
        {.ranks = 4, .experts = 4, .ep = 2, .etp = 2, .dispatcher = "alltoall"},
        {.ranks = 4, .experts = 4, .ep = 2, .etp = 2, .dispatcher = "allgather"}, {.tp = 2, .sp = true, .experts = 4},
        {.tp = 2, .sp = true, .experts = 4, .etp = 1}, {.tp = 2, .sp = true, .experts = 4, .etp = 1, .ep = 2},
        {.tp = 3, .sp = true, .experts = 3, .etp = 1, .ep = 3},
        {.ranks = 4, .tp = 2, .sp = true, .experts = 4, .ep = 2}, {.cp = 2, .experts = 4, .ep = 2},
        {.ranks = 4, .cp = 2, .experts = 4, .ep = 4, .sharded = true},
        {.ranks = 4, .experts = 4, .ep = 2, .sharded = true}, {.ranks = 4, .experts = 4, .ep = 2, .average = true},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2}, {.ranks = 4, .pp = 2, .vpp = 2, .experts = 4, .ep = 2},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .schedule = "zero-bubble"},
        {.ranks = 2, .experts = 4, .ep = 2, .freq = 2}, {.ranks = 2, .experts = 4, .ep = 2, .shared_width = 16},
        {.tp = 2, .sp = true, .experts = 4, .shared_width = 16, .freq = 3},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .layers = "0111"},
        {.ranks = 4,
            .tp = 2,
            .sp = true,
            .experts = 4,
            .ep = 2,
            .layers = "0010",
            .shared_width = 16,
            .shared_gate = true},
        {.ranks = 4,
            .pp = 2,
            .tp = 2,
            .sp = true,
            .experts = 4,
            .shared_width = 16,
            .shared_gate = true,
            .schedule = "zero-bubble"},
        {.cp = 2, .experts = 4, .ep = 2, .shared_width = 16, .shared_gate = true, .precision = "bf16-mixed"},
        {.ranks = 8, .pp = 2, .vpp = 2, .tp = 2, .sp = true, .cp = 2, .experts = 4, .ep = 2, .sharded = true},
        {.ranks = 2, .experts = 4, .ep = 2, .selective = true, .dropout = 0.1},
        {.ranks = 2, .experts = 4, .ep = 2, .precision = "bf16-mixed"},
        {.tp = 2, .sp = true, .experts = 4, .precision = "16-mixed"}};
    ALL_EQUAL_ONE_RANK(cases);
}

static void every_expert_is_cut_over_tensor_and_expert_ranks(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 2, .experts = 3, .ep = 2, .extended = true},
        {.ranks = 4, .experts = 3, .ep = 4, .extended = true},
        {.ranks = 4, .tp = 2, .sp = true, .experts = 3, .ep = 2, .extended = true, .coefficient = 1},
        {.ranks = 4, .tp = 2, .sp = true, .experts = 4, .ep = 2, .extended = true, .sharded = true},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .extended = true, .layers = "0111"},
        {.ranks = 4, .cp = 2, .experts = 4, .ep = 4, .extended = true, .starved = true},
        {.ranks = 2, .experts = 4, .ep = 2, .extended = true, .capacity = 1, .precision = "bf16-mixed"}};
    ALL_EQUAL_ONE_RANK(cases);
}

static void an_expert_and_a_rank_without_rows_go_along(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 4, .experts = 8, .ep = 4, .starved = true},
        {.ranks = 4, .experts = 8, .ep = 4, .starved = true, .dispatcher = "allgather", .sharded = true},
        {.ranks = 4, .experts = 8, .ep = 2, .etp = 2, .starved = true}, {.ranks = 3, .cp = 3, .experts = 12, .ep = 3},
        {.ranks = 2, .experts = 8, .ep = 2, .topk = 1, .pre_softmax = true, .starved = true},
        {.ranks = 4, .pp = 2, .experts = 8, .ep = 2, .starved = true, .schedule = "zero-bubble"}};
    ALL_EQUAL_ONE_RANK(cases);
}

static void experts_made_again_compute_the_same_in_less_memory(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 2, .experts = 4, .ep = 2, .experts_again = true, .coefficient = 1},
        {.ranks = 1, .experts = 4, .experts_again = true, .shared_width = 16, .capacity = 1},
        {.tp = 2, .sp = true, .experts = 4, .experts_again = true, .selective = true, .freq = 2, .dropout = 0.1},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .experts_again = true, .schedule = "zero-bubble", .sharded = true},
        {.cp = 2, .experts = 4, .ep = 2, .experts_again = true, .precision = "bf16-mixed"}};
    ALL_EQUAL_ONE_RANK(cases);
    const shared_case kept = {.experts = 4, .micro = 4}, again = {.experts = 4, .micro = 4, .experts_again = true};
    shared_result whole = run_it(&kept), less = run_it(&again);
    assert_true(less.high_water < whole.high_water - whole.high_water / 8);
    assert_true(less.loss[STEPS - 1] == whole.loss[STEPS - 1] && less.norm[0] == whole.norm[0]);
}

static void stages_without_experts_go_along(void **state) {
    (void)state;
    const shared_case cases[] = {{.pp = 4, .experts = 4, .freq = 4},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .freq = 4, .sharded = true},
        {.pp = 2, .experts = 4, .freq = 4, .precision = "16-mixed"}};
    ALL_EQUAL_ONE_RANK(cases);
}

/* The gradient of the router is in the norm of each step, and in what the next one makes of it. */
static void losses_of_the_router_weigh_the_same(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 2, .experts = 4, .ep = 2, .coefficient = 1},
        {.tp = 2, .sp = true, .experts = 4, .coefficient = 1}, {.cp = 2, .experts = 4, .coefficient = 1},
        {.tp = 2, .sp = true, .experts = 4, .balance = "seq_aux_loss", .coefficient = 1, .micro = 2},
        {.cp = 3, .experts = 4, .balance = "seq_aux_loss", .coefficient = 1, .micro = 2},
        {.tp = 2, .sp = true, .experts = 4, .z = 0.1}, {.cp = 2, .experts = 4, .z = 0.1, .score = "sigmoid"},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .coefficient = 1, .z = 0.1},
        {.ranks = 4, .cp = 2, .tp = 2, .sp = true, .experts = 4, .coefficient = 1, .score = "sigmoid"},
        {.ranks = 2, .experts = 4, .coefficient = 1, .average = true},
        {.ranks = 2, .experts = 4, .coefficient = 1, .documents = true},
        {.cp = 2, .experts = 4, .coefficient = 1, .documents = true},
        {.tp = 2, .sp = true, .experts = 4, .balance = "global_aux_loss", .coefficient = 1},
        {.cp = 2, .experts = 4, .balance = "global_aux_loss", .coefficient = 1, .full = true},
        {.pp = 2, .vpp = 2, .experts = 4, .balance = "global_aux_loss", .coefficient = 1},
        {.tp = 2,
            .sp = true,
            .experts = 4,
            .balances = {"global_aux_loss", "aux_loss", "seq_aux_loss"},
            .coefficients = {1, 0.5, 0.5},
            .micro = 2}};
    ALL_EQUAL_ONE_RANK(cases);
}

static void must_be_alike(const shared_case *a, const shared_case *b) {
    shared_result found = run_it(a), wanted = run_it(b);
    shared_case c = filled(a);
    if (compare(&c, &found, &wanted))
        fail_msg("%s", loom_error_message());
}

/* A mean over the tokens, in which the losses of the router weigh by all tokens of the valid ones, or one over the
 * microbatches, in which they weigh as they are. */
static void the_router_has_the_same_gradient_in_both_means(void **state) {
    (void)state;
    shared_result of[2];
    for (int mean = 0; mean < 2; mean++) {
        const shared_case alone = {.experts = 4,
            .documents = true,
            .coefficient = 1,
            .z = 0.1,
            .topk = 1,
            .pre_softmax = true,
            .mean_of_each = mean};
        shared_case tensor = alone, context = alone, both = alone, data = alone;
        tensor.tp = context.cp = both.tp = both.cp = data.ranks = 2;
        tensor.sp = both.sp = true;
        must_be_alike(&tensor, &alone);
        must_be_alike(&context, &alone);
        must_be_alike(&both, &alone);
        must_be_alike(&data, &alone);
        of[mean] = run_it(&alone);
    }
    assert_true(fabs(of[1].norm[0] - of[0].norm[0]) > 1e-3);
}

/* What data ranks route at once is one call: the same as a larger microbatch of one rank. */
static void a_global_loss_is_of_all_data_ranks_and_of_one_step(void **state) {
    (void)state;
    const char *global = "global_aux_loss";
    const shared_case data = {.ranks = 2, .experts = 4, .ep = 2, .balance = global, .coefficient = 1, .micro = 2};
    const shared_case averaged = {
        .ranks = 2, .experts = 4, .balance = global, .coefficient = 1, .micro = 2, .average = true};
    const shared_case alone = {.experts = 4, .balance = global, .coefficient = 1, .micro = 4};
    const shared_case aux = {.experts = 4, .coefficient = 1, .micro = 4};
    must_be_alike(&data, &alone);
    must_be_alike(&averaged, &alone);
    /* With one call a step it is that of the microbatch, in every step. */
    must_be_alike(&alone, &aux);
    const shared_case calls = {.experts = 4, .balance = global, .coefficient = 1};
    const shared_case each = {.experts = 4, .coefficient = 1};
    assert_true(fabs(run_it(&calls).norm[0] - run_it(&each).norm[0]) > 1e-4);
}

static void losses_of_the_router_reach_its_gradient(void **state) {
    (void)state;
    const shared_case none = {.experts = 4}, balance = {.experts = 4, .coefficient = 1}, z = {.experts = 4, .z = 0.1};
    shared_result plain = run_it(&none), with_balance = run_it(&balance), with_z = run_it(&z);
    assert_true(fabs(with_balance.norm[0] - plain.norm[0]) > 0.1 && fabs(with_z.norm[0] - plain.norm[0]) > 0.1);
    /* They are no part of the loss that is told. */
    assert_true(with_balance.loss[0] == plain.loss[0] && with_z.loss[0] == plain.loss[0]);
}

/* Capacity is of the tokens that a rank routes: data ranks have the microbatches that one rank has. */
static void what_finds_no_room_is_dropped_on_any_rank(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 2, .experts = 4, .ep = 2, .capacity = 1},
        {.ranks = 2, .experts = 4, .ep = 2, .capacity = 0.5, .by_position = true},
        {.ranks = 2, .experts = 4, .ep = 2, .capacity = 1, .padded = true, .dispatcher = "allgather"},
        {.ranks = 4, .experts = 4, .ep = 2, .etp = 2, .capacity = 1.25, .score = "sigmoid"}};
    ALL_EQUAL_ONE_RANK(cases);
}

static void expect_refusal(shared_case c, const char *words) {
    shared_result result;
    if (try_run(&c, &result) == LOOM_OK || !strstr(loom_error_message(), words))
        fail_msg("%d experts, ep %d: found \"%s\", expected \"%s\"", c.experts, c.ep, loom_error_message(), words);
}

static void what_cannot_be_shared_is_refused_with_its_numbers(void **state) {
    (void)state;
    expect_refusal((shared_case){.ranks = 4, .experts = 6, .ep = 4},
        "expert_model_parallel_size 4 does not divide num_moe_experts 6");
    expect_refusal((shared_case){.ranks = 5, .experts = 5, .etp = 5},
        "expert_tensor_parallel_size 5 does not divide moe_ffn_hidden_size 24");
    expect_refusal((shared_case){.ranks = 2, .tp = 2, .experts = 4}, "needs sequence_parallel true");
    expect_refusal((shared_case){.ranks = 1, .experts = 4, .topk = 5}, "moe_router_topk is 5");
    expect_refusal((shared_case){.ranks = 1, .experts = 4, .topk = 1}, "moe_router_pre_softmax");
    expect_refusal((shared_case){.ranks = 1, .experts = 4, .balance = "even"}, "found even, expected one of aux_loss");
    expect_refusal((shared_case){.ranks = 1, .experts = 4, .balances = {"aux_loss", "sinkhorn"}},
        "found sinkhorn in a list of 2, expected it alone");
    expect_refusal(
        (shared_case){.ranks = 1, .experts = 4, .balances = {"aux_loss", "aux_loss"}}, "found aux_loss twice");
    expect_refusal(
        (shared_case){.ranks = 1, .experts = 4, .dispatcher = "ring"}, "found ring, expected one of alltoall");
    expect_refusal((shared_case){.ranks = 2, .ep = 2}, "expected 1 for a model without experts");
}

static void the_same_holds_on_mpi_ranks(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 2, .experts = 4, .ep = 2, .dispatcher = "alltoall"},
        {.ranks = 2, .experts = 4, .ep = 2, .dispatcher = "allgather", .starved = true},
        {.cp = 2, .experts = 4, .ep = 2, .coefficient = 1},
        {.cp = 3, .experts = 12, .ep = 3, .starved = true, .dispatcher = "alltoall"},
        {.ranks = 4, .experts = 8, .ep = 4, .starved = true, .dispatcher = "alltoall"},
        {.ranks = 4, .experts = 4, .ep = 2, .etp = 2, .sharded = true},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .starved = true, .schedule = "zero-bubble"}};
    ALL_EQUAL_ONE_RANK_ON_MPI(cases);
}

int main(int argc, char **argv) {
    const struct CMUnitTest on_mpi[] = {cmocka_unit_test(the_same_holds_on_mpi_ranks)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts_are_shared_out_in_any_way),
        cmocka_unit_test(every_expert_is_cut_over_tensor_and_expert_ranks),
        cmocka_unit_test(an_expert_and_a_rank_without_rows_go_along),
        cmocka_unit_test(experts_made_again_compute_the_same_in_less_memory),
        cmocka_unit_test(stages_without_experts_go_along),
        cmocka_unit_test(losses_of_the_router_weigh_the_same),
        cmocka_unit_test(losses_of_the_router_reach_its_gradient),
        cmocka_unit_test(the_router_has_the_same_gradient_in_both_means),
        cmocka_unit_test(a_global_loss_is_of_all_data_ranks_and_of_one_step),
        cmocka_unit_test(what_finds_no_room_is_dropped_on_any_rank),
        cmocka_unit_test(what_cannot_be_shared_is_refused_with_its_numbers),
    };
    (void)argv;
    return argc > 1 ? cmocka_run_group_tests(on_mpi, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
}
