/* Reads a Hugging Face tokenizer.json. The file describes a pipeline in which almost anything can be put together; what
 * is taken here are the parts that byte-level BPE and SentencePiece's BPE are made of. Every member of every object is
 * looked at: an unknown one, or a known one with a value that would change tokens, is refused with its place in the
 * file, so that what opens gives the ids that the file's own program gives. */
#include "data/tokenizer_json.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char gpt2_regex[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

typedef struct reader {
    const char *name;
    loom__tokenizer_json *made;
    short byte_of[512]; /* of the letters that stand for bytes in byte-level vocabularies; -1 = none */
    char *word;         /* [longest + 1] a text of the vocabulary in work */
    size_t longest;
    char *end; /* of the texts written so far */
} reader;

/* ---- faults ---- */

static loom_status wrong(const reader *r, const char *where, const json_t *found, const char *expected) {
    char *text = found ? json_dumps(found, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII) : NULL;
    loom_status status =
        loom_fail(LOOM_ERR_FORMAT, "%s: %s is %.100s, expected %s", r->name, where, text ? text : "missing", expected);
    free(text);
    return status;
}

static loom_status refuse(const reader *r, const char *where, const json_t *found, const char *built) {
    char *text = found ? json_dumps(found, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII) : NULL;
    loom_status status = loom_fail(LOOM_ERR_UNSUPPORTED, "%s: not supported yet: %s %.100s, there is: %s", r->name,
        where, text ? text : "null", built);
    free(text);
    return status;
}

/* `known` are names between spaces: " type vocab ". */
static loom_status check_members(const reader *r, const char *where, json_t *object, const char *known) {
    const char *key;
    json_t *value;
    if (!json_is_object(object))
        return wrong(r, where, object, "an object");
    json_object_foreach(object, key, value) {
        char spaced[80];
        int length = snprintf(spaced, sizeof spaced, " %s ", key);
        if (length >= (int)sizeof spaced || strchr(key, ' ') || !strstr(known, spaced))
            return loom_fail(LOOM_ERR_UNSUPPORTED, "%s: not supported yet: member '%.100s' of %s, there is:%s", r->name,
                key, where, known);
    }
    return LOOM_OK;
}

static const char *type_of(const json_t *object) {
    const char *type = json_string_value(json_object_get(object, "type"));
    return type ? type : "";
}

static bool is_type(const json_t *object, const char *type) {
    return strcmp(type_of(object), type) == 0;
}

static loom_status read_bool(
    const reader *r, const char *where, const json_t *object, const char *key, bool otherwise, bool *value) {
    const json_t *found = json_object_get(object, key);
    char place[128];
    snprintf(place, sizeof place, "%s.%s", where, key);
    if (found && !json_is_boolean(found))
        return wrong(r, place, found, "true or false");
    *value = found ? json_is_true(found) : otherwise;
    return LOOM_OK;
}

/* A flag that must have one value. */
static loom_status require_bool(
    const reader *r, const char *where, const json_t *object, const char *key, bool otherwise, bool wanted) {
    bool value;
    char place[128];
    snprintf(place, sizeof place, "%s.%s", where, key);
    LOOM_TRY(read_bool(r, where, object, key, otherwise, &value));
    return value == wanted ? LOOM_OK : refuse(r, place, json_object_get(object, key), wanted ? "true" : "false");
}

static loom_status read_affix(
    const reader *r, const char *where, const json_t *object, const char *key, bool may_be_empty, loom__affix *affix) {
    const json_t *found = json_object_get(object, key);
    char place[128];
    snprintf(place, sizeof place, "%s.%s", where, key);
    size_t bytes = json_string_length(found);
    if (!json_is_string(found) || (bytes == 0 && !may_be_empty) || bytes > sizeof affix->text)
        return wrong(r, place, found, "a text of 1 to 64 bytes");
    memcpy(affix->text, json_string_value(found), bytes);
    affix->bytes = bytes;
    return LOOM_OK;
}

