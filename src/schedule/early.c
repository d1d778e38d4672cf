/* Receives ahead of need. Computations of a list are numbered; a receive moves in front of the one that stands `depth`
 * before its reader. Since a computation reads one message at most, at most depth + 1 readers of moved receives are
 * ever ahead, and one table of readers and one of places make the pass linear. */
#include <inttypes.h>
#include <stdlib.h>

#include "schedule/schedule.h"

typedef struct pass {
    const loom_schedule_config *config;
    const loom_schedule_list *list;
    int64_t depth, virtual_microbatches;
    int64_t *reader; /* [2, virtual microbatches] number of the computation that reads an input, a gradient */
    int64_t *first;  /* [computations + 1] of those moved in front of a computation, the first in `moved` */
    int64_t *moved;  /* receives, by the computation that they moved in front of */
    int64_t computations;
} pass;

static bool reads_input(loom_instruction_kind kind) {
    return kind == LOOM_INSTRUCTION_FORWARD || kind == LOOM_INSTRUCTION_RECEIVE_PREVIOUS;
}

static int64_t *reader_of(const pass *p, const loom_instruction *at) {
    int64_t place = at->chunk * p->config->microbatches + at->microbatch;
    return &p->reader[(reads_input(at->kind) ? 0 : p->virtual_microbatches) + place];
}

static loom_status find_readers(pass *p) {
    for (int64_t i = 0; i < 2 * p->virtual_microbatches; i++)
        p->reader[i] = -1;
    for (int64_t i = 0; i < p->list->count; i++) {
        const loom_instruction *at = &p->list->instructions[i];
        bool computes = loom_instruction_computes(at->kind);
        if (!computes && !loom__instruction_receives(at->kind))
            continue;
        if (at->chunk < 0 || at->chunk >= loom__schedule_chunks(p->config) || at->microbatch < 0 ||
            at->microbatch >= p->config->microbatches)
            return loom_fail(LOOM_ERR_ARGUMENT,
                "instruction %" PRId64 " (%s) is about microbatch %" PRId64 ", chunk %d: expected microbatches below "
                "%" PRId64 " and chunks below %" PRId64,
                i, loom_instruction_name(at->kind), at->microbatch, at->chunk, p->config->microbatches,
                loom__schedule_chunks(p->config));
        if (computes && at->kind != LOOM_INSTRUCTION_BACKWARD_WEIGHT)
            *reader_of(p, at) = p->computations;
        p->computations += computes;
    }
    return LOOM_OK;
}

/* The computation that a receive stands in front of, after the pass; `before` of them stand in front of it now. */
static int64_t place_of(const pass *p, const loom_instruction *receive, int64_t before) {
    int64_t reader = *reader_of(p, receive), wanted = reader > p->depth ? reader - p->depth : 0;
    return reader >= 0 && wanted < before ? wanted : before;
}

/* Counting sort of the receives that move by their new place, in list order where it is the same. */
static void sort_moved(pass *p) {
    for (int round = 0; round < 2; round++) {
        int64_t before = 0;
        for (int64_t i = 0; i < p->list->count; i++) {
            const loom_instruction *at = &p->list->instructions[i];
            before += loom_instruction_computes(at->kind);
            if (!loom__instruction_receives(at->kind))
                continue;
            int64_t place = place_of(p, at, before);
            if (place < before && round == 0)
                p->first[place + 1]++;
            else if (place < before)
                p->moved[p->first[place]++] = i;
        }
        for (int64_t c = 0; c < p->computations && round == 0; c++)
            p->first[c + 1] += p->first[c];
    }
}

/* After the sort, `first` of a place is its end. */
static void write_early(const pass *p, loom_schedule_list *early) {
    int64_t computation = 0, written = 0;
    for (int64_t i = 0; i < p->list->count; i++) {
        loom_instruction at = p->list->instructions[i];
        if (loom_instruction_computes(at.kind)) {
            for (; written < p->first[computation]; written++) {
                loom_instruction receive = p->list->instructions[p->moved[written]];
                receive.exchange = -1;
                early->instructions[early->count++] = receive;
            }
            computation++;
        }
        if (!loom__instruction_receives(at.kind) || place_of(p, &at, computation) == computation)
            early->instructions[early->count++] = at;
    }
}

loom_status loom_schedule_post_receives_early(
    const loom_schedule_config *config, const loom_schedule_list *list, int64_t depth, loom_schedule_list *early) {
    LOOM_TRY(loom_schedule_config_check(config));
    if (depth < 0)
        return loom_fail(LOOM_ERR_ARGUMENT, "depth is %" PRId64 ": expected at least 0; nearest legal 0", depth);
    pass p = {.config = config,
        .list = list,
        .depth = depth,
        .virtual_microbatches = loom__schedule_chunks(config) * config->microbatches};
    loom_schedule_list made = {0};
    loom_status status = LOOM_OK;
    p.reader = malloc((size_t)(2 * p.virtual_microbatches) * sizeof *p.reader);
    p.first = calloc((size_t)list->count + 2, sizeof *p.first);
    p.moved = malloc((size_t)(list->count + 1) * sizeof *p.moved);
    made.instructions = malloc((size_t)(list->count + 1) * sizeof *made.instructions);
    if (!p.reader || !p.first || !p.moved || !made.instructions)
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory for a schedule of %" PRId64 " instructions", list->count);
    if (!status)
        status = find_readers(&p);
    if (!status) {
        sort_moved(&p);
        write_early(&p, &made);
        *early = made;
    } else {
        free(made.instructions);
    }
    free(p.reader);
    free(p.first);
    free(p.moved);
    return status;
}
