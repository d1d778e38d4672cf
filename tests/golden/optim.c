/* Schedules, AdamW and clipping against the numbers of Megatron-Core and PyTorch. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "optim/norm.h"
#include "optim/optim.h"
#include "optim/scaler.h"
#include "optim/schedule.h"
#include "parallel/ddp_parameters.h"
#include "support/golden.h"

static double number(const json_t *value) {
    if (json_is_string(value))
        return strcmp(json_string_value(value), "inf") == 0 ? (double)INFINITY : (double)NAN;
    return json_number_value(value);
}

static bool near(double found, double expected, double relative, double absolute) {
    return fabs(found - expected) <= relative * fabs(expected) + absolute;
}

/* Calls check(item, id) for each case of each file that fits; it returns whether the case ran. */
static void each_case(const char *pattern, bool (*check)(const json_t *item, const char *id)) {
    glob_t files = golden_glob(pattern);
    int ran = 0, left = 0;
    for (size_t f = 0; f < files.gl_pathc; f++) {
        json_t *file = golden_json(files.gl_pathv[f]), *item;
        size_t i;
        json_array_foreach(json_object_get(file, "cases"), i, item) {
            bool did = check(item, golden_string(item, "id", "?"));
            ran += did;
            left += !did;
        }
        json_decref(file);
    }
    globfree(&files);
    printf("%s: %d cases ran, %d left out\n", pattern, ran, left);
    assert_true(ran > 0);
}

static void check_row(const char *id, const loom__schedule *schedule, const loom__schedule_group *group,
    double multiplier, int64_t step, double lr, double weight_decay) {
    double found_lr = NAN, found_wd = NAN;
    if (loom__schedule_lr(schedule, group, step, &found_lr) || loom__schedule_wd(schedule, group, step, &found_wd))
        fail_msg("%s at %lld: %s", id, (long long)step, loom_error_message());
    found_wd *= multiplier;
    if (!near(found_lr, lr, 1e-12, 1e-300) || !near(found_wd, weight_decay, 1e-12, 1e-300))
        fail_msg("%s at %lld: lr %.17g, wd %.17g, expected %.17g, %.17g", id, (long long)step, found_lr, found_wd, lr,
            weight_decay);
}

static bool check_schedule(const json_t *item, const char *id) {
    const loom__schedule schedule = {
        .style = golden_string(item, "lr_decay_style", NULL),
        .warmup = golden_int(item, "lr_warmup_steps", 0),
        .decay = golden_int(item, "lr_decay_steps", 0),
        .init_lr = golden_number(item, "init_lr", 0),
        .wsd_style = golden_string(item, "lr_wsd_decay_style", NULL),
        .wsd_decay = golden_int(item, "wsd_decay_steps", -1),
        .wd_incr_steps = golden_int(item, "wd_incr_steps", 0),
        .wd_incr_style = golden_string(item, "wd_incr_style", NULL),
    };
    const loom__schedule_group base = {golden_number(item, "max_lr", 0), golden_number(item, "min_lr", 0),
        golden_number(item, "start_wd", 0), golden_number(item, "end_wd", 0)};
    bool refused = loom__schedule_check(&schedule, &base) != LOOM_OK;
    if (refused != (golden_int(item, "error", 0) != 0))
        fail_msg("%s: %s", id, refused ? loom_error_message() : "accepted, the reference refuses it");
    const json_t *rows = json_object_get(item, "rows"), *groups = json_object_get(item, "groups"), *row;
    size_t r, g;
    json_array_foreach(rows, r, row) {
        int64_t step = json_integer_value(json_array_get(row, 0));
        const json_t *own;
        json_array_foreach(groups, g, own) {
            const loom__schedule_group group = {golden_number(own, "max_lr", base.max_lr),
                golden_number(own, "min_lr", base.min_lr), golden_number(own, "start_wd", base.start_wd),
                golden_number(own, "end_wd", base.end_wd)};
            check_row(id, &schedule, &group, golden_number(own, "wd_mult", 1), step,
                number(json_array_get(row, 1 + 2 * g)), number(json_array_get(row, 2 + 2 * g)));
        }
    }
    double lr;
    if (json_object_get(item, "error_at") &&
        loom__schedule_lr(&schedule, &base, golden_int(item, "error_at", 0), &lr) == LOOM_OK)
        fail_msg("%s: step %lld has a rate, the reference fails there", id, golden_int(item, "error_at", 0));
    return true;
}

static void schedules_equal_megatrons(void **state) {
    (void)state;
    each_case("optim/megatron_lr.json", check_schedule);
}

