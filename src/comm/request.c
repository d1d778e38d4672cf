/* Waiting, and saying why a wait does not end. A wait moves all outstanding operations of the rank on, then spins,
 * yields and sleeps; every few milliseconds it looks at the board: has the run been aborted, has a member died,
 * returned or come to another operation, has the time run out. Invariant: a wait returns only when the request is done
 * or the endpoint has failed, and after a failure only when nobody reads this rank's memory any more. */
#include "base/record.h"
#include "comm/comm.h"
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { LOOKS_FOR_MESSAGE = 25, LINGER_NS = 500000000 };
enum { SPINS = 2000, YIELDS = 50, LOOK_EVERY_NS = 20000000, SLEEP_FIRST_NS = 50000, SLEEP_LONGEST_NS = 500000 };

loom__page *loom__endpoint_page(const loom__endpoint *endpoint, int global_rank) {
    int page = endpoint->page_of ? endpoint->page_of[global_rank] : global_rank;
    return page < 0 ? NULL : &endpoint->board->page[page];
}

loom_status loom__endpoint_fail(loom__endpoint *endpoint, loom_status status, const char *format, ...) {
    if (!endpoint->failure) {
        va_list arguments;
        va_start(arguments, format);
        loom__record_format(endpoint->failure_text, sizeof endpoint->failure_text, format, arguments);
        va_end(arguments);
        endpoint->failure = status;
        loom__board_abort(endpoint->board, endpoint->rank, status, endpoint->failure_text);
    }
    return loom__endpoint_status(endpoint);
}

loom_status loom__endpoint_status(const loom__endpoint *endpoint) {
    return endpoint->failure ? loom_fail(endpoint->failure, "%s", endpoint->failure_text) : LOOM_OK;
}

void loom__request_describe(const loom_request *request, char *text, size_t bytes) {
    int length = snprintf(text, bytes, "%s #%llu of group %s (%llu bytes", loom__operation_name(request->operation),
        (unsigned long long)request->sequence, request->comm->name, (unsigned long long)request->bytes);
    const loom_comm *comm = request->comm;
    if (length < 0 || (size_t)length >= bytes)
        return;
    const char *side = request->operation == LOOM__SEND ? " to" : " from";
    if (request->operation >= LOOM__SEND && request->tag < LOOM_TAG_COUNT)
        snprintf(text + length, bytes - (size_t)length, "%s rank %d, tag %d)", side, comm->ranks[request->peer],
            request->tag);
    else if (request->operation >= LOOM__SEND)
        snprintf(
            text + length, bytes - (size_t)length, "%s rank %d, to make a group)", side, comm->ranks[request->peer]);
    else
        snprintf(text + length, bytes - (size_t)length, ")");
}

void loom__request_done(loom_request *request) {
    loom_comm *comm = request->comm;
    request->done = true;
    if (request->ended)
        *request->ended = loom__clock();
    loom__page_finish(
        comm->endpoint->page, comm->key, comm->name, request->operation, request->sequence, request->bytes);
}

void loom__request_time(loom_request *request, uint64_t *ended) {
    request->ended = ended;
    if (request->done)
        *ended = loom__clock();
}

bool loom__request_must_follow(const loom_request *request, int stage) {
    for (const loom_request *earlier = request->previous; earlier; earlier = earlier->previous)
        if (!earlier->done && earlier->comm == request->comm && earlier->operation == request->operation &&
            earlier->peer == request->peer && earlier->tag == request->tag && earlier->stage < stage)
            return true;
    return false;
}

loom_status loom__message_mismatch(loom_request *request, int64_t other_count, loom_dtype other_dtype) {
    bool sends = request->operation == LOOM__SEND;
    loom_comm *comm = request->comm;
    return loom__endpoint_fail(comm->endpoint, LOOM_ERR_COMM,
        "rank %d %s %lld elements of %s %s rank %d (group %s, tag %d), which %s %lld elements of %s",
        comm->ranks[comm->place], sends ? "sends" : "receives", (long long)request->count,
        loom_dtype_name(request->dtype), sends ? "to" : "from", comm->ranks[request->peer], comm->name, request->tag,
        sends ? "receives" : "sends", (long long)other_count, loom_dtype_name(other_dtype));
}

void loom__comm_progress(void *context) {
    loom__endpoint *endpoint = context;
    if (!endpoint->first || endpoint->progressing || endpoint->failure)
        return;
    endpoint->progressing = true;
    atomic_store_explicit(&endpoint->page->moved, loom__clock(), memory_order_relaxed);
    for (loom_request *request = endpoint->first; request; request = request->next)
        if (!request->done && request->comm->backend->advance(request) != LOOM_OK)
            break;
    endpoint->progressing = false;
}

