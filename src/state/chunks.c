/* Reading chunks, alone or together. Together every member knows all wishes and so who reads what, and in which round.
 * The invariant: in round k each member sends the k-th chunk that it reads, be it read well or not, and receives, one
 * after another, those of the others that it wishes; so all messages meet, and a read that failed is told at the end.
 */
#include "state/chunks.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/task.h"
#include <stdlib.h>

enum { TAG = 0 };

typedef struct reading {
    const loom_checkpoint *checkpoint;
    const loom__chunk_wish *wishes; /* of this rank */
    int64_t count;
    loom_status (*take)(void *context, int64_t wish, const float *values);
    void *context;
    bool direct;
    const loom_team *team;
    const loom__chunk_wish *queue; /* what this rank reads, in this order */
    int64_t queued, next;          /* next: to be fetched */
    loom__chunk_memory memory[2];  /* of the chunk at hand and the next one, in turn */
    loom__task fetch;              /* of the next one */
    loom_value_pool *pool;         /* of the chunk at hand */
    float *own, *other;            /* the largest chunk, where chunks have to be copied */
} reading;

static const loom_checkpoint_tensor *tensor_of(const reading *r, const loom__chunk_wish *wish) {
    return loom_checkpoint_tensor_at(r->checkpoint, wish->tensor);
}

static int64_t elements_of(const reading *r, const loom__chunk_wish *wish) {
    const loom_checkpoint_tensor *tensor = tensor_of(r, wish);
    int64_t elements = 1;
    for (int i = 0; i < tensor->dims; i++)
        elements *= tensor->chunks[wish->chunk].sizes[i];
    return elements;
}

static loom_status fetch_next(void *argument) {
    reading *r = argument;
    const loom__chunk_wish *wish = &r->queue[r->next];
    loom__checkpoint_fetch(r->checkpoint, (const loom__checkpoint_entry *)tensor_of(r, wish), wish->chunk, r->direct,
        &r->memory[r->next % 2]);
    return LOOM_OK;
}

/* Number `number` of the queue is there, and a thread fetches the one behind it. */
static void advance(reading *r, int64_t number) {
    if (number == 0) {
        r->next = 0;
        (void)fetch_next(r);
    }
    loom__task_drop(&r->fetch);
    r->next = number + 1;
    if (r->next < r->queued)
        loom__task_start(&r->fetch, r->team, fetch_next, r);
}

/* Number `number` of the queue: *values are in the file, in what was fetched of it or, where the elements are not fp32
 * or not aligned, in `own`; until the next call. Numbers come in order. */
static loom_status read_one(reading *r, int64_t number, const float **values) {
    const loom__chunk_wish *wish = &r->queue[number];
    const loom_checkpoint_tensor *tensor = tensor_of(r, wish);
    advance(r, number);
    loom_value_pool_destroy(r->pool);
    r->pool = NULL;
    if (!r->own)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a chunk of %s", tensor->name);
    LOOM_TRY(loom_value_pool_create(&r->pool));
    return loom__checkpoint_fetched_floats(r->checkpoint, (const loom__checkpoint_entry *)tensor, wish->chunk,
        &r->memory[number % 2], r->pool, r->own, values);
}

/* Room for the largest chunk of these wishes. */
static float *room_for(const reading *r, const loom__chunk_wish *wishes, int64_t count) {
    int64_t most = 1;
    for (int64_t i = 0; i < count; i++) {
        int64_t elements = elements_of(r, &wishes[i]);
        most = elements > most ? elements : most;
    }
    return malloc((size_t)most * sizeof(float));
}

/* ---- alone */

static loom_status read_alone(reading *r) {
    r->queue = r->wishes;
    r->queued = r->count;
    r->own = room_for(r, r->wishes, r->count);
    for (int64_t i = 0; i < r->count; i++) {
        const float *values = NULL;
        LOOM_TRY(read_one(r, i, &values));
        LOOM_TRY(r->take(r->context, i, values));
    }
    return LOOM_OK;
}

/* ---- together */

/* A chunk that some member wishes: wishers [first, first + count) of the list of all. */
typedef struct wisher {
    loom__chunk_wish wish;
    int64_t member, number; /* number: of its wishes */
} wisher;

typedef struct shared {
    int64_t first, count;
    int64_t reader, round;
} shared;

