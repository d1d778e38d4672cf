/* Bucketed gradient reduction. A bucket starts when all its parameters and all earlier buckets are ready, so that every
 * rank starts the same collectives in the same order although its parameters may become ready in another one.
 * Invariant: buckets before next_bucket have started, the others have not, and a started bucket's gradients are not
 * touched until finish has waited for it. Nothing here depends on the values of gradients: a NaN found on one rank is
 * remembered, its bucket is reduced all the same, and finish tells all members. */
#include "ddp/ddp.h"
#include "ddp/buffer.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MESSAGE_BYTES = 1024 };

typedef struct lookup {
    const loom_parameter *parameter;
    int64_t place;
} lookup;

typedef struct bucket_state {
    int64_t waiting; /* parameters that are not ready */
    loom_request *request;
} bucket_state;

struct loom__ddp {
    loom_rank *rank;
    loom__ddp_options options;
    loom__ddp_view view;
    loom__ddp_place *places;
    loom__ddp_bucket *buckets;
    loom_parameter **parameters; /* in the order of the places */
    lookup *by_address;          /* sorted */
    bool *ready;                 /* of each place, in this step */
    bucket_state *states;
    int64_t next_bucket;
    bool last;
    loom_status failure; /* the first one of this step; reported by finish */
    char message[MESSAGE_BYTES];
};

loom__ddp_options loom__ddp_options_default(void) {
    return (loom__ddp_options){.overlap_grad_reduce = true};
}

static void remember(loom__ddp *ddp, loom_status status) {
    if (!status || ddp->failure)
        return;
    ddp->failure = status;
    snprintf(ddp->message, sizeof ddp->message, "%s", loom_error_message());
}

static int compare_address(const void *a, const void *b) {
    uintptr_t x = (uintptr_t)((const lookup *)a)->parameter, y = (uintptr_t)((const lookup *)b)->parameter;
    return (x > y) - (x < y);
}

static int64_t find_place(const loom__ddp *ddp, const loom_parameter *parameter) {
    lookup key = {parameter, 0};
    const lookup *found = bsearch(&key, ddp->by_address, (size_t)ddp->view.place_count, sizeof key, compare_address);
    return found ? found->place : -1;
}

static loom_status count_elements(const loom_parameter *parameter, int64_t *count) {
    *count = 1;
    for (int i = 0; i < parameter->dims; i++)
        if (parameter->shape[i] < 0 || __builtin_mul_overflow(*count, parameter->shape[i], count))
            return loom_fail(LOOM_ERR_ARGUMENT, "gradient buffer: axis %d of %s has %lld elements, which cannot be", i,
                parameter->name, (long long)parameter->shape[i]);
    if (!parameter->data)
        return loom_fail(LOOM_ERR_ARGUMENT, "gradient buffer: %s has no data yet (shapes only)", parameter->name);
    return LOOM_OK;
}

