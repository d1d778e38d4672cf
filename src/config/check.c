/* Checks of what depends on several fields, and the checks of single parts for configurations made in code. Each part's
 * rule lives with the part (layout's in loom_layout_init, the model's in loom__model_config_complete); here they are
 * asked together, and every fault is reported at once. */
#include "config/field.h"
#include "config/sizes.h"
#include "spec/parameter.h"
#include <inttypes.h>
#include <megaloom/data.h>
#include <megaloom/layout.h>
#include <string.h>

static void check_strategy(const loom_megatron_strategy_config *strategy, loom__faults *faults) {
    if (strategy->sequence_parallel && strategy->tensor_model_parallel_size == 1)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.sequence_parallel: found true with strategy.tensor_model_parallel_size 1, expected a tensor size "
            "of at least 2, or false");
}

loom_status loom_megatron_strategy_config_check(const loom_megatron_strategy_config *config) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom_run_config run = loom_run_config_default();
    run.strategy = *config;
    loom__fields_check(&run, "strategy.", &faults);
    check_strategy(config, &faults);
    return loom__faults_end(&faults);
}

loom_status loom_precision_config_check(const loom_precision_config *config) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom_run_config run = loom_run_config_default();
    run.precision = *config;
    loom__fields_check(&run, "precision", &faults);
    return loom__faults_end(&faults);
}

loom_status loom_model_config_check(const loom_model_config *config) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom_run_config run = loom_run_config_default();
    run.model.config = *config;
    loom__fields_check(&run, "model.", &faults);
    return loom__faults_end(&faults);
}

static bool is_megatron(const loom_lr_config *lr) {
    return lr->schedule && strncmp(lr->schedule, "megatron-", 9) == 0;
}

static void only_megatron(bool set, const char *field, loom__faults *faults) {
    if (set)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "optim.%s: only the schedules megatron-… use it", field);
}

/* steps: of the run; 0 = unknown. */
static void check_schedule(const loom_lr_config *lr, int64_t steps, loom__faults *faults) {
    if (!is_megatron(lr)) {
        only_megatron(lr->init_lr != 0, "init_lr", faults);
        only_megatron(lr->lr_decay_steps != 0, "lr_decay_steps", faults);
        only_megatron(lr->wsd_decay_steps != 0, "wsd_decay_steps", faults);
        return;
    }
    int64_t decay = lr->lr_decay_steps ? lr->lr_decay_steps : steps;
    if (decay && lr->warmup_steps >= decay)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "optim.warmup_steps: found %" PRId64 ", expected less than the %" PRId64 " steps of the schedule",
            lr->warmup_steps, decay);
    if (strcmp(lr->schedule, "megatron-WSD") != 0)
        only_megatron(lr->wsd_decay_steps != 0, "wsd_decay_steps", faults);
    else if (lr->wsd_decay_steps == 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "optim.wsd_decay_steps: missing, schedule megatron-WSD needs it");
    else if (decay && lr->wsd_decay_steps > decay)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "optim.wsd_decay_steps: found %" PRId64 ", expected at most the %" PRId64 " steps of the schedule",
            lr->wsd_decay_steps, decay);
}

static void check_rates(const loom_optimizer_config *optim, loom__faults *faults) {
    if (optim->min_lr > optim->lr)
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "optim.min_lr: found %g, expected at most optim.lr, %g", optim->min_lr, optim->lr);
}

loom_status loom_optimizer_config_check(const loom_optimizer_config *config) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom_run_config run = loom_run_config_default();
    run.optim = *config;
    loom__fields_check(&run, "optim.", &faults);
    check_rates(config, &faults);
    return loom__faults_end(&faults);
}

loom_status loom_lr_config_check(const loom_lr_config *config) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom_run_config run = loom_run_config_default();
    run.lr = *config;
    loom__fields_check(&run, "optim.", &faults);
    check_schedule(config, 0, &faults);
    return loom__faults_end(&faults);
}

/* Adds the faults that a part has found, each with the section of the field that its line begins with: the parts do
 * not know where a run file says their fields. */
static void add_part(loom__faults *faults, loom_status status) {
    static const char *const sections[] = {"strategy.", "model.", "data."};
    const char *next;
    for (const char *line = status == LOOM_OK ? "" : loom_error_message(); *line; line = next) {
        size_t length = strcspn(line, "\n"), word = strspn(line, "abcdefghijklmnopqrstuvwxyz0123456789_");
        const char *section = "";
        for (size_t i = 0; i < sizeof sections / sizeof *sections && !*section; i++) {
            char path[160];
            snprintf(path, sizeof path, "%s%.*s", sections[i], (int)(word < 100 ? word : 100), line);
            section = loom__field_find(path) >= 0 ? sections[i] : "";
        }
        loom__faults_add(faults, status, "%s%.*s", section, (int)length, line);
        next = line + length + (line[length] == '\n');
    }
}

