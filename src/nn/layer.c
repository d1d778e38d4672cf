/* The transformer layer: x + proj(attention(norm(x))), then + fc2(act(fc1(norm(·)))). Biases behind a sum over ranks,
 * dropout and the residual are one pass over memory. A layer is a set of pointers into the parameters; one of experts
 * owns the lists of its own and what its router keeps over a step. */
#include "nn/layer.h"
#include "parallel/parallel.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static loom_parameter *find(const loom__parameter_set *set, int64_t number, const char *what) {
    char name[LOOM__PARAMETER_NAME_MAX];
    snprintf(name, sizeof name, "decoder.layers.%lld.%s", (long long)number, what);
    return loom__parameter_set_find(set, name);
}

static bool belongs(const loom__parameter_descriptor *descriptor, const loom__layer *layer, const char *end) {
    size_t length = strlen(descriptor->name), tail = strlen(end);
    return descriptor->layer == layer->number && descriptor->expert >= 0 && length > tail &&
           strcmp(descriptor->name + length - tail, end) == 0;
}

/* Puts those of this rank's experts into `to`, in order, as they are in its part. */
static int64_t list_experts(
    const loom__parameter_set *set, const loom__layer *layer, const char *end, loom_parameter **to) {
    int64_t count = 0;
    for (int64_t i = 0; i < set->count; i++)
        if (belongs(set->part->entries[i].descriptor, layer, end))
            to[count++] = &set->parameters[i];
    return count;
}

static loom_status bind_experts(const loom__parameter_set *set, loom__layer *layer) {
    if (!loom__layer_has_experts(layer->config, layer->number))
        return LOOM_OK;
    size_t most = (size_t)layer->config->moe.num_moe_experts;
    bool biases = loom__model_biases(layer->config).mlp;
    layer->router = find(set, layer->number, "mlp.router.weight");
    layer->router_bias = find(set, layer->number, "mlp.router.bias");
    layer->shared_gate = find(set, layer->number, "mlp.shared_experts.gate_weight");
    layer->experts_fc1 = calloc(4 * most, sizeof *layer->experts_fc1);
    if (!layer->experts_fc1)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %zu experts", most);
    layer->experts_fc2 = layer->experts_fc1 + most;
    layer->experts_fc1_bias = biases ? layer->experts_fc1 + 2 * most : NULL;
    layer->experts_fc2_bias = biases ? layer->experts_fc1 + 3 * most : NULL;
    int64_t count = list_experts(set, layer, "linear_fc1.weight", layer->experts_fc1);
    bool alike = count > 0 && list_experts(set, layer, "linear_fc2.weight", layer->experts_fc2) == count;
    if (biases)
        alike = alike && list_experts(set, layer, "linear_fc1.bias", layer->experts_fc1_bias) == count &&
                list_experts(set, layer, "linear_fc2.bias", layer->experts_fc2_bias) == count;
    layer->expert_count = count;
    const loom_parameter *bias = find(set, layer->number, "mlp.router.expert_bias");
    bool biased = layer->config->moe.moe_router_enable_expert_bias;
    if (layer->router && alike && (bias != NULL) == biased)
        return loom__router_memory_create((int64_t)most, bias ? bias->data : NULL,
            loom__balance_coefficient(&layer->config->moe, "global_aux_loss") > 0, &layer->router_memory);
    return loom_fail(LOOM_ERR_INTERNAL, "the spec lacks an expert of layer %lld", (long long)layer->number);
}

void loom__layer_unbind(loom__layer *layer) {
    free(layer->experts_fc1);
    layer->experts_fc1 = layer->experts_fc2 = layer->experts_fc1_bias = layer->experts_fc2_bias = NULL;
    loom__router_memory_destroy(layer->router_memory);
    layer->router_memory = NULL;
}

