/* Document, sample and shuffle indices, as Megatron-Core builds them: the split's documents, repeated for as many
 * epochs as the samples asked need, are shuffled; the stream of their tokens is cut into samples; the samples are
 * shuffled. When the last epoch would give less than 80 % of its samples, it is shuffled apart, so that what is trained
 * on is not a random choice out of it. All three shuffles draw from one generator in this order.
 *
 * The lengths stand in an array of 4 bytes each, and so do the documents: three passes over a few megabytes, of which
 * two are random, are all the work. */
#include "data/gpt.h"
#include "data/mt19937.h"

#include <stdlib.h>
#include <sys/mman.h>

void loom__gpt_indices_free(loom__gpt_indices *indices) {
    if (indices->file.data) {
        loom__unmap_file(&indices->file);
    } else {
        free((void *)indices->document_index);
        free((void *)indices->sample_index);
        free((void *)indices->shuffle_index);
    }
    *indices = (loom__gpt_indices){0};
}

/* Shuffles and lookups jump about in their arrays, and with pages of 4 KiB most jumps would first look for their page.
 */
void *loom__gpt_large(size_t bytes) {
    enum { HUGE_PAGE = 2 << 20 };
    if (bytes < HUGE_PAGE)
        return malloc(bytes + 1);
    size_t whole = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void *memory = aligned_alloc(HUGE_PAGE, whole);
    if (memory)
        madvise(memory, whole, MADV_HUGEPAGE);
    return memory;
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

static loom_status check_epochs(
    const loom__gpt_key *key, int64_t epochs, int64_t tokens_per_epoch, int64_t max_epochs) {
    if (max_epochs == 0 || epochs <= max_epochs)
        return LOOM_OK;
    int64_t most = tokens_per_epoch > INT64_MAX / max_epochs
                       ? INT64_MAX / key->sequence_length
                       : whole_samples(tokens_per_epoch * max_epochs, key->extra, key->sequence_length);
    return loom_fail(LOOM_ERR_CONFIG,
        "%lld samples of %lld tokens are asked, which takes %lld epochs of %lld tokens, expected at most %lld epochs: "
        "they have %lld samples",
        (long long)key->samples, (long long)key->sequence_length, (long long)epochs, (long long)tokens_per_epoch,
        (long long)max_epochs, (long long)most);
}

static loom_status make_plan(const loom__gpt_key *key, int64_t tokens_per_epoch, int64_t max_epochs, plan *made) {
    int64_t s = key->sequence_length, extra = key->extra, wanted = key->samples;
    plan p = {.epochs = 1};
    int64_t tokens = 0, total = 0;
    if (wanted > 0) {
        if (__builtin_mul_overflow(wanted, s, &tokens) || __builtin_add_overflow(tokens, extra, &tokens))
            return loom_fail(
                LOOM_ERR_CONFIG, "%lld samples of %lld tokens exceed 2^63 tokens", (long long)wanted, (long long)s);
        p.epochs = tokens / tokens_per_epoch + (tokens % tokens_per_epoch != 0);
        LOOM_TRY(check_epochs(key, p.epochs, tokens_per_epoch, max_epochs));
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
    if (key->keep_partial && total > extra && (total - extra) % s != 0)
        p.samples++;
    *made = p;
    return LOOM_OK;
}

static loom_status build_documents(const plan *p, loom__mt19937 *generator, loom__gpt_indices *indices) {
    int64_t each = indices->end - indices->first;
    if (__builtin_mul_overflow(each, p->epochs, &indices->documents) || indices->documents > INT64_MAX / 8)
        return no_memory("document", indices->documents);
    uint32_t *order = loom__gpt_large((size_t)indices->documents * sizeof *order), *at = order;
    if (!order)
        return no_memory("document", indices->documents);
    indices->document_index = order;
    for (int64_t epoch = 0; epoch < p->epochs; epoch++)
        for (int64_t i = indices->first; i < indices->end; i++)
            *at++ = (uint32_t)i;
    int64_t together = p->last_apart ? indices->documents - each : indices->documents;
    loom__mt19937_shuffle_u32(generator, order, together);
    loom__mt19937_shuffle_u32(generator, order + together, indices->documents - together);
    return LOOM_OK;
}

/* Cuts the stream of tokens. Cut i lies at its token i*s, and belongs to the document of the last token before the
 * cut that the sample before it reads: token i*s itself where there is an extra one, else the token before. */
static loom_status build_samples(
    const loom__gpt_key *key, const plan *p, const int32_t *lengths, loom__gpt_indices *indices) {
    enum { AHEAD = 32 };
    int64_t s = key->sequence_length, extra = key->extra, documents = indices->documents;
    if (p->samples > INT64_MAX / 32)
        return no_memory("sample", p->samples);
    loom__gpt_cut *cuts = loom__gpt_large(((size_t)p->samples + 1) * sizeof *cuts);
    if (!cuts)
        return no_memory("sample", p->samples);
    indices->sample_index = cuts;
    indices->samples = p->samples;
    cuts[0] = (loom__gpt_cut){0, 0};
    const uint32_t *order = indices->document_index;
    int64_t found = 1, begin = 0, wanted = s + extra - 1; /* of the stream's tokens */
    for (int64_t place = 0; place < documents && found <= p->samples; place++) {
        if (place + AHEAD < documents)
            __builtin_prefetch(&lengths[order[place + AHEAD] - indices->first]);
        int64_t end = begin + lengths[order[place] - indices->first];
        for (; wanted < end && found <= p->samples; wanted += s)
            cuts[found++] = (loom__gpt_cut){place, wanted - begin + 1 - extra};
        begin = end;
    }
    if (found <= p->samples) /* the partial last sample */
        cuts[found] = (loom__gpt_cut){documents - 1, lengths[order[documents - 1] - indices->first] - extra};
    return LOOM_OK;
}

static loom_status build_shuffle(const plan *p, loom__mt19937 *generator, loom__gpt_indices *indices) {
    int64_t *shuffle = loom__gpt_large((size_t)indices->samples * sizeof *shuffle);
    if (!shuffle)
        return no_memory("shuffle", indices->samples);
    indices->shuffle_index = shuffle;
    for (int64_t i = 0; i < indices->samples; i++)
        shuffle[i] = i;
    int64_t together = p->last_apart ? p->samples_before_last : indices->samples;
    loom__mt19937_shuffle(generator, shuffle, together);
    loom__mt19937_shuffle(generator, shuffle + together, indices->samples - together);
    return LOOM_OK;
}

loom_status loom__gpt_indices_build(
    const loom__gpt_key *key, const int32_t *lengths, int64_t max_epochs, loom__gpt_indices *indices) {
    int64_t tokens_per_epoch = 0;
    for (int64_t i = 0; i < key->end - key->first; i++)
        tokens_per_epoch += lengths[i];
    if (key->end > UINT32_MAX)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: a set of %lld sequences, at most 2^32 - 1 work",
            (long long)key->end);
    if (tokens_per_epoch == 0 && key->samples > 0)
        return loom_fail(LOOM_ERR_CONFIG,
            "its %lld documents have no token, but %lld samples are asked of them: give the split a larger share",
            (long long)(key->end - key->first), (long long)key->samples);
    plan p = {0};
    LOOM_TRY(make_plan(key, tokens_per_epoch, max_epochs, &p));
    loom__mt19937 generator;
    loom__mt19937_seed(&generator, (uint32_t)key->seed);
    loom__gpt_indices made = {.first = key->first, .end = key->end, .epochs = p.epochs};
    loom_status status = build_documents(&p, &generator, &made);
    if (status == LOOM_OK)
        status = build_samples(key, &p, lengths, &made);
    if (status == LOOM_OK)
        status = build_shuffle(&p, &generator, &made);
    if (status != LOOM_OK) {
        loom__gpt_indices_free(&made);
        return status;
    }
    *indices = made;
    return LOOM_OK;
}
