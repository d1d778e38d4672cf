/* Where an asynchronous save copies to, and the copying. */
#ifndef CHECKPOINT_COPY_H
#define CHECKPOINT_COPY_H

#include "checkpoint/task.h"
#include <stddef.h>

/* Memory for copies, kept from one save to the next; zeroed at first, and it must stay where it is. */
typedef struct loom__copy_memory {
    void *data; /* [bytes], on a huge page's border; what was in it is lost by each call below */
    size_t bytes;
    void *mapping;
    size_t mapped;
    loom__task touch; /* of its pages */
    atomic_bool enough;
} loom__copy_memory;

/* `more` bytes beyond those there are, and a thread that touches all of them, until the next call: new pages can take
 * the system longer than the copy that goes into them. Where memory is short nothing is reserved; a save tells. `team`
 * is the owner's, as of a task. */
void loom__copy_memory_prepare(loom__copy_memory *memory, const loom_team *team, size_t more);
/* At least `bytes`. LOOM_ERR_MEMORY, which names `what` is saved. */
loom_status loom__copy_memory_reserve(loom__copy_memory *memory, const char *what, size_t bytes);
void loom__copy_memory_free(loom__copy_memory *memory);

/* memcpy past the caches, as memory that is not read again soon should be written: what a cache line held before is
 * not read first, and what the caches hold is left there. `to` on a border of 16 bytes. */
void loom__copy_past_caches(void *to, const void *from, size_t bytes);

#endif
