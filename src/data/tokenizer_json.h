/* What a Hugging Face tokenizer.json says, as far as Megaloom does it; all else is refused by name when it is read. */
#ifndef DATA_TOKENIZER_JSON_H
#define DATA_TOKENIZER_JSON_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/bpe.h"

#include <megaloom/data.h>
#include <pcre2.h>

#define LOOM__METASPACE "\xe2\x96\x81" /* U+2581: SentencePiece's space */

enum {
    LOOM__TOKENIZER_STEPS = 8,    /* normalizers, and pre-tokenizers, of a file */
    LOOM__TOKENIZER_EDGE = 16,    /* tokens that a template puts at either end */
    LOOM__TOKENIZER_AFFIX = 64,   /* bytes of a text to find or to put */
    LOOM__TOKENIZER_ADDED = 1024, /* bytes of an added token */
};

typedef struct loom__affix {
    char text[LOOM__TOKENIZER_AFFIX];
    size_t bytes;
} loom__affix;

typedef struct loom__normalizer {
    enum { LOOM__NORMALIZE_PREPEND, LOOM__NORMALIZE_REPLACE, LOOM__NORMALIZE_NFC } kind;
    loom__affix pattern, content; /* of replace; prepend has a content */
} loom__normalizer;

typedef struct loom__splitter {
    enum { LOOM__SPLIT_NONE, LOOM__SPLIT_REGEX, LOOM__SPLIT_TEXT, LOOM__SPLIT_METASPACE } kind;
    enum { LOOM__SPLIT_ISOLATED, LOOM__SPLIT_REMOVED, LOOM__SPLIT_WITH_PREVIOUS, LOOM__SPLIT_WITH_NEXT } behavior;
    enum {
        LOOM__PREFIX_NEVER,
        LOOM__PREFIX_FIRST,
        LOOM__PREFIX_ALWAYS
    } prefix; /* metaspace, or a byte level's space */
    pcre2_code *regex;
    loom__affix text; /* to split at; metaspace: what stands for a space */
    bool split;       /* metaspace: before each of them */
} loom__splitter;

/* A set of texts, as a tree of bytes. */
typedef struct loom__trie {
    loom__map edges; /* node << 8 | byte -> node; 0 is the root */
    loom__map ends;  /* node -> id */
    uint64_t nodes;
    bool starts[256];
} loom__trie;

enum { LOOM__PIECE_ADDED = 1, LOOM__PIECE_SPECIAL = 2 };

typedef struct loom__tokenizer_json {
    loom__bpe bpe;
    char *texts;            /* of all pieces */
    unsigned char *flags;   /* [bpe.ids] LOOM__PIECE_… */
    short *bytes;           /* [bpe.ids] the byte that a token such as <0x0A> decodes to, else -1 */
    loom__trie raw, normal; /* added tokens to find before, and after, normalization */
    loom__normalizer normalizers[LOOM__TOKENIZER_STEPS];
    loom__splitter splitters[LOOM__TOKENIZER_STEPS];
    int normalizer_count, splitter_count;
    bool byte_level;
    uint32_t before[LOOM__TOKENIZER_EDGE], after[LOOM__TOKENIZER_EDGE]; /* tokens that a template puts around */
    int before_count, after_count;
    /* Of the decoder, unless it is of the byte level. */
    loom__affix decode_from, decode_to; /* bytes 0: nothing is replaced */
    int strip;                          /* leading decode_strip's that a text loses at most */
    loom__affix decode_strip;
    bool strip_first_token; /* a metaspace decoder: of the first token only, and all of them */
    int64_t end;            /* end of document, decodes to nothing; -1 = none */
    bool cut_at_spaces;     /* no token has a U+2581 behind another character: words can be cut before it */
    char *name;             /* of the file */
} loom__tokenizer_json;

/* Reads the text of a tokenizer.json; name is for messages. */
loom_status loom__tokenizer_json_read(
    const char *name, const char *text, size_t bytes, loom__tokenizer_json **tokenizer);
void loom__tokenizer_json_free(loom__tokenizer_json *tokenizer); /* NULL is accepted */

/* Adds the text to the set; at most LOOM__TOKENIZER_ADDED bytes. */
loom_status loom__trie_add(loom__trie *trie, const char *text, size_t bytes, uint32_t id);
/* The longest text of the set that text begins with: its id and *length, or LOOM__NO_TOKEN. */
uint32_t loom__trie_find(const loom__trie *trie, const char *text, size_t bytes, size_t *length);

/* A growing text. A cleared struct is empty. */
typedef struct loom__buffer {
    char *text;
    size_t bytes, capacity;
} loom__buffer;

loom_status loom__buffer_add(loom__buffer *buffer, const char *text, size_t bytes);

/* The normalized text of text, which is valid UTF-8; swap is a second buffer for work. */
loom_status loom__tokenizer_json_normalize(const loom__tokenizer_json *tokenizer, const char *text, size_t bytes,
    loom__buffer *normalized, loom__buffer *swap);

/* Ids of a text, and texts of ids, as loom_tokenizer has them. Thread-safe. */
loom_status loom__tokenizer_json_encode(
    void *context, const char *text, size_t bytes, int64_t *tokens, size_t capacity, size_t *count);
loom_status loom__tokenizer_json_decode(
    void *context, const int64_t *tokens, size_t count, char *text, size_t capacity, size_t *bytes);
/* How many of the first tokens have a text that no later token changes: all but a run of byte tokens at the end. */
size_t loom__tokenizer_json_settled(void *context, const int64_t *tokens, size_t count);
/* The most tokens that a byte of text can become, and those around the text. */
void loom__tokenizer_json_room(const loom__tokenizer_json *tokenizer, int64_t *per_byte, int64_t *extra);

#endif
