/* Expert parameters: a buffer of their own, reduced over the ranks that hold the same experts alone. Experts are the
 * test's own; where expert parallelism of 2 gives even ranks the first expert and odd ranks the second, one rank that
 * has both as dense parameters and uses them by turns computes the same. */
#include "ddp/ddp.h"
#include "parallel/ddp_parameters.h"
#include "small_model.h"
#include "support.h"
#include "toy_module.h"
#include <math.h>
#include <string.h>

/* ---- buffers ---- */

enum { COUNT = 5, RANKS = 4 };
static const int64_t counts[COUNT] = {300, 70, 1, 500, 129};
static const bool is_expert[COUNT] = {false, true, false, true, true};

typedef struct buffer_case {
    loom__ddp_options options;
    bool poisons; /* rank 3's part of a gradient of its experts */
} buffer_case;

/* The members of a parity, in order. */
static loom_status make_expert_group(loom_rank *rank, loom_comm **group) {
    int parity = loom_rank_index(rank) % 2, ranks[RANKS / 2] = {parity, parity + 2};
    return loom_group_create(rank, "edp", ranks, RANKS / 2, group);
}

/* Whole numbers, so that sums in any order are exact. */
static float gradient_of(int64_t p, int64_t e, int rank) {
    return (float)((e % 50 + 100 * p) * (rank + 1));
}

static loom_status check_sums(const loom__ddp_view *view, const test_parameters *set, int me, float mean) {
    for (int64_t place = 0; place < COUNT; place++) {
        const loom_parameter *parameter = view->parameters[place];
        int64_t p = parameter->index;
        const loom__ddp_bucket *bucket = &view->buckets[view->places[place].bucket];
        CHECK(bucket->expert == is_expert[p], "p%lld lies in a bucket of the other kind", (long long)p);
        for (int64_t e = 0; e < set->counts[p]; e++) {
            float wanted = 0;
            for (int r = 0; r < RANKS; r++)
                wanted += !is_expert[p] || r % 2 == me % 2 ? gradient_of(p, e, r) : 0;
            CHECK(parameter->grad[e] == wanted * mean, "p%lld[%lld] is %g on rank %d, expected %g", (long long)p,
                (long long)e, (double)parameter->grad[e], me, (double)(wanted * mean));
        }
    }
    return LOOM_OK;
}

/* Ranks may come to their experts in another order than to the rest. */
static loom_status write_all(test_parameters *set, loom__ddp *ddp, int me, bool experts_first, bool poisons) {
    for (int pass = 0; pass < 2; pass++)
        for (int64_t p = COUNT - 1; p >= 0; p--) {
            bool accumulate;
            if (is_expert[p] != (experts_first == (pass == 0)))
                continue;
            float *grad = loom_parameter_begin_grad(set->list[p], &accumulate);
            for (int64_t e = 0; e < set->counts[p]; e++)
                grad[e] = gradient_of(p, e, me);
            if (poisons && me == 3 && p == 3)
                grad[7] = NAN;
            loom__ddp_parameter_ready(ddp, set->list[p]);
        }
    return LOOM_OK;
}

