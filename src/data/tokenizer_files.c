/* Byte-level BPE from other files than tokenizer.json: GPT-2's vocab.json and merges.txt, whose content is put where it
 * stands in a tokenizer.json, and tiktoken's ranks. There a pair is joined when its join is a token, the one of lowest
 * rank first, so that the joins follow from the tokens: every way of cutting a token in two tokens is one, of its rank.
 */
#include "data/tokenizer_reader.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- vocab.json and merges.txt ---- */

/* The lines of the file as "left right"; its first may be a comment. */
static loom_status list_merges(const char *name, const char *text, size_t bytes, json_t *merges) {
    const char *end = text + bytes;
    for (int64_t line = 1; text < end; line++) {
        const char *stop = memchr(text, '\n', (size_t)(end - text));
        size_t length = (size_t)((stop ? stop : end) - text);
        const char *begin = text;
        text = stop ? stop + 1 : end;
        length -= length > 0 && begin[length - 1] == '\r';
        if (length == 0 || (line == 1 && length >= 8 && memcmp(begin, "#version", 8) == 0))
            continue;
        json_t *merge = json_stringn(begin, length);
        if (!merge || json_array_append_new(merges, merge) != 0)
            return loom_fail(
                LOOM_ERR_FORMAT, "%s: merges, line %lld: is not UTF-8, expected two tokens", name, (long long)line);
    }
    return LOOM_OK;
}

static json_t *list_special(const json_t *vocab, const char *const *special) {
    json_t *list = json_array();
    for (int i = 0; list && special[i]; i++) {
        json_t *id = json_object_get(vocab, special[i]);
        if (json_is_integer(id))
            json_array_append_new(list, json_pack("{s:s, s:O, s:b}", "content", special[i], "id", id, "special", 1));
    }
    return list;
}

loom_status loom__tokenizer_json_from_merges(const char *name, const char *vocab, size_t vocab_bytes,
    const char *merges, size_t merge_bytes, const char *const *special, loom__tokenizer_json **tokenizer) {
    json_error_t error;
    json_t *pieces = json_loadb(vocab, vocab_bytes, JSON_REJECT_DUPLICATES, &error), *pairs = json_array();
    loom_status status = LOOM_OK;
    if (!pieces)
        status = loom_fail(LOOM_ERR_FORMAT, "%s:%d:%d: no vocab.json: %s", name, error.line, error.column, error.text);
    if (status == LOOM_OK)
        status = list_merges(name, merges, merge_bytes, pairs);
    json_t *root = status != LOOM_OK
                       ? NULL
                       : json_pack("{s:o, s:{s:s, s:b}, s:{s:s}, s:{s:s, s:O, s:O}}", "added_tokens",
                             list_special(pieces, special), "pre_tokenizer", "type", "ByteLevel", "add_prefix_space", 0,
                             "decoder", "type", "ByteLevel", "model", "type", "BPE", "vocab", pieces, "merges", pairs);
    if (status == LOOM_OK)
        status = root ? loom__tokenizer_json_build(name, root, tokenizer)
                      : loom_fail(LOOM_ERR_MEMORY, "%s: no memory", name);
    json_decref(root);
    json_decref(pairs);
    json_decref(pieces);
    return status;
}

/* ---- ranks ---- */

enum { LLAMA3_RANKS = 128000, LLAMA3_SPECIAL = 256, LONGEST_TOKEN = 1 << 16 };

