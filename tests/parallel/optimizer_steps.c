/* Loss scale, groups and schedules inside the optimizer's step, with gradients set by hand. Four ranks are a layout of
 * tensor 2 x data 2: ranks 0, 1 and ranks 2, 3 hold one model each. */
#include <math.h>
#include <string.h>

#include "optim/optim.h"
#include "parallel/ddp_parameters.h"
#include "parallel/support.h"

enum { LARGEST = 70 };

static loom_optimizer_config usual(void) {
    loom_optimizer_config config = loom_optimizer_config_default();
    config.lr = 1e-2;
    config.weight_decay = 0.5;
    return config;
}

typedef struct model {
    test_parameters set;
    loom__ddp *ddp;
    loom_optimizer *optimizer;
    loom_comm *tensor;
} model;

/* Parameters of the given sizes, which the tensor ranks hold shards of; the last is the same on both. */
static loom_status model_create(loom_rank *rank, const int64_t *counts, int64_t count,
    const loom_optimizer_config *config, const loom_lr_config *lr, loom_optimizer_conditions conditions, model *made) {
    int size = loom_comm_size(loom_rank_world(rank)), me = loom_rank_index(rank);
    int first = me / 2 * 2, tensor_ranks[] = {first, first + 1}, data_ranks[] = {me % 2, me % 2 + 2};
    loom_comm *data;
    *made = (model){0};
    test_parameters_create(&made->set, counts, count, 1.0f);
    made->set.parameters[count - 1].tensor_parallel = false;
    made->set.parameters[count - 1].decay = false;
    LOOM_TRY(loom_group_create(rank, "tensor", size == 4 ? tensor_ranks : &me, size == 4 ? 2 : 1, &made->tensor));
    LOOM_TRY(loom_group_create(rank, "data", size == 4 ? data_ranks : &me, size == 4 ? 2 : 1, &data));
    const loom__ddp_options ddp_options = loom__ddp_options_default();
    LOOM_TRY(loom__ddp_create(rank, &ddp_options, made->set.list, count, data, &made->ddp));
    const loom__optimizer_options options = {.steps = 20,
        .conditions = conditions,
        .model_parallel = made->tensor,
        .counts_replicated = loom_comm_rank(made->tensor) == 0};
    return loom__optimizer_create(rank, config, lr, made->ddp, &options, &made->optimizer);
}

static void model_destroy(model *made) {
    loom__optimizer_destroy(made->optimizer);
    loom__ddp_destroy(made->ddp);
    test_parameters_destroy(&made->set);
}

/* A backward whose gradients are `value` everywhere, and the data-parallel reduction. */
static loom_status backward(model *made, float value, int64_t bad_parameter) {
    loom__ddp_begin_step(made->ddp);
    loom__ddp_expect_last(made->ddp, true);
    for (int64_t p = made->set.count - 1; p >= 0; p--) {
        bool accumulate;
        float *grad = loom_parameter_begin_grad(made->set.list[p], &accumulate);
        for (int64_t e = 0; e < made->set.counts[p]; e++)
            grad[e] = value;
        if (p == bad_parameter)
            grad[made->set.counts[p] - 1] = INFINITY;
        loom__ddp_parameter_ready(made->ddp, made->set.list[p]);
    }
    return loom__ddp_finish(made->ddp);
}

static const loom_lr_config falling = {.schedule = "megatron-linear"};
static const int64_t counts[] = {LARGEST, 5, 3};

typedef struct snapshot {
    float weights[3][LARGEST], state[2][LARGEST];
    loom_lr_state lr;
} snapshot;

static void take(const model *made, snapshot *out) {
    memset(out, 0, sizeof *out);
    for (int p = 0; p < 3; p++)
        memcpy(out->weights[p], made->set.list[p]->data, (size_t)counts[p] * sizeof(float));
    for (int i = 0; i < 2; i++)
        memcpy(out->state[i], loom__optimizer_state_of(made->optimizer)->arrays[i].values, sizeof out->state[i]);
    out->lr = loom_optimizer_lr_state(made->optimizer);
}

