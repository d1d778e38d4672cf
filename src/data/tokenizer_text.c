/* Runs what a tokenizer.json describes: added tokens are cut out of the text, what lies between is normalized, cut into
 * words by one splitter after another, and each word goes through byte-pair encoding. No list of words is ever made: a
 * splitter hands each part to the next one. All that changes hangs on the call, so that threads may share a tokenizer.
 */
#include "data/tokenizer_json.h"
#include "data/utf8.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum {
    MARKS_IN_A_ROW = 256,        /* sorting them takes quadratic time */
    MATCH_STEPS_BASE = 10000000, /* of one match; and a few for each byte */
    MATCH_STEPS_PER_BYTE = 32,
    MATCH_HEAP_KIB = 64 * 1024,
};

/* ---- buffers and sets ---- */

loom_status loom__buffer_add(loom__buffer *buffer, const char *text, size_t bytes) {
    if (bytes > buffer->capacity - buffer->bytes) {
        size_t capacity = buffer->bytes + bytes + buffer->capacity / 2 + 64;
        char *grown = capacity < bytes ? NULL : realloc(buffer->text, capacity);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "no memory for %zu bytes of text", capacity);
        buffer->text = grown;
        buffer->capacity = capacity;
    }
    if (bytes > 0)
        memcpy(buffer->text + buffer->bytes, text, bytes);
    buffer->bytes += bytes;
    return LOOM_OK;
}

loom_status loom__trie_add(loom__trie *trie, const char *text, size_t bytes, uint32_t id) {
    uint64_t node = 0;
    for (size_t i = 0; i < bytes; i++) {
        uint64_t key = node << 8 | (unsigned char)text[i], next = loom__map_get(&trie->edges, key);
        if (next == UINT64_MAX) {
            next = ++trie->nodes;
            LOOM_TRY(loom__map_put(&trie->edges, key, next));
        }
        node = next;
    }
    trie->starts[(unsigned char)text[0]] = true;
    return loom__map_put(&trie->ends, node, id);
}

uint32_t loom__trie_find(const loom__trie *trie, const char *text, size_t bytes, size_t *length) {
    uint64_t node = 0, found = UINT64_MAX;
    for (size_t i = 0; i < bytes; i++) {
        node = loom__map_get(&trie->edges, node << 8 | (unsigned char)text[i]);
        if (node == UINT64_MAX)
            break;
        uint64_t id = loom__map_get(&trie->ends, node);
        if (id != UINT64_MAX) {
            found = id;
            *length = i + 1;
        }
    }
    return found == UINT64_MAX ? LOOM__NO_TOKEN : (uint32_t)found;
}

/* ---- normalization ---- */

static loom_status compose(const char *text, size_t bytes, loom__buffer *out) {
    bool ascii = true;
    for (size_t i = 0; i < bytes && ascii; i++)
        ascii = (unsigned char)text[i] < 0x80;
    if (ascii)
        return loom__buffer_add(out, text, bytes);
    int marks = 0;
    for (size_t i = 0; i < bytes;) {
        utf8proc_int32_t letter;
        i += (size_t)utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(bytes - i), &letter);
        marks = utf8proc_get_property(letter)->combining_class != 0 ? marks + 1 : 0;
        if (marks > MARKS_IN_A_ROW)
            return loom_fail(LOOM_ERR_ARGUMENT, "more than %d combining marks in a row, the last is U+%04X",
                MARKS_IN_A_ROW, (unsigned)letter);
    }
    utf8proc_uint8_t *composed = NULL;
    utf8proc_ssize_t made = utf8proc_map(
        (const utf8proc_uint8_t *)text, (utf8proc_ssize_t)bytes, &composed, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (made < 0)
        return loom_fail(
            LOOM_ERR_MEMORY, "%zu bytes of text cannot be put into normal form C: %s", bytes, utf8proc_errmsg(made));
    loom_status status = loom__buffer_add(out, (const char *)composed, (size_t)made);
    free(composed);
    return status;
}

/* Each `pattern` becomes `content`. */
static loom_status replace(
    const loom__affix *pattern, const loom__affix *content, const char *text, size_t bytes, loom__buffer *out) {
    if (bytes == 0)
        return LOOM_OK;
    const char *end = text + bytes;
    for (;;) {
        const char *found = memmem(text, (size_t)(end - text), pattern->text, pattern->bytes);
        LOOM_TRY(loom__buffer_add(out, text, (size_t)((found ? found : end) - text)));
        if (!found)
            return LOOM_OK;
        LOOM_TRY(loom__buffer_add(out, content->text, content->bytes));
        text = found + pattern->bytes;
    }
}

