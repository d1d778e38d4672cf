/* The architectures that are built: which parameters a model has depends on its configuration alone; the architecture
 * decides defaults, Hugging Face names and what a Hugging Face file can say. */
#ifndef SPEC_ARCHITECTURE_H
#define SPEC_ARCHITECTURE_H

#include <stdbool.h>

typedef enum loom__architecture {
    LOOM__ARCHITECTURE_UNKNOWN = -1,
    LOOM__GPT2,
    LOOM__LLAMA,
    LOOM__MISTRAL,
    LOOM__MIXTRAL,
    LOOM__QWEN2,
    LOOM__QWEN3,
    LOOM__QWEN2_MOE,
    LOOM__QWEN3_MOE,
    LOOM__GEMMA,
    LOOM__ARCHITECTURE_COUNT
} loom__architecture;

/* Their names, for messages. */
#define LOOM__ARCHITECTURES_BUILT "gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen2_moe, qwen3_moe and gemma"

/* The architecture of that name; LOOM__ARCHITECTURE_UNKNOWN for NULL and for any other name. */
loom__architecture loom__architecture_find(const char *name);
/* NULL for one that is not known. */
const char *loom__architecture_name(loom__architecture architecture);
/* Whether its models are those with experts: one without any is of another architecture. */
bool loom__architecture_has_experts(loom__architecture architecture);

#endif
