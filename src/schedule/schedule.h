/* What the files of this room share: the defaults of a schedule's sizes, who a message goes to, the proof. */
#ifndef SCHEDULE_SCHEDULE_H
#define SCHEDULE_SCHEDULE_H

#include "base/faults.h"
#include <megaloom/schedule.h>

/* Chunks of a stage, 1 without interleaving; microbatches of a group. */
int64_t loom__schedule_chunks(const loom_schedule_config *config);
int64_t loom__schedule_group(const loom_schedule_config *config);

/* All checks of loom_schedule_config_check, without the nearest legal values. */
void loom__schedule_faults(const loom_schedule_config *config, loom__faults *faults);

static inline bool loom__instruction_sends(loom_instruction_kind kind) {
    return kind == LOOM_INSTRUCTION_SEND_NEXT || kind == LOOM_INSTRUCTION_SEND_PREVIOUS;
}
static inline bool loom__instruction_receives(loom_instruction_kind kind) {
    return kind == LOOM_INSTRUCTION_RECEIVE_PREVIOUS || kind == LOOM_INSTRUCTION_RECEIVE_NEXT;
}

/* Proves each list by itself. Since every list has all its receives and sends exactly once, every message of one stage
 * has its other side in the list of a neighbour. */
loom_status loom__schedule_prove(const loom_schedule_config *config, const loom_schedule_list *lists);

#endif
