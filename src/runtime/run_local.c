/* Ranks as threads of this process. The caller's thread only watches: it starts one thread a rank, waits until all have
 * ended, and starts the grace period when the run is aborted. Invariant: everything that a rank's thread can touch
 * lives in the run, which is freed only when every thread has ended; a run with an abandoned rank is never freed. */
#include "runtime/binding.h"
#include "runtime/rank.h"
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_RANKS = 4096, WATCH_NS = 50000000 };

typedef struct local_run local_run;

typedef struct local_seat {
    local_run *run;
    int index;
    pthread_t thread;
    bool started, ended; /* ended: under the run's lock */
    loom_status status;
    char text[LOOM__MESSAGE];
} local_seat;

struct local_run {
    int n, threads;
    loom_rank_function function;
    void *argument;
    loom_run_options options;
    loom__thread_world *world;
    loom__board *board;
    loom__cpus cpus;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int ended;
    local_seat seats[];
};

static loom_status run_rank(local_seat *seat) {
    local_run *run = seat->run;
    loom__endpoint *endpoint;
    loom__endpoint_options options = {
        .timeout = run->options.timeout, .oversubscribed = (int64_t)run->n * run->threads > run->cpus.count};
    LOOM_TRY(loom__endpoint_create_thread(run->world, seat->index, &options, &endpoint));
    loom_rank rank;
    loom_status status = loom__rank_open(&rank, endpoint, seat->index, run->n, run->threads,
        loom__cpus_of_rank(&run->cpus, run->n, seat->index, run->threads), &run->options);
    if (status == LOOM_OK)
        status = loom__rank_run(&rank, run->function, run->argument, seat->text);
    loom__rank_close(&rank);
    return status;
}

static void *rank_main(void *argument) {
    local_seat *seat = argument;
    local_run *run = seat->run;
    loom_status status = run_rank(seat);
    if (status != LOOM_OK && !seat->text[0])
        snprintf(seat->text, sizeof seat->text, "rank %d could not start: %s", seat->index, loom_error_message());
    if (status != LOOM_OK) {
        loom__board_abort(run->board, seat->index, status, seat->text);
        loom__thread_world_wake(run->world);
    }
    pthread_mutex_lock(&run->lock);
    seat->status = status;
    seat->ended = true;
    run->ended++;
    pthread_cond_broadcast(&run->changed);
    pthread_mutex_unlock(&run->lock);
    return NULL;
}

static void free_run(local_run *run) {
    pthread_mutex_destroy(&run->lock);
    pthread_cond_destroy(&run->changed);
    loom__thread_world_destroy(run->world);
    loom__cpus_free(&run->cpus);
    free(run);
}

/* Ends a run in which some ranks returned long ago and others do not. Called with the lock held. */
static void abort_late(local_run *run) {
    char text[LOOM__MESSAGE], doing[512];
    int late = 0, first = 0;
    for (int i = 0; i < run->n; i++)
        late += !run->seats[i].ended;
    while (run->seats[first].ended)
        first++;
    loom__page_describe(&run->board->page[first], doing, sizeof doing);
    snprintf(text, sizeof text,
        "rank %d has not returned from its function %.1f s after another rank did (%d of %d ranks are late); rank %d's "
        "%s",
        first, run->options.timeout, late, run->n, first, doing);
    loom__board_abort(run->board, first, LOOM_ERR_TIMEOUT, text);
    loom__thread_world_wake(run->world);
}

/* Waits until all ranks have ended, or the grace period of an aborted run has. Returns whether all have. */
static bool watch(local_run *run) {
    uint64_t first_end = 0, abort_seen = 0;
    pthread_mutex_lock(&run->lock);
    while (run->ended < run->n) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += WATCH_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&run->changed, &run->lock, &until);
        uint64_t now = loom__clock();
        if (run->ended > 0 && first_end == 0)
            first_end = now;
        if (abort_seen == 0 && loom__board_aborted(run->board))
            abort_seen = now;
        if (abort_seen == 0 && first_end != 0 && (double)(now - first_end) * 1e-9 > run->options.timeout &&
            run->ended < run->n)
            abort_late(run);
        if (abort_seen != 0 && (double)(now - abort_seen) * 1e-9 > run->options.grace)
            break;
    }
    bool all = run->ended == run->n;
    pthread_mutex_unlock(&run->lock);
    return all;
}

