/* A step: all microbatches of one global batch, forward and (in training) backward, the reduction of the loss, and the
 * gradients made final. The loss gradient is seeded with 1 / expected tokens, so that the sum over microbatches and
 * ranks is the mean whenever every token counts; where some do not, the exact factor expected / valid goes to the
 * optimizer, which applies it once. */
#include "optim/optim.h"
#include "runtime/rank.h"
#include "strategy/strategy.h"
#include <megaloom/state.h>
#include <string.h>

static loom_status call(loom_parallel *parallel, loom_event event, loom_step *step) {
    return loom_callbacks_call(parallel->fabric->callbacks, event, step);
}

/* ---- sizes ---- */

static loom_status check_mode(loom_step_mode mode) {
    if (mode < LOOM_TRAINING || mode > LOOM_PREDICT)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "mode of a step: found %d, expected %d to %d", (int)mode, LOOM_TRAINING, LOOM_PREDICT);
    return LOOM_OK;
}

static loom_status check_step(const loom_step *step) {
    LOOM_TRY(check_mode(step->mode));
    const char *missing = step->micro_batch_size < 1   ? "micro_batch_size"
                          : step->seq_length < 1       ? "seq_length"
                          : step->num_microbatches < 1 ? "num_microbatches"
                                                       : NULL;
    return missing ? loom_fail(LOOM_ERR_ARGUMENT, "%s is not given and could not be inferred from the batch", missing)
                   : LOOM_OK;
}

/* ---- the end of a step ---- */

static loom_status sum_partial(loom_parallel *parallel) {
    if (!parallel->partial_count)
        return LOOM_OK;
    float *at = parallel->partial_buffer;
    for (int64_t i = 0; i < parallel->partial_count; i++) {
        const loom_parameter *parameter = parallel->partial[i];
        int64_t count = loom_parameter_count(parameter);
        memcpy(at, parameter->grad, (size_t)count * sizeof *at);
        at += count;
    }
    LOOM_TRY(loom_all_reduce(parallel->fabric->groups[LOOM_GROUP_TP], parallel->partial_buffer,
        parallel->partial_buffer, parallel->partial_elements, LOOM_F32, LOOM_SUM));
    at = parallel->partial_buffer;
    for (int64_t i = 0; i < parallel->partial_count; i++) {
        loom_parameter *parameter = parallel->partial[i];
        int64_t count = loom_parameter_count(parameter);
        memcpy(parameter->grad, at, (size_t)count * sizeof *at);
        at += count;
    }
    return LOOM_OK;
}

/* Copies on the first and the last stage see different gradients of one tensor, and must stay equal. */
static loom_status sum_ends(loom_parallel *parallel) {
    loom_comm *ends = parallel->fabric->groups[LOOM_GROUP_EMBD];
    if (!ends || loom_comm_size(ends) == 1)
        return LOOM_OK;
    for (int64_t i = 0; i < parallel->parameter_count; i++) {
        loom_parameter *parameter = parallel->parameters[i];
        if (parameter->shared_ends)
            LOOM_TRY(loom_all_reduce(
                ends, parameter->grad, parameter->grad, loom_parameter_count(parameter), LOOM_F32, LOOM_SUM));
    }
    return LOOM_OK;
}

loom_status loom__parallel_finish_gradients(loom_parallel *parallel, const loom_step *step) {
    loom_status status = loom__ddp_finish(parallel->ddp);
    if (status == LOOM_ERR_NUMERIC)
        return loom_fail_context(status, "step %lld: ", (long long)step->number + 1);
    LOOM_TRY(status);
    LOOM_TRY(sum_partial(parallel));
    const loom_module *module = parallel->module;
    if (module->finalize_gradients)
        LOOM_TRY(module->finalize_gradients(module->context));
    return sum_ends(parallel);
}

/* The last stage has the losses; all others hear of them. */
static loom_status reduce_loss(loom_parallel *parallel, loom_step *step) {
    loom_comm *const *groups = parallel->fabric->groups;
    if (parallel->stage == parallel->stages - 1)
        LOOM_TRY(parallel->reduction.reduce(
            parallel->reduction.context, groups[LOOM_GROUP_DP_CP], &step->loss_sum, &step->tokens, &step->loss));
    double numbers[3] = {step->loss_sum, step->tokens, step->loss};
    if (parallel->stages > 1)
        LOOM_TRY(loom_broadcast(groups[LOOM_GROUP_PP], numbers, 3, LOOM_F64, (int)parallel->stages - 1));
    step->loss_sum = numbers[0];
    step->tokens = numbers[1];
    step->loss = numbers[2];
    return LOOM_OK;
}

static loom_status reduce(loom_parallel *parallel, loom_step *step, double expected) {
    LOOM_TRY(call(parallel, LOOM_EVENT_REDUCE_MICROBATCHES_START, step));
    LOOM_TRY(reduce_loss(parallel, step));
    if (step->mode == LOOM_TRAINING)
        parallel->token_factor = step->tokens > 0 ? expected / step->tokens : 1;
    return call(parallel, LOOM_EVENT_REDUCE_MICROBATCHES_END, step);
}

