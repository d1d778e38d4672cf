/* The sharded state of one rank. Layers that are alike share a key: the layer is the first axis of its tensor, so that
 * the cut over stages is, like that over tensor ranks, a matter of offsets alone. The invariant: over all ranks of a
 * layout the entries whose replica is 0 cover each tensor once, whatever the layout. */
#include "checkpoint/sharded.h"
#include "checkpoint/list.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

const char *loom__optimizer_form_name(loom__optimizer_form form) {
    switch (form) {
    case LOOM__OPTIMIZER_FULLY_RESHARDABLE:
        return "fully_reshardable";
    case LOOM__OPTIMIZER_DP_RESHARDABLE:
        return "dp_reshardable";
    case LOOM__OPTIMIZER_MODEL_SPACE:
        return "fully_sharded_model_space";
    default:
        return NULL;
    }
}

loom__content_metadata loom__sharded_state_dict_metadata(bool use_distributed_optimizer, bool fully_reshardable) {
    loom__optimizer_form form = !use_distributed_optimizer ? LOOM__OPTIMIZER_WHOLE
                                : fully_reshardable        ? LOOM__OPTIMIZER_FULLY_RESHARDABLE
                                                           : LOOM__OPTIMIZER_DP_RESHARDABLE;
    return (loom__content_metadata){
        .distrib_optim_sharding_type = loom__optimizer_form_name(form), .chained_optim_avoid_prefix = true};
}

loom_status loom__state_key_format(char key[LOOM__STATE_KEY_BYTES], const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(key, LOOM__STATE_KEY_BYTES, format, arguments);
    va_end(arguments);
    if (length < 0 || length >= LOOM__STATE_KEY_BYTES)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "checkpoint key %.60s…: found %d bytes, expected at most %d", key,
            length, LOOM__STATE_KEY_BYTES - 1);
    return LOOM_OK;
}

loom_status loom__state_list_add(loom__state_list *list, loom__state_entry **entry) {
    loom__sharded_state *state = list->state;
    if (state->count == list->room) {
        int64_t room = list->room ? 2 * list->room : 64;
        loom__state_entry *grown = realloc(state->entries, (size_t)room * sizeof *grown);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for a sharded state of %lld chunks", (long long)room);
        state->entries = grown;
        list->room = room;
    }
    *entry = &state->entries[state->count++];
    **entry = (loom__state_entry){.entry = -1};
    return LOOM_OK;
}

/* Behind "decoder.layers.N."; the name itself outside the layers. */
static const char *name_in_layer(const loom__parameter_descriptor *parameter) {
    const char *name = parameter->name;
    for (int dots = 0; parameter->layer >= 0 && dots < 3; name++)
        dots += *name == '.';
    return name;
}

/* Transformer Engine fuses a norm into the linear layer behind it. */
static const char *rename_norm(const char *name) {
    static const char *const names[][2] = {
        {"input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"},
        {"input_layernorm.bias", "self_attention.linear_qkv.layer_norm_bias"},
        {"pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"},
        {"pre_mlp_layernorm.bias", "mlp.linear_fc1.layer_norm_bias"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i][0]) == 0)
            return names[i][1];
    return name;
}

loom__key_style loom__key_style_of(const loom_model_config *config, bool singleton_local_shards) {
    if (singleton_local_shards)
        return LOOM__KEYS_SINGLETON;
    return loom__layers_differ(config) ? LOOM__KEYS_OF_LAYERS : LOOM__KEYS_STACKED;
}

static loom__key_style style_of(const loom__state_list *list) {
    return loom__key_style_of(&list->layout->spec->config, list->options->singleton_local_shards);
}

/* What of a name in a layer stands before and behind the number of an expert: "mlp.experts." and "linear_fc1.weight".
 */
static const char *skip_expert(const char *name, size_t *before) {
    static const char local[] = "local_experts.";
    const char *at = strstr(name, local);
    *before = (size_t)(at - name);
    return strchr(at + strlen(local), '.') + 1;
}

