/* The proof of one stage's list: a walk with a few flags for each (microbatch, chunk), which say what has been done. An
 * instruction is legal when what it needs has been done and it itself has not; at the end everything must have been
 * done. Nothing here looks at another stage: messages have names, so that complete lists match. */
#include <inttypes.h>
#include <stdlib.h>

#include "schedule/schedule.h"

enum {
    FORWARD = 1,
    INPUT_HALF = 2,
    WEIGHT_HALF = 4,
    INPUT_RECEIVED = 8,
    GRADIENT_RECEIVED = 16,
    OUTPUT_SENT = 32,
    GRADIENT_SENT = 64
};

typedef struct proof {
    const loom_schedule_config *config;
    int64_t stage, chunks, at;
    loom_instruction now;
    unsigned char *done;  /* [chunks, microbatches] flags */
    int64_t *accumulated; /* [chunks] microbatches whose gradients of parameters are in */
    bool *reduced;        /* [chunks] the reduction has started */
    bool sync;
} proof;

static const char *const names[LOOM_INSTRUCTION_KINDS] = {
    [LOOM_INSTRUCTION_FORWARD] = "forward",
    [LOOM_INSTRUCTION_BACKWARD] = "backward",
    [LOOM_INSTRUCTION_BACKWARD_INPUT] = "backward (inputs)",
    [LOOM_INSTRUCTION_BACKWARD_WEIGHT] = "backward (weights)",
    [LOOM_INSTRUCTION_SEND_NEXT] = "send to next",
    [LOOM_INSTRUCTION_SEND_PREVIOUS] = "send to previous",
    [LOOM_INSTRUCTION_RECEIVE_PREVIOUS] = "receive from previous",
    [LOOM_INSTRUCTION_RECEIVE_NEXT] = "receive from next",
    [LOOM_INSTRUCTION_SYNC_OFF] = "reductions off",
    [LOOM_INSTRUCTION_SYNC_ON] = "reductions on",
    [LOOM_INSTRUCTION_GRAD_SYNC] = "start of the gradient reduction",
    [LOOM_INSTRUCTION_PARAM_SYNC] = "start of the parameter gather",
};

const char *loom_instruction_name(loom_instruction_kind kind) {
    return (unsigned)kind < LOOM_INSTRUCTION_KINDS ? names[kind] : "unknown instruction";
}

bool loom_instruction_computes(loom_instruction_kind kind) {
    return kind == LOOM_INSTRUCTION_FORWARD || kind == LOOM_INSTRUCTION_BACKWARD ||
           kind == LOOM_INSTRUCTION_BACKWARD_INPUT || kind == LOOM_INSTRUCTION_BACKWARD_WEIGHT;
}

static loom_status wrong(const proof *p, const char *why) {
    if (p->now.microbatch < 0)
        return loom_fail(LOOM_ERR_ARGUMENT, "stage %" PRId64 ", instruction %" PRId64 " (%s, chunk %d): %s", p->stage,
            p->at, loom_instruction_name(p->now.kind), p->now.chunk, why);
    return loom_fail(LOOM_ERR_ARGUMENT,
        "stage %" PRId64 ", instruction %" PRId64 " (%s of microbatch %" PRId64 ", chunk %d): %s", p->stage, p->at,
        loom_instruction_name(p->now.kind), p->now.microbatch, p->now.chunk, why);
}

/* Where the model begins and ends nothing is exchanged. */
static bool model_begins(const proof *p, int32_t chunk) {
    return loom_schedule_model_begins(p->stage, chunk);
}

static bool model_ends(const proof *p, int32_t chunk) {
    return loom_schedule_model_ends(p->config->stages, p->chunks, p->stage, chunk);
}

/* The next accumulation of the chunk; its place among the others and the state of the reductions are what they must
 * be. */
static loom_status accumulate(proof *p) {
    int64_t *accumulated = &p->accumulated[p->now.chunk];
    if (p->now.microbatch != *accumulated)
        return wrong(p, "its gradients of parameters must be accumulated in the order of microbatches");
    bool last = ++*accumulated == p->config->microbatches;
    if (p->sync && !last)
        return wrong(p, "reductions are on, but later microbatches still add to the gradients");
    if (p->sync)
        p->reduced[p->now.chunk] = true;
    return LOOM_OK;
}

static loom_status compute(proof *p, unsigned char *done) {
    loom_instruction_kind kind = p->now.kind;
    if (kind == LOOM_INSTRUCTION_FORWARD) {
        if (*done & FORWARD)
            return wrong(p, "it is there twice");
        if (!model_begins(p, p->now.chunk) && !(*done & INPUT_RECEIVED))
            return wrong(p, "its input has not been received");
        *done |= FORWARD;
        return LOOM_OK;
    }
    if (p->config->forward_only)
        return wrong(p, "the schedule is forward-only");
    if (kind != LOOM_INSTRUCTION_BACKWARD_WEIGHT) {
        if (*done & INPUT_HALF)
            return wrong(p, "it is there twice");
        if (!(*done & FORWARD))
            return wrong(p, "its forward has not been computed");
        if (!model_ends(p, p->now.chunk) && !(*done & GRADIENT_RECEIVED))
            return wrong(p, "the gradient of its output has not been received");
        *done |= INPUT_HALF;
    }
    if (kind != LOOM_INSTRUCTION_BACKWARD_INPUT) {
        if (*done & WEIGHT_HALF)
            return wrong(p, "it is there twice");
        if (!(*done & INPUT_HALF))
            return wrong(p, "its input half has not been computed");
        *done |= WEIGHT_HALF;
        return accumulate(p);
    }
    return LOOM_OK;
}

