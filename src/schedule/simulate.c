/* All stages played against each other. A stage runs until it needs a message whose other side has not started, and is
 * taken up again when that happens; since the time of everything follows from the lists alone, the order in which
 * stages are taken up does not matter, and each start of a send or receive wakes one stage at most: the whole is
 * linear. When nobody can go on, each stage that is not through waits for another one such, and following them finds
 * the cycle. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "schedule/schedule.h"

/* A message is named by the computation that reads it: a forward for an activation, a backward for a gradient. */
typedef struct wire {
    double sent, received; /* when the two sides started; below 0: not yet */
} wire;

typedef struct player {
    int64_t next; /* instruction */
    double time, end;
    int64_t event;       /* the next of the result's */
    bool posted, queued; /* posted: the exchange at `next` has started (blocking) */
    int64_t activations, receives;
} player;

typedef struct game {
    const loom_schedule_config *config;
    const loom_schedule_list *lists;
    loom_schedule_costs costs;
    bool blocking;
    int64_t chunks;
    wire *wires; /* [stages, 2, chunks, microbatches]: activations, then gradients */
    player *players;
    int64_t *queue, waiting, taken; /* a ring of stages */
    loom_schedule_result result;
} game;

/* The two ends of the message of a send or receive, and of the message that a computation reads. */
typedef struct route {
    bool there, activation;
    int64_t sender, reader;
    int32_t chunk; /* of the reader */
    int64_t microbatch;
} route;

static route route_of(const game *g, int64_t stage, const loom_instruction *at) {
    int64_t stages = g->config->stages, next = (stage + 1) % stages, previous = (stage + stages - 1) % stages;
    route r = {true, false, stage, stage, at->chunk, at->microbatch};
    switch (at->kind) {
    case LOOM_INSTRUCTION_SEND_NEXT:
        r.activation = true;
        r.reader = next;
        r.chunk += stage == stages - 1;
        break;
    case LOOM_INSTRUCTION_SEND_PREVIOUS:
        r.reader = previous;
        r.chunk -= stage == 0;
        break;
    case LOOM_INSTRUCTION_RECEIVE_PREVIOUS:
    case LOOM_INSTRUCTION_FORWARD:
        r.activation = true;
        r.sender = previous;
        r.there = !(stage == 0 && at->chunk == 0);
        break;
    case LOOM_INSTRUCTION_RECEIVE_NEXT:
    case LOOM_INSTRUCTION_BACKWARD:
    case LOOM_INSTRUCTION_BACKWARD_INPUT:
        r.sender = next;
        r.there = !(stage == stages - 1 && at->chunk == g->chunks - 1);
        break;
    default:
        r.there = false;
    }
    return r;
}

static wire *wire_of(const game *g, const route *r) {
    int64_t place = ((r->reader * 2 + !r->activation) * g->chunks + r->chunk) * g->config->microbatches + r->microbatch;
    return &g->wires[place];
}

static bool through(const wire *w) {
    return w->sent >= 0.0 && w->received >= 0.0;
}

static double arrival(const game *g, const wire *w) {
    return (w->sent > w->received ? w->sent : w->received) + g->costs.message;
}

static void wake(game *g, int64_t stage) {
    player *p = &g->players[stage];
    if (p->queued)
        return;
    p->queued = true;
    g->queue[(g->taken + g->waiting++) % g->config->stages] = stage;
}

static void start_message(game *g, int64_t stage, const loom_instruction *at) {
    route r = route_of(g, stage, at);
    wire *w = wire_of(g, &r);
    player *p = &g->players[stage];
    loom_schedule_stage_result *seen = &g->result.stage[stage];
    if (loom__instruction_sends(at->kind)) {
        w->sent = p->time;
        wake(g, r.reader);
        return;
    }
    w->received = p->time;
    if (++p->receives > seen->receives)
        seen->receives = p->receives;
    if (g->blocking)
        wake(g, r.sender);
}

static double cost(const double *costs, int64_t place) {
    return costs ? costs[place] : 1.0;
}

static double cost_of(const game *g, int64_t stage, const loom_instruction *at) {
    int64_t place = stage * g->chunks + at->chunk;
    switch (at->kind) {
    case LOOM_INSTRUCTION_FORWARD:
        return cost(g->costs.forward, place);
    case LOOM_INSTRUCTION_BACKWARD_INPUT:
        return cost(g->costs.backward_input, place);
    case LOOM_INSTRUCTION_BACKWARD_WEIGHT:
        return cost(g->costs.backward_weight, place);
    default:
        return cost(g->costs.backward_input, place) + cost(g->costs.backward_weight, place);
    }
}

static void count_activations(game *g, int64_t stage, loom_instruction_kind kind) {
    player *p = &g->players[stage];
    loom_schedule_stage_result *seen = &g->result.stage[stage];
    if (kind == LOOM_INSTRUCTION_FORWARD && ++p->activations > seen->activations)
        seen->activations = p->activations;
    if (g->config->forward_only || kind == LOOM_INSTRUCTION_BACKWARD || kind == LOOM_INSTRUCTION_BACKWARD_WEIGHT)
        p->activations--;
}

