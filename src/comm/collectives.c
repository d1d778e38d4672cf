/* The public names of the collectives: each call becomes one loom__call, so that checks, records and order are the same
 * for all. Invariant: nothing here knows a backend. */
#include "base/record.h"
#include "comm/comm.h"
#include <string.h>

loom_status loom__run(loom_comm *comm, const loom__call *call) {
    loom_request *request;
    LOOM_TRY(loom__start(comm, call, &request));
    return loom_wait(request);
}

static loom_status check_counts(const loom_comm *comm, const char *name, const int64_t *counts) {
    if (comm)
        LOOM_TRY(loom__endpoint_status(comm->endpoint));
    if (!counts)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "%s in group %s: the list of counts is NULL", name, comm ? comm->name : "NULL");
    return LOOM_OK;
}

static loom_status check_tag(const loom_comm *comm, const char *name, int tag) {
    if (comm)
        LOOM_TRY(loom__endpoint_status(comm->endpoint));
    if (tag < 0 || tag >= LOOM_TAG_COUNT)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s in group %s: tag %d, expected 0 to %d", name,
            comm ? comm->name : "NULL", tag, LOOM_TAG_COUNT - 1);
    return LOOM_OK;
}

static loom__call all_reduce_call(const void *in, void *out, int64_t count, loom_dtype dtype, loom_reduce operation) {
    return (loom__call){
        .operation = LOOM__ALL_REDUCE, .in = in, .out = out, .count = count, .dtype = dtype, .reduce = operation};
}

static loom__call all_gather_call(
    const void *in, void *out, int64_t count_each, const int64_t *counts, loom_dtype dtype) {
    return (loom__call){
        .operation = LOOM__ALL_GATHER, .in = in, .out = out, .count = count_each, .counts = counts, .dtype = dtype};
}

static loom__call reduce_scatter_call(
    const void *in, void *out, int64_t count_each, const int64_t *counts, loom_dtype dtype, loom_reduce operation) {
    return (loom__call){.operation = LOOM__REDUCE_SCATTER,
        .in = in,
        .out = out,
        .count = count_each,
        .counts = counts,
        .dtype = dtype,
        .reduce = operation};
}

static loom__call broadcast_call(void *buffer, int64_t count, loom_dtype dtype, int root) {
    return (loom__call){
        .operation = LOOM__BROADCAST, .in = buffer, .out = buffer, .count = count, .dtype = dtype, .peer = root};
}

static loom__call all_to_all_call(const void *in, void *out, int64_t count_each, const int64_t *send_counts,
    const int64_t *receive_counts, loom_dtype dtype) {
    return (loom__call){.operation = LOOM__ALL_TO_ALL,
        .in = in,
        .out = out,
        .count = count_each,
        .counts = send_counts,
        .receive_counts = receive_counts,
        .dtype = dtype};
}

static loom__call send_call(const void *buffer, int64_t count, loom_dtype dtype, int to, int tag) {
    return (loom__call){.operation = LOOM__SEND, .in = buffer, .count = count, .dtype = dtype, .peer = to, .tag = tag};
}

static loom__call receive_call(void *buffer, int64_t count, loom_dtype dtype, int from, int tag) {
    return (loom__call){
        .operation = LOOM__RECEIVE, .out = buffer, .count = count, .dtype = dtype, .peer = from, .tag = tag};
}

loom_status loom_all_reduce_start(loom_comm *comm, const void *in, void *out, int64_t count, loom_dtype dtype,
    loom_reduce operation, loom_request **request) {
    loom__call call = all_reduce_call(in, out, count, dtype, operation);
    return loom__start(comm, &call, request);
}

loom_status loom_all_gather_v_start(
    loom_comm *comm, const void *in, void *out, const int64_t *counts, loom_dtype dtype, loom_request **request) {
    LOOM_TRY(check_counts(comm, "all_gather", counts));
    loom__call call = all_gather_call(in, out, 0, counts, dtype);
    return loom__start(comm, &call, request);
}

loom_status loom_reduce_scatter_v_start(loom_comm *comm, const void *in, void *out, const int64_t *counts,
    loom_dtype dtype, loom_reduce operation, loom_request **request) {
    LOOM_TRY(check_counts(comm, "reduce_scatter", counts));
    loom__call call = reduce_scatter_call(in, out, 0, counts, dtype, operation);
    return loom__start(comm, &call, request);
}

loom_status loom_broadcast_start(
    loom_comm *comm, void *buffer, int64_t count, loom_dtype dtype, int root, loom_request **request) {
    loom__call call = broadcast_call(buffer, count, dtype, root);
    return loom__start(comm, &call, request);
}

loom_status loom_all_to_all_v_start(loom_comm *comm, const void *in, const int64_t *send_counts, void *out,
    const int64_t *receive_counts, loom_dtype dtype, loom_request **request) {
    LOOM_TRY(check_counts(comm, "all_to_all", send_counts));
    LOOM_TRY(check_counts(comm, "all_to_all", receive_counts));
    loom__call call = all_to_all_call(in, out, 0, send_counts, receive_counts, dtype);
    return loom__start(comm, &call, request);
}

