/* The statistics of routers are those of one rank at any layout: counts equal, losses to rounding; and what is computed
 * again, or without a backward, is counted once, or not at all. */
#include "parallel/shared_model.h"

enum { MOST_EXPERTS = 8 };

/* A copy of a step's statistics. */
typedef struct counted {
    loom_router_statistics of;
    loom_router_layer layers[LAYERS];
    int64_t chosen[LAYERS][MOST_EXPERTS], kept[LAYERS][MOST_EXPERTS];
} counted;

typedef struct counting {
    const shared_case *c;
    counted steps[STEPS];
    bool differs; /* some rank was told other numbers than rank 0 */
} counting;

static void copy(const loom_router_statistics *of, counted *to) {
    *to = (counted){.of = *of};
    for (int64_t i = 0; i < of->layer_count; i++) {
        to->layers[i] = of->layers[i];
        memcpy(to->chosen[i], of->layers[i].chosen, (size_t)of->experts * sizeof(int64_t));
        memcpy(to->kept[i], of->layers[i].kept, (size_t)of->experts * sizeof(int64_t));
    }
}

/* A callback: what it finds at the end of a step must be what the loop finds after it. */
static loom_status look(void *context, loom_step *step) {
    const loom_parallel *parallel = *(loom_parallel *const *)context;
    return step->mode != LOOM_TRAINING || loom_parallel_router_statistics(parallel)
               ? LOOM_OK
               : loom_fail(LOOM_ERR_INTERNAL, "a callback finds no statistics");
}

static loom_status one_step(
    loom_parallel *parallel, loom_optimizer *optimizer, loom_batches *batches, loom_batches *validation, counted *to) {
    double loss;
    loom_optimizer_outcome outcome;
    LOOM_TRY(loom_parallel_training_step(parallel, batches, &loss));
    LOOM_TRY(loom_optimizer_step(optimizer, &outcome));
    LOOM_TRY(loom_batches_reset(validation));
    LOOM_TRY(loom_parallel_validation_step(parallel, validation, &loss));
    copy(loom_parallel_router_statistics(parallel), to);
    return LOOM_OK;
}

static loom_status train_and_count(
    loom_fabric *fabric, loom_parallel *parallel, const loom_dataset *dataset, const shared_case *c, counted *steps) {
    loom_dataloader loader = {
        .dataset = dataset, .micro_batch_size = c->micro ? c->micro : 1, .global_batch_size = BATCH};
    loom_batches *batches = NULL, *validation = NULL;
    loom_optimizer *optimizer = NULL;
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_callback callback = {.context = &parallel, .event = {[LOOM_EVENT_STEP_END] = look}};
    optim.lr = 0.001;
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(fabric, parallel, &optim, NULL, &optimizer));
    LOOM_TRY(loom_callbacks_add(loom_fabric_callbacks(fabric), &callback));
    if (loom_parallel_router_statistics(parallel))
        return loom_fail(LOOM_ERR_INTERNAL, "there are statistics before anybody asks for them");
    LOOM_TRY(loom_parallel_collect_router_statistics(parallel, true));
    loom_status status = loom_fabric_setup_dataloader(fabric, &loader, &batches);
    loader.mode = LOOM_VALIDATION;
    if (!status)
        status = loom_fabric_setup_dataloader(fabric, &loader, &validation);
    for (int step = 0; !status && step < STEPS; step++)
        status = one_step(parallel, optimizer, batches, validation, &steps[step]);
    loom_batches_destroy(batches);
    loom_batches_destroy(validation);
    if (!status)
        status = loom_parallel_collect_router_statistics(parallel, false);
    if (!status && loom_parallel_router_statistics(parallel))
        status = loom_fail(LOOM_ERR_INTERNAL, "there are statistics after they were switched off");
    loom_callbacks_remove(loom_fabric_callbacks(fabric), &callback);
    return status;
}

/* Every rank sends what it was told to rank 0, as far as it can be compared by its bytes. */
static loom_status all_are_told_the_same(loom_rank *rank, const counted *mine, bool *differs) {
    const int ranks = loom_rank_count(rank);
    double sent[STEPS * 3], *all = malloc((size_t)ranks * sizeof sent);
    if (!all)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory");
    for (int step = 0; step < STEPS; step++) {
        sent[3 * step] = (double)mine[step].of.choices;
        sent[3 * step + 1] = mine[step].of.load;
        sent[3 * step + 2] = mine[step].layers[LAYERS - 1].losses[LOOM_ROUTER_Z];
    }
    loom_status status = loom_all_gather(loom_rank_world(rank), sent, all, STEPS * 3, LOOM_F64);
    *differs = false;
    for (int i = 0; !status && i < ranks; i++)
        *differs = *differs || memcmp(all + (ptrdiff_t)i * STEPS * 3, sent, sizeof sent) != 0;
    free(all);
    return status;
}

