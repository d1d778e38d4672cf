/* Encodes a block of documents: what one worker does at a time. A document that cannot be encoded leaves nothing behind
 * in any dataset, so that those of several keys correspond; it is counted, and the first are told with file and line.
 */
#include "data/json_line.h"
#include "data/preprocess.h"

#include <stdlib.h>
#include <string.h>

/* A longer document's memory is not kept for the next. */
enum { KEPT_BYTES = 8 << 20, PIECE_BYTES = 1 << 16 };

void loom__encoded_block_free(loom__encoded_block *block) {
    loom__text_block_free(&block->text);
    for (int i = 0; i < LOOM__PREPROCESS_KEYS; i++)
        free(block->elements[i].data);
    free(block->lengths);
    *block = (loom__encoded_block){0};
}

void loom__encode_scratch_free(loom__encode_scratch *scratch) {
    free(scratch->tokens);
    *scratch = (loom__encode_scratch){0};
}

static loom_status reserve_tokens(loom__encode_scratch *scratch, size_t wanted) {
    if (wanted <= scratch->capacity)
        return LOOM_OK;
    loom__encode_scratch_free(scratch);
    scratch->tokens = wanted > PTRDIFF_MAX / sizeof *scratch->tokens ? NULL : malloc(wanted * sizeof *scratch->tokens);
    if (!scratch->tokens)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for %zu tokens", wanted);
    scratch->capacity = wanted;
    return LOOM_OK;
}

static loom_status reserve_elements(loom__elements *elements, size_t more) {
    if (more <= elements->capacity - elements->bytes)
        return LOOM_OK;
    size_t capacity = elements->bytes + more + elements->capacity / 2;
    unsigned char *grown = realloc(elements->data, capacity);
    if (!grown)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for %zu bytes of tokens", capacity);
    elements->data = grown;
    elements->capacity = capacity;
    return LOOM_OK;
}

/* The dtype follows the vocabulary, so that ids that the tokenizer may give fit it. */
static loom_status append_tokens(
    const loom__preprocess *job, const int64_t *tokens, size_t count, loom__elements *elements) {
    LOOM_TRY(reserve_elements(elements, count * job->size));
    for (size_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= job->tokenizer->vocab_size)
            return loom_fail(LOOM_ERR_STATE, "tokenizer %s gives token %lld, expected 0 to %lld", job->tokenizer->name,
                (long long)tokens[i], (long long)job->tokenizer->vocab_size - 1);
    unsigned char *out = elements->data + elements->bytes;
    for (size_t i = 0; i < count; i++) {
        if (job->dtype == LOOM_U16)
            memcpy(out + 2 * i, &(uint16_t){(uint16_t)tokens[i]}, 2);
        else
            memcpy(out + 4 * i, &(int32_t){(int32_t)tokens[i]}, 4);
    }
    elements->bytes += count * job->size;
    return LOOM_OK;
}

/* Each byte is a token of its own, so that a text may be encoded in pieces: eight bytes a token would be many times a
 * long text. */
static loom_status encode_bytes(const loom__preprocess *job, const char *text, size_t bytes, bool append_eod,
    loom__encode_scratch *scratch, loom__elements *elements, int64_t *length) {
    const loom_tokenizer *tokenizer = job->tokenizer;
    if (bytes >= INT32_MAX)
        return loom_fail(LOOM_ERR_ARGUMENT, "the document has %zu tokens, expected at most %d", bytes, INT32_MAX);
    LOOM_TRY(reserve_tokens(scratch, PIECE_BYTES));
    LOOM_TRY(reserve_elements(elements, (bytes + 1) * job->size));
    for (size_t from = 0, count; from < bytes; from += count) {
        size_t piece = bytes - from < PIECE_BYTES ? bytes - from : PIECE_BYTES;
        LOOM_TRY(tokenizer->encode(tokenizer->context, text + from, piece, scratch->tokens, PIECE_BYTES, &count));
        LOOM_TRY(append_tokens(job, scratch->tokens, count, elements));
    }
    if (append_eod)
        LOOM_TRY(append_tokens(job, &tokenizer->eod, 1, elements));
    *length = (int64_t)bytes + append_eod;
    return LOOM_OK;
}

/* One text of one key. *length: its tokens, the end of document included; 0 where there is no text. */
static loom_status encode_text(const loom__preprocess *job, const char *text, size_t bytes, bool keep_empty,
    loom__encode_scratch *scratch, loom__elements *elements, int64_t *length) {
    const loom_tokenizer *tokenizer = job->tokenizer;
    size_t room = loom_tokenizer_room(tokenizer, bytes), count = 0;
    if (tokenizer->encode == loom_tokenizer_byte()->encode)
        return encode_bytes(
            job, text, bytes, job->config.append_eod && (bytes > 0 || keep_empty), scratch, elements, length);
    LOOM_TRY(reserve_tokens(scratch, room < SIZE_MAX ? room + 1 : room));
    if (bytes > 0) /* a tokenizer's begin of text alone is no document */
        LOOM_TRY(tokenizer->encode(tokenizer->context, text, bytes, scratch->tokens, scratch->capacity - 1, &count));
    if (job->config.append_eod && (count > 0 || keep_empty))
        scratch->tokens[count++] = tokenizer->eod;
    if (count > INT32_MAX)
        return loom_fail(LOOM_ERR_ARGUMENT, "the document has %zu tokens, expected at most %d", count, INT32_MAX);
    LOOM_TRY(append_tokens(job, scratch->tokens, count, elements));
    *length = (int64_t)count;
    return LOOM_OK;
}

