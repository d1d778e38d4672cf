/* Making the gradient buffer: which parameters lie where, and that their values and grad point there. Invariant:
 * parameters keep their own memory until nothing can fail any more. */
#include "ddp/buffer.h"
#include "ddp/state.h"
#include "tensor/dtype.h"
#include <stdlib.h>
#include <string.h>

loom__ddp_options loom__ddp_options_default(void) {
    return (loom__ddp_options){.overlap_grad_reduce = true};
}

static int compare_address(const void *a, const void *b) {
    uintptr_t x = (uintptr_t)((const loom__ddp_lookup *)a)->parameter,
              y = (uintptr_t)((const loom__ddp_lookup *)b)->parameter;
    return (x > y) - (x < y);
}

int64_t loom__ddp_find_place(const loom__ddp *ddp, const loom_parameter *parameter) {
    loom__ddp_lookup key = {parameter, 0};
    const loom__ddp_lookup *found =
        bsearch(&key, ddp->by_address, (size_t)ddp->view.place_count, sizeof key, compare_address);
    return found ? found->place : -1;
}

static loom_status describe(const loom_parameter *parameter, loom_dtype dtype, loom__ddp_parameter *out) {
    int64_t count = 1;
    for (int i = 0; i < parameter->dims; i++)
        if (parameter->shape[i] < 0 || __builtin_mul_overflow(count, parameter->shape[i], &count))
            return loom_fail(LOOM_ERR_ARGUMENT, "gradient buffer: axis %d of %s has %lld elements, which cannot be", i,
                parameter->name, (long long)parameter->shape[i]);
    if (!loom_parameter_values(parameter))
        return loom_fail(LOOM_ERR_ARGUMENT, "gradient buffer: %s has no data yet (shapes only)", parameter->name);
    if (parameter->dtype != LOOM_F32 && parameter->dtype != dtype)
        return loom_fail(LOOM_ERR_ARGUMENT, "gradient buffer: %s is kept in %s, expected F32 or %s", parameter->name,
            loom_dtype_name(parameter->dtype), loom_dtype_name(dtype));
    *out = (loom__ddp_parameter){
        .entry = {.count = count, .chunk = parameter->chunk, .shared_embedding = parameter->shared_ends},
        .dtype = dtype,
        .expert = parameter->expert_parallel};
    return LOOM_OK;
}

static loom_status describe_all(
    loom_parameter *const *parameters, int64_t count, loom_dtype dtype, loom__ddp_parameter *out) {
    for (int64_t i = 0; i < count; i++) {
        LOOM_TRY(describe(parameters[i], dtype, &out[i]));
        if (i > 0 && parameters[i]->chunk < parameters[i - 1]->chunk)
            return loom_fail(LOOM_ERR_ARGUMENT,
                "gradient buffer: %s of chunk %lld stands behind %s of chunk %lld; expected the chunks in order",
                parameters[i]->name, (long long)parameters[i]->chunk, parameters[i - 1]->name,
                (long long)parameters[i - 1]->chunk);
    }
    return LOOM_OK;
}

