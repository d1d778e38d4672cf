/* What the reader, the writer and the fuzzer of .idx share beyond <megaloom/data.h>. */
#ifndef FORMAT_INDEXED_H
#define FORMAT_INDEXED_H

#include <megaloom/data.h>

enum { LOOM__INDEXED_HEADER_BYTES = 34 }; /* magic 9, version 8, dtype code 1, sequences 8, document entries 8 */

extern const char loom__indexed_magic[9];

/* The format's dtype codes; LOOM_DTYPE_COUNT and 0 for none. */
loom_dtype loom__indexed_dtype_of_code(unsigned code);
unsigned loom__indexed_code_of_dtype(loom_dtype dtype);

/* Where the parts of a checked .idx lie. */
typedef struct loom__indexed_view {
    loom_dtype dtype;
    size_t size; /* of an element */
    int64_t sequences, document_entries, tokens;
    const unsigned char *lengths, *pointers, *documents;
    const unsigned char *modes; /* NULL = not multimodal */
} loom__indexed_view;

/* Checks every field of the .idx in memory (borrowed) against itself and a .bin of bin_bytes; `prefix` is for messages.
 */
loom_status loom__indexed_check(
    const char *prefix, const void *idx, size_t idx_bytes, uint64_t bin_bytes, loom__indexed_view *view);

/* Opens a pair in memory, borrowed until the close. */
loom_status loom__indexed_open_memory(
    const char *prefix, const void *idx, size_t idx_bytes, const void *bin, size_t bin_bytes, loom_indexed **indexed);

/* How far a writer is, at the end of a document. */
typedef struct loom__indexed_mark {
    uint64_t bin_bytes;
    int64_t sequences, documents;
} loom__indexed_mark;

/* Flushes all that was written to the disk and says how much that is. */
loom_status loom__indexed_writer_mark(loom_indexed_writer *writer, loom__indexed_mark *mark);
/* Goes on behind the mark of a writer of the same dtype whose process ended, or that was abandoned; what it wrote after
 * the mark is dropped. LOOM_ERR_NOT_FOUND where its temporary files are missing or shorter: they are left as they are.
 */
loom_status loom__indexed_writer_resume(const char *prefix, loom_dtype dtype, bool multimodal,
    const loom__indexed_mark *mark, loom_indexed_writer **writer);
/* Frees and leaves the temporary files. NULL is accepted. */
void loom__indexed_writer_abandon(loom_indexed_writer *writer);

#endif
