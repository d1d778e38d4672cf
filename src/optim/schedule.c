/* Schedules: the value of a step comes from the step's number alone, so that resuming needs no state and any rank can
 * tell it. Invariant: the formulas are those of the reference in its order of operations, in double. */
#include "optim/schedule.h"
#include "base/faults.h"
#include "optim/policies.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const lr_names[] = {"warmup-cosine", "constant", "linear", "cosine", "inverse-square-root", "WSD"};
static const char *const wsd_names[] = {"linear", "cosine", "exponential", "minus_sqrt"};
static const char *const wd_names[] = {"constant", "linear", "cosine"};
static const char styles[] = "warmup-cosine, constant, linear, cosine, inverse-square-root, WSD or a policy of NeMo's";
static const char wsd_styles[] = "linear, cosine, exponential or minus_sqrt";
static const char wd_styles[] = "constant, linear or cosine";
static const char run_prefix[] = "megatron-";

static bool is(const char *style, const char *name) {
    return style && strcmp(style, name) == 0;
}

/* The name as one of the list, which lives for ever; NULL where it has none like it. */
static const char *listed(const char *name, const char *const *names, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (is(name, names[i]))
            return names[i];
    return NULL;
}

#define LISTED(name, names) listed(name, names, sizeof(names) / sizeof *(names))

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
    if (loom__policy_lr(schedule, group, step, lr))
        return LOOM_OK;
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
    if (step > schedule->wd_incr_steps || is(schedule->wd_incr_style, "constant")) {
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

static void check_styles(const loom__schedule *schedule, const loom__schedule_group *group, loom__faults *faults) {
    double ignored;
    if (!LISTED(schedule->style, lr_names) && !loom__policy_name(schedule->style))
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "learning-rate schedule: found %s, expected %s", shown(schedule->style), styles);
    if (is(schedule->style, "WSD")) {
        if (!wsd_coefficient(schedule->wsd_style, 0.0, &ignored))
            loom__faults_add(faults, LOOM_ERR_CONFIG, "lr_wsd_decay_style: found %s, expected %s",
                shown(schedule->wsd_style), wsd_styles);
        if (schedule->wsd_decay < 0)
            loom__faults_add(faults, LOOM_ERR_CONFIG, "wsd_decay_steps: found none, WSD needs a number from 0");
    }
    if (!LISTED(schedule->wd_incr_style, wd_names))
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
    bool policy = loom__policy_name(schedule->style) != NULL;
    if (policy)
        loom__policy_check(schedule, &faults);
    if (policy || is(schedule->style, "warmup-cosine")) {
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

/* The steps given, or the share of all. */
static int64_t steps_or_ratio(int64_t steps, double ratio, int64_t all) {
    return steps > 0 || !(ratio > 0.0) ? steps : (int64_t)(ratio * (double)all);
}

static void fill_policy(const loom_lr_config *lr, loom__schedule *made) {
    int64_t hold = steps_or_ratio(lr->hold_steps, lr->hold_ratio, made->decay);
    made->warmup = steps_or_ratio(lr->warmup_steps, lr->warmup_ratio, made->decay);
    made->hold = hold > 0 ? hold + made->warmup : 0;
    made->constant = steps_or_ratio(lr->constant_steps, lr->constant_ratio, made->decay);
    made->power = lr->power;
    made->cycle = lr->cycle;
    made->decay_rate = lr->decay_rate;
    made->d_model = lr->d_model;
}

static void check_either(bool steps, bool ratio, const char *what, loom__faults *faults) {
    if (steps && ratio)
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "optim.%s_steps, optim.%s_ratio: found both, expected one of them", what, what);
}

static loom_status check_ratios(const loom_lr_config *lr) {
    loom__faults faults;
    loom__faults_begin(&faults);
    check_either(lr->warmup_steps > 0, lr->warmup_ratio > 0, "warmup", &faults);
    check_either(lr->hold_steps > 0, lr->hold_ratio > 0, "hold", &faults);
    check_either(lr->constant_steps > 0, lr->constant_ratio > 0, "constant", &faults);
    return loom__faults_end(&faults);
}

/* The style that the name of a run file means; NULL where none does. */
static const char *style_of(const char *name) {
    size_t prefix = sizeof run_prefix - 1;
    if (is(name, "cosine"))
        return "warmup-cosine";
    if (!name || strncmp(name, run_prefix, prefix) != 0)
        return loom__policy_name(name);
    return is(name + prefix, "warmup-cosine") ? NULL : LISTED(name + prefix, lr_names);
}

loom_status loom__schedule_make(const loom_optimizer_config *config, const loom_lr_config *lr, int64_t steps,
    loom__schedule *schedule, loom__schedule_group *group) {
    const char *style = style_of(lr->schedule), *wd_style = lr->weight_decay_incr_style;
    if (!style)
        return loom_fail(LOOM_ERR_CONFIG,
            "optim.schedule: found %s, expected cosine, megatron-{constant,linear,cosine,inverse-square-root,WSD} or a "
            "policy of NeMo's",
            shown(lr->schedule));
    bool policy = loom__policy_name(style) != NULL, megatron = !policy && !is(style, "warmup-cosine");
    int64_t own_steps = megatron ? lr->lr_decay_steps : policy ? lr->max_steps : 0;
    loom__schedule made = {
        .style = style,
        .warmup = lr->warmup_steps,
        .decay = own_steps > 0 ? own_steps : steps,
        .init_lr = megatron ? lr->init_lr : 0.0,
        .wsd_style = LISTED(lr->lr_wsd_decay_style, wsd_names),
        .wsd_decay = lr->wsd_decay_steps > 0 ? lr->wsd_decay_steps : -1,
        .wd_incr_steps = lr->wd_incr_steps > 0 ? lr->wd_incr_steps : steps,
        .wd_incr_style = wd_style ? LISTED(wd_style, wd_names) : wd_names[0],
    };
    LOOM_TRY(check_ratios(lr));
    if (policy)
        fill_policy(lr, &made);
    bool ramp = !is(made.wd_incr_style, "constant");
    loom__schedule_group base = {config->lr, config->min_lr, ramp ? lr->start_weight_decay : config->weight_decay,
        ramp && lr->end_weight_decay > 0 ? lr->end_weight_decay : config->weight_decay};
    LOOM_TRY(loom__schedule_check(&made, &base));
    *schedule = made;
    *group = base;
    return LOOM_OK;
}

loom__schedule_group loom__schedule_decoupled(const loom_optimizer_config *config, const loom__schedule_group *base) {
    loom__schedule_group group = *base;
    if (config->decoupled_lr > 0.0) {
        group.max_lr = config->decoupled_lr;
        group.min_lr = config->decoupled_min_lr > 0.0 ? config->decoupled_min_lr : base->min_lr;
    }
    return group;
}

loom_lr_state loom__schedule_save(
    const loom__schedule *schedule, const loom__schedule_group *group, int64_t num_steps) {
    loom_lr_state state = {.num_steps = num_steps,
        .max_lr = group->max_lr,
        .min_lr = group->min_lr,
        .lr_warmup_steps = schedule->warmup,
        .lr_decay_steps = schedule->decay,
        .start_wd = group->start_wd,
        .end_wd = group->end_wd,
        .wd_incr_steps = schedule->wd_incr_steps};
    snprintf(state.lr_decay_style, sizeof state.lr_decay_style, "%s", shown(schedule->style));
    snprintf(state.wd_incr_style, sizeof state.wd_incr_style, "%s", shown(schedule->wd_incr_style));
    return state;
}

static void same_number(const char *name, double here, double saved, loom__faults *faults) {
    if (here < saved || here > saved)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "%s: found %.17g, the saved schedule has %.17g", name, here, saved);
}

