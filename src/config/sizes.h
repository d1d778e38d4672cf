/* From the strategy's fields to the sizes that a layout is made of. */
#ifndef CONFIG_SIZES_H
#define CONFIG_SIZES_H

#include <megaloom/config.h>
#include <megaloom/layout.h>

loom_parallel_sizes loom__strategy_sizes(const loom_megatron_strategy_config *strategy, int64_t world_size);

#endif
