/* What a checkpoint says beside its tensors, as values: the layout that wrote it, and of the optimizer its groups, its
 * schedule and its loss scaler. Names are Megatron-Core's, except under "megaloom". */
#include "optim/optim.h"
#include "state/state.h"
#include <stdlib.h>

static loom_status set_int(loom_value_pool *pool, loom_value *dict, const char *key, int64_t of) {
    loom_value *value = NULL;
    LOOM_TRY(loom_value_int(pool, of, &value));
    return loom_value_set(pool, dict, key, value);
}

loom_status loom__set_bool(loom_value_pool *pool, loom_value *dict, const char *key, bool of) {
    loom_value *value = NULL;
    LOOM_TRY(loom_value_bool(pool, of, &value));
    return loom_value_set(pool, dict, key, value);
}

static loom_status set_float(loom_value_pool *pool, loom_value *dict, const char *key, double of) {
    loom_value *value = NULL;
    LOOM_TRY(loom_value_float(pool, of, &value));
    return loom_value_set(pool, dict, key, value);
}

loom_status loom__set_text(loom_value_pool *pool, loom_value *dict, const char *key, const char *of) {
    loom_value *value = NULL;
    LOOM_TRY(loom_value_text(pool, of, &value));
    return loom_value_set(pool, dict, key, value);
}

/* ---- the layout */

enum { STAGE_FIELDS = 4 };

loom_status loom__layout_value(loom_value_pool *pool, const loom__sharded_layout *layout, const loom_value **out) {
    loom_value *dict = NULL, *stages = NULL;
    LOOM_TRY(loom_value_dict(pool, &dict));
    LOOM_TRY(set_int(pool, dict, "tensor_model_parallel_size", layout->tp));
    LOOM_TRY(set_int(pool, dict, "pipeline_model_parallel_size", layout->pp));
    LOOM_TRY(set_int(pool, dict, "optimizer_shards", layout->dp));
    if (loom__layout_has_experts(layout)) {
        LOOM_TRY(set_int(pool, dict, "expert_tensor_parallel_size", layout->etp));
        LOOM_TRY(set_int(pool, dict, "expert_model_parallel_size", layout->ep));
        LOOM_TRY(set_int(pool, dict, "expert_optimizer_shards", layout->edp));
    }
    LOOM_TRY(set_int(pool, dict, "bucket_size", layout->bucket_size));
    LOOM_TRY(loom__set_bool(pool, dict, "pad_buckets_for_high_nccl_busbw", layout->pad_for_high_busbw));
    LOOM_TRY(loom_value_list(pool, &stages));
    for (int64_t i = 0; i < layout->chunks * layout->pp; i++) {
        const loom_stage *stage = &layout->stages[i];
        const int64_t fields[STAGE_FIELDS] = {stage->first_layer, stage->layers, stage->embedding, stage->loss};
        loom_value *item = NULL;
        LOOM_TRY(loom_value_ints(pool, false, fields, STAGE_FIELDS, &item));
        LOOM_TRY(loom_value_append(pool, stages, item));
    }
    LOOM_TRY(loom_value_set(pool, dict, "stages", stages));
    *out = dict;
    return LOOM_OK;
}

static bool get_int(const loom_value *from, const char *key, int64_t *out) {
    const loom_value *value = loom_value_get(from, key);
    if (!value || (value->kind != LOOM_VALUE_INT && value->kind != LOOM_VALUE_BOOL))
        return false;
    *out = value->integer;
    return true;
}

static bool read_stage(const loom_value *value, loom_stage *stage) {
    int64_t fields[STAGE_FIELDS];
    if (value->kind != LOOM_VALUE_LIST || value->count != STAGE_FIELDS)
        return false;
    for (int i = 0; i < STAGE_FIELDS; i++) {
        if (value->items[i]->kind != LOOM_VALUE_INT)
            return false;
        fields[i] = value->items[i]->integer;
    }
    *stage = (loom_stage){fields[0], fields[1], fields[2] != 0, fields[3] != 0};
    return true;
}