/* Text that grows in a fixed buffer. */
typedef struct sentence {
    char text[LOOM__MESSAGE];
    size_t length;
} sentence;

LOOM_PRINTF(2, 3) static void say(sentence *s, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    s->length += loom__record_format(s->text + s->length, sizeof s->text - s->length, format, arguments);
    va_end(arguments);
}

static void say_doing(sentence *s, const loom__page *page, const char *who) {
    char doing[512];
    loom__page_describe(page, doing, sizeof doing);
    say(s, "; %s's %s", who, doing);
}

/* The members that this request depends on, but for the caller: one side of a message, or all. */
static bool concerns(const loom_request *request, int place) {
    return place != request->comm->place && (request->operation < LOOM__SEND || place == request->peer);
}

/* Whether the member is known not to have come to this operation. Without a page (another machine), or where the page
 * cannot follow all groups, nothing is known. */
static bool is_missing(const loom_request *request, int place) {
    const loom_comm *comm = request->comm;
    const loom__page *page = loom__endpoint_page(comm->endpoint, comm->ranks[place]);
    if (!page)
        return false;
    if (request->operation >= LOOM__SEND)
        return true;
    return loom__page_started(page, comm->key) < (int64_t)request->sequence;
}

static loom_status fail_aborted(loom_request *request) {
    loom__endpoint *endpoint = request->comm->endpoint;
    return loom__endpoint_fail(
        endpoint, LOOM_ERR_ABORTED, "rank %d ended the run: %s", endpoint->board->rank, endpoint->board->message);
}

static loom_status fail_about(loom_request *request, int place, loom_status status, const char *what) {
    loom_comm *comm = request->comm;
    const loom__page *page = loom__endpoint_page(comm->endpoint, comm->ranks[place]);
    char operation[160], who[32];
    sentence s = {.length = 0};
    loom__request_describe(request, operation, sizeof operation);
    snprintf(who, sizeof who, "rank %d", comm->ranks[place]);
    say(&s, "%s %s %s", who, what, operation);
    say_doing(&s, page, who);
    return loom__endpoint_fail(comm->endpoint, status, "%s", s.text);
}

static bool is_waiting(const loom__page *page) {
    return atomic_load_explicit(&page->waiting, memory_order_acquire) != 0;
}

/* Whoever a message does not come from may itself wait for another: then it is a member that waits for nobody, and has
 * not returned, that holds all up. */
static void say_who_holds_up(sentence *s, const loom_request *request) {
    const loom_comm *comm = request->comm;
    const loom__page *peer =
        request->operation < LOOM__SEND ? NULL : loom__endpoint_page(comm->endpoint, comm->ranks[request->peer]);
    if (!peer || !is_waiting(peer))
        return;
    for (int place = 0, said = 0; place < comm->size && said < 3; place++) {
        const loom__page *page = loom__endpoint_page(comm->endpoint, comm->ranks[place]);
        if (place == comm->place || !page || is_waiting(page) ||
            atomic_load_explicit(&page->state, memory_order_acquire) != LOOM__RANK_RUNNING)
            continue;
        char who[32];
        snprintf(who, sizeof who, "rank %d", comm->ranks[place]);
        say(s, "; %s waits for nobody", who);
        say_doing(s, page, who);
        said++;
    }
}

