/* Where a checkpoint has what it says beside its tensors: among the common state or in objects, as the form of the
 * optimizer asks for. The invariant: a run that saves and a tool that rewrites a checkpoint both come here, so that the
 * same values lie at the same place in both. */
#include "state/state.h"

loom_status loom__content_value(loom_value_pool *pool, const loom__content_metadata *content, loom_value **out) {
    LOOM_TRY(loom_value_dict(pool, out));
    if (content->distrib_optim_sharding_type)
        LOOM_TRY(loom__set_text(pool, *out, "distrib_optim_sharding_type", content->distrib_optim_sharding_type));
    LOOM_TRY(loom__set_bool(pool, *out, "singleton_local_shards", content->singleton_local_shards));
    return loom__set_bool(pool, *out, "chained_optim_avoid_prefix", content->chained_optim_avoid_prefix);
}

static const char expert_flag[] = "is_expert_parallel";

static bool is_set(const loom_value *group, const char *key) {
    const loom_value *flag = loom_value_get(group, key);
    return flag && flag->kind == LOOM_VALUE_BOOL && flag->integer != 0;
}

/* Megatron-Core writes in a group whether it is of experts; without a word it is not. */
static loom_status groups_value(
    loom_value_pool *pool, const loom__optimizer_values *values, bool experts, loom_value **out) {
    loom_value *list = NULL;
    LOOM_TRY(loom_value_list(pool, &list));
    for (int64_t i = 0; i < values->groups->count; i++)
        if (is_set(values->groups->items[i], expert_flag) == experts)
            LOOM_TRY(loom_value_append(pool, list, values->groups->items[i]));
    LOOM_TRY(loom_value_dict(pool, out));
    return loom_value_set(pool, *out, "param_groups", list);
}

/* Whether a group is of parameters such as experts have: of weights, which decay, or of biases, which do not. */
static bool has_such_experts(const loom__model_spec *spec, const loom_value *group) {
    const loom_value *mult = loom_value_get(group, "wd_mult");
    bool decays = !mult || (mult->kind == LOOM_VALUE_FLOAT ? mult->number > 0 : mult->integer > 0), found = false;
    for (int64_t i = 0; i < spec->count; i++)
        found = found || (spec->parameters[i].expert >= 0 && spec->parameters[i].decay == decays);
    return found && !is_set(group, "is_decoupled_lr");
}

static loom_status copy_for_experts(loom_value_pool *pool, const loom_value *group, loom_value *list) {
    loom_value *dict = NULL;
    LOOM_TRY(loom_value_dict(pool, &dict));
    LOOM_TRY(loom__set_bool(pool, dict, expert_flag, true));
    for (int64_t i = 0; group->kind == LOOM_VALUE_DICT && i < group->count; i++)
        if (!loom_value_is_text(group->items[2 * i], expert_flag))
            LOOM_TRY(loom_value_set_pair(pool, dict, group->items[2 * i], group->items[2 * i + 1]));
    return loom_value_append(pool, list, dict);
}

loom_status loom__optimizer_values_for(
    loom_value_pool *pool, const loom__sharded_layout *layout, loom__optimizer_values *values) {
    loom_value *list = NULL;
    bool found = !values->groups || !loom__layout_chains(layout);
    for (int64_t i = 0; !found && i < values->groups->count; i++)
        found = is_set(values->groups->items[i], expert_flag);
    if (found)
        return LOOM_OK;
    LOOM_TRY(loom_value_list(pool, &list));
    for (int64_t i = 0; i < values->groups->count; i++)
        LOOM_TRY(loom_value_append(pool, list, values->groups->items[i]));
    for (int64_t i = 0; i < values->groups->count; i++)
        if (has_such_experts(layout->spec, values->groups->items[i]))
            LOOM_TRY(copy_for_experts(pool, values->groups->items[i], list));
    values->groups = list;
    return LOOM_OK;
}

/* What PyTorch's optimizer keeps beside its tensors: nothing before the first update. */
static loom_status state_value(loom_value_pool *pool, int64_t updates, loom_value **out) {
    const float steps = (float)updates;
    loom_value *tensor = NULL;
    LOOM_TRY(loom_value_dict(pool, out));
    if (!(steps > 0))
        return LOOM_OK;
    LOOM_TRY(loom_value_tensor_copy(pool, LOOM_F32, 0, NULL, &steps, &tensor));
    return loom_value_set(pool, *out, "common_step", tensor);
}

/* Of the parameters of one kind. */
static loom_status optimizer_value(loom_value_pool *pool, const loom__sharded_options *options, bool experts,
    const loom__optimizer_values *values, loom_value **out) {
    const char *type = loom__optimizer_form_name(options->form);
    bool whole = options->form == LOOM__OPTIMIZER_WHOLE;
    loom_value *groups = NULL, *state = NULL;
    LOOM_TRY(loom_value_dict(pool, out));
    if (type)
        LOOM_TRY(loom__set_text(pool, *out, "param_state_sharding_type", type));
    if (options->form == LOOM__OPTIMIZER_DP_RESHARDABLE)
        return LOOM_OK;
    LOOM_TRY(groups_value(pool, values, experts, &groups));
    if (whole) {
        LOOM_TRY(state_value(pool, values->steps, &state));
        LOOM_TRY(loom_value_set(pool, groups, "state", state));
    }
    /* There Megatron-Core's optimizer is PyTorch's own, where it has no masters; else it wraps it. */
    if (whole && options->param_dtype == LOOM_F32)
        *out = groups;
    else
        LOOM_TRY(loom_value_set(pool, *out, "optimizer", groups));
    return values->scaler ? loom_value_set(pool, *out, "grad_scaler", values->scaler) : LOOM_OK;
}

