/* A dataset without files: each sample is a walk over the vocabulary whose steps are 1, 2 or 3, drawn from a
 * counter-based stream keyed by (seed, sample). A model learns it quickly (the best loss is ln 3), and every layout
 * reads the same tokens. */
#include "base/random.h"
#include <megaloom/data.h>
#include <stdlib.h>

typedef struct mock {
    int64_t s, vocabulary, samples;
    uint64_t seed;
} mock;

static loom_status mock_get(void *context, int64_t index, const loom_sample_row *row) {
    const mock *m = context;
    if (index >= m->samples)
        return loom_fail(LOOM_ERR_ARGUMENT, "mock dataset: sample %lld asked, there are %lld", (long long)index,
            (long long)m->samples);
    bool padding = index < 0;
    uint64_t sample = padding ? 0 : (uint64_t)index;
    int64_t token = 0;
    for (int64_t t = 0; t < m->s; t++) {
        loom__philox words = loom__philox4x32((uint32_t)t, (uint32_t)((uint64_t)t >> 32), (uint32_t)sample,
            (uint32_t)(sample >> 32), (uint32_t)m->seed, (uint32_t)(m->seed >> 32));
        if (t == 0)
            token = (int64_t)(words.word[0] % (uint64_t)m->vocabulary);
        row->tokens[t] = token;
        token = (token + 1 + words.word[1] % 3) % m->vocabulary;
        row->labels[t] = token;
        row->loss_mask[t] = padding ? 0.0f : 1.0f;
        row->position_ids[t] = t;
        if (row->document_start)
            row->document_start[t] = 0;
    }
    return LOOM_OK;
}

loom_status loom_mock_dataset_create(
    int64_t sequence_length, int64_t vocab_size, uint64_t seed, int64_t samples, loom_dataset *dataset) {
    if (sequence_length < 1 || vocab_size < 1 || samples < 0)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "mock dataset: sequence length %lld, vocabulary %lld, samples %lld; expected at least 1, 1, 0",
            (long long)sequence_length, (long long)vocab_size, (long long)samples);
    mock *m = malloc(sizeof *m);
    if (!m)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a mock dataset");
    *m = (mock){sequence_length, vocab_size, samples, seed};
    *dataset = (loom_dataset){
        .context = m, .length = samples, .sequence_length = sequence_length, .get = mock_get, .destroy = free};
    return LOOM_OK;
}
