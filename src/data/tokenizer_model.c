/* The model of a tokenizer.json: its vocabulary, its merges, and the tokens that were added to them. How many ids and
 * how much text there are is measured before anything is made, so that no number in the file decides what is allocated.
 */
#include "data/tokenizer_reader.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_own_letter(unsigned byte) {
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

static void fill_byte_letters(loom__reader *r) {
    short next = 256;
    memset(r->byte_of, 0xff, sizeof r->byte_of);
    for (short byte = 0; byte < 256; byte++)
        r->byte_of[is_own_letter((unsigned)byte) ? byte : next++] = byte;
}

size_t loom__byte_letters(const char *text, size_t bytes, char *letters) {
    unsigned letter_of[256], next = 256;
    for (unsigned byte = 0; byte < 256; byte++)
        letter_of[byte] = is_own_letter(byte) ? byte : next++;
    size_t made = 0;
    for (size_t i = 0; i < bytes; i++) {
        unsigned letter = letter_of[(unsigned char)text[i]];
        if (letter >= 0x80)
            letters[made++] = (char)(0xc0 | letter >> 6);
        letters[made++] = (char)(letter < 0x80 ? letter : 0x80 | (letter & 0x3f));
    }
    return made;
}

/* A vocabulary's text as the bytes that words are made of, in r->word. False: no word becomes it, the text is as it
 * stands in the file. */
static bool to_word(loom__reader *r, const char *text, size_t bytes, size_t *word_bytes) {
    size_t made = 0;
    for (size_t i = 0; r->made->byte_level && i < bytes; i++) {
        unsigned lead = (unsigned char)text[i];
        unsigned letter = lead < 0x80   ? lead
                          : lead < 0xe0 ? (lead & 0x1f) << 6 | ((unsigned char)text[++i] & 0x3f)
                                        : 511;
        if (letter >= 512 || r->byte_of[letter] < 0) {
            memcpy(r->word, text, bytes);
            *word_bytes = bytes;
            return false;
        }
        r->word[made++] = (char)r->byte_of[letter];
    }
    if (!r->made->byte_level)
        memcpy(r->word, text, made = bytes);
    *word_bytes = made;
    return bytes > 0;
}

static loom_status read_id(const loom__reader *r, const char *text, const json_t *id, uint64_t limit, uint64_t *value) {
    if (!json_is_integer(id) || json_integer_value(id) < 0 || (uint64_t)json_integer_value(id) >= limit) {
        char where[160];
        snprintf(where, sizeof where, "the id of token '%.100s'", text);
        return loom__reader_wrong(r, where, id, "a number from 0 to about the number of tokens");
    }
    *value = (uint64_t)json_integer_value(id);
    return LOOM_OK;
}

/* The set that holds the token, and the text under which it stands there. *normal is set up to be freed. */
static loom_status normal_text(
    loom__reader *r, const json_t *token, const char **text, size_t *bytes, loom__buffer *normal) {
    bool special, normalized;
    const json_t *content = json_object_get(token, "content");
    LOOM_TRY(loom__reader_bool(r, "added_tokens", token, "special", false, &special));
    LOOM_TRY(loom__reader_bool(r, "added_tokens", token, "normalized", !special, &normalized));
    *text = json_string_value(content);
    *bytes = json_string_length(content);
    if (!normalized)
        return LOOM_OK;
    loom__buffer swap = {0};
    loom_status status = loom__tokenizer_json_normalize(r->made, *text, *bytes, normal, &swap);
    free(swap.text);
    LOOM_TRY(status);
    *text = normal->text;
    *bytes = normal->bytes;
    return LOOM_OK;
}

const char *loom__reader_keep(loom__reader *r, const char *text, size_t bytes) {
    char *kept = r->end;
    memcpy(kept, text, bytes);
    r->end += bytes;
    return kept;
}