loom_status loom__layout_read(const loom_value *common, loom__sharded_layout *layout, loom_stage **out, bool *found) {
    const loom_value *told = loom_value_get(loom_value_get(common, "megaloom"), "layout");
    const loom_value *list = loom_value_get(told, "stages");
    int64_t pad = 0;
    *layout = (loom__sharded_layout){0};
    *found = told != NULL;
    if (!told)
        return LOOM_OK;
    /* Of a model without experts there are none. */
    (void)get_int(told, "expert_tensor_parallel_size", &layout->etp);
    (void)get_int(told, "expert_model_parallel_size", &layout->ep);
    (void)get_int(told, "expert_optimizer_shards", &layout->edp);
    bool fits = get_int(told, "tensor_model_parallel_size", &layout->tp) &&
                get_int(told, "pipeline_model_parallel_size", &layout->pp) &&
                get_int(told, "optimizer_shards", &layout->dp) && get_int(told, "bucket_size", &layout->bucket_size) &&
                get_int(told, "pad_buckets_for_high_nccl_busbw", &pad) && list && list->kind == LOOM_VALUE_LIST &&
                layout->tp > 0 && layout->pp > 0 && list->count > 0 && list->count % layout->pp == 0;
    loom_stage *stages = fits ? calloc((size_t)list->count, sizeof *stages) : NULL;
    if (fits && !stages)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld stages", (long long)list->count);
    for (int64_t i = 0; fits && i < list->count; i++)
        fits = read_stage(list->items[i], &stages[i]);
    if (!fits) {
        free(stages);
        return loom_fail(LOOM_ERR_FORMAT,
            "checkpoint: megaloom.layout of the common state is not a layout: expected sizes from 1 and for each chunk "
            "of each stage first layer, layers, embedding and loss");
    }
    layout->chunks = list->count / layout->pp;
    layout->pad_for_high_busbw = pad != 0;
    layout->stages = *out = stages;
    return LOOM_OK;
}

/* ---- the optimizer */

static loom_status set_none(loom_value_pool *pool, loom_value *dict, const char *key) {
    loom_value *value = NULL;
    LOOM_TRY(loom_value_none(pool, &value));
    return loom_value_set(pool, dict, key, value);
}

/* What PyTorch's optimizer, which takes its groups whole from a checkpoint, wants to find in one. */
static loom_status add_torch_fields(loom_value_pool *pool, const loom_optimizer *optimizer, loom_value *dict) {
    static const char *const off[] = {"capturable", "differentiable"}, *const none[] = {"foreach", "fused"};
    const loom_optimizer_config *config = loom__optimizer_config_of(optimizer);
    const double numbers[] = {config->adam_beta1, config->adam_beta2};
    loom_value *betas = NULL;
    LOOM_TRY(loom_value_tuple(pool, &betas));
    for (int i = 0; i < 2; i++) {
        loom_value *beta = NULL;
        LOOM_TRY(loom_value_float(pool, numbers[i], &beta));
        LOOM_TRY(loom_value_append(pool, betas, beta));
    }
    LOOM_TRY(loom_value_set(pool, dict, "betas", betas));
    LOOM_TRY(set_float(pool, dict, "eps", config->adam_eps));
    LOOM_TRY(loom__set_bool(pool, dict, "amsgrad", config->amsgrad));
    LOOM_TRY(loom__set_bool(pool, dict, "maximize", config->maximize));
    for (int i = 0; i < 2; i++) {
        LOOM_TRY(set_none(pool, dict, none[i]));
        LOOM_TRY(loom__set_bool(pool, dict, off[i], false));
    }
    return loom__set_bool(pool, dict, "decoupled_weight_decay", config->decoupled_weight_decay);
}

static loom_status group_value(loom_value_pool *pool, const loom_optimizer *optimizer,
    const loom_optimizer_group *group, bool experts, const loom_lr_state *schedule, loom_value **out) {
    loom_value *dict = NULL;
    LOOM_TRY(loom_value_dict(pool, &dict));
    LOOM_TRY(loom__set_bool(pool, dict, "is_expert_parallel", experts));
    LOOM_TRY(loom__set_bool(pool, dict, "default_config", true));
    LOOM_TRY(set_float(pool, dict, "wd_mult", group->wd_mult));
    LOOM_TRY(set_float(pool, dict, "lr_mult", group->lr_mult));
    LOOM_TRY(loom__set_bool(pool, dict, "is_decoupled_lr", group->decoupled));
    LOOM_TRY(set_float(pool, dict, "max_lr", schedule->max_lr));
    LOOM_TRY(set_float(pool, dict, "min_lr", schedule->min_lr));
    LOOM_TRY(set_float(pool, dict, "lr", group->lr));
    LOOM_TRY(set_float(pool, dict, "weight_decay", group->weight_decay));
    LOOM_TRY(add_torch_fields(pool, optimizer, dict));
    LOOM_TRY(set_float(pool, dict, "step", (double)loom__optimizer_progress_of(optimizer).steps));
    *out = dict;
    return LOOM_OK;
}

