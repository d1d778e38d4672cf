/* Experts of a configuration: what their fields mean to a router, and what may be together. */
#include "base/faults.h"
#include "spec/parameter.h"
#include <inttypes.h>
#include <string.h>

enum { EXPERTS_MAX = 1 << 14, WIDTH_MAX = 1 << 26 };

static bool is(const char *given, const char *otherwise, const char *name) {
    return strcmp(given ? given : otherwise, name) == 0;
}

/* Of the types of balance losses; type 0 is there where none is named. */
static const char *balance_type(const loom_moe_config *moe, int i) {
    const char *name = i < LOOM_MOE_BALANCES ? moe->moe_router_load_balancing_type[i] : NULL;
    return name || i > 0 ? name : "aux_loss";
}

double loom__balance_coefficient(const loom_moe_config *moe, const char *type) {
    for (int i = 0; i < LOOM_MOE_BALANCES && balance_type(moe, i); i++)
        if (strcmp(balance_type(moe, i), type) == 0)
            return moe->moe_aux_loss_coeff[i];
    return 0;
}

loom__router loom__model_router(const loom_model_config *config) {
    const loom_moe_config *moe = &config->moe;
    return (loom__router){
        .experts = moe->num_moe_experts,
        .topk = moe->moe_router_topk,
        .score = is(moe->moe_router_score_function, "softmax", "sigmoid") ? LOOM__ROUTER_SIGMOID : LOOM__ROUTER_SOFTMAX,
        .pre_softmax = moe->moe_router_pre_softmax,
        .sinkhorn = strcmp(balance_type(moe, 0), "sinkhorn") == 0,
        .groups = moe->moe_router_num_groups,
        .group_topk = moe->moe_router_group_topk,
        .scaling = moe->moe_router_topk_scaling_factor,
        .capacity_factor = moe->moe_expert_capacity_factor,
        .drop = is(moe->moe_token_drop_policy, "probs", "position") ? LOOM__DROP_BY_POSITION : LOOM__DROP_BY_PROBS,
        .pad_to_capacity = moe->moe_pad_expert_input_to_capacity,
    };
}

/* One of the names, or NULL for the first; `unbuilt` is one that Megatron has besides. */
static void check_name(
    loom__faults *faults, const char *field, const char *found, const char *unbuilt, const char *const *names) {
    char list[128] = "";
    for (int i = 0; names[i]; i++) {
        if (!found || strcmp(found, names[i]) == 0)
            return;
        strncat(list, i ? ", " : "", sizeof list - strlen(list) - 1);
        strncat(list, names[i], sizeof list - strlen(list) - 1);
    }
    if (unbuilt && strcmp(found, unbuilt) == 0)
        loom__faults_add(
            faults, LOOM_ERR_UNSUPPORTED, "not supported yet: %s %s; what works: %s", field, unbuilt, list);
    else
        loom__faults_add(faults, LOOM_ERR_CONFIG, "%s: found %s, expected one of %s", field, found, list);
}

/* Losses may come together, each with a coefficient of its own. */
static void check_balance(loom__faults *faults, const loom_moe_config *moe) {
    static const char field[] = "moe_router_load_balancing_type";
    int types = 1;
    while (balance_type(moe, types))
        types++;
    for (int i = 0; i < types; i++) {
        const char *type = balance_type(moe, i);
        check_name(faults, field, type, NULL,
            (const char *const[]){"aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none", NULL});
        if (types > 1 && (strcmp(type, "sinkhorn") == 0 || strcmp(type, "none") == 0))
            loom__faults_add(
                faults, LOOM_ERR_CONFIG, "%s: found %s in a list of %d, expected it alone", field, type, types);
        for (int before = 0; before < i; before++)
            if (strcmp(balance_type(moe, before), type) == 0)
                loom__faults_add(faults, LOOM_ERR_CONFIG, "%s: found %s twice, expected each once", field, type);
    }
    int64_t coefficients = moe->moe_aux_loss_coeff_count ? moe->moe_aux_loss_coeff_count : 1;
    if (coefficients != types)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "moe_aux_loss_coeff: found %" PRId64 " for the %d of %s, expected as many", coefficients, types, field);
}

static void check_names(loom__faults *faults, const loom_moe_config *moe) {
    check_name(faults, "moe_router_score_function", moe->moe_router_score_function, NULL,
        (const char *const[]){"softmax", "sigmoid", NULL});
    check_name(faults, "moe_token_drop_policy", moe->moe_token_drop_policy, NULL,
        (const char *const[]){"probs", "position", NULL});
    check_name(faults, "moe_token_dispatcher_type", moe->moe_token_dispatcher_type, "flex",
        (const char *const[]){"alltoall", "allgather", NULL});
    check_name(faults, "moe_router_dtype", moe->moe_router_dtype, NULL, (const char *const[]){"fp32", "fp64", NULL});
}

