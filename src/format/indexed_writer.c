/* Writing Megatron's indexed datasets. The .bin is written in a stream, and beside it the lengths, document ends and
 * modes, each into a temporary file of its own, so that memory does not grow with the set; the .idx is put together
 * from them at the end. Order of becoming visible: the old .idx goes, the new .bin comes, the new .idx comes. A pair is
 * opened through its .idx, so at no moment can a mixed pair be opened. */
#include "format/file.h"
#include "format/indexed.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

enum { BIN, IDX, LENGTHS, DOCUMENTS, MODES, FILES };

static const char *const suffixes[FILES] = {".bin", ".idx", ".idx.lengths", ".idx.documents", ".idx.modes"};

struct loom_indexed_writer {
    char *prefix;
    loom__new_file files[FILES]; /* documents: the entries after the first, which is 0; modes: only if multimodal */
    loom_dtype dtype;
    size_t size;
    bool multimodal, finished;
    int64_t sequences, documents, ended; /* ended: sequences that belong to a document */
};

static loom_status no_memory(const char *prefix) {
    return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to write it", prefix);
}

static bool has_file(const loom_indexed_writer *writer, int file) {
    return file != MODES || writer->multimodal;
}

/* `bytes` of each file are there already; NULL = none is. */
static loom_status open_files(loom_indexed_writer *writer, const uint64_t *bytes) {
    loom_status status = LOOM_OK;
    for (int i = 0; i < FILES && status == LOOM_OK; i++) {
        if (!has_file(writer, i))
            continue;
        char *path = loom__path_join(writer->prefix, "", suffixes[i]);
        status = !path                   ? no_memory(writer->prefix)
                 : bytes && bytes[i] > 0 ? loom__new_file_resume(path, bytes[i], &writer->files[i])
                                         : loom__new_file_create(path, &writer->files[i]);
        free(path);
    }
    return status;
}

static loom_status make(const char *prefix, loom_dtype dtype, bool multimodal, loom_indexed_writer **writer) {
    if (loom__indexed_code_of_dtype(dtype) == 0)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: dtype is %s, expected U8, I8, I16, I32, I64, F64, F32 or U16", prefix,
            loom_dtype_name(dtype));
    loom_indexed_writer *made = calloc(1, sizeof *made);
    if (!made)
        return no_memory(prefix);
    *made = (loom_indexed_writer){
        .prefix = strdup(prefix), .dtype = dtype, .size = loom_dtype_size(dtype), .multimodal = multimodal};
    for (int i = 0; i < FILES; i++)
        made->files[i].descriptor = -1;
    if (!made->prefix) {
        free(made);
        return no_memory(prefix);
    }
    *writer = made;
    return LOOM_OK;
}

loom_status loom_indexed_writer_create(
    const char *prefix, loom_dtype dtype, bool multimodal, loom_indexed_writer **writer) {
    loom_indexed_writer *made;
    LOOM_TRY(make(prefix, dtype, multimodal, &made));
    loom_status status = open_files(made, NULL);
    if (status != LOOM_OK) {
        loom_indexed_writer_destroy(made);
        return status;
    }
    *writer = made;
    return LOOM_OK;
}

loom_status loom__indexed_writer_mark(loom_indexed_writer *writer, loom__indexed_mark *mark) {
    if (writer->finished || writer->ended != writer->sequences)
        return loom_fail(LOOM_ERR_STATE, "%s: a mark is set %s", writer->prefix,
            writer->finished ? "after finish" : "inside a document");
    for (int i = 0; i < FILES; i++)
        if (i != IDX && has_file(writer, i))
            LOOM_TRY(loom__new_file_sync(&writer->files[i]));
    *mark = (loom__indexed_mark){
        .bin_bytes = writer->files[BIN].bytes, .sequences = writer->sequences, .documents = writer->documents};
    return LOOM_OK;
}