static loom_status count_on_rank(loom_rank *rank, void *argument) {
    counting *job = argument;
    loom_fabric *fabric = NULL;
    loom_parallel *parallel = NULL;
    loom_dataset dataset = {0};
    counting *mine = calloc(1, sizeof *mine);
    loom_status status = mine ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory");
    if (!status)
        status = loom_mock_dataset_create(S, VOCABULARY, 5, STEPS * BATCH, &dataset);
    if (!status)
        status = set_up(rank, job->c, &fabric, &parallel);
    if (!status)
        status = train_and_count(fabric, parallel, &dataset, job->c, mine->steps);
    if (!status)
        status = all_are_told_the_same(rank, mine->steps, &mine->differs);
    if (!status && loom_rank_index(rank) == 0) {
        memcpy(job->steps, mine->steps, sizeof job->steps);
        job->differs = mine->differs;
    }
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    loom_dataset_destroy(&dataset);
    free(mine);
    return status;
}

static void count_it(const shared_case *given, counting *job) {
    char text[TEXT];
    shared_case c = filled(given);
    loom_run_options options = test_options();
    job->c = &c;
    if (loom_run_local(c.ranks, count_on_rank, job, &options))
        fail_msg("%s: %s", name_of(&c, text), loom_error_message());
    if (job->differs)
        fail_msg("%s: not all ranks are told the same", name_of(&c, text));
}

static bool same_loss(double a, double b) {
    return (isnan(a) && isnan(b)) || fabs(a - b) <= 1e-5 * fabs(b);
}

static void expect_same(const char *name, int step, const counted *found, const counted *wanted) {
    const loom_router_statistics *a = &found->of, *b = &wanted->of;
    if (a->layer_count != b->layer_count || a->experts != b->experts || a->choices != b->choices ||
        a->dropped != b->dropped || a->limited != b->limited || a->load != b->load)
        fail_msg("%s: step %d has %lld choices, %lld dropped, load %g; one rank has %lld, %lld, %g", name, step,
            (long long)a->choices, (long long)a->dropped, a->load, (long long)b->choices, (long long)b->dropped,
            b->load);
    for (int64_t i = 0; i < a->layer_count; i++) {
        const loom_router_layer *x = &found->layers[i], *y = &wanted->layers[i];
        if (x->layer != y->layer || x->choices != y->choices || x->dropped != y->dropped ||
            memcmp(found->chosen[i], wanted->chosen[i], sizeof found->chosen[i]) != 0 ||
            memcmp(found->kept[i], wanted->kept[i], sizeof found->kept[i]) != 0)
            fail_msg("%s: step %d: layer %lld counts otherwise than one rank", name, step, (long long)y->layer);
        for (int k = 0; k < LOOM_ROUTER_LOSS_COUNT; k++)
            if (!same_loss(x->losses[k], y->losses[k]))
                fail_msg("%s: step %d: layer %lld: %s is %.9g, one rank has %.9g", name, step, (long long)y->layer,
                    loom_router_loss_name((loom_router_loss)k), x->losses[k], y->losses[k]);
    }
}

static void count_as_one_rank(const shared_case *cases, size_t count) {
    counting *found = calloc(2, sizeof *found), *wanted = found + 1;
    assert_non_null(found);
    for (size_t i = 0; i < count; i += FEW) {
        char name[TEXT];
        shared_case c = filled(&cases[i]), alone = on_one_rank(&cases[i]);
        count_it(&cases[i], found);
        count_it(&alone, wanted);
        for (int step = 0; step < STEPS; step++)
            expect_same(name_of(&c, name), step, &found->steps[step], &wanted->steps[step]);
        /* Each token of the batch has chosen topk experts, once. */
        assert_int_equal(wanted->steps[0].layers[0].choices, (int64_t)BATCH * S * (c.topk ? c.topk : 2));
    }
    free(found);
}
#define COUNT_AS_ONE_RANK(cases) count_as_one_rank(cases, sizeof(cases) / sizeof *(cases))

static void any_layout_counts_as_one_rank(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 2, .experts = 4, .coefficient = 0.5, .z = 0.1},
        {.ranks = 2, .experts = 4, .ep = 2, .coefficient = 0.5, .z = 0.1, .dispatcher = "alltoall"},
        {.tp = 2, .sp = true, .experts = 4, .coefficient = 0.5, .z = 0.1},
        {.tp = 2, .sp = true, .experts = 4, .balance = "seq_aux_loss", .coefficient = 0.5, .z = 0.1, .micro = 2},
        {.cp = 2, .experts = 4, .ep = 2, .coefficient = 0.5, .z = 0.1},
        {.cp = 2, .experts = 4, .balance = "seq_aux_loss", .coefficient = 0.5, .micro = 2},
        {.pp = 2, .experts = 4, .coefficient = 0.5, .z = 0.1},
        {.ranks = 4, .pp = 2, .vpp = 2, .experts = 4, .ep = 2, .coefficient = 0.5, .z = 0.1, .topk = 3},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .schedule = "zero-bubble", .z = 0.1, .sharded = true},
        {.ranks = 4, .cp = 2, .tp = 2, .sp = true, .experts = 4, .coefficient = 0.5, .z = 0.1, .score = "sigmoid"},
        {.ranks = 4, .tp = 2, .sp = true, .experts = 4, .etp = 1, .ep = 2, .coefficient = 0.5},
        {.cp = 2, .experts = 4, .balances = {"aux_loss", "global_aux_loss"}, .coefficients = {0.5, 0.25}},
        {.tp = 2, .pp = 2, .sp = true, .experts = 4, .balance = "global_aux_loss", .coefficient = 0.5}};
    COUNT_AS_ONE_RANK(cases);
}

