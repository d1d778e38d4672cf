/* The public collectives: arguments are checked here, once for all backends, and become requests; groups are made and
 * freed here. Invariant: a request enters the endpoint's list only when its backend has accepted it, and every request
 * in the list holds its group alive. */
#include "comm/comm.h"
#include "base/random.h"
#include "comm/reduce.h"
#include <megaloom/rank.h>
#include <stdlib.h>
#include <string.h>

int loom_comm_rank(const loom_comm *comm) {
    return comm->place;
}

int loom_comm_size(const loom_comm *comm) {
    return comm->size;
}

int loom_comm_world_rank(const loom_comm *comm, int place) {
    return place >= 0 && place < comm->size ? comm->ranks[place] : -1;
}

const char *loom_comm_name(const loom_comm *comm) {
    return comm->name;
}

/* Every group a rank ever makes gets a key of its own, the same on all members, since members make the groups of one
 * name and list in one order. A key that came back would bring the records of the old group back to life. 0 = out of
 * memory. */
static uint64_t group_key(loom__endpoint *endpoint, const char *name, const int *ranks, int count) {
    uint64_t base = loom__hash_bytes(LOOM__HASH_BEGIN, name, strlen(name));
    base = loom__hash_bytes(base, ranks, (size_t)count * sizeof *ranks);
    int at = 0;
    while (at < endpoint->names && endpoint->made[at].base != base)
        at++;
    if (at == endpoint->names) {
        loom__made *made = realloc(endpoint->made, (size_t)(at + 1) * sizeof *made);
        if (!made)
            return 0;
        made[at] = (loom__made){.base = base};
        endpoint->made = made;
        endpoint->names++;
    }
    uint64_t copy = endpoint->made[at].copies++;
    return loom__hash_bytes(base, &copy, sizeof copy) | 1u;
}

loom_status loom__group_create(
    loom__endpoint *endpoint, const char *name, const int *ranks, int count, loom_comm **out) {
    LOOM_TRY(loom__endpoint_status(endpoint));
    if (!name || !*name || strlen(name) >= LOOM__GROUP_NAME)
        return loom_fail(LOOM_ERR_ARGUMENT, "name of a group: found %s%s%s, expected 1 to %d characters",
            name ? "\"" : "", name ? name : "NULL", name ? "\"" : "", LOOM__GROUP_NAME - 1);
    if (!ranks || count < 1 || count > endpoint->size)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "group %s: found %d members, expected 1 to %d", name, ranks ? count : 0, endpoint->size);
    bool *seen = calloc((size_t)endpoint->size, sizeof *seen);
    loom_comm *comm = calloc(1, sizeof *comm);
    int *list = malloc((size_t)count * sizeof *list);
    loom_status status = LOOM_OK;
    if (!seen || !comm || !list) {
        status = loom_fail(LOOM_ERR_MEMORY, "group %s: out of memory for %d members", name, count);
        goto failed;
    }
    comm->place = -1;
    for (int i = 0; i < count; i++) {
        if (ranks[i] < 0 || ranks[i] >= endpoint->size || seen[ranks[i]]) {
            status = loom_fail(LOOM_ERR_ARGUMENT, "group %s: member %d is rank %d, expected %s", name, i, ranks[i],
                ranks[i] < 0 || ranks[i] >= endpoint->size ? "a rank of the world" : "each rank once");
            goto failed;
        }
        seen[ranks[i]] = true;
        list[i] = ranks[i];
        if (ranks[i] == endpoint->rank)
            comm->place = i;
    }
    if (comm->place < 0) {
        status =
            loom_fail(LOOM_ERR_ARGUMENT, "group %s: rank %d makes it without being a member", name, endpoint->rank);
        goto failed;
    }
    comm->endpoint = endpoint;
    comm->backend = count == 1 ? &loom__self_backend : endpoint->backend;
    memcpy(comm->name, name, strlen(name) + 1);
    comm->key = group_key(endpoint, name, ranks, count);
    if (comm->key == 0) {
        status = loom_fail(LOOM_ERR_MEMORY, "group %s: out of memory", name);
        goto failed;
    }
    comm->size = count;
    comm->ranks = list;
    comm->uses = 1;
    status = comm->backend->create_group(comm);
    if (status)
        goto failed;
    comm->slot = loom__page_add_group(endpoint->page, comm->key);
    comm->next = endpoint->comms;
    endpoint->comms = comm;
    free(seen);
    *out = comm;
    return LOOM_OK;
failed:
    free(seen);
    free(comm);
    free(list);
    return status;
}

static void release_comm(loom_comm *comm) {
    if (--comm->uses > 0)
        return;
    loom__page_remove_group(comm->endpoint->page, comm->slot);
    loom_comm **link = &comm->endpoint->comms;
    while (*link != comm)
        link = &(*link)->next;
    *link = comm->next;
    comm->backend->destroy_group(comm);
    free(comm->ranks);
    free(comm);
}

