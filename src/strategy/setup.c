/* Setting modules and optimizers up: the one place that knows in which order configuration, precision, weights,
 * gradient buffers and callbacks are put together. */
#include "config/sizes.h"
#include "layout/layout.h"
#include "model/gpt.h"
#include "optim/optim.h"
#include "strategy/strategy.h"
#include "tensor/dtype.h"
#include <stdlib.h>

/* How the model is cut over the fabric's stages, which the fabric cannot know before there is a model. */
static loom_status take_split(loom_fabric *fabric, const loom_model_config *config) {
    loom_stage_split split = loom_stage_split_of(&fabric->config, config);
    /* A model without layers is refused where its fields are. */
    if (split.layers > 0)
        LOOM_TRY(loom__stage_split_check(&split));
    fabric->split = split;
    return LOOM_OK;
}

loom_status loom_gpt_create(loom_fabric *fabric, const loom_model_config *config, loom_module **module) {
    LOOM_TRY(take_split(fabric, config));
    return loom__gpt_create(config, NULL, fabric->perform_initialization, module);
}

loom_status loom_hf_read_config(const char *directory, loom_model_config *config) {
    LOOM_TRY(loom__hf_read_config(directory, config));
    if (config->seq_length == 0)
        config->seq_length = config->max_position_embeddings;
    return LOOM_OK;
}

loom_status loom_gpt_create_from_hf(
    loom_fabric *fabric, const char *directory, const loom_model_config *config, loom_module **module) {
    LOOM_TRY(take_split(fabric, config));
    return loom__gpt_create(config, directory, fabric->perform_initialization, module);
}

static void destroy_module(loom_module *module) {
    if (module && module->destroy)
        module->destroy(module->context);
}

loom_status loom__parallel_check_gradients(const loom_parallel *parallel, const char *who) {
    return parallel->inference ? loom_fail(LOOM_ERR_STATE,
                                     "%s: this module was set up by loom_fabric_setup_module_for_inference and has no "
                                     "gradients, expected one of loom_fabric_setup_module",
                                     who)
                               : LOOM_OK;
}

static loom_status find_partial(loom_parallel *parallel) {
    parallel->partial = calloc((size_t)parallel->parameter_count + 1, sizeof(loom_parameter *));
    if (!parallel->partial)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the list of partial gradients");
    for (int64_t i = 0; i < parallel->parameter_count; i++) {
        loom_parameter *parameter = parallel->parameters[i];
        if (!parameter->sequence_partial && !parameter->tensor_partial)
            continue;
        if (parameter->expert_parallel)
            return loom_fail(LOOM_ERR_ARGUMENT,
                "parameter %s is expert_parallel and partial over the tensor ranks (sequence_partial, tensor_partial): "
                "a module adds such gradients up itself (finalize_gradients)",
                parameter->name);
        parallel->partial[parallel->partial_count++] = parameter;
        parallel->partial_elements += loom_parameter_count(parameter);
    }
    parallel->partial_buffer = malloc((size_t)(parallel->partial_elements + 1) * sizeof(float));
    return parallel->partial_buffer ? LOOM_OK
                                    : loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld partial gradients",
                                          (long long)parallel->partial_elements);
}

static loom__ddp_options megatron_options(const loom_parallel *parallel) {
    const loom_fabric *fabric = parallel->fabric;
    const loom_ddp_config *config = &fabric->config.ddp_config;
    bool sharded = config->use_distributed_optimizer;
    return (loom__ddp_options){
        .overlap_grad_reduce = config->overlap_grad_reduce,
        .bucket_size = config->bucket_size,
        .data_parallel_size = loom_comm_size(fabric->groups[LOOM_GROUP_DP]),
        .param_dtype = fabric->precision_plugin->params_dtype,
        .grad_reduce_in_fp32 = config->grad_reduce_in_fp32,
        .average_in_collective = config->average_in_collective,
        .check_for_nan_in_grad = config->check_for_nan_in_grad,
        .check_for_large_grads = config->check_for_large_grads,
        .microbatches_noted = true,
        .note_nonfinite = fabric->precision.has_scaler,
        .disable_bucketing = parallel->stage > 0,
        .use_distributed_optimizer = sharded,
        .pad_buckets_for_high_nccl_busbw = config->pad_buckets_for_high_nccl_busbw,
        .instance = sharded ? fabric->groups[LOOM_GROUP_INTRA_DP_CP] : NULL,
        .expert = fabric->groups[LOOM_GROUP_EDP],
        .expert_instance = sharded ? fabric->groups[LOOM_GROUP_INTRA_EDP] : NULL,
        .overlap_param_gather = config->overlap_param_gather,
        .align_param_gather = config->align_param_gather,
        .gathers_by_chunk =
            loom__aligns_reductions(parallel) && config->align_param_gather && parallel->chunk_count > 1,
    };
}

