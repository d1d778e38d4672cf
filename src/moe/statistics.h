/* What routers decide during a step, gathered layer by layer: this rank's sums first, then those of all ranks. */
#ifndef MOE_STATISTICS_H
#define MOE_STATISTICS_H

#include "moe/router.h"
#include <megaloom/router.h>

typedef struct loom__router_collector loom__router_collector;

/* layers [count] (copied): the layers of the model that have experts, ascending. limited: they have a capacity.
 * LOOM_ERR_MEMORY. */
loom_status loom__router_collector_create(
    const int64_t *layers, int64_t count, int64_t experts, bool limited, loom__router_collector **collector);
void loom__router_collector_destroy(loom__router_collector *collector); /* NULL is accepted */

/* A step begins. What `finish` gave stays. */
void loom__router_collector_clear(loom__router_collector *collector);

/* The losses of one microbatch, each divided by its coefficient. `part` is what this rank adds: the sum over the ranks
 * that share the microbatch's tokens is its loss. */
typedef struct loom__router_losses {
    bool has[LOOM_ROUTER_LOSS_COUNT];
    double part[LOOM_ROUTER_LOSS_COUNT];
} loom__router_losses;
/* Adds what this rank routed of one microbatch in one layer. LOOM_ERR_INTERNAL: the layer is none of the collector's.
 */
loom_status loom__router_collector_add(loom__router_collector *collector, int64_t layer, int64_t tokens,
    const loom__routing *routing, const loom__router_losses *losses);

/* What is to be added up over all ranks, in place, before `finish`: *count numbers, the same on every rank. Those that
 * are counts are whole, so that their sum is exact in any order. */
double *loom__router_collector_sums(loom__router_collector *collector, int64_t *count);
/* The step is over, and the sums are those of all ranks, `sharers` of which share each microbatch's tokens. What is
 * returned is the collector's and holds until the next call. */
const loom_router_statistics *loom__router_collector_finish(loom__router_collector *collector, int64_t sharers);

#endif
