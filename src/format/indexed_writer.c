/* Writing Megatron's indexed datasets. The .bin is written in a stream while lengths and document ends collect in
 * memory (12 bytes a sequence and document); the .idx follows at the end. Order of becoming visible: the old .idx goes,
 * the new .bin comes, the new .idx comes. A pair is opened through its .idx, so at no moment can a mixed pair be
 * opened. */
#include "format/file.h"
#include "format/indexed.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

struct loom_indexed_writer {
    char *prefix;
    loom__new_file bin, idx;
    loom_dtype dtype;
    size_t size;
    bool multimodal, finished;
    int32_t *lengths;
    int8_t *modes;
    int64_t sequences, sequence_capacity;
    int64_t *documents; /* entries after the first, which is 0 */
    int64_t document_count, document_capacity;
};

static loom_status no_memory(const char *prefix) {
    return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for the index", prefix);
}

static loom_status create_files(loom_indexed_writer *writer) {
    char *bin = loom__path_join(writer->prefix, "", ".bin"), *idx = loom__path_join(writer->prefix, "", ".idx");
    loom_status status = bin && idx ? LOOM_OK : no_memory(writer->prefix);
    if (status == LOOM_OK)
        status = loom__new_file_create(bin, &writer->bin);
    if (status == LOOM_OK)
        status = loom__new_file_create(idx, &writer->idx);
    free(bin);
    free(idx);
    return status;
}