loom_status loom__layer_bind(
    const loom__parameter_set *set, const loom_model_config *config, int64_t number, loom__layer *layer) {
    bool experts = loom__layer_has_experts(config, number);
    *layer = (loom__layer){
        .number = number,
        .config = config,
        .input_norm = find(set, number, "input_layernorm.weight"),
        .input_norm_bias = find(set, number, "input_layernorm.bias"),
        .qkv = find(set, number, "self_attention.linear_qkv.weight"),
        .qkv_bias = find(set, number, "self_attention.linear_qkv.bias"),
        .q_norm = find(set, number, "self_attention.q_layernorm.weight"),
        .k_norm = find(set, number, "self_attention.k_layernorm.weight"),
        .proj = find(set, number, "self_attention.linear_proj.weight"),
        .proj_bias = find(set, number, "self_attention.linear_proj.bias"),
        .mlp_norm = find(set, number, "pre_mlp_layernorm.weight"),
        .mlp_norm_bias = find(set, number, "pre_mlp_layernorm.bias"),
        .fc1 = find(set, number, experts ? "mlp.shared_experts.linear_fc1.weight" : "mlp.linear_fc1.weight"),
        .fc1_bias = find(set, number, experts ? "mlp.shared_experts.linear_fc1.bias" : "mlp.linear_fc1.bias"),
        .fc2 = find(set, number, experts ? "mlp.shared_experts.linear_fc2.weight" : "mlp.linear_fc2.weight"),
        .fc2_bias = find(set, number, experts ? "mlp.shared_experts.linear_fc2.bias" : "mlp.linear_fc2.bias"),
    };
    LOOM_TRY(bind_experts(set, layer));
    bool heads_have_norms = layer->q_norm && layer->k_norm;
    if (!layer->input_norm || !layer->qkv || heads_have_norms != config->qk_layernorm || !layer->proj ||
        !layer->mlp_norm || (!layer->router && (!layer->fc1 || !layer->fc2)))
        return loom_fail(LOOM_ERR_INTERNAL, "the spec lacks a parameter of layer %lld", (long long)number);
    return LOOM_OK;
}

void loom__microbatch_release(void *microbatch) {
    loom__microbatch *m = microbatch;
    if (!m || --m->references > 0)
        return;
    for (int type = 0; type < LOOM__CONTEXT_TYPES; type++)
        free(m->context[type].memory);
    free(m);
}

static int tp_size(const loom__microbatch *m) {
    return loom_comm_size(m->tp);
}

int64_t loom__first_row(const loom__microbatch *m) {
    return m->sequence_parallel ? m->s / tp_size(m) * loom_comm_rank(m->tp) : 0;
}

loom_positions loom__row_positions(const loom__microbatch *m) {
    const int64_t row = loom__first_row(m), turn = m->rows.turn;
    if (row < turn)
        return (loom_positions){m->rows.first + row, turn == INT64_MAX ? turn : turn - row, m->rows.second};
    return loom_positions_from(m->rows.second + row - turn);
}

static int64_t local_heads(const loom_model_config *config, const loom__microbatch *m) {
    return config->num_attention_heads / tp_size(m);
}

/* With more ranks than groups each holds a copy of one. */
static int64_t local_groups(const loom_model_config *config, const loom__microbatch *m) {
    int64_t groups = config->num_query_groups / tp_size(m);
    return groups > 0 ? groups : 1;
}

static loom_dropout site_dropout(const loom__microbatch *m, double probability, int64_t layer, uint32_t site) {
    return (loom_dropout){m->training ? (float)probability : 0.0f, m->seed, (uint32_t)layer, site};
}

loom_status loom__norm(loom_tape *tape, const loom_model_config *config, loom_tensor *x, loom_parameter *weight,
    loom_parameter *bias, loom_tensor **output) {
    float eps = (float)config->layernorm_epsilon;
    return config->layernorm_zero_centered_gamma ? loom_zero_centered_norm(tape, x, weight, bias, eps, output)
                                                 : loom_norm(tape, x, weight, bias, eps, output);
}

/* ---- attention ---- */

typedef struct layer_call {
    const loom__layer *layer;
    loom__microbatch *microbatch;
} layer_call;

static void layer_call_free(void *argument) {
    layer_call *call = argument;
    loom__microbatch_release(call->microbatch);
    free(call);
}

static layer_call *layer_call_create(const loom__layer *layer, loom__microbatch *microbatch) {
    layer_call *call = malloc(sizeof *call);
    if (!call)
        return NULL;
    *call = (layer_call){layer, microbatch};
    microbatch->references++;
    return call;
}

