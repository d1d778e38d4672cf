/* The fine-tuning dataset. All files are read and turned into tokens once, when it is made: what is kept is one array
 * of tokens, a flag for each of them that says whether it was an answer, and where samples begin. A row is one sample,
 * or with packing as many as follow one another and fit; each begins at position 0 and sees nothing of those before it,
 * so a row of several trains as the samples alone would. */
#include "data/finetune.h"
#include "data/dataset.h"
#include "data/json_line.h"
#include "format/file.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct finetune {
    int64_t s, samples, rows;
    int64_t *begin;     /* [samples + 1] first token of each sample */
    int64_t *first;     /* [rows + 1] first sample of each row */
    int32_t *tokens;    /* of all samples; a sample of n tokens takes n - 1 positions */
    bool *answer;       /* of each token: it counts where it is a label */
    int64_t room, kept; /* tokens */
    int64_t sample_room, row_room;
} finetune;

loom_finetune_dataset_config loom_finetune_dataset_config_default(void) {
    return (loom_finetune_dataset_config){0};
}

static void finetune_destroy(void *context) {
    finetune *set = context;
    free(set->begin);
    free(set->first);
    free(set->tokens);
    free(set->answer);
    free(set);
}

/* ---- Reading ---- */

static void put_sample(const finetune *set, int64_t sample, int64_t *at, const loom_sample_row *row) {
    int64_t from = set->begin[sample], positions = set->begin[sample + 1] - from - 1, start = *at;
    for (int64_t i = 0; i < positions; i++, ++*at) {
        row->tokens[*at] = set->tokens[from + i];
        row->labels[*at] = set->tokens[from + i + 1];
        row->loss_mask[*at] = set->answer[from + i + 1] ? 1.0f : 0.0f;
        row->position_ids[*at] = i;
        if (row->document_start)
            row->document_start[*at] = (int32_t)start;
    }
}

static loom_status finetune_get(void *context, int64_t index, const loom_sample_row *row) {
    const finetune *set = context;
    if (index >= set->rows)
        return loom_fail(LOOM_ERR_ARGUMENT, "row %lld of the fine-tuning data asked, there are %lld", (long long)index,
            (long long)set->rows);
    int64_t number = index < 0 ? 0 : index, at = 0;
    for (int64_t sample = set->first[number]; sample < set->first[number + 1]; sample++)
        put_sample(set, sample, &at, row);
    for (int64_t start = at; at < set->s; at++) {
        row->tokens[at] = row->labels[at] = 0;
        row->loss_mask[at] = 0.0f;
        row->position_ids[at] = at - start;
        if (row->document_start)
            row->document_start[at] = (int32_t)start;
    }
    if (index < 0)
        loom__mask_row(row, set->s);
    return LOOM_OK;
}

static int64_t finetune_positions(void *context, int64_t index) {
    const finetune *set = context;
    int64_t first = set->first[index], end = set->first[index + 1];
    return set->begin[end] - set->begin[first] - (end - first);
}

/* ---- Making ---- */

typedef struct reader {
    const loom_finetune_dataset_config *config;
    finetune *set;
    const char *path;
    int64_t line;
    int64_t *scratch; /* tokens of one text */
    size_t scratch_room;
} reader;

/* Room for one more element of an array that grows by doubling. */
static loom_status grow(void **array, int64_t *room, int64_t wanted, size_t size) {
    if (wanted <= *room)
        return LOOM_OK;
    int64_t larger = *room < 1024 ? 1024 : *room;
    while (larger < wanted)
        larger *= 2;
    void *grown = realloc(*array, (size_t)larger * size);
    if (!grown)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for %lld entries of the fine-tuning data", (long long)wanted);
    *array = grown;
    *room = larger;
    return LOOM_OK;
}

static loom_status append(finetune *set, int64_t token, bool answer) {
    int64_t room = set->room;
    LOOM_TRY(grow((void **)&set->answer, &room, set->kept + 1, sizeof *set->answer));
    LOOM_TRY(grow((void **)&set->tokens, &set->room, set->kept + 1, sizeof *set->tokens));
    set->answer[set->kept] = answer;
    set->tokens[set->kept++] = (int32_t)token;
    return LOOM_OK;
}