/* A policy through the door of a run. Where the reference crashes on what is legal, the numbers before the crash hold,
 * and at it there is a finite rate. */
static bool check_policy(const json_t *item, const char *id) {
    const json_t *options = json_object_get(item, "options"), *rates = json_object_get(item, "lr_at"), *rate;
    const char *policy = golden_string(item, "policy", "?");
    double own_minimum = strcmp(policy, "SquareAnnealing") == 0 ? 1e-5 : 0; /* its default in the reference */
    const loom_optimizer_config config = {
        .lr = golden_number(item, "lr", 0), .min_lr = golden_number(options, "min_lr", own_minimum)};
    const loom_lr_config lr = {
        .schedule = policy,
        .max_steps = golden_int(options, "max_steps", 0),
        .warmup_steps = golden_int(options, "warmup_steps", 0),
        .warmup_ratio = golden_number(options, "warmup_ratio", 0),
        .hold_steps = golden_int(options, "hold_steps", 0),
        .hold_ratio = golden_number(options, "hold_ratio", 0),
        .constant_steps = golden_int(options, "constant_steps", 0),
        .constant_ratio = golden_number(options, "constant_ratio", 0),
        .power = golden_number(options, "power", 1),
        .cycle = json_is_true(json_object_get(options, "cycle")),
        .decay_rate = golden_number(options, "decay_rate", 0.5),
        .d_model = golden_int(options, "d_model", 0),
    };
    const int64_t without_end = (int64_t)1 << 40;
    bool refuses = golden_int(item, "error", 0) && !golden_int(item, "reference_crashes", 0);
    loom_lr_values values = {0};
    size_t k;
    bool refused = loom_lr_at(&config, &lr, without_end, 0, &values) != LOOM_OK;
    if (refused != refuses)
        fail_msg("%s: %s", id, refused ? loom_error_message() : "accepted, the reference refuses it");
    if (refuses)
        return true;
    json_array_foreach(rates, k, rate) {
        if (loom_lr_at(&config, &lr, without_end, (int64_t)k, &values))
            fail_msg("%s after %zu steps: %s", id, k, loom_error_message());
        if (!near(values.lr, number(rate), 1e-12, 1e-17))
            fail_msg("%s after %zu steps: %.17g, expected %.17g", id, k, values.lr, number(rate));
    }
    for (int64_t step = golden_int(item, "error_at", -1); step >= 0 && step < 40; step++)
        if (loom_lr_at(&config, &lr, without_end, step, &values) || !isfinite(values.lr) || values.lr < 0)
            fail_msg("%s after %lld steps: %.17g", id, (long long)step, values.lr);
    return true;
}

static void policies_equal_nemos(void **state) {
    (void)state;
    each_case("optim/nemo_lr.json", check_policy);
}

static bool check_scaler(const json_t *item, const char *id) {
    const loom__scaler_options options = {.dynamic = true,
        .initial_scale = golden_number(item, "initial_scale", 0),
        .min_scale = golden_number(item, "min_scale", 0),
        .growth_factor = golden_number(item, "growth_factor", 0),
        .backoff_factor = golden_number(item, "backoff_factor", 0),
        .growth_interval = golden_int(item, "growth_interval", 0),
        .hysteresis = golden_int(item, "hysteresis", 0)};
    const char *bits = golden_string(item, "found_inf", "");
    const json_t *rows = json_object_get(item, "rows"), *row;
    loom__scaler scaler;
    size_t t;
    bool refused = loom__scaler_make(&options, &scaler) != LOOM_OK;
    if (refused != (golden_int(item, "error", 0) != 0))
        fail_msg("%s: %s", id, refused ? loom_error_message() : "accepted, the reference refuses it");
    json_array_foreach(rows, t, row) {
        float scale = (float)number(json_array_get(row, 0)), before = scaler.scale;
        bool stuck = loom__scaler_update(&scaler, bits[t] == '1');
        bool same = scaler.scale == scale && scaler.growth_tracker == json_integer_value(json_array_get(row, 2)) &&
                    scaler.hysteresis_tracker == json_integer_value(json_array_get(row, 3)) &&
                    near((double)(1.0f / scaler.scale), number(json_array_get(row, 1)), 1e-8, 0);
        if (!same)
            fail_msg("%s update %zu: scale %.9g, trackers %lld and %lld", id, t, (double)scaler.scale,
                (long long)scaler.growth_tracker, (long long)scaler.hysteresis_tracker);
        bool at_floor = bits[t] == '1' && scaler.hysteresis_tracker <= 0 && before <= (float)options.min_scale;
        if (stuck != at_floor)
            fail_msg("%s update %zu: scale %.9g, the floor is %s", id, t, (double)before, stuck ? "said" : "not said");
    }
    return true;
}

