/* The map between Megatron-Core's parameters and Hugging Face tensors, as index arithmetic.
 *
 * A parameter is a list of row blocks; each block takes `rows` consecutive canonical rows from one Hugging Face tensor.
 * A tensor is read along its rows (llama: nn.Linear is [out, in] as in Megatron) or across them (gpt2: Conv1D is [in,
 * out], so a canonical row is a column, with the tensor's width as stride). Blocks come in canonical order and cover
 * the parameter. */
#include "spec/huggingface.h"
#include "base/text.h"
#include "spec/architecture.h"
#include <stdio.h>
#include <string.h>

static bool is_gpt2(const loom__model_spec *spec) {
    return loom__architecture_find(spec->config.architecture) == LOOM__GPT2;
}

/* What the files of a family of Llama's kin have; without any of it they are Llama's. */
typedef struct family {
    bool biases, qkv_bias, window, qk_norm, zero_centered, scaled;
    bool any_qkv_bias, proj_bias, dense_layers, shared_experts, pre_softmax; /* optional, but for the shared experts */
} family;

static const family families[LOOM__ARCHITECTURE_COUNT] = {[LOOM__GPT2] = {.biases = true},
    [LOOM__LLAMA] = {.biases = true},
    [LOOM__MISTRAL] = {.window = true},
    [LOOM__MIXTRAL] = {.window = true},
    [LOOM__QWEN2] = {.qkv_bias = true},
    [LOOM__QWEN3] = {.qk_norm = true},
    [LOOM__QWEN2_MOE] = {.any_qkv_bias = true, .dense_layers = true, .shared_experts = true, .pre_softmax = true},
    [LOOM__QWEN3_MOE] = {.qk_norm = true, .proj_bias = true, .dense_layers = true, .pre_softmax = true},
    [LOOM__GEMMA] = {.zero_centered = true, .scaled = true}};

/* The same of its experts. */
static const char *experts_cannot(const family *has, const loom_model_config *config) {
    const loom_moe_config *moe = &config->moe;
    const bool experts = loom__architecture_has_experts(loom__architecture_find(config->architecture));
    if ((moe->num_moe_experts > 0) != experts)
        return experts ? "no experts" : "experts";
    if (!experts)
        return NULL;
    if (!has->dense_layers && loom_model_expert_layers(config) < config->num_layers)
        return "layers without experts";
    if ((moe->moe_shared_expert_intermediate_size > 0) != has->shared_experts)
        return has->shared_experts ? "no shared experts" : "shared experts";
    if (moe->moe_shared_expert_gate != has->shared_experts)
        return has->shared_experts ? "shared experts without a gate" : "a gate of shared experts";
    if (moe->moe_router_enable_expert_bias)
        return "moe_router_enable_expert_bias true";
    if (moe->moe_router_pre_softmax && !has->pre_softmax)
        return "moe_router_pre_softmax true";
    if (moe->moe_router_score_function && strcmp(moe->moe_router_score_function, "softmax") != 0)
        return "a moe_router_score_function that is not softmax";
    if (moe->moe_router_num_groups > 0)
        return "groups of experts";
    if (moe->moe_router_topk_scaling_factor > 0 && moe->moe_router_topk_scaling_factor != 1)
        return "moe_router_topk_scaling_factor";
    if (loom__model_router(config).sinkhorn)
        return "moe_router_load_balancing_type sinkhorn";
    return NULL;
}

/* What of the configuration the family's files cannot say; NULL = nothing. */
static const char *family_cannot(const family *has, const loom_model_config *config) {
    loom__biases biases = loom__model_biases(config);
    if (biases.mlp && !has->biases && config->moe.num_moe_experts > 0)
        return "biases of experts (add_bias_linear or add_mlp_bias true), for which its files have no tensors";
    if (config->add_bias_linear && !has->biases)
        return "add_bias_linear true";
    if (biases.proj && !has->biases && !has->proj_bias)
        return "a bias of attention's output projection";
    if (biases.mlp && !has->biases)
        return "biases of the MLP";
    if (biases.proj && !biases.qkv)
        return "a bias of attention's output projection alone";
    bool qkv_bias_alone = biases.qkv && !biases.proj;
    if (!has->any_qkv_bias && qkv_bias_alone != has->qkv_bias)
        return qkv_bias_alone ? "a bias of qkv alone" : "no bias of qkv";
    if (config->window_size != 0 && !has->window)
        return "a sliding window";
    if (config->qk_layernorm != has->qk_norm)
        return has->qk_norm ? "qk_layernorm false" : "qk_layernorm true";
    if (config->layernorm_zero_centered_gamma != has->zero_centered)
        return has->zero_centered ? "layernorm_zero_centered_gamma false" : "layernorm_zero_centered_gamma true";
    if (config->scale_embeddings != has->scaled)
        return has->scaled ? "scale_embeddings false" : "scale_embeddings true";
    return experts_cannot(has, config);
}

