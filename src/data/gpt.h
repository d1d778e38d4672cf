/* The indices of a GPT dataset, apart from the tokens, so that they can be checked, kept on disk and timed. */
#ifndef DATA_GPT_H
#define DATA_GPT_H

#include "format/file.h"
#include <megaloom/data.h>

/* A sample begins at token `offset` of document_index[place]. */
typedef struct loom__gpt_cut {
    int64_t place, offset;
} loom__gpt_cut;

/* Everything the indices depend on. No padding: it is hashed and compared as bytes. */
typedef struct loom__gpt_key {
    int64_t first, end;      /* the split's sequences [first, end) */
    uint64_t lengths_hash;   /* of their lengths; 0 where nothing is kept on disk */
    int64_t sequence_length; /* s */
    int64_t seed;
    int64_t samples;      /* asked; -1 = one epoch */
    int64_t extra;        /* 1: a sample has a token more, which is a label only */
    int64_t keep_partial; /* 1: the last, padded sample is kept */
} loom__gpt_key;

typedef struct loom__gpt_indices {
    int64_t first, end; /* the split's sequences [first, end) */
    int64_t epochs;
    int64_t documents;              /* entries of document_index: epochs * (end - first) */
    const uint32_t *document_index; /* sequence numbers in reading order */
    int64_t samples;
    const loom__gpt_cut *sample_index; /* [samples + 1] */
    const int64_t *shuffle_index;      /* [samples] sample asked -> sample in reading order */
    loom__mapping file;                /* where the three lie; cleared where they are of the heap */
} loom__gpt_indices;

/* Memory for an array that is read in no order; free with free. */
void *loom__gpt_large(size_t bytes);

/* lengths[i]: tokens of sequence key->first + i. max_epochs 0 = no limit. */
loom_status loom__gpt_indices_build(
    const loom__gpt_key *key, const int32_t *lengths, int64_t max_epochs, loom__gpt_indices *indices);
void loom__gpt_indices_free(loom__gpt_indices *indices);

uint64_t loom__gpt_hash(const void *data, size_t bytes);
/* The same from a file of `folder` that is named after the key, or, where there is none or it is damaged, built and put
 * there. Of those that ask at once, in this run or another, one builds and the others wait for it. */
loom_status loom__gpt_indices_cached(const char *folder, const loom__gpt_key *key, const int32_t *lengths,
    int64_t max_epochs, loom__gpt_indices *indices);

/* Of a dataset made by loom_gpt_dataset_create. */
const loom__gpt_indices *loom__gpt_dataset_indices(const loom_dataset *dataset);

#endif
