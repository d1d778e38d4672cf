/* Samplers: NeMo's four. A batch is found from its number by arithmetic, with no state: consumed samples are all there
 * is to resume. One round is the microbatches of all data-parallel ranks together: micro_batch_size *
 * data_parallel_size samples. A shuffled sampler gives each rank a part of the dataset, whole rounds of it, and reads
 * every part in one and the same order, torch's permutation for the epoch; what is left behind the last round is never
 * read. */
#include "data/mt19937.h"

#include <megaloom/data.h>
#include <stdlib.h>
#include <string.h>

static loom_status positive(const char *name, int64_t value) {
    if (value < 1)
        return loom_fail(LOOM_ERR_CONFIG, "%s is %lld, expected at least 1", name, (long long)value);
    return LOOM_OK;
}

static int64_t round_of(const loom_data_sampler_config *config) {
    return config->micro_batch_size * config->data_parallel_size;
}

static loom_status check(const loom_data_sampler_config *config) {
    LOOM_TRY(positive("the number of samples", config->total_samples));
    LOOM_TRY(positive("micro_batch_size", config->micro_batch_size));
    LOOM_TRY(positive("the data-parallel size", config->data_parallel_size));
    if (config->data_parallel_rank < 0 || config->data_parallel_rank >= config->data_parallel_size)
        return loom_fail(LOOM_ERR_CONFIG, "data-parallel rank is %lld, expected 0 to %lld",
            (long long)config->data_parallel_rank, (long long)config->data_parallel_size - 1);
    if (config->consumed_samples < 0)
        return loom_fail(
            LOOM_ERR_CONFIG, "consumed samples are %lld, expected at least 0", (long long)config->consumed_samples);
    int64_t unused, round;
    if (__builtin_mul_overflow(config->micro_batch_size, config->data_parallel_size, &round))
        return loom_fail(LOOM_ERR_CONFIG, "micro_batch_size %lld times data-parallel size %lld exceeds 2^63",
            (long long)config->micro_batch_size, (long long)config->data_parallel_size);
    if (config->global_batch_size != 0)
        return loom_data_microbatches(
            config->global_batch_size, config->micro_batch_size, config->data_parallel_size, &unused);
    if (config->pad_samples_to_global_batch_size && !config->drop_last)
        return loom_fail(LOOM_ERR_CONFIG, "pad_samples_to_global_batch_size needs a global_batch_size");
    return LOOM_OK;
}

static loom_status check_batch(int64_t batch, int64_t batches) {
    if (batch < 0 || batch >= batches)
        return loom_fail(LOOM_ERR_ARGUMENT, "batch %lld asked, there are %lld", (long long)batch, (long long)batches);
    return LOOM_OK;
}

static int64_t parts(int64_t samples, int64_t size, bool drop_last) {
    return samples / size + (!drop_last && samples % size != 0);
}

/* ---- single ---- */

/* Padding rows at the end. */
static int64_t padding(const loom_data_sampler_config *config) {
    if (config->drop_last || !config->pad_samples_to_global_batch_size)
        return 0;
    int64_t over = (config->total_samples - config->consumed_samples) % config->global_batch_size;
    return over ? config->global_batch_size - over : 0;
}

static loom_status single_length(void *context, const loom_data_sampler_config *config, int64_t *batches) {
    (void)context;
    LOOM_TRY(check(config));
    if (config->consumed_samples >= config->total_samples)
        return loom_fail(LOOM_ERR_CONFIG, "consumed samples are %lld, expected 0 to %lld: none is left",
            (long long)config->consumed_samples, (long long)config->total_samples - 1);
    int64_t left = config->total_samples - config->consumed_samples + padding(config);
    *batches = parts(left, round_of(config), config->drop_last);
    return LOOM_OK;
}

