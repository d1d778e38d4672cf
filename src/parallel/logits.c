/* Logits of a router in two precisions. In fp32 the products are the rank's matrix products. In double they are loops
 * here: experts are few, and no library would do it in the order that we promise. The invariant: a sum in double goes
 * over its terms in ascending order, whoever computes it, so that it does not hang on the number of threads. */
#include "parallel/logits.h"
#include "parallel/common.h"
#include <stdlib.h>
#include <string.h>

/* Rows of one item of a team's work. */
enum { ITEM_ROWS = 16 };

static bool is_double(const loom_tensor *logits) {
    return logits->dtype == LOOM_F64;
}

static double *doubles(loom_tensor *tensor) {
    return tensor ? tensor->data : NULL;
}

static float *floats(loom_tensor *tensor) {
    return tensor ? tensor->data : NULL;
}

/* ---- products in double ---- */

typedef struct product {
    const double *left; /* logits, or their gradient */
    const double *weight;
    const loom_tensor *x;
    double *logits;
    loom_tensor *d_x;
    float *grad;
    bool accumulate;
    int64_t tokens, experts, h;
} product;

static void logits_item(void *argument, int64_t item, int worker) {
    const product *p = argument;
    (void)worker;
    for (int64_t t = item * ITEM_ROWS; t < (item + 1) * ITEM_ROWS && t < p->tokens; t++)
        for (int64_t e = 0; e < p->experts; e++) {
            const double *w = p->weight + e * p->h;
            double sum = 0;
            for (int64_t c = 0; c < p->h; c++)
                sum += (double)loom__row_get(p->x->dtype, loom__element(p->x, t * p->h), c) * w[c];
            p->logits[t * p->experts + e] = sum;
        }
}

static void input_item(void *argument, int64_t item, int worker) {
    const product *p = argument;
    (void)worker;
    for (int64_t t = item * ITEM_ROWS; t < (item + 1) * ITEM_ROWS && t < p->tokens; t++)
        for (int64_t c = 0; c < p->h; c++) {
            double sum = 0;
            for (int64_t e = 0; e < p->experts; e++)
                sum += p->left[t * p->experts + e] * p->weight[e * p->h + c];
            loom__row_put(p->d_x->dtype, loom__element(p->d_x, t * p->h), c, (float)sum);
        }
}

/* Channels of all experts. */
static void weight_item(void *argument, int64_t item, int worker) {
    const product *p = argument;
    (void)worker;
    for (int64_t e = 0; e < p->experts; e++)
        for (int64_t c = item * ITEM_ROWS; c < (item + 1) * ITEM_ROWS && c < p->h; c++) {
            double sum = 0;
            for (int64_t t = 0; t < p->tokens; t++)
                sum +=
                    p->left[t * p->experts + e] * (double)loom__row_get(p->x->dtype, loom__element(p->x, t * p->h), c);
            float *to = p->grad + e * p->h + c;
            *to = p->accumulate ? *to + (float)sum : (float)sum;
        }
}

static int64_t items_of(int64_t rows) {
    return (rows + ITEM_ROWS - 1) / ITEM_ROWS;
}

/* The weight in double, for release. */
static loom_status widened(loom_tape *tape, const loom_parameter *weight, loom_tensor **out) {
    const int64_t count = weight->shape[0] * weight->shape[1];
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), LOOM_F64, 2, weight->shape, out));
    for (int64_t i = 0; i < count; i++)
        doubles(*out)[i] = (double)loom__row_get(weight->dtype, loom_parameter_values(weight), i);
    return LOOM_OK;
}

static loom_status create_in_double(
    loom_tape *tape, loom_tensor *x, const loom_parameter *weight, loom_tensor *logits) {
    loom_tensor *wide;
    LOOM_TRY(widened(tape, weight, &wide));
    product p = {.weight = doubles(wide),
        .x = x,
        .logits = doubles(logits),
        .tokens = logits->shape[0],
        .experts = logits->shape[1],
        .h = x->shape[2]};
    loom_team_run(TEAM(tape), logits_item, &p, items_of(p.tokens));
    loom_tensor_release(wide);
    return LOOM_OK;
}

/* ---- products ---- */

static loom_status add_bias(loom_tape *tape, const loom_parameter *bias, loom_tensor *logits) {
    const int64_t tokens = logits->shape[0], experts = logits->shape[1];
    loom_tensor *wide;
    const float *values;
    LOOM_TRY(loom__vector(tape, bias, 0, &wide, &values));
    if (!is_double(logits))
        KERNELS(tape)->bias_add(TEAM(tape), tokens, experts, floats(logits), values, floats(logits));
    else
        for (int64_t i = 0; i < tokens * experts; i++)
            doubles(logits)[i] += (double)values[i % experts];
    loom_tensor_release(wide);
    return LOOM_OK;
}

loom_status loom__logits_create(loom_tape *tape, loom_tensor *x, const loom_parameter *weight,
    const loom_parameter *bias, bool in_double, loom_tensor **out) {
    const int64_t tokens = x->shape[0] * x->shape[1], experts = weight->shape[0], h = x->shape[2];
    loom_tensor *logits;
    LOOM_TRY(loom_tensor_create(
        loom_tape_rank(tape), in_double ? LOOM_F64 : LOOM_F32, 2, (int64_t[]){tokens, experts}, &logits));
    loom_status status = LOOM_OK;
    if (in_double)
        status = create_in_double(tape, x, weight, logits);
    else if (x->dtype == LOOM_F32)
        KERNELS(tape)->gemm(TEAM(tape), false, true, tokens, experts, h, 1, loom_tensor_f32(x), h, weight->data, h,
            false, floats(logits), experts);
    else
        loom__kernels16(tape, x->dtype)
            ->gemm_f32(TEAM(tape), false, true, tokens, experts, h, 1, x->data, h, weight->data16, h, false,
                floats(logits), experts);
    if (!status && bias)
        status = add_bias(tape, bias, logits);
    if (status) {
        loom_tensor_release(logits);
        return status;
    }
    *out = logits;
    return LOOM_OK;
}

