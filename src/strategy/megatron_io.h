/* What the strategy asks of the Megatron checkpoint I/O itself. */
#ifndef STRATEGY_MEGATRON_IO_H
#define STRATEGY_MEGATRON_IO_H

#include "strategy/strategy.h"
#include <megaloom/checkpoint_io.h>

/* Its configuration; NULL for an I/O of another kind. */
const loom_checkpoint_io_config *loom__megatron_io_config(const loom_checkpoint_io *io);

#endif