/* False: what it reads is not under way. */
static bool compute(game *g, int64_t stage, const loom_instruction *at) {
    player *p = &g->players[stage];
    route r = route_of(g, stage, at);
    double start = p->time;
    if (r.there) {
        const wire *w = wire_of(g, &r);
        if (!through(w))
            return false;
        if (arrival(g, w) > start)
            start = arrival(g, w);
        p->receives--;
    }
    double took = cost_of(g, stage, at);
    p->time = p->end = start + took;
    g->result.stage[stage].busy += took;
    count_activations(g, stage, at->kind);
    g->result.events[p->event++] = (loom_schedule_event){stage, at->kind, at->chunk, at->microbatch, start, p->end};
    return true;
}

static bool transfers(loom_instruction_kind kind) {
    return loom__instruction_sends(kind) || loom__instruction_receives(kind);
}

/* One behind the last of the exchange that begins at `first`. */
static int64_t exchange_end(const loom_schedule_list *list, int64_t first) {
    int64_t end = first + 1, number = list->instructions[first].exchange;
    while (number >= 0 && end < list->count && transfers(list->instructions[end].kind) &&
           list->instructions[end].exchange == number)
        end++;
    return end;
}

/* The reference's call: all of it starts together, and the stage goes on when all of it is done. */
static bool exchange(game *g, int64_t stage) {
    const loom_schedule_list *list = &g->lists[stage];
    player *p = &g->players[stage];
    int64_t first = p->next, end = exchange_end(list, first);
    for (int64_t i = first; i < end && !p->posted; i++)
        start_message(g, stage, &list->instructions[i]);
    p->posted = true;
    double done = p->time;
    for (int64_t i = first; i < end; i++) {
        route r = route_of(g, stage, &list->instructions[i]);
        const wire *w = wire_of(g, &r);
        if (!through(w))
            return false;
        if (arrival(g, w) > done)
            done = arrival(g, w);
    }
    p->posted = false;
    p->time = done;
    p->next = end;
    return true;
}

static void play(game *g, int64_t stage) {
    const loom_schedule_list *list = &g->lists[stage];
    player *p = &g->players[stage];
    while (p->next < list->count) {
        const loom_instruction *at = &list->instructions[p->next];
        if (g->blocking && transfers(at->kind)) {
            if (!exchange(g, stage))
                return;
            continue;
        }
        if (transfers(at->kind))
            start_message(g, stage, at);
        else if (loom_instruction_computes(at->kind) && !compute(g, stage, at))
            return;
        p->next++;
    }
}

/* What keeps a stage that is not through: the message, and the stage on its other side. */
static route obstacle(const game *g, int64_t stage, int64_t *other) {
    const loom_schedule_list *list = &g->lists[stage];
    int64_t first = g->players[stage].next, end = exchange_end(list, first);
    route r = route_of(g, stage, &list->instructions[first]);
    for (int64_t i = first; i < end; i++) {
        r = route_of(g, stage, &list->instructions[i]);
        if (!through(wire_of(g, &r)))
            break;
    }
    *other = wire_of(g, &r)->sent < 0.0 ? r.sender : r.reader;
    return r;
}

/* Where the other stage's list has its side of the message. */
static int64_t find_side(const game *g, int64_t stage, const route *wanted, loom_instruction_kind *kind) {
    const loom_schedule_list *list = &g->lists[stage];
    for (int64_t i = g->players[stage].next; i < list->count; i++) {
        route r = route_of(g, stage, &list->instructions[i]);
        *kind = list->instructions[i].kind;
        if (transfers(*kind) && wire_of(g, &r) == wire_of(g, wanted))
            return i;
    }
    return -1;
}

enum { STAGES_NAMED = 16 };

static loom_status deadlock(const game *g) {
    char text[6000];
    size_t used = 0;
    int64_t stage = 0, other, length = 0;
    while (g->players[stage].next == g->lists[stage].count)
        stage++;
    /* After as many steps as there are stages one stands on the cycle. */
    for (int64_t i = 0; i < g->config->stages; i++) {
        (void)obstacle(g, stage, &other);
        stage = other;
    }
    int64_t first = stage;
    do {
        const loom_instruction *at = &g->lists[stage].instructions[g->players[stage].next];
        route r = obstacle(g, stage, &other);
        loom_instruction_kind kind = LOOM_INSTRUCTION_KINDS;
        int64_t there = find_side(g, other, &r, &kind);
        if (length < STAGES_NAMED)
            used += (size_t)snprintf(text + used, sizeof text - used,
                "%sstage %" PRId64 " at instruction %" PRId64 " (%s of microbatch %" PRId64
                ", chunk %d) waits for stage %" PRId64 " to start its instruction %" PRId64
                " (%s, the %s for microbatch %" PRId64 ", chunk %d)",
                length > 0 ? "; " : "", stage, g->players[stage].next, loom_instruction_name(at->kind), at->microbatch,
                at->chunk, other, there, loom_instruction_name(kind), r.activation ? "activation" : "gradient",
                r.microbatch, r.chunk);
        length++;
        stage = other;
    } while (stage != first);
    if (length > STAGES_NAMED)
        snprintf(text + used, sizeof text - used, "; and %" PRId64 " more", length - STAGES_NAMED);
    return loom_fail(LOOM_ERR_ARGUMENT, "the schedule ends in a deadlock of %" PRId64 " stages: %s", length, text);
}

