/* What the user iterates over. One loader is cut for this data-parallel rank by the strategy's sampler; several are
 * taken in turn in "max_size_cycle" mode: the longest ends it, the others begin again when they are exhausted. A
 * ramp-up counts the samples of all loaders together, so that several leave the sizes of steps to what stands here. */
#include "strategy/strategy.h"
#include <stdlib.h>
#include <string.h>

static loom_status add_source(
    loom_batches *batches, const loom_data_loader *loader, const loom_data_loader_config *config) {
    loom__source *source = &batches->sources[batches->source_count];
    *source = (loom__source){.loader = *loader,
        .start = loader->consumed_samples ? loader->consumed_samples(loader->context) : 0,
        .length = -1};
    if (config)
        source->config = *config;
    batches->source_count++;
    if (loader->remaining)
        source->length = loader->remaining(loader->context);
    return loom_batch_create(loader->micro_batch_size, loader->sequence_length, loader->document_boundaries,
        &batches->buffers[batches->source_count - 1]);
}

static bool ramps_up(const loom_batches *batches) {
    return batches->sizes.rampup_batch_size[2] > 0;
}

static int64_t consumed_of_all(const loom_batches *batches) {
    int64_t consumed = 0;
    for (int64_t i = 0; i < batches->source_count; i++) {
        const loom__source *source = &batches->sources[i];
        if (source->loader.consumed_samples)
            consumed += source->before + source->loader.consumed_samples(source->loader.context);
    }
    return consumed;
}

/* The microbatches of whole steps of a ramp-up among the next `length`: no step is begun that cannot be finished. */
static loom_status whole_steps(const loom_batches *batches, int64_t *length) {
    int64_t taken = 0, consumed = consumed_of_all(batches);
    loom_data_step step;
    for (;; taken += step.microbatches, consumed += step.running_global_batch_size) {
        LOOM_TRY(loom_data_step_at(&batches->sizes, consumed, &step));
        if (step.microbatches > *length - taken)
            break;
        if (consumed > batches->sizes.rampup_batch_size[2]) { /* from here on all steps are alike */
            taken += (*length - taken) / step.microbatches * step.microbatches;
            break;
        }
    }
    *length = taken;
    return LOOM_OK;
}

/* Microbatches in all: the longest source, times the number of sources; −1 when one of them has no known end. */
static loom_status find_length(loom_batches *batches) {
    int64_t longest = 0;
    for (int64_t i = 0; i < batches->source_count; i++) {
        if (batches->sources[i].length < 0) {
            batches->length = -1;
            return LOOM_OK;
        }
        longest = batches->sources[i].length > longest ? batches->sources[i].length : longest;
    }
    batches->length = longest * batches->source_count;
    if (ramps_up(batches))
        LOOM_TRY(whole_steps(batches, &batches->length));
    batches->done = batches->length == 0;
    return LOOM_OK;
}

static loom_status create_empty(int64_t count, loom_batches **out) {
    loom_batches *batches = calloc(1, sizeof *batches);
    if (batches) {
        batches->sources = calloc((size_t)count, sizeof *batches->sources);
        batches->buffers = calloc((size_t)count, sizeof *batches->buffers);
        batches->last_batch = batches->last_loader = -1;
    }
    if (!batches || !batches->sources || !batches->buffers) {
        loom_batches_destroy(batches);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld data loaders", (long long)count);
    }
    *out = batches;
    return LOOM_OK;
}