loom_status loom__tokenizer_json_normalize(const loom__tokenizer_json *tokenizer, const char *text, size_t bytes,
    loom__buffer *normalized, loom__buffer *swap) {
    normalized->bytes = 0;
    LOOM_TRY(loom__buffer_add(normalized, text, bytes));
    for (int i = 0; i < tokenizer->normalizer_count; i++) {
        const loom__normalizer *step = &tokenizer->normalizers[i];
        loom__buffer before = *normalized;
        *normalized = *swap;
        *swap = before;
        normalized->bytes = 0;
        if (step->kind == LOOM__NORMALIZE_NFC)
            LOOM_TRY(compose(swap->text, swap->bytes, normalized));
        else if (step->kind == LOOM__NORMALIZE_REPLACE)
            LOOM_TRY(replace(&step->pattern, &step->content, swap->text, swap->bytes, normalized));
        else {
            LOOM_TRY(loom__buffer_add(normalized, step->content.text, swap->bytes > 0 ? step->content.bytes : 0));
            LOOM_TRY(loom__buffer_add(normalized, swap->text, swap->bytes));
        }
    }
    return LOOM_OK;
}

/* ---- encoding ---- */

typedef struct encoding {
    const loom__tokenizer_json *tokenizer;
    int64_t *tokens;
    size_t capacity, count;
    loom__bpe_scratch scratch;
    loom__buffer normal, swap, changed[LOOM__TOKENIZER_STEPS]; /* the last: of each splitter */
    pcre2_match_data *match;
    pcre2_match_context *limits;
    loom__word_taker take; /* NULL: words are encoded */
    void *taker;
} encoding;

static loom_status put(encoding *e, const uint32_t *ids, size_t count) {
    if (count > e->capacity - e->count)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "the text gives more tokens than the %zu that there is room for", e->capacity);
    for (size_t i = 0; i < count; i++)
        e->tokens[e->count++] = ids[i];
    return LOOM_OK;
}

static loom_status encode_word(encoding *e, const char *text, size_t bytes) {
    if (e->take)
        return e->take(e->taker, text, bytes);
    size_t count = 0;
    LOOM_TRY(loom__bpe_encode(&e->tokenizer->bpe, text, bytes, &e->scratch, &count));
    return put(e, e->scratch.symbols, count);
}

static loom_status encode_words(encoding *e, const char *text, size_t bytes) {
    const char *end = text + bytes, *at = text;
    while (
        e->tokenizer->cut_at_spaces && at < end && (at = memmem(at, (size_t)(end - at), LOOM__METASPACE, 3)) != NULL) {
        if (at > text && (at - text < 3 || memcmp(at - 3, LOOM__METASPACE, 3) != 0)) {
            LOOM_TRY(encode_word(e, text, (size_t)(at - text)));
            text = at;
        }
        at += 3;
    }
    return text < end ? encode_word(e, text, (size_t)(end - text)) : LOOM_OK;
}

static loom_status split(encoding *e, int step, const char *text, size_t bytes, bool first);

/* The next match at or behind *from: [*from, *end) of text, or *from = bytes where there is none. */
static loom_status find_match(
    encoding *e, const loom__splitter *splitter, const char *text, size_t bytes, size_t *from, size_t *end) {
    if (splitter->kind != LOOM__SPLIT_REGEX) {
        const char *found = memmem(text + *from, bytes - *from, splitter->text.text, splitter->text.bytes);
        *from = found ? (size_t)(found - text) : bytes;
        *end = found ? *from + splitter->text.bytes : bytes;
        return LOOM_OK;
    }
    /* Empty matches cut nothing off; the next try begins behind the next character. */
    int result = pcre2_match(
        splitter->regex, (PCRE2_SPTR)text, bytes, *from, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, e->match, e->limits);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT)
        result = pcre2_match(splitter->regex, (PCRE2_SPTR)text, bytes, *from,
            PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY | PCRE2_NO_JIT, e->match, e->limits);
    if (result == PCRE2_ERROR_NOMATCH) {
        *from = *end = bytes;
        return LOOM_OK;
    }
    if (result < 0) {
        char reason[160] = "";
        pcre2_get_error_message(result, (PCRE2_UCHAR *)reason, sizeof reason);
        return loom_fail(LOOM_ERR_FORMAT, "%s: a pattern of pre_tokenizer fails on %zu bytes of text, at byte %zu: %s",
            e->tokenizer->name, bytes, *from, reason);
    }
    const PCRE2_SIZE *found = pcre2_get_ovector_pointer(e->match);
    if (found[0] < *from || found[1] <= found[0])
        return loom_fail(LOOM_ERR_FORMAT, "%s: a pattern of pre_tokenizer matches backwards, at byte %zu of a text",
            e->tokenizer->name, *from);
    *from = found[0];
    *end = found[1];
    return LOOM_OK;
}

