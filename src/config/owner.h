/* What a loaded run configuration owns. The public struct comes first, so that its address is the owner's. */
#ifndef CONFIG_OWNER_H
#define CONFIG_OWNER_H

#include <megaloom/config.h>

typedef struct loom__config_owner {
    loom_run_config config;
    void **blocks;
    int64_t block_count, block_capacity;
} loom__config_owner;

/* The block, from malloc, which now lives as long as the owner; NULL, with the block freed, when memory is out or the
 * block is NULL. */
void *loom__config_owner_keep(loom__config_owner *owner, void *block);

/* A copy that lives as long as the owner; NULL when memory is out. */
const char *loom__config_owner_string(loom__config_owner *owner, const char *text);
void loom__config_owner_destroy(loom__config_owner *owner);

#endif