static int64_t common_divisor(int64_t a, int64_t b) {
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Into how many equal parts the ranks cut a sequence: each context rank has two, and its tensor ranks share both. */
static int64_t sequence_parts(const loom_fabric *fabric) {
    int64_t tp = fabric->config.sequence_parallel ? loom_comm_size(fabric->groups[LOOM_GROUP_TP]) : 1;
    int64_t cp = loom_comm_size(fabric->groups[LOOM_GROUP_CP]);
    return cp == 1 ? tp : cp * (tp / common_divisor(tp, 2)) * 2;
}

/* A step is as long as its samples need, rounded up to what the user and the ranks ask of it. */
static loom_status sequence_multiple(const loom_fabric *fabric, int64_t asked, int64_t *multiple) {
    int64_t parts = sequence_parts(fabric);
    if (asked < 0 || __builtin_mul_overflow(asked, parts / common_divisor(parts, asked), multiple))
        return loom_fail(LOOM_ERR_CONFIG, "pad_seq_length_to_mult is %lld, expected 0 to %lld", (long long)asked,
            (long long)(INT64_MAX / parts));
    return LOOM_OK;
}

/* alone: its steps are those of the batches. */
static loom_status describe_for_rank(
    const loom_fabric *fabric, const loom_dataloader *description, bool alone, loom_data_loader_config *made) {
    loom_data_loader_config config = loom_data_loader_config_default();
    loom_comm *dp = fabric->groups[LOOM_GROUP_DP];
    config.sampler = description->sampler ? description->sampler : fabric->sampler;
    config.seed = description->seed;
    config.decrease_batch_size_if_needed = description->decrease_batch_size_if_needed;
    if (description->mode == LOOM_TRAINING && alone)
        memcpy(config.rampup_batch_size, description->rampup_batch_size, sizeof config.rampup_batch_size);
    config.micro_batch_size = description->micro_batch_size;
    config.data_parallel_rank = loom_comm_rank(dp);
    config.data_parallel_size = loom_comm_size(dp);
    config.global_batch_size = description->global_batch_size
                                   ? description->global_batch_size
                                   : description->micro_batch_size * config.data_parallel_size;
    config.consumed_samples = description->mode == LOOM_TRAINING ? description->consumed_samples : 0;
    config.cycle = description->cycle;
    if (description->pad_seq_length_to_mult != 0)
        LOOM_TRY(sequence_multiple(fabric, description->pad_seq_length_to_mult, &config.pad_seq_length_to_mult));
    if (description->mode == LOOM_TEST || description->mode == LOOM_PREDICT) {
        config.drop_last = false;
        config.pad_samples_to_global_batch_size = true;
    }
    *made = config;
    return LOOM_OK;
}

static loom_status cut_for_rank(const loom_fabric *fabric, const loom_dataloader *description,
    const loom_data_loader_config *config, loom_data_loader *loader) {
    loom_data_loader plain;
    LOOM_TRY(loom_data_loader_create(description->dataset, config, &plain));
    const loom_data_prefetch_config ahead = {
        description->prefetch_factor, fabric->config.timeout, loom_rank_index(fabric->rank)};
    loom_status status = LOOM_OK;
    if (ahead.depth > 0)
        status = loom_data_loader_prefetch(&plain, &ahead, loader);
    else
        *loader = plain;
    if (status)
        loom_data_loader_destroy(&plain);
    return status;
}

static bool has_rampup(const loom_dataloader *loader) {
    return loader->mode == LOOM_TRAINING && loader->rampup_batch_size[2] != 0;
}

/* Several loaders have one ramp-up, and their samplers must not know steps. */
static loom_status check_rampup(const loom_fabric *fabric, const loom_dataloader *loaders, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const loom_dataloader *first = &loaders[0], *other = &loaders[i];
        const loom_data_sampler *sampler = other->sampler ? other->sampler : fabric->sampler;
        if (memcmp(first->rampup_batch_size, other->rampup_batch_size, sizeof first->rampup_batch_size) != 0 ||
            first->global_batch_size != other->global_batch_size || first->mode != other->mode ||
            first->decrease_batch_size_if_needed != other->decrease_batch_size_if_needed)
            return loom_fail(LOOM_ERR_CONFIG,
                "data loaders that are combined must agree: loader %lld has rampup_batch_size [%lld, %lld, %lld] to "
                "%lld, the first [%lld, %lld, %lld] to %lld, expected one ramp-up for all",
                (long long)i, (long long)other->rampup_batch_size[0], (long long)other->rampup_batch_size[1],
                (long long)other->rampup_batch_size[2], (long long)other->global_batch_size,
                (long long)first->rampup_batch_size[0], (long long)first->rampup_batch_size[1],
                (long long)first->rampup_batch_size[2], (long long)first->global_batch_size);
        if (sampler && sampler->global_batches)
            return loom_fail(LOOM_ERR_UNSUPPORTED,
                "not supported yet: rampup_batch_size with %lld data loaders and the sampler %s, there is: single, "
                "cyclic",
                (long long)count, sampler->name);
    }
    return LOOM_OK;
}

