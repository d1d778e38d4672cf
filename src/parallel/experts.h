/* A layer of experts as operations: the router, the way of rows to the experts and back, and the experts' products.
 *
 * Rows are tokens of this rank, one for each expert that a token goes to, in the order (expert, token). Over the ranks
 * of `all` there is one copy of all experts: ep ranks have experts/ep of them each, and etp ranks a slice of each
 * expert. On the ranks of an expert its rows lie in the order (expert, source rank, token), so that no result depends
 * on when a message comes. Weights of the sum over a token's experts are applied where the token is. F32, BF16 or F16.
 */
#ifndef PARALLEL_EXPERTS_H
#define PARALLEL_EXPERTS_H

#include "moe/router.h"
#include "moe/statistics.h"
#include <megaloom/tensor.h>

typedef struct loom__expert_groups {
    loom_comm *ep, *etp; /* NULL: of one member */
    loom_comm *all;      /* etp members of ep rank 0, of ep rank 1, …; NULL: of one member */
    bool gather;         /* rows go to all ranks and each takes its own, in place of an all-to-all */
} loom__expert_groups;

/* What the router of one layer decided for a microbatch, and the plan of its rows. Counted. */
typedef struct loom__routed {
    int64_t references;
    int64_t tokens, experts;
    loom__routing routing; /* its arrays are this struct's */
    loom__expert_groups groups;
    int64_t rows, *counts, *token; /* of this rank: counts [experts], token [rows] */
    int64_t first_expert, local_experts;
    int64_t sources, *source_counts; /* [sources, experts] of the ranks of `all` */
    int64_t expert_rows;             /* rows that this rank's experts get */
    int64_t *local_counts;           /* [local_experts] of them */
} loom__routed;
void loom__routed_release(loom__routed *routed); /* NULL is accepted */

/* What the router of one layer keeps from one microbatch to the next. */
typedef struct loom__router_memory {
    int64_t experts;
    float *bias;    /* [experts] added to scores for the choice alone; borrowed; NULL: none */
    double *tokens; /* [experts] that have gone to each in this step, of this rank; where there is a bias */
    double *load;   /* [experts] counts of the global balance loss, of all ranks and calls of this step; or NULL */
    int64_t calls;
} loom__router_memory;

/* bias may be NULL; global: there is a global balance loss. LOOM_ERR_MEMORY; loom__router_memory_destroy. */
loom_status loom__router_memory_create(int64_t experts, float *bias, bool global, loom__router_memory **memory);
void loom__router_memory_destroy(loom__router_memory *memory); /* NULL is accepted */
/* Adds a map [tokens, experts] to the counts. */
void loom__router_memory_count(loom__router_memory *memory, int64_t tokens, const uint8_t *map);
/* After the last microbatch of a step: bias[e] += rate * sign(mean of tokens - tokens[e]) with the tokens of all ranks
 * of the group (NULL: of this one), and the counts begin again. The layers are alike, and the same on all members.
 * Collective over the group where there are biases. */
loom_status loom__router_memories_end_step(
    loom__router_memory *const *memories, int64_t count, loom_comm *group, double rate);

/* Where the random numbers of a router belong. */
typedef struct loom__router_noise {
    uint64_t seed;
    int64_t layer;
    const int64_t *sample;    /* [b], borrowed for the call; NULL: 0, 1, … */
    loom_positions positions; /* of this rank's rows */
    const int32_t *each; /* [b] of loom__random_logits: the positions of samples of one row, in their place; or NULL */
} loom__router_noise;

/* Balance losses: of the microbatch, of each sequence by itself, of the step so far. */
typedef enum loom__balance_kind {
    LOOM__BALANCE_MICROBATCH, /* aux_loss */
    LOOM__BALANCE_SEQUENCE,   /* seq_aux_loss */
    LOOM__BALANCE_GLOBAL,     /* global_aux_loss: the counts of all ranks of step_group, averaged over a step's calls */
    LOOM__BALANCES
} loom__balance_kind;

typedef struct loom__router_options {
    loom__router router;
    loom__expert_groups groups;
    bool training;
    bool in_double;     /* logits, the choice, weights and losses; the weights that go on are rounded to fp32 */
    bool random_logits; /* normal ones in place of x W^T, whose gradient goes back as if they were x W^T */
    bool weigh_input;   /* for whoever dispatches: loom__weigh_tokens */
    double jitter;      /* for whoever has x: loom__router_jitter; 0 = none */
    loom__router_noise noise;
    /* Losses that keep the load even, of the tokens of all ranks of balance_group (NULL: of this one): a coefficient of
     * 0 is none. Their gradient is multiplied by own_loss_scale. */
    double balance_coefficient[LOOM__BALANCES], z_coefficient, own_loss_scale;
    loom_comm *balance_group;
    loom_comm *step_group;       /* balance_group of all data ranks together; NULL: this rank alone */
    loom__router_memory *memory; /* of the layer; counted where the tape records a training; NULL: none */
    /* Where a microbatch of a training is added, as one of layer `layer`; borrowed; NULL: nowhere. */
    loom__router_collector *collector;
    int64_t layer;
} loom__router_options;