static loom_status single_batch(
    void *context, const loom_data_sampler_config *config, int64_t batch, int64_t *samples, int64_t *count) {
    int64_t batches = 0;
    LOOM_TRY(single_length(context, config, &batches));
    LOOM_TRY(check_batch(batch, batches));
    int64_t real = config->total_samples - config->consumed_samples, all = real + padding(config);
    int64_t first = (batch * config->data_parallel_size + config->data_parallel_rank) * config->micro_batch_size;
    int64_t found = 0;
    for (int64_t i = first; i < all && found < config->micro_batch_size; i++)
        samples[found++] = i < real ? config->consumed_samples + i : real - 1 - i;
    *count = found;
    return LOOM_OK;
}

/* ---- batch ---- */

static loom_status batch_length(void *context, const loom_data_sampler_config *config, int64_t *batches) {
    (void)context;
    LOOM_TRY(check(config));
    LOOM_TRY(positive("global_batch_size", config->global_batch_size));
    int64_t left = config->total_samples - config->consumed_samples % config->total_samples;
    *batches = parts(left, config->global_batch_size, config->drop_last);
    return LOOM_OK;
}

static loom_status batch_batch(
    void *context, const loom_data_sampler_config *config, int64_t batch, int64_t *samples, int64_t *count) {
    int64_t batches = 0, size = config->data_parallel_size;
    LOOM_TRY(batch_length(context, config, &batches));
    LOOM_TRY(check_batch(batch, batches));
    int64_t first = config->consumed_samples % config->total_samples + batch * config->global_batch_size, found = 0;
    bool padded = config->pad_samples_to_global_batch_size;
    for (int64_t i = config->data_parallel_rank; i < config->global_batch_size; i += size)
        if (padded || first + i < config->total_samples)
            samples[found++] = first + i < config->total_samples ? first + i : -1;
    *count = found;
    return LOOM_OK;
}

/* ---- cyclic and random_batch ---- */

/* Samples of each rank's part. */
static int64_t part_of(const loom_data_sampler_config *config) {
    return config->total_samples / round_of(config) * config->micro_batch_size;
}

static loom_status check_shuffled(const loom_data_sampler_config *config, int64_t unit) {
    LOOM_TRY(check(config));
    LOOM_TRY(positive("global_batch_size", unit));
    if (config->pad_samples_to_global_batch_size)
        return loom_fail(LOOM_ERR_CONFIG, "a shuffled sampler has no padding: pad_samples_to_global_batch_size is set");
    if (!config->drop_last && round_of(config) > 1)
        return loom_fail(LOOM_ERR_CONFIG,
            "a shuffled sampler cannot keep an incomplete last batch of %lld samples: drop_last is not set",
            (long long)round_of(config));
    int64_t epoch = config->total_samples / unit * unit;
    if (epoch == 0)
        return loom_fail(LOOM_ERR_CONFIG, "the dataset has %lld samples, expected at least %lld",
            (long long)config->total_samples, (long long)unit);
    int64_t over = config->consumed_samples % epoch % round_of(config);
    if (over != 0)
        return loom_fail(LOOM_ERR_CONFIG,
            "consumed samples are %lld, %lld into an epoch of %lld, expected a multiple of micro_batch_size %lld x "
            "data-parallel size %lld: nearest are %lld and %lld",
            (long long)config->consumed_samples, (long long)(config->consumed_samples % epoch), (long long)epoch,
            (long long)config->micro_batch_size, (long long)config->data_parallel_size,
            (long long)(config->consumed_samples - over),
            (long long)(config->consumed_samples - over + round_of(config)));
    return LOOM_OK;
}

/* unit: samples of all ranks that come or stay away together; share: those of one rank. */
static loom_status shuffled_length(const loom_data_sampler_config *config, int64_t unit, int64_t *batches) {
    LOOM_TRY(check_shuffled(config, unit));
    int64_t position = config->consumed_samples % (config->total_samples / unit * unit);
    int64_t left = part_of(config) - position / config->data_parallel_size;
    *batches = parts(left, unit / config->data_parallel_size, config->drop_last);
    return LOOM_OK;
}

