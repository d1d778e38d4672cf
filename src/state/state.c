/* What saving and loading know alike: which states can be, what of a checkpoint is whose, and the layout of a module.
 */
#include "state/state.h"
#include "config/sizes.h"
#include "ddp/plan.h"
#include "model/gpt.h"
#include <stdio.h>
#include <stdlib.h>

static loom_status check_item(const loom_state *state, int64_t number) {
    const loom_state_item *item = &state->items[number];
    bool object = item->load || item->save;
    if (!item->key || (item->module != NULL) + (item->optimizer != NULL) + object > 1)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "state, item %lld (%s): expected a key and one of module, optimizer and load or save", (long long)number,
            item->key ? item->key : "no key");
    for (int64_t i = 0; i < number; i++) {
        const loom_state_item *other = &state->items[i];
        if (strcmp(other->key, item->key) == 0)
            return loom_fail(LOOM_ERR_ARGUMENT, "state: the key %s comes twice", item->key);
        if ((item->module && other->module == item->module) || (item->optimizer && other->optimizer == item->optimizer))
            return loom_fail(LOOM_ERR_ARGUMENT, "state: the keys %s and %s have the same %s, expected each once",
                other->key, item->key, item->module ? "module" : "optimizer");
    }
    return LOOM_OK;
}

static loom_status check_optimizer(const loom_state *state, const loom_optimizer *optimizer) {
    for (int64_t i = 0; i < state->count; i++)
        if (state->items[i].module && state->items[i].module->optimizer == optimizer)
            return LOOM_OK;
    return loom_fail(LOOM_ERR_ARGUMENT,
        "state: an optimizer alone cannot be saved or loaded, since its tensors are sharded as its model's are: "
        "pass it in a state with the model that it belongs to");
}

static loom_status check_module(const loom_state_item *item) {
    const loom_parallel *module = item->module;
    if (strlen(item->key) >= LOOM__STATE_PREFIX_BYTES - 1)
        return loom_fail(LOOM_ERR_ARGUMENT, "state: the key %.40s… of a module has %zu bytes, expected at most %d",
            item->key, strlen(item->key), LOOM__STATE_PREFIX_BYTES - 2);
    if (!module->is_gpt && module->stages > 1)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: checkpoints of a module that was not made by loom_gpt_create on %lld pipeline stages; "
            "only on 1",
            (long long)module->stages);
    for (int64_t i = 0; !module->is_gpt && i < module->parameter_count; i++)
        if (module->parameters[i]->expert_parallel)
            return loom_fail(LOOM_ERR_UNSUPPORTED,
                "not supported yet: checkpoints of a module with experts (%s) that was not made by loom_gpt_create",
                module->parameters[i]->name);
    if (!module->is_gpt && loom_parallel_dtype(module) != LOOM_F32)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: checkpoints of a module that was not made by loom_gpt_create with %s weights; only "
            "fp32 ones",
            loom_dtype_name(loom_parallel_dtype(module)));
    return LOOM_OK;
}

/* Whose tensor is "a.b.w": that of a module a.b, or b.w of one a? */
static loom_status check_prefixes(const loom_state *state, const loom_state_item *item) {
    for (int64_t i = 0; i < state->count; i++)
        if (state->items[i].module && loom__begins_with(state->items[i].key, item->key))
            return loom_fail(LOOM_ERR_ARGUMENT,
                "state: the key %s of a module begins with that of another, %s, and a dot: expected keys that do not",
                state->items[i].key, item->key);
    return LOOM_OK;
}

loom_status loom__state_check(const loom_state *state) {
    for (int64_t i = 0; i < state->count; i++)
        LOOM_TRY(check_item(state, i));
    for (int64_t i = 0; i < state->count; i++) {
        if (state->items[i].optimizer)
            LOOM_TRY(check_optimizer(state, state->items[i].optimizer));
        if (!state->items[i].module)
            continue;
        LOOM_TRY(check_module(&state->items[i]));
        LOOM_TRY(check_prefixes(state, &state->items[i]));
    }
    return LOOM_OK;
}

/* The module whose tensors have no prefix: state_dict, where there is one. */
static const loom_state_item *main_module(const loom_state *state) {
    const loom_state_item *first = loom__state_item(state, "state_dict");
    for (int64_t i = 0; i < state->count && !(first && first->module); i++)
        if (state->items[i].module)
            first = &state->items[i];
    return first && first->module ? first : NULL;
}