static loom_status run_step(
    loom_parallel *parallel, loom_step *step, loom_logits_function receive, void *receive_context) {
    LOOM_TRY(call(parallel, LOOM_EVENT_STEP_START, step));
    /* A callback may have replaced the step after the sampler's had filled it in. */
    loom__infer_sizes(step);
    LOOM_TRY(check_step(step));
    bool training = step->mode == LOOM_TRAINING;
    loom_comm *const *groups = parallel->fabric->groups;
    int64_t dp = loom_comm_size(groups[LOOM_GROUP_DP]), reduced = loom_comm_size(groups[LOOM_GROUP_DP_CP]);
    step->global_batch_size = step->micro_batch_size * step->num_microbatches * dp;
    double expected = (double)step->global_batch_size * (double)step->seq_length;
    bool average = parallel->fabric->config.ddp_config.average_in_collective;
    double loss_scale = training && parallel->optimizer ? loom__optimizer_loss_scale(parallel->optimizer) : 1.0;
    float seed = (float)((average ? (double)reduced : 1.0) * loss_scale / expected);
    if (training) {
        parallel->loss_scale = loss_scale;
        loom__ddp_begin_step(parallel->ddp);
        loom__routers_begin_step(parallel);
    }
    LOOM_TRY(call(parallel, LOOM_EVENT_MICROBATCHES_START, step));
    loom__trace_step_begins(parallel);
    /* Operations wait for the parameters that they read; a user's module may read them elsewhere. */
    if (!parallel->is_gpt)
        LOOM_TRY(loom__ddp_wait_parameters(parallel->ddp));
    LOOM_TRY(loom__run_microbatches(parallel, step, seed, receive, receive_context));
    LOOM_TRY(loom__ddp_wait_parameters(parallel->ddp));
    loom__trace_step_ends(parallel, step);
    LOOM_TRY(call(parallel, LOOM_EVENT_MICROBATCHES_END, step));
    loom_profile_phase before = loom__profile_phase(parallel->fabric->rank, LOOM_PROFILE_REDUCTION);
    loom_status status = training ? loom__parallel_finish_gradients(parallel, step) : LOOM_OK;
    if (!status)
        status = reduce(parallel, step, expected);
    if (!status && training)
        status = loom__routers_end_step(parallel);
    loom__profile_phase(parallel->fabric->rank, before);
    LOOM_TRY(status);
    step->consumed_samples = loom_batches_get_state(step->batches).consumed_samples;
    return call(parallel, LOOM_EVENT_STEP_END, step);
}

loom_status loom_parallel_step(loom_parallel *parallel, loom_step_mode mode, loom_batches *batches,
    const loom_step_sizes *sizes, loom_logits_function receive, void *context, loom_step_result *result) {
    LOOM_TRY(check_mode(mode));
    if (mode == LOOM_TRAINING)
        LOOM_TRY(loom__parallel_check_gradients(parallel, "training_step"));
    if (mode == LOOM_TRAINING) {
        bool pending;
        LOOM_TRY(loom_fabric_finalize_saves(parallel->fabric, false, &pending));
    }
    if (receive && !loom_parallel_model_config(parallel))
        return loom_fail(
            LOOM_ERR_ARGUMENT, "this module has no configuration that tells its vocabulary: logits cannot be given");
    loom_step step = {
        .mode = mode,
        .number = parallel->steps[mode],
        .batches = batches,
        .micro_batch_size = sizes ? sizes->micro_batch_size : 0,
        .seq_length = sizes ? sizes->seq_length : 0,
        .num_microbatches = sizes ? sizes->num_microbatches : 0,
    };
    LOOM_TRY(run_step(parallel, &step, receive, context));
    parallel->steps[step.mode]++;
    *result = (loom_step_result){step.loss, step.tokens, step.stop, step.num_microbatches};
    return LOOM_OK;
}

static loom_status plain_step(loom_parallel *parallel, loom_step_mode mode, loom_batches *batches, double *loss) {
    loom_step_result result;
    LOOM_TRY(loom_parallel_step(parallel, mode, batches, NULL, NULL, NULL, &result));
    *loss = result.loss;
    return LOOM_OK;
}

loom_status loom_parallel_training_step(loom_parallel *parallel, loom_batches *batches, double *loss) {
    return plain_step(parallel, LOOM_TRAINING, batches, loss);
}

loom_status loom_parallel_validation_step(loom_parallel *parallel, loom_batches *batches, double *loss) {
    return plain_step(parallel, LOOM_VALIDATION, batches, loss);
}

loom_status loom_parallel_test_step(loom_parallel *parallel, loom_batches *batches, double *loss) {
    return plain_step(parallel, LOOM_TEST, batches, loss);
}

loom_status loom_parallel_predict_step(
    loom_parallel *parallel, loom_batches *batches, loom_logits_function receive, void *context) {
    loom_step_result result;
    return loom_parallel_step(parallel, LOOM_PREDICT, batches, NULL, receive, context, &result);
}

void loom_parallel_observe(loom_parallel *parallel, loom_forward_observer observer, void *context) {
    parallel->observer = observer;
    parallel->observer_context = context;
}
