/* What of an optimizer is no tensor: how many updates it has done, and where its schedule stands. Megatron-LM, NeMo and
 * the form dp_reshardable keep them at different places; a checkpoint that has neither leaves both as they are. */
#include "optim/optim.h"
#include "state/state.h"
#include <math.h>
#include <stdio.h>

static const loom_value *first_item(const loom_value *list) {
    bool is_list = list && (list->kind == LOOM_VALUE_LIST || list->kind == LOOM_VALUE_TUPLE);
    return is_list && list->count > 0 ? list->items[0] : NULL;
}

static const loom_value *groups_in(const loom_value *optimizer) {
    const loom_value *inner = loom_value_get(optimizer, "optimizer");
    const loom_value *groups = loom_value_get(inner ? inner : optimizer, "param_groups");
    return groups && groups->kind == LOOM_VALUE_LIST ? groups : NULL;
}

static loom_status add_groups(loom_value_pool *pool, const loom_value *optimizer, loom_value *to) {
    const loom_value *from = groups_in(optimizer);
    for (int64_t i = 0; from && i < from->count; i++)
        LOOM_TRY(loom_value_append(pool, to, from->items[i]));
    return LOOM_OK;
}

/* Of an optimizer, or of all that are chained. */
static loom_status common_groups(loom_value_pool *pool, const loom_value *common, const loom_value **out) {
    loom_value *all = NULL;
    *out = groups_in(common);
    if (loom__first_optimizer(common) == common)
        return LOOM_OK;
    bool dict = common->kind == LOOM_VALUE_DICT;
    LOOM_TRY(loom_value_list(pool, &all));
    for (int64_t i = 0; i < common->count; i++)
        LOOM_TRY(add_groups(pool, common->items[dict ? 2 * i + 1 : i], all));
    *out = all->count > 0 ? all : NULL;
    return LOOM_OK;
}

/* A tensor of one number, which need not be aligned, counts as that number. */
static bool read_number(const loom_value *value, double *out) {
    float number = 0;
    if (value && value->kind == LOOM_VALUE_INT)
        *out = (double)value->integer;
    else if (value && value->kind == LOOM_VALUE_FLOAT)
        *out = value->number;
    else if (value && value->kind == LOOM_VALUE_TENSOR && value->tensor->dtype == LOOM_F32 &&
             value->tensor->elements == 1)
        *out = (double)*(float *)memcpy(&number, value->tensor->data, sizeof number);
    else
        return false;
    return true;
}

static loom_status read_whole(const loom_value *from, const char *what, const char *key, double least, int64_t *out) {
    double number = 0;
    const double most = 0x1p62;
    if (!read_number(loom_value_get(from, key), &number))
        return LOOM_OK;
    if (!(number >= least && number < most) || floor(number) < number)
        return loom_fail(LOOM_ERR_FORMAT, "checkpoint: %s, %s: found %g, expected a whole number from %g on", what, key,
            number, least);
    *out = (int64_t)number;
    return LOOM_OK;
}

static loom_status read_integer(const loom_value *from, const char *what, const char *key, int64_t *out) {
    return read_whole(from, what, key, 0, out);
}

/* "step" of the first group, or that of all parameters; *steps stays where there is none. */
static loom_status read_steps(const loom_value *optimizer, int64_t *steps) {
    const loom_value *inner = loom_value_get(optimizer, "optimizer");
    if (inner)
        optimizer = inner;
    LOOM_TRY(read_integer(loom_value_get(optimizer, "state"), "state of the optimizer", "common_step", steps));
    const loom_value *groups = loom_value_get(optimizer, "param_groups");
    return read_integer(first_item(groups), "param_groups of the optimizer", "step", steps);
}

/* What the first data-parallel group of a dp_reshardable optimizer keeps under a name, of the optimizer for experts or
 * the other, which may be the only one; *value stays where it does not. */