/* Blank lines are no documents; they are skipped without being counted. */
static loom_status encode_json(const loom__preprocess *job, loom__encoded_block *block, const char *text, size_t bytes,
    loom__encode_scratch *scratch, int64_t *lengths) {
    json_t *object;
    LOOM_TRY(loom__json_line_parse(text, bytes, false, &object));
    if (!object) {
        lengths[0] = LOOM__DOCUMENT_SKIPPED;
        return LOOM_OK;
    }
    loom_status status = LOOM_OK;
    for (int64_t k = 0; k < job->key_count && status == LOOM_OK; k++) {
        const char *value;
        size_t value_bytes;
        status = loom__json_line_text(object, job->keys[k], &value, &value_bytes);
        if (status == LOOM_OK)
            status = encode_text(job, value, value_bytes, true, scratch, &block->elements[k], &lengths[k]);
    }
    json_decref(object);
    return status;
}

static loom_status encode_plain(const loom__preprocess *job, loom__encoded_block *block, loom_text_format format,
    const char *text, size_t bytes, loom__encode_scratch *scratch, int64_t *length) {
    if (format == LOOM_TEXT_LINE && bytes > 0 && text[bytes - 1] == '\r')
        bytes--;
    LOOM_TRY(encode_text(job, text, bytes, false, scratch, &block->elements[0], length));
    if (*length == 0) {
        block->empty++;
        *length = LOOM__DOCUMENT_SKIPPED;
    }
    return LOOM_OK;
}

/* Where a document lies, for people. */
static loom_status fail_at(const loom__preprocess *job, const loom__document *document, loom_text_format format) {
    const char *path = job->files.files[document->file].path;
    if (format == LOOM_TEXT_FILE)
        return loom_fail_context(LOOM_ERR_FORMAT, "%s: ", path);
    return loom_fail_context(LOOM_ERR_FORMAT, "%s:%lld: ", path, (long long)document->line);
}

static loom_status encode_document(const loom__preprocess *job, loom__encoded_block *block,
    const loom__document *document, loom__encode_scratch *scratch, int64_t *lengths) {
    size_t before[LOOM__PREPROCESS_KEYS];
    int64_t empty = block->empty;
    for (int64_t k = 0; k < job->key_count; k++)
        before[k] = block->elements[k].bytes;
    const char *text = block->text.text + document->offset;
    loom_text_format format = loom__text_format_of(job->config.format, job->files.files[document->file].path);
    loom_status status = loom__text_check_length(document);
    if (status == LOOM_OK)
        status = format == LOOM_TEXT_JSON ? encode_json(job, block, text, document->bytes, scratch, lengths)
                                          : encode_plain(job, block, format, text, document->bytes, scratch, lengths);
    if (status == LOOM_OK)
        return LOOM_OK;
    bool skip = !job->config.strict && status != LOOM_ERR_MEMORY && status != LOOM_ERR_STATE;
    status = status == LOOM_ERR_MEMORY || status == LOOM_ERR_STATE ? status : fail_at(job, document, format);
    if (!skip)
        return status;
    for (int64_t k = 0; k < job->key_count; k++)
        block->elements[k].bytes = before[k];
    block->empty = empty;
    block->invalid++;
    if (block->message_count < LOOM__PREPROCESS_MESSAGES)
        strncpy(block->messages[block->message_count++], loom_error_message(), sizeof block->messages[0] - 1);
    lengths[0] = LOOM__DOCUMENT_SKIPPED;
    return LOOM_OK;
}

static loom_status begin_block(const loom__preprocess *job, loom__encoded_block *block) {
    for (int64_t k = 0; k < job->key_count; k++) {
        block->elements[k].bytes = 0;
        if (block->elements[k].capacity > KEPT_BYTES) {
            free(block->elements[k].data);
            block->elements[k] = (loom__elements){0};
        }
    }
    block->empty = block->invalid = 0;
    block->message_count = 0;
    memset(block->messages, 0, sizeof block->messages);
    int64_t wanted = block->text.count * job->key_count;
    if (wanted > block->length_capacity) {
        free(block->lengths);
        block->lengths = calloc((size_t)wanted, sizeof *block->lengths);
        block->length_capacity = block->lengths ? wanted : 0;
    }
    return block->lengths ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "no memory for %lld documents", (long long)wanted);
}

void loom__encode_block(const loom__preprocess *job, loom__encoded_block *block, loom__encode_scratch *scratch) {
    block->status = begin_block(job, block);
    for (int64_t i = 0; i < block->text.count && block->status == LOOM_OK; i++)
        block->status =
            encode_document(job, block, &block->text.documents[i], scratch, block->lengths + i * job->key_count);
    block->error[0] = '\0';
    if (block->status != LOOM_OK)
        strncat(block->error, loom_error_message(), sizeof block->error - 1);
    if (scratch->capacity > KEPT_BYTES / sizeof *scratch->tokens)
        loom__encode_scratch_free(scratch);
}
