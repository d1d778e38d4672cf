/* The rank object: a bundle of what one thread of control needs. Invariant: it is used by the thread that opened it and
 * by no other; whatever others may look at lies on the board. */
#include "runtime/rank.h"
#include "base/record.h"
#include "base/team.h"
#include "runtime/allocator.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

loom_run_options loom_run_options_default(void) {
    return (loom_run_options){.timeout = 1800, .grace = 10};
}

loom_status loom__run_options_resolve(const loom_run_options *given, loom_run_options *out) {
    loom_run_options options = given ? *given : loom_run_options_default();
    if (options.threads < 0)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "threads of a rank: found %d, expected 0 (automatic) or more", options.threads);
    if (!(options.timeout > 0) || isinf(options.timeout))
        return loom_fail(
            LOOM_ERR_ARGUMENT, "timeout of a run: found %g s, expected more than 0 (default 1800)", options.timeout);
    if (!(options.grace >= 0) || isinf(options.grace))
        return loom_fail(
            LOOM_ERR_ARGUMENT, "grace period of a run: found %g s, expected 0 or more (default 10)", options.grace);
    if (!options.kernels)
        options.kernels = loom_kernels_fast();
    *out = options;
    return LOOM_OK;
}

loom_status loom__rank_open(loom_rank *rank, loom__endpoint *endpoint, int local_index, int local_count, int threads,
    const int *cpus, const loom_run_options *options) {
    *rank = (loom_rank){.index = endpoint->rank,
        .count = endpoint->size,
        .local_index = local_index,
        .local_count = local_count,
        .endpoint = endpoint,
        .kernels = options->kernels,
        .options = *options};
    rank->options.threads = threads;
    LOOM_TRY(loom__team_create(threads, cpus, &rank->team));
    loom__team_set_progress(rank->team, loom__comm_progress, endpoint);
    return LOOM_OK;
}

void loom__rank_close(loom_rank *rank) {
    loom__profile_drop(rank);
    /* The endpoint goes first: other thread ranks may be reading this rank's memory until then, and MPI may write to it
     * even later. The allocator, which may outlive it, asks it no more. */
    if (rank->allocator)
        loom__allocator_forget_endpoint(rank->allocator);
    if (loom__endpoint_destroy(rank->endpoint))
        loom__allocator_destroy(rank->allocator);
    loom__team_destroy(rank->team);
    *rank = (loom_rank){0};
}

static void shorten_waits(loom_rank *rank) {
    double shortest = rank->endpoint->limit;
    for (const loom__limit *limit = rank->limits; limit; limit = limit->next)
        shortest = limit->seconds < shortest ? limit->seconds : shortest;
    rank->endpoint->timeout = shortest;
}

void loom__rank_lift_limit(loom_rank *rank, loom__limit *limit) {
    loom__limit **at = &rank->limits;
    while (*at && *at != limit)
        at = &(*at)->next;
    if (!*at)
        return;
    *at = limit->next;
    shorten_waits(rank);
}

void loom__rank_set_limit(loom_rank *rank, loom__limit *limit, double seconds) {
    loom__rank_lift_limit(rank, limit);
    *limit = (loom__limit){seconds, rank->limits};
    rank->limits = limit;
    shorten_waits(rank);
}

void loom__rank_progress(loom_rank *rank) {
    loom__comm_progress(rank->endpoint);
}

/* What was asked for or read is wrong: what the rank was doing meanwhile does not help to mend it. */
static bool is_about_input(loom_status status) {
    return status == LOOM_ERR_CONFIG || status == LOOM_ERR_UNSUPPORTED || status == LOOM_ERR_FORMAT ||
           status == LOOM_ERR_NOT_FOUND;
}

loom_status loom__rank_run(loom_rank *rank, loom_rank_function function, void *argument, char *text) {
    loom__endpoint *endpoint = rank->endpoint;
    text[0] = '\0';
    loom_error_clear();
    loom_status status = function(rank, argument);
    if (status == LOOM_OK)
        status = loom__endpoint_check_finished(endpoint);
    if (status == LOOM_OK) {
        atomic_store_explicit(&endpoint->page->state, LOOM__RANK_RETURNED, memory_order_seq_cst);
        return LOOM_OK;
    }
    const char *message = loom_error_message();
    if (!*message)
        message = loom_status_text(status);
    if (status == LOOM_ERR_ABORTED) { /* the message is of the rank that failed, and names it */
        snprintf(text, LOOM__MESSAGE, "%s", message);
    } else if (is_about_input(status)) {
        snprintf(text, LOOM__MESSAGE, "rank %d: %s", rank->index, message);
    } else {
        char doing[512];
        loom__page_describe(endpoint->page, doing, sizeof doing);
        snprintf(text, LOOM__MESSAGE, "rank %d: %s [%s: %s; rank %d's %s]", rank->index, message,
            loom_status_name(status), loom_status_text(status), rank->index, doing);
    }
    atomic_store_explicit(&endpoint->page->state, LOOM__RANK_FAILED, memory_order_seq_cst);
    loom__board_abort(endpoint->board, rank->index, status, text);
    return status;
}

int loom_rank_index(const loom_rank *rank) {
    return rank->index;
}

int loom_rank_count(const loom_rank *rank) {
    return rank->count;
}

int loom_rank_local_index(const loom_rank *rank) {
    return rank->local_index;
}

int loom_rank_local_count(const loom_rank *rank) {
    return rank->local_count;
}

loom_comm *loom_rank_world(loom_rank *rank) {
    return rank->endpoint->world;
}

loom_team *loom_rank_team(loom_rank *rank) {
    return rank->team;
}

const loom_kernels *loom_rank_kernels(const loom_rank *rank) {
    return rank->kernels;
}

void loom_rank_log(loom_rank *rank, loom_log_level level, const char *format, ...) {
    char line[LOOM__MESSAGE];
    if (!rank->options.log)
        return;
    va_list arguments;
    va_start(arguments, format);
    loom__record_format(line, sizeof line, format, arguments);
    va_end(arguments);
    rank->options.log(rank->options.log_context, level, line);
}

void loom_rank_note(loom_rank *rank, const char *text) {
    loom__page_note(rank->endpoint->page, text);
}

typedef struct dump {
    loom_rank *rank;
    loom_log_level level;
} dump;

static void log_line(void *context, const char *text) {
    const dump *to = context;
    loom_rank_log(to->rank, to->level, "%s", text);
}

void loom_rank_dump(loom_rank *rank, loom_log_level level) {
    char doing[512];
    dump to = {rank, level};
    loom__page_dump(rank->endpoint->page, LOOM__RECORDS, log_line, &to);
    loom__page_describe(rank->endpoint->page, doing, sizeof doing);
    loom_rank_log(rank, level, "rank %d: %s", rank->index, doing);
}

loom_status loom_group_create(loom_rank *rank, const char *name, const int *ranks, int count, loom_comm **comm) {
    return loom__group_create(rank->endpoint, name, ranks, count, comm);
}