static loom_status reduce(loom_rank *rank, void *argument) {
    const buffer_case *c = argument;
    loom__ddp_options options = c->options;
    int me = loom_rank_index(rank);
    test_parameters set;
    loom__ddp *ddp = NULL;
    loom_status status = LOOM_OK;
    LOOM_TRY(make_expert_group(rank, &options.expert));
    test_parameters_create(&set, counts, COUNT, 1.0f);
    for (int64_t p = 0; p < COUNT; p++)
        set.parameters[p].expert_parallel = is_expert[p];
    LOOM_TRY(loom__ddp_create(rank, &options, set.list, COUNT, loom_rank_world(rank), &ddp));
    const loom__ddp_view *view = loom__ddp_view_of(ddp);
    int64_t held[2] = {0, 0};
    for (int64_t place = 0; place < COUNT; place++)
        held[is_expert[view->parameters[place]->index]] += view->parts[place].count;
    for (int step = 0; step < 2 && !status; step++) {
        loom__ddp_begin_step(ddp);
        loom__ddp_expect_last(ddp, true);
        status = write_all(&set, ddp, me, me % 2 == step, c->poisons);
        if (!status)
            status = loom__ddp_finish(ddp);
        if (!status)
            status = loom__ddp_gather_gradients(ddp);
        if (!status)
            status = check_sums(view, &set, me, options.average_in_collective ? 1.0f / RANKS : 1.0f);
    }
    /* All shards together are all elements: 4 of the dense ones, 2 of each set of experts. */
    if (!status)
        status = loom_all_reduce(loom_rank_world(rank), held, held, 2, LOOM_I64, LOOM_SUM);
    int64_t copies = view->sharded ? 1 : RANKS, dense = 301 * copies, experts = 699 * (view->sharded ? 2 : RANKS);
    if (!status && (held[0] != dense || held[1] != experts))
        status = loom_fail(LOOM_ERR_INTERNAL, "all ranks hold %lld dense and %lld expert elements", (long long)held[0],
            (long long)held[1]);
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    loom_group_destroy(options.expert);
    return status;
}

static void experts_are_reduced_over_those_who_share_them(void **state) {
    (void)state;
    for (int bits = 0; bits < 8; bits++)
        for (int64_t bucket_size = 1; bucket_size <= 401; bucket_size += 200) {
            buffer_case c = {.options = {.overlap_grad_reduce = bits & 1,
                                 .use_distributed_optimizer = bits & 2,
                                 .average_in_collective = bits & 4,
                                 .check_for_nan_in_grad = true,
                                 .bucket_size = bucket_size}};
            must_run(RANKS, reduce, &c);
        }
}

static loom_status reduce_poisoned(loom_rank *rank, void *argument) {
    loom_status status = reduce(rank, argument);
    CHECK(status == (loom_rank_index(rank) == 3 ? LOOM_ERR_NUMERIC : LOOM_ERR_ABORTED) &&
              strstr(loom_error_message(), "the gradient of p3 has a NaN") && strstr(loom_error_message(), "rank 3)"),
        "rank %d: %s", loom_rank_index(rank), loom_error_message());
    return LOOM_OK;
}

static void a_nan_of_an_expert_is_named_on_all_ranks(void **state) {
    (void)state;
    buffer_case c = {.options = {.overlap_grad_reduce = true, .check_for_nan_in_grad = true}, .poisons = true};
    must_run(RANKS, reduce_poisoned, &c);
}