loom_status loom_send_start(
    loom_comm *comm, const void *buffer, int64_t count, loom_dtype dtype, int to, int tag, loom_request **request) {
    LOOM_TRY(check_tag(comm, "send", tag));
    loom__call call = send_call(buffer, count, dtype, to, tag);
    return loom__start(comm, &call, request);
}

loom_status loom_receive_start(
    loom_comm *comm, void *buffer, int64_t count, loom_dtype dtype, int from, int tag, loom_request **request) {
    LOOM_TRY(check_tag(comm, "receive", tag));
    loom__call call = receive_call(buffer, count, dtype, from, tag);
    return loom__start(comm, &call, request);
}

loom_status loom_all_reduce(
    loom_comm *comm, const void *in, void *out, int64_t count, loom_dtype dtype, loom_reduce operation) {
    loom__call call = all_reduce_call(in, out, count, dtype, operation);
    return loom__run(comm, &call);
}

loom_status loom_all_gather(loom_comm *comm, const void *in, void *out, int64_t count_each, loom_dtype dtype) {
    loom__call call = all_gather_call(in, out, count_each, NULL, dtype);
    return loom__run(comm, &call);
}

loom_status loom_all_gather_v(loom_comm *comm, const void *in, void *out, const int64_t *counts, loom_dtype dtype) {
    LOOM_TRY(check_counts(comm, "all_gather", counts));
    loom__call call = all_gather_call(in, out, 0, counts, dtype);
    return loom__run(comm, &call);
}

loom_status loom_reduce_scatter(
    loom_comm *comm, const void *in, void *out, int64_t count_each, loom_dtype dtype, loom_reduce operation) {
    loom__call call = reduce_scatter_call(in, out, count_each, NULL, dtype, operation);
    return loom__run(comm, &call);
}

loom_status loom_reduce_scatter_v(
    loom_comm *comm, const void *in, void *out, const int64_t *counts, loom_dtype dtype, loom_reduce operation) {
    LOOM_TRY(check_counts(comm, "reduce_scatter", counts));
    loom__call call = reduce_scatter_call(in, out, 0, counts, dtype, operation);
    return loom__run(comm, &call);
}

loom_status loom_broadcast(loom_comm *comm, void *buffer, int64_t count, loom_dtype dtype, int root) {
    loom__call call = broadcast_call(buffer, count, dtype, root);
    return loom__run(comm, &call);
}

loom_status loom_all_to_all(loom_comm *comm, const void *in, void *out, int64_t count_each, loom_dtype dtype) {
    loom__call call = all_to_all_call(in, out, count_each, NULL, NULL, dtype);
    return loom__run(comm, &call);
}

loom_status loom_all_to_all_v(loom_comm *comm, const void *in, const int64_t *send_counts, void *out,
    const int64_t *receive_counts, loom_dtype dtype) {
    LOOM_TRY(check_counts(comm, "all_to_all", send_counts));
    LOOM_TRY(check_counts(comm, "all_to_all", receive_counts));
    loom__call call = all_to_all_call(in, out, 0, send_counts, receive_counts, dtype);
    return loom__run(comm, &call);
}

loom_status loom_send(loom_comm *comm, const void *buffer, int64_t count, loom_dtype dtype, int to, int tag) {
    LOOM_TRY(check_tag(comm, "send", tag));
    loom__call call = send_call(buffer, count, dtype, to, tag);
    return loom__run(comm, &call);
}

loom_status loom_receive(loom_comm *comm, void *buffer, int64_t count, loom_dtype dtype, int from, int tag) {
    LOOM_TRY(check_tag(comm, "receive", tag));
    loom__call call = receive_call(buffer, count, dtype, from, tag);
    return loom__run(comm, &call);
}

loom_status loom_barrier(loom_comm *comm) {
    loom__call call = {.operation = LOOM__BARRIER, .dtype = LOOM_U8};
    return loom__run(comm, &call);
}

loom_status loom_agree(loom_comm *comm, loom_status mine) {
    char own_text[LOOM__RECORD_BYTES], theirs[LOOM__MESSAGE];
    size_t length = strlen(loom_error_message());
    memcpy(own_text, loom_error_message(), length + 1);
    int64_t failing = !comm || mine == LOOM_OK ? 0 : comm->size - comm->place; /* the largest is the lowest member's */
    LOOM_TRY(loom_all_reduce(comm, &failing, &failing, 1, LOOM_I64, LOOM_MAX));
    if (failing == 0)
        return LOOM_OK;
    /* Others get as much of the message as one that ends a run may have. */
    memset(theirs, 0, sizeof theirs);
    memcpy(theirs, own_text, length < sizeof theirs ? length : loom__whole_characters(own_text, sizeof theirs - 1));
    int lowest = comm->size - (int)failing;
    LOOM_TRY(loom_broadcast(comm, theirs, (int64_t)sizeof theirs, LOOM_U8, lowest));
    if (mine != LOOM_OK)
        return loom_fail(mine, "%s", own_text);
    theirs[sizeof theirs - 1] = '\0';
    return loom_fail(LOOM_ERR_ABORTED, "rank %d: %s", comm->ranks[lowest], theirs);
}
