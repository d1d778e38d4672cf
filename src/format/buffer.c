/* A text that grows by doubling. */
#include "format/pickle.h"

#include <stdlib.h>

loom_status loom__buffer_append(loom__buffer *buffer, const void *data, size_t bytes) {
    if (bytes > buffer->room - buffer->count) {
        size_t wanted;
        if (__builtin_add_overflow(buffer->count, bytes, &wanted))
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for a text of %zu bytes", bytes);
        if (wanted < buffer->room * 2)
            wanted = buffer->room * 2;
        if (wanted < 256)
            wanted = 256;
        void *grown = realloc(buffer->bytes, wanted);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for a text of %zu bytes", wanted);
        buffer->bytes = grown;
        buffer->room = wanted;
    }
    if (bytes)
        memcpy(buffer->bytes + buffer->count, data, bytes);
    buffer->count += bytes;
    return LOOM_OK;
}