static void loss_scales_equal_megatrons(void **state) {
    (void)state;
    each_case("optim/loss_scale.json", check_scaler);
}

static void run_cosine_equals_the_training_runs(void **state) {
    (void)state;
    glob_t files = golden_glob("train/*/trajectory.json");
    int rows = 0;
    for (size_t f = 0; f < files.gl_pathc; f++) {
        json_t *file = golden_json(files.gl_pathv[f]);
        const json_t *plan = json_object_get(file, "lr_schedule"), *rates = json_object_get(file, "lr"), *rate;
        const loom_optimizer_config config = {
            .lr = golden_number(plan, "max", 0), .min_lr = golden_number(plan, "min", 0)};
        const loom_lr_config lr_config = {.schedule = "cosine", .warmup_steps = golden_int(plan, "warmup", 0)};
        loom__schedule schedule;
        loom__schedule_group group;
        size_t t;
        if (loom__schedule_make(&config, &lr_config, (int64_t)json_array_size(rates), &schedule, &group))
            fail_msg("%s: %s", files.gl_pathv[f], loom_error_message());
        json_array_foreach(rates, t, rate) {
            double lr = NAN;
            assert_int_equal(loom__schedule_lr(&schedule, &group, (int64_t)t, &lr), LOOM_OK);
            if (!near(lr, number(rate), 1e-12, 0))
                fail_msg("%s step %zu: %.17g, expected %.17g", files.gl_pathv[f], t, lr, number(rate));
            rows++;
        }
        json_decref(file);
    }
    printf("train/*/trajectory.json: %zu runs, %d rates\n", files.gl_pathc, rows);
    globfree(&files);
    assert_true(rows > 0);
}

typedef struct steps_case {
    const json_t *item;
    const char *id;
    double beta1, beta2;
} steps_case;

/* Last-bit differences are allowed, relative to the largest value: moments are sums whose terms may cancel. */
static loom_status compare(
    const char *id, const char *what, size_t step, const float *found, const json_t *expected, double relative) {
    const json_t *value;
    double largest = 0;
    size_t i;
    json_array_foreach(expected, i, value) largest = fmax(largest, fabs(number(value)));
    json_array_foreach(expected, i, value) {
        if (!near((double)found[i], number(value), 0, relative * largest))
            return loom_fail(LOOM_ERR_INTERNAL, "%s step %zu: %s[%zu] is %.9g, expected %.9g", id, step, what, i,
                (double)found[i], number(value));
    }
    return LOOM_OK;
}

static const char *golden_state_name(const char *name) {
    static const char *const names[][2] = {
        {"exp_avg", "m"}, {"exp_avg_sq", "v"}, {"max_exp_avg_sq", "vmax"}, {"momentum_buffer", "buf"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i][0], name) == 0)
            return names[i][1];
    return "?";
}

static loom_status compare_state(
    const char *id, size_t step, const loom_optimizer *optimizer, const json_t *expected, double relative) {
    enum { MOST = 64 };
    const loom__optimizer_state *state = loom__optimizer_state_of(optimizer);
    for (int i = 0; i < state->count; i++) {
        const char *name = golden_state_name(state->arrays[i].name);
        const json_t *values = json_object_get(expected, name);
        float widened[MOST];
        if (!values || json_array_size(values) > MOST)
            return loom_fail(LOOM_ERR_INTERNAL, "%s step %zu: no state %s", id, step, state->arrays[i].name);
        for (size_t e = 0; e < json_array_size(values); e++) {
            uint32_t half = (uint32_t)((const uint16_t *)state->arrays[i].values)[e] << 16;
            if (state->arrays[i].dtype == LOOM_BF16)
                memcpy(&widened[e], &half, sizeof half);
            else
                widened[e] = ((const float *)state->arrays[i].values)[e];
        }
        LOOM_TRY(compare(id, name, step, widened, values, relative));
    }
    return LOOM_OK;
}