loom_status loom__logits_for_products(
    loom_tape *tape, loom_tensor *d_logits, loom_dtype activations, loom_tensor **out) {
    if (is_double(d_logits) || activations == LOOM_F32) {
        *out = loom_tensor_retain(d_logits);
        return LOOM_OK;
    }
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), activations, 2, d_logits->shape, out));
    loom__kernels16(tape, activations)->narrow(TEAM(tape), loom_tensor_count(d_logits), floats(d_logits), (*out)->data);
    return LOOM_OK;
}

loom_status loom__logits_to_input(
    loom_tape *tape, loom_tensor *d_logits, const loom_parameter *weight, loom_tensor *d_x) {
    const int64_t tokens = d_logits->shape[0], experts = d_logits->shape[1], h = d_x->shape[2];
    if (!is_double(d_logits)) {
        LOOM__KERNEL(tape, d_x->dtype, gemm, false, false, tokens, h, experts, 1, d_logits->data, experts,
            loom_parameter_values(weight), h, false, d_x->data, h);
        return LOOM_OK;
    }
    loom_tensor *wide;
    LOOM_TRY(widened(tape, weight, &wide));
    product p = {
        .left = doubles(d_logits), .weight = doubles(wide), .d_x = d_x, .tokens = tokens, .experts = experts, .h = h};
    loom_team_run(TEAM(tape), input_item, &p, items_of(tokens));
    loom_tensor_release(wide);
    return LOOM_OK;
}

void loom__logits_to_weight(loom_tape *tape, loom_tensor *d_logits, loom_tensor *x, bool accumulate, float *grad) {
    const int64_t tokens = d_logits->shape[0], experts = d_logits->shape[1], h = x->shape[2];
    product p = {.left = d_logits->data,
        .x = x,
        .grad = grad,
        .accumulate = accumulate,
        .tokens = tokens,
        .experts = experts,
        .h = h};
    if (is_double(d_logits))
        loom_team_run(TEAM(tape), weight_item, &p, items_of(h));
    else if (x->dtype == LOOM_F32)
        KERNELS(tape)->gemm(TEAM(tape), true, false, experts, h, tokens, 1, floats(d_logits), experts,
            loom_tensor_f32(x), h, accumulate, grad, h);
    else
        loom__kernels16(tape, x->dtype)
            ->gemm_f32(TEAM(tape), true, false, experts, h, tokens, 1, d_logits->data, experts, x->data, h, accumulate,
                grad, h);
}

void loom__logits_to_bias(loom_tape *tape, const loom_tensor *d_logits, bool accumulate, float *grad) {
    const int64_t tokens = d_logits->shape[0], experts = d_logits->shape[1];
    if (!is_double(d_logits)) {
        LOOM__KERNEL(tape, d_logits->dtype, bias_gradient, tokens, experts, d_logits->data, accumulate, grad);
        return;
    }
    const double *from = d_logits->data;
    for (int64_t e = 0; e < experts; e++) {
        double sum = 0;
        for (int64_t t = 0; t < tokens; t++)
            sum += from[t * experts + e];
        grad[e] = accumulate ? grad[e] + (float)sum : (float)sum;
    }
}

/* ---- the arithmetic of `moe` ---- */

loom_status loom__logits_route(
    const loom_tensor *logits, const loom__router *router, const float *bias, bool training, loom__routing *routing) {
    return is_double(logits) ? loom__route64(router, logits->shape[0], logits->data, bias, training, routing)
                             : loom__route(router, logits->shape[0], logits->data, bias, training, routing);
}

loom_status loom__logits_route_backward(const loom_tensor *logits, const loom__router *router,
    const loom__routing *routing, const float *d_probs, loom_tensor *d_logits) {
    const int64_t tokens = logits->shape[0];
    return is_double(logits) ? loom__route_backward64(router, tokens, logits->data, routing, d_probs, doubles(d_logits))
                             : loom__route_backward(router, tokens, logits->data, routing, d_probs, floats(d_logits));
}

loom_status loom__logits_balance_count(const loom_tensor *logits, const loom__balance *balance, double *counts) {
    return is_double(logits) ? loom__balance_count64(balance, logits->data, counts)
                             : loom__balance_count(balance, logits->data, counts);
}

loom_status loom__logits_balance_loss(const loom_tensor *logits, const loom__balance *balance, const double *weights,
    double scale, double *loss, loom_tensor *d_logits) {
    return is_double(logits) ? loom__balance_loss64(balance, logits->data, weights, scale, loss, doubles(d_logits))
                             : loom__balance_loss(balance, logits->data, weights, scale, loss, floats(d_logits));
}

void loom__logits_z_loss(
    const loom_tensor *logits, double coefficient, double scale, double *loss, loom_tensor *d_logits) {
    const int64_t tokens = logits->shape[0], experts = logits->shape[1];
    if (is_double(logits))
        loom__router_z_loss64(tokens, experts, logits->data, NULL, coefficient, scale, loss, doubles(d_logits));
    else
        loom__router_z_loss(tokens, experts, logits->data, NULL, coefficient, scale, loss, floats(d_logits));
}
