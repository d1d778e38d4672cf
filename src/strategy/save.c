/* Saving a state: every rank lists the chunks and objects that it holds, also those that others hold as well, and hands
 * the list to the checkpoint I/O. The invariant: each chunk has one main holder among the ranks, and a chunk's bytes
 * are the same on all that hold it. */
#include "strategy/save.h"
#include "model/gpt.h"
#include "optim/optim.h"
#include "strategy/load.h"
#include <megaloom/checkpoint_io.h>
#include <stdio.h>
#include <stdlib.h>

/* Keys of the common state that a save writes by itself. */
static const char *const own_keys[] = {
    "checkpoint_version", "content_metadata", "optimizer", "opt_param_scheduler", "megaloom"};

typedef struct saving {
    loom_fabric *fabric;
    const char *path;
    const loom_state *state;
    const loom_state_filter *filters;
    int64_t filter_count;
    loom__state_parts parts;
    const char *module_key, *optimizer_key;
    loom__sharded_layout layout; /* of the module */
    loom_stage *stages;
    loom__sharded_options options;
    loom__state_buckets *buckets; /* NULL without the distributed optimizer */
    loom__sharded_state *entries; /* of this rank; NULL without a module */
    loom_value_pool *pool;
    loom_checkpoint_shard *shards;
    loom_checkpoint_value *objects;
    loom_checkpoint_content content;
} saving;

static bool keeps(const saving *s, const char *key, const char *name) {
    for (int64_t i = 0; i < s->filter_count; i++)
        if (key && strcmp(s->filters[i].key, key) == 0 && !s->filters[i].keep(s->filters[i].context, name))
            return false;
    return true;
}

static loom_status check_keys(saving *s) {
    LOOM_TRY(loom__state_check(s->state, &s->parts));
    for (int64_t i = 0; i < s->filter_count; i++)
        if (!s->filters[i].key || !s->filters[i].keep || !loom__state_item(s->state, s->filters[i].key))
            return loom_fail(LOOM_ERR_ARGUMENT, "save: a filter has the key %s, which the state lacks",
                s->filters[i].key ? s->filters[i].key : "(none)");
    for (int64_t i = 0; i < s->state->count; i++) {
        const loom_state_item *item = &s->state->items[i];
        if (item->module)
            s->module_key = item->key;
        if (item->optimizer)
            s->optimizer_key = item->key;
        if (!loom__state_is_plain(item))
            continue;
        for (size_t k = 0; k < sizeof own_keys / sizeof *own_keys; k++)
            if (strcmp(item->key, own_keys[k]) == 0)
                return loom_fail(
                    LOOM_ERR_ARGUMENT, "state: the key %s is the checkpoint's own; expected another", item->key);
        if (!item->save && !item->value)
            return loom_fail(
                LOOM_ERR_ARGUMENT, "state: %s has neither a value nor a function that saves it", item->key);
    }
    return LOOM_OK;
}

/* ---- what this rank holds */

static loom_status shard_state(saving *s) {
    const loom_parallel *parallel = s->parts.module;
    if (!parallel)
        return LOOM_OK;
    const loom__gpt *gpt = parallel->module->context;
    LOOM_TRY(loom__parallel_layout(parallel, &s->layout, &s->stages));
    const loom__ddp_view *view = parallel->ddp ? loom__ddp_view_of(parallel->ddp) : NULL;
    s->options = (loom__sharded_options){.prefix = "", .param_dtype = LOOM_F32, .grad_dtype = LOOM_F32};
    if (s->parts.optimizer) {
        const loom__optimizer_state *state = loom__optimizer_state_of(s->parts.optimizer);
        s->options.form = view->sharded ? LOOM__OPTIMIZER_DP_RESHARDABLE : LOOM__OPTIMIZER_WHOLE;
        s->options.moments = state->count;
        for (int i = 0; i < state->count; i++) {
            s->options.moment[i].name = state->arrays[i].name;
            s->options.moment[i].dtype = state->arrays[i].dtype;
        }
        if (view->sharded)
            LOOM_TRY(loom__state_buckets_create(&s->layout, gpt->part, parallel->stage, &s->buckets));
    }
    int place = loom_comm_rank(s->fabric->groups[LOOM_GROUP_DP_CP]);
    return loom__sharded_state_create(
        &s->layout, &s->options, gpt->part, gpt->set->tp_rank, parallel->stage, place, &s->entries);
}

