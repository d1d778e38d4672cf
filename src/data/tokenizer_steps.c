/* The steps of a tokenizer.json around its model, in the order in which a text passes through them: normalizers,
 * pre-tokenizers, the post-processor, and the decoder on the way back. Each step becomes an entry of the tokenizer that
 * does what the `tokenizers` package does; a step, or a combination, that cannot be done exactly is refused. */
#include "data/tokenizer_reader.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char gpt2_regex[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* ---- regular expressions ---- */

/* PCRE2's \s has one character more than the \s of these files, and other escapes mean something else there, so \s is
 * written out and what may differ is refused. */
static loom_status translate(const loom__reader *r, const char *pattern, loom__buffer *out) {
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

static loom_status compile(const loom__reader *r, const char *pattern, pcre2_code **regex) {
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
static loom_status read_pattern_text(
    const loom__reader *r, const char *where, const json_t *object, loom__affix *text) {
    json_t *pattern = json_object_get(object, "pattern");
    if (!json_is_object(pattern) || !json_object_get(pattern, "String") || json_object_size(pattern) != 1)
        return loom__reader_refuse(r, where, pattern, "{\"String\": text}");
    return loom__reader_affix(r, where, pattern, "String", false, text);
}

static loom_status read_normalizer(const loom__reader *r, json_t *step, loom__normalizer *made) {
    if (loom__reader_is_type(step, "NFC")) {
        made->kind = LOOM__NORMALIZE_NFC;
        return loom__reader_check_members(r, "normalizer", step, " type ");
    }
    if (loom__reader_is_type(step, "Prepend")) {
        made->kind = LOOM__NORMALIZE_PREPEND;
        LOOM_TRY(loom__reader_check_members(r, "normalizer", step, " type prepend "));
        return loom__reader_affix(r, "normalizer", step, "prepend", false, &made->content);
    }
    if (loom__reader_is_type(step, "Replace")) {
        made->kind = LOOM__NORMALIZE_REPLACE;
        LOOM_TRY(loom__reader_check_members(r, "normalizer", step, " type pattern content "));
        LOOM_TRY(read_pattern_text(r, "normalizer.pattern", step, &made->pattern));
        return loom__reader_affix(r, "normalizer", step, "content", true, &made->content);
    }
    return loom__reader_refuse(r, "normalizer.type", json_object_get(step, "type"), "NFC, Prepend, Replace, Sequence");
}

loom_status loom__read_normalizers(loom__reader *r, json_t *object) {
    json_t *steps[LOOM__TOKENIZER_STEPS];
    LOOM_TRY(loom__reader_steps(r, "normalizer", object, "normalizers", steps, &r->made->normalizer_count));
    for (int i = 0; i < r->made->normalizer_count; i++)
        LOOM_TRY(read_normalizer(r, steps[i], &r->made->normalizers[i]));
    return LOOM_OK;
}

/* ---- pre-tokenizer ---- */

static loom_status read_split(const loom__reader *r, json_t *step, loom__splitter *made) {
    static const char *const names[] = {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext"};
    static const int behaviors[] = {
        LOOM__SPLIT_ISOLATED, LOOM__SPLIT_REMOVED, LOOM__SPLIT_WITH_PREVIOUS, LOOM__SPLIT_WITH_NEXT};
    LOOM_TRY(loom__reader_check_members(r, "pre_tokenizer", step, " type pattern behavior invert "));
    LOOM_TRY(loom__reader_require_bool(r, "pre_tokenizer", step, "invert", false, false));
    const json_t *behavior = json_object_get(step, "behavior");
    size_t i = 0;
    while (i < 4 && (!json_is_string(behavior) || strcmp(json_string_value(behavior), names[i]) != 0))
        i++;
    if (i == 4)
        return loom__reader_refuse(
            r, "pre_tokenizer.behavior", behavior, "Isolated, Removed, MergedWithPrevious, MergedWithNext");
    made->behavior = (unsigned)behaviors[i];
    const json_t *pattern = json_object_get(step, "pattern"), *regex = json_object_get(pattern, "Regex");
    if (!regex) {
        made->kind = LOOM__SPLIT_TEXT;
        return read_pattern_text(r, "pre_tokenizer.pattern", step, &made->text);
    }
    if (!json_is_string(regex) || json_object_size(pattern) != 1)
        return loom__reader_wrong(r, "pre_tokenizer.pattern", pattern, "{\"Regex\": text} or {\"String\": text}");
    made->kind = LOOM__SPLIT_REGEX;
    return compile(r, json_string_value(regex), &made->regex);
}

static loom_status read_byte_level(const loom__reader *r, json_t *step, loom__splitter *made) {
    bool prefix, regex;
    LOOM_TRY(loom__reader_check_members(r, "pre_tokenizer", step, " type add_prefix_space trim_offsets use_regex "));
    LOOM_TRY(loom__reader_bool(r, "pre_tokenizer", step, "add_prefix_space", true, &prefix));
    LOOM_TRY(loom__reader_bool(r, "pre_tokenizer", step, "use_regex", true, &regex));
    made->prefix = prefix ? LOOM__PREFIX_ALWAYS : LOOM__PREFIX_NEVER;
    made->kind = regex ? LOOM__SPLIT_REGEX : LOOM__SPLIT_NONE;
    return regex ? compile(r, gpt2_regex, &made->regex) : LOOM_OK;
}

static loom_status read_prefix(const loom__reader *r, const char *where, const json_t *step, unsigned *prefix) {
    const json_t *scheme = json_object_get(step, "prepend_scheme");
    const char *text = json_string_value(scheme);
    bool add;
    LOOM_TRY(loom__reader_bool(r, where, step, "add_prefix_space", true, &add));
    if (!scheme)
        *prefix = add ? LOOM__PREFIX_ALWAYS : LOOM__PREFIX_NEVER;
    else if (text && strcmp(text, "always") == 0)
        *prefix = LOOM__PREFIX_ALWAYS;
    else if (text && strcmp(text, "first") == 0)
        *prefix = LOOM__PREFIX_FIRST;
    else if (text && strcmp(text, "never") == 0)
        *prefix = LOOM__PREFIX_NEVER;
    else
        return loom__reader_wrong(r, where, scheme, "prepend_scheme \"always\", \"first\" or \"never\"");
    return LOOM_OK;
}

loom_status loom__read_splitters(loom__reader *r, json_t *object) {
    json_t *steps[LOOM__TOKENIZER_STEPS];
    int count;
    LOOM_TRY(loom__reader_steps(r, "pre_tokenizer", object, "pretokenizers", steps, &count));
    for (int i = 0; i < count; i++) {
        loom__splitter *made = &r->made->splitters[r->made->splitter_count++];
        if (r->made->byte_level)
            return loom__reader_refuse(
                r, "pre_tokenizer: after ByteLevel,", json_object_get(steps[i], "type"), "nothing");
        if (loom__reader_is_type(steps[i], "ByteLevel")) {
            r->made->byte_level = true;
            LOOM_TRY(read_byte_level(r, steps[i], made));
        } else if (loom__reader_is_type(steps[i], "Split")) {
            LOOM_TRY(read_split(r, steps[i], made));
        } else if (loom__reader_is_type(steps[i], "Metaspace")) {
            unsigned prefix;
            made->kind = LOOM__SPLIT_METASPACE;
            made->behavior = LOOM__SPLIT_WITH_NEXT;
            LOOM_TRY(loom__reader_check_members(
                r, "pre_tokenizer", steps[i], " type replacement prepend_scheme split add_prefix_space str_rep "));
            LOOM_TRY(loom__reader_affix(r, "pre_tokenizer", steps[i], "replacement", false, &made->text));
            LOOM_TRY(loom__reader_bool(r, "pre_tokenizer", steps[i], "split", true, &made->split));
            LOOM_TRY(read_prefix(r, "pre_tokenizer", steps[i], &prefix));
            made->prefix = prefix;
        } else {
            return loom__reader_refuse(
                r, "pre_tokenizer.type", json_object_get(steps[i], "type"), "ByteLevel, Split, Metaspace, Sequence");
        }
    }
    return LOOM_OK;
}

/* ---- post-processor ---- */

static loom_status read_special(
    const loom__reader *r, const json_t *item, const json_t *tokens, uint32_t *ids, int *count) {
    const char *name = json_string_value(json_object_get(item, "id"));
    const json_t *list = json_object_get(name ? json_object_get(tokens, name) : NULL, "ids");
    if (!json_is_array(list))
        return loom__reader_wrong(r, "post_processor.special_tokens", item, "a token that special_tokens lists");
    size_t i;
    json_t *id;
    json_array_foreach(list, i, id) {
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= r->made->bpe.ids)
            return loom__reader_wrong(r, "post_processor.special_tokens.ids", id, "an id of the vocabulary");
        if (*count == LOOM__TOKENIZER_EDGE)
            return loom__reader_refuse(r, "post_processor.single", list, "up to 16 special tokens");
        ids[(*count)++] = (uint32_t)json_integer_value(id);
    }
    return LOOM_OK;
}

static loom_status read_template(loom__reader *r, json_t *step) {
    loom__tokenizer_json *made = r->made;
    LOOM_TRY(loom__reader_check_members(r, "post_processor", step, " type single pair special_tokens "));
    const json_t *single = json_object_get(step, "single"), *tokens = json_object_get(step, "special_tokens");
    if (!json_is_array(single))
        return loom__reader_wrong(r, "post_processor.single", single, "a list");
    bool seen = false;
    size_t i;
    json_t *item;
    json_array_foreach(single, i, item) {
        const json_t *special = json_object_get(item, "SpecialToken"), *text = json_object_get(item, "Sequence");
        if (!!special == !!text || (text && seen))
            return loom__reader_wrong(r, "post_processor.single", item, "special tokens around one Sequence");
        seen = seen || text;
        if (special)
            LOOM_TRY(read_special(r, special, tokens, seen ? made->after : made->before,
                seen ? &made->after_count : &made->before_count));
    }
    return seen ? LOOM_OK : loom__reader_wrong(r, "post_processor.single", single, "a Sequence");
}

loom_status loom__read_post_processors(loom__reader *r, json_t *object) {
    json_t *steps[LOOM__TOKENIZER_STEPS];
    int count;
    bool had_template = false;
    LOOM_TRY(loom__reader_steps(r, "post_processor", object, "processors", steps, &count));
    for (int i = 0; i < count; i++) {
        if (loom__reader_is_type(steps[i], "ByteLevel"))
            continue; /* moves offsets, which nobody asks for */
        if (!loom__reader_is_type(steps[i], "TemplateProcessing") || had_template)
            return loom__reader_refuse(r, "post_processor.type", json_object_get(steps[i], "type"),
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

static loom_status read_strip(const loom__reader *r, json_t *step, bool fused) {
    LOOM_TRY(loom__reader_check_members(r, "decoder", step, " type content start stop "));
    const json_t *start = json_object_get(step, "start"), *stop = json_object_get(step, "stop");
    if (!fused || !json_is_integer(start) || json_integer_value(start) < 0 || json_integer_value(start) > 64 ||
        !json_is_integer(stop) || json_integer_value(stop) != 0)
        return loom__reader_refuse(r, "decoder Strip", step, "after Fuse, start up to 64, stop 0");
    r->made->strip = (int)json_integer_value(start);
    return loom__reader_affix(r, "decoder", step, "content", false, &r->made->decode_strip);
}

loom_status loom__read_decoder(loom__reader *r, json_t *object) {
    static const char built[] = "ByteLevel with ByteLevel's pre_tokenizer, Metaspace, or a Sequence of Replace, "
                                "ByteFallback, Fuse, Strip in this order";
    static const char *const order[] = {"Replace", "ByteFallback", "Fuse", "Strip"};
    loom__tokenizer_json *made = r->made;
    json_t *steps[LOOM__TOKENIZER_STEPS];
    int count, last = -1;
    LOOM_TRY(loom__reader_steps(r, "decoder", object, "decoders", steps, &count));
    if (made->byte_level || count == 0 || loom__reader_is_type(steps[0], "ByteLevel"))
        return made->byte_level && count == 1 && loom__reader_is_type(steps[0], "ByteLevel")
                   ? LOOM_OK
                   : loom__reader_refuse(r, "decoder", object, built);
    if (count == 1 && loom__reader_is_type(steps[0], "Metaspace")) {
        unsigned prefix;
        LOOM_TRY(loom__reader_check_members(
            r, "decoder", steps[0], " type replacement prepend_scheme split add_prefix_space str_rep "));
        LOOM_TRY(loom__reader_affix(r, "decoder", steps[0], "replacement", false, &made->decode_from));
        LOOM_TRY(read_prefix(r, "decoder", steps[0], &prefix));
        made->decode_to = (loom__affix){.text = " ", .bytes = 1};
        made->strip_first_token = prefix != LOOM__PREFIX_NEVER;
        return LOOM_OK;
    }
    for (int i = 0, k; i < count; i++, last = k) {
        for (k = last + 1; k < 4 && !loom__reader_is_type(steps[i], order[k]); k++)
            ;
        if (k == 4)
            return loom__reader_refuse(r, "decoder", object, built);
        if (k == 0) {
            LOOM_TRY(loom__reader_check_members(r, "decoder", steps[i], " type pattern content "));
            LOOM_TRY(read_pattern_text(r, "decoder.pattern", steps[i], &made->decode_from));
            LOOM_TRY(loom__reader_affix(r, "decoder", steps[i], "content", true, &made->decode_to));
        } else if (k == 3) {
            LOOM_TRY(read_strip(r, steps[i], last == 2));
        } else {
            LOOM_TRY(loom__reader_check_members(r, "decoder", steps[i], " type "));
            if (k == 1)
                mark_byte_tokens(made);
        }
    }
    return LOOM_OK;
}
