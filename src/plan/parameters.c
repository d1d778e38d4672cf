/* How many parameters there are, and how many a rank holds. Dense parameters come from the very descriptors that
 * training allocates, of a model with one layer: layers are alike. Experts, which training does not build yet, follow
 * Megatron-Core's shapes. */
#include "plan/sizes.h"
#include <stdlib.h>
#include <string.h>

/* Places in the gradient buffer begin at multiples of this, in elements. */
enum { PLAIN_ALIGNMENT = 16, SHARDED_ALIGNMENT = 64, SHARDED_END = 128, BUSBW_END = 1 << 16 };

static int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

static int64_t place_of(const loom__plan_sizes *sizes, int64_t count) {
    return round_up(count, sizes->sharded ? SHARDED_ALIGNMENT : PLAIN_ALIGNMENT);
}

static void add_descriptor(const loom__plan_sizes *sizes, const loom__model_spec *spec,
    const loom__parameter_descriptor *parameter, loom__plan_parameters *to) {
    int64_t shape[2], whole = loom__descriptor_count(parameter);
    loom__parameter_local_shape(spec, parameter, sizes->tp, shape);
    int64_t rank = shape[0] * (parameter->dims == 2 ? shape[1] : 1);
    bool partial =
        (parameter->sequence_partial && sizes->sequence_parallel) || (parameter->tensor_partial && sizes->tp > 1);
    to->whole += whole;
    to->active += whole;
    to->rank += rank;
    to->buffer += place_of(sizes, rank);
    to->partial += partial ? rank : 0;
}

/* A dense tensor of a layer with experts; `rank` of its elements are on one rank. */
static void add_dense(const loom__plan_sizes *sizes, int64_t whole, int64_t rank, loom__plan_parameters *to) {
    to->whole += whole;
    to->active += whole;
    to->rank += rank;
    to->buffer += place_of(sizes, rank);
}

/* One tensor of each expert. */
static void add_experts(const loom__plan_sizes *sizes, int64_t elements, loom__plan_parameters *to) {
    const loom_moe_config *moe = &sizes->model.moe;
    int64_t mine = moe->num_moe_experts / sizes->ep, local = elements / sizes->etp;
    to->whole += moe->num_moe_experts * elements;
    to->active += moe->moe_router_topk * elements;
    to->rank += mine * local;
    to->buffer += mine * place_of(sizes, local);
    to->expert_buffer += mine * place_of(sizes, local);
}

static void add_mixture(const loom__plan_sizes *sizes, loom__plan_parameters *to) {
    const loom_model_config *model = &sizes->model;
    const loom_moe_config *moe = &model->moe;
    int64_t h = model->hidden_size, f = loom__plan_expert_width(sizes), tp = sizes->tp;
    int64_t gates = loom_activation_is_gated(model->activation) ? 2 : 1;
    bool biases = loom__model_biases(model).mlp;
    add_dense(sizes, moe->num_moe_experts * h, moe->num_moe_experts * h, to);
    if (moe->moe_router_enable_expert_bias)
        add_dense(sizes, moe->num_moe_experts, moe->num_moe_experts, to);
    add_experts(sizes, gates * f * h, to);
    add_experts(sizes, f * h, to);
    if (biases) {
        add_experts(sizes, gates * f, to);
        add_experts(sizes, h, to);
    }
    int64_t shared = moe->moe_shared_expert_intermediate_size;
    if (shared > 0) {
        add_dense(sizes, gates * shared * h, gates * shared * h / tp, to);
        add_dense(sizes, shared * h, shared * h / tp, to);
    }
}

static void sort_in(const loom__plan_sizes *sizes, const loom__model_spec *spec, loom__plan_model *model) {
    for (int64_t i = 0; i < spec->count; i++) {
        const loom__parameter_descriptor *parameter = &spec->parameters[i];
        if (parameter->place == LOOM__PLACE_EMBEDDING)
            add_descriptor(sizes, spec, parameter, &model->embedding);
        else if (parameter->place == LOOM__PLACE_HEAD)
            add_descriptor(sizes, spec, parameter, &model->head);
        else
            add_descriptor(sizes, spec, parameter, &model->layer);
        if (parameter->place == LOOM__PLACE_LAYER && !strstr(parameter->name, ".mlp."))
            add_descriptor(sizes, spec, parameter, &model->expert_layer);
    }
    if (spec->tied_head)
        add_descriptor(sizes, spec, spec->tied_head, &model->tied_head);
    if (sizes->model.moe.num_moe_experts > 0)
        add_mixture(sizes, &model->expert_layer);
}

loom_status loom__plan_parameters_make(const loom__plan_sizes *sizes, loom__plan_model *model) {
    loom_model_config one = sizes->model;
    loom__model_spec *spec = NULL;
    one.num_layers = 1;
    one.moe.num_moe_experts = 0; /* the layer without them; with them it is counted below */
    LOOM_TRY(loom__model_spec_create(&one, &spec));
    loom__plan_model made = {0};
    sort_in(sizes, spec, &made);
    loom__model_spec_destroy(spec);
    *model = made;
    return LOOM_OK;
}

static void add(loom__plan_parameters *to, const loom__plan_parameters *part, int64_t times) {
    to->whole += times * part->whole;
    to->active += times * part->active;
    to->rank += times * part->rank;
    to->buffer += times * part->buffer;
    to->expert_buffer += times * part->expert_buffer;
    to->partial += times * part->partial;
}

static int64_t least_common_multiple(int64_t a, int64_t b) {
    int64_t x = a, y = b;
    while (y) {
        int64_t rest = x % y;
        x = y;
        y = rest;
    }
    return a / x * b;
}

/* Where buckets end they are padded, half of the unit on average, and the last of a chunk exactly. */
static int64_t ends(const loom__plan_sizes *sizes, int64_t elements, int64_t shards, bool bucketed) {
    const loom_ddp_config *ddp = &sizes->config->strategy.ddp_config;
    if (!sizes->sharded || elements == 0)
        return elements;
    int64_t unit = least_common_multiple(shards, ddp->pad_buckets_for_high_nccl_busbw ? BUSBW_END : SHARDED_END);
    int64_t size = ddp->bucket_size ? ddp->bucket_size : sizes->dp > 40 ? 1000000 * sizes->dp : 40000000;
    int64_t inner = bucketed && ddp->overlap_grad_reduce ? elements / size : 0;
    return round_up(elements + inner * (unit / 2), unit);
}

loom__plan_parameters loom__plan_stage_parameters(
    const loom__plan_sizes *sizes, const loom__plan_model *model, int64_t stage) {
    loom__plan_parameters all = {0};
    for (int64_t c = 0; c < sizes->chunks; c++) {
        const loom_stage *chunk = loom__plan_chunk_of(sizes, stage, c);
        loom__plan_parameters part = {0};
        int64_t experts, layers = loom__plan_count_layers(sizes, chunk, &experts);
        add(&part, &model->layer, layers - experts);
        add(&part, &model->expert_layer, experts);
        if (chunk->embedding)
            add(&part, &model->embedding, 1);
        if (chunk->loss)
            add(&part, &model->head, 1);
        if (chunk->loss && sizes->pp > 1)
            add(&part, &model->tied_head, 1);
        bool bucketed = stage == 0 && c == 0;
        int64_t dense = ends(sizes, part.buffer - part.expert_buffer, sizes->shards, bucketed);
        part.expert_buffer = ends(sizes, part.expert_buffer, sizes->expert_shards, bucketed);
        part.buffer = dense + part.expert_buffer;
        add(&all, &part, 1);
    }
    return all;
}