static loom_status read_group(
    const loom__load_scope *scope, bool experts, const char *name, loom_value_pool *pool, const loom_value **value) {
    const loom_checkpoint *checkpoint = scope->checkpoint;
    char wanted[128];
    const char *chained = experts ? "chained_1." : "chained_0.";
    snprintf(wanted, sizeof wanted, "%soptimizer.distributed.dp_group_idx_0.%s/shard_0_1", chained, name);
    for (int64_t i = 0; i < loom_checkpoint_get_info(checkpoint)->objects; i++) {
        const loom_checkpoint_object *object = loom_checkpoint_object_at(checkpoint, i);
        const char *key = loom__load_scope_key(scope, object->name);
        const loom_value *list = NULL;
        if (!key || (strcmp(key, wanted) != 0 && (experts || strcmp(key, wanted + strlen(chained)) != 0)))
            continue;
        LOOM_TRY(loom_checkpoint_read_object(checkpoint, object, pool, &list));
        *value = first_item(list);
        break;
    }
    return LOOM_OK;
}

static loom_status read_text(const loom_value *from, const char *key, char *to, size_t bytes) {
    const loom_value *value = loom_value_get(from, key);
    if (!value || value->kind != LOOM_VALUE_TEXT)
        return LOOM_OK;
    if (snprintf(to, bytes, "%s", value->text) >= (int)bytes)
        return loom_fail(LOOM_ERR_FORMAT, "checkpoint: schedule, %s: found %.60s, expected at most %zu bytes", key,
            value->text, bytes - 1);
    return LOOM_OK;
}

static loom_status load_schedule(loom_optimizer *optimizer, const loom_value *common) {
    const loom_value *saved = loom_value_get(common, "opt_param_scheduler");
    if (!saved)
        saved = first_item(loom_value_get(common, "lr_schedulers"));
    if (!saved)
        return LOOM_OK;
    loom_lr_state state = loom_optimizer_lr_state(optimizer);
    (void)read_number(loom_value_get(saved, "max_lr"), &state.max_lr);
    (void)read_number(loom_value_get(saved, "min_lr"), &state.min_lr);
    (void)read_number(loom_value_get(saved, "start_wd"), &state.start_wd);
    (void)read_number(loom_value_get(saved, "end_wd"), &state.end_wd);
    LOOM_TRY(read_integer(saved, "schedule", "num_steps", &state.num_steps));
    LOOM_TRY(read_integer(saved, "schedule", "lr_warmup_steps", &state.lr_warmup_steps));
    LOOM_TRY(read_integer(saved, "schedule", "lr_decay_steps", &state.lr_decay_steps));
    LOOM_TRY(read_integer(saved, "schedule", "wd_incr_steps", &state.wd_incr_steps));
    LOOM_TRY(read_text(saved, "lr_decay_style", state.lr_decay_style, sizeof state.lr_decay_style));
    LOOM_TRY(read_text(saved, "wd_incr_style", state.wd_incr_style, sizeof state.wd_incr_style));
    return loom_optimizer_load_lr_state(optimizer, &state);
}

static loom_status read_scaler(const loom_value *scaler, loom__optimizer_progress *progress) {
    const double many = 0x1p53; /* bad steps in a row */
    progress->dynamic = false;
    if (!read_number(loom_value_get(scaler, "scale"), &progress->scale))
        return LOOM_OK;
    if (!(progress->scale > 0) || isinf(progress->scale))
        return loom_fail(LOOM_ERR_FORMAT, "checkpoint: grad_scaler, scale: found %g, expected a finite number above 0",
            progress->scale);
    LOOM_TRY(read_integer(scaler, "grad_scaler", "growth_tracker", &progress->growth_tracker));
    LOOM_TRY(read_whole(scaler, "grad_scaler", "hysteresis_tracker", -many, &progress->hysteresis_tracker));
    progress->dynamic = true;
    return LOOM_OK;
}

