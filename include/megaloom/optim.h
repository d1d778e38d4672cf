/* The optimizer: clipping by the global norm, the learning-rate schedule, Adam and SGD.
 *
 * It works on the gradients that the data-parallel reduction left in the parameters' buffers: the same on every member
 * of the data-parallel group, sharded over the model-parallel group (tensor x pipeline). Under the distributed
 * optimizer (strategy.ddp.use_distributed_optimizer) each member of the data-parallel group has a part of every bucket
 * of them, updates that part of the parameters, keeps state for it alone, and then gets the others' parts. */
#ifndef MEGALOOM_OPTIM_H
#define MEGALOOM_OPTIM_H

#include <megaloom/config.h>
#include <megaloom/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct loom_optimizer loom_optimizer;

/* Which parameters decay and which have a scaled rate. Called once for each parameter, when the optimizer is made; the
 * answers must agree on all ranks. Zero-initialised is the default: parameters of two or more dimensions decay, no rate
 * is scaled. The multiplier is kept beside lr and min_lr and applied where a step needs the product, so that nothing,
 * a schedule that is loaded included, applies it twice. */
typedef struct loom_optimizer_conditions {
    /* True: no weight decay. NULL: parameter->decay is false. */
    bool (*no_weight_decay_cond)(const loom_parameter *parameter, void *context);
    /* True: the rate is multiplied by lr_mult. NULL: false for all. */
    bool (*scale_lr_cond)(const loom_parameter *parameter, void *context);
    double lr_mult; /* read where scale_lr_cond is given; from 0 */
    void *context;
} loom_optimizer_conditions;

/* The values that step `step` (from 0) of a run of `steps` steps uses. */
typedef struct loom_lr_values {
    double lr;
    double decoupled_lr; /* of word embeddings and head; lr without optim.decoupled_lr */
    double weight_decay; /* of parameters that decay */
} loom_lr_values;
/* Pure. Errors: LOOM_ERR_CONFIG for a schedule that cannot be, as when an optimizer is made. */
LOOM_API loom_status loom_lr_at(
    const loom_optimizer_config *config, const loom_lr_config *lr, int64_t steps, int64_t step, loom_lr_values *values);

/* What a scheduler saves; the names are those of Megatron-Core's OptimizerParamScheduler. */
typedef struct loom_lr_state {
    int64_t num_steps; /* updates so far; one that was skipped does not count */
    double max_lr, min_lr;
    int64_t lr_warmup_steps, lr_decay_steps;
    char lr_decay_style[48];
    double start_wd, end_wd;
    int64_t wd_incr_steps;
    char wd_incr_style[16];
} loom_lr_state;

/* What a step did. */
typedef struct loom_optimizer_outcome {
    bool skipped;     /* the update was left out because of an overflow, which is logged with the tensor, the microbatch
                         and the rank; only under a loss scale, else an error */
    double grad_norm; /* global norm before clipping, each parameter counted once; rounded to fp32; NaN if skipped */
    double loss_scale;         /* that the gradients of this step had; 1 without one */
    double lr;                 /* learning rate of this step, of parameters without a multiplier */
    int64_t step;              /* updates so far, this one included */
    int64_t skipped_steps;     /* so far, this one included */
    int64_t num_zeros_in_grad; /* over the whole model; -1 without optim.log_num_zeros_in_grad */
} loom_optimizer_outcome;

/* One update:
 *   norm = |t/s| * sqrt(sum of g^2),  c = clip_grad > 0 ? min(1, clip_grad/(norm + 1e-6)) : 1,  Adam or SGD with
 * t/s*c*g (see loom_adamw, loom_sgd), where t corrects the mean over tokens (set by the training step, 1 otherwise) and
 * s is the loss scale. The sum is exact before it is rounded, so that the norm's bits do not depend on who holds which
 * element. Gradients are left as they are. Collective over the model-parallel group; members of a data-parallel group
 * do the same on equal gradients. With a distributed optimizer collective over the members of its instance as well,
 * whose parameters are whole afterwards, or with overlap_param_gather when they are read (loom_parameter_ready).
 *
 * Under a loss scale a NaN or an infinity on one rank makes all ranks of the group skip the step: parameters, moments,
 * the schedule and the number of steps stay as they are, the scale goes its way.
 *
 * Errors: LOOM_ERR_NUMERIC when a gradient is NaN or infinite without a loss scale, or with one that is at its floor,
 * naming the step, the first such parameter and the rank (a rank without one gets LOOM_ERR_ABORTED and that message),
 * or when the norm does not fit fp32; parameters, moments and the number of steps are then unchanged. outcome may be
 * NULL. */
LOOM_API loom_status loom_optimizer_step(loom_optimizer *optimizer, loom_optimizer_outcome *outcome);

/* Somebody has changed the values of parameters of 16 bits, by loading them for example: the fp32 masters become these
 * values, which the next update would else replace by those of the masters. Nothing to do for F32. Not collective; on
 * every rank. */
LOOM_API void loom_optimizer_reload_model_params(loom_optimizer *optimizer);

/* Parameters of this rank that share all values. */
typedef struct loom_optimizer_group {
    int64_t parameters;
    bool decoupled;          /* their rate is optim.decoupled_lr's */
    double lr_mult, wd_mult; /* lr_mult of the conditions, or 1; 0 without weight decay, or 1 */
    double pre_mult_lr;      /* what the schedule gives for the next step */
    double pre_mult_wd;
    double lr, weight_decay; /* the products, which the next step uses */
} loom_optimizer_group;
enum { LOOM_OPTIMIZER_GROUPS = 8 };
/* The groups that have parameters, at most LOOM_OPTIMIZER_GROUPS. Not collective. */
LOOM_API loom_status loom_optimizer_groups(
    const loom_optimizer *optimizer, loom_optimizer_group groups[LOOM_OPTIMIZER_GROUPS], int64_t *count);

/* Bytes that this rank keeps for updates beside parameters and gradients, fp32 masters of 16-bit ones included: of all
 * of its parameters, or of its shard of them under a distributed optimizer. Not collective. */
LOOM_API size_t loom_optimizer_state_bytes(const loom_optimizer *optimizer);

/* The schedule to go on from, and going on from it: optim.override_opt_param_scheduler and
 * optim.use_checkpoint_opt_param_scheduler decide whose values hold; with neither they must agree, else LOOM_ERR_CONFIG
 * names those that do not and nothing changes. Not collective; the same on all ranks. */
LOOM_API loom_lr_state loom_optimizer_lr_state(const loom_optimizer *optimizer);
LOOM_API loom_status loom_optimizer_load_lr_state(loom_optimizer *optimizer, const loom_lr_state *state);

#ifdef __cplusplus
}
#endif
#endif
