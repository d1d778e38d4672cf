/* Fuzzes the reader of .metadata: what it accepts must be what a reader of boxes relies on. */
#include "checkpoint/checkpoint.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void check_tensor(const loom_checkpoint_tensor *tensor) {
    int64_t covered = 0;
    for (int64_t c = 0; c < tensor->chunk_count; c++) {
        int64_t elements = 1;
        for (int i = 0; i < tensor->dims; i++) {
            if (tensor->chunks[c].offsets[i] < 0 ||
                tensor->chunks[c].offsets[i] + tensor->chunks[c].sizes[i] > tensor->shape[i])
                abort();
            elements *= tensor->chunks[c].sizes[i];
        }
        if (strchr(tensor->chunks[c].file, '/'))
            abort();
        covered += elements;
    }
    if (covered != tensor->elements)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    loom_checkpoint *checkpoint = calloc(1, sizeof *checkpoint);
    if (!checkpoint)
        return 0;
    if (loom__checkpoint_read_metadata("fuzz", data, bytes, checkpoint) == LOOM_OK) {
        for (int64_t i = 0; i < checkpoint->info.tensors; i++)
            check_tensor(&checkpoint->tensors[i].tensor);
        loom__checkpoint_hints(checkpoint);
    }
    loom_checkpoint_close(checkpoint);
    return 0;
}