/* The tokens of a text behind those of the sample so far. Only the first text begins with a begin of text. */
static loom_status append_text(reader *from, const json_t *text, bool answer) {
    const loom_tokenizer *tokenizer = from->config->tokenizer;
    size_t bytes = json_string_length(text), count = 0, room = loom_tokenizer_room(tokenizer, bytes);
    if (room > from->scratch_room) {
        int64_t *larger = room < SIZE_MAX / sizeof *larger ? realloc(from->scratch, room * sizeof *larger) : NULL;
        if (!larger)
            return loom_fail(LOOM_ERR_MEMORY, "no memory for the tokens of %zu bytes", bytes);
        from->scratch = larger;
        from->scratch_room = room;
    }
    LOOM_TRY(tokenizer->encode(
        tokenizer->context, json_string_value(text), bytes, from->scratch, from->scratch_room, &count));
    bool first = from->set->kept == from->set->begin[from->set->samples];
    size_t skipped = !first && count > 0 && tokenizer->bos >= 0 && from->scratch[0] == tokenizer->bos;
    for (size_t i = skipped; i < count; i++)
        LOOM_TRY(append(from->set, from->scratch[i], answer));
    return answer ? append(from->set, tokenizer->eod, true) : LOOM_OK;
}

static loom_status wrong(const char *found) {
    return loom_fail(LOOM_ERR_FORMAT,
        "%s, expected {\"input\": \"…\", \"output\": \"…\"} or {\"messages\": [{\"role\": \"…\", \"content\": \"…\"}, "
        "…]}",
        found);
}

static loom_status take_messages(reader *from, const json_t *messages) {
    int64_t answers = 0;
    size_t i;
    json_t *message;
    json_array_foreach(messages, i, message) {
        const json_t *role = json_object_get(message, "role"), *content = json_object_get(message, "content");
        if (!json_is_string(role) || !json_is_string(content))
            return wrong("a message without the texts role and content");
        bool answer = strcmp(json_string_value(role), "assistant") == 0;
        answers += answer;
        LOOM_TRY(append_text(from, content, answer));
    }
    return answers ? LOOM_OK : wrong("no message of the role assistant");
}

static loom_status take_object(reader *from, const json_t *object) {
    const json_t *messages = json_object_get(object, "messages");
    if (json_is_array(messages))
        return take_messages(from, messages);
    const json_t *input = json_object_get(object, "input"), *output = json_object_get(object, "output");
    if (!json_is_string(input) || !json_is_string(output))
        return wrong("no texts input and output, and no list of messages");
    LOOM_TRY(append_text(from, input, false));
    return append_text(from, output, true);
}

/* Ends the sample, which gets a row of its own or joins the last. */
static loom_status end_sample(reader *from) {
    finetune *set = from->set;
    int64_t positions = set->kept - set->begin[set->samples] - 1;
    if (positions < 1)
        return loom_fail(LOOM_ERR_FORMAT, "a sample of %lld tokens, expected at least 2", (long long)positions + 1);
    if (positions > set->s)
        return loom_fail(LOOM_ERR_FORMAT,
            "the sample takes %lld positions, the sequence has %lld: shorten it, or take longer sequences",
            (long long)positions, (long long)set->s);
    LOOM_TRY(grow((void **)&set->begin, &set->sample_room, set->samples + 2, sizeof *set->begin));
    LOOM_TRY(grow((void **)&set->first, &set->row_room, set->rows + 2, sizeof *set->first));
    set->begin[++set->samples] = set->kept;
    int64_t used = 0;
    if (set->rows > 0)
        for (int64_t k = set->first[set->rows - 1]; k < set->samples - 1; k++)
            used += set->begin[k + 1] - set->begin[k] - 1;
    if (set->rows == 0 || !from->config->pack || used + positions > set->s)
        set->first[set->rows++] = set->samples - 1;
    set->first[set->rows] = set->samples;
    return LOOM_OK;
}

