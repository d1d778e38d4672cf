/* Inside comm: endpoints, groups, requests, and what a backend does.
 *
 * An endpoint is one rank's end of all its communication: its groups, its outstanding requests in order, its page of
 * the recorder, and the failure that ended it, if one did. Only the rank's own thread touches it. */
#ifndef COMM_COMM_H
#define COMM_COMM_H

#include "comm/recorder.h"

typedef struct loom__endpoint loom__endpoint;

typedef struct loom__backend {
    /* Fills comm->state for the members in comm->ranks. Collective over them. */
    loom_status (*create_group)(loom_comm *comm);
    void (*destroy_group)(loom_comm *comm);
    /* Prepares request->state; nothing has to move yet. */
    loom_status (*start)(loom_request *request);
    /* Moves the request on without waiting; sets request->done at its end. An error goes through loom__endpoint_fail.
     */
    loom_status (*advance)(loom_request *request);
    /* Frees request->state; after a failure the request may not be done: sets endpoint->lent when its buffers, or those
     * of other requests, may still be read or written. */
    void (*release)(loom_request *request);
    /* After a failure: returns when no other rank reads this rank's memory any more. */
    void (*quiesce)(loom__endpoint *endpoint);
    void (*destroy_endpoint)(loom__endpoint *endpoint);
} loom__backend;

struct loom_comm {
    loom__endpoint *endpoint;
    const loom__backend *backend;
    char name[LOOM__GROUP_NAME];
    uint64_t key; /* the same on all members, different for every group a rank makes */
    int size, place;
    int *ranks;                     /* [size] global ranks */
    uint64_t collectives, messages; /* started so far */
    int slot;                       /* in the endpoint's page */
    int uses;                       /* 1 for the owner, 1 for each outstanding request */
    void *state;
    loom_comm *next;
};

struct loom_request {
    loom_comm *comm;
    loom_request *previous, *next; /* in the endpoint's list, oldest first */
    loom__operation operation;
    loom_dtype dtype;
    loom_reduce reduce;
    const void *in;
    void *out;
    int64_t count; /* elements: of the whole for all_reduce, broadcast, send, receive; else unused */
    int peer, tag; /* root of a broadcast, the other side of a message */
    uint64_t sequence, bytes;
    bool done;
    int stage;
    int looks;       /* how often a wait found the other side of a message gone */
    uint64_t *ended; /* where loom__clock goes when it is done, or NULL */
    void *state;
    int64_t *receive_counts; /* [size], all_to_all only */
    int64_t counts[];        /* [size] for the forms with a count a member, then [size] receive counts */
};

/* How many groups of one name and list of ranks have been made. */
typedef struct loom__made {
    uint64_t base, copies;
} loom__made;

/* Told when this rank's own thread enters and leaves the start of an operation, and a wait for one. */
typedef struct loom__comm_watch {
    void *context;
    void (*enter)(void *context, const loom_request *request, bool starts);
    void (*leave)(void *context);
} loom__comm_watch;

struct loom__endpoint {
    int rank, size;
    const loom__backend *backend; /* of groups with more than one member */
    loom__board *board;
    loom__page *page;    /* this rank's own, on the board */
    const int *page_of;  /* [size] the page of a global rank, -1 on other machines; NULL = page number is the rank */
    double timeout;      /* seconds that a wait may take now */
    double limit;        /* the same, as the launcher was told */
    bool oversubscribed; /* more threads than cores: waits give the core away at once */
    bool one_process;    /* all ranks are threads of this process */
    _Atomic uint32_t *sleep_word; /* thread ranks: what this rank sleeps on; others clear it and wake */
    loom_comm *comms, *world;
    loom_comm *end;   /* MPI: the group in which all ranks meet when their functions have returned */
    bool ending;      /* the rank's function has returned: waits no longer heed the abort flag */
    loom__made *made; /* [names] */
    int names;
    loom_request *first, *last;
    bool progressing;
    const loom__comm_watch *watch; /* NULL = nobody watches */
    bool lent;                     /* a request was dropped, and buffers may still be read or written */
    loom_status failure;
    char failure_text[LOOM__MESSAGE];
    void *state;
};

/* What both launchers say about the ranks' waits. */
typedef struct loom__endpoint_options {
    double timeout;
    bool oversubscribed;
} loom__endpoint_options;

/* The ranks of one process: one world, then one endpoint for each rank, made by the rank's own thread. The world lives
 * until its last endpoint and its creator are gone. */
