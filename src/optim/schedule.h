/* Learning rate and weight decay as functions of the step. Pure arithmetic in double. */
#ifndef OPTIM_SCHEDULE_H
#define OPTIM_SCHEDULE_H

#include <megaloom/optim.h>

/* style "warmup-cosine": step t < warmup uses max_lr*(t+1)/warmup, then half a cosine from max_lr at t = warmup to
 * min_lr at t = decay - 1 (the last step), min_lr after it. Weight decay is end_wd. styles "constant", "linear",
 * "cosine", "inverse-square-root", "WSD": Megatron-Core's OptimizerParamScheduler. Up to and with step = warmup:
 * init_lr + (max_lr - init_lr)*step/warmup; then the style's decay over decay - warmup steps to min_lr. Weight decay
 * goes from start_wd to end_wd over wd_incr_steps ("constant", "linear", "cosine"). NeMo's policies by their names: see
 * loom_lr_config. */
typedef struct loom__schedule {
    const char *style;     /* never freed: a string of the program */
    int64_t warmup, decay; /* steps; Megatron's may also be samples; decay is a policy's max_steps */
    double init_lr;        /* Megatron's alone */
    const char *wsd_style; /* of WSD: "linear", "cosine", "exponential", "minus_sqrt" */
    int64_t wsd_decay;     /* length of WSD's annealing, which ends at `decay`; -1 = not given */
    int64_t wd_incr_steps;
    const char *wd_incr_style;
    int64_t hold;     /* of a policy: warm-up and hold together, 0 = it does not hold */
    int64_t constant; /* of CosineAnnealing and T5InverseSquareRootAnnealing */
    double power, decay_rate;
    bool cycle;
    int64_t d_model;
} loom__schedule;

/* The values that groups of parameters may have of their own. */
typedef struct loom__schedule_group {
    double max_lr, min_lr, start_wd, end_wd;
} loom__schedule_group;

/* Checks what Megatron-Core's constructor checks, and the names of the styles at once; all faults are reported. */
loom_status loom__schedule_check(const loom__schedule *schedule, const loom__schedule_group *group);

/* The schedule of a run of `steps` steps (at least 1), and its group without overrides. Nothing of the configuration is
 * kept. Checked. */
loom_status loom__schedule_make(const loom_optimizer_config *config, const loom_lr_config *lr, int64_t steps,
    loom__schedule *schedule, loom__schedule_group *group);

/* The group of embedding and head under optim.decoupled_lr; the group `base` without it. */
loom__schedule_group loom__schedule_decoupled(const loom_optimizer_config *config, const loom__schedule_group *base);

/* What a scheduler that has made num_steps steps saves, and taking it up again as the reference does: with `override`
 * only num_steps is taken, with `use_checkpoint` all values, else all must agree (LOOM_ERR_CONFIG names those that do
 * not). On an error nothing changes. */
loom_lr_state loom__schedule_save(const loom__schedule *schedule, const loom__schedule_group *group, int64_t num_steps);
loom_status loom__schedule_load(const loom_lr_state *saved, bool override, bool use_checkpoint,
    loom__schedule *schedule, loom__schedule_group *group, int64_t *num_steps);

/* The values of step `step` (from 0). LOOM_ERR_CONFIG for an unknown style where the step depends on it. */
loom_status loom__schedule_lr(
    const loom__schedule *schedule, const loom__schedule_group *group, int64_t step, double *lr);
loom_status loom__schedule_wd(
    const loom__schedule *schedule, const loom__schedule_group *group, int64_t step, double *weight_decay);

#endif