static loom_status attend(loom_tape *tape, const loom__context_way *way, loom_tensor *qkv,
    const loom_attention_options *options, loom_tensor **output) {
    return way->ring ? loom__ring_attention(tape, qkv, options, way->ring, output)
                     : loom_attention(tape, qkv, options, output);
}

/* More rows of fewer heads: then attention, then back. */
static loom_status attention_by_heads(loom_tape *tape, const loom__context_way *way, loom_tensor *qkv,
    const loom_attention_options *all, loom_tensor **output) {
    int64_t size = loom_comm_size(way->heads_group);
    loom_attention_options options = *all;
    options.n /= size;
    options.g /= size;
    options.head_offset += options.n * loom_comm_rank(way->heads_group);
    loom_tensor *part = NULL, *context = NULL;
    LOOM_TRY(loom__heads_for_rows(tape, qkv, way->heads_group, &part));
    loom_status status = attend(tape, way, part, &options, &context);
    loom_tensor_release(part);
    if (!status)
        status = loom__rows_for_heads(tape, context, way->heads_group, output);
    loom_tensor_release(context);
    return status;
}

/* qkv [s, b, …] after its projection, norms and rotation -> [s, b, n/tp*d]. */
static loom_status core_attention(loom_tape *tape, void *argument, loom_tensor *qkv, loom_tensor **output) {
    const layer_call *call = argument;
    const loom_model_config *config = call->layer->config;
    const loom__microbatch *m = call->microbatch;
    const loom__context_way *way = &m->context[loom__context_type_of(config, call->layer->number)];
    int64_t n = local_heads(config, m);
    loom_attention_options options = {
        .n = n,
        .g = local_groups(config, m),
        .d = config->kv_channels,
        .scale = 1.0f / sqrtf((float)config->kv_channels),
        .causal = true,
        .window = config->window_size,
        .document_start = way->document_start,
        .dropout = site_dropout(m, config->attention_dropout, call->layer->number, LOOM_DROPOUT_ATTENTION),
        .sample = m->sample,
        .head_offset = n * loom_comm_rank(m->tp),
    };
    if (m->cache)
        return loom__cached_attention(tape, m->cache, call->layer->number, qkv, &options, output);
    if (way->heads_group)
        return attention_by_heads(tape, way, qkv, &options, output);
    return attend(tape, way, qkv, &options, output);
}

static loom_status norm_heads(const loom__layer *layer, loom_tape *tape, const loom__microbatch *m, loom_tensor **qkv) {
    const loom_model_config *config = layer->config;
    if (!config->qk_layernorm)
        return LOOM_OK;
    int64_t g = local_groups(config, m);
    loom_tensor *normed;
    LOOM_TRY(loom_qk_norm(tape, *qkv, layer->q_norm, layer->k_norm, g, local_heads(config, m) / g, config->kv_channels,
        (float)config->layernorm_epsilon, config->layernorm_zero_centered_gamma, &normed));
    loom_tensor_release(*qkv);
    *qkv = normed;
    return LOOM_OK;
}

static loom_status rotate(const loom__layer *layer, loom_tape *tape, const loom__microbatch *m, loom_tensor **qkv) {
    const loom_model_config *config = layer->config;
    if (config->position_embedding_type != LOOM_POSITION_ROPE)
        return LOOM_OK;
    int64_t g = local_groups(config, m);
    loom_tensor *rotated;
    LOOM_TRY(loom_rope(tape, *qkv, &m->rope, g, local_heads(config, m) / g, config->kv_channels, m->positions,
        m->rows.first, &rotated));
    loom_tensor_release(*qkv);
    *qkv = rotated;
    return LOOM_OK;
}