static void stages_without_experts_go_along(void **state) {
    (void)state;
    const shared_case cases[] = {{.pp = 4, .experts = 4, .freq = 4, .coefficient = 0.5},
        {.ranks = 4, .pp = 2, .experts = 4, .ep = 2, .freq = 4, .sharded = true, .coefficient = 0.5},
        {.ranks = 2, .pp = 2, .vpp = 2, .experts = 4, .freq = 2, .z = 0.1}};
    COUNT_AS_ONE_RANK(cases);
}

static void what_is_computed_again_counts_once(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 1, .experts = 4, .full = true, .coefficient = 0.5, .z = 0.1},
        {.pp = 2, .experts = 4, .full = true, .schedule = "zero-bubble", .z = 0.1},
        {.tp = 2, .sp = true, .experts = 4, .selective = true, .experts_again = true, .coefficient = 0.5},
        {.ranks = 2, .experts = 4, .ep = 2, .experts_again = true, .capacity = 1, .z = 0.1}};
    COUNT_AS_ONE_RANK(cases);
}

static void what_is_dropped_is_counted_on_any_rank(void **state) {
    (void)state;
    const shared_case cases[] = {{.ranks = 2, .experts = 4, .ep = 2, .capacity = 1},
        {.ranks = 2, .experts = 4, .capacity = 0.5, .by_position = true, .pp = 2},
        {.ranks = 4, .experts = 4, .ep = 2, .etp = 2, .capacity = 1, .padded = true, .dispatcher = "allgather"}};
    COUNT_AS_ONE_RANK(cases);
}

/* Of a router of zeros all is known: every token goes to the first experts, with equal scores. */
static void numbers_of_an_even_router_are_known(void **state) {
    const shared_case c = {.ranks = 2,
        .experts = 8,
        .topk = 1,
        .pre_softmax = true,
        .starved = true,
        .capacity = 1,
        .coefficient = 0.5,
        .z = 0.25};
    counting *found = calloc(1, sizeof *found);
    (void)state;
    assert_non_null(found);
    count_it(&c, found);
    const counted *step = &found->steps[0];
    assert_true(step->of.limited && step->of.layer_count == LAYERS);
    for (int i = 0; i < LAYERS; i++) {
        const loom_router_layer *layer = &step->layers[i];
        assert_int_equal(layer->choices, BATCH * S);
        assert_int_equal(step->chosen[i][0], BATCH * S);
        assert_int_equal(step->kept[i][0], BATCH * S / 8);
        assert_int_equal(layer->dropped, BATCH * S * 7 / 8);
        assert_true(layer->load == 8);
        assert_true(fabs(layer->losses[LOOM_ROUTER_LOAD_BALANCING] - 1) < 1e-6);
        assert_true(fabs(layer->losses[LOOM_ROUTER_Z] - log(8) * log(8)) < 1e-6);
        assert_true(isnan(layer->losses[LOOM_ROUTER_SEQ_LOAD_BALANCING]));
    }
    free(found);
}

/* ---- whom it does not concern ---- */

static loom_status ask_a_dense_model(loom_rank *rank, void *argument) {
    loom_fabric *fabric = NULL;
    loom_parallel *parallel = NULL;
    loom_status status = set_up(rank, argument, &fabric, &parallel);
    if (!status)
        status = loom_parallel_collect_router_statistics(parallel, true);
    if (!status && loom_parallel_router_statistics(parallel))
        status = loom_fail(LOOM_ERR_INTERNAL, "a dense model has statistics of routers");
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    return status;
}

static void a_dense_model_has_none(void **state) {
    const shared_case dense = {.ranks = 1};
    shared_case c = filled(&dense);
    loom_run_options options = test_options();
    (void)state;
    if (loom_run_local(1, ask_a_dense_model, &c, &options))
        fail_msg("%s", loom_error_message());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_layout_counts_as_one_rank),
        cmocka_unit_test(stages_without_experts_go_along),
        cmocka_unit_test(what_is_computed_again_counts_once),
        cmocka_unit_test(what_is_dropped_is_counted_on_any_rank),
        cmocka_unit_test(numbers_of_an_even_router_are_known),
        cmocka_unit_test(a_dense_model_has_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