/* PyTorch's own optimizer has its steps beside the groups, where other forms have none. */
static loom_status add_steps(loom_value_pool *pool, int64_t steps, const loom_value **groups) {
    loom_value *list = NULL, *dict = NULL, *number = NULL;
    if (!*groups || steps < 0 || loom_value_get(first_item(*groups), "step"))
        return LOOM_OK;
    LOOM_TRY(loom_value_list(pool, &list));
    LOOM_TRY(loom_value_float(pool, (double)steps, &number));
    for (int64_t g = 0; g < (*groups)->count; g++) {
        const loom_value *group = (*groups)->items[g];
        LOOM_TRY(loom_value_dict(pool, &dict));
        for (int64_t i = 0; group->kind == LOOM_VALUE_DICT && i < group->count; i++)
            LOOM_TRY(loom_value_set_pair(pool, dict, group->items[2 * i], group->items[2 * i + 1]));
        LOOM_TRY(loom_value_set(pool, dict, "step", number));
        LOOM_TRY(loom_value_append(pool, list, dict));
    }
    *groups = list;
    return LOOM_OK;
}

static loom_status object_groups(
    const loom__load_scope *scope, loom_value_pool *pool, const loom_value *group, const loom_value **groups) {
    const loom_value *experts = NULL;
    loom_value *both = NULL;
    *groups = groups_in(group);
    LOOM_TRY(read_group(scope, true, "optimizer", pool, &experts));
    if (!experts)
        return LOOM_OK;
    LOOM_TRY(loom_value_list(pool, &both));
    LOOM_TRY(add_groups(pool, group, both));
    LOOM_TRY(add_groups(pool, experts, both));
    *groups = both;
    return LOOM_OK;
}

/* What is not among the common state is, or may be, with the group. */
loom_status loom__optimizer_values_read(
    const loom__load_scope *scope, loom_value_pool *pool, loom__optimizer_values *out) {
    const loom_value *common = loom_value_get(scope->root, "optimizer"), *group = NULL;
    const loom_value *optimizer = loom__first_optimizer(common);
    loom__optimizer_values values = {.steps = -1,
        .scaler = loom_value_get(optimizer, "grad_scaler"),
        .schedule = loom_value_get(scope->root, "opt_param_scheduler")};
    LOOM_TRY(common_groups(pool, common, &values.groups));
    LOOM_TRY(read_steps(optimizer, &values.steps));
    if (values.steps < 0 || !values.groups) {
        LOOM_TRY(read_group(scope, false, "optimizer", pool, &group));
        if (!values.groups)
            LOOM_TRY(object_groups(scope, pool, group, &values.groups));
        LOOM_TRY(read_steps(group, &values.steps));
    }
    if (!values.scaler)
        LOOM_TRY(read_group(scope, false, "grad_scaler", pool, &values.scaler));
    LOOM_TRY(add_steps(pool, values.steps, &values.groups));
    *out = values;
    return LOOM_OK;
}

static loom_status load_all(loom_optimizer *optimizer, const loom__load_scope *scope, loom_value_pool *pool) {
    loom__optimizer_progress progress = loom__optimizer_progress_of(optimizer);
    loom__optimizer_values values;
    LOOM_TRY(loom__optimizer_values_read(scope, pool, &values));
    LOOM_TRY(read_scaler(values.scaler, &progress));
    LOOM_TRY(
        read_integer(loom_value_get(scope->root, "megaloom"), "megaloom", "skipped_steps", &progress.skipped_steps));
    if (values.steps >= 0) {
        progress.steps = values.steps;
        loom__optimizer_set_progress(optimizer, &progress);
    }
    return load_schedule(optimizer, scope->root);
}

loom_status loom__load_optimizer(loom_optimizer *optimizer, const loom__load_scope *scope) {
    loom_value_pool *pool = NULL;
    LOOM_TRY(loom_value_pool_create(&pool));
    loom_status status = load_all(optimizer, scope, pool);
    loom_value_pool_destroy(pool);
    return status;
}
