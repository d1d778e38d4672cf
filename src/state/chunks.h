/* Chunks of a checkpoint for those who want them: read by each for itself, or once in a group and sent to the others.
 */
#ifndef STATE_CHUNKS_H
#define STATE_CHUNKS_H

#include "strategy/strategy.h"
#include <megaloom/checkpoint.h>

typedef struct loom__chunk_wish {
    int64_t tensor, chunk; /* numbers in the checkpoint */
} loom__chunk_wish;

typedef struct loom__chunk_source {
    const loom_checkpoint *checkpoint;
    loom_comm *group;      /* whose members share the reading; NULL: this rank reads for itself */
    bool direct;           /* past the page cache: nobody else of the machine wants the same chunks from the disk */
    const loom_team *team; /* of this rank; may be NULL */
} loom__chunk_source;

/* Calls take(context, wish number, elements in fp32) for each wish, in any order; wishes come sorted and once. The
 * elements are borrowed for the call. While one chunk is taken, a thread reads the next one. With a group of several
 * members: collective, and each chunk is read by one of those that wish it, by elements in balance, and sent to the
 * others. The memory is that of three chunks at most. `prepared` is what the caller has come to before: the group's
 * members begin together or not at all. */
loom_status loom__chunks_read(const loom__chunk_source *from, loom_status prepared, const loom__chunk_wish *wishes,
    int64_t count, loom_status (*take)(void *context, int64_t wish, const float *values), void *context);

#endif
