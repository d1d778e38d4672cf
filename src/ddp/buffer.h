/* Large zeroed buffers that live as long as the model. */
#ifndef DDP_BUFFER_H
#define DDP_BUFFER_H

#include <megaloom/rank.h>

/* `elements` zeros of a dtype, 64-byte aligned, on 2 MB pages where the system gives them, first touched by the rank's
 * team. `what` names the buffer in the error message. Free with loom__buffer_destroy. */
loom_status loom__buffer_create(loom_rank *rank, loom_dtype dtype, int64_t elements, const char *what, void **buffer);
/* As loom_comm_free, of a rank that created it. */
void loom__buffer_destroy(loom_rank *rank, void *buffer);

#endif
