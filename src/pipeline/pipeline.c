/* The executor. For each (microbatch, chunk) of this stage there is a cell: its tape while it is alive, and what of its
 * messages has come or is under way. An instruction changes one cell, or starts one message.
 *
 * Invariants: a computation is the only place that waits, and only for what it reads (a send waits where its tag or its
 * memory would else be used twice). A cell holds no activation of its own: what it received belongs to the nodes of its
 * tape, and what it sends to the send; of both it remembers which values of the tape they are. At the end all cells are
 * empty, whatever happened. */
#include "pipeline/pipeline.h"
#include "comm/comm.h"
#include "pipeline/exchange.h"
#include "runtime/rank.h"
#include <stdio.h>
#include <stdlib.h>

typedef struct cell {
    loom_tape *tape;
    loom_tensor input, output; /* descriptions, without memory; dims and shape are valid with a tape */
    loom_tensor *to_send;      /* the output, until its send has started */
    loom_tensor *d_output;     /* where the model ends */
    loom_tensor *d_input;      /* until its send has started */
    bool halfway;              /* the input half has run, the weight half has not */
    loom__incoming activation, gradient;
} cell;

struct loom__pipeline {
    loom_rank *rank;
    loom__pipeline_options options;
    int stage, stages;
    loom__exchange exchange;
    loom__pipeline_record *record;
    loom__pipeline_counts counts;
    int64_t live;
    /* Of the run now: */
    const loom__pipeline_run *run;
    const loom__pipeline_work *work;
    cell *cells;   /* [chunks][microbatches] */
    int64_t *left; /* [microbatches] tapes that are still to end */
    int64_t cell_count, left_count;
    const loom_instruction *current;
};

loom_status loom__pipeline_create(
    loom_rank *rank, loom_comm *group, const loom__pipeline_options *options, loom__pipeline **out) {
    loom__pipeline *pipeline = calloc(1, sizeof *pipeline);
    if (!pipeline)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a pipeline");
    pipeline->rank = rank;
    pipeline->options = *options;
    pipeline->stage = loom_comm_rank(group);
    pipeline->stages = loom_comm_size(group);
    loom_status status = loom__exchange_open(&pipeline->exchange, rank, group, options->chunks, options->activations,
        options->wire, options->variable_shapes);
    if (status) {
        free(pipeline);
        return status;
    }
    *out = pipeline;
    return LOOM_OK;
}

void loom__pipeline_destroy(loom__pipeline *pipeline) {
    if (!pipeline)
        return;
    free(pipeline->cells);
    free(pipeline->left);
    free(pipeline);
}

loom__pipeline_counts loom__pipeline_counts_of(const loom__pipeline *pipeline) {
    loom__pipeline_counts counts = pipeline->counts;
    counts.sends = pipeline->exchange.most_under_way;
    return counts;
}

void loom__pipeline_set_record(loom__pipeline *pipeline, loom__pipeline_record *record) {
    pipeline->record = record;
}

/* ---- where the model begins and ends, and who the neighbours are ---- */

static bool begins(const loom__pipeline *p, int64_t chunk) {
    return loom_schedule_model_begins(p->stage, chunk);
}

static bool ends(const loom__pipeline *p, int64_t chunk) {
    return loom_schedule_model_ends(p->stages, p->options.chunks, p->stage, chunk);
}

/* The message before the chunk, or behind it. */
static loom__message message_before(const loom__pipeline *p, loom__flow flow, const loom_instruction *at) {
    return (loom__message){flow, (p->stage + p->stages - 1) % p->stages, at->chunk, at->microbatch};
}

static loom__message message_behind(const loom__pipeline *p, loom__flow flow, const loom_instruction *at) {
    int64_t boundary = p->stage == p->stages - 1 ? at->chunk + 1 : at->chunk;
    return (loom__message){flow, (p->stage + 1) % p->stages, boundary, at->microbatch};
}

/* ---- what others can read about this rank ---- */

