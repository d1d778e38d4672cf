/* Checks of what depends on several fields, and the checks of single parts for configurations made in code. Each part's
 * rule lives with the part (layout's in loom_layout_init, the model's in loom__model_config_complete); here they are
 * asked together, and every fault is reported at once. */
#include "config/check.h"
#include "config/field.h"
#include "config/precision.h"
#include "config/sizes.h"
#include "layout/layout.h"
#include "spec/parameter.h"
#include <inttypes.h>
#include <megaloom/data.h>
#include <string.h>

/* With pytorch there is no DDP configuration: a field of it that was set would count for nothing. */
static void check_unused_ddp(const loom_megatron_strategy_config *strategy, loom__faults *faults) {
    static const char section[] = "strategy.ddp.";
    char found[64];
    loom_run_config run = loom_run_config_default();
    run.strategy = *strategy;
    for (int64_t i = 0; i < loom__field_count; i++) {
        const loom__field *field = &loom__fields[i];
        if (strncmp(field->path, section, sizeof section - 1) != 0 || field->not_built ||
            loom__field_is_default(field, &run))
            continue;
        loom__field_text(field, &run, found, sizeof found);
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "%s: found %s, expected %s with strategy.ddp pytorch, which has no DDP "
            "configuration",
            field->path, found, field->preset);
    }
}

static void check_ddp(const loom_megatron_strategy_config *strategy, loom__faults *faults) {
    const loom_ddp_config *ddp = &strategy->ddp_config;
    bool pytorch = strategy->ddp && strcmp(strategy->ddp, "pytorch") == 0;
    bool sharded = ddp->use_distributed_optimizer && !pytorch;
    int64_t instances = strategy->num_distributed_optimizer_instances;
    if (instances > 1 && !sharded)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.num_distributed_optimizer_instances: found %" PRId64
            ", expected 1 without strategy.ddp.use_distributed_optimizer",
            instances);
    if (!pytorch && ddp->num_distributed_optimizer_instances != 1 &&
        ddp->num_distributed_optimizer_instances != instances)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.ddp.num_distributed_optimizer_instances: found %" PRId64
            ", expected 1 or that of strategy.num_distributed_optimizer_instances, %" PRId64,
            ddp->num_distributed_optimizer_instances, instances);
    if (!pytorch && ddp->overlap_param_gather && !sharded)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.ddp.overlap_param_gather: found true without strategy.ddp.use_distributed_optimizer, which "
            "gathers parameters; expected false");
    if (!pytorch && ddp->align_grad_reduce && !ddp->overlap_grad_reduce)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.ddp.align_grad_reduce: found true without strategy.ddp.overlap_grad_reduce, whose reductions it "
            "aligns; expected false");
    if (!pytorch && ddp->align_param_gather && !ddp->overlap_param_gather)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.ddp.align_param_gather: found true without strategy.ddp.overlap_param_gather, whose gathers it "
            "aligns; expected false");
    if (pytorch)
        check_unused_ddp(strategy, faults);
    const struct {
        const char *name;
        bool set;
    } wrapper[] = {{"bucket_cap_mb", strategy->bucket_cap_mb != 0},
        {"find_unused_parameters", strategy->find_unused_parameters},
        {"gradient_as_bucket_view", strategy->gradient_as_bucket_view}, {"static_graph", strategy->static_graph}};
    for (size_t i = 0; i < sizeof wrapper / sizeof *wrapper; i++)
        if (wrapper[i].set && !pytorch)
            loom__faults_add(
                faults, LOOM_ERR_CONFIG, "strategy.%s: only strategy.ddp pytorch uses it", wrapper[i].name);
}

static void check_checkpoint(const loom_run_config *config, loom__faults *faults) {
    const loom_checkpoint_config *checkpoint = &config->checkpoint;
    int64_t every = config->validation.every;
    if (checkpoint->keep_best > 0 && (every <= 0 || checkpoint->every % every != 0))
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "checkpoint.keep_best: found %" PRId64 " with checkpoint.every %" PRId64 " and validation.every %" PRId64
            "; expected checkpoints each some validations, whose loss ranks them, or 0",
            checkpoint->keep_best, checkpoint->every, every);
}

