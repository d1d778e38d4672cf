/* The microbatches of a step: what the instructions of a schedule mean for a module. Every rank reads every microbatch
 * of its data-parallel part once, at the first forward that needs it, and keeps it until its last computation here is
 * over; so all chunks of a rank are fed from one iterator, and their order does not matter. What leaves a stage is
 * checked to be finite, since the stage after could no longer name the layer. */
#include "parallel/parallel.h"
#include "strategy/strategy.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Computations between a receive and the one that reads it, at least: what travels meanwhile costs no time. */
enum { RECEIVES_AHEAD = 2 };

typedef struct microbatch {
    loom_batch *batch;   /* this rank's positions; NULL before it is read and after it is finished */
    loom_batch *whole;   /* all positions, where logits are handed out and context ranks have a part each; else NULL */
    loom_tensor *logits; /* of the last stage, until all stages can take them */
} microbatch;

typedef struct step_work {
    loom_parallel *parallel;
    loom_step *step;
    float seed; /* of the loss gradient */
    loom_logits_function receive;
    void *receive_context;
    microbatch *microbatches; /* [num_microbatches] */
    int64_t read;
    bool warned; /* of a loss or an activation that is not finite */
} step_work;

static loom_status call(const step_work *work, loom_event event) {
    return loom_callbacks_call(work->parallel->fabric->callbacks, event, work->step);
}

/* ---- data ---- */

/* LOOM_END before the first microbatch is the end of the data; later it is an error. */
static loom_status fetch(const step_work *work, const loom_batch **batch) {
    const loom_step *step = work->step;
    const loom_model_config *model = loom_parallel_model_config(work->parallel);
    loom_status status = loom_batches_next(step->batches, batch);
    if (status == LOOM_END && work->read > 0)
        return loom_fail(LOOM_ERR_STATE, "the data ended after %lld of the step's %lld microbatches",
            (long long)work->read, (long long)step->num_microbatches);
    LOOM_TRY(status);
    int64_t s = (*batch)->s;
    bool shorter = model && model->parallel.variable_seq_lengths && s > 0 && s < step->seq_length;
    if ((*batch)->rows != step->micro_batch_size || (s != step->seq_length && !shorter))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "the step has microbatches of %lld rows of %lld positions, but its loader gives %lld of %lld",
            (long long)step->micro_batch_size, (long long)step->seq_length, (long long)(*batch)->rows, (long long)s);
    return LOOM_OK;
}

static loom_comm *context_of(const step_work *work) {
    return work->parallel->fabric->groups[LOOM_GROUP_CP];
}

static loom_status keep(const step_work *work, const loom_batch *batch, microbatch *m) {
    LOOM_TRY(loom__batch_cut(batch, context_of(work), &m->batch));
    return work->receive && loom_comm_size(context_of(work)) > 1 ? loom__batch_cut(batch, NULL, &m->whole) : LOOM_OK;
}

static loom_status read_through(step_work *work, int64_t last) {
    loom_rank *rank = work->parallel->fabric->rank;
    loom_profile_phase before = loom__profile_phase(rank, LOOM_PROFILE_DATA);
    loom_status status = LOOM_OK;
    loom_rank_note(rank, "reading a batch");
    while (!status && work->read <= last) {
        const loom_batch *batch = NULL;
        status = fetch(work, &batch);
        if (!status)
            status = keep(work, batch, &work->microbatches[work->read]);
        work->read += !status;
    }
    loom_rank_note(rank, NULL);
    loom__profile_phase(rank, before);
    return status;
}

/* Logits are handed out with their batch, in a pipeline after the step. */
static bool keeps_logits(const step_work *work) {
    return work->receive && work->parallel->stages > 1;
}

static void finished(void *context, int64_t number) {
    const step_work *work = context;
    if (work->step->mode == LOOM_TRAINING)
        loom__ddp_note_microbatch(work->parallel->ddp, number);
    if (keeps_logits(work))
        return;
    loom_batch_destroy(work->microbatches[number].batch);
    loom_batch_destroy(work->microbatches[number].whole);
    work->microbatches[number].batch = work->microbatches[number].whole = NULL;
}

/* ---- logits ---- */

