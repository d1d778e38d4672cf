/* Schedules: the value of a step comes from the step's number alone, so that resuming needs no state and any rank can
 * tell it. Invariant: the formulas are those of the reference in its order of operations, in double. */
#include "optim/schedule.h"
#include "base/faults.h"
#include <math.h>
#include <string.h>

static const char styles[] = "warmup-cosine, constant, linear, cosine, inverse-square-root or WSD";
static const char wsd_styles[] = "linear, cosine, exponential or minus_sqrt";
static const char wd_styles[] = "constant, linear or cosine";
static const char run_prefix[] = "megatron-";

static bool is(const char *style, const char *name) {
    return style && strcmp(style, name) == 0;
}

static const char *shown(const char *style) {
    return style ? style : "(none)";
}

/* Half a cosine from 1 at ratio 0 to 0 at ratio 1. */
static double half_cosine(double ratio) {
    return 0.5 * (cos(M_PI * ratio) + 1.0);
}

static bool wsd_coefficient(const char *style, double ratio, double *coefficient) {
    if (is(style, "linear"))
        *coefficient = 1.0 - ratio;
    else if (is(style, "cosine"))
        *coefficient = half_cosine(ratio);
    else if (is(style, "exponential"))
        *coefficient = 2.0 * pow(0.5, ratio) - 1.0;
    else if (is(style, "minus_sqrt"))
        *coefficient = 1.0 - sqrt(ratio);
    else
        return false;
    return true;
}

static double warmup_cosine(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    if (step < schedule->warmup)
        return group->max_lr * (double)(step + 1) / (double)schedule->warmup;
    int64_t last = schedule->decay - 1;
    if (step > last)
        return group->min_lr;
    if (step == schedule->warmup)
        return group->max_lr;
    double ratio = (double)(step - schedule->warmup) / (double)(last - schedule->warmup);
    return group->min_lr + (group->max_lr - group->min_lr) * half_cosine(ratio);
}

loom_status loom__schedule_lr(
    const loom__schedule *schedule, const loom__schedule_group *group, int64_t step, double *lr) {
    const char *style = schedule->style;
    double max_lr = group->max_lr, min_lr = group->min_lr, coefficient;
    if (is(style, "warmup-cosine")) {
        *lr = warmup_cosine(schedule, group, step);
        return LOOM_OK;
    }
    if (schedule->warmup > 0 && step <= schedule->warmup) {
        *lr = schedule->init_lr + (max_lr - schedule->init_lr) * (double)step / (double)schedule->warmup;
        return LOOM_OK;
    }
    if (is(style, "constant")) {
        *lr = max_lr;
        return LOOM_OK;
    }
    if (step > schedule->decay) {
        *lr = min_lr;
        return LOOM_OK;
    }
    if (is(style, "inverse-square-root")) {
        double warmup = schedule->warmup > 1 ? (double)schedule->warmup : 1.0;
        double value = max_lr * sqrt(warmup) / sqrt(step > 1 ? (double)step : 1.0);
        *lr = value > min_lr ? value : min_lr;
        return LOOM_OK;
    }
    double ratio = (double)(step - schedule->warmup) / (double)(schedule->decay - schedule->warmup);
    if (is(style, "linear")) {
        coefficient = 1.0 - ratio;
    } else if (is(style, "cosine")) {
        coefficient = half_cosine(ratio);
    } else if (is(style, "WSD")) {
        int64_t annealing = schedule->decay - schedule->wsd_decay;
        coefficient = 1.0;
        if (step > annealing && !wsd_coefficient(schedule->wsd_style,
                                    (double)(step - annealing) / (double)schedule->wsd_decay, &coefficient))
            return loom_fail(
                LOOM_ERR_CONFIG, "lr_wsd_decay_style: found %s, expected %s", shown(schedule->wsd_style), wsd_styles);
    } else {
        return loom_fail(LOOM_ERR_CONFIG, "learning-rate schedule: found %s, expected %s", shown(style), styles);
    }
    *lr = min_lr + coefficient * (max_lr - min_lr);
    return LOOM_OK;
}

loom_status loom__schedule_wd(
    const loom__schedule *schedule, const loom__schedule_group *group, int64_t step, double *weight_decay) {
    double coefficient = 1.0;
    if (is(schedule->style, "warmup-cosine") || step > schedule->wd_incr_steps ||
        is(schedule->wd_incr_style, "constant")) {
        *weight_decay = group->end_wd;
        return LOOM_OK;
    }
    double ratio = schedule->wd_incr_steps > 0 ? (double)step / (double)schedule->wd_incr_steps : 1.0;
    if (is(schedule->wd_incr_style, "linear"))
        coefficient = ratio;
    else if (is(schedule->wd_incr_style, "cosine"))
        coefficient = half_cosine(1.0 - ratio);
    else
        return loom_fail(LOOM_ERR_CONFIG, "weight-decay increment style: found %s, expected %s",
            shown(schedule->wd_incr_style), wd_styles);
    *weight_decay = group->start_wd + coefficient * (group->end_wd - group->start_wd);
    return LOOM_OK;
}

