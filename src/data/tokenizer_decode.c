/* Tokens back to text, as a tokenizer.json's decoder does it. All but one thing is done token by token, so that more
 * tokens only append: a run of byte tokens (<0xE4><0xBD><0xA0>) is the text that its bytes are, or, where they are no
 * UTF-8, one U+FFFD for each of them, which is known when the run has ended. Special tokens are not there at all and
 * end no run. */
#include "data/tokenizer_json.h"
#include "data/utf8.h"

typedef struct decoding {
    const loom__tokenizer_json *tokenizer;
    char *text; /* NULL: only counted */
    size_t bytes;
    int strip; /* what may still be taken off the beginning */
} decoding;

static void write_text(decoding *d, const char *text, size_t bytes) {
    const loom__affix *strip = &d->tokenizer->decode_strip;
    while (d->strip > 0 && bytes > 0) {
        if (bytes < strip->bytes || memcmp(text, strip->text, strip->bytes) != 0) {
            d->strip = 0;
            break;
        }
        text += strip->bytes;
        bytes -= strip->bytes;
        d->strip--;
    }
    if (d->text && bytes > 0)
        memcpy(d->text + d->bytes, text, bytes);
    d->bytes += bytes;
}

static void decode_token(decoding *d, uint32_t id, bool first) {
    const loom__tokenizer_json *tokenizer = d->tokenizer;
    const loom__bpe_piece *piece = &tokenizer->bpe.pieces[id];
    const loom__affix *from = &tokenizer->decode_from, *to = &tokenizer->decode_to;
    const char *at = piece->text, *stop = at + piece->bytes;
    for (const char *found;
         from->bytes > 0 && (found = memmem(at, (size_t)(stop - at), from->text, from->bytes)) != NULL;
         at = found + from->bytes) {
        write_text(d, at, (size_t)(found - at));
        if (!(first && tokenizer->strip_first_token))
            write_text(d, to->text, to->bytes);
    }
    write_text(d, at, (size_t)(stop - at));
}

static bool is_skipped(const loom__tokenizer_json *tokenizer, int64_t id) {
    return (tokenizer->flags[id] & LOOM__PIECE_SPECIAL) || id == tokenizer->end || !tokenizer->bpe.pieces[id].text;
}

/* The run of byte tokens that tokens[0, count) begins with: where it ends, and whether its bytes are UTF-8. */
static size_t measure_run(const loom__tokenizer_json *tokenizer, const int64_t *tokens, size_t count, bool *is_utf8) {
    loom__utf8 character = {.count = 0};
    size_t i = 0;
    *is_utf8 = true;
    for (; i < count; i++) {
        if (is_skipped(tokenizer, tokens[i]))
            continue;
        if (tokenizer->bytes[tokens[i]] < 0)
            break;
        *is_utf8 = *is_utf8 && loom__utf8_take(&character, (unsigned char)tokenizer->bytes[tokens[i]]);
    }
    *is_utf8 = *is_utf8 && character.count == 0;
    return i;
}

static size_t decode_run(decoding *d, const int64_t *tokens, size_t count) {
    bool is_utf8;
    size_t length = measure_run(d->tokenizer, tokens, count, &is_utf8);
    for (size_t i = 0; i < length; i++)
        if (!is_skipped(d->tokenizer, tokens[i])) {
            char byte = (char)d->tokenizer->bytes[tokens[i]];
            write_text(d, is_utf8 ? &byte : LOOM__UTF8_REPLACEMENT, is_utf8 ? 1 : sizeof LOOM__UTF8_REPLACEMENT - 1);
        }
    return length;
}

/* Counts the text, and writes it where text is not NULL. */
static size_t decode_all(const loom__tokenizer_json *tokenizer, const int64_t *tokens, size_t count, char *text) {
    decoding d = {.tokenizer = tokenizer, .text = text, .strip = tokenizer->strip};
    bool first = true;
    for (size_t i = 0; i < count;) {
        if (is_skipped(tokenizer, tokens[i])) {
            i++;
            continue;
        }
        if (tokenizer->bytes[tokens[i]] >= 0)
            i += decode_run(&d, tokens + i, count - i);
        else
            decode_token(&d, (uint32_t)tokens[i++], first);
        first = false;
    }
    return d.bytes;
}

loom_status loom__tokenizer_json_decode(
    void *context, const int64_t *tokens, size_t count, char *text, size_t capacity, size_t *bytes) {
    const loom__tokenizer_json *tokenizer = context;
    for (size_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= tokenizer->bpe.ids)
            return loom_fail(LOOM_ERR_ARGUMENT, "token %zu is %lld, expected 0 to %lld", i, (long long)tokens[i],
                (long long)tokenizer->bpe.ids - 1);
    size_t wanted = decode_all(tokenizer, tokens, count, NULL);
    if (wanted <= capacity && wanted > 0)
        decode_all(tokenizer, tokens, count, text);
    *bytes = wanted;
    return LOOM_OK;
}

size_t loom__tokenizer_json_settled(void *context, const int64_t *tokens, size_t count) {
    const loom__tokenizer_json *tokenizer = context;
    size_t settled = count;
    for (size_t i = count; i > 0; i--) {
        bool is_known = tokens[i - 1] >= 0 && tokens[i - 1] < tokenizer->bpe.ids;
        if (is_known && is_skipped(tokenizer, tokens[i - 1]))
            continue;
        if (!is_known || tokenizer->bytes[tokens[i - 1]] < 0)
            break;
        settled = i - 1;
    }
    return settled;
}
