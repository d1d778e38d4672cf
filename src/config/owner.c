/* Strings of a configuration may be static, shared or owned, so fields never free them: the owner keeps a list of its
 * copies and frees them together. */
#include "config/owner.h"
#include <stdlib.h>
#include <string.h>

const char *loom__config_owner_string(loom__config_owner *owner, const char *text) {
    if (owner->string_count == owner->string_capacity) {
        int64_t capacity = owner->string_capacity ? 2 * owner->string_capacity : 16;
        char **strings = realloc(owner->strings, (size_t)capacity * sizeof *strings);
        if (!strings)
            return NULL;
        owner->strings = strings;
        owner->string_capacity = capacity;
    }
    char *copy = strdup(text);
    if (copy)
        owner->strings[owner->string_count++] = copy;
    return copy;
}

void loom__config_owner_destroy(loom__config_owner *owner) {
    if (!owner)
        return;
    for (int64_t i = 0; i < owner->string_count; i++)
        free(owner->strings[i]);
    free(owner->strings);
    free(owner->paths);
    free(owner);
}

void loom_run_config_destroy(loom_run_config *config) {
    loom__config_owner_destroy((loom__config_owner *)config);
}