/* The verdict of a run whose ranks have all ended. */
static loom_status verdict(local_run *run) {
    if (!loom__board_aborted(run->board))
        return LOOM_OK;
    if (run->board->status == LOOM_ERR_TIMEOUT || run->board->status == LOOM_ERR_COMM)
        loom__board_dump(run->board, run->options.log, run->options.log_context);
    /* A rank may have heard of another's failure (loom_agree) and returned before that one did. */
    const local_seat *first = &run->seats[run->board->rank];
    for (int i = 0; i < run->n && (first->status == LOOM_OK || first->status == LOOM_ERR_ABORTED); i++)
        if (run->seats[i].status != LOOM_OK && run->seats[i].status != LOOM_ERR_ABORTED)
            first = &run->seats[i];
    if (first->status == LOOM_OK || first->status == LOOM_ERR_ABORTED)
        return loom_fail((loom_status)run->board->status, "%s", run->board->message);
    return loom_fail(first->status, "%s", first->text);
}

/* Leaves the ranks behind that are still late; false where the last of them has come back meanwhile. */
static bool abandon(local_run *run, char *text, size_t bytes) {
    char doing[512];
    size_t length = 0;
    text[0] = '\0';
    pthread_mutex_lock(&run->lock);
    bool late = run->ended < run->n;
    for (int i = 0; i < run->n; i++) {
        if (run->seats[i].ended)
            continue;
        loom__page_describe(&run->board->page[i], doing, sizeof doing);
        if (length < bytes - 1)
            length += (size_t)snprintf(text + length, bytes - length, "; rank %d did not come back within %.1f s (%s)",
                i, run->options.grace, doing);
        if (run->seats[i].started)
            pthread_detach(run->seats[i].thread);
        run->seats[i].started = false;
    }
    pthread_mutex_unlock(&run->lock);
    return late;
}

static void join(local_run *run) {
    for (int i = 0; i < run->n; i++)
        if (run->seats[i].started)
            pthread_join(run->seats[i].thread, NULL);
}

loom_status loom_run_local(int n, loom_rank_function function, void *argument, const loom_run_options *given) {
    int launched;
    bool beside = given && given->beside_mpi;
    if (n < 1 || n > MOST_RANKS)
        return loom_fail(LOOM_ERR_ARGUMENT, "thread ranks: found %d, expected 1 to %d", n, MOST_RANKS);
    if (!function)
        return loom_fail(LOOM_ERR_ARGUMENT, "loom_run_local: the function is NULL");
    if (!beside && loom_mpi_launched(&launched) && launched > 1)
        return loom_fail(LOOM_ERR_STATE,
            "loom_run_local was called inside an MPI run of %d processes, where each would start %d thread ranks of "
            "its own; use loom_run_mpi, or start one process without mpirun",
            launched, n);
    loom_run_options options;
    LOOM_TRY(loom__run_options_resolve(given, &options));
    local_run *run = calloc(1, sizeof *run + (size_t)n * sizeof(local_seat));
    if (!run)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %d thread ranks", n);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&run->changed, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&run->lock, NULL);
    run->n = n;
    run->function = function;
    run->argument = argument;
    run->options = options;
    loom_status status = loom__cpus_allowed(&run->cpus);
    if (status == LOOM_OK)
        status = loom__thread_world_create(n, &run->world);
    if (status != LOOM_OK) {
        free_run(run);
        return status;
    }
    run->board = loom__thread_world_board(run->world);
    run->threads = options.threads > 0 ? options.threads : loom__cpus_default_threads(&run->cpus, n);
    for (int i = 0; i < n; i++) {
        local_seat *seat = &run->seats[i];
        seat->run = run;
        seat->index = i;
        int error = pthread_create(&seat->thread, NULL, rank_main, seat);
        seat->started = error == 0;
        if (error == 0)
            continue;
        pthread_mutex_lock(&run->lock);
        seat->ended = true;
        seat->status = LOOM_ERR_MEMORY;
        run->ended++;
        snprintf(seat->text, sizeof seat->text, "the thread of rank %d could not be started: %s", i, strerror(error));
        pthread_mutex_unlock(&run->lock);
        loom__board_abort(run->board, i, LOOM_ERR_MEMORY, seat->text);
    }
    char late[LOOM__MESSAGE];
    if (!watch(run) && abandon(run, late, sizeof late)) {
        loom__board_dump(run->board, run->options.log, run->options.log_context);
        join(run);
        return loom_fail(LOOM_ERR_STUCK, "%s%s", run->board->message, late);
    }
    join(run);
    status = verdict(run);
    free_run(run);
    return status;
}
