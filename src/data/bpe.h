/* Byte-pair encoding on raw bytes: a vocabulary, its merges, and how a word becomes tokens. Nothing here knows about
 * files or regular expressions. After the last bpe_add everything is read-only and may be shared by threads. */
#ifndef DATA_BPE_H
#define DATA_BPE_H

#include <megaloom/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* From 64-bit keys to 64-bit values; no key is UINT64_MAX. A cleared struct is an empty map. */
typedef struct loom__map {
    uint64_t *keys, *values;
    uint64_t slots, count; /* slots: 0 or a power of two */
} loom__map;

loom_status loom__map_put(loom__map *map, uint64_t key, uint64_t value);
/* UINT64_MAX where there is none. */
uint64_t loom__map_get(const loom__map *map, uint64_t key);
void loom__map_free(loom__map *map);

enum { LOOM__NO_TOKEN = UINT32_MAX };

typedef struct loom__bpe_piece {
    const char *text; /* NULL: no token has this id */
    uint32_t bytes;
    bool found_by_text; /* words may become this token */
} loom__bpe_piece;

typedef struct loom__bpe {
    loom__bpe_piece *pieces; /* [ids] */
    uint32_t ids;            /* largest id + 1 */
    uint32_t *slots;         /* from the hash of a text to an id */
    uint64_t slot_count;
    loom__map merges;       /* left id << 32 | right id -> rank << 32 | id of the two joined */
    uint32_t byte_ids[256]; /* of the token that stands for a byte; LOOM__NO_TOKEN where there is none */
    uint32_t unknown;       /* stands for characters without a token; LOOM__NO_TOKEN: they are an error */
    bool join_unknown;      /* unknown characters in a row become one token */
    bool by_character;      /* words begin as UTF-8 characters, else as bytes */
    bool whole_words_first; /* a word that is a token is not split */
} loom__bpe;

/* Room for ids below `ids`. */
loom_status loom__bpe_create(loom__bpe *bpe, uint32_t ids);
void loom__bpe_free(loom__bpe *bpe);
/* text is borrowed until the vocabulary is freed. */
void loom__bpe_add(loom__bpe *bpe, uint32_t id, const char *text, uint32_t bytes, bool found_by_text);
uint32_t loom__bpe_find(const loom__bpe *bpe, const char *text, size_t bytes);

/* What one thread needs to encode words; grows with the longest one. A cleared struct is empty. */
typedef struct loom__bpe_scratch {
    uint32_t *symbols, *next, *previous; /* [capacity] */
    struct loom__bpe_candidate *heap;    /* [2 * capacity] */
    size_t capacity, heap_count;
} loom__bpe_scratch;

void loom__bpe_scratch_free(loom__bpe_scratch *scratch);

/* Tokens of a word of valid UTF-8: scratch->symbols[0, *count). The pair of lowest rank is joined first, the leftmost
 * of equals, until no pair is left to join. O(bytes log bytes). LOOM_ERR_ARGUMENT names a character without a token. */
loom_status loom__bpe_encode(
    const loom__bpe *bpe, const char *text, size_t bytes, loom__bpe_scratch *scratch, size_t *count);

#endif
