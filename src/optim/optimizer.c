/* The step of AdamW over the buffers of a ddp. Every rank takes the same decision from the same global norm: update
 * with one scale (token factor times clip factor), or fail together and leave everything as it was. Invariant: moments
 * have the map of the gradient buffer, and all values of a parameter's group are products made once, at creation. */
#include "base/faults.h"
#include "ddp/buffer.h"
#include "optim/norm.h"
#include "optim/optim.h"
#include "optim/schedule.h"
#include "runtime/rank.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct loom_optimizer {
    loom_rank *rank;
    loom__ddp *ddp;
    loom_comm *model_parallel;
    loom_optimizer_config config;
    loom__schedule schedule;
    loom__schedule_group base;
    loom__schedule_group *groups; /* [places] */
    int64_t *counted;             /* [places] leading elements that this rank counts in the norm */
    float *m, *v;
    double token_factor;
    int64_t steps_done;
};

static loom_status check_config(const loom_optimizer_config *config) {
    const char *name = config->optimizer ? config->optimizer : "(none)";
    if (strcmp(name, "sgd") == 0)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: optim.optimizer=sgd (expected adam)");
    loom__faults faults;
    loom__faults_begin(&faults);
    if (strcmp(name, "adam") != 0)
        loom__faults_add(&faults, LOOM_ERR_CONFIG, "optim.optimizer: found %s, expected adam", name);
    if (config->decoupled_lr > 0.0 || config->decoupled_min_lr > 0.0)
        loom__faults_add(&faults, LOOM_ERR_UNSUPPORTED,
            "not supported yet: optim.decoupled_lr=%g, optim.decoupled_min_lr=%g (a rate of its own for embeddings)",
            config->decoupled_lr, config->decoupled_min_lr);
    if (config->log_num_zeros_in_grad)
        loom__faults_add(&faults, LOOM_ERR_UNSUPPORTED, "not supported yet: optim.log_num_zeros_in_grad=true");
    /* Written so that a NaN is a fault. */
    if (!(config->lr > 0.0))
        loom__faults_add(&faults, LOOM_ERR_CONFIG, "optim.lr: found %g, expected a rate above 0", config->lr);
    if (!(config->adam_beta1 >= 0.0 && config->adam_beta1 < 1.0))
        loom__faults_add(
            &faults, LOOM_ERR_CONFIG, "optim.adam_beta1: found %g, expected 0 <= beta < 1", config->adam_beta1);
    if (!(config->adam_beta2 >= 0.0 && config->adam_beta2 < 1.0))
        loom__faults_add(
            &faults, LOOM_ERR_CONFIG, "optim.adam_beta2: found %g, expected 0 <= beta < 1", config->adam_beta2);
    if (!((float)config->adam_eps > 0.0f) || isinf((float)config->adam_eps))
        loom__faults_add(&faults, LOOM_ERR_CONFIG, "optim.adam_eps: found %g, expected a number above 0 that fits fp32",
            config->adam_eps);
    if (!(config->clip_grad >= 0.0) || isinf(config->clip_grad))
        loom__faults_add(&faults, LOOM_ERR_CONFIG,
            "optim.clip_grad: found %g, expected a number from 0 (0 = no clipping)", config->clip_grad);
    return loom__faults_end(&faults);
}

/* The values of one parameter, and what it counts in the norm. */
static loom_status place_parameter(
    loom_optimizer *optimizer, const loom__optimizer_options *options, const loom__ddp_view *view, int64_t place) {
    const loom_optimizer_conditions *conditions = &options->conditions;
    const loom_parameter *parameter = view->parameters[place];
    loom__schedule_group *group = &optimizer->groups[place];
    *group = optimizer->base;
    if (conditions->no_weight_decay_cond ? conditions->no_weight_decay_cond(parameter, conditions->context)
                                         : !parameter->decay)
        group->start_wd = group->end_wd = 0.0;
    if (conditions->scale_lr_cond && conditions->scale_lr_cond(parameter, conditions->context)) {
        group->max_lr *= conditions->lr_mult;
        group->min_lr *= conditions->lr_mult;
    }
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

loom_status loom__optimizer_create(loom_rank *rank, const loom_optimizer_config *config, const loom_lr_config *lr,
    loom__ddp *ddp, const loom__optimizer_options *options, loom_optimizer **out) {
    loom__schedule schedule;
    loom__schedule_group base;
    const double mult = options->conditions.lr_mult;
    LOOM_TRY(check_config(config));
    LOOM_TRY(loom__schedule_make(config, lr, options->steps, &schedule, &base));
    if (options->conditions.scale_lr_cond && (!(mult >= 0.0) || isinf(mult)))
        return loom_fail(LOOM_ERR_ARGUMENT, "lr_mult: found %g, expected a number from 0", mult);
    const loom__ddp_view *view = loom__ddp_view_of(ddp);
    loom_optimizer *optimizer = calloc(1, sizeof *optimizer);
    if (!optimizer)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for an optimizer");
    *optimizer = (loom_optimizer){.rank = rank,
        .ddp = ddp,
        .model_parallel = options->model_parallel,
        .config = *config,
        .schedule = schedule,
        .base = base,
        .token_factor = 1.0};
    optimizer->config.optimizer = NULL;
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
        status = loom__buffer_create(rank, view->elements, "the first moments", &optimizer->m);
    if (!status)
        status = loom__buffer_create(rank, view->elements, "the second moments", &optimizer->v);
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
    loom__buffer_destroy(optimizer->m);
    loom__buffer_destroy(optimizer->v);
    free(optimizer);
}

loom_status loom__optimizer_set_token_factor(loom_optimizer *optimizer, double factor) {
    if (!(factor > 0.0) || isinf(factor))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "token factor: found %g, expected a finite number above 0 (expected/valid tokens)", factor);
    optimizer->token_factor = factor;
    return LOOM_OK;
}

