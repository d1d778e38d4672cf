/* What a token costs: the matrix products of forward and backward, by the usual count of two operations a multiply-add.
 */
#include "spec/parameter.h"

double loom_model_flops_per_token(const loom_model_config *config) {
    double h = (double)config->hidden_size, n = (double)config->num_attention_heads, d = (double)config->kv_channels;
    double g = (double)config->num_query_groups, f = (double)config->ffn_hidden_size, s = (double)config->seq_length;
    double seen =
        config->window_size > 0 && (double)config->window_size < s ? (double)config->window_size : (s + 1) / 2;
    double gates = loom_activation_is_gated(config->activation) ? 2 : 1;
    double projections = h * (n + 2 * g) * d + n * d * h, dense = gates * h * f + f * h;
    double attention = 2 * seen * n * d;
    double head = h * (double)config->vocab_size;
    /* A token goes through its experts alone. */
    const loom_moe_config *moe = &config->moe;
    double width = (double)moe->moe_router_topk * (double)moe->moe_ffn_hidden_size +
                   (double)moe->moe_shared_expert_intermediate_size;
    double scores = (double)moe->num_moe_experts + (moe->moe_shared_expert_gate ? 1 : 0);
    double sparse = h * scores + (gates + 1) * h * width, layers = (double)config->num_layers;
    double with_experts = (double)loom_model_expert_layers(config);
    return 3 * 2 *
           (layers * (projections + attention) + (layers - with_experts) * dense + with_experts * sparse + head);
}
