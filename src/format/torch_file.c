/* A torch archive is data.pkl, one record data/KEY for each storage, and small records that name the version and the
 * byte order. Elements stay where they are: a tensor that lies row-major in its storage points into the archive, any
 * other is copied into the pool, and is never larger than its storage. */
#include "format/torch_file.h"

#include <stdio.h>
#include <stdlib.h>

enum { COPIED_MOST = 64 /* times the archive's bytes: copies of tensors that share a storage */ };

typedef struct reader {
    const loom__zip *zip;
    loom__torch_check check;
    loom_value_pool *pool;
    const void **unpacked; /* [records]; NULL until asked for */
    size_t copies_left;
} reader;

/* The unpacked bytes of a record: in place, or once in the pool. */
static loom_status unpack(const reader *r, const loom__zip_record *record, bool check, const void **data) {
    const void **slot = &r->unpacked[record - r->zip->records];
    void *memory = NULL;
    if (!*slot) {
        *slot = record->stored;
        if (record->deflated) {
            LOOM_TRY(loom__value_allocate(r->pool, record->bytes, &memory));
            LOOM_TRY(loom__zip_inflate(r->zip, record, memory));
            *slot = memory;
        }
        if (check)
            LOOM_TRY(loom__zip_check(r->zip, record, *slot));
    }
    *data = *slot;
    return LOOM_OK;
}

static loom_status check_byte_order(const reader *r) {
    const loom__zip_record *record = loom__zip_find(r->zip, "byteorder");
    const void *text = NULL;
    if (!record)
        return LOOM_OK;
    LOOM_TRY(unpack(r, record, true, &text));
    if (record->bytes != 6 || memcmp(text, "little", 6) != 0)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: %s: its byte order is '%.*s', expected little",
            r->zip->what, record->bytes > 20 ? 20 : (int)record->bytes, (const char *)text);
    return LOOM_OK;
}

static bool is_row_major(const loom__pickled_tensor *of) {
    int64_t stride = 1;
    for (int i = of->tensor->dims - 1; i >= 0; i--) {
        if (of->tensor->shape[i] != 1 && of->strides[i] != stride)
            return false;
        stride *= of->tensor->shape[i];
    }
    return true;
}

static loom_status copy_strided(
    reader *r, const loom__pickled_tensor *of, const unsigned char *storage, const void **data) {
    const loom_value_tensor *tensor = of->tensor;
    size_t size = loom_dtype_size(tensor->dtype), bytes = (size_t)tensor->elements * size;
    int64_t at[LOOM_VALUE_MAX_DIMS] = {0}, from = of->first;
    void *memory = NULL;
    if (bytes > r->copies_left)
        return loom_fail(LOOM_ERR_FORMAT, "%s: its tensors are together more than %d times as large as it",
            r->zip->what, COPIED_MOST);
    r->copies_left -= bytes;
    LOOM_TRY(loom__value_allocate(r->pool, bytes, &memory));
    for (int64_t i = 0; i < tensor->elements; i++) {
        memcpy((unsigned char *)memory + (size_t)i * size, storage + (size_t)from * size, size);
        for (int d = tensor->dims - 1; d >= 0; d--) {
            from += of->strides[d];
            if (++at[d] < tensor->shape[d])
                break;
            from -= of->strides[d] * tensor->shape[d];
            at[d] = 0;
        }
    }
    *data = memory;
    return LOOM_OK;
}

static loom_status resolve(reader *r, const loom__pickled_tensor *of) {
    char name[128];
    const loom__zip_record *record = NULL;
    const void *storage = NULL;
    size_t size = loom_dtype_size(of->tensor->dtype), bytes;
    if (snprintf(name, sizeof name, "data/%s", of->storage) >= (int)sizeof name)
        return loom_fail(
            LOOM_ERR_FORMAT, "%s: a storage has the key '%.80s…', which is too long", r->zip->what, of->storage);
    LOOM_TRY(loom__zip_get(r->zip, name, &record));
    if (__builtin_mul_overflow((size_t)of->storage_elements, size, &bytes) || bytes != record->bytes)
        return loom_fail(LOOM_ERR_FORMAT, "%s: record '%s' has %zu bytes, expected %lld elements of %zu", r->zip->what,
            name, record->bytes, (long long)of->storage_elements, size);
    LOOM_TRY(unpack(r, record, r->check == LOOM__TORCH_CHECK, &storage));
    of->tensor->data = (const unsigned char *)storage + (of->tensor->elements ? (size_t)of->first * size : 0);
    return of->tensor->elements == 0 || is_row_major(of) ? LOOM_OK : copy_strided(r, of, storage, &of->tensor->data);
}

