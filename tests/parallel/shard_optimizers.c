/* Every optimizer on shards beside the same on whole buffers, and what a bad gradient in one shard does to all ranks.
 */
#include "optim/optim.h"
#include "parallel/ddp_parameters.h"
#include "parallel/support.h"
#include <math.h>
#include <string.h>

enum { COUNT = 5, RANKS = 4, ELEMENTS = 301 + 1 + 777 + 2003 + 65 };
static const int64_t counts[COUNT] = {301, 1, 777, 2003, 65};

static const loom_optimizer_config adam = {.optimizer = "adam",
    .lr = 1e-2,
    .weight_decay = 0.1,
    .decoupled_weight_decay = true,
    .adam_beta1 = 0.9,
    .adam_beta2 = 0.95,
    .adam_eps = 1e-8,
    .clip_grad = 1.0};
static const loom_lr_config constant = {.schedule = "megatron-constant"};

/* One rank's parameters, whose gradients are reduced over all ranks. */
typedef struct model {
    test_parameters set;
    loom__ddp *ddp;
    loom_optimizer *optimizer;
} model;

/* instances 0: nothing is shared out. */
static loom_status model_create(
    loom_rank *rank, const loom_optimizer_config *config, int instances, bool checks, model *made) {
    int me = loom_rank_index(rank), size = instances ? RANKS / instances : RANKS, members[RANKS];
    loom__ddp_options options = {.overlap_grad_reduce = true,
        .bucket_size = 600,
        .check_for_nan_in_grad = checks,
        .use_distributed_optimizer = instances > 0,
        .overlap_param_gather = instances > 0};
    loom_comm *shards, *alone;
    *made = (model){0};
    for (int i = 0; i < size; i++)
        members[i] = me / size * size + i;
    LOOM_TRY(loom_group_create(rank, "instance", members, size, &shards));
    LOOM_TRY(loom_group_create(rank, "alone", &me, 1, &alone));
    options.instance = shards;
    test_parameters_create(&made->set, counts, COUNT, 0.5f);
    made->set.parameters[2].decay = false;
    made->set.parameters[3].embedding_or_output = true;
    LOOM_TRY(loom__ddp_create(rank, &options, made->set.list, COUNT, loom_rank_world(rank), &made->ddp));
    const loom__optimizer_options wanted = {
        .steps = 20, .model_parallel = instances ? shards : alone, .counts_replicated = true};
    return loom__optimizer_create(rank, config, &constant, made->ddp, &wanted, &made->optimizer);
}

static void model_destroy(model *made) {
    loom__optimizer_destroy(made->optimizer);
    loom__ddp_destroy(made->ddp);
    test_parameters_destroy(&made->set);
}

/* A backward and its reduction. bad: a place in p3 whose gradient is infinite on rank 1; -1 = none. */
static loom_status backward(model *made, int me, int step, float scale, int64_t bad) {
    loom__ddp_begin_step(made->ddp);
    loom__ddp_expect_last(made->ddp, true);
    for (int64_t p = COUNT - 1; p >= 0; p--) {
        bool accumulate;
        float *grad = loom_parameter_begin_grad(made->set.list[p], &accumulate);
        for (int64_t e = 0; e < counts[p]; e++)
            grad[e] = scale * sinf((float)(e + 37 * p + 5 * me + 11 * step));
        if (p == 3 && bad >= 0 && me == 1)
            grad[bad] = INFINITY;
        loom__ddp_parameter_ready(made->ddp, made->set.list[p]);
    }
    return loom__ddp_finish(made->ddp);
}

static loom_status read_weights(model *made, float *all) {
    LOOM_TRY(loom__ddp_wait_parameters(made->ddp));
    for (int64_t p = 0; p < COUNT; p++) {
        memcpy(all, made->set.list[p]->data, (size_t)counts[p] * sizeof *all);
        all += counts[p];
    }
    return LOOM_OK;
}

static loom_status compare(loom_rank *rank, void *argument) {
    const loom_optimizer_config *config = argument;
    int me = loom_rank_index(rank);
    float wanted[ELEMENTS], found[ELEMENTS];
    for (int instances = 1; instances <= RANKS; instances *= 2) {
        model plain, sharded;
        loom_optimizer_outcome a, b;
        LOOM_TRY(model_create(rank, config, 0, true, &plain));
        LOOM_TRY(model_create(rank, config, instances, true, &sharded));
        for (int step = 0; step < 6; step++) {
            LOOM_TRY(backward(&plain, me, step, 0.1f, -1));
            LOOM_TRY(loom_optimizer_step(plain.optimizer, &a));
            LOOM_TRY(backward(&sharded, me, step, 0.1f, -1));
            LOOM_TRY(loom_optimizer_step(sharded.optimizer, &b));
            LOOM_TRY(read_weights(&plain, wanted));
            LOOM_TRY(read_weights(&sharded, found));
            CHECK(a.grad_norm == b.grad_norm && a.num_zeros_in_grad == b.num_zeros_in_grad,
                "%d instances, step %d: norm %.17g with %lld zeros, the plain one %.17g with %lld", instances, step,
                b.grad_norm, (long long)b.num_zeros_in_grad, a.grad_norm, (long long)a.num_zeros_in_grad);
            CHECK(memcmp(wanted, found, sizeof wanted) == 0, "%d instances, step %d: the weights differ", instances,
                step);
        }
        CHECK(loom_optimizer_state_bytes(plain.optimizer) == 0 || instances == RANKS ||
                  loom_optimizer_state_bytes(sharded.optimizer) < loom_optimizer_state_bytes(plain.optimizer),
            "%d instances keep %zu bytes a rank", instances, loom_optimizer_state_bytes(sharded.optimizer));
        model_destroy(&plain);
        model_destroy(&sharded);
    }
    return LOOM_OK;
}

