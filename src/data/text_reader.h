/* Files of text as documents, in blocks of bounded size: what reading for preprocessing and for training a tokenizer
 * have in common. */
#ifndef DATA_TEXT_READER_H
#define DATA_TEXT_READER_H

#include "data/json_line.h"
#include "data/text_files.h"

enum { LOOM__TEXT_BLOCK_BYTES = 1 << 17 };

/* The form of a file: that which was asked for; for LOOM_TEXT_AUTO, by the ending of its name. */
loom_text_format loom__text_format_of(loom_text_format asked, const char *path);

/* LOOM_ERR_ARGUMENT where the format needs a separator and has none of 1 to 4096 bytes, or has one and needs none. */
loom_status loom__text_check_separator(loom_text_format format, const char *separator);

/* Where a document ends in text[0, bytes), searched from `from` on (what lies before has been searched already): its
 * bytes, or SIZE_MAX where the text does not say. *next is where the one after it begins, or where to search on. */
size_t loom__text_cut(
    loom_text_format format, const char *separator, const char *text, size_t bytes, size_t from, size_t *next);

/* Before a document: `offset` bytes and `line` lines of file number `file` are done. */
typedef struct loom__text_place {
    int64_t file, offset, line;
} loom__text_place;

typedef struct loom__document {
    size_t offset, bytes; /* in the block's text */
    int64_t file;         /* number in the list */
    int64_t line;         /* of the file, counted from 1; where the document begins */
    int64_t too_long; /* bytes of a line that is longer than LOOM__JSON_LINE_BYTES, of which there is none here; or 0 */
} loom__document;

/* Documents in a row. A cleared struct is empty; its memory is used again by the next reading. */
typedef struct loom__text_block {
    char *text;
    size_t bytes, capacity;
    loom__document *documents;
    int64_t count, document_capacity;
    loom__text_place end; /* behind the last document */
} loom__text_block;

void loom__text_block_free(loom__text_block *block);

/* LOOM_ERR_FORMAT where the document is a line that is too long. */
loom_status loom__text_check_length(const loom__document *document);

typedef struct loom__text_reader loom__text_reader;

/* files and separator are borrowed. block_bytes: a block ends with the document that reaches it. */
loom_status loom__text_reader_create(const loom__text_files *files, loom_text_format format, const char *separator,
    size_t block_bytes, loom__text_place start, loom__text_reader **reader);
void loom__text_reader_destroy(loom__text_reader *reader); /* NULL is accepted */
/* The next documents; LOOM_END after the last. */
loom_status loom__text_reader_next(loom__text_reader *reader, loom__text_block *block);

#endif
