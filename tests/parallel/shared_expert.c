/* The shared expert that computes while rows travel: the bits of the one that does not, on any layout; and that it
 * does, without a clock. On thread ranks nothing is left to chance: rank 1 sends rows, and their gradients, when rank 0
 * has computed what they are to pass under. Would rank 0 wait for them first, it would never get there: rank 1 stops
 * holding back after a while, and the test sees that it has. */
#include "parallel/shared_model.h"
#include <stdatomic.h>
#include <time.h>

/* ---- the same bits ---- */

static loom_status must_be_equal(const shared_case *c, const shared_result *found, const shared_result *wanted) {
    char name[TEXT];
    name_of(c, name);
    for (int step = 0; step < STEPS; step++)
        CHECK(found->loss[step] == wanted->loss[step] && found->norm[step] == wanted->norm[step],
            "%s, step %d: loss %.17g and norm %.17g, without overlap %.17g and %.17g", name, step, found->loss[step],
            found->norm[step], wanted->loss[step], wanted->norm[step]);
    CHECK(found->evaluated == wanted->evaluated, "%s: evaluation loss %.17g, without overlap %.17g", name,
        found->evaluated, wanted->evaluated);
    CHECK(found->kept_count > 0 && found->kept_count == wanted->kept_count &&
              memcmp(found->kept, wanted->kept, (size_t)found->kept_count * sizeof *found->kept) == 0,
        "%s: gradients of routers differ", name);
    return LOOM_OK;
}

static shared_case filled_case(const shared_case *given, bool overlap) {
    shared_case c = filled(given);
    c.experts = c.experts ? c.experts : 4;
    c.shared_width = c.shared_width ? c.shared_width : 16;
    c.dispatcher = "alltoall";
    c.shared_overlap = overlap;
    return c;
}

static const shared_case cases[] = {{.ranks = 1}, {.ranks = 2, .ep = 2}, {.ranks = 2, .ep = 2, .shared_gate = true},
    {.ranks = 4, .ep = 4, .starved = true}, {.tp = 2, .sp = true, .ep = 2, .etp = 1, .shared_gate = true},
    {.ranks = 4, .tp = 2, .sp = true, .ep = 2}, {.tp = 2, .sp = true, .shared_gate = true},
    {.ranks = 4, .tp = 2, .sp = true, .ep = 2, .full = true, .dropout = 0.1},
    {.ranks = 4, .tp = 2, .sp = true, .ep = 2, .experts_again = true, .shared_gate = true},
    {.ranks = 4, .pp = 2, .vpp = 2, .ep = 2, .freq = 2},
    {.ranks = 4, .pp = 2, .ep = 2, .schedule = "zero-bubble", .shared_gate = true},
    {.ranks = 8, .pp = 2, .vpp = 2, .tp = 2, .sp = true, .ep = 4, .etp = 1, .sharded = true, .layers = "0110"},
    {.ranks = 4, .cp = 2, .ep = 4, .sharded = true, .capacity = 1, .jitter = 0.1},
    {.ranks = 2, .ep = 2, .etp = 1, .precision = "bf16-mixed", .shared_gate = true, .coefficient = 1},
    {.ranks = 4, .ep = 2, .etp = 2, .precision = "16-mixed", .selective = true},
    {.ranks = 2, .ep = 2, .topk = 1, .pre_softmax = true, .weigh_input = true}};
enum { CASES = sizeof cases / sizeof *cases };

static void it_has_the_bits_of_one_that_computes_alone(void **state) {
    (void)state;
    for (int i = 0; i < CASES; i += FEW) {
        shared_case with = filled_case(&cases[i], true), without = filled_case(&cases[i], false);
        shared_result found = run_it(&with), wanted = run_it(&without);
        if (must_be_equal(&with, &found, &wanted))
            fail_msg("%s", loom_error_message());
    }
}

