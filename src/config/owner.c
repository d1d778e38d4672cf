/* Strings and lists of a configuration may be static, shared or owned, so fields never free them: the owner keeps a
 * list of its blocks and frees them together. */
#include "config/owner.h"
#include <stdlib.h>
#include <string.h>

void *loom__config_owner_keep(loom__config_owner *owner, void *block) {
    if (block && owner->block_count == owner->block_capacity) {
        int64_t capacity = owner->block_capacity ? 2 * owner->block_capacity : 16;
        void **blocks = realloc(owner->blocks, (size_t)capacity * sizeof *blocks);
        if (!blocks) {
            free(block);
            return NULL;
        }
        owner->blocks = blocks;
        owner->block_capacity = capacity;
    }
    if (block)
        owner->blocks[owner->block_count++] = block;
    return block;
}

const char *loom__config_owner_string(loom__config_owner *owner, const char *text) {
    return loom__config_owner_keep(owner, strdup(text));
}

void loom__config_owner_destroy(loom__config_owner *owner) {
    if (!owner)
        return;
    for (int64_t i = 0; i < owner->block_count; i++)
        free(owner->blocks[i]);
    free(owner->blocks);
    free(owner);
}

void loom_run_config_destroy(loom_run_config *config) {
    loom__config_owner_destroy((loom__config_owner *)config);
}
