/* The parameters of a decoder-only model, in Megatron-Core's registration order (which its gradient buffers follow: in
 * the attention the output projection comes before linear_qkv), and how the ranks of a tensor group share them.
 *
 * The shard map is written once, as a walk over row blocks of the canonical tensor in local order; an emitter joins
 * neighbouring pieces, so callers see maximal runs. Every shape here comes from a completed configuration, whose
 * products do not overflow. */
#include "spec/parameter.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct list {
    loom__model_spec *spec;
    loom__place place; /* of the parameters being added; so below */
    int64_t layer;     /* -1 outside the layers */
} list;

static loom__parameter_descriptor *add(list *to, const char *name, int dims, int64_t rows, int64_t cols) {
    loom__parameter_descriptor *parameter = &to->spec->parameters[to->spec->count++];
    *parameter = (loom__parameter_descriptor){.dims = dims,
        .shape = {rows, cols},
        .padded_rows = rows,
        .shard = LOOM__SHARD_NONE,
        .initial = dims == 2 ? LOOM__INIT_NORMAL : LOOM__INIT_ZERO,
        .std = dims == 2 ? to->spec->config.init_method_std : 0,
        .decay = dims >= 2,
        .place = to->place,
        .layer = to->layer,
        .expert = -1};
    if (to->layer >= 0)
        snprintf(parameter->name, sizeof parameter->name, "decoder.layers.%lld.%s", (long long)to->layer, name);
    else
        snprintf(parameter->name, sizeof parameter->name, "%s", name);
    return parameter;
}

static void add_vocabulary_rows(list *to, const char *name, int tie_group) {
    const loom_model_config *config = &to->spec->config;
    loom__parameter_descriptor *parameter = add(to, name, 2, config->vocab_size, config->hidden_size);
    parameter->padded_rows = config->padded_vocab_size;
    parameter->shard = LOOM__SHARD_SLICE;
    parameter->tie_group = tie_group;
    parameter->embedding_or_output = true;
}

/* A factor of 1. */
static loom__initial norm_weight_initial(const loom_model_config *config) {
    return config->layernorm_zero_centered_gamma ? LOOM__INIT_ZERO : LOOM__INIT_ONE;
}

static void add_norm(list *to, const char *weight, const char *bias) {
    const loom_model_config *config = &to->spec->config;
    loom__parameter_descriptor *parameter = add(to, weight, 1, config->hidden_size, 1);
    parameter->initial = norm_weight_initial(config);
    parameter->sequence_partial = true;
    if (config->normalization == LOOM_LAYERNORM)
        add(to, bias, 1, config->hidden_size, 1)->sequence_partial = true;
}

/* A norm of heads: every rank has the whole weight and some of the heads. */
static void add_head_norm(list *to, const char *weight) {
    const loom_model_config *config = &to->spec->config;
    loom__parameter_descriptor *parameter = add(to, weight, 1, config->kv_channels, 1);
    parameter->initial = norm_weight_initial(config);
    parameter->tensor_partial = true;
}

loom__biases loom__model_biases(const loom_model_config *config) {
    return (loom__biases){
        .qkv = config->add_bias_linear || config->add_qkv_bias,
        .proj = config->add_bias_linear || config->add_proj_bias,
        .mlp = config->add_bias_linear || config->add_mlp_bias,
        .router = config->add_bias_linear,
    };
}

/* A linear layer cut along its output (axis 0), bias included. */
static void add_column_linear(
    list *to, const char *weight, const char *bias, int64_t out, int64_t in, loom__shard_kind shard, bool has_bias) {
    add(to, weight, 2, out, in)->shard = shard;
    if (has_bias)
        add(to, bias, 1, out, 1)->shard = shard;
}

/* A linear layer cut along its input (axis 1); the whole bias is added once, after the reduction. */
static void add_row_linear(list *to, const char *weight, const char *bias, int64_t out, int64_t in, bool has_bias) {
    const loom_model_config *config = &to->spec->config;
    loom__parameter_descriptor *parameter = add(to, weight, 2, out, in);
    parameter->shard = LOOM__SHARD_SLICE;
    parameter->shard_axis = 1;
    if (config->use_scaled_init)
        parameter->std = config->init_method_std / sqrt(2.0 * (double)config->num_layers);
    if (has_bias)
        add(to, bias, 1, out, 1)->sequence_partial = true;
}

