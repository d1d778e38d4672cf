/* How many microbatches a step has, as a function of the samples consumed before it: nothing else decides, so a run
 * that is resumed inside a ramp-up goes on with the same sizes. The arithmetic is Megatron-Core's, in doubles where it
 * divides the ramp-up's samples by its increments. */
#include <megaloom/data.h>

static loom_status positive(const char *name, int64_t value) {
    if (value < 1)
        return loom_fail(LOOM_ERR_CONFIG, "%s is %lld, expected at least 1", name, (long long)value);
    return LOOM_OK;
}

static loom_status check_sizes(
    int64_t global_batch_size, int64_t micro_batch_size, int64_t data_parallel_size, int64_t *round) {
    LOOM_TRY(positive("global_batch_size", global_batch_size));
    LOOM_TRY(positive("micro_batch_size", micro_batch_size));
    LOOM_TRY(positive("the data-parallel size", data_parallel_size));
    if (__builtin_mul_overflow(micro_batch_size, data_parallel_size, round))
        return loom_fail(LOOM_ERR_CONFIG, "micro_batch_size %lld times data-parallel size %lld exceeds 2^63",
            (long long)micro_batch_size, (long long)data_parallel_size);
    return LOOM_OK;
}

loom_status loom_data_microbatches(
    int64_t global_batch_size, int64_t micro_batch_size, int64_t data_parallel_size, int64_t *microbatches) {
    int64_t round;
    LOOM_TRY(check_sizes(global_batch_size, micro_batch_size, data_parallel_size, &round));
    int64_t below = global_batch_size / round * round;
    if (below == 0)
        return loom_fail(LOOM_ERR_CONFIG,
            "global_batch_size is %lld, expected a multiple of micro_batch_size %lld x data-parallel size %lld; "
            "nearest legal %lld",
            (long long)global_batch_size, (long long)micro_batch_size, (long long)data_parallel_size, (long long)round);
    if (below != global_batch_size)
        return loom_fail(LOOM_ERR_CONFIG,
            "global_batch_size is %lld, expected a multiple of micro_batch_size %lld x data-parallel size %lld; "
            "nearest legal %lld or %lld",
            (long long)global_batch_size, (long long)micro_batch_size, (long long)data_parallel_size, (long long)below,
            (long long)(below + round));
    *microbatches = global_batch_size / round;
    return LOOM_OK;
}

/* Increments of the ramp-up; 0 = there is none. */
static loom_status increments_of(const loom_data_step_config *config, int64_t *increments) {
    int64_t start = config->rampup_batch_size[0], increment = config->rampup_batch_size[1],
            samples = config->rampup_batch_size[2], global = config->global_batch_size;
    *increments = 0;
    if (start == 0 && increment == 0 && samples == 0)
        return LOOM_OK;
    LOOM_TRY(positive("the start of rampup_batch_size", start));
    LOOM_TRY(positive("the increment of rampup_batch_size", increment));
    LOOM_TRY(positive("the number of samples of rampup_batch_size", samples));
    if (start >= global)
        return loom_fail(LOOM_ERR_CONFIG,
            "rampup_batch_size starts with %lld, expected less than global_batch_size %lld", (long long)start,
            (long long)global);
    if (increment > global - start)
        return loom_fail(LOOM_ERR_CONFIG,
            "rampup_batch_size goes from %lld in steps of %lld, which pass global_batch_size %lld", (long long)start,
            (long long)increment, (long long)global);
    if ((global - start) % increment != 0)
        return loom_fail(LOOM_ERR_CONFIG,
            "rampup_batch_size goes from %lld in steps of %lld, expected that they reach global_batch_size %lld",
            (long long)start, (long long)increment, (long long)global);
    *increments = (global - start) / increment;
    return LOOM_OK;
}

loom_status loom_data_step_at(const loom_data_step_config *config, int64_t consumed, loom_data_step *step) {
    int64_t round, increments, global = config->global_batch_size;
    LOOM_TRY(check_sizes(global, config->micro_batch_size, config->data_parallel_size, &round));
    LOOM_TRY(increments_of(config, &increments));
    if (consumed < 0)
        return loom_fail(LOOM_ERR_CONFIG, "consumed samples are %lld, expected at least 0", (long long)consumed);
    if (increments > 0 && consumed <= config->rampup_batch_size[2]) {
        double part = (double)config->rampup_batch_size[2] / (double)increments;
        global = config->rampup_batch_size[0] + (int64_t)((double)consumed / part) * config->rampup_batch_size[1];
    }
    int64_t running = config->decrease_batch_size_if_needed ? global / round * round : global;
    loom_data_step made = {global, running, 0, 0};
    /* A size that rounds down to nothing is refused as it was asked. */
    loom_status status = loom_data_microbatches(
        running > 0 ? running : global, config->micro_batch_size, config->data_parallel_size, &made.microbatches);
    if (status && increments > 0)
        return loom_fail_context(status, "after %lld samples of the ramp-up: ", (long long)consumed);
    LOOM_TRY(status);
    *step = made;
    return LOOM_OK;
}

/* A number of steps from `consumed` on that surely have the size of the first of them: the ramp-up is walked in
 * stretches, however many samples it has. */
static int64_t alike(const loom_data_step_config *config, int64_t consumed, const loom_data_step *step) {
    int64_t increments;
    if (increments_of(config, &increments) != LOOM_OK || increments == 0)
        return 1;
    double part = (double)config->rampup_batch_size[2] / (double)increments;
    double level = (double)((step->global_batch_size - config->rampup_batch_size[0]) / config->rampup_batch_size[1]);
    double steps = ((level + 1.0) * part - (double)consumed) / (double)step->running_global_batch_size - 1.0;
    return steps > 1.0 ? (int64_t)steps : 1;
}

loom_status loom_data_step_check(const loom_data_step_config *config) {
    loom_data_step step;
    LOOM_TRY(loom_data_step_at(config, 0, &step));
    for (int64_t consumed = 0; consumed <= config->rampup_batch_size[2];) {
        LOOM_TRY(loom_data_step_at(config, consumed, &step));
        consumed += alike(config, consumed, &step) * step.running_global_batch_size;
    }
    return loom_data_step_at(config, INT64_MAX, &step);
}

loom_status loom_data_step_samples(
    const loom_data_step_config *config, int64_t consumed, int64_t steps, int64_t *samples) {
    loom_data_step step;
    int64_t begin = consumed, rest;
    LOOM_TRY(loom_data_step_at(config, consumed, &step));
    while (steps > 0 && consumed <= config->rampup_batch_size[2]) {
        LOOM_TRY(loom_data_step_at(config, consumed, &step));
        int64_t some = alike(config, consumed, &step);
        some = some < steps ? some : steps;
        consumed += some * step.running_global_batch_size;
        steps -= some;
    }
    LOOM_TRY(loom_data_step_at(config, consumed, &step));
    if (__builtin_mul_overflow(steps, step.running_global_batch_size, &rest) ||
        __builtin_add_overflow(consumed - begin, rest, samples))
        return loom_fail(LOOM_ERR_CONFIG, "%lld steps of %lld samples are more samples than can be counted",
            (long long)steps, (long long)step.running_global_batch_size);
    return LOOM_OK;
}