void loom_group_destroy(loom_comm *comm) {
    /* The world lives as long as its rank. */
    if (comm && comm != comm->endpoint->world)
        release_comm(comm);
}

void loom__request_free(loom_request *request) {
    loom_comm *comm = request->comm;
    loom__endpoint *endpoint = comm->endpoint;
    *(request->previous ? &request->previous->next : &endpoint->first) = request->next;
    *(request->next ? &request->next->previous : &endpoint->last) = request->previous;
    comm->backend->release(request);
    free(request);
    release_comm(comm);
}

void loom_comm_free(const loom_comm *comm, void *memory) {
    if (!comm || !comm->endpoint->lent)
        free(memory);
}

bool loom__endpoint_destroy(loom__endpoint *endpoint) {
    if (!endpoint)
        return true;
    /* Requests are left only where the run has been aborted; others may be reading what they point to. */
    if (endpoint->first)
        endpoint->backend->quiesce(endpoint);
    while (endpoint->first)
        loom__request_free(endpoint->first);
    endpoint->world = NULL;
    while (endpoint->comms)
        release_comm(endpoint->comms);
    free(endpoint->made);
    bool own = !endpoint->lent;
    endpoint->backend->destroy_endpoint(endpoint);
    return own;
}

loom_status loom__endpoint_check_finished(loom__endpoint *endpoint) {
    if (!endpoint->first)
        return LOOM_OK;
    char what[128];
    int open = 0;
    for (loom_request *request = endpoint->first; request; request = request->next)
        open++;
    loom__request_describe(endpoint->first, what, sizeof what);
    return loom__endpoint_fail(endpoint, LOOM_ERR_STATE,
        "the rank's function returned with %d request%s that loom_wait never got; the oldest is %s", open,
        open == 1 ? "" : "s", what);
}

static bool has_counts(loom__operation operation) {
    return operation == LOOM__ALL_GATHER || operation == LOOM__REDUCE_SCATTER || operation == LOOM__ALL_TO_ALL;
}

static bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    return a_bytes > 0 && b_bytes > 0 && (uintptr_t)a < (uintptr_t)b + b_bytes && (uintptr_t)b < (uintptr_t)a + a_bytes;
}

/* Adds up counts; false when one is negative or the bytes do not fit 63 bits. */
static bool total_bytes(const int64_t *counts, int size, loom_dtype dtype, uint64_t *bytes) {
    int64_t total = 0;
    for (int i = 0; i < size; i++)
        if (counts[i] < 0 || __builtin_add_overflow(total, counts[i], &total))
            return false;
    int64_t product;
    if (__builtin_mul_overflow(total, (int64_t)loom_dtype_size(dtype), &product))
        return false;
    *bytes = (uint64_t)product;
    return true;
}

static loom_status check_call(const loom_comm *comm, const loom__call *call) {
    const char *name = loom__operation_name(call->operation);
    if (loom_dtype_size(call->dtype) == 0)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s in group %s: %d is no dtype", name, comm->name, (int)call->dtype);
    if (call->operation == LOOM__ALL_REDUCE || call->operation == LOOM__REDUCE_SCATTER) {
        if (call->reduce != LOOM_SUM && call->reduce != LOOM_MAX)
            return loom_fail(LOOM_ERR_ARGUMENT, "%s in group %s: %d is no reduction, expected LOOM_SUM or LOOM_MAX",
                name, comm->name, (int)call->reduce);
        if (!loom__reduce_supports(call->dtype))
            return loom_fail(LOOM_ERR_UNSUPPORTED,
                "not supported yet: %s of %s in group %s; F32, BF16, F16, F64 and I64 can be reduced", name,
                loom_dtype_name(call->dtype), comm->name);
    }
    bool message = call->operation == LOOM__SEND || call->operation == LOOM__RECEIVE;
    if ((message || call->operation == LOOM__BROADCAST) && (call->peer < 0 || call->peer >= comm->size))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s in group %s: member %d, expected 0 to %d", name, comm->name, call->peer,
            comm->size - 1);
    if (message && call->peer == comm->place)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "%s in group %s: member %d is the caller itself", name, comm->name, call->peer);
    return LOOM_OK;
}

void loom__request_sizes(const loom_request *request, uint64_t *in, uint64_t *out) {
    const loom_comm *comm = request->comm;
    *in = *out = request->bytes;
    if (request->operation == LOOM__ALL_GATHER)
        *in = (uint64_t)request->counts[comm->place] * loom_dtype_size(request->dtype);
    if (request->operation == LOOM__REDUCE_SCATTER)
        *out = (uint64_t)request->counts[comm->place] * loom_dtype_size(request->dtype);
    if (request->operation == LOOM__ALL_TO_ALL)
        total_bytes(request->receive_counts, comm->size, request->dtype, out);
    if (request->operation == LOOM__SEND)
        *out = 0;
    if (request->operation == LOOM__RECEIVE)
        *in = 0;
}