/* How many ids and how much text there are, before anything is made. */
static loom_status measure(loom__reader *r, const json_t *vocab, const json_t *added, uint64_t *ids, size_t *bytes) {
    /* Ids may have gaps, but a table must not be larger than the file deserves. */
    uint64_t limit = 4 * ((uint64_t)json_object_size(vocab) + json_array_size(added)) + 1024, id;
    const char *text;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)vocab, text, value) {
        LOOM_TRY(read_id(r, text, value, limit, &id));
        size_t length = strlen(text);
        r->longest = length > r->longest ? length : r->longest;
        *bytes += length;
        *ids = id >= *ids ? id + 1 : *ids;
    }
    size_t i;
    json_array_foreach(added, i, value) {
        const json_t *content = json_object_get(value, "content");
        size_t length = json_string_length(content);
        if (length < 1 || length > LOOM__TOKENIZER_ADDED)
            return loom__reader_wrong(r, "added_tokens.content", content, "a text of 1 to 1024 bytes");
        LOOM_TRY(read_id(r, json_string_value(content), json_object_get(value, "id"), limit, &id));
        r->longest = length > r->longest ? length : r->longest;
        loom__buffer normal = {0};
        loom_status status = normal_text(r, value, &text, &length, &normal);
        free(normal.text);
        LOOM_TRY(status);
        *bytes += length;
        *ids = id >= *ids ? id + 1 : *ids;
    }
    return LOOM_OK;
}

loom_status loom__reader_begin_model(loom__reader *r, uint64_t ids, size_t bytes) {
    loom__tokenizer_json *made = r->made;
    fill_byte_letters(r);
    LOOM_TRY(loom__bpe_create(&made->bpe, (uint32_t)ids));
    made->texts = malloc(bytes + 1);
    made->flags = calloc(ids + 1, sizeof *made->flags);
    made->bytes = malloc((ids + 1) * sizeof *made->bytes);
    r->word = malloc(r->longest + 1);
    if (!made->texts || !made->flags || !made->bytes || !r->word)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for %llu tokens", r->name, (unsigned long long)ids);
    memset(made->bytes, 0xff, (ids + 1) * sizeof *made->bytes);
    r->end = made->texts;
    return LOOM_OK;
}

static loom_status read_vocabulary(loom__reader *r, json_t *vocab, const json_t *added) {
    loom__tokenizer_json *made = r->made;
    uint64_t ids = 0;
    size_t bytes = 0;
    LOOM_TRY(measure(r, vocab, added, &ids, &bytes));
    LOOM_TRY(loom__reader_begin_model(r, ids, bytes));
    const char *text;
    json_t *value;
    json_object_foreach(vocab, text, value) {
        uint32_t id = (uint32_t)json_integer_value(value);
        size_t length;
        bool is_word = to_word(r, text, strlen(text), &length);
        if (made->bpe.pieces[id].text)
            return loom_fail(
                LOOM_ERR_FORMAT, "%s: model.vocab: '%.100s' has id %u, which another token has", r->name, text, id);
        loom__bpe_add(&made->bpe, id, loom__reader_keep(r, r->word, length), (uint32_t)length, is_word);
    }
    return LOOM_OK;
}

static uint32_t find_token(loom__reader *r, const char *text, size_t bytes) {
    size_t length;
    if (bytes > r->longest || !to_word(r, text, bytes, &length))
        return LOOM__NO_TOKEN;
    return loom__bpe_find(&r->made->bpe, r->word, length);
}

/* The two texts of "left right" or ["left", "right"]. */
static bool merge_parts(const json_t *merge, const char *part[2], size_t bytes[2]) {
    if (json_is_array(merge) && json_array_size(merge) == 2) {
        for (size_t k = 0; k < 2; k++) {
            part[k] = json_string_value(json_array_get(merge, k));
            bytes[k] = json_string_length(json_array_get(merge, k));
        }
        return part[0] && part[1];
    }
    const char *text = json_string_value(merge), *space = text ? strchr(text, ' ') : NULL;
    if (!space || strchr(space + 1, ' '))
        return false;
    part[0] = text;
    bytes[0] = (size_t)(space - text);
    part[1] = space + 1;
    bytes[1] = strlen(space + 1);
    return true;
}