loom_status loom__indexed_writer_resume(const char *prefix, loom_dtype dtype, bool multimodal,
    const loom__indexed_mark *mark, loom_indexed_writer **writer) {
    uint64_t sequences = (uint64_t)mark->sequences, documents = (uint64_t)mark->documents;
    if (mark->sequences < 0 || mark->documents < 0 || sequences > UINT64_MAX / 8 || documents > UINT64_MAX / 8)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: a mark of %lld sequences and %lld documents, expected at least 0",
            prefix, (long long)mark->sequences, (long long)mark->documents);
    const uint64_t bytes[FILES] = {mark->bin_bytes, 0, sequences * sizeof(int32_t), documents * 8, sequences};
    loom_indexed_writer *made;
    LOOM_TRY(make(prefix, dtype, multimodal, &made));
    made->sequences = made->ended = mark->sequences;
    made->documents = mark->documents;
    loom_status status = open_files(made, bytes);
    if (status != LOOM_OK) {
        loom__indexed_writer_abandon(made);
        return status;
    }
    *writer = made;
    return LOOM_OK;
}

static loom_status check_sequence(const loom_indexed_writer *writer, int64_t count, int mode) {
    if (writer->finished)
        return loom_fail(LOOM_ERR_STATE, "%s: a sequence comes after finish", writer->prefix);
    if (count < 0 || count > INT32_MAX)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: sequence %lld has %lld elements, expected 0 to %d", writer->prefix,
            (long long)writer->sequences, (long long)count, INT32_MAX);
    if (mode < INT8_MIN || mode > INT8_MAX || (mode != 0 && !writer->multimodal))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: sequence %lld has mode %d, expected %s", writer->prefix,
            (long long)writer->sequences, mode, writer->multimodal ? "-128 to 127" : "0 (the set is not multimodal)");
    return LOOM_OK;
}

static loom_status record_sequence(loom_indexed_writer *writer, int64_t count, int mode) {
    const int32_t length = (int32_t)count;
    const int8_t small = (int8_t)mode;
    LOOM_TRY(loom__new_file_write(&writer->files[LENGTHS], &length, sizeof length));
    if (writer->multimodal)
        LOOM_TRY(loom__new_file_write(&writer->files[MODES], &small, sizeof small));
    writer->sequences++;
    return LOOM_OK;
}

loom_status loom_indexed_writer_add(loom_indexed_writer *writer, const void *elements, int64_t count, int mode) {
    LOOM_TRY(check_sequence(writer, count, mode));
    LOOM_TRY(loom__new_file_write(&writer->files[BIN], elements, (size_t)count * writer->size));
    return record_sequence(writer, count, mode);
}

static void integer_range(loom_dtype dtype, int64_t *least, int64_t *most) {
    switch (dtype) {
    case LOOM_U8:
        *least = 0, *most = UINT8_MAX;
        return;
    case LOOM_I8:
        *least = INT8_MIN, *most = INT8_MAX;
        return;
    case LOOM_I16:
        *least = INT16_MIN, *most = INT16_MAX;
        return;
    case LOOM_U16:
        *least = 0, *most = UINT16_MAX;
        return;
    case LOOM_I32:
        *least = INT32_MIN, *most = INT32_MAX;
        return;
    case LOOM_I64:
        *least = INT64_MIN, *most = INT64_MAX;
        return;
    default:
        *least = 1, *most = 0;
    }
}

loom_status loom_indexed_writer_add_tokens(
    loom_indexed_writer *writer, const int64_t *tokens, int64_t count, int mode) {
    LOOM_TRY(check_sequence(writer, count, mode));
    int64_t least, most;
    integer_range(writer->dtype, &least, &most);
    if (least > most)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: dtype is %s, expected an integer type for tokens", writer->prefix,
            loom_dtype_name(writer->dtype));
    /* Checked before anything is written, so that a refused sequence leaves no trace. */
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] < least || tokens[i] > most)
            return loom_fail(LOOM_ERR_ARGUMENT,
                "%s: token %lld at %lld of sequence %lld does not fit %s (%lld to %lld)", writer->prefix,
                (long long)tokens[i], (long long)i, (long long)writer->sequences, loom_dtype_name(writer->dtype),
                (long long)least, (long long)most);
    for (int64_t i = 0; i < count; i++) /* little-endian: the low bytes are the narrow value */
        LOOM_TRY(loom__new_file_write(&writer->files[BIN], &tokens[i], writer->size));
    return record_sequence(writer, count, mode);
}

