/* The loader: a position in the consumed stream, from which every microbatch follows. It keeps no random state and no
 * queue; `consumed` is all of it, so a loader that starts at n gives what one that ran to n would have given next.
 *
 * An epoch is what one pass hands out: with drop_last the whole global batches, with padding the samples filled up to
 * whole global batches, else all samples. Within an epoch the sampler is asked for a stretch at a time: to the epoch's
 * end by one that knows microbatches, one step by one that knows global batches. */
#include <megaloom/data.h>

#include <stdatomic.h>
#include <stdio.h>
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
    *made = (loom_batch){.s = s, .rows = rows, .batch_index = -1, .loader_index = -1};
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
    loom_data_sampler_config stretch; /* what the sampler is asked; consumed_samples is where the stretch begins */
    loom_data_step_config sizes;
    bool cycle;
    int64_t seed;
    int64_t round;          /* samples of one microbatch of all ranks */
    int64_t epoch;          /* samples an epoch hands out */
    int64_t end;            /* consumed samples at which all ends; -1 = never */
    int64_t consumed;       /* in all */
    int64_t step_end;       /* consumed samples at which the step in hand ends */
    int64_t stretch_begin;  /* consumed samples at which the stretch begins */
    int64_t batches, batch; /* microbatches of the stretch, and the next of them */
    int64_t *order;         /* of a shuffled sampler, for epoch_ordered */
    int64_t epoch_ordered;
    _Atomic int64_t reading;     /* sample; read by whoever asks what is slow */
    int64_t *share, share_count; /* the stretch's samples, of a sampler of global batches */
    int64_t multiple;            /* of which a step's length is one; 0 = each step has the dataset's */
    int64_t s;                   /* of the stretch */
} source;

static loom_status begin_step(source *from) {
    loom_data_step step;
    LOOM_TRY(loom_data_step_at(&from->sizes, from->consumed, &step));
    from->step_end = from->consumed + step.running_global_batch_size;
    return LOOM_OK;
}

static loom_status make_order(source *from, int64_t epoch) {
    const loom_data_sampler *sampler = from->sampler;
    if (!sampler->order || epoch == from->epoch_ordered)
        return LOOM_OK;
    int64_t *order;
    LOOM_TRY(sampler->order(sampler->context, &from->stretch, &order));
    free(from->order);
    from->stretch.order = from->order = order;
    from->epoch_ordered = epoch;
    return LOOM_OK;
}

/* The length of the stretch's longest sample on any data-parallel rank, rounded up. Each rank finds it alone: the
 * sampler tells what the others read, and the dataset how long that is. */
static loom_status find_length(source *from) {
    const loom_data_sampler *sampler = from->sampler;
    const loom_dataset *dataset = from->dataset;
    loom_data_sampler_config other = from->stretch;
    int64_t longest = 1, count;
    for (int64_t rank = 0; rank < other.data_parallel_size; rank++) {
        other.data_parallel_rank = rank;
        LOOM_TRY(sampler->batch(sampler->context, &other, 0, from->share, &count));
        for (int64_t i = 0; i < count; i++) {
            int64_t positions = from->share[i] < 0 ? 1 : dataset->positions(dataset->context, from->share[i]);
            longest = positions > longest ? positions : longest;
        }
    }
    int64_t over = longest % from->multiple, more = over ? from->multiple - over : 0;
    from->s = more < dataset->sequence_length - longest ? longest + more : dataset->sequence_length;
    return LOOM_OK;
}

/* All of the stretch's microbatches at once. */
static loom_status take_share(source *from, int64_t left) {
    const loom_data_sampler *sampler = from->sampler;
    int64_t step = from->step_end - from->consumed;
    from->stretch.global_batch_size = from->stretch.drop_last && left < step ? left : step;
    if (from->multiple)
        LOOM_TRY(find_length(from));
    LOOM_TRY(sampler->batch(sampler->context, &from->stretch, 0, from->share, &from->share_count));
    from->batches = ((left < step ? left : step) + from->round - 1) / from->round;
    return LOOM_OK;
}

