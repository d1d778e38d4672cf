/* Loading tensors: what the files of it share. */
#ifndef STRATEGY_LOAD_H
#define STRATEGY_LOAD_H

#include "checkpoint/reshard.h"
#include "strategy/strategy.h"
#include <megaloom/checkpoint.h>
#include <megaloom/state.h>

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