static loom_status self_attention(
    const loom__layer *layer, loom_tape *tape, loom__microbatch *m, loom_tensor *x, loom_tensor **output) {
    const loom_model_config *config = layer->config;
    loom_tensor *normed = NULL, *qkv = NULL, *context = NULL, *projected = NULL;
    loom_status status = loom__norm(tape, config, x, layer->input_norm, layer->input_norm_bias, &normed);
    if (!status)
        status = loom__column_linear(tape, normed, layer->qkv, layer->qkv_bias, m->tp, m->sequence_parallel, &qkv);
    loom_tensor_release(normed);
    if (!status)
        status = norm_heads(layer, tape, m, &qkv);
    if (!status)
        status = rotate(layer, tape, m, &qkv);
    if (!status && config->recompute == LOOM_RECOMPUTE_SELECTIVE) {
        layer_call *call = layer_call_create(layer, m);
        status = call ? loom_recompute_call(tape, core_attention, call, layer_call_free, qkv, &context)
                      : loom_fail(LOOM_ERR_MEMORY, "out of memory for a recomputation");
    } else if (!status) {
        status = core_attention(tape, &(layer_call){layer, m}, qkv, &context);
    }
    loom_tensor_release(qkv);
    if (!status)
        status = loom__row_linear(tape, context, layer->proj, m->tp, m->sequence_parallel, &projected);
    loom_tensor_release(context);
    if (!status) {
        loom_dropout dropout = site_dropout(m, config->hidden_dropout, layer->number, LOOM_DROPOUT_PROJECTION);
        status = loom_bias_dropout_add(
            tape, projected, layer->proj_bias, x, &dropout, m->sample, loom__row_positions(m), output);
    }
    loom_tensor_release(projected);
    return status;
}

/* The wide half of an MLP, and the narrow one. */
static loom_status widen_mlp(
    const loom__layer *layer, loom_tape *tape, const loom__microbatch *m, loom_tensor *normed, loom_tensor **active) {
    loom_tensor *wide = NULL;
    LOOM_TRY(loom__column_linear(tape, normed, layer->fc1, NULL, m->tp, m->sequence_parallel, &wide));
    loom_status status = loom_activate(tape, layer->config->activation, wide, layer->fc1_bias, active);
    loom_tensor_release(wide);
    return status;
}

static loom_status narrow_mlp(
    const loom__layer *layer, loom_tape *tape, const loom__microbatch *m, loom_tensor *active, loom_tensor **narrow) {
    return loom__row_linear(tape, active, layer->fc2, m->tp, m->sequence_parallel, narrow);
}

static loom_status dense_mlp(
    const loom__layer *layer, loom_tape *tape, const loom__microbatch *m, loom_tensor *normed, loom_tensor **narrow) {
    loom_tensor *active = NULL;
    LOOM_TRY(widen_mlp(layer, tape, m, normed, &active));
    loom_status status = narrow_mlp(layer, tape, m, active, narrow);
    loom_tensor_release(active);
    return status;
}

static loom_status through_experts(
    const loom__layer *layer, loom_tape *tape, loom_tensor *rows, const loom__routed *routed, loom_tensor **narrow) {
    loom_tensor *wide = NULL, *active = NULL;
    loom_status status = loom__expert_linear(tape, rows, routed, layer->experts_fc1, NULL, &wide);
    if (!status)
        status = loom__expert_activate(tape, layer->config->activation, wide, routed, layer->experts_fc1_bias, &active);
    loom_tensor_release(wide);
    if (!status)
        status = loom__expert_linear(tape, active, routed, layer->experts_fc2, layer->experts_fc2_bias, narrow);
    loom_tensor_release(active);
    return status;
}

/* The router may read other rows than the experts get. */
static loom_status route(const loom__layer *layer, loom_tape *tape, const loom__microbatch *m, loom_tensor *normed,
    loom_tensor **probs, loom__routed **routed) {
    loom__router_options options = m->router;
    options.memory = layer->router_memory;
    options.layer = layer->number;
    /* A cache reads positions of several rows that are nowhere side by side. */
    options.noise =
        (loom__router_noise){m->seed, layer->number, m->sample, loom__row_positions(m), m->cache ? m->positions : NULL};
    if (!(options.jitter > 0))
        return loom__route_tokens(tape, normed, layer->router, layer->router_bias, &options, probs, routed);
    loom_tensor *read = NULL;
    LOOM_TRY(loom__router_jitter(tape, normed, options.jitter, &options.noise, &read));
    loom_status status = loom__route_tokens(tape, read, layer->router, layer->router_bias, &options, probs, routed);
    loom_tensor_release(read);
    return status;
}