static loom_status lay_out(loom__ddp *ddp, loom_parameter *const *parameters, int64_t count) {
    int64_t bucket_size = ddp->options.bucket_size ? ddp->options.bucket_size
                                                   : loom__ddp_default_bucket_size(loom_comm_size(ddp->view.dp));
    if (!ddp->options.overlap_grad_reduce || ddp->options.disable_bucketing)
        bucket_size = 0;
    int64_t *counts = calloc(2 * (size_t)count + 1, sizeof *counts);
    if (!counts)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a map of %lld parameters", (long long)count);
    int64_t *chunks = counts + count;
    loom_status status = LOOM_OK;
    for (int64_t i = 0; i < count && !status; i++) {
        status = count_elements(parameters[i], &counts[i]);
        chunks[i] = parameters[i]->chunk;
        if (!status && i > 0 && chunks[i] < chunks[i - 1])
            status = loom_fail(LOOM_ERR_ARGUMENT,
                "gradient buffer: %s of chunk %lld stands behind %s of chunk %lld; expected the chunks in order",
                parameters[i]->name, (long long)chunks[i], parameters[i - 1]->name, (long long)chunks[i - 1]);
    }
    if (!status)
        status = loom__ddp_map(counts, chunks, count, bucket_size, ddp->places, ddp->buckets, &ddp->view.bucket_count,
            &ddp->view.elements);
    free(counts);
    LOOM_TRY(status);
    for (int64_t place = 0; place < count; place++) {
        ddp->parameters[place] = parameters[count - 1 - place];
        ddp->by_address[place] = (lookup){ddp->parameters[place], place};
    }
    qsort(ddp->by_address, (size_t)count, sizeof *ddp->by_address, compare_address);
    for (int64_t i = 1; i < count; i++)
        if (ddp->by_address[i].parameter == ddp->by_address[i - 1].parameter)
            return loom_fail(
                LOOM_ERR_ARGUMENT, "gradient buffer: %s is listed twice", ddp->by_address[i].parameter->name);
    return LOOM_OK;
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
    size_t entries = (size_t)count + 1; /* never 0 bytes */
    ddp->rank = rank;
    ddp->options = *options;
    ddp->view.dp = dp;
    ddp->places = calloc(entries, sizeof *ddp->places);
    ddp->buckets = calloc(entries, sizeof *ddp->buckets);
    ddp->parameters = calloc(entries, sizeof *ddp->parameters);
    ddp->by_address = calloc(entries, sizeof *ddp->by_address);
    ddp->ready = calloc(entries, sizeof *ddp->ready);
    ddp->states = calloc(entries, sizeof *ddp->states);
    loom_status status = LOOM_OK;
    if (!ddp->places || !ddp->buckets || !ddp->parameters || !ddp->by_address || !ddp->ready || !ddp->states)
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory for a map of %lld parameters", (long long)count);
    if (!status)
        status = lay_out(ddp, parameters, count);
    if (!status)
        status = loom__buffer_create(rank, ddp->view.elements, "the gradient buffer", &ddp->view.grad);
    if (!status)
        status = loom__buffer_create(rank, ddp->view.elements, "the parameter buffer", &ddp->view.data);
    if (status) {
        /* No parameter points into the buffers yet. */
        loom__ddp_destroy(ddp);
        return status;
    }
    for (int64_t place = 0; place < count; place++) {
        loom_parameter *parameter = ddp->parameters[place];
        float *data = ddp->view.data + ddp->places[place].start;
        memcpy(data, parameter->data, (size_t)ddp->places[place].count * sizeof *data);
        parameter->data = data;
        free(parameter->memory);
        parameter->memory = NULL;
        parameter->grad = ddp->view.grad + ddp->places[place].start;
    }
    ddp->view.places = ddp->places;
    ddp->view.parameters = ddp->parameters;
    ddp->view.buckets = ddp->buckets;
    ddp->view.place_count = count;
    loom__ddp_begin_step(ddp);
    *out = ddp;
    return LOOM_OK;
}

/* Waits for every outstanding bucket, also after one has failed. */
static loom_status wait_all(loom__ddp *ddp) {
    loom_status first = LOOM_OK;
    for (int64_t i = 0; i < ddp->next_bucket; i++) {
        loom_status status = loom_wait(ddp->states[i].request);
        ddp->states[i].request = NULL;
        if (status && !first)
            first = status;
    }
    return first;
}

void loom__ddp_destroy(loom__ddp *ddp) {
    if (!ddp)
        return;
    (void)wait_all(ddp);
    for (int64_t place = 0; place < ddp->view.place_count; place++)
        ddp->parameters[place]->data = ddp->parameters[place]->grad = NULL;
    loom__buffer_destroy(ddp->view.grad);
    loom__buffer_destroy(ddp->view.data);
    free(ddp->places);
    free(ddp->buckets);
    free(ddp->parameters);
    free(ddp->by_address);
    free(ddp->ready);
    free(ddp->states);
    free(ddp);
}

void loom__ddp_begin_step(loom__ddp *ddp) {
    /* A step that was given up may have left buckets under way, whose memory is about to be written. */
    (void)wait_all(ddp);
    ddp->next_bucket = 0;
    ddp->last = false;
    ddp->failure = LOOM_OK;
    for (int64_t place = 0; place < ddp->view.place_count; place++) {
        ddp->parameters[place]->grad_written = false;
        ddp->ready[place] = false;
    }
    for (int64_t i = 0; i < ddp->view.bucket_count; i++)
        ddp->states[i].waiting = ddp->buckets[i].places;
}

void loom__ddp_expect_last(loom__ddp *ddp, bool last) {
    ddp->last = last;
}

