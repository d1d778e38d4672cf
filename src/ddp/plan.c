/* Parameters are sorted into buffers in the order in which they stand; then each buffer is laid out by itself.
 * Invariant: a parameter that is not frozen lies in exactly one buffer. */
#include "ddp/plan.h"
#include <stdlib.h>

static loom__ddp_plan_buffer *find_buffer(loom__ddp_plan *plan, loom_dtype param, loom_dtype grad, bool expert) {
    for (int i = 0; i < plan->buffer_count; i++) {
        loom__ddp_plan_buffer *buffer = &plan->buffers[i];
        if (buffer->param_dtype == param && buffer->grad_dtype == grad && buffer->expert == expert)
            return buffer;
    }
    if (plan->buffer_count == LOOM__DDP_BUFFERS)
        return NULL;
    plan->buffers[plan->buffer_count] =
        (loom__ddp_plan_buffer){.param_dtype = param, .grad_dtype = grad, .expert = expert};
    return &plan->buffers[plan->buffer_count++];
}

static loom_status add(loom__ddp_plan_buffer *buffer, int64_t index, int64_t count) {
    if (!buffer->indices)
        buffer->indices = malloc((size_t)count * sizeof *buffer->indices);
    if (!buffer->indices)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a map of %lld parameters", (long long)count);
    buffer->indices[buffer->count++] = index;
    return LOOM_OK;
}

static loom_status sort_in(const loom__ddp_parameter *parameters, int64_t count, bool expert,
    const loom__ddp_plan_options *options, loom__ddp_plan *plan) {
    for (int64_t i = 0; i < count; i++) {
        const loom__ddp_parameter *parameter = &parameters[i];
        if (parameter->frozen || parameter->expert != expert)
            continue;
        loom_dtype grad = options->grad_reduce_in_fp32 ? LOOM_F32 : parameter->dtype;
        loom__ddp_plan_buffer *buffer = find_buffer(plan, parameter->dtype, grad, expert);
        if (!buffer)
            return loom_fail(
                LOOM_ERR_ARGUMENT, "gradient buffer: found more than %d kinds of parameters", LOOM__DDP_BUFFERS);
        LOOM_TRY(add(buffer, i, count));
    }
    return LOOM_OK;
}

static loom_status lay_out(const loom__ddp_parameter *parameters, const loom__ddp_plan_options *options,
    int64_t bucket_size, loom__ddp_plan_buffer *buffer) {
    loom__ddp_map_options map = {
        .bucket_size = bucket_size,
        .alignment = options->alignment,
        .pad_for_high_busbw = options->pad_buckets_for_high_nccl_busbw,
        .first_bucket_size = options->first_bucket_size,
    };
    if (options->use_distributed_optimizer)
        map.shards = buffer->expert ? options->expert_shards : options->dense_shards;
    size_t entries = (size_t)buffer->count;
    loom__ddp_entry *list = malloc(entries * sizeof *list);
    buffer->places = malloc(entries * sizeof *buffer->places);
    buffer->buckets = malloc(entries * sizeof *buffer->buckets);
    loom_status status =
        list && buffer->places && buffer->buckets
            ? LOOM_OK
            : loom_fail(LOOM_ERR_MEMORY, "out of memory for a map of %lld parameters", (long long)buffer->count);
    for (int64_t i = 0; !status && i < buffer->count; i++)
        list[i] = parameters[buffer->indices[i]].entry;
    if (!status)
        status = loom__ddp_map(
            list, buffer->count, &map, buffer->places, buffer->buckets, &buffer->bucket_count, &buffer->elements);
    free(list);
    return status;
}

loom_status loom__ddp_plan_make(
    const loom__ddp_parameter *parameters, int64_t count, const loom__ddp_plan_options *options, loom__ddp_plan *out) {
    loom__ddp_plan plan = {.bucket_size = options->bucket_size};
    if (plan.bucket_size < 0)
        plan.bucket_size = loom__ddp_default_bucket_size(options->data_parallel);
    if (!options->overlap_grad_reduce || options->disable_bucketing)
        plan.bucket_size = -1;
    loom_status status = sort_in(parameters, count, false, options, &plan);
    if (!status)
        status = sort_in(parameters, count, true, options, &plan);
    /* A step's seed takes the mean over all tokens of the step for dense and expert parameters alike. In the form in
     * which the collective takes part of it, it does so for both by the dense group's size: the smaller group of
     * experts sums up the same tokens, since each of its members has had those of several ranks. */
    for (int i = 0; i < plan.buffer_count; i++)
        plan.buffers[i].scale = options->average_in_collective ? 1.0 / (double)options->dense_group : 1.0;
    for (int i = 0; i < plan.buffer_count && !status; i++)
        status = lay_out(parameters, options, plan.bucket_size, &plan.buffers[i]);
    if (status) {
        loom__ddp_plan_free(&plan);
        return status;
    }
    *out = plan;
    return LOOM_OK;
}

void loom__ddp_plan_free(loom__ddp_plan *plan) {
    for (int i = 0; i < plan->buffer_count; i++) {
        free(plan->buffers[i].indices);
        free(plan->buffers[i].places);
        free(plan->buffers[i].buckets);
    }
    *plan = (loom__ddp_plan){0};
}