static void every_optimizer_has_the_same_bits_in_shards(void **state) {
    (void)state;
    loom_optimizer_config configs[8];
    for (int i = 0; i < 8; i++)
        configs[i] = adam;
    configs[1].decoupled_weight_decay = false;
    configs[2].amsgrad = true;
    configs[3].exp_avg_dtype = configs[3].exp_avg_sq_dtype = "bf16";
    configs[4].decoupled_lr = 5e-2;
    configs[4].log_num_zeros_in_grad = true;
    configs[5].clip_norm_type = "inf";
    configs[6].optimizer = "sgd";
    configs[6].sgd_momentum = 0.9;
    configs[7].optimizer = "sgd";
    configs[7].clip_norm_type = "1";
    for (int i = 0; i < 8; i++)
        must_run(RANKS, compare, &configs[i]);
}

/* The sum of an element that is infinite on rank 1 lies with the rank that has its shard, and with nobody else. */
static loom_status overflow(loom_rank *rank, void *argument) {
    (void)argument;
    int me = loom_rank_index(rank);
    float before[ELEMENTS], after[ELEMENTS];
    loom__scaler_options options = loom__scaler_options_default();
    model made;
    loom_optimizer_outcome outcome;
    options.initial_scale = 1024;
    options.hysteresis = 1;
    LOOM_TRY(model_create(rank, &adam, 1, false, &made));
    LOOM_TRY(loom__optimizer_set_scaler(made.optimizer, &options));
    for (int step = 0; step < 5; step++) {
        bool bad = step == 1 || step == 3;
        float scale = (float)loom__optimizer_loss_scale(made.optimizer);
        LOOM_TRY(read_weights(&made, before));
        LOOM_TRY(backward(&made, me, step, scale, bad ? 500 * step : -1));
        LOOM_TRY(loom_optimizer_step(made.optimizer, &outcome));
        LOOM_TRY(read_weights(&made, after));
        CHECK(outcome.skipped == bad, "rank %d: step %d is %s", me, step, outcome.skipped ? "skipped" : "not skipped");
        CHECK((memcmp(before, after, sizeof before) == 0) == bad, "rank %d: the weights of step %d", me, step);
    }
    CHECK(outcome.skipped_steps == 2 && outcome.step == 3, "%lld skipped, %lld done", (long long)outcome.skipped_steps,
        (long long)outcome.step);
    CHECK(loom__optimizer_loss_scale(made.optimizer) == 256, "scale %g", loom__optimizer_loss_scale(made.optimizer));
    model_destroy(&made);
    return LOOM_OK;
}

static void an_overflow_in_one_shard_makes_all_ranks_skip(void **state) {
    (void)state;
    must_run(RANKS, overflow, NULL);
}

typedef struct bad_step {
    bool checks; /* before the reduction */
    const char *words;
} bad_step;

static loom_status fail_together(loom_rank *rank, void *argument) {
    const bad_step *bad = argument;
    int me = loom_rank_index(rank);
    float before[ELEMENTS], after[ELEMENTS];
    model made;
    LOOM_TRY(model_create(rank, &adam, 2, bad->checks, &made));
    LOOM_TRY(backward(&made, me, 0, 1, -1));
    LOOM_TRY(loom_optimizer_step(made.optimizer, NULL));
    LOOM_TRY(read_weights(&made, before));
    loom_status status = backward(&made, me, 1, 1, 1200);
    CHECK(!status == !bad->checks, "rank %d: the reduction says %s", me, loom_status_name(status));
    if (!status)
        status = loom_optimizer_step(made.optimizer, NULL);
    CHECK(status == LOOM_ERR_NUMERIC || status == LOOM_ERR_ABORTED, "rank %d: %s", me, loom_status_name(status));
    CHECK(strstr(loom_error_message(), bad->words), "rank %d: %s", me, loom_error_message());
    LOOM_TRY(read_weights(&made, after));
    CHECK(memcmp(before, after, sizeof before) == 0, "rank %d: the weights have changed", me);
    LOOM_TRY(backward(&made, me, 2, 1, -1));
    LOOM_TRY(loom_optimizer_step(made.optimizer, NULL));
    model_destroy(&made);
    return LOOM_OK;
}

static void a_bad_gradient_in_one_shard_is_named_on_all_ranks(void **state) {
    (void)state;
    must_run(RANKS, fail_together,
        &(bad_step){true, "the gradient of p3 has a NaN or an infinity before its reduction (bucket "});
    must_run(RANKS, fail_together, &(bad_step){false, "step 2: the gradient of p3 has a NaN or an infinity (rank "});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_optimizer_has_the_same_bits_in_shards),
        cmocka_unit_test(an_overflow_in_one_shard_makes_all_ranks_skip),
        cmocka_unit_test(a_bad_gradient_in_one_shard_is_named_on_all_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