/* The operation before its microbatch: a note is cut off after LOOM__NOTE bytes. */
void loom__pipeline_note(const loom__pipeline *p) {
    const loom_instruction *at = p->current;
    char text[LOOM__NOTE];
    if (p->stages > 1)
        snprintf(text, sizeof text, "stage %d: %s of microbatch %lld, chunk %d", p->stage,
            loom_instruction_name(at->kind), (long long)at->microbatch, (int)at->chunk);
    else
        snprintf(
            text, sizeof text, "%s of microbatch %lld", loom_instruction_name(at->kind), (long long)at->microbatch);
    loom_rank_note(p->rank, text);
}

static loom_status say_where(const loom__pipeline *p, const loom_instruction *at, loom_status status) {
    if (!status || status == LOOM_ERR_ABORTED || status == LOOM_END || p->stages == 1)
        return status;
    return loom_fail_context(status, "stage %d, %s of microbatch %lld, chunk %d: ", p->stage,
        loom_instruction_name(at->kind), (long long)at->microbatch, (int)at->chunk);
}

static void record(loom__pipeline *p, loom_instruction_kind kind, const loom_instruction *at, uint64_t start) {
    loom__pipeline_record *to = p->record;
    if (!to)
        return;
    if (to->count == to->capacity) {
        to->dropped++;
        return;
    }
    to->events[to->count++] = (loom__pipeline_event){kind, at->chunk, at->microbatch, start, loom__clock()};
}

static loom_status impossible(const loom_instruction *at, const char *why) {
    return loom_fail(LOOM_ERR_STATE, "the schedule asks for the %s of microbatch %lld, chunk %d, %s",
        loom_instruction_name(at->kind), (long long)at->microbatch, (int)at->chunk, why);
}

static loom_status find_cell(loom__pipeline *p, const loom_instruction *at, cell **out) {
    int64_t microbatches = p->run->microbatches;
    if (at->chunk < 0 || at->chunk >= p->options.chunks || at->microbatch < 0 || at->microbatch >= microbatches)
        return impossible(at, "which the step does not have");
    *out = &p->cells[at->chunk * microbatches + at->microbatch];
    return LOOM_OK;
}

/* ---- messages ---- */

static loom_status post(loom__pipeline *p, const loom_instruction *at) {
    cell *c;
    LOOM_TRY(find_cell(p, at, &c));
    bool activation = at->kind == LOOM_INSTRUCTION_RECEIVE_PREVIOUS;
    loom__incoming *incoming = activation ? &c->activation : &c->gradient;
    if (incoming->posted)
        return impossible(at, "a second time");
    loom__message message =
        activation ? message_before(p, LOOM__FLOW_ACTIVATION, at) : message_behind(p, LOOM__FLOW_GRADIENT, at);
    return loom__exchange_post(&p->exchange, incoming, &message, p->run->dims, p->run->shape);
}

static loom_status take(loom__pipeline *p, const loom_instruction *at, loom__flow flow, loom_tensor **tensor) {
    cell *c;
    LOOM_TRY(find_cell(p, at, &c));
    loom__incoming *incoming = flow == LOOM__FLOW_ACTIVATION ? &c->activation : &c->gradient;
    if (!incoming->posted)
        return impossible(at, "whose message it has not received");
    bool waits = p->record && !loom__exchange_arrived(incoming);
    uint64_t start = waits ? loom__clock() : 0;
    LOOM_TRY(loom__exchange_take(&p->exchange, incoming, tensor));
    if (waits)
        record(p, flow == LOOM__FLOW_ACTIVATION ? LOOM_INSTRUCTION_RECEIVE_PREVIOUS : LOOM_INSTRUCTION_RECEIVE_NEXT, at,
            start);
    return LOOM_OK;
}

/* Forward-only lists have nothing that holds a fast stage back: it would fill its memory with outputs that wait. The
 * first stage posts the receive for the next chunk within a group, so with as many sends open nobody waits in a
 * circle. In training a stage cannot run ahead of the backwards it waits for. */
static int64_t most_sends(const loom__pipeline *p) {
    return p->run->training ? 0 : p->run->group + 2 * p->stages;
}

