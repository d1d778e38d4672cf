/* How the cases of routing say what a router is. */
#ifndef GOLDEN_ROUTER_CASE_H
#define GOLDEN_ROUTER_CASE_H

#include "moe/router.h"
#include "support/golden.h"

static inline double number_at(const json_t *array, int64_t i) {
    return json_number_value(json_array_get(array, (size_t)i));
}

static inline loom__router router_of(const json_t *item) {
    const json_t *options = json_object_get(item, "options");
    const char *score = golden_string(options, "moe_router_score_function", "softmax");
    const char *balance = golden_string(options, "moe_router_load_balancing_type", "");
    const char *drop = golden_string(options, "moe_token_drop_policy", "probs");
    return (loom__router){
        .experts = golden_int(item, "experts", 0),
        .topk = golden_int(item, "topk", 0),
        .score = strcmp(score, "sigmoid") == 0 ? LOOM__ROUTER_SIGMOID : LOOM__ROUTER_SOFTMAX,
        .pre_softmax = json_is_true(json_object_get(options, "moe_router_pre_softmax")),
        .sinkhorn = strcmp(balance, "sinkhorn") == 0,
        .groups = golden_int(options, "moe_router_num_groups", 0),
        .group_topk = golden_int(options, "moe_router_group_topk", 0),
        .scaling = golden_number(options, "moe_router_topk_scaling_factor", 0),
        .capacity_factor = golden_number(options, "moe_expert_capacity_factor", 0),
        .drop = strcmp(drop, "position") == 0 ? LOOM__DROP_BY_POSITION : LOOM__DROP_BY_PROBS,
        .pad_to_capacity = json_is_true(json_object_get(options, "moe_pad_expert_input_to_capacity")),
    };
}

/* The coefficient of a kind of balance loss: options have one kind, or lists. */
static inline double coefficient_of(const json_t *options, const char *kind) {
    const json_t *types = json_object_get(options, "moe_router_load_balancing_type");
    const json_t *coefficients = json_object_get(options, "moe_aux_loss_coeff"), *type;
    size_t i;
    if (json_is_string(types))
        return strcmp(json_string_value(types), kind) == 0 ? json_number_value(coefficients) : 0;
    json_array_foreach(types, i, type) if (strcmp(json_string_value(type), kind) == 0) return number_at(
        coefficients, (int64_t)i);
    return 0;
}

#endif