/* Logits [b, s, v] from each context rank's [b, s/cp, v]. Collective over the context ranks. */
static loom_status join_positions(
    const step_work *work, const loom_batch *part, int64_t vocabulary, const float *mine, float *whole) {
    loom_comm *context = context_of(work);
    int64_t cp = loom_comm_size(context), rows = part->s / 2, count = part->b * part->s * vocabulary, begin[2];
    size_t run = (size_t)(rows * vocabulary) * sizeof(float);
    float *all = malloc((size_t)(cp * count + 1) * sizeof *all);
    if (!all)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld logits", (long long)(cp * count));
    loom_status status = loom_all_gather(context, mine, all, count, LOOM_F32);
    for (int64_t member = 0; !status && member < cp; member++) {
        loom_layout_context_chunks(part->s * cp, cp, member, begin);
        for (int64_t j = 0; j < part->b; j++)
            for (int half = 0; half < 2; half++)
                memcpy(whole + (j * part->s * cp + begin[half]) * vocabulary,
                    all + member * count + (j * part->s + half * rows) * vocabulary, run);
    }
    loom_comm_free(context, all);
    return status;
}

static loom_status give_logits(
    const step_work *work, const microbatch *m, int64_t vocabulary, const float *values, int64_t count) {
    if (!m->whole)
        return work->receive(work->receive_context, m->batch, vocabulary, values);
    int64_t cp = loom_comm_size(context_of(work));
    float *whole = malloc((size_t)(count * cp + 1) * sizeof *whole);
    if (!whole)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld logits", (long long)(count * cp));
    loom_status status = join_positions(work, m->batch, vocabulary, values, whole);
    if (!status)
        status = work->receive(work->receive_context, m->whole, vocabulary, whole);
    free(whole);
    return status;
}

/* Every rank gets the whole ones. logits [s, b, v/tp] is NULL on stages before the last. Collective over the tensor
 * ranks, the stages and the context ranks. */
static loom_status hand_out_logits(const step_work *work, const microbatch *m, loom_tensor *logits) {
    loom_parallel *parallel = work->parallel;
    loom_comm *const *groups = parallel->fabric->groups;
    const loom_batch *batch = m->batch;
    int64_t vocabulary = loom_parallel_model_config(parallel)->vocab_size, count = batch->b * batch->s * vocabulary;
    float *whole = malloc((size_t)(count + 1) * sizeof *whole);
    if (!whole)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld logits", (long long)count);
    loom_status status = LOOM_OK;
    if (logits)
        status = loom__gather_logits(logits, vocabulary, groups[LOOM_GROUP_TP], whole);
    if (!status && parallel->stages > 1)
        status = loom_broadcast(groups[LOOM_GROUP_PP], whole, count, LOOM_F32, (int)parallel->stages - 1);
    if (!status)
        status = give_logits(work, m, vocabulary, whole, count);
    loom_comm_free(groups[LOOM_GROUP_PP], whole);
    return status;
}

static loom_status hand_out_kept_logits(const step_work *work) {
    for (int64_t i = 0; keeps_logits(work) && i < work->step->num_microbatches; i++) {
        microbatch *m = &work->microbatches[i];
        LOOM_TRY(hand_out_logits(work, m, m->logits));
        loom_tensor_release(m->logits);
        m->logits = NULL;
    }
    return LOOM_OK;
}

/* ---- a forward ---- */

static bool begins(const loom_parallel *parallel, int64_t chunk) {
    return loom_schedule_model_begins(parallel->stage, chunk);
}

static bool ends(const loom_parallel *parallel, int64_t chunk) {
    return loom_schedule_model_ends(parallel->stages, parallel->chunk_count, parallel->stage, chunk);
}

static bool has_nonfinite(const loom_parallel *parallel, const loom_tensor *tensor) {
    loom_rank *rank = parallel->fabric->rank;
    const loom_kernels *kernels = loom_rank_kernels(rank);
    loom_team *team = loom_rank_team(rank);
    int64_t count = loom_tensor_count(tensor);
    switch (tensor->dtype) {
    case LOOM_F32:
        return kernels->has_nonfinite(team, count, tensor->data);
    case LOOM_BF16:
        return kernels->bf16->has_nonfinite(team, count, tensor->data);
    case LOOM_F16:
        return kernels->f16->has_nonfinite(team, count, tensor->data);
    default:
        return false;
    }
}

/* What goes to the next stage. Each tensor rank may have other rows of it, and all must know. */
static loom_status look_at_output(const loom_parallel *parallel, const loom_tensor *output, bool *bad) {
    int64_t found = has_nonfinite(parallel, output);
    loom_comm *tensor_ranks = parallel->fabric->groups[LOOM_GROUP_TP];
    if (loom_comm_size(tensor_ranks) > 1)
        LOOM_TRY(loom_all_reduce(tensor_ranks, &found, &found, 1, LOOM_I64, LOOM_MAX));
    *bad = found;
    return LOOM_OK;
}