static loom_status check_descriptions(const loom_fabric *fabric, const loom_dataloader *loaders, int64_t count) {
    if (count < 1)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "setup_dataloader: found %lld loaders, expected at least 1", (long long)count);
    bool ramp = false;
    for (int64_t i = 0; count > 1 && i < count; i++) {
        if (loaders[i].pad_seq_length_to_mult != 0)
            return loom_fail(LOOM_ERR_UNSUPPORTED,
                "not supported yet: pad_seq_length_to_mult with %lld data loaders, one alone works", (long long)count);
        ramp = ramp || has_rampup(&loaders[i]);
    }
    return ramp ? check_rampup(fabric, loaders, count) : LOOM_OK;
}

/* The sizes of steps that several loaders share. */
static loom_status share_steps(
    loom_batches *batches, const loom_dataloader *first, const loom_data_loader_config *config) {
    batches->sizes =
        (loom_data_step_config){config->global_batch_size, config->micro_batch_size, config->data_parallel_size,
            {first->rampup_batch_size[0], first->rampup_batch_size[1], first->rampup_batch_size[2]},
            config->decrease_batch_size_if_needed};
    return loom_data_step_check(&batches->sizes);
}

/* A step has one size, whichever loader its microbatches come from. */
static loom_status check_alike(const loom_data_loader *first, const loom_data_loader *other) {
    if (first->micro_batch_size == other->micro_batch_size && first->sequence_length == other->sequence_length &&
        first->microbatches == other->microbatches)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_CONFIG,
        "data loaders that are combined must agree: %lld and %lld rows, %lld and %lld positions, %lld and %lld "
        "microbatches",
        (long long)first->micro_batch_size, (long long)other->micro_batch_size, (long long)first->sequence_length,
        (long long)other->sequence_length, (long long)first->microbatches, (long long)other->microbatches);
}

loom_status loom_fabric_setup_dataloaders(
    loom_fabric *fabric, const loom_dataloader *loaders, int64_t count, loom_batches **out) {
    if (!fabric->launched)
        return loom_fail(LOOM_ERR_STATE, "setup_dataloader: the fabric has not been launched");
    LOOM_TRY(check_descriptions(fabric, loaders, count));
    loom_batches *batches;
    LOOM_TRY(create_empty(count, &batches));
    batches->output_data_idx = fabric->config.output_data_idx;
    batches->stop_when_size_changes = loaders[0].stop_when_batch_size_changes;
    loom_status status = LOOM_OK;
    for (int64_t i = 0; !status && i < count; i++) {
        loom_data_loader loader;
        loom_data_loader_config config;
        status = describe_for_rank(fabric, &loaders[i], count == 1, &config);
        if (!status && i == 0 && count > 1 && has_rampup(&loaders[0]))
            status = share_steps(batches, &loaders[0], &config);
        if (!status)
            status = cut_for_rank(fabric, &loaders[i], &config, &loader);
        if (!status)
            status = add_source(batches, &loader, &config);
        if (!status && i > 0)
            status = check_alike(&batches->sources[0].loader, &loader);
    }
    if (!status)
        status = find_length(batches);
    status = loom_agree(loom_rank_world(fabric->rank), status);
    if (status) {
        loom_batches_destroy(batches);
        return status;
    }
    *out = batches;
    return LOOM_OK;
}

