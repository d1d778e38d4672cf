/* Saving a state: every rank lists the chunks and objects that it holds, also those that others hold as well, and hands
 * the list to the checkpoint I/O. The invariant: each chunk has one main holder among the ranks, and a chunk's bytes
 * are the same on all that hold it. */
#include "state/save.h"
#include "model/gpt.h"
#include "optim/optim.h"
#include "state/context.h"
#include "state/state.h"
#include <megaloom/checkpoint_io.h>
#include <stdio.h>
#include <stdlib.h>

/* Keys of the common state that a save writes by itself. */
static const char *const own_keys[] = {
    "checkpoint_version", "content_metadata", "optimizer", "opt_param_scheduler", "megaloom"};

/* One module of a state. */
typedef struct saving {
    loom_fabric *fabric;
    const loom_state_filter *filters;
    int64_t filter_count;
    loom__state_module parts;
    loom__sharded_layout layout;
    loom_stage *stages;
    loom__sharded_options options;
    loom__state_buckets *buckets; /* NULL without the distributed optimizer */
    loom__sharded_state *entries; /* of this rank; NULL for a module without a specification: */
    loom__own_state *own;
    loom_value_pool *pool; /* borrowed */
} saving;

/* All of it. */
typedef struct saving_all {
    loom_fabric *fabric;
    const char *path;
    const loom_state *state;
    const loom_state_filter *filters;
    int64_t filter_count;
    saving *modules; /* [count], the main one first */
    int64_t count;
    loom_value_pool *pool;
    loom_checkpoint_shard *shards;
    loom_checkpoint_value *objects;
    char *context; /* of rank 0 */
    loom_checkpoint_content content;
} saving_all;

static bool keeps(const loom_state_filter *filters, int64_t count, const char *key, const char *name) {
    for (int64_t i = 0; i < count; i++)
        if (key && strcmp(filters[i].key, key) == 0 && !filters[i].keep(filters[i].context, name))
            return false;
    return true;
}

/* An item's key, or below it a path into a plain one: "run/data". */
static bool is_key_of(const loom_state *state, const char *key) {
    const char *slash = strchr(key, '/');
    for (int64_t i = 0; i < state->count; i++) {
        const loom_state_item *item = &state->items[i];
        size_t bytes = strlen(item->key);
        bool below = slash && loom__state_is_plain(item) && bytes == (size_t)(slash - key);
        if (strcmp(item->key, key) == 0 || (below && strncmp(item->key, key, bytes) == 0))
            return true;
    }
    return false;
}

static loom_status no_such_key(const char *key) {
    return loom_fail(LOOM_ERR_ARGUMENT, "save: a filter has the key %s, which the state lacks", key ? key : "(none)");
}