loom_status loom_indexed_writer_create(
    const char *prefix, loom_dtype dtype, bool multimodal, loom_indexed_writer **writer) {
    if (loom__indexed_code_of_dtype(dtype) == 0)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: dtype is %s, expected U8, I8, I16, I32, I64, F64, F32 or U16", prefix,
            loom_dtype_name(dtype));
    loom_indexed_writer *made = calloc(1, sizeof *made);
    if (!made)
        return no_memory(prefix);
    *made = (loom_indexed_writer){.prefix = strdup(prefix),
        .dtype = dtype,
        .size = loom_dtype_size(dtype),
        .multimodal = multimodal,
        .bin.descriptor = -1,
        .idx.descriptor = -1};
    loom_status status = made->prefix ? create_files(made) : no_memory(prefix);
    if (status != LOOM_OK) {
        loom_indexed_writer_destroy(made);
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

/* Room for one more sequence. */
static loom_status reserve_sequence(loom_indexed_writer *writer) {
    if (writer->sequences < writer->sequence_capacity)
        return LOOM_OK;
    int64_t capacity = writer->sequence_capacity ? 2 * writer->sequence_capacity : 1024;
    int32_t *lengths = realloc(writer->lengths, (size_t)capacity * sizeof *lengths);
    if (!lengths)
        return no_memory(writer->prefix);
    writer->lengths = lengths;
    int8_t *modes = realloc(writer->modes, (size_t)capacity);
    if (!modes)
        return no_memory(writer->prefix);
    writer->modes = modes;
    writer->sequence_capacity = capacity;
    return LOOM_OK;
}

static void record_sequence(loom_indexed_writer *writer, int64_t count, int mode) {
    writer->lengths[writer->sequences] = (int32_t)count;
    writer->modes[writer->sequences] = (int8_t)mode;
    writer->sequences++;
}

loom_status loom_indexed_writer_add(loom_indexed_writer *writer, const void *elements, int64_t count, int mode) {
    LOOM_TRY(check_sequence(writer, count, mode));
    LOOM_TRY(reserve_sequence(writer));
    LOOM_TRY(loom__new_file_write(&writer->bin, elements, (size_t)count * writer->size));
    record_sequence(writer, count, mode);
    return LOOM_OK;
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
    LOOM_TRY(reserve_sequence(writer));
    for (int64_t i = 0; i < count; i++) /* little-endian: the low bytes are the narrow value */
        LOOM_TRY(loom__new_file_write(&writer->bin, &tokens[i], writer->size));
    record_sequence(writer, count, mode);
    return LOOM_OK;
}

loom_status loom_indexed_writer_end_document(loom_indexed_writer *writer) {
    if (writer->finished)
        return loom_fail(LOOM_ERR_STATE, "%s: a document ends after finish", writer->prefix);
    if (writer->document_count == writer->document_capacity) {
        int64_t capacity = writer->document_capacity ? 2 * writer->document_capacity : 1024;
        int64_t *documents = realloc(writer->documents, (size_t)capacity * sizeof *documents);
        if (!documents)
            return no_memory(writer->prefix);
        writer->documents = documents;
        writer->document_capacity = capacity;
    }
    writer->documents[writer->document_count++] = writer->sequences;
    return LOOM_OK;
}

static loom_status write_index(loom_indexed_writer *writer) {
    loom__new_file *idx = &writer->idx;
    uint64_t version = 1, sequences = (uint64_t)writer->sequences, entries = (uint64_t)writer->document_count + 1;
    unsigned char code = (unsigned char)loom__indexed_code_of_dtype(writer->dtype);
    LOOM_TRY(loom__new_file_write(idx, loom__indexed_magic, sizeof loom__indexed_magic));
    LOOM_TRY(loom__new_file_write(idx, &version, sizeof version));
    LOOM_TRY(loom__new_file_write(idx, &code, sizeof code));
    LOOM_TRY(loom__new_file_write(idx, &sequences, sizeof sequences));
    LOOM_TRY(loom__new_file_write(idx, &entries, sizeof entries));
    LOOM_TRY(loom__new_file_write(idx, writer->lengths, (size_t)writer->sequences * sizeof *writer->lengths));
    int64_t pointer = 0;
    for (int64_t i = 0; i < writer->sequences; i++) {
        LOOM_TRY(loom__new_file_write(idx, &pointer, sizeof pointer));
        pointer += (int64_t)writer->lengths[i] * (int64_t)writer->size;
    }
    int64_t zero = 0;
    LOOM_TRY(loom__new_file_write(idx, &zero, sizeof zero));
    LOOM_TRY(loom__new_file_write(idx, writer->documents, (size_t)writer->document_count * sizeof *writer->documents));
    if (writer->multimodal)
        LOOM_TRY(loom__new_file_write(idx, writer->modes, (size_t)writer->sequences));
    return LOOM_OK;
}

loom_status loom_indexed_writer_finish(loom_indexed_writer *writer) {
    if (writer->finished)
        return loom_fail(LOOM_ERR_STATE, "%s: is finished already", writer->prefix);
    int64_t ended = writer->document_count ? writer->documents[writer->document_count - 1] : 0;
    if (ended != writer->sequences)
        return loom_fail(LOOM_ERR_STATE, "%s: the last %lld sequences belong to no document: end it before finish",
            writer->prefix, (long long)(writer->sequences - ended));
    LOOM_TRY(write_index(writer));
    LOOM_TRY(loom__new_file_sync(&writer->bin));
    LOOM_TRY(loom__new_file_sync(&writer->idx));
    if (unlink(writer->idx.path) != 0 && errno != ENOENT) {
        writer->idx.failed = loom_fail(LOOM_ERR_IO, "%s: cannot be replaced: %s", writer->idx.path, strerror(errno));
        return writer->idx.failed;
    }
    LOOM_TRY(loom__new_file_commit(&writer->bin));
    LOOM_TRY(loom__new_file_commit(&writer->idx));
    writer->finished = true;
    return LOOM_OK;
}

void loom_indexed_writer_destroy(loom_indexed_writer *writer) {
    if (!writer)
        return;
    loom__new_file_destroy(&writer->bin);
    loom__new_file_destroy(&writer->idx);
    free(writer->prefix);
    free(writer->lengths);
    free(writer->modes);
    free(writer->documents);
    free(writer);
}
