/* Mixed precision: weights and activations in 16 bits, sums, gradients, masters and state of the optimizer in fp32.
 * What is converted where: dtypes into configurations, values of parameters before they are wrapped, losses where the
 * model ends. What the plugin cannot do from outside it says in params_dtype, and the strategy does it as it wraps the
 * module: masters are taken of the fp32 values, then these are rounded. A batch holds integers and the mask of the
 * loss, which stays fp32, so no input is converted. */
#include "strategy/precision.h"
#include "config/precision.h"
#include "optim/optim.h"

static loom_status convert_config(void *context, loom_model_config *model, loom_ddp_config *ddp) {
    const loom__precision *precision = context;
    (void)model; /* has no dtype of its own: activations follow the parameters */
    ddp->grad_reduce_in_fp32 = precision->grad_reduce_in_fp32;
    return LOOM_OK;
}

/* Values that are made in 16 bits are rounded before anything is made of them. */
static loom_status convert_module(void *context, loom_module *module) {
    const loom__precision *precision = context;
    loom_parameter *const *parameters;
    int64_t count;
    if (precision->initial == LOOM_F32)
        return LOOM_OK;
    LOOM_TRY(module->parameters(module->context, &parameters, &count));
    for (int64_t i = 0; i < count; i++) {
        float *values = parameters[i]->dtype == LOOM_F32 ? parameters[i]->data : NULL;
        int64_t elements = values ? loom_parameter_count(parameters[i]) : 0;
        for (int64_t e = 0; e < elements; e++)
            values[e] = precision->initial == LOOM_BF16 ? loom_bf16_to_f32(loom_f32_to_bf16(values[e]))
                                                        : loom_f16_to_f32(loom_f32_to_f16(values[e]));
    }
    return LOOM_OK;
}

static loom_status setup_optimizer(void *context, loom_optimizer *optimizer) {
    const loom__precision *precision = context;
    loom_dtype found = loom__optimizer_dtype(optimizer);
    if (found != precision->plugin.params_dtype)
        return loom_fail(LOOM_ERR_CONFIG,
            "setup_optimizer: the optimizer's parameters are kept in %s, expected %s as precision %s keeps the model's",
            loom_dtype_name(found), loom_dtype_name(precision->plugin.params_dtype), precision->plugin.name);
    return precision->has_scaler ? loom__optimizer_set_scaler(optimizer, &precision->scaler) : LOOM_OK;
}

static loom_status convert_output(void *context, loom_tape *tape, loom_tensor **output) {
    (void)context;
    loom_tensor *wide;
    LOOM_TRY(loom_cast(tape, *output, LOOM_F32, &wide));
    loom_tensor_release(*output);
    *output = wide;
    return LOOM_OK;
}

void loom__precision_make(const loom_precision_config *config, loom__precision *precision) {
    const loom_precision_config preset = loom_precision_config_default();
    if (!config)
        config = &preset;
    loom_dtype dtype = loom__precision_dtype(config);
    *precision = (loom__precision){
        .plugin =
            {
                .name = dtype == LOOM_BF16  ? "bf16-mixed"
                        : dtype == LOOM_F16 ? "16-mixed"
                                            : "32",
                .context = precision,
                .convert_config = convert_config,
                .convert_module = convert_module,
                .setup_optimizer = setup_optimizer,
                .convert_output = convert_output,
                .params_dtype = dtype,
            },
        .initial = loom__dtype_called(config->params_dtype, LOOM_F32),
        .wire = config->pipeline_dtype ? config->pipeline_dtype
                : dtype == LOOM_BF16   ? "bf16"
                                       : "fp32",
        .wire_given = config->pipeline_dtype,
        .grad_reduce_in_fp32 = config->grad_reduce_in_fp32,
        .has_scaler = dtype == LOOM_F16,
        .scaler = loom__scaler_options_default(),
    };
    precision->scaler.dynamic = !(config->loss_scale > 0);
    precision->scaler.initial_scale = precision->scaler.dynamic ? config->initial_loss_scale : config->loss_scale;
    precision->scaler.min_scale = config->min_loss_scale;
    precision->scaler.growth_interval = config->loss_scale_window;
    precision->scaler.hysteresis = config->hysteresis;
}
