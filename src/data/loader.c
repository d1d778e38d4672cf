/* The loader: a position in the consumed stream, from which every microbatch follows. It keeps no random state and no
 * queue; `consumed` is all of it, so a loader that starts at n gives what one that ran to n would have given next.
 *
 * An epoch is what one pass hands out: with drop_last the whole global batches, with padding the samples filled up to
 * whole global batches, else all samples. A pass that starts inside an epoch ends where the epoch ends. */
#include <megaloom/data.h>

#include <stdlib.h>
#include <string.h>

/* ---- Batches ---- */

loom_status loom_batch_create(int64_t rows, int64_t s, bool document_boundaries, loom_batch **batch) {
    int64_t elements;
    if (rows < 1 || s < 1 || __builtin_mul_overflow(rows, s, &elements) || elements > INT64_MAX / 64)
        return loom_fail(LOOM_ERR_ARGUMENT, "a batch of %lld rows of %lld tokens, expected at least 1 of 1",
            (long long)rows, (long long)s);
    size_t n = (size_t)elements;
    loom_batch *made = calloc(1, sizeof *made);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for a batch");
    *made = (loom_batch){.s = s, .rows = rows};
    made->tokens = calloc(n, sizeof *made->tokens);
    made->labels = calloc(n, sizeof *made->labels);
    made->loss_mask = calloc(n, sizeof *made->loss_mask);
    made->position_ids = calloc(n, sizeof *made->position_ids);
    made->document_start = document_boundaries ? calloc(n, sizeof *made->document_start) : NULL;
    made->sample = calloc((size_t)rows, sizeof *made->sample);
    made->index = calloc((size_t)rows, sizeof *made->index);
    if (!made->tokens || !made->labels || !made->loss_mask || !made->position_ids || !made->sample || !made->index ||
        (document_boundaries && !made->document_start)) {
        loom_batch_destroy(made);
        return loom_fail(
            LOOM_ERR_MEMORY, "no memory for a batch of %lld rows of %lld tokens", (long long)rows, (long long)s);
    }
    *batch = made;
    return LOOM_OK;
}

void loom_batch_destroy(loom_batch *batch) {
    if (!batch)
        return;
    free(batch->tokens);
    free(batch->labels);
    free(batch->loss_mask);
    free(batch->position_ids);
    free(batch->document_start);
    free(batch->sample);
    free(batch->index);
    free(batch);
}

/* ---- The loader of a dataset and a sampler ---- */

typedef struct source {
    const loom_dataset *dataset;
    const loom_data_sampler *sampler;
    loom_data_sampler_config pass; /* of the sampler, from where the current pass began */
    bool cycle;
    int64_t round;    /* samples of one microbatch of all ranks */
    int64_t epoch;    /* samples an epoch hands out */
    int64_t consumed; /* in all */
    int64_t batches;  /* of the current pass */
    int64_t batch;    /* next one of the pass */
} source;

/* Begins a pass at `consumed`. */
static loom_status begin_pass(source *from, int64_t consumed) {
    if (consumed < 0)
        return loom_fail(LOOM_ERR_CONFIG, "consumed samples are %lld, expected at least 0", (long long)consumed);
    int64_t position = consumed;
    if (from->cycle)
        position = consumed % from->epoch;
    loom_data_sampler_config pass = from->pass;
    int64_t batches = 0;
    if (position < from->epoch && position < pass.total_samples) {
        pass.consumed_samples = position;
        LOOM_TRY(from->sampler->length(from->sampler->context, &pass, &batches));
        /* Whole steps only: a step must not begin that cannot be finished. */
        int64_t whole = (from->epoch - position) / pass.global_batch_size * (pass.global_batch_size / from->round);
        if (pass.drop_last && batches > whole)
            batches = whole;
    }
    from->pass = pass;
    from->consumed = consumed;
    from->batches = batches;
    from->batch = 0;
    return LOOM_OK;
}

static loom_status fill_row(const source *from, loom_batch *batch, int64_t row) {
    int64_t s = batch->s, at = row * s;
    loom_sample_row target = {.tokens = batch->tokens + at,
        .labels = batch->labels + at,
        .loss_mask = batch->loss_mask + at,
        .position_ids = batch->position_ids + at,
        .document_start = batch->document_start ? batch->document_start + at : NULL};
    int64_t index = batch->index[row];
    LOOM_TRY(from->dataset->get(from->dataset->context, index, &target));
    if (index < 0) /* also where a user's dataset forgets it */
        memset(target.loss_mask, 0, (size_t)s * sizeof *target.loss_mask);
    return LOOM_OK;
}