loom_status loom_fabric_setup_dataloader(loom_fabric *fabric, const loom_dataloader *loader, loom_batches **batches) {
    return loom_fabric_setup_dataloaders(fabric, loader, 1, batches);
}

loom_status loom_fabric_setup_loader(loom_fabric *fabric, const loom_data_loader *loader, loom_batches **out) {
    if (!fabric->launched)
        return loom_fail(LOOM_ERR_STATE, "setup_loader: the fabric has not been launched");
    if (!loader->next)
        return loom_fail(LOOM_ERR_ARGUMENT, "a data loader needs its function next");
    loom_batches *batches;
    LOOM_TRY(create_empty(1, &batches));
    batches->output_data_idx = fabric->config.output_data_idx;
    loom_status status = add_source(batches, loader, NULL);
    if (!status)
        status = find_length(batches);
    if (status) {
        batches->source_count = 0; /* the loader stays the caller's */
        loom_batch_destroy(batches->buffers[0]);
        loom_batches_destroy(batches);
        return status;
    }
    *out = batches;
    return LOOM_OK;
}

void loom_batches_destroy(loom_batches *batches) {
    if (!batches)
        return;
    for (int64_t i = 0; i < batches->source_count; i++) {
        loom_data_loader_destroy(&batches->sources[i].loader);
        loom_batch_destroy(batches->buffers[i]);
    }
    free(batches->sources);
    free(batches->buffers);
    free(batches);
}

/* The columns of the rank's chunks, of [b, s] values. */
static void cut(const loom_batch *batch, const loom_batch *part, int64_t chunks, const int64_t begin[2],
    const void *from, void *to, size_t size) {
    int64_t length = part->s / chunks;
    for (int64_t j = 0; j < batch->b; j++)
        for (int64_t i = 0; i < chunks; i++)
            memcpy((char *)to + (size_t)(j * part->s + i * length) * size,
                (const char *)from + (size_t)(j * batch->s + begin[i]) * size, (size_t)length * size);
}

loom_status loom__batch_cut(const loom_batch *batch, const loom_comm *context, loom_batch **out) {
    int64_t cp = context ? loom_comm_size(context) : 1, s = batch->s / cp, chunks = cp > 1 ? 2 : 1, begin[2] = {0};
    if (cp > 1 && batch->s % (2 * cp))
        return loom_fail(LOOM_ERR_CONFIG,
            "a sequence of %lld positions cannot be cut into 2 chunks for each of %lld context ranks "
            "(context_parallel_size): expected a multiple of %lld, nearest %lld and %lld",
            (long long)batch->s, (long long)cp, (long long)(2 * cp), (long long)(batch->s / (2 * cp) * (2 * cp)),
            (long long)((batch->s / (2 * cp) + 1) * (2 * cp)));
    loom_batch *part;
    LOOM_TRY(loom_batch_create(batch->rows, s, batch->document_start != NULL, &part));
    part->b = batch->b;
    if (cp > 1)
        loom_layout_context_chunks(batch->s, cp, loom_comm_rank(context), begin);
    cut(batch, part, chunks, begin, batch->tokens, part->tokens, sizeof *part->tokens);
    cut(batch, part, chunks, begin, batch->labels, part->labels, sizeof *part->labels);
    cut(batch, part, chunks, begin, batch->loss_mask, part->loss_mask, sizeof *part->loss_mask);
    cut(batch, part, chunks, begin, batch->position_ids, part->position_ids, sizeof *part->position_ids);
    if (part->document_start)
        cut(batch, part, chunks, begin, batch->document_start, part->document_start, sizeof *part->document_start);
    memcpy(part->sample, batch->sample, (size_t)batch->b * sizeof *part->sample);
    memcpy(part->index, batch->index, (size_t)batch->b * sizeof *part->index);
    *out = part;
    return LOOM_OK;
}