static loom_status transfer(proof *p, unsigned char *done) {
    loom_instruction_kind kind = p->now.kind;
    bool activation = kind == LOOM_INSTRUCTION_SEND_NEXT || kind == LOOM_INSTRUCTION_RECEIVE_PREVIOUS;
    if (!activation && p->config->forward_only)
        return wrong(p, "the schedule is forward-only");
    bool output = kind == LOOM_INSTRUCTION_SEND_NEXT || kind == LOOM_INSTRUCTION_RECEIVE_NEXT;
    if (output ? model_ends(p, p->now.chunk) : model_begins(p, p->now.chunk))
        return wrong(p, output ? "the model ends here" : "the model begins here");
    unsigned char needed = 0, flag;
    if (loom__instruction_sends(kind)) {
        needed = activation ? FORWARD : INPUT_HALF;
        flag = activation ? OUTPUT_SENT : GRADIENT_SENT;
    } else {
        flag = activation ? INPUT_RECEIVED : GRADIENT_RECEIVED;
    }
    if (*done & flag)
        return wrong(p, "it is there twice");
    if ((*done & needed) != needed)
        return wrong(p, "what it sends has not been computed");
    *done |= flag;
    return LOOM_OK;
}

static loom_status prove_instruction(proof *p) {
    loom_instruction_kind kind = p->now.kind;
    if ((unsigned)kind >= LOOM_INSTRUCTION_KINDS)
        return wrong(p, "there is no such instruction");
    if (p->now.chunk < 0 || p->now.chunk >= p->chunks)
        return wrong(p, "there is no such chunk");
    if (kind == LOOM_INSTRUCTION_SYNC_OFF || kind == LOOM_INSTRUCTION_SYNC_ON)
        p->sync = kind == LOOM_INSTRUCTION_SYNC_ON;
    if (kind == LOOM_INSTRUCTION_GRAD_SYNC) {
        if (p->reduced[p->now.chunk])
            return wrong(p, "the reduction has started already");
        if (p->accumulated[p->now.chunk] != p->config->microbatches)
            return wrong(p, "the gradients are not complete");
        p->reduced[p->now.chunk] = true;
    }
    if (kind >= LOOM_INSTRUCTION_SYNC_OFF)
        return LOOM_OK;
    if (p->now.microbatch < 0 || p->now.microbatch >= p->config->microbatches)
        return wrong(p, "there is no such microbatch");
    unsigned char *done = &p->done[p->now.chunk * p->config->microbatches + p->now.microbatch];
    return loom_instruction_computes(kind) ? compute(p, done) : transfer(p, done);
}

static loom_status missing(const proof *p, int32_t chunk, int64_t microbatch, loom_instruction_kind kind) {
    return loom_fail(LOOM_ERR_ARGUMENT,
        "stage %" PRId64 ": the %s of microbatch %" PRId64 ", chunk %d, is missing from its list", p->stage,
        loom_instruction_name(kind), microbatch, chunk);
}

/* What was received has been read when the forward or backward is there; so these are the rest. */
static loom_status prove_complete(const proof *p) {
    bool backward = !p->config->forward_only;
    for (int32_t chunk = 0; chunk < p->chunks; chunk++) {
        for (int64_t m = 0; m < p->config->microbatches; m++) {
            unsigned char done = p->done[chunk * p->config->microbatches + m];
            if (!(done & FORWARD))
                return missing(p, chunk, m, LOOM_INSTRUCTION_FORWARD);
            if (backward && !(done & INPUT_HALF))
                return missing(p, chunk, m, LOOM_INSTRUCTION_BACKWARD);
            if (backward && !(done & WEIGHT_HALF))
                return missing(p, chunk, m, LOOM_INSTRUCTION_BACKWARD_WEIGHT);
            if (!model_ends(p, chunk) && !(done & OUTPUT_SENT))
                return missing(p, chunk, m, LOOM_INSTRUCTION_SEND_NEXT);
            if (backward && !model_begins(p, chunk) && !(done & GRADIENT_SENT))
                return missing(p, chunk, m, LOOM_INSTRUCTION_SEND_PREVIOUS);
        }
        if (backward && !p->reduced[chunk])
            return loom_fail(
                LOOM_ERR_ARGUMENT, "stage %" PRId64 ": the gradients of chunk %d are never reduced", p->stage, chunk);
    }
    return LOOM_OK;
}

static loom_status prove_list(proof *p, const loom_schedule_list *list) {
    for (p->at = 0; p->at < list->count; p->at++) {
        p->now = list->instructions[p->at];
        LOOM_TRY(prove_instruction(p));
    }
    return prove_complete(p);
}

loom_status loom__schedule_prove(const loom_schedule_config *config, const loom_schedule_list *lists) {
    size_t chunks = (size_t)loom__schedule_chunks(config), flags = chunks * (size_t)config->microbatches;
    loom_status status = LOOM_OK;
    for (int64_t stage = 0; stage < config->stages && !status; stage++) {
        proof p = {.config = config, .stage = stage, .chunks = (int64_t)chunks, .sync = true};
        p.done = calloc(flags, sizeof *p.done);
        p.accumulated = calloc(chunks, sizeof *p.accumulated);
        p.reduced = calloc(chunks, sizeof *p.reduced);
        status =
            p.done && p.accumulated && p.reduced
                ? prove_list(&p, &lists[stage])
                : loom_fail(LOOM_ERR_MEMORY, "out of memory to prove a schedule of %zu virtual microbatches", flags);
        free(p.done);
        free(p.accumulated);
        free(p.reduced);
    }
    return status;
}