/* The weights of a token's experts are put on it before they get it, where there is one, or on what they give. */
static loom_status expert_rows(loom_tape *tape, const loom__microbatch *m, loom_tensor *normed, loom_tensor **probs,
    loom__routed *routed, loom_tensor **rows) {
    if (!m->router.weigh_input)
        return loom__expert_rows(tape, normed, routed, rows);
    loom_tensor *weighed = NULL, *units = NULL;
    LOOM_TRY(loom__weigh_tokens(tape, normed, *probs, routed, &weighed, &units));
    loom_tensor_release(*probs);
    *probs = units;
    loom_status status = loom__expert_rows(tape, weighed, routed, rows);
    loom_tensor_release(weighed);
    return status;
}

/* *shared [s/tp, b, h] becomes (*shared + bias) * sigmoid of the gate: what is weighted is all that the experts give.
 */
static loom_status weigh_shared(
    const loom__layer *layer, loom_tape *tape, const loom__microbatch *m, loom_tensor *normed, loom_tensor **shared) {
    loom_tensor *whole = *shared;
    loom_status status = LOOM_OK;
    *shared = NULL;
    if (layer->fc2_bias) {
        loom_tensor *narrow = whole;
        whole = NULL;
        status = loom_bias_dropout_add(
            tape, narrow, layer->fc2_bias, NULL, &(loom_dropout){0}, m->sample, loom__row_positions(m), &whole);
        loom_tensor_release(narrow);
    }
    if (!status)
        status = loom_sigmoid_gate(tape, normed, layer->shared_gate, whole, shared);
    loom_tensor_release(whole);
    return status;
}

/* What the experts that every token goes to make of `active`, weighted by their gate where they have one. */
static loom_status finish_shared(const loom__layer *layer, loom_tape *tape, const loom__microbatch *m,
    loom_tensor *normed, loom_tensor *active, loom_tensor **shared) {
    LOOM_TRY(narrow_mlp(layer, tape, m, active, shared));
    return layer->shared_gate ? weigh_shared(layer, tape, m, normed, shared) : LOOM_OK;
}

/* Rows travel to the experts under the wide half of the shared one, where that is asked for (active not NULL). */
static loom_status to_experts(const loom__layer *layer, loom_tape *tape, const loom__microbatch *m, loom_tensor *normed,
    loom__routed *routed, loom_tensor **probs, loom_tensor **active, loom_tensor **rows) {
    loom_tensor *mine = NULL, *moved = NULL;
    loom_status status = expert_rows(tape, m, normed, probs, routed, &mine);
    if (!status)
        status = loom__expert_exchange_start(tape, routed, true, mine, &moved);
    loom_tensor_release(mine);
    if (!status && active)
        status = widen_mlp(layer, tape, m, normed, active);
    if (!status)
        status = loom__expert_dispatch(tape, moved, routed, rows);
    loom_tensor_release(moved);
    return status;
}

/* And back under its narrow half. */
static loom_status from_experts(const loom__layer *layer, loom_tape *tape, const loom__microbatch *m,
    loom_tensor *normed, loom__routed *routed, loom_tensor *narrow, loom_tensor *probs, loom_tensor *active,
    loom_tensor **shared, loom_tensor **output) {
    loom_tensor *sum = NULL, *moved = NULL;
    loom_status status = loom__expert_return(tape, narrow, routed, &sum);
    if (!status)
        status = loom__expert_exchange_start(tape, routed, false, sum, &moved);
    loom_tensor_release(sum);
    if (!status && active)
        status = finish_shared(layer, tape, m, normed, active, shared);
    if (!status)
        status = loom__expert_combine(tape, moved, probs, routed, normed->shape[0], normed->shape[1], output);
    loom_tensor_release(moved);
    return status;
}

/* shared: where the shared expert is computed while rows travel, its output; NULL: it is not. */
static loom_status routed_experts(const loom__layer *layer, loom_tape *tape, const loom__microbatch *m,
    loom_tensor *normed, loom_tensor **shared, loom_tensor **output) {
    loom_tensor *probs = NULL, *rows = NULL, *narrow = NULL, *active = NULL;
    loom__routed *routed = NULL;
    loom_status status = route(layer, tape, m, normed, &probs, &routed);
    if (!status)
        status = to_experts(layer, tape, m, normed, routed, &probs, shared ? &active : NULL, &rows);
    if (!status)
        status = through_experts(layer, tape, rows, routed, &narrow);
    loom_tensor_release(rows);
    if (!status)
        status = from_experts(layer, tape, m, normed, routed, narrow, probs, active, shared, output);
    loom_tensor_release(narrow);
    loom_tensor_release(active);
    loom_tensor_release(probs);
    loom__routed_release(routed);
    return status;
}

