/* GPT as a module: how it comes into being. It knows its configuration from the start, and its parameters once a
 * strategy tells it where it lives (materialize) and which chunks of the model it holds there. The invariant: every
 * rank knows the whole spec and holds the parameters of its chunks alone. */
#include "model/gpt.h"
#include "spec/rope.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static loom__gpt *gpt_of(void *context) {
    return context;
}

/* ---- coming into being ---- */

static loom_status make_rope(loom__gpt *gpt) {
    const loom_model_config *config = &gpt->config;
    if (config->position_embedding_type != LOOM_POSITION_ROPE || gpt->layer_count == 0)
        return LOOM_OK;
    int64_t half = loom__rope_channels(config) / 2;
    int64_t positions =
        config->max_position_embeddings > config->seq_length ? config->max_position_embeddings : config->seq_length;
    gpt->cosine = malloc((size_t)(positions * half + 1) * sizeof(float));
    gpt->sine = malloc((size_t)(positions * half + 1) * sizeof(float));
    if (!gpt->cosine || !gpt->sine)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for rotary tables of %lld positions", (long long)positions);
    for (int64_t i = 0; i < half; i++) {
        double frequency = loom__rope_frequency(config, i);
        for (int64_t p = 0; p < positions; p++) {
            gpt->cosine[p * half + i] = (float)cos((double)p * frequency);
            gpt->sine[p * half + i] = (float)sin((double)p * frequency);
        }
    }
    gpt->rope = (loom_rope_table){positions, 2 * half, gpt->cosine, gpt->sine};
    return LOOM_OK;
}

static loom_status make_replica_group(loom__gpt *gpt) {
    loom_comm *tp = gpt->environment.tensor_group;
    int64_t size = loom_comm_size(tp), groups = gpt->config.num_query_groups;
    if (size <= groups || gpt->layer_count == 0)
        return LOOM_OK;
    int count = (int)(size / groups), first = loom_comm_rank(tp) / count * count;
    int *ranks = malloc((size_t)count * sizeof *ranks);
    if (!ranks)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a group of %d ranks", count);
    for (int i = 0; i < count; i++)
        ranks[i] = loom_comm_world_rank(tp, first + i);
    loom_status status = loom_group_create(gpt->environment.rank, "kv_replicas", ranks, count, &gpt->replicas);
    free(ranks);
    return status;
}

static loom_status make_chunks(loom__gpt *gpt, const loom_stage *places, int64_t count) {
    gpt->chunks = calloc((size_t)count, sizeof *gpt->chunks);
    for (int64_t i = 0; i < count; i++)
        gpt->layer_count += places[i].layers;
    gpt->layers = calloc((size_t)gpt->layer_count + 1, sizeof *gpt->layers);
    if (!gpt->chunks || !gpt->layers)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld layers", (long long)gpt->layer_count);
    gpt->chunk_count = count;
    loom__layer *layer = gpt->layers;
    for (int64_t i = 0; i < count; i++) {
        gpt->chunks[i] = (loom__gpt_chunk){places[i], layer};
        for (int64_t j = 0; j < places[i].layers; j++)
            LOOM_TRY(loom__layer_bind(gpt->set, &gpt->config, places[i].first_layer + j, layer++));
    }
    return LOOM_OK;
}

static loom_status bind_parameters(loom__gpt *gpt) {
    const loom__parameter_set *set = gpt->set;
    gpt->word_embeddings = loom__parameter_set_find(set, "embedding.word_embeddings.weight");
    gpt->position_embeddings = loom__parameter_set_find(set, "embedding.position_embeddings.weight");
    gpt->final_norm = loom__parameter_set_find(set, "decoder.final_layernorm.weight");
    gpt->final_norm_bias = loom__parameter_set_find(set, "decoder.final_layernorm.bias");
    gpt->output = loom__parameter_set_find(set, "output_layer.weight");
    if (!gpt->output && gpt->config.share_embeddings_and_output_weights)
        gpt->output = gpt->word_embeddings;
    for (int64_t i = 0; i < gpt->chunk_count; i++) {
        const loom_stage *place = &gpt->chunks[i].place;
        if ((place->embedding && !gpt->word_embeddings) || (place->loss && (!gpt->final_norm || !gpt->output)))
            return loom_fail(LOOM_ERR_INTERNAL, "the spec lacks the embedding, the final norm or the head");
    }
    return LOOM_OK;
}

