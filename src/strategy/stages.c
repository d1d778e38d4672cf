/* How a module is cut over the stages of the pipeline. The layers that a stage gets are arithmetic on the model's and
 * the strategy's fields (<megaloom/stages.h>), the same on every rank; so every rank finds the same faults. */
#include "config/precision.h"
#include "config/sizes.h"
#include "strategy/strategy.h"
#include <stdio.h>
#include <stdlib.h>

static loom_status check_module(const loom_parallel *parallel) {
    if (!parallel->module->activation_shape)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "strategy.pipeline_model_parallel_size: found %lld, but this module has no activation_shape and cannot be "
            "cut into stages; expected 1",
            (long long)parallel->stages);
    if (!parallel->module->config)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "strategy.pipeline_model_parallel_size: found %lld, but this module has no model configuration (config) "
            "that tells its layers; expected 1",
            (long long)parallel->stages);
    return LOOM_OK;
}

static loom_status find_chunks(loom_parallel *parallel, loom_stage **out) {
    LOOM_TRY(check_module(parallel));
    loom_stage_split split = loom_stage_split_of(&parallel->fabric->config, loom_parallel_model_config(parallel));
    int64_t stages = parallel->stages, chunks = 0;
    LOOM_TRY(loom_stage_split_chunks(&split, &chunks));
    loom_stage *all = calloc((size_t)(chunks * stages), sizeof *all);
    if (!all)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld chunks of the model", (long long)(chunks * stages));
    loom_status status = loom_stage_split_make(&split, all);
    if (status) {
        free(all);
        return status;
    }
    /* Those of this stage move to the front; none is overwritten before it is read. */
    for (int64_t c = 0; c < chunks; c++)
        all[c] = all[c * stages + parallel->stage];
    parallel->chunk_count = chunks;
    *out = all;
    return LOOM_OK;
}

loom_status loom__parallel_cut(loom_parallel *parallel, loom_stage **chunks) {
    const loom_fabric *fabric = parallel->fabric;
    loom_comm *group = fabric->groups[LOOM_GROUP_PP];
    *chunks = NULL;
    parallel->stage = loom_comm_rank(group);
    parallel->stages = loom_comm_size(group);
    parallel->chunk_count = 1;
    parallel->schedule = loom__strategy_schedule(&fabric->config);
    if (parallel->stages > 1)
        LOOM_TRY(find_chunks(parallel, chunks));
    if (parallel->chunk_count > 1 && parallel->schedule == LOOM_SCHEDULE_ZERO_BUBBLE) {
        free(*chunks);
        *chunks = NULL;
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: schedule=zero-bubble with %lld chunks of the model on a stage; 1f1b works, or one "
            "chunk",
            (long long)parallel->chunk_count);
    }
    const loom_model_config *model = loom_parallel_model_config(parallel);
    loom__pipeline_options options = {
        .chunks = parallel->chunk_count,
        .activations = fabric->precision_plugin->params_dtype,
        .wire = loom__dtype_called(fabric->pipeline_dtype, LOOM_F32),
        .variable_shapes = model && model->parallel.variable_seq_lengths,
    };
    loom_status status = loom__pipeline_create(fabric->rank, group, &options, &parallel->pipeline);
    if (status) {
        free(*chunks);
        *chunks = NULL;
    }
    return status;
}

loom_status loom_parallel_state_key(const loom_parallel *parallel, int64_t chunk, char *key, size_t bytes) {
    if (chunk < 0 || chunk >= parallel->chunk_count)
        return loom_fail(LOOM_ERR_ARGUMENT, "chunk of this stage: found %lld, expected 0 to %lld", (long long)chunk,
            (long long)parallel->chunk_count - 1);
    int length = parallel->chunk_count > 1 ? snprintf(key, bytes, "model_%lld", (long long)chunk)
                                           : snprintf(key, bytes, "model");
    return length >= 0 && (size_t)length < bytes
               ? LOOM_OK
               : loom_fail(LOOM_ERR_ARGUMENT, "state key of chunk %lld: %d bytes do not fit %zu", (long long)chunk,
                     length + 1, bytes);
}
