/* Making an optimizer: which values each parameter has, what the update keeps, and the schedule they follow. Invariant:
 * the kept arrays have the map of the gradient buffer; a group is told by three bits, and its values are made from the
 * schedule's anew for each step, so that a multiplier cannot be applied twice. */
#include "optim/optimizer.h"
#include "base/faults.h"
#include "ddp/buffer.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool is(const char *text, const char *name) {
    return text && strcmp(text, name) == 0;
}

/* NULL stands for the default. */
static bool is_dtype(const char *name) {
    return !name || is(name, "fp32") || is(name, "bf16");
}

static void check_adam(const loom_optimizer_config *config, loom__faults *faults) {
    /* Written so that a NaN is a fault. */
    if (!(config->adam_beta1 >= 0.0 && config->adam_beta1 < 1.0))
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "optim.adam_beta1: found %g, expected 0 <= beta < 1", config->adam_beta1);
    if (!(config->adam_beta2 >= 0.0 && config->adam_beta2 < 1.0))
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "optim.adam_beta2: found %g, expected 0 <= beta < 1", config->adam_beta2);
    if (!((float)config->adam_eps > 0.0f) || isinf((float)config->adam_eps))
        loom__faults_add(faults, LOOM_ERR_CONFIG, "optim.adam_eps: found %g, expected a number above 0 that fits fp32",
            config->adam_eps);
    if (!is_dtype(config->exp_avg_dtype) || !is_dtype(config->exp_avg_sq_dtype))
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "optim.exp_avg_dtype, optim.exp_avg_sq_dtype: found %s and %s, expected fp32 or bf16",
            config->exp_avg_dtype ? config->exp_avg_dtype : "fp32",
            config->exp_avg_sq_dtype ? config->exp_avg_sq_dtype : "fp32");
}

static void check_sgd(const loom_optimizer_config *config, loom__faults *faults) {
    if (!(config->sgd_momentum >= 0.0 && config->sgd_momentum < 1.0))
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "optim.sgd_momentum: found %g, expected 0 <= momentum < 1", config->sgd_momentum);
    if (!(config->sgd_dampening >= 0.0 && config->sgd_dampening <= 1.0))
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "optim.sgd_dampening: found %g, expected 0 to 1", config->sgd_dampening);
}

static loom_status check_config(const loom_optimizer_config *config) {
    loom__faults faults;
    loom__faults_begin(&faults);
    if (!is(config->optimizer, "adam") && !is(config->optimizer, "sgd"))
        loom__faults_add(&faults, LOOM_ERR_CONFIG, "optim.optimizer: found %s, expected adam or sgd",
            config->optimizer ? config->optimizer : "(none)");
    if (!(config->lr > 0.0))
        loom__faults_add(&faults, LOOM_ERR_CONFIG, "optim.lr: found %g, expected a rate above 0", config->lr);
    if (is(config->optimizer, "sgd"))
        check_sgd(config, &faults);
    else
        check_adam(config, &faults);
    if (!(config->clip_grad >= 0.0) || isinf(config->clip_grad))
        loom__faults_add(&faults, LOOM_ERR_CONFIG,
            "optim.clip_grad: found %g, expected a number from 0 (0 = no clipping)", config->clip_grad);
    const char *norm = config->clip_norm_type;
    if (norm && !is(norm, "1") && !is(norm, "2") && !is(norm, "inf"))
        loom__faults_add(&faults, LOOM_ERR_CONFIG, "optim.clip_norm_type: found %s, expected 2, 1 or inf", norm);
    return loom__faults_end(&faults);
}

/* The group of one parameter, and what it counts in the norm. */
static loom_status place_parameter(
    loom_optimizer *optimizer, const loom__optimizer_options *options, const loom__ddp_view *view, int64_t place) {
    const loom_optimizer_conditions *conditions = &options->conditions;
    const loom_parameter *parameter = view->parameters[place];
    bool still = conditions->no_weight_decay_cond ? conditions->no_weight_decay_cond(parameter, conditions->context)
                                                  : !parameter->decay;
    bool scaled = conditions->scale_lr_cond && conditions->scale_lr_cond(parameter, conditions->context);
    bool decoupled = parameter->embedding_or_output && optimizer->config.decoupled_lr > 0.0;
    optimizer->groups[place] = (uint8_t)((still ? 0 : LOOM__GROUP_DECAYS) | (scaled ? LOOM__GROUP_SCALED : 0) |
                                         (decoupled ? LOOM__GROUP_DECOUPLED : 0));
    int64_t all = view->places[place].count;
    int64_t counted = parameter->tensor_parallel || options->counts_replicated ? all : 0;
    if (options->counted_elements)
        counted = options->counted_elements(parameter, options->counted_context);
    if (counted < 0 || counted > all)
        return loom_fail(LOOM_ERR_ARGUMENT, "norm: %s counts %lld elements on rank %d, expected 0 to %lld",
            parameter->name, (long long)counted, loom_rank_index(optimizer->rank), (long long)all);
    optimizer->counted[place] = counted;
    return LOOM_OK;
}