/* PyTorch counts buckets in MiB; its first one, which is reduced last before the next forward, is 1 MiB at most. */
static loom__ddp_options pytorch_options(const loom_fabric *fabric) {
    const loom_megatron_strategy_config *config = &fabric->config;
    const double mebi = 1048576.0, most = 0x1p50;
    double bytes = (config->bucket_cap_mb > 0 ? config->bucket_cap_mb : 25.0) * mebi;
    int64_t elements = (int64_t)(bytes < most ? bytes : most) / (int64_t)sizeof(float);
    int64_t first = (int64_t)mebi / (int64_t)sizeof(float);
    elements = elements > 0 ? elements : 1;
    return (loom__ddp_options){
        .overlap_grad_reduce = true,
        .param_dtype = fabric->precision_plugin->params_dtype,
        .grad_reduce_in_fp32 = config->ddp_config.grad_reduce_in_fp32,
        .bucket_size = elements,
        .first_bucket_size = first < elements ? first : elements,
        .find_unused_parameters = config->find_unused_parameters,
        .static_graph = config->static_graph,
        .leave_reduction = fabric->no_ddp_communication_hook,
        .expert = fabric->groups[LOOM_GROUP_EDP],
    };
}

static loom_status wrap_ddp(loom_parallel *parallel) {
    const loom_fabric *fabric = parallel->fabric;
    loom__ddp_options options = fabric->pytorch_ddp ? pytorch_options(fabric) : megatron_options(parallel);
    return loom__ddp_create(fabric->rank, &options, parallel->parameters, parallel->parameter_count,
        fabric->groups[LOOM_GROUP_DP_CP], &parallel->ddp);
}

static loom_status log_parameter_count(const loom_parallel *parallel) {
    const loom_fabric *fabric = parallel->fabric;
    int64_t local = 0, whole = 0, experts = 0;
    for (int64_t i = 0; i < parallel->parameter_count; i++) {
        const loom_parameter *parameter = parallel->parameters[i];
        local += loom_parameter_count(parameter);
        *(parameter->expert_parallel ? &experts : &whole) += parameter->owned;
    }
    LOOM_TRY(loom_all_reduce(fabric->groups[LOOM_GROUP_TP_PP], &whole, &whole, 1, LOOM_I64, LOOM_SUM));
    LOOM_TRY(loom_all_reduce(fabric->groups[LOOM_GROUP_ETP_EP_PP], &experts, &experts, 1, LOOM_I64, LOOM_SUM));
    whole += experts;
    if (loom_rank_index(fabric->rank) == 0)
        loom_rank_log(fabric->rank, LOOM_LOG_INFO, "the model has %lld parameters, padding included; rank 0 holds %lld",
            (long long)whole, (long long)local);
    return LOOM_OK;
}

/* The sampler as a callback: it knows the sizes of a step, as far as nobody has given others. */
void loom__infer_sizes(loom_step *step) {
    loom_batches_state state = loom_batches_get_state(step->batches);
    if (!step->micro_batch_size)
        step->micro_batch_size = state.micro_batch_size;
    if (!step->seq_length)
        step->seq_length = state.seq_length;
    if (!step->num_microbatches)
        step->num_microbatches = state.num_microbatches ? state.num_microbatches : 1;
}

static loom_status sampler_step_start(void *context, loom_step *step) {
    (void)context;
    loom__infer_sizes(step);
    return LOOM_OK;
}

/* Where ramp-up has just changed the size of a step the loop may want to validate and save. The first step after a
 * resume has none before it, so it does not stop the loop again. */
static loom_status sampler_microbatches_start(void *context, loom_step *step) {
    (void)context;
    loom_batches *batches = step->batches;
    if (step->mode != LOOM_TRAINING)
        return LOOM_OK;
    if (batches->stop_when_size_changes && batches->last_microbatches > 0 &&
        batches->last_microbatches != step->num_microbatches)
        step->stop = true;
    batches->last_microbatches = step->num_microbatches;
    return LOOM_OK;
}

static loom_status register_sampler(loom_fabric *fabric) {
    loom_callback callback = {.event = {[LOOM_EVENT_STEP_START] = sampler_step_start,
                                  [LOOM_EVENT_MICROBATCHES_START] = sampler_microbatches_start}};
    return loom_callbacks_add(fabric->callbacks, &callback);
}

