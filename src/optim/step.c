/* The step. Every rank takes the same decision from the same numbers: update with one scale (token factor times clip
 * factor over loss scale), skip together, or fail together and leave everything as it was. Invariant: nothing of
 * weights, state or counters changes before that decision. */
#include "optim/optimizer.h"
#include "runtime/spans.h"
#include <math.h>
#include <stdio.h>

enum { NOTE = 1024 };

/* Everybody gets the text of the last member that has one: a backward begins on the last stage. */
static loom_status share_note(loom_comm *group, char note[NOTE]) {
    int64_t place = note[0] ? loom_comm_rank(group) : -1;
    LOOM_TRY(loom_all_reduce(group, &place, &place, 1, LOOM_I64, LOOM_MAX));
    return place < 0 ? LOOM_OK : loom_broadcast(group, note, NOTE, LOOM_U8, (int)place);
}

/* A status that is bad, whose message is where a gradient of the model is not finite: as its rank noted it before the
 * reduction, which spreads it over the data-parallel group, else behind it. All ranks that hold the model and its
 * copies are here: they have the same numbers. */
static loom_status find_nonfinite(loom_optimizer *optimizer, const char *why) {
    const char *own = loom__ddp_nonfinite(optimizer->ddp);
    const loom__ddp_view *view = loom__ddp_view_of(optimizer->ddp);
    char note[NOTE] = "";
    snprintf(note, sizeof note, "%s", own ? own : "");
    if (optimizer->has_scaler) {
        LOOM_TRY(share_note(view->share[LOOM__DDP_DENSE].group, note));
        LOOM_TRY(share_note(optimizer->model_parallel, note));
        if (optimizer->expert_model_parallel) {
            LOOM_TRY(share_note(view->share[LOOM__DDP_EXPERT].group, note));
            LOOM_TRY(share_note(optimizer->expert_model_parallel, note));
        }
    }
    if (note[0])
        return loom_fail(LOOM_ERR_NUMERIC, "%s%s", why, note);
    loom_status status = loom_agree(optimizer->model_parallel, loom__norm_blame(optimizer->rank, view, why));
    if (optimizer->expert_model_parallel)
        status = loom_agree(optimizer->expert_model_parallel, status);
    LOOM_TRY(status);
    return loom_fail(
        LOOM_ERR_INTERNAL, "%sno rank finds the gradient (rank %d)", why, loom_rank_index(optimizer->rank));
}

/* Said once, whichever rank it comes from. */
static loom_status tell_skip(loom_optimizer *optimizer, double scale) {
    loom_status found = find_nonfinite(optimizer, "");
    if (found != LOOM_ERR_NUMERIC && found != LOOM_ERR_ABORTED)
        return found;
    if (loom_rank_index(optimizer->rank) == 0)
        loom_rank_log(optimizer->rank, LOOM_LOG_WARNING,
            "update %lld is skipped, %lld so far: %s; loss scale %.10g, next %.10g",
            (long long)optimizer->steps_done + 1, (long long)optimizer->skipped_steps, loom_error_message(), scale,
            loom__optimizer_loss_scale(optimizer));
    return LOOM_OK;
}

/* The gradients have a NaN or an infinity somewhere. */
static loom_status overflowed(loom_optimizer *optimizer) {
    char why[160];
    long long step = (long long)optimizer->steps_done + 1;
    double scale = loom__optimizer_loss_scale(optimizer);
    if (optimizer->has_scaler && !loom__scaler_update(&optimizer->scaler, true)) {
        optimizer->skipped_steps++;
        return tell_skip(optimizer, scale);
    }
    if (optimizer->has_scaler)
        snprintf(why, sizeof why,
            "step %lld: the gradients overflow although the loss scale is at its floor, %.10g (min_loss_scale): ", step,
            scale);
    else
        snprintf(why, sizeof why, "step %lld: ", step);
    return find_nonfinite(optimizer, why);
}

/* The masters that an update changes, or the parameters themselves where they are fp32. */
static float *weights_of(const loom__ddp_view *view, const loom__ddp_part *at) {
    return view->master ? view->master + at->state : view->data + at->start;
}