/* Puts a buffer of the plan behind those that are there. */
static void append(loom__ddp *ddp, const loom__ddp_plan_buffer *buffer, loom_parameter *const *parameters) {
    loom__ddp_view *view = &ddp->view;
    const loom__ddp_share *share = &view->share[buffer->expert ? LOOM__DDP_EXPERT : LOOM__DDP_DENSE];
    int64_t first_place = view->place_count, first_bucket = view->bucket_count;
    for (int64_t i = 0; i < buffer->bucket_count; i++) {
        loom__ddp_bucket *bucket = &ddp->buckets[first_bucket + i];
        *bucket = buffer->buckets[i];
        bucket->start += view->elements;
        bucket->end += view->elements;
        bucket->first_place += first_place;
        bucket->expert = buffer->expert;
    }
    for (int64_t i = 0; i < buffer->count; i++) {
        const loom__ddp_place *from = &buffer->places[i];
        int64_t place = first_place + i;
        ddp->parts[place] = loom__ddp_part_of(from, &buffer->buckets[from->bucket], share->shards, share->shard);
        ddp->parts[place].start += view->elements;
        ddp->parts[place].state += view->state_elements;
        ddp->places[place] = (loom__ddp_place){
            .start = from->start + view->elements, .count = from->count, .bucket = from->bucket + first_bucket};
        ddp->parameters[place] = parameters[buffer->indices[buffer->count - 1 - i]];
        ddp->by_address[place] = (loom__ddp_lookup){ddp->parameters[place], place};
    }
    ddp->region[buffer->expert ? LOOM__DDP_EXPERT : LOOM__DDP_DENSE] = (loom__ddp_region){.first = first_bucket,
        .end = first_bucket + buffer->bucket_count,
        .next = first_bucket,
        .gathers_left = first_bucket};
    view->place_count += buffer->count;
    view->bucket_count += buffer->bucket_count;
    view->elements += buffer->elements;
    view->state_elements += buffer->elements / share->shards;
    view->has_experts |= buffer->expert;
    ddp->scale[buffer->expert ? LOOM__DDP_EXPERT : LOOM__DDP_DENSE] = (float)buffer->scale;
}

static loom_status lay_out(loom__ddp *ddp, loom_parameter *const *parameters, int64_t count) {
    const loom__ddp_options *options = &ddp->options;
    loom__ddp_view *view = &ddp->view;
    const loom__ddp_share *dense = &view->share[LOOM__DDP_DENSE], *expert = &view->share[LOOM__DDP_EXPERT];
    const loom__ddp_plan_options wanted = {
        .grad_reduce_in_fp32 = options->grad_reduce_in_fp32,
        .overlap_grad_reduce = options->overlap_grad_reduce,
        .disable_bucketing = options->disable_bucketing,
        .use_distributed_optimizer = view->sharded,
        .pad_buckets_for_high_nccl_busbw = options->pad_buckets_for_high_nccl_busbw,
        .average_in_collective = options->average_in_collective,
        .bucket_size = options->bucket_size ? options->bucket_size : -1,
        .first_bucket_size = options->first_bucket_size,
        .data_parallel = options->data_parallel_size ? options->data_parallel_size : loom_comm_size(dense->group),
        .dense_shards = dense->shards,
        .expert_shards = expert->shards,
        .dense_group = loom_comm_size(dense->group),
        .alignment = LOOM__DDP_ALIGNMENT,
    };
    loom__ddp_plan plan = {0};
    view->places = ddp->places;
    view->buckets = ddp->buckets;
    loom__ddp_parameter *list = calloc((size_t)count + 1, sizeof *list);
    if (!list)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a map of %lld parameters", (long long)count);
    loom_status status = describe_all(parameters, count, view->dtype, list);
    for (int64_t i = 0; !status && i < count; i++)
        if (list[i].expert && !expert->group)
            status = loom_fail(LOOM_ERR_ARGUMENT,
                "gradient buffer: %s is expert_parallel, but there is no group to reduce it over", parameters[i]->name);
    if (!status)
        status = loom__ddp_plan_make(list, count, &wanted, &plan);
    free(list);
    LOOM_TRY(status);
    for (int i = 0; i < plan.buffer_count; i++)
        append(ddp, &plan.buffers[i], parameters);
    loom__ddp_plan_free(&plan);
    ddp->chunks = count > 0 ? parameters[count - 1]->chunk + 1 : 0;
    qsort(ddp->by_address, (size_t)count, sizeof *ddp->by_address, compare_address);
    for (int64_t i = 1; i < count; i++)
        if (ddp->by_address[i].parameter == ddp->by_address[i - 1].parameter)
            return loom_fail(
                LOOM_ERR_ARGUMENT, "gradient buffer: %s is listed twice", ddp->by_address[i].parameter->name);
    return LOOM_OK;
}