/* What comes before the ranks meet in materialize. */
static loom_status configure(loom_fabric *fabric, const loom_module *module) {
    const loom_precision_plugin *precision = fabric->precision_plugin;
    if (!module->config)
        return LOOM_OK;
    loom_model_config *config = module->config(module->context);
    int64_t experts = fabric->config.expert_model_parallel_size;
    if (experts > 1 && config->moe.num_moe_experts == 0)
        return loom_fail(LOOM_ERR_CONFIG,
            "strategy.expert_model_parallel_size: found %lld, expected 1 for a model without experts "
            "(model.num_moe_experts)",
            (long long)experts);
    if (precision->convert_config)
        LOOM_TRY(precision->convert_config(precision->context, config, &fabric->config.ddp_config));
    return loom_model_config_check(config);
}

/* Of dense parameters over the tensor ranks, or of expert ones over theirs. */
static loom_status check_owners_of(const loom_parallel *parallel, bool experts, int64_t *owned) {
    loom_comm *ranks = parallel->fabric->groups[experts ? LOOM_GROUP_ETP : LOOM_GROUP_TP];
    int64_t count = parallel->parameter_count;
    for (int64_t i = 0; i < count; i++)
        owned[i] = parallel->parameters[i]->owned;
    LOOM_TRY(loom_all_reduce(ranks, owned, owned, count, LOOM_I64, LOOM_SUM));
    for (int64_t i = 0; i < count; i++) {
        const loom_parameter *parameter = parallel->parameters[i];
        bool copy = parameter->shared_ends && parallel->stage > 0; /* the first stage counts it */
        if (parameter->expert_parallel == experts && owned[i] == 0 && !copy && loom_parameter_count(parameter) > 0)
            return loom_fail(LOOM_ERR_ARGUMENT,
                "parameter %s is owned by no tensor rank (field owned): it would not count in the norm",
                parameter->name);
    }
    return LOOM_OK;
}

/* A parameter that no tensor rank counts would silently be missing from the norm. */
static loom_status check_owners(const loom_parallel *parallel) {
    int64_t count = parallel->parameter_count, *owned = malloc((size_t)(count + 1) * sizeof *owned);
    if (!owned)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld parameters", (long long)count);
    loom_status status = check_owners_of(parallel, false, owned);
    if (!status)
        status = check_owners_of(parallel, true, owned);
    free(owned);
    return status;
}

/* Without a gradient buffer: parameters get memory for 16 bits, and give that for fp32 back. */
static loom_status narrow_parameters(loom_parallel *parallel) {
    const loom_fabric *fabric = parallel->fabric;
    loom_dtype dtype = fabric->precision_plugin->params_dtype;
    int64_t elements = 0;
    if (dtype == LOOM_F32)
        return LOOM_OK;
    for (int64_t i = 0; i < parallel->parameter_count; i++)
        elements += loom_parameter_count(parallel->parameters[i]);
    parallel->narrow_values = malloc((size_t)(elements + 1) * sizeof *parallel->narrow_values);
    if (!parallel->narrow_values)
        return loom_fail(
            LOOM_ERR_MEMORY, "out of memory for %lld weights in %s", (long long)elements, loom_dtype_name(dtype));
    uint16_t *at = parallel->narrow_values;
    for (int64_t i = 0; i < parallel->parameter_count; i++) {
        loom_parameter *parameter = parallel->parameters[i];
        if (parameter->dtype == LOOM_F32)
            loom__parameter_narrow(parameter, dtype, at);
        at += loom_parameter_count(parameter);
    }
    return LOOM_OK;
}

/* Around the parameters that the module has made. */
static loom_status wrap(loom_parallel *parallel) {
    const loom_precision_plugin *precision = parallel->fabric->precision_plugin;
    const loom_module *module = parallel->module;
    LOOM_TRY(module->parameters(module->context, &parallel->parameters, &parallel->parameter_count));
    if (precision->convert_module)
        LOOM_TRY(precision->convert_module(precision->context, parallel->module));
    if (!parallel->inference) {
        LOOM_TRY(wrap_ddp(parallel));
        LOOM_TRY(find_partial(parallel));
    } else {
        LOOM_TRY(narrow_parameters(parallel));
    }
    return register_sampler(parallel->fabric);
}