/* Runs the forward again with every operation's output checked, to name the first one that is not finite. All tensor
 * ranks come here, and all of them go through the whole forward: its collectives need them. */
static loom_status find_nonfinite(const step_work *work, const loom_forward *done) {
    loom_parallel *parallel = work->parallel;
    char found[LOOM_NONFINITE_BYTES] = "";
    loom_tape_options options = {.check_finite = true, .nonfinite = found};
    loom_forward forward = {.batch = done->batch, .chunk = done->chunk, .training = done->training};
    loom_tape *tape = NULL;
    loom_tensor *output = NULL, *input = NULL;
    /* The stage before has looked at it, so that it was finite when it left. */
    bool narrowed = done->input && has_nonfinite(parallel, done->input);
    loom_status status = loom_tape_create(parallel->fabric->rank, &options, &tape);
    if (!status && done->input)
        status = loom_tensor_view(done->input, done->input->dims, done->input->shape, &input);
    if (input)
        input->tape = 0; /* it is a value of the tape that is kept */
    forward.input = input;
    if (!status)
        status = parallel->module->forward(parallel->module->context, tape, &forward, &output);
    loom_tensor_release(output);
    loom_tensor_release(input);
    loom_tape_destroy(tape);
    LOOM_TRY(status);
    if (narrowed)
        status = loom_fail(LOOM_ERR_NUMERIC,
            "what came from the stage before is too large for strategy.pipeline_dtype %s; bf16 and fp32 hold more",
            parallel->fabric->pipeline_dtype);
    else if (found[0])
        status = loom_fail(LOOM_ERR_NUMERIC, "%s", found);
    LOOM_TRY(loom_agree(parallel->fabric->groups[LOOM_GROUP_TP], status));
    return loom_fail(LOOM_ERR_NUMERIC, "%s has a NaN or an infinity that no operation's output shows",
        ends(parallel, done->chunk) ? "the loss" : "what goes to the next stage");
}

/* Under a loss scale a training step goes on, since its update will be skipped, and says why; else the run ends. */
static loom_status name_nonfinite(step_work *work, const loom_forward *forward) {
    loom_parallel *parallel = work->parallel;
    const loom_step *step = work->step;
    bool goes_on = forward->training && parallel->optimizer && parallel->fabric->precision.has_scaler;
    loom_status status = loom_fail_context(find_nonfinite(work, forward),
        "step %lld, microbatch %lld: ", (long long)step->number + 1, (long long)step->microbatch);
    if (!goes_on || (status != LOOM_ERR_NUMERIC && status != LOOM_ERR_ABORTED))
        return status;
    if (!work->warned && loom_comm_rank(parallel->fabric->groups[LOOM_GROUP_TP]) == 0)
        loom_rank_log(parallel->fabric->rank, LOOM_LOG_WARNING, "%s; no update follows", loom_error_message());
    work->warned = true;
    return LOOM_OK;
}

/* Nothing that comes of a bad loss may be taken for a gradient. */
static void spoil(loom_tensor *gradient) {
    for (int64_t i = 0; gradient && i < loom_tensor_count(gradient); i++)
        loom_tensor_f32(gradient)[i] = NAN;
}

/* The microbatch's own loss tells whether it is bad: the sum stays bad after one that was. */
static loom_status reduce_loss(
    step_work *work, const loom_forward *forward, const loom_tensor *losses, loom_tensor *gradient) {
    const loom_loss_reduction *reduction = &work->parallel->reduction;
    loom_step *step = work->step;
    double before = step->loss_sum;
    if (!isfinite(before))
        step->loss_sum = 0;
    LOOM_TRY(reduction->forward(
        reduction->context, forward->batch, losses, work->seed, &step->loss_sum, &step->tokens, gradient));
    bool bad = !isfinite(step->loss_sum);
    if (!isfinite(before))
        step->loss_sum += before;
    if (!bad)
        return LOOM_OK;
    LOOM_TRY(name_nonfinite(work, forward));
    spoil(gradient);
    return LOOM_OK;
}

