/* What a model is made of, asked of the very list of descriptors that training allocates, cut as a stage has it, and of
 * the very check that a run makes. */
#include "spec/part.h"
#include <string.h>

static int64_t *kind_of(loom_model_description *to, const char *name) {
    /* Norms first: they also stand inside an attention. */
    if (strstr(name, "layernorm"))
        return &to->norms;
    if (strncmp(name, "embedding.", strlen("embedding.")) == 0)
        return &to->embedding;
    if (strstr(name, ".self_attention."))
        return &to->attention;
    if (strstr(name, ".mlp."))
        return &to->mlp;
    return &to->head;
}

loom_status loom_model_describe_stage(
    const loom_model_config *config, const loom_stage *stage, loom_model_description *description) {
    loom_model_config completed = *config;
    loom__model_spec *spec;
    LOOM_TRY(loom__model_config_complete(&completed, 1, false));
    LOOM_TRY(loom__model_spec_create(&completed, &spec));
    bool whole = stage->embedding && stage->loss;
    loom_model_description made = {0};
    loom__part *part = NULL;
    loom_status status = loom__part_create(spec, whole ? 1 : 2, stage, 1, &part);
    for (int64_t i = 0; !status && i < part->count; i++) {
        const loom__parameter_descriptor *parameter = part->entries[i].descriptor;
        int64_t count = loom__descriptor_count(parameter);
        *kind_of(&made, parameter->name) += count;
        made.total += count;
        made.tensors++;
    }
    loom__part_destroy(part);
    loom__model_spec_destroy(spec);
    if (!status)
        *description = made;
    return status;
}

loom_status loom_model_describe(const loom_model_config *config, loom_model_description *description) {
    const loom_stage whole = {.layers = config->num_layers, .embedding = true, .loss = true};
    return loom_model_describe_stage(config, &whole, description);
}

int64_t loom_model_tensor_sizes(const loom_model_config *config, int64_t *sizes, int64_t capacity) {
    int64_t count = 0;
    /* Tensor ranks share layers of experts with sequence parallelism alone. */
    bool sparse = config->moe.num_moe_experts > 0;
    for (int64_t tp = 1; tp <= config->num_attention_heads; tp++) {
        loom_model_config completed = *config;
        if (config->num_attention_heads % tp != 0 || loom__model_config_complete(&completed, tp, sparse && tp > 1))
            continue;
        if (count < capacity)
            sizes[count] = tp;
        count++;
    }
    loom_error_clear();
    return count;
}
