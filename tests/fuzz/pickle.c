/* Fuzzes the reader of pickles. What it accepts is rendered, written and read again: the second reading must render the
 * same. */
#include "format/pickle.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static char *rendered(const void *data, size_t bytes, loom_value_pool *pool, const loom_value **root) {
    loom__pickled pickled;
    char *text = NULL;
    if (loom__pickle_read("fuzz", data, bytes, pool, &pickled) != LOOM_OK ||
        loom_value_to_json(pickled.root, 0, &text) != LOOM_OK)
        return NULL;
    *root = pickled.root;
    return text;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    loom_value_pool *pool = NULL;
    const loom_value *root = NULL;
    loom__buffer written = {0};
    loom__tensor_list tensors = {0};
    if (loom_value_pool_create(&pool) != LOOM_OK)
        return 0;
    char *first = rendered(data, bytes, pool, &root), *second = NULL;
    /* Names and depths that no pickle of ours could have are refused by the writer. */
    if (first && loom__pickle_write(root, &tensors, &written) == LOOM_OK) {
        second = rendered(written.bytes, written.count, pool, &root);
        if (!second || strcmp(first, second) != 0)
            abort();
    }
    free(first);
    free(second);
    free(written.bytes);
    free((void *)tensors.items);
    loom_value_pool_destroy(pool);
    return 0;
}
