/* What saving and loading know alike: which states can be, and the layout of a module. */
#include "config/sizes.h"
#include "ddp/plan.h"
#include "model/gpt.h"
#include "strategy/load.h"
#include <stdlib.h>

static loom_status check_item(const loom_state *state, int64_t number, loom__state_parts *parts) {
    const loom_state_item *item = &state->items[number];
    bool object = item->load || item->save;
    if (!item->key || (item->module != NULL) + (item->optimizer != NULL) + object > 1)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "state, item %lld (%s): expected a key and one of module, optimizer and load or save", (long long)number,
            item->key ? item->key : "no key");
    for (int64_t i = 0; i < number; i++)
        if (strcmp(state->items[i].key, item->key) == 0)
            return loom_fail(LOOM_ERR_ARGUMENT, "state: the key %s comes twice", item->key);
    if ((item->module && parts->module) || (item->optimizer && parts->optimizer))
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: a state with two %s (key %s)",
            item->module ? "modules" : "optimizers", item->key);
    if (item->module)
        parts->module = item->module;
    if (item->optimizer)
        parts->optimizer = item->optimizer;
    return LOOM_OK;
}

loom_status loom__state_check(const loom_state *state, loom__state_parts *parts) {
    for (int64_t i = 0; i < state->count; i++)
        LOOM_TRY(check_item(state, i, parts));
    if (parts->optimizer && (!parts->module || parts->module->optimizer != parts->optimizer))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "state: an optimizer alone cannot be saved or loaded, since its tensors are sharded as its model's are: "
            "pass it in a state with the model that it belongs to");
    if (parts->module && !parts->module->is_gpt)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "state: this module was not made by loom_gpt_create: its tensors have no names in a checkpoint");
    if (parts->module && loom_parallel_dtype(parts->module) != LOOM_F32)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: checkpoints of a model with %s weights; only fp32 ones",
            loom_dtype_name(loom_parallel_dtype(parts->module)));
    return LOOM_OK;
}

const loom_state_item *loom__state_item(const loom_state *state, const char *key) {
    for (int64_t i = 0; i < state->count; i++)
        if (strcmp(state->items[i].key, key) == 0)
            return &state->items[i];
    return NULL;
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
        .chunks = parallel->chunk_count,
        .stages = stages,
        .bucket_size = bucket_size(fabric),
        .pad_for_high_busbw = fabric->config.ddp_config.pad_buckets_for_high_nccl_busbw};
    *out = stages;
    return LOOM_OK;
}