static loom_status overflow(loom_rank *rank, void *argument) {
    (void)argument;
    const loom_optimizer_config config = usual();
    loom__scaler_options options = loom__scaler_options_default();
    loom_optimizer_outcome outcome;
    model made, plain;
    snapshot before, after;
    options.initial_scale = 1024;
    options.hysteresis = 1;
    LOOM_TRY(model_create(rank, counts, 3, &config, &falling, (loom_optimizer_conditions){0}, &made));
    LOOM_TRY(model_create(rank, counts, 3, &config, &falling, (loom_optimizer_conditions){0}, &plain));
    LOOM_TRY(loom__optimizer_set_scaler(made.optimizer, &options));
    CHECK(loom__optimizer_loss_scale(made.optimizer) == 1024, "the scale");
    for (int step = 0; step < 6; step++) {
        bool bad = step == 2 || step == 3;
        float scale = (float)loom__optimizer_loss_scale(made.optimizer);
        take(&made, &before);
        LOOM_TRY(backward(&made, scale * 0.25f, bad && loom_rank_index(rank) == 3 ? step - 2 : -1));
        LOOM_TRY(loom_optimizer_step(made.optimizer, &outcome));
        take(&made, &after);
        CHECK(outcome.skipped == bad, "step %d is %s", step, outcome.skipped ? "skipped" : "not skipped");
        CHECK(outcome.loss_scale == (double)scale && isnan(outcome.grad_norm) == bad, "step %d: norm %g at scale %g",
            step, outcome.grad_norm, outcome.loss_scale);
        CHECK((memcmp(&before, &after, sizeof before) == 0) == bad, "step %d: weights, moments or schedule", step);
        CHECK(outcome.step + outcome.skipped_steps == step + 1, "step %d: %lld updates, %lld skipped", step,
            (long long)outcome.step, (long long)outcome.skipped_steps);
        if (bad)
            continue;
        LOOM_TRY(backward(&plain, 0.25f, -1));
        LOOM_TRY(loom_optimizer_step(plain.optimizer, NULL));
        take(&plain, &before);
        CHECK(memcmp(&before, &after, sizeof before) == 0, "step %d: not as without a scale", step);
    }
    CHECK(outcome.skipped_steps == 2 && loom__optimizer_loss_scale(made.optimizer) == 256, "scale %g after %lld",
        loom__optimizer_loss_scale(made.optimizer), (long long)outcome.skipped_steps);
    model_destroy(&made);
    model_destroy(&plain);
    return LOOM_OK;
}

static void an_overflow_on_one_rank_makes_all_skip_and_changes_nothing_but_the_scale(void **state) {
    (void)state;
    must_run(4, overflow, NULL);
}

static loom_status at_the_floor(loom_rank *rank, void *argument) {
    (void)argument;
    const loom_optimizer_config config = usual();
    loom__scaler_options options = loom__scaler_options_default();
    model made;
    int me = loom_rank_index(rank);
    options.initial_scale = 4;
    options.min_scale = 2;
    LOOM_TRY(model_create(rank, counts, 3, &config, &falling, (loom_optimizer_conditions){0}, &made));
    LOOM_TRY(loom__optimizer_set_scaler(made.optimizer, &options));
    for (int step = 0; step < 2; step++) {
        LOOM_TRY(backward(&made, 1, me == 1 ? 0 : -1));
        LOOM_TRY(loom_optimizer_step(made.optimizer, NULL));
    }
    CHECK(loom__optimizer_loss_scale(made.optimizer) == 2, "scale %g", loom__optimizer_loss_scale(made.optimizer));
    LOOM_TRY(backward(&made, 1, me == 1 ? 0 : -1));
    loom_status status = loom_optimizer_step(made.optimizer, NULL);
    CHECK(status == (me % 2 ? LOOM_ERR_NUMERIC : LOOM_ERR_ABORTED), "rank %d: %s", me, loom_status_name(status));
    CHECK(strstr(loom_error_message(), "step 1: the gradients overflow although the loss scale is at its floor, 2 "
                                       "(min_loss_scale): the gradient of p0 has a NaN or an infinity"),
        "rank %d: %s", me, loom_error_message());
    model_destroy(&made);
    return LOOM_OK;
}