static loom_status read_archive(reader *r, const loom_value **value) {
    const loom__zip_record *record = NULL;
    const void *pickle = NULL;
    loom__pickled pickled = {0};
    LOOM_TRY(loom__zip_get(r->zip, "data.pkl", &record));
    LOOM_TRY(check_byte_order(r));
    LOOM_TRY(unpack(r, record, true, &pickle));
    LOOM_TRY(loom__pickle_read(r->zip->what, pickle, record->bytes, r->pool, &pickled));
    for (int64_t i = 0; i < pickled.tensor_count; i++)
        LOOM_TRY(resolve(r, &pickled.tensors[i]));
    *value = pickled.root;
    return LOOM_OK;
}

loom_status loom__torch_read(const char *what, const void *data, size_t bytes, loom__torch_check check,
    loom_value_pool *pool, const loom_value **value) {
    loom__zip zip = {0};
    LOOM_TRY(loom__zip_open(what, data, bytes, &zip));
    reader r = {&zip, check, pool, calloc((size_t)zip.count + 1, sizeof *r.unpacked), SIZE_MAX};
    if (bytes < SIZE_MAX / COPIED_MOST)
        r.copies_left = bytes * COPIED_MOST;
    loom_status status =
        r.unpacked ? read_archive(&r, value) : loom_fail(LOOM_ERR_MEMORY, "%s: no memory to read it", what);
    free((void *)r.unpacked);
    loom__zip_close(&zip);
    return status;
}

/* Torch puts a hash of the records there; it is compared by nobody, and differs where the contents do. */
static loom_status add_identity(loom__zip_writer *zip, const loom__buffer *pickle, const loom__tensor_list *tensors) {
    char text[48];
    uint64_t a = 0xcbf29ce484222325u, b = pickle->count;
    for (size_t i = 0; i < pickle->count; i++)
        a = (a ^ pickle->bytes[i]) * 0x100000001b3u;
    for (int64_t i = 0; i < tensors->count; i++)
        b = b * 31 + (uint64_t)tensors->items[i]->elements;
    snprintf(text, sizeof text, "%020llu%020llu", (unsigned long long)a, (unsigned long long)b);
    return loom__zip_writer_add(zip, ".data/serialization_id", text, 40);
}

static loom_status write_records(loom__zip_writer *zip, const loom__buffer *pickle, const loom__tensor_list *tensors) {
    LOOM_TRY(loom__zip_writer_add(zip, "data.pkl", pickle->bytes, pickle->count));
    LOOM_TRY(loom__zip_writer_add(zip, ".format_version", "1", 1));
    LOOM_TRY(loom__zip_writer_add(zip, ".storage_alignment", "64", 2));
    LOOM_TRY(loom__zip_writer_add(zip, "byteorder", "little", 6));
    for (int64_t i = 0; i < tensors->count; i++) {
        char name[32];
        const loom_value_tensor *tensor = tensors->items[i];
        snprintf(name, sizeof name, "data/%lld", (long long)i);
        LOOM_TRY(
            loom__zip_writer_add(zip, name, tensor->data, (size_t)tensor->elements * loom_dtype_size(tensor->dtype)));
    }
    LOOM_TRY(loom__zip_writer_add(zip, "version", "3\n", 2));
    return add_identity(zip, pickle, tensors);
}

loom_status loom__torch_write(loom__new_file *file, const loom_value *value, uint64_t *bytes) {
    loom__buffer pickle = {0};
    loom__tensor_list tensors = {0};
    loom__zip_writer *zip = NULL;
    loom_status status = loom__pickle_write(value, &tensors, &pickle);
    if (status == LOOM_OK)
        status = loom__zip_writer_create(file, &zip);
    if (status == LOOM_OK)
        status = write_records(zip, &pickle, &tensors);
    if (status == LOOM_OK)
        status = loom__zip_writer_finish(zip, bytes);
    loom__zip_writer_destroy(zip);
    free((void *)tensors.items);
    free(pickle.bytes);
    return status;
}
