/* Reads text in blocks of whole documents. A block holds what was read, and the documents are places in it; the piece
 * of a document that was cut at its end moves into the next block. So memory is bounded by the block and the longest
 * document, whatever the size of the files, and the place behind a block is one where reading can begin again. A line
 * of JSON, which parsing takes apart in memory, has a limit: of a longer one only its length is kept. */
#include "data/text_reader.h"
#include "base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A longer document's memory is not kept for the next. */
enum { KEPT_BYTES = 4 << 20, SEPARATOR_BYTES = 4096 };

struct loom__text_reader {
    const loom__text_files *files;
    loom_text_format asked, format; /* format: of the open file */
    const char *separator;
    size_t block_bytes;
    loom__text_place place; /* of the first byte that belongs to no document yet */
    int descriptor;         /* of file number place.file; -1 = not open */
    char *carry;            /* what was read of it behind place */
    size_t carried, carry_capacity;
};

loom_text_format loom__text_format_of(loom_text_format asked, const char *path) {
    static const char *const json[] = {".jsonl", ".json", ".ndjson"};
    for (size_t i = 0; asked == LOOM_TEXT_AUTO && i < sizeof json / sizeof *json; i++)
        if (loom__ends_with(path, json[i]))
            return LOOM_TEXT_JSON;
    return asked == LOOM_TEXT_AUTO ? LOOM_TEXT_FILE : asked;
}

loom_status loom__text_check_separator(loom_text_format format, const char *separator) {
    size_t length = separator ? strlen(separator) : 0;
    if (format == LOOM_TEXT_SEPARATOR ? length >= 1 && length <= SEPARATOR_BYTES : separator == NULL)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_ARGUMENT, "the separator has %zu bytes, expected %s", length,
        format == LOOM_TEXT_SEPARATOR ? "1 to 4096" : "one only for the format of separated texts");
}

size_t loom__text_cut(
    loom_text_format format, const char *separator, const char *text, size_t bytes, size_t from, size_t *next) {
    size_t length = format == LOOM_TEXT_SEPARATOR ? strlen(separator) : 1;
    const char *found = format == LOOM_TEXT_FILE        ? NULL
                        : format == LOOM_TEXT_SEPARATOR ? memmem(text + from, bytes - from, separator, length)
                                                        : memchr(text + from, '\n', bytes - from);
    if (!found) { /* a separator may have begun at the end */
        *next = bytes - from < length ? from : bytes - length + 1;
        return SIZE_MAX;
    }
    *next = (size_t)(found - text) + length;
    return (size_t)(found - text);
}

void loom__text_block_free(loom__text_block *block) {
    free(block->text);
    free(block->documents);
    *block = (loom__text_block){0};
}

loom_status loom__text_reader_create(const loom__text_files *files, loom_text_format format, const char *separator,
    size_t block_bytes, loom__text_place start, loom__text_reader **reader) {
    loom__text_reader *made = calloc(1, sizeof *made);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "no memory to read text");
    *made = (loom__text_reader){.files = files,
        .asked = format,
        .separator = separator,
        .block_bytes = block_bytes,
        .place = start,
        .descriptor = -1};
    *reader = made;
    return LOOM_OK;
}

void loom__text_reader_destroy(loom__text_reader *reader) {
    if (!reader)
        return;
    if (reader->descriptor >= 0)
        close(reader->descriptor);
    free(reader->carry);
    free(reader);
}

static const char *path_of(const loom__text_reader *reader) {
    return reader->files->files[reader->place.file].path;
}

static loom_status fail_read(const loom__text_reader *reader) {
    return loom_fail(LOOM_ERR_IO, "%s: cannot be read at byte %lld: %s", path_of(reader),
        (long long)reader->place.offset, strerror(errno));
}

static loom_status open_file(loom__text_reader *reader) {
    reader->format = loom__text_format_of(reader->asked, path_of(reader));
    reader->descriptor = open(path_of(reader), O_RDONLY | O_CLOEXEC);
    if (reader->descriptor < 0 || lseek(reader->descriptor, (off_t)reader->place.offset, SEEK_SET) < 0)
        return fail_read(reader);
    return LOOM_OK;
}

static loom_status reserve(char **text, size_t *capacity, size_t bytes) {
    if (bytes <= *capacity)
        return LOOM_OK;
    size_t wanted = bytes + bytes / 2;
    char *grown = realloc(*text, wanted);
    if (!grown)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for %zu bytes of text", wanted);
    *text = grown;
    *capacity = wanted;
    return LOOM_OK;
}

/* Appends up to a block of the open file; *end where it has ended. */
static loom_status read_more(loom__text_reader *reader, loom__text_block *block, bool *end) {
    LOOM_TRY(reserve(&block->text, &block->capacity, block->bytes + reader->block_bytes));
    ssize_t got;
    do
        got = read(reader->descriptor, block->text + block->bytes, reader->block_bytes);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return fail_read(reader);
    block->bytes += (size_t)got;
    *end = got == 0;
    return LOOM_OK;
}

static int64_t count_lines(const char *text, size_t bytes) {
    int64_t lines = 0;
    for (const char *end = text + bytes; (text = memchr(text, '\n', (size_t)(end - text))) != NULL; text++)
        lines++;
    return lines;
}