static void check_strategy(const loom_megatron_strategy_config *strategy, loom__faults *faults) {
    if (strategy->sequence_parallel && strategy->tensor_model_parallel_size == 1)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.sequence_parallel: found true with strategy.tensor_model_parallel_size 1, expected at least 2 "
            "tensor "
            "ranks to share rows");
    check_ddp(strategy, faults);
    loom__check_strategy_pipeline(strategy, faults);
}

loom_status loom_megatron_strategy_config_check(const loom_megatron_strategy_config *config) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom_run_config run = loom_run_config_default();
    run.strategy = *config;
    loom__fields_check(&run, "strategy.", &faults);
    loom__fields_check(&run, "schedule", &faults);
    check_strategy(config, &faults);
    return loom__faults_end(&faults);
}

loom_status loom_checkpoint_io_config_check(const loom_checkpoint_io_config *config) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom_run_config run = loom_run_config_default();
    run.checkpoint.io = *config;
    loom__fields_check(&run, "checkpoint.", &faults);
    return loom__faults_end(&faults);
}

loom_status loom_precision_config_check(const loom_precision_config *config) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom_run_config run = loom_run_config_default();
    run.precision = *config;
    loom__fields_check(&run, "precision", &faults);
    if (faults.status != LOOM_ERR_CONFIG)
        loom__check_precision(config, &faults);
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

static void one_of_two(bool steps, bool ratio, const char *what, loom__faults *faults) {
    if (steps && ratio)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "optim.%s_ratio: found together with optim.%s_steps, expected one "
            "of them",
            what, what);
}

static void check_decay_ramp(const loom_lr_config *lr, loom__faults *faults) {
    bool ramp = lr->weight_decay_incr_style && strcmp(lr->weight_decay_incr_style, "constant") != 0;
    const struct {
        bool set;
        const char *field;
    } fields[] = {{lr->start_weight_decay > 0, "start_weight_decay"}, {lr->end_weight_decay > 0, "end_weight_decay"},
        {lr->wd_incr_steps != 0, "wd_incr_steps"}};
    for (size_t i = 0; !ramp && i < sizeof fields / sizeof *fields; i++)
        if (fields[i].set)
            loom__faults_add(faults, LOOM_ERR_CONFIG,
                "optim.%s: used only by optim.weight_decay_incr_style linear and cosine", fields[i].field);
}

/* What a schedule uses of the fields that not all use; a field that would be ignored is a fault. */
static void check_used(const loom_lr_config *lr, loom__faults *faults) {
    const char *name = lr->schedule;
    bool megatron = strncmp(name, "megatron-", 9) == 0, policy = !megatron && strcmp(name, "cosine") != 0;
    bool t5 = strcmp(name, "T5InverseSquareRootAnnealing") == 0;
    const struct {
        bool set, used;
        const char *field, *by;
    } fields[] = {
        {lr->warmup_steps != 0, !t5, "warmup_steps", "schedules other than T5InverseSquareRootAnnealing"},
        {lr->init_lr != 0, megatron, "init_lr", "the schedules megatron-…"},
        {lr->lr_decay_steps != 0, megatron, "lr_decay_steps", "the schedules megatron-…"},
        {lr->wsd_decay_steps != 0, strcmp(name, "megatron-WSD") == 0, "wsd_decay_steps", "megatron-WSD"},
        {lr->max_steps != 0, policy, "max_steps", "NeMo's policies"},
        {lr->warmup_ratio > 0, policy && !t5, "warmup_ratio", "NeMo's policies with a warm-up"},
        {lr->hold_steps != 0, policy && strstr(name, "Hold"), "hold_steps", "policies with Hold in their names"},
        {lr->hold_ratio > 0, policy && strstr(name, "Hold"), "hold_ratio", "policies with Hold in their names"},
        {lr->constant_steps != 0, t5 || strcmp(name, "CosineAnnealing") == 0, "constant_steps",
            "CosineAnnealing and T5InverseSquareRootAnnealing"},
        {lr->constant_ratio > 0, t5 || strcmp(name, "CosineAnnealing") == 0, "constant_ratio",
            "CosineAnnealing and T5InverseSquareRootAnnealing"},
        {lr->power < 1 || lr->power > 1, strncmp(name, "Polynomial", 10) == 0, "power", "Polynomial…Annealing"},
        {lr->cycle, strncmp(name, "Polynomial", 10) == 0, "cycle", "Polynomial…Annealing"},
        {lr->decay_rate < 0.5 || lr->decay_rate > 0.5, strcmp(name, "NoamHoldAnnealing") == 0, "decay_rate",
            "NoamHoldAnnealing"},
        {lr->d_model != 0, strcmp(name, "NoamAnnealing") == 0, "d_model", "NoamAnnealing"},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].set && !fields[i].used)
            loom__faults_add(faults, LOOM_ERR_CONFIG, "optim.%s: used only by %s", fields[i].field, fields[i].by);
}