static loom_status ask_without_a_group(loom_rank *rank, void *argument) {
    const loom__ddp_options options = loom__ddp_options_default();
    test_parameters set;
    loom__ddp *ddp;
    (void)argument;
    test_parameters_create(&set, counts, 2, 1.0f);
    set.parameters[1].expert_parallel = true;
    CHECK(loom__ddp_create(rank, &options, set.list, 2, loom_rank_world(rank), &ddp) == LOOM_ERR_ARGUMENT &&
              strstr(loom_error_message(), "p1 is expert_parallel"),
        "%s", loom_error_message());
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void an_expert_without_a_group_is_refused(void **state) {
    (void)state;
    must_run(1, ask_without_a_group, NULL);
}

/* ---- a module of one's own with experts ---- */

enum { STEPS = 6 };
static const float initial[2] = {2, -3};

typedef struct expert_toy {
    toy own;
    bool both; /* this rank has both experts, and uses them by turns */
    int64_t forwards;
} expert_toy;

typedef struct expert_case {
    int ranks;
    bool sharded, overlaps, averages;
    int64_t instances;
    double loss[STEPS], norm[STEPS];
    float values[3]; /* dense, first and second expert, after the steps */
} expert_case;

static loom_status materialize(void *context, const loom_module_environment *environment) {
    expert_toy *t = context;
    LOOM_TRY(toy_materialize(&t->own, environment));
    CHECK(loom_comm_size(environment->expert_group) == (t->both ? 1 : 2), "%d ranks share the experts out",
        loom_comm_size(environment->expert_group));
    for (int i = 1; i < t->own.parameters; i++) {
        int expert = t->both ? i - 1 : loom_comm_rank(environment->expert_group);
        t->own.parameter[i].expert_parallel = !t->both;
        t->own.parameter[i].owned = true;
        t->own.memory[i] = initial[expert];
    }
    return LOOM_OK;
}

static loom_status parameters(void *context, loom_parameter *const **list, int64_t *count) {
    return toy_parameters(&((expert_toy *)context)->own, list, count);
}

static loom_status forward(void *context, loom_tape *tape, const loom_forward *call, loom_tensor **output) {
    expert_toy *t = context;
    t->own.use[1].parameter = t->both ? 1 + (int)(t->forwards++ % 2) : 1;
    return toy_forward(&t->own, tape, call, output);
}

static const int labels[8][TOY_SEQUENCE] = {
    {1, 2, 3}, {4, -1, -1}, {1, 1, 1}, {2, 2, 2}, {3, 1, 2}, {5, 5, -1}, {1, 4, 1}, {2, 2, 6}};

static loom_status get_again(void *context, int64_t index, const loom_sample_row *row) {
    return toy_get(context, index < 0 ? index : index % 8, row);
}

static loom_status collect_values(loom_rank *rank, const expert_toy *t, expert_case *c) {
    double mine[3] = {*t->own.parameter[0].data, 0, 0};
    loom_comm *world = loom_rank_world(rank);
    int expert = loom_rank_index(rank) % 2;
    mine[1] = t->both || expert == 0 ? *t->own.parameter[1].data : 0;
    mine[2] = t->both ? *t->own.parameter[2].data : expert == 1 ? *t->own.parameter[1].data : 0;
    double most[3], least[3] = {-mine[0], -mine[1], -mine[2]};
    LOOM_TRY(loom_all_reduce(world, mine, most, 3, LOOM_F64, LOOM_MAX));
    LOOM_TRY(loom_all_reduce(world, least, least, 3, LOOM_F64, LOOM_MAX));
    CHECK(most[0] == -least[0], "the dense parameter differs between ranks");
    if (loom_rank_index(rank) == 0)
        for (int i = 0; i < 3; i++)
            c->values[i] = (float)(fabs(most[i]) > fabs(least[i]) ? most[i] : -least[i]);
    return LOOM_OK;
}

static loom_status train_experts(loom_rank *rank, small_run *run, expert_toy *t, expert_case *c) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    loom_dataloader loader = {.dataset = &run->dataset, .micro_batch_size = 1, .global_batch_size = 4};
    loom_optimizer_config optim = loom_optimizer_config_default();
    optim.lr = 0.05;
    optim.clip_grad = 0.7; /* below every norm here, so that a wrong one changes the weights */
    config.expert_model_parallel_size = c->ranks == 1 ? 1 : 2;
    config.num_distributed_optimizer_instances = c->instances ? c->instances : 1;
    config.ddp_config.use_distributed_optimizer = c->sharded;
    config.ddp_config.overlap_grad_reduce = config.ddp_config.overlap_param_gather = c->overlaps && c->sharded;
    config.ddp_config.average_in_collective = c->averages;
    config.ddp_config.num_distributed_optimizer_instances = config.num_distributed_optimizer_instances;
    t->own.module =
        (loom_module){.context = t, .materialize = materialize, .parameters = parameters, .forward = forward};
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run->fabric));
    LOOM_TRY(loom_fabric_launch(run->fabric));
    LOOM_TRY(loom_fabric_setup_module(run->fabric, &t->own.module, &run->parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(run->fabric, run->parallel, &optim, NULL, &run->optimizer));
    LOOM_TRY(loom_fabric_setup_dataloader(run->fabric, &loader, &run->batches));
    for (int step = 0; step < STEPS; step++) {
        double loss;
        loom_optimizer_outcome outcome;
        LOOM_TRY(loom_parallel_training_step(run->parallel, run->batches, &loss));
        LOOM_TRY(loom_optimizer_step(run->optimizer, &outcome));
        if (loom_rank_index(rank) == 0) {
            c->loss[step] = loss;
            c->norm[step] = outcome.grad_norm;
        }
    }
    LOOM_TRY(loom_parallel_parameters(run->parallel, &(loom_parameter *const *){NULL}, &(int64_t){0}));
    return collect_values(rank, t, c);
}