float *loom__optimizer_first_moment(loom_optimizer *optimizer) {
    return optimizer->m;
}

float *loom__optimizer_second_moment(loom_optimizer *optimizer) {
    return optimizer->v;
}

/* All members of the model-parallel group are here: they have the same norm. */
static loom_status fail_together(loom_optimizer *optimizer, double norm) {
    long long step = (long long)optimizer->steps_done + 1;
    loom_status status = loom__norm_blame(optimizer->rank, loom__ddp_view_of(optimizer->ddp), step);
    LOOM_TRY(loom_agree(optimizer->model_parallel, status));
    return loom_fail(LOOM_ERR_NUMERIC, "step %lld: the norm of the gradients is %g although each is finite (rank %d)",
        step, norm, loom_rank_index(optimizer->rank));
}

static loom_status update_place(loom_optimizer *optimizer, int64_t place, loom_adamw *adamw) {
    const loom__ddp_view *view = loom__ddp_view_of(optimizer->ddp);
    const loom__ddp_place *at = &view->places[place];
    LOOM_TRY(loom__schedule_lr(&optimizer->schedule, &optimizer->groups[place], optimizer->steps_done, &adamw->lr));
    LOOM_TRY(loom__schedule_wd(
        &optimizer->schedule, &optimizer->groups[place], optimizer->steps_done, &adamw->weight_decay));
    loom_rank_kernels(optimizer->rank)
        ->adamw(loom_rank_team(optimizer->rank), at->count, adamw, view->grad + at->start, view->data + at->start,
            optimizer->m + at->start, optimizer->v + at->start, NULL);
    return LOOM_OK;
}

static loom_status step_all(loom_optimizer *optimizer, loom_optimizer_outcome *out) {
    const loom__ddp_view *view = loom__ddp_view_of(optimizer->ddp);
    const loom_optimizer_config *config = &optimizer->config;
    double norm, lr, factor = optimizer->token_factor, step = (double)optimizer->steps_done + 1.0;
    LOOM_TRY(loom__schedule_lr(&optimizer->schedule, &optimizer->base, optimizer->steps_done, &lr));
    double partial = loom__norm_partial(optimizer->rank, view, optimizer->counted);
    LOOM_TRY(loom__norm_global(optimizer->model_parallel, partial, factor, &norm));
    if (!isfinite(norm))
        return fail_together(optimizer, norm);
    loom_adamw adamw = {
        .beta1 = config->adam_beta1,
        .beta2 = config->adam_beta2,
        .eps = config->adam_eps,
        .bias_correction1 = 1.0 - pow(config->adam_beta1, step),
        .bias_correction2 = 1.0 - pow(config->adam_beta2, step),
        .grad_scale = (float)(factor * loom__clip_factor(config->clip_grad, norm)),
    };
    for (int64_t place = 0; place < view->place_count; place++)
        LOOM_TRY(update_place(optimizer, place, &adamw));
    optimizer->steps_done++;
    optimizer->token_factor = 1.0;
    if (out)
        *out = (loom_optimizer_outcome){.grad_norm = norm, .loss_scale = 1.0, .lr = lr, .step = optimizer->steps_done};
    return LOOM_OK;
}

loom_status loom_optimizer_step(loom_optimizer *optimizer, loom_optimizer_outcome *out) {
    loom_profile_phase before = loom__profile_phase(optimizer->rank, LOOM_PROFILE_OPTIMIZER);
    loom_status status = step_all(optimizer, out);
    loom__profile_phase(optimizer->rank, before);
    return status;
}
