/* The arithmetic of a schedule's sizes: which sizes make one, which (microbatch, chunk) is the i-th, and how a stage
 * divides its work. Everything is a function of the sizes in constant time, so that lists of any length need no
 * table. */
#include <inttypes.h>
#include <stdio.h>

#include "base/suggest.h"
#include "schedule/schedule.h"

/* So that the number of instructions of a stage, and of bytes, cannot overflow. */
static const int64_t most_virtual_microbatches = (int64_t)1 << 40;

int64_t loom__schedule_chunks(const loom_schedule_config *config) {
    return config->chunks > 0 ? config->chunks : 1;
}

int64_t loom__schedule_group(const loom_schedule_config *config) {
    return config->group > 0 ? config->group : config->stages;
}

void loom_schedule_virtual_microbatch(
    const loom_schedule_config *config, int64_t index, bool backward, int64_t *microbatch, int32_t *chunk) {
    int64_t chunks = loom__schedule_chunks(config), group = loom__schedule_group(config);
    int64_t first = index / (group * chunks) * group, left = config->microbatches - first;
    int64_t members = left < group ? left : group, place = index - first * chunks;
    int64_t which = place / members;
    *microbatch = first + place % members;
    *chunk = (int32_t)(backward ? chunks - 1 - which : which);
}

void loom_schedule_count(const loom_schedule_config *config, int64_t stage, loom_schedule_counts *counts) {
    int64_t chunks = loom__schedule_chunks(config), total = config->microbatches * chunks;
    int64_t behind = config->stages - stage - 1, warmup;
    if (config->forward_only)
        warmup = total;
    else if (config->stages == 1)
        warmup = 1;
    else if (chunks == 1)
        warmup = behind;
    else
        warmup = 2 * behind + (chunks - 1) * loom__schedule_group(config);
    bool all = warmup >= total;
    if (all)
        warmup = total;
    *counts = (loom_schedule_counts){total, warmup, total - warmup, all};
}

static bool legal_group(int64_t microbatches, int64_t stages, int64_t group) {
    int64_t last = microbatches % group;
    return last == 0 || last >= stages;
}

static void check_interleaved(loom__faults *faults, const loom_schedule_config *c) {
    int64_t group = loom__schedule_group(c);
    if (c->microbatches < c->stages) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "%" PRId64 " microbatch%s with virtual_pipeline_model_parallel_size %" PRId64
            ": expected at least one for each of the %" PRId64 " stages of pipeline_model_parallel_size",
            c->microbatches, c->microbatches == 1 ? "" : "es", c->chunks, c->stages);
    } else if (group < c->stages || group > c->microbatches) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "microbatch_group_size_per_vp_stage is %" PRId64 ": expected from pipeline_model_parallel_size %" PRId64
            " to the %" PRId64 " microbatches of a step",
            group, c->stages, c->microbatches);
    } else if (!legal_group(c->microbatches, c->stages, group)) {
        int64_t last = c->microbatches % group;
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "%" PRId64 " microbatches in groups of %" PRId64
            " (microbatch_group_size_per_vp_stage) leave a last group of %" PRId64
            ": expected none, or at least pipeline_model_parallel_size %" PRId64,
            c->microbatches, group, last, c->stages);
    }
}

static bool check_least(loom__faults *faults, const char *name, int64_t value, int64_t least) {
    if (value >= least)
        return true;
    loom__faults_add(faults, LOOM_ERR_CONFIG, "%s is %" PRId64 ": expected at least %" PRId64, name, value, least);
    return false;
}

void loom__schedule_faults(const loom_schedule_config *c, loom__faults *faults) {
    bool sizes = check_least(faults, "pipeline_model_parallel_size", c->stages, 1);
    sizes &= check_least(faults, "virtual_pipeline_model_parallel_size", c->chunks, 0);
    sizes &= check_least(faults, "the number of microbatches", c->microbatches, 1);
    sizes &= check_least(faults, "microbatch_group_size_per_vp_stage", c->group, 0);
    if (c->kind != LOOM_SCHEDULE_1F1B && c->kind != LOOM_SCHEDULE_ZERO_BUBBLE)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "the schedule is number %d: expected 1f1b (%d) or zero-bubble (%d)",
            (int)c->kind, LOOM_SCHEDULE_1F1B, LOOM_SCHEDULE_ZERO_BUBBLE);
    if (sizes && (c->microbatches > most_virtual_microbatches / loom__schedule_chunks(c) || c->stages > INT32_MAX ||
                     c->chunks > INT32_MAX)) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "%" PRId64 " microbatches in %" PRId64 " chunks on %" PRId64 " stages: expected at most %" PRId64
            " microbatches times chunks, and at most %d stages and chunks",
            c->microbatches, loom__schedule_chunks(c), c->stages, most_virtual_microbatches, INT32_MAX);
        sizes = false;
    }
    if (sizes && c->chunks > 1 && c->stages == 1)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "virtual_pipeline_model_parallel_size is %" PRId64
            ", but pipeline_model_parallel_size is 1: expected at least 2 pipeline stages, or no virtual ones",
            c->chunks);
    else if (sizes && c->chunks > 1)
        check_interleaved(faults, c);
    else if (sizes && c->group != 0 && c->group != c->stages)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "microbatch_group_size_per_vp_stage is %" PRId64
            ", but there are no virtual stages (virtual_pipeline_model_parallel_size): expected "
            "pipeline_model_parallel_size %" PRId64 ", or null",
            c->group, c->stages);
    if (c->chunks > 1 && c->kind == LOOM_SCHEDULE_ZERO_BUBBLE)
        loom__faults_add(faults, LOOM_ERR_UNSUPPORTED,
            "not supported yet: the zero-bubble schedule with virtual_pipeline_model_parallel_size %" PRId64
            "; the 1f1b schedule has it",
            c->chunks);
}

static void try_sizes(void *context, loom__faults *faults) {
    loom__schedule_faults(context, faults);
}

loom_status loom_schedule_config_check(const loom_schedule_config *config) {
    loom_schedule_config c = *config;
    const int64_t most = LOOM__NUMBER_MAX;
    const loom__variable variables[] = {{"pipeline_model_parallel_size", &c.stages, NULL, 1, most, 0, false},
        {"virtual_pipeline_model_parallel_size", &c.chunks, NULL, 1, most, 0, true},
        {"microbatches", &c.microbatches, NULL, 1, most, 0, false},
        {"microbatch_group_size_per_vp_stage", &c.group, NULL, 1, most, c.stages, true}};
    const loom__trial trial = {
        .variables = variables, .count = sizeof variables / sizeof *variables, .check = try_sizes, .context = &c};
    loom__faults faults;
    loom__faults_begin(&faults);
    loom__schedule_faults(&c, &faults);
    loom__faults_suggest(&faults, &trial);
    return loom__faults_end(&faults);
}
