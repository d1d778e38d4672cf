/* The checks of what depends on several fields, over the files of this room. */
#ifndef CONFIG_CHECK_H
#define CONFIG_CHECK_H

#include "base/faults.h"
#include <megaloom/config.h>

/* Adds the faults that a part has found, as left in the error record, each with the section of the field that its line
 * begins with: the parts do not know where a run file says their fields. A fault that two parts find is added once. */
void loom__check_add_part(loom__faults *faults, loom_status status);

/* All checks of loom_run_config_check. */
void loom__check_run(const loom_run_config *config, int64_t world_size, loom__faults *faults);

/* The same for a run that is planned, with what context and expert parallelism ask of the model. faulty: one a field of
 * the table, true where loading has named it already; what else is said about such a field is left out. */
void loom__check_planned(const loom_run_config *config, const bool *faulty, int64_t world_size, loom__faults *faults);

/* More than there can be threads of one process, and no more than a plan takes. */
bool loom__many_ranks(int64_t ranks);

/* What the strategy's pipeline fields say without a model and a batch. */
void loom__check_strategy_pipeline(const loom_megatron_strategy_config *strategy, loom__faults *faults);
/* The layers on the stages, and the microbatches of every batch size of the run in the schedule. data_parallel: ranks,
 * 0 = unknown, then microbatches are not counted. */
void loom__check_pipeline(const loom_run_config *config, int64_t data_parallel, loom__faults *faults);

#endif