static loom_status run_experts(loom_rank *rank, void *argument) {
    expert_case *c = argument;
    expert_toy t = {.both = c->ranks == 1,
        .own = {.parameters = c->ranks == 1 ? 3 : 2, .uses = 2, .initial = 1, .use = {{0, 0}, {1, 0.5f}}}};
    toy_rows rows = {labels};
    small_run run = {.dataset = toy_dataset(&rows, STEPS * 4)};
    run.dataset.get = get_again;
    loom_status status = train_experts(rank, &run, &t, c);
    loom_batches_destroy(run.batches);
    loom_parallel_destroy(run.parallel);
    loom_fabric_destroy(run.fabric);
    return status;
}

static bool close_to(double found, double wanted) {
    return fabs(found - wanted) <= 3e-6 * fabs(wanted);
}

static void experts_on_four_ranks_follow_one_rank_that_has_all(void **state) {
    (void)state;
    expert_case one = {.ranks = 1},
                cases[] = {{.ranks = 4}, {.ranks = 4, .averages = true}, {.ranks = 4, .sharded = true},
                    {.ranks = 4, .sharded = true, .overlaps = true}, {.ranks = 4, .sharded = true, .averages = true},
                    {.ranks = 4, .sharded = true, .instances = 2}};
    must_run(1, run_experts, &one);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        expert_case *c = &cases[i];
        must_run(c->ranks, run_experts, c);
        for (int step = 0; step < STEPS; step++)
            if (!close_to(c->loss[step], one.loss[step]) || !close_to(c->norm[step], one.norm[step]))
                fail_msg("case %zu, step %d: loss %.9g, norm %.9g, expected %.9g and %.9g", i, step, c->loss[step],
                    c->norm[step], one.loss[step], one.norm[step]);
        for (int p = 0; p < 3; p++)
            if (!close_to(c->values[p], one.values[p]))
                fail_msg(
                    "case %zu: parameter %d is %.9g, expected %.9g", i, p, (double)c->values[p], (double)one.values[p]);
        if (i > 0 && !c->averages)
            for (int step = 0; step < STEPS; step++)
                assert_true(c->loss[step] == cases[0].loss[step] && c->norm[step] == cases[0].norm[step]);
    }
}

/* ---- a model without experts ---- */

static loom_status ask_for_experts(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    small_run run;
    (void)argument;
    config.expert_model_parallel_size = 2;
    loom_status status = small_start(rank, &config, &run);
    small_destroy(&run);
    CHECK(status == LOOM_ERR_CONFIG && strstr(loom_error_message(), "strategy.expert_model_parallel_size: found 2"),
        "%s", loom_error_message());
    return LOOM_OK;
}

static void a_model_without_experts_has_no_expert_parallelism(void **state) {
    (void)state;
    must_run(2, ask_for_experts, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts_are_reduced_over_those_who_share_them),
        cmocka_unit_test(a_nan_of_an_expert_is_named_on_all_ranks),
        cmocka_unit_test(an_expert_without_a_group_is_refused),
        cmocka_unit_test(experts_on_four_ranks_follow_one_rank_that_has_all),
        cmocka_unit_test(a_model_without_experts_has_no_expert_parallelism),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
