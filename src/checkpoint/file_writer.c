/* One data file: archives one behind another. Each is described as soon as it is whole, by records of fixed size with
 * two texts behind, so that descriptions of many ranks can be put one after the other as bytes. */
#include "checkpoint/description.h"
#include "format/torch_file.h"

#include <stdio.h>
#include <stdlib.h>

enum { ALIGNMENT = 64 };

struct loom__checkpoint_writer {
    loom__new_file file;
    char name[64];
    bool has_tensors;
    loom__buffer description;
};

loom_status loom__checkpoint_file_create(const char *path, int rank, int number, loom__checkpoint_writer **writer) {
    loom__checkpoint_writer *made = calloc(1, sizeof *made);
    char *full = NULL;
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to write it", path);
    made->file.descriptor = -1;
    snprintf(made->name, sizeof made->name, "__%d_%d.distcp", rank, number);
    loom_status status = asprintf(&full, "%s.tmp/%s", path, made->name) < 0
                             ? loom_fail(LOOM_ERR_MEMORY, "%s: no memory to write it", path)
                             : loom__new_file_create_direct(full, &made->file);
    if (status == LOOM_OK)
        *writer = made;
    else
        free(made);
    free(full);
    return status;
}

void loom__checkpoint_writer_destroy(loom__checkpoint_writer *writer) {
    if (!writer)
        return;
    loom__new_file_destroy(&writer->file);
    free(writer->description.bytes);
    free(writer);
}

/* Writes the archive, and its record with the two texts. */
static loom_status write_archive(
    loom__checkpoint_writer *writer, const char *name, const loom_value *value, loom__checkpoint_record record) {
    /* The archive aligns its elements from its own begin. */
    static const char zeros[ALIGNMENT] = {0};
    LOOM_TRY(loom__new_file_write(&writer->file, zeros, (size_t)(-writer->file.bytes % ALIGNMENT)));
    record.position = writer->file.bytes;
    LOOM_TRY(loom__torch_write(&writer->file, value, &record.bytes));
    record.file_bytes = (uint32_t)strlen(writer->name) + 1;
    record.name_bytes = (uint32_t)strlen(name) + 1;
    LOOM_TRY(loom__buffer_append(&writer->description, &record, sizeof record));
    LOOM_TRY(loom__buffer_append(&writer->description, writer->name, record.file_bytes));
    return loom__buffer_append(&writer->description, name, record.name_bytes);
}

static loom_status check_name(const loom__checkpoint_writer *writer, const char *name) {
    if (!*name || strlen(name) > UINT16_MAX)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: the name '%.40s' is empty or longer than %d bytes", writer->file.path,
            name, UINT16_MAX);
    return LOOM_OK;
}

loom_status loom__checkpoint_file_object(loom__checkpoint_writer *writer, const char *name, const loom_value *value) {
    LOOM_TRY(check_name(writer, name));
    if (writer->has_tensors)
        return loom_fail(LOOM_ERR_STATE, "%s: object '%s' after the first tensor", writer->file.path, name);
    return write_archive(writer, name, value, (loom__checkpoint_record){.dtype = -1});
}

loom_status loom__checkpoint_file_tensor(loom__checkpoint_writer *writer, const char *name, loom_dtype dtype, int dims,
    const int64_t *shape, const int64_t *offsets, const int64_t *sizes, const void *data) {
    loom__checkpoint_record record = {.dtype = (int32_t)dtype, .dims = dims};
    loom_value_tensor tensor = {.dtype = dtype, .dims = dims, .elements = 1, .data = data};
    LOOM_TRY(check_name(writer, name));
    if (dims < 0 || dims > LOOM_CHECKPOINT_MAX_DIMS || !loom_dtype_torch_name(dtype))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: tensor '%s' of %s and %d dimensions cannot be written",
            writer->file.path, name, loom_dtype_name(dtype), dims);
    for (int i = 0; i < LOOM_CHECKPOINT_MAX_DIMS; i++)
        tensor.shape[i] = 1;
    for (int i = 0; i < dims; i++) {
        if (offsets[i] < 0 || sizes[i] < 0 || sizes[i] > shape[i] || offsets[i] > shape[i] - sizes[i] ||
            __builtin_mul_overflow(tensor.elements, sizes[i], &tensor.elements))
            return loom_fail(LOOM_ERR_ARGUMENT,
                "%s: tensor '%s': chunk [%lld, +%lld) on axis %d, expected inside of %lld", writer->file.path, name,
                (long long)offsets[i], (long long)sizes[i], i, (long long)shape[i]);
        record.shape[i] = shape[i];
        record.offsets[i] = offsets[i];
        record.sizes[i] = tensor.shape[i] = sizes[i];
    }
    writer->has_tensors = true;
    loom_value value = {.kind = LOOM_VALUE_TENSOR, .tensor = &tensor};
    return write_archive(writer, name, &value, record);
}

loom_status loom__checkpoint_file_finish(loom__checkpoint_writer *writer, loom__checkpoint_description *description) {
    LOOM_TRY(loom__new_file_sync(&writer->file));
    LOOM_TRY(loom__new_file_commit(&writer->file));
    *description = (loom__checkpoint_description){writer->description.bytes, writer->description.count};
    writer->description = (loom__buffer){0};
    return LOOM_OK;
}
