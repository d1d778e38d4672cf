/* NeMo's learning-rate policies. Pure arithmetic in double. */
#ifndef OPTIM_POLICIES_H
#define OPTIM_POLICIES_H

#include "base/faults.h"
#include "optim/schedule.h"

/* The name as a string that lives for ever, or NULL where no policy has it. */
const char *loom__policy_name(const char *name);

/* The rate after `step` steps; false where schedule->style is no policy. */
bool loom__policy_lr(const loom__schedule *schedule, const loom__schedule_group *group, int64_t step, double *lr);

/* What a policy needs beside what all schedules need. */
void loom__policy_check(const loom__schedule *schedule, loom__faults *faults);

#endif