loom_status loom__hf_check(const loom__model_spec *spec) {
    const loom_model_config *config = &spec->config;
    loom__architecture architecture = loom__architecture_find(config->architecture);
    bool gpt2 = architecture == LOOM__GPT2, gated = loom_activation_is_gated(config->activation);
    loom__biases biases = loom__model_biases(config);
    const char *cannot = NULL;
    if (architecture == LOOM__ARCHITECTURE_UNKNOWN)
        cannot = "a name that is none of " LOOM__ARCHITECTURES_BUILT;
    else if ((config->normalization == LOOM_LAYERNORM) != gpt2)
        cannot = gpt2 ? "normalization rmsnorm" : "normalization layernorm";
    else if (gated == gpt2)
        cannot = gpt2 ? "a gated activation" : "an activation without a gate";
    else if (config->position_embedding_type != (gpt2 ? LOOM_POSITION_LEARNED : LOOM_POSITION_ROPE))
        cannot = gpt2 ? "positions that are not learned" : "positions that are not rotary";
    else if (gpt2 && config->num_query_groups != config->num_attention_heads)
        cannot = "fewer query groups than heads";
    else if (gpt2 && config->kv_channels * config->num_attention_heads != config->hidden_size)
        cannot = "kv_channels other than hidden_size / num_attention_heads";
    else if (gpt2 && !(biases.qkv && biases.proj && biases.mlp))
        cannot = "add_bias_linear false";
    else if (!gpt2 && config->rotary_percent != 1.0)
        cannot = "rotary_percent below 1";
    else
        cannot = family_cannot(&families[architecture], config);
    if (cannot)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: Hugging Face files of a %s model with %s",
            config->architecture, cannot);
    return LOOM_OK;
}

/* A Hugging Face tensor and where its rows of a parameter lie. */
typedef struct source {
    loom__hf_tensor tensor;
    bool across;   /* a canonical row is a column of the tensor */
    int64_t width; /* elements of a canonical row */
} source;

/* "model.layers.3.mlp.up_proj.weight" for (3, "mlp.up_proj", "weight"). rows, cols: as Megatron sees it. */
static source source_make(const loom__model_spec *spec, const loom__parameter_descriptor *parameter, const char *module,
    const char *kind, int64_t rows, int64_t cols) {
    bool weight_of_linear = is_gpt2(spec) && parameter->layer >= 0 && parameter->dims == 2;
    source made = {.across = weight_of_linear, .width = cols};
    made.tensor.dims = parameter->dims;
    made.tensor.shape[0] = weight_of_linear ? cols : rows;
    made.tensor.shape[1] = weight_of_linear ? rows : cols;
    if (parameter->layer >= 0)
        snprintf(made.tensor.name, sizeof made.tensor.name, "%s.%lld.%s.%s",
            is_gpt2(spec) ? "transformer.h" : "model.layers", (long long)parameter->layer, module, kind);
    else
        snprintf(made.tensor.name, sizeof made.tensor.name, "%s.%s", module, kind);
    return made;
}

static loom_status emit_rows(
    const source *from, int64_t canonical_row, int64_t hf_row, int64_t rows, loom__hf_run run, void *context) {
    if (!from->across)
        return run(
            context, canonical_row * from->width, rows * from->width, from->tensor.name, hf_row * from->width, 1);
    for (int64_t row = 0; row < rows; row++)
        LOOM_TRY(run(context, (canonical_row + row) * from->width, from->width, from->tensor.name, hf_row + row,
            from->tensor.shape[1]));
    return LOOM_OK;
}

/* What a parameter is made of. */
typedef enum shape_of { WHOLE, QKV, GATE_UP } shape_of;

typedef struct entry {
    const char *megatron; /* module inside a layer, or the whole module name outside; without .weight, .bias */
    shape_of made_of;
    const char *gpt2, *llama; /* module(s) there; the kin of Llama have its names */
} entry;

