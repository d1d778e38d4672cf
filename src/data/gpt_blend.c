/* A blend of GPT datasets from their files. How many samples each part is built with follows from its share, rounded up
 * twice as Megatron-Core does, since the part's own order depends on that number. */
#include "data/blend.h"

#include <stdlib.h>

typedef struct gpt_blend {
    loom_indexed **files;
    int64_t count;
    loom_dataset inner; /* the blend, or the one part */
} gpt_blend;

loom_gpt_blend_config loom_gpt_blend_config_default(void) {
    return (loom_gpt_blend_config){.gpt = loom_gpt_dataset_config_default(), .surplus = 0.005};
}

static void gpt_blend_destroy(void *context) {
    gpt_blend *set = context;
    if (!set)
        return;
    loom_dataset_destroy(&set->inner);
    for (int64_t i = 0; set->files && i < set->count; i++)
        loom_indexed_close(set->files[i]);
    free(set->files);
    free(set);
}

static loom_status gpt_blend_get(void *context, int64_t index, const loom_sample_row *row) {
    const gpt_blend *set = context;
    return set->inner.get(set->inner.context, index, row);
}

static void gpt_blend_locate(void *context, int64_t index, char *text, size_t bytes) {
    const gpt_blend *set = context;
    set->inner.locate(set->inner.context, index, text, bytes);
}

const loom_dataset *loom__gpt_blend_inner(const loom_dataset *dataset) {
    return dataset->get == gpt_blend_get ? &((const gpt_blend *)dataset->context)->inner : dataset;
}

static loom_status make_part(
    const loom_gpt_blend_config *config, double weight, int64_t i, gpt_blend *set, loom_dataset *part) {
    loom_gpt_dataset_config gpt = config->gpt;
    if (config->weights)
        gpt.samples = loom_data_blend_share(weight, config->gpt.samples, config->surplus);
    else if (config->count > 1)
        gpt.samples = -1;
    LOOM_TRY(loom_indexed_open(config->prefixes[i], &set->files[i]));
    return loom_gpt_dataset_create(set->files[i], &gpt, part);
}

/* weights [count] sum to 1; NULL as in the configuration. */
static loom_status blend_parts(
    const loom_gpt_blend_config *config, const double *weights, loom_dataset *parts, gpt_blend *set) {
    loom_status status = LOOM_OK;
    int64_t made = 0;
    for (; made < config->count; made++) {
        status = make_part(config, weights ? weights[made] : 0.0, made, set, &parts[made]);
        if (status)
            break;
    }
    int64_t size = weights ? 0 : config->gpt.samples;
    for (int64_t i = 0; weights && i < config->count; i++)
        size += loom_data_blend_share(weights[i], config->gpt.samples, 0.0);
    if (!status)
        status = loom_blended_dataset_create(parts, weights, config->count, size, &set->inner);
    for (int64_t i = 0; status && i < made; i++)
        loom_dataset_destroy(&parts[i]);
    return status;
}

static loom_status check(const loom_gpt_blend_config *config) {
    if (config->count < 1)
        return loom_fail(LOOM_ERR_CONFIG, "a blend of %lld datasets, expected at least 1", (long long)config->count);
    if (config->weights && config->gpt.samples < 0)
        return loom_fail(LOOM_ERR_CONFIG, "a blend with weights needs a number of samples: give one, or no weights");
    for (int64_t i = 0; config->weights && i < config->count; i++)
        if (!(config->weights[i] > 0.0 && config->weights[i] < 1e300))
            return loom_fail(LOOM_ERR_CONFIG, "weight of %s is %g, expected a number above 0", config->prefixes[i],
                config->weights[i]);
    if (!(config->surplus >= 0.0 && config->surplus < 1e6))
        return loom_fail(LOOM_ERR_CONFIG, "surplus is %g, expected a number from 0", config->surplus);
    return LOOM_OK;
}

static loom_status fill(const loom_gpt_blend_config *config, gpt_blend *set) {
    if (config->count == 1 && !config->weights)
        return make_part(config, 0.0, 0, set, &set->inner);
    size_t count = (size_t)config->count;
    double *weights = config->weights ? malloc(count * sizeof *weights) : NULL;
    loom_dataset *parts = calloc(count, sizeof *parts);
    loom_status status = LOOM_OK;
    if (!parts || (config->weights && !weights))
        status = loom_fail(LOOM_ERR_MEMORY, "no memory for a blend of %zu datasets", count);
    if (!status && weights) {
        memcpy(weights, config->weights, count * sizeof *weights);
        loom_data_blend_normalize(weights, config->count);
    }
    if (!status)
        status = blend_parts(config, weights, parts, set);
    free(weights);
    free(parts);
    return status;
}

loom_status loom_gpt_blend_create(const loom_gpt_blend_config *config, loom_dataset *dataset) {
    LOOM_TRY(check(config));
    gpt_blend *set = calloc(1, sizeof *set);
    if (set) {
        set->count = config->count;
        set->files = calloc((size_t)config->count, sizeof *set->files);
    }
    loom_status status = set && set->files ? fill(config, set)
                                           : loom_fail(LOOM_ERR_MEMORY, "no memory for a blend of %lld datasets",
                                                 (long long)config->count);
    if (status) {
        gpt_blend_destroy(set);
        return status;
    }
    *dataset = (loom_dataset){.context = set,
        .length = set->inner.length,
        .sequence_length = set->inner.sequence_length,
        .document_boundaries = set->inner.document_boundaries,
        .get = gpt_blend_get,
        .locate = gpt_blend_locate,
        .destroy = gpt_blend_destroy};
    return LOOM_OK;
}