/* steps: of the run; 0 = unknown. */
static void check_schedule(const loom_lr_config *lr, int64_t steps, loom__faults *faults) {
    check_decay_ramp(lr, faults);
    one_of_two(lr->warmup_steps != 0, lr->warmup_ratio > 0, "warmup", faults);
    one_of_two(lr->hold_steps != 0, lr->hold_ratio > 0, "hold", faults);
    one_of_two(lr->constant_steps != 0, lr->constant_ratio > 0, "constant", faults);
    if (lr->override_opt_param_scheduler && lr->use_checkpoint_opt_param_scheduler)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "optim.override_opt_param_scheduler: found true together with optim.use_checkpoint_opt_param_scheduler, "
            "expected one of them at most");
    if (!lr->schedule)
        return;
    check_used(lr, faults);
    if (strcmp(lr->schedule, "NoamAnnealing") == 0 && lr->d_model == 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "optim.d_model: missing, schedule NoamAnnealing needs it");
    if (strcmp(lr->schedule, "NoamHoldAnnealing") == 0 && lr->warmup_steps == 0 && !(lr->warmup_ratio > 0))
        loom__faults_add(faults, LOOM_ERR_CONFIG, "optim.warmup_steps: missing, schedule NoamHoldAnnealing needs it");
    if (strncmp(lr->schedule, "megatron-", 9) != 0)
        return;
    int64_t decay = lr->lr_decay_steps ? lr->lr_decay_steps : steps;
    if (decay && lr->warmup_steps >= decay)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "optim.warmup_steps: found %" PRId64 ", expected less than the %" PRId64 " steps of the schedule",
            lr->warmup_steps, decay);
    if (strcmp(lr->schedule, "megatron-WSD") != 0)
        return;
    if (lr->wsd_decay_steps == 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "optim.wsd_decay_steps: missing, schedule megatron-WSD needs it");
    else if (decay && lr->wsd_decay_steps > decay)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "optim.wsd_decay_steps: found %" PRId64 ", expected at most the %" PRId64 " steps of the schedule",
            lr->wsd_decay_steps, decay);
}

