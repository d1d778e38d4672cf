/* Collectives and ends on thread ranks. */
#include "parallel/comm_cases.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static loom_run_options quick(void) {
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.timeout = 60;
    options.grace = 20;
    return options;
}

static void run(int n, loom_rank_function function, void *argument) {
    loom_run_options options = quick();
    loom_status status = loom_run_local(n, function, argument, &options);
    if (status != LOOM_OK)
        fail_msg("%d ranks: %s", n, loom_error_message());
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void nap(double time) {
    struct timespec rest = {(time_t)time, (long)((time - (double)(time_t)time) * 1e9)};
    nanosleep(&rest, NULL);
}

static void expect_text(const char *part) {
    if (!strstr(loom_error_message(), part))
        fail_msg("\"%s\" is missing in: %s", part, loom_error_message());
}

static void collectives_on_1_to_5_threads_are_bit_exact(void **state) {
    (void)state;
    for (int n = 1; n <= 5; n++)
        run(n, comm_cases, NULL);
}

static loom_status seventeen(loom_rank *rank, void *argument) {
    (void)argument;
    loom_comm *world = loom_rank_world(rank);
    static const loom_dtype dtypes[] = {LOOM_F32, LOOM_BF16, LOOM_F64, LOOM_I64, LOOM_F16};
    for (int d = 0; d < 5; d++) {
        LOOM_TRY(comm_case_all(world, dtypes[d], 16));
        LOOM_TRY(comm_case_all(world, dtypes[d], 3000));
    }
    return LOOM_OK;
}

static void sums_over_17_threads_are_summed_in_blocks(void **state) {
    (void)state;
    run(17, seventeen, NULL);
}

static loom_status large(loom_rank *rank, void *argument) {
    (void)argument;
    return comm_case_all(loom_rank_world(rank), LOOM_F32, 400009);
}

static void large_operations_go_in_pieces(void **state) {
    (void)state;
    run(3, large, NULL);
}

static loom_status nan_stays(loom_rank *rank, void *argument) {
    (void)argument;
    int me = loom_rank_index(rank), n = loom_rank_count(rank);
    for (int who = 0; who < n; who++) {
        float x = me == who ? NAN : (float)me, y = 0;
        LOOM_TRY(loom_all_reduce(loom_rank_world(rank), &x, &y, 1, LOOM_F32, LOOM_MAX));
        CHECK(isnan(y), "NaN of rank %d vanished", who);
        uint16_t b = loom_f32_to_bf16(x);
        LOOM_TRY(loom_all_reduce(loom_rank_world(rank), &b, &b, 1, LOOM_BF16, LOOM_MAX));
        CHECK(isnan(loom_bf16_to_f32(b)), "bf16 NaN of rank %d vanished", who);
    }
    return LOOM_OK;
}

static void nan_does_not_vanish_in_a_maximum(void **state) {
    (void)state;
    run(4, nan_stays, NULL);
}

static void agreement_carries_the_message_of_the_lowest_failing_member(void **state) {
    (void)state;
    run(1, comm_agreement, NULL);
    run(4, comm_agreement, NULL);
}

/* A list of faults as long as the error record. */
static loom_status long_agreement(loom_rank *rank, void *argument) {
    (void)argument;
    loom_comm *world = loom_rank_world(rank);
    int me = loom_rank_index(rank);
    char text[8000];
    for (size_t i = 0; i + 1 < sizeof text; i++)
        text[i] = (char)('a' + (i + (size_t)me) % 26);
    memcpy(text + 2045, "\u2026", 3); /* across the last byte that is sent to others */
    text[sizeof text - 1] = '\0';
    loom_status status = loom_agree(world, me == 0 ? LOOM_OK : loom_fail(LOOM_ERR_CONFIG, "%s", text));
    if (me == 0) {
        CHECK(status == LOOM_ERR_ABORTED, "got %d", status);
        CHECK(strncmp(loom_error_message(), "rank 1: bcd", 11) == 0, "%.20s", loom_error_message());
        CHECK(strlen(loom_error_message()) == strlen("rank 1: ") + 2045, "%zu", strlen(loom_error_message()));
    } else {
        CHECK(status == LOOM_ERR_CONFIG, "got %d", status);
        CHECK(strcmp(loom_error_message(), text) == 0, "rank %d's own message is cut", me);
    }
    CHECK(loom_agree(NULL, LOOM_OK) == LOOM_ERR_ARGUMENT, "no group");
    return LOOM_OK;
}

static void agreement_leaves_a_failing_member_its_whole_message(void **state) {
    (void)state;
    run(3, long_agreement, NULL);
}

/* A team working for long moves communication on between its items. */
static void idle_item(void *argument, int64_t item, int worker) {
    (void)argument;
    (void)item;
    (void)worker;
    nap(0.002);
}

static loom_status overlap_rank(loom_rank *rank, void *argument) {
    _Atomic int *finished = argument;
    float x[4096] = {1}, y[4096];
    loom_request *request;
    LOOM_TRY(loom_all_reduce_start(loom_rank_world(rank), x, y, 4096, LOOM_F32, LOOM_SUM, &request));
    if (loom_rank_index(rank) == 0) {
        /* The others wait; rank 0 only computes until they are done. */
        while (atomic_load(finished) < loom_rank_count(rank) - 1)
            loom_team_run(loom_rank_team(rank), idle_item, NULL, 4);
        return loom_wait(request);
    }
    LOOM_TRY(loom_wait(request));
    atomic_fetch_add(finished, 1);
    return LOOM_OK;
}

static void operations_progress_while_the_team_computes(void **state) {
    (void)state;
    _Atomic int finished = 0;
    run(3, overlap_rank, &finished);
    assert_int_equal(atomic_load(&finished), 2);
}

static loom_status test_polls(loom_rank *rank, void *argument) {
    (void)argument;
    int64_t x = loom_rank_index(rank), y = -1;
    loom_request *request;
    bool done = false;
    LOOM_TRY(loom_all_reduce_start(loom_rank_world(rank), &x, &y, 1, LOOM_I64, LOOM_SUM, &request));
    while (!done)
        LOOM_TRY(loom_test(request, &done));
    LOOM_TRY(loom_wait(request));
    CHECK(y == 3, "got %lld", (long long)y);
    LOOM_TRY(loom_test(NULL, &done));
    CHECK(done, "NULL is finished already");
    return loom_wait(NULL);
}

static void testing_a_request_finishes_it(void **state) {
    (void)state;
    run(3, test_polls, NULL);
}

/* Bad calls. */

static loom_status bad_calls(loom_rank *rank, void *argument) {
    (void)argument;
    loom_comm *world = loom_rank_world(rank), *comm;
    float x[4] = {0}, y[4];
    int64_t counts[2] = {2, -1};
    loom_request *request;
    CHECK(loom_all_reduce(world, x, y, -1, LOOM_F32, LOOM_SUM) == LOOM_ERR_ARGUMENT, "negative count");
    CHECK(loom_all_reduce(world, x, x + 1, 3, LOOM_F32, LOOM_SUM) == LOOM_ERR_ARGUMENT, "overlap");
    CHECK(loom_all_reduce(world, x, NULL, 3, LOOM_F32, LOOM_SUM) == LOOM_ERR_ARGUMENT, "NULL");
    CHECK(loom_all_reduce(world, x, y, 4, (loom_dtype)99, LOOM_SUM) == LOOM_ERR_ARGUMENT, "dtype");
    CHECK(loom_all_reduce(world, x, y, 4, LOOM_F32, (loom_reduce)7) == LOOM_ERR_ARGUMENT, "operation");
    CHECK(loom_all_reduce(world, x, y, 4, LOOM_I16, LOOM_SUM) == LOOM_ERR_UNSUPPORTED, "I16");
    CHECK(strstr(loom_error_message(), "not supported yet") != NULL, "%s", loom_error_message());
    CHECK(loom_all_reduce(world, x, y, INT64_MAX, LOOM_F32, LOOM_SUM) == LOOM_ERR_ARGUMENT, "63 bits");
    CHECK(loom_all_gather_v(world, x, y, counts, LOOM_F32) == LOOM_ERR_ARGUMENT, "negative count in the list");
    CHECK(loom_all_gather_v(world, x, y, NULL, LOOM_F32) == LOOM_ERR_ARGUMENT, "no list");
    CHECK(loom_broadcast(world, x, 4, LOOM_F32, 2) == LOOM_ERR_ARGUMENT, "root");
    CHECK(loom_send_start(world, x, 4, LOOM_F32, loom_rank_index(rank), 0, &request) == LOOM_ERR_ARGUMENT, "self");
    CHECK(loom_send(world, x, 4, LOOM_F32, 1, LOOM_TAG_COUNT) == LOOM_ERR_ARGUMENT, "tag");
    CHECK(loom_receive(world, x, 4, LOOM_F32, 0, -1) == LOOM_ERR_ARGUMENT, "tag");
    CHECK(loom_barrier(NULL) == LOOM_ERR_ARGUMENT, "group");
    int twice[] = {0, 0}, outside[] = {0, 2}, other[] = {1 - loom_rank_index(rank)};
    CHECK(loom_group_create(rank, "tp", twice, 2, &comm) == LOOM_ERR_ARGUMENT, "twice");
    CHECK(loom_group_create(rank, "tp", outside, 2, &comm) == LOOM_ERR_ARGUMENT, "outside");
    CHECK(loom_group_create(rank, "tp", other, 1, &comm) == LOOM_ERR_ARGUMENT, "not a member");
    CHECK(loom_group_create(rank, "", twice, 1, &comm) == LOOM_ERR_ARGUMENT, "name");
    CHECK(loom_group_create(rank, "a name that is longer than 31 bytes", twice, 1, &comm) == LOOM_ERR_ARGUMENT, "name");
    /* Nothing of that has harmed the group. */
    return loom_barrier(world);
}

static void bad_calls_are_refused_and_start_nothing(void **state) {
    (void)state;
    run(2, bad_calls, NULL);
    loom_run_options options = quick();
    assert_int_equal(loom_run_local(0, bad_calls, NULL, &options), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_run_local(2, NULL, NULL, &options), LOOM_ERR_ARGUMENT);
    options.timeout = 0;
    assert_int_equal(loom_run_local(2, bad_calls, NULL, &options), LOOM_ERR_ARGUMENT);
    expect_text("timeout");
    options = quick();
    options.threads = -1;
    assert_int_equal(loom_run_local(2, bad_calls, NULL, &options), LOOM_ERR_ARGUMENT);
}

static loom_status different_operations(loom_rank *rank, void *argument) {
    (void)argument;
    float x[3] = {0}, y[9];
    if (loom_rank_index(rank) == 2)
        return loom_all_gather(loom_rank_world(rank), x, y, 3, LOOM_F32);
    return loom_all_reduce(loom_rank_world(rank), x, y, 3, LOOM_F32, LOOM_SUM);
}

static loom_status different_counts(loom_rank *rank, void *argument) {
    (void)argument;
    float x[3] = {0}, y[3];
    return loom_all_reduce(loom_rank_world(rank), x, y, loom_rank_index(rank) == 2 ? 2 : 3, LOOM_F32, LOOM_SUM);
}

static void members_that_disagree_are_told_so(void **state) {
    (void)state;
    loom_run_options options = quick();
    assert_int_equal(loom_run_local(3, different_operations, NULL, &options), LOOM_ERR_COMM);
    expect_text("rank 0 came to all_reduce");
    expect_text("rank 2 to all_gather");
    expect_text("group world");
    assert_int_equal(loom_run_local(3, different_counts, NULL, &options), LOOM_ERR_COMM);
    expect_text("of 3 F32");
    expect_text("of 2 F32");
}

static loom_status different_message(loom_rank *rank, void *argument) {
    loom_status *statuses = argument;
    float x[3] = {0};
    int me = loom_rank_index(rank);
    statuses[me] = me == 0 ? loom_send(loom_rank_world(rank), x, 3, LOOM_F32, 1, 5)
                           : loom_receive(loom_rank_world(rank), x, 2, LOOM_F32, 0, 5);
    return statuses[me];
}

static void a_receive_of_another_count_fails_on_both_sides(void **state) {
    (void)state;
    loom_run_options options = quick();
    loom_status statuses[2] = {LOOM_OK, LOOM_OK};
    assert_int_equal(loom_run_local(2, different_message, statuses, &options), LOOM_ERR_COMM);
    assert_int_not_equal(statuses[0], LOOM_OK);
    assert_int_not_equal(statuses[1], LOOM_OK);
    expect_text("2 elements");
    expect_text("3 elements");
}

/* Ends. */

static loom_status one_fails(loom_rank *rank, void *argument) {
    (void)argument;
    int64_t x = 1;
    LOOM_TRY(loom_all_reduce(loom_rank_world(rank), &x, &x, 1, LOOM_I64, LOOM_SUM));
    if (loom_rank_index(rank) == 2) {
        loom_rank_note(rank, "reading a batch");
        return loom_fail(LOOM_ERR_IO, "the data set has a hole");
    }
    return loom_all_reduce(loom_rank_world(rank), &x, &x, 1, LOOM_I64, LOOM_SUM);
}

static void a_rank_that_fails_ends_the_run_and_is_named(void **state) {
    (void)state;
    double began = seconds();
    loom_run_options options = quick();
    assert_int_equal(loom_run_local(4, one_fails, NULL, &options), LOOM_ERR_IO);
    assert_true(seconds() - began < 5);
    expect_text("rank 2: the data set has a hole");
    expect_text("last finished operation: all_reduce #1 of group world (8 bytes)");
    expect_text("current: reading a batch");
}

static loom_status one_leaves(loom_rank *rank, void *argument) {
    (void)argument;
    LOOM_TRY(loom_barrier(loom_rank_world(rank)));
    return loom_rank_index(rank) == 2 ? LOOM_OK : loom_barrier(loom_rank_world(rank));
}

static void a_rank_that_returns_early_is_named(void **state) {
    (void)state;
    double began = seconds();
    loom_run_options options = quick();
    assert_int_equal(loom_run_local(3, one_leaves, NULL, &options), LOOM_ERR_COMM);
    assert_true(seconds() - began < 5);
    expect_text("rank 2 returned from its function without coming to barrier #2 of group world");
    expect_text("barrier #1");
}

typedef struct log_lines {
    pthread_mutex_t lock;
    char text[8192];
} log_lines;

static void keep_line(void *context, loom_log_level level, const char *line) {
    log_lines *lines = context;
    pthread_mutex_lock(&lines->lock);
    size_t length = strlen(lines->text);
    snprintf(lines->text + length, sizeof lines->text - length, "%d %s\n", (int)level, line);
    pthread_mutex_unlock(&lines->lock);
}

static loom_status one_is_late(loom_rank *rank, void *argument) {
    (void)argument;
    loom_comm *comm = loom_rank_world(rank);
    const int pair[2] = {0, 2};
    if (loom_rank_index(rank) != 1)
        LOOM_TRY(loom_group_create(rank, "tp", pair, 2, &comm));
    LOOM_TRY(loom_barrier(loom_rank_world(rank)));
    if (loom_rank_index(rank) == 1) {
        nap(0.9);
        return LOOM_OK;
    }
    if (loom_rank_index(rank) == 2) {
        loom_rank_note(rank, "reading a batch");
        nap(1.2);
    }
    return loom_barrier(comm);
}

static void a_rank_that_does_not_come_is_named_after_the_timeout(void **state) {
    (void)state;
    static log_lines lines = {.lock = PTHREAD_MUTEX_INITIALIZER};
    loom_run_options options = quick();
    options.timeout = 0.5;
    options.log = keep_line;
    options.log_context = &lines;
    double began = seconds();
    assert_int_equal(loom_run_local(3, one_is_late, NULL, &options), LOOM_ERR_TIMEOUT);
    assert_true(seconds() - began < 5);
    expect_text("rank 2 has not come to barrier #1 of group tp");
    expect_text("rank 2's last finished operation: barrier #1 of group world");
    assert_non_null(strstr(lines.text, "rank 0: barrier #1 of group tp (0 bytes) started"));
    assert_non_null(strstr(lines.text, "rank 2: barrier #1 of group world (0 bytes) finished"));
    expect_text("current: reading a batch");
}

/* Rank 0 waits for rank 2, which waits a little longer for rank 1. */
static loom_status one_holds_up(loom_rank *rank, void *argument) {
    (void)argument;
    loom_comm *world = loom_rank_world(rank);
    int me = loom_rank_index(rank);
    int64_t x = 0;
    LOOM_TRY(loom_barrier(world));
    if (me == 1) {
        loom_rank_note(rank, "reading a batch");
        nap(2);
    } else if (me == 2) {
        nap(0.5);
    }
    if (me == 0)
        return loom_receive(world, &x, 1, LOOM_I64, 2, 5);
    if (me == 2)
        LOOM_TRY(loom_receive(world, &x, 1, LOOM_I64, 1, 5));
    return loom_send(world, &x, 1, LOOM_I64, me == 1 ? 2 : 0, 5);
}

static void whoever_holds_up_those_that_wait_for_each_other_is_named(void **state) {
    (void)state;
    loom_run_options options = quick();
    options.timeout = 0.8;
    assert_int_equal(loom_run_local(3, one_holds_up, NULL, &options), LOOM_ERR_TIMEOUT);
    expect_text("rank 2 has not come to receive #1 of group world");
    expect_text("rank 1 waits for nobody; rank 1's last finished operation: barrier #1 of group world");
    expect_text("current: reading a batch");
}

/* More groups than the recorder follows: rank 1 has come to the operation of the last one, and it alone keeps it from
 * ending, but nobody can know that. */
static loom_status many_groups(loom_rank *rank, void *argument) {
    _Atomic int *stage = argument; /* 1: rank 1 has come, 2: rank 0 has given up */
    enum { GROUPS = 70 };
    const int both[2] = {0, 1};
    loom_comm *comm = NULL;
    float x[1000] = {1}, y[1000];
    for (int i = 0; i < GROUPS; i++)
        LOOM_TRY(loom_group_create(rank, "pair", both, 2, &comm));
    if (loom_rank_index(rank) == 0) {
        while (atomic_load(stage) != 1)
            nap(0.001);
        loom_status status = loom_all_reduce(comm, x, y, 1000, LOOM_F32, LOOM_SUM);
        atomic_store(stage, 2);
        return status;
    }
    loom_request *request;
    LOOM_TRY(loom_all_reduce_start(comm, x, y, 1000, LOOM_F32, LOOM_SUM, &request));
    atomic_store(stage, 1);
    while (atomic_load(stage) != 2)
        nap(0.001);
    return loom_wait(request);
}

static void a_timeout_in_a_group_that_cannot_be_followed_accuses_nobody_of_not_coming(void **state) {
    (void)state;
    loom_run_options options = quick();
    options.timeout = 0.3;
    _Atomic int stage = 0;
    assert_int_equal(loom_run_local(2, many_groups, &stage, &options), LOOM_ERR_TIMEOUT);
    expect_text("all_reduce #1 of group pair (4000 bytes) did not finish within");
    expect_text("rank 1's last finished operation");
}

static loom_status message_never_sent(loom_rank *rank, void *argument) {
    (void)argument;
    float x;
    if (loom_rank_index(rank) == 0)
        return loom_receive(loom_rank_world(rank), &x, 1, LOOM_F32, 1, 7);
    nap(0.8);
    return LOOM_OK;
}

static void a_message_that_never_comes_names_its_sender(void **state) {
    (void)state;
    loom_run_options options = quick();
    options.timeout = 0.3;
    assert_int_equal(loom_run_local(2, message_never_sent, NULL, &options), LOOM_ERR_TIMEOUT);
    expect_text("rank 1 has not come to receive #1 of group world (4 bytes from rank 1, tag 7)");
}

static loom_status forgets(loom_rank *rank, void *argument) {
    (void)argument;
    static float x[4], y[4];
    loom_request *request;
    if (loom_rank_index(rank) == 0)
        return loom_all_reduce_start(loom_rank_world(rank), x, y, 4, LOOM_F32, LOOM_SUM, &request);
    return LOOM_OK;
}

static void a_request_that_was_never_waited_for_is_an_error(void **state) {
    (void)state;
    loom_run_options options = quick();
    assert_int_equal(loom_run_local(2, forgets, NULL, &options), LOOM_ERR_STATE);
    expect_text("all_reduce #1 of group world");
}

static loom_status late_to_the_end(loom_rank *rank, void *argument) {
    (void)argument;
    if (loom_rank_index(rank) == 1)
        nap(1.0);
    return LOOM_OK;
}

static void a_rank_that_does_not_return_is_named_after_the_timeout(void **state) {
    (void)state;
    loom_run_options options = quick();
    options.timeout = 0.3;
    assert_int_equal(loom_run_local(2, late_to_the_end, NULL, &options), LOOM_ERR_TIMEOUT);
    expect_text("rank 1 has not returned");
}

/* A rank fails between a start and its wait. It frees its buffers after loom_cancel, the others theirs after the failed
 * wait, while some may be in the middle of reading them; a sanitizer sees it if they still do afterwards. */
static loom_status cancels(loom_rank *rank, void *argument) {
    (void)argument;
    enum { COUNT = 1 << 20 };
    float *x = calloc(COUNT, sizeof *x), *y = calloc(COUNT, sizeof *y);
    loom_request *request = NULL;
    loom_status status = loom_all_reduce_start(loom_rank_world(rank), x, y, COUNT, LOOM_F32, LOOM_SUM, &request);
    if (status == LOOM_OK && loom_rank_index(rank) == 1) {
        status = loom_fail(LOOM_ERR_NUMERIC, "the loss is NaN");
        loom_cancel(request, status);
        loom_cancel(NULL, status);
    } else if (status == LOOM_OK) {
        status = loom_wait(request);
    }
    free(x);
    free(y);
    if (status == LOOM_OK)
        status = loom_barrier(loom_rank_world(rank));
    return status;
}

static void a_cancel_ends_the_run_with_its_reason_and_all_buffers_are_free(void **state) {
    (void)state;
    loom_run_options options = quick();
    for (int turn = 0; turn < 12; turn++) {
        assert_int_equal(loom_run_local(3, cancels, NULL, &options), LOOM_ERR_NUMERIC);
        expect_text("rank 1: the loss is NaN");
    }
}

/* Ranks read each other's memory; rank 0's buffers lie on its stack, and are gone when rank 1 comes. */
enum { LATE_KINDS = 6, LATE_COUNT = 3000 };

typedef struct late_scene {
    int kind;
    int64_t count;
    atomic_bool gone, looked;
    loom_status status; /* of the late rank */
    bool touched;       /* something came into its memory */
} late_scene;

static loom_status late_operation(const late_scene *s, loom_comm *world, int64_t *in, int64_t *out) {
    int me = loom_comm_rank(world);
    switch (s->kind) {
    case 0:
        return loom_all_reduce(world, in, out, s->count, LOOM_I64, LOOM_SUM);
    case 1:
        return loom_all_gather(world, in, out, s->count / 2, LOOM_I64);
    case 2:
        return loom_reduce_scatter(world, in, out, s->count / 2, LOOM_I64, LOOM_SUM);
    case 3:
        return loom_broadcast(world, me == 0 ? in : out, s->count, LOOM_I64, 0);
    case 4:
        return loom_all_to_all(world, in, out, s->count / 2, LOOM_I64);
    default:
        return me == 0 ? loom_send(world, in, s->count, LOOM_I64, 1, 0)
                       : loom_receive(world, out, s->count, LOOM_I64, 0, 0);
    }
}

static __attribute__((noinline)) loom_status give_up(const late_scene *s, loom_comm *world) {
    int64_t in[LATE_COUNT], out[LATE_COUNT];
    for (int i = 0; i < LATE_COUNT; i++)
        in[i] = 1;
    return late_operation(s, world, in, out);
}

static __attribute__((noinline)) void use_the_stack(late_scene *s) {
    volatile int64_t other[2 * LATE_COUNT];
    for (int i = 0; i < 2 * LATE_COUNT; i++)
        other[i] = 2;
    atomic_store(&s->gone, other[s->count] == 2);
    while (!atomic_load(&s->looked))
        nap(0.001);
}

static loom_status one_comes_late(loom_rank *rank, void *argument) {
    late_scene *s = argument;
    static const int64_t zeros[LATE_COUNT];
    int64_t in[LATE_COUNT] = {0}, out[LATE_COUNT] = {0};
    if (loom_rank_index(rank) == 0) {
        loom_status status = give_up(s, loom_rank_world(rank));
        use_the_stack(s);
        return status;
    }
    while (!atomic_load(&s->gone))
        nap(0.001);
    s->status = late_operation(s, loom_rank_world(rank), in, out);
    s->touched = memcmp(out, zeros, sizeof out) != 0;
    atomic_store(&s->looked, true);
    return s->status;
}

static void a_late_rank_does_not_read_what_others_have_given_up(void **state) {
    (void)state;
    loom_run_options options = quick();
    options.timeout = 0.1;
    for (int i = 0; i < 2 * LATE_KINDS; i++) {
        late_scene s = {.kind = i / 2, .count = i % 2 ? LATE_COUNT : 10};
        assert_int_equal(loom_run_local(2, one_comes_late, &s, &options), LOOM_ERR_TIMEOUT);
        assert_int_equal(s.status, LOOM_ERR_ABORTED);
        assert_false(s.touched);
    }
}

static loom_status sleeps_for_ever(loom_rank *rank, void *argument) {
    (void)argument;
    if (loom_rank_index(rank) == 2) {
        loom_rank_note(rank, "reading a batch");
        nap(1000);
    }
    return loom_barrier(loom_rank_world(rank));
}

static void a_thread_rank_that_never_comes_back_is_abandoned(void **state) {
    (void)state;
    int pipes[2];
    assert_int_equal(pipe(pipes), 0);
    pid_t child = fork();
    if (child == 0) {
        loom_run_options options = quick();
        options.timeout = 0.3;
        options.grace = 0.3;
        loom_status status = loom_run_local(3, sleeps_for_ever, NULL, &options);
        ssize_t written = write(pipes[1], loom_error_message(), strlen(loom_error_message()));
        _exit(status == LOOM_ERR_STUCK && written > 0 ? 7 : 1);
    }
    close(pipes[1]);
    char text[4096];
    size_t length = 0;
    for (ssize_t n; (n = read(pipes[0], text + length, sizeof text - 1 - length)) > 0;)
        length += (size_t)n;
    text[length] = '\0';
    close(pipes[0]);
    int result;
    waitpid(child, &result, 0);
    assert_true(WIFEXITED(result));
    assert_int_equal(WEXITSTATUS(result), 7);
    assert_non_null(strstr(text, "rank 2 did not come back within 0.3 s"));
    assert_non_null(strstr(text, "reading a batch"));
    assert_non_null(strstr(text, "barrier #1 of group world"));
}

/* The rest of the rank. */

static loom_status dumps(loom_rank *rank, void *argument) {
    (void)argument;
    int64_t x = 1;
    CHECK(loom_rank_local_count(rank) == loom_rank_count(rank), "local");
    CHECK(loom_rank_local_index(rank) == loom_rank_index(rank), "local");
    CHECK(loom_team_size(loom_rank_team(rank)) == 2, "team");
    CHECK(loom_rank_kernels(rank) != NULL, "kernels");
    LOOM_TRY(loom_all_reduce(loom_rank_world(rank), &x, &x, 1, LOOM_I64, LOOM_SUM));
    LOOM_TRY(loom_barrier(loom_rank_world(rank)));
    if (loom_rank_index(rank) == 1)
        loom_rank_dump(rank, LOOM_LOG_INFO);
    return LOOM_OK;
}

static void the_recorder_is_written_as_lines_for_a_person(void **state) {
    (void)state;
    log_lines lines = {.lock = PTHREAD_MUTEX_INITIALIZER};
    loom_run_options options = quick();
    options.threads = 2;
    options.log = keep_line;
    options.log_context = &lines;
    assert_int_equal(loom_run_local(2, dumps, NULL, &options), LOOM_OK);
    assert_non_null(strstr(lines.text, "1 rank 1: all_reduce #1 of group world (8 bytes) finished"));
    assert_non_null(strstr(lines.text, "1 rank 1: barrier #1") ? lines.text : strstr(lines.text, "barrier #2"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(collectives_on_1_to_5_threads_are_bit_exact),
        cmocka_unit_test(sums_over_17_threads_are_summed_in_blocks),
        cmocka_unit_test(large_operations_go_in_pieces),
        cmocka_unit_test(nan_does_not_vanish_in_a_maximum),
        cmocka_unit_test(agreement_carries_the_message_of_the_lowest_failing_member),
        cmocka_unit_test(agreement_leaves_a_failing_member_its_whole_message),
        cmocka_unit_test(operations_progress_while_the_team_computes),
        cmocka_unit_test(testing_a_request_finishes_it),
        cmocka_unit_test(bad_calls_are_refused_and_start_nothing),
        cmocka_unit_test(members_that_disagree_are_told_so),
        cmocka_unit_test(a_receive_of_another_count_fails_on_both_sides),
        cmocka_unit_test(a_rank_that_fails_ends_the_run_and_is_named),
        cmocka_unit_test(a_rank_that_returns_early_is_named),
        cmocka_unit_test(a_rank_that_does_not_come_is_named_after_the_timeout),
        cmocka_unit_test(whoever_holds_up_those_that_wait_for_each_other_is_named),
        cmocka_unit_test(a_timeout_in_a_group_that_cannot_be_followed_accuses_nobody_of_not_coming),
        cmocka_unit_test(a_message_that_never_comes_names_its_sender),
        cmocka_unit_test(a_request_that_was_never_waited_for_is_an_error),
        cmocka_unit_test(a_rank_that_does_not_return_is_named_after_the_timeout),
        cmocka_unit_test(a_cancel_ends_the_run_with_its_reason_and_all_buffers_are_free),
        cmocka_unit_test(a_late_rank_does_not_read_what_others_have_given_up),
        cmocka_unit_test(a_thread_rank_that_never_comes_back_is_abandoned),
        cmocka_unit_test(the_recorder_is_written_as_lines_for_a_person),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