static loom_status next_batch(void *context, loom_batch *batch) {
    source *from = context;
    if (batch->rows < from->pass.micro_batch_size || batch->s != from->dataset->sequence_length ||
        (from->dataset->document_boundaries && !batch->document_start))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "a batch of %lld rows of %lld tokens%s, expected %lld rows of %lld tokens%s", (long long)batch->rows,
            (long long)batch->s, batch->document_start ? " with document_start" : "",
            (long long)from->pass.micro_batch_size, (long long)from->dataset->sequence_length,
            from->dataset->document_boundaries ? " with document_start" : "");
    if (from->batch == from->batches) {
        if (!from->cycle)
            return loom_fail(LOOM_END, "no more batches after %lld samples", (long long)from->consumed);
        /* A pass ends where its epoch ends, so the next one begins an epoch. */
        int64_t over = from->consumed % from->epoch;
        LOOM_TRY(begin_pass(from, over ? from->consumed + from->epoch - over : from->consumed));
        if (from->batches == 0)
            return loom_fail(LOOM_END, "no more batches after %lld samples", (long long)from->consumed);
    }
    int64_t count = 0;
    LOOM_TRY(from->sampler->batch(from->sampler->context, &from->pass, from->batch, batch->index, &count));
    for (int64_t row = 0; row < count; row++) {
        batch->sample[row] = from->consumed + from->pass.data_parallel_rank * from->pass.micro_batch_size + row;
        LOOM_TRY(fill_row(from, batch, row));
    }
    batch->b = count;
    int64_t left = from->epoch - from->consumed % from->epoch;
    from->consumed += from->round < left ? from->round : left;
    from->batch++;
    return LOOM_OK;
}

static int64_t consumed_samples(void *context) {
    return ((const source *)context)->consumed;
}

static int64_t remaining(void *context) {
    const source *from = context;
    return from->cycle ? -1 : from->batches - from->batch;
}

static loom_status seek(void *context, int64_t consumed) {
    return begin_pass(context, consumed);
}

loom_data_loader_config loom_data_loader_config_default(void) {
    return (loom_data_loader_config){
        .micro_batch_size = 1, .global_batch_size = 1, .data_parallel_size = 1, .drop_last = true};
}

static loom_status epoch_samples(const loom_data_loader_config *config, int64_t total, int64_t *epoch) {
    int64_t global = config->global_batch_size, whole = total / global * global;
    *epoch = config->drop_last                                            ? whole
             : config->pad_samples_to_global_batch_size && whole != total ? whole + global
                                                                          : total;
    if (*epoch < 1)
        return loom_fail(LOOM_ERR_CONFIG, "the dataset has %lld samples, expected at least one global batch of %lld",
            (long long)total, (long long)(config->drop_last ? global : 1));
    return LOOM_OK;
}

loom_status loom_data_loader_create(
    const loom_dataset *dataset, const loom_data_loader_config *config, loom_data_loader *loader) {
    int64_t microbatches = 0, epoch = 0;
    LOOM_TRY(loom_data_microbatches(
        config->global_batch_size, config->micro_batch_size, config->data_parallel_size, &microbatches));
    LOOM_TRY(epoch_samples(config, dataset->length, &epoch));
    source *from = calloc(1, sizeof *from);
    if (!from)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for a loader");
    *from = (source){.dataset = dataset,
        .sampler = config->sampler ? config->sampler : loom_data_sampler_single(),
        .pass = {.total_samples = dataset->length,
            .micro_batch_size = config->micro_batch_size,
            .global_batch_size = config->global_batch_size,
            .data_parallel_rank = config->data_parallel_rank,
            .data_parallel_size = config->data_parallel_size,
            .drop_last = config->drop_last,
            .pad_samples_to_global_batch_size = config->pad_samples_to_global_batch_size},
        .cycle = config->cycle,
        .round = config->micro_batch_size * config->data_parallel_size,
        .epoch = epoch};
    int64_t unused;
    loom_status status = from->sampler->length(from->sampler->context, &from->pass, &unused);
    if (status == LOOM_OK)
        status = begin_pass(from, config->consumed_samples);
    if (status != LOOM_OK) {
        free(from);
        return status;
    }
    *loader = (loom_data_loader){.context = from,
        .micro_batch_size = config->micro_batch_size,
        .sequence_length = dataset->sequence_length,
        .microbatches = microbatches,
        .document_boundaries = dataset->document_boundaries,
        .next = next_batch,
        .consumed_samples = consumed_samples,
        .remaining = remaining,
        .seek = seek,
        .destroy = free};
    return LOOM_OK;
}

void loom_data_loader_destroy(loom_data_loader *loader) {
    if (!loader)
        return;
    if (loader->destroy)
        loader->destroy(loader->context);
    *loader = (loom_data_loader){0};
}
