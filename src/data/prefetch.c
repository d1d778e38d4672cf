/* Reading ahead. A thread fills a ring of batches in the order of the loader below it; whoever takes one swaps its own
 * batch for the full one, so nothing is copied and the ring never grows. With each batch stands what the loader below
 * said right after it: consumed samples, what remains, the next step's sizes. So the one who takes sees the loader as
 * it would be without the thread. Between start and stop only the thread calls the loader below, but for `locate`. */
#include <megaloom/data.h>

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* What a loader says of itself between two microbatches. */
typedef struct place {
    int64_t consumed, remaining;
    loom_data_step step;
} place;

typedef struct slot {
    loom_batch *batch;
    place after;
    loom_status status;
    char *message; /* of a status that is none of success; may be NULL */
} slot;

typedef struct ahead {
    loom_data_loader inner;
    loom_data_prefetch_config config;
    pthread_t thread;
    bool running; /* the thread is there and has not been joined */
    bool back;    /* it will not touch anything any more */
    pthread_mutex_t mutex;
    pthread_cond_t filled, taken;
    slot *slots; /* [depth] */
    int64_t first, count;
    bool stop;
    place now; /* as the taker sees it */
} ahead;

static place place_of(const loom_data_loader *loader) {
    place at = {.consumed = loader->consumed_samples ? loader->consumed_samples(loader->context) : 0,
        .remaining = loader->remaining ? loader->remaining(loader->context) : -1,
        .step = {.microbatches = loader->microbatches, .sequence_length = loader->sequence_length}};
    /* A step that has no sizes is refused when it is read. */
    if (loader->step && loader->step(loader->context, &at.step) != LOOM_OK)
        loom_error_clear();
    return at;
}

/* ---- The thread ---- */

static void *read_on(void *context) {
    ahead *own = context;
    bool ended = false;
    pthread_mutex_lock(&own->mutex);
    while (!own->stop && !ended) {
        if (own->count == own->config.depth) {
            pthread_cond_wait(&own->taken, &own->mutex);
            continue;
        }
        slot *into = &own->slots[(own->first + own->count) % own->config.depth];
        pthread_mutex_unlock(&own->mutex);
        into->batch->s = own->inner.sequence_length; /* a step of shorter samples may have had it */
        into->status = own->inner.next(own->inner.context, into->batch);
        ended = into->status != LOOM_OK;
        into->message = ended ? strdup(loom_error_message()) : NULL;
        into->after = place_of(&own->inner);
        pthread_mutex_lock(&own->mutex);
        own->count++;
        pthread_cond_signal(&own->filled);
    }
    own->back = true;
    pthread_cond_signal(&own->filled);
    pthread_mutex_unlock(&own->mutex);
    return NULL;
}

static struct timespec deadline(double seconds) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += (time_t)seconds;
    at.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    if (at.tv_nsec >= 1000000000L) {
        at.tv_sec++;
        at.tv_nsec -= 1000000000L;
    }
    return at;
}

static loom_status too_slow(const ahead *own, const char *what) {
    char rank[48] = "", where[256] = "";
    if (own->config.rank >= 0)
        snprintf(rank, sizeof rank, "rank %lld: ", (long long)own->config.rank);
    if (own->inner.locate)
        own->inner.locate(own->inner.context, where, sizeof where);
    return loom_fail(LOOM_ERR_TIMEOUT, "%sthe reader of the data has not %s within %g s; it is reading %s", rank, what,
        own->config.timeout, *where ? where : "from a source that does not say where");
}

static loom_status start(ahead *own) {
    own->first = own->count = 0;
    own->stop = own->back = false;
    own->now = place_of(&own->inner);
    int error = pthread_create(&own->thread, NULL, read_on, own);
    own->running = error == 0;
    return error ? loom_fail(LOOM_ERR_MEMORY, "the reader's thread cannot be started: %s", strerror(error)) : LOOM_OK;
}

/* With the mutex held: until there is a microbatch, or until the thread is back. */
static loom_status wait_for(ahead *own, bool back) {
    struct timespec until = own->config.timeout > 0 ? deadline(own->config.timeout) : (struct timespec){0};
    int error = 0;
    while (back ? !own->back : own->count == 0) {
        if (error == ETIMEDOUT)
            return too_slow(own, back ? "stopped" : "given a microbatch");
        error = own->config.timeout > 0 ? pthread_cond_timedwait(&own->filled, &own->mutex, &until)
                                        : pthread_cond_wait(&own->filled, &own->mutex);
    }
    return LOOM_OK;
}

/* After it the ring is empty and the loader below is the caller's; not so after LOOM_ERR_TIMEOUT. */
static loom_status stop(ahead *own) {
    if (!own->running)
        return LOOM_OK;
    pthread_mutex_lock(&own->mutex);
    own->stop = true;
    pthread_cond_signal(&own->taken);
    loom_status status = wait_for(own, true);
    pthread_mutex_unlock(&own->mutex);
    LOOM_TRY(status);
    pthread_join(own->thread, NULL);
    own->running = false;
    for (; own->count > 0; own->count--, own->first = (own->first + 1) % own->config.depth)
        free(own->slots[own->first].message);
    return LOOM_OK;
}