static loom_status play_all(game *g) {
    loom_schedule_result *result = &g->result;
    for (int64_t stage = 0; stage < g->config->stages; stage++)
        wake(g, stage);
    while (g->waiting > 0) {
        int64_t stage = g->queue[g->taken];
        g->taken = (g->taken + 1) % g->config->stages;
        g->waiting--;
        g->players[stage].queued = false;
        play(g, stage);
    }
    double busy = 0.0;
    for (int64_t stage = 0; stage < g->config->stages; stage++) {
        const player *p = &g->players[stage];
        if (p->next < g->lists[stage].count)
            return deadlock(g);
        if (p->end > result->makespan)
            result->makespan = p->end;
        busy += result->stage[stage].busy;
    }
    result->bubble = result->makespan > 0.0 ? 1.0 - busy / ((double)g->config->stages * result->makespan) : 0.0;
    return LOOM_OK;
}

static loom_status check_costs(const loom_schedule_config *config, const loom_schedule_costs *costs) {
    const double *const arrays[] = {costs->forward, costs->backward_input, costs->backward_weight};
    static const char *const what[] = {"forward", "input half", "weight half"};
    int64_t chunks = loom__schedule_chunks(config);
    for (int a = 0; a < 3; a++)
        for (int64_t i = 0; arrays[a] && i < config->stages * chunks; i++)
            if (!(arrays[a][i] >= 0.0) || isinf(arrays[a][i]))
                return loom_fail(LOOM_ERR_ARGUMENT,
                    "the cost of the %s of stage %" PRId64 ", chunk %" PRId64
                    " is %g: expected a finite number of at least 0",
                    what[a], i / chunks, i % chunks, arrays[a][i]);
    if (!(costs->message >= 0.0) || isinf(costs->message))
        return loom_fail(
            LOOM_ERR_ARGUMENT, "the cost of a message is %g: expected a finite number of at least 0", costs->message);
    return LOOM_OK;
}

static loom_status allocate(game *g) {
    size_t stages = (size_t)g->config->stages, events = 0;
    size_t wires = stages * 2 * (size_t)g->chunks * (size_t)g->config->microbatches;
    g->players = calloc(stages, sizeof *g->players);
    g->queue = malloc(stages * sizeof *g->queue);
    g->wires = malloc(wires * sizeof *g->wires);
    g->result.stage = calloc(stages, sizeof *g->result.stage);
    for (size_t stage = 0; g->players && stage < stages; stage++) {
        g->players[stage].event = (int64_t)events;
        for (int64_t i = 0; i < g->lists[stage].count; i++)
            events += loom_instruction_computes(g->lists[stage].instructions[i].kind);
    }
    g->result.event_count = (int64_t)events;
    g->result.events = malloc(events * sizeof *g->result.events);
    if (!g->players || !g->queue || !g->wires || !g->result.stage || !g->result.events)
        return loom_fail(LOOM_ERR_MEMORY,
            "out of memory to simulate %zu stages with %" PRId64 " microbatches in %" PRId64 " chunks", stages,
            g->config->microbatches, g->chunks);
    for (size_t i = 0; i < wires; i++)
        g->wires[i] = (wire){-1.0, -1.0};
    return LOOM_OK;
}

loom_status loom_schedule_simulate(const loom_schedule_config *config, const loom_schedule_list *lists,
    const loom_schedule_costs *costs, bool blocking, loom_schedule_result *result) {
    LOOM_TRY(loom_schedule_config_check(config));
    game g = {.config = config, .lists = lists, .blocking = blocking, .chunks = loom__schedule_chunks(config)};
    if (costs)
        g.costs = *costs;
    LOOM_TRY(check_costs(config, &g.costs));
    LOOM_TRY(loom__schedule_prove(config, lists));
    g.result.stages = config->stages;
    loom_status status = allocate(&g);
    if (!status)
        status = play_all(&g);
    free(g.players);
    free(g.queue);
    free(g.wires);
    if (status)
        loom_schedule_result_free(&g.result);
    else
        *result = g.result;
    return status;
}

void loom_schedule_result_free(loom_schedule_result *result) {
    if (!result)
        return;
    free(result->stage);
    free(result->events);
    *result = (loom_schedule_result){0};
}
