/* From the fields of a configuration to the sizes that a layout and its stages are made of. */
#ifndef CONFIG_SIZES_H
#define CONFIG_SIZES_H

#include <megaloom/config.h>
#include <megaloom/layout.h>
#include <megaloom/schedule.h>
#include <megaloom/stages.h>

loom_parallel_sizes loom__strategy_sizes(const loom_megatron_strategy_config *strategy, int64_t world_size);
/* Of training; NULL is the default. */
loom_schedule_kind loom__strategy_schedule(const loom_megatron_strategy_config *strategy);

#endif