void loom__state_key(
    const loom__parameter_descriptor *parameter, loom__key_style style, int part, char key[LOOM__STATE_KEY_BYTES]) {
    static const char *const halves[] = {"", "_w", "_v"};
    const char *name = rename_norm(name_in_layer(parameter)), *half = halves[part + 1];
    char layer[64] = "", expert[64] = "";
    size_t before = 0;
    if (parameter->expert >= 0)
        snprintf(expert, sizeof expert, "mlp.experts.experts.");
    if (parameter->expert >= 0 && style == LOOM__KEYS_SINGLETON)
        snprintf(expert, sizeof expert, "mlp.experts.experts.%lld.", (long long)parameter->expert);
    if (parameter->expert >= 0)
        name = skip_expert(name, &before);
    if (parameter->layer >= 0)
        snprintf(layer, sizeof layer, "decoder.layers.");
    if (parameter->layer >= 0 && style != LOOM__KEYS_STACKED)
        snprintf(layer, sizeof layer, "decoder.layers.%lld.", (long long)parameter->layer);
    snprintf(key, LOOM__STATE_KEY_BYTES, "%s%s%s%s", layer, expert, name, half);
}

/* Axes of a key that number what shares it. */
static void place_axis(loom__state_entry *entry, int64_t length, int64_t at) {
    entry->shape[entry->dims] = length;
    entry->offset[entry->dims] = at;
    entry->size[entry->dims++] = 1;
}

static void place_axes(
    const loom__state_list *list, const loom__parameter_descriptor *parameter, loom__state_entry *entry) {
    const loom_model_config *config = &list->layout->spec->config;
    loom__key_style style = style_of(list);
    if (parameter->layer >= 0 && style == LOOM__KEYS_STACKED)
        place_axis(entry, config->num_layers, parameter->layer);
    if (parameter->expert >= 0 && style != LOOM__KEYS_SINGLETON)
        place_axis(entry, config->moe.num_moe_experts, parameter->expert);
}

/* Global shape, offset and size of one box of a parameter. */
static void place_box(const loom__state_list *list, const loom__parameter_descriptor *parameter, const loom__box *box,
    int part, loom__state_entry *entry) {
    place_axes(list, parameter, entry);
    int64_t shape[2] = {part < 0 ? parameter->padded_rows : parameter->padded_rows / 2, parameter->shape[1]};
    int64_t skipped = part > 0 ? shape[0] : 0;
    for (int i = 0; i < parameter->dims; i++) {
        int to = entry->dims++;
        entry->shape[to] = shape[i];
        entry->offset[to] = box->first[i] - (i == 0 ? skipped : 0);
        entry->size[to] = box->count[i];
    }
    entry->at = box->at;
    entry->count = box->count[0] * box->count[1];
}

/* One chunk; `part`: 0 or 1 of a gated layer whose halves have keys of their own, else -1. */
static loom_status add_box(loom__state_list *list, int64_t number, const char *prefix, int array, loom_dtype dtype,
    const loom__box *box, int part) {
    const loom__part_entry *held = &list->part->entries[number];
    const loom__parameter_descriptor *parameter = &list->layout->spec->parameters[held->canonical];
    char name[LOOM__STATE_KEY_BYTES];
    loom__state_entry *entry = NULL;
    LOOM_TRY(loom__state_list_add(list, &entry));
    loom__state_key(parameter, style_of(list), part, name);
    LOOM_TRY(loom__state_key_format(entry->key, "%s%s", prefix, name));
    place_box(list, parameter, box, part, entry);
    entry->expert = parameter->expert >= 0;
    entry->dtype = dtype;
    entry->replica[0] = held->copy;
    entry->array = array;
    entry->entry = number;
    return LOOM_OK;
}

static int64_t data_rank(const loom__state_list *list, const loom__parameter_descriptor *parameter) {
    return parameter->expert >= 0 ? list->at->edp_rank : list->at->dp_rank;
}

/* All chunks of one array of one parameter; keys begin with `prefix`. range: the elements of the local tensor that this
 * data-parallel place alone has; NULL: it has all of them, as every other does. */
