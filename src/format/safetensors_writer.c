/* Writing safetensors. The header is fixed by the first byte of data; from then on the writer only counts, and finish
 * compares the count with what the header promised. The header is padded with spaces to a multiple of 8 bytes, so that
 * the data part is aligned in the file. */
#include "base/text.h"
#include "format/file.h"
#include "format/safetensors.h"

#include <jansson.h>
#include <stdlib.h>

struct loom_safetensors_writer {
    loom__new_file file;
    json_t *header, *metadata;
    uint64_t promised; /* bytes of data by the header */
    uint64_t given;
    bool begun, finished;
};

static loom_status no_memory(const loom_safetensors_writer *writer) {
    return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for the header", writer->file.path);
}

loom_status loom_safetensors_writer_create(const char *path, loom_safetensors_writer **writer) {
    loom_safetensors_writer *made = calloc(1, sizeof *made);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to write it", path);
    made->file.descriptor = -1;
    made->header = json_object();
    loom_status status = loom__new_file_create(path, &made->file);
    if (status == LOOM_OK && !made->header)
        status = no_memory(made);
    if (status != LOOM_OK) {
        loom_safetensors_writer_destroy(made);
        return status;
    }
    *writer = made;
    return LOOM_OK;
}

static loom_status check_open(const loom_safetensors_writer *writer, const char *what) {
    if (writer->begun)
        return loom_fail(LOOM_ERR_STATE, "%s: %s comes after the first data, expected before", writer->file.path, what);
    return LOOM_OK;
}

loom_status loom_safetensors_writer_metadata(loom_safetensors_writer *writer, const char *key, const char *value) {
    LOOM_TRY(check_open(writer, "metadata"));
    if (!writer->metadata) {
        writer->metadata = json_object();
        if (!writer->metadata || json_object_set(writer->header, "__metadata__", writer->metadata) != 0)
            return no_memory(writer);
    }
    if (json_object_get(writer->metadata, key))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: metadata '%s' is given twice", writer->file.path, key);
    if (!loom__is_utf8(key) || !loom__is_utf8(value))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: metadata '%s' is no valid UTF-8", writer->file.path, key);
    if (json_object_set_new(writer->metadata, key, json_string(value)) != 0)
        return no_memory(writer);
    return LOOM_OK;
}

static loom_status count_bytes(const loom_safetensors_writer *writer, const char *name, loom_dtype dtype, int dims,
    const int64_t *shape, uint64_t *end) {
    int64_t bytes = (int64_t)loom_dtype_size(dtype);
    for (int i = 0; i < dims; i++) {
        if (shape[i] < 0)
            return loom_fail(LOOM_ERR_ARGUMENT, "%s: tensor '%s': shape[%d] is %lld, expected at least 0",
                writer->file.path, name, i, (long long)shape[i]);
        if (__builtin_mul_overflow(bytes, shape[i], &bytes))
            return loom_fail(
                LOOM_ERR_ARGUMENT, "%s: tensor '%s': its size exceeds 2^63 bytes", writer->file.path, name);
    }
    if (__builtin_add_overflow(writer->promised, (uint64_t)bytes, end) || *end > INT64_MAX)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: tensor '%s': the file exceeds 2^63 bytes", writer->file.path, name);
    return LOOM_OK;
}

loom_status loom_safetensors_writer_add(
    loom_safetensors_writer *writer, const char *name, loom_dtype dtype, int dims, const int64_t *shape) {
    LOOM_TRY(check_open(writer, "a tensor"));
    const char *path = writer->file.path;
    if (loom_dtype_size(dtype) == 0)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: tensor '%s': %d is no dtype", path, name, (int)dtype);
    if (dims < 0 || dims > LOOM_SAFETENSORS_MAX_DIMS)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: tensor '%s': has %d dimensions, expected 0 to %d", path, name, dims,
            LOOM_SAFETENSORS_MAX_DIMS);
    if (json_object_get(writer->header, name) || strcmp(name, "__metadata__") == 0)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: tensor '%s' is given twice, or is a name of the format", path, name);
    if (!loom__is_utf8(name))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: a tensor's name is no valid UTF-8", path);
    uint64_t end = 0;
    LOOM_TRY(count_bytes(writer, name, dtype, dims, shape, &end));
    json_t *entry = json_pack("{s:s, s:[], s:[I, I]}", "dtype", loom_dtype_name(dtype), "shape", "data_offsets",
        (json_int_t)writer->promised, (json_int_t)end);
    bool whole = entry != NULL;
    for (int i = 0; i < dims && whole; i++)
        whole = json_array_append_new(json_object_get(entry, "shape"), json_integer(shape[i])) == 0;
    if (!whole) {
        json_decref(entry);
        return no_memory(writer);
    }
    if (json_object_set_new(writer->header, name, entry) != 0)
        return no_memory(writer);
    writer->promised = end;
    return LOOM_OK;
}

static loom_status begin(loom_safetensors_writer *writer) {
    char *text = json_dumps(writer->header, JSON_COMPACT);
    if (!text)
        return no_memory(writer);
    static const char spaces[8] = {' ', ' ', ' ', ' ', ' ', ' ', ' ', ' '};
    size_t length = strlen(text), padding = (8 - length % 8) % 8;
    uint64_t total = length + padding;
    loom_status status = LOOM_OK;
    if (total > LOOM__SAFETENSORS_HEADER_MAX)
        status = loom_fail(LOOM_ERR_ARGUMENT, "%s: the header has %llu bytes, expected at most %d", writer->file.path,
            (unsigned long long)total, LOOM__SAFETENSORS_HEADER_MAX);
    if (status == LOOM_OK)
        status = loom__new_file_write(&writer->file, &total, sizeof total);
    if (status == LOOM_OK)
        status = loom__new_file_write(&writer->file, text, length);
    if (status == LOOM_OK)
        status = loom__new_file_write(&writer->file, spaces, padding);
    free(text);
    writer->begun = status == LOOM_OK;
    return status;
}

loom_status loom_safetensors_writer_write(loom_safetensors_writer *writer, const void *data, size_t bytes) {
    if (writer->finished)
        return loom_fail(LOOM_ERR_STATE, "%s: data comes after finish", writer->file.path);
    if (!writer->begun)
        LOOM_TRY(begin(writer));
    if (bytes > writer->promised - writer->given)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: %zu bytes of data given, expected at most the %llu that are left",
            writer->file.path, bytes, (unsigned long long)(writer->promised - writer->given));
    LOOM_TRY(loom__new_file_write(&writer->file, data, bytes));
    writer->given += bytes;
    return LOOM_OK;
}

loom_status loom_safetensors_writer_finish(loom_safetensors_writer *writer) {
    if (writer->finished)
        return loom_fail(LOOM_ERR_STATE, "%s: is finished already", writer->file.path);
    if (!writer->begun)
        LOOM_TRY(begin(writer));
    if (writer->given != writer->promised)
        return loom_fail(LOOM_ERR_STATE, "%s: %llu bytes of data given, expected %llu", writer->file.path,
            (unsigned long long)writer->given, (unsigned long long)writer->promised);
    LOOM_TRY(loom__new_file_sync(&writer->file));
    LOOM_TRY(loom__new_file_commit(&writer->file));
    writer->finished = true;
    return LOOM_OK;
}

void loom_safetensors_writer_destroy(loom_safetensors_writer *writer) {
    if (!writer)
        return;
    loom__new_file_destroy(&writer->file);
    json_decref(writer->metadata);
    json_decref(writer->header);
    free(writer);
}
