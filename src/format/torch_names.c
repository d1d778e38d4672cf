/* Torch's names of element types. */
#include "format/pickle.h"

typedef struct names {
    loom_dtype dtype;
    const char *storage, *plain;
} names;

static const names known[] = {{LOOM_F64, "DoubleStorage", "float64"}, {LOOM_F32, "FloatStorage", "float32"},
    {LOOM_F16, "HalfStorage", "float16"}, {LOOM_BF16, "BFloat16Storage", "bfloat16"},
    {LOOM_I64, "LongStorage", "int64"}, {LOOM_I32, "IntStorage", "int32"}, {LOOM_I16, "ShortStorage", "int16"},
    {LOOM_I8, "CharStorage", "int8"}, {LOOM_U8, "ByteStorage", "uint8"}, {LOOM_BOOL, "BoolStorage", "bool"}};

enum { KNOWN = sizeof known / sizeof *known };

loom_dtype loom__torch_storage_dtype(const char *name) {
    for (int i = 0; i < KNOWN; i++)
        if (strcmp(known[i].storage, name) == 0)
            return known[i].dtype;
    return LOOM_DTYPE_COUNT;
}

loom_dtype loom__torch_dtype(const char *name) {
    for (int i = 0; i < KNOWN; i++)
        if (strcmp(known[i].plain, name) == 0)
            return known[i].dtype;
    return LOOM_DTYPE_COUNT;
}

const char *loom__torch_storage_name(loom_dtype dtype) {
    for (int i = 0; i < KNOWN; i++)
        if (known[i].dtype == dtype)
            return known[i].storage;
    return NULL;
}

const char *loom__torch_dtype_name(loom_dtype dtype) {
    for (int i = 0; i < KNOWN; i++)
        if (known[i].dtype == dtype)
            return known[i].plain;
    return NULL;
}
