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
        .dtype = dtype};
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

static loom_status lay_out(loom__ddp *ddp, loom_parameter *const *parameters, int64_t count) {
    const loom__ddp_options *options = &ddp->options;
    loom__ddp_view *view = &ddp->view;
    const loom__ddp_plan_options wanted = {
        .grad_reduce_in_fp32 = options->grad_reduce_in_fp32,
        .overlap_grad_reduce = options->overlap_grad_reduce,
        .disable_bucketing = options->disable_bucketing,
        .use_distributed_optimizer = view->sharded,
        .pad_buckets_for_high_nccl_busbw = options->pad_buckets_for_high_nccl_busbw,
        .bucket_size = options->bucket_size ? options->bucket_size : -1,
        .first_bucket_size = options->first_bucket_size,
        .data_parallel = options->data_parallel_size ? options->data_parallel_size : loom_comm_size(view->dp),
        .dense_shards = view->shards,
        .alignment = LOOM__DDP_ALIGNMENT,
    };
    loom__ddp_parameter *list = calloc((size_t)count + 1, sizeof *list);
    if (!list)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a map of %lld parameters", (long long)count);
    loom_status status = describe_all(parameters, count, view->dtype, list);
    if (!status)
        status = loom__ddp_plan_make(list, count, &wanted, &ddp->plan);
    free(list);
    LOOM_TRY(status);
    const loom__ddp_plan_buffer *buffer = &ddp->plan.buffers[0];
    view->places = buffer->places;
    view->buckets = buffer->buckets;
    view->bucket_count = buffer->bucket_count;
    view->elements = buffer->elements;
    view->state_elements = view->elements / view->shards;
    for (int64_t place = 0; place < count; place++) {
        const loom__ddp_place *at = &view->places[place];
        ddp->parameters[place] = parameters[count - 1 - place];
        ddp->by_address[place] = (loom__ddp_lookup){ddp->parameters[place], place};
        ddp->parts[place] = loom__ddp_part_of(at, &view->buckets[at->bucket], view->shards, view->shard);
    }
    qsort(ddp->by_address, (size_t)count, sizeof *ddp->by_address, compare_address);
    for (int64_t i = 1; i < count; i++)
        if (ddp->by_address[i].parameter == ddp->by_address[i - 1].parameter)
            return loom_fail(
                LOOM_ERR_ARGUMENT, "gradient buffer: %s is listed twice", ddp->by_address[i].parameter->name);
    view->place_count = count;
    return LOOM_OK;
}

static loom_status share_out(loom__ddp *ddp) {
    loom__ddp_view *view = &ddp->view;
    int dp = loom_comm_size(view->dp), size;
    view->shards = 1;
    view->instance = ddp->options.instance ? ddp->options.instance : view->dp;
    view->sharded = ddp->options.use_distributed_optimizer;
    if (!view->sharded)
        return LOOM_OK;
    size = loom_comm_size(view->instance);
    if (dp % size || loom_comm_rank(view->dp) % size != loom_comm_rank(view->instance))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "distributed optimizer: place %d of %d of an instance is place %d of %d of the data-parallel group; "
            "expected consecutive places, and a size that divides the group's",
            loom_comm_rank(view->instance), size, loom_comm_rank(view->dp), dp);
    view->shards = size;
    view->shard = loom_comm_rank(view->instance);
    return LOOM_OK;
}

static loom_status allocate(loom__ddp *ddp, int64_t count) {
    size_t entries = (size_t)count + 1; /* never 0 bytes */
    ddp->parts = calloc(entries, sizeof *ddp->parts);
    ddp->parameters = calloc(entries, sizeof *ddp->parameters);
    ddp->by_address = calloc(entries, sizeof *ddp->by_address);
    ddp->ready = calloc(entries, sizeof *ddp->ready);
    ddp->unused = calloc(entries, sizeof *ddp->unused);
    ddp->states = calloc(entries, sizeof *ddp->states);
    ddp->part_counts = calloc((size_t)ddp->view.shards, sizeof *ddp->part_counts);
    if (!ddp->parts || !ddp->parameters || !ddp->by_address || !ddp->ready || !ddp->unused || !ddp->states ||
        !ddp->part_counts)
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
    if (ddp->options.grad_reduce_in_fp32 || loom_comm_size(view->dp) == 1)
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
    ddp->view.dp = dp;
    loom_status status = choose_dtype(ddp);
    if (!status)
        status = share_out(ddp);
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
    loom__buffer_destroy(ddp->view.grad);
    loom__buffer_destroy(ddp->view.data);
    loom__buffer_destroy(ddp->view.data16);
    loom__buffer_destroy(ddp->view.master);
    loom__buffer_destroy(ddp->reduced16);
    loom__ddp_plan_free(&ddp->plan);
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
