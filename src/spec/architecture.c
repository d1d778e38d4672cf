/* The names of the architectures, in the order of their numbers, and what a name alone decides. */
#include "spec/architecture.h"
#include <stddef.h>
#include <string.h>

static const char *const names[LOOM__ARCHITECTURE_COUNT] = {
    "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma"};

loom__architecture loom__architecture_find(const char *name) {
    for (int i = 0; name && i < LOOM__ARCHITECTURE_COUNT; i++)
        if (strcmp(names[i], name) == 0)
            return (loom__architecture)i;
    return LOOM__ARCHITECTURE_UNKNOWN;
}

const char *loom__architecture_name(loom__architecture architecture) {
    return architecture >= 0 && architecture < LOOM__ARCHITECTURE_COUNT ? names[architecture] : NULL;
}

bool loom__architecture_has_experts(loom__architecture architecture) {
    return architecture == LOOM__MIXTRAL || architecture == LOOM__QWEN2_MOE || architecture == LOOM__QWEN3_MOE;
}
