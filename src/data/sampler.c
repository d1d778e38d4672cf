/* Samplers. A microbatch is found from its number by arithmetic, with no state: consumed samples are all there is to
 * resume. One round is the microbatches of all data-parallel ranks together: micro_batch_size * data_parallel_size
 * samples. */
#include <megaloom/data.h>

#include <string.h>

static loom_status positive(const char *name, int64_t value) {
    if (value < 1)
        return loom_fail(LOOM_ERR_CONFIG, "%s is %lld, expected at least 1", name, (long long)value);
    return LOOM_OK;
}

loom_status loom_data_microbatches(
    int64_t global_batch_size, int64_t micro_batch_size, int64_t data_parallel_size, int64_t *microbatches) {
    LOOM_TRY(positive("global_batch_size", global_batch_size));
    LOOM_TRY(positive("micro_batch_size", micro_batch_size));
    LOOM_TRY(positive("the data-parallel size", data_parallel_size));
    int64_t round;
    if (__builtin_mul_overflow(micro_batch_size, data_parallel_size, &round))
        return loom_fail(LOOM_ERR_CONFIG, "micro_batch_size %lld times data-parallel size %lld exceeds 2^63",
            (long long)micro_batch_size, (long long)data_parallel_size);
    int64_t below = global_batch_size / round * round;
    if (below == 0)
        return loom_fail(LOOM_ERR_CONFIG,
            "global_batch_size is %lld, expected a multiple of micro_batch_size %lld x data-parallel size %lld: "
            "nearest is %lld",
            (long long)global_batch_size, (long long)micro_batch_size, (long long)data_parallel_size, (long long)round);
    if (below != global_batch_size)
        return loom_fail(LOOM_ERR_CONFIG,
            "global_batch_size is %lld, expected a multiple of micro_batch_size %lld x data-parallel size %lld: "
            "nearest are "
            "%lld and %lld",
            (long long)global_batch_size, (long long)micro_batch_size, (long long)data_parallel_size, (long long)below,
            (long long)(below + round));
    *microbatches = global_batch_size / round;
    return LOOM_OK;
}

static loom_status check(const loom_data_sampler_config *config) {
    LOOM_TRY(positive("the number of samples", config->total_samples));
    LOOM_TRY(positive("micro_batch_size", config->micro_batch_size));
    LOOM_TRY(positive("the data-parallel size", config->data_parallel_size));
    if (config->data_parallel_rank < 0 || config->data_parallel_rank >= config->data_parallel_size)
        return loom_fail(LOOM_ERR_CONFIG, "data-parallel rank is %lld, expected 0 to %lld",
            (long long)config->data_parallel_rank, (long long)config->data_parallel_size - 1);
    if (config->consumed_samples < 0 || config->consumed_samples >= config->total_samples)
        return loom_fail(LOOM_ERR_CONFIG, "consumed samples are %lld, expected 0 to %lld: none is left",
            (long long)config->consumed_samples, (long long)config->total_samples - 1);
    int64_t unused;
    if (config->global_batch_size != 0)
        LOOM_TRY(loom_data_microbatches(
            config->global_batch_size, config->micro_batch_size, config->data_parallel_size, &unused));
    else if (config->pad_samples_to_global_batch_size && !config->drop_last)
        return loom_fail(LOOM_ERR_CONFIG, "pad_samples_to_global_batch_size needs a global_batch_size");
    return loom_data_microbatches(config->micro_batch_size * config->data_parallel_size, config->micro_batch_size,
        config->data_parallel_size, &unused);
}

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
    int64_t round = config->micro_batch_size * config->data_parallel_size;
    int64_t left = config->total_samples - config->consumed_samples + padding(config);
    *batches = left / round + (!config->drop_last && left % round != 0);
    return LOOM_OK;
}

static loom_status single_batch(
    void *context, const loom_data_sampler_config *config, int64_t batch, int64_t *samples, int64_t *count) {
    int64_t batches = 0;
    LOOM_TRY(single_length(context, config, &batches));
    if (batch < 0 || batch >= batches)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "microbatch %lld asked, there are %lld", (long long)batch, (long long)batches);
    int64_t real = config->total_samples - config->consumed_samples, all = real + padding(config);
    int64_t first = (batch * config->data_parallel_size + config->data_parallel_rank) * config->micro_batch_size;
    int64_t found = 0;
    for (int64_t i = first; i < all && found < config->micro_batch_size; i++)
        samples[found++] = i < real ? config->consumed_samples + i : real - 1 - i;
    *count = found;
    return LOOM_OK;
}

const loom_data_sampler *loom_data_sampler_single(void) {
    static const loom_data_sampler single = {.name = "single", .length = single_length, .batch = single_batch};
    return &single;
}

loom_status loom_data_sampler_find(const char *name, const loom_data_sampler **sampler) {
    static const char *const later[] = {"cyclic", "batch", "random_batch"};
    for (size_t i = 0; i < sizeof later / sizeof *later; i++)
        if (strcmp(name, later[i]) == 0)
            return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: dataloader_type '%s', there is: single", name);
    if (strcmp(name, "single") != 0)
        return loom_fail(LOOM_ERR_CONFIG, "dataloader_type is '%.100s', expected single", name);
    *sampler = loom_data_sampler_single();
    return LOOM_OK;
}
