/* Sharded and PyTorch-style buffers on parameters of the test's own: who holds what, what is under way when, and norms
 * that are known in advance. */
#include "ddp/ddp.h"
#include "optim/optim.h"
#include "parallel/ddp_parameters.h"
#include "parallel/support.h"
#include <math.h>
#include <string.h>

enum { COUNT = 6, LOOKS = 10000 };
static const int64_t counts[COUNT] = {300, 1, 700, 2000, 64, 129};

static const loom_optimizer_config adam = {.optimizer = "adam",
    .lr = 1e-2,
    .weight_decay = 0.1,
    .decoupled_weight_decay = true,
    .adam_beta1 = 0.9,
    .adam_beta2 = 0.95,
    .adam_eps = 1e-8,
    .clip_grad = 1.0};
static const loom_lr_config constant = {.schedule = "megatron-constant"};

static loom_status make_optimizer(loom_rank *rank, loom__ddp *ddp, loom_comm *group, loom_optimizer **optimizer) {
    const loom__optimizer_options options = {
        .steps = 100, .model_parallel = group, .counts_replicated = loom_comm_rank(group) == 0};
    return loom__optimizer_create(rank, &adam, &constant, ddp, &options, optimizer);
}

static void write_gradient(loom_parameter *parameter, int64_t count, float value) {
    bool accumulate;
    float *grad = loom_parameter_begin_grad(parameter, &accumulate);
    for (int64_t e = 0; e < count; e++)
        grad[e] = value;
}

/* Gradients whose sum over the ranks is element + 1000 * parameter times the sum of 1 … ranks. */
static void write_known(test_parameters *set, int64_t p, int me) {
    bool accumulate;
    float *grad = loom_parameter_begin_grad(set->list[p], &accumulate);
    for (int64_t e = 0; e < set->counts[p]; e++)
        grad[e] = (float)((e % 100 + 1000 * p) * (me + 1));
}

/* ---- shards ---- */

static loom_status sum_in_shards(loom_rank *rank, void *argument) {
    const loom__ddp_options *options = argument;
    int me = loom_rank_index(rank), size = loom_rank_count(rank);
    test_parameters set;
    loom__ddp *ddp;
    test_parameters_create(&set, counts, COUNT, 1.0f);
    LOOM_TRY(loom__ddp_create(rank, options, set.list, COUNT, loom_rank_world(rank), &ddp));
    const loom__ddp_view *view = loom__ddp_view_of(ddp);
    const loom__ddp_share *share = &view->share[LOOM__DDP_DENSE];
    CHECK(view->sharded && share->shards == size && share->shard == me, "shard %lld of %lld", (long long)share->shard,
        (long long)share->shards);
    for (int step = 0; step < 3; step++) {
        loom__ddp_begin_step(ddp);
        loom__ddp_expect_last(ddp, true);
        for (int64_t p = COUNT - 1; p >= 0; p--) {
            write_known(&set, p, me);
            loom__ddp_parameter_ready(ddp, set.list[p]);
        }
        LOOM_TRY(loom__ddp_finish(ddp));
        float factor = (float)(size * (size + 1)) / 2 / (float)(options->average_in_collective ? size : 1);
        for (int whole = 0; whole < 2; whole++) {
            if (whole)
                LOOM_TRY(loom__ddp_gather_gradients(ddp));
            for (int64_t place = 0; place < COUNT; place++) {
                int64_t p = COUNT - 1 - place, start = view->places[place].start;
                int64_t first = whole ? 0 : view->parts[place].start - start;
                int64_t count = whole ? counts[p] : view->parts[place].count;
                for (int64_t e = first; e < first + count; e++)
                    CHECK(set.list[p]->grad[e] == (float)(e % 100 + 1000 * p) * factor,
                        "step %d, p%lld[%lld] is %g on rank %d", step, (long long)p, (long long)e,
                        (double)set.list[p]->grad[e], me);
            }
        }
    }
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void a_shard_holds_the_sum_of_its_part_and_all_get_it_when_asked(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int64_t bucket_size = 1; bucket_size <= 4000; bucket_size += 1333) {
            loom__ddp_options options = {.overlap_grad_reduce = bucket_size % 2,
                .bucket_size = bucket_size,
                .check_for_nan_in_grad = true,
                .average_in_collective = ranks != 3 && bucket_size > 2000,
                .use_distributed_optimizer = true};
            must_run(ranks, sum_in_shards, &options);
        }
}

