/* Noise on what a router reads, logits that are drawn, and weights that come before the expert: the same on any layout,
 * in recomputations too, and noise in training alone. */
#include "parallel/shared_model.h"

static void noise_is_the_same_on_any_layout(void **state) {
    (void)state;
    const shared_case cases[] = {{.tp = 2, .sp = true, .experts = 4, .jitter = 0.5},
        {.cp = 2, .experts = 4, .jitter = 0.5}, {.cp = 3, .experts = 4, .jitter = 0.5, .full = true, .micro = 2},
        {.ranks = 4, .pp = 2, .vpp = 2, .experts = 4, .ep = 2, .jitter = 0.5},
        {.ranks = 2, .experts = 4, .ep = 2, .jitter = 0.5, .precision = "bf16-mixed"},
        {.full = true, .experts = 4, .jitter = 0.5, .coefficient = 1}};
    ALL_EQUAL_ONE_RANK(cases);
    /* However microbatches are cut. */
    const shared_case one = {.experts = 4, .jitter = 0.5}, two = {.experts = 4, .jitter = 0.5, .micro = 2};
    shared_result ones = run_it(&one), twos = run_it(&two);
    shared_case c = filled(&two);
    if (compare(&c, &twos, &ones))
        fail_msg("%s", loom_error_message());
    const shared_case plain = {.experts = 4};
    shared_result quiet = run_it(&plain);
    assert_true(fabs(ones.loss[0] - quiet.loss[0]) > 1e-5);
}

static void drawn_logits_are_the_same_on_any_layout(void **state) {
    (void)state;
    const shared_case cases[] = {{.tp = 2, .sp = true, .experts = 4, .forced = true},
        {.cp = 2, .experts = 4, .forced = true, .full = true}, {.ranks = 2, .experts = 4, .ep = 2, .forced = true},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .forced = true, .score = "sigmoid", .bias = 0.05}};
    ALL_EQUAL_ONE_RANK(cases);
}

static void weights_before_the_expert_are_the_same_on_any_layout(void **state) {
    (void)state;
    const shared_case cases[] = {
        {.tp = 2, .sp = true, .experts = 4, .topk = 1, .weigh_input = true, .score = "sigmoid"},
        {.ranks = 2, .experts = 4, .ep = 2, .topk = 1, .weigh_input = true, .pre_softmax = true, .capacity = 1},
        {.ranks = 2,
            .experts = 4,
            .ep = 2,
            .topk = 1,
            .weigh_input = true,
            .pre_softmax = true,
            .capacity = 1,
            .padded = true},
        {.ranks = 4,
            .experts = 4,
            .ep = 2,
            .etp = 2,
            .topk = 1,
            .weigh_input = true,
            .score = "sigmoid",
            .shared_width = 16},
        {.full = true, .experts = 4, .topk = 1, .weigh_input = true, .score = "sigmoid"}};
    ALL_EQUAL_ONE_RANK(cases);
    /* The expert is no linear map, so that it is not the same before it as behind it. */
    const shared_case before = {.experts = 4, .topk = 1, .weigh_input = true, .score = "sigmoid"};
    const shared_case behind = {.experts = 4, .topk = 1, .score = "sigmoid"};
    assert_true(fabs(run_it(&before).loss[0] - run_it(&behind).loss[0]) > 1e-6);
    const shared_case two = {.ranks = 1, .experts = 4, .topk = 2, .weigh_input = true};
    shared_result result;
    assert_int_not_equal(try_run(&two, &result), LOOM_OK);
    assert_non_null(strstr(loom_error_message(), "moe_apply_probs_on_input: found true with moe_router_topk 2"));
}

/* A router in double differs from one in fp32 by rounding, and so do its layouts. */
static void a_router_in_double_computes_what_one_in_fp32_does(void **state) {
    (void)state;
    const shared_case cases[] = {
        {.tp = 2, .sp = true, .experts = 4, .fp64 = true, .balance = "global_aux_loss", .coefficient = 1, .z = 0.1},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .fp64 = true, .score = "sigmoid", .bias = 0.05, .jitter = 0.5},
        {.cp = 2, .experts = 4, .fp64 = true, .full = true, .forced = true},
        {.ranks = 2, .experts = 4, .ep = 2, .fp64 = true, .capacity = 1}};
    ALL_EQUAL_ONE_RANK(cases);
    const shared_case narrow[] = {{.experts = 4, .coefficient = 1, .z = 0.1},
        {.experts = 4, .score = "sigmoid", .micro = 2, .balance = "seq_aux_loss", .coefficient = 1},
        {.experts = 4, .precision = "bf16-mixed"}};
    for (size_t i = 0; i < sizeof narrow / sizeof *narrow; i++) {
        shared_case wide = narrow[i], c = filled(&narrow[i]);
        wide.fp64 = true;
        shared_result found = run_it(&wide), wanted = run_it(&narrow[i]);
        if (compare(&c, &found, &wanted))
            fail_msg("%s", loom_error_message());
    }
}

/* ---- in training alone ---- */

typedef struct evaluation {
    shared_case c;
    double loss;
} evaluation;

static loom_status evaluate(loom_rank *rank, void *argument) {
    evaluation *e = argument;
    loom_fabric *fabric = NULL;
    loom_parallel *parallel = NULL;
    loom_dataset dataset = {0};
    loom_batches *batches = NULL;
    loom_status status = loom_mock_dataset_create(S, VOCABULARY, 5, BATCH, &dataset);
    loom_dataloader loader = {
        .dataset = &dataset, .micro_batch_size = 1, .global_batch_size = BATCH, .mode = LOOM_VALIDATION};
    if (!status)
        status = set_up(rank, &e->c, &fabric, &parallel);
    if (!status)
        status = loom_fabric_setup_dataloader(fabric, &loader, &batches);
    if (!status)
        status = loom_parallel_validation_step(parallel, batches, &e->loss);
    loom_batches_destroy(batches);
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    loom_dataset_destroy(&dataset);
    return status;
}

static void an_evaluation_hears_no_noise(void **state) {
    (void)state;
    const shared_case quiet = {.experts = 4}, noisy = {.experts = 4, .jitter = 0.5};
    evaluation plain = {.c = filled(&quiet)}, with = {.c = filled(&noisy)};
    must_run(1, evaluate, &plain);
    must_run(1, evaluate, &with);
    assert_true(plain.loss == with.loss);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(noise_is_the_same_on_any_layout),
        cmocka_unit_test(drawn_logits_are_the_same_on_any_layout),
        cmocka_unit_test(weights_before_the_expert_are_the_same_on_any_layout),
        cmocka_unit_test(a_router_in_double_computes_what_one_in_fp32_does),
        cmocka_unit_test(an_evaluation_hears_no_noise),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