/* Whether the table refuses the field's value. */
static bool is_refused(const loom_run_config *config, const char *path) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom__field_check(&loom__fields[loom__field_find(path)], config, "", &faults);
    return faults.count > 0;
}

static void missing(loom__faults *faults, const char *path, const char *expected) {
    loom__faults_add(faults, LOOM_ERR_CONFIG, "%s: missing, expected %s", path, expected);
}

static void check_model(const loom_run_config *config, loom__faults *faults) {
    loom_model_config model = config->model.config;
    const loom_megatron_strategy_config *strategy = &config->strategy;
    /* Read from text alone: the sizes are still in the directory. */
    if (config->model.hf && model.num_layers == 0)
        return;
    if (is_refused(config, "model.architecture"))
        return;
    int64_t before = faults->count;
    if (!model.architecture)
        missing(faults, "model.architecture", "gpt2 or llama (or model.hf)");
    if (model.num_layers == 0)
        missing(faults, "model.num_layers", "an integer >= 1 (or model.hf)");
    if (model.hidden_size == 0)
        missing(faults, "model.hidden_size", "an integer >= 1 (or model.hf)");
    if (model.num_attention_heads == 0)
        missing(faults, "model.num_attention_heads", "an integer >= 1 (or model.hf)");
    if (model.seq_length == 0)
        missing(faults, "model.seq_length", "an integer >= 1");
    if (model.vocab_size == 0)
        missing(faults, "model.vocab_size",
            config->data.tokenizer && strcmp(config->data.tokenizer, "byte") != 0
                ? "at least as many as data.tokenizer has tokens"
                : "an integer >= 1");
    int64_t tp = strategy->tensor_model_parallel_size;
    if (faults->count == before)
        add_part(faults, loom__model_config_complete(&model, tp, strategy->sequence_parallel && tp > 1));
}

loom_parallel_sizes loom__strategy_sizes(const loom_megatron_strategy_config *strategy, int64_t world_size) {
    loom_parallel_sizes sizes = loom_parallel_sizes_default(world_size);
    sizes.tensor = strategy->tensor_model_parallel_size;
    sizes.pipeline = strategy->pipeline_model_parallel_size;
    sizes.virtual_pipeline = strategy->virtual_pipeline_model_parallel_size;
    sizes.context = strategy->context_parallel_size;
    sizes.expert = strategy->expert_model_parallel_size;
    sizes.expert_tensor = strategy->expert_tensor_parallel_size;
    sizes.encoder_tensor = strategy->encoder_tensor_model_parallel_size;
    sizes.encoder_pipeline = strategy->encoder_pipeline_model_parallel_size;
    sizes.optimizer_instances = strategy->num_distributed_optimizer_instances;
    sizes.use_tp_pp_dp_mapping = strategy->use_tp_pp_dp_mapping;
    return sizes;
}

/* Returns the data-parallel size, 0 where the layout has faults. */
static int64_t check_layout(const loom_run_config *config, int64_t world_size, loom__faults *faults) {
    loom_parallel_sizes sizes = loom__strategy_sizes(&config->strategy, world_size);
    loom_layout layout;
    loom_status status = loom_layout_init(&sizes, &layout);
    add_part(faults, status);
    return status == LOOM_OK ? loom_layout_data_parallel_size(&layout) : 0;
}

/* Microbatches that the interleaved schedule can take: in groups, the last of them no smaller than the pipeline. */
static void check_interleaved(
    const loom_run_config *config, int64_t consumed, int64_t microbatches, loom__faults *faults) {
    const loom_megatron_strategy_config *strategy = &config->strategy;
    int64_t stages = strategy->pipeline_model_parallel_size, group = strategy->microbatch_group_size_per_vp_stage;
    group = group ? group : stages;
    if (microbatches >= group && (microbatches % group == 0 || microbatches % group >= stages))
        return;
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "data.rampup_batch_size: the step after %" PRId64 " samples has %" PRId64
        " microbatches, expected a multiple of %" PRId64 " for the interleaved schedule of %" PRId64
        " stages: the nearest is %" PRId64,
        consumed, microbatches, group, stages, (microbatches + group - 1) / group * group);
}

/* Every size of the ramp-up, since a run must not be refused in its middle. */
static void check_rampup(const loom_run_config *config, const loom_data_step_config *sizes, loom__faults *faults) {
    loom_status status = loom_data_step_check(sizes);
    if (status) {
        loom__faults_add(faults, status, "data.rampup_batch_size: %s", loom_error_message());
        return;
    }
    const loom_megatron_strategy_config *strategy = &config->strategy;
    bool interleaved = strategy->pipeline_model_parallel_size > 1 && strategy->virtual_pipeline_model_parallel_size > 1;
    int64_t before = 0;
    for (int64_t consumed = 0; interleaved && consumed <= sizes->rampup_batch_size[2];) {
        loom_data_step step;
        if (loom_data_step_at(sizes, consumed, &step) != LOOM_OK)
            return;
        if (step.microbatches != before)
            check_interleaved(config, consumed, step.microbatches, faults);
        before = step.microbatches;
        consumed += step.running_global_batch_size;
    }
}