static void check_optimizer(const loom_optimizer_config *optim, loom__faults *faults) {
    double decoupled_min = optim->decoupled_min_lr > 0 ? optim->decoupled_min_lr : optim->min_lr;
    bool sgd = optim->optimizer && strcmp(optim->optimizer, "sgd") == 0;
    const struct {
        bool set, used;
        const char *field, *by;
    } fields[] = {
        {!optim->decoupled_weight_decay, !sgd, "decoupled_weight_decay", "adam"},
        {optim->amsgrad, !sgd, "amsgrad", "adam"},
        {optim->exp_avg_dtype && strcmp(optim->exp_avg_dtype, "fp32") != 0, !sgd, "exp_avg_dtype", "adam"},
        {optim->exp_avg_sq_dtype && strcmp(optim->exp_avg_sq_dtype, "fp32") != 0, !sgd, "exp_avg_sq_dtype", "adam"},
        {optim->sgd_momentum < 0.9 || optim->sgd_momentum > 0.9, sgd, "sgd_momentum", "sgd"},
        {optim->sgd_dampening > 0, sgd, "sgd_dampening", "sgd"},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].set && !fields[i].used)
            loom__faults_add(
                faults, LOOM_ERR_CONFIG, "optim.%s: used only by optim.optimizer %s", fields[i].field, fields[i].by);
    if (optim->min_lr > optim->lr)
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "optim.min_lr: found %g, expected at most optim.lr, %g", optim->min_lr, optim->lr);
    if (optim->decoupled_min_lr > 0 && !(optim->decoupled_lr > 0))
        loom__faults_add(faults, LOOM_ERR_CONFIG, "optim.decoupled_min_lr: used only with optim.decoupled_lr");
    else if (optim->decoupled_lr > 0 && decoupled_min > optim->decoupled_lr)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "optim.decoupled_lr: found %g, expected at least its lowest value, %g (optim.decoupled_min_lr, or "
            "optim.min_lr)",
            optim->decoupled_lr, decoupled_min);
}