static loom_status add_parameter(
    loom__state_list *list, int64_t number, const char *prefix, int array, loom_dtype dtype, const int64_t range[2]) {
    const loom__model_spec *spec = list->layout->spec;
    const loom__parameter_descriptor *parameter = &spec->parameters[list->part->entries[number].canonical];
    loom__shard_box shards[LOOM__SHARD_BOXES];
    int count = loom__shard_boxes(spec, parameter, loom__layout_tensor_size(list->layout, parameter),
        loom__place_tensor_rank(list->at, parameter), shards);
    for (int i = 0; i < count; i++) {
        bool apart = list->options->singleton_local_shards && parameter->shard == LOOM__SHARD_GATE_UP;
        loom__box boxes[LOOM__RANGE_BOXES] = {shards[i].box};
        int made = range ? loom__box_range(&shards[i].box, range[0], range[1] - range[0], range[0], boxes) : 1;
        for (int k = 0; k < made; k++) {
            LOOM_TRY(add_box(list, number, prefix, array, dtype, &boxes[k], apart ? i : -1));
            loom__state_entry *entry = &list->state->entries[list->state->count - 1];
            entry->replica[1] = shards[i].replica;
            entry->replica[2] = range ? 0 : data_rank(list, parameter);
        }
    }
    return LOOM_OK;
}

/* A linear layer of a transformer layer, known by its weight, has an object beside it. */
static loom_status add_extra_state(loom__state_list *list, int64_t number) {
    static const char *const linear[] = {"self_attention.linear_proj.weight", "self_attention.linear_qkv.weight",
        "mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc2.weight"};
    const loom__parameter_descriptor *parameter = list->part->entries[number].descriptor;
    const char *name = name_in_layer(parameter);
    bool found = parameter->expert >= 0 && parameter->dims == 2;
    for (size_t i = 0; i < sizeof linear / sizeof *linear; i++)
        found = found || (parameter->layer >= 0 && strcmp(name, linear[i]) == 0);
    if (!found)
        return LOOM_OK;
    char key[LOOM__STATE_KEY_BYTES], place[64];
    loom__state_entry *entry = NULL;
    LOOM_TRY(loom__state_list_add(list, &entry));
    loom__state_key(parameter, style_of(list), -1, key);
    place_axes(list, parameter, entry);
    if (entry->dims == 0)
        place_axis(entry, 1, 0);
    snprintf(place, sizeof place, "%lld_%lld", (long long)entry->offset[0], (long long)entry->shape[0]);
    if (entry->dims > 1)
        snprintf(place, sizeof place, "%lld.%lld_%lld.%lld", (long long)entry->offset[0], (long long)entry->offset[1],
            (long long)entry->shape[0], (long long)entry->shape[1]);
    LOOM_TRY(loom__state_key_format(entry->key, "%s%.*s_extra_state/shard_%s", list->options->prefix,
        (int)(strlen(key) - strlen("weight")), key, place));
    entry->object = LOOM__STATE_EXTRA;
    entry->expert = parameter->expert >= 0;
    entry->replica[1] = loom__place_tensor_rank(list->at, parameter);
    entry->replica[2] = data_rank(list, parameter);
    entry->entry = number;
    return LOOM_OK;
}

/* buckets: NULL, or those whose shards are written one by one. */
static loom_status add_moment(
    loom__state_list *list, const char *name, int array, loom_dtype dtype, const loom__state_buckets *buckets) {
    char prefix[LOOM__STATE_KEY_BYTES];
    LOOM_TRY(loom__state_key_format(prefix, "optimizer.state.%s.%s", name, list->options->prefix));
    for (int64_t i = 0; i < list->part->count; i++) {
        int64_t range[2] = {0, 0};
        if (buckets)
            loom__state_shard_range(buckets, list->part->entries[i].buffer_place, list->layout, list->at, range);
        if (!buckets || range[0] < range[1])
            LOOM_TRY(add_parameter(list, i, prefix, array, dtype, buckets ? range : NULL));
    }
    return LOOM_OK;
}

