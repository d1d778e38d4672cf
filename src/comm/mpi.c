/* Ranks that are MPI processes. Every collective is one or two exchanges, in which each member sends a range of bytes
 * to each other member and receives one, and a local sum or copy: a reduce-scatter is an exchange of parts and a sum in
 * member order, an all-gather is an exchange of whole parts. So the numbers are those of the other backends, the bytes
 * those of a ring, and nothing depends on what MPI thinks of sums. The exchanges are plain messages and not
 * MPI_Ialltoallv, whose int displacements cannot address a large buffer and which does not tell when members disagree
 * about a size. All is non-blocking and polled. A range longer than the chunk limit goes as several messages, in order,
 * through the one door below.
 *
 * Invariant: after a failure MPI is not called again for this endpoint, and what MPI may still read or write is not
 * freed: neither a request's own memory nor, where a buffer of the caller is small, its copy, which is what MPI was
 * given. A message (send, receive) begins with both sides telling each other their size, so that a mismatch is known
 * on both before any data moves. */
#include "comm/mpi_world.h"

#if MEGALOOM_MPI
#include "base/parts.h"
#include "comm/reduce.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    SMALL_REDUCE = 4096,        /* an all-reduce of at most this goes whole to every member: one exchange, not two */
    SMALL_BROADCAST = 64 * 1024 /* a broadcast of at most this comes from the root directly */
};

/* All tags of a communicator; MPI promises no more than 32767. */
enum {
    KIND_TO_RECEIVER, /* the sender's size */
    KIND_TO_SENDER,   /* the receiver's size */
    KIND_DATA,
    KINDS,
    TAG_MESSAGES = 0,
    TAG_COLLECTIVES = TAG_MESSAGES + KINDS * LOOM__TAG_END,
    COLLECTIVE_WINDOW = 256,          /* collectives of a group that can be under way at once */
    COLLECTIVE_TAGS = 2 * LOOM__SEND, /* two exchanges of each operation */
    TAG_MAKE_GROUP = TAG_COLLECTIVES + COLLECTIVE_TAGS * COLLECTIVE_WINDOW,
    TAG_END
};
_Static_assert(TAG_END <= 32767, "MPI promises tags up to 32767");
_Static_assert(LOOM_COPIED_BYTES <= SMALL_REDUCE, "MPI writes to the output of an all-reduce that is copied");

enum { STAGE_NEW, STAGE_FIRST, STAGE_SECOND };

typedef struct mpi_group {
    MPI_Comm comm;
} mpi_group;

/* Messages under way, and how many bytes each receive must bring (-1 for a send). */
typedef struct exchange {
    MPI_Request *requests;
    int64_t *expected;
    MPI_Status *statuses;
    int count, capacity;
} exchange;

typedef struct mpi_request {
    exchange exchange;
    char *scratch; /* what came from the others, `stride` bytes a member */
    size_t stride;
    int64_t mine[2], theirs[2]; /* count and dtype of the two sides of a message */
    MPI_Request header;
    void *result; /* where the copy of the output goes at the end; NULL: it was not copied */
    size_t result_bytes;
    _Alignas(max_align_t) char copies[];
} mpi_request;

static loom__mpi_world *world_of(const loom_comm *comm) {
    return comm->endpoint->state;
}

static loom_status fail_mpi(loom_request *request, int error) {
    char reason[MPI_MAX_ERROR_STRING], what[160];
    int length;
    MPI_Error_string(error, reason, &length);
    loom__request_describe(request, what, sizeof what);
    return loom__endpoint_fail(request->comm->endpoint, LOOM_ERR_COMM, "%s: MPI reports: %s", what, reason);
}

static void finish(loom_request *request) {
    const mpi_request *state = request->state;
    if (state->result)
        memcpy(state->result, request->out, state->result_bytes);
    loom__request_done(request);
}