static loom_status check_keys(const saving_all *s) {
    LOOM_TRY(loom__state_check(s->state));
    for (int64_t i = 0; i < s->filter_count; i++)
        if (!s->filters[i].key || !s->filters[i].keep || !is_key_of(s->state, s->filters[i].key))
            return no_such_key(s->filters[i].key);
    for (int64_t i = 0; i < s->state->count; i++) {
        const loom_state_item *item = &s->state->items[i];
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
    if (!parallel->is_gpt)
        return loom__own_state_create(parallel, s->parts.optimizer, &s->own);
    const loom__gpt *gpt = parallel->module->context;
    LOOM_TRY(loom__parallel_layout(parallel, &s->layout, &s->stages));
    const loom__ddp_view *view = parallel->ddp ? loom__ddp_view_of(parallel->ddp) : NULL;
    loom_dtype dtype = loom_parallel_dtype(parallel);
    s->options = (loom__sharded_options){.prefix = "",
        .param_dtype = dtype,
        .grad_dtype = s->fabric->config.ddp_config.grad_reduce_in_fp32 ? LOOM_F32 : dtype};
    if (s->parts.optimizer) {
        const loom__optimizer_state *state = loom__optimizer_state_of(s->parts.optimizer);
        s->options.form = !view->sharded                                        ? LOOM__OPTIMIZER_WHOLE
                          : s->fabric->config.dist_ckpt_optim_fully_reshardable ? LOOM__OPTIMIZER_FULLY_RESHARDABLE
                                                                                : LOOM__OPTIMIZER_DP_RESHARDABLE;
        s->options.by_shard = true;
        s->options.scaler = loom__optimizer_progress_of(s->parts.optimizer).has_scaler;
        s->options.moments = state->count;
        for (int i = 0; i < state->count; i++) {
            s->options.moment[i].name = state->arrays[i].name;
            s->options.moment[i].dtype = state->arrays[i].dtype;
        }
        if (s->options.form == LOOM__OPTIMIZER_DP_RESHARDABLE)
            LOOM_TRY(loom__state_buckets_create(&s->layout, gpt->part, parallel->stage, &s->buckets));
    }
    const loom__sharded_place at = loom__parallel_place(parallel);
    return loom__sharded_state_create(&s->layout, &s->options, gpt->part, &at, &s->entries);
}

static bool chains(const saving *s) {
    return s->entries && loom__layout_chains(&s->layout);
}

static bool keeps_entry(const saving *s, bool of_optimizer, const char *key) {
    return keeps(s->filters, s->filter_count, of_optimizer ? s->parts.optimizer_key : s->parts.key, key);
}

static bool is_kept(const saving *s, const loom__state_entry *entry) {
    bool of_module = entry->array == LOOM__STATE_WEIGHT && entry->object <= LOOM__STATE_EXTRA;
    return keeps_entry(s, !of_module, entry->key);
}

/* A key as the checkpoint has it; it lives as long as the pool and what `key` is of. */
static loom_status name_of(const saving *s, const char *key, const char **name) {
    char whole[LOOM__STATE_NAME_BYTES];
    loom_value *text = NULL;
    *name = key;
    if (!s->parts.prefix[0])
        return LOOM_OK;
    snprintf(whole, sizeof whole, "%s%s", s->parts.prefix, key);
    LOOM_TRY(loom_value_text(s->pool, whole, &text));
    *name = text->text;
    return LOOM_OK;
}

static loom_status no_data(const loom__state_entry *entry, const char *name) {
    return loom_fail(LOOM_ERR_INTERNAL, "checkpoint key %s: elements %lld to %lld of %s are not this rank's",
        entry->key, (long long)entry->at, (long long)(entry->at + entry->count), name);
}

/* An array that the optimizer keeps of its parts: masters, where the weights are not their own, and moments. */
static const void *kept_array(const saving *s, const loom__ddp_view *view, int array, loom_dtype *dtype) {
    const loom__optimizer_state *state = loom__optimizer_state_of(s->parts.optimizer);
    *dtype = array == LOOM__STATE_MASTER ? LOOM_F32 : state->arrays[array - LOOM__STATE_MOMENT].dtype;
    return array == LOOM__STATE_MASTER ? view->master : state->arrays[array - LOOM__STATE_MOMENT].values;
}

static loom_status data_of(const saving *s, const loom__state_entry *entry, const void **data) {
    const loom_parallel *parallel = s->parts.module;
    const loom__gpt *gpt = parallel->module->context;
    const loom_parameter *parameter = gpt->set->list[entry->entry];
    loom_dtype dtype = parameter->dtype;
    if (entry->array == LOOM__STATE_WEIGHT || (entry->array == LOOM__STATE_MASTER && dtype == LOOM_F32)) {
        *data = (const char *)loom_parameter_values(parameter) + (size_t)entry->at * loom_dtype_size(dtype);
        return LOOM_OK;
    }
    const loom__ddp_view *view = loom__ddp_view_of(parallel->ddp);
    const char *values = kept_array(s, view, entry->array, &dtype);
    int64_t number = gpt->part->entries[entry->entry].buffer_place;
    const loom__ddp_part *part = &view->parts[number];
    int64_t from = entry->at - (part->start - view->places[number].start);
    if (view->parameters[number] != parameter || from < 0 || from + entry->count > part->count)
        return no_data(entry, parameter->name);
    *data = values + (size_t)(part->state + from) * loom_dtype_size(dtype);
    return LOOM_OK;
}

_Static_assert((int)LOOM__STATE_DIMS <= (int)LOOM_CHECKPOINT_MAX_DIMS, "shapes are copied whole");

static loom_status list_tensor(saving_all *all, const saving *s, const loom__state_entry *entry) {
    loom_checkpoint_shard *shard = &all->shards[all->content.shard_count];
    *shard =
        (loom_checkpoint_shard){.main = loom__state_entry_is_main(entry), .dtype = entry->dtype, .dims = entry->dims};
    memcpy(shard->shape, entry->shape, sizeof entry->shape);
    memcpy(shard->offsets, entry->offset, sizeof entry->offset);
    memcpy(shard->sizes, entry->size, sizeof entry->size);
    LOOM_TRY(name_of(s, entry->key, &shard->key));
    if (entry->entry >= 0)
        LOOM_TRY(data_of(s, entry, &shard->data));
    all->content.shard_count++;
    return LOOM_OK;
}

static loom_status list_own(saving_all *all, const saving *s, const loom__own_entry *entry) {
    loom_checkpoint_shard *shard = &all->shards[all->content.shard_count];
    *shard = (loom_checkpoint_shard){
        .main = entry->is_main, .dtype = entry->dtype, .dims = entry->dims, .data = entry->values};
    memcpy(shard->shape, entry->shape, sizeof entry->shape);
    memcpy(shard->offsets, entry->offset, sizeof entry->offset);
    memcpy(shard->sizes, entry->size, sizeof entry->size);
    LOOM_TRY(name_of(s, entry->key, &shard->key));
    all->content.shard_count++;
    return LOOM_OK;
}

static loom_status list_object(saving_all *all, const saving *s, const loom__state_entry *entry) {
    const loom_value *list = NULL;
    loom__optimizer_values values = {0};
    if (s->parts.optimizer)
        LOOM_TRY(loom__optimizer_values_of(s->pool, s->parts.optimizer, chains(s), &values));
    LOOM_TRY(loom__object_value(s->pool, entry, &s->options, s->buckets, &values, &list));
    loom_checkpoint_value *object = &all->objects[all->content.object_count++];
    object->value = list;
    return name_of(s, entry->key, &object->key);
}

static loom_status list_module(saving_all *all, const saving *s) {
    for (int64_t i = 0; s->entries && i < s->entries->count; i++) {
        const loom__state_entry *entry = &s->entries->entries[i];
        if (!is_kept(s, entry))
            continue;
        if (!entry->object)
            LOOM_TRY(list_tensor(all, s, entry));
        else if (loom__state_entry_is_main(entry))
            LOOM_TRY(list_object(all, s, entry));
    }
    for (int64_t i = 0; s->own && i < s->own->count; i++) {
        const loom__own_entry *entry = &s->own->entries[i];
        if (entry->size[entry->dims - 1] > 0 && keeps_entry(s, entry->of_optimizer, entry->key))
            LOOM_TRY(list_own(all, s, entry));
    }
    return LOOM_OK;
}

static loom_status list_content(saving_all *all) {
    size_t room = 1;
    for (int64_t i = 0; i < all->count; i++) {
        const saving *s = &all->modules[i];
        room += (size_t)(s->entries ? s->entries->count : 0) + (size_t)(s->own ? s->own->count : 0);
    }
    all->content.shards = all->shards = calloc(room, sizeof *all->shards);
    all->content.objects = all->objects = calloc(room, sizeof *all->objects);
    if (!all->shards || !all->objects)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the list of %zu chunks", room);
    for (int64_t i = 0; i < all->count; i++)
        LOOM_TRY(list_module(all, &all->modules[i]));
    return LOOM_OK;
}

/* ---- the common state */

static loom_status add_content(const saving_all *s, loom_value *common) {
    const loom_megatron_strategy_config *config = &s->fabric->config;
    loom__content_metadata content = loom__sharded_state_dict_metadata(
        config->ddp_config.use_distributed_optimizer, config->dist_ckpt_optim_fully_reshardable);
    loom_value *dict = NULL, *version = NULL;
    LOOM_TRY(loom_value_float(s->pool, 3.0, &version)); /* Megatron-LM's, since 2020 */
    LOOM_TRY(loom_value_set(s->pool, common, "checkpoint_version", version));
    LOOM_TRY(loom__content_value(s->pool, &content, &dict));
    return loom_value_set(s->pool, common, "content_metadata", dict);
}

static bool filters_below(const loom_state_filter *filters, int64_t count, const char *path) {
    size_t bytes = strlen(path);
    for (int64_t i = 0; i < count; i++)
        if (strncmp(filters[i].key, path, bytes) == 0 && (!filters[i].key[bytes] || filters[i].key[bytes] == '/'))
            return true;
    return false;
}

/* A dict without the entries, of its own and of dicts in it, that the filters leave out. */
static loom_status filtered(loom_value_pool *pool, const loom_state_filter *filters, int64_t count, const char *path,
    const loom_value **value) {
    loom_value *dict = NULL;
    const loom_value *from = *value;
    if (!from || from->kind != LOOM_VALUE_DICT || !filters_below(filters, count, path))
        return LOOM_OK;
    LOOM_TRY(loom_value_dict(pool, &dict));
    for (int64_t i = 0; i < from->count; i++) {
        const loom_value *name = from->items[2 * i], *inner = from->items[2 * i + 1];
        char below[LOOM__STATE_NAME_BYTES];
        bool is_text = name->kind == LOOM_VALUE_TEXT;
        if (is_text && !keeps(filters, count, path, name->text))
            continue;
        if (is_text && snprintf(below, sizeof below, "%s/%s", path, name->text) < (int)sizeof below)
            LOOM_TRY(filtered(pool, filters, count, below, &inner));
        LOOM_TRY(loom_value_set_pair(pool, dict, name, inner));
    }
    *value = dict;
    return LOOM_OK;
}

static loom_status add_optimizer(const saving *s, loom_value *common) {
    loom__optimizer_values values;
    loom_value *dict = NULL;
    if (!s->parts.optimizer)
        return LOOM_OK;
    LOOM_TRY(loom__optimizer_values_of(s->pool, s->parts.optimizer, chains(s), &values));
    LOOM_TRY(loom__optimizer_common_value(s->pool, &s->options, chains(s), &values, NULL, &dict));
    const loom_value *kept = dict;
    LOOM_TRY(filtered(s->pool, s->filters, s->filter_count, s->parts.optimizer_key, &kept));
    LOOM_TRY(loom_value_set(s->pool, common, "optimizer", kept));
    return loom_value_set(s->pool, common, "opt_param_scheduler", values.schedule);
}

/* What only we read of a module: *dict. */
static loom_status make_own(const saving *s, loom_value **dict) {
    const loom_value *layout = NULL;
    loom_value *skipped = NULL, *seed = NULL;
    LOOM_TRY(loom_value_dict(s->pool, dict));
    if (s->entries) {
        const loom__gpt *gpt = s->parts.module->module->context;
        LOOM_TRY(loom__layout_value(s->pool, &s->layout, &layout));
        LOOM_TRY(loom_value_set(s->pool, *dict, "layout", layout));
        /* All that random numbers have as a state: the rest of their coordinates are those of the data. */
        LOOM_TRY(loom_value_int(s->pool, (int64_t)gpt->environment.seed, &seed));
        LOOM_TRY(loom_value_set(s->pool, *dict, "seed", seed));
    }
    if (s->parts.optimizer) {
        LOOM_TRY(loom_value_int(s->pool, loom__optimizer_progress_of(s->parts.optimizer).skipped_steps, &skipped));
        LOOM_TRY(loom_value_set(s->pool, *dict, "skipped_steps", skipped));
    }
    return LOOM_OK;
}

/* The main module's part of the common state is where Megatron-Core has it; each other's is alike, under its key. */
static loom_status add_modules(const saving_all *all, loom_value *common) {
    loom_value *own = NULL, *others = NULL;
    if (all->count == 0)
        return LOOM_OK;
    LOOM_TRY(add_optimizer(&all->modules[0], common));
    LOOM_TRY(make_own(&all->modules[0], &own));
    LOOM_TRY(loom_value_set(all->pool, common, "megaloom", own));
    if (all->count == 1)
        return LOOM_OK;
    LOOM_TRY(loom__set_text(all->pool, own, "main_module", all->modules[0].parts.key));
    LOOM_TRY(loom_value_dict(all->pool, &others));
    for (int64_t i = 1; i < all->count; i++) {
        const saving *s = &all->modules[i];
        loom_value *root = NULL, *inner = NULL;
        LOOM_TRY(loom_value_dict(all->pool, &root));
        LOOM_TRY(add_optimizer(s, root));
        LOOM_TRY(make_own(s, &inner));
        LOOM_TRY(loom_value_set(all->pool, root, "megaloom", inner));
        LOOM_TRY(loom_value_set(all->pool, others, s->parts.key, root));
    }
    return loom_value_set(all->pool, own, "modules", others);
}

/* A filter of a path finds a DICT there. */
static loom_status check_path(const loom_state_filter *filter, const loom_value *value, const char *path) {
    for (const char *slash; value && path; path = slash ? slash + 1 : NULL) {
        char name[LOOM__STATE_NAME_BYTES];
        slash = strchr(path, '/');
        size_t bytes = slash ? (size_t)(slash - path) : strlen(path);
        if (bytes >= sizeof name)
            return no_such_key(filter->key);
        memcpy(name, path, bytes);
        name[bytes] = '\0';
        value = loom_value_get(value, name);
    }
    return value && value->kind == LOOM_VALUE_DICT ? LOOM_OK : no_such_key(filter->key);
}

static loom_status check_paths(const saving_all *s, const loom_state_item *item, const loom_value *value) {
    size_t bytes = strlen(item->key);
    for (int64_t i = 0; i < s->filter_count; i++)
        if (strncmp(s->filters[i].key, item->key, bytes) == 0 && s->filters[i].key[bytes] == '/')
            LOOM_TRY(check_path(&s->filters[i], value, s->filters[i].key + bytes + 1));
    return LOOM_OK;
}

static loom_status make_common(const saving_all *s, loom_value **common) {
    LOOM_TRY(loom_value_dict(s->pool, common));
    LOOM_TRY(add_content(s, *common));
    LOOM_TRY(add_modules(s, *common));
    for (int64_t i = 0; i < s->state->count; i++) {
        const loom_state_item *item = &s->state->items[i];
        const loom_value *value = item->value;
        if (!loom__state_is_plain(item))
            continue;
        if (item->save)
            LOOM_TRY(item->save(item->context, s->pool, &value));
        LOOM_TRY(check_paths(s, item, value));
        LOOM_TRY(filtered(s->pool, s->filters, s->filter_count, item->key, &value));
        LOOM_TRY(loom_value_set(s->pool, *common, item->key, value));
    }
    return LOOM_OK;
}

/* Of the main module, where its configuration tells how to make it. */
static loom_status make_context(saving_all *s) {
    if (s->count == 0 || !s->modules[0].parts.module->is_gpt)
        return LOOM_OK;
    LOOM_TRY(loom__parallel_context(s->modules[0].parts.module, &s->context, &s->content.context_bytes));
    s->content.context = s->context;
    return LOOM_OK;
}

/* ---- together */

static loom_status list_modules(saving_all *s) {
    loom__state_module module;
    while (loom__state_module_at(s->state, s->count, &module))
        s->count++;
    s->modules = calloc((size_t)s->count + 1, sizeof *s->modules);
    if (!s->modules) {
        s->count = 0;
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a state");
    }
    for (int64_t i = 0; i < s->count; i++) {
        saving *one = &s->modules[i];
        *one = (saving){.fabric = s->fabric, .filters = s->filters, .filter_count = s->filter_count, .pool = s->pool};
        (void)loom__state_module_at(s->state, i, &one->parts);
        LOOM_TRY(shard_state(one));
    }
    return LOOM_OK;
}

/* The main module's keys have no prefix that would keep them apart from those of others. */
static loom_status check_apart(const saving_all *s, const char *name) {
    for (int64_t i = 1; i < s->count; i++)
        if (loom__begins_with(name, s->modules[i].parts.key))
            return loom_fail(LOOM_ERR_ARGUMENT,
                "state: the key %s of a module begins keys of the main module, %s, such as %s: expected another",
                s->modules[i].parts.key, s->modules[0].parts.key, name);
    return LOOM_OK;
}

static loom_status check_all_apart(const saving_all *s) {
    LOOM_TRY(s->count > 1 ? check_apart(s, "optimizer.") : LOOM_OK);
    for (int64_t i = 0; s->count > 1 && s->modules->entries && i < s->modules->entries->count; i++)
        LOOM_TRY(check_apart(s, s->modules->entries->entries[i].key));
    for (int64_t i = 0; s->count > 1 && s->modules->own && i < s->modules->own->count; i++)
        LOOM_TRY(check_apart(s, s->modules->own->entries[i].key));
    return LOOM_OK;
}

static loom_status prepare(saving_all *s) {
    LOOM_TRY(check_keys(s));
    LOOM_TRY(loom_value_pool_create(&s->pool));
    LOOM_TRY(list_modules(s));
    return check_all_apart(s);
}

static loom_status list_all(saving_all *s) {
    loom_value *common = NULL;
    LOOM_TRY(list_content(s));
    if (loom_rank_index(s->fabric->rank) != 0)
        return LOOM_OK;
    LOOM_TRY(make_common(s, &common));
    s->content.common = common;
    return make_context(s);
}

static loom_status save_all(saving_all *s) {
    loom_comm *world = loom_rank_world(s->fabric->rank);
    LOOM_TRY(loom_agree(world, prepare(s)));
    for (int64_t i = 0; i < s->count; i++)
        if (s->modules[i].parts.module->ddp)
            LOOM_TRY(loom__ddp_wait_parameters(s->modules[i].parts.module->ddp));
    LOOM_TRY(loom_agree(world, list_all(s)));
    return loom_checkpoint_io_save(loom_fabric_checkpoint_io(s->fabric), s->path, &s->content);
}

static void free_module(saving *s) {
    loom__state_buckets_destroy(s->buckets);
    loom__sharded_state_destroy(s->entries);
    loom__own_state_destroy(s->own);
    free(s->stages);
}

loom_status loom__fabric_start_save(loom_fabric *fabric, const char *path, const loom_state *state,
    const loom_state_filter *filters, int64_t filter_count) {
    saving_all s = {.fabric = fabric, .path = path, .state = state, .filters = filters, .filter_count = filter_count};
    loom_status status = save_all(&s);
    free(s.shards);
    free(s.objects);
    free(s.context);
    for (int64_t i = 0; i < s.count; i++)
        free_module(&s.modules[i]);
    free(s.modules);
    loom_value_pool_destroy(s.pool);
    return status;
}

loom_status loom_fabric_save(loom_fabric *fabric, const char *path, const loom_state *state,
    const loom_state_filter *filters, int64_t filter_count) {
    bool pending;
    LOOM_TRY(loom_fabric_finalize_saves(fabric, true, &pending));
    return loom__fabric_start_save(fabric, path, state, filters, filter_count);
}
