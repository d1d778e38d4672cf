/* A step: all microbatches of one global batch, forward and (in training) backward, the reduction of the loss, and the
 * gradients made final. The loss gradient is seeded with 1 / expected tokens, so that the sum over microbatches and
 * ranks is the mean whenever every token counts; where some do not, the exact factor expected / valid goes to the
 * optimizer, which applies it once. */
#include "optim/optim.h"
#include "parallel/parallel.h"
#include "runtime/rank.h"
#include "strategy/strategy.h"
#include <math.h>
#include <stdlib.h>
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

/* ---- one microbatch ---- */

typedef struct step_context {
    loom_parallel *parallel;
    loom_step *step;
    float seed; /* of the loss gradient */
    loom_logits_function receive;
    void *receive_context;
} step_context;

static loom_status hand_out_logits(const step_context *context, loom_tensor *logits) {
    loom_parallel *parallel = context->parallel;
    const loom_batch *batch = context->step->batch;
    int64_t vocabulary = loom_parallel_model_config(parallel)->vocab_size;
    float *whole = malloc((size_t)(batch->b * batch->s * vocabulary + 1) * sizeof *whole);
    if (!whole)
        return loom_fail(
            LOOM_ERR_MEMORY, "out of memory for %lld logits", (long long)(batch->b * batch->s * vocabulary));
    loom_status status = loom__gather_logits(logits, vocabulary, parallel->fabric->groups[LOOM_GROUP_TP], whole);
    if (!status)
        status = context->receive(context->receive_context, batch, vocabulary, whole);
    free(whole);
    return status;
}

/* Runs the forward again with every operation's output checked, to name the first one that is not finite. */
static loom_status name_nonfinite(const step_context *context) {
    loom_parallel *parallel = context->parallel;
    const loom_step *step = context->step;
    loom_tape_options options = {.check_finite = true};
    loom_forward forward = {.batch = step->batch, .training = step->mode == LOOM_TRAINING};
    loom_tape *tape;
    loom_tensor *losses = NULL;
    LOOM_TRY(loom_tape_create(parallel->fabric->rank, &options, &tape));
    loom_status status = parallel->module->forward(parallel->module->context, tape, &forward, &losses);
    loom_tensor_release(losses);
    loom_tape_destroy(tape);
    if (!status)
        status = loom_fail(LOOM_ERR_NUMERIC, "the loss has a NaN or an infinity that no operation's output shows");
    return loom_fail_context(
        status, "step %lld, microbatch %lld: ", (long long)step->number + 1, (long long)step->microbatch);
}

static loom_status backward(const step_context *context, loom_tape *tape, loom_tensor *losses, loom_tensor *d_losses) {
    const loom_step *step = context->step;
    loom__ddp_expect_last(context->parallel->ddp, step->microbatch == step->num_microbatches - 1);
    return loom_tape_backward(tape, losses, d_losses);
}

static loom_status forward_backward(const step_context *context, loom_tape *tape) {
    loom_parallel *parallel = context->parallel;
    loom_step *step = context->step;
    const loom_precision_plugin *precision = parallel->fabric->precision_plugin;
    bool training = step->mode == LOOM_TRAINING;
    loom_tensor *losses = NULL, *d_losses = NULL, *logits = NULL;
    loom_forward forward = {.batch = step->batch, .training = training, .logits = context->receive ? &logits : NULL};
    loom_status status = LOOM_OK;
    if (precision->convert_input)
        status = precision->convert_input(precision->context, step->batch);
    loom_profile_phase before = loom__profile_phase(parallel->fabric->rank, LOOM_PROFILE_FORWARD);
    if (!status)
        status = parallel->module->forward(parallel->module->context, tape, &forward, &losses);
    loom__profile_phase(parallel->fabric->rank, LOOM_PROFILE_LOSS);
    if (!status && precision->convert_output)
        status = precision->convert_output(precision->context, losses);
    if (!status && context->receive)
        status = logits ? hand_out_logits(context, logits)
                        : loom_fail(LOOM_ERR_UNSUPPORTED, "this module gives no logits (loom_forward.logits)");
    loom_tensor_release(logits);
    if (!status && training)
        status = loom_tensor_create(parallel->fabric->rank, LOOM_F32, losses->dims, losses->shape, &d_losses);
    if (!status)
        status = parallel->reduction.forward(
            parallel->reduction.context, step->batch, losses, context->seed, &step->loss_sum, &step->tokens, d_losses);
    if (!status && !isfinite(step->loss_sum))
        status = name_nonfinite(context);
    if (!status && training)
        status = backward(context, tape, losses, d_losses);
    loom__profile_phase(parallel->fabric->rank, before);
    loom_tensor_release(losses);
    loom_tensor_release(d_losses);
    return status;
}

