/* Saving a state. Every rank writes one file with what it alone stands for and tells rank 0 what is in it; rank 0 makes
 * the checkpoint of that. The invariant: nothing is renamed before all ranks have said that their file is on the disk,
 * so that a failed rank leaves what was there. */
#include "checkpoint/context.h"
#include "checkpoint/writer.h"
#include "model/gpt.h"
#include "optim/optim.h"
#include "strategy/context.h"
#include "strategy/load.h"
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
    loom_value_pool *pool; /* borrowed, as is the writer */
    loom__checkpoint_writer *writer;
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
    loom__checkpoint_writer *writer;
    loom__checkpoint_description description;
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

/* ---- what this rank writes */

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

static bool keeps_entry(const saving *s, bool of_optimizer, const char *key) {
    return keeps(s->filters, s->filter_count, of_optimizer ? s->parts.optimizer_key : s->parts.key, key);
}

/* Members of other instances of the distributed optimizer, and all but the first member without it, hold what others
 * write. */
static bool writes(const saving *s, const loom__state_entry *entry) {
    bool of_module = entry->array == LOOM__STATE_WEIGHT && entry->object <= LOOM__STATE_EXTRA;
    return loom__state_entry_is_main(entry) && keeps_entry(s, !of_module, entry->key);
}

/* A key as the checkpoint has it. */
static const char *name_of(const saving *s, const char *key, char name[LOOM__STATE_NAME_BYTES]) {
    snprintf(name, LOOM__STATE_NAME_BYTES, "%s%s", s->parts.prefix, key);
    return name;
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

static loom_status write_tensor(saving *s, const loom__state_entry *entry) {
    const void *data = NULL;
    void *gap = NULL;
    if (entry->entry < 0) {
        data = gap = calloc((size_t)entry->count, loom_dtype_size(entry->dtype));
        if (!gap)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for a gap of %lld elements", (long long)entry->count);
    } else {
        LOOM_TRY(data_of(s, entry, &data));
    }
    char name[LOOM__STATE_NAME_BYTES];
    loom_status status = loom__checkpoint_file_tensor(s->writer, name_of(s, entry->key, name), entry->dtype,
        entry->dims, entry->shape, entry->offset, entry->size, data);
    free(gap);
    return status;
}

static loom_status append_dtype(const saving *s, loom_value *list, loom_dtype dtype) {
    loom_value *name = NULL;
    LOOM_TRY(loom_value_name(s->pool, loom__state_dtype_name(dtype), &name));
    return loom_value_append(s->pool, list, name);
}

/* [{(dtype of parameters, of gradients): [elements of its buckets]}, … a buffer]. */
static loom_status numel_value(const saving *s, bool experts, bool unpadded, loom_value **out) {
    loom_value *list = NULL, *dict = NULL, *numbers = NULL;
    LOOM_TRY(loom_value_list(s->pool, &list));
    for (int64_t b = 0; b < s->buckets->count; b++) {
        const loom__state_bucket *bucket = &s->buckets->buckets[b];
        if (bucket->expert != experts)
            continue;
        if (bucket->index == 0) {
            loom_value *key = NULL;
            LOOM_TRY(loom_value_dict(s->pool, &dict));
            LOOM_TRY(loom_value_list(s->pool, &numbers));
            LOOM_TRY(loom_value_tuple(s->pool, &key));
            LOOM_TRY(append_dtype(s, key, s->options.param_dtype));
            LOOM_TRY(append_dtype(s, key, s->options.grad_dtype));
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

static loom_status groups_value(const saving *s, bool experts, loom_value **out) {
    const loom_value *groups = NULL;
    LOOM_TRY(loom_value_dict(s->pool, out));
    LOOM_TRY(loom__optimizer_groups_value(s->pool, s->parts.optimizer, experts, &groups));
    return loom_value_set(s->pool, *out, "param_groups", groups);
}

static loom_status write_object(saving *s, const loom__state_entry *entry) {
    loom_value *value = NULL, *list = NULL;
    const loom_value *scaler = NULL;
    if (entry->object == LOOM__STATE_EXTRA)
        LOOM_TRY(loom_value_none(s->pool, &value));
    else if (entry->object == LOOM__STATE_OPTIMIZER)
        LOOM_TRY(groups_value(s, entry->expert, &value));
    else if (entry->object == LOOM__STATE_SCALER)
        LOOM_TRY(loom__optimizer_scaler_value(s->pool, s->parts.optimizer, &scaler));
    else
        LOOM_TRY(numel_value(s, entry->expert, entry->object == LOOM__STATE_NUMEL_UNPADDED, &value));
    LOOM_TRY(loom_value_list(s->pool, &list));
    LOOM_TRY(loom_value_append(s->pool, list, scaler ? scaler : value));
    char name[LOOM__STATE_NAME_BYTES];
    return loom__checkpoint_file_object(s->writer, name_of(s, entry->key, name), list);
}

static bool writes_own(const saving *s, const loom__own_entry *entry) {
    return entry->is_main && keeps_entry(s, entry->of_optimizer, entry->key);
}

static int64_t count_written(const saving *s) {
    int64_t count = 0;
    for (int64_t i = 0; s->entries && i < s->entries->count; i++)
        count += writes(s, &s->entries->entries[i]);
    for (int64_t i = 0; s->own && i < s->own->count; i++)
        count += writes_own(s, &s->own->entries[i]);
    return count;
}

static loom_status write_objects(saving *s) {
    for (int64_t i = 0; s->entries && i < s->entries->count; i++)
        if (writes(s, &s->entries->entries[i]) && s->entries->entries[i].object)
            LOOM_TRY(write_object(s, &s->entries->entries[i]));
    return LOOM_OK;
}

static loom_status write_own(const saving *s, const loom__own_entry *entry) {
    char name[LOOM__STATE_NAME_BYTES];
    return loom__checkpoint_file_tensor(s->writer, name_of(s, entry->key, name), entry->dtype, entry->dims,
        entry->shape, entry->offset, entry->size, entry->values);
}

static loom_status write_tensors(saving *s) {
    for (int64_t i = 0; s->entries && i < s->entries->count; i++)
        if (writes(s, &s->entries->entries[i]) && !s->entries->entries[i].object)
            LOOM_TRY(write_tensor(s, &s->entries->entries[i]));
    for (int64_t i = 0; s->own && i < s->own->count; i++)
        if (writes_own(s, &s->own->entries[i]))
            LOOM_TRY(write_own(s, &s->own->entries[i]));
    return LOOM_OK;
}

static loom_status write_file(saving_all *all) {
    int64_t count = 0;
    for (int64_t i = 0; i < all->count; i++)
        count += count_written(&all->modules[i]);
    if (count == 0)
        return LOOM_OK;
    LOOM_TRY(loom__checkpoint_file_create(all->path, loom_rank_index(all->fabric->rank), 0, &all->writer));
    for (int64_t i = 0; i < all->count; i++) {
        all->modules[i].writer = all->writer;
        LOOM_TRY(write_objects(&all->modules[i]));
    }
    for (int64_t i = 0; i < all->count; i++)
        LOOM_TRY(write_tensors(&all->modules[i]));
    return loom__checkpoint_file_finish(all->writer, &all->description);
}

/* ---- the common state */

static loom_status set_text(loom_value_pool *pool, loom_value *dict, const char *key, const char *of) {
    loom_value *value = NULL;
    LOOM_TRY(loom_value_text(pool, of, &value));
    return loom_value_set(pool, dict, key, value);
}

static loom_status set_bool(loom_value_pool *pool, loom_value *dict, const char *key, bool of) {
    loom_value *value = NULL;
    LOOM_TRY(loom_value_bool(pool, of, &value));
    return loom_value_set(pool, dict, key, value);
}

static loom_status add_content(const saving_all *s, loom_value *common) {
    const loom_megatron_strategy_config *config = &s->fabric->config;
    loom__content_metadata content = loom__sharded_state_dict_metadata(
        config->ddp_config.use_distributed_optimizer, config->dist_ckpt_optim_fully_reshardable);
    loom_value *dict = NULL, *version = NULL;
    LOOM_TRY(loom_value_float(s->pool, 3.0, &version)); /* Megatron-LM's, since 2020 */
    LOOM_TRY(loom_value_set(s->pool, common, "checkpoint_version", version));
    LOOM_TRY(loom_value_dict(s->pool, &dict));
    if (content.distrib_optim_sharding_type)
        LOOM_TRY(set_text(s->pool, dict, "distrib_optim_sharding_type", content.distrib_optim_sharding_type));
    LOOM_TRY(set_bool(s->pool, dict, "singleton_local_shards", content.singleton_local_shards));
    LOOM_TRY(set_bool(s->pool, dict, "chained_optim_avoid_prefix", content.chained_optim_avoid_prefix));
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

/* Of the parameters of one kind. */
static loom_status optimizer_value(const saving *s, bool experts, loom_value **out) {
    const loom_optimizer *optimizer = s->parts.optimizer;
    const loom_value *scaler = NULL, *state = NULL;
    loom_value *dict = NULL, *groups = NULL;
    bool whole = s->options.form == LOOM__OPTIMIZER_WHOLE;
    LOOM_TRY(loom_value_dict(s->pool, &dict));
    if (!whole && s->entries)
        LOOM_TRY(set_text(s->pool, dict, "param_state_sharding_type", loom__optimizer_form_name(s->options.form)));
    if (s->options.form != LOOM__OPTIMIZER_DP_RESHARDABLE)
        LOOM_TRY(groups_value(s, experts, &groups));
    if (whole) {
        LOOM_TRY(loom__optimizer_step_value(s->pool, optimizer, &state));
        LOOM_TRY(loom_value_set(s->pool, groups, "state", state));
    }
    /* There Megatron-Core's optimizer is PyTorch's own, where it has no masters; else it wraps it. */
    if (whole && s->options.param_dtype == LOOM_F32)
        dict = groups;
    else if (groups)
        LOOM_TRY(loom_value_set(s->pool, dict, "optimizer", groups));
    LOOM_TRY(loom__optimizer_scaler_value(s->pool, optimizer, &scaler));
    if (scaler && s->options.form != LOOM__OPTIMIZER_DP_RESHARDABLE)
        LOOM_TRY(loom_value_set(s->pool, dict, "grad_scaler", scaler));
    *out = dict;
    return LOOM_OK;
}

/* Megatron-Core has an optimizer for experts beside that for the rest, and a DICT of both by number. */
static loom_status add_optimizer(const saving *s, loom_value *common) {
    const loom_value *schedule = NULL;
    loom_value *dict = NULL;
    if (!s->parts.optimizer)
        return LOOM_OK;
    bool chained = s->entries && loom__layout_has_experts(&s->layout);
    if (chained)
        LOOM_TRY(loom_value_dict(s->pool, &dict));
    else
        LOOM_TRY(optimizer_value(s, false, &dict));
    for (int experts = 0; chained && experts < 2; experts++) {
        loom_value *one = NULL, *number = NULL;
        LOOM_TRY(optimizer_value(s, experts, &one));
        LOOM_TRY(loom_value_int(s->pool, experts, &number));
        LOOM_TRY(loom_value_set_pair(s->pool, dict, number, one));
    }
    const loom_value *kept = dict;
    LOOM_TRY(filtered(s->pool, s->filters, s->filter_count, s->parts.optimizer_key, &kept));
    LOOM_TRY(loom_value_set(s->pool, common, "optimizer", kept));
    LOOM_TRY(loom__optimizer_schedule_value(s->pool, s->parts.optimizer, &schedule));
    return loom_value_set(s->pool, common, "opt_param_scheduler", schedule);
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
    LOOM_TRY(set_text(all->pool, own, "main_module", all->modules[0].parts.key));
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
static loom_status write_context(const saving_all *s) {
    char *text = NULL;
    size_t length = 0;
    if (s->count == 0 || !s->modules[0].parts.module->is_gpt)
        return LOOM_OK;
    LOOM_TRY(loom__parallel_context(s->modules[0].parts.module, &text, &length));
    loom_status status = loom__checkpoint_write_context(s->path, text, length);
    free(text);
    return status;
}

/* ---- together */

static loom_status commit(const saving_all *s, const char *all, const int64_t *bytes, int64_t most, int ranks) {
    loom__checkpoint_description *descriptions = calloc((size_t)ranks, sizeof *descriptions);
    loom_value *common = NULL;
    int64_t count = 0;
    if (!descriptions)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the descriptions of %d files", ranks);
    for (int i = 0; i < ranks; i++)
        if (bytes[i] > 0)
            descriptions[count++] = (loom__checkpoint_description){(char *)all + i * most, (size_t)bytes[i]};
    loom_status status = make_common(s, &common);
    if (!status)
        status = write_context(s);
    if (!status)
        status = loom__checkpoint_commit(s->path, descriptions, count, common);
    free(descriptions);
    return status;
}

/* What every rank's file holds, on rank 0. */
static loom_status gather(const saving_all *s, const int64_t *bytes, int64_t most, char *all) {
    loom_comm *world = loom_rank_world(s->fabric->rank);
    char *mine = calloc((size_t)most + 1, 1);
    loom_status status =
        all && mine ? LOOM_OK
                    : loom_fail(LOOM_ERR_MEMORY,
                          "out of memory for the descriptions of a checkpoint (%lld bytes a rank)", (long long)most);
    status = loom_agree(world, status);
    if (!status) {
        if (s->description.bytes > 0)
            memcpy(mine, s->description.data, s->description.bytes);
        status = loom_all_gather(world, mine, all, most, LOOM_U8);
    }
    free(mine);
    LOOM_TRY(status);
    bool first = loom_rank_index(s->fabric->rank) == 0;
    return loom_agree(world, first ? commit(s, all, bytes, most, loom_comm_size(world)) : LOOM_OK);
}

static loom_status finish(const saving_all *s) {
    loom_comm *world = loom_rank_world(s->fabric->rank);
    int ranks = loom_comm_size(world);
    int64_t mine = (int64_t)s->description.bytes, most = 0;
    int64_t *bytes = calloc((size_t)ranks, sizeof *bytes);
    loom_status status = loom_agree(
        world, bytes ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for the sizes of %d files", ranks));
    if (!status)
        status = loom_all_gather(world, &mine, bytes, 1, LOOM_I64);
    for (int i = 0; i < ranks && !status; i++)
        most = bytes[i] > most ? bytes[i] : most;
    char *all = status ? NULL : malloc((size_t)(most * ranks) + 1);
    if (!status)
        status = gather(s, bytes, most, all);
    free(all);
    free(bytes);
    return status;
}

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
    LOOM_TRY(check_all_apart(s));
    return loom_rank_index(s->fabric->rank) == 0 ? loom__checkpoint_begin(s->path) : LOOM_OK;
}

static loom_status save_all(saving_all *s) {
    loom_comm *world = loom_rank_world(s->fabric->rank);
    LOOM_TRY(loom_agree(world, prepare(s)));
    for (int64_t i = 0; i < s->count; i++)
        if (s->modules[i].parts.module->ddp)
            LOOM_TRY(loom__ddp_wait_parameters(s->modules[i].parts.module->ddp));
    LOOM_TRY(loom_agree(world, write_file(s)));
    return finish(s);
}

loom_status loom_fabric_save(loom_fabric *fabric, const char *path, const loom_state *state,
    const loom_state_filter *filters, int64_t filter_count) {
    saving_all s = {.fabric = fabric, .path = path, .state = state, .filters = filters, .filter_count = filter_count};
    loom_status status = save_all(&s);
    loom__checkpoint_writer_destroy(s.writer);
    free(s.description.data);
    for (int64_t i = 0; i < s.count; i++) {
        loom__state_buckets_destroy(s.modules[i].buckets);
        loom__sharded_state_destroy(s.modules[i].entries);
        loom__own_state_destroy(s.modules[i].own);
        free(s.modules[i].stages);
    }
    free(s.modules);
    loom_value_pool_destroy(s.pool);
    return status;
}
