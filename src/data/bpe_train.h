/* Learning byte-pair encoding: words and how often they occur become joins. Nothing here knows about files or JSON. */
#ifndef DATA_BPE_TRAIN_H
#define DATA_BPE_TRAIN_H

#include "data/bpe.h"

/* Different words and their numbers. A cleared struct is empty. */
typedef struct loom__word_counts {
    char *texts; /* of all words, one behind the other */
    size_t text_bytes, text_capacity;
    struct loom__counted_word {
        size_t offset;
        uint32_t bytes;
        int64_t count;
    } * words;
    int64_t count, capacity;
    int64_t *slots; /* from the hash of a text to a word; -1 = none */
    uint64_t slot_count;
} loom__word_counts;

void loom__word_counts_free(loom__word_counts *words);
loom_status loom__word_counts_add(loom__word_counts *words, const char *text, size_t bytes);

typedef struct loom__join {
    uint32_t left, right, joined; /* ids */
} loom__join;

/* Up to `tokens` new tokens, with ids from 256 on, out of bytes, whose ids byte_ids gives (each of 0 to 255 once): the
 * joins in the order of their ranks. Two joins may give one token, so that there may be more joins than tokens. joins:
 * free with free. */
loom_status loom__bpe_train(const loom__word_counts *words, const uint32_t byte_ids[256], int64_t tokens,
    loom__join **joins, int64_t *join_count);

#endif