static loom_status finish_model(step_work *work, const loom_forward *forward, loom_tape *tape, loom_tensor **losses,
    loom_tensor *logits, loom_tensor **d_losses) {
    loom_parallel *parallel = work->parallel;
    const loom_precision_plugin *precision = parallel->fabric->precision_plugin;
    if (precision->convert_output)
        LOOM_TRY(precision->convert_output(precision->context, tape, losses));
    if ((*losses)->dtype != LOOM_F32)
        return loom_fail(LOOM_ERR_ARGUMENT, "the losses of this module are kept in %s, expected F32",
            loom_dtype_name((*losses)->dtype));
    if (work->receive && !logits)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "this module gives no logits (loom_forward.logits)");
    if (keeps_logits(work))
        work->microbatches[work->step->microbatch].logits = loom_tensor_retain(logits);
    else if (work->receive)
        LOOM_TRY(hand_out_logits(work, &work->microbatches[work->step->microbatch], logits));
    loom_tensor *gradient = NULL;
    if (d_losses)
        LOOM_TRY(loom_tensor_create(parallel->fabric->rank, LOOM_F32, (*losses)->dims, (*losses)->shape, &gradient));
    loom_status status = reduce_loss(work, forward, *losses, gradient);
    if (status) {
        loom_tensor_release(gradient);
        return status;
    }
    if (d_losses)
        *d_losses = gradient;
    return LOOM_OK;
}

typedef struct observed {
    const loom_parallel *parallel;
    const loom_batch *batch;
} observed;

static loom_status observe(void *context, const char *scope, const char *operation, loom_tensor *output) {
    const observed *of = context;
    return of->parallel->observer(of->parallel->observer_context, of->batch, scope, operation, output);
}

static loom_status run_module(
    step_work *work, int64_t chunk, loom_tape *tape, loom_tensor *input, loom_tensor **output, loom_tensor **d_output) {
    loom_parallel *parallel = work->parallel;
    const loom_module *module = parallel->module;
    loom_rank *rank = parallel->fabric->rank;
    const loom_precision_plugin *precision = parallel->fabric->precision_plugin;
    loom_tensor *made = NULL, *logits = NULL;
    bool last = ends(parallel, chunk), bad = false;
    loom_forward forward = {
        .batch = work->step->batch,
        .chunk = chunk,
        .input = input,
        .training = work->step->mode == LOOM_TRAINING,
        .own_loss_scale = (double)work->seed * (double)work->step->micro_batch_size * (double)work->step->seq_length,
        .router_collector = work->step->mode == LOOM_TRAINING ? parallel->router_collector : NULL,
        .logits = last && work->receive ? &logits : NULL,
    };
    if (begins(parallel, chunk) && precision->convert_input)
        LOOM_TRY(precision->convert_input(precision->context, forward.batch));
    loom_profile_phase before = loom__profile_phase(rank, LOOM_PROFILE_FORWARD);
    observed seen = {parallel, forward.batch};
    loom_tape_observe(tape, parallel->observer ? observe : NULL, &seen);
    loom_status status = module->forward(module->context, tape, &forward, &made);
    loom_tape_observe(tape, NULL, NULL);
    if (!status && last) {
        loom__profile_phase(rank, LOOM_PROFILE_LOSS);
        status = finish_model(work, &forward, tape, &made, logits, d_output);
    } else if (!status) {
        status = loom_tensor_ready(made);
        if (!status)
            status = look_at_output(parallel, made, &bad);
        if (!status && bad)
            status = name_nonfinite(work, &forward);
    }
    loom__profile_phase(rank, before);
    loom_tensor_release(logits);
    if (status) {
        loom_tensor_release(made);
        return status;
    }
    *output = made;
    return LOOM_OK;
}

static loom_status forward(void *context, int64_t number, int64_t chunk, loom_tape *tape, loom_tensor *input,
    loom_tensor **output, loom_tensor **d_output) {
    step_work *work = context;
    loom_step *step = work->step;
    if (number >= work->read) {
        LOOM_TRY(read_through(work, number));
        loom__pipeline_note(work->parallel->pipeline);
    }
    step->microbatch = number;
    step->batch = work->microbatches[number].batch;
    LOOM_TRY(call(work, LOOM_EVENT_MICROBATCH_START));
    LOOM_TRY(run_module(work, chunk, tape, input, output, d_output));
    return call(work, LOOM_EVENT_MICROBATCH_END);
}

/* ---- the other instructions ---- */

static void sync(void *context, bool on) {
    const step_work *work = context;
    if (work->parallel->ddp) /* else there are no gradients */
        loom__ddp_expect_last(work->parallel->ddp, on);
}

static void start_reductions(void *context, int64_t chunk) {
    const step_work *work = context;
    loom__ddp_sync_gradients(work->parallel->ddp, chunk);
}