static loom_status read_line(reader *from, const char *text, size_t bytes) {
    json_t *object;
    loom_status status = loom__json_line_parse(text, bytes, true, &object);
    if (status == LOOM_OK && object)
        status = take_object(from, object);
    if (status == LOOM_OK && object)
        status = end_sample(from);
    json_decref(object);
    return status ? loom_fail_context(status, "%s:%lld: ", from->path, (long long)from->line) : LOOM_OK;
}

static loom_status read_text(reader *from, const char *path, const char *text, size_t length) {
    const char *at = text, *end = text + length;
    loom_status status = LOOM_OK;
    from->path = path;
    for (from->line = 1; at < end && !status; from->line++) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        status = read_line(from, at, (size_t)((stop ? stop : end) - at));
        at = stop ? stop + 1 : end;
    }
    return status;
}

static loom_status read_file(reader *from, const char *path) {
    loom__mapping file;
    LOOM_TRY(loom__map_file(path, &file));
    loom_status status = read_text(from, path, (const char *)file.data, file.bytes);
    loom__unmap_file(&file);
    return status;
}

static loom_status check_config(const loom_finetune_dataset_config *config) {
    if (config->sequence_length < 1 || config->sequence_length > INT32_MAX)
        return loom_fail(LOOM_ERR_CONFIG, "sequence length is %lld, expected 1 to %d",
            (long long)config->sequence_length, INT32_MAX);
    if (!config->tokenizer)
        return loom_fail(LOOM_ERR_CONFIG, "a fine-tuning dataset needs a tokenizer");
    if (config->tokenizer->eod < 0)
        return loom_fail(LOOM_ERR_CONFIG, "the tokenizer %s has no end-of-document token, which every answer ends with",
            config->tokenizer->name);
    if (config->vocab_size > 0 && config->tokenizer->vocab_size > config->vocab_size)
        return loom_fail(LOOM_ERR_CONFIG, "the tokenizer %s has %lld tokens, the model %lld, expected at least as many",
            config->tokenizer->name, (long long)config->tokenizer->vocab_size, (long long)config->vocab_size);
    return LOOM_OK;
}

/* Begins to read; what it allocates is freed by finish. */
static loom_status begin(const loom_finetune_dataset_config *config, reader *from) {
    LOOM_TRY(check_config(config));
    finetune *set = calloc(1, sizeof *set);
    if (!set)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for a dataset");
    set->s = config->sequence_length;
    *from = (reader){.config = config, .set = set};
    loom_status status = grow((void **)&set->begin, &set->sample_room, 1, sizeof *set->begin);
    if (status) {
        finetune_destroy(set);
        return status;
    }
    set->begin[0] = 0;
    return LOOM_OK;
}

/* After reading with this status: the dataset, or nothing. */
static loom_status finish(reader *from, loom_status status, loom_dataset *dataset) {
    finetune *set = from->set;
    free(from->scratch);
    if (!status && set->rows == 0)
        status = loom_fail(LOOM_ERR_NOT_FOUND, "%s: no sample, expected at least one line of JSON", from->path);
    if (status) {
        finetune_destroy(set);
        return status;
    }
    *dataset = (loom_dataset){.context = set,
        .length = set->rows,
        .sequence_length = set->s,
        .document_boundaries = from->config->pack,
        .get = finetune_get,
        .positions = finetune_positions,
        .destroy = finetune_destroy};
    return LOOM_OK;
}

loom_status loom__finetune_open_memory(const loom_finetune_dataset_config *config, const char *name, const void *text,
    size_t bytes, loom_dataset *dataset) {
    reader from;
    LOOM_TRY(begin(config, &from));
    return finish(&from, read_text(&from, name, text, bytes), dataset);
}

loom_status loom_finetune_dataset_create(const loom_finetune_dataset_config *config, loom_dataset *dataset) {
    reader from;
    if (config->count < 1)
        return loom_fail(
            LOOM_ERR_CONFIG, "a fine-tuning dataset of %lld files, expected at least 1", (long long)config->count);
    LOOM_TRY(begin(config, &from));
    loom_status status = LOOM_OK;
    for (int64_t i = 0; !status && i < config->count; i++)
        status = read_file(&from, config->paths[i]);
    return finish(&from, status, dataset);
}
