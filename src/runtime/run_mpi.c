/* This process as one rank of an MPI run. When the function has returned, all ranks meet once more: if all come, they
 * all know how the run ended, and MPI is finalised; if not, the run is ended with MPI_Abort. Invariant: whoever ends
 * the run has written the reason before, once a machine: to the log, or from the SIGTERM handler to stderr. */
#include "runtime/binding.h"
#include "runtime/rank.h"

/* loom_run_mpi logs its failures itself: also those from before there are ranks. */
static loom_status log_failure(const loom_run_options *options, loom_status status) {
    if (options && options->log)
        options->log(options->log_context, LOOM_LOG_ERROR, loom_error_message());
    return status;
}

#if MEGALOOM_MPI
#include <mpi.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* How long a rank that failed waits for the others to fail as well, before it ends the run for all. */
#define MEET_AFTER_FAILURE 2.0

/* A signal handler has no argument; this is what it may look at. Set while a run is under way. */
static loom__board *_Atomic signal_board;

static void write_line(const char *text) {
    char whole[LOOM__MESSAGE + 16];
    loom__line line = {whole, 0, sizeof whole - 1};
    loom__line_put(&line, "megaloom: ");
    loom__line_put(&line, text);
    whole[line.length] = '\n';
    /* One write, so that lines of several processes do not mix. Nobody is left to hear that it failed. */
    if (write(STDERR_FILENO, whole, line.length + 1) < 0)
        return;
}

static void write_page(const loom__page *page, bool dead) {
    char text[1024];
    loom__line line = {text, 0, sizeof text};
    loom__line_put(&line, "rank ");
    loom__line_put_number(&line, (uint64_t)atomic_load_explicit(&page->rank, memory_order_relaxed));
    uint32_t state = atomic_load_explicit(&page->state, memory_order_relaxed);
    loom__line_put(&line, dead                           ? " has died; its "
                          : state == LOOM__RANK_RETURNED ? " had returned; its "
                          : state == LOOM__RANK_FAILED   ? " had failed; its "
                                                         : ": ");
    loom__page_describe(page, text + line.length, sizeof text - line.length);
    write_line(text);
}

/* mpirun sends SIGTERM as soon as a process has died, and SIGKILL a second later or as soon as one more has: a rank
 * that went before the report is written would take the writer with it. Only calls that are safe here are made. */