static loom_status setup(loom_parallel *parallel) {
    loom_fabric *fabric = parallel->fabric;
    loom_module *module = parallel->module;
    LOOM_TRY(loom_agree(loom_rank_world(fabric->rank), configure(fabric, module)));
    loom_stage *chunks = NULL;
    LOOM_TRY(loom_agree(loom_rank_world(fabric->rank), loom__parallel_cut(parallel, &chunks)));
    loom_module_environment environment = {
        .rank = fabric->rank,
        .tensor_group = fabric->groups[LOOM_GROUP_TP],
        .expert_group = fabric->groups[LOOM_GROUP_EP],
        .expert_tensor_group = fabric->groups[LOOM_GROUP_ETP],
        .experts_group = fabric->groups[LOOM_GROUP_ETP_EP],
        .balance_group = fabric->groups[LOOM_GROUP_TP_CP],
        .step_group = fabric->groups[LOOM_GROUP_TP_DP_CP],
        .sequence_parallel = fabric->config.sequence_parallel,
        .seed = fabric->seed,
        .perform_initialization = fabric->perform_initialization,
        .stage = parallel->stage,
        .stages = parallel->stages,
        .chunk_count = parallel->chunk_count,
        .chunks = chunks,
        .pipeline_group = fabric->groups[LOOM_GROUP_PP],
        .context_group = fabric->groups[LOOM_GROUP_CP],
    };
    loom_status status = module->materialize(module->context, &environment);
    free(chunks);
    if (!status)
        status = wrap(parallel);
    /* All ranks or none: a rank that cannot read its weights must not leave the others waiting in the first step. */
    LOOM_TRY(loom_agree(loom_rank_world(fabric->rank), status));
    LOOM_TRY(check_owners(parallel));
    return log_parameter_count(parallel);
}

static loom_status setup_module(loom_fabric *fabric, loom_module *module, bool inference, loom_parallel **out) {
    if (!fabric->launched) {
        destroy_module(module);
        return loom_fail(LOOM_ERR_STATE, "setup_module: the fabric has not been launched");
    }
    loom_parallel *parallel = calloc(1, sizeof *parallel);
    if (!parallel) {
        destroy_module(module);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a parallel module");
    }
    parallel->fabric = fabric;
    parallel->module = module;
    parallel->inference = inference;
    parallel->is_gpt = loom__module_is_gpt(module);
    parallel->reduction = *loom_loss_reduction_masked_token();
    parallel->token_factor = parallel->loss_scale = 1;
    fabric->modules++;
    loom_status status = setup(parallel);
    if (status) {
        loom_parallel_destroy(parallel);
        return status;
    }
    *out = parallel;
    return LOOM_OK;
}

loom_status loom_fabric_setup_module(loom_fabric *fabric, loom_module *module, loom_parallel **parallel) {
    return setup_module(fabric, module, false, parallel);
}

loom_status loom_fabric_setup_module_for_inference(loom_fabric *fabric, loom_module *module, loom_parallel **parallel) {
    return setup_module(fabric, module, true, parallel);
}

/* The optimizer as a callback: when the loss has been reduced it learns how many of the expected tokens counted. */
static loom_status optimizer_reduced(void *context, loom_step *step) {
    const loom_parallel *parallel = context;
    return step->mode == LOOM_TRAINING ? loom__optimizer_set_token_factor(parallel->optimizer, parallel->token_factor)
                                       : LOOM_OK;
}

static loom_callback optimizer_callback(loom_parallel *parallel) {
    return (loom_callback){.context = parallel, .event = {[LOOM_EVENT_REDUCE_MICROBATCHES_END] = optimizer_reduced}};
}

static void unregister_optimizer(loom_parallel *parallel) {
    loom_callback callback = optimizer_callback(parallel);
    loom_callbacks_remove(parallel->fabric->callbacks, &callback);
}

void loom_parallel_destroy(loom_parallel *parallel) {
    if (!parallel)
        return;
    unregister_optimizer(parallel);
    loom__optimizer_destroy(parallel->optimizer);
    loom__trace_free(parallel);
    loom__router_collector_destroy(parallel->router_collector);
    loom__pipeline_destroy(parallel->pipeline);
    loom_schedule_list_free(&parallel->training.list);
    loom_schedule_list_free(&parallel->evaluation.list);
    loom__ddp_destroy(parallel->ddp);
    destroy_module(parallel->module);
    free(parallel->partial);
    free(parallel->partial_buffer);
    free(parallel->narrow_values);
    parallel->fabric->modules--;
    free(parallel);
}

loom_status loom_fabric_module_to_device(loom_fabric *fabric, loom_parallel *parallel) {
    (void)fabric;
    (void)parallel;
    return LOOM_OK;
}

void loom_parallel_set_loss_reduction(loom_parallel *parallel, const loom_loss_reduction *reduction) {
    parallel->reduction = *reduction;
}

const loom_model_config *loom_parallel_model_config(const loom_parallel *parallel) {
    return parallel->module->config ? parallel->module->config(parallel->module->context) : NULL;
}

