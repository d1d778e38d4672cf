/* The GPT dataset: a sample is a run of s (+1) tokens of the shuffled stream, gathered from the mapped sequences
 * straight into the caller's row; labels are the same tokens one further. get writes nothing but the row, so any number
 * of threads may call it. */
#include "data/gpt.h"
#include "data/blend.h"
#include "data/dataset.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct gpt {
    const loom_indexed *indexed;
    loom_gpt_dataset_config config; /* without its texts */
    int64_t pad;                    /* the token that marks padding; negative where no token does */
    loom__gpt_indices indices;
} gpt;

loom_gpt_dataset_config loom_gpt_dataset_config_default(void) {
    return (loom_gpt_dataset_config){.seed = 1234,
        .split = "969,30,1",
        .which = LOOM_SPLIT_TRAIN,
        .samples = -1,
        .add_extra_token_to_sequence = true,
        .drop_last_partial_validation_sequence = true,
        .eod = -1,
        .pad = -1};
}

const loom__gpt_indices *loom__gpt_dataset_indices(const loom_dataset *dataset) {
    return &((const gpt *)dataset->context)->indices;
}

/* ---- Reading ---- */

static loom_status check_tokens(const gpt *set, int64_t sequence, int64_t first, const int64_t *tokens, int64_t count) {
    for (int64_t i = 0; i < count && set->config.vocab_size > 0; i++)
        if (tokens[i] < 0 || tokens[i] >= set->config.vocab_size)
            return loom_fail(LOOM_ERR_FORMAT, "%s.bin: token %lld of sequence %lld is %lld, expected 0 to %lld",
                loom_indexed_prefix(set->indexed), (long long)(first + i), (long long)sequence, (long long)tokens[i],
                (long long)set->config.vocab_size - 1);
    return LOOM_OK;
}

/* The sample's tokens: s into `tokens`, with the extra token the one after them into *last. *found of s (+1) are real;
 * the others, at the end, are left as they are. */
static loom_status gather(const gpt *set, int64_t sample, int64_t *tokens, int64_t *last, int64_t *found) {
    int64_t s = set->config.sequence_length, extra = set->config.add_extra_token_to_sequence;
    loom__gpt_cut from = set->indices.sample_index[sample], to = set->indices.sample_index[sample + 1];
    int64_t have = 0;
    for (int64_t place = from.place; place <= to.place; place++) {
        int64_t sequence = set->indices.document_index[place];
        int64_t first = place == from.place ? from.offset : 0;
        int64_t end = place == to.place ? to.offset + extra : loom_indexed_length(set->indexed, sequence);
        int64_t whole = end - first, inside = whole < s - have ? whole : s - have;
        LOOM_TRY(loom_indexed_read(set->indexed, sequence, first, inside, tokens + have));
        LOOM_TRY(check_tokens(set, sequence, first, tokens + have, inside));
        if (whole > inside) {
            LOOM_TRY(loom_indexed_read(set->indexed, sequence, first + inside, 1, last));
            LOOM_TRY(check_tokens(set, sequence, first + inside, last, 1));
        }
        have += whole;
    }
    *found = have;
    return LOOM_OK;
}

/* Positions and boundaries count from the token after each eod. */
static void fill_positions(const gpt *set, const loom_sample_row *row) {
    int64_t start = 0;
    for (int64_t i = 0; i < set->config.sequence_length; i++) {
        row->position_ids[i] = set->config.reset_position_ids ? i - start : i;
        if (row->document_start)
            row->document_start[i] = set->config.reset_attention_mask ? (int32_t)start : 0;
        if (set->config.eod >= 0 && row->tokens[i] == set->config.eod)
            start = i + 1;
    }
}