static void at_the_floor_the_run_stops_and_says_why(void **state) {
    (void)state;
    must_run(4, at_the_floor, NULL);
}

static loom_status constant_scale(loom_rank *rank, void *argument) {
    (void)argument;
    const loom_optimizer_config config = usual();
    const loom__scaler_options options = {.initial_scale = 128};
    loom_optimizer_outcome outcome = {0};
    model made;
    LOOM_TRY(model_create(rank, counts, 3, &config, &falling, (loom_optimizer_conditions){0}, &made));
    LOOM_TRY(loom__optimizer_set_scaler(made.optimizer, &options));
    for (int step = 0; step < 5; step++) {
        LOOM_TRY(backward(&made, 1, step < 4 ? 1 : -1));
        LOOM_TRY(loom_optimizer_step(made.optimizer, &outcome));
        CHECK(outcome.loss_scale == 128, "scale %g", outcome.loss_scale);
    }
    CHECK(outcome.step == 1 && outcome.skipped_steps == 4, "%lld updates", (long long)outcome.step);
    const loom__scaler_options none = {0};
    CHECK(loom__optimizer_set_scaler(made.optimizer, &none) == LOOM_ERR_CONFIG, "scale 0");
    model_destroy(&made);
    return LOOM_OK;
}

static void a_constant_scale_skips_and_stays(void **state) {
    (void)state;
    must_run(1, constant_scale, NULL);
}

static loom_status zeros(loom_rank *rank, void *argument) {
    (void)argument;
    loom_optimizer_config config = usual();
    loom_optimizer_outcome outcome;
    model made;
    LOOM_TRY(model_create(rank, counts, 3, &config, &falling, (loom_optimizer_conditions){0}, &made));
    LOOM_TRY(backward(&made, 1, -1));
    LOOM_TRY(loom_optimizer_step(made.optimizer, &outcome));
    CHECK(outcome.num_zeros_in_grad == -1, "%lld zeros without being asked", (long long)outcome.num_zeros_in_grad);
    model_destroy(&made);
    config.log_num_zeros_in_grad = true;
    LOOM_TRY(model_create(rank, counts, 3, &config, &falling, (loom_optimizer_conditions){0}, &made));
    LOOM_TRY(backward(&made, 1, -1));
    made.set.list[0]->grad[7] = 0;
    made.set.list[2]->grad[0] = -0.0f; /* replicated: one of the tensor ranks counts it */
    LOOM_TRY(loom_optimizer_step(made.optimizer, &outcome));
    CHECK(outcome.num_zeros_in_grad == 3, "%lld zeros", (long long)outcome.num_zeros_in_grad);
    model_destroy(&made);
    return LOOM_OK;
}

static void zeros_are_counted_once_over_the_model(void **state) {
    (void)state;
    must_run(4, zeros, NULL);
}

static bool is_first_two(const loom_parameter *parameter, void *context) {
    (void)context;
    return parameter->index < 2;
}

/* p0 is an embedding; the rates of p0 and p1 are halved; p2 does not decay. */
static loom_status grouped_model(
    loom_rank *rank, const loom_optimizer_config *config, const loom_lr_config *lr, model *made) {
    loom_optimizer_conditions conditions = {.scale_lr_cond = is_first_two, .lr_mult = 0.5};
    LOOM_TRY(model_create(rank, counts, 3, config, lr, conditions, made));
    loom__optimizer_destroy(made->optimizer);
    made->optimizer = NULL;
    made->set.parameters[0].embedding_or_output = true;
    const loom__optimizer_options options = {
        .steps = 20, .conditions = conditions, .model_parallel = made->tensor, .counts_replicated = true};
    return loom__optimizer_create(rank, config, lr, made->ddp, &options, &made->optimizer);
}

