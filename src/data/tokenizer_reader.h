/* Reading a tokenizer.json in parts: what the parts share, and the parts. A tokenizer is made in this order:
 * normalizers and splitters, the model, added tokens, post-processors, the decoder. */
#ifndef DATA_TOKENIZER_READER_H
#define DATA_TOKENIZER_READER_H

#include "data/tokenizer_json.h"

#include <jansson.h>

typedef struct loom__reader {
    const char *name; /* of the file, for messages */
    loom__tokenizer_json *made;
    short byte_of[512]; /* of the letters that stand for bytes in byte-level vocabularies; -1 = none */
    char *word;         /* [longest + 1] a text of the vocabulary in work; whoever made the reader frees it */
    size_t longest;
    char *end; /* of the texts written so far */
} loom__reader;

/* Makes what is read into; loom__reader_end gives it away with LOOM_OK, else frees it and passes the status on. */
loom_status loom__reader_begin(const char *name, loom__reader *r);
loom_status loom__reader_end(loom__reader *r, loom_status status, loom__tokenizer_json **tokenizer);

/* What the root of a tokenizer.json says; borrowed. */
loom_status loom__tokenizer_json_build(const char *name, json_t *root, loom__tokenizer_json **tokenizer);

/* The regular expression by which Llama 3 cuts words. */
extern const char loom__llama3_pattern[];

/* ---- what the parts share ---- */

/* LOOM_ERR_FORMAT: `where` is what was found, or missing where that is NULL, and what was expected. */
loom_status loom__reader_wrong(const loom__reader *r, const char *where, const json_t *found, const char *expected);
/* LOOM_ERR_UNSUPPORTED: not supported yet, with what there is. */
loom_status loom__reader_refuse(const loom__reader *r, const char *where, const json_t *found, const char *built);
/* `known` are names between spaces: " type vocab ". */
loom_status loom__reader_check_members(const loom__reader *r, const char *where, json_t *object, const char *known);
bool loom__reader_is_type(const json_t *object, const char *type);
/* A flag; `otherwise` where it is missing. */
loom_status loom__reader_bool(
    const loom__reader *r, const char *where, const json_t *object, const char *key, bool otherwise, bool *value);
/* A flag that must have one value. */
loom_status loom__reader_require_bool(
    const loom__reader *r, const char *where, const json_t *object, const char *key, bool otherwise, bool wanted);
loom_status loom__reader_affix(const loom__reader *r, const char *where, const json_t *object, const char *key,
    bool may_be_empty, loom__affix *affix);
/* The steps of an object, or of a "Sequence" of them under `member`, at most LOOM__TOKENIZER_STEPS; borrowed. */
loom_status loom__reader_steps(
    const loom__reader *r, const char *where, json_t *object, const char *member, json_t **steps, int *count);

/* ---- the parts, each a member of the file; NULL where it is missing ---- */

loom_status loom__read_normalizers(loom__reader *r, json_t *object);
loom_status loom__read_splitters(loom__reader *r, json_t *object);
/* An empty model, for ids below `ids`, whose texts have so many bytes in all and r->longest at most each. */
loom_status loom__reader_begin_model(loom__reader *r, uint64_t ids, size_t bytes);
/* A copy of the text that lives as long as the model. */
const char *loom__reader_keep(loom__reader *r, const char *text, size_t bytes);
/* The text that stands for bytes in byte-level vocabularies, in UTF-8: `letters` has room for 2 * bytes. */
size_t loom__byte_letters(const char *text, size_t bytes, char *letters);
/* The model, with room for the added tokens. */
loom_status loom__read_bpe_model(loom__reader *r, json_t *model, const json_t *added);
loom_status loom__read_added_tokens(loom__reader *r, const json_t *list);
loom_status loom__read_post_processors(loom__reader *r, json_t *object);
loom_status loom__read_decoder(loom__reader *r, json_t *object);

#endif
