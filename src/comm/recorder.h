/* The recorder: what each rank of this machine is doing, readable by its neighbours at any moment.
 *
 * A board holds one page a rank and the flag that ends the run. It lies in ordinary memory for thread ranks and in a
 * mapping shared on the node for MPI ranks, so it holds no pointers. Only its rank writes a page; anybody reads it. The
 * fields are relaxed atomics: a reader may meet a page between two changes, which a diagnosis can bear. */
#ifndef COMM_RECORDER_H
#define COMM_RECORDER_H

#include <megaloom/comm.h>
#include <stdatomic.h>

/* X(NAME, text) */
#define LOOM__OPERATION_LIST(X)                                                                                        \
    X(ALL_REDUCE, "all_reduce")                                                                                        \
    X(ALL_GATHER, "all_gather")                                                                                        \
    X(REDUCE_SCATTER, "reduce_scatter")                                                                                \
    X(BROADCAST, "broadcast")                                                                                          \
    X(ALL_TO_ALL, "all_to_all")                                                                                        \
    X(BARRIER, "barrier")                                                                                              \
    X(SEND, "send")                                                                                                    \
    X(RECEIVE, "receive")

typedef enum loom__operation {
#define LOOM__OPERATION_ENUM(name, text) LOOM__##name,
    LOOM__OPERATION_LIST(LOOM__OPERATION_ENUM)
#undef LOOM__OPERATION_ENUM
        LOOM__OPERATION_COUNT
} loom__operation;

const char *loom__operation_name(loom__operation operation);

enum {
    LOOM__GROUP_NAME = 32,  /* bytes of a group's name, its end counted */
    LOOM__NOTE = 64,        /* bytes of a note, its end counted */
    LOOM__MESSAGE = 2048,   /* bytes of the message that ends a run */
    LOOM__RECORDS = 64,     /* operations a page remembers */
    LOOM__PAGE_GROUPS = 64, /* groups a page can follow */
    LOOM__TOLD = -1
};

typedef enum loom__record_state { LOOM__RECORD_NONE, LOOM__RECORD_STARTED, LOOM__RECORD_FINISHED } loom__record_state;

typedef struct loom__record {
    _Atomic uint64_t key;      /* of the group: the same on all members */
    _Atomic uint64_t sequence; /* number of the operation in its group, from 1; messages count apart */
    _Atomic uint64_t bytes;
    _Atomic uint64_t time; /* nanoseconds of the monotonic clock at its last change of state */
    _Atomic uint64_t group[LOOM__GROUP_NAME / 8];
    _Atomic uint32_t operation;
    _Atomic uint32_t state;
} loom__record;

typedef enum loom__rank_state {
    LOOM__RANK_ABSENT,
    LOOM__RANK_RUNNING,
    LOOM__RANK_RETURNED, /* its function came back with LOOM_OK */
    LOOM__RANK_FAILED
} loom__rank_state;

typedef struct loom__page {
    _Alignas(64) _Atomic int32_t rank;
    _Atomic int32_t pid;
    _Atomic uint64_t pid_space; /* which pid namespace the pid belongs to */
    _Atomic uint64_t affinity;  /* a hash of the CPUs the process may use */
    _Atomic uint32_t state;
    _Atomic uint32_t waiting; /* 1 while the rank waits for `current` */
    _Atomic uint64_t moved;   /* when the rank last moved its communication on, nanoseconds */
    _Atomic uint64_t begun;   /* records written so far */
    _Atomic uint64_t note[LOOM__NOTE / 8];
    loom__record current, last;
    loom__record ring[LOOM__RECORDS];
    struct {
        _Atomic uint64_t key, started; /* how many collectives of this group the rank has come to */
        bool used;                     /* by a group that lives; the counts of an ended one stay readable */
    } groups[LOOM__PAGE_GROUPS];
    _Atomic uint32_t forgot; /* the rank has made more groups than are kept here */
} loom__page;