static const entry entries[] = {
    {"embedding.word_embeddings", WHOLE, "transformer.wte", "model.embed_tokens"},
    {"embedding.position_embeddings", WHOLE, "transformer.wpe", NULL},
    {"input_layernorm", WHOLE, "ln_1", "input_layernorm"},
    {"self_attention.linear_proj", WHOLE, "attn.c_proj", "self_attn.o_proj"},
    {"self_attention.linear_qkv", QKV, "attn.c_attn", "self_attn."},
    {"self_attention.q_layernorm", WHOLE, NULL, "self_attn.q_norm"},
    {"self_attention.k_layernorm", WHOLE, NULL, "self_attn.k_norm"},
    {"pre_mlp_layernorm", WHOLE, "ln_2", "post_attention_layernorm"},
    {"mlp.router", WHOLE, NULL, "block_sparse_moe.gate"},
    {"mlp.shared_experts", WHOLE, NULL, "mlp.shared_expert_gate"},
    {"mlp.shared_experts.linear_fc1", GATE_UP, NULL, "mlp.shared_expert."},
    {"mlp.shared_experts.linear_fc2", WHOLE, NULL, "mlp.shared_expert.down_proj"},
    {"mlp.linear_fc1", GATE_UP, "mlp.c_fc", "mlp."},
    {"mlp.linear_fc2", WHOLE, "mlp.c_proj", "mlp.down_proj"},
    {"decoder.final_layernorm", WHOLE, "transformer.ln_f", "model.norm"},
    {"output_layer", WHOLE, "lm_head", "lm_head"},
};

/* Splits "decoder.layers.3.mlp.linear_fc1.weight" into its entry and "weight". */
static loom_status find_entry(
    const loom__model_spec *spec, const loom__parameter_descriptor *parameter, const entry **found, const char **kind) {
    const char *module = parameter->name;
    if (parameter->layer >= 0) {
        module += strlen("decoder.layers.");
        module += strcspn(module, ".") + 1;
    }
    const char *dot = strrchr(module, '.');
    size_t length = dot ? (size_t)(dot - module) : 0;
    for (size_t i = 0; length && i < sizeof entries / sizeof *entries; i++)
        if (strlen(entries[i].megatron) == length && strncmp(entries[i].megatron, module, length) == 0) {
            *found = &entries[i];
            *kind = dot + 1;
            return LOOM_OK;
        }
    return loom_fail(
        LOOM_ERR_ARGUMENT, "\"%s\" is no parameter of a %s model", parameter->name, spec->config.architecture);
}

static bool is_mixtral(const loom__model_spec *spec) {
    return loom__architecture_find(spec->config.architecture) == LOOM__MIXTRAL;
}

/* An expert's three: gate, up and down, which Mixtral calls w1, w3 and w2. */
static source expert_source(
    const loom__model_spec *spec, const loom__parameter_descriptor *parameter, int number, int64_t rows) {
    static const char *const names[] = {"gate_proj", "up_proj", "down_proj"}, *const mixtral[] = {"w1", "w3", "w2"};
    char module[LOOM__HF_NAME_MAX];
    snprintf(module, sizeof module, "%s.experts.%lld.%s", is_mixtral(spec) ? "block_sparse_moe" : "mlp",
        (long long)parameter->expert, (is_mixtral(spec) ? mixtral : names)[number]);
    return source_make(spec, parameter, module, "weight", rows, parameter->shape[1]);
}

/* The tensors of a parameter, 1 to 3. */
typedef struct sources {
    shape_of made_of;
    bool fused; /* gpt2's c_attn: q, k and v one after the other in one tensor */
    int count;
    source part[3];
} sources;