typedef struct sharing {
    reading *r;
    loom_comm *group;
    int members, me;
    int64_t *counts; /* [members] wishes, then [members] numbers of a message */
    wisher *wishers;
    shared *chunks;          /* sorted by round and reader */
    loom__chunk_wish *queue; /* those that this rank reads, by round */
    int64_t total, chunk_count;
    loom_request **sends; /* [members] */
    loom_status failed;   /* of this rank's reads */
} sharing;

static int by_chunk(const void *a, const void *b) {
    const wisher *x = a, *y = b;
    int64_t difference = x->wish.tensor != y->wish.tensor ? x->wish.tensor - y->wish.tensor
                         : x->wish.chunk != y->wish.chunk ? x->wish.chunk - y->wish.chunk
                                                          : x->member - y->member;
    return (difference > 0) - (difference < 0);
}

static int by_round(const void *a, const void *b) {
    const shared *x = a, *y = b;
    int64_t difference = x->round != y->round ? x->round - y->round : x->reader - y->reader;
    return (difference > 0) - (difference < 0);
}

static bool same_chunk(const wisher *a, const wisher *b) {
    return a->wish.tensor == b->wish.tensor && a->wish.chunk == b->wish.chunk;
}

/* A reader for each chunk: of those that wish it the one that has read the least so far. Behind the elements of each
 * member stands how many chunks it reads. */
static loom_status assign(sharing *s) {
    int64_t *filled = calloc((size_t)s->members, 2 * sizeof *filled);
    s->chunks = calloc((size_t)s->total + 1, sizeof *s->chunks);
    if (!filled || !s->chunks) {
        free(filled);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory to share out the reading of %lld chunks", (long long)s->total);
    }
    qsort(s->wishers, (size_t)s->total, sizeof *s->wishers, by_chunk);
    for (int64_t first = 0, end; first < s->total; first = end) {
        int64_t reader = s->wishers[first].member;
        for (end = first; end < s->total && same_chunk(&s->wishers[first], &s->wishers[end]); end++)
            if (filled[s->wishers[end].member] < filled[reader])
                reader = s->wishers[end].member;
        filled[reader] += elements_of(s->r, &s->wishers[first].wish);
        s->chunks[s->chunk_count++] = (shared){first, end - first, reader, filled[s->members + reader]++};
    }
    qsort(s->chunks, (size_t)s->chunk_count, sizeof *s->chunks, by_round);
    free(filled);
    s->r->queue = s->queue = calloc((size_t)s->chunk_count + 1, sizeof *s->queue);
    if (!s->queue)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld chunks", (long long)s->chunk_count);
    for (int64_t i = 0; i < s->chunk_count; i++)
        if (s->chunks[i].reader == s->me)
            s->queue[s->r->queued++] = s->wishers[s->chunks[i].first].wish;
    return LOOM_OK;
}

static loom_status list_wishers(sharing *s, const loom__chunk_wish *all) {
    int64_t at = 0;
    s->wishers = calloc((size_t)s->total + 1, sizeof *s->wishers);
    s->sends = calloc((size_t)s->members, sizeof *s->sends);
    s->r->own = room_for(s->r, s->r->wishes, s->r->count);
    s->r->other = room_for(s->r, s->r->wishes, s->r->count);
    if (!s->wishers || !s->sends || !s->r->own || !s->r->other)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory to read %lld chunks together", (long long)s->total);
    for (int m = 0; m < s->members; m++)
        for (int64_t i = 0; i < s->counts[m]; i++, at++)
            s->wishers[at] = (wisher){all[at], m, i};
    return assign(s);
}