/* Scratch that is kept from one operation to the next, since fresh pages cost more than the sums. */
static void *take_scratch(loom__mpi_world *world, size_t bytes) {
    loom__mpi_scratch *best = NULL;
    for (int i = 0; i < LOOM__MPI_SCRATCHES; i++) {
        loom__mpi_scratch *s = &world->scratches[i];
        if (!s->used && (!best || (s->bytes >= bytes ? best->bytes < bytes || s->bytes < best->bytes
                                                     : best->bytes < bytes && s->bytes > best->bytes)))
            best = s;
    }
    if (!best)
        return malloc(bytes);
    if (best->bytes < bytes) {
        free(best->memory);
        best->memory = malloc(bytes);
        best->bytes = best->memory ? bytes : 0;
    }
    best->used = best->memory != NULL;
    return best->memory;
}

static void give_scratch(loom__mpi_world *world, void *memory) {
    for (int i = 0; i < LOOM__MPI_SCRATCHES; i++) {
        if (memory && world->scratches[i].memory == memory) {
            world->scratches[i].used = false;
            return;
        }
    }
    free(memory);
}

/* The door: the only place where bytes become MPI counts. */

static bool make_room(exchange *e) {
    if (e->count < e->capacity)
        return true;
    int capacity = e->capacity ? 2 * e->capacity : 8;
    MPI_Request *requests = realloc(e->requests, (size_t)capacity * sizeof *requests);
    if (requests)
        e->requests = requests;
    int64_t *expected = realloc(e->expected, (size_t)capacity * sizeof *expected);
    if (expected)
        e->expected = expected;
    MPI_Status *statuses = realloc(e->statuses, (size_t)capacity * sizeof *statuses);
    if (statuses)
        e->statuses = statuses;
    if (!requests || !expected || !statuses)
        return false;
    e->capacity = capacity;
    return true;
}

static loom_status no_room(loom_request *request) {
    return loom__endpoint_fail(
        request->comm->endpoint, LOOM_ERR_MEMORY, "group %s: out of memory for messages", request->comm->name);
}

static loom_status transfer(loom_request *request, bool sends, void *buffer, size_t bytes, int peer, int tag) {
    mpi_request *state = request->state;
    exchange *e = &state->exchange;
    size_t chunk = world_of(request->comm)->chunk;
    MPI_Comm comm = ((mpi_group *)request->comm->state)->comm;
    for (size_t done = 0; done < bytes; done += chunk) {
        int n = (int)(bytes - done < chunk ? bytes - done : chunk);
        if (!make_room(e))
            return no_room(request);
        char *at = (char *)buffer + done;
        int error = sends ? MPI_Isend(at, n, MPI_BYTE, peer, tag, comm, &e->requests[e->count])
                          : MPI_Irecv(at, n, MPI_BYTE, peer, tag, comm, &e->requests[e->count]);
        if (error != MPI_SUCCESS)
            return fail_mpi(request, error);
        e->expected[e->count++] = sends ? -1 : n;
    }
    return LOOM_OK;
}

static loom_status send_bytes(loom_request *request, const void *buffer, size_t bytes, int peer, int tag) {
    return transfer(request, true, (void *)(uintptr_t)buffer, bytes, peer, tag);
}

static loom_status receive_bytes(loom_request *request, void *buffer, size_t bytes, int peer, int tag) {
    return transfer(request, false, buffer, bytes, peer, tag);
}

/* Whether all messages of the exchange have arrived and left; then it is empty again. */
static loom_status test_exchange(loom_request *request, bool *finished) {
    exchange *e = &((mpi_request *)request->state)->exchange;
    int flag = 1, error = MPI_SUCCESS;
    if (e->count > 0)
        error = MPI_Testall(e->count, e->requests, &flag, e->statuses);
    if (error == MPI_ERR_IN_STATUS) {
        for (int i = 0; i < e->count; i++)
            if (e->statuses[i].MPI_ERROR != MPI_SUCCESS && e->statuses[i].MPI_ERROR != MPI_ERR_PENDING)
                error = e->statuses[i].MPI_ERROR;
    }
    if (error != MPI_SUCCESS)
        return fail_mpi(request, error);
    *finished = flag != 0;
    if (!flag)
        return LOOM_OK;
    for (int i = 0; i < e->count; i++) {
        int got;
        if (e->expected[i] < 0)
            continue;
        MPI_Get_count(&e->statuses[i], MPI_BYTE, &got);
        if (got != e->expected[i]) {
            char what[160];
            loom__request_describe(request, what, sizeof what);
            return loom__endpoint_fail(request->comm->endpoint, LOOM_ERR_COMM,
                "%s: rank %d sent %d bytes where %lld were expected; members disagree about the sizes", what,
                request->comm->ranks[e->statuses[i].MPI_SOURCE], got, (long long)e->expected[i]);
        }
    }
    e->count = 0;
    return LOOM_OK;
}

