/* A best-fit allocator over large segments, for the few hundred live blocks of a training step. Blocks of a segment lie
 * next to each other and know their neighbours; freed neighbours are joined at once. The choice of a block depends only
 * on the sequence of calls, so a step that repeats its calls repeats its addresses and the high-water mark stops
 * growing. Under AddressSanitizer each block is a system allocation, so that overruns are seen. */
#include "runtime/allocator.h"
#include "runtime/rank.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { ALIGNMENT = 64, HUGE_PAGE = 2 << 20 };
#define SEGMENT_BYTES ((size_t)32 << 20)

#if defined(__SANITIZE_ADDRESS__)
#define DIRECT 1
#elif defined(__has_feature)
#define DIRECT __has_feature(address_sanitizer) /* clang's word for it */
#else
#define DIRECT 0
#endif

typedef struct block {
    size_t bytes;                 /* of the memory behind this header */
    struct block *before, *after; /* neighbours in the segment */
    struct block *free_before, *free_after;
    bool free;
    char pad[ALIGNMENT - 5 * 8 - 1];
} block;

_Static_assert(sizeof(block) == ALIGNMENT, "the memory behind a header must be aligned");

typedef struct segment {
    struct segment *next;
    void *memory;
    size_t bytes;
} segment;

struct loom__allocator {
    segment *segments;
    block *free_list;
    const bool *lent; /* the endpoint's; NULL = of no rank */
    loom_memory memory;
};

loom_status loom__allocator_create(loom__allocator **out) {
    loom__allocator *allocator = calloc(1, sizeof *allocator);
    if (!allocator)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for an allocator");
    *out = allocator;
    return LOOM_OK;
}

void loom__allocator_destroy(loom__allocator *allocator) {
    if (!allocator)
        return;
    for (segment *s = allocator->segments, *next; s; s = next) {
        next = s->next;
        free(s->memory);
        free(s);
    }
    free(allocator);
}

static void free_list_add(loom__allocator *allocator, block *b) {
    b->free = true;
    b->free_before = NULL;
    b->free_after = allocator->free_list;
    if (b->free_after)
        b->free_after->free_before = b;
    allocator->free_list = b;
}

static void free_list_remove(loom__allocator *allocator, block *b) {
    b->free = false;
    if (b->free_before)
        b->free_before->free_after = b->free_after;
    else
        allocator->free_list = b->free_after;
    if (b->free_after)
        b->free_after->free_before = b->free_before;
}

static loom_status add_segment(loom__allocator *allocator, size_t wanted) {
    size_t bytes = wanted + sizeof(block) > SEGMENT_BYTES ? wanted + sizeof(block) : SEGMENT_BYTES;
    bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    segment *s = malloc(sizeof *s);
    void *memory = s ? aligned_alloc(HUGE_PAGE, bytes) : NULL;
    if (!memory) {
        free(s);
        return loom_fail(
            LOOM_ERR_MEMORY, "out of memory: %zu bytes asked for, %zu in use", wanted, allocator->memory.in_use);
    }
    (void)madvise(memory, bytes, MADV_HUGEPAGE); /* advice: without it the run is slower, not wrong */
    *s = (segment){allocator->segments, memory, bytes};
    allocator->segments = s;
    allocator->memory.reserved += bytes;
    block *b = memory;
    *b = (block){.bytes = bytes - sizeof(block)};
    free_list_add(allocator, b);
    return LOOM_OK;
}

static block *best_fit(const loom__allocator *allocator, size_t bytes) {
    block *best = NULL;
    for (block *b = allocator->free_list; b; b = b->free_after)
        if (b->bytes >= bytes && (!best || b->bytes < best->bytes)) {
            best = b;
            if (b->bytes == bytes)
                break;
        }
    return best;
}

static void count_in(loom__allocator *allocator, size_t bytes) {
    allocator->memory.in_use += bytes;
    if (allocator->memory.in_use > allocator->memory.high_water)
        allocator->memory.high_water = allocator->memory.in_use;
}

loom_status loom__allocate(loom__allocator *allocator, size_t bytes, void **memory) {
    if (bytes > SIZE_MAX / 2)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory: %zu bytes asked for", bytes);
    bytes = bytes ? (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT : ALIGNMENT;
    if (DIRECT) {
        block *b = aligned_alloc(ALIGNMENT, bytes + sizeof(block));
        if (!b)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory: %zu bytes asked for", bytes);
        *b = (block){.bytes = bytes};
        count_in(allocator, bytes);
        *memory = b + 1;
        return LOOM_OK;
    }
    block *b = best_fit(allocator, bytes);
    if (!b) {
        LOOM_TRY(add_segment(allocator, bytes));
        b = best_fit(allocator, bytes);
    }
    free_list_remove(allocator, b);
    if (b->bytes >= bytes + 2 * sizeof(block)) {
        block *rest = (block *)((char *)(b + 1) + bytes);
        *rest = (block){.bytes = b->bytes - bytes - sizeof(block), .before = b, .after = b->after};
        if (rest->after)
            rest->after->before = rest;
        b->after = rest;
        b->bytes = bytes;
        free_list_add(allocator, rest);
    }
    count_in(allocator, b->bytes);
    *memory = b + 1;
    return LOOM_OK;
}

/* Takes `b` into its neighbour `before`. */
static void join(block *before, block *b) {
    before->bytes += sizeof(block) + b->bytes;
    before->after = b->after;
    if (b->after)
        b->after->before = before;
}

void loom__allocator_forget_endpoint(loom__allocator *allocator) {
    allocator->lent = NULL;
}

void loom__release(loom__allocator *allocator, void *memory) {
    /* The run has failed, and MPI may still write into buffers of messages that were given up. */
    if (!memory || (allocator->lent && *allocator->lent))
        return;
    block *b = (block *)memory - 1;
    allocator->memory.in_use -= b->bytes;
    if (DIRECT) {
        free(b);
        return;
    }
    if (b->after && b->after->free) {
        free_list_remove(allocator, b->after);
        join(b, b->after);
    }
    if (b->before && b->before->free) {
        block *before = b->before;
        free_list_remove(allocator, before);
        join(before, b);
        b = before;
    }
    free_list_add(allocator, b);
}

loom_memory loom__allocator_memory(const loom__allocator *allocator) {
    return allocator->memory;
}

loom_status loom__rank_allocator(loom_rank *rank, loom__allocator **allocator) {
    if (!rank->allocator) {
        LOOM_TRY(loom__allocator_create(&rank->allocator));
        rank->allocator->lent = &rank->endpoint->lent;
    }
    *allocator = rank->allocator;
    return LOOM_OK;
}

loom_memory loom_rank_memory(const loom_rank *rank) {
    return rank->allocator ? loom__allocator_memory(rank->allocator) : (loom_memory){0};
}