static bool is_kept(const saving *s, const loom__state_entry *entry) {
    const char *key =
        entry->array == LOOM__STATE_WEIGHT && entry->object <= LOOM__STATE_EXTRA ? s->module_key : s->optimizer_key;
    return keeps(s, key, entry->key);
}

static loom_status no_data(const loom__state_entry *entry, const char *name) {
    return loom_fail(LOOM_ERR_INTERNAL, "checkpoint key %s: elements %lld to %lld of %s are not this rank's",
        entry->key, (long long)entry->at, (long long)(entry->at + entry->count), name);
}

static loom_status data_of(const saving *s, const loom__state_entry *entry, const void **data) {
    const loom_parallel *parallel = s->parts.module;
    const loom__gpt *gpt = parallel->module->context;
    const loom_parameter *parameter = gpt->set->list[entry->entry];
    *data = parameter->data + entry->at;
    if (entry->array < LOOM__STATE_MOMENT)
        return LOOM_OK;
    const loom__ddp_view *view = loom__ddp_view_of(parallel->ddp);
    const struct loom__optimizer_array *array =
        &loom__optimizer_state_of(s->parts.optimizer)->arrays[entry->array - LOOM__STATE_MOMENT];
    int64_t number = view->place_count - 1 - entry->entry;
    const loom__ddp_part *part = &view->parts[number];
    int64_t from = entry->at - (part->start - view->places[number].start);
    if (view->parameters[number] != parameter || from < 0 || from + entry->count > part->count)
        return no_data(entry, parameter->name);
    *data = (const char *)array->values + (size_t)(part->state + from) * loom_dtype_size(array->dtype);
    return LOOM_OK;
}

_Static_assert((int)LOOM__STATE_DIMS <= (int)LOOM_CHECKPOINT_MAX_DIMS, "shapes are copied whole");

static loom_status list_tensor(saving *s, const loom__state_entry *entry) {
    loom_checkpoint_shard *shard = &s->shards[s->content.shard_count];
    *shard = (loom_checkpoint_shard){
        .key = entry->key, .main = loom__state_entry_is_main(entry), .dtype = entry->dtype, .dims = entry->dims};
    memcpy(shard->shape, entry->shape, sizeof entry->shape);
    memcpy(shard->offsets, entry->offset, sizeof entry->offset);
    memcpy(shard->sizes, entry->size, sizeof entry->size);
    if (entry->entry >= 0)
        LOOM_TRY(data_of(s, entry, &shard->data));
    s->content.shard_count++;
    return LOOM_OK;
}

/* [{(torch.float32, torch.float32): [elements of its buckets]}, … a buffer]. */
static loom_status numel_value(const saving *s, bool unpadded, loom_value **out) {
    loom_value *list = NULL, *dict = NULL, *numbers = NULL;
    LOOM_TRY(loom_value_list(s->pool, &list));
    for (int64_t b = 0; b < s->buckets->count; b++) {
        const loom__state_bucket *bucket = &s->buckets->buckets[b];
        if (bucket->index == 0) {
            loom_value *key = NULL, *dtype = NULL;
            LOOM_TRY(loom_value_dict(s->pool, &dict));
            LOOM_TRY(loom_value_list(s->pool, &numbers));
            LOOM_TRY(loom_value_tuple(s->pool, &key));
            LOOM_TRY(loom_value_name(s->pool, "torch.float32", &dtype));
            LOOM_TRY(loom_value_append(s->pool, key, dtype));
            LOOM_TRY(loom_value_append(s->pool, key, dtype));
            LOOM_TRY(loom_value_set_pair(s->pool, dict, key, numbers));
            LOOM_TRY(loom_value_append(s->pool, list, dict));
        }
        loom_value *number = NULL;
        LOOM_TRY(loom_value_int(s->pool, unpadded ? bucket->unpadded : bucket->numel, &number));
        LOOM_TRY(loom_value_append(s->pool, numbers, number));
    }
    *out = list;
    return LOOM_OK;
}

static loom_status groups_value(const saving *s, loom_value **out) {
    const loom_value *groups = NULL;
    LOOM_TRY(loom_value_dict(s->pool, out));
    LOOM_TRY(loom__optimizer_groups_value(s->pool, s->parts.optimizer, &groups));
    return loom_value_set(s->pool, *out, "param_groups", groups);
}

