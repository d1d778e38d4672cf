/* What of an optimizer is no tensor: how many updates it has done, and where its schedule stands. Megatron-LM, NeMo and
 * the form dp_reshardable keep them at different places; a checkpoint that has neither leaves both as they are. */
#include "optim/optim.h"
#include "strategy/load.h"
#include <math.h>
#include <stdio.h>

static const loom_value *first_item(const loom_value *list) {
    return list && list->kind == LOOM_VALUE_LIST && list->count > 0 ? list->items[0] : NULL;
}

static bool read_number(const loom_value *value, double *out) {
    if (value && value->kind == LOOM_VALUE_INT)
        *out = (double)value->integer;
    else if (value && value->kind == LOOM_VALUE_FLOAT)
        *out = value->number;
    else
        return false;
    return true;
}

static loom_status read_integer(const loom_value *from, const char *what, const char *key, int64_t *out) {
    double number = 0;
    const double most = 0x1p62;
    if (!read_number(loom_value_get(from, key), &number))
        return LOOM_OK;
    if (!(number >= 0 && number < most) || floor(number) < number)
        return loom_fail(
            LOOM_ERR_FORMAT, "checkpoint: %s, %s: found %g, expected a whole number from 0 on", what, key, number);
    *out = (int64_t)number;
    return LOOM_OK;
}

/* "step" of the first group; *steps stays where there is none. */
static loom_status read_steps(const loom_value *optimizer, int64_t *steps) {
    const loom_value *inner = loom_value_get(optimizer, "optimizer");
    const loom_value *groups = loom_value_get(inner ? inner : optimizer, "param_groups");
    return read_integer(first_item(groups), "param_groups of the optimizer", "step", steps);
}

static loom_status find_steps(const loom__load_scope *scope, int64_t *steps) {
    const loom_checkpoint *checkpoint = scope->checkpoint;
    const loom_checkpoint_info *info = loom_checkpoint_get_info(checkpoint);
    const loom_value *common = loom_value_get(scope->root, "optimizer"), *inner = first_item(common);
    LOOM_TRY(read_steps(inner ? inner : common, steps));
    for (int64_t i = 0; *steps < 0 && i < info->objects; i++) {
        const loom_checkpoint_object *object = loom_checkpoint_object_at(checkpoint, i);
        const char *key = loom__load_scope_key(scope, object->name);
        if (!key || strcmp(key, "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1") != 0)
            continue;
        loom_value_pool *pool = NULL;
        const loom_value *value = NULL;
        LOOM_TRY(loom_value_pool_create(&pool));
        loom_status status = loom_checkpoint_read_object(checkpoint, object, pool, &value);
        if (!status)
            status = read_steps(first_item(value), steps);
        loom_value_pool_destroy(pool);
        return status;
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

/* skipped_steps and grad_scaler are ours and Megatron-Core's; either may be missing. */
static loom_status read_progress(const loom_value *common, loom__optimizer_progress *progress) {
    const loom_value *scaler = loom_value_get(loom_value_get(common, "optimizer"), "grad_scaler");
    LOOM_TRY(read_integer(loom_value_get(common, "megaloom"), "megaloom", "skipped_steps", &progress->skipped_steps));
    if (!read_number(loom_value_get(scaler, "scale"), &progress->scale))
        return LOOM_OK;
    if (!(progress->scale > 0) || isinf(progress->scale))
        return loom_fail(LOOM_ERR_FORMAT, "checkpoint: grad_scaler, scale: found %g, expected a finite number above 0",
            progress->scale);
    LOOM_TRY(read_integer(scaler, "grad_scaler", "growth_tracker", &progress->growth_tracker));
    LOOM_TRY(read_integer(scaler, "grad_scaler", "hysteresis_tracker", &progress->hysteresis_tracker));
    progress->has_scaler = true;
    return LOOM_OK;
}

loom_status loom__load_optimizer(loom_optimizer *optimizer, const loom__load_scope *scope) {
    loom__optimizer_progress progress = loom__optimizer_progress_of(optimizer);
    int64_t steps = -1;
    LOOM_TRY(find_steps(scope, &steps));
    LOOM_TRY(read_progress(scope->root, &progress));
    if (steps >= 0) {
        progress.steps = steps;
        loom__optimizer_set_progress(optimizer, &progress);
    }
    return load_schedule(optimizer, scope->root);
}
