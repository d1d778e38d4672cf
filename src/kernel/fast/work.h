/* Cutting work for the team, by shape alone, and scratch. */
#ifndef KERNEL_FAST_WORK_H
#define KERNEL_FAST_WORK_H

#include "kernel/fast/fast.h"
#include "kernel/fast/simd.h"
#include "kernel/ref/ref.h"

enum {
    ITEM_ELEMENTS = 16384
}; /* of one item of memory-bound work: it fits the cache, and costs far more than its hand-out */

INLINE int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}
INLINE int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}
INLINE int64_t parts_of(int64_t size, int64_t part) {
    return (size + part - 1) / part;
}
INLINE int64_t round_up(int64_t size, int64_t unit) {
    return parts_of(size, unit) * unit;
}

INLINE int64_t rows_per_item(int64_t cols) {
    return larger(1, ITEM_ELEMENTS / larger(1, cols));
}

/* Scratch for a call: a part that all workers see, which lives in front of the owner's private part, and a private part
 * for each worker. It is reserved before the run, so that running out of memory is known while another way is open. */
typedef struct scratch {
    loom_team *team;
    size_t private_bytes;
    void *shared;
    void *owner;
} scratch;

INLINE bool scratch_reserve(scratch *s, loom_team *team, size_t shared_bytes, size_t private_bytes) {
    shared_bytes = (shared_bytes + 63) / 64 * 64;
    private_bytes = private_bytes ? private_bytes : 64; /* so that NULL always means that memory is out */
    *s = (scratch){team, private_bytes, loom_team_scratch(team, 0, shared_bytes + private_bytes), NULL};
    if (!s->shared)
        return false;
    s->owner = (char *)s->shared + shared_bytes;
    for (int worker = 1; worker < loom_team_size(team); worker++)
        if (!loom_team_scratch(team, worker, private_bytes))
            return false;
    return true;
}

INLINE void *scratch_of(const scratch *s, int worker) {
    return worker == 0 ? s->owner : loom_team_scratch(s->team, worker, s->private_bytes);
}

#endif
