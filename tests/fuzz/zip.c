/* Fuzzes the reader of torch's archives: the zip directory, every record unpacked and compared, and the whole as
 * torch.load would have it, of which then every tensor's elements are read. */
#include "format/torch_file.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { UNPACK_MOST = 1 << 20 };

static void use_records(const loom__zip *zip) {
    for (int64_t i = 0; i < zip->count; i++) {
        const loom__zip_record *record = &zip->records[i];
        unsigned char *unpacked = record->deflated && record->bytes <= UNPACK_MOST ? malloc(record->bytes + 1) : NULL;
        if (unpacked && loom__zip_inflate(zip, record, unpacked) == LOOM_OK)
            (void)loom__zip_check(zip, record, unpacked);
        if (!record->deflated)
            (void)loom__zip_check(zip, record, record->stored);
        free(unpacked);
    }
}

static size_t sum_of(const loom_value *value) {
    size_t sum = 0;
    if (value->kind == LOOM_VALUE_TENSOR)
        for (size_t i = 0; i < (size_t)value->tensor->elements * loom_dtype_size(value->tensor->dtype); i++)
            sum += ((const unsigned char *)value->tensor->data)[i];
    if (value->kind == LOOM_VALUE_LIST || value->kind == LOOM_VALUE_TUPLE || value->kind == LOOM_VALUE_DICT)
        for (int64_t i = 0; i < value->count * (value->kind == LOOM_VALUE_DICT ? 2 : 1); i++)
            sum += sum_of(value->items[i]);
    return sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    loom__zip zip;
    if (loom__zip_open("fuzz", data, bytes, &zip) == LOOM_OK) {
        use_records(&zip);
        loom__zip_close(&zip);
    }
    loom_value_pool *pool = NULL;
    const loom_value *value = NULL;
    if (loom_value_pool_create(&pool) != LOOM_OK)
        return 0;
    if (loom__torch_read("fuzz", data, bytes, LOOM__TORCH_TRUST, pool, &value) == LOOM_OK && sum_of(value) == SIZE_MAX)
        abort();
    loom_value_pool_destroy(pool);
    return 0;
}