/* Everybody's wishes. */
static loom_status meet(sharing *s) {
    s->counts = calloc((size_t)s->members, 2 * sizeof *s->counts);
    LOOM_TRY(loom_agree(s->group,
        s->counts ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for the chunks of %d ranks", s->members)));
    LOOM_TRY(loom_all_gather(s->group, &s->r->count, s->counts, 1, LOOM_I64));
    for (int m = 0; m < s->members; m++) {
        s->total += s->counts[m];
        s->counts[s->members + m] = s->counts[m] * (int64_t)(sizeof(loom__chunk_wish) / sizeof(int64_t));
    }
    loom__chunk_wish *all = calloc((size_t)s->total + 1, sizeof *all);
    loom_status status = loom_agree(
        s->group, all ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld chunks", (long long)s->total));
    if (!status)
        status = loom_all_gather_v(s->group, s->r->wishes, all, s->counts + s->members, LOOM_I64);
    if (!status)
        status = loom_agree(s->group, list_wishers(s, all));
    free(all);
    return status;
}

static void keep_failure(sharing *s, loom_status status) {
    if (status && !s->failed)
        s->failed = status;
}

/* Reads this rank's chunk of a round, takes it, and starts to send it. */
static loom_status give(sharing *s, const shared *chunk) {
    const wisher *first = &s->wishers[chunk->first];
    const float *values = NULL;
    if (!s->failed)
        keep_failure(s, read_one(s->r, chunk->round, &values));
    for (int64_t i = 0; i < chunk->count; i++) {
        int64_t member = first[i].member;
        if (member != s->me)
            LOOM_TRY(loom_send_start(s->group, s->failed ? s->r->own : values, elements_of(s->r, &first->wish),
                LOOM_F32, (int)member, TAG, &s->sends[member]));
        else if (!s->failed)
            keep_failure(s, s->r->take(s->r->context, first[i].number, values));
    }
    return LOOM_OK;
}

static loom_status accept(sharing *s, const shared *chunk) {
    for (int64_t i = chunk->first; i < chunk->first + chunk->count; i++) {
        if (s->wishers[i].member != s->me)
            continue;
        LOOM_TRY(loom_receive(
            s->group, s->r->other, elements_of(s->r, &s->wishers[i].wish), LOOM_F32, (int)chunk->reader, TAG));
        if (!s->failed)
            keep_failure(s, s->r->take(s->r->context, s->wishers[i].number, s->r->other));
    }
    return LOOM_OK;
}

static loom_status end_sends(sharing *s) {
    for (int m = 0; m < s->members; m++) {
        loom_request *request = s->sends[m];
        s->sends[m] = NULL;
        LOOM_TRY(loom_wait(request));
    }
    return LOOM_OK;
}

/* Chunks [*at, …) of one round: what this rank gives goes first, so that others can come for it. */
static loom_status exchange(sharing *s, int64_t *at) {
    int64_t begin = *at, round = s->chunks[begin].round;
    for (; *at < s->chunk_count && s->chunks[*at].round == round; ++*at)
        if (s->chunks[*at].reader == s->me)
            LOOM_TRY(give(s, &s->chunks[*at]));
    for (int64_t i = begin; i < *at; i++)
        if (s->chunks[i].reader != s->me)
            LOOM_TRY(accept(s, &s->chunks[i]));
    return end_sends(s);
}

static loom_status read_together(loom_comm *group, loom_status prepared, reading *r) {
    sharing s = {.r = r, .group = group, .members = loom_comm_size(group), .me = loom_comm_rank(group)};
    LOOM_TRY(loom_agree(group, prepared));
    loom_status status = meet(&s);
    for (int64_t at = 0; at < s.chunk_count && !status;)
        status = exchange(&s, &at);
    for (int m = 0; s.sends && m < s.members; m++)
        loom_cancel(s.sends[m], status);
    free(s.counts);
    free(s.wishers);
    free(s.chunks);
    loom__task_drop(&r->fetch);
    free(s.queue);
    free(s.sends);
    return status ? status : loom_agree(group, s.failed);
}

loom_status loom__chunks_read(const loom__chunk_source *from, loom_status prepared, const loom__chunk_wish *wishes,
    int64_t count, loom_status (*take)(void *context, int64_t wish, const float *values), void *context) {
    loom_comm *group = from->group;
    reading r = {.checkpoint = from->checkpoint,
        .wishes = wishes,
        .count = count,
        .take = take,
        .context = context,
        .direct = from->direct,
        .team = from->team};
    loom_status status = prepared;
    if (group && loom_comm_size(group) > 1)
        status = read_together(group, prepared, &r);
    else if (!prepared)
        status = read_alone(&r);
    loom__task_drop(&r.fetch);
    loom__chunk_memory_free(&r.memory[0]);
    loom__chunk_memory_free(&r.memory[1]);
    loom_value_pool_destroy(r.pool);
    free(r.own);
    free(r.other);
    return status;
}
