/* The checks of a pipeline before any rank starts. How layers may be cut is known to the layout, which microbatch
 * counts make a schedule is known to the schedule; here they are asked, for the batch size of the run and for each size
 * that a ramp-up passes through, since a run that starts must not stop at its tenth batch size. */
#include "config/check.h"
#include "config/sizes.h"
#include "layout/layout.h"
#include "schedule/schedule.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

loom_stage_split loom_stage_split_of(const loom_megatron_strategy_config *strategy, const loom_model_config *model) {
    const loom_model_parallel_config *parallel = &model->parallel;
    return (loom_stage_split){
        .layers = model->num_layers,
        .pipeline_model_parallel_size = strategy->pipeline_model_parallel_size,
        .virtual_pipeline_model_parallel_size = strategy->virtual_pipeline_model_parallel_size,
        .num_layers_in_first_pipeline_stage = parallel->num_layers_in_first_pipeline_stage,
        .num_layers_in_last_pipeline_stage = parallel->num_layers_in_last_pipeline_stage,
        .account_for_embedding_in_pipeline_split = parallel->account_for_embedding_in_pipeline_split,
        .account_for_loss_in_pipeline_split = parallel->account_for_loss_in_pipeline_split,
        .pipeline_model_parallel_layout = parallel->pipeline_model_parallel_layout,
        .balanced_pipeline_split = parallel->balanced_pipeline_split,
    };
}

loom_schedule_kind loom__strategy_schedule(const loom_megatron_strategy_config *strategy) {
    return strategy->schedule && strcmp(strategy->schedule, "zero-bubble") == 0 ? LOOM_SCHEDULE_ZERO_BUBBLE
                                                                                : LOOM_SCHEDULE_1F1B;
}

static bool group_fits(const loom_megatron_strategy_config *strategy) {
    int64_t group = strategy->microbatch_group_size_per_vp_stage;
    return group == 0 || group >= strategy->pipeline_model_parallel_size;
}

void loom__check_strategy_pipeline(const loom_megatron_strategy_config *strategy, loom__faults *faults) {
    if (!group_fits(strategy))
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.microbatch_group_size_per_vp_stage: found %" PRId64
            ", expected at least strategy.pipeline_model_parallel_size %" PRId64 ", or null",
            strategy->microbatch_group_size_per_vp_stage, strategy->pipeline_model_parallel_size);
    loom__faults part;
    loom__faults_begin(&part);
    loom__faults_add_record(&part, loom__check_virtual_stages(strategy->virtual_pipeline_model_parallel_size,
                                       strategy->pipeline_model_parallel_size));
    loom__check_add_part(faults, &part);
}

typedef struct step {
    loom_schedule_config schedule; /* all but the microbatches */
    int64_t micro, data_parallel;
} step;

/* Adds why a batch of `size` samples makes no schedule. The schedule knows microbatches alone, so its lines get the
 * fields that they come from; batch: what the size is called. */
static void check_size(const step *s, int64_t size, const char *batch, loom__faults *faults) {
    loom_schedule_config schedule = s->schedule;
    loom__faults found;
    schedule.microbatches = size / (s->micro * s->data_parallel);
    loom__faults_begin(&found);
    loom__schedule_faults(&schedule, &found);
    const char *next;
    for (const char *line = found.text; *line; line = next) {
        size_t length = strcspn(line, "\n");
        loom__faults_add(faults, found.status,
            "%.*s (%s %" PRId64 ", data.micro_batch_size %" PRId64 ", %" PRId64 " data-parallel rank%s)", (int)length,
            line, batch, size, s->micro, s->data_parallel, s->data_parallel == 1 ? "" : "s");
        next = line + length + (line[length] == '\n');
    }
}