loom_dtype loom_parallel_dtype(const loom_parallel *parallel) {
    return parallel->fabric->precision_plugin->params_dtype;
}

loom_status loom_parallel_parameters(loom_parallel *parallel, loom_parameter *const **parameters, int64_t *count) {
    LOOM_TRY(loom__ddp_wait_parameters(parallel->ddp));
    *parameters = parallel->parameters;
    *count = parallel->parameter_count;
    return LOOM_OK;
}

loom_status loom_parallel_gather_gradients(loom_parallel *parallel) {
    LOOM_TRY(loom__parallel_check_gradients(parallel, "gather_gradients"));
    return loom__ddp_gather_gradients(parallel->ddp);
}

loom_status loom_fabric_setup_optimizer(loom_fabric *fabric, loom_parallel *parallel, loom_optimizer *optimizer) {
    if (parallel->optimizer == optimizer)
        return LOOM_OK;
    LOOM_TRY(loom__parallel_check_gradients(parallel, "setup_optimizer"));
    if (parallel->optimizer)
        return loom_fail(LOOM_ERR_STATE, "setup_optimizer: this module has another optimizer already");
    const loom_precision_plugin *precision = fabric->precision_plugin;
    if (precision->setup_optimizer)
        LOOM_TRY(precision->setup_optimizer(precision->context, optimizer));
    loom_callback callback = optimizer_callback(parallel);
    LOOM_TRY(loom_callbacks_add(fabric->callbacks, &callback));
    parallel->optimizer = optimizer;
    return LOOM_OK;
}

/* Over the tensor ranks each canonical element counts once: modules say how many of a parameter's elements this rank
 * owns. */
static int64_t owned_elements(const loom_parameter *parameter, void *context) {
    (void)context;
    return parameter->owned;
}

/* The ranks among which expert parameters are counted, NULL where none has any: a stage of dense layers alone goes
 * along with those that have. Collective over them. */
static loom_status find_expert_ranks(const loom_parallel *parallel, loom_comm *ranks, loom_comm **found) {
    int64_t experts = loom__ddp_view_of(parallel->ddp)->has_experts;
    LOOM_TRY(loom_all_reduce(ranks, &experts, &experts, 1, LOOM_I64, LOOM_MAX));
    *found = experts ? ranks : NULL;
    return LOOM_OK;
}

loom_status loom_fabric_setup_megatron_optimizer(loom_fabric *fabric, loom_parallel *parallel,
    const loom_optimizer_config *config, const loom_optimizer_setup *setup, loom_optimizer **optimizer) {
    LOOM_TRY(loom__parallel_check_gradients(parallel, "setup_megatron_optimizer"));
    if (parallel->optimizer)
        return loom_fail(LOOM_ERR_STATE, "setup_megatron_optimizer: this module has an optimizer already");
    loom_optimizer_config converted = *config;
    const loom_precision_plugin *precision = fabric->precision_plugin;
    if (precision->convert_optimizer_config)
        LOOM_TRY(precision->convert_optimizer_config(precision->context, &converted));
    LOOM_TRY(loom_optimizer_config_check(&converted));
    loom_lr_config schedule = setup ? setup->schedule : loom_lr_config_default();
    if (!setup)
        schedule.schedule = "megatron-constant";
    LOOM_TRY(loom_lr_config_check(&schedule));
    bool sharded = loom__ddp_view_of(parallel->ddp)->sharded;
    loom__optimizer_options options = {
        .steps = setup ? setup->steps : 1,
        .model_parallel = fabric->groups[sharded ? LOOM_GROUP_INTRA_DIST_OPT : LOOM_GROUP_TP_PP],
        .counts_replicated = loom_comm_rank(fabric->groups[LOOM_GROUP_TP]) == 0,
        .counted_elements = owned_elements,
    };
    LOOM_TRY(find_expert_ranks(parallel, fabric->groups[sharded ? LOOM_GROUP_INTRA_DIST_OPT : LOOM_GROUP_ETP_EP_PP],
        &options.expert_model_parallel));
    if (setup)
        options.conditions = setup->conditions;
    loom_optimizer *made = NULL;
    loom_status status = loom__optimizer_create(fabric->rank, &converted, &schedule, parallel->ddp, &options, &made);
    if (!status)
        status = loom_fabric_setup_optimizer(fabric, parallel, made);
    status = loom_agree(loom_rank_world(fabric->rank), status);
    if (status) {
        unregister_optimizer(parallel);
        parallel->optimizer = NULL;
        loom__optimizer_destroy(made);
        return status;
    }
    loom__fabric_expect_save(fabric, parallel, made);
    *optimizer = made;
    return LOOM_OK;
}
