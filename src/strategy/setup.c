/* Setting modules and optimizers up: the one place that knows in which order configuration, precision, weights,
 * gradient buffers and callbacks are put together. */
#include "model/gpt.h"
#include "optim/optim.h"
#include "strategy/strategy.h"
#include <stdlib.h>

loom_status loom_gpt_create(loom_fabric *fabric, const loom_model_config *config, loom_module **module) {
    (void)fabric;
    return loom__gpt_create(config, NULL, module);
}

loom_status loom_hf_read_config(const char *directory, loom_model_config *config) {
    return loom__hf_read_config(directory, config);
}

loom_status loom_gpt_create_from_hf(
    loom_fabric *fabric, const char *directory, const loom_model_config *config, loom_module **module) {
    (void)fabric;
    return loom__gpt_create(config, directory, module);
}

static void destroy_module(loom_module *module) {
    if (module && module->destroy)
        module->destroy(module->context);
}

static loom_status find_partial(loom_parallel *parallel) {
    parallel->partial = calloc((size_t)parallel->parameter_count + 1, sizeof(loom_parameter *));
    if (!parallel->partial)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the list of partial gradients");
    for (int64_t i = 0; i < parallel->parameter_count; i++) {
        loom_parameter *parameter = parallel->parameters[i];
        if (!parameter->sequence_partial)
            continue;
        parallel->partial[parallel->partial_count++] = parameter;
        parallel->partial_elements += parameter->shape[0] * (parameter->dims == 2 ? parameter->shape[1] : 1);
    }
    parallel->partial_buffer = malloc((size_t)(parallel->partial_elements + 1) * sizeof(float));
    return parallel->partial_buffer ? LOOM_OK
                                    : loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld partial gradients",
                                          (long long)parallel->partial_elements);
}

static loom_status wrap_ddp(loom_parallel *parallel) {
    const loom_ddp_config *config = &parallel->fabric->config.ddp_config;
    loom__ddp_options options = loom__ddp_options_default();
    options.overlap_grad_reduce = config->overlap_grad_reduce;
    options.bucket_size = config->bucket_size;
    options.average_in_collective = config->average_in_collective;
    options.check_for_nan_in_grad = config->check_for_nan_in_grad;
    return loom__ddp_create(parallel->fabric->rank, &options, parallel->parameters, parallel->parameter_count,
        parallel->fabric->groups[LOOM_GROUP_DP_CP], &parallel->ddp);
}

static loom_status log_parameter_count(const loom_parallel *parallel) {
    const loom_fabric *fabric = parallel->fabric;
    int64_t local = 0, whole = 0;
    for (int64_t i = 0; i < parallel->parameter_count; i++) {
        const loom_parameter *parameter = parallel->parameters[i];
        local += parameter->shape[0] * (parameter->dims == 2 ? parameter->shape[1] : 1);
        whole += parameter->owned;
    }
    LOOM_TRY(loom_all_reduce(fabric->groups[LOOM_GROUP_TP_PP], &whole, &whole, 1, LOOM_I64, LOOM_SUM));
    if (loom_comm_rank(fabric->groups[LOOM_GROUP_DP]) == 0)
        loom_rank_log(fabric->rank, LOOM_LOG_INFO,
            "rank %d holds %lld parameters of the model's %lld (padding included)", loom_rank_index(fabric->rank),
            (long long)local, (long long)whole);
    return LOOM_OK;
}

/* The sampler as a callback: it knows the sizes of a step, as far as nobody has given others. */
static loom_status sampler_step_start(void *context, loom_step *step) {
    (void)context;
    loom_batches_state state = loom_batches_get_state(step->batches);
    if (!step->micro_batch_size)
        step->micro_batch_size = state.micro_batch_size;
    if (!step->seq_length)
        step->seq_length = state.seq_length;
    if (!step->num_microbatches)
        step->num_microbatches = state.num_microbatches ? state.num_microbatches : 1;
    return LOOM_OK;
}

static loom_status register_sampler(loom_fabric *fabric) {
    loom_callback callback = {.event = {[LOOM_EVENT_STEP_START] = sampler_step_start}};
    return loom_callbacks_add(fabric->callbacks, &callback);
}

/* What comes before the ranks meet in materialize. */
static loom_status configure(loom_fabric *fabric, const loom_module *module) {
    const loom_precision_plugin *precision = fabric->precision_plugin;
    if (!module->config)
        return LOOM_OK;
    loom_model_config *config = module->config(module->context);
    if (precision->convert_config)
        LOOM_TRY(precision->convert_config(precision->context, config, &fabric->config.ddp_config));
    return loom_model_config_check(config);
}

static loom_status setup(loom_parallel *parallel) {
    loom_fabric *fabric = parallel->fabric;
    loom_module *module = parallel->module;
    const loom_precision_plugin *precision = fabric->precision_plugin;
    LOOM_TRY(loom_agree(loom_rank_world(fabric->rank), configure(fabric, module)));
    loom_module_environment environment = {
        .rank = fabric->rank,
        .tensor_group = fabric->groups[LOOM_GROUP_TP],
        .sequence_parallel = fabric->config.sequence_parallel,
        .seed = fabric->seed,
        .perform_initialization = fabric->perform_initialization,
    };
    LOOM_TRY(module->materialize(module->context, &environment));
    LOOM_TRY(module->parameters(module->context, &parallel->parameters, &parallel->parameter_count));
    if (precision->convert_module)
        LOOM_TRY(precision->convert_module(precision->context, module));
    LOOM_TRY(wrap_ddp(parallel));
    LOOM_TRY(find_partial(parallel));
    return register_sampler(fabric);
}

