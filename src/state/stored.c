/* From the names and chunks of a checkpoint to what arithmetic on layouts takes. A load by ranks and a tool without any
 * begin here. The invariant: an optimizer that nobody asks for is not looked at, so that no layout is needed by which
 * its buckets would be understood. */
#include "state/stored.h"
#include <stdlib.h>

_Static_assert((int)LOOM_CHECKPOINT_MAX_DIMS == (int)LOOM__STORED_DIMS, "shapes are copied whole");

static loom_status copy_chunks(loom__stored *stored, const char *key, const loom_checkpoint_tensor *tensor) {
    int64_t number = stored->count;
    loom__stored_chunk *chunks = calloc((size_t)tensor->chunk_count + 1, sizeof *chunks);
    if (!chunks)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld chunks", (long long)tensor->chunk_count);
    for (int64_t c = 0; c < tensor->chunk_count; c++)
        for (int i = 0; i < tensor->dims; i++) {
            chunks[c].offset[i] = tensor->chunks[c].offsets[i];
            chunks[c].size[i] = tensor->chunks[c].sizes[i];
        }
    loom__stored_tensor *to = &stored->tensors[number];
    *to = (loom__stored_tensor){.key = key,
        .dims = tensor->dims,
        .original_dims = tensor->original_dims,
        .chunk_count = tensor->chunk_count,
        .chunks = chunks};
    memcpy(to->shape, tensor->shape, sizeof to->shape);
    memcpy(to->original_shape, tensor->original_shape, sizeof to->original_shape);
    stored->chunks[number] = chunks;
    stored->count++;
    return LOOM_OK;
}

loom_status loom__stored_list(const loom__load_scope *scope, bool weights_alone, loom__stored *stored) {
    int64_t count = loom_checkpoint_get_info(scope->checkpoint)->tensors;
    stored->checkpoint = scope->checkpoint;
    stored->tensors = calloc((size_t)count + 1, sizeof *stored->tensors);
    stored->chunks = calloc((size_t)count + 1, sizeof(loom__stored_chunk *));
    stored->numbers = calloc((size_t)count + 1, sizeof *stored->numbers);
    if (!stored->tensors || !stored->chunks || !stored->numbers)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld tensors", (long long)count);
    for (int64_t i = 0; i < count; i++) {
        const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(scope->checkpoint, i);
        const char *key = loom__load_scope_key(scope, tensor->name);
        if (!key || (weights_alone && loom__is_of_optimizer(key)))
            continue;
        stored->numbers[stored->count] = i;
        LOOM_TRY(copy_chunks(stored, key, tensor));
    }
    return LOOM_OK;
}

static loom_status find_layout(
    const loom__load_scope *scope, const loom_model_config *config, loom__stored *stored, bool *found) {
    loom__sharded_layout told;
    loom_stage *stages = NULL;
    LOOM_TRY(loom__layout_read(scope->root, &told, &stages, found));
    if (!*found)
        return loom__written_find(config, stored->tensors, stored->count, &stored->written, found);
    loom_status status = loom__written_from(config, stored->tensors, stored->count, &told, &stored->written);
    free(stages);
    return status;
}

loom_status loom__stored_sort(const loom__load_scope *scope, const loom__model_spec *spec,
    const loom__sharded_options *options, loom__stored *stored) {
    bool found = false;
    if (!options->weights_alone)
        LOOM_TRY(find_layout(scope, &spec->config, stored, &found));
    loom__stored_state state = {
        .tensors = stored->tensors, .count = stored->count, .layout = found ? &stored->written.layout : NULL};
    return loom__reshard_source_create(spec, &state, options, &stored->source);
}

void loom__stored_free(loom__stored *stored) {
    loom__reshard_source_destroy(stored->source);
    loom__written_free(&stored->written);
    for (int64_t i = 0; i < stored->count; i++)
        free(stored->chunks[i]);
    free(stored->chunks);
    free(stored->numbers);
    free(stored->tensors);
    *stored = (loom__stored){0};
}

loom_status loom__stored_plan_whole(
    const loom__stored *stored, const loom__model_spec *spec, int array, loom__reshard_plan **plan) {
    const int64_t count = array == LOOM__STATE_WEIGHT ? loom__spec_tensors(spec) : spec->count;
    loom__reshard_want *wants = calloc((size_t)count + 1, sizeof *wants);
    if (!wants)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld parameters", (long long)count);
    for (int64_t i = 0; i < count; i++) {
        int64_t shape[2];
        loom__parameter_local_shape(spec, &spec->parameters[i], 1, shape);
        wants[i] = (loom__reshard_want){.array = array, .canonical = i, .count = shape[0] * shape[1]};
    }
    loom_status status = loom__reshard_plan_create(stored->source, spec, 1, 0, wants, count, plan);
    free(wants);
    return status;
}