static loom_status list_object(saving *s, const loom__state_entry *entry) {
    loom_value *value = NULL, *list = NULL;
    if (entry->object == LOOM__STATE_EXTRA)
        LOOM_TRY(loom_value_none(s->pool, &value));
    else if (entry->object == LOOM__STATE_OPTIMIZER)
        LOOM_TRY(groups_value(s, &value));
    else
        LOOM_TRY(numel_value(s, entry->object == LOOM__STATE_NUMEL_UNPADDED, &value));
    LOOM_TRY(loom_value_list(s->pool, &list));
    LOOM_TRY(loom_value_append(s->pool, list, value));
    s->objects[s->content.object_count++] = (loom_checkpoint_value){entry->key, list};
    return LOOM_OK;
}

static loom_status list_content(saving *s) {
    size_t room = s->entries ? (size_t)s->entries->count + 1 : 1;
    s->content.shards = s->shards = calloc(room, sizeof *s->shards);
    s->content.objects = s->objects = calloc(room, sizeof *s->objects);
    if (!s->shards || !s->objects)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the list of %zu chunks", room);
    for (int64_t i = 0; s->entries && i < s->entries->count; i++) {
        const loom__state_entry *entry = &s->entries->entries[i];
        if (!is_kept(s, entry))
            continue;
        if (!entry->object)
            LOOM_TRY(list_tensor(s, entry));
        else if (loom__state_entry_is_main(entry))
            LOOM_TRY(list_object(s, entry));
    }
    return LOOM_OK;
}

/* ---- the common state */

static loom_status set_text(const saving *s, loom_value *dict, const char *key, const char *of) {
    loom_value *value = NULL;
    LOOM_TRY(loom_value_text(s->pool, of, &value));
    return loom_value_set(s->pool, dict, key, value);
}

static loom_status set_bool(const saving *s, loom_value *dict, const char *key, bool of) {
    loom_value *value = NULL;
    LOOM_TRY(loom_value_bool(s->pool, of, &value));
    return loom_value_set(s->pool, dict, key, value);
}

static loom_status add_content(const saving *s, loom_value *common) {
    loom__content_metadata content =
        loom__sharded_state_dict_metadata(s->fabric->config.ddp_config.use_distributed_optimizer);
    loom_value *dict = NULL, *version = NULL;
    LOOM_TRY(loom_value_float(s->pool, 3.0, &version)); /* Megatron-LM's, since 2020 */
    LOOM_TRY(loom_value_set(s->pool, common, "checkpoint_version", version));
    LOOM_TRY(loom_value_dict(s->pool, &dict));
    if (content.distrib_optim_sharding_type)
        LOOM_TRY(set_text(s, dict, "distrib_optim_sharding_type", content.distrib_optim_sharding_type));
    LOOM_TRY(set_bool(s, dict, "singleton_local_shards", content.singleton_local_shards));
    LOOM_TRY(set_bool(s, dict, "chained_optim_avoid_prefix", content.chained_optim_avoid_prefix));
    return loom_value_set(s->pool, common, "content_metadata", dict);
}

static loom_status add_optimizer(const saving *s, loom_value *common) {
    const loom_optimizer *optimizer = s->parts.optimizer;
    const loom_value *schedule = NULL, *scaler = NULL;
    loom_value *dict = NULL, *groups = NULL;
    if (!optimizer)
        return LOOM_OK;
    LOOM_TRY(loom_value_dict(s->pool, &dict));
    if (s->buckets) {
        LOOM_TRY(set_text(s, dict, "param_state_sharding_type", "dp_reshardable"));
    } else {
        LOOM_TRY(groups_value(s, &groups));
        LOOM_TRY(loom_value_set(s->pool, dict, "optimizer", groups));
    }
    LOOM_TRY(loom__optimizer_scaler_value(s->pool, optimizer, &scaler));
    if (scaler)
        LOOM_TRY(loom_value_set(s->pool, dict, "grad_scaler", scaler));
    LOOM_TRY(loom_value_set(s->pool, common, "optimizer", dict));
    LOOM_TRY(loom__optimizer_schedule_value(s->pool, optimizer, &schedule));
    return loom_value_set(s->pool, common, "opt_param_scheduler", schedule);
}