/* Parts of text as the matches of the splitter divide it. */
static loom_status split_at_matches(encoding *e, int step, const char *text, size_t bytes, bool first) {
    const loom__splitter *splitter = &e->tokenizer->splitters[step];
    size_t done = 0, at = 0;
    while (at < bytes) {
        size_t end = bytes;
        LOOM_TRY(find_match(e, splitter, text, bytes, &at, &end));
        size_t cut = splitter->behavior == LOOM__SPLIT_WITH_PREVIOUS ? end : at;
        if (cut > done)
            LOOM_TRY(split(e, step + 1, text + done, cut - done, first && done == 0));
        done = cut;
        if (splitter->behavior == LOOM__SPLIT_ISOLATED && end > done) {
            LOOM_TRY(split(e, step + 1, text + done, end - done, first && done == 0));
            done = end;
        } else if (splitter->behavior == LOOM__SPLIT_REMOVED) {
            done = end;
        }
        at = end;
    }
    return done < bytes ? split(e, step + 1, text + done, bytes - done, first && done == 0) : LOOM_OK;
}

/* Spaces become what stands for them, and one is put before the text. */
static loom_status split_metaspace(encoding *e, int step, const char *text, size_t bytes, bool first) {
    static const loom__affix space = {.text = " ", .bytes = 1};
    const loom__splitter *splitter = &e->tokenizer->splitters[step];
    const loom__affix *mark = &splitter->text;
    loom__buffer *changed = &e->changed[step];
    bool has_mark = text[0] == ' ' || (bytes >= mark->bytes && memcmp(text, mark->text, mark->bytes) == 0);
    bool add = splitter->prefix == LOOM__PREFIX_ALWAYS || (splitter->prefix == LOOM__PREFIX_FIRST && first);
    changed->bytes = 0;
    LOOM_TRY(loom__buffer_add(changed, mark->text, add && !has_mark ? mark->bytes : 0));
    LOOM_TRY(replace(&space, mark, text, bytes, changed));
    return splitter->split ? split_at_matches(e, step, changed->text, changed->bytes, first)
                           : split(e, step + 1, changed->text, changed->bytes, first);
}

/* `first`: text begins where the whole text begins. */
static loom_status split(encoding *e, int step, const char *text, size_t bytes, bool first) {
    if (step == e->tokenizer->splitter_count)
        return encode_words(e, text, bytes);
    const loom__splitter *splitter = &e->tokenizer->splitters[step];
    if (splitter->kind == LOOM__SPLIT_METASPACE)
        return split_metaspace(e, step, text, bytes, first);
    if (splitter->prefix != LOOM__PREFIX_NEVER && text[0] != ' ') {
        e->changed[step].bytes = 0;
        LOOM_TRY(loom__buffer_add(&e->changed[step], " ", 1));
        LOOM_TRY(loom__buffer_add(&e->changed[step], text, bytes));
        text = e->changed[step].text;
        bytes++;
    }
    return splitter->kind == LOOM__SPLIT_NONE ? split(e, step + 1, text, bytes, first)
                                              : split_at_matches(e, step, text, bytes, first);
}

typedef loom_status (*between)(encoding *e, const char *text, size_t bytes, bool first);

/* Puts the added tokens of the set, the leftmost and then the longest, and hands what lies between them on. */
static loom_status cut_added(
    encoding *e, const loom__trie *trie, const char *text, size_t bytes, bool first, between rest) {
    size_t done = 0;
    for (size_t at = 0; trie->nodes > 0 && at < bytes;) {
        size_t length = 0;
        uint32_t id = trie->starts[(unsigned char)text[at]] ? loom__trie_find(trie, text + at, bytes - at, &length)
                                                            : LOOM__NO_TOKEN;
        if (id == LOOM__NO_TOKEN) {
            at++;
            continue;
        }
        if (at > done)
            LOOM_TRY(rest(e, text + done, at - done, first && done == 0));
        LOOM_TRY(put(e, &id, 1));
        done = at += length;
    }
    return done < bytes ? rest(e, text + done, bytes - done, first && done == 0) : LOOM_OK;
}

static loom_status encode_normal(encoding *e, const char *text, size_t bytes, bool first) {
    return split(e, 0, text, bytes, first);
}

static loom_status encode_raw(encoding *e, const char *text, size_t bytes, bool first) {
    if (e->tokenizer->normalizer_count > 0) {
        LOOM_TRY(loom__tokenizer_json_normalize(e->tokenizer, text, bytes, &e->normal, &e->swap));
        text = e->normal.text;
        bytes = e->normal.bytes;
    }
    return cut_added(e, &e->tokenizer->normal, text, bytes, first, encode_normal);
}

