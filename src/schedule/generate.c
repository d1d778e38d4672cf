/* The lists of instructions, stage by stage. Each generator walks the virtual microbatches in the order of the
 * reference's functions and appends; which (microbatch, chunk) a number stands for is arithmetic (config.c), so that a
 * list takes time and memory in proportion to its length. The invariant: what is exchanged in one call of the reference
 * stands together under one number, sends before receives, and every send has its receive in the neighbour's list. */
#include <inttypes.h>
#include <stdlib.h>

#include "schedule/schedule.h"

typedef struct builder {
    const loom_schedule_config *config;
    int64_t stage, chunks;
    loom_schedule_counts counts;
    loom_schedule_list list;
    int64_t room, exchanges;
    bool sync, failed;
} builder;

static void append(builder *b, loom_instruction_kind kind, int64_t microbatch, int32_t chunk, int64_t exchange) {
    if (b->list.count == b->room && !b->failed) {
        int64_t room = b->room > 0 ? b->room * 2 : 64;
        loom_instruction *grown = realloc(b->list.instructions, (size_t)room * sizeof *grown);
        b->failed = !grown;
        if (grown) {
            b->list.instructions = grown;
            b->room = room;
        }
    }
    if (!b->failed)
        b->list.instructions[b->list.count++] = (loom_instruction){kind, chunk, microbatch, exchange};
}

static bool first_stage(const builder *b) {
    return b->stage == 0;
}

static bool last_stage(const builder *b) {
    return b->stage == b->config->stages - 1;
}

static void set_sync(builder *b, bool on) {
    if (b->sync != on)
        append(b, on ? LOOM_INSTRUCTION_SYNC_ON : LOOM_INSTRUCTION_SYNC_OFF, -1, 0, -1);
    b->sync = on;
}

/* One message of an exchange. */
typedef struct message {
    bool there;
    int32_t chunk;
    int64_t microbatch;
} message;

typedef struct exchange {
    message send_next, send_previous, receive_previous, receive_next;
} exchange;

static void append_exchange(builder *b, exchange e) {
    if (e.send_next.there)
        append(b, LOOM_INSTRUCTION_SEND_NEXT, e.send_next.microbatch, e.send_next.chunk, b->exchanges);
    if (e.send_previous.there)
        append(b, LOOM_INSTRUCTION_SEND_PREVIOUS, e.send_previous.microbatch, e.send_previous.chunk, b->exchanges);
    if (e.receive_previous.there)
        append(b, LOOM_INSTRUCTION_RECEIVE_PREVIOUS, e.receive_previous.microbatch, e.receive_previous.chunk,
            b->exchanges);
    if (e.receive_next.there)
        append(b, LOOM_INSTRUCTION_RECEIVE_NEXT, e.receive_next.microbatch, e.receive_next.chunk, b->exchanges);
    b->exchanges++;
}

static void one_stage(builder *b) {
    int64_t count = b->config->microbatches;
    bool halves = b->config->kind == LOOM_SCHEDULE_ZERO_BUBBLE;
    for (int64_t i = 0; i < count; i++) {
        if (i == count - 1)
            set_sync(b, true);
        append(b, LOOM_INSTRUCTION_FORWARD, i, 0, -1);
        if (b->config->forward_only)
            continue;
        append(b, halves ? LOOM_INSTRUCTION_BACKWARD_INPUT : LOOM_INSTRUCTION_BACKWARD, i, 0, -1);
        if (halves)
            append(b, LOOM_INSTRUCTION_BACKWARD_WEIGHT, i, 0, -1);
    }
}

/* The ends of the pipeline have no neighbour on that side. */
static message to_next(const builder *b, int64_t microbatch) {
    return (message){!last_stage(b), 0, microbatch};
}

static message to_previous(const builder *b, int64_t microbatch) {
    return (message){!first_stage(b), 0, microbatch};
}

static void stages_forward_only(builder *b) {
    for (int64_t i = 0; i < b->config->microbatches; i++) {
        append_exchange(b, (exchange){.receive_previous = to_previous(b, i)});
        append(b, LOOM_INSTRUCTION_FORWARD, i, 0, -1);
        append_exchange(b, (exchange){.send_next = to_next(b, i)});
    }
}

