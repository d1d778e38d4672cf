/* Datasets in general, and the fixed one, which replays the tokens of a safetensors file in their order. */
#include "data/dataset.h"

#include <megaloom/safetensors.h>
#include <stdlib.h>

void loom_dataset_destroy(loom_dataset *dataset) {
    if (!dataset)
        return;
    if (dataset->destroy)
        dataset->destroy(dataset->context);
    *dataset = (loom_dataset){0};
}

typedef struct fixed {
    loom_safetensors *file;
    const loom_safetensors_tensor *tokens; /* [steps, batch, s+1] */
    int64_t s, samples, vocab_size;
} fixed;

static loom_status fixed_get(void *context, int64_t index, const loom_sample_row *row) {
    const fixed *set = context;
    if (index >= set->samples || set->samples == 0)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: sample %lld asked, there are %lld", set->tokens->path,
            (long long)index, (long long)set->samples);
    int64_t first = (index < 0 ? 0 : index) * (set->s + 1), last = 0;
    LOOM_TRY(loom_safetensors_read_i64(set->tokens, first, set->s, row->tokens));
    LOOM_TRY(loom_safetensors_read_i64(set->tokens, first + set->s, 1, &last));
    for (int64_t i = 0; i < set->s; i++) {
        row->labels[i] = i + 1 < set->s ? row->tokens[i + 1] : last;
        row->loss_mask[i] = 1.0f;
        row->position_ids[i] = i;
        if (row->document_start)
            row->document_start[i] = 0;
    }
    for (int64_t i = 0; i <= set->s; i++) {
        int64_t token = i < set->s ? row->tokens[i] : last;
        if (token < 0 || (set->vocab_size > 0 && token >= set->vocab_size))
            return loom_fail(LOOM_ERR_FORMAT,
                "%s: token %lld of sample %lld is %lld, expected at least 0 and below %lld", set->tokens->path,
                (long long)i, (long long)index, (long long)token,
                (long long)(set->vocab_size > 0 ? set->vocab_size : INT64_MAX));
    }
    if (index < 0)
        loom__mask_row(row, set->s);
    return LOOM_OK;
}

static void fixed_destroy(void *context) {
    fixed *set = context;
    loom_safetensors_close(set->file);
    free(set);
}

static loom_status describe(const loom_safetensors *file, const loom_safetensors_tensor **tokens) {
    const loom_safetensors_tensor *found = NULL;
    LOOM_TRY(loom_safetensors_find(file, "tokens", &found));
    if (found->dims != 3 || found->shape[1] < 1 || found->shape[2] < 2)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: tensor 'tokens' has %d dimensions [%lld, %lld, %lld, …], expected 3: [steps, batch, sequence + 1]",
            found->path, found->dims, (long long)found->shape[0], (long long)found->shape[1],
            (long long)found->shape[2]);
    int64_t none;
    LOOM_TRY(loom_safetensors_read_i64(found, 0, 0, &none)); /* refuses what is no integer dtype */
    *tokens = found;
    return LOOM_OK;
}

loom_status loom_fixed_dataset_create(const char *path, int64_t vocab_size, loom_dataset *dataset, int64_t *batch) {
    loom_safetensors *file;
    LOOM_TRY(loom_safetensors_open(path, &file));
    const loom_safetensors_tensor *tokens = NULL;
    loom_status status = describe(file, &tokens);
    fixed *set = status == LOOM_OK ? calloc(1, sizeof *set) : NULL;
    if (status == LOOM_OK && !set)
        status = loom_fail(LOOM_ERR_MEMORY, "%s: no memory for a dataset", path);
    if (status != LOOM_OK) {
        loom_safetensors_close(file);
        return status;
    }
    *set = (fixed){.file = file,
        .tokens = tokens,
        .s = tokens->shape[2] - 1,
        .samples = tokens->shape[0] * tokens->shape[1],
        .vocab_size = vocab_size};
    *dataset = (loom_dataset){
        .context = set, .length = set->samples, .sequence_length = set->s, .get = fixed_get, .destroy = fixed_destroy};
    if (batch)
        *batch = tokens->shape[1];
    return LOOM_OK;
}