/* Checks buffers against sizes, which are known once the counts are in the request. */
static loom_status check_buffers(const loom_request *request) {
    const loom_comm *comm = request->comm;
    const char *name = loom__operation_name(request->operation);
    size_t element = loom_dtype_size(request->dtype);
    uint64_t in, out;
    loom__request_sizes(request, &in, &out);
    if ((in > 0 && !request->in) || (out > 0 && !request->out))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s in group %s: a buffer is NULL where %llu bytes are expected", name,
            comm->name, (unsigned long long)(in > 0 && !request->in ? in : out));
    bool wrong = false;
    if (request->operation == LOOM__ALL_TO_ALL)
        wrong = overlap(request->in, in, request->out, out);
    if (request->operation == LOOM__ALL_REDUCE)
        wrong = request->in != request->out && overlap(request->in, in, request->out, out);
    if (request->operation == LOOM__ALL_GATHER || request->operation == LOOM__REDUCE_SCATTER) {
        const char *whole = request->operation == LOOM__ALL_GATHER ? request->out : request->in;
        const char *part = request->operation == LOOM__ALL_GATHER ? request->in : request->out;
        uint64_t offset = 0, mine = (uint64_t)request->counts[comm->place] * element;
        total_bytes(request->counts, comm->place, request->dtype, &offset);
        wrong = overlap(whole, request->bytes, part, mine) && whole + offset != part;
    }
    if (wrong)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s in group %s: in and out overlap where they must not", name, comm->name);
    return LOOM_OK;
}

loom_status loom__start(loom_comm *comm, const loom__call *call, loom_request **out) {
    if (!comm || !out)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "%s: the %s is NULL", loom__operation_name(call->operation), comm ? "request" : "group");
    loom__endpoint *endpoint = comm->endpoint;
    LOOM_TRY(loom__endpoint_status(endpoint));
    LOOM_TRY(check_call(comm, call));
    size_t lists = call->operation == LOOM__ALL_TO_ALL ? 2 : has_counts(call->operation) ? 1 : 0;
    loom_request *request = calloc(1, sizeof *request + lists * (size_t)comm->size * sizeof(int64_t));
    if (!request)
        return loom_fail(
            LOOM_ERR_MEMORY, "%s in group %s: out of memory", loom__operation_name(call->operation), comm->name);
    request->comm = comm;
    request->operation = call->operation;
    request->dtype = call->dtype;
    request->reduce = call->reduce;
    request->in = call->in;
    request->out = call->out;
    request->count = call->count;
    request->peer = call->peer;
    request->tag = call->tag;
    bool fits;
    if (lists > 0) {
        for (int i = 0; i < comm->size; i++)
            request->counts[i] = call->counts ? call->counts[i] : call->count;
        fits = total_bytes(request->counts, comm->size, call->dtype, &request->bytes);
        if (lists == 2) {
            uint64_t received;
            request->receive_counts = request->counts + comm->size;
            for (int i = 0; i < comm->size; i++)
                request->receive_counts[i] = call->receive_counts ? call->receive_counts[i] : call->count;
            fits = fits && total_bytes(request->receive_counts, comm->size, call->dtype, &received);
        }
    } else {
        fits = total_bytes(&request->count, 1, call->dtype, &request->bytes);
    }
    loom_status status = LOOM_OK;
    if (!fits)
        status = loom_fail(LOOM_ERR_ARGUMENT, "%s in group %s: a count is negative or the sizes exceed 63 bits",
            loom__operation_name(call->operation), comm->name);
    if (status == LOOM_OK)
        status = check_buffers(request);
    bool message = call->operation == LOOM__SEND || call->operation == LOOM__RECEIVE;
    request->sequence = (message ? comm->messages : comm->collectives) + 1;
    const loom__comm_watch *watch = endpoint->watch;
    if (watch)
        watch->enter(watch->context, request, true);
    if (status == LOOM_OK)
        status = comm->backend->start(request);
    if (status != LOOM_OK) {
        if (watch)
            watch->leave(watch->context);
        free(request);
        return status;
    }
    *(message ? &comm->messages : &comm->collectives) += 1;
    comm->uses++;
    request->previous = endpoint->last;
    *(endpoint->last ? &endpoint->last->next : &endpoint->first) = request;
    endpoint->last = request;
    loom__page_begin(endpoint->page, message ? -1 : comm->slot, comm->key, comm->name, request->operation,
        request->sequence, request->bytes);
    loom__comm_progress(endpoint);
    if (watch)
        watch->leave(watch->context);
    *out = request;
    return LOOM_OK;
}