/* Collectives. */

/* The operation is part of the tag: members that came with different ones do not take each other's messages for theirs,
 * and wait until the recorder shows it. */
static int tag_of(const loom_request *request, int exchange_number) {
    return TAG_COLLECTIVES + COLLECTIVE_TAGS * (int)(request->sequence % COLLECTIVE_WINDOW) +
           2 * (int)request->operation + exchange_number;
}

static size_t bytes_before(const loom_request *request, const int64_t *counts, int place) {
    int64_t sum = 0;
    for (int i = 0; i < place; i++)
        sum += counts[i];
    return (size_t)sum * loom_dtype_size(request->dtype);
}

/* The part of member `place`: of equal parts for all-reduce and broadcast, by the counts else. */
static size_t part_begin(const loom_request *request, int place) {
    if (request->operation == LOOM__REDUCE_SCATTER || request->operation == LOOM__ALL_GATHER)
        return bytes_before(request, request->counts, place);
    return (size_t)loom__part_begin(request->count, request->comm->size, place) * loom_dtype_size(request->dtype);
}

static size_t part_bytes(const loom_request *request, int place) {
    return part_begin(request, place + 1) - part_begin(request, place);
}

static bool is_small(const loom_request *request) {
    return (request->operation == LOOM__ALL_REDUCE && request->bytes <= SMALL_REDUCE) ||
           (request->operation == LOOM__BROADCAST && request->bytes <= SMALL_BROADCAST);
}

/* The other members, beginning with the next one, so that not all send to member 0 first. */
static int other(const loom_comm *comm, int step) {
    return (comm->place + step) % comm->size;
}

static loom_status get_scratch(loom_request *request, size_t bytes_each) {
    mpi_request *state = request->state;
    state->stride = (bytes_each + 63) / 64 * 64;
    if (bytes_each == 0)
        return LOOM_OK;
    state->scratch = take_scratch(world_of(request->comm), state->stride * (size_t)request->comm->size);
    if (!state->scratch)
        return loom__endpoint_fail(request->comm->endpoint, LOOM_ERR_MEMORY,
            "group %s: out of memory for %zu bytes of each of %d members", request->comm->name, bytes_each,
            request->comm->size);
    return LOOM_OK;
}

/* Sends part p of `in` to member p (or all of it to everybody) and collects what the others have for me. */
static loom_status exchange_terms(loom_request *request, bool whole) {
    loom_comm *comm = request->comm;
    mpi_request *state = request->state;
    const char *in = request->in;
    size_t mine = whole ? request->bytes : part_bytes(request, comm->place);
    int tag = tag_of(request, 0);
    LOOM_TRY(get_scratch(request, mine));
    for (int step = 1; step < comm->size; step++) {
        int peer = other(comm, comm->size - step);
        LOOM_TRY(receive_bytes(request, state->scratch + state->stride * (size_t)peer, mine, peer, tag));
    }
    for (int step = 1; step < comm->size; step++) {
        int peer = other(comm, step);
        LOOM_TRY(send_bytes(request, whole ? in : in + part_begin(request, peer),
            whole ? request->bytes : part_bytes(request, peer), peer, tag));
    }
    return LOOM_OK;
}