static void round_weights(const loom_optimizer *optimizer, const loom__ddp_view *view, const loom__ddp_part *at) {
    const loom_kernels *kernels = loom_rank_kernels(optimizer->rank);
    if (view->master)
        (view->dtype == LOOM_BF16 ? kernels->bf16 : kernels->f16)
            ->narrow(loom_rank_team(optimizer->rank), at->count, view->master + at->state, view->data16 + at->start);
}

void loom_optimizer_reload_model_params(loom_optimizer *optimizer) {
    const loom__ddp_view *view = loom__ddp_view_of(optimizer->ddp);
    const loom_kernels *kernels = loom_rank_kernels(optimizer->rank);
    for (int64_t place = 0; view->master && place < view->place_count; place++) {
        const loom__ddp_part *at = &view->parts[place];
        (view->dtype == LOOM_BF16 ? kernels->bf16 : kernels->f16)
            ->widen(loom_rank_team(optimizer->rank), at->count, view->data16 + at->start, view->master + at->state);
    }
}

static void update_adam(loom_optimizer *optimizer, const loom_optimizer_group *groups, float grad_scale) {
    const loom__ddp_view *view = loom__ddp_view_of(optimizer->ddp);
    const loom_optimizer_config *config = &optimizer->config;
    const struct loom__optimizer_array *arrays = optimizer->state.arrays;
    double step = (double)optimizer->steps_done + 1.0;
    loom_adamw adamw = {
        .beta1 = config->adam_beta1,
        .beta2 = config->adam_beta2,
        .eps = config->adam_eps,
        .bias_correction1 = 1.0 - pow(config->adam_beta1, step),
        .bias_correction2 = 1.0 - pow(config->adam_beta2, step),
        .grad_scale = grad_scale,
        .coupled_decay = !config->decoupled_weight_decay,
        .bf16_m = arrays[0].dtype == LOOM_BF16,
        .bf16_v = arrays[1].dtype == LOOM_BF16,
    };
    for (int64_t place = 0; place < view->place_count; place++) {
        const loom__ddp_part *at = &view->parts[place];
        const loom_optimizer_group *group = &groups[optimizer->groups[place]];
        char *m = (char *)arrays[0].values + (size_t)at->state * loom_dtype_size(arrays[0].dtype);
        char *v = (char *)arrays[1].values + (size_t)at->state * loom_dtype_size(arrays[1].dtype);
        adamw.lr = group->lr;
        adamw.weight_decay = group->weight_decay;
        loom_rank_kernels(optimizer->rank)
            ->adamw(loom_rank_team(optimizer->rank), at->count, &adamw, view->grad + at->start, weights_of(view, at), m,
                v, config->amsgrad ? (float *)arrays[2].values + at->state : NULL);
        round_weights(optimizer, view, at);
    }
}

static void update_sgd(loom_optimizer *optimizer, const loom_optimizer_group *groups, float grad_scale) {
    const loom__ddp_view *view = loom__ddp_view_of(optimizer->ddp);
    float *momentum = optimizer->state.count ? optimizer->state.arrays[0].values : NULL;
    loom_sgd sgd = {.momentum = optimizer->config.sgd_momentum,
        .dampening = optimizer->config.sgd_dampening,
        .first = optimizer->steps_done == 0,
        .grad_scale = grad_scale};
    for (int64_t place = 0; place < view->place_count; place++) {
        const loom__ddp_part *at = &view->parts[place];
        const loom_optimizer_group *group = &groups[optimizer->groups[place]];
        sgd.lr = group->lr;
        sgd.weight_decay = group->weight_decay;
        loom_rank_kernels(optimizer->rank)
            ->sgd(loom_rank_team(optimizer->rank), at->count, &sgd, view->grad + at->start, weights_of(view, at),
                momentum ? momentum + at->state : NULL);
        round_weights(optimizer, view, at);
    }
}