static loom_status add_layout(const saving *s, loom_value *common) {
    const loom_value *layout = NULL;
    loom_value *dict = NULL, *skipped = NULL;
    if (!s->parts.module)
        return LOOM_OK;
    LOOM_TRY(loom_value_dict(s->pool, &dict));
    LOOM_TRY(loom__layout_value(s->pool, &s->layout, &layout));
    LOOM_TRY(loom_value_set(s->pool, dict, "layout", layout));
    if (s->parts.optimizer) {
        LOOM_TRY(loom_value_int(s->pool, loom__optimizer_progress_of(s->parts.optimizer).skipped_steps, &skipped));
        LOOM_TRY(loom_value_set(s->pool, dict, "skipped_steps", skipped));
    }
    return loom_value_set(s->pool, common, "megaloom", dict);
}

/* A dict without the entries that the filters leave out. */
static loom_status filtered(const saving *s, const char *key, const loom_value **value) {
    loom_value *dict = NULL;
    const loom_value *from = *value;
    if (from->kind != LOOM_VALUE_DICT || s->filter_count == 0)
        return LOOM_OK;
    LOOM_TRY(loom_value_dict(s->pool, &dict));
    for (int64_t i = 0; i < from->count; i++) {
        const loom_value *name = from->items[2 * i];
        if (name->kind != LOOM_VALUE_TEXT || keeps(s, key, name->text))
            LOOM_TRY(loom_value_set_pair(s->pool, dict, name, from->items[2 * i + 1]));
    }
    *value = dict;
    return LOOM_OK;
}

static loom_status make_common(const saving *s, loom_value **common) {
    LOOM_TRY(loom_value_dict(s->pool, common));
    LOOM_TRY(add_content(s, *common));
    LOOM_TRY(add_optimizer(s, *common));
    LOOM_TRY(add_layout(s, *common));
    for (int64_t i = 0; i < s->state->count; i++) {
        const loom_state_item *item = &s->state->items[i];
        const loom_value *value = item->value;
        if (!loom__state_is_plain(item))
            continue;
        if (item->save)
            LOOM_TRY(item->save(item->context, s->pool, &value));
        LOOM_TRY(filtered(s, item->key, &value));
        LOOM_TRY(loom_value_set(s->pool, *common, item->key, value));
    }
    return LOOM_OK;
}

/* ---- together */

static loom_status prepare(saving *s) {
    LOOM_TRY(check_keys(s));
    LOOM_TRY(loom_value_pool_create(&s->pool));
    return shard_state(s);
}

static loom_status list_all(saving *s) {
    loom_value *common = NULL;
    LOOM_TRY(list_content(s));
    if (loom_rank_index(s->fabric->rank) == 0)
        LOOM_TRY(make_common(s, &common));
    s->content.common = common;
    return LOOM_OK;
}

static loom_status save_all(saving *s) {
    loom_comm *world = loom_rank_world(s->fabric->rank);
    LOOM_TRY(loom_agree(world, prepare(s)));
    if (s->parts.module && s->parts.module->ddp)
        LOOM_TRY(loom__ddp_wait_parameters(s->parts.module->ddp));
    LOOM_TRY(loom_agree(world, list_all(s)));
    return loom_checkpoint_io_save(loom_fabric_checkpoint_io(s->fabric), s->path, &s->content);
}

loom_status loom__fabric_start_save(loom_fabric *fabric, const char *path, const loom_state *state,
    const loom_state_filter *filters, int64_t filter_count) {
    saving s = {.fabric = fabric, .path = path, .state = state, .filters = filters, .filter_count = filter_count};
    loom_status status = save_all(&s);
    free(s.shards);
    free(s.objects);
    loom__state_buckets_destroy(s.buckets);
    loom__sharded_state_destroy(s.entries);
    loom_value_pool_destroy(s.pool);
    free(s.stages);
    return status;
}

loom_status loom_fabric_save(loom_fabric *fabric, const char *path, const loom_state *state,
    const loom_state_filter *filters, int64_t filter_count) {
    bool pending;
    LOOM_TRY(loom_fabric_finalize_saves(fabric, true, &pending));
    return loom__fabric_start_save(fabric, path, state, filters, filter_count);
}