/* The steps of an object, or of a "Sequence" of them under `member`. */
static loom_status list_steps(
    const reader *r, const char *where, json_t *object, const char *member, json_t **steps, int *count) {
    *count = 0;
    if (!object || json_is_null(object))
        return LOOM_OK;
    if (!is_type(object, "Sequence")) {
        steps[(*count)++] = object;
        return LOOM_OK;
    }
    char known[64];
    snprintf(known, sizeof known, " type %s ", member);
    LOOM_TRY(check_members(r, where, object, known));
    json_t *list = json_object_get(object, member);
    if (!json_is_array(list))
        return wrong(r, where, object, "a list of steps");
    if (json_array_size(list) > LOOM__TOKENIZER_STEPS)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "%s: not supported yet: %s of %zu steps, there is: up to %d", r->name,
            where, json_array_size(list), LOOM__TOKENIZER_STEPS);
    for (; *count < (int)json_array_size(list); ++*count)
        steps[*count] = json_array_get(list, (size_t)*count);
    return LOOM_OK;
}

/* ---- regular expressions ---- */

/* PCRE2's \s has one character more than the \s of these files, and other escapes mean something else there, so \s is
 * written out and what may differ is refused. */
static loom_status translate(const reader *r, const char *pattern, loom__buffer *out) {
    static const char space[] = "\\p{Z}\\x{9}-\\x{d}\\x{85}";
    bool in_class = false;
    for (const char *at = pattern; *at; at++) {
        if (*at == '[')
            in_class = true;
        else if (*at == ']')
            in_class = false;
        if (!in_class && strncmp(at, "(*", 2) == 0)
            return loom_fail(LOOM_ERR_UNSUPPORTED, "%s: not supported yet: (* in the pattern %.100s", r->name, pattern);
        if (*at != '\\') {
            LOOM_TRY(loom__buffer_add(out, at, 1));
            continue;
        }
        at++;
        bool letter = (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z');
        if (*at == '\0' || (letter && !strchr("sSdDpPrntf", *at)) || (*at == 'S' && in_class) ||
            (*at >= '0' && *at <= '9'))
            return loom_fail(
                LOOM_ERR_UNSUPPORTED, "%s: not supported yet: \\%.1s in the pattern %.100s", r->name, at, pattern);
        if (*at == 's' || *at == 'S') {
            const char *open = in_class ? "" : *at == 's' ? "[" : "[^";
            LOOM_TRY(loom__buffer_add(out, open, strlen(open)));
            LOOM_TRY(loom__buffer_add(out, space, sizeof space - 1));
            LOOM_TRY(loom__buffer_add(out, "]", in_class ? 0 : 1));
        } else {
            LOOM_TRY(loom__buffer_add(out, at - 1, 2));
        }
    }
    return LOOM_OK;
}

static loom_status compile(const reader *r, const char *pattern, pcre2_code **regex) {
    loom__buffer text = {0};
    loom_status status = translate(r, pattern, &text);
    int error = 0;
    PCRE2_SIZE at = 0;
    if (status == LOOM_OK) {
        *regex = pcre2_compile((PCRE2_SPTR)(text.text ? text.text : ""), text.bytes,
            PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error, &at, NULL);
        if (!*regex) {
            char reason[160] = "";
            pcre2_get_error_message(error, (PCRE2_UCHAR *)reason, sizeof reason);
            status =
                loom_fail(LOOM_ERR_FORMAT, "%s: the pattern %.200s cannot be compiled: %s", r->name, pattern, reason);
        } else {
            /* Where there is no compiler for this machine, the interpreter does the same, slower. */
            (void)pcre2_jit_compile(*regex, PCRE2_JIT_COMPLETE);
        }
    }
    free(text.text);
    return status;
}

/* ---- normalizer ---- */

/* The text of {"String": text}. */
static loom_status read_pattern_text(const reader *r, const char *where, const json_t *object, loom__affix *text) {
    json_t *pattern = json_object_get(object, "pattern");
    if (!json_is_object(pattern) || !json_object_get(pattern, "String") || json_object_size(pattern) != 1)
        return refuse(r, where, pattern, "{\"String\": text}");
    return read_affix(r, where, pattern, "String", false, text);
}

static loom_status read_normalizer(const reader *r, json_t *step, loom__normalizer *made) {
    if (is_type(step, "NFC")) {
        made->kind = LOOM__NORMALIZE_NFC;
        return check_members(r, "normalizer", step, " type ");
    }
    if (is_type(step, "Prepend")) {
        made->kind = LOOM__NORMALIZE_PREPEND;
        LOOM_TRY(check_members(r, "normalizer", step, " type prepend "));
        return read_affix(r, "normalizer", step, "prepend", false, &made->content);
    }
    if (is_type(step, "Replace")) {
        made->kind = LOOM__NORMALIZE_REPLACE;
        LOOM_TRY(check_members(r, "normalizer", step, " type pattern content "));
        LOOM_TRY(read_pattern_text(r, "normalizer.pattern", step, &made->pattern));
        return read_affix(r, "normalizer", step, "content", true, &made->content);
    }
    return refuse(r, "normalizer.type", json_object_get(step, "type"), "NFC, Prepend, Replace, Sequence");
}

static loom_status read_normalizers(reader *r, json_t *object) {
    json_t *steps[LOOM__TOKENIZER_STEPS];
    LOOM_TRY(list_steps(r, "normalizer", object, "normalizers", steps, &r->made->normalizer_count));
    for (int i = 0; i < r->made->normalizer_count; i++)
        LOOM_TRY(read_normalizer(r, steps[i], &r->made->normalizers[i]));
    return LOOM_OK;
}

/* ---- pre-tokenizer ---- */

static loom_status read_split(const reader *r, json_t *step, loom__splitter *made) {
    static const char *const names[] = {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext"};
    static const int behaviors[] = {
        LOOM__SPLIT_ISOLATED, LOOM__SPLIT_REMOVED, LOOM__SPLIT_WITH_PREVIOUS, LOOM__SPLIT_WITH_NEXT};
    LOOM_TRY(check_members(r, "pre_tokenizer", step, " type pattern behavior invert "));
    LOOM_TRY(require_bool(r, "pre_tokenizer", step, "invert", false, false));
    const json_t *behavior = json_object_get(step, "behavior");
    size_t i = 0;
    while (i < 4 && (!json_is_string(behavior) || strcmp(json_string_value(behavior), names[i]) != 0))
        i++;
    if (i == 4)
        return refuse(r, "pre_tokenizer.behavior", behavior, "Isolated, Removed, MergedWithPrevious, MergedWithNext");
    made->behavior = (unsigned)behaviors[i];
    const json_t *pattern = json_object_get(step, "pattern"), *regex = json_object_get(pattern, "Regex");
    if (!regex) {
        made->kind = LOOM__SPLIT_TEXT;
        return read_pattern_text(r, "pre_tokenizer.pattern", step, &made->text);
    }
    if (!json_is_string(regex) || json_object_size(pattern) != 1)
        return wrong(r, "pre_tokenizer.pattern", pattern, "{\"Regex\": text} or {\"String\": text}");
    made->kind = LOOM__SPLIT_REGEX;
    return compile(r, json_string_value(regex), &made->regex);
}

static loom_status read_byte_level(const reader *r, json_t *step, loom__splitter *made) {
    bool prefix, regex;
    LOOM_TRY(check_members(r, "pre_tokenizer", step, " type add_prefix_space trim_offsets use_regex "));
    LOOM_TRY(read_bool(r, "pre_tokenizer", step, "add_prefix_space", true, &prefix));
    LOOM_TRY(read_bool(r, "pre_tokenizer", step, "use_regex", true, &regex));
    made->prefix = prefix ? LOOM__PREFIX_ALWAYS : LOOM__PREFIX_NEVER;
    made->kind = regex ? LOOM__SPLIT_REGEX : LOOM__SPLIT_NONE;
    return regex ? compile(r, gpt2_regex, &made->regex) : LOOM_OK;
}

static loom_status read_prefix(const reader *r, const char *where, const json_t *step, unsigned *prefix) {
    const json_t *scheme = json_object_get(step, "prepend_scheme");
    const char *text = json_string_value(scheme);
    bool add;
    LOOM_TRY(read_bool(r, where, step, "add_prefix_space", true, &add));
    if (!scheme)
        *prefix = add ? LOOM__PREFIX_ALWAYS : LOOM__PREFIX_NEVER;
    else if (text && strcmp(text, "always") == 0)
        *prefix = LOOM__PREFIX_ALWAYS;
    else if (text && strcmp(text, "first") == 0)
        *prefix = LOOM__PREFIX_FIRST;
    else if (text && strcmp(text, "never") == 0)
        *prefix = LOOM__PREFIX_NEVER;
    else
        return wrong(r, where, scheme, "prepend_scheme \"always\", \"first\" or \"never\"");
    return LOOM_OK;
}

static loom_status read_splitters(reader *r, json_t *object) {
    json_t *steps[LOOM__TOKENIZER_STEPS];
    int count;
    LOOM_TRY(list_steps(r, "pre_tokenizer", object, "pretokenizers", steps, &count));
    for (int i = 0; i < count; i++) {
        loom__splitter *made = &r->made->splitters[r->made->splitter_count++];
        if (r->made->byte_level)
            return refuse(r, "pre_tokenizer: after ByteLevel,", json_object_get(steps[i], "type"), "nothing");
        if (is_type(steps[i], "ByteLevel")) {
            r->made->byte_level = true;
            LOOM_TRY(read_byte_level(r, steps[i], made));
        } else if (is_type(steps[i], "Split")) {
            LOOM_TRY(read_split(r, steps[i], made));
        } else if (is_type(steps[i], "Metaspace")) {
            unsigned prefix;
            made->kind = LOOM__SPLIT_METASPACE;
            made->behavior = LOOM__SPLIT_WITH_NEXT;
            LOOM_TRY(check_members(
                r, "pre_tokenizer", steps[i], " type replacement prepend_scheme split add_prefix_space str_rep "));
            LOOM_TRY(read_affix(r, "pre_tokenizer", steps[i], "replacement", false, &made->text));
            LOOM_TRY(read_bool(r, "pre_tokenizer", steps[i], "split", true, &made->split));
            LOOM_TRY(read_prefix(r, "pre_tokenizer", steps[i], &prefix));
            made->prefix = prefix;
        } else {
            return refuse(
                r, "pre_tokenizer.type", json_object_get(steps[i], "type"), "ByteLevel, Split, Metaspace, Sequence");
        }
    }
    return LOOM_OK;
}

/* ---- model ---- */

static void fill_byte_letters(reader *r) {
    short next = 256;
    memset(r->byte_of, 0xff, sizeof r->byte_of);
    for (short byte = 0; byte < 256; byte++) {
        bool itself = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
        r->byte_of[itself ? byte : next++] = byte;
    }
}

/* A vocabulary's text as the bytes that words are made of, in r->word. False: no word becomes it, the text is as it
 * stands in the file. */
static bool to_word(reader *r, const char *text, size_t bytes, size_t *word_bytes) {
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

static loom_status read_id(const reader *r, const char *text, const json_t *id, uint64_t limit, uint64_t *value) {
    if (!json_is_integer(id) || json_integer_value(id) < 0 || (uint64_t)json_integer_value(id) >= limit) {
        char where[160];
        snprintf(where, sizeof where, "the id of token '%.100s'", text);
        return wrong(r, where, id, "a number from 0 to about the number of tokens");
    }
    *value = (uint64_t)json_integer_value(id);
    return LOOM_OK;
}

/* The set that holds the token, and the text under which it stands there. *normal is set up to be freed. */
static loom_status normal_text(reader *r, const json_t *token, const char **text, size_t *bytes, loom__buffer *normal) {
    bool special, normalized;
    const json_t *content = json_object_get(token, "content");
    LOOM_TRY(read_bool(r, "added_tokens", token, "special", false, &special));
    LOOM_TRY(read_bool(r, "added_tokens", token, "normalized", !special, &normalized));
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

static const char *keep_text(reader *r, const char *text, size_t bytes) {
    char *kept = r->end;
    memcpy(kept, text, bytes);
    r->end += bytes;
    return kept;
}

/* How many ids and how much text there are, before anything is made. */
static loom_status measure(reader *r, const json_t *vocab, const json_t *added, uint64_t *ids, size_t *bytes) {
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
            return wrong(r, "added_tokens.content", content, "a text of 1 to 1024 bytes");
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

static loom_status read_vocabulary(reader *r, json_t *vocab, const json_t *added) {
    loom__tokenizer_json *made = r->made;
    uint64_t ids = 0;
    size_t bytes = 0;
    LOOM_TRY(measure(r, vocab, added, &ids, &bytes));
    LOOM_TRY(loom__bpe_create(&made->bpe, (uint32_t)ids));
    made->texts = malloc(bytes + 1);
    made->flags = calloc(ids + 1, sizeof *made->flags);
    made->bytes = malloc((ids + 1) * sizeof *made->bytes);
    r->word = malloc(r->longest + 1);
    if (!made->texts || !made->flags || !made->bytes || !r->word)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for %llu tokens", r->name, (unsigned long long)ids);
    memset(made->bytes, 0xff, (ids + 1) * sizeof *made->bytes);
    r->end = made->texts;
    const char *text;
    json_t *value;
    json_object_foreach(vocab, text, value) {
        uint32_t id = (uint32_t)json_integer_value(value);
        size_t length;
        bool is_word = to_word(r, text, strlen(text), &length);
        if (made->bpe.pieces[id].text)
            return loom_fail(
                LOOM_ERR_FORMAT, "%s: model.vocab: '%.100s' has id %u, which another token has", r->name, text, id);
        loom__bpe_add(&made->bpe, id, keep_text(r, r->word, length), (uint32_t)length, is_word);
    }
    return LOOM_OK;
}

static uint32_t find_token(reader *r, const char *text, size_t bytes) {
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

static loom_status read_merges(reader *r, const json_t *merges) {
    if (!json_is_array(merges) || json_array_size(merges) >= UINT32_MAX)
        return wrong(r, "model.merges", merges, "a list of pairs");
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
            status = wrong(r, where, merge, "a pair of tokens whose join is a token");
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
static loom_status read_byte_tokens(reader *r, bool fallback) {
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

static loom_status read_model(reader *r, json_t *model, const json_t *added) {
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    loom__bpe *bpe = &r->made->bpe;
    bool fallback, join_unknown, whole;
    if (!json_is_object(model))
        return wrong(r, "model", model, "an object");
    /* Files of before 2021 have no type; they are BPE. */
    if (json_object_get(model, "type") ? !is_type(model, "BPE") : !json_object_get(model, "merges"))
        return refuse(r, "model.type", json_object_get(model, "type"), "BPE");
    LOOM_TRY(check_members(r, "model", model,
        " type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback ignore_merges "
        "vocab merges "));
    for (size_t i = 0; i < 2; i++)
        if (json_string_length(json_object_get(model, affixes[i])) > 0)
            return refuse(r, affixes[i], json_object_get(model, affixes[i]), "none");
    const json_t *dropout = json_object_get(model, "dropout"), *unknown = json_object_get(model, "unk_token");
    if (dropout && !json_is_null(dropout) && !(json_is_number(dropout) && !(json_number_value(dropout) != 0)))
        return refuse(r, "model.dropout", dropout, "null");
    LOOM_TRY(read_bool(r, "model", model, "fuse_unk", false, &join_unknown));
    LOOM_TRY(read_bool(r, "model", model, "byte_fallback", false, &fallback));
    LOOM_TRY(read_bool(r, "model", model, "ignore_merges", false, &whole));
    if (fallback && r->made->byte_level)
        return refuse(r, "model.byte_fallback", json_object_get(model, "byte_fallback"), "false with ByteLevel");
    json_t *vocab = json_object_get(model, "vocab");
    if (!json_is_object(vocab))
        return wrong(r, "model.vocab", vocab, "an object of tokens and ids");
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
            return wrong(r, "model.unk_token", unknown, "null or a token of model.vocab");
    }
    return LOOM_OK;
}

/* ---- added tokens ---- */

static loom_status read_added_token(reader *r, const json_t *token, loom__buffer *normal) {
    bool special;
    LOOM_TRY(read_bool(r, "added_tokens", token, "special", false, &special));
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
        return wrong(r, "added_tokens.content", token, "1 to 1024 bytes when normalized");
    if (!piece->text) /* it decodes to what it is found as */
        loom__bpe_add(&r->made->bpe, id, keep_text(r, text, bytes), (uint32_t)bytes, false);
    return loom__trie_add(text == normal->text ? &r->made->normal : &r->made->raw, text, bytes, id);
}

static loom_status read_added(reader *r, const json_t *list) {
    static const char *const refused[] = {"single_word", "lstrip", "rstrip"};
    size_t i;
    json_t *token;
    json_array_foreach(list, i, token) {
        LOOM_TRY(check_members(r, "added_tokens", token, " id content single_word lstrip rstrip normalized special "));
        for (size_t k = 0; k < 3; k++)
            LOOM_TRY(require_bool(r, "added_tokens", token, refused[k], false, false));
        loom__buffer normal = {0};
        loom_status status = read_added_token(r, token, &normal);
        free(normal.text);
        LOOM_TRY(status);
    }
    return LOOM_OK;
}

/* ---- post-processor ---- */

static loom_status read_special(const reader *r, const json_t *item, const json_t *tokens, uint32_t *ids, int *count) {
    const char *name = json_string_value(json_object_get(item, "id"));
    const json_t *list = json_object_get(name ? json_object_get(tokens, name) : NULL, "ids");
    if (!json_is_array(list))
        return wrong(r, "post_processor.special_tokens", item, "a token that special_tokens lists");
    size_t i;
    json_t *id;
    json_array_foreach(list, i, id) {
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= r->made->bpe.ids)
            return wrong(r, "post_processor.special_tokens.ids", id, "an id of the vocabulary");
        if (*count == LOOM__TOKENIZER_EDGE)
            return refuse(r, "post_processor.single", list, "up to 16 special tokens");
        ids[(*count)++] = (uint32_t)json_integer_value(id);
    }
    return LOOM_OK;
}

static loom_status read_template(reader *r, json_t *step) {
    loom__tokenizer_json *made = r->made;
    LOOM_TRY(check_members(r, "post_processor", step, " type single pair special_tokens "));
    const json_t *single = json_object_get(step, "single"), *tokens = json_object_get(step, "special_tokens");
    if (!json_is_array(single))
        return wrong(r, "post_processor.single", single, "a list");
    bool seen = false;
    size_t i;
    json_t *item;
    json_array_foreach(single, i, item) {
        const json_t *special = json_object_get(item, "SpecialToken"), *text = json_object_get(item, "Sequence");
        if (!!special == !!text || (text && seen))
            return wrong(r, "post_processor.single", item, "special tokens around one Sequence");
        seen = seen || text;
        if (special)
            LOOM_TRY(read_special(r, special, tokens, seen ? made->after : made->before,
                seen ? &made->after_count : &made->before_count));
    }
    return seen ? LOOM_OK : wrong(r, "post_processor.single", single, "a Sequence");
}

static loom_status read_post_processors(reader *r, json_t *object) {
    json_t *steps[LOOM__TOKENIZER_STEPS];
    int count;
    bool had_template = false;
    LOOM_TRY(list_steps(r, "post_processor", object, "processors", steps, &count));
    for (int i = 0; i < count; i++) {
        if (is_type(steps[i], "ByteLevel"))
            continue; /* moves offsets, which nobody asks for */
        if (!is_type(steps[i], "TemplateProcessing") || had_template)
            return refuse(r, "post_processor.type", json_object_get(steps[i], "type"),
                "ByteLevel, one TemplateProcessing, Sequence");
        had_template = true;
        LOOM_TRY(read_template(r, steps[i]));
    }
    return LOOM_OK;
}

/* ---- decoder ---- */

static void mark_byte_tokens(loom__tokenizer_json *made) {
    for (uint32_t id = 0; id < made->bpe.ids; id++) {
        const loom__bpe_piece *piece = &made->bpe.pieces[id];
        char text[8];
        unsigned byte;
        if (piece->bytes != 6 || memcmp(piece->text, "<0x", 3) != 0)
            continue;
        memcpy(text, piece->text + 3, 3);
        text[3] = '\0';
        if (strspn(text, "0123456789abcdefABCDEF") == 2 && text[2] == '>' && sscanf(text, "%2x", &byte) == 1)
            made->bytes[id] = (short)byte;
    }
}

static loom_status read_strip(const reader *r, json_t *step, bool fused) {
    LOOM_TRY(check_members(r, "decoder", step, " type content start stop "));
    const json_t *start = json_object_get(step, "start"), *stop = json_object_get(step, "stop");
    if (!fused || !json_is_integer(start) || json_integer_value(start) < 0 || json_integer_value(start) > 64 ||
        !json_is_integer(stop) || json_integer_value(stop) != 0)
        return refuse(r, "decoder Strip", step, "after Fuse, start up to 64, stop 0");
    r->made->strip = (int)json_integer_value(start);
    return read_affix(r, "decoder", step, "content", false, &r->made->decode_strip);
}

static loom_status read_decoder(reader *r, json_t *object) {
    static const char built[] = "ByteLevel with ByteLevel's pre_tokenizer, Metaspace, or a Sequence of Replace, "
                                "ByteFallback, Fuse, Strip in this order";
    static const char *const order[] = {"Replace", "ByteFallback", "Fuse", "Strip"};
    loom__tokenizer_json *made = r->made;
    json_t *steps[LOOM__TOKENIZER_STEPS];
    int count, last = -1;
    LOOM_TRY(list_steps(r, "decoder", object, "decoders", steps, &count));
    if (made->byte_level || count == 0 || is_type(steps[0], "ByteLevel"))
        return made->byte_level && count == 1 && is_type(steps[0], "ByteLevel") ? LOOM_OK
                                                                                : refuse(r, "decoder", object, built);
    if (count == 1 && is_type(steps[0], "Metaspace")) {
        unsigned prefix;
        LOOM_TRY(
            check_members(r, "decoder", steps[0], " type replacement prepend_scheme split add_prefix_space str_rep "));
        LOOM_TRY(read_affix(r, "decoder", steps[0], "replacement", false, &made->decode_from));
        LOOM_TRY(read_prefix(r, "decoder", steps[0], &prefix));
        made->decode_to = (loom__affix){.text = " ", .bytes = 1};
        made->strip_first_token = prefix != LOOM__PREFIX_NEVER;
        return LOOM_OK;
    }
    for (int i = 0, k; i < count; i++, last = k) {
        for (k = last + 1; k < 4 && !is_type(steps[i], order[k]); k++)
            ;
        if (k == 4)
            return refuse(r, "decoder", object, built);
        if (k == 0) {
            LOOM_TRY(check_members(r, "decoder", steps[i], " type pattern content "));
            LOOM_TRY(read_pattern_text(r, "decoder.pattern", steps[i], &made->decode_from));
            LOOM_TRY(read_affix(r, "decoder", steps[i], "content", true, &made->decode_to));
        } else if (k == 3) {
            LOOM_TRY(read_strip(r, steps[i], last == 2));
        } else {
            LOOM_TRY(check_members(r, "decoder", steps[i], " type "));
            if (k == 1)
                mark_byte_tokens(made);
        }
    }
    return LOOM_OK;
}

/* ---- the whole ---- */

/* Where no token crosses from another character to a U+2581, no join does, and a text of one word, as SentencePiece's
 * files have it, is the same as its parts one by one. */
static bool can_cut_at_spaces(const loom__tokenizer_json *made) {
    static const char space[] = LOOM__METASPACE;
    const loom__bpe *bpe = &made->bpe;
    uint32_t id = loom__bpe_find(bpe, space, 3);
    if (!bpe->by_character || bpe->whole_words_first || id == LOOM__NO_TOKEN || id == bpe->unknown)
        return false;
    for (uint32_t i = 0; i < bpe->ids; i++) {
        if (!bpe->pieces[i].found_by_text)
            continue;
        const char *text = bpe->pieces[i].text, *end = text + bpe->pieces[i].bytes, *at = text;
        for (; (at = memmem(at, (size_t)(end - at), space, 3)) != NULL; at += 3)
            if (at - text >= 3 ? memcmp(at - 3, space, 3) != 0 : at > text)
                return false;
    }
    return true;
}

static loom_status read_root(reader *r, json_t *root) {
    static const char *const nulls[] = {"truncation", "padding"};
    LOOM_TRY(check_members(r, "the file", root,
        " version truncation padding added_tokens normalizer pre_tokenizer post_processor decoder model "));
    for (size_t i = 0; i < 2; i++) {
        const json_t *value = json_object_get(root, nulls[i]);
        if (value && !json_is_null(value))
            return refuse(r, nulls[i], value, "null");
    }
    const json_t *added = json_object_get(root, "added_tokens");
    if (added && !json_is_array(added))
        return wrong(r, "added_tokens", added, "a list");
    LOOM_TRY(read_normalizers(r, json_object_get(root, "normalizer")));
    LOOM_TRY(read_splitters(r, json_object_get(root, "pre_tokenizer")));
    LOOM_TRY(read_model(r, json_object_get(root, "model"), added));
    LOOM_TRY(read_added(r, added));
    LOOM_TRY(read_post_processors(r, json_object_get(root, "post_processor")));
    r->made->cut_at_spaces = can_cut_at_spaces(r->made);
    return read_decoder(r, json_object_get(root, "decoder"));
}

loom_status loom__tokenizer_json_read(
    const char *name, const char *text, size_t bytes, loom__tokenizer_json **tokenizer) {
    json_error_t error;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (!root)
        return loom_fail(
            LOOM_ERR_FORMAT, "%s:%d:%d: no tokenizer.json: %s", name, error.line, error.column, error.text);
    reader r = {.name = name, .made = calloc(1, sizeof *r.made)};
    loom_status status = LOOM_OK;
    if (r.made) {
        r.made->end = -1;
        r.made->name = strdup(name);
    }
    if (!r.made || !r.made->name)
        status = loom_fail(LOOM_ERR_MEMORY, "%s: no memory", name);
    fill_byte_letters(&r);
    if (status == LOOM_OK)
        status = read_root(&r, root);
    json_decref(root);
    free(r.word);
    if (status == LOOM_OK)
        *tokenizer = r.made;
    else
        loom__tokenizer_json_free(r.made);
    return status;
}

void loom__tokenizer_json_free(loom__tokenizer_json *tokenizer) {
    if (!tokenizer)
        return;
    for (int i = 0; i < tokenizer->splitter_count; i++)
        pcre2_code_free(tokenizer->splitters[i].regex);
    loom__bpe_free(&tokenizer->bpe);
    loom__map_free(&tokenizer->raw.edges);
    loom__map_free(&tokenizer->raw.ends);
    loom__map_free(&tokenizer->normal.edges);
    loom__map_free(&tokenizer->normal.ends);
    free(tokenizer->texts);
    free(tokenizer->flags);
    free(tokenizer->bytes);
    free(tokenizer->name);
    free(tokenizer);
}