static loom_status share_out(
    bool sharded, const char *what, loom_comm *group, loom_comm *instance, loom__ddp_share *share) {
    *share = (loom__ddp_share){.group = group, .instance = instance ? instance : group, .shards = 1};
    if (!sharded || !group)
        return LOOM_OK;
    int all = loom_comm_size(group), size = loom_comm_size(share->instance);
    if (all % size || loom_comm_rank(group) % size != loom_comm_rank(share->instance))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "distributed optimizer: place %d of %d of an instance is place %d of %d of the %s group; "
            "expected consecutive places, and a size that divides the group's",
            loom_comm_rank(share->instance), size, loom_comm_rank(group), all, what);
    share->shards = size;
    share->shard = loom_comm_rank(share->instance);
    return LOOM_OK;
}

static loom_status share_out_all(loom__ddp *ddp, loom_comm *dp) {
    const loom__ddp_options *options = &ddp->options;
    loom__ddp_view *view = &ddp->view;
    view->sharded = options->use_distributed_optimizer;
    LOOM_TRY(share_out(view->sharded, "data-parallel", dp, options->instance, &view->share[LOOM__DDP_DENSE]));
    return share_out(view->sharded, "expert-data-parallel", options->expert, options->expert_instance,
        &view->share[LOOM__DDP_EXPERT]);
}

static loom_status allocate(loom__ddp *ddp, int64_t count) {
    size_t entries = (size_t)count + 1; /* never 0 bytes */
    const loom__ddp_share *share = ddp->view.share;
    int64_t dense = share[LOOM__DDP_DENSE].shards, expert = share[LOOM__DDP_EXPERT].shards;
    ddp->places = calloc(entries, sizeof *ddp->places);
    ddp->buckets = calloc(entries, sizeof *ddp->buckets);
    ddp->parts = calloc(entries, sizeof *ddp->parts);
    ddp->parameters = calloc(entries, sizeof *ddp->parameters);
    ddp->by_address = calloc(entries, sizeof *ddp->by_address);
    ddp->ready = calloc(entries, sizeof *ddp->ready);
    ddp->unused = calloc(entries, sizeof *ddp->unused);
    ddp->states = calloc(entries, sizeof *ddp->states);
    ddp->part_counts = calloc((size_t)(dense > expert ? dense : expert), sizeof *ddp->part_counts);
    if (!ddp->places || !ddp->buckets || !ddp->parts || !ddp->parameters || !ddp->by_address || !ddp->ready ||
        !ddp->unused || !ddp->states || !ddp->part_counts)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a map of %lld parameters", (long long)count);
    return LOOM_OK;
}

static loom_status choose_dtype(loom__ddp *ddp) {
    loom__ddp_view *view = &ddp->view;
    const loom_kernels *kernels = loom_rank_kernels(ddp->rank);
    view->dtype = ddp->options.param_dtype;
    if (view->dtype == LOOM_F32)
        return LOOM_OK;
    ddp->narrow = view->dtype == LOOM_BF16 ? kernels->bf16 : view->dtype == LOOM_F16 ? kernels->f16 : NULL;
    return ddp->narrow ? LOOM_OK
                       : loom_fail(LOOM_ERR_UNSUPPORTED,
                             "not supported yet: parameters in %s by the kernels '%s'; what works: F32",
                             loom_dtype_name(view->dtype), kernels->name);
}

static loom_status make_buffers(loom__ddp *ddp) {
    loom__ddp_view *view = &ddp->view;
    void *made = NULL;
    LOOM_TRY(loom__buffer_create(ddp->rank, LOOM_F32, view->elements, "the gradient buffer", &made));
    view->grad = made;
    LOOM_TRY(loom__buffer_create(ddp->rank, view->dtype, view->elements, "the parameter buffer", &made));
    if (view->dtype == LOOM_F32) {
        view->data = made;
        return LOOM_OK;
    }
    view->data16 = made;
    LOOM_TRY(loom__buffer_create(ddp->rank, LOOM_F32, view->state_elements, "the fp32 masters", &made));
    view->master = made;
    const loom_comm *dp = view->share[LOOM__DDP_DENSE].group, *experts = view->share[LOOM__DDP_EXPERT].group;
    bool alone = loom_comm_size(dp) == 1 && (!experts || loom_comm_size(experts) == 1);
    if (ddp->options.grad_reduce_in_fp32 || alone)
        return LOOM_OK;
    LOOM_TRY(loom__buffer_create(ddp->rank, view->dtype, view->elements, "the gradients that are reduced", &made));
    ddp->reduced16 = made;
    return LOOM_OK;
}