static loom_status check_finite(const loom__ddp *ddp, int64_t index) {
    const loom__ddp_bucket *bucket = &ddp->buckets[index];
    const loom_kernels *kernels = loom_rank_kernels(ddp->rank);
    loom_team *team = loom_rank_team(ddp->rank);
    if (!kernels->has_nonfinite(team, bucket->end - bucket->start, ddp->view.grad + bucket->start))
        return LOOM_OK;
    for (int64_t place = bucket->first_place; place < bucket->first_place + bucket->places; place++)
        if (kernels->has_nonfinite(team, ddp->places[place].count, ddp->parameters[place]->grad))
            return loom_fail(LOOM_ERR_NUMERIC,
                "the gradient of %s has a NaN or an infinity before its reduction (bucket %lld of %lld, rank %d)",
                ddp->parameters[place]->name, (long long)index, (long long)ddp->view.bucket_count,
                loom_rank_index(ddp->rank));
    return loom_fail(LOOM_ERR_INTERNAL, "bucket %lld has a NaN or an infinity between its parameters (rank %d)",
        (long long)index, loom_rank_index(ddp->rank));
}

static void start_bucket(loom__ddp *ddp, int64_t index) {
    const loom__ddp_bucket *bucket = &ddp->buckets[index];
    for (int64_t place = bucket->first_place; place < bucket->first_place + bucket->places; place++) {
        loom_parameter *parameter = ddp->parameters[place];
        if (!parameter->grad_written)
            memset(parameter->grad, 0, (size_t)ddp->places[place].count * sizeof(float));
        parameter->grad_written = true;
    }
    if (ddp->options.check_for_nan_in_grad)
        remember(ddp, check_finite(ddp, index));
    float *grad = ddp->view.grad + bucket->start;
    if (loom_comm_size(ddp->view.dp) > 1)
        remember(ddp, loom_all_reduce_start(ddp->view.dp, grad, grad, bucket->end - bucket->start, LOOM_F32, LOOM_SUM,
                          &ddp->states[index].request));
}

static void start_ready_buckets(loom__ddp *ddp) {
    while (ddp->next_bucket < ddp->view.bucket_count && ddp->states[ddp->next_bucket].waiting == 0)
        start_bucket(ddp, ddp->next_bucket++);
}

void loom__ddp_parameter_ready(void *context, loom_parameter *parameter) {
    loom__ddp *ddp = context;
    if (!ddp->last)
        return;
    int64_t place = find_place(ddp, parameter);
    if (place < 0)
        return;
    if (ddp->ready[place]) {
        remember(ddp, loom_fail(LOOM_ERR_STATE,
                          "%s became ready twice in the last backward of a step: its first gradient may be reduced "
                          "already (rank %d)",
                          parameter->name, loom_rank_index(ddp->rank)));
        return;
    }
    ddp->ready[place] = true;
    ddp->states[ddp->places[place].bucket].waiting--;
    if (ddp->options.overlap_grad_reduce)
        start_ready_buckets(ddp);
}

void loom__ddp_chunk_complete(loom__ddp *ddp, int64_t chunk) {
    for (int64_t place = 0; place < ddp->view.place_count; place++) {
        if (ddp->parameters[place]->chunk != chunk || ddp->ready[place])
            continue;
        ddp->ready[place] = true;
        ddp->states[ddp->places[place].bucket].waiting--;
    }
    if (ddp->options.overlap_grad_reduce)
        start_ready_buckets(ddp);
}

loom_status loom__ddp_finish(loom__ddp *ddp) {
    int size = loom_comm_size(ddp->view.dp);
    while (ddp->next_bucket < ddp->view.bucket_count)
        start_bucket(ddp, ddp->next_bucket++);
    ddp->last = false;
    remember(ddp, wait_all(ddp));
    /* What was remembered came first; the thread's record may have gone on since. */
    loom_status status = ddp->failure ? loom_fail(ddp->failure, "%s", ddp->message) : LOOM_OK;
    /* A gradient is bad on one rank alone, so all must hear of it; a failed communication ends the others by itself. */
    if (ddp->options.check_for_nan_in_grad && size > 1 && (!status || status == LOOM_ERR_NUMERIC))
        status = loom_agree(ddp->view.dp, status);
    LOOM_TRY(status);
    if (ddp->options.average_in_collective && size > 1)
        loom_rank_kernels(ddp->rank)->scale(
            loom_rank_team(ddp->rank), ddp->view.elements, 1.0f / (float)size, ddp->view.grad, ddp->view.grad);
    return LOOM_OK;
}

const loom__ddp_view *loom__ddp_view_of(const loom__ddp *ddp) {
    return &ddp->view;
}