/* Two linear layers of width f under the module `where`. */
static void add_mlp(list *to, const char *where, int64_t f) {
    const loom_model_config *config = &to->spec->config;
    bool gated = loom_activation_is_gated(config->activation), biased = loom__model_biases(config).mlp;
    char weight[LOOM__PARAMETER_NAME_MAX], bias[LOOM__PARAMETER_NAME_MAX];
    snprintf(weight, sizeof weight, "%s.linear_fc1.weight", where);
    snprintf(bias, sizeof bias, "%s.linear_fc1.bias", where);
    add_column_linear(to, weight, bias, gated ? 2 * f : f, config->hidden_size,
        gated ? LOOM__SHARD_GATE_UP : LOOM__SHARD_SLICE, biased);
    snprintf(weight, sizeof weight, "%s.linear_fc2.weight", where);
    snprintf(bias, sizeof bias, "%s.linear_fc2.bias", where);
    add_row_linear(to, weight, bias, config->hidden_size, f, biased);
}

/* Megatron-Core draws it as it does weights; biases of linear layers it sets to zero. */
static void add_router_bias(list *to) {
    loom__parameter_descriptor *parameter = add(to, "mlp.router.bias", 1, to->spec->config.moe.num_moe_experts, 1);
    parameter->initial = LOOM__INIT_NORMAL;
    parameter->std = to->spec->config.init_method_std;
    parameter->sequence_partial = true;
}

static void add_experts(list *to) {
    const loom_moe_config *moe = &to->spec->config.moe;
    /* Each tensor rank routes its own rows of the sequence. */
    add(to, "mlp.router.weight", 2, moe->num_moe_experts, to->spec->config.hidden_size)->sequence_partial = true;
    if (loom__model_biases(&to->spec->config).router)
        add_router_bias(to);
    for (int64_t e = 0; e < moe->num_moe_experts; e++) {
        char where[LOOM__PARAMETER_NAME_MAX];
        snprintf(where, sizeof where, "mlp.experts.local_experts.%lld", (long long)e);
        int64_t first = to->spec->count;
        add_mlp(to, where, moe->moe_ffn_hidden_size);
        for (int64_t i = first; i < to->spec->count; i++) {
            loom__parameter_descriptor *parameter = &to->spec->parameters[i];
            parameter->expert = e;
            /* The tensor ranks of an expert have all of its rows, whatever those of the sequence have. */
            parameter->sequence_partial = false;
        }
    }
    if (moe->moe_shared_expert_gate)
        add(to, "mlp.shared_experts.gate_weight", 2, 1, to->spec->config.hidden_size)->sequence_partial = true;
    if (moe->moe_shared_expert_intermediate_size > 0)
        add_mlp(to, "mlp.shared_experts", moe->moe_shared_expert_intermediate_size);
}

static void add_layer(list *to) {
    const loom_model_config *config = &to->spec->config;
    int64_t h = config->hidden_size, f = config->ffn_hidden_size, d = config->kv_channels;
    int64_t n = config->num_attention_heads, g = config->num_query_groups;
    loom__biases biases = loom__model_biases(config);
    add_norm(to, "input_layernorm.weight", "input_layernorm.bias");
    add_row_linear(to, "self_attention.linear_proj.weight", "self_attention.linear_proj.bias", h, n * d, biases.proj);
    add_column_linear(to, "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias", (n + 2 * g) * d, h,
        LOOM__SHARD_QKV_GROUPS, biases.qkv);
    if (config->qk_layernorm) {
        add_head_norm(to, "self_attention.q_layernorm.weight");
        add_head_norm(to, "self_attention.k_layernorm.weight");
    }
    add_norm(to, "pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias");
    if (loom__layer_has_experts(config, to->layer)) {
        add_experts(to);
        return;
    }
    add_mlp(to, "mlp", f);
}

/* The bias of the choice of experts is moved by what the router counts and by no gradient. */
static void add_module_buffers(list *to) {
    const loom_model_config *config = &to->spec->config;
    int64_t parameters = to->spec->count;
    to->place = LOOM__PLACE_LAYER;
    for (to->layer = 0; to->layer < config->num_layers; to->layer++)
        if (config->moe.moe_router_enable_expert_bias && loom__layer_has_experts(config, to->layer))
            add(to, "mlp.router.expert_bias", 1, config->moe.num_moe_experts, 1);
    to->spec->module_buffers = to->spec->count - parameters;
    to->spec->count = parameters;
}

