/* Making an optimizer, and what only the training step, precision, checkpoints and tests need of it. */
#ifndef OPTIM_OPTIM_H
#define OPTIM_OPTIM_H

#include "ddp/ddp.h"
#include "optim/scaler.h"
#include <megaloom/optim.h>

typedef struct loom__optimizer_options {
    int64_t steps; /* of the run: where schedules end */
    loom_optimizer_conditions conditions;
    /* The group over which the norm is added, and over which ranks fail together: tensor x pipeline, and with shards
     * x the members of an instance. */
    loom_comm *model_parallel;
    /* The same of expert parameters: expert tensor x expert x pipeline, and with shards x the members of an instance.
     * The same on all its members: where one has such parameters, all go along. NULL: none of them has any. */
    loom_comm *expert_model_parallel;
    /* Whether this rank counts, in the norm, parameters that are the same on all tensor ranks: true on tensor rank 0.
     */
    bool counts_replicated;
    /* How many leading elements of a parameter's local tensor this rank counts in the norm, where each element of the
     * model must count once: 0 to all. NULL: all of a tensor-parallel one and, with counts_replicated, of a replicated
     * one; else none. */
    int64_t (*counted_elements)(const loom_parameter *parameter, void *context);
    void *counted_context;
} loom__optimizer_options;

/* An optimizer over the parameters of a ddp, which must outlive it. Not collective. LOOM_ERR_CONFIG for values that
 * cannot be. */
loom_status loom__optimizer_create(loom_rank *rank, const loom_optimizer_config *config, const loom_lr_config *lr,
    loom__ddp *ddp, const loom__optimizer_options *options, loom_optimizer **optimizer);

/* NULL is accepted. Not collective. The parameters live on. */
void loom__optimizer_destroy(loom_optimizer *optimizer);

/* The factor expected/valid tokens of the coming step: gradients count `factor` times as much, in norm and update. It
 * is applied once: the step sets it back to 1. A number above 0 that is finite. */
loom_status loom__optimizer_set_token_factor(loom_optimizer *optimizer, double factor);

/* From now on gradients are those of loss * scale: the step divides them again, and skips where they overflowed.
 * LOOM_ERR_CONFIG names options that cannot be. Not collective; the same on all ranks. */
loom_status loom__optimizer_set_scaler(loom_optimizer *optimizer, const loom__scaler_options *options);
/* In which the parameters are kept that it updates. */
loom_dtype loom__optimizer_dtype(const loom_optimizer *optimizer);
/* By what the loss of the coming step is to be multiplied; 1 without a scaler. */
double loom__optimizer_loss_scale(const loom_optimizer *optimizer);

/* What an update keeps of each parameter, state_elements of the ddp's view in each array, in the order of its parts;
 * owned by the optimizer. */
enum { LOOM__OPTIMIZER_ARRAYS = 3 };
typedef struct loom__optimizer_state {
    int count;
    struct loom__optimizer_array {
        const char *name; /* PyTorch's: exp_avg, exp_avg_sq, max_exp_avg_sq; momentum_buffer */
        loom_dtype dtype; /* LOOM_F32 or LOOM_BF16 */
        void *values;
    } arrays[LOOM__OPTIMIZER_ARRAYS];
} loom__optimizer_state;
const loom__optimizer_state *loom__optimizer_state_of(const loom_optimizer *optimizer);

/* loom_optimizer_groups of the parameters of experts, or of the others: `parameters` counts those alone. */
loom_status loom__optimizer_groups_of(
    const loom_optimizer *optimizer, bool experts, loom_optimizer_group groups[LOOM_OPTIMIZER_GROUPS], int64_t *count);

/* As it was made with, without the strings. */
const loom_optimizer_config *loom__optimizer_config_of(const loom_optimizer *optimizer);

/* What else of an optimizer goes on after a stop; its schedule is loom_lr_state. */
typedef struct loom__optimizer_progress {
    int64_t steps, skipped_steps; /* updates so far */
    bool has_scaler, dynamic;     /* of which the rest is; a scale that is not dynamic is no state */
    double scale;
    int64_t growth_tracker, hysteresis_tracker;
} loom__optimizer_progress;
loom__optimizer_progress loom__optimizer_progress_of(const loom_optimizer *optimizer);
/* The scaler's part is left as it is where the optimizer, or the progress, has none that is dynamic. */
void loom__optimizer_set_progress(loom_optimizer *optimizer, const loom__optimizer_progress *progress);

#endif