loom_status loom_fabric_setup_module(loom_fabric *fabric, loom_module *module, loom_parallel **out) {
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
    parallel->is_gpt = loom__module_is_gpt(module);
    parallel->reduction = *loom_loss_reduction_masked_token();
    parallel->token_factor = 1;
    fabric->modules++;
    /* All ranks or none: a rank that cannot read its weights must not leave the others waiting in the first step. */
    loom_status status = loom_agree(loom_rank_world(fabric->rank), setup(parallel));
    if (!status)
        status = log_parameter_count(parallel);
    if (status) {
        loom_parallel_destroy(parallel);
        return status;
    }
    *out = parallel;
    return LOOM_OK;
}

void loom_parallel_destroy(loom_parallel *parallel) {
    if (!parallel)
        return;
    loom_optimizer_destroy(parallel->optimizer);
    loom__ddp_destroy(parallel->ddp);
    destroy_module(parallel->module);
    free(parallel->partial);
    free(parallel->partial_buffer);
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

loom_status loom_parallel_parameters(loom_parallel *parallel, loom_parameter *const **parameters, int64_t *count) {
    *parameters = parallel->parameters;
    *count = parallel->parameter_count;
    return LOOM_OK;
}

loom_status loom_fabric_setup_optimizer(loom_fabric *fabric, loom_parallel *parallel, loom_optimizer *optimizer) {
    const loom_precision_plugin *precision = fabric->precision_plugin;
    if (precision->setup_optimizer)
        LOOM_TRY(precision->setup_optimizer(precision->context, optimizer));
    parallel->optimizer = optimizer;
    return LOOM_OK;
}

/* Over the tensor ranks each canonical element counts once: modules say how many of a parameter's elements this rank
 * owns. */
static int64_t owned_elements(const loom_parameter *parameter, void *context) {
    (void)context;
    return parameter->owned;
}

loom_status loom_fabric_setup_megatron_optimizer(loom_fabric *fabric, loom_parallel *parallel,
    const loom_optimizer_config *config, const loom_optimizer_setup *setup, loom_optimizer **optimizer) {
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
    loom__optimizer_options options = {
        .steps = setup ? setup->steps : 1,
        .model_parallel = fabric->groups[LOOM_GROUP_TP_PP],
        .counts_replicated = loom_comm_rank(fabric->groups[LOOM_GROUP_TP]) == 0,
        .counted_elements = owned_elements,
    };
    if (setup)
        options.conditions = setup->conditions;
    loom_optimizer *made;
    LOOM_TRY(loom__optimizer_create(fabric->rank, &converted, &schedule, parallel->ddp, &options, &made));
    loom_status status = loom_fabric_setup_optimizer(fabric, parallel, made);
    if (status) {
        loom_optimizer_destroy(made);
        return status;
    }
    *optimizer = made;
    return LOOM_OK;
}

static loom_status gpt_set(const loom_parallel *parallel, const loom__parameter_set **set) {
    if (!parallel->is_gpt)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "this module was not made by loom_gpt_create: its tensors have no canonical form");
    *set = ((loom__gpt *)parallel->module->context)->set;
    return LOOM_OK;
}

loom_status loom_gpt_describe_hf(loom_parallel *parallel, loom_safetensors_writer *writer) {
    const loom__parameter_set *set = NULL;
    LOOM_TRY(gpt_set(parallel, &set));
    return loom__hf_describe(set, writer);
}

loom_status loom_gpt_write_hf(loom_parallel *parallel, bool gradients, loom_safetensors_writer *writer) {
    const loom__parameter_set *set = NULL;
    LOOM_TRY(gpt_set(parallel, &set));
    return loom__hf_write(set, gradients ? LOOM__PARAMETER_GRAD : LOOM__PARAMETER_DATA,
        parallel->fabric->groups[LOOM_GROUP_TP], (float)(gradients ? parallel->token_factor : 1), writer);
}

loom_status loom_gpt_visit(loom_parallel *parallel, bool gradients,
    loom_status (*body)(void *context, const char *name, int dims, const int64_t *shape, const float *values),
    void *context) {
    const loom__parameter_set *set = NULL;
    LOOM_TRY(gpt_set(parallel, &set));
    for (int64_t i = 0; i < set->count; i++) {
        const loom__parameter_descriptor *descriptor = &set->spec->parameters[i];
        int64_t count = descriptor->shape[0] * (descriptor->dims == 2 ? descriptor->shape[1] : 1);
        float *values = malloc((size_t)(count + 1) * sizeof *values);
        loom_status status =
            values ? loom__parameter_gather(set, i, gradients ? LOOM__PARAMETER_GRAD : LOOM__PARAMETER_DATA,
                         parallel->fabric->groups[LOOM_GROUP_TP], values)
                   : loom_fail(LOOM_ERR_MEMORY, "out of memory for %s", descriptor->name);
        for (int64_t e = 0; !status && gradients && e < count; e++)
            values[e] *= (float)parallel->token_factor;
        if (!status)
            status = body(context, descriptor->name, descriptor->dims, descriptor->shape, values);
        free(values);
        LOOM_TRY(status);
    }
    return LOOM_OK;
}