static bool near(double a, double b) {
    return fabs(a - b) <= 1e-15;
}

static loom_status check_groups(const model *made, const double expected[3][2]) {
    loom_optimizer_group groups[LOOM_OPTIMIZER_GROUPS];
    int64_t count;
    LOOM_TRY(loom_optimizer_groups(made->optimizer, groups, &count));
    CHECK(count == 3, "%lld groups", (long long)count);
    for (int i = 0; i < 3; i++)
        CHECK(groups[i].parameters == 1 && near(groups[i].lr, expected[i][0]) &&
                  near(groups[i].weight_decay, expected[i][1]) &&
                  near(groups[i].lr, groups[i].pre_mult_lr * groups[i].lr_mult) &&
                  near(groups[i].weight_decay, groups[i].pre_mult_wd * groups[i].wd_mult),
            "group %d: lr %g, weight decay %g", i, groups[i].lr, groups[i].weight_decay);
    return LOOM_OK;
}

static loom_status multiplied(loom_rank *rank, void *argument) {
    (void)argument;
    loom_optimizer_config config = usual();
    loom_lr_config lr = falling;
    model made, resumed;
    config.decoupled_lr = 4e-2;
    LOOM_TRY(grouped_model(rank, &config, &lr, &made));
    /* Groups come without decay first, then the scaled one, then the scaled and decoupled one. */
    LOOM_TRY(check_groups(&made, (const double[3][2]){{1e-2, 0}, {0.5e-2, 0.5}, {2e-2, 0.5}}));
    for (int step = 0; step < 10; step++) {
        LOOM_TRY(backward(&made, 0.25f, -1));
        LOOM_TRY(loom_optimizer_step(made.optimizer, NULL));
    }
    LOOM_TRY(check_groups(&made, (const double[3][2]){{0.5e-2, 0}, {0.25e-2, 0.5}, {1e-2, 0.5}}));
    /* Taken up again, and once more, the multiplier counts once. */
    loom_lr_state state = loom_optimizer_lr_state(made.optimizer);
    lr.use_checkpoint_opt_param_scheduler = true;
    LOOM_TRY(grouped_model(rank, &config, &lr, &resumed));
    for (int i = 0; i < 2; i++) {
        LOOM_TRY(loom_optimizer_load_lr_state(resumed.optimizer, &state));
        LOOM_TRY(check_groups(&resumed, (const double[3][2]){{0.5e-2, 0}, {0.25e-2, 0.5}, {1e-2, 0.5}}));
        state = loom_optimizer_lr_state(resumed.optimizer);
    }
    state.max_lr = 2e-2;
    LOOM_TRY(loom_optimizer_load_lr_state(resumed.optimizer, &state));
    LOOM_TRY(check_groups(&resumed, (const double[3][2]){{1e-2, 0}, {0.5e-2, 0.5}, {1e-2, 0.5}}));
    /* Without a field that decides, values must agree. */
    CHECK(loom_optimizer_load_lr_state(made.optimizer, &state) == LOOM_ERR_CONFIG, "other values were taken");
    LOOM_TRY(check_groups(&made, (const double[3][2]){{0.5e-2, 0}, {0.25e-2, 0.5}, {1e-2, 0.5}}));
    model_destroy(&made);
    model_destroy(&resumed);
    return LOOM_OK;
}

static void multipliers_and_the_rate_of_embeddings_count_once_also_after_a_load(void **state) {
    (void)state;
    must_run(1, multiplied, NULL);
}