static void move_in_narrow(loom__ddp *ddp, int64_t place) {
    loom__ddp_view *view = &ddp->view;
    loom_team *team = loom_rank_team(ddp->rank);
    loom_parameter *parameter = ddp->parameters[place];
    const loom__ddp_place *at = &view->places[place];
    const loom__ddp_part *part = &ddp->parts[place];
    int64_t first = part->start - at->start;
    float *master = view->master + part->state;
    if (parameter->dtype == LOOM_F32) {
        memcpy(master, parameter->data + first, (size_t)part->count * sizeof *master);
        loom__parameter_narrow(parameter, view->dtype, view->data16 + at->start);
        return;
    }
    ddp->narrow->widen(team, part->count, parameter->data16 + first, master);
    memcpy(view->data16 + at->start, parameter->data16, (size_t)at->count * sizeof *view->data16);
    parameter->data16 = view->data16 + at->start;
    free(parameter->memory);
    parameter->memory = NULL;
}

/* Until here no parameter points into the buffers. */
static void move_in(loom__ddp *ddp) {
    loom__ddp_view *view = &ddp->view;
    for (int64_t place = 0; place < view->place_count; place++) {
        loom_parameter *parameter = ddp->parameters[place];
        parameter->grad = view->grad + view->places[place].start;
        if (view->dtype != LOOM_F32) {
            move_in_narrow(ddp, place);
            continue;
        }
        float *data = view->data + view->places[place].start;
        memcpy(data, parameter->data, (size_t)view->places[place].count * sizeof *data);
        parameter->data = data;
        free(parameter->memory);
        parameter->memory = NULL;
    }
}

loom_status loom__ddp_create(loom_rank *rank, const loom__ddp_options *options, loom_parameter *const *parameters,
    int64_t count, loom_comm *dp, loom__ddp **out) {
    if (count < 0 || options->bucket_size < 0)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "gradient buffer: found %lld parameters and bucket_size %lld, expected numbers from 0", (long long)count,
            (long long)options->bucket_size);
    loom__ddp *ddp = calloc(1, sizeof *ddp);
    if (!ddp)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a gradient buffer");
    ddp->rank = rank;
    ddp->options = *options;
    loom_status status = choose_dtype(ddp);
    if (!status)
        status = share_out_all(ddp, dp);
    if (!status)
        status = allocate(ddp, count);
    if (!status)
        status = lay_out(ddp, parameters, count);
    if (!status)
        status = make_buffers(ddp);
    if (status) {
        ddp->view.place_count = 0;
        loom__ddp_destroy(ddp);
        return status;
    }
    move_in(ddp);
    ddp->view.parameters = ddp->parameters;
    ddp->view.parts = ddp->parts;
    loom__ddp_begin_step(ddp);
    *out = ddp;
    return LOOM_OK;
}

void loom__ddp_destroy(loom__ddp *ddp) {
    if (!ddp)
        return;
    (void)loom__ddp_wait_reductions(ddp);
    loom__ddp_drop_gathers(ddp);
    for (int64_t place = 0; place < ddp->view.place_count; place++) {
        loom_parameter *parameter = ddp->parameters[place];
        parameter->data = parameter->grad = NULL;
        parameter->data16 = NULL;
        parameter->await_data = NULL;
    }
    loom__buffer_destroy(ddp->rank, ddp->view.grad);
    loom__buffer_destroy(ddp->rank, ddp->view.data);
    loom__buffer_destroy(ddp->rank, ddp->view.data16);
    loom__buffer_destroy(ddp->rank, ddp->view.master);
    loom__buffer_destroy(ddp->rank, ddp->reduced16);
    free(ddp->places);
    free(ddp->buckets);
    free(ddp->parts);
    free(ddp->parameters);
    free(ddp->by_address);
    free(ddp->ready);
    free(ddp->unused);
    free(ddp->states);
    free(ddp->part_counts);
    free(ddp);
}

const loom__ddp_view *loom__ddp_view_of(const loom__ddp *ddp) {
    return &ddp->view;
}
