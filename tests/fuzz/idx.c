/* Fuzzes the reader of .idx. The input is checked against a .bin too large to be real and opened with a small real one,
 * of which then every element is read. */
#include "format/indexed.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { BIN_BYTES = 256 };

static void use(const loom_indexed *set) {
    int64_t tokens[BIN_BYTES], sum = 0;
    for (int64_t i = 0; i < loom_indexed_sequences(set); i++) {
        int64_t length = loom_indexed_length(set, i);
        sum += length;
        if (length > BIN_BYTES || (length > 0 && loom_indexed_read(set, i, length - 1, 2, tokens) == LOOM_OK))
            abort();
        (void)loom_indexed_read(set, i, 0, length, tokens); /* refused for floating-point sets */
        (void)loom_indexed_mode(set, i);
    }
    if (sum != loom_indexed_tokens(set))
        abort();
    for (int64_t d = 0; d < loom_indexed_documents(set); d++)
        if (loom_indexed_document(set, d) > loom_indexed_document(set, d + 1))
            abort();
    if (loom_indexed_document(set, loom_indexed_documents(set)) != loom_indexed_sequences(set))
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    loom__indexed_view view;
    (void)loom__indexed_check("fuzz", data, bytes, UINT64_MAX, &view);
    unsigned char *bin = calloc(1, BIN_BYTES);
    loom_indexed *set;
    if (bin && loom__indexed_open_memory("fuzz", data, bytes, bin, BIN_BYTES, &set) == LOOM_OK) {
        use(set);
        loom_indexed_close(set);
    }
    free(bin);
    return 0;
}
