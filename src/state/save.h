/* What the files of a save share. */
#ifndef STATE_SAVE_H
#define STATE_SAVE_H

#include "strategy/strategy.h"
#include <megaloom/state.h>

/* loom_fabric_save, when no other save goes on. */
loom_status loom__fabric_start_save(loom_fabric *fabric, const char *path, const loom_state *state,
    const loom_state_filter *filters, int64_t filter_count);

#endif
