/* Fuzzes the reader of a safetensors index, beside two real shards (tests/fuzz/shards: tensor `a` in 1.safetensors, `b`
 * in 2.safetensors). Nothing but these may open, and what opens holds the tensors that the index lists. */
#include "format/safetensors.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    loom_safetensors *file;
    loom_status status =
        loom__safetensors_open_index(MEGALOOM_TESTS "/fuzz/shards/fuzz.index.json", data, bytes, &file);
    if (status != LOOM_OK)
        return 0;
    for (int64_t i = 0; i < loom_safetensors_count(file); i++) {
        const loom_safetensors_tensor *tensor = loom_safetensors_get(file, i);
        int64_t value;
        if ((strcmp(tensor->name, "a") != 0 && strcmp(tensor->name, "b") != 0) ||
            loom_safetensors_read_i64(tensor, 0, 1, &value) != LOOM_OK)
            abort();
    }
    loom_safetensors_close(file);
    return 0;
}