static loom_status walk_steps(loom_optimizer *optimizer, loom_parameter *parameter, const steps_case *argument) {
    const json_t *grads = json_object_get(argument->item, "grads"), *grad;
    const char *dtype = golden_string(argument->item, "dtype", "");
    /* There the weights are bf16 too, and every operation on them is rounded: two roundings a step. */
    bool half = strcmp(dtype, "bfloat16") == 0;
    double relative = half ? 0x1p-7 : strcmp(dtype, "float64") == 0 ? 2e-6 : 5e-7;
    size_t t;
    json_array_foreach(grads, t, grad) {
        const json_t *expected = json_array_get(json_object_get(argument->item, "steps"), t), *value;
        size_t i;
        loom_optimizer_outcome outcome;
        json_array_foreach(grad, i, value) parameter->grad[i] = (float)number(value);
        LOOM_TRY(loom_optimizer_step(optimizer, &outcome));
        if (outcome.step != (int64_t)t + 1 || outcome.skipped)
            return loom_fail(
                LOOM_ERR_INTERNAL, "%s: outcome of step %zu is %lld", argument->id, t + 1, (long long)outcome.step);
        double of_weights = half ? (double)(t + 1) * 0x1p-8 : relative;
        LOOM_TRY(compare(argument->id, "p", t, parameter->data, json_object_get(expected, "p"), of_weights));
        LOOM_TRY(compare_state(argument->id, t, optimizer, expected, relative));
    }
    return LOOM_OK;
}

static bool every_parameter(const loom_parameter *parameter, void *context) {
    (void)parameter;
    (void)context;
    return true;
}

static loom_status run_steps(loom_rank *rank, void *context) {
    const steps_case *argument = context;
    const json_t *options = json_object_get(argument->item, "options"), *p0 = json_object_get(argument->item, "p0"),
                 *value;
    const char *name = golden_string(argument->item, "optimizer", ""),
               *moments = strcmp(golden_string(argument->item, "dtype", ""), "bfloat16") == 0 ? "bf16" : "fp32";
    bool decoupled = strcmp(name, "AdamW") == 0;
    double lr = golden_number(options, "lr", 1e-3);
    const loom_optimizer_config config = {
        .optimizer = strcmp(name, "SGD") == 0 ? "sgd" : "adam",
        .decoupled_weight_decay = decoupled,
        .amsgrad = json_is_true(json_object_get(options, "amsgrad")),
        .maximize = json_is_true(json_object_get(options, "maximize")),
        .sgd_momentum = golden_number(options, "momentum", 0),
        .sgd_dampening = golden_number(options, "dampening", 0),
        .exp_avg_dtype = moments,
        .exp_avg_sq_dtype = moments,
        .lr = lr > 0 ? lr : 1, /* a rate of 0 is a multiplier's doing */
        .min_lr = 0,
        .weight_decay = golden_number(options, "weight_decay", decoupled ? 1e-2 : 0),
        .adam_beta1 = argument->beta1,
        .adam_beta2 = argument->beta2,
        .adam_eps = golden_number(options, "eps", 1e-8),
    };
    const loom_lr_config rate = {.schedule = "megatron-constant"};
    const loom__optimizer_options optimizer_options = {.steps = 100,
        .model_parallel = loom_rank_world(rank),
        .conditions = {.scale_lr_cond = every_parameter, .lr_mult = lr > 0 ? 1 : 0}};
    const loom__ddp_options ddp_options = loom__ddp_options_default();
    int64_t count = (int64_t)json_array_size(p0);
    test_parameters set;
    loom__ddp *ddp = NULL;
    loom_optimizer *optimizer = NULL;
    size_t i;
    test_parameters_create(&set, &count, 1, 0);
    json_array_foreach(p0, i, value) set.memory[0][i] = (float)number(value);
    loom_status status = loom__ddp_create(rank, &ddp_options, set.list, 1, loom_rank_world(rank), &ddp);
    if (!status)
        status = loom__optimizer_create(rank, &config, &rate, ddp, &optimizer_options, &optimizer);
    if (!status)
        status = walk_steps(optimizer, set.list[0], argument);
    loom__optimizer_destroy(optimizer);
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return status;
}

/* Nesterov's momentum is not built. */
static bool check_steps(const json_t *item, const char *id) {
    const json_t *options = json_object_get(item, "options");
    const char *optimizer = golden_string(item, "optimizer", "");
    if ((strcmp(optimizer, "AdamW") != 0 && strcmp(optimizer, "Adam") != 0 && strcmp(optimizer, "SGD") != 0) ||
        json_is_true(json_object_get(options, "nesterov")))
        return false;
    const json_t *betas = json_object_get(options, "betas");
    steps_case argument = {
        item, id, betas ? number(json_array_get(betas, 0)) : 0.9, betas ? number(json_array_get(betas, 1)) : 0.999};
    if (loom_run_local(1, run_steps, &argument, NULL))
        fail_msg("%s", loom_error_message());
    return true;
}