static loom_status read_merges(loom__reader *r, const json_t *merges) {
    if (!json_is_array(merges) || json_array_size(merges) >= UINT32_MAX)
        return loom__reader_wrong(r, "model.merges", merges, "a list of pairs");
    char *joined = malloc(r->longest + 1);
    if (!joined)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for merges", r->name);
    loom_status status = LOOM_OK;
    size_t i;
    json_t *merge;
    json_array_foreach(merges, i, merge) {
        const char *part[2];
        size_t bytes[2];
        uint32_t left = LOOM__NO_TOKEN, right = LOOM__NO_TOKEN, whole = LOOM__NO_TOKEN;
        if (merge_parts(merge, part, bytes) && bytes[0] + bytes[1] <= r->longest) {
            memcpy(joined, part[0], bytes[0]);
            memcpy(joined + bytes[0], part[1], bytes[1]);
            left = find_token(r, part[0], bytes[0]);
            right = find_token(r, part[1], bytes[1]);
            whole = find_token(r, joined, bytes[0] + bytes[1]);
        }
        if (left == LOOM__NO_TOKEN || right == LOOM__NO_TOKEN || whole == LOOM__NO_TOKEN) {
            char where[64];
            snprintf(where, sizeof where, "model.merges[%zu]", i);
            status = loom__reader_wrong(r, where, merge, "a pair of tokens whose join is a token");
            break;
        }
        status = loom__map_put(&r->made->bpe.merges, (uint64_t)left << 32 | right, (uint64_t)i << 32 | whole);
        if (status != LOOM_OK)
            break;
    }
    free(joined);
    return status;
}

/* Tokens <0x00> to <0xFF>: what they decode to, and, with fallback, what characters without a token become. */
static loom_status read_byte_tokens(loom__reader *r, bool fallback) {
    for (int byte = 0; byte < 256; byte++) {
        char text[8];
        snprintf(text, sizeof text, "<0x%02X>", (unsigned)byte);
        uint32_t id = loom__bpe_find(&r->made->bpe, text, 6);
        if (fallback && id == LOOM__NO_TOKEN)
            return loom_fail(LOOM_ERR_FORMAT,
                "%s: model.vocab has no token %s, expected one for each byte, since byte_fallback is true", r->name,
                text);
        if (fallback)
            r->made->bpe.byte_ids[byte] = id;
    }
    return LOOM_OK;
}