static loom_status measure_state(loom_rank *rank, void *argument) {
    const int64_t large[] = {40000, 250, 60000};
    size_t *bytes = argument;
    const loom__ddp_options options = {.use_distributed_optimizer = loom_rank_count(rank) > 1};
    test_parameters set;
    loom__ddp *ddp;
    loom_optimizer *optimizer;
    test_parameters_create(&set, large, 3, 1.0f);
    LOOM_TRY(loom__ddp_create(rank, &options, set.list, 3, loom_rank_world(rank), &ddp));
    LOOM_TRY(make_optimizer(rank, ddp, loom_rank_world(rank), &optimizer));
    int64_t mine = (int64_t)loom_optimizer_state_bytes(optimizer), most = 0;
    LOOM_TRY(loom_all_reduce(loom_rank_world(rank), &mine, &most, 1, LOOM_I64, LOOM_MAX));
    if (loom_rank_index(rank) == 0)
        *bytes = (size_t)most;
    loom__optimizer_destroy(optimizer);
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void four_ranks_keep_a_quarter_of_the_state_each(void **state) {
    (void)state;
    size_t one, four;
    must_run(1, measure_state, &one);
    must_run(4, measure_state, &four);
    printf("optimizer state: %zu bytes on one rank, at most %zu on each of four\n", one, four);
    assert_true(fabs((double)four / (double)one - 0.25) < 0.02 * 0.25);
    assert_true(one >= 2 * 100250 * sizeof(float));
}

/* Ranks 0, 1 are the first stage, 2, 3 the last; each stage is a data-parallel group of two. */
static loom_status train_tied(loom_rank *rank, void *argument) {
    (void)argument;
    const int64_t sizes[] = {1};
    int me = loom_rank_index(rank), stage = me / 2, stage_ranks[] = {stage * 2, stage * 2 + 1},
        end_ranks[] = {me % 2, me % 2 + 2};
    const loom__ddp_options options = {
        .average_in_collective = true, .use_distributed_optimizer = true, .overlap_param_gather = true};
    loom_comm *dp, *ends, *world = loom_rank_world(rank);
    test_parameters set;
    loom__ddp *ddp;
    loom_optimizer *optimizer;
    loom_optimizer_outcome outcome;
    test_parameters_create(&set, sizes, 1, 0.25f);
    set.parameters[0].shared_ends = true;
    set.parameters[0].tensor_parallel = false;
    LOOM_TRY(loom_group_create(rank, "data", stage_ranks, 2, &dp));
    LOOM_TRY(loom_group_create(rank, "ends", end_ranks, 2, &ends));
    LOOM_TRY(loom__ddp_create(rank, &options, set.list, 1, dp, &ddp));
    const loom__optimizer_options made = {.steps = 100, .model_parallel = world, .counts_replicated = stage == 0};
    LOOM_TRY(loom__optimizer_create(rank, &adam, &constant, ddp, &made, &optimizer));
    for (int step = 0; step < 10; step++) {
        loom__ddp_begin_step(ddp);
        loom__ddp_expect_last(ddp, true);
        write_gradient(set.list[0], 1, (float)(me + 1 + step));
        loom__ddp_parameter_ready(ddp, set.list[0]);
        LOOM_TRY(loom__ddp_finish(ddp));
        LOOM_TRY(loom_all_reduce(ends, set.list[0]->grad, set.list[0]->grad, 1, LOOM_F32, LOOM_SUM));
        LOOM_TRY(loom_optimizer_step(optimizer, &outcome));
        CHECK(outcome.grad_norm == 5.0 + 2 * step, "step %d: the norm is %.9g on rank %d", step, outcome.grad_norm, me);
        LOOM_TRY(loom_parameter_ready(set.list[0]));
        float mine = *set.list[0]->data, all[4];
        LOOM_TRY(loom_all_gather(world, &mine, all, 1, LOOM_F32));
        for (int r = 0; r < 4; r++)
            CHECK(memcmp(&all[r], &mine, sizeof mine) == 0, "step %d: ranks %d and %d differ", step, me, r);
        CHECK(mine != 0.25f, "step %d: nothing was updated", step);
    }
    loom__optimizer_destroy(optimizer);
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void tied_copies_of_two_stages_have_one_norm_and_stay_equal(void **state) {
    (void)state;
    must_run(4, train_tied, NULL);
}

/* ---- the order of events ---- */

/* Whether the gradient of parameter p becomes the sum over all ranks on each of them. What the ranks tell each other
 * goes over another group; it moves the reduction on and nothing else. All leave the loop together. */
static loom_status await_sum(loom_comm *other, const test_parameters *set, int64_t p, int size, bool *reduced) {
    float wanted = (float)(1000 * p) * (float)(size * (size + 1)) / 2;
    *reduced = false;
    for (int i = 0; i < LOOKS && !*reduced; i++) {
        int64_t missing = set->list[p]->grad[0] != wanted;
        LOOM_TRY(loom_all_reduce(other, &missing, &missing, 1, LOOM_I64, LOOM_MAX));
        *reduced = missing == 0;
    }
    return loom_agree(other, *reduced ? LOOM_OK : loom_fail(LOOM_ERR_TIMEOUT, "not reduced"));
}

/* The same of all values of a parameter, which nobody waits for by name. */
static loom_status await_values(loom_comm *other, const loom_parameter *parameter, float wanted, int looks) {
    for (int i = 0; i < looks; i++) {
        int64_t missing = 0;
        for (int64_t e = 0; e < parameter->shape[0]; e++)
            missing += parameter->data[e] != wanted;
        LOOM_TRY(loom_all_reduce(other, &missing, &missing, 1, LOOM_I64, LOOM_MAX));
        if (!missing)
            return LOOM_OK;
    }
    return loom_fail(LOOM_ERR_TIMEOUT, "%s is not gathered", parameter->name);
}

/* p0 to p2 are chunk 0, the others chunk 1, with a bucket each. */
static loom_status start_by_chunks(loom_rank *rank, void *argument) {
    const loom__ddp_options *options = argument;
    int me = loom_rank_index(rank), size = loom_rank_count(rank), all[] = {0, 1, 2};
    loom_comm *data, *other = loom_rank_world(rank);
    test_parameters set;
    loom__ddp *ddp;
    bool reduced;
    test_parameters_create(&set, counts, COUNT, 1.0f);
    for (int64_t p = 0; p < COUNT; p++)
        set.list[p]->chunk = p / 3;
    LOOM_TRY(loom_group_create(rank, "data", all, size, &data));
    LOOM_TRY(loom__ddp_create(rank, options, set.list, COUNT, data, &ddp));
    const loom__ddp_view *view = loom__ddp_view_of(ddp);
    if (options->gathers_by_chunk) {
        for (int64_t place = 0; place < COUNT; place++)
            for (int64_t e = 0; e < view->parts[place].count; e++)
                view->data[view->parts[place].start + e] = 7;
        LOOM_TRY(loom__ddp_gather(ddp));
        loom__ddp_sync_parameters(ddp, 0);
        for (int64_t p = 0; p < 3; p++)
            LOOM_TRY(await_values(other, set.list[p], 7, LOOKS));
        CHECK(await_values(other, set.list[3], 7, 20) == LOOM_ERR_TIMEOUT, "chunk 1 is gathered before its time");
        loom__ddp_sync_parameters(ddp, 1);
        LOOM_TRY(await_values(other, set.list[COUNT - 1], 7, LOOKS));
        LOOM_TRY(loom__ddp_wait_parameters(ddp));
    }
    loom__ddp_begin_step(ddp);
    for (int64_t chunk = 1; chunk >= 0; chunk--) {
        int64_t first = 3 * chunk;
        for (int64_t p = first + 2; p >= first; p--) {
            write_known(&set, p, me);
            loom__ddp_parameter_ready(ddp, set.list[p]);
        }
        LOOM_TRY(loom_barrier(other));
        CHECK(set.list[first + 2]->grad[0] == (float)(1000 * (first + 2) * (me + 1)), "reduced before its time");
        loom__ddp_sync_gradients(ddp, chunk);
        if (!options->use_distributed_optimizer)
            LOOM_TRY(await_sum(other, &set, first + 2, size, &reduced));
    }
    LOOM_TRY(loom__ddp_finish(ddp));
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void collectives_of_a_chunk_start_when_a_schedule_says_so(void **state) {
    (void)state;
    loom__ddp_options options = {.overlap_grad_reduce = true, .bucket_size = 1};
    must_run(3, start_by_chunks, &options);
    options.use_distributed_optimizer = options.overlap_param_gather = true;
    options.align_param_gather = options.gathers_by_chunk = true;
    must_run(3, start_by_chunks, &options);
}

static loom_status reduce_during_backward(loom_rank *rank, void *argument) {
    const loom__ddp_options *options = argument;
    int me = loom_rank_index(rank), size = loom_rank_count(rank), all[] = {0, 1, 2};
    loom_comm *data;
    test_parameters set;
    loom__ddp *ddp;
    bool reduced;
    test_parameters_create(&set, counts, COUNT, 1.0f);
    LOOM_TRY(loom_group_create(rank, "data", all, size, &data));
    LOOM_TRY(loom__ddp_create(rank, options, set.list, COUNT, data, &ddp));
    loom__ddp_begin_step(ddp);
    for (int microbatch = 0; microbatch < 2; microbatch++) {
        loom__ddp_expect_last(ddp, microbatch == 1);
        for (int64_t p = COUNT - 1; p >= 1; p--) {
            write_known(&set, p, me);
            loom__ddp_parameter_ready(ddp, set.list[p]);
        }
    }
    /* p0 has no gradient yet: the backward is not over. */
    if (options->overlap_grad_reduce)
        LOOM_TRY(await_sum(loom_rank_world(rank), &set, COUNT - 1, size, &reduced));
    else
        CHECK(set.list[COUNT - 1]->grad[0] == (float)(1000 * (COUNT - 1) * (me + 1)), "reduced before its time");
    write_known(&set, 0, me);
    loom__ddp_parameter_ready(ddp, set.list[0]);
    LOOM_TRY(loom__ddp_finish(ddp));
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void buckets_are_reduced_before_the_backward_has_ended(void **state) {
    (void)state;
    loom__ddp_options variants[] = {
        {.overlap_grad_reduce = true, .bucket_size = 100},
        {.overlap_grad_reduce = true, .bucket_size = 100, .first_bucket_size = 10},
        {.overlap_grad_reduce = false, .bucket_size = 100},
    };
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++)
        must_run(3, reduce_during_backward, &variants[i]);
}

static loom_status forward_while_gathering(loom_rank *rank, void *argument) {
    const loom__ddp_options *options = argument;
    int me = loom_rank_index(rank);
    test_parameters set;
    loom__ddp *ddp;
    test_parameters_create(&set, counts, COUNT, 1.0f);
    LOOM_TRY(loom__ddp_create(rank, options, set.list, COUNT, loom_rank_world(rank), &ddp));
    const loom__ddp_view *view = loom__ddp_view_of(ddp);
    for (int step = 0; step < 4; step++) {
        /* An update: each member writes its part. */
        for (int64_t place = 0; place < COUNT; place++)
            for (int64_t e = 0; e < view->parts[place].count; e++)
                view->data[view->parts[place].start + e] = (float)(100 * step + place + 1);
        LOOM_TRY(loom__ddp_gather(ddp));
        bool waits = options->overlap_param_gather;
        for (int64_t p = 0; p < COUNT; p++)
            CHECK(!set.list[p]->await_data == !waits, "step %d: p%lld is %s", step, (long long)p,
                waits ? "not awaited" : "awaited");
        for (int64_t p = 0; p < COUNT; p++) {
            LOOM_TRY(loom_parameter_ready(set.list[p]));
            for (int64_t e = 0; e < counts[p]; e++)
                CHECK(set.list[p]->data[e] == (float)(100 * step + COUNT - p), "step %d: p%lld[%lld] is %g on rank %d",
                    step, (long long)p, (long long)e, (double)set.list[p]->data[e], me);
            /* What comes later in the forward has not been waited for. */
            CHECK(!waits || p == COUNT - 1 || set.list[COUNT - 1]->await_data, "step %d: p%lld waits for the last one",
                step, (long long)p);
        }
        LOOM_TRY(loom__ddp_wait_parameters(ddp));
    }
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void a_forward_waits_for_the_parameters_that_it_reads_and_no_others(void **state) {
    (void)state;
    loom__ddp_options options = {.overlap_grad_reduce = true, .bucket_size = 1, .use_distributed_optimizer = true};
    must_run(3, forward_while_gathering, &options);
    options.overlap_param_gather = true;
    must_run(3, forward_while_gathering, &options);
    options.align_param_gather = true;
    must_run(3, forward_while_gathering, &options);
}

static loom_status leave_while_gathering(loom_rank *rank, void *argument) {
    const loom__ddp_options *options = argument;
    test_parameters set;
    loom__ddp *ddp;
    test_parameters_create(&set, counts, COUNT, 1.0f);
    LOOM_TRY(loom__ddp_create(rank, options, set.list, COUNT, loom_rank_world(rank), &ddp));
    LOOM_TRY(loom__ddp_gather(ddp));
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void a_buffer_may_go_while_its_parameters_are_gathered(void **state) {
    (void)state;
    loom__ddp_options options = {
        .overlap_grad_reduce = true, .bucket_size = 1, .use_distributed_optimizer = true, .overlap_param_gather = true};
    must_run(3, leave_while_gathering, &options);
}

/* ---- instances ---- */

static loom_status share_badly(loom_rank *rank, void *argument) {
    (void)argument;
    int me = loom_rank_index(rank), scattered[] = {me % 2, me % 2 + 2};
    loom__ddp_options options = {.use_distributed_optimizer = true};
    test_parameters set;
    loom__ddp *ddp = NULL;
    test_parameters_create(&set, counts, COUNT, 1.0f);
    LOOM_TRY(loom_group_create(rank, "scattered", scattered, 2, &options.instance));
    loom_status status = loom__ddp_create(rank, &options, set.list, COUNT, loom_rank_world(rank), &ddp);
    if (me == 1 || me == 2)
        CHECK(status == LOOM_ERR_ARGUMENT && strstr(loom_error_message(), "expected consecutive places"), "%s",
            loom_error_message());
    loom__ddp_destroy(status ? NULL : ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void instances_that_are_not_consecutive_are_refused(void **state) {
    (void)state;
    must_run(4, share_badly, NULL);
}

/* ---- PyTorch's rules ---- */

typedef struct unused_plan {
    loom__ddp_options options;
    bool at_once; /* the bucket of the unused parameter does not hold up the others */
} unused_plan;

/* p4 has no gradient; a tape of p0 … p3 and p5 is alive. */
static loom_status leave_one_out(loom_rank *rank, void *argument) {
    const unused_plan *plan = argument;
    int me = loom_rank_index(rank), size = loom_rank_count(rank), all[] = {0, 1, 2};
    loom_comm *data;
    test_parameters set;
    loom__ddp *ddp;
    bool reduced = true;
    test_parameters_create(&set, counts, COUNT, 1.0f);
    LOOM_TRY(loom_group_create(rank, "data", all, size, &data));
    LOOM_TRY(loom__ddp_create(rank, &plan->options, set.list, COUNT, data, &ddp));
    for (int step = 0; step < 3; step++) {
        loom__ddp_begin_step(ddp);
        loom__ddp_expect_last(ddp, true);
        for (int64_t p = 0; p < COUNT; p++)
            set.list[p]->pending_uses = p != 4;
        for (int64_t p = COUNT - 1; p >= 0; p--) {
            if (p == 4)
                continue;
            if (p == 0 && step > 0) {
                loom_status status =
                    plan->at_once ? await_sum(loom_rank_world(rank), &set, 3, size, &reduced) : LOOM_OK;
                CHECK(!status, "step %d: the unused parameter stalls those behind it", step);
                CHECK(plan->at_once || set.list[3]->grad[0] == (float)(3000 * (me + 1)), "reduced before its time");
            }
            write_known(&set, p, me);
            set.list[p]->pending_uses = 0;
            loom__ddp_parameter_ready(ddp, set.list[p]);
        }
        LOOM_TRY(loom__ddp_finish(ddp));
        for (int64_t e = 0; e < counts[4]; e++)
            CHECK(
                set.list[4]->grad[e] == 0, "the gradient of the unused parameter is %g", (double)set.list[4]->grad[e]);
        CHECK(set.list[0]->grad[1] == (float)(size * (size + 1)) / 2, "the sum is %g", (double)set.list[0]->grad[1]);
    }
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void an_unused_parameter_stalls_no_bucket_where_that_is_asked(void **state) {
    (void)state;
    const loom__ddp_options each = {.overlap_grad_reduce = true, .bucket_size = 1, .first_bucket_size = 1};
    unused_plan plans[] = {{each, false}, {each, true}, {each, true}};
    plans[1].options.find_unused_parameters = true;
    plans[2].options.static_graph = true;
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++)
        must_run(3, leave_one_out, &plans[i]);
}

static loom_status change_the_graph(loom_rank *rank, void *argument) {
    (void)argument;
    const loom__ddp_options options = {
        .overlap_grad_reduce = true, .bucket_size = 1, .first_bucket_size = 1, .static_graph = true};
    test_parameters set;
    loom__ddp *ddp;
    loom_status status = LOOM_OK;
    test_parameters_create(&set, counts, COUNT, 1.0f);
    LOOM_TRY(loom__ddp_create(rank, &options, set.list, COUNT, loom_rank_world(rank), &ddp));
    for (int step = 0; step < 2; step++) {
        loom__ddp_begin_step(ddp);
        loom__ddp_expect_last(ddp, true);
        for (int64_t p = COUNT - 1; p >= 0; p--) {
            if (p == 2 && step == 0)
                continue;
            /* In the second step the memory of p2 is being reduced already. */
            if (p != 2)
                write_known(&set, p, 0);
            loom__ddp_parameter_ready(ddp, set.list[p]);
        }
        status = loom__ddp_finish(ddp);
        CHECK(step == 1 || !status, "%s", loom_error_message());
    }
    CHECK(status == LOOM_ERR_STATE && strstr(loom_error_message(), "p2 has a gradient, but had none in the first step"),
        "%s", loom_error_message());
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void a_static_graph_that_changes_is_an_error(void **state) {
    (void)state;
    must_run(2, change_the_graph, NULL);
}

static loom_status reduce_by_hand(loom_rank *rank, void *argument) {
    (void)argument;
    int me = loom_rank_index(rank);
    const loom__ddp_options options = {
        .overlap_grad_reduce = true, .bucket_size = 1, .first_bucket_size = 1, .leave_reduction = true};
    test_parameters set;
    loom__ddp *ddp;
    test_parameters_create(&set, counts, COUNT, 1.0f);
    LOOM_TRY(loom__ddp_create(rank, &options, set.list, COUNT, loom_rank_world(rank), &ddp));
    loom__ddp_begin_step(ddp);
    loom__ddp_expect_last(ddp, true);
    for (int64_t p = COUNT - 1; p >= 0; p--) {
        write_known(&set, p, me);
        loom__ddp_parameter_ready(ddp, set.list[p]);
    }
    LOOM_TRY(loom__ddp_finish(ddp));
    CHECK(set.list[3]->grad[0] == (float)(3000 * (me + 1)), "found %g, expected this rank's own gradient",
        (double)set.list[3]->grad[0]);
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return LOOM_OK;
}

static void without_the_hook_every_rank_keeps_its_own_gradient(void **state) {
    (void)state;
    must_run(2, reduce_by_hand, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_shard_holds_the_sum_of_its_part_and_all_get_it_when_asked),
        cmocka_unit_test(four_ranks_keep_a_quarter_of_the_state_each),
        cmocka_unit_test(tied_copies_of_two_stages_have_one_norm_and_stay_equal),
        cmocka_unit_test(buckets_are_reduced_before_the_backward_has_ended),
        cmocka_unit_test(collectives_of_a_chunk_start_when_a_schedule_says_so),
        cmocka_unit_test(a_forward_waits_for_the_parameters_that_it_reads_and_no_others),
        cmocka_unit_test(a_buffer_may_go_while_its_parameters_are_gathered),
        cmocka_unit_test(instances_that_are_not_consecutive_are_refused),
        cmocka_unit_test(an_unused_parameter_stalls_no_bucket_where_that_is_asked),
        cmocka_unit_test(a_static_graph_that_changes_is_an_error),
        cmocka_unit_test(without_the_hook_every_rank_keeps_its_own_gradient),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