static void updates_equal_pytorchs(void **state) {
    (void)state;
    each_case("optim/steps.json", check_steps);
}

static loom_status check_clip_numbers(loom_rank *rank, const loom__ddp_view *view, const steps_case *argument) {
    const json_t *item = argument->item, *clipped = json_object_get(item, "clipped"), *value;
    double expected = number(json_object_get(item, "norm")), coefficient = number(json_object_get(item, "coeff"));
    const char *type = golden_string(item, "norm_type", "");
    int64_t counted[TEST_PARAMETERS];
    for (int64_t place = 0; place < view->place_count; place++)
        counted[place] = view->places[place].count;
    loom__norm partial = loom__norm_partial(rank, view, counted,
        strcmp(type, "inf") == 0   ? LOOM__NORM_INF
        : strcmp(type, "1.0") == 0 ? LOOM__NORM_1
                                   : LOOM__NORM_2,
        false);
    LOOM_TRY(loom__norm_gather(loom_rank_world(rank), &partial));
    double norm = loom__norm_value(&partial, 1.0);
    if (!isfinite(expected))
        return isfinite(norm) ? loom_fail(LOOM_ERR_INTERNAL, "%s: the norm is %g", argument->id, norm) : LOOM_OK;
    /* The reference sums squares in fp32, where those of tiny numbers vanish. */
    if (!near(norm, expected, 2e-7, 1e-20))
        return loom_fail(LOOM_ERR_INTERNAL, "%s: norm %.9g, expected %.9g", argument->id, norm, expected);
    double factor = loom__clip_factor(golden_number(item, "max_norm", 0), norm);
    if (!near(factor, coefficient < 1 ? coefficient : 1, 4e-7, 0))
        return loom_fail(LOOM_ERR_INTERNAL, "%s: factor %.9g, expected %.9g", argument->id, factor, coefficient);
    for (int64_t place = 0; place < view->place_count; place++) {
        size_t i;
        json_array_foreach(json_array_get(clipped, (size_t)(view->place_count - 1 - place)), i, value) {
            double found = (double)view->grad[view->places[place].start + (int64_t)i] * factor;
            if (!near(found, number(value), 1e-6, 0))
                return loom_fail(
                    LOOM_ERR_INTERNAL, "%s: clipped to %.9g, expected %.9g", argument->id, found, number(value));
        }
    }
    return LOOM_OK;
}

static loom_status run_clip(loom_rank *rank, void *context) {
    const steps_case *argument = context;
    const json_t *grads = json_object_get(argument->item, "grads"), *grad, *value;
    const loom__ddp_options options = loom__ddp_options_default();
    int64_t counts[TEST_PARAMETERS] = {0};
    int64_t count = (int64_t)json_array_size(grads);
    size_t p, i;
    if (count > TEST_PARAMETERS)
        return loom_fail(LOOM_ERR_INTERNAL, "%s has %lld gradients", argument->id, (long long)count);
    json_array_foreach(grads, p, grad) counts[p] = (int64_t)json_array_size(grad);
    test_parameters set;
    loom__ddp *ddp = NULL;
    test_parameters_create(&set, counts, count, 0);
    loom_status status = loom__ddp_create(rank, &options, set.list, count, loom_rank_world(rank), &ddp);
    if (!status) {
        json_array_foreach(grads, p, grad) {
            json_array_foreach(grad, i, value) set.parameters[p].grad[i] = (float)number(value);
        }
        status = check_clip_numbers(rank, loom__ddp_view_of(ddp), argument);
    }
    loom__ddp_destroy(ddp);
    test_parameters_destroy(&set);
    return status;
}

/* Norms other than the first, the second and the largest element are not built. */
static bool check_clip(const json_t *item, const char *id) {
    const char *type = golden_string(item, "norm_type", "");
    if (strcmp(type, "2.0") != 0 && strcmp(type, "1.0") != 0 && strcmp(type, "inf") != 0)
        return false;
    steps_case argument = {.item = item, .id = id};
    if (loom_run_local(1, run_clip, &argument, NULL))
        fail_msg("%s", loom_error_message());
    return true;
}

static void norm_and_clipping_equal_megatrons(void **state) {
    (void)state;
    each_case("optim/clip.json", check_clip);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(schedules_equal_megatrons),
        cmocka_unit_test(policies_equal_nemos),
        cmocka_unit_test(loss_scales_equal_megatrons),
        cmocka_unit_test(run_cosine_equals_the_training_runs),
        cmocka_unit_test(updates_equal_pytorchs),
        cmocka_unit_test(norm_and_clipping_equal_megatrons),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
