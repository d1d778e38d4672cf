/* Text of tokens that come one by one. Decoding is a function of all tokens, and costs as much; so a window of the last
 * ones is kept, and what its decoded text has more than before is new. The invariant: the window's text, but for what
 * the first token would lose at the beginning of a text, is the end of the text of all tokens, because the window is
 * only cut before a token that has text of its own, at which nothing depends on what came before. */
#include "data/tokenizer_json.h"
#include "data/utf8.h"

#include <stdlib.h>
#include <string.h>

struct loom_text_stream {
    const loom_tokenizer *tokenizer;
    int64_t *tokens; /* the window */
    size_t count, capacity;
    char *decoded; /* the window's text, or a part of it */
    size_t room;
    size_t passed; /* bytes of the window's text that have been given */
    loom__utf8 character;
    loom__buffer out;
};

static loom_status add_token(loom_text_stream *stream, int64_t token) {
    if (stream->count == stream->capacity) {
        size_t capacity = 2 * stream->capacity + 16;
        int64_t *grown = realloc(stream->tokens, capacity * sizeof *grown);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "no memory for the text of %zu tokens", capacity);
        stream->tokens = grown;
        stream->capacity = capacity;
    }
    stream->tokens[stream->count++] = token;
    return LOOM_OK;
}

static loom_status decode(loom_text_stream *stream, const int64_t *tokens, size_t count, size_t *bytes) {
    const loom_tokenizer *tokenizer = stream->tokenizer;
    LOOM_TRY(tokenizer->decode(tokenizer->context, tokens, count, stream->decoded, stream->room, bytes));
    if (*bytes <= stream->room)
        return LOOM_OK;
    char *grown = realloc(stream->decoded, 2 * *bytes);
    if (!grown)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for %zu bytes of text", *bytes);
    stream->decoded = grown;
    stream->room = 2 * *bytes;
    return tokenizer->decode(tokenizer->context, tokens, count, stream->decoded, stream->room, bytes);
}

/* What cannot be part of a character is given as U+FFFD. */
static loom_status replace_held(loom_text_stream *stream) {
    stream->character.count = 0;
    return loom__buffer_add(&stream->out, LOOM__UTF8_REPLACEMENT, sizeof LOOM__UTF8_REPLACEMENT - 1);
}

static loom_status give_byte(loom_text_stream *stream, unsigned char byte) {
    loom__utf8 *character = &stream->character;
    if (character->count > 0 && !loom__utf8_may_follow(character, byte))
        LOOM_TRY(replace_held(stream));
    size_t length = character->count + 1;
    if (!loom__utf8_take(character, byte))
        return replace_held(stream);
    return character->count == 0 ? loom__buffer_add(&stream->out, (const char *)character->held, length) : LOOM_OK;
}

static loom_status give(loom_text_stream *stream, size_t count) {
    size_t bytes = 0;
    LOOM_TRY(decode(stream, stream->tokens, count, &bytes));
    for (size_t i = stream->passed; i < bytes; i++)
        LOOM_TRY(give_byte(stream, (unsigned char)stream->decoded[i]));
    stream->passed = bytes;
    return LOOM_OK;
}

static size_t settled(const loom_text_stream *stream) {
    const loom_tokenizer *tokenizer = stream->tokenizer;
    return tokenizer->settled ? tokenizer->settled(tokenizer->context, stream->tokens, stream->count) : stream->count;
}

static loom_status cut_window(loom_text_stream *stream) {
    size_t bytes = 0;
    if (stream->count < 2 || settled(stream) < stream->count)
        return LOOM_OK;
    int64_t last = stream->tokens[stream->count - 1];
    LOOM_TRY(decode(stream, &last, 1, &bytes));
    if (bytes > 0) {
        stream->tokens[0] = last;
        stream->count = 1;
        stream->passed = bytes;
    }
    return LOOM_OK;
}

static loom_status begin(loom_text_stream *stream, const int64_t *before, size_t count) {
    for (size_t i = 0; i < count; i++)
        LOOM_TRY(add_token(stream, before[i]));
    LOOM_TRY(decode(stream, stream->tokens, stream->count, &stream->passed));
    return cut_window(stream);
}

loom_status loom_text_stream_create(
    const loom_tokenizer *tokenizer, const int64_t *before, size_t count, loom_text_stream **stream) {
    loom_text_stream *made = calloc(1, sizeof *made);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for a stream of text");
    made->tokenizer = tokenizer;
    loom_status status = begin(made, before, count);
    if (status) {
        loom_text_stream_destroy(made);
        return status;
    }
    *stream = made;
    return LOOM_OK;
}

loom_status loom_text_stream_put(loom_text_stream *stream, int64_t token, const char **text, size_t *bytes) {
    stream->out.bytes = 0;
    LOOM_TRY(add_token(stream, token));
    size_t count = settled(stream);
    if (count == stream->count) {
        LOOM_TRY(give(stream, count));
        LOOM_TRY(cut_window(stream));
    }
    *text = stream->out.bytes > 0 ? stream->out.text : "";
    *bytes = stream->out.bytes;
    return LOOM_OK;
}

loom_status loom_text_stream_end(loom_text_stream *stream, const char **text, size_t *bytes) {
    stream->out.bytes = 0;
    LOOM_TRY(give(stream, stream->count));
    if (stream->character.count > 0)
        LOOM_TRY(replace_held(stream));
    *text = stream->out.bytes > 0 ? stream->out.text : "";
    *bytes = stream->out.bytes;
    return LOOM_OK;
}

void loom_text_stream_destroy(loom_text_stream *stream) {
    if (!stream)
        return;
    free(stream->tokens);
    free(stream->decoded);
    free(stream->out.text);
    free(stream);
}