static loom_status sources_of(const loom__model_spec *spec, const loom__parameter_descriptor *parameter, sources *out) {
    const loom_model_config *config = &spec->config;
    const entry *found = NULL;
    const char *kind = NULL;
    LOOM_TRY(loom__hf_check(spec));
    if (parameter->expert >= 0) {
        bool second = loom__ends_with(parameter->name, "linear_fc2.weight");
        int64_t each = second ? parameter->shape[0] : parameter->shape[0] / 2;
        *out = (sources){.made_of = second ? WHOLE : GATE_UP, .count = second ? 1 : 2};
        out->part[0] = expert_source(spec, parameter, second ? 2 : 0, each);
        out->part[1] = expert_source(spec, parameter, 1, each);
        return LOOM_OK;
    }
    LOOM_TRY(find_entry(spec, parameter, &found, &kind));
    bool gpt2 = is_gpt2(spec);
    const char *module = gpt2 ? found->gpt2 : found->llama;
    if (strcmp(found->megatron, "mlp.router") == 0 && !is_mixtral(spec))
        module = "mlp.gate";
    /* Megatron-Core has the gate as a parameter of the shared experts themselves, not as a layer. */
    if (strcmp(kind, "gate_weight") == 0)
        kind = "weight";
    int64_t rows = parameter->shape[0], cols = parameter->shape[1];
    out->made_of = gpt2 && found->made_of == GATE_UP ? WHOLE : found->made_of;
    out->fused = gpt2 && found->made_of == QKV;
    if (out->made_of == WHOLE || out->fused) {
        out->count = 1;
        out->part[0] = source_make(spec, parameter, module, kind, rows, cols);
        return LOOM_OK;
    }
    static const char *const qkv[] = {"q_proj", "k_proj", "v_proj"}, *const gate_up[] = {"gate_proj", "up_proj"};
    int64_t d = config->kv_channels;
    int64_t qkv_rows[] = {config->num_attention_heads * d, config->num_query_groups * d, config->num_query_groups * d};
    out->count = out->made_of == QKV ? 3 : 2;
    for (int i = 0; i < out->count; i++) {
        char name[LOOM__HF_NAME_MAX];
        snprintf(name, sizeof name, "%s%s", module, out->made_of == QKV ? qkv[i] : gate_up[i]);
        out->part[i] = source_make(spec, parameter, name, kind, out->made_of == QKV ? qkv_rows[i] : rows / 2, cols);
    }
    return LOOM_OK;
}

loom_status loom__hf_parameter_tensors(const loom__model_spec *spec, const loom__parameter_descriptor *parameter,
    loom__hf_tensor_function tensor, void *context) {
    sources from;
    LOOM_TRY(sources_of(spec, parameter, &from));
    for (int i = 0; i < from.count; i++)
        LOOM_TRY(tensor(context, &from.part[i].tensor));
    return LOOM_OK;
}

loom_status loom__hf_source_runs(
    const loom__model_spec *spec, const loom__parameter_descriptor *parameter, loom__hf_run run, void *context) {
    const loom_model_config *config = &spec->config;
    sources from;
    LOOM_TRY(sources_of(spec, parameter, &from));
    int64_t rows = parameter->shape[0];
    if (from.made_of == WHOLE)
        return emit_rows(&from.part[0], 0, 0, rows, run, context);
    if (from.made_of == GATE_UP) {
        LOOM_TRY(emit_rows(&from.part[0], 0, 0, rows / 2, run, context));
        return emit_rows(&from.part[1], rows / 2, 0, rows / 2, run, context);
    }
    int64_t d = config->kv_channels, g = config->num_query_groups;
    int64_t queries = config->num_attention_heads / g * d; /* rows of one group's query heads */
    /* In the fused tensor k begins after all queries, v after all keys. */
    const source *q = &from.part[0], *k = from.fused ? q : &from.part[1], *v = from.fused ? q : &from.part[2];
    int64_t k_base = from.fused ? g * queries : 0, v_base = from.fused ? g * (queries + d) : 0;
    for (int64_t group = 0; group < g; group++) {
        int64_t row = group * (queries + 2 * d);
        LOOM_TRY(emit_rows(q, row, group * queries, queries, run, context));
        LOOM_TRY(emit_rows(k, row + queries, k_base + group * d, d, run, context));
        LOOM_TRY(emit_rows(v, row + queries + d, v_base + group * d, d, run, context));
    }
    return LOOM_OK;
}

static const char gpt2_prefix[] = "transformer.";

const char *loom__hf_other_name(const loom__model_spec *spec, const char *hf_name) {
    size_t length = sizeof gpt2_prefix - 1;
    return is_gpt2(spec) && strncmp(hf_name, gpt2_prefix, length) == 0 ? hf_name + length : NULL;
}

bool loom__hf_is_ignorable(const loom__model_spec *spec, const char *hf_name) {
    if (spec->config.share_embeddings_and_output_weights && strcmp(hf_name, "lm_head.weight") == 0)
        return true;
    if (is_gpt2(spec))
        return loom__ends_with(hf_name, ".attn.bias") || loom__ends_with(hf_name, ".attn.masked_bias");
    return loom__ends_with(hf_name, ".rotary_emb.inv_freq");
}