loom_status loom_indexed_writer_end_document(loom_indexed_writer *writer) {
    if (writer->finished)
        return loom_fail(LOOM_ERR_STATE, "%s: a document ends after finish", writer->prefix);
    LOOM_TRY(loom__new_file_write(&writer->files[DOCUMENTS], &writer->sequences, sizeof writer->sequences));
    writer->documents++;
    writer->ended = writer->sequences;
    return LOOM_OK;
}

static loom_status copy(void *context, const void *data, size_t bytes) {
    loom_indexed_writer *writer = context;
    return loom__new_file_write(&writer->files[IDX], data, bytes);
}

typedef struct pointers {
    loom_indexed_writer *writer;
    int64_t next; /* where the next sequence begins, in bytes */
} pointers;

/* What lengths say about where their sequences lie. */
static loom_status write_pointers(void *context, const void *data, size_t bytes) {
    pointers *at = context;
    for (size_t i = 0; i < bytes; i += sizeof(int32_t)) {
        LOOM_TRY(loom__new_file_write(&at->writer->files[IDX], &at->next, sizeof at->next));
        at->next += (int64_t)loom__load_i32((const unsigned char *)data + i) * (int64_t)at->writer->size;
    }
    return LOOM_OK;
}

static loom_status write_index(loom_indexed_writer *writer) {
    loom__new_file *idx = &writer->files[IDX];
    uint64_t version = 1, sequences = (uint64_t)writer->sequences, entries = (uint64_t)writer->documents + 1;
    unsigned char code = (unsigned char)loom__indexed_code_of_dtype(writer->dtype);
    LOOM_TRY(loom__new_file_write(idx, loom__indexed_magic, sizeof loom__indexed_magic));
    LOOM_TRY(loom__new_file_write(idx, &version, sizeof version));
    LOOM_TRY(loom__new_file_write(idx, &code, sizeof code));
    LOOM_TRY(loom__new_file_write(idx, &sequences, sizeof sequences));
    LOOM_TRY(loom__new_file_write(idx, &entries, sizeof entries));
    LOOM_TRY(loom__new_file_read_back(&writer->files[LENGTHS], copy, writer));
    LOOM_TRY(loom__new_file_read_back(&writer->files[LENGTHS], write_pointers, &(pointers){.writer = writer}));
    int64_t zero = 0;
    LOOM_TRY(loom__new_file_write(idx, &zero, sizeof zero));
    LOOM_TRY(loom__new_file_read_back(&writer->files[DOCUMENTS], copy, writer));
    return writer->multimodal ? loom__new_file_read_back(&writer->files[MODES], copy, writer) : LOOM_OK;
}

loom_status loom_indexed_writer_finish(loom_indexed_writer *writer) {
    if (writer->finished)
        return loom_fail(LOOM_ERR_STATE, "%s: is finished already", writer->prefix);
    if (writer->ended != writer->sequences)
        return loom_fail(LOOM_ERR_STATE, "%s: the last %lld sequences belong to no document: end it before finish",
            writer->prefix, (long long)(writer->sequences - writer->ended));
    loom__new_file *bin = &writer->files[BIN], *idx = &writer->files[IDX];
    LOOM_TRY(write_index(writer));
    LOOM_TRY(loom__new_file_sync(bin));
    LOOM_TRY(loom__new_file_sync(idx));
    if (unlink(idx->path) != 0 && errno != ENOENT) {
        idx->failed = loom_fail(LOOM_ERR_IO, "%s: cannot be replaced: %s", idx->path, strerror(errno));
        return idx->failed;
    }
    LOOM_TRY(loom__new_file_commit(bin));
    LOOM_TRY(loom__new_file_commit(idx));
    writer->finished = true;
    return LOOM_OK;
}

void loom_indexed_writer_destroy(loom_indexed_writer *writer) {
    if (!writer)
        return;
    for (int i = 0; i < FILES; i++)
        loom__new_file_destroy(&writer->files[i]);
    free(writer->prefix);
    free(writer);
}

void loom__indexed_writer_abandon(loom_indexed_writer *writer) {
    for (int i = 0; writer && i < FILES; i++)
        loom__new_file_abandon(&writer->files[i]);
    loom_indexed_writer_destroy(writer);
}