static loom_status equal_on_mpi(loom_rank *rank, void *argument) {
    (void)argument;
    for (int i = 0; i < CASES; i++) {
        shared_case with = filled_case(&cases[i], true), without = filled_case(&cases[i], false);
        shared_result found, wanted;
        if (with.ranks != loom_rank_count(rank))
            continue;
        LOOM_TRY(on_rank(rank, &(shared_job){&with, &found}));
        LOOM_TRY(on_rank(rank, &(shared_job){&without, &wanted}));
        loom_status status = loom_rank_index(rank) == 0 ? must_be_equal(&with, &found, &wanted) : LOOM_OK;
        LOOM_TRY(loom_agree(loom_rank_world(rank), status));
    }
    return LOOM_OK;
}

static void the_same_holds_on_mpi_ranks(void **state) {
    (void)state;
    loom_run_options options = test_options();
    if (loom_run_mpi(equal_on_mpi, NULL, &options))
        fail_msg("%s", loom_error_message());
}

/* ---- rows that come late ----
 *
 * Four times a layer and microbatch rows travel under a product of the shared expert: to the experts under fc1 and back
 * under fc2, and in the backward to the experts under fc2 and back under fc1. Rank 0 counts these products when they
 * are done; before the rows of each, rank 1 waits for that count. Products are told by their shapes. */

enum { SHARED = 20, OWN = 24 /* of a routed expert */, WINDOWS = 4, NORMS = 2 * LAYERS + 1 };
enum window { TO_FORWARD, BACK_FORWARD, TO_BACKWARD, BACK_BACKWARD };

static const loom_kernels *plain;
static _Atomic int64_t done[WINDOWS]; /* of rank 0 */
static _Atomic bool gave_up;
static _Thread_local int rank_index;
static _Thread_local int64_t sent[WINDOWS], norms;

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void nothing(void *argument, int64_t item, int worker) {
    (void)argument, (void)item, (void)worker;
}

/* Messages move on meanwhile, as they do between the items of a kernel. */
static void hold_back(loom_team *team, enum window of) {
    if (rank_index != 1)
        return;
    int64_t wanted = ++sent[of];
    for (double until = seconds_now() + 5; atomic_load(&done[of]) < wanted && !atomic_load(&gave_up);) {
        loom_team_run(team, nothing, NULL, 1);
        if (seconds_now() > until)
            atomic_store(&gave_up, true);
    }
}

static void held_gemm(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
    const float *a, int64_t lda, const float *b, int64_t ldb, bool accumulate, float *c, int64_t ldc) {
    plain->gemm(team, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, accumulate, c, ldc);
    if (rank_index != 0 || trans_a)
        return;
    if (trans_b && n == 2 * SHARED)
        atomic_fetch_add(&done[TO_FORWARD], 1);
    else if (trans_b && k == SHARED)
        atomic_fetch_add(&done[BACK_FORWARD], 1);
    else if (!trans_b && n == SHARED)
        atomic_fetch_add(&done[TO_BACKWARD], 1);
    else if (!trans_b && k == 2 * SHARED)
        atomic_fetch_add(&done[BACK_BACKWARD], 1);
}

/* The weight gradient of the experts' fc1 is the last product before the gradients of rows go back. */
static void held_grouped(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
    int64_t lda, int64_t ldb, int64_t ldc) {
    plain->gemm_grouped(team, trans_a, trans_b, count, products, lda, ldb, ldc);
    if (trans_b && lda == OWN)
        hold_back(team, BACK_FORWARD);
    else if (trans_a && ldb == WIDTH)
        hold_back(team, BACK_BACKWARD);
}

/* Of a microbatch the backward of the norm that follows a layer comes before that layer's. */
static void held_norm(loom_team *team, int64_t rows, int64_t h, const float *x, const float *weight, const float *rstd,
    const float *d_y, float *d_x) {
    plain->rmsnorm_backward_input(team, rows, h, x, weight, rstd, d_y, d_x);
    int64_t place = norms++ % NORMS;
    if (place % 2 == 0 && place + 1 < NORMS)
        hold_back(team, TO_BACKWARD);
}