/* Begins a stretch at `consumed`, inside an epoch. To the sampler each epoch is the first one, of another seed: its own
 * count of epochs depends on sizes that a ramp-up changes. */
static loom_status begin_stretch(source *from) {
    const loom_data_sampler *sampler = from->sampler;
    int64_t position = from->consumed % from->epoch, epoch = from->consumed / from->epoch;
    from->stretch_begin = from->consumed;
    from->batch = from->batches = 0;
    from->stretch.consumed_samples = position;
    from->stretch.seed = (int64_t)((uint64_t)from->seed + (uint64_t)epoch);
    LOOM_TRY(make_order(from, epoch));
    if (sampler->global_batches)
        return take_share(from, from->epoch - position);
    LOOM_TRY(sampler->length(sampler->context, &from->stretch, &from->batches));
    int64_t most = (from->epoch - position + from->round - 1) / from->round;
    from->batches = from->batches < most ? from->batches : most;
    return LOOM_OK;
}

/* For the next microbatch, which there is. */
static loom_status begin(source *from) {
    if (from->consumed >= from->step_end)
        LOOM_TRY(begin_step(from));
    return from->batch >= from->batches ? begin_stretch(from) : LOOM_OK;
}

/* The samples of one pass from `consumed` on that make whole steps. */
static loom_status find_end(source *from, int64_t consumed) {
    from->end = from->epoch;
    if (from->cycle || consumed >= from->epoch || !from->stretch.drop_last) {
        from->end = from->cycle ? -1 : from->epoch;
        return LOOM_OK;
    }
    loom_data_step step;
    int64_t at = consumed;
    while (at <= from->sizes.rampup_batch_size[2] && at < from->epoch) {
        LOOM_TRY(loom_data_step_at(&from->sizes, at, &step));
        if (at + step.running_global_batch_size > from->epoch)
            break;
        at += step.running_global_batch_size;
    }
    LOOM_TRY(loom_data_step_at(&from->sizes, at, &step));
    from->end = at + (from->epoch - at) / step.running_global_batch_size * step.running_global_batch_size;
    return LOOM_OK;
}

static loom_status seek(void *context, int64_t consumed) {
    source *from = context;
    if (consumed < 0)
        return loom_fail(LOOM_ERR_CONFIG, "consumed samples are %lld, expected at least 0", (long long)consumed);
    LOOM_TRY(find_end(from, consumed));
    from->consumed = from->step_end = consumed;
    from->batches = from->batch = 0;
    from->share_count = 0;
    return LOOM_OK;
}

static void locate(void *context, char *text, size_t bytes) {
    source *from = context;
    int64_t index = atomic_load_explicit(&from->reading, memory_order_relaxed);
    int written = snprintf(text, bytes, "sample %lld%s", (long long)index, from->dataset->locate ? ", " : "");
    if (from->dataset->locate && written >= 0 && (size_t)written < bytes)
        from->dataset->locate(from->dataset->context, index, text + written, bytes - (size_t)written);
}

/* The dataset fills a row to its own length; what the batch does not have of it is overwritten by the next row, so rows
 * are filled in order. */
static loom_status fill_row(source *from, const loom_batch *batch, int64_t row) {
    int64_t s = from->s, at = row * s, whole = from->dataset->sequence_length;
    loom_sample_row target = {.tokens = batch->tokens + at,
        .labels = batch->labels + at,
        .loss_mask = batch->loss_mask + at,
        .position_ids = batch->position_ids + at,
        .document_start = batch->document_start ? batch->document_start + at : NULL};
    int64_t index = batch->index[row];
    atomic_store_explicit(&from->reading, index, memory_order_relaxed);
    loom_status status = from->dataset->get(from->dataset->context, index, &target);
    if (status != LOOM_OK) {
        char where[256];
        locate(from, where, sizeof where);
        return loom_fail_context(
            status, "data-parallel rank %lld, %s: ", (long long)from->stretch.data_parallel_rank, where);
    }
    if (index < 0) /* also where a user's dataset forgets it */
        memset(target.loss_mask, 0, (size_t)whole * sizeof *target.loss_mask);
    return LOOM_OK;
}