static loom_status sum_terms(loom_request *request, bool whole) {
    loom_comm *comm = request->comm;
    mpi_request *state = request->state;
    size_t begin = whole ? 0 : part_begin(request, comm->place);
    size_t bytes = whole ? request->bytes : part_bytes(request, comm->place);
    if (bytes == 0)
        return LOOM_OK;
    const void **inputs = malloc((size_t)comm->size * sizeof *inputs);
    if (!inputs)
        return no_room(request);
    for (int i = 0; i < comm->size; i++)
        inputs[i] = i == comm->place ? (const char *)request->in + begin : state->scratch + state->stride * (size_t)i;
    char *out = request->out;
    if (request->operation == LOOM__ALL_REDUCE)
        out += begin;
    loom__reduce(
        request->dtype, request->reduce, comm->size, inputs, (int64_t)(bytes / loom_dtype_size(request->dtype)), out);
    free(inputs);
    return LOOM_OK;
}

/* Everybody's part of `out` goes from `mine` to everybody; `spared` (or -1) has all of it already. */
static loom_status exchange_parts(loom_request *request, const void *mine, int exchange_number, int spared) {
    loom_comm *comm = request->comm;
    char *out = request->out;
    int tag = tag_of(request, exchange_number);
    for (int step = 1; step < comm->size && comm->place != spared; step++) {
        int peer = other(comm, comm->size - step);
        LOOM_TRY(receive_bytes(request, out + part_begin(request, peer), part_bytes(request, peer), peer, tag));
    }
    for (int step = 1; step < comm->size; step++) {
        int peer = other(comm, step);
        if (peer != spared)
            LOOM_TRY(send_bytes(request, mine, part_bytes(request, comm->place), peer, tag));
    }
    return LOOM_OK;
}

static loom_status exchange_from_root(loom_request *request) {
    loom_comm *comm = request->comm;
    int root = request->peer, tag = tag_of(request, 0);
    bool whole = is_small(request);
    if (comm->place != root)
        return receive_bytes(request, (char *)request->out + (whole ? 0 : part_begin(request, comm->place)),
            whole ? request->bytes : part_bytes(request, comm->place), root, tag);
    for (int step = 1; step < comm->size; step++) {
        int peer = other(comm, step);
        LOOM_TRY(send_bytes(request, (const char *)request->in + (whole ? 0 : part_begin(request, peer)),
            whole ? request->bytes : part_bytes(request, peer), peer, tag));
    }
    return LOOM_OK;
}

static loom_status exchange_all_to_all(loom_request *request) {
    loom_comm *comm = request->comm;
    size_t element = loom_dtype_size(request->dtype);
    const char *in = request->in;
    char *out = request->out;
    int me = comm->place, tag = tag_of(request, 0);
    for (int step = 1; step < comm->size; step++) {
        int peer = other(comm, comm->size - step);
        LOOM_TRY(receive_bytes(request, out + bytes_before(request, request->receive_counts, peer),
            (size_t)request->receive_counts[peer] * element, peer, tag));
    }
    for (int step = 1; step < comm->size; step++) {
        int peer = other(comm, step);
        LOOM_TRY(send_bytes(request, in + bytes_before(request, request->counts, peer),
            (size_t)request->counts[peer] * element, peer, tag));
    }
    if (request->counts[me] > 0)
        memcpy(out + bytes_before(request, request->receive_counts, me),
            in + bytes_before(request, request->counts, me), (size_t)request->counts[me] * element);
    return LOOM_OK;
}

static loom_status first_exchange(loom_request *request) {
    loom_comm *comm = request->comm;
    mpi_request *state = request->state;
    switch (request->operation) {
    case LOOM__ALL_REDUCE:
    case LOOM__REDUCE_SCATTER:
        return exchange_terms(request, is_small(request));
    case LOOM__ALL_GATHER: {
        char *place = (char *)request->out + part_begin(request, comm->place);
        size_t mine = part_bytes(request, comm->place);
        if (mine > 0 && request->in != place)
            memcpy(place, request->in, mine);
        return exchange_parts(request, request->in, 0, -1);
    }
    case LOOM__BROADCAST:
        return exchange_from_root(request);
    case LOOM__ALL_TO_ALL:
        return exchange_all_to_all(request);
    default: {
        if (!make_room(&state->exchange))
            return no_room(request);
        int error = MPI_Ibarrier(((mpi_group *)comm->state)->comm, &state->exchange.requests[0]);
        if (error != MPI_SUCCESS)
            return fail_mpi(request, error);
        state->exchange.expected[0] = -1;
        state->exchange.count = 1;
        return LOOM_OK;
    }
    }
}