void loom__model_config_complete_experts(
    loom_model_config *config, int64_t tp, bool sequence_parallel, loom__faults *faults) {
    loom_moe_config *moe = &config->moe;
    if (moe->num_moe_experts == 0)
        return;
    if (moe->num_moe_experts < 1 || moe->num_moe_experts > EXPERTS_MAX) {
        loom__faults_add(faults, LOOM_ERR_CONFIG, "num_moe_experts: found %" PRId64 ", expected 1 to %d",
            moe->num_moe_experts, EXPERTS_MAX);
        return;
    }
    if (moe->moe_ffn_hidden_size == 0)
        moe->moe_ffn_hidden_size = config->ffn_hidden_size;
    if (moe->moe_router_topk == 0)
        moe->moe_router_topk = moe->num_moe_experts < 2 ? 1 : 2;
    if (moe->moe_ffn_hidden_size < 1 || moe->moe_ffn_hidden_size > WIDTH_MAX)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "moe_ffn_hidden_size: found %" PRId64 ", expected 1 to %d",
            moe->moe_ffn_hidden_size, WIDTH_MAX);
    int64_t shared = moe->moe_shared_expert_intermediate_size;
    if (shared < 0 || shared > WIDTH_MAX)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "moe_shared_expert_intermediate_size: found %" PRId64 ", expected 1 to %d, or null", shared, WIDTH_MAX);
    else if (shared % tp)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "moe_shared_expert_intermediate_size %" PRId64 " is not divisible by tensor_model_parallel_size %" PRId64,
            shared, tp);
    if (moe->moe_shared_expert_gate && shared == 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "moe_shared_expert_gate: found true without moe_shared_expert_intermediate_size, the width of the expert "
            "that it weights: give that, or set the gate to false (qwen2_moe has it true)");
    if (moe->moe_shared_expert_overlap && shared == 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "moe_shared_expert_overlap: found true without moe_shared_expert_intermediate_size, the width of the "
            "expert that computes while rows travel: give that, or set it to false");
    else if (moe->moe_shared_expert_overlap && moe->moe_token_dispatcher_type &&
             strcmp(moe->moe_token_dispatcher_type, "alltoall") != 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "moe_token_dispatcher_type: found %s with moe_shared_expert_overlap, expected alltoall, whose rows travel "
            "while the shared expert computes",
            moe->moe_token_dispatcher_type);
    loom__moe_layer_freq_complete(&moe->moe_layer_freq, config->num_layers, faults);
    if (tp > 1 && !sequence_parallel)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "num_moe_experts %" PRId64 " with tensor_model_parallel_size %" PRId64
            " needs sequence_parallel true: each tensor rank routes rows of its own",
            moe->num_moe_experts, tp);
    check_names(faults, moe);
    check_balance(faults, moe);
    loom__router router = loom__model_router(config);
    loom_status status = loom__router_check(&router, moe->moe_router_enable_expert_bias);
    if (status)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "%s", loom_error_message());
    if (router.sinkhorn && moe->moe_aux_loss_coeff[0] > 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "moe_aux_loss_coeff: found %g with moe_router_load_balancing_type sinkhorn, expected 0",
            moe->moe_aux_loss_coeff[0]);
    if (moe->moe_layer_recompute && config->recompute == LOOM_RECOMPUTE_FULL)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "moe_layer_recompute: found true with recompute full, which makes whole layers again: expected false, or "
            "recompute none or selective");
    if (moe->moe_apply_probs_on_input && router.topk != 1)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "moe_apply_probs_on_input: found true with moe_router_topk %" PRId64
            ", expected 1: a row has the weight of one expert",
            router.topk);
    if (router.pad_to_capacity && !(router.capacity_factor > 0))
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "moe_pad_expert_input_to_capacity: found true without moe_expert_capacity_factor, which gives the "
            "capacity");
}

void loom__model_expert_ranks_faults(const loom_model_config *config, int64_t ep, int64_t etp, loom__faults *faults) {
    const loom_moe_config *moe = &config->moe;
    if (moe->num_moe_experts == 0 && ep > 1)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "expert_model_parallel_size: found %" PRId64 ", expected 1 for a model without experts (num_moe_experts)",
            ep);
    if (moe->num_moe_experts == 0)
        return;
    if (moe->num_moe_experts % ep)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "expert_model_parallel_size %" PRId64 " does not divide num_moe_experts %" PRId64, ep,
            moe->num_moe_experts);
    if (moe->moe_ffn_hidden_size % etp)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "expert_tensor_parallel_size %" PRId64 " does not divide moe_ffn_hidden_size %" PRId64, etp,
            moe->moe_ffn_hidden_size);
}