/* The samples of the next microbatch, and their places in the consumed stream. */
static loom_status choose(const source *from, loom_batch *batch, int64_t *count) {
    const loom_data_sampler_config *stretch = &from->stretch;
    int64_t rank = stretch->data_parallel_rank, size = stretch->data_parallel_size, rows = stretch->micro_batch_size;
    if (!from->sampler->global_batches) {
        LOOM_TRY(from->sampler->batch(from->sampler->context, stretch, from->batch, batch->index, count));
        for (int64_t row = 0; row < *count; row++)
            batch->sample[row] = from->consumed + rank * rows + row;
        return LOOM_OK;
    }
    int64_t first = from->batch * rows, left = from->share_count - first;
    *count = left < 0 ? 0 : left < rows ? left : rows;
    for (int64_t row = 0; row < *count; row++) {
        batch->index[row] = from->share[first + row];
        batch->sample[row] = from->stretch_begin + (first + row) * size + rank;
    }
    return LOOM_OK;
}

static bool has_ended(const source *from) {
    return from->end >= 0 && from->consumed >= from->end;
}

static loom_status next_batch(void *context, loom_batch *batch) {
    source *from = context;
    if (batch->rows < from->stretch.micro_batch_size || batch->s != from->dataset->sequence_length ||
        (from->dataset->document_boundaries && !batch->document_start))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "a batch of %lld rows of %lld tokens%s, expected %lld rows of %lld tokens%s", (long long)batch->rows,
            (long long)batch->s, batch->document_start ? " with document_start" : "",
            (long long)from->stretch.micro_batch_size, (long long)from->dataset->sequence_length,
            from->dataset->document_boundaries ? " with document_start" : "");
    if (has_ended(from))
        return loom_fail(LOOM_END, "no more batches after %lld samples", (long long)from->consumed);
    LOOM_TRY(begin(from));
    int64_t count = 0;
    LOOM_TRY(choose(from, batch, &count));
    for (int64_t row = 0; row < count; row++)
        LOOM_TRY(fill_row(from, batch, row));
    batch->b = count;
    batch->s = from->s;
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
    if (from->end < 0)
        return -1;
    return from->consumed < from->end ? (from->end - from->consumed + from->round - 1) / from->round : 0;
}

static loom_status step_sizes(void *context, loom_data_step *step) {
    source *from = context;
    if (from->multiple && !has_ended(from))
        LOOM_TRY(begin(from));
    LOOM_TRY(loom_data_step_at(&from->sizes, from->consumed, step));
    step->sequence_length = from->s;
    return LOOM_OK;
}

static void destroy(void *context) {
    source *from = context;
    free(from->order);
    free(from->share);
    free(from);
}

loom_data_loader_config loom_data_loader_config_default(void) {
    return (loom_data_loader_config){
        .micro_batch_size = 1, .global_batch_size = 1, .data_parallel_size = 1, .drop_last = true};
}

static loom_status epoch_samples(const loom_data_loader_config *config, int64_t global, int64_t total, int64_t *epoch) {
    int64_t whole = total / global * global;
    *epoch = config->drop_last                                            ? whole
             : config->pad_samples_to_global_batch_size && whole != total ? whole + global
                                                                          : total;
    if (*epoch < 1)
        return loom_fail(LOOM_ERR_CONFIG, "the dataset has %lld samples, expected at least one global batch of %lld",
            (long long)total, (long long)(config->drop_last ? global : 1));
    return LOOM_OK;
}

static loom_status check_rampup(const loom_data_loader_config *config, const loom_data_step_config *sizes) {
    if (sizes->rampup_batch_size[2] > 0 && !config->drop_last)
        return loom_fail(LOOM_ERR_CONFIG, "rampup_batch_size is given with drop_last false, expected drop_last");
    return loom_data_step_check(sizes);
}