static void start_gathers(void *context, int64_t chunk) {
    const step_work *work = context;
    loom__ddp_sync_parameters(work->parallel->ddp, chunk);
}

bool loom__aligns_reductions(const loom_parallel *parallel) {
    const loom_fabric *fabric = parallel->fabric;
    return !fabric->pytorch_ddp && fabric->config.ddp_config.align_grad_reduce && parallel->stages > 1;
}

/* ---- the step ---- */

static bool same_schedule(const loom_schedule_config *a, const loom_schedule_config *b) {
    return a->stages == b->stages && a->chunks == b->chunks && a->microbatches == b->microbatches &&
           a->group == b->group && a->kind == b->kind && a->forward_only == b->forward_only &&
           a->align_sync == b->align_sync;
}

static loom_status find_schedule(loom_parallel *parallel, const loom_step *step, loom__step_schedule **out) {
    const loom_megatron_strategy_config *strategy = &parallel->fabric->config;
    bool training = step->mode == LOOM_TRAINING;
    loom_schedule_config wanted = {
        .stages = parallel->stages,
        .chunks = parallel->chunk_count > 1 ? parallel->chunk_count : 0,
        .microbatches = step->num_microbatches,
        .group = parallel->chunk_count > 1 ? strategy->microbatch_group_size_per_vp_stage : 0,
        .kind = training ? parallel->schedule : LOOM_SCHEDULE_1F1B,
        .forward_only = !training,
        .align_sync = training && loom__aligns_reductions(parallel),
    };
    loom__step_schedule *schedule = training ? &parallel->training : &parallel->evaluation;
    *out = schedule;
    if (same_schedule(&schedule->config, &wanted))
        return LOOM_OK;
    loom_schedule_list_free(&schedule->list);
    schedule->config = (loom_schedule_config){0};
    loom_schedule_list list;
    LOOM_TRY(loom_schedule_make(&wanted, parallel->stage, &list));
    loom_status status = loom_schedule_post_receives_early(&wanted, &list, RECEIVES_AHEAD, &schedule->list);
    loom_schedule_list_free(&list);
    LOOM_TRY(status);
    schedule->config = wanted;
    return LOOM_OK;
}

static loom_status execute(step_work *work) {
    loom_parallel *parallel = work->parallel;
    const loom_step *step = work->step;
    const loom_module *module = parallel->module;
    bool training = step->mode == LOOM_TRAINING;
    loom__step_schedule *schedule = NULL;
    LOOM_TRY(find_schedule(parallel, step, &schedule));
    int64_t group = schedule->config.group;
    loom__pipeline_run run = {
        .list = &schedule->list,
        .microbatches = step->num_microbatches,
        .group = group ? group : parallel->stages,
        .training = training,
        .split_backward = schedule->config.kind == LOOM_SCHEDULE_ZERO_BUBBLE,
    };
    int64_t length = step->seq_length / loom_comm_size(parallel->fabric->groups[LOOM_GROUP_CP]);
    if (parallel->stages > 1)
        LOOM_TRY(module->activation_shape(module->context, step->micro_batch_size, length, &run.dims, run.shape));
    loom__pipeline_work functions = {
        .context = work,
        .forward = forward,
        .finished = finished,
        .sync = sync,
        .grad_sync = start_reductions,
        .param_sync = parallel->fabric->config.ddp_config.align_param_gather ? start_gathers : NULL,
        .parameter_ready = loom__ddp_parameter_ready,
        .ready_context = parallel->ddp,
    };
    return loom__pipeline_execute(parallel->pipeline, &run, &functions);
}

loom_status loom__run_microbatches(
    loom_parallel *parallel, loom_step *step, float seed, loom_logits_function receive, void *receive_context) {
    step_work work = {
        .parallel = parallel, .step = step, .seed = seed, .receive = receive, .receive_context = receive_context};
    work.microbatches = calloc((size_t)step->num_microbatches, sizeof *work.microbatches);
    if (!work.microbatches)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld microbatches", (long long)step->num_microbatches);
    /* Before anything is sent: the end of the data is no error, and all ranks come to it. */
    loom_status status = read_through(&work, 0);
    if (!status)
        status = execute(&work);
    if (!status)
        status = hand_out_kept_logits(&work);
    for (int64_t i = 0; i < step->num_microbatches; i++) {
        loom_batch_destroy(work.microbatches[i].batch);
        loom_batch_destroy(work.microbatches[i].whole);
        loom_tensor_release(work.microbatches[i].logits);
    }
    free(work.microbatches);
    step->batch = NULL;
    return status;
}
