/* Reads a Hugging Face tokenizer.json. The file describes a pipeline in which almost anything can be put together; what
 * is taken here are the parts that byte-level BPE and SentencePiece's BPE are made of. Every member of every object is
 * looked at: an unknown one, or a known one with a value that would change tokens, is refused with its place in the
 * file, so that what opens gives the ids that the file's own program gives. */
#include "data/tokenizer_reader.h"

#include <stdlib.h>
#include <string.h>

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

static loom_status read_root(loom__reader *r, json_t *root) {
    static const char *const nulls[] = {"truncation", "padding"};
    LOOM_TRY(loom__reader_check_members(r, "the file", root,
        " version truncation padding added_tokens normalizer pre_tokenizer post_processor decoder model "));
    for (size_t i = 0; i < 2; i++) {
        const json_t *value = json_object_get(root, nulls[i]);
        if (value && !json_is_null(value))
            return loom__reader_refuse(r, nulls[i], value, "null");
    }
    const json_t *added = json_object_get(root, "added_tokens");
    if (added && !json_is_array(added))
        return loom__reader_wrong(r, "added_tokens", added, "a list");
    LOOM_TRY(loom__read_normalizers(r, json_object_get(root, "normalizer")));
    LOOM_TRY(loom__read_splitters(r, json_object_get(root, "pre_tokenizer")));
    LOOM_TRY(loom__read_bpe_model(r, json_object_get(root, "model"), added));
    LOOM_TRY(loom__read_added_tokens(r, added));
    LOOM_TRY(loom__read_post_processors(r, json_object_get(root, "post_processor")));
    r->made->cut_at_spaces = can_cut_at_spaces(r->made);
    return loom__read_decoder(r, json_object_get(root, "decoder"));
}

loom_status loom__reader_begin(const char *name, loom__reader *r) {
    *r = (loom__reader){.name = name, .made = calloc(1, sizeof *r->made)};
    if (r->made) {
        r->made->end = -1;
        r->made->name = strdup(name);
    }
    return r->made && r->made->name ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "%s: no memory", name);
}

loom_status loom__reader_end(loom__reader *r, loom_status status, loom__tokenizer_json **tokenizer) {
    free(r->word);
    if (status == LOOM_OK)
        *tokenizer = r->made;
    else
        loom__tokenizer_json_free(r->made);
    return status;
}

loom_status loom__tokenizer_json_build(const char *name, json_t *root, loom__tokenizer_json **tokenizer) {
    loom__reader r;
    loom_status status = loom__reader_begin(name, &r);
    if (status == LOOM_OK)
        status = read_root(&r, root);
    return loom__reader_end(&r, status, tokenizer);
}

loom_status loom__tokenizer_json_read(
    const char *name, const char *text, size_t bytes, loom__tokenizer_json **tokenizer) {
    json_error_t error;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (!root)
        return loom_fail(
            LOOM_ERR_FORMAT, "%s:%d:%d: no tokenizer.json: %s", name, error.line, error.column, error.text);
    loom_status status = loom__tokenizer_json_build(name, root, tokenizer);
    json_decref(root);
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