static loom_status fail_timeout(loom_request *request, double seconds) {
    loom_comm *comm = request->comm;
    loom__endpoint *endpoint = comm->endpoint;
    char operation[160], who[32];
    sentence s = {.length = 0};
    loom__request_describe(request, operation, sizeof operation);
    int missing = 0, suspect = -1;
    uint64_t oldest = UINT64_MAX;
    for (int place = 0; place < comm->size; place++) {
        if (!concerns(request, place))
            continue;
        const loom__page *page = loom__endpoint_page(endpoint, comm->ranks[place]);
        if (is_missing(request, place)) {
            /* Naming the first few is help; naming a thousand is not. */
            if (missing < 8)
                say(&s, missing == 0 ? "rank %d" : ", rank %d", comm->ranks[place]);
            missing++;
        } else if (page && atomic_load_explicit(&page->moved, memory_order_relaxed) < oldest) {
            oldest = atomic_load_explicit(&page->moved, memory_order_relaxed);
            suspect = place;
        }
    }
    if (missing > 8)
        say(&s, " and %d more", missing - 8);
    if (missing > 0) {
        say(&s, " %s not come to %s within %.1f s", missing == 1 ? "has" : "have", operation, seconds);
        for (int place = 0, said = 0; place < comm->size && said < 3; place++) {
            if (!concerns(request, place) || !is_missing(request, place))
                continue;
            snprintf(who, sizeof who, "rank %d", comm->ranks[place]);
            say_doing(&s, loom__endpoint_page(endpoint, comm->ranks[place]), who);
            said++;
        }
        say_who_holds_up(&s, request);
    } else if (suspect >= 0) {
        snprintf(who, sizeof who, "rank %d", comm->ranks[suspect]);
        say(&s, "%s did not finish within %.1f s; nobody is known to be missing, and %s has moved it on least recently",
            operation, seconds, who);
        say_doing(&s, loom__endpoint_page(endpoint, comm->ranks[suspect]), who);
    } else {
        say(&s, "%s did not finish within %.1f s; the other members are on other machines", operation, seconds);
    }
    return loom__endpoint_fail(endpoint, LOOM_ERR_TIMEOUT, "%s", s.text);
}

/* The members came to the same number with different operations; only MPI needs this, threads compare directly. */
static loom_status check_same_operation(loom_request *request, int place) {
    loom_comm *comm = request->comm;
    const loom__page *page = loom__endpoint_page(comm->endpoint, comm->ranks[place]);
    if (request->operation >= LOOM__SEND || !page)
        return LOOM_OK;
    const loom__record *record = loom__page_find(page, comm->key, request->sequence);
    if (!record)
        return LOOM_OK;
    loom__operation theirs = (loom__operation)atomic_load_explicit(&record->operation, memory_order_relaxed);
    uint64_t bytes = atomic_load_explicit(&record->bytes, memory_order_relaxed);
    /* The sizes of an all-to-all differ by right. */
    if (theirs == request->operation && (bytes == request->bytes || theirs == LOOM__ALL_TO_ALL))
        return LOOM_OK;
    /* The page may be going past this record just now. */
    if (atomic_load_explicit(&record->sequence, memory_order_acquire) != request->sequence)
        return LOOM_OK;
    char mine[160];
    loom__request_describe(request, mine, sizeof mine);
    return loom__endpoint_fail(comm->endpoint, LOOM_ERR_COMM,
        "members of group %s disagree about operation #%llu: rank %d came to %s, rank %d to %s (%llu bytes)",
        comm->name, (unsigned long long)request->sequence, comm->ranks[comm->place], mine, comm->ranks[place],
        loom__operation_name(theirs), (unsigned long long)bytes);
}

/* The slow look of a long wait. */
static loom_status look_around(loom_request *request, double seconds) {
    loom_comm *comm = request->comm;
    loom__endpoint *endpoint = comm->endpoint;
    /* Where the ranks meet at the end, whoever has returned is about to come, unless it dies on the way. */
    bool at_end = comm == endpoint->end;
    for (int place = 0; place < comm->size; place++) {
        const loom__page *page = loom__endpoint_page(endpoint, comm->ranks[place]);
        if (!concerns(request, place) || !page)
            continue;
        uint32_t state = atomic_load_explicit(&page->state, memory_order_acquire);
        if (state == LOOM__RANK_RETURNED && !at_end && is_missing(request, place)) {
            /* What it did before it returned is visible now. */
            loom__comm_progress(endpoint);
            if (request->done || endpoint->failure)
                return LOOM_OK;
            /* A message may still be on its way from a process that has returned. */
            if (request->operation >= LOOM__SEND && !endpoint->one_process && ++request->looks < LOOKS_FOR_MESSAGE)
                continue;
            return fail_about(request, place, LOOM_ERR_COMM, "returned from its function without coming to");
        }
        if (!endpoint->one_process && (at_end || state != LOOM__RANK_RETURNED)) {
            if (loom__page_process_is_dead(page))
                return fail_about(request, place, LOOM_ERR_COMM, "has died; it was needed by");
            LOOM_TRY(check_same_operation(request, place));
        }
    }
    return seconds > endpoint->timeout ? fail_timeout(request, seconds) : LOOM_OK;
}

static void sleep_for(loom__endpoint *endpoint, long nanoseconds) {
    struct timespec time = {.tv_sec = 0, .tv_nsec = nanoseconds};
    if (endpoint->sleep_word)
        syscall(SYS_futex, endpoint->sleep_word, FUTEX_WAIT_PRIVATE, 1, &time, NULL, 0);
    else
        nanosleep(&time, NULL);
}

