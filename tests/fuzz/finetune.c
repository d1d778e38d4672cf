/* Fuzzes the reader of fine-tuning data, packed and not; every row of what it takes is read and holds legal tokens. */
#include "data/finetune.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { S = 16 };

static void use(const loom_dataset *set) {
    int64_t tokens[S], labels[S], positions[S];
    float mask[S];
    int32_t start[S];
    const loom_sample_row row = {tokens, labels, mask, positions, start};
    for (int64_t i = -1; i < set->length; i++) {
        if (set->get(set->context, i, &row) != LOOM_OK)
            abort();
        for (int k = 0; k < S; k++)
            if (tokens[k] < 0 || tokens[k] >= LOOM_BYTE_VOCABULARY || labels[k] < 0 ||
                labels[k] >= LOOM_BYTE_VOCABULARY || positions[k] != k - start[k] || (i < 0 && mask[k] != 0.0f))
                abort();
    }
    if (set->get(set->context, set->length, &row) == LOOM_OK)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    for (int pack = 0; pack < 2; pack++) {
        loom_finetune_dataset_config config = loom_finetune_dataset_config_default();
        config.tokenizer = loom_tokenizer_byte();
        config.sequence_length = S;
        config.pack = pack != 0;
        loom_dataset set;
        if (loom__finetune_open_memory(&config, "fuzz", data, bytes, &set) != LOOM_OK)
            continue;
        use(&set);
        loom_dataset_destroy(&set);
    }
    return 0;
}