static void same_style(const char *name, const char *here, const char *saved, loom__faults *faults) {
    if (!is(here, saved))
        loom__faults_add(faults, LOOM_ERR_CONFIG, "%s: found %s, the saved schedule has %s", name, shown(here), saved);
}

static loom_status check_same(
    const loom_lr_state *saved, const loom__schedule *schedule, const loom__schedule_group *group) {
    loom__faults faults;
    loom__faults_begin(&faults);
    same_number("learning rate", group->max_lr, saved->max_lr, &faults);
    same_number("minimum learning rate", group->min_lr, saved->min_lr, &faults);
    same_number("warm-up steps", (double)schedule->warmup, (double)saved->lr_warmup_steps, &faults);
    same_number("decay steps", (double)schedule->decay, (double)saved->lr_decay_steps, &faults);
    same_style("decay style", schedule->style, saved->lr_decay_style, &faults);
    same_number("weight decay at the start", group->start_wd, saved->start_wd, &faults);
    same_number("weight decay at the end", group->end_wd, saved->end_wd, &faults);
    same_number("weight-decay steps", (double)schedule->wd_incr_steps, (double)saved->wd_incr_steps, &faults);
    same_style("weight-decay style", schedule->wd_incr_style, saved->wd_incr_style, &faults);
    if (faults.count > 0)
        loom__faults_add(&faults, LOOM_ERR_CONFIG,
            "set optim.override_opt_param_scheduler to keep what was found, optim.use_checkpoint_opt_param_scheduler "
            "to take what was saved");
    return loom__faults_end(&faults);
}