static loom_status update(loom_optimizer *optimizer, const loom_optimizer_group *groups, double norm, double factor) {
    const loom_optimizer_config *config = &optimizer->config;
    double scale = factor * loom__clip_factor(config->clip_grad, norm);
    float grad_scale = (float)(config->maximize ? -scale : scale);
    /* Where no forward came since the last update, its gathers still read what is about to change. */
    LOOM_TRY(loom__ddp_wait_parameters(optimizer->ddp));
    if (optimizer->sgd)
        update_sgd(optimizer, groups, grad_scale);
    else
        update_adam(optimizer, groups, grad_scale);
    LOOM_TRY(loom__ddp_gather(optimizer->ddp));
    optimizer->steps_done++;
    optimizer->schedule_steps++;
    if (optimizer->has_scaler)
        (void)loom__scaler_update(&optimizer->scaler, false);
    if (isinf(loom__optimizer_loss_scale(optimizer)))
        return loom_fail(LOOM_ERR_NUMERIC, "step %lld: the loss scale has grown beyond fp32 (rank %d)",
            (long long)optimizer->steps_done, loom_rank_index(optimizer->rank));
    return LOOM_OK;
}

/* Of dense parameters the ranks of one model are added up, of expert ones all ranks that hold the experts once. */
static loom_status take_norm(const loom_optimizer *optimizer, loom__norm *norm) {
    const loom__ddp_view *view = loom__ddp_view_of(optimizer->ddp);
    *norm = loom__norm_partial(optimizer->rank, view, optimizer->counted, optimizer->norm_type, false);
    LOOM_TRY(loom__norm_gather(optimizer->model_parallel, norm));
    if (!optimizer->expert_model_parallel)
        return LOOM_OK;
    loom__norm experts = loom__norm_partial(optimizer->rank, view, optimizer->counted, optimizer->norm_type, true);
    LOOM_TRY(loom__norm_gather(optimizer->expert_model_parallel, &experts));
    loom__norm_add(norm, &experts);
    return LOOM_OK;
}

static loom_status step_all(loom_optimizer *optimizer, loom_optimizer_outcome *out) {
    loom_optimizer_group groups[LOOM_OPTIMIZER_GROUPS];
    double loss_scale = loom__optimizer_loss_scale(optimizer), factor = optimizer->token_factor / loss_scale;
    LOOM_TRY(loom__optimizer_group_values(optimizer, groups));
    loom__norm norm;
    LOOM_TRY(take_norm(optimizer, &norm));
    bool skipped = norm.sum.nonfinite != 0;
    double value = loom__norm_value(&norm, factor);
    if (skipped)
        LOOM_TRY(overflowed(optimizer));
    else if (!isfinite(value))
        return loom_fail(LOOM_ERR_NUMERIC,
            "step %lld: the norm of the gradients is %g although each is finite (rank %d)",
            (long long)optimizer->steps_done + 1, value, loom_rank_index(optimizer->rank));
    else
        LOOM_TRY(update(optimizer, groups, value, factor));
    optimizer->token_factor = 1.0;
    if (out)
        *out = (loom_optimizer_outcome){.skipped = skipped,
            .grad_norm = value,
            .loss_scale = loss_scale,
            .lr = groups[LOOM__GROUP_DECAYS].lr,
            .step = optimizer->steps_done,
            .skipped_steps = optimizer->skipped_steps,
            .num_zeros_in_grad = optimizer->config.log_num_zeros_in_grad ? norm.sum.zeros : -1};
    return LOOM_OK;
}

loom_status loom_optimizer_step(loom_optimizer *optimizer, loom_optimizer_outcome *out) {
    loom_profile_phase before = loom__profile_phase(optimizer->rank, LOOM_PROFILE_OPTIMIZER);
    loom__span span = {.kind = LOOM_SPAN_OPTIMIZER_STEP, .bucket = -1, .start = loom__span_clock(optimizer->rank)};
    loom_status status = step_all(optimizer, out);
    span.end = loom__span_clock(optimizer->rank);
    if (!status)
        loom__span_add(optimizer->rank, &span);
    loom__profile_phase(optimizer->rank, before);
    return status;
}
