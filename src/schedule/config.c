/* The arithmetic of a schedule's sizes: which sizes make one, which (microbatch, chunk) is the i-th, and how a stage
 * divides its work. Everything is a function of the sizes in constant time, so that lists of any length need no table;
 * only the search for the nearest legal group walks. */
#include <inttypes.h>
#include <stdio.h>

#include "base/faults.h"
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

/* At least `stages` microbatches are there, so that all of them in one group is always legal. */
static void nearest_groups(int64_t microbatches, int64_t stages, int64_t group, char *text, size_t bytes) {
    int64_t below = group < microbatches ? group - 1 : microbatches, above = group + 1 > stages ? group + 1 : stages;
    while (below >= stages && !legal_group(microbatches, stages, below))
        below--;
    while (above <= microbatches && !legal_group(microbatches, stages, above))
        above++;
    if (below >= stages && above <= microbatches)
        snprintf(text, bytes, "%" PRId64 " or %" PRId64, below, above);
    else
        snprintf(text, bytes, "%" PRId64, below >= stages ? below : above);
}

static void check_interleaved(loom__faults *faults, const loom_schedule_config *c) {
    int64_t group = loom__schedule_group(c);
    char legal[64];
    if (c->microbatches < c->stages) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "%" PRId64 " microbatch%s with virtual_pipeline_model_parallel_size %" PRId64
            ": expected at least one for each of the %" PRId64 " pipeline stages; nearest legal %" PRId64
            " microbatches, or virtual_pipeline_model_parallel_size null",
            c->microbatches, c->microbatches == 1 ? "" : "es", c->chunks, c->stages, c->stages);
    } else if (group < c->stages || group > c->microbatches) {
        nearest_groups(c->microbatches, c->stages, group, legal, sizeof legal);
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "microbatch_group_size_per_vp_stage is %" PRId64 ": expected from pipeline_model_parallel_size %" PRId64
            " to the %" PRId64 " microbatches of a step; nearest legal %s",
            group, c->stages, c->microbatches, legal);
    } else if (!legal_group(c->microbatches, c->stages, group)) {
        int64_t last = c->microbatches % group;
        nearest_groups(c->microbatches, c->stages, group, legal, sizeof legal);
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "%" PRId64 " microbatches in groups of %" PRId64
            " (microbatch_group_size_per_vp_stage) leave a last group of %" PRId64
            ": expected none, or at least pipeline_model_parallel_size %" PRId64 "; nearest legal %" PRId64
            " or %" PRId64 " microbatches, or microbatch_group_size_per_vp_stage %s",
            c->microbatches, group, last, c->stages, c->microbatches - last, c->microbatches - last + c->stages, legal);
    }
}

static bool check_least(loom__faults *faults, const char *name, int64_t value, int64_t least) {
    if (value >= least)
        return true;
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "%s is %" PRId64 ": expected at least %" PRId64 "; nearest legal %" PRId64, name, value, least, least);
    return false;
}

loom_status loom_schedule_config_check(const loom_schedule_config *config) {
    const loom_schedule_config *c = config;
    loom__faults faults;
    loom__faults_begin(&faults);
    bool sizes = check_least(&faults, "pipeline_model_parallel_size", c->stages, 1);
    sizes &= check_least(&faults, "virtual_pipeline_model_parallel_size", c->chunks, 0);
    sizes &= check_least(&faults, "the number of microbatches", c->microbatches, 1);
    sizes &= check_least(&faults, "microbatch_group_size_per_vp_stage", c->group, 0);
    if (c->kind != LOOM_SCHEDULE_1F1B && c->kind != LOOM_SCHEDULE_ZERO_BUBBLE)
        loom__faults_add(&faults, LOOM_ERR_CONFIG, "the schedule is number %d: expected 1f1b (%d) or zero-bubble (%d)",
            (int)c->kind, LOOM_SCHEDULE_1F1B, LOOM_SCHEDULE_ZERO_BUBBLE);
    if (sizes && (c->microbatches > most_virtual_microbatches / loom__schedule_chunks(c) || c->stages > INT32_MAX ||
                     c->chunks > INT32_MAX)) {
        loom__faults_add(&faults, LOOM_ERR_CONFIG,
            "%" PRId64 " microbatches in %" PRId64 " chunks on %" PRId64 " stages: expected at most %" PRId64
            " microbatches times chunks, and at most %d stages and chunks",
            c->microbatches, loom__schedule_chunks(c), c->stages, most_virtual_microbatches, INT32_MAX);
        sizes = false;
    }
    if (sizes && c->chunks > 1 && c->stages == 1)
        loom__faults_add(&faults, LOOM_ERR_CONFIG,
            "virtual_pipeline_model_parallel_size is %" PRId64
            ", but pipeline_model_parallel_size is 1: expected at least 2 pipeline stages, or no virtual ones",
            c->chunks);
    else if (sizes && c->chunks > 1)
        check_interleaved(&faults, c);
    else if (sizes && c->group != 0 && c->group != c->stages)
        loom__faults_add(&faults, LOOM_ERR_CONFIG,
            "microbatch_group_size_per_vp_stage is %" PRId64
            ", but there are no virtual stages: expected virtual_pipeline_model_parallel_size of at least 2 with it; "
            "nearest legal null",
            c->group);
    if (c->chunks > 1 && c->kind == LOOM_SCHEDULE_ZERO_BUBBLE)
        loom__faults_add(&faults, LOOM_ERR_UNSUPPORTED,
            "not supported yet: the zero-bubble schedule with virtual_pipeline_model_parallel_size %" PRId64
            "; nearest legal null, or the 1f1b schedule",
            c->chunks);
    return loom__faults_end(&faults);
}
