/* What the parts of preprocessing share: the encoding of a block of documents, which workers do, and the journal, by
 * which a run that was stopped goes on. */
#ifndef DATA_PREPROCESS_H
#define DATA_PREPROCESS_H

#include "data/text_reader.h"
#include "format/indexed.h"

enum { LOOM__PREPROCESS_KEYS = 64, LOOM__PREPROCESS_MESSAGES = 8 };

/* A configuration with its defaults filled in; all borrowed. */
typedef struct loom__preprocess {
    loom_data_preprocess_config config;
    const loom_tokenizer *tokenizer;
    const char *const *keys;
    int64_t key_count; /* datasets */
    loom_dtype dtype;
    size_t size; /* of an element */
    loom__text_files files;
} loom__preprocess;

/* ---- a block of documents, encoded ---- */

/* The tokens of a key, as elements of the dataset, document after document. */
typedef struct loom__elements {
    unsigned char *data;
    size_t bytes, capacity;
} loom__elements;

enum { LOOM__DOCUMENT_SKIPPED = -1 };

/* Memory is kept from block to block. A cleared struct is empty. */
typedef struct loom__encoded_block {
    loom__text_block text;
    loom__elements elements[LOOM__PREPROCESS_KEYS];
    int64_t *lengths; /* [documents, keys] in tokens; 0 = no sequence; LOOM__DOCUMENT_SKIPPED */
    int64_t length_capacity;
    int64_t empty, invalid;
    int message_count; /* of the first that are invalid */
    char messages[LOOM__PREPROCESS_MESSAGES][512];
    loom_status status; /* of encoding; what was wrong is in error */
    char error[512];
} loom__encoded_block;

void loom__encoded_block_free(loom__encoded_block *block);

/* Memory of one worker. A cleared struct is empty. */
typedef struct loom__encode_scratch {
    int64_t *tokens;
    size_t capacity;
} loom__encode_scratch;

void loom__encode_scratch_free(loom__encode_scratch *scratch);

/* Encodes block->text; sets everything else of the block. Reads `job` only, so that threads may share it. */
void loom__encode_block(const loom__preprocess *job, loom__encoded_block *block, loom__encode_scratch *scratch);

/* ---- the journal ---- */

typedef struct loom__journal {
    loom__text_place place; /* what was done of the input */
    loom_data_preprocess_result result;
    loom__indexed_mark marks[LOOM__PREPROCESS_KEYS];
} loom__journal;

/* Reads PREFIX.preprocess; false where there is none, or none of this configuration and these input files: then
 * *other_bytes is what the run that wrote it had done, else 0. */
bool loom__journal_read(const loom__preprocess *job, loom__journal *journal, int64_t *other_bytes);
/* Replaces it in one step. */
loom_status loom__journal_write(const loom__preprocess *job, const loom__journal *journal);
/* LOOM_ERR_IO where there is one that cannot be removed. */
loom_status loom__journal_remove(const loom__preprocess *job);

/* loom_data_preprocess_text with other sizes than those that suit large inputs: of a block of text, and of the text
 * after which the journal is written. */
loom_status loom__preprocess_text(const loom_data_preprocess_config *config, size_t block_bytes, int64_t journal_bytes,
    loom_data_preprocess_result *result);

#endif