/* The local work between the exchanges, and the second exchange where there is one; *more says so. */
static loom_status after_first(loom_request *request, bool *more) {
    loom_comm *comm = request->comm;
    *more = false;
    if (request->operation == LOOM__REDUCE_SCATTER)
        return sum_terms(request, false);
    if (request->operation == LOOM__ALL_REDUCE) {
        LOOM_TRY(sum_terms(request, is_small(request)));
        *more = !is_small(request);
    } else if (request->operation == LOOM__BROADCAST) {
        *more = !is_small(request);
    }
    if (!*more)
        return LOOM_OK;
    int spared = request->operation == LOOM__BROADCAST ? request->peer : -1;
    return exchange_parts(request, (char *)request->out + part_begin(request, comm->place), 1, spared);
}

/* A collective whose tag is still taken by the one COLLECTIVE_WINDOW before waits for that. */
static bool window_is_full(const loom_request *request) {
    for (const loom_request *earlier = request->previous; earlier; earlier = earlier->previous)
        if (!earlier->done && earlier->comm == request->comm && earlier->operation < LOOM__SEND &&
            earlier->sequence + COLLECTIVE_WINDOW <= request->sequence)
            return true;
    return false;
}

static loom_status advance_collective(loom_request *request) {
    bool finished = false, more = false;
    if (request->stage == STAGE_NEW) {
        if (request->sequence > COLLECTIVE_WINDOW && window_is_full(request))
            return LOOM_OK;
        LOOM_TRY(first_exchange(request));
        request->stage = STAGE_FIRST;
    }
    if (request->stage == STAGE_FIRST) {
        LOOM_TRY(test_exchange(request, &finished));
        if (!finished)
            return LOOM_OK;
        LOOM_TRY(after_first(request, &more));
        if (!more) {
            finish(request);
            return LOOM_OK;
        }
        request->stage = STAGE_SECOND;
    }
    LOOM_TRY(test_exchange(request, &finished));
    if (finished)
        finish(request);
    return LOOM_OK;
}

/* Messages. */

static loom_status start_message(loom_request *request) {
    mpi_request *state = request->state;
    MPI_Comm comm = ((mpi_group *)request->comm->state)->comm;
    bool sends = request->operation == LOOM__SEND;
    int base = TAG_MESSAGES + KINDS * request->tag;
    state->mine[0] = request->count;
    state->mine[1] = (int64_t)request->dtype;
    int error = MPI_Irecv(state->theirs, (int)sizeof state->theirs, MPI_BYTE, request->peer,
        base + (sends ? KIND_TO_SENDER : KIND_TO_RECEIVER), comm, &state->header);
    if (error != MPI_SUCCESS)
        return fail_mpi(request, error);
    /* The header goes with the exchange, so that its buffer is known to be free at the end. */
    return send_bytes(
        request, state->mine, sizeof state->mine, request->peer, base + (sends ? KIND_TO_RECEIVER : KIND_TO_SENDER));
}