static loom_status hold_rows(
    void *context, const loom_batch *batch, const char *scope, const char *operation, loom_tensor *output) {
    (void)batch, (void)scope, (void)output;
    if (strcmp(operation, "expert rows") == 0)
        hold_back(loom_rank_team(context), TO_FORWARD);
    return LOOM_OK;
}

static loom_status held_step(loom_rank *rank, const shared_case *c) {
    loom_fabric *fabric = NULL;
    loom_parallel *parallel = NULL;
    loom_batches *batches = NULL;
    loom_dataset dataset = {0};
    double loss;
    rank_index = loom_rank_index(rank);
    memset(sent, 0, sizeof sent);
    norms = 0;
    loom_status status = loom_mock_dataset_create(S, VOCABULARY, 5, BATCH, &dataset);
    loom_dataloader loader = {.dataset = &dataset, .micro_batch_size = 1, .global_batch_size = BATCH};
    if (!status)
        status = set_up(rank, c, &fabric, &parallel);
    if (!status)
        loom_parallel_observe(parallel, hold_rows, rank);
    if (!status)
        status = loom_fabric_setup_dataloader(fabric, &loader, &batches);
    if (!status)
        status = loom_parallel_training_step(parallel, batches, &loss);
    loom_batches_destroy(batches);
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    loom_dataset_destroy(&dataset);
    for (int window = 0; window < WINDOWS && !status && rank_index == 1; window++)
        CHECK(sent[window] == LAYERS * BATCH / 2, "rank 1 was to hold back %lld times in window %d",
            (long long)sent[window], window);
    return status;
}

static loom_status held_on_rank(loom_rank *rank, void *argument) {
    return held_step(rank, argument);
}

static void rows_travel_under_the_shared_expert(void **state) {
    (void)state;
    const shared_case given = {.ranks = 2, .ep = 2, .shared_width = SHARED}, c = filled_case(&given, true);
    loom_run_options options = test_options();
    plain = options.kernels ? options.kernels : loom_kernels_fast();
    loom_kernels held = *plain;
    held.gemm = held_gemm;
    held.gemm_grouped = held_grouped;
    held.rmsnorm_backward_input = held_norm;
    options.kernels = &held;
    if (loom_run_local(2, held_on_rank, (void *)(uintptr_t)&c, &options))
        fail_msg("%s", loom_error_message());
    for (int window = 0; window < WINDOWS; window++)
        assert_int_equal(atomic_load(&done[window]), LAYERS * BATCH / 2);
    if (atomic_load(&gave_up))
        fail_msg("rank 0 waits for rows before it computes the shared expert");
}

/* ---- what does not go together ---- */

static void expect_refusal(shared_case c, const char *words) {
    shared_result result;
    if (try_run(&c, &result) == LOOM_OK || !strstr(loom_error_message(), words))
        fail_msg("found \"%s\", expected \"%s\"", loom_error_message(), words);
}

static void what_has_nothing_to_compute_or_to_wait_for_is_refused(void **state) {
    (void)state;
    expect_refusal((shared_case){.experts = 4, .shared_width = 16, .shared_overlap = true, .dispatcher = "allgather"},
        "moe_token_dispatcher_type: found allgather with moe_shared_expert_overlap, expected alltoall");
    expect_refusal((shared_case){.experts = 4, .shared_overlap = true, .dispatcher = "alltoall"},
        "moe_shared_expert_overlap: found true without moe_shared_expert_intermediate_size");
}

int main(int argc, char **argv) {
    const struct CMUnitTest on_mpi[] = {cmocka_unit_test(the_same_holds_on_mpi_ranks)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_has_the_bits_of_one_that_computes_alone),
        cmocka_unit_test(rows_travel_under_the_shared_expert),
        cmocka_unit_test(what_has_nothing_to_compute_or_to_wait_for_is_refused),
    };
    (void)argv;
    return argc > 1 ? cmocka_run_group_tests(on_mpi, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
}