typedef struct loom__board {
    _Atomic uint32_t claimed; /* a rank is writing the message */
    _Atomic uint32_t aborted; /* the run ends; rank, status and message below are valid */
    _Atomic int32_t teller;   /* the process that tells a person why; 0 = nobody yet, LOOM__TOLD = it has told */
    int32_t rank, status;
    char message[LOOM__MESSAGE];
    int32_t pages;
    loom__page page[];
} loom__board;

size_t loom__board_bytes(int pages);
/* Ends the run: the first caller's rank, status and message stay. Returns whether this was the first. */
bool loom__board_abort(loom__board *board, int rank, loom_status status, const char *message);
static inline bool loom__board_aborted(loom__board *board) {
    return atomic_load_explicit(&board->aborted, memory_order_seq_cst) != 0;
}
/* True for the first caller only: it is the one that tells a person, and says so with loom__board_told. */
bool loom__board_claim_report(loom__board *board);
void loom__board_told(loom__board *board);
/* The process that has claimed the report and is still at it, or 0. */
int32_t loom__board_teller(loom__board *board);

/* Fills in who the page belongs to: rank, pid, pid namespace. */
void loom__page_open(loom__page *page, int rank);
/* The place of a group in page->groups, or -1 when the page is full. */
int loom__page_add_group(loom__page *page, uint64_t key);
/* The group has ended. Its count is kept until its place is needed. */
void loom__page_remove_group(loom__page *page, int slot);
/* How many collectives of the group the page's rank has come to; -1 when it has not made the group,
 * LOOM__STARTED_UNKNOWN when the page may have forgotten it. */
#define LOOM__STARTED_UNKNOWN INT64_MAX
int64_t loom__page_started(const loom__page *page, uint64_t key);
void loom__page_note(loom__page *page, const char *text);

/* One operation begins; `slot` (or -1) is its group's place when it is a collective. */
void loom__page_begin(loom__page *page, int slot, uint64_t key, const char *group, loom__operation operation,
    uint64_t sequence, uint64_t bytes);
/* It has finished. */
void loom__page_finish(
    loom__page *page, uint64_t key, const char *group, loom__operation operation, uint64_t sequence, uint64_t bytes);
/* The rank starts, or stops, waiting for an operation. */
void loom__page_wait(
    loom__page *page, uint64_t key, const char *group, loom__operation operation, uint64_t sequence, uint64_t bytes);
void loom__page_wait_end(loom__page *page);
/* The record of a collective in the ring, or NULL when the ring has gone past it. */
const loom__record *loom__page_find(const loom__page *page, uint64_t key, uint64_t sequence);

/* True when the page's process is known to have ended (same pid namespace, no such process, or a zombie). */
bool loom__page_process_is_dead(const loom__page *page);

/* "last finished operation: all_reduce #16 of group tp (4096 bytes), 1.2 s ago; current: all_gather #17 of group tp
 * (64 bytes), for 3.0 s". Safe in a signal handler. Returns the bytes written, the final 0 not counted. */
size_t loom__page_describe(const loom__page *page, char *text, size_t bytes);
/* One line for each of the last `most` operations, oldest first, without newlines. */
void loom__page_dump(const loom__page *page, int most, void (*line)(void *context, const char *text), void *context);
/* The last operations of every rank of the machine, as lines of the log; for a run that hung. log may be NULL. */
void loom__board_dump(const loom__board *board, loom_log_function log, void *log_context);

/* A text that is put together by hand, for signal handlers: filled from the left, cut at its end, always ended by a 0.
 * Begin with {text, 0, bytes}. */
typedef struct loom__line {
    char *text;
    size_t length, bytes;
} loom__line;
void loom__line_put(loom__line *line, const char *text);
void loom__line_put_number(loom__line *line, uint64_t number);

/* Nanoseconds of the monotonic clock, which all processes of a machine share. */
uint64_t loom__clock(void);

#endif