loom_status loom__read_bpe_model(loom__reader *r, json_t *model, const json_t *added) {
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    loom__bpe *bpe = &r->made->bpe;
    bool fallback, join_unknown, whole;
    if (!json_is_object(model))
        return loom__reader_wrong(r, "model", model, "an object");
    /* Files of before 2021 have no type; they are BPE. */
    if (json_object_get(model, "type") ? !loom__reader_is_type(model, "BPE") : !json_object_get(model, "merges"))
        return loom__reader_refuse(r, "model.type", json_object_get(model, "type"), "BPE");
    LOOM_TRY(loom__reader_check_members(r, "model", model,
        " type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback ignore_merges "
        "vocab merges "));
    for (size_t i = 0; i < 2; i++)
        if (json_string_length(json_object_get(model, affixes[i])) > 0)
            return loom__reader_refuse(r, affixes[i], json_object_get(model, affixes[i]), "none");
    const json_t *dropout = json_object_get(model, "dropout"), *unknown = json_object_get(model, "unk_token");
    if (dropout && !json_is_null(dropout) && !(json_is_number(dropout) && !(json_number_value(dropout) != 0)))
        return loom__reader_refuse(r, "model.dropout", dropout, "null");
    LOOM_TRY(loom__reader_bool(r, "model", model, "fuse_unk", false, &join_unknown));
    LOOM_TRY(loom__reader_bool(r, "model", model, "byte_fallback", false, &fallback));
    LOOM_TRY(loom__reader_bool(r, "model", model, "ignore_merges", false, &whole));
    if (fallback && r->made->byte_level)
        return loom__reader_refuse(
            r, "model.byte_fallback", json_object_get(model, "byte_fallback"), "false with ByteLevel");
    json_t *vocab = json_object_get(model, "vocab");
    if (!json_is_object(vocab))
        return loom__reader_wrong(r, "model.vocab", vocab, "an object of tokens and ids");
    LOOM_TRY(read_vocabulary(r, vocab, added));
    bpe->by_character = !r->made->byte_level;
    bpe->join_unknown = join_unknown;
    bpe->whole_words_first = whole;
    LOOM_TRY(read_merges(r, json_object_get(model, "merges")));
    for (int byte = 0; r->made->byte_level && byte < 256; byte++)
        bpe->byte_ids[byte] = loom__bpe_find(bpe, (const char[]){(char)byte}, 1);
    LOOM_TRY(read_byte_tokens(r, fallback));
    if (unknown && !json_is_null(unknown)) {
        bpe->unknown =
            find_token(r, json_is_string(unknown) ? json_string_value(unknown) : "", json_string_length(unknown));
        if (bpe->unknown == LOOM__NO_TOKEN)
            return loom__reader_wrong(r, "model.unk_token", unknown, "null or a token of model.vocab");
    }
    return LOOM_OK;
}

/* ---- added tokens ---- */

static loom_status read_added_token(loom__reader *r, const json_t *token, loom__buffer *normal) {
    bool special;
    LOOM_TRY(loom__reader_bool(r, "added_tokens", token, "special", false, &special));
    const char *text = json_string_value(json_object_get(token, "content"));
    size_t bytes = json_string_length(json_object_get(token, "content")), length;
    uint32_t id = (uint32_t)json_integer_value(json_object_get(token, "id")), known = find_token(r, text, bytes);
    loom__bpe_piece *piece = &r->made->bpe.pieces[id];
    to_word(r, text, bytes, &length);
    if (r->made->flags[id] || (known != LOOM__NO_TOKEN && known != id) ||
        (piece->text && (piece->bytes != length || memcmp(piece->text, r->word, length) != 0)))
        return loom_fail(LOOM_ERR_FORMAT, "%s: added_tokens: '%.100s' has id %u, which is not what other tokens leave",
            r->name, text, id);
    r->made->flags[id] = (unsigned char)(LOOM__PIECE_ADDED | (special ? LOOM__PIECE_SPECIAL : 0));
    LOOM_TRY(normal_text(r, token, &text, &bytes, normal));
    if (bytes == 0 || bytes > LOOM__TOKENIZER_ADDED)
        return loom__reader_wrong(r, "added_tokens.content", token, "1 to 1024 bytes when normalized");
    if (!piece->text) /* it decodes to what it is found as */
        loom__bpe_add(&r->made->bpe, id, loom__reader_keep(r, text, bytes), (uint32_t)bytes, false);
    return loom__trie_add(text == normal->text ? &r->made->normal : &r->made->raw, text, bytes, id);
}

loom_status loom__read_added_tokens(loom__reader *r, const json_t *list) {
    static const char *const refused[] = {"single_word", "lstrip", "rstrip"};
    size_t i;
    json_t *token;
    json_array_foreach(list, i, token) {
        LOOM_TRY(loom__reader_check_members(
            r, "added_tokens", token, " id content single_word lstrip rstrip normalized special "));
        for (size_t k = 0; k < 3; k++)
            LOOM_TRY(loom__reader_require_bool(r, "added_tokens", token, refused[k], false, false));
        loom__buffer normal = {0};
        loom_status status = read_added_token(r, token, &normal);
        free(normal.text);
        LOOM_TRY(status);
    }
    return LOOM_OK;
}