/* What this rank does by itself. */
static loom_status make_parameters(loom__gpt *gpt, const loom_stage *chunks, int64_t chunk_count) {
    const loom_module_environment *environment = &gpt->environment;
    int tp = loom_comm_size(environment->tensor_group), tp_rank = loom_comm_rank(environment->tensor_group);
    loom_comm *expert_tensor = environment->expert_tensor_group;
    const loom__tensor_place at = {tp, tp_rank, expert_tensor ? loom_comm_size(expert_tensor) : 0,
        expert_tensor ? loom_comm_rank(expert_tensor) : 0, environment->sequence_parallel};
    int ep = environment->expert_group ? loom_comm_size(environment->expert_group) : 1;
    gpt->given_padded_vocab_size = gpt->config.padded_vocab_size;
    const loom__model_ranks ranks = {
        tp, loom__gpt_context_size(gpt), ep, at.etp ? at.etp : tp, environment->sequence_parallel};
    LOOM_TRY(loom__model_config_complete_on(&gpt->config, &ranks));
    const loom_stage whole = {.layers = gpt->config.num_layers, .embedding = true, .loss = true};
    if (!chunks && environment->stages > 1)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "stage %lld of %lld was given no chunks of the model (loom_module_environment.chunks)",
            (long long)environment->stage, (long long)environment->stages);
    if (!chunks) {
        chunks = &whole;
        chunk_count = 1;
    }
    LOOM_TRY(loom__model_spec_create(&gpt->config, &gpt->spec));
    LOOM_TRY(loom__part_create(gpt->spec, environment->stages, chunks, chunk_count, &gpt->part));
    int64_t experts = gpt->config.moe.num_moe_experts / ep;
    if (ep > 1)
        loom__part_keep_experts(gpt->part, experts * loom_comm_rank(environment->expert_group), experts);
    loom__part_place_experts(gpt->part, loom__experts_are_among(tp, ep, at.etp ? at.etp : tp));
    LOOM_TRY(loom__parameter_set_create(gpt->spec, gpt->part, &at, &gpt->set));
    gpt->set->experts = environment->experts_group;
    LOOM_TRY(make_chunks(gpt, chunks, chunk_count));
    LOOM_TRY(bind_parameters(gpt));
    LOOM_TRY(make_rope(gpt));
    if (gpt->hf_directory)
        return loom__hf_load(gpt->hf_directory, gpt->set);
    bool initialize = gpt->initialize && environment->perform_initialization;
    return initialize ? loom__parameter_set_initialize(gpt->set, environment->seed) : LOOM_OK;
}

static loom_status gpt_materialize(void *context, const loom_module_environment *environment) {
    loom__gpt *gpt = gpt_of(context);
    if (gpt->set)
        return loom_fail(LOOM_ERR_STATE, "this model has been set up already");
    gpt->environment = *environment;
    gpt->environment.chunks = NULL;
    /* Making a group is collective: a rank that failed must not be waited for there. */
    LOOM_TRY(
        loom_agree(environment->tensor_group, make_parameters(gpt, environment->chunks, environment->chunk_count)));
    LOOM_TRY(loom__gpt_make_context_levels(gpt));
    return make_replica_group(gpt);
}