static void on_sigterm(int signal_number) {
    enum { WAITS = 90, WAIT_MILLISECONDS = 10 };
    loom__board *board = signal_board;
    if (board && loom__board_claim_report(board)) {
        bool known = loom__board_aborted(board);
        if (known)
            write_line(board->message);
        for (int i = 0; i < board->pages; i++) {
            const loom__page *page = &board->page[i];
            uint32_t state = atomic_load_explicit(&page->state, memory_order_relaxed);
            if ((state == LOOM__RANK_RUNNING || state == LOOM__RANK_RETURNED) && loom__page_process_is_dead(page)) {
                write_page(page, true);
                known = true;
            }
        }
        if (!known)
            write_line("the run was ended from outside (SIGTERM)");
        for (int i = 0; i < board->pages; i++)
            if (!loom__page_process_is_dead(&board->page[i]))
                write_page(&board->page[i], false);
        loom__board_told(board);
    }
    if (board && loom__board_teller(board) == (int32_t)getpid())
        return; /* to the report, after which the run ends */
    for (int i = 0; board && i < WAITS && loom__board_teller(board); i++)
        poll(NULL, 0, WAIT_MILLISECONDS);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void report(const loom_run_options *options, loom__board *board, const char *text) {
    if (!options->log || !loom__board_claim_report(board))
        return;
    options->log(options->log_context, LOOM_LOG_ERROR, text);
    if (board->status == LOOM_ERR_TIMEOUT || board->status == LOOM_ERR_COMM)
        loom__board_dump(board, options->log, options->log_context);
    loom__board_told(board);
}

static void warn_about_binding(loom_rank *rank, const loom__cpus *cpus, int threads) {
    if (threads > cpus->count && cpus->online > cpus->count)
        loom_rank_log(rank, LOOM_LOG_WARNING,
            "rank %d has %d compute threads, but the launcher bound it to %d of %d CPUs: they will take turns. Start "
            "it "
            "with `mpirun --bind-to none`, or `mpirun --map-by slot:PE=%d --bind-to core`",
            rank->index, threads, cpus->count, cpus->online, threads);
}

/* All ranks tell how their function ended. Returns whether everybody came. */
static bool meet(loom_rank *rank, loom_status status, char *text) {
    loom__endpoint *endpoint = rank->endpoint;
    if (endpoint->failure)
        return false;
    endpoint->ending = true;
    if (status != LOOM_OK) {
        double patience = rank->options.grace < MEET_AFTER_FAILURE ? rank->options.grace : MEET_AFTER_FAILURE;
        if (endpoint->timeout > patience)
            endpoint->timeout = patience;
        loom_fail(status, "%s", text);
    }
    loom_status together = loom_agree(endpoint->end, status);
    if (together != LOOM_OK && status == LOOM_OK)
        snprintf(text, LOOM__MESSAGE, "%s", loom_error_message());
    return !endpoint->failure;
}

/* The endpoint, on all ranks or on none. `mine` is what this rank has come to so far. */
static loom_status start(loom_status mine, const loom_run_options *options, size_t chunk_bytes, const loom__cpus *cpus,
    loom__mpi_place *place, loom__endpoint **endpoint) {
    bool speaks = false;
    int rank = 0;
    char text[LOOM__MESSAGE];
    loom__endpoint_options waits = {.timeout = options->timeout};
    loom_status status = loom__endpoint_create_mpi(&waits, mine, chunk_bytes, cpus->hash, place, &speaks, endpoint);
    if (status == LOOM_OK || status == LOOM_ERR_ABORTED) /* whose message names the rank */
        return status;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    snprintf(text, sizeof text, "rank %d could not start: %s", rank, loom_error_message());
    if (speaks && options->log)
        options->log(options->log_context, LOOM_LOG_ERROR, text);
    return loom_fail(status, "%s", text);
}

static loom_status run_rank(loom_status mine, loom_rank_function function, void *argument,
    const loom_run_options *options, const loom__mpi_options *mpi, const loom__cpus *cpus, bool own) {
    loom__endpoint *endpoint;
    loom__mpi_place place;
    LOOM_TRY(start(mine, options, mpi->chunk_bytes, cpus, &place, &endpoint));
    int sharing = place.same_cores ? place.local_size : 1, seat = place.same_cores ? place.local_rank : 0;
    int threads = options->threads > 0 ? options->threads : loom__cpus_default_threads(cpus, sharing);
    endpoint->oversubscribed = (int64_t)sharing * threads > cpus->count;
    struct sigaction handler = {.sa_handler = on_sigterm}, before;
    signal_board = endpoint->board;
    sigaction(SIGTERM, &handler, &before);
    /* A caller with a handler of its own has plans for this signal. */
    if (before.sa_handler != SIG_DFL)
        sigaction(SIGTERM, &before, NULL);
    loom_rank rank;
    char text[LOOM__MESSAGE] = "";
    loom_status status = loom__rank_open(&rank, endpoint, place.local_rank, place.local_size, threads,
        loom__cpus_of_rank(cpus, sharing, seat, threads), options);
    if (status == LOOM_OK) {
        warn_about_binding(&rank, cpus, threads);
        status = loom__rank_run(&rank, function, argument, text);
        if (mpi->returned)
            mpi->returned(&rank);
    } else {
        snprintf(text, sizeof text, "rank %d could not start: %s", endpoint->rank, loom_error_message());
        loom__board_abort(endpoint->board, endpoint->rank, status, text);
    }
    bool together = meet(&rank, status, text);
    if (together && status == LOOM_OK && text[0])
        status = LOOM_ERR_ABORTED;
    if (!together && status == LOOM_OK) {
        status = endpoint->failure;
        snprintf(text, sizeof text, "%s", endpoint->failure_text);
    }
    if (status != LOOM_OK)
        report(options, endpoint->board, text);
    if (!together && own && endpoint->size > 1)
        MPI_Abort(MPI_COMM_WORLD, 1);
    sigaction(SIGTERM, &before, NULL);
    signal_board = NULL;
    loom__rank_close(&rank);
    return status == LOOM_OK ? LOOM_OK : loom_fail(status, "%s", text);
}

/* What was asked for; after a failure options are such that the failure can be told to the other ranks. */
static loom_status resolve(loom_rank_function function, const loom_run_options *given, loom_run_options *options) {
    *options = loom_run_options_default();
    if (given) {
        options->log = given->log;
        options->log_context = given->log_context;
    }
    if (!function)
        return loom_fail(LOOM_ERR_ARGUMENT, "loom_run_mpi: the function is NULL");
    return loom__run_options_resolve(given, options);
}

loom_status loom__run_mpi(
    loom_rank_function function, void *argument, const loom_run_options *given, const loom__mpi_options *mpi) {
    static const loom__mpi_options none = {0};
    loom_run_options options;
    int finalised = 0, initialised = 0, level = MPI_THREAD_FUNNELED;
    MPI_Finalized(&finalised);
    if (finalised)
        return log_failure(
            given, loom_fail(LOOM_ERR_STATE, "loom_run_mpi: MPI has been finalised; a process can run it once"));
    MPI_Initialized(&initialised);
    loom_status status = resolve(function, given, &options);
    /* Where MPI is up, the other ranks may be waiting for this one to start with them. */
    if (status != LOOM_OK && !initialised)
        return log_failure(given, status);
    if (initialised)
        MPI_Query_thread(&level);
    else if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level) != MPI_SUCCESS)
        return log_failure(given, loom_fail(LOOM_ERR_COMM, "loom_run_mpi: MPI could not be initialised"));
    loom__cpus cpus = {0};
    if (status == LOOM_OK)
        status = loom__cpus_allowed(&cpus);
    if (status == LOOM_OK && level < MPI_THREAD_FUNNELED)
        status = loom_fail(LOOM_ERR_STATE, "loom_run_mpi: MPI was initialised for single-threaded use; MPI_Init_thread "
                                           "with MPI_THREAD_FUNNELED is needed");
    status = run_rank(status, function, argument, &options, mpi ? mpi : &none, &cpus, !initialised);
    loom__cpus_free(&cpus);
    if (!initialised)
        MPI_Finalize();
    return status;
}

#else

loom_status loom__run_mpi(
    loom_rank_function function, void *argument, const loom_run_options *options, const loom__mpi_options *mpi) {
    (void)function;
    (void)argument;
    (void)mpi;
    return log_failure(options,
        loom_fail(LOOM_ERR_UNSUPPORTED, "this build of Megaloom has no MPI (configure with -DMEGALOOM_MPI=ON)"));
}

#endif

loom_status loom_run_mpi(loom_rank_function function, void *argument, const loom_run_options *options) {
    return loom__run_mpi(function, argument, options, NULL);
}
