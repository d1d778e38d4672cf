/* Chunks of a checkpoint for those who want them: read by each for itself, or once in a group and sent to the others. */
#ifndef STRATEGY_CHUNKS_H
#define STRATEGY_CHUNKS_H

#include "strategy/strategy.h"
#include <megaloom/checkpoint.h>

typedef struct loom__chunk_wish {
    int64_t tensor, chunk; /* numbers in the checkpoint */
} loom__chunk_wish;

/* Calls take(context, wish number, elements in fp32) for each wish, in any order; wishes come sorted and once. The
 * elements are borrowed for the call, and lie in the checkpoint's file where they can. While one is taken, the file's
 * next ones are on their way. With `group` of several members: collective, and each chunk is read by one of those that
 * wish it, by bytes in balance, and sent to the others; the memory is that of two chunks. `prepared` is what the caller
 * has come to before: the group's members begin together or not at all. */
loom_status loom__chunks_read(loom_comm *group, loom_status prepared, const loom_checkpoint *checkpoint,
    const loom__chunk_wish *wishes, int64_t count,
    loom_status (*take)(void *context, int64_t wish, const float *values), void *context);

#endif