static loom_status momentum(loom_rank *rank, void *argument) {
    (void)argument;
    loom_optimizer_config config = usual();
    const loom_lr_config constant = {.schedule = "megatron-constant"};
    model made;
    config.optimizer = "sgd";
    config.sgd_momentum = 0.5;
    config.weight_decay = 0;
    config.clip_grad = 0;
    LOOM_TRY(model_create(rank, counts, 3, &config, &constant, (loom_optimizer_conditions){0}, &made));
    double w = 1, b = 0;
    for (int step = 0; step < 3; step++) {
        LOOM_TRY(backward(&made, 1, -1));
        LOOM_TRY(loom_optimizer_step(made.optimizer, NULL));
        b = 0.5 * b + 2; /* two data-parallel ranks */
        w -= 1e-2 * b;
    }
    CHECK(fabs((double)made.set.list[0]->data[LARGEST - 1] - w) < 1e-6, "%.9g, expected %.9g",
        (double)made.set.list[0]->data[LARGEST - 1], w);
    CHECK(loom__optimizer_state_of(made.optimizer)->count == 1, "one buffer");
    model_destroy(&made);
    config.sgd_momentum = 0;
    LOOM_TRY(model_create(rank, counts, 3, &config, &constant, (loom_optimizer_conditions){0}, &made));
    LOOM_TRY(backward(&made, 1, -1));
    LOOM_TRY(loom_optimizer_step(made.optimizer, NULL));
    CHECK(fabs((double)made.set.list[1]->data[0] - 0.98) < 1e-6, "%.9g", (double)made.set.list[1]->data[0]);
    CHECK(loom__optimizer_state_of(made.optimizer)->count == 0, "no buffer");
    model_destroy(&made);
    return LOOM_OK;
}

static void sgd_keeps_a_buffer_only_where_it_has_momentum(void **state) {
    (void)state;
    must_run(4, momentum, NULL);
}

static int64_t first_of_tied(const loom_parameter *parameter, void *context) {
    return parameter->index == 0 && *(const int *)context == 1 ? 0 : parameter->shape[0];
}

static loom_status tied(loom_rank *rank, void *argument) {
    (void)argument;
    const int64_t one[] = {1, 1};
    int me = loom_rank_index(rank), alone = me;
    const loom_optimizer_config config = usual();
    const loom__ddp_options ddp_options = loom__ddp_options_default();
    const loom__optimizer_options options = {.steps = 20,
        .model_parallel = loom_rank_world(rank),
        .counted_elements = first_of_tied,
        .counted_context = &me};
    loom_optimizer_outcome outcome;
    loom_comm *data;
    model made = {0};
    test_parameters_create(&made.set, one, 2, 1.0f);
    LOOM_TRY(loom_group_create(rank, "alone", &alone, 1, &data));
    LOOM_TRY(loom__ddp_create(rank, &ddp_options, made.set.list, 2, data, &made.ddp));
    LOOM_TRY(loom__optimizer_create(rank, &config, &falling, made.ddp, &options, &made.optimizer));
    made.set.list[0]->grad[0] = 3;
    made.set.list[1]->grad[0] = me == 0 ? 4 : 0;
    LOOM_TRY(loom_optimizer_step(made.optimizer, &outcome));
    CHECK(outcome.grad_norm == 5, "norm %.9g", outcome.grad_norm);
    model_destroy(&made);
    return LOOM_OK;
}

static void a_tied_gradient_counts_once_in_the_norm(void **state) {
    (void)state;
    must_run(2, tied, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_overflow_on_one_rank_makes_all_skip_and_changes_nothing_but_the_scale),
        cmocka_unit_test(at_the_floor_the_run_stops_and_says_why),
        cmocka_unit_test(a_constant_scale_skips_and_stays),
        cmocka_unit_test(zeros_are_counted_once_over_the_model),
        cmocka_unit_test(multipliers_and_the_rate_of_embeddings_count_once_also_after_a_load),
        cmocka_unit_test(sgd_keeps_a_buffer_only_where_it_has_momentum),
        cmocka_unit_test(a_tied_gradient_counts_once_in_the_norm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
