/* NeMo's policies. Each is a warm-up to lr, for some a hold at lr, then a curve until max_steps and min_lr behind it.
 * Invariant: where the reference divides by zero or takes the root of nothing, the value here is the one that its
 * neighbours tend to; everywhere else the numbers are the reference's. */
#include "optim/policies.h"
#include <math.h>
#include <string.h>

enum { HOLDS = 1, ANNEALS_WITHOUT_WARMUP = 2 };

typedef struct policy {
    const char *name;
    double (*curve)(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step);
    int flags;
} policy;

static double larger(double a, double b) {
    return a > b ? a : b;
}

/* part/whole; the end where there is nothing to walk through. */
static double share(int64_t part, int64_t whole) {
    return whole > 0 ? (double)part / (double)whole : 1.0;
}

static double left_after_warmup(const loom__schedule *schedule, int64_t step) {
    return 1.0 - share(step - schedule->warmup, schedule->decay - schedule->warmup);
}

static double constant_curve(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    (void)schedule;
    (void)step;
    return group->max_lr;
}

static double square_curve(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    double left = left_after_warmup(schedule, step);
    return larger(group->max_lr * left * left, group->min_lr);
}

/* The reference does not take the warm-up off here. */
static double square_root_curve(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    return larger(group->max_lr * sqrt(1.0 - share(step, schedule->decay)), group->min_lr);
}

static double linear_curve(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    return group->min_lr + left_after_warmup(schedule, step) * (group->max_lr - group->min_lr);
}

static double cosine_between(const loom__schedule_group *group, int64_t step, int64_t steps) {
    double coefficient = 0.5 * (1.0 + cos(M_PI * share(step, steps)));
    return group->min_lr + coefficient * (group->max_lr - group->min_lr);
}

/* With a constant end the warm-up is another one: it starts at 0. */
static double cosine_curve(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    int64_t warmup = schedule->warmup, decay = schedule->decay - schedule->constant - warmup;
    if (schedule->constant == 0)
        return cosine_between(group, step - warmup, schedule->decay - warmup);
    if (warmup > 0 && step <= warmup)
        return group->max_lr * (double)step / (double)warmup;
    return step - warmup > decay ? group->min_lr : cosine_between(group, step - warmup, decay);
}

static double noam_curve(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    double at = step > 1 ? (double)step : 1.0, warmup = (double)schedule->warmup;
    double value = 1.0 / sqrt(at);
    if (schedule->warmup > 0)
        value = fmin(value, at / (warmup * sqrt(warmup)));
    value *= group->max_lr / sqrt((double)schedule->d_model);
    return at > warmup ? larger(value, group->min_lr) : value;
}

static double noam_hold_curve(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    int64_t hold = schedule->hold > 0 ? schedule->hold - schedule->warmup : 0;
    double warmed = larger(1.0, pow((double)schedule->warmup, schedule->decay_rate));
    double decayed = larger(1.0, pow((double)(step - hold), schedule->decay_rate));
    return larger(group->max_lr * warmed / decayed, group->min_lr);
}

static double inverse_square_root_curve(
    const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    return group->max_lr / sqrt((double)(step + 1) / (double)(schedule->warmup + 1));
}

static double t5_curve(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    int64_t at = step > schedule->constant ? step : schedule->constant;
    (void)group;
    return 1.0 / sqrt(at > 1 ? (double)at : 1.0);
}

/* step of `steps`; with cycles the length grows by whole multiples, so that the rate jumps up again. */
static double polynomial(
    const loom__schedule *schedule, const loom__schedule_group *group, int64_t step, int64_t steps) {
    double length = (double)steps, at = (double)step;
    if (schedule->cycle && step != 0 && steps > 0)
        length *= ceil(at / length);
    double done = length > 0.0 ? fmin(at / length, 1.0) : 1.0;
    return group->min_lr + (group->max_lr - group->min_lr) * pow(1.0 - done, schedule->power);
}

static double polynomial_curve(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    return polynomial(schedule, group, step - schedule->warmup, schedule->decay - schedule->warmup);
}

static double polynomial_hold_curve(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    int64_t before = schedule->hold > schedule->warmup ? schedule->hold : schedule->warmup;
    return polynomial(schedule, group, step - schedule->hold, schedule->decay - before);
}

static double linear_hold_curve(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    double done = share(step - schedule->hold, schedule->decay - schedule->hold);
    return group->min_lr + (1.0 - done) * (group->max_lr - group->min_lr);
}

static double one_minus_root_hold_curve(
    const loom__schedule *schedule, const loom__schedule_group *group, int64_t step) {
    double done = share(step - schedule->hold, schedule->decay - schedule->hold);
    return larger(group->max_lr * (1.0 - sqrt(done)), group->min_lr);
}

static const policy policies[] = {
    {"WarmupPolicy", constant_curve, 0},
    {"WarmupHoldPolicy", constant_curve, HOLDS},
    {"SquareAnnealing", square_curve, 0},
    {"SquareRootAnnealing", square_root_curve, 0},
    {"CosineAnnealing", cosine_curve, 0},
    {"WarmupAnnealing", linear_curve, 0},
    {"InverseSquareRootAnnealing", inverse_square_root_curve, 0},
    {"T5InverseSquareRootAnnealing", t5_curve, ANNEALS_WITHOUT_WARMUP},
    {"PolynomialDecayAnnealing", polynomial_curve, 0},
    {"PolynomialHoldDecayAnnealing", polynomial_hold_curve, HOLDS},
    {"NoamAnnealing", noam_curve, ANNEALS_WITHOUT_WARMUP},
    {"NoamHoldAnnealing", noam_hold_curve, HOLDS},
    {"WarmupHoldAnnealLinear", linear_hold_curve, HOLDS},
    {"WarmupHoldAnnealOneMinusSquareRoot", one_minus_root_hold_curve, HOLDS},
};

static const policy *find(const char *name) {
    for (size_t i = 0; name && i < sizeof policies / sizeof *policies; i++)
        if (strcmp(policies[i].name, name) == 0)
            return &policies[i];
    return NULL;
}

const char *loom__policy_name(const char *name) {
    const policy *found = find(name);
    return found ? found->name : NULL;
}

bool loom__policy_lr(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step, double *lr) {
    const policy *found = find(schedule->style);
    if (!found)
        return false;
    bool warms_up = !(found->flags & ANNEALS_WITHOUT_WARMUP) && schedule->warmup > 0 && step <= schedule->warmup;
    /* Noam's has no end. */
    bool ended = step > schedule->decay && found->curve != noam_curve;
    if (warms_up && schedule->constant == 0)
        *lr = group->max_lr * ((double)(step + 1) / (double)(schedule->warmup + 1));
    else if (!warms_up && (found->flags & HOLDS) && step < schedule->hold)
        *lr = group->max_lr;
    else if (!warms_up && ended)
        *lr = group->min_lr;
    else
        *lr = found->curve(schedule, group, step);
    return true;
}

void loom__policy_check(const loom__schedule *schedule, loom__faults *faults) {
    const policy *found = find(schedule->style);
    if (found->curve == noam_curve && schedule->d_model < 1)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "d_model: found %lld, NoamAnnealing needs a width from 1",
            (long long)schedule->d_model);
    if (found->curve == noam_hold_curve && schedule->warmup < 1)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "warmup_steps: found %lld, NoamHoldAnnealing needs a number from 1",
            (long long)schedule->warmup);
    if (schedule->constant < 0 || schedule->hold < 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "constant_steps, hold_steps: found %lld and %lld, expected numbers from 0", (long long)schedule->constant,
            (long long)schedule->hold);
}