static loom_status add_array(loom_optimizer *optimizer, const char *name, const char *dtype) {
    int64_t elements = loom__ddp_view_of(optimizer->ddp)->state_elements;
    struct loom__optimizer_array array = {name, is(dtype, "bf16") ? LOOM_BF16 : LOOM_F32, NULL};
    LOOM_TRY(loom__buffer_create(optimizer->rank, array.dtype, elements, name, &array.values));
    optimizer->state.arrays[optimizer->state.count++] = array;
    return LOOM_OK;
}

static loom_status add_state(loom_optimizer *optimizer, const loom_optimizer_config *config) {
    if (optimizer->sgd)
        return config->sgd_momentum > 0.0 ? add_array(optimizer, "momentum_buffer", NULL) : LOOM_OK;
    LOOM_TRY(add_array(optimizer, "exp_avg", config->exp_avg_dtype));
    LOOM_TRY(add_array(optimizer, "exp_avg_sq", config->exp_avg_sq_dtype));
    return config->amsgrad ? add_array(optimizer, "max_exp_avg_sq", NULL) : LOOM_OK;
}

loom_status loom__optimizer_create(loom_rank *rank, const loom_optimizer_config *config, const loom_lr_config *lr,
    loom__ddp *ddp, const loom__optimizer_options *options, loom_optimizer **out) {
    loom__schedule schedule;
    loom__schedule_group base;
    const double mult = options->conditions.lr_mult;
    LOOM_TRY(check_config(config));
    LOOM_TRY(loom__schedule_make(config, lr, options->steps, &schedule, &base));
    loom__schedule_group decoupled = loom__schedule_decoupled(config, &base);
    LOOM_TRY(loom__schedule_check(&schedule, &decoupled));
    if (options->conditions.scale_lr_cond && (!(mult >= 0.0) || isinf(mult)))
        return loom_fail(LOOM_ERR_ARGUMENT, "lr_mult: found %g, expected a number from 0", mult);
    const loom__ddp_view *view = loom__ddp_view_of(ddp);
    loom_optimizer *optimizer = calloc(1, sizeof *optimizer);
    if (!optimizer)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for an optimizer");
    *optimizer = (loom_optimizer){.rank = rank,
        .ddp = ddp,
        .model_parallel = options->model_parallel,
        .expert_model_parallel = options->expert_model_parallel,
        .config = *config,
        .sgd = is(config->optimizer, "sgd"),
        .override_schedule = lr->override_opt_param_scheduler,
        .use_saved_schedule = lr->use_checkpoint_opt_param_scheduler,
        .norm_type = is(config->clip_norm_type, "1")     ? LOOM__NORM_1
                     : is(config->clip_norm_type, "inf") ? LOOM__NORM_INF
                                                         : LOOM__NORM_2,
        .schedule = schedule,
        .base = base,
        .decoupled = decoupled,
        .lr_mult = mult,
        .token_factor = 1.0};
    size_t entries = (size_t)view->place_count + 1; /* never 0 bytes */
    optimizer->groups = calloc(entries, sizeof *optimizer->groups);
    optimizer->counted = calloc(entries, sizeof *optimizer->counted);
    loom_status status = LOOM_OK;
    if (!optimizer->groups || !optimizer->counted)
        status = loom_fail(
            LOOM_ERR_MEMORY, "out of memory for an optimizer of %lld parameters", (long long)view->place_count);
    for (int64_t place = 0; place < view->place_count && !status; place++)
        status = place_parameter(optimizer, options, view, place);
    if (!status)
        status = add_state(optimizer, config);
    /* The caller may free them. */
    optimizer->config.optimizer = optimizer->config.exp_avg_dtype = optimizer->config.exp_avg_sq_dtype =
        optimizer->config.clip_norm_type = NULL;
    if (status) {
        loom__optimizer_destroy(optimizer);
        return status;
    }
    *out = optimizer;
    return LOOM_OK;
}

void loom__optimizer_destroy(loom_optimizer *optimizer) {
    if (!optimizer)
        return;
    free(optimizer->groups);
    free(optimizer->counted);
    for (int i = 0; i < optimizer->state.count; i++)
        loom__buffer_destroy(optimizer->rank, optimizer->state.arrays[i].values);
    free(optimizer);
}

loom_status loom__optimizer_set_token_factor(loom_optimizer *optimizer, double factor) {
    if (!(factor > 0.0) || isinf(factor))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "token factor: found %g, expected a finite number above 0 (expected/valid tokens)", factor);
    optimizer->token_factor = factor;
    return LOOM_OK;
}

loom_status loom__optimizer_set_scaler(loom_optimizer *optimizer, const loom__scaler_options *options) {
    LOOM_TRY(loom__scaler_make(options, &optimizer->scaler));
    optimizer->has_scaler = true;
    return LOOM_OK;
}

loom_dtype loom__optimizer_dtype(const loom_optimizer *optimizer) {
    return loom__ddp_view_of(optimizer->ddp)->dtype;
}

double loom__optimizer_loss_scale(const loom_optimizer *optimizer) {
    return optimizer->has_scaler ? (double)optimizer->scaler.scale : 1.0;
}