static void check_ramp_up(const step *s, const int64_t ramp[3], int64_t global, loom__faults *faults) {
    enum { SIZES_MAX = 1 << 16 };
    /* Without chunks any number of microbatches is a schedule. */
    if (ramp[0] < 1 || ramp[1] < 1 || s->schedule.chunks <= 1)
        return;
    /* Whether a size is legal depends on its microbatches modulo the group, which repeats: no more need be asked. */
    int64_t group = s->schedule.group > 0 ? s->schedule.group : s->schedule.stages;
    int64_t sizes = global > ramp[0] ? (global - ramp[0] - 1) / ramp[1] + 1 : 0;
    int64_t asked = sizes / 2 < group ? sizes : 2 * group;
    if (asked > SIZES_MAX) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "data.rampup_batch_size: [%" PRId64 ", %" PRId64 ", %" PRId64 "] passes through %" PRId64
            " batch sizes, expected at most %d",
            ramp[0], ramp[1], ramp[2], sizes, SIZES_MAX);
        return;
    }
    loom__faults found;
    loom__faults_begin(&found);
    for (int64_t i = 0; i < asked && found.count == 0; i++) {
        int64_t size = ramp[0] + i * ramp[1];
        /* One that is no whole number of microbatches is refused where batches are checked. */
        if (size < s->micro * s->data_parallel)
            continue;
        check_size(s, size, "batch size", &found);
        if (found.count > 0)
            loom__faults_add(faults, found.status,
                "data.rampup_batch_size: [%" PRId64 ", %" PRId64 ", %" PRId64 "] passes through batch size %" PRId64
                ": %s",
                ramp[0], ramp[1], ramp[2], size, found.text);
    }
}

static void check_microbatches(
    const loom_run_config *config, int64_t chunks, int64_t data_parallel, loom__faults *faults) {
    const loom_data_config *data = &config->data;
    int64_t micro = data->micro_batch_size, global = data->global_batch_size;
    if (data_parallel < 1 || micro < 1 || micro > INT64_MAX / data_parallel)
        return;
    /* The batch of a fixed file is known when it is opened. */
    bool in_file = data->kind && strcmp(data->kind, "fixed") == 0;
    if (global == 0 && in_file)
        return;
    if (global == 0)
        global = micro * data_parallel;
    /* A batch that is no whole number of microbatches is refused where batches are checked. */
    if (global % (micro * data_parallel) != 0 && !data->decrease_batch_size_if_needed)
        return;
    const step s = {.schedule = {.stages = config->strategy.pipeline_model_parallel_size,
                        .chunks = chunks,
                        .group = config->strategy.microbatch_group_size_per_vp_stage,
                        .kind = loom__strategy_schedule(&config->strategy)},
        .micro = micro,
        .data_parallel = data_parallel};
    /* What no batch size mends is told without one. */
    loom_schedule_config least = s.schedule;
    least.microbatches = least.stages;
    least.group = chunks > 1 ? 0 : least.group;
    loom__faults part;
    loom__faults_begin(&part);
    loom__schedule_faults(&least, &part);
    bool possible = part.count == 0;
    if (possible)
        check_size(
            &s, global, data->global_batch_size ? "data.global_batch_size" : "data.global_batch_size null is", &part);
    loom__check_add_part(faults, &part);
    if (possible)
        check_ramp_up(&s, data->rampup_batch_size, global, faults);
}

void loom__check_pipeline(const loom_run_config *config, int64_t data_parallel, loom__faults *faults) {
    loom_stage_split split = loom_stage_split_of(&config->strategy, &config->model.config);
    int64_t chunks = 0, unused;
    loom__faults part;
    loom__faults_begin(&part);
    loom__stage_chunks_faults(&split, &chunks, &part);
    /* Layers that are still in a directory, or missing, are named elsewhere. */
    if (part.count == 0 && split.layers != 0)
        loom__stage_split_faults(&split, &unused, &part);
    loom__check_add_part(faults, &part);
    if (chunks > 0 && group_fits(&config->strategy))
        check_microbatches(config, chunks, data_parallel, faults);
}