/* The document text[offset, offset + bytes), and then what lies before `next`, are done. */
static loom_status append(
    loom__text_reader *reader, loom__text_block *block, size_t offset, size_t bytes, size_t next) {
    if (block->count == block->document_capacity) {
        int64_t capacity = block->document_capacity ? 2 * block->document_capacity : 256;
        loom__document *grown = realloc(block->documents, (size_t)capacity * sizeof *grown);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "no memory for %lld documents", (long long)capacity);
        block->documents = grown;
        block->document_capacity = capacity;
    }
    bool too_long = reader->format == LOOM_TEXT_JSON && bytes > LOOM__JSON_LINE_BYTES;
    block->documents[block->count++] = (loom__document){.offset = offset,
        .bytes = bytes,
        .file = reader->place.file,
        .line = reader->place.line + 1,
        .too_long = too_long ? (int64_t)bytes : 0};
    reader->place.offset += (int64_t)(next - offset);
    reader->place.line += count_lines(block->text + offset, next - offset);
    return LOOM_OK;
}

/* The documents that end in text[*start, bytes); *start moves behind them, *searched to where to search on. */
static loom_status cut_documents(loom__text_reader *reader, loom__text_block *block, size_t *start, size_t *searched) {
    for (;;) {
        size_t next;
        size_t end = loom__text_cut(reader->format, reader->separator, block->text, block->bytes, *searched, &next);
        *searched = next;
        if (end == SIZE_MAX)
            return LOOM_OK;
        LOOM_TRY(append(reader, block, *start, end - *start, next));
        *start = next;
    }
}

/* Reads on to the end of a line that has become too long, forgetting it. What follows it in the file stands at `start`
 * then, where the line began; *end where the file has ended. */
static loom_status forget_line(loom__text_reader *reader, loom__text_block *block, size_t start, bool *end) {
    int64_t length = (int64_t)(block->bytes - start);
    const char *stop = NULL;
    while (!stop && !*end) {
        block->bytes = start;
        LOOM_TRY(read_more(reader, block, end));
        stop = memchr(block->text + start, '\n', block->bytes - start);
        length += stop ? stop - (block->text + start) : (int64_t)(block->bytes - start);
    }
    size_t behind = stop ? (size_t)(stop - block->text) + 1 : block->bytes;
    block->bytes -= behind - start;
    LOOM_TRY(append(reader, block, start, 0, start));
    block->documents[block->count - 1].too_long = length;
    if (stop) {
        memmove(block->text + start, block->text + behind, block->bytes - start);
        reader->place.offset += length + 1;
        reader->place.line++;
    }
    return LOOM_OK;
}

loom_status loom__text_check_length(const loom__document *document) {
    return loom__json_line_check_length(document->too_long);
}

static loom_status end_file(loom__text_reader *reader, loom__text_block *block, size_t start) {
    /* A file of one document has it also where it is empty; otherwise nothing behind the last end is no document. */
    if (start < block->bytes || (reader->format == LOOM_TEXT_FILE && reader->place.offset == 0))
        LOOM_TRY(append(reader, block, start, block->bytes - start, block->bytes));
    close(reader->descriptor);
    reader->descriptor = -1;
    reader->place = (loom__text_place){.file = reader->place.file + 1};
    return LOOM_OK;
}

static loom_status begin_block(loom__text_reader *reader, loom__text_block *block) {
    if (block->capacity > KEPT_BYTES)
        loom__text_block_free(block);
    block->count = 0;
    block->bytes = 0;
    LOOM_TRY(reserve(&block->text, &block->capacity, reader->carried + 1));
    if (reader->carried > 0)
        memcpy(block->text, reader->carry, reader->carried);
    block->bytes = reader->carried;
    reader->carried = 0;
    return LOOM_OK;
}

static loom_status keep_rest(loom__text_reader *reader, const loom__text_block *block, size_t start) {
    size_t rest = block->bytes - start;
    if (reader->carry_capacity > KEPT_BYTES && rest <= KEPT_BYTES) {
        free(reader->carry);
        reader->carry = NULL;
        reader->carry_capacity = 0;
    }
    LOOM_TRY(reserve(&reader->carry, &reader->carry_capacity, rest + 1));
    memcpy(reader->carry, block->text + start, rest);
    reader->carried = rest;
    return LOOM_OK;
}

loom_status loom__text_reader_next(loom__text_reader *reader, loom__text_block *block) {
    LOOM_TRY(begin_block(reader, block));
    size_t start = 0, searched = 0;
    while (reader->place.file < reader->files->count && (block->count == 0 || block->bytes < reader->block_bytes)) {
        if (reader->descriptor < 0)
            LOOM_TRY(open_file(reader));
        bool end = false;
        LOOM_TRY(read_more(reader, block, &end));
        LOOM_TRY(cut_documents(reader, block, &start, &searched));
        if (reader->format == LOOM_TEXT_JSON && block->bytes - start > LOOM__JSON_LINE_BYTES) {
            LOOM_TRY(forget_line(reader, block, start, &end));
            searched = start;
            LOOM_TRY(cut_documents(reader, block, &start, &searched));
        }
        if (end) {
            LOOM_TRY(end_file(reader, block, start));
            start = searched = block->bytes;
        }
    }
    LOOM_TRY(keep_rest(reader, block, start));
    block->end = reader->place;
    return block->count > 0 ? LOOM_OK : LOOM_END;
}