static bool one_of(const char *style, const char *const *names, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (is(style, names[i]))
            return true;
    return false;
}

static void check_styles(const loom__schedule *schedule, const loom__schedule_group *group, loom__faults *faults) {
    static const char *const lr_names[] = {
        "warmup-cosine", "constant", "linear", "cosine", "inverse-square-root", "WSD"};
    double ignored;
    if (!one_of(schedule->style, lr_names, sizeof lr_names / sizeof *lr_names))
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "learning-rate schedule: found %s, expected %s", shown(schedule->style), styles);
    if (is(schedule->style, "WSD")) {
        if (!wsd_coefficient(schedule->wsd_style, 0.0, &ignored))
            loom__faults_add(faults, LOOM_ERR_CONFIG, "lr_wsd_decay_style: found %s, expected %s",
                shown(schedule->wsd_style), wsd_styles);
        if (schedule->wsd_decay < 0)
            loom__faults_add(faults, LOOM_ERR_CONFIG, "wsd_decay_steps: found none, WSD needs a number from 0");
    }
    if (is(schedule->style, "warmup-cosine"))
        return;
    static const char *const wd_names[] = {"constant", "linear", "cosine"};
    if (!one_of(schedule->wd_incr_style, wd_names, sizeof wd_names / sizeof *wd_names))
        loom__faults_add(faults, LOOM_ERR_CONFIG, "weight-decay increment style: found %s, expected %s",
            shown(schedule->wd_incr_style), wd_styles);
    if (is(schedule->wd_incr_style, "constant") && (group->start_wd < group->end_wd || group->start_wd > group->end_wd))
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "weight decay: found %g at the start and %g at the end, a constant one has equal ones", group->start_wd,
            group->end_wd);
}

loom_status loom__schedule_check(const loom__schedule *schedule, const loom__schedule_group *group) {
    loom__faults faults;
    loom__faults_begin(&faults);
    /* Written so that a NaN is a fault. */
    if (!(group->min_lr >= 0.0))
        loom__faults_add(&faults, LOOM_ERR_CONFIG, "min_lr: found %g, expected a rate from 0", group->min_lr);
    if (!(group->max_lr >= group->min_lr) || isinf(group->max_lr))
        loom__faults_add(&faults, LOOM_ERR_CONFIG, "lr: found %g, expected at least min_lr, which is %g", group->max_lr,
            group->min_lr);
    if (!(group->start_wd >= 0.0) || !(group->end_wd >= group->start_wd) || isinf(group->end_wd))
        loom__faults_add(&faults, LOOM_ERR_CONFIG,
            "weight decay: found %g at the start and %g at the end, expected 0 <= start <= end", group->start_wd,
            group->end_wd);
    if (schedule->decay <= 0)
        loom__faults_add(&faults, LOOM_ERR_CONFIG, "lr_decay_steps: found %lld, expected a number from 1",
            (long long)schedule->decay);
    if (is(schedule->style, "warmup-cosine")) {
        if (schedule->warmup < 0)
            loom__faults_add(&faults, LOOM_ERR_CONFIG, "warmup_steps: found %lld, expected a number from 0",
                (long long)schedule->warmup);
    } else {
        if (!(schedule->init_lr <= group->max_lr))
            loom__faults_add(&faults, LOOM_ERR_CONFIG, "init_lr: found %g, expected at most lr, which is %g",
                schedule->init_lr, group->max_lr);
        if (schedule->warmup >= schedule->decay)
            loom__faults_add(&faults, LOOM_ERR_CONFIG,
                "warmup_steps: found %lld, expected less than lr_decay_steps, which is %lld",
                (long long)schedule->warmup, (long long)schedule->decay);
    }
    check_styles(schedule, group, &faults);
    return loom__faults_end(&faults);
}

loom_status loom__schedule_make(const loom_optimizer_config *config, const loom_lr_config *lr, int64_t steps,
    loom__schedule *schedule, loom__schedule_group *group) {
    const char *name = lr->schedule;
    size_t prefix = sizeof run_prefix - 1;
    bool megatron = name && strncmp(name, run_prefix, prefix) == 0;
    loom__schedule made = {
        .style = megatron             ? name + prefix
                 : is(name, "cosine") ? "warmup-cosine"
                                      : name,
        .warmup = lr->warmup_steps,
        .decay = megatron && lr->lr_decay_steps > 0 ? lr->lr_decay_steps : steps,
        .init_lr = lr->init_lr,
        .wsd_style = lr->lr_wsd_decay_style,
        .wsd_decay = lr->wsd_decay_steps > 0 ? lr->wsd_decay_steps : -1,
        .wd_incr_steps = steps,
        .wd_incr_style = "constant",
    };
    if ((!megatron && !is(name, "cosine")) || (megatron && is(made.style, "warmup-cosine")))
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: optim.schedule=%s (expected cosine or megatron-{constant,linear,cosine,"
            "inverse-square-root,WSD})",
            shown(name));
    loom__schedule_group base = {config->lr, config->min_lr, config->weight_decay, config->weight_decay};
    LOOM_TRY(loom__schedule_check(&made, &base));
    *schedule = made;
    *group = base;
    return LOOM_OK;
}