static loom_status send(loom__pipeline *p, const loom_instruction *at) {
    cell *c;
    LOOM_TRY(find_cell(p, at, &c));
    bool output = at->kind == LOOM_INSTRUCTION_SEND_NEXT;
    loom_tensor **from = output ? &c->to_send : &c->d_input, *tensor = *from;
    if (!tensor)
        return impossible(at, "which has nothing to send");
    *from = NULL;
    loom__message message =
        output ? message_behind(p, LOOM__FLOW_ACTIVATION, at) : message_before(p, LOOM__FLOW_GRADIENT, at);
    return loom__exchange_send(&p->exchange, &message, tensor, most_sends(p));
}

/* ---- computations ---- */

static void end_tape(loom__pipeline *p, cell *c, int64_t microbatch) {
    loom_tape_destroy(c->tape);
    c->tape = NULL;
    c->halfway = false;
    p->live--;
    if (--p->left[microbatch] == 0 && p->work->finished)
        p->work->finished(p->work->context, microbatch);
}

static loom_status check_output(const loom__pipeline *p, const loom_tensor *output) {
    const loom__pipeline_run *run = p->run;
    bool same = output->dims == run->dims;
    for (int i = 0; same && i < run->dims; i++)
        same = output->shape[i] == run->shape[i];
    if (output->dtype == p->options.activations && (same || p->options.variable_shapes))
        return LOOM_OK;
    char found[128] = "", expected[128] = "";
    for (int i = 0, at = 0; i < output->dims; i++)
        at += snprintf(found + at, sizeof found - (size_t)at, "%s%lld", i ? ", " : "", (long long)output->shape[i]);
    for (int i = 0, at = 0; i < run->dims; i++)
        at += snprintf(expected + at, sizeof expected - (size_t)at, "%s%lld", i ? ", " : "", (long long)run->shape[i]);
    return loom_fail(LOOM_ERR_ARGUMENT,
        "the activations for the next stage are [%s] of %s, expected [%s] of %s like those of all microbatches of the "
        "step (model.variable_seq_lengths allows other shapes)",
        found, loom_dtype_name(output->dtype), expected, loom_dtype_name(p->options.activations));
}

/* What the tape knows of a tensor stays when its memory goes. */
static loom_tensor description(const loom_tensor *tensor) {
    loom_tensor known = *tensor;
    known.data = NULL;
    known.storage = NULL;
    known.pending = NULL;
    known.source = NULL;
    return known;
}

static loom_status run_forward(loom__pipeline *p, const loom_instruction *at, cell *c, loom_tensor *input) {
    const loom__pipeline_run *run = p->run;
    const loom__pipeline_work *work = p->work;
    loom_tensor *output = NULL;
    if (input && run->training)
        LOOM_TRY(loom_tape_leaf(c->tape, input));
    LOOM_TRY(work->forward(
        work->context, at->microbatch, at->chunk, c->tape, input, &output, run->training ? &c->d_output : NULL));
    if (input)
        c->input = description(input);
    c->output = description(output);
    if (ends(p, at->chunk)) {
        loom_tensor_release(output);
        return LOOM_OK;
    }
    c->to_send = output;
    return check_output(p, output);
}

static loom_status forward(loom__pipeline *p, const loom_instruction *at, cell *c) {
    loom_tensor *input = NULL;
    if (c->tape)
        return impossible(at, "a second time");
    if (!begins(p, at->chunk))
        LOOM_TRY(take(p, at, LOOM__FLOW_ACTIVATION, &input));
    uint64_t start = p->record ? loom__clock() : 0;
    loom_tape_options options = {
        .record = p->run->training,
        .defer_weights = p->run->split_backward,
        .parameter_ready = p->run->training ? p->work->parameter_ready : NULL,
        .context = p->work->ready_context,
    };
    loom_status status = loom_tape_create(p->rank, &options, &c->tape);
    if (!status) {
        p->live++;
        if (p->live > p->counts.live)
            p->counts.live = p->live;
        status = run_forward(p, at, c, input);
    }
    loom_tensor_release(input);
    LOOM_TRY(status);
    if (!p->run->training)
        end_tape(p, c, at->microbatch);
    record(p, at->kind, at, start);
    return LOOM_OK;
}

