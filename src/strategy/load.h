/* Saving and loading states: what the files of it share. */
#ifndef STRATEGY_LOAD_H
#define STRATEGY_LOAD_H

#include "checkpoint/reshard.h"
#include "strategy/strategy.h"
#include <megaloom/checkpoint.h>
#include <megaloom/state.h>

/* What of a state is not plain; NULL where there is none. */
typedef struct loom__state_parts {
    loom_parallel *module;
    loom_optimizer *optimizer;
} loom__state_parts;
/* LOOM_ERR_ARGUMENT for a state that cannot be. */
loom_status loom__state_check(const loom_state *state, loom__state_parts *parts);
/* The item of that key, or NULL. */
const loom_state_item *loom__state_item(const loom_state *state, const char *key);
static inline bool loom__state_is_plain(const loom_state_item *item) {
    return !item->module && !item->optimizer;
}

/* The layout of a module, whose spec is the module's; *stages are the layout's, for free(). The state of an optimizer
 * that is not distributed is not shared out: dp is 1. */
loom_status loom__parallel_layout(const loom_parallel *parallel, loom__sharded_layout *layout, loom_stage **stages);
/* The same as a value of the common state, and back: *found is false where a checkpoint has none. */
loom_status loom__layout_value(loom_value_pool *pool, const loom__sharded_layout *layout, const loom_value **value);
loom_status loom__layout_read(const loom_value *common, loom__sharded_layout *layout, loom_stage **stages, bool *found);

/* param_groups of the optimizer, its schedule, and its loss scaler (NULL without one). */
loom_status loom__optimizer_groups_value(
    loom_value_pool *pool, const loom_optimizer *optimizer, const loom_value **value);
/* What PyTorch's optimizer keeps beside its tensors: {common_step}, or nothing before the first update. */
loom_status loom__optimizer_step_value(
    loom_value_pool *pool, const loom_optimizer *optimizer, const loom_value **value);
loom_status loom__optimizer_schedule_value(
    loom_value_pool *pool, const loom_optimizer *optimizer, const loom_value **value);
loom_status loom__optimizer_scaler_value(
    loom_value_pool *pool, const loom_optimizer *optimizer, const loom_value **value);

/* A checkpoint that is sorted to the parameters of a module. */
typedef struct loom__load loom__load;

/* optimizer may be NULL. Not collective: the same on every rank. Errors: those of loom__reshard_source_create. */
loom_status loom__load_create(const loom_parallel *parallel, const loom_optimizer *optimizer,
    const loom_checkpoint *checkpoint, loom__load **load);
void loom__load_destroy(loom__load *load); /* NULL is accepted */

/* The three lists of a report, over the whole model: the same on every rank. */
loom_status loom__load_list(const loom__load *load, loom_load_report *report);
/* Reads this rank's part of what there is. *masters: whether the parameters were read as the optimizer's masters, so
 * that with shards they are to be gathered. */
loom_status loom__load_read(const loom__load *load, bool *masters);
/* Updates so far and schedule of the optimizer, as far as the checkpoint has them. */
loom_status loom__load_optimizer(loom_optimizer *optimizer, const loom_checkpoint *checkpoint);

#endif