static void add_all(loom__model_spec *spec) {
    const loom_model_config *config = &spec->config;
    bool tied = config->share_embeddings_and_output_weights;
    list to = {.spec = spec, .place = LOOM__PLACE_EMBEDDING, .layer = -1};
    add_vocabulary_rows(&to, "embedding.word_embeddings.weight", tied ? 1 : 0);
    if (config->position_embedding_type == LOOM_POSITION_LEARNED)
        add(&to, "embedding.position_embeddings.weight", 2, config->max_position_embeddings, config->hidden_size)
            ->sequence_partial = true;
    to.place = LOOM__PLACE_LAYER;
    for (to.layer = 0; to.layer < config->num_layers; to.layer++)
        add_layer(&to);
    to.place = LOOM__PLACE_HEAD;
    to.layer = -1;
    add_norm(&to, "decoder.final_layernorm.weight", "decoder.final_layernorm.bias");
    add_vocabulary_rows(&to, "output_layer.weight", tied ? 1 : 0);
    loom__parameter_descriptor head = spec->parameters[spec->count - 1];
    spec->count -= tied;
    add_module_buffers(&to);
    loom__parameter_descriptor *behind = &spec->parameters[loom__spec_tensors(spec)];
    if (tied) {
        *behind = head;
        spec->tied_head = behind;
    }
}

loom_status loom__model_spec_create(const loom_model_config *completed, loom__model_spec **spec) {
    enum { A_LAYER = 18, AN_EXPERT = 4, OUTSIDE = 5 }; /* parameters, at most; a tied head comes behind them */
    if (completed->num_layers < 1 || completed->padded_vocab_size < completed->vocab_size || completed->kv_channels < 1)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "a model specification needs a completed configuration (loom__model_config_complete)");
    size_t a_layer = A_LAYER + AN_EXPERT * (size_t)completed->moe.num_moe_experts;
    loom__model_spec *made = calloc(1, sizeof *made);
    if (made)
        made->parameters = calloc((size_t)completed->num_layers * a_layer + OUTSIDE, sizeof *made->parameters);
    if (!made || !made->parameters) {
        free(made);
        return loom_fail(
            LOOM_ERR_MEMORY, "out of memory for the parameter list of %lld layers", (long long)completed->num_layers);
    }
    made->config = *completed;
    add_all(made);
    *spec = made;
    return LOOM_OK;
}

void loom__model_spec_destroy(loom__model_spec *spec) {
    if (!spec)
        return;
    free(spec->parameters);
    free(spec);
}

void loom__parameter_local_shape(
    const loom__model_spec *spec, const loom__parameter_descriptor *parameter, int64_t tp, int64_t shape[2]) {
    const loom_model_config *config = &spec->config;
    shape[0] = parameter->padded_rows;
    shape[1] = parameter->shape[1];
    if (parameter->shard == LOOM__SHARD_QKV_GROUPS) {
        int64_t g = config->num_query_groups;
        shape[0] = (config->num_attention_heads / tp + 2 * (tp > g ? 1 : g / tp)) * config->kv_channels;
    } else if (parameter->shard != LOOM__SHARD_NONE) {
        shape[parameter->shard_axis] /= tp;
    }
}

/* Joins pieces that continue each other and hands out what is complete. */
typedef struct emitter {
    loom__shard_run run;
    void *context;
    int64_t local, canonical, count; /* the piece not handed out yet; canonical -1 = padding */
} emitter;

static loom_status flush(emitter *emit) {
    int64_t count = emit->count;
    emit->count = 0;
    return count ? emit->run(emit->context, emit->local, emit->canonical, count) : LOOM_OK;
}

static loom_status append(emitter *emit, int64_t canonical, int64_t count) {
    if (count == 0)
        return LOOM_OK;
    bool both_padding = emit->canonical < 0 && canonical < 0;
    bool continues = emit->canonical >= 0 && canonical == emit->canonical + emit->count;
    if (emit->count && (both_padding || continues)) {
        emit->count += count;
        return LOOM_OK;
    }
    int64_t next = emit->local + emit->count;
    LOOM_TRY(flush(emit));
    emit->local = next;
    emit->canonical = canonical;
    emit->count = count;
    return LOOM_OK;
}

