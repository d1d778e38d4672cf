/* What the files of this room share: the defaults of a schedule's sizes, and the list that grows. */
#ifndef SCHEDULE_SCHEDULE_H
#define SCHEDULE_SCHEDULE_H

#include <megaloom/schedule.h>

/* Chunks of a stage, 1 without interleaving; microbatches of a group. */
int64_t loom__schedule_chunks(const loom_schedule_config *config);
int64_t loom__schedule_group(const loom_schedule_config *config);

#endif
