/* Fuzzes the safetensors reader. What opens is used: every tensor is looked up by its name and read to its last
 * element. */
#include "format/safetensors.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void use(const loom_safetensors *file, const loom_safetensors_tensor *tensor) {
    const loom_safetensors_tensor *found;
    if (loom_safetensors_find(file, tensor->name, &found) != LOOM_OK || found != tensor)
        abort();
    float floats[16];
    int64_t integers[16];
    int64_t count = tensor->elements < 16 ? tensor->elements : 16, first = tensor->elements - count;
    bool is_float = loom_safetensors_read_f32(tensor, first, count, floats) == LOOM_OK;
    bool is_integer = loom_safetensors_read_i64(tensor, first, count, integers) == LOOM_OK;
    if (is_float == is_integer || loom_safetensors_read_f32(tensor, first, count + 1, floats) == LOOM_OK)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    loom_safetensors *file;
    if (loom__safetensors_open_memory("fuzz", data, bytes, &file) != LOOM_OK)
        return 0;
    for (int64_t i = 0; i < loom_safetensors_count(file); i++)
        use(file, loom_safetensors_get(file, i));
    (void)loom_safetensors_metadata(file, "format");
    loom_safetensors_close(file);
    return 0;
}
