/* What the files of the optimizer share. */
#ifndef OPTIM_OPTIMIZER_H
#define OPTIM_OPTIMIZER_H

#include "optim/norm.h"
#include "optim/optim.h"
#include "optim/schedule.h"

/* Which values a parameter has; the number is an index of tables of LOOM_OPTIMIZER_GROUPS. */
enum { LOOM__GROUP_DECAYS = 1, LOOM__GROUP_SCALED = 2, LOOM__GROUP_DECOUPLED = 4 };

struct loom_optimizer {
    loom_rank *rank;
    loom__ddp *ddp;
    loom_comm *model_parallel, *expert_model_parallel;
    loom_optimizer_config config; /* its strings are not kept */
    bool sgd, override_schedule, use_saved_schedule;
    loom__norm_type norm_type;
    loom__schedule schedule;
    loom__schedule_group base, decoupled; /* before multipliers */
    double lr_mult;
    uint8_t *groups;  /* [places] LOOM__GROUP_… */
    int64_t *counted; /* [places] leading elements that this rank counts in the norm */
    loom__optimizer_state state;
    bool has_scaler;
    loom__scaler scaler;
    double token_factor;
    int64_t steps_done, skipped_steps;
    int64_t schedule_steps; /* of the schedule; other than steps_done where one was loaded */
};

/* The values of all groups, also of those without parameters, for the next step. `parameters` is 0. */
loom_status loom__optimizer_group_values(
    const loom_optimizer *optimizer, loom_optimizer_group groups[LOOM_OPTIMIZER_GROUPS]);

#endif
