/* What the files of a save share. */
#ifndef STRATEGY_SAVE_H
#define STRATEGY_SAVE_H

#include "strategy/strategy.h"
#include <megaloom/state.h>

/* loom_fabric_save, when no other save goes on. */
loom_status loom__fabric_start_save(loom_fabric *fabric, const char *path, const loom_state *state,
    const loom_state_filter *filters, int64_t filter_count);

/* Tells the checkpoint I/O about how much this rank will write of a module and its optimizer, which may be NULL. It
 * cannot fail: what cannot be saved is told by the save. */
void loom__fabric_expect_save(loom_fabric *fabric, loom_parallel *parallel, loom_optimizer *optimizer);

#endif