static void weight_half(builder *b, int64_t microbatch) {
    bool last = microbatch == b->config->microbatches - 1;
    if (last && (!b->config->align_sync || first_stage(b)))
        set_sync(b, true);
    append(b, LOOM_INSTRUCTION_BACKWARD_WEIGHT, microbatch, 0, -1);
}

static void backward(builder *b, int64_t microbatch) {
    if (b->config->kind == LOOM_SCHEDULE_1F1B)
        append(b, LOOM_INSTRUCTION_BACKWARD, microbatch, 0, -1);
    else
        append(b, LOOM_INSTRUCTION_BACKWARD_INPUT, microbatch, 0, -1);
}

/* Weight halves wait for their turn: stage s lets s of them be outstanding, so that with its stages - s microbatches
 * under way it holds as many activations as stage 0, and no more. */
static void one_forward_one_backward(builder *b) {
    bool halves = b->config->kind == LOOM_SCHEDULE_ZERO_BUBBLE;
    bool early = !halves && (!b->config->align_sync || first_stage(b));
    int64_t count = b->config->microbatches, warmup = b->counts.warmup, remaining = b->counts.remaining;
    for (int64_t i = 0; i < warmup; i++) {
        append_exchange(b, (exchange){.receive_previous = to_previous(b, i)});
        append(b, LOOM_INSTRUCTION_FORWARD, i, 0, -1);
        append_exchange(b, (exchange){.send_next = to_next(b, i)});
    }
    if (remaining > 0)
        append_exchange(b, (exchange){.receive_previous = to_previous(b, warmup)});
    for (int64_t i = 0; i < count; i++) {
        bool steady = i < remaining, more = i + 1 < remaining;
        if (steady) {
            append(b, LOOM_INSTRUCTION_FORWARD, warmup + i, 0, -1);
            append_exchange(b, (exchange){.send_next = to_next(b, warmup + i), .receive_next = to_next(b, i)});
        }
        if (i == count - 1 && early)
            set_sync(b, true);
        if (!steady)
            append_exchange(b, (exchange){.receive_next = to_next(b, i)});
        backward(b, i);
        exchange behind = {.send_previous = to_previous(b, i)};
        if (more)
            behind.receive_previous = to_previous(b, warmup + i + 1);
        append_exchange(b, behind);
        if (halves && i >= b->stage)
            weight_half(b, i - b->stage);
    }
    for (int64_t i = count > b->stage ? count - b->stage : 0; halves && i < count; i++)
        weight_half(b, i);
    if (!b->sync) {
        set_sync(b, true);
        append(b, LOOM_INSTRUCTION_GRAD_SYNC, -1, 0, -1);
    }
}

static void virtual_microbatch(const builder *b, int64_t index, bool backward_one, message *m) {
    m->there = true;
    loom_schedule_virtual_microbatch(b->config, index, backward_one, &m->microbatch, &m->chunk);
}

/* What the reference receives after its forward number `index`: the next that this stage needs. The first stage gets
 * what the last one makes at this time, stages - 1 later, unless that leaves the model. Backwards are the mirror image.
 */
static message incoming(const builder *b, int64_t index, bool backward_one) {
    message m = {0};
    bool leading = backward_one ? last_stage(b) : first_stage(b);
    if (!leading) {
        virtual_microbatch(b, index + 1, backward_one, &m);
        return m;
    }
    int64_t aligned = index - (b->config->stages - 1);
    if (aligned < 0)
        return m;
    virtual_microbatch(b, aligned, backward_one, &m);
    m.there = m.chunk != (backward_one ? 0 : b->chunks - 1);
    m.chunk += backward_one ? -1 : 1;
    return m;
}

/* What leaves after the forward or backward number `index`; nothing where the model ends. */
static message outgoing(const builder *b, int64_t index, bool backward_one) {
    message m;
    virtual_microbatch(b, index, backward_one, &m);
    m.there = backward_one ? !(first_stage(b) && m.chunk == 0) : !(last_stage(b) && m.chunk == b->chunks - 1);
    return m;
}

/* The gathers of a chunk start on all stages at once: the first microbatch reaches this one `stage` forwards later. */
static void interleaved_forward(builder *b, int64_t index) {
    message m;
    if (b->config->align_sync && index + b->stage < b->counts.total) {
        virtual_microbatch(b, index + b->stage, false, &m);
        if (m.microbatch == 0 && m.chunk + 1 > 1 && m.chunk + 1 < b->chunks)
            append(b, LOOM_INSTRUCTION_PARAM_SYNC, -1, m.chunk + 1, -1);
    }
    virtual_microbatch(b, index, false, &m);
    append(b, LOOM_INSTRUCTION_FORWARD, m.microbatch, m.chunk, -1);
}