/* Processes that fail together (loom_agree) do not end in the same instant: what a rank sent before it failed may still
 * arrive, and a wait that ended before would turn an orderly end into MPI_Abort. Threads cannot linger, since the
 * memory of a rank that failed may be gone. */
static bool aborted_for_long(const loom__endpoint *endpoint, uint64_t *seen) {
    uint64_t now = loom__clock();
    if (*seen == 0)
        *seen = now;
    return endpoint->one_process || now - *seen > LINGER_NS;
}

static void wait_until_done(loom_request *request) {
    loom_comm *comm = request->comm;
    loom__endpoint *endpoint = comm->endpoint;
    uint64_t began = loom__clock(), looked = began, aborted = 0;
    /* Threads are woken by what they wait for, and need no look of their own but that for ranks that are gone. */
    long sleep = endpoint->sleep_word ? LOOK_EVERY_NS : SLEEP_FIRST_NS;
    loom__page_wait(endpoint->page, comm->key, comm->name, request->operation, request->sequence, request->bytes);
    for (int turn = endpoint->oversubscribed ? SPINS : 0;; turn++) {
        loom__comm_progress(endpoint);
        if (request->done || endpoint->failure)
            break;
        if (!endpoint->ending && loom__board_aborted(endpoint->board) && aborted_for_long(endpoint, &aborted)) {
            fail_aborted(request);
            break;
        }
        if (turn < SPINS) {
#if defined(__x86_64__)
            _mm_pause();
#endif
            continue;
        }
        uint64_t now = loom__clock();
        if (now - looked > LOOK_EVERY_NS) {
            looked = now;
            if (look_around(request, (double)(now - began) * 1e-9) != LOOM_OK || request->done)
                break;
        }
        if (turn < SPINS + YIELDS) {
            sched_yield();
            continue;
        }
        /* Announce the sleep, look once more, and only then sleep: whoever moves on after the look sees the word. */
        if (endpoint->sleep_word) {
            atomic_store_explicit(endpoint->sleep_word, 1, memory_order_seq_cst);
            loom__comm_progress(endpoint);
            if (request->done || endpoint->failure || loom__board_aborted(endpoint->board)) {
                atomic_store_explicit(endpoint->sleep_word, 0, memory_order_seq_cst);
                continue;
            }
        }
        sleep_for(endpoint, sleep);
        if (endpoint->sleep_word)
            atomic_store_explicit(endpoint->sleep_word, 0, memory_order_seq_cst);
        if (!endpoint->sleep_word)
            sleep = sleep * 2 < SLEEP_LONGEST_NS ? sleep * 2 : SLEEP_LONGEST_NS;
    }
    loom__page_wait_end(endpoint->page);
}

loom_status loom_wait(loom_request *request) {
    if (!request)
        return LOOM_OK;
    loom__endpoint *endpoint = request->comm->endpoint;
    const loom__comm_watch *watch = endpoint->watch;
    if (watch)
        watch->enter(watch->context, request, false);
    if (!request->done && !endpoint->failure)
        wait_until_done(request);
    if (watch)
        watch->leave(watch->context);
    bool done = request->done;
    if (!done)
        endpoint->backend->quiesce(endpoint);
    loom__request_free(request);
    return done ? LOOM_OK : loom__endpoint_status(endpoint);
}

void loom_cancel(loom_request *request, loom_status why) {
    if (!request)
        return;
    loom__endpoint *endpoint = request->comm->endpoint;
    if (!request->done && !endpoint->failure) {
        const char *message = loom_error_message();
        loom__endpoint_fail(
            endpoint, why == LOOM_OK ? LOOM_ERR_STATE : why, "%s", *message ? message : "an operation was cancelled");
    }
    if (!request->done)
        endpoint->backend->quiesce(endpoint);
    loom__request_free(request);
}

loom_status loom_test(loom_request *request, bool *done) {
    if (!request) {
        *done = true;
        return LOOM_OK;
    }
    loom__endpoint *endpoint = request->comm->endpoint;
    loom__comm_progress(endpoint);
    if (!request->done && !endpoint->failure && loom__board_aborted(endpoint->board))
        fail_aborted(request);
    if (!request->done)
        LOOM_TRY(loom__endpoint_status(endpoint));
    *done = request->done;
    return LOOM_OK;
}