/* ---- The loader ---- */

static loom_status take(ahead *own, loom_batch *batch) {
    slot *full = &own->slots[own->first];
    /* An end, like an error, stays where it is until the loader is sent elsewhere. */
    if (full->status != LOOM_OK)
        return loom_fail(full->status, "%s", full->message ? full->message : "the reader of the data failed");
    const loom_batch *read = full->batch;
    int64_t s = own->inner.sequence_length;
    if (batch->rows != read->rows || batch->s != s || !batch->document_start != !read->document_start)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "a batch of %lld rows of %lld tokens, expected %lld rows of %lld tokens with the loader's document_start",
            (long long)batch->rows, (long long)batch->s, (long long)read->rows, (long long)s);
    loom_batch kept = *batch;
    *batch = *full->batch;
    *full->batch = kept;
    own->now = full->after;
    own->first = (own->first + 1) % own->config.depth;
    own->count--;
    pthread_cond_signal(&own->taken);
    return LOOM_OK;
}

static loom_status next(void *context, loom_batch *batch) {
    ahead *own = context;
    pthread_mutex_lock(&own->mutex);
    loom_status status = own->running ? wait_for(own, false)
                                      : loom_fail(LOOM_ERR_STATE, "the reader of the data has not been started again");
    if (status == LOOM_OK)
        status = take(own, batch);
    pthread_mutex_unlock(&own->mutex);
    return status;
}

static int64_t consumed_samples(void *context) {
    return ((const ahead *)context)->now.consumed;
}

static int64_t remaining(void *context) {
    return ((const ahead *)context)->now.remaining;
}

static loom_status step(void *context, loom_data_step *sizes) {
    *sizes = ((const ahead *)context)->now.step;
    return LOOM_OK;
}

static void locate(void *context, char *text, size_t bytes) {
    const ahead *own = context;
    own->inner.locate(own->inner.context, text, bytes);
}

static loom_status seek(void *context, int64_t consumed) {
    ahead *own = context;
    LOOM_TRY(stop(own));
    loom_status status = own->inner.seek(own->inner.context, consumed);
    /* Where it cannot go it stays where the reader was, which is not where the taker was. */
    return status == LOOM_OK ? start(own) : status;
}

static void free_ring(ahead *own) {
    for (int64_t i = 0; own->slots && i < own->config.depth; i++)
        loom_batch_destroy(own->slots[i].batch);
    free(own->slots);
    pthread_cond_destroy(&own->filled);
    pthread_cond_destroy(&own->taken);
    pthread_mutex_destroy(&own->mutex);
    free(own);
}

static void destroy(void *context) {
    ahead *own = context;
    if (stop(own) != LOOM_OK) {
        /* A reader that does not come back may still write: what it uses stays. */
        pthread_detach(own->thread);
        return;
    }
    loom_data_loader_destroy(&own->inner);
    free_ring(own);
}

static loom_status make_ring(ahead *own) {
    own->slots = calloc((size_t)own->config.depth, sizeof *own->slots);
    if (!own->slots)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for %lld batches", (long long)own->config.depth);
    for (int64_t i = 0; i < own->config.depth; i++)
        LOOM_TRY(loom_batch_create(own->inner.micro_batch_size, own->inner.sequence_length,
            own->inner.document_boundaries, &own->slots[i].batch));
    return LOOM_OK;
}

loom_status loom_data_loader_prefetch(
    const loom_data_loader *inner, const loom_data_prefetch_config *config, loom_data_loader *loader) {
    if (config->depth < 1 || config->depth > INT32_MAX || !(config->timeout >= 0))
        return loom_fail(LOOM_ERR_CONFIG,
            "reading %lld microbatches ahead with a timeout of %g s, expected 1 to %d, and 0 or more",
            (long long)config->depth, config->timeout, INT32_MAX);
    ahead *own = calloc(1, sizeof *own);
    if (!own)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for a reader");
    own->inner = *inner;
    own->config = *config;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&own->mutex, NULL);
    pthread_cond_init(&own->filled, &attributes);
    pthread_cond_init(&own->taken, NULL);
    pthread_condattr_destroy(&attributes);
    loom_status status = make_ring(own);
    if (status == LOOM_OK)
        status = start(own);
    if (status != LOOM_OK) {
        free_ring(own);
        return status;
    }
    *loader = *inner;
    loader->context = own;
    loader->next = next;
    loader->consumed_samples = consumed_samples;
    loader->remaining = remaining;
    loader->step = inner->step ? step : NULL;
    loader->seek = inner->seek ? seek : NULL;
    loader->locate = inner->locate ? locate : NULL;
    loader->destroy = destroy;
    return LOOM_OK;
}
