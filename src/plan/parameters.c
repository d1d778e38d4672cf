/* How many parameters there are, and how many a rank holds: all of them come from the very descriptors that training
 * allocates, of models with one layer, with experts and without. */
#include "plan/sizes.h"
#include "spec/part.h"

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
    bool expert = parameter->expert >= 0;
    int64_t shape[2], whole = loom__descriptor_count(parameter), rank, place;
    loom__parameter_local_shape(spec, parameter, expert ? sizes->etp : sizes->tp, shape);
    rank = shape[0] * (parameter->dims == 2 ? shape[1] : 1);
    place = place_of(sizes, rank);
    bool partial =
        (parameter->sequence_partial && sizes->sequence_parallel) || (parameter->tensor_partial && sizes->tp > 1);
    to->whole += whole;
    /* Experts are alike: a token meets as many as it goes to, and a rank has its share of them. */
    to->active += !expert || parameter->expert < sizes->model.moe.moe_router_topk ? whole : 0;
    if (expert && parameter->expert >= sizes->model.moe.num_moe_experts / sizes->ep)
        return;
    to->rank += rank;
    to->buffer += place;
    to->expert_buffer += expert && !loom__experts_are_among(sizes->tp, sizes->ep, sizes->etp) ? place : 0;
    to->partial += partial ? rank : 0;
}

static void sort_in(const loom__plan_sizes *sizes, const loom__model_spec *spec, loom__plan_model *model) {
    for (int64_t i = 0; i < spec->count; i++) {
        const loom__parameter_descriptor *parameter = &spec->parameters[i];
        loom__plan_parameters *layer = loom__layer_has_experts(&spec->config, 0) ? &model->expert_layer : &model->layer;
        add_descriptor(sizes, spec, parameter,
            parameter->place == LOOM__PLACE_EMBEDDING ? &model->embedding
            : parameter->place == LOOM__PLACE_HEAD    ? &model->head
                                                      : layer);
    }
    if (spec->tied_head)
        add_descriptor(sizes, spec, spec->tied_head, &model->tied_head);
}

/* Of a model of one layer, with experts or without: layers of a kind are alike. */
static loom_status count_one_layer(const loom__plan_sizes *sizes, int64_t experts, loom__plan_model *model) {
    loom_model_config one = sizes->model;
    loom__model_spec *spec = NULL;
    one.num_layers = 1;
    one.moe.moe_layer_freq = (loom_moe_layer_freq){.every = 1};
    one.moe.num_moe_experts = experts;
    LOOM_TRY(loom__model_spec_create(&one, &spec));
    sort_in(sizes, spec, model);
    loom__model_spec_destroy(spec);
    return LOOM_OK;
}

loom_status loom__plan_parameters_make(const loom__plan_sizes *sizes, loom__plan_model *model) {
    loom__plan_model made = {0}, with_experts = {0};
    LOOM_TRY(count_one_layer(sizes, 0, &made));
    if (sizes->model.moe.num_moe_experts > 0)
        LOOM_TRY(count_one_layer(sizes, sizes->model.moe.num_moe_experts, &with_experts));
    made.expert_layer = with_experts.expert_layer;
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
