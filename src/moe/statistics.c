/* Statistics of routers. All that is gathered is a row of doubles a layer (choices and kept tokens of each expert, sums
 * of losses and how many there were), so that one sum over all ranks makes a step's statistics of it, whoever has which
 * tokens and which layers. Invariant: the row of a layer that this rank does not have is zero. */
#include "moe/statistics.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Behind the two counts of each expert. */
enum { LOSS_SUMS = 0, LOSS_COUNTS = LOOM_ROUTER_LOSS_COUNT, LOSS_COLUMNS = 2 * LOOM_ROUTER_LOSS_COUNT };

struct loom__router_collector {
    int64_t width; /* of a row */
    double *sums;  /* [layers, width] */
    loom_router_statistics result;
    loom_router_layer *layers; /* of the result; their numbers stand from the start */
    int64_t *counts;           /* [layers, 2, experts] of the result */
};

const char *loom_router_loss_name(loom_router_loss loss) {
    switch (loss) {
#define CASE(name, text)                                                                                               \
    case LOOM_ROUTER_##name:                                                                                           \
        return text;
        LOOM_ROUTER_LOSS_LIST(CASE)
#undef CASE
    case LOOM_ROUTER_LOSS_COUNT:
        break;
    }
    return "?";
}

loom_status loom__router_collector_create(
    const int64_t *layers, int64_t count, int64_t experts, bool limited, loom__router_collector **out) {
    loom__router_collector *made = calloc(1, sizeof *made);
    const size_t rows = (size_t)count;
    if (made) {
        made->width = 2 * experts + LOSS_COLUMNS;
        made->sums = calloc(rows * (size_t)made->width + 1, sizeof *made->sums);
        made->layers = calloc(rows + 1, sizeof *made->layers);
        made->counts = calloc(rows * 2 * (size_t)experts + 1, sizeof *made->counts);
    }
    if (!made || !made->sums || !made->layers || !made->counts) {
        loom__router_collector_destroy(made);
        return loom_fail(LOOM_ERR_MEMORY,
            "out of memory for the statistics of %" PRId64 " layers of %" PRId64 " experts", count, experts);
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t *counts = made->counts + 2 * i * experts;
        made->layers[i] = (loom_router_layer){.layer = layers[i], .chosen = counts, .kept = counts + experts};
    }
    made->result =
        (loom_router_statistics){.experts = experts, .limited = limited, .layer_count = count, .layers = made->layers};
    *out = made;
    return LOOM_OK;
}

void loom__router_collector_destroy(loom__router_collector *c) {
    if (!c)
        return;
    free(c->sums);
    free(c->layers);
    free(c->counts);
    free(c);
}

void loom__router_collector_clear(loom__router_collector *c) {
    memset(c->sums, 0, (size_t)(c->result.layer_count * c->width) * sizeof *c->sums);
}

loom_status loom__router_collector_add(loom__router_collector *c, int64_t layer, int64_t tokens,
    const loom__routing *routing, const loom__router_losses *losses) {
    const int64_t experts = c->result.experts;
    int64_t at = 0;
    while (at < c->result.layer_count && c->layers[at].layer != layer)
        at++;
    if (at == c->result.layer_count)
        return loom_fail(LOOM_ERR_INTERNAL, "layer %" PRId64 " has a router, but is none of those with experts", layer);
    double *chosen = c->sums + at * c->width, *kept = chosen + experts, *loss = kept + experts;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t e = 0; e < experts; e++) {
            const bool is_chosen = routing->chosen[t * experts + e];
            chosen[e] += is_chosen;
            kept[e] += is_chosen && routing->map[t * experts + e];
        }
    for (int i = 0; i < LOOM_ROUTER_LOSS_COUNT; i++)
        if (losses->has[i]) {
            loss[LOSS_SUMS + i] += losses->part[i];
            loss[LOSS_COUNTS + i] += 1;
        }
    return LOOM_OK;
}

double *loom__router_collector_sums(loom__router_collector *c, int64_t *count) {
    *count = c->result.layer_count * c->width;
    return c->sums;
}

/* Each rank counts its part of a microbatch, so that `sharers` counts stand for one loss. */
static void finish_layer(const loom__router_collector *c, int64_t at, int64_t sharers) {
    const int64_t experts = c->result.experts;
    const double *chosen = c->sums + at * c->width, *kept = chosen + experts, *loss = kept + experts;
    loom_router_layer *layer = &c->layers[at];
    int64_t *counts = c->counts + 2 * at * experts, most = 0;
    layer->choices = layer->dropped = 0;
    for (int64_t e = 0; e < experts; e++) {
        counts[e] = (int64_t)chosen[e];
        counts[experts + e] = (int64_t)kept[e];
        layer->choices += counts[e];
        layer->dropped += counts[e] - counts[experts + e];
        most = counts[e] > most ? counts[e] : most;
    }
    layer->load = layer->choices > 0 ? (double)most * (double)experts / (double)layer->choices : NAN;
    for (int i = 0; i < LOOM_ROUTER_LOSS_COUNT; i++) {
        const double count = loss[LOSS_COUNTS + i];
        layer->losses[i] = count > 0 ? loss[LOSS_SUMS + i] * (double)sharers / count : NAN;
    }
}

const loom_router_statistics *loom__router_collector_finish(loom__router_collector *c, int64_t sharers) {
    loom_router_statistics *of = &c->result;
    const double count = (double)of->layer_count;
    of->choices = of->dropped = 0;
    of->load = of->mean_load = 0;
    memset(of->losses, 0, sizeof of->losses);
    for (int64_t i = 0; i < of->layer_count; i++) {
        const loom_router_layer *layer = &c->layers[i];
        finish_layer(c, i, sharers);
        of->choices += layer->choices;
        of->dropped += layer->dropped;
        of->load = layer->load > of->load ? layer->load : of->load;
        of->mean_load += layer->load / count;
        for (int k = 0; k < LOOM_ROUTER_LOSS_COUNT; k++)
            of->losses[k] += layer->losses[k] / count;
    }
    return of;
}