bool loom__state_module_at(const loom_state *state, int64_t number, loom__state_module *out) {
    const loom_state_item *first = main_module(state), *item = number == 0 ? first : NULL;
    for (int64_t i = 0; i < state->count && !item; i++)
        if (state->items[i].module && &state->items[i] != first && --number == 0)
            item = &state->items[i];
    if (!item)
        return false;
    *out = (loom__state_module){.key = item->key, .is_main = item == first, .module = item->module};
    if (item != first)
        snprintf(out->prefix, sizeof out->prefix, "%s.", item->key);
    for (int64_t i = 0; i < state->count && item->module->optimizer; i++)
        if (state->items[i].optimizer == item->module->optimizer) {
            out->optimizer = state->items[i].optimizer;
            out->optimizer_key = state->items[i].key;
        }
    return true;
}

const loom_state_item *loom__state_item(const loom_state *state, const char *key) {
    for (int64_t i = 0; i < state->count; i++)
        if (strcmp(state->items[i].key, key) == 0)
            return &state->items[i];
    return NULL;
}

loom__load_scope loom__load_scope_of(const loom_checkpoint *checkpoint, const loom__state_module *module) {
    const loom_value *common = loom_checkpoint_get_info(checkpoint)->common, *own = loom_value_get(common, "megaloom");
    const loom_value *others = loom_value_get(own, "modules"), *told = loom_value_get(own, "main_module");
    loom__load_scope scope = {.checkpoint = checkpoint, .root = common, .others = others};
    bool is_main = told ? loom_value_is_text(told, module->key) : module->is_main;
    if (loom_value_get(others, module->key) || !is_main) {
        snprintf(scope.prefix, sizeof scope.prefix, "%s.", module->key);
        scope.root = loom_value_get(others, module->key);
    }
    return scope;
}

const char *loom__load_scope_key(const loom__load_scope *scope, const char *name) {
    size_t bytes = strlen(scope->prefix);
    if (bytes > 0)
        return strncmp(name, scope->prefix, bytes) == 0 ? name + bytes : NULL;
    bool dict = scope->others && scope->others->kind == LOOM_VALUE_DICT;
    for (int64_t i = 0; dict && i < scope->others->count; i++) {
        const loom_value *key = scope->others->items[2 * i];
        if (key->kind == LOOM_VALUE_TEXT && loom__begins_with(name, key->text))
            return NULL;
    }
    return name;
}

loom__sharded_place loom__parallel_place(const loom_parallel *parallel) {
    loom_comm *const *groups = parallel->fabric->groups;
    return (loom__sharded_place){.stage = parallel->stage,
        .tp_rank = loom_comm_rank(groups[LOOM_GROUP_TP]),
        .dp_rank = loom_comm_rank(groups[LOOM_GROUP_DP_CP]),
        .etp_rank = loom_comm_rank(groups[LOOM_GROUP_ETP]),
        .ep_rank = loom_comm_rank(groups[LOOM_GROUP_EP]),
        .edp_rank = loom_comm_rank(groups[LOOM_GROUP_EDP])};
}

static int64_t bucket_size(const loom_fabric *fabric) {
    const loom_ddp_config *config = &fabric->config.ddp_config;
    if (!config->overlap_grad_reduce)
        return -1;
    return config->bucket_size ? config->bucket_size
                               : loom__ddp_default_bucket_size(loom_comm_size(fabric->groups[LOOM_GROUP_DP]));
}

loom_status loom__parallel_layout(const loom_parallel *parallel, loom__sharded_layout *layout, loom_stage **out) {
    const loom_fabric *fabric = parallel->fabric;
    const loom__gpt *gpt = parallel->module->context;
    const loom__ddp_view *view = parallel->ddp ? loom__ddp_view_of(parallel->ddp) : NULL;
    loom_stage_split split = loom_stage_split_of(&fabric->config, loom_parallel_model_config(parallel));
    int64_t count = parallel->chunk_count * parallel->stages;
    loom_stage *stages = calloc((size_t)count, sizeof *stages);
    if (!stages)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld chunks of the model", (long long)count);
    stages[0] = (loom_stage){.layers = gpt->spec->config.num_layers, .embedding = true, .loss = true};
    loom_status status = parallel->stages > 1 ? loom_stage_split_make(&split, stages) : LOOM_OK;
    if (status) {
        free(stages);
        return status;
    }
    *layout = (loom__sharded_layout){.spec = gpt->spec,
        .tp = loom_comm_size(fabric->groups[LOOM_GROUP_TP]),
        .pp = parallel->stages,
        .dp = view && view->sharded ? view->share[LOOM__DDP_DENSE].shards : 1,
        .etp = loom_comm_size(fabric->groups[LOOM_GROUP_ETP]),
        .ep = loom_comm_size(fabric->groups[LOOM_GROUP_EP]),
        .edp = view && view->sharded ? view->share[LOOM__DDP_EXPERT].shards : 1,
        .chunks = parallel->chunk_count,
        .stages = stages,
        .bucket_size = bucket_size(fabric),
        .pad_for_high_busbw = fabric->config.ddp_config.pad_buckets_for_high_nccl_busbw};
    *out = stages;
    return LOOM_OK;
}