static loom_status check_dynamic(const loom_dataset *dataset, const loom_data_loader_config *config) {
    const loom_data_sampler *sampler = config->sampler ? config->sampler : loom_data_sampler_single();
    int64_t multiple = config->pad_seq_length_to_mult;
    if (multiple == 0)
        return LOOM_OK;
    if (multiple < 0)
        return loom_fail(LOOM_ERR_CONFIG,
            "pad_seq_length_to_mult is %lld, expected 0 (all steps have the dataset's length) or more",
            (long long)multiple);
    if (!dataset->positions)
        return loom_fail(LOOM_ERR_CONFIG,
            "pad_seq_length_to_mult is %lld with a dataset that does not tell how long its samples are, expected a "
            "fine-tuning dataset, or 0",
            (long long)multiple);
    if (!sampler->global_batches)
        return loom_fail(LOOM_ERR_CONFIG,
            "pad_seq_length_to_mult is %lld with the sampler %s, expected batch or random_batch, or 0: a step's length "
            "is that of its longest sample",
            (long long)multiple, sampler->name);
    if (config->rampup_batch_size[2] > 0)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: pad_seq_length_to_mult %lld with rampup_batch_size, one of them works",
            (long long)multiple);
    return LOOM_OK;
}

/* Asks the sampler once, so that what it refuses is refused now. */
static loom_status check_sampler(const source *from) {
    loom_data_sampler_config first = from->stretch;
    int64_t unused;
    return from->sampler->length(from->sampler->context, &first, &unused);
}

loom_status loom_data_loader_create(
    const loom_dataset *dataset, const loom_data_loader_config *config, loom_data_loader *loader) {
    loom_data_step_config sizes = {config->global_batch_size, config->micro_batch_size, config->data_parallel_size,
        {config->rampup_batch_size[0], config->rampup_batch_size[1], config->rampup_batch_size[2]},
        config->decrease_batch_size_if_needed};
    loom_data_step full;
    int64_t epoch = 0;
    LOOM_TRY(check_rampup(config, &sizes));
    LOOM_TRY(check_dynamic(dataset, config));
    LOOM_TRY(loom_data_step_at(&sizes, INT64_MAX, &full));
    LOOM_TRY(epoch_samples(config, full.running_global_batch_size, dataset->length, &epoch));
    source *from = calloc(1, sizeof *from);
    if (!from)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for a loader");
    *from = (source){.dataset = dataset,
        .sampler = config->sampler ? config->sampler : loom_data_sampler_single(),
        .stretch = {.total_samples = dataset->length,
            .micro_batch_size = config->micro_batch_size,
            .global_batch_size = full.running_global_batch_size,
            .data_parallel_rank = config->data_parallel_rank,
            .data_parallel_size = config->data_parallel_size,
            .drop_last = config->drop_last,
            .pad_samples_to_global_batch_size = config->pad_samples_to_global_batch_size},
        .sizes = sizes,
        .cycle = config->cycle,
        .seed = config->seed,
        .round = config->micro_batch_size * config->data_parallel_size,
        .epoch = epoch,
        .epoch_ordered = -1,
        .multiple = config->pad_seq_length_to_mult,
        .s = dataset->sequence_length};
    from->share = malloc((size_t)(full.running_global_batch_size / config->data_parallel_size) * sizeof *from->share);
    loom_status status = from->share ? check_sampler(from) : loom_fail(LOOM_ERR_MEMORY, "no memory for a loader");
    if (status == LOOM_OK)
        status = seek(from, config->consumed_samples);
    if (status != LOOM_OK) {
        destroy(from);
        return status;
    }
    *loader = (loom_data_loader){.context = from,
        .micro_batch_size = config->micro_batch_size,
        .sequence_length = dataset->sequence_length,
        .microbatches = full.microbatches,
        .document_boundaries = dataset->document_boundaries,
        .next = next_batch,
        .consumed_samples = consumed_samples,
        .remaining = remaining,
        .seek = seek,
        .destroy = destroy,
        .step = step_sizes,
        .locate = locate};
    return LOOM_OK;
}

void loom_data_loader_destroy(loom_data_loader *loader) {
    if (!loader)
        return;
    if (loader->destroy)
        loader->destroy(loader->context);
    *loader = (loom_data_loader){0};
}