static loom_status advance_message(loom_request *request) {
    mpi_request *state = request->state;
    if (request->stage == STAGE_NEW) {
        int arrived;
        if (loom__request_must_follow(request, STAGE_FIRST))
            return LOOM_OK;
        int error = MPI_Test(&state->header, &arrived, MPI_STATUS_IGNORE);
        if (error != MPI_SUCCESS)
            return fail_mpi(request, error);
        if (!arrived)
            return LOOM_OK;
        if (state->theirs[0] != request->count || state->theirs[1] != (int64_t)request->dtype)
            return loom__message_mismatch(request, state->theirs[0], (loom_dtype)state->theirs[1]);
        int tag = TAG_MESSAGES + KINDS * request->tag + KIND_DATA;
        if (request->operation == LOOM__SEND)
            LOOM_TRY(send_bytes(request, request->in, request->bytes, request->peer, tag));
        else
            LOOM_TRY(receive_bytes(request, request->out, request->bytes, request->peer, tag));
        request->stage = STAGE_FIRST;
    }
    bool finished = false;
    LOOM_TRY(test_exchange(request, &finished));
    if (finished)
        finish(request);
    return LOOM_OK;
}

/* The backend's table. */

/* Bytes of the caller's buffers that MPI reads and writes itself, but for those too large to be copied: sums are
 * written by this room, at an end. */
static void copied_bytes(const loom_request *request, size_t *in, size_t *out) {
    uint64_t reads, writes;
    bool reduces = request->operation == LOOM__ALL_REDUCE || request->operation == LOOM__REDUCE_SCATTER;
    bool broadcasts = request->operation == LOOM__BROADCAST, is_root = request->peer == request->comm->place;
    loom__request_sizes(request, &reads, &writes);
    *in = reads > LOOM_COPIED_BYTES || (broadcasts && !is_root) ? 0 : (size_t)reads;
    *out = writes > LOOM_COPIED_BYTES || reduces || (broadcasts && is_root) ? 0 : (size_t)writes;
}

/* The request works in copies of the caller's small buffers, behind its state, with which they outlive a failure. */
static loom_status make_state(loom_request *request) {
    size_t in, out;
    copied_bytes(request, &in, &out);
    size_t before_out = (in + _Alignof(max_align_t) - 1) / _Alignof(max_align_t) * _Alignof(max_align_t);
    mpi_request *state = malloc(sizeof *state + before_out + out);
    if (!state)
        return loom_fail(LOOM_ERR_MEMORY, "group %s: out of memory", request->comm->name);
    memset(state, 0, sizeof *state);
    if (in > 0)
        request->in = memcpy(state->copies, request->in, in);
    if (out > 0) {
        state->result = request->out;
        state->result_bytes = out;
        request->out = state->copies + before_out;
    }
    request->state = state;
    return LOOM_OK;
}

static loom_status start(loom_request *request) {
    LOOM_TRY(make_state(request));
    loom_status status = LOOM_OK;
    if (request->operation >= LOOM__SEND)
        status = start_message(request);
    if (status != LOOM_OK)
        request->state = NULL; /* MPI may hold parts of it */
    return status;
}

static loom_status advance(loom_request *request) {
    return request->operation >= LOOM__SEND ? advance_message(request) : advance_collective(request);
}

static void release(loom_request *request) {
    mpi_request *state = request->state;
    if (!request->done) { /* MPI may still write into it, and into the buffers */
        request->comm->endpoint->lent = true;
        return;
    }
    give_scratch(world_of(request->comm), state->scratch);
    free(state->exchange.requests);
    free(state->exchange.expected);
    free(state->exchange.statuses);
    free(state);
}

static void quiesce(loom__endpoint *endpoint) {
    (void)endpoint; /* no other process reads this one's memory */
}

/* All members tell the first one which group they mean, and hear from it; so that the collective call of MPI, which
 * knows no time limit, begins when everybody is there. */