loom_status loom__schedule_load(const loom_lr_state *saved, bool override, bool use_checkpoint,
    loom__schedule *schedule, loom__schedule_group *group, int64_t *num_steps) {
    if (override && use_checkpoint)
        return loom_fail(LOOM_ERR_CONFIG,
            "optim.override_opt_param_scheduler, optim.use_checkpoint_opt_param_scheduler: "
            "found both true, expected one of them at most");
    if (saved->num_steps < 0)
        return loom_fail(LOOM_ERR_ARGUMENT, "num_steps of a saved schedule: found %lld, expected a number from 0",
            (long long)saved->num_steps);
    if (!override && !use_checkpoint)
        LOOM_TRY(check_same(saved, schedule, group));
    if (use_checkpoint) {
        loom__schedule taken = *schedule;
        loom__schedule_group values = {saved->max_lr, saved->min_lr, saved->start_wd, saved->end_wd};
        const char *style = LISTED(saved->lr_decay_style, lr_names);
        taken.style = style ? style : loom__policy_name(saved->lr_decay_style);
        taken.warmup = saved->lr_warmup_steps;
        taken.decay = saved->lr_decay_steps;
        taken.wd_incr_steps = saved->wd_incr_steps;
        taken.wd_incr_style = LISTED(saved->wd_incr_style, wd_names);
        LOOM_TRY(loom__schedule_check(&taken, &values));
        *schedule = taken;
        *group = values;
    }
    *num_steps = saved->num_steps;
    return LOOM_OK;
}

loom_status loom_lr_at(const loom_optimizer_config *config, const loom_lr_config *lr, int64_t steps, int64_t step,
    loom_lr_values *values) {
    loom__schedule schedule;
    loom__schedule_group base;
    loom_lr_values at;
    if (step < 0)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "step of a schedule: found %lld, expected a number from 0", (long long)step);
    LOOM_TRY(loom__schedule_make(config, lr, steps, &schedule, &base));
    loom__schedule_group decoupled = loom__schedule_decoupled(config, &base);
    LOOM_TRY(loom__schedule_lr(&schedule, &base, step, &at.lr));
    LOOM_TRY(loom__schedule_wd(&schedule, &base, step, &at.weight_decay));
    LOOM_TRY(loom__schedule_lr(&schedule, &decoupled, step, &at.decoupled_lr));
    *values = at;
    return LOOM_OK;
}