static loom_status gpt_parameters(void *context, loom_parameter *const **parameters, int64_t *count) {
    const loom__gpt *gpt = gpt_of(context);
    if (!gpt->set)
        return loom_fail(LOOM_ERR_STATE, "this model has no parameters yet: it has not been set up");
    *parameters = gpt->set->list;
    *count = gpt->set->count;
    return LOOM_OK;
}

static loom_model_config *gpt_config(void *context) {
    return &gpt_of(context)->config;
}

static void gpt_destroy(void *context) {
    loom__gpt *gpt = gpt_of(context);
    if (!gpt)
        return;
    loom_group_destroy(gpt->replicas);
    loom_group_destroy(gpt->context_levels[0]);
    loom_group_destroy(gpt->context_levels[1]);
    free(gpt->chunks);
    for (int64_t i = 0; gpt->layers && i < gpt->layer_count; i++)
        loom__layer_unbind(&gpt->layers[i]);
    free(gpt->layers);
    free(gpt->cosine);
    free(gpt->sine);
    loom__parameter_set_destroy(gpt->set);
    loom__part_destroy(gpt->part);
    loom__model_spec_destroy(gpt->spec);
    free(gpt->hf_directory);
    free(gpt);
}

/* ---- gradients of copies ---- */

/* A replica's key/value gradient comes from its own query heads alone; the copies stay equal because all add the same
 * sum. */
static loom_status sum_replicas(const loom__gpt *gpt, const loom_parameter *parameter) {
    if (!parameter || !parameter->grad)
        return LOOM_OK;
    int64_t width = parameter->dims == 2 ? parameter->shape[1] : 1, d = gpt->config.kv_channels;
    int64_t first = (parameter->shape[0] - 2 * d) * width;
    return loom_all_reduce(
        gpt->replicas, parameter->grad + first, parameter->grad + first, 2 * d * width, LOOM_F32, LOOM_SUM);
}

/* Of all routers of this rank, once a step, as in Megatron-Core: before the optimizer knows whether it will update. */
static loom_status end_step_of_routers(const loom__gpt *gpt) {
    int64_t count = 0;
    loom__router_memory **memories = malloc((size_t)(gpt->layer_count + 1) * sizeof *memories);
    if (!memories)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a list of %lld layers", (long long)gpt->layer_count);
    for (int64_t i = 0; i < gpt->layer_count; i++)
        if (gpt->layers[i].router_memory)
            memories[count++] = gpt->layers[i].router_memory;
    loom_status status = loom__router_memories_end_step(
        memories, count, gpt->environment.step_group, gpt->config.moe.moe_router_bias_update_rate);
    free(memories);
    return status;
}

static loom_status gpt_finalize(void *context) {
    const loom__gpt *gpt = gpt_of(context);
    for (int64_t i = 0; gpt->replicas && i < gpt->layer_count; i++) {
        LOOM_TRY(sum_replicas(gpt, gpt->layers[i].qkv));
        LOOM_TRY(sum_replicas(gpt, gpt->layers[i].qkv_bias));
    }
    return end_step_of_routers(gpt);
}

loom_status loom__gpt_create(
    const loom_model_config *config, const char *hf_directory, bool initialize, loom_module **module) {
    loom__gpt *gpt = calloc(1, sizeof *gpt);
    char *directory = hf_directory ? strdup(hf_directory) : NULL;
    if (!gpt || (hf_directory && !directory)) {
        free(gpt);
        free(directory);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a model");
    }
    gpt->config = *config;
    gpt->hf_directory = directory;
    gpt->initialize = initialize;
    gpt->module = (loom_module){
        .context = gpt,
        .materialize = gpt_materialize,
        .parameters = gpt_parameters,
        .forward = loom__gpt_forward,
        .activation_shape = loom__gpt_activation_shape,
        .finalize_gradients = gpt_finalize,
        .config = gpt_config,
        .destroy = gpt_destroy,
    };
    *module = &gpt->module;
    return LOOM_OK;
}

bool loom__module_is_gpt(const loom_module *module) {
    return module->materialize == gpt_materialize;
}