/* The routed experts, and beside them those that every token goes to, while rows travel or behind it; without the
 * latter's last bias where they have no gate, which then comes with the residual. Either way the gradients of `normed`
 * come in one order (gate, shared expert, rows, router), and so have the same bits. */
static loom_status experts(
    const loom__layer *layer, loom_tape *tape, const loom__microbatch *m, loom_tensor *normed, loom_tensor **output) {
    if (!layer->fc1)
        return routed_experts(layer, tape, m, normed, NULL, output);
    bool overlap = layer->config->moe.moe_shared_expert_overlap;
    loom_tensor *routed = NULL, *shared = NULL, *active = NULL;
    loom_status status = routed_experts(layer, tape, m, normed, overlap ? &shared : NULL, &routed);
    if (!status && !overlap)
        status = widen_mlp(layer, tape, m, normed, &active);
    if (!status && !overlap)
        status = finish_shared(layer, tape, m, normed, active, &shared);
    loom_tensor_release(active);
    if (!status)
        status = loom_add(tape, routed, shared, output);
    loom_tensor_release(routed);
    loom_tensor_release(shared);
    return status;
}

static loom_status recomputed_experts(loom_tape *tape, void *argument, loom_tensor *normed, loom_tensor **output) {
    const layer_call *call = argument;
    return experts(call->layer, tape, call->microbatch, normed, output);
}

static loom_status expert_mlp(
    const loom__layer *layer, loom_tape *tape, loom__microbatch *m, loom_tensor *normed, loom_tensor **output) {
    if (!layer->config->moe.moe_layer_recompute)
        return experts(layer, tape, m, normed, output);
    layer_call *call = layer_call_create(layer, m);
    return call ? loom_recompute_call(tape, recomputed_experts, call, layer_call_free, normed, output)
                : loom_fail(LOOM_ERR_MEMORY, "out of memory for a recomputation");
}

static loom_status mlp(
    const loom__layer *layer, loom_tape *tape, loom__microbatch *m, loom_tensor *x, loom_tensor **output) {
    const loom_model_config *config = layer->config;
    loom_tensor *normed = NULL, *narrow = NULL;
    loom_status status = loom__norm(tape, config, x, layer->mlp_norm, layer->mlp_norm_bias, &normed);
    if (!status)
        status =
            layer->router ? expert_mlp(layer, tape, m, normed, &narrow) : dense_mlp(layer, tape, m, normed, &narrow);
    loom_tensor_release(normed);
    if (!status) {
        loom_dropout dropout = site_dropout(m, config->hidden_dropout, layer->number, LOOM_DROPOUT_MLP);
        loom_parameter *bias = layer->shared_gate ? NULL : layer->fc2_bias;
        status = loom_bias_dropout_add(tape, narrow, bias, x, &dropout, m->sample, loom__row_positions(m), output);
    }
    loom_tensor_release(narrow);
    return status;
}

static loom_status whole_layer(loom_tape *tape, void *argument, loom_tensor *x, loom_tensor **output) {
    const layer_call *call = argument;
    loom_tensor *middle = NULL;
    LOOM_TRY(self_attention(call->layer, tape, call->microbatch, x, &middle));
    loom_status status = mlp(call->layer, tape, call->microbatch, middle, output);
    loom_tensor_release(middle);
    return status;
}

loom_status loom__layer_forward(
    const loom__layer *layer, loom_tape *tape, loom__microbatch *microbatch, loom_tensor *x, loom_tensor **output) {
    char scope[64];
    snprintf(scope, sizeof scope, "decoder.layers.%lld", (long long)layer->number);
    loom_tape_scope(tape, scope);
    if (layer->config->recompute != LOOM_RECOMPUTE_FULL)
        return whole_layer(tape, &(layer_call){layer, microbatch}, x, output);
    layer_call *call = layer_call_create(layer, microbatch);
    return call ? loom_recompute_call(tape, whole_layer, call, layer_call_free, x, output)
                : loom_fail(LOOM_ERR_MEMORY, "out of memory for a recomputation");
}