static loom_status add_state(loom__state_list *list, const loom__state_buckets *buckets) {
    const loom__sharded_options *options = list->options;
    if (options->form == LOOM__OPTIMIZER_FULLY_RESHARDABLE)
        LOOM_TRY(add_moment(list, "param", LOOM__STATE_MASTER, LOOM_F32, buckets));
    else if (options->param_dtype != LOOM_F32)
        LOOM_TRY(add_moment(list, "fp32_param", LOOM__STATE_MASTER, LOOM_F32, buckets));
    for (int i = 0; i < options->moments; i++)
        LOOM_TRY(add_moment(list, options->moment[i].name, LOOM__STATE_MOMENT + i, options->moment[i].dtype, buckets));
    return LOOM_OK;
}

static loom_status add_optimizer(loom__state_list *list) {
    const loom__sharded_options *options = list->options;
    loom__optimizer_form form = options->form;
    if (form == LOOM__OPTIMIZER_ABSENT)
        return LOOM_OK;
    if (form == LOOM__OPTIMIZER_DP_RESHARDABLE)
        return loom__state_list_add_buckets(list);
    if (form == LOOM__OPTIMIZER_MODEL_SPACE)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "distrib_optim_sharding_type: fully_sharded_model_space is read, not written; expected dp_reshardable or "
            "fully_reshardable");
    if (form != LOOM__OPTIMIZER_FULLY_RESHARDABLE || !options->by_shard)
        return add_state(list, NULL);
    loom__state_buckets *buckets = NULL;
    LOOM_TRY(loom__state_buckets_create(list->layout, list->part, list->at->stage, &buckets));
    loom_status status = add_state(list, buckets);
    loom__state_buckets_destroy(buckets);
    return status;
}

static loom_status add_all(loom__state_list *list) {
    for (int64_t i = 0; i < list->part->count; i++)
        LOOM_TRY(add_parameter(list, i, list->options->prefix, LOOM__STATE_WEIGHT, list->options->param_dtype, NULL));
    for (int64_t i = list->part->count; i < list->part->count + list->part->module_buffers; i++)
        LOOM_TRY(add_parameter(list, i, list->options->prefix, LOOM__STATE_WEIGHT, LOOM_F32, NULL));
    for (int64_t i = 0; i < list->part->count; i++)
        LOOM_TRY(add_extra_state(list, i));
    return add_optimizer(list);
}

loom_status loom__sharded_state_create(const loom__sharded_layout *layout, const loom__sharded_options *options,
    const loom__part *part, const loom__sharded_place *at, loom__sharded_state **out) {
    loom__sharded_state *state = calloc(1, sizeof *state);
    if (!state)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a sharded state");
    loom__state_list list = {.state = state, .layout = layout, .options = options, .part = part, .at = at};
    loom_status status = add_all(&list);
    if (status) {
        loom__sharded_state_destroy(state);
        return status;
    }
    *out = state;
    return LOOM_OK;
}

void loom__sharded_state_destroy(loom__sharded_state *state) {
    if (!state)
        return;
    free(state->entries);
    free(state);
}

static loom_status stage_part(const loom__sharded_layout *layout, int64_t stage, loom__part **part) {
    if (!layout->stages)
        return loom__part_create(layout->spec, 1, NULL, 0, part);
    loom_stage *chunks = malloc((size_t)layout->chunks * sizeof *chunks);
    if (!chunks)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld chunks", (long long)layout->chunks);
    for (int64_t c = 0; c < layout->chunks; c++)
        chunks[c] = layout->stages[c * layout->pp + stage];
    loom_status status = loom__part_create(layout->spec, layout->pp, chunks, layout->chunks, part);
    free(chunks);
    return status;
}

loom_status loom__sharded_part(const loom__sharded_layout *layout, int64_t stage, int64_t ep_rank, loom__part **part) {
    LOOM_TRY(stage_part(layout, stage, part));
    int64_t experts = loom__layout_has_experts(layout) ? layout->spec->config.moe.num_moe_experts / layout->ep : 0;
    if (experts > 0)
        loom__part_keep_experts(*part, experts * ep_rank, experts);
    loom__part_place_experts(*part, !loom__layout_chains(layout));
    return LOOM_OK;
}