loom_status loom_optimizer_config_check(const loom_optimizer_config *config) {
    loom__faults faults;
    loom__faults_begin(&faults);
    loom_run_config run = loom_run_config_default();
    run.optim = *config;
    loom__fields_check(&run, "optim.", &faults);
    check_optimizer(config, &faults);
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

void loom__check_add_part(loom__faults *faults, const loom__faults *part) {
    static const char *const sections[] = {"strategy.", "model.", "data."};
    const char *next;
    for (const char *line = part->text; *line; line = next) {
        size_t length = strcspn(line, "\n"), word = strspn(line, "abcdefghijklmnopqrstuvwxyz0123456789_");
        const char *section = "";
        for (size_t i = 0; i < sizeof sections / sizeof *sections && !*section; i++) {
            char path[160];
            snprintf(path, sizeof path, "%s%.*s", sections[i], (int)(word < 100 ? word : 100), line);
            section = loom__field_find(path) >= 0 ? sections[i] : "";
        }
        char text[2048];
        snprintf(text, sizeof text, "%s%.*s", section, (int)length, line);
        if (!loom__faults_has(faults, text))
            loom__faults_add(faults, part->status, "%s", text);
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

static bool lacks_experts(const loom_model_config *model) {
    return loom__architecture_has_experts(loom__architecture_find(model->architecture)) &&
           model->moe.num_moe_experts == 0;
}

/* Experts cut over tensor x expert ranks. */
static void check_extended(
    const loom_model_config *model, const loom_megatron_strategy_config *strategy, loom__faults *faults) {
    const loom_moe_config *moe = &model->moe;
    int64_t tp = strategy->tensor_model_parallel_size, ep = strategy->expert_model_parallel_size, slices;
    if (moe->num_moe_experts == 0) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.moe_extended_tp: found true for a model without experts (model.num_moe_experts); expected false");
        return;
    }
    if (moe->moe_token_dispatcher_type && strcmp(moe->moe_token_dispatcher_type, "allgather") != 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "model.moe_token_dispatcher_type: found %s with strategy.moe_extended_tp, which gathers all rows; expected "
            "allgather",
            moe->moe_token_dispatcher_type);
    if (__builtin_mul_overflow(tp, ep, &slices) || slices < 1 || moe->moe_ffn_hidden_size % slices)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "strategy.moe_extended_tp: model.moe_ffn_hidden_size %" PRId64
            " is not divisible by tensor_model_parallel_size %" PRId64 " x expert_model_parallel_size %" PRId64,
            moe->moe_ffn_hidden_size, tp, ep);
}

/* What context and expert parallelism ask of the model, which may have faults of its own: of what is missing or derived
 * from it nothing is said. */
static void check_model_ranks(const loom_run_config *config, loom_model_config *model, loom__faults *faults) {
    const loom_megatron_strategy_config *strategy = &config->strategy;
    int64_t tp = strategy->tensor_model_parallel_size, etp = strategy->expert_tensor_parallel_size;
    bool sequence_parallel = strategy->sequence_parallel && tp > 1;
    if (model->num_query_groups == 0)
        model->num_query_groups = model->num_attention_heads;
    if (model->moe.moe_ffn_hidden_size == 0)
        model->moe.moe_ffn_hidden_size = model->ffn_hidden_size;
    loom__faults part;
    loom__faults_begin(&part);
    if (model->seq_length > 0)
        loom__model_context_faults(model, tp, strategy->context_parallel_size, sequence_parallel, &part);
    bool shared_out = !lacks_experts(model) && !strategy->moe_extended_tp;
    if (shared_out)
        loom__model_expert_ranks_faults(model, strategy->expert_model_parallel_size, etp ? etp : tp, &part);
    loom__check_add_part(faults, &part);
    if (!lacks_experts(model) && strategy->moe_extended_tp)
        check_extended(model, strategy, faults);
}

static void check_model(const loom_run_config *config, loom__faults *faults) {
    loom_model_config model = config->model.config;
    const loom_megatron_strategy_config *strategy = &config->strategy;
    /* Read from text alone: the sizes are still in the directory. */
    if ((config->model.hf || config->model.from) && model.num_layers == 0)
        return;
    if (is_refused(config, "model.architecture"))
        return;
    int64_t before = faults->count;
    if (!model.architecture)
        missing(faults, "model.architecture", "one of " LOOM__ARCHITECTURES_BUILT " (or model.hf)");
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
    if (lacks_experts(&model)) {
        char expected[96];
        snprintf(expected, sizeof expected, "an integer >= 1 with model.architecture %s", model.architecture);
        missing(faults, "model.num_moe_experts", expected);
    }
    int64_t tp = strategy->tensor_model_parallel_size;
    bool sequence_parallel = strategy->sequence_parallel && tp > 1;
    loom__faults part;
    loom__faults_begin(&part);
    if (faults->count == before)
        loom__model_complete_faults(&model, tp, sequence_parallel, &part);
    loom__check_add_part(faults, &part);
    /* A model with parts that are not built is told of already, but not complete. It has no faults here: they would
     * have been counted above. */
    if (faults->count == before && faults->not_built)
        (void)loom__model_config_complete_planned(&model, tp, sequence_parallel);
    check_model_ranks(config, &model, faults);
}

loom_parallel_sizes loom__strategy_sizes(const loom_megatron_strategy_config *strategy, int64_t world_size) {
    loom_parallel_sizes sizes = loom_parallel_sizes_default(world_size);
    sizes.tensor = strategy->tensor_model_parallel_size;
    sizes.pipeline = strategy->pipeline_model_parallel_size;
    sizes.virtual_pipeline = strategy->virtual_pipeline_model_parallel_size;
    sizes.context = strategy->context_parallel_size;
    sizes.expert = strategy->expert_model_parallel_size;
    sizes.expert_tensor = strategy->expert_tensor_parallel_size;
    sizes.moe_extended_tp = strategy->moe_extended_tp;
    sizes.encoder_tensor = strategy->encoder_tensor_model_parallel_size;
    sizes.encoder_pipeline = strategy->encoder_pipeline_model_parallel_size;
    sizes.optimizer_instances = strategy->num_distributed_optimizer_instances;
    sizes.use_tp_pp_dp_mapping = strategy->use_tp_pp_dp_mapping;
    return sizes;
}

/* Returns the data-parallel size, 0 where the ranks cannot be divided. */
static int64_t check_layout(const loom_run_config *config, int64_t world_size, loom__faults *faults) {
    loom_parallel_sizes sizes = loom__strategy_sizes(&config->strategy, world_size);
    loom__layout_checked layout = {0};
    loom__faults part;
    loom__faults_begin(&part);
    loom__layout_faults(&sizes, &layout, &part);
    loom__check_add_part(faults, &part);
    return layout.data;
}

static void check_batch(
    const loom_run_config *config, int64_t world_size, int64_t data_parallel, loom__faults *faults) {
    const loom_data_config *data = &config->data;
    int64_t micro = data->micro_batch_size, global = data->global_batch_size;
    if (micro < 1 || global < 1 || data_parallel < 1 || micro > INT64_MAX / data_parallel)
        return;
    int64_t unit = micro * data_parallel;
    if (data->rampup_batch_size[0] != 0 && data->rampup_batch_size[2] == 0) {
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "data.rampup_batch_size: found %d number%s, expected three: the first batch size, the increment, and the "
            "samples that the increments take",
            data->rampup_batch_size[1] ? 2 : 1, data->rampup_batch_size[1] ? "s" : "");
        return;
    }
    if (data->rampup_batch_size[0] != 0) {
        const loom_data_step_config sizes = {global, micro, data_parallel,
            {data->rampup_batch_size[0], data->rampup_batch_size[1], data->rampup_batch_size[2]},
            data->decrease_batch_size_if_needed};
        loom_status status = loom_data_step_check(&sizes);
        /* What is legal of the batch alone need not be so of the ramp-up: that is found for the whole run. */
        const char *found = loom_error_message(), *end = strstr(found, "; nearest legal ");
        int length = end ? (int)(end - found) : (int)strlen(found);
        if (status)
            loom__faults_add(faults, status,
                "data.rampup_batch_size: [%" PRId64 ", %" PRId64 ", %" PRId64 "] on world_size %" PRId64 ": %.*s",
                data->rampup_batch_size[0], data->rampup_batch_size[1], data->rampup_batch_size[2], world_size, length,
                found);
        return;
    }
    if (global % unit == 0 || (data->decrease_batch_size_if_needed && global > unit))
        return;
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "data.global_batch_size: found %" PRId64 ", expected a multiple of %" PRId64 " (data.micro_batch_size %" PRId64
        " times %" PRId64 " data-parallel rank%s)",
        global, unit, micro, data_parallel, data_parallel == 1 ? "" : "s");
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
    if (data->pad_seq_length_to_mult && !finetune)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "data.pad_seq_length_to_mult: found %" PRId64 " with data.kind %s, expected data.kind finetune: only its "
            "samples differ in length",
            data->pad_seq_length_to_mult, data->kind);
    if (mock)
        return;
    if (data->path_count == 0 && data->train_path_count == 0)
        missing(faults, "data.path", "a prefix, or weights and prefixes in turn");
    if (fixed) {
        check_one_file("data.path", data->path_count, faults);
        check_one_file("data.train_path", data->train_path_count, faults);
        check_one_file("data.valid_path", data->valid_path_count, faults);
        check_one_file("data.test_path", data->test_path_count, faults);
    }
    if (finetune &&
        (is_weighted(data->path, data->path_count) || is_weighted(data->train_path, data->train_path_count) ||
            is_weighted(data->valid_path, data->valid_path_count) ||
            is_weighted(data->test_path, data->test_path_count)))
        loom__faults_add(faults, LOOM_ERR_CONFIG, "data.path: data.kind finetune takes files without weights");
    /* What is not in files of its own is a share of the common ones; files that are read whole have none. */
    bool read_whole = fixed || finetune;
    if (config->validation.every > 0 && data->valid_path_count == 0 && (read_whole || data->path_count == 0))
        missing(faults, "data.valid_path",
            read_whole ? "a file to validate with, since validation.every is set"
                       : "a prefix to validate with, since data.path is not given");
    if (config->validation.test && data->test_path_count == 0 && (read_whole || data->path_count == 0))
        missing(faults, "data.test_path",
            read_whole ? "a file to test with, since validation.test is set"
                       : "a prefix to test with, since data.path is not given");
}