static void check_batch(const loom_run_config *config, int64_t data_parallel, loom__faults *faults) {
    const loom_data_config *data = &config->data;
    int64_t micro = data->micro_batch_size, global = data->global_batch_size;
    if (micro < 1 || global < 1 || data_parallel < 1 || micro > INT64_MAX / data_parallel)
        return;
    int64_t unit = micro * data_parallel;
    if (data->rampup_batch_size[0] != 0) {
        const loom_data_step_config sizes = {global, micro, data_parallel,
            {data->rampup_batch_size[0], data->rampup_batch_size[1], data->rampup_batch_size[2]},
            data->decrease_batch_size_if_needed};
        check_rampup(config, &sizes, faults);
        return;
    }
    if (global % unit == 0 || (data->decrease_batch_size_if_needed && global > unit))
        return;
    int64_t below = global / unit * unit;
    char lower[64] = "";
    if (below > 0)
        snprintf(lower, sizeof lower, "sizes are %" PRId64 " and ", below);
    else
        snprintf(lower, sizeof lower, "size is ");
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "data.global_batch_size: found %" PRId64 ", expected a multiple of %" PRId64 " (data.micro_batch_size %" PRId64
        " times %" PRId64 " data-parallel rank%s): the nearest legal %s%" PRId64,
        global, unit, micro, data_parallel, data_parallel == 1 ? "" : "s", lower, below + unit);
}

static void check_one_file(const char *field, int64_t count, loom__faults *faults) {
    if (count > 1)
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "%s: found %" PRId64 " files, expected one for data.kind fixed", field, count);
}

static bool is_weighted(const loom_data_path *paths, int64_t count) {
    return count > 1 && paths[0].weight > 0;
}

static void check_paths(const loom_run_config *config, loom__faults *faults) {
    const loom_data_config *data = &config->data;
    bool fixed = strcmp(data->kind, "fixed") == 0, mock = strcmp(data->kind, "mock") == 0,
         finetune = strcmp(data->kind, "finetune") == 0;
    if (data->pack_sequences && !finetune)
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "data.pack_sequences: only data.kind finetune packs, found %s", data->kind);
    if (mock)
        return;
    if (data->path_count == 0 && data->train_path_count == 0)
        missing(faults, "data.path", "a prefix, or weights and prefixes in turn");
    if (fixed) {
        check_one_file("data.path", data->path_count, faults);
        check_one_file("data.train_path", data->train_path_count, faults);
        check_one_file("data.valid_path", data->valid_path_count, faults);
    }
    if (finetune &&
        (is_weighted(data->path, data->path_count) || is_weighted(data->train_path, data->train_path_count) ||
            is_weighted(data->valid_path, data->valid_path_count)))
        loom__faults_add(faults, LOOM_ERR_CONFIG, "data.path: data.kind finetune takes files without weights");
    /* What is not in files of its own is a share of the common ones; files that are read whole have none. */
    bool read_whole = fixed || finetune;
    if (config->validation.every > 0 && data->valid_path_count == 0 && (read_whole || data->path_count == 0))
        missing(faults, "data.valid_path",
            read_whole ? "a file to validate with, since validation.every is set"
                       : "a prefix to validate with, since data.path is not given");
}

static void check_data(const loom_run_config *config, loom__faults *faults) {
    const loom_data_config *data = &config->data;
    if (data->kind)
        check_paths(config, faults);
    if (data->rampup_batch_size[0] != 0 && data->global_batch_size == 0)
        missing(faults, "data.global_batch_size", "the size that data.rampup_batch_size grows to");
    double shares[LOOM_SPLIT_COUNT][2];
    add_part(faults, loom_data_split_parse(data->split, shares));
}

loom_status loom_run_config_check(const loom_run_config *config, int64_t world_size) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom__fields_check(config, "", &faults);
    bool sound = faults.status != LOOM_ERR_CONFIG;
    if (config->steps == 0)
        missing(&faults, "steps", "an integer >= 1");
    /* Combinations are judged only where their parts are sound. */
    if (sound) {
        check_strategy(&config->strategy, &faults);
        check_model(config, &faults);
        check_data(config, &faults);
        check_rates(&config->optim, &faults);
        check_schedule(&config->lr, config->steps, &faults);
        if (world_size > 0)
            check_batch(config, check_layout(config, world_size, &faults), &faults);
    }
    return loom__faults_end(&faults);
}