static loom_status gpt_get(void *context, int64_t index, const loom_sample_row *row) {
    const gpt *set = context;
    int64_t s = set->config.sequence_length;
    if (index >= set->indices.samples || set->indices.samples == 0)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: sample %lld asked, there are %lld", loom_indexed_prefix(set->indexed),
            (long long)index, (long long)set->indices.samples);
    /* A padding row is any sample with its loss masked: its tokens are legal and it costs no special case in the model.
     */
    int64_t last = 0, found = 0;
    LOOM_TRY(gather(set, set->indices.shuffle_index[index < 0 ? 0 : index], row->tokens, &last, &found));
    for (int64_t i = found; i < s; i++)
        row->tokens[i] = set->pad;
    if (found <= s)
        last = set->pad;
    fill_positions(set, row);
    for (int64_t i = 0; i < s; i++) {
        int64_t label = i + 1 < s ? row->tokens[i + 1] : last;
        bool padded = label == set->pad;
        bool masked = padded || (set->config.eod_mask_loss && row->tokens[i] == set->config.eod);
        row->labels[i] = padded ? 0 : label;
        row->loss_mask[i] = masked ? 0.0f : 1.0f;
    }
    for (int64_t i = 0; i < s; i++)
        if (row->tokens[i] == set->pad)
            row->tokens[i] = 0;
    if (index < 0)
        loom__mask_row(row, s);
    return LOOM_OK;
}

static void gpt_locate(void *context, int64_t index, char *text, size_t bytes) {
    const gpt *set = context;
    if (bytes == 0)
        return;
    *text = '\0';
    if (set->indices.samples == 0 || index >= set->indices.samples)
        return;
    loom__gpt_cut from = set->indices.sample_index[set->indices.shuffle_index[index < 0 ? 0 : index]];
    int64_t sequence = set->indices.document_index[from.place];
    int64_t byte = loom_indexed_pointer(set->indexed, sequence) +
                   from.offset * (int64_t)loom_dtype_size(loom_indexed_dtype(set->indexed));
    snprintf(text, bytes, "%s.bin, byte %lld (sequence %lld)", loom_indexed_prefix(set->indexed), (long long)byte,
        (long long)sequence);
}

/* ---- Creation ---- */

static void gpt_destroy(void *context) {
    gpt *set = context;
    loom__gpt_indices_free(&set->indices);
    free(set);
}

static loom_status check_config(const loom_indexed *indexed, const loom_gpt_dataset_config *config) {
    /* document_start is 32 bits wide */
    if (config->sequence_length < 1 || config->sequence_length > INT32_MAX)
        return loom_fail(LOOM_ERR_CONFIG, "sequence length is %lld, expected 1 to %d",
            (long long)config->sequence_length, INT32_MAX);
    if (config->seed < 0 || config->seed > UINT32_MAX)
        return loom_fail(
            LOOM_ERR_CONFIG, "the data's seed is %lld, expected 0 to %u", (long long)config->seed, UINT32_MAX);
    if (config->samples < -1)
        return loom_fail(LOOM_ERR_CONFIG, "number of samples is %lld, expected at least 0, or -1 for one epoch",
            (long long)config->samples);
    if (config->max_epochs < 0)
        return loom_fail(LOOM_ERR_CONFIG, "max_epochs is %lld, expected at least 1, or 0 for no limit",
            (long long)config->max_epochs);
    if (!config->split || config->which < LOOM_SPLIT_TRAIN || config->which >= LOOM_SPLIT_COUNT)
        return loom_fail(LOOM_ERR_CONFIG, "the split or which part of it is not given");
    bool needs_eod = config->reset_position_ids || config->reset_attention_mask || config->eod_mask_loss;
    if (needs_eod && config->eod < 0)
        return loom_fail(LOOM_ERR_CONFIG,
            "reset_position_ids, reset_attention_mask and eod_mask_loss need the tokenizer's end-of-document token");
    loom_dtype dtype = loom_indexed_dtype(indexed);
    if (dtype == LOOM_F32 || dtype == LOOM_F64)
        return loom_fail(LOOM_ERR_CONFIG, "%s: dtype is %s, expected an integer type for tokens",
            loom_indexed_prefix(indexed), loom_dtype_name(dtype));
    return LOOM_OK;
}