static loom_status meet(loom_comm *comm) {
    loom__endpoint *endpoint = comm->endpoint;
    loom_comm *world = endpoint->world;
    int64_t mine[2] = {(int64_t)comm->key, comm->size}, verdict = 1;
    int leader = comm->ranks[0];
    loom__call tell = {
        .operation = LOOM__SEND, .in = mine, .count = 2, .dtype = LOOM_I64, .peer = leader, .tag = LOOM__TAG_GROUP};
    loom__call hear = {.operation = LOOM__RECEIVE,
        .out = &verdict,
        .count = 1,
        .dtype = LOOM_I64,
        .peer = leader,
        .tag = LOOM__TAG_GROUP};
    if (endpoint->rank != leader) {
        LOOM_TRY(loom__run(world, &tell));
        LOOM_TRY(loom__run(world, &hear));
    } else {
        int odd = -1;
        for (int i = 1; i < comm->size; i++) {
            int64_t theirs[2];
            hear.out = theirs;
            hear.count = 2;
            hear.peer = comm->ranks[i];
            LOOM_TRY(loom__run(world, &hear));
            if (theirs[0] != mine[0] || theirs[1] != mine[1])
                odd = comm->ranks[i];
        }
        verdict = odd < 0 ? 1 : -1 - odd;
        tell.in = &verdict;
        tell.count = 1;
        for (int i = 1; i < comm->size; i++) {
            tell.peer = comm->ranks[i];
            LOOM_TRY(loom__run(world, &tell));
        }
    }
    if (verdict != 1)
        return loom__endpoint_fail(endpoint, LOOM_ERR_COMM,
            "group %s: rank %d and rank %d name different groups; all members must give the same name and list",
            comm->name, leader, (int)(-1 - verdict));
    return LOOM_OK;
}

static loom_status create_group(loom_comm *comm) {
    loom__endpoint *endpoint = comm->endpoint;
    loom__mpi_world *world = endpoint->state;
    mpi_group *group = calloc(1, sizeof *group);
    if (!group)
        return loom_fail(LOOM_ERR_MEMORY, "group %s: out of memory", comm->name);
    if (!endpoint->world || !endpoint->end) {
        group->comm = endpoint->world ? world->end : world->world;
        comm->state = group;
        return LOOM_OK;
    }
    loom_status status = meet(comm);
    if (status != LOOM_OK) {
        free(group);
        return status;
    }
    MPI_Group all, some;
    int error = MPI_Comm_group(world->world, &all);
    if (error == MPI_SUCCESS) {
        error = MPI_Group_incl(all, comm->size, comm->ranks, &some);
        MPI_Group_free(&all);
    }
    if (error == MPI_SUCCESS) {
        error = MPI_Comm_create_group(world->world, some, TAG_MAKE_GROUP, &group->comm);
        MPI_Group_free(&some);
    }
    if (error == MPI_SUCCESS)
        error = MPI_Comm_set_errhandler(group->comm, MPI_ERRORS_RETURN);
    if (error != MPI_SUCCESS) {
        char reason[MPI_MAX_ERROR_STRING];
        int length;
        MPI_Error_string(error, reason, &length);
        free(group);
        return loom__endpoint_fail(endpoint, LOOM_ERR_COMM, "group %s: MPI reports: %s", comm->name, reason);
    }
    comm->state = group;
    return LOOM_OK;
}

static void destroy_group(loom_comm *comm) {
    mpi_group *group = comm->state;
    const loom__mpi_world *world = world_of(comm);
    if (!comm->endpoint->failure && group->comm != world->world && group->comm != world->end)
        MPI_Comm_free(&group->comm);
    free(group);
}

static void destroy_endpoint(loom__endpoint *endpoint) {
    loom__mpi_world *world = endpoint->state;
    if (!endpoint->failure && world->end != MPI_COMM_NULL)
        MPI_Comm_free(&world->end);
    if (!endpoint->failure && world->world != MPI_COMM_NULL)
        MPI_Comm_free(&world->world);
    for (int i = 0; i < LOOM__MPI_SCRATCHES; i++)
        if (!world->scratches[i].used)
            free(world->scratches[i].memory);
    if (endpoint->board)
        munmap(endpoint->board, world->board_bytes);
    free(world->page_of);
    free(world);
    free(endpoint);
}

const loom__backend loom__mpi_backend = {
    .create_group = create_group,
    .destroy_group = destroy_group,
    .start = start,
    .advance = advance,
    .release = release,
    .quiesce = quiesce,
    .destroy_endpoint = destroy_endpoint,
};

#endif
