/* Buffers of parameters, gradients and moments: long lived and walked from end to end, so they ask for huge pages and
 * are touched first by the threads that will work on them. */
#include "ddp/buffer.h"
#include <megaloom/comm.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 1 << 21, LINE = 64 };

typedef struct touch {
    unsigned char *memory;
    size_t bytes;
} touch;

static void zero_page(void *argument, int64_t item, int worker) {
    (void)worker;
    const touch *whole = argument;
    size_t first = (size_t)item * PAGE, left = whole->bytes - first;
    memset(whole->memory + first, 0, left < PAGE ? left : PAGE);
}

loom_status loom__buffer_create(loom_rank *rank, loom_dtype dtype, int64_t elements, const char *what, void **buffer) {
    size_t wanted = (size_t)elements * loom_dtype_size(dtype), unit = wanted >= PAGE ? PAGE : LINE;
    size_t bytes = (wanted + unit - 1) / unit * unit;
    if (bytes == 0)
        bytes = unit;
    void *memory = aligned_alloc(unit, bytes);
    if (!memory)
        return loom_fail(
            LOOM_ERR_MEMORY, "out of memory for %s of %zu bytes (rank %d)", what, bytes, loom_rank_index(rank));
    /* A hint: without huge pages the buffer works all the same. */
    if (unit == PAGE)
        (void)madvise(memory, bytes, MADV_HUGEPAGE);
    touch whole = {memory, bytes};
    loom_team_run(loom_rank_team(rank), zero_page, &whole, (int64_t)((bytes + PAGE - 1) / PAGE));
    *buffer = memory;
    return LOOM_OK;
}

void loom__buffer_destroy(loom_rank *rank, void *buffer) {
    loom_comm_free(loom_rank_world(rank), buffer);
}
