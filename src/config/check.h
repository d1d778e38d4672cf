/* The checks of what depends on several fields, over the files of this room. */
#ifndef CONFIG_CHECK_H
#define CONFIG_CHECK_H

#include "base/faults.h"
#include <megaloom/config.h>

/* Adds the faults that a part has found, each with the section of the field that its line begins with: the parts do
 * not know where a run file says their fields. A fault that two parts find is added once. */
void loom__check_add_part(loom__faults *faults, const loom__faults *part);

/* All checks of loom_run_config_check, without the nearest legal values. False where a field has a fault of its own:
 * then nothing else was judged. */
bool loom__check_run(const loom_run_config *config, int64_t world_size, loom__faults *faults);
/* What is judged of strategy, model and data, whose fields have no faults of their own. */
void loom__check_sizes(const loom_run_config *config, int64_t world_size, loom__faults *faults);

/* Says behind each line of loom__check_sizes which values of the fields that it names are legal (base/suggest.h).
 * faulty: one a field of the table, true where lines about it are left out; NULL = none. */
void loom__suggest_run(const loom_run_config *config, const bool *faulty, int64_t world_size, loom__faults *faults);
/* Adds the lines of `found` that speak of no faulty field: by its own name, as a word. */
void loom__add_unknown(loom__faults *faults, const loom__faults *found, const bool *faulty);

/* Without some sizes nothing of a model is judged. Where one is missing, the rest is judged with one that all divides,
 * and what is filled in is marked as faulty; false where nothing is missing, or nothing sensible can be put there. */
bool loom__fill_in(loom_run_config *config, bool *faulty);

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