typedef struct loom__thread_world loom__thread_world;
loom_status loom__thread_world_create(int size, loom__thread_world **world);
void loom__thread_world_destroy(loom__thread_world *world);
loom__board *loom__thread_world_board(loom__thread_world *world);
/* Wakes all ranks that sleep in a wait; after the board was aborted. */
void loom__thread_world_wake(loom__thread_world *world);
loom_status loom__endpoint_create_thread(
    loom__thread_world *world, int rank, const loom__endpoint_options *options, loom__endpoint **endpoint);

/* Where an MPI rank sits on its machine. */
typedef struct loom__mpi_place {
    int local_rank, local_size;
    bool same_cores; /* all ranks of the machine may use the same CPUs: mpirun has bound nobody */
} loom__mpi_place;

/* This process as one rank of MPI_COMM_WORLD; MPI is initialised. Collective over MPI_COMM_WORLD, also for a rank that
 * cannot start, which brings its error as `mine`. A failure is everybody's: a rank that failed by itself gets its own
 * error, the others LOOM_ERR_ABORTED with the message of the lowest one, on which *speaks is set. chunk_bytes limits
 * one MPI message (0 = as large as MPI can); affinity is a hash of the CPUs the process may use. */
loom_status loom__endpoint_create_mpi(const loom__endpoint_options *options, loom_status mine, size_t chunk_bytes,
    uint64_t affinity, loom__mpi_place *place, bool *speaks, loom__endpoint **endpoint);

/* Frees the endpoint and all groups it still has. Outstanding requests are dropped. NULL is accepted. Returns whether
 * the buffers of all requests are the rank's own again; when not (MPI), their memory must never be freed. */
bool loom__endpoint_destroy(loom__endpoint *endpoint);
/* The end of the rank's function: LOOM_ERR_STATE when requests were started and never given to loom_wait. */
loom_status loom__endpoint_check_finished(loom__endpoint *endpoint);

/* A group of global ranks, the caller among them; see loom_group_create. */
loom_status loom__group_create(
    loom__endpoint *endpoint, const char *name, const int *ranks, int count, loom_comm **comm);

/* Moves all outstanding operations of the rank on, as far as they go without waiting. context is the endpoint; the form
 * is that of a team's progress hook. Errors are kept for the next wait. */
void loom__comm_progress(void *context);

/* Records the failure that ends this rank's communication, and the run's: the board is aborted with the message. Later
 * waits and starts return the same. Returns status with the message in the error record. */
loom_status loom__endpoint_fail(loom__endpoint *endpoint, loom_status status, const char *format, ...)
    LOOM_PRINTF(3, 4);
/* LOOM_OK, or that failure again. */
loom_status loom__endpoint_status(const loom__endpoint *endpoint);

/* For backends. */
extern const loom__backend loom__self_backend;
loom__page *loom__endpoint_page(const loom__endpoint *endpoint, int global_rank); /* NULL on another machine */
void loom__request_done(loom_request *request);
/* Bytes of the request's input and output, as the operation's declaration gives them. */
void loom__request_sizes(const loom_request *request, uint64_t *in, uint64_t *out);
/* The clock at which the request is done goes to *ended, at once where it is done already; until loom_wait for it
 * returns. */
void loom__request_time(loom_request *request, uint64_t *ended);
/* True when an earlier message of the same group, direction, peer and tag has not reached `stage`: the later one may
 * not overtake it. */
bool loom__request_must_follow(const loom_request *request, int stage);
loom_status loom__message_mismatch(loom_request *request, int64_t other_count, loom_dtype other_dtype);
/* "all_reduce #17 of group tp (4096 bytes)" */
void loom__request_describe(const loom_request *request, char *text, size_t bytes);
/* Everything a call says about its operation; what an operation does not use is 0. */
typedef struct loom__call {
    loom__operation operation;
    const void *in;
    void *out;
    int64_t count; /* of the whole, or of each member where counts is NULL */
    const int64_t *counts, *receive_counts;
    loom_dtype dtype;
    loom_reduce reduce;
    int peer, tag;
} loom__call;

/* Tags that users cannot name, for loom__start. */
enum { LOOM__TAG_GROUP = LOOM_TAG_COUNT, LOOM__TAG_END };

/* Checks the call and makes it a request. */
loom_status loom__start(loom_comm *comm, const loom__call *call, loom_request **request);
/* The same and loom_wait. */
loom_status loom__run(loom_comm *comm, const loom__call *call);
void loom__request_free(loom_request *request);

#endif