static loom_status next_of(loom_batches *batches, int64_t index) {
    loom__source *source = &batches->sources[index];
    loom_data_loader *loader = &source->loader;
    /* A loader of samples that differ in length may have made the last one shorter. */
    batches->buffers[index]->s = loader->sequence_length;
    loom_status status = loader->next(loader->context, batches->buffers[index]);
    /* A shorter loader begins again; with one loader alone its end is the end. */
    if (status == LOOM_END && batches->source_count > 1 && loader->seek) {
        if (loader->consumed_samples)
            source->before += loader->consumed_samples(loader->context) - source->start;
        LOOM_TRY(loader->seek(loader->context, source->start));
        status = loader->next(loader->context, batches->buffers[index]);
    }
    return status;
}

loom_status loom_batches_next(loom_batches *batches, const loom_batch **batch) {
    if (batches->done)
        return LOOM_END;
    int64_t index = batches->fetched % batches->source_count;
    loom_status status = next_of(batches, index);
    if (status) {
        batches->done = batches->done || status == LOOM_END;
        return status;
    }
    batches->last_loader = index;
    batches->last_batch = batches->fetched / batches->source_count;
    batches->fetched++;
    batches->done = batches->length >= 0 && batches->fetched >= batches->length;
    batches->buffers[index]->batch_index = batches->output_data_idx ? batches->last_batch : -1;
    batches->buffers[index]->loader_index = batches->output_data_idx ? index : -1;
    *batch = batches->buffers[index];
    return LOOM_OK;
}

loom_batches_state loom_batches_get_state(const loom_batches *batches) {
    const loom_data_loader *loader = &batches->sources[0].loader;
    loom_data_step step = {.microbatches = loader->microbatches};
    int64_t consumed = consumed_of_all(batches);
    loom_status status = ramps_up(batches) ? loom_data_step_at(&batches->sizes, consumed, &step)
                         : loader->step    ? loader->step(loader->context, &step)
                                           : LOOM_OK;
    /* A step that has no sizes is refused when its first microbatch is read. */
    if (status)
        loom_error_clear();
    return (loom_batches_state){
        .fetched = batches->fetched,
        .length = batches->length,
        .done = batches->done,
        .batch_index = batches->last_batch,
        .loader_index = batches->last_loader,
        .last = batches->last_loader < 0 ? NULL : batches->buffers[batches->last_loader],
        .consumed_samples = consumed,
        .micro_batch_size = loader->micro_batch_size,
        .seq_length = step.sequence_length ? step.sequence_length : loader->sequence_length,
        .num_microbatches = step.microbatches,
    };
}

loom_status loom_batches_data_config(
    const loom_batches *batches, int64_t loader_index, loom_data_loader_config *config) {
    if (loader_index < 0 || loader_index >= batches->source_count)
        return loom_fail(LOOM_ERR_ARGUMENT, "data_config: loader %lld, expected 0 to %lld", (long long)loader_index,
            (long long)batches->source_count - 1);
    if (batches->sources[loader_index].config.micro_batch_size == 0)
        return loom_fail(LOOM_ERR_STATE, "data_config: a loader of one's own has none");
    *config = batches->sources[loader_index].config;
    if (ramps_up(batches))
        memcpy(config->rampup_batch_size, batches->sizes.rampup_batch_size, sizeof config->rampup_batch_size);
    return LOOM_OK;
}

loom_status loom_batches_reset(loom_batches *batches) {
    for (int64_t i = 0; i < batches->source_count; i++) {
        loom_data_loader *loader = &batches->sources[i].loader;
        if (!loader->seek)
            return loom_fail(LOOM_ERR_UNSUPPORTED, "this data loader cannot begin again (it has no seek)");
        LOOM_TRY(loader->seek(loader->context, batches->sources[i].start));
        batches->sources[i].before = 0;
    }
    batches->fetched = batches->last_microbatches = 0;
    batches->last_loader = batches->last_batch = -1;
    batches->done = batches->length == 0;
    return LOOM_OK;
}
