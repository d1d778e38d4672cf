/* What the strategy asks of the Megatron checkpoint I/O itself. */
#ifndef STRATEGY_MEGATRON_IO_H
#define STRATEGY_MEGATRON_IO_H

#include "strategy/strategy.h"
#include <megaloom/checkpoint_io.h>

/* Its configuration; NULL for an I/O of another kind. */
const loom_checkpoint_io_config *loom__megatron_io_config(const loom_checkpoint_io *io);

/* Of an I/O whose configuration is not NULL: this rank will write about so many bytes more. With async_save a thread
 * makes the pages of the copy ready while the rank goes on; nothing otherwise, nor while a save goes on. */
void loom__megatron_io_prepare(const loom_checkpoint_io *io, size_t bytes);

#endif