static loom_status add_rest(loom_value_pool *pool, const loom_value *rest, loom_value *to) {
    static const char *const known[] = {
        "param_state_sharding_type", "optimizer", "param_groups", "state", "grad_scaler"};
    for (int64_t i = 0; rest && rest->kind == LOOM_VALUE_DICT && i < rest->count; i++) {
        const loom_value *key = rest->items[2 * i];
        bool taken = false;
        for (size_t k = 0; k < sizeof known / sizeof *known; k++)
            taken = taken || loom_value_is_text(key, known[k]);
        if (!taken)
            LOOM_TRY(loom_value_set_pair(pool, to, key, rest->items[2 * i + 1]));
    }
    return LOOM_OK;
}

const loom_value *loom__first_optimizer(const loom_value *value) {
    if (value && (value->kind == LOOM_VALUE_LIST || value->kind == LOOM_VALUE_TUPLE) && value->count > 0)
        return value->items[0];
    bool numbered =
        value && value->kind == LOOM_VALUE_DICT && value->count > 0 && value->items[0]->kind == LOOM_VALUE_INT;
    return numbered ? value->items[1] : value;
}

loom_status loom__optimizer_common_value(loom_value_pool *pool, const loom__sharded_options *options, bool experts,
    const loom__optimizer_values *values, const loom_value *rest, loom_value **out) {
    loom_value *both = NULL, *one = NULL, *number = NULL;
    rest = loom__first_optimizer(rest);
    LOOM_TRY(loom_value_dict(pool, &both));
    for (int kind = 0; kind < (experts ? 2 : 1); kind++) {
        LOOM_TRY(optimizer_value(pool, options, kind, values, &one));
        LOOM_TRY(add_rest(pool, rest, one));
        LOOM_TRY(loom_value_int(pool, kind, &number));
        LOOM_TRY(loom_value_set_pair(pool, both, number, one));
    }
    *out = experts ? both : one;
    return LOOM_OK;
}

static loom_status append_dtype(loom_value_pool *pool, loom_value *list, loom_dtype dtype) {
    loom_value *name = NULL;
    LOOM_TRY(loom_value_name(pool, loom__state_dtype_name(dtype), &name));
    return loom_value_append(pool, list, name);
}

/* [{(dtype of parameters, of gradients): [elements of its buckets]}, … a buffer]. */
static loom_status numel_value(loom_value_pool *pool, const loom__sharded_options *options,
    const loom__state_buckets *buckets, bool experts, bool unpadded, loom_value **out) {
    loom_value *list = NULL, *dict = NULL, *numbers = NULL;
    LOOM_TRY(loom_value_list(pool, &list));
    for (int64_t b = 0; b < buckets->count; b++) {
        const loom__state_bucket *bucket = &buckets->buckets[b];
        if (bucket->expert != experts)
            continue;
        if (bucket->index == 0) {
            loom_value *key = NULL;
            LOOM_TRY(loom_value_dict(pool, &dict));
            LOOM_TRY(loom_value_list(pool, &numbers));
            LOOM_TRY(loom_value_tuple(pool, &key));
            LOOM_TRY(append_dtype(pool, key, options->param_dtype));
            LOOM_TRY(append_dtype(pool, key, options->grad_dtype));
            LOOM_TRY(loom_value_set_pair(pool, dict, key, numbers));
            LOOM_TRY(loom_value_append(pool, list, dict));
        }
        loom_value *number = NULL;
        LOOM_TRY(loom_value_int(pool, unpadded ? bucket->unpadded : bucket->numel, &number));
        LOOM_TRY(loom_value_append(pool, numbers, number));
    }
    *out = list;
    return LOOM_OK;
}

loom_status loom__object_value(loom_value_pool *pool, const loom__state_entry *entry,
    const loom__sharded_options *options, const loom__state_buckets *buckets, const loom__optimizer_values *values,
    const loom_value **out) {
    const loom__state_object object = entry->object;
    loom_value *made = NULL, *list = NULL;
    LOOM_TRY(loom_value_list(pool, &list));
    switch (object) {
    case LOOM__STATE_EXTRA:
        LOOM_TRY(loom_value_none(pool, &made));
        break;
    case LOOM__STATE_OPTIMIZER:
        LOOM_TRY(groups_value(pool, values, entry->expert, &made));
        break;
    case LOOM__STATE_NUMEL:
    case LOOM__STATE_NUMEL_UNPADDED:
        LOOM_TRY(numel_value(pool, options, buckets, entry->expert, object == LOOM__STATE_NUMEL_UNPADDED, &made));
        break;
    default:
        break;
    }
    LOOM_TRY(loom_value_append(pool, list, object == LOOM__STATE_SCALER ? values->scaler : made));
    *out = list;
    return LOOM_OK;
}