static loom_status append_rows(
    emitter *emit, const loom__parameter_descriptor *parameter, int64_t first, int64_t rows) {
    return append(emit, first * parameter->shape[1], rows * parameter->shape[1]);
}

static loom_status append_slice(
    emitter *emit, const loom__parameter_descriptor *parameter, int64_t tp, int64_t tp_rank) {
    if (parameter->shard_axis == 1) {
        int64_t width = parameter->shape[1] / tp;
        for (int64_t row = 0; row < parameter->shape[0]; row++)
            LOOM_TRY(append(emit, row * parameter->shape[1] + tp_rank * width, width));
        return LOOM_OK;
    }
    int64_t rows = parameter->padded_rows / tp, first = tp_rank * rows;
    int64_t real = first >= parameter->shape[0] ? 0 : parameter->shape[0] - first;
    real = real < rows ? real : rows;
    LOOM_TRY(append_rows(emit, parameter, first, real));
    return append(emit, -1, (rows - real) * parameter->shape[1]);
}

static loom_status append_gate_up(
    emitter *emit, const loom__parameter_descriptor *parameter, int64_t tp, int64_t tp_rank) {
    int64_t half = parameter->shape[0] / 2, rows = half / tp;
    LOOM_TRY(append_rows(emit, parameter, tp_rank * rows, rows));
    return append_rows(emit, parameter, half + tp_rank * rows, rows);
}

static loom_status append_groups(emitter *emit, const loom_model_config *config,
    const loom__parameter_descriptor *parameter, int64_t tp, int64_t tp_rank) {
    int64_t n = config->num_attention_heads, g = config->num_query_groups, d = config->kv_channels;
    int64_t group_rows = (n / g + 2) * d;
    if (tp <= g)
        return append_rows(emit, parameter, tp_rank * (g / tp) * group_rows, g / tp * group_rows);
    int64_t sharers = tp / g, heads = n / tp;
    int64_t group_first = tp_rank / sharers * group_rows;
    LOOM_TRY(append_rows(emit, parameter, group_first + tp_rank % sharers * heads * d, heads * d));
    return append_rows(emit, parameter, group_first + n / g * d, 2 * d);
}

loom_status loom__parameter_shard_runs(const loom__model_spec *spec, const loom__parameter_descriptor *parameter,
    int64_t tp, int64_t tp_rank, loom__shard_run run, void *context) {
    emitter emit = {.run = run, .context = context};
    loom_status status = LOOM_OK;
    switch (parameter->shard) {
    case LOOM__SHARD_NONE:
        status = append_rows(&emit, parameter, 0, parameter->shape[0]);
        break;
    case LOOM__SHARD_SLICE:
        status = append_slice(&emit, parameter, tp, tp_rank);
        break;
    case LOOM__SHARD_GATE_UP:
        status = append_gate_up(&emit, parameter, tp, tp_rank);
        break;
    case LOOM__SHARD_QKV_GROUPS:
        status = append_groups(&emit, &spec->config, parameter, tp, tp_rank);
        break;
    }
    LOOM_TRY(status);
    return flush(&emit);
}

bool loom__parameter_is_replicated_kv(
    const loom__model_spec *spec, const loom__parameter_descriptor *parameter, int64_t tp) {
    return parameter->shard == LOOM__SHARD_QKV_GROUPS && tp > spec->config.num_query_groups;
}

int64_t loom__parameter_owned_count(
    const loom__model_spec *spec, const loom__parameter_descriptor *parameter, int64_t tp, int64_t tp_rank) {
    int64_t shape[2];
    loom__parameter_local_shape(spec, parameter, tp, shape);
    if (parameter->shard == LOOM__SHARD_NONE)
        return tp_rank == 0 ? shape[0] * shape[1] : 0;
    if (loom__parameter_is_replicated_kv(spec, parameter, tp) && tp_rank % (tp / spec->config.num_query_groups) != 0)
        shape[0] -= 2 * spec->config.kv_channels;
    return shape[0] * shape[1];
}
