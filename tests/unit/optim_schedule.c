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
    refused(&(loom_lr_config){.schedule = "CosineAnnealing"}, 10, LOOM_ERR_UNSUPPORTED,
        "not supported yet: optim.schedule=CosineAnnealing");
    refused(
        &(loom_lr_config){.schedule = "megatron-warmup-cosine"}, 10, LOOM_ERR_UNSUPPORTED, "megatron-warmup-cosine");
    refused(&(loom_lr_config){0}, 10, LOOM_ERR_UNSUPPORTED, "optim.schedule=(none)");
    refused(&(loom_lr_config){.schedule = "megatron-cube"}, 10, LOOM_ERR_CONFIG, "found cube, expected");
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cosine_warms_up_from_the_first_step_and_ends_at_min_lr),
        cmocka_unit_test(cosine_is_finite_where_nothing_is_left_to_decay),
        cmocka_unit_test(megatrons_first_step_has_init_lr),
        cmocka_unit_test(decay_ends_with_the_run_or_where_it_is_told_to),
        cmocka_unit_test(schedules_that_cannot_be_are_refused_with_all_faults),
        cmocka_unit_test(a_rate_below_the_minimum_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
