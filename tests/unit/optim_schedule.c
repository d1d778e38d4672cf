/* Schedules as a run asks for them; the numbers of Megatron-Core are in golden.optim. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "optim/schedule.h"

static const loom_optimizer_config optim = {
    .optimizer = "adam", .lr = 1e-3, .min_lr = 1e-4, .weight_decay = 0.1, .adam_beta1 = 0.9};

static double lr_of(const loom_lr_config *config, int64_t steps, int64_t step) {
    loom__schedule schedule;
    loom__schedule_group group;
    double lr = NAN, weight_decay = NAN;
    assert_int_equal(loom__schedule_make(&optim, config, steps, &schedule, &group), LOOM_OK);
    assert_int_equal(loom__schedule_lr(&schedule, &group, step, &lr), LOOM_OK);
    assert_int_equal(loom__schedule_wd(&schedule, &group, step, &weight_decay), LOOM_OK);
    assert_true(weight_decay == 0.1);
    return lr;
}

static bool near(double a, double b) {
    return fabs(a - b) <= 1e-15;
}

static void cosine_warms_up_from_the_first_step_and_ends_at_min_lr(void **state) {
    (void)state;
    const loom_lr_config config = {.schedule = "cosine", .warmup_steps = 4};
    assert_true(near(lr_of(&config, 25, 0), 1e-3 / 4));
    assert_true(near(lr_of(&config, 25, 3), 1e-3));
    assert_true(near(lr_of(&config, 25, 4), 1e-3));
    assert_true(near(lr_of(&config, 25, 14), 5.5e-4));
    assert_true(near(lr_of(&config, 25, 24), 1e-4));
    assert_true(near(lr_of(&config, 25, 1000), 1e-4));
}

static void cosine_is_finite_where_nothing_is_left_to_decay(void **state) {
    (void)state;
    const loom_lr_config none = {.schedule = "cosine"}, all = {.schedule = "cosine", .warmup_steps = 10};
    assert_true(near(lr_of(&none, 1, 0), 1e-3));
    assert_true(near(lr_of(&none, 1, 1), 1e-4));
    assert_true(near(lr_of(&all, 10, 9), 1e-3));
    assert_true(near(lr_of(&all, 11, 10), 1e-3));
    assert_true(near(lr_of(&all, 5, 4), 5e-4));
}

static void megatrons_first_step_has_init_lr(void **state) {
    (void)state;
    const loom_lr_config zero = {.schedule = "megatron-cosine", .warmup_steps = 4},
                         some = {.schedule = "megatron-linear", .warmup_steps = 4, .init_lr = 2e-4};
    assert_true(lr_of(&zero, 25, 0) == 0.0);
    assert_true(near(lr_of(&zero, 25, 4), 1e-3));
    assert_true(lr_of(&some, 25, 0) == 2e-4);
}

static void decay_ends_with_the_run_or_where_it_is_told_to(void **state) {
    (void)state;
    const loom_lr_config run = {.schedule = "megatron-linear"},
                         told = {.schedule = "megatron-linear", .lr_decay_steps = 10};
    assert_true(near(lr_of(&run, 20, 10), 5.5e-4));
    assert_true(near(lr_of(&told, 20, 10), 1e-4));
    assert_true(near(lr_of(&told, 20, 5), 5.5e-4));
}

static void refused(const loom_lr_config *config, int64_t steps, loom_status expected, const char *words) {
    loom__schedule schedule = {.warmup = 77};
    loom__schedule_group group;
    assert_int_equal(loom__schedule_make(&optim, config, steps, &schedule, &group), expected);
    if (!strstr(loom_error_message(), words))
        fail_msg("%s does not say: %s", loom_error_message(), words);
    assert_int_equal(schedule.warmup, 77);
}

static void schedules_that_cannot_be_are_refused_with_all_faults(void **state) {
    (void)state;
    refused(&(loom_lr_config){.schedule = "megatron-warmup-cosine"}, 10, LOOM_ERR_CONFIG,
        "optim.schedule: found megatron-warmup-cosine, expected cosine, megatron-{");
    refused(&(loom_lr_config){0}, 10, LOOM_ERR_CONFIG, "optim.schedule: found (none)");
    refused(&(loom_lr_config){.schedule = "megatron-cube"}, 10, LOOM_ERR_CONFIG, "found megatron-cube, expected");
    refused(&(loom_lr_config){.schedule = "NoamAnnealing"}, 10, LOOM_ERR_CONFIG, "d_model: found 0");
    refused(&(loom_lr_config){.schedule = "NoamHoldAnnealing"}, 10, LOOM_ERR_CONFIG, "warmup_steps: found 0");
    refused(&(loom_lr_config){.schedule = "WarmupHoldPolicy", .hold_steps = 2, .hold_ratio = 0.1}, 10, LOOM_ERR_CONFIG,
        "optim.hold_steps, optim.hold_ratio: found both");
    refused(&(loom_lr_config){.schedule = "megatron-WSD"}, 10, LOOM_ERR_CONFIG,
        "lr_wsd_decay_style: found (none), expected linear, cosine, exponential or minus_sqrt\nwsd_decay_steps");
    refused(&(loom_lr_config){.schedule = "megatron-linear", .warmup_steps = 10}, 10, LOOM_ERR_CONFIG,
        "warmup_steps: found 10, expected less than lr_decay_steps, which is 10");
    refused(&(loom_lr_config){.schedule = "cosine", .warmup_steps = -1}, 10, LOOM_ERR_CONFIG, "warmup_steps: found -1");
    refused(
        &(loom_lr_config){.schedule = "megatron-linear", .init_lr = NAN}, 10, LOOM_ERR_CONFIG, "init_lr: found nan");
    refused(&(loom_lr_config){.schedule = "cosine"}, 0, LOOM_ERR_CONFIG, "lr_decay_steps: found 0");
}

static void a_rate_below_the_minimum_is_refused(void **state) {
    (void)state;
    loom_optimizer_config low = optim;
    loom__schedule schedule;
    loom__schedule_group group;
    low.lr = 1e-5;
    low.weight_decay = NAN;
    assert_int_equal(
        loom__schedule_make(&low, &(loom_lr_config){.schedule = "cosine"}, 10, &schedule, &group), LOOM_ERR_CONFIG);
    assert_non_null(strstr(loom_error_message(), "lr: found 1e-05, expected at least min_lr, which is 0.0001"));
    assert_non_null(strstr(loom_error_message(), "weight decay: found nan"));
}

static void weight_decay_grows_under_every_schedule(void **state) {
    (void)state;
    const char *const names[] = {"cosine", "megatron-linear", "CosineAnnealing"};
    for (int i = 0; i < 3; i++) {
        const loom_lr_config config = {
            .schedule = names[i], .start_weight_decay = 0.02, .weight_decay_incr_style = "linear", .wd_incr_steps = 8};
        const double expected[] = {0.02, 0.06, 0.1, 0.1};
        for (int64_t step = 0; step < 16; step += 4) {
            loom_lr_values values = {0};
            assert_int_equal(loom_lr_at(&optim, &config, 20, step, &values), LOOM_OK);
            assert_true(near(values.weight_decay, expected[step / 4]));
        }
    }
}

static void a_decoupled_rate_follows_the_same_curve(void **state) {
    (void)state;
    loom_optimizer_config decoupled = optim;
    const loom_lr_config config = {.schedule = "megatron-linear"};
    loom_lr_values values = {0};
    decoupled.decoupled_lr = 4e-3;
    assert_int_equal(loom_lr_at(&decoupled, &config, 10, 5, &values), LOOM_OK);
    assert_true(near(values.lr, 5.5e-4) && near(values.decoupled_lr, 2.05e-3));
    decoupled.decoupled_min_lr = 2e-3;
    assert_int_equal(loom_lr_at(&decoupled, &config, 10, 10, &values), LOOM_OK);
    assert_true(near(values.lr, 1e-4) && near(values.decoupled_lr, 2e-3));
}

typedef struct resumed {
    loom__schedule schedule;
    loom__schedule_group group;
    int64_t step;
} resumed;

/* A schedule of other values than those that were saved. */
static loom_status resume(bool override, bool use_checkpoint, resumed *out) {
    const loom_lr_config before = {.schedule = "megatron-linear", .warmup_steps = 2},
                         after = {.schedule = "megatron-cosine", .warmup_steps = 3};
    loom_optimizer_config lower = optim;
    resumed saved;
    lower.lr = 5e-4;
    assert_int_equal(loom__schedule_make(&optim, &before, 20, &saved.schedule, &saved.group), LOOM_OK);
    loom_lr_state state = loom__schedule_save(&saved.schedule, &saved.group, 7);
    assert_int_equal(loom__schedule_make(&lower, &after, 20, &out->schedule, &out->group), LOOM_OK);
    out->step = -1;
    return loom__schedule_load(&state, override, use_checkpoint, &out->schedule, &out->group, &out->step);
}