static loom_status add_groups(loom_value_pool *pool, const loom_optimizer *optimizer, bool experts, loom_value *list) {
    loom_optimizer_group groups[LOOM_OPTIMIZER_GROUPS];
    loom_lr_state schedule = loom_optimizer_lr_state(optimizer);
    int64_t count = 0;
    LOOM_TRY(loom__optimizer_groups_of(optimizer, experts, groups, &count));
    /* Those that decay come first, as in Megatron-Core. */
    for (int64_t i = count - 1; i >= 0; i--) {
        loom_value *group = NULL;
        LOOM_TRY(group_value(pool, optimizer, &groups[i], experts, &schedule, &group));
        LOOM_TRY(loom_value_append(pool, list, group));
    }
    return LOOM_OK;
}

static loom_status schedule_value(loom_value_pool *pool, const loom_optimizer *optimizer, const loom_value **out) {
    loom_lr_state state = loom_optimizer_lr_state(optimizer);
    loom_value *dict = NULL;
    LOOM_TRY(loom_value_dict(pool, &dict));
    LOOM_TRY(set_float(pool, dict, "max_lr", state.max_lr));
    LOOM_TRY(set_int(pool, dict, "lr_warmup_steps", state.lr_warmup_steps));
    LOOM_TRY(set_int(pool, dict, "num_steps", state.num_steps));
    LOOM_TRY(loom__set_text(pool, dict, "lr_decay_style", state.lr_decay_style));
    LOOM_TRY(set_int(pool, dict, "lr_decay_steps", state.lr_decay_steps));
    LOOM_TRY(set_float(pool, dict, "min_lr", state.min_lr));
    LOOM_TRY(set_float(pool, dict, "start_wd", state.start_wd));
    LOOM_TRY(set_float(pool, dict, "end_wd", state.end_wd));
    LOOM_TRY(loom__set_text(pool, dict, "wd_incr_style", state.wd_incr_style));
    LOOM_TRY(set_int(pool, dict, "wd_incr_steps", state.wd_incr_steps));
    *out = dict;
    return LOOM_OK;
}

static loom_status scaler_value(loom_value_pool *pool, const loom_optimizer *optimizer, const loom_value **out) {
    loom__optimizer_progress progress = loom__optimizer_progress_of(optimizer);
    loom_value *dict = NULL;
    *out = NULL;
    if (!progress.has_scaler)
        return LOOM_OK;
    LOOM_TRY(loom_value_dict(pool, &dict));
    *out = dict;
    if (!progress.dynamic)
        return LOOM_OK;
    /* Megatron-Core keeps it as a tensor and moves that to its device. */
    const float scale = (float)progress.scale;
    const int64_t one = 1;
    loom_value *tensor = NULL;
    LOOM_TRY(loom_value_tensor_copy(pool, LOOM_F32, 1, &one, &scale, &tensor));
    LOOM_TRY(loom_value_set(pool, dict, "scale", tensor));
    LOOM_TRY(set_int(pool, dict, "growth_tracker", progress.growth_tracker));
    return set_int(pool, dict, "hysteresis_tracker", progress.hysteresis_tracker);
}

loom_status loom__optimizer_values_of(
    loom_value_pool *pool, const loom_optimizer *optimizer, bool experts, loom__optimizer_values *out) {
    loom__optimizer_values values = {.steps = loom__optimizer_progress_of(optimizer).steps};
    loom_value *groups = NULL;
    LOOM_TRY(loom_value_list(pool, &groups));
    LOOM_TRY(add_groups(pool, optimizer, false, groups));
    if (experts)
        LOOM_TRY(add_groups(pool, optimizer, true, groups));
    values.groups = groups;
    LOOM_TRY(scaler_value(pool, optimizer, &values.scaler));
    LOOM_TRY(schedule_value(pool, optimizer, &values.schedule));
    *out = values;
    return LOOM_OK;
}
