/* Routing. A token's choice is made on keys (logits, or scores with their bias), its weights on scores without the
 * bias; the two meet only in `chosen`. Invariant: chosen has topk ones in each row whatever the numbers are (NaN
 * included), so that counts of rows never depend on data being sane; a NaN shows in probs. */
#include "moe/router.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>

static loom_status check_groups(const loom__router *r) {
    if (r->groups == 0 && r->group_topk == 0)
        return LOOM_OK;
    if (r->groups < 1 || r->group_topk < 1)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "moe_router_num_groups is %" PRId64 " and moe_router_group_topk %" PRId64 ": both are needed, or none",
            r->groups, r->group_topk);
    if (r->experts % r->groups != 0)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "num_moe_experts is %" PRId64 ": not a multiple of moe_router_num_groups, which is %" PRId64, r->experts,
            r->groups);
    if (r->group_topk > r->groups)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "moe_router_group_topk is %" PRId64 ": more than the %" PRId64 " groups of moe_router_num_groups",
            r->group_topk, r->groups);
    if (r->topk < r->group_topk || r->topk / r->group_topk > r->experts / r->groups ||
        r->topk > r->experts / r->groups * r->group_topk)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "moe_router_topk is %" PRId64 ": expected %" PRId64 " to %" PRId64 " with moe_router_group_topk %" PRId64
            " of groups of %" PRId64 " experts",
            r->topk, r->group_topk, r->experts / r->groups * r->group_topk, r->group_topk, r->experts / r->groups);
    return LOOM_OK;
}

loom_status loom__router_check(const loom__router *r, bool has_bias) {
    if (r->experts < 1)
        return loom_fail(LOOM_ERR_ARGUMENT, "num_moe_experts is %" PRId64 ": expected 1 or more", r->experts);
    if (r->topk < 1 || r->topk > r->experts)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "moe_router_topk is %" PRId64 ": expected 1 to the %" PRId64 " of num_moe_experts", r->topk, r->experts);
    if (r->score == LOOM__ROUTER_SOFTMAX && !r->sinkhorn && !r->pre_softmax && r->topk == 1)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "moe_router_topk is 1 with a softmax over the chosen experts, which is then always 1: set "
            "moe_router_pre_softmax to true, or moe_router_score_function to sigmoid");
    if (has_bias && (r->score != LOOM__ROUTER_SIGMOID || r->sinkhorn))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "moe_router_enable_expert_bias needs moe_router_score_function sigmoid, and no sinkhorn");
    return check_groups(r);
}

/* Which function of the logits weighs the chosen experts. */
typedef enum weighing { SOFTMAX_OF_ALL, SOFTMAX_OF_CHOSEN, SIGMOID, SIGMOID_SHARE } weighing;

static weighing weighing_of(const loom__router *r) {
    if (r->sinkhorn)
        return r->topk == 1 ? SIGMOID : SOFTMAX_OF_ALL;
    if (r->score == LOOM__ROUTER_SIGMOID)
        return r->topk == 1 ? SIGMOID : SIGMOID_SHARE;
    return r->pre_softmax ? SOFTMAX_OF_ALL : SOFTMAX_OF_CHOSEN;
}

static double factor_of(const loom__router *r) {
    return r->scaling > 0 && !r->sinkhorn ? r->scaling : 1.0;
}

#define REAL float
#define NAMED(name) name
#define PROBS(routing) ((routing)->probs)
#include "moe/router_real.h"
#undef REAL
#undef NAMED
#undef PROBS

#define REAL double
#define NAMED(name) name##64
#define PROBS(routing) ((routing)->probs64)
#include "moe/router_real.h"

loom_status loom__route(const loom__router *r, int64_t tokens, const float *logits, const float *bias, bool training,
    loom__routing *routing) {
    return route(r, tokens, logits, bias, training, routing);
}

loom_status loom__route64(const loom__router *r, int64_t tokens, const double *logits, const float *bias, bool training,
    loom__routing *routing) {
    LOOM_TRY(route64(r, tokens, logits, bias, training, routing));
    for (int64_t i = 0; i < tokens * r->experts; i++)
        routing->probs[i] = (float)routing->probs64[i];
    return LOOM_OK;
}

int64_t loom__expert_capacity(int64_t choices, int64_t experts, double factor, int64_t minimum) {
    double capacity = ceil((double)choices / (double)experts * factor);
    if (capacity >= 0x1p62) /* no integer holds what a huge factor gives; no expert has as many tokens */
        return (int64_t)1 << 62;
    return capacity < (double)minimum ? minimum : (int64_t)capacity;
}