static void a_saved_schedule_must_agree_unless_a_field_says_whose_values_hold(void **state) {
    (void)state;
    resumed out;
    assert_int_equal(resume(false, false, &out), LOOM_ERR_CONFIG);
    assert_non_null(
        strstr(loom_error_message(), "learning rate: found 0.00050000000000000001, the saved schedule has"));
    assert_non_null(strstr(loom_error_message(), "decay style: found cosine, the saved schedule has linear"));
    assert_non_null(strstr(loom_error_message(), "optim.override_opt_param_scheduler"));
    assert_true(out.step == -1 && out.schedule.warmup == 3);

    assert_int_equal(resume(true, false, &out), LOOM_OK);
    assert_true(out.step == 7 && out.schedule.warmup == 3 && near(out.group.max_lr, 5e-4));
    assert_string_equal(out.schedule.style, "cosine");

    assert_int_equal(resume(false, true, &out), LOOM_OK);
    assert_true(out.step == 7 && out.schedule.warmup == 2 && near(out.group.max_lr, 1e-3));
    assert_string_equal(out.schedule.style, "linear");

    assert_int_equal(resume(true, true, &out), LOOM_ERR_CONFIG);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cosine_warms_up_from_the_first_step_and_ends_at_min_lr),
        cmocka_unit_test(cosine_is_finite_where_nothing_is_left_to_decay),
        cmocka_unit_test(megatrons_first_step_has_init_lr),
        cmocka_unit_test(decay_ends_with_the_run_or_where_it_is_told_to),
        cmocka_unit_test(schedules_that_cannot_be_are_refused_with_all_faults),
        cmocka_unit_test(weight_decay_grows_under_every_schedule),
        cmocka_unit_test(a_decoupled_rate_follows_the_same_curve),
        cmocka_unit_test(a_saved_schedule_must_agree_unless_a_field_says_whose_values_hold),
        cmocka_unit_test(a_rate_below_the_minimum_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