static void check_split(const loom_run_config *config, loom__faults *faults) {
    const loom_data_config *data = &config->data;
    double shares[LOOM_SPLIT_COUNT][2];
    loom_status status = loom_data_split_parse(data->split, shares);
    loom__faults part;
    loom__faults_begin(&part);
    loom__faults_add_record(&part, status);
    loom__check_add_part(faults, &part);
    if (status || !data->kind || strcmp(data->kind, "gpt") != 0 || data->path_count == 0)
        return;
    if (data->train_path_count == 0 && shares[LOOM_SPLIT_TRAIN][0] < 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "data.split: found \"%s\", expected a first share above 0, for training, or data.train_path", data->split);
    if (config->validation.every > 0 && data->valid_path_count == 0 && shares[LOOM_SPLIT_VALID][0] < 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "data.split: found \"%s\", expected a second share above 0 since validation.every is set, or "
            "data.valid_path, or validation.every=0",
            data->split);
    if (config->validation.test && data->test_path_count == 0 && shares[LOOM_SPLIT_TEST][0] < 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "data.split: found \"%s\", expected a third share above 0 since validation.test is set, or data.test_path",
            data->split);
}

static void check_data(const loom_run_config *config, loom__faults *faults) {
    const loom_data_config *data = &config->data;
    if (data->kind)
        check_paths(config, faults);
    if (data->pad_seq_length_to_mult && strcmp(data->dataloader_type, "batch") != 0 &&
        strcmp(data->dataloader_type, "random_batch") != 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "data.dataloader_type: found %s, expected batch or random_batch with data.pad_seq_length_to_mult",
            data->dataloader_type);
    if (data->pad_seq_length_to_mult && data->rampup_batch_size[0] != 0)
        loom__faults_add(faults, LOOM_ERR_UNSUPPORTED,
            "not supported yet: data.pad_seq_length_to_mult with data.rampup_batch_size, one of them works");
    if (data->rampup_batch_size[0] != 0 && data->global_batch_size == 0)
        missing(faults, "data.global_batch_size", "the size that data.rampup_batch_size grows to");
    const struct {
        const char *name;
        bool given;
    } of_documents[] = {{"reset_position_ids", data->reset_position_ids},
        {"reset_attention_mask", data->reset_attention_mask}, {"eod_mask_loss", data->eod_mask_loss}};
    for (size_t i = 0; i < sizeof of_documents / sizeof *of_documents; i++)
        if (of_documents[i].given && data->kind && strcmp(data->kind, "gpt") != 0)
            loom__faults_add(faults, LOOM_ERR_CONFIG,
                "data.%s: found true with data.kind %s, expected data.kind gpt: only its documents have ends",
                of_documents[i].name, data->kind);
    check_split(config, faults);
}

