/* Document, sample and shuffle indices, as Megatron-Core builds them: the split's documents, repeated for as many
 * epochs as the samples asked need, are shuffled; the stream of their tokens is cut into samples; the samples are
 * shuffled. When the last epoch would give less than 80 % of its samples, it is shuffled apart, so that what is trained
 * on is not a random choice out of it. All three shuffles draw from one generator in this order. */
#include "data/dataset.h"
#include "data/gpt.h"
#include "data/mt19937.h"

#include <stdlib.h>

void loom__gpt_indices_free(loom__gpt_indices *indices) {
    free(indices->document_index);
    free(indices->sample_index);
    free(indices->shuffle_index);
    *indices = (loom__gpt_indices){0};
}

static loom_status no_memory(const char *what, int64_t count) {
    return loom_fail(LOOM_ERR_MEMORY, "no memory for the %s index of %lld entries", what, (long long)count);
}

/* Whole samples in `tokens` tokens, of which the first only starts and `extra` is a label only. */
static int64_t whole_samples(int64_t tokens, int64_t extra, int64_t s) {
    return tokens > extra ? (tokens - extra) / s : 0;
}

typedef struct plan {
    int64_t epochs;
    int64_t samples_before_last; /* samples that begin before the last epoch; used when that one is apart */
    bool last_apart;
    int64_t samples; /* of all epochs */
} plan;

static loom_status make_plan(const loom_gpt_dataset_config *config, int64_t tokens_per_epoch, plan *made) {
    int64_t s = config->sequence_length, extra = config->add_extra_token_to_sequence, wanted = config->samples;
    plan p = {.epochs = 1};
    int64_t tokens = 0, total = 0;
    if (wanted > 0) {
        if (__builtin_mul_overflow(wanted, s, &tokens) || __builtin_add_overflow(tokens, extra, &tokens))
            return loom_fail(
                LOOM_ERR_CONFIG, "%lld samples of %lld tokens exceed 2^63 tokens", (long long)wanted, (long long)s);
        p.epochs = tokens / tokens_per_epoch + (tokens % tokens_per_epoch != 0);
    }
    if (__builtin_mul_overflow(p.epochs, tokens_per_epoch, &total))
        return loom_fail(LOOM_ERR_CONFIG, "%lld epochs of %lld tokens exceed 2^63 tokens", (long long)p.epochs,
            (long long)tokens_per_epoch);
    if (p.epochs > 1) {
        p.samples_before_last = whole_samples(total - tokens_per_epoch, extra, s);
        int64_t from_last = wanted - p.samples_before_last, per_epoch = whole_samples(tokens_per_epoch, extra, s);
        p.last_apart = from_last < (int64_t)(0.80 * (double)per_epoch);
    }
    p.samples = whole_samples(total, extra, s);
    bool keep_partial = config->which == LOOM_SPLIT_VALID && !config->drop_last_partial_validation_sequence;
    if (keep_partial && total > extra && (total - extra) % s != 0)
        p.samples++;
    *made = p;
    return LOOM_OK;
}

static loom_status build_documents(const plan *p, loom__mt19937 *generator, loom__gpt_indices *indices) {
    int64_t each = indices->end - indices->first;
    if (__builtin_mul_overflow(each, p->epochs, &indices->documents) || indices->documents > INT64_MAX / 8)
        return no_memory("document", indices->documents);
    indices->document_index = malloc((size_t)indices->documents * sizeof *indices->document_index + 1);
    if (!indices->document_index)
        return no_memory("document", indices->documents);
    int64_t *at = indices->document_index;
    for (int64_t epoch = 0; epoch < p->epochs; epoch++)
        for (int64_t i = 0; i < each; i++)
            *at++ = indices->first + i;
    int64_t together = p->last_apart ? indices->documents - each : indices->documents;
    loom__mt19937_shuffle(generator, indices->document_index, together);
    loom__mt19937_shuffle(generator, indices->document_index + together, indices->documents - together);
    return LOOM_OK;
}

/* Cuts the stream: from one cut to the next lie s tokens, and the last `extra` of a sample is the first of the next. */
static loom_status build_samples(const loom_gpt_dataset_config *config, const plan *p,
    int64_t (*length)(const void *context, int64_t sequence), const void *context, loom__gpt_indices *indices) {
    int64_t extra = config->add_extra_token_to_sequence;
    if (p->samples > INT64_MAX / 32)
        return no_memory("sample", p->samples);
    loom__gpt_cut *cuts = malloc(((size_t)p->samples + 1) * sizeof *cuts);
    if (!cuts)
        return no_memory("sample", p->samples);
    indices->sample_index = cuts;
    indices->samples = p->samples;
    int64_t place = 0, offset = 0;
    cuts[0] = (loom__gpt_cut){0, 0};
    for (int64_t i = 1; i <= p->samples; i++) {
        int64_t missing = config->sequence_length + extra;
        for (;;) {
            int64_t rest = length(context, indices->document_index[place]) - offset;
            if (missing <= rest) {
                offset += missing - extra;
                break;
            }
            if (place == indices->documents - 1) { /* the partial last sample */
                offset += rest - extra;
                break;
            }
            missing -= rest;
            place++;
            offset = 0;
        }
        cuts[i] = (loom__gpt_cut){place, offset};
    }
    return LOOM_OK;
}

static loom_status build_shuffle(const plan *p, loom__mt19937 *generator, loom__gpt_indices *indices) {
    indices->shuffle_index = malloc((size_t)indices->samples * sizeof *indices->shuffle_index + 1);
    if (!indices->shuffle_index)
        return no_memory("shuffle", indices->samples);
    for (int64_t i = 0; i < indices->samples; i++)
        indices->shuffle_index[i] = i;
    int64_t together = p->last_apart ? p->samples_before_last : indices->samples;
    loom__mt19937_shuffle(generator, indices->shuffle_index, together);
    loom__mt19937_shuffle(generator, indices->shuffle_index + together, indices->samples - together);
    return LOOM_OK;
}

loom_status loom__gpt_indices_build(const loom_gpt_dataset_config *config, int64_t first, int64_t end,
    int64_t (*length)(const void *context, int64_t sequence), const void *context, loom__gpt_indices *indices) {
    int64_t tokens_per_epoch = 0;
    for (int64_t i = first; i < end; i++)
        tokens_per_epoch += length(context, i);
    if (tokens_per_epoch == 0 && config->samples > 0)
        return loom_fail(LOOM_ERR_CONFIG,
            "split '%s' of '%s' has %lld documents and no token, but %lld samples are asked of it: give it a larger "
            "share",
            loom__split_name(config->which), config->split, (long long)(end - first), (long long)config->samples);
    plan p = {0};
    LOOM_TRY(make_plan(config, tokens_per_epoch, &p));
    loom__mt19937 generator;
    loom__mt19937_seed(&generator, (uint32_t)config->seed);
    loom__gpt_indices made = {.first = first, .end = end, .epochs = p.epochs};
    loom_status status = build_documents(&p, &generator, &made);
    if (status == LOOM_OK)
        status = build_samples(config, &p, length, context, &made);
    if (status == LOOM_OK)
        status = build_shuffle(&p, &generator, &made);
    if (status != LOOM_OK) {
        loom__gpt_indices_free(&made);
        return status;
    }
    *indices = made;
    return LOOM_OK;
}