static loom_status begin(encoding *e, size_t bytes) {
    uint64_t steps = MATCH_STEPS_BASE + MATCH_STEPS_PER_BYTE * (uint64_t)bytes;
    e->match = pcre2_match_data_create(1, NULL);
    e->limits = pcre2_match_context_create(NULL);
    if (!e->match || !e->limits)
        return loom_fail(LOOM_ERR_MEMORY, "no memory to encode text");
    pcre2_set_match_limit(e->limits, steps < UINT32_MAX ? (uint32_t)steps : UINT32_MAX);
    pcre2_set_heap_limit(e->limits, MATCH_HEAP_KIB);
    return LOOM_OK;
}

static void end(encoding *e) {
    pcre2_match_data_free(e->match);
    pcre2_match_context_free(e->limits);
    loom__bpe_scratch_free(&e->scratch);
    free(e->normal.text);
    free(e->swap.text);
    for (int i = 0; i < LOOM__TOKENIZER_STEPS; i++)
        free(e->changed[i].text);
}

static loom_status check_text(const loom__tokenizer_json *tokenizer, const char *text, size_t bytes) {
    size_t valid = bytes > PTRDIFF_MAX ? 0 : loom__utf8_valid(text, bytes);
    if (valid == bytes)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_ARGUMENT, "byte %zu of the text (0x%02x) is not UTF-8, which %s works on", valid,
        (unsigned)(unsigned char)text[valid], tokenizer->name);
}

loom_status loom__tokenizer_json_encode(
    void *context, const char *text, size_t bytes, int64_t *tokens, size_t capacity, size_t *count) {
    const loom__tokenizer_json *tokenizer = context;
    LOOM_TRY(check_text(tokenizer, text, bytes));
    encoding e = {.tokenizer = tokenizer, .tokens = tokens, .capacity = capacity};
    loom_status status = begin(&e, bytes);
    if (status == LOOM_OK)
        status = put(&e, tokenizer->before, (size_t)tokenizer->before_count);
    if (status == LOOM_OK)
        status = cut_added(&e, &tokenizer->raw, text, bytes, true, encode_raw);
    if (status == LOOM_OK)
        status = put(&e, tokenizer->after, (size_t)tokenizer->after_count);
    end(&e);
    if (status == LOOM_OK)
        *count = e.count;
    return status;
}

loom_status loom__tokenizer_json_words(
    const loom__tokenizer_json *tokenizer, const char *text, size_t bytes, loom__word_taker take, void *taker) {
    LOOM_TRY(check_text(tokenizer, text, bytes));
    encoding e = {.tokenizer = tokenizer, .take = take, .taker = taker};
    loom_status status = begin(&e, bytes);
    if (status == LOOM_OK && bytes > 0)
        status = encode_raw(&e, text, bytes, true);
    end(&e);
    return status;
}

/* Characters that each have a token are one symbol, others as many as they have bytes. */
static int64_t symbols_of(const loom__tokenizer_json *tokenizer, const loom__affix *text) {
    int64_t symbols = 0;
    for (size_t i = 0, step; i < text->bytes; i += step) {
        utf8proc_int32_t letter;
        step = (size_t)utf8proc_iterate(
            (const utf8proc_uint8_t *)text->text + i, (utf8proc_ssize_t)(text->bytes - i), &letter);
        bool whole =
            tokenizer->bpe.by_character && loom__bpe_find(&tokenizer->bpe, text->text + i, step) != LOOM__NO_TOKEN;
        symbols += whole ? 1 : (int64_t)step;
    }
    return symbols;
}

void loom__tokenizer_json_room(const loom__tokenizer_json *tokenizer, int64_t *per_byte, int64_t *extra) {
    double most = 1; /* symbols for a byte; what is put once to a text may be put to each of its parts */
    for (int i = 0; i < tokenizer->normalizer_count; i++) {
        const loom__normalizer *step = &tokenizer->normalizers[i];
        double content = (double)symbols_of(tokenizer, &step->content);
        if (step->kind == LOOM__NORMALIZE_NFC)
            most *= 3; /* the standard's bound for UTF-8 */
        else if (step->kind == LOOM__NORMALIZE_REPLACE)
            most *= content > 1 ? content : 1;
        else
            most += content;
    }
    for (int i = 0; i < tokenizer->splitter_count; i++) {
        const loom__splitter *step = &tokenizer->splitters[i];
        double mark = (double)symbols_of(tokenizer, &step->text);
        if (step->kind == LOOM__SPLIT_METASPACE)
            most = 2 * most * (mark > 1 ? mark : 1);
        else if (step->prefix != LOOM__PREFIX_NEVER)
            most *= 2;
    }
    *per_byte = most < 1e9 ? (int64_t)most : 1000000000;
    *extra = tokenizer->before_count + tokenizer->after_count;
}