static void interleaved_backward(builder *b, int64_t index) {
    message m;
    virtual_microbatch(b, index, true, &m);
    if (!b->config->align_sync && m.microbatch == b->config->microbatches - 1)
        set_sync(b, true);
    append(b, LOOM_INSTRUCTION_BACKWARD, m.microbatch, m.chunk, -1);
    if (b->config->align_sync && index >= b->stage) {
        virtual_microbatch(b, index - b->stage, true, &m);
        if (m.microbatch == b->config->microbatches - 1) {
            set_sync(b, true);
            append(b, LOOM_INSTRUCTION_GRAD_SYNC, -1, m.chunk, -1);
        }
    }
    set_sync(b, false);
}

static void interleaved(builder *b) {
    int64_t total = b->counts.total, warmup = b->counts.warmup, remaining = b->counts.remaining;
    bool forward_only = b->config->forward_only;
    for (int32_t chunk = 0; b->config->align_sync && chunk < 2; chunk++)
        append(b, LOOM_INSTRUCTION_PARAM_SYNC, -1, chunk, -1);
    message first = {!first_stage(b), 0, 0}, first_gradient = {!last_stage(b), (int32_t)b->chunks - 1, 0};
    append_exchange(b, (exchange){.receive_previous = first});
    for (int64_t k = 0; k < warmup; k++) {
        interleaved_forward(b, k);
        exchange e = {.send_next = outgoing(b, k, false)};
        if (k + 1 < total)
            e.receive_previous = incoming(b, k, false);
        if (k == warmup - 1 && remaining > 0)
            e.receive_next = first_gradient;
        append_exchange(b, e);
    }
    for (int64_t k = 0; k < remaining; k++) {
        interleaved_forward(b, warmup + k);
        interleaved_backward(b, k);
        exchange e = {.send_next = outgoing(b, warmup + k, false),
            .send_previous = outgoing(b, k, true),
            .receive_next = incoming(b, k, true)};
        if (k + 1 < remaining)
            e.receive_previous = incoming(b, warmup + k, false);
        append_exchange(b, e);
    }
    if (forward_only)
        return;
    if (remaining == 0)
        append_exchange(b, (exchange){.receive_next = first_gradient});
    for (int64_t k = remaining; k < total; k++) {
        interleaved_backward(b, k);
        exchange e = {.send_previous = outgoing(b, k, true)};
        if (k + 1 < total)
            e.receive_next = incoming(b, k, true);
        append_exchange(b, e);
    }
    set_sync(b, true);
    /* The last group has as many microbatches as there are stages, or more: of the last backwards only those of chunk 0
     * are so near the end that a later stage does not reach their aligned moment. */
    if (b->config->align_sync && !first_stage(b))
        append(b, LOOM_INSTRUCTION_GRAD_SYNC, -1, 0, -1);
}

loom_status loom_schedule_make(const loom_schedule_config *config, int64_t stage, loom_schedule_list *list) {
    LOOM_TRY(loom_schedule_config_check(config));
    if (stage < 0 || stage >= config->stages)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "stage is %" PRId64 ": expected one of 0 … %" PRId64, stage, config->stages - 1);
    builder b = {.config = config, .stage = stage, .chunks = loom__schedule_chunks(config), .sync = true};
    loom_schedule_count(config, stage, &b.counts);
    set_sync(&b, false);
    if (config->stages == 1)
        one_stage(&b);
    else if (b.chunks > 1)
        interleaved(&b);
    else if (config->forward_only)
        stages_forward_only(&b);
    else
        one_forward_one_backward(&b);
    if (b.failed) {
        free(b.list.instructions);
        return loom_fail(LOOM_ERR_MEMORY,
            "out of memory for the schedule of stage %" PRId64 " (%" PRId64 " microbatches in %" PRId64 " chunks)",
            stage, config->microbatches, b.chunks);
    }
    *list = b.list;
    return LOOM_OK;
}

void loom_schedule_list_free(loom_schedule_list *list) {
    if (list)
        free(list->instructions);
    if (list)
        *list = (loom_schedule_list){0};
}