/* y [s, b, h] = x * u, u uniform in [1 - eps, 1 + eps] for each element. Local. */
loom_status loom__router_jitter(
    loom_tape *tape, loom_tensor *x, double eps, const loom__router_noise *noise, loom_tensor **output);
/* logits [s*b, experts], F32 or F64: standard normal. LOOM_ERR_MEMORY. */
loom_status loom__random_logits(const loom__router_noise *noise, int64_t b, loom_tensor *logits);

/* x [s, b, h] (this rank's rows), weight [experts, h], bias [experts] of the logits or NULL. *probs [s*b, experts] F32:
 * the weights of the experts, to be given to loom__expert_combine. *routed: loom__routed_release. Collective over
 * groups.all, and over balance_group or step_group where there is a balance loss and the tape records. */
loom_status loom__route_tokens(loom_tape *tape, loom_tensor *x, loom_parameter *weight, loom_parameter *bias,
    const loom__router_options *options, loom_tensor **probs, loom__routed **routed);
/* y [s, b, h] = x times the weight of the expert that each token goes to (topk 1; 0 where it was dropped), and units
 * [s*b, experts]: the probs of loom__expert_combine that are left, 1 where it goes. Local. */
loom_status loom__weigh_tokens(loom_tape *tape, loom_tensor *x, loom_tensor *probs, loom__routed *routed,
    loom_tensor **output, loom_tensor **units);
/* The way to the experts and back, in parts, so that other operations can be recorded and computed while rows travel:
 *
 *   rows, exchange start, (others), dispatch; the experts; return, exchange start, (others), combine
 *
 * In the backward the same exchanges run under the backwards of the same others. Each is a collective over a part of
 * groups.all, which all its ranks call in this order.
 *
 * rows [routed->rows, h] of x [s, b, h], one for each expert that a token of this rank goes to. Local. */
loom_status loom__expert_rows(loom_tape *tape, loom_tensor *x, loom__routed *routed, loom_tensor **rows);
/* *moved, pending: what comes here of the rows of all ep ranks, for this rank's experts, or from them back. Nothing is
 * recorded: that does the one of these functions that takes it. Ready at once where rows are gathered. Collective over
 * ep. */
loom_status loom__expert_exchange_start(
    loom_tape *tape, const loom__routed *routed, bool to_experts, loom_tensor *rows, loom_tensor **moved);
/* output [expert_rows, h] of this rank's experts, from what has come of the rows. Collective over etp. */
loom_status loom__expert_dispatch(loom_tape *tape, loom_tensor *moved, loom__routed *routed, loom_tensor **output);
/* y [expert_rows, o] = rows W_e^T + b_e, W_e = weights[e] [o, i] for the rows of local expert e, b_e = biases[e] [o] on
 * the first rank of etp alone, as the sum over etp is to come; their gradients are whole on all. biases: NULL or
 * [local_experts]. Local. */
loom_status loom__expert_linear(loom_tape *tape, loom_tensor *rows, const loom__routed *routed,
    loom_parameter *const *weights, loom_parameter *const *biases, loom_tensor **output);
/* As loom_activate of each expert's rows with its bias, biases[e] [o]; biases NULL: none. Local. */
loom_status loom__expert_activate(loom_tape *tape, loom_activation act, loom_tensor *rows, const loom__routed *routed,
    loom_parameter *const *biases, loom_tensor **output);
/* Of operation `op` on rows of `dtype`: all biases [width] are there and gathered. biases NULL: nothing to do. */
loom_status loom__expert_biases_ready(
    const char *op, loom_dtype dtype, const loom__routed *routed, loom_parameter *const *biases, int64_t width);
/* Adds the sums over each expert's rows of d_y, counts[e] of them, to the gradients of biases[e]. */
void loom__expert_bias_gradients(
    loom_tape *tape, int64_t experts, const int64_t *counts, loom_parameter *const *biases, loom_tensor *d_y);
/* sum: of the rows [expert_rows, h] that this rank's experts give over etp, in the order in which they came. Collective
 * over etp. */
loom_status loom__expert_return(loom_tape *tape, loom_tensor *rows, loom__routed *routed, loom_tensor **sum);
/* output [s, b, h]: for each token the sum over its experts of probs * row, from what has come of the sums. */
loom_status loom__expert_combine(loom_tape *tape, loom_tensor *moved, loom_tensor *probs, loom__routed *routed,
    int64_t s, int64_t b, loom_tensor **output);

#endif
