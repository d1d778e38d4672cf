/* A router's logits [tokens, experts], in F32 or, where that is asked for, in F64: the products that make them and take
 * their gradient back, and the arithmetic of `moe` on them. d_logits is as the logits are. */
#ifndef PARALLEL_LOGITS_H
#define PARALLEL_LOGITS_H

#include "moe/router.h"
#include <megaloom/tensor.h>

/* logits = x W^T + bias, x [s, b, h] with tokens = s*b, weight [experts, h], bias [experts] or NULL; sums in fp32, or
 * in double, as they are kept. */
loom_status loom__logits_create(loom_tape *tape, loom_tensor *x, const loom_parameter *weight,
    const loom_parameter *bias, bool in_double, loom_tensor **logits);

/* As the functions of moe/router.h. d_logits of a loss may be NULL. */
loom_status loom__logits_route(
    const loom_tensor *logits, const loom__router *router, const float *bias, bool training, loom__routing *routing);
loom_status loom__logits_route_backward(const loom_tensor *logits, const loom__router *router,
    const loom__routing *routing, const float *d_probs, loom_tensor *d_logits);
loom_status loom__logits_balance_count(const loom_tensor *logits, const loom__balance *balance, double *counts);
loom_status loom__logits_balance_loss(const loom_tensor *logits, const loom__balance *balance, const double *weights,
    double scale, double *loss, loom_tensor *d_logits);
void loom__logits_z_loss(
    const loom_tensor *logits, double coefficient, double scale, double *loss, loom_tensor *d_logits);

/* What the two products below take: F64 ones as they are, others in the dtype of the activations. */
loom_status loom__logits_for_products(
    loom_tape *tape, loom_tensor *d_logits, loom_dtype activations, loom_tensor **out);
/* d_x [s, b, h] = d_logits W, rounded once. */
loom_status loom__logits_to_input(
    loom_tape *tape, loom_tensor *d_logits, const loom_parameter *weight, loom_tensor *d_x);
/* grad [experts, h] (+)= d_logits^T x. */
void loom__logits_to_weight(loom_tape *tape, loom_tensor *d_logits, loom_tensor *x, bool accumulate, float *grad);
/* grad [experts] (+)= the sum of d_logits over the tokens. */
void loom__logits_to_bias(loom_tape *tape, const loom_tensor *d_logits, bool accumulate, float *grad);

#endif
