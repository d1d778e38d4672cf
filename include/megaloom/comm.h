/* Groups of ranks and their collectives.
 *
 * A loom_comm is one rank's handle of a group. All collectives below are collective over the group: every member calls
 * them in the same order with the same count, dtype and operation. They behave the same on every backend (self,
 * threads, MPI), bit for bit.
 *
 * Reduction: element i = x0[i] + x1[i] + … in group-rank order, with an fp32 accumulator for F32, BF16 and F16 (double
 * for F64, int64 for I64). Groups of more than LOOM_REDUCE_BLOCK members are summed in consecutive blocks of that many
 * members, then the block sums in order. The result does not depend on chunking, offset, bucket or backend. An
 * all_reduce is a reduce_scatter and an all_gather.
 *
 * A finished operation means: my output is ready and nobody reads my input any more. Buffers are borrowed until then; a
 * list of counts only for the call. Buffers may be NULL where nothing is to be read or written. An input and an output
 * of one call may overlap only where a comment allows it.
 *
 * Errors. Every wait ends with an error when the world is aborted or its timeout passes (never for ever). The message
 * says which operation of which group it was, who has not come, and what that rank finished last and does now. Once a
 * rank's communication has failed the run is over: every later start, and every wait for an unfinished operation,
 * returns the same error (an operation that had finished stays good).
 * LOOM_ERR_TIMEOUT: this rank's wait took too long. LOOM_ERR_COMM: members disagree about the operation, or one has
 * died. LOOM_ERR_ABORTED: another rank failed. LOOM_ERR_ARGUMENT and LOOM_ERR_UNSUPPORTED come from the start, which
 * then has started nothing.
 *
 * After a failed wait or a cancel on thread ranks the buffers are the caller's again. MPI cannot promise that: a
 * message may still come into them, or be read from them, whenever the process calls MPI. Under MPI a buffer of at most
 * LOOM_COPIED_BYTES is the caller's again all the same, since the operation works in a copy: it may lie on the stack.
 * Larger ones of an unfinished operation must not be freed or used again before MPI_Finalize has returned: they are
 * allocated, and freed with loom_comm_free, which knows. Tensors of the library know too.
 *
 * Threads. A group belongs to the rank's own thread; no other may use it. */
#ifndef MEGALOOM_COMM_H
#define MEGALOOM_COMM_H

#include <megaloom/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LOOM_REDUCE_BLOCK 16
#define LOOM_TAG_COUNT 8000    /* tags of messages are 0 … LOOM_TAG_COUNT-1 */
#define LOOM_COPIED_BYTES 4096 /* a buffer of at most this is the caller's again after a failure, under MPI too */

typedef struct loom_comm loom_comm;
typedef struct loom_request loom_request;

typedef enum loom_reduce { LOOM_SUM, LOOM_MAX } loom_reduce;

LOOM_API int loom_comm_rank(const loom_comm *comm);                  /* my place in the group, 0 … size-1 */
LOOM_API int loom_comm_size(const loom_comm *comm);                  /* members */
LOOM_API int loom_comm_world_rank(const loom_comm *comm, int place); /* global rank of a member */
LOOM_API const char *loom_comm_name(const loom_comm *comm);          /* "tp", "dp", …, for messages */

/* Non-blocking forms. Each writes *request on success; it must be given to loom_wait exactly once (also after an
 * error), or to loom_cancel, which free it. Operations of one group start and take effect in the order of the calls.
 * F32, BF16, F16, F64, I64 reduce; the others move bytes. `count` is in elements. */

/* out[i] = reduce over members of in[i]; out may be in. */
LOOM_API loom_status loom_all_reduce_start(loom_comm *comm, const void *in, void *out, int64_t count, loom_dtype dtype,
    loom_reduce operation, loom_request **request);
/* out = in of member 0, then of member 1, …; counts[place] elements each. in may be its own place in out. */
LOOM_API loom_status loom_all_gather_v_start(
    loom_comm *comm, const void *in, void *out, const int64_t *counts, loom_dtype dtype, loom_request **request);
/* out (counts[my place] elements) = my part of the sum over members of in (all parts, in place order). out may be my
 * part of in. */
LOOM_API loom_status loom_reduce_scatter_v_start(loom_comm *comm, const void *in, void *out, const int64_t *counts,
    loom_dtype dtype, loom_reduce operation, loom_request **request);