/* Where nothing flowed into the input its gradient is zero, and the stage before waits for it all the same. */
static loom_status keep_input_gradient(loom__pipeline *p, cell *c) {
    loom_tensor *gradient = loom_tape_gradient(c->tape, &c->input);
    if (gradient) {
        c->d_input = loom_tensor_retain(gradient);
        return LOOM_OK;
    }
    LOOM_TRY(loom_tensor_create(p->rank, c->input.dtype, c->input.dims, c->input.shape, &c->d_input));
    memset(c->d_input->data, 0, (size_t)loom_tensor_count(c->d_input) * loom_dtype_size(c->input.dtype));
    return LOOM_OK;
}

static loom_status backward(loom__pipeline *p, const loom_instruction *at, cell *c) {
    loom_tensor *d_output = c->d_output;
    if (!c->tape || c->halfway)
        return impossible(at, "which has no forward that waits for it");
    c->d_output = NULL;
    if (!ends(p, at->chunk))
        LOOM_TRY(take(p, at, LOOM__FLOW_GRADIENT, &d_output));
    uint64_t start = p->record ? loom__clock() : 0;
    loom_status status = loom_tape_backward(c->tape, &c->output, d_output);
    loom_tensor_release(d_output);
    if (!status && !begins(p, at->chunk))
        status = keep_input_gradient(p, c);
    c->halfway = at->kind == LOOM_INSTRUCTION_BACKWARD_INPUT;
    if (!status && !c->halfway && p->run->split_backward)
        status = loom_tape_run_weights(c->tape);
    LOOM_TRY(status);
    if (!c->halfway)
        end_tape(p, c, at->microbatch);
    record(p, at->kind, at, start);
    return LOOM_OK;
}

static loom_status backward_weight(loom__pipeline *p, const loom_instruction *at, cell *c) {
    if (!c->halfway)
        return impossible(at, "before its input half");
    uint64_t start = p->record ? loom__clock() : 0;
    LOOM_TRY(loom_tape_run_weights(c->tape));
    end_tape(p, c, at->microbatch);
    record(p, at->kind, at, start);
    return LOOM_OK;
}

static loom_status compute(loom__pipeline *p, const loom_instruction *at) {
    cell *c;
    LOOM_TRY(find_cell(p, at, &c));
    LOOM_TRY(loom__exchange_poll(&p->exchange));
    p->current = at;
    loom__pipeline_note(p);
    if (at->kind == LOOM_INSTRUCTION_FORWARD)
        return forward(p, at, c);
    return at->kind == LOOM_INSTRUCTION_BACKWARD_WEIGHT ? backward_weight(p, at, c) : backward(p, at, c);
}

/* ---- the walk ---- */

static loom_status carry_out(loom__pipeline *p, int64_t at) {
    const loom_instruction *instruction = &p->run->list->instructions[at];
    const loom__pipeline_work *work = p->work;
    switch (instruction->kind) {
    case LOOM_INSTRUCTION_FORWARD:
    case LOOM_INSTRUCTION_BACKWARD:
    case LOOM_INSTRUCTION_BACKWARD_INPUT:
    case LOOM_INSTRUCTION_BACKWARD_WEIGHT:
        return compute(p, instruction);
    case LOOM_INSTRUCTION_SEND_NEXT:
    case LOOM_INSTRUCTION_SEND_PREVIOUS:
        return send(p, instruction);
    case LOOM_INSTRUCTION_RECEIVE_PREVIOUS:
    case LOOM_INSTRUCTION_RECEIVE_NEXT:
        return post(p, instruction);
    case LOOM_INSTRUCTION_SYNC_OFF:
    case LOOM_INSTRUCTION_SYNC_ON:
        work->sync(work->context, instruction->kind == LOOM_INSTRUCTION_SYNC_ON);
        return LOOM_OK;
    case LOOM_INSTRUCTION_GRAD_SYNC:
        if (work->grad_sync)
            work->grad_sync(work->context, instruction->chunk);
        return LOOM_OK;
    case LOOM_INSTRUCTION_PARAM_SYNC:
        if (work->param_sync)
            work->param_sync(work->context, instruction->chunk);
        return LOOM_OK;
    default:
        return loom_fail(LOOM_ERR_STATE, "instruction %lld of the schedule has kind %d, which is none", (long long)at,
            (int)instruction->kind);
    }
}

