/* What a trace shows beside the computations of a schedule: a bounded record of one rank, which whoever does such a
 * thing finds at the rank. Only the rank's own thread writes. */
#ifndef RUNTIME_SPANS_H
#define RUNTIME_SPANS_H

#include "runtime/rank.h"
#include <megaloom/timeline.h>

typedef struct loom__span {
    loom_span_kind kind;
    int64_t bucket; /* -1 where it is about none */
    int64_t bytes;
    uint64_t start, end; /* nanoseconds of loom__clock */
} loom__span;

/* The memory is its owner's. What finds no place is counted. */
typedef struct loom__spans {
    loom__span *spans; /* [capacity] */
    int64_t count, capacity, dropped;
} loom__spans;

/* The clock while spans are recorded, else 0. */
static inline uint64_t loom__span_clock(const loom_rank *rank) {
    return rank->spans ? loom__clock() : 0;
}

/* Nothing while none are recorded, or where the span began before they were (start 0). */
static inline void loom__span_add(loom_rank *rank, const loom__span *span) {
    loom__spans *to = rank->spans;
    if (!to || span->start == 0)
        return;
    if (to->count < to->capacity)
        to->spans[to->count++] = *span;
    else
        to->dropped++;
}

#endif