/* buffer of member `root` is copied to the others. */
LOOM_API loom_status loom_broadcast_start(
    loom_comm *comm, void *buffer, int64_t count, loom_dtype dtype, int root, loom_request **request);
/* Part p of `in` (send_counts[p] elements, parts next to each other) goes to member p; `out` holds what came from
 * member 0, 1, … (receive_counts[p] elements each). in and out do not overlap. */
LOOM_API loom_status loom_all_to_all_v_start(loom_comm *comm, const void *in, const int64_t *send_counts, void *out,
    const int64_t *receive_counts, loom_dtype dtype, loom_request **request);
/* Point to point inside the group. A send finishes when the receiver has copied; receives match sends of the same peer
 * and tag in order. A receive of another count or dtype than the send's is an error on both. `to` and `from` are places
 * in the group, not the caller's own; tag is in [0, LOOM_TAG_COUNT). */
LOOM_API loom_status loom_send_start(
    loom_comm *comm, const void *buffer, int64_t count, loom_dtype dtype, int to, int tag, loom_request **request);
LOOM_API loom_status loom_receive_start(
    loom_comm *comm, void *buffer, int64_t count, loom_dtype dtype, int from, int tag, loom_request **request);

/* Waits for the request, frees it, returns its status. NULL is finished already. */
LOOM_API loom_status loom_wait(loom_request *request);
/* For cleaning up after an error: gives the request up and frees it. If it had not finished, the run ends with the
 * status `why` and this thread's error message, and the buffers are as after a failed wait (see the top). NULL is
 * accepted. */
LOOM_API void loom_cancel(loom_request *request, loom_status why);
/* free(memory), of what operations of the rank may have had as buffers: after a failure under MPI the memory stays
 * allocated until the process ends, where it may be that of an unfinished operation. After the wait or cancel of each
 * operation that has it. NULL is accepted, also as group, which is a group of the caller alone. */
LOOM_API void loom_comm_free(const loom_comm *comm, void *memory);
/* Moves all outstanding operations of the rank on; *done tells whether this one has finished (loom_wait still frees
 * it). Has no time limit of its own: who polls for long ends with loom_wait, which does. */
LOOM_API loom_status loom_test(loom_request *request, bool *done);

/* Blocking forms. */
LOOM_API loom_status loom_all_reduce(
    loom_comm *comm, const void *in, void *out, int64_t count, loom_dtype dtype, loom_reduce operation);
LOOM_API loom_status loom_all_gather(loom_comm *comm, const void *in, void *out, int64_t count_each, loom_dtype dtype);
LOOM_API loom_status loom_all_gather_v(
    loom_comm *comm, const void *in, void *out, const int64_t *counts, loom_dtype dtype);
LOOM_API loom_status loom_reduce_scatter(
    loom_comm *comm, const void *in, void *out, int64_t count_each, loom_dtype dtype, loom_reduce operation);
LOOM_API loom_status loom_reduce_scatter_v(
    loom_comm *comm, const void *in, void *out, const int64_t *counts, loom_dtype dtype, loom_reduce operation);
LOOM_API loom_status loom_broadcast(loom_comm *comm, void *buffer, int64_t count, loom_dtype dtype, int root);
LOOM_API loom_status loom_all_to_all(loom_comm *comm, const void *in, void *out, int64_t count_each, loom_dtype dtype);
LOOM_API loom_status loom_all_to_all_v(loom_comm *comm, const void *in, const int64_t *send_counts, void *out,
    const int64_t *receive_counts, loom_dtype dtype);
LOOM_API loom_status loom_send(loom_comm *comm, const void *buffer, int64_t count, loom_dtype dtype, int to, int tag);
LOOM_API loom_status loom_receive(loom_comm *comm, void *buffer, int64_t count, loom_dtype dtype, int from, int tag);
LOOM_API loom_status loom_barrier(loom_comm *comm);

/* Fail together: every member gives its own status. LOOM_OK when all are good. Otherwise a member whose own status was
 * bad gets it back with its message, and the others get LOOM_ERR_ABORTED with the message of the lowest failing member
 * (its first 2047 bytes). The run goes on: it is the caller who returns the error. */
LOOM_API loom_status loom_agree(loom_comm *comm, loom_status mine);

#ifdef __cplusplus
}
#endif
#endif
