/* A model on the ranks that share it: all checks of a configuration together, with the nearest values that pass all of
 * them. What a run asks besides is not known here; it makes the same checks with its own. */
#include "base/suggest.h"
#include "spec/parameter.h"

typedef struct trial {
    loom_model_config config;
    loom__model_ranks ranks;
} trial;

static void find_faults(loom_model_config *config, const loom__model_ranks *ranks, loom__faults *faults) {
    int64_t before = faults->count;
    loom__model_complete_faults(config, ranks->tensor, ranks->sequence_parallel, faults);
    if (faults->count > before)
        return;
    loom__model_context_faults(config, ranks->tensor, ranks->context, ranks->sequence_parallel, faults);
    loom__model_expert_ranks_faults(config, ranks->expert, ranks->expert_tensor, faults);
}

static void try_values(void *context, loom__faults *faults) {
    const trial *t = context;
    loom_model_config config = t->config;
    find_faults(&config, &t->ranks, faults);
}

static void suggest(const loom_model_config *config, const loom__model_ranks *ranks, loom__faults *faults) {
    trial t = {*config, *ranks};
    loom_model_config *c = &t.config;
    loom_moe_config *moe = &c->moe;
    const int64_t most = LOOM__NUMBER_MAX, n = c->num_attention_heads, h = c->hidden_size;
    const int64_t f = c->ffn_hidden_size > 0 ? c->ffn_hidden_size : h > 0 && h < most ? 4 * h : 0;
    const loom__variable variables[] = {{"tensor_model_parallel_size", &t.ranks.tensor, NULL, 1, most, 0, false},
        {"context_parallel_size", &t.ranks.context, NULL, 1, most, 0, false},
        {"expert_model_parallel_size", &t.ranks.expert, NULL, 1, most, 0, false},
        {"expert_tensor_parallel_size", &t.ranks.expert_tensor, NULL, 1, most, 0, false},
        {"sequence_parallel", NULL, &t.ranks.sequence_parallel, 0, 0, 0, false},
        {"num_layers", &c->num_layers, NULL, 1, most, 0, false},
        {"hidden_size", &c->hidden_size, NULL, 1, most, 0, false},
        {"ffn_hidden_size", &c->ffn_hidden_size, NULL, 1, most, f, true},
        {"num_attention_heads", &c->num_attention_heads, NULL, 1, most, 0, false},
        {"num_query_groups", &c->num_query_groups, NULL, 1, most, n, true},
        {"kv_channels", &c->kv_channels, NULL, 1, most, n > 0 ? h / n : 0, true},
        {"replicate_query_groups", NULL, &c->replicate_query_groups, 0, 0, 0, false},
        {"seq_length", &c->seq_length, NULL, 1, most, 0, false},
        {"max_position_embeddings", &c->max_position_embeddings, NULL, 1, most, c->seq_length, true},
        {"vocab_size", &c->vocab_size, NULL, 1, most, 0, false},
        {"padded_vocab_size", &c->padded_vocab_size, NULL, 1, most, 0, true},
        {"num_moe_experts", &moe->num_moe_experts, NULL, 1, most, 0, true},
        {"moe_ffn_hidden_size", &moe->moe_ffn_hidden_size, NULL, 1, most, f, true},
        {"moe_router_topk", &moe->moe_router_topk, NULL, 1, most, 0, false},
        {"moe_router_num_groups", &moe->moe_router_num_groups, NULL, 1, most, 0, true},
        {"moe_router_group_topk", &moe->moe_router_group_topk, NULL, 1, most, 0, true},
        {"moe_shared_expert_intermediate_size", &moe->moe_shared_expert_intermediate_size, NULL, 1, most, 0, true}};
    const loom__trial all = {
        .variables = variables, .count = sizeof variables / sizeof *variables, .check = try_values, .context = &t};
    loom__faults_suggest(faults, &all);
}

loom_status loom__model_config_complete_on(loom_model_config *config, const loom__model_ranks *ranks) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom_model_config made = *config;
    find_faults(&made, ranks, &faults);
    suggest(config, ranks, &faults);
    LOOM_TRY(loom__faults_end(&faults));
    *config = made;
    return LOOM_OK;
}

loom_status loom__model_config_complete(loom_model_config *config, int64_t tp, bool sequence_parallel) {
    const loom__model_ranks ranks = {tp, 1, 1, 1, sequence_parallel};
    return loom__model_config_complete_on(config, &ranks);
}

loom_status loom__model_config_complete_planned(loom_model_config *config, int64_t tp, bool sequence_parallel) {
    loom__faults faults, not_built;
    loom__faults_begin(&faults);
    loom__faults_begin(&not_built);
    faults.not_built = &not_built;
    loom__model_complete_faults(config, tp, sequence_parallel, &faults);
    return loom__faults_end(&faults);
}
