/* What the routers of a model with experts decided in a training step: the load of each expert, what found no room, and
 * the losses that keep the load even. loom_parallel_router_statistics gives it, loom_step_report takes it. */
#ifndef MEGALOOM_ROUTER_H
#define MEGALOOM_ROUTER_H

#include <megaloom/status.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(ENUM, name): a router's own losses, under the names that Megatron-Core logs them by. */
#define LOOM_ROUTER_LOSS_LIST(X)                                                                                       \
    X(LOAD_BALANCING, "load_balancing_loss")                                                                           \
    X(SEQ_LOAD_BALANCING, "seq_load_balancing_loss")                                                                   \
    X(GLOBAL_LOAD_BALANCING, "global_load_balancing_loss")                                                             \
    X(Z, "z_loss")

typedef enum loom_router_loss {
#define LOOM_ROUTER_LOSS_ENUM(name, text) LOOM_ROUTER_##name,
    LOOM_ROUTER_LOSS_LIST(LOOM_ROUTER_LOSS_ENUM)
#undef LOOM_ROUTER_LOSS_ENUM
        LOOM_ROUTER_LOSS_COUNT
} loom_router_loss;

/* One layer of experts, over all tokens of a step's global batch. */
typedef struct loom_router_layer {
    int64_t layer;            /* of the model, from 0 */
    const int64_t *chosen;    /* [experts] tokens that chose the expert: their sum is tokens * moe_router_topk */
    const int64_t *kept;      /* [experts] those of them that its capacity let through */
    int64_t choices, dropped; /* the sum of chosen, and how many of them found no room */
    double load; /* the largest of chosen over their mean: 1 is even, `experts` all on one; NaN without choices */
    /* Divided by the coefficient, a mean over the microbatches and data-parallel ranks; NaN: the model has no such
     * loss. Megatron-Core logs them so, but for the z loss, of which it logs the tokens of one rank alone. That of the
     * global batch is of the load so far in the step: how many microbatches a rank has decides what it is. */
    double losses[LOOM_ROUTER_LOSS_COUNT];
} loom_router_layer;

typedef struct loom_router_statistics {
    int64_t experts;
    bool limited; /* experts have a capacity: only then can anything be dropped */
    int64_t layer_count;
    const loom_router_layer *layers;       /* [layer_count] those with experts, in the order of the model */
    int64_t choices, dropped;              /* of all layers */
    double load, mean_load;                /* of the most uneven layer; the mean over the layers */
    double losses[LOOM_ROUTER_LOSS_COUNT]; /* means over the layers; NaN: no such loss */
} loom_router_statistics;

/* "load_balancing_loss", …; "?" for a number that is none. */
LOOM_API const char *loom_router_loss_name(loom_router_loss loss);

#ifdef __cplusplus
}
#endif
#endif