const char loom__llama3_pattern[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
                                    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

typedef struct rank_line {
    const char *code; /* base64 */
    size_t code_bytes;
    uint64_t rank;
} rank_line;

static int value_of(char letter) {
    return letter >= 'A' && letter <= 'Z'   ? letter - 'A'
           : letter >= 'a' && letter <= 'z' ? letter - 'a' + 26
           : letter >= '0' && letter <= '9' ? letter - '0' + 52
           : letter == '+'                  ? 62
           : letter == '/'                  ? 63
                                            : -1;
}

/* The bytes of a code; SIZE_MAX where it is none. `out` has room for 3 / 4 of its letters. */
static size_t decode64(const char *code, size_t letters, char *out) {
    size_t made = 0, padding = letters > 0 && code[letters - 1] == '=';
    padding += letters > 1 && code[letters - 2] == '=';
    if (letters == 0 || letters % 4 != 0)
        return SIZE_MAX;
    for (size_t i = 0; i < letters; i += 4) {
        unsigned bits = 0;
        size_t bytes = i + 4 == letters ? 3 - padding : 3;
        for (size_t k = 0; k < 4; k++) {
            int value = k <= bytes ? value_of(code[i + k]) : 0;
            if (value < 0)
                return SIZE_MAX;
            bits = bits << 6 | (unsigned)value;
        }
        for (size_t k = 0; k < bytes; k++)
            out[made++] = (char)(bits >> (16 - 8 * k));
    }
    return made;
}

/* The next line that is not empty; false at the end. *at moves behind it. */
static bool next_line(const char **at, const char *end, const char **line, size_t *bytes) {
    while (*at < end) {
        const char *stop = memchr(*at, '\n', (size_t)(end - *at));
        *line = *at;
        *bytes = (size_t)((stop ? stop : end) - *at);
        *at = stop ? stop + 1 : end;
        *bytes -= *bytes > 0 && (*line)[*bytes - 1] == '\r';
        if (*bytes > 0)
            return true;
    }
    return false;
}

static bool parse_line(const char *line, size_t bytes, rank_line *parsed) {
    const char *space = memchr(line, ' ', bytes);
    if (!space || space + 1 == line + bytes || line + bytes - space > 10)
        return false;
    *parsed = (rank_line){.code = line, .code_bytes = (size_t)(space - line)};
    for (const char *digit = space + 1; digit < line + bytes; digit++) {
        if (*digit < '0' || *digit > '9')
            return false;
        parsed->rank = 10 * parsed->rank + (uint64_t)(*digit - '0');
    }
    return true;
}

static loom_status wrong_line(const loom__reader *r, int64_t number, const char *line, size_t bytes) {
    return loom_fail(LOOM_ERR_FORMAT,
        "%s: token %lld: '%.*s' is no line of ranks, expected base64, a space and a rank below the number of lines",
        r->name, (long long)number, (int)(bytes < 60 ? bytes : 60), line);
}

/* Ranks are the numbers below the number of lines, each once: looked at before anything is made. */
static loom_status measure(loom__reader *r, const char *text, size_t bytes, uint64_t *ranks, size_t *text_bytes) {
    const char *at = text, *end = text + bytes, *line;
    size_t length;
    rank_line parsed;
    *ranks = 0;
    *text_bytes = 0;
    for (; next_line(&at, end, &line, &length); ++*ranks) {
        if (!parse_line(line, length, &parsed) || parsed.code_bytes > LONGEST_TOKEN)
            return wrong_line(r, (int64_t)*ranks, line, length);
        size_t most = parsed.code_bytes / 4 * 3;
        *text_bytes += most;
        r->longest = most > r->longest ? most : r->longest;
    }
    return *ranks > 0 ? LOOM_OK : loom_fail(LOOM_ERR_FORMAT, "%s: has no token, expected a line for each", r->name);
}

static loom_status add_ranks(loom__reader *r, const char *text, size_t bytes, uint64_t ranks) {
    const char *at = text, *end = text + bytes, *line;
    size_t length;
    rank_line parsed;
    loom__bpe *bpe = &r->made->bpe;
    for (int64_t number = 0; next_line(&at, end, &line, &length); number++) {
        if (!parse_line(line, length, &parsed) || parsed.rank >= ranks || bpe->pieces[parsed.rank].text)
            return wrong_line(r, number, line, length);
        size_t made = decode64(parsed.code, parsed.code_bytes, r->word);
        if (made == SIZE_MAX || made == 0)
            return wrong_line(r, number, line, length);
        if (loom__bpe_find(bpe, r->word, made) != LOOM__NO_TOKEN)
            return loom_fail(LOOM_ERR_FORMAT, "%s: token %lld has the bytes of token %u, expected others", r->name,
                (long long)number, loom__bpe_find(bpe, r->word, made));
        loom__bpe_add(bpe, (uint32_t)parsed.rank, loom__reader_keep(r, r->word, made), (uint32_t)made, true);
    }
    return LOOM_OK;
}

static loom_status add_joins(loom__reader *r, uint64_t ranks) {
    loom__bpe *bpe = &r->made->bpe;
    for (uint32_t id = 0; id < ranks; id++) {
        const loom__bpe_piece piece = bpe->pieces[id];
        for (uint32_t cut = 1; cut < piece.bytes; cut++) {
            uint32_t left = loom__bpe_find(bpe, piece.text, cut);
            uint32_t right = left == LOOM__NO_TOKEN ? left : loom__bpe_find(bpe, piece.text + cut, piece.bytes - cut);
            if (right != LOOM__NO_TOKEN)
                LOOM_TRY(loom__map_put(&bpe->merges, (uint64_t)left << 32 | right, (uint64_t)id << 32 | id));
        }
    }
    for (int byte = 0; byte < 256; byte++) {
        bpe->byte_ids[byte] = loom__bpe_find(bpe, (const char[]){(char)byte}, 1);
        if (bpe->byte_ids[byte] == LOOM__NO_TOKEN)
            return loom_fail(
                LOOM_ERR_FORMAT, "%s: no token is the byte 0x%02x, expected one for each byte", r->name, byte);
    }
    return LOOM_OK;
}

/* The special tokens that Llama 3's own program puts behind its ranks. */
static void llama3_special(int i, char text[64]) {
    static const char *const named[] = {"<|begin_of_text|>", "<|end_of_text|>", NULL, NULL, NULL, NULL,
        "<|start_header_id|>", "<|end_header_id|>", NULL, "<|eot_id|>"};
    if (i < 10 && named[i])
        snprintf(text, 64, "%s", named[i]);
    else
        snprintf(text, 64, "<|reserved_special_token_%d|>", i < 6 ? i - 2 : i == 8 ? 4 : i - 5);
}

static json_t *list_llama3(uint64_t ranks) {
    json_t *list = json_array();
    for (int i = 0; list && ranks == LLAMA3_RANKS && i < LLAMA3_SPECIAL; i++) {
        char text[64];
        llama3_special(i, text);
        json_array_append_new(
            list, json_pack("{s:s, s:I, s:b}", "content", text, "id", (json_int_t)ranks + i, "special", 1));
    }
    return list;
}

static loom_status read_ranks(loom__reader *r, const char *text, size_t bytes, json_t *steps, json_t *decoder) {
    uint64_t ranks;
    size_t text_bytes;
    LOOM_TRY(loom__read_splitters(r, steps));
    LOOM_TRY(measure(r, text, bytes, &ranks, &text_bytes));
    bool llama3 = ranks == LLAMA3_RANKS;
    r->longest = r->longest < 64 ? 64 : r->longest;
    LOOM_TRY(loom__reader_begin_model(
        r, ranks + (llama3 ? LLAMA3_SPECIAL : 0), text_bytes + (llama3 ? LLAMA3_SPECIAL * 64 : 0)));
    r->made->bpe.whole_words_first = true;
    LOOM_TRY(add_ranks(r, text, bytes, ranks));
    LOOM_TRY(add_joins(r, ranks));
    json_t *special = list_llama3(ranks);
    loom_status status = loom__read_added_tokens(r, special);
    json_decref(special);
    LOOM_TRY(status);
    return loom__read_decoder(r, decoder);
}

loom_status loom__tokenizer_json_from_ranks(
    const char *name, const char *text, size_t bytes, loom__tokenizer_json **tokenizer) {
    json_t *steps = json_pack("{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, {s:s, s:b, s:b}]}", "type", "Sequence",
        "pretokenizers", "type", "Split", "pattern", "Regex", loom__llama3_pattern, "behavior", "Isolated", "invert", 0,
        "type", "ByteLevel", "add_prefix_space", 0, "use_regex", 0);
    json_t *decoder = json_pack("{s:s}", "type", "ByteLevel");
    loom__reader r;
    loom_status status = loom__reader_begin(name, &r);
    if (status == LOOM_OK)
        status = steps && decoder ? read_ranks(&r, text, bytes, steps, decoder)
                                  : loom_fail(LOOM_ERR_MEMORY, "%s: no memory", name);
    json_decref(steps);
    json_decref(decoder);
    return loom__reader_end(&r, status, tokenizer);
}