static loom_status make_room(loom__pipeline *p) {
    const loom__pipeline_run *run = p->run;
    int64_t chunks = p->options.chunks, cells;
    if (run->microbatches < 1 || __builtin_mul_overflow(run->microbatches, chunks, &cells))
        return loom_fail(
            LOOM_ERR_ARGUMENT, "microbatches of a step: found %lld, expected 1 or more", (long long)run->microbatches);
    if (cells > p->cell_count) {
        free(p->cells);
        p->cells = calloc((size_t)cells, sizeof *p->cells);
        p->cell_count = p->cells ? cells : 0;
    }
    if (run->microbatches > p->left_count) {
        free(p->left);
        p->left = calloc((size_t)run->microbatches, sizeof *p->left);
        p->left_count = p->left ? run->microbatches : 0;
    }
    if (!p->cells || !p->left)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld microbatches in %lld chunks",
            (long long)run->microbatches, (long long)chunks);
    for (int64_t i = 0; i < run->microbatches; i++)
        p->left[i] = chunks;
    p->live = 0;
    return LOOM_OK;
}

/* A list that leaves something undone would train on less than the step, without a word. */
static loom_status check_finished(const loom__pipeline *p) {
    for (int64_t i = 0; i < p->run->microbatches; i++)
        if (p->left[i] != 0)
            return loom_fail(LOOM_ERR_STATE,
                "the schedule of stage %d ends with %lld of the %lld chunks of microbatch %lld undone", p->stage,
                (long long)p->left[i], (long long)p->options.chunks, (long long)i);
    for (int64_t i = 0; i < p->run->microbatches * p->options.chunks; i++)
        if (p->cells[i].to_send || p->cells[i].d_input || p->cells[i].activation.posted || p->cells[i].gradient.posted)
            return loom_fail(LOOM_ERR_STATE,
                "the schedule of stage %d ends with a message of microbatch %lld, chunk %lld, that nobody sent or used",
                p->stage, (long long)(i % p->run->microbatches), (long long)(i / p->run->microbatches));
    return LOOM_OK;
}

static void give_up(loom__pipeline *p, loom_status why) {
    loom__exchange_cancel(&p->exchange, why);
    for (int64_t i = 0; i < p->run->microbatches * p->options.chunks; i++) {
        cell *c = &p->cells[i];
        loom__exchange_cancel_incoming(&p->exchange, &c->activation, why);
        loom__exchange_cancel_incoming(&p->exchange, &c->gradient, why);
        loom_tensor_release(c->to_send);
        loom_tensor_release(c->d_output);
        loom_tensor_release(c->d_input);
        loom_tape_destroy(c->tape);
        c->tape = NULL;
        c->to_send = c->d_output = c->d_input = NULL;
    }
    /* Receives lie in the cells: what MPI may still write to is left where it is. */
    if (p->rank->endpoint->lent) {
        p->cells = NULL;
        p->cell_count = 0;
    } else {
        memset(p->cells, 0, (size_t)p->cell_count * sizeof *p->cells);
    }
}

loom_status loom__pipeline_execute(loom__pipeline *p, const loom__pipeline_run *run, const loom__pipeline_work *work) {
    p->run = run;
    p->work = work;
    LOOM_TRY(make_room(p));
    loom_status status = LOOM_OK;
    for (int64_t at = 0; !status && at < run->list->count; at++) {
        status = carry_out(p, at);
        if (status)
            status = say_where(p, &run->list->instructions[at], status);
    }
    if (!status)
        status = loom__exchange_finish(&p->exchange);
    if (!status)
        status = check_finished(p);
    if (status)
        give_up(p, status);
    loom_rank_note(p->rank, NULL);
    return status;
}