const loom__optimizer_state *loom__optimizer_state_of(const loom_optimizer *optimizer) {
    return &optimizer->state;
}

const loom_optimizer_config *loom__optimizer_config_of(const loom_optimizer *optimizer) {
    return &optimizer->config;
}

loom__optimizer_progress loom__optimizer_progress_of(const loom_optimizer *optimizer) {
    return (loom__optimizer_progress){.steps = optimizer->steps_done,
        .skipped_steps = optimizer->skipped_steps,
        .has_scaler = optimizer->has_scaler,
        .dynamic = optimizer->has_scaler && optimizer->scaler.options.dynamic,
        .scale = (double)optimizer->scaler.scale,
        .growth_tracker = optimizer->scaler.growth_tracker,
        .hysteresis_tracker = optimizer->scaler.hysteresis_tracker};
}

void loom__optimizer_set_progress(loom_optimizer *optimizer, const loom__optimizer_progress *progress) {
    optimizer->steps_done = optimizer->schedule_steps = progress->steps;
    optimizer->skipped_steps = progress->skipped_steps;
    if (!optimizer->has_scaler || !optimizer->scaler.options.dynamic || !progress->dynamic)
        return;
    optimizer->scaler.scale = (float)progress->scale;
    optimizer->scaler.growth_tracker = progress->growth_tracker;
    optimizer->scaler.hysteresis_tracker = progress->hysteresis_tracker;
}

size_t loom_optimizer_state_bytes(const loom_optimizer *optimizer) {
    size_t bytes = 0, elements = (size_t)loom__ddp_view_of(optimizer->ddp)->state_elements;
    if (loom__ddp_view_of(optimizer->ddp)->master)
        bytes += elements * sizeof(float);
    for (int i = 0; i < optimizer->state.count; i++)
        bytes += elements * loom_dtype_size(optimizer->state.arrays[i].dtype);
    return bytes;
}

loom_status loom__optimizer_group_values(
    const loom_optimizer *optimizer, loom_optimizer_group groups[LOOM_OPTIMIZER_GROUPS]) {
    for (int i = 0; i < LOOM_OPTIMIZER_GROUPS; i++) {
        bool decoupled = i & LOOM__GROUP_DECOUPLED;
        const loom__schedule_group *values = decoupled ? &optimizer->decoupled : &optimizer->base;
        loom_optimizer_group group = {.decoupled = decoupled,
            .lr_mult = i & LOOM__GROUP_SCALED ? optimizer->lr_mult : 1.0,
            .wd_mult = i & LOOM__GROUP_DECAYS ? 1.0 : 0.0};
        LOOM_TRY(loom__schedule_lr(&optimizer->schedule, values, optimizer->schedule_steps, &group.pre_mult_lr));
        LOOM_TRY(loom__schedule_wd(&optimizer->schedule, values, optimizer->schedule_steps, &group.pre_mult_wd));
        group.lr = group.pre_mult_lr * group.lr_mult;
        group.weight_decay = group.pre_mult_wd * group.wd_mult;
        groups[i] = group;
    }
    return LOOM_OK;
}

static loom_status find_groups(const loom_optimizer *optimizer, const bool kinds[2],
    loom_optimizer_group groups[LOOM_OPTIMIZER_GROUPS], int64_t *count) {
    loom_optimizer_group all[LOOM_OPTIMIZER_GROUPS];
    const loom__ddp_view *view = loom__ddp_view_of(optimizer->ddp);
    int64_t found = 0;
    LOOM_TRY(loom__optimizer_group_values(optimizer, all));
    for (int64_t place = 0; place < view->place_count; place++)
        all[optimizer->groups[place]].parameters += kinds[view->parameters[place]->expert_parallel];
    for (int i = 0; i < LOOM_OPTIMIZER_GROUPS; i++)
        if (all[i].parameters > 0)
            groups[found++] = all[i];
    *count = found;
    return LOOM_OK;
}

loom_status loom_optimizer_groups(
    const loom_optimizer *optimizer, loom_optimizer_group groups[LOOM_OPTIMIZER_GROUPS], int64_t *count) {
    return find_groups(optimizer, (const bool[2]){true, true}, groups, count);
}

loom_status loom__optimizer_groups_of(
    const loom_optimizer *optimizer, bool experts, loom_optimizer_group groups[LOOM_OPTIMIZER_GROUPS], int64_t *count) {
    return find_groups(optimizer, (const bool[2]){!experts, experts}, groups, count);
}

loom_lr_state loom_optimizer_lr_state(const loom_optimizer *optimizer) {
    return loom__schedule_save(&optimizer->schedule, &optimizer->base, optimizer->schedule_steps);
}

loom_status loom_optimizer_load_lr_state(loom_optimizer *optimizer, const loom_lr_state *state) {
    LOOM_TRY(loom__schedule_load(state, optimizer->override_schedule, optimizer->use_saved_schedule,
        &optimizer->schedule, &optimizer->base, &optimizer->schedule_steps));
    optimizer->decoupled = loom__schedule_decoupled(&optimizer->config, &optimizer->base);
    return LOOM_OK;
}
