/* What a loaded run configuration owns. The public struct comes first, so that its address is the owner's. */
#ifndef CONFIG_OWNER_H
#define CONFIG_OWNER_H

#include <megaloom/config.h>

typedef struct loom__config_owner {
    loom_run_config config;
    char **strings;
    int64_t string_count, string_capacity;
    loom_data_path *paths;
} loom__config_owner;

/* A copy that lives as long as the owner; NULL when memory is out. */
const char *loom__config_owner_string(loom__config_owner *owner, const char *text);
void loom__config_owner_destroy(loom__config_owner *owner);

#endif
