/* Fuzzes the reader of Hugging Face config.json. What is refused leaves the model as it was; what is taken goes through
 * the check that every configuration goes through, which must end with a sound model or with a message. */
#include "spec/huggingface.h"
#include "spec/parameter.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    loom_model_config before, model;
    memset(&before, 0, sizeof before);
    memcpy(&model, &before, sizeof model);
    loom_status status = loom__hf_model_config("fuzz", (const char *)data, bytes, &model);
    if (status != LOOM_OK) {
        if (memcmp(&before, &model, sizeof model) != 0 || !*loom_error_message())
            abort();
        return 0;
    }
    model.seq_length = 16;
    model.make_vocab_size_divisible_by = 128;
    if (loom__model_config_complete(&model, 2, false) == LOOM_OK &&
        (model.num_attention_heads % 2 != 0 || model.padded_vocab_size < model.vocab_size || model.kv_channels < 1))
        abort();
    return 0;
}