static loom_status make_order(const loom_data_sampler_config *config, int64_t unit, int64_t **order) {
    LOOM_TRY(check_shuffled(config, unit));
    int64_t epoch = config->consumed_samples / (config->total_samples / unit * unit), part = part_of(config);
    int64_t *made = malloc((size_t)part * sizeof *made + 1);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for the order of %lld samples", (long long)part);
    loom__torch_randperm((uint64_t)config->seed + (uint64_t)epoch, part, made);
    *order = made;
    return LOOM_OK;
}

static loom_status shuffled_batch(
    const loom_data_sampler_config *config, int64_t unit, int64_t batch, int64_t *samples, int64_t *count) {
    int64_t batches, part = part_of(config), share = unit / config->data_parallel_size, *made = NULL;
    LOOM_TRY(shuffled_length(config, unit, &batches));
    LOOM_TRY(check_batch(batch, batches));
    if (!config->order)
        LOOM_TRY(make_order(config, unit, &made));
    const int64_t *order = config->order ? config->order : made;
    int64_t position = config->consumed_samples % (config->total_samples / unit * unit), found = 0;
    int64_t first = position / config->data_parallel_size + batch * share;
    for (int64_t i = first; i < part && found < share; i++)
        samples[found++] = config->data_parallel_rank * part + order[i];
    free(made);
    *count = found;
    return LOOM_OK;
}

static loom_status cyclic_length(void *context, const loom_data_sampler_config *config, int64_t *batches) {
    (void)context;
    LOOM_TRY(check(config));
    return shuffled_length(config, round_of(config), batches);
}

static loom_status cyclic_batch(
    void *context, const loom_data_sampler_config *config, int64_t batch, int64_t *samples, int64_t *count) {
    (void)context;
    LOOM_TRY(check(config));
    return shuffled_batch(config, round_of(config), batch, samples, count);
}

static loom_status cyclic_order(void *context, const loom_data_sampler_config *config, int64_t **order) {
    (void)context;
    LOOM_TRY(check(config));
    return make_order(config, round_of(config), order);
}

static loom_status random_batch_length(void *context, const loom_data_sampler_config *config, int64_t *batches) {
    (void)context;
    return shuffled_length(config, config->global_batch_size, batches);
}

static loom_status random_batch_batch(
    void *context, const loom_data_sampler_config *config, int64_t batch, int64_t *samples, int64_t *count) {
    (void)context;
    LOOM_TRY(check_shuffled(config, config->global_batch_size));
    return shuffled_batch(config, config->global_batch_size, batch, samples, count);
}

static loom_status random_batch_order(void *context, const loom_data_sampler_config *config, int64_t **order) {
    (void)context;
    return make_order(config, config->global_batch_size, order);
}

/* ---- by name ---- */

static const loom_data_sampler samplers[] = {
    {.name = "single", .length = single_length, .batch = single_batch},
    {.name = "cyclic", .length = cyclic_length, .batch = cyclic_batch, .order = cyclic_order},
    {.name = "batch", .global_batches = true, .length = batch_length, .batch = batch_batch},
    {.name = "random_batch",
        .global_batches = true,
        .length = random_batch_length,
        .batch = random_batch_batch,
        .order = random_batch_order},
};

const loom_data_sampler *loom_data_sampler_single(void) {
    return &samplers[0];
}

const loom_data_sampler *loom_data_sampler_cyclic(void) {
    return &samplers[1];
}

const loom_data_sampler *loom_data_sampler_batch(void) {
    return &samplers[2];
}

const loom_data_sampler *loom_data_sampler_random_batch(void) {
    return &samplers[3];
}

loom_status loom_data_sampler_find(const char *name, const loom_data_sampler **sampler) {
    for (size_t i = 0; i < sizeof samplers / sizeof *samplers; i++)
        if (strcmp(name, samplers[i].name) == 0) {
            *sampler = &samplers[i];
            return LOOM_OK;
        }
    return loom_fail(
        LOOM_ERR_CONFIG, "dataloader_type is '%.100s', expected single, cyclic, batch or random_batch", name);
}