void loom__check_sizes(const loom_run_config *config, int64_t world_size, loom__faults *faults) {
    check_strategy(&config->strategy, faults);
    check_model(config, faults);
    check_data(config, faults);
    int64_t data_parallel = world_size > 0 ? check_layout(config, world_size, faults) : 0;
    check_batch(config, world_size, data_parallel, faults);
    loom__check_pipeline(config, data_parallel, faults);
}

bool loom__check_run(const loom_run_config *config, int64_t world_size, loom__faults *faults) {
    loom__fields_check(config, "", faults);
    bool sound = faults->status != LOOM_ERR_CONFIG;
    if (config->steps == 0)
        missing(faults, "steps", "an integer >= 1");
    /* Combinations are judged only where their parts are sound. */
    if (!sound)
        return false;
    loom__check_sizes(config, world_size, faults);
    loom__check_precision(&config->precision, faults);
    check_checkpoint(config, faults);
    check_optimizer(&config->optim, faults);
    check_schedule(&config->lr, config->steps, faults);
    return true;
}

loom_status loom_run_config_check(const loom_run_config *config, int64_t world_size) {
    loom__faults faults;
    loom__faults_begin(&faults);
    if (loom__check_run(config, world_size, &faults))
        loom__suggest_run(config, NULL, world_size, &faults);
    return loom__faults_end(&faults);
}
