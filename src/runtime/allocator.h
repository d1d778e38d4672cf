/* The caching allocator of a rank: activations, gradients and scratch of one thread of control. */
#ifndef RUNTIME_ALLOCATOR_H
#define RUNTIME_ALLOCATOR_H

#include <megaloom/tensor.h>

typedef struct loom__allocator loom__allocator;

loom_status loom__allocator_create(loom__allocator **allocator);
/* Gives all memory back to the system; blocks still handed out become invalid. NULL is accepted. */
void loom__allocator_destroy(loom__allocator *allocator);

/* 64-byte aligned memory of at least `bytes` (0 gives a valid block). Contents undefined. */
loom_status loom__allocate(loom__allocator *allocator, size_t bytes, void **memory);
/* Before the rank's endpoint goes. */
void loom__allocator_forget_endpoint(loom__allocator *allocator);
/* Keeps the memory where the allocator's rank has lent buffers to MPI that it may still write to (endpoint->lent). */
void loom__release(loom__allocator *allocator, void *memory);

loom_memory loom__allocator_memory(const loom__allocator *allocator);

/* The allocator of a rank, made on first use. */
loom_status loom__rank_allocator(loom_rank *rank, loom__allocator **allocator);

#endif