static loom_status run_microbatch(const step_context *context) {
    loom_parallel *parallel = context->parallel;
    bool training = context->step->mode == LOOM_TRAINING;
    loom_tape_options options = {
        .record = training,
        .parameter_ready = training ? loom__ddp_parameter_ready : NULL,
        .context = parallel->ddp,
    };
    loom_tape *tape;
    LOOM_TRY(loom_tape_create(parallel->fabric->rank, &options, &tape));
    loom_status status = forward_backward(context, tape);
    loom_tape_destroy(tape);
    return status;
}

/* LOOM_END before the first microbatch is the end of the data; later it is an error. */
static loom_status fetch(loom_step *step) {
    loom_status status = loom_batches_next(step->batches, &step->batch);
    if (status == LOOM_END && step->microbatch > 0)
        return loom_fail(LOOM_ERR_STATE, "the data ended after %lld of the step's %lld microbatches",
            (long long)step->microbatch, (long long)step->num_microbatches);
    LOOM_TRY(status);
    if (step->batch->rows != step->micro_batch_size || step->batch->s != step->seq_length)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "the step has microbatches of %lld rows of %lld positions, but its loader gives %lld of %lld",
            (long long)step->micro_batch_size, (long long)step->seq_length, (long long)step->batch->rows,
            (long long)step->batch->s);
    return LOOM_OK;
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

loom_status loom__parallel_finish_gradients(loom_parallel *parallel) {
    LOOM_TRY(loom__ddp_finish(parallel->ddp));
    LOOM_TRY(sum_partial(parallel));
    const loom_module *module = parallel->module;
    return module->finalize_gradients ? module->finalize_gradients(module->context) : LOOM_OK;
}

static loom_status reduce(loom_parallel *parallel, loom_step *step, double expected) {
    LOOM_TRY(call(parallel, LOOM_EVENT_REDUCE_MICROBATCHES_START, step));
    LOOM_TRY(parallel->reduction.reduce(parallel->reduction.context, parallel->fabric->groups[LOOM_GROUP_DP_CP],
        &step->loss_sum, &step->tokens, &step->loss));
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
    int64_t dp = loom_comm_size(parallel->fabric->groups[LOOM_GROUP_DP]);
    step->global_batch_size = step->micro_batch_size * step->num_microbatches * dp;
    double expected = (double)step->global_batch_size * (double)step->seq_length;
    bool average = parallel->fabric->config.ddp_config.average_in_collective;
    step_context context = {parallel, step, (float)((average ? (double)dp : 1.0) / expected), receive, receive_context};
    if (training)
        loom__ddp_begin_step(parallel->ddp);
    LOOM_TRY(call(parallel, LOOM_EVENT_MICROBATCHES_START, step));
    for (step->microbatch = 0; step->microbatch < step->num_microbatches; step->microbatch++) {
        loom_rank_note(parallel->fabric->rank, "reading a batch");
        loom_profile_phase before = loom__profile_phase(parallel->fabric->rank, LOOM_PROFILE_DATA);
        loom_status status = fetch(step);
        loom__profile_phase(parallel->fabric->rank, before);
        loom_rank_note(parallel->fabric->rank, NULL);
        LOOM_TRY(status);
        LOOM_TRY(call(parallel, LOOM_EVENT_MICROBATCH_START, step));
        LOOM_TRY(run_microbatch(&context));
        LOOM_TRY(call(parallel, LOOM_EVENT_MICROBATCH_END, step));
    }
    step->batch = NULL;
    LOOM_TRY(call(parallel, LOOM_EVENT_MICROBATCHES_END, step));
    loom_profile_phase before = loom__profile_phase(parallel->fabric->rank, LOOM_PROFILE_REDUCTION);
    loom_status status = training ? loom__parallel_finish_gradients(parallel) : LOOM_OK;
    if (!status)
        status = reduce(parallel, step, expected);
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