static loom_status make_indices(
    const loom_indexed *indexed, const loom_gpt_dataset_config *config, int64_t first, int64_t end, gpt *set) {
    loom__gpt_key key = {.first = first,
        .end = end,
        .sequence_length = config->sequence_length,
        .seed = config->seed,
        .samples = config->samples,
        .extra = config->add_extra_token_to_sequence,
        .keep_partial = config->which == LOOM_SPLIT_VALID && !config->drop_last_partial_validation_sequence};
    size_t count = (size_t)(end - first);
    int32_t *lengths = loom__gpt_large(count * sizeof *lengths);
    if (!lengths)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for the lengths of %zu documents", count);
    for (size_t i = 0; i < count; i++)
        lengths[i] = (int32_t)loom_indexed_length(indexed, first + (int64_t)i);
    loom_status status;
    if (config->index_mapping_dir) {
        key.lengths_hash = loom__gpt_hash(lengths, count * sizeof *lengths);
        status = loom__gpt_indices_cached(config->index_mapping_dir, &key, lengths, config->max_epochs, &set->indices);
    } else {
        status = loom__gpt_indices_build(&key, lengths, config->max_epochs, &set->indices);
    }
    free(lengths);
    return status ? loom_fail_context(status, "%s, %s part of '%s': ", loom_indexed_prefix(indexed),
                        loom__split_name(config->which), config->split)
                  : LOOM_OK;
}

loom_status loom_gpt_dataset_create(
    const loom_indexed *indexed, const loom_gpt_dataset_config *config, loom_dataset *dataset) {
    LOOM_TRY(check_config(indexed, config));
    double shares[LOOM_SPLIT_COUNT][2];
    LOOM_TRY(loom_data_split_parse(config->split, shares));
    if (shares[config->which][0] < 0.0)
        return loom_fail(
            LOOM_ERR_NOT_FOUND, "split '%s' gives no share to %s", config->split, loom__split_name(config->which));
    int64_t first, end;
    loom_data_split_bounds(shares[config->which], loom_indexed_sequences(indexed), &first, &end);

    gpt *set = calloc(1, sizeof *set);
    if (!set)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for a dataset", loom_indexed_prefix(indexed));
    set->indexed = indexed;
    set->config = *config;
    set->config.split = set->config.index_mapping_dir = NULL;
    set->pad = config->pad == config->eod || config->pad < 0 ? -1 : config->pad;
    loom_status status = make_indices(indexed, config, first, end, set);
    if (status != LOOM_OK) {
        gpt_destroy(set);
        return status;
    }
    *dataset = (loom_dataset){.context = set,
        .length = set->indices.samples,
        .sequence_length = config->sequence_length,
        .document_boundaries = config->reset_attention_mask,
        .get = gpt_get,
        .locate = gpt_locate,
        .destroy = gpt_destroy};
    return LOOM_OK;
}

loom_status loom_gpt_dataset_get_order(const loom_dataset *dataset, loom_gpt_dataset_order *order) {
    const loom_dataset *inner = loom__gpt_blend_inner(dataset);
    if (inner->get != gpt_get)
        return loom_fail(LOOM_ERR_ARGUMENT, "this dataset is no GPT dataset of one part: it has no order of its own");
    const loom__gpt_indices *indices = loom__gpt_dataset_indices(inner);
    *order = (loom_gpt_dataset_order){.first = indices->first,
        .end = indices->end,
        .epochs = indices->epochs,
        .documents = indices->documents,
        .document_index = indices->document_index,
        .samples = indices->samples,
        .sample_index = &indices->sample_index->place,
        .shuffle_index = indices->shuffle_index};
    return LOOM_OK;
}
