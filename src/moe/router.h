/* Which experts a token goes to, and with what weight: the arithmetic of a router, on raw arrays, without ranks.
 *
 * Arrays are [tokens, experts], row-major; token number = position * b + sample, as in an activation [s, b, h]. Where
 * values are equal the lower expert, and the lower token, comes first (Megatron-Core leaves that open). Sums are in
 * double. Nothing here is collective; what must be added over ranks is an argument or a result of its own. */
#ifndef MOE_ROUTER_H
#define MOE_ROUTER_H

#include <megaloom/status.h>
#include <stdbool.h>
#include <stdint.h>

typedef enum loom__router_score { LOOM__ROUTER_SOFTMAX, LOOM__ROUTER_SIGMOID } loom__router_score;
typedef enum loom__drop_policy { LOOM__DROP_BY_PROBS, LOOM__DROP_BY_POSITION } loom__drop_policy;

typedef struct loom__router {
    int64_t experts, topk;
    loom__router_score score;
    bool pre_softmax;           /* the softmax is over all experts, not over the chosen ones */
    bool sinkhorn;              /* the choice is balanced over the tokens; a sigmoid (topk 1) or a softmax weighs */
    int64_t groups, group_topk; /* experts come in groups, and a token's are all in group_topk of them; 0, 0 = none */
    double scaling;             /* of the weights; 0 = none */
    double capacity_factor;     /* 0 = an expert takes what comes */
    loom__drop_policy drop;
    bool pad_to_capacity; /* an expert with room takes tokens with weight 0 */
} loom__router;

/* All rules between the fields; LOOM_ERR_ARGUMENT names the field. */
loom_status loom__router_check(const loom__router *router, bool has_bias);

/* What routing gives: arrays of the caller's, [tokens, experts]. */
typedef struct loom__routing {
    float *probs;    /* the weight of the expert's output; 0 where the token does not go */
    uint8_t *chosen; /* 1: the router's choice, topk a token */
    uint8_t *map;    /* 1: where the token goes, after capacity */
    int64_t dropped; /* choices that found no room */
    double *probs64; /* probs before they were rounded, of loom__route64; NULL elsewhere */
} loom__routing;

/* Routes. bias [experts], added to sigmoid scores for the choice alone, or NULL. training matters to sinkhorn.
 * LOOM_ERR_MEMORY. */
loom_status loom__route(const loom__router *router, int64_t tokens, const float *logits, const float *bias,
    bool training, loom__routing *routing);
/* d_logits += the gradient that comes through probs; d_probs [tokens, experts] is read where map and chosen are 1. */
loom_status loom__route_backward(const loom__router *router, int64_t tokens, const float *logits,
    const loom__routing *routing, const float *d_probs, float *d_logits);

/* The same with logits in double, in which everything is computed then. */
loom_status loom__route64(const loom__router *router, int64_t tokens, const double *logits, const float *bias,
    bool training, loom__routing *routing);
loom_status loom__route_backward64(const loom__router *router, int64_t tokens, const double *logits,
    const loom__routing *routing, const float *d_probs, double *d_logits);

/* Tokens that an expert takes when `choices` = tokens * topk are spread: ceil(choices/experts * factor), at least
 * `minimum`, at most 2^62. */
int64_t loom__expert_capacity(int64_t choices, int64_t experts, double factor, int64_t minimum);

/* ---- losses that keep the load even ---- */

/* Which tokens a balance loss is of. */
typedef struct loom__balance {
    const loom__router *router;
    int64_t tokens, batch;  /* tokens = positions * batch */
    bool per_sequence;      /* seq_aux_loss: the load of each sequence by itself */
    const uint8_t *padding; /* [tokens], 1 = the token does not count; or NULL */
} loom__balance;

/* counts [per_sequence ? batch : 1, experts] += how often each expert is among the topk best scores of a token (without
 * bias, groups and capacity). */
loom_status loom__balance_count(const loom__balance *balance, const float *logits, double *counts);
/* weights (as counts, may be the same array) = what a score of the expert costs:
 *   coefficient * experts * counts / (topk * total^2), over batch where per_sequence
 * counts are those of the whole group, total its tokens (per sequence: the tokens of one). */
void loom__balance_weights(
    const loom__balance *balance, double coefficient, const double *counts, double total, double *weights);
/* *loss = this rank's part, the sum of score * weight over its tokens and experts; d_logits (may be NULL) += scale *
 * its gradient. */
loom_status loom__balance_loss(const loom__balance *balance, const float *logits, const double *weights, double scale,
    double *loss, float *d_logits);

/* *loss = coefficient * the mean over tokens of (log sum exp logits)^2; d_logits (may be NULL) += scale * its gradient.
 */
void loom__router_z_loss(int64_t tokens, int64_t experts, const float *logits, const uint8_t *padding,
    double coefficient, double scale, double *loss, float *d_logits);

/* The same three of logits in double. */
loom_status loom__balance_count64(const loom__balance *balance, const double *logits, double *counts);
loom_status loom__balance_loss64(const loom__balance *balance, const double *logits, const double *weights,
    double scale, double *loss, double *d_logits);
void loom__router_z_loss64(int64_t tokens, int64_t experts, const double *logits, const uint8_t *padding,
    double coefficient, double scale, double *loss, double *d_logits);

/* bias[e] += rate * sign(mean of counts - counts[e]). */
void loom__expert_bias_update(int64_t experts, const double *counts, double rate, float *bias);

#endif
