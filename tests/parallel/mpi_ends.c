/* How MPI runs end. The test program starts mpirun with itself and the name of a scene; the scene's rank 2 misbehaves;
 * the test reads what the run wrote and how long it took. */
#include "parallel/comm_cases.h"
#include "runtime/rank.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#if MEGALOOM_MPI
static const char *own_path;

static void nap(double time) {
    struct timespec rest = {(time_t)time, (long)((time - (double)(time_t)time) * 1e9)};
    while (nanosleep(&rest, &rest) != 0)
        continue;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* The scenes: what a rank does. */

static void die(int signal_number) {
    (void)signal_number;
    raise(SIGKILL);
}

/* This process dies when its function has long returned. */
static void die_soon(void) {
    signal(SIGALRM, die);
    alarm(1);
}

/* Rank 2 is held up between its return and the meeting at the end. */
static void hold_up(loom_rank *rank) {
    if (loom_rank_index(rank) == 2)
        nap(0.5);
}

/* All ranks have come out of the first barrier: who dies now is missed in no operation. */
static void wait_for_all_past_the_barrier(loom_rank *rank) {
    const loom__board *board = rank->endpoint->board;
    for (int i = 0; i < board->pages;) {
        if (atomic_load(&board->page[i].last.state) == LOOM__RECORD_FINISHED &&
            atomic_load(&board->page[i].last.operation) == LOOM__BARRIER)
            i++;
        else
            nap(0.01);
    }
}

static loom_status scene(loom_rank *rank, void *argument) {
    const char *name = argument;
    loom_comm *world = loom_rank_world(rank), *pair = NULL;
    int me = loom_rank_index(rank), two[2] = {1, 2};
    int64_t x = 1, all[3];
    if (strcmp(name, "bound") == 0)
        return LOOM_OK;
    if (strcmp(name, "local") == 0)
        return loom_run_local(2, scene, argument, NULL);
    if (me > 0)
        LOOM_TRY(loom_group_create(rank, "tp", two, 2, &pair));
    LOOM_TRY(loom_barrier(world));
    if (strncmp(name, "kill", 4) == 0 && me == 2) {
        wait_for_all_past_the_barrier(rank);
        raise(SIGKILL);
    }
    if (strncmp(name, "kill-group", 10) == 0 && me == 1)
        return loom_all_reduce(pair, &x, &x, 1, LOOM_I64, LOOM_SUM);
    if (strncmp(name, "kill", 4) == 0)
        nap(30);
    if (strcmp(name, "held-up") == 0)
        return LOOM_OK;
    if (strncmp(name, "end-kill", 8) == 0) {
        if (me == 2)
            die_soon();
        if (me == 1 || (me == 0 && strcmp(name, "end-kill-busy") == 0))
            nap(30);
        return LOOM_OK;
    }
    if (strcmp(name, "disagree") == 0 && me == 2)
        return loom_all_gather(world, &x, all, 1, LOOM_I64);
    if (strcmp(name, "message") == 0 && me > 0)
        return me == 1 ? loom_send(pair, all, 3, LOOM_I64, 1, 0) : loom_receive(pair, all, 2, LOOM_I64, 0, 0);
    if (strcmp(name, "together") == 0) {
        loom_status mine = me == 2 ? loom_fail(LOOM_ERR_IO, "the disk is full") : LOOM_OK;
        return loom_agree(world, mine);
    }
    if (strcmp(name, "late") == 0) {
        if (me == 2)
            nap(30);
        return LOOM_OK;
    }
    if (me == 2) {
        if (strcmp(name, "exit") == 0)
            exit(3);
        if (strcmp(name, "early") == 0)
            return LOOM_OK;
        loom_rank_note(rank, "reading a batch");
        if (strcmp(name, "fail") == 0)
            return loom_fail(LOOM_ERR_IO, "the data set has a hole");
        if (strcmp(name, "sleep") == 0)
            nap(1000);
    }
    return loom_all_reduce(world, &x, &x, 1, LOOM_I64, LOOM_SUM);
}

/* `context` is the scene's name. */
static void to_stderr(void *context, loom_log_level level, const char *line) {
    if (level == LOOM_LOG_ERROR && strcmp(context, "kill-group-slow-log") == 0)
        nap(1.3); /* mpirun's SIGTERM comes a second after a process has died, its SIGKILL one more second later */
    fprintf(stderr, "LOG %d %s\n", (int)level, line);
}

/* MPI of the program's own. <mpi.h> is for the backend alone; these two are the same in every MPI. */
int MPI_Init_thread(int *argc, char ***argv, int required, int *provided);
int MPI_Finalize(void);

/* Rank 2 cannot start: it asked its MPI for single-threaded use, or gives options or a function that none can run. */
static int play_own_mpi(char *name) {
    enum { SINGLE, FUNNELED };
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    bool bad = rank && strcmp(rank, "2") == 0;
    loom_rank_function function = bad && strcmp(name, "own-function") == 0 ? NULL : scene;
    int level;
    alarm(15); /* where ranks wait for one that has gone, nothing else ends them */
    MPI_Init_thread(NULL, NULL, bad && strcmp(name, "own-single") == 0 ? SINGLE : FUNNELED, &level);
    loom_run_options options = loom_run_options_default();
    options.threads = bad && strcmp(name, "own-options") == 0 ? -1 : 1;
    options.log = to_stderr;
    options.log_context = name;
    loom_status status = loom_run_mpi(function, "fail", &options);
    fprintf(stderr, "rank %s got %s: %s\n", rank, loom_status_name(status), loom_error_message());
    MPI_Finalize();
    return status == LOOM_OK ? 0 : 1;
}

static int play(char *name) {
    if (strncmp(name, "own", 3) == 0)
        return play_own_mpi(name);
    loom_run_options options = loom_run_options_default();
    options.threads = strcmp(name, "bound") == 0 ? 2 : 1;
    options.timeout = strcmp(name, "sleep") == 0 || strcmp(name, "late") == 0 ? 1 : 30;
    options.grace = 2;
    options.log = to_stderr;
    options.log_context = name;
    loom__mpi_options mpi = {.returned = strcmp(name, "held-up") == 0 ? hold_up : NULL};
    return loom__run_mpi(scene, name, &options, &mpi) == LOOM_OK ? 0 : 1;
}

/* The tests: what a person sees. */

typedef struct outcome {
    char text[1 << 16];
    int status;
    double seconds;
} outcome;

static void start(const char *flags, const char *name, outcome *out) {
    char command[2048];
    const char *mpirun = getenv("MEGALOOM_MPIRUN");
    snprintf(command, sizeof command,
        "exec %s --allow-run-as-root --oversubscribe --mca btl_vader_single_copy_mechanism none %s '%s' %s 2>&1",
        mpirun && *mpirun ? mpirun : "mpirun", flags, own_path, name);
    double began = seconds();
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    size_t length = fread(out->text, 1, sizeof out->text - 1, pipe);
    out->text[length] = '\0';
    out->status = pclose(pipe);
    out->seconds = seconds() - began;
}

static void expect(const outcome *out, const char *part) {
    if (!strstr(out->text, part))
        fail_msg("\"%s\" is missing in:\n%s", part, out->text);
}

static int times(const outcome *out, const char *part) {
    int count = 0;
    for (const char *at = out->text; (at = strstr(at, part)); at++)
        count++;
    return count;
}

/* Three ranks; the run must fail, and soon. */
static void start_failing(const char *name, outcome *out) {
    start("-n 3 --bind-to none", name, out);
    assert_int_not_equal(out->status, 0);
    assert_true(out->seconds < 20);
}

static void a_killed_process_is_named_with_its_operations(void **state) {
    (void)state;
    static outcome out;
    start_failing("kill-group", &out);
    expect(&out, "rank 2 has died");
    expect(&out, "last finished operation: barrier #1 of group world");
    expect(&out, "current: between operations");
    expect(&out, "group tp");
}

static void a_killed_process_is_named_by_ranks_that_compute(void **state) {
    (void)state;
    static outcome out;
    start_failing("kill-busy", &out);
    expect(&out, "megaloom: rank 2 has died; its last finished operation: barrier #1 of group world");
    assert_int_equal(times(&out, "rank 2 has died"), 1);
}

static void a_report_is_written_to_its_end_though_the_signal_to_end_comes_meanwhile(void **state) {
    (void)state;
    static outcome out;
    start_failing("kill-group-slow-log", &out);
    expect(&out, "LOG 3 rank 1: rank 2 has died");
    expect(&out, "LOG 1 rank 2: barrier #1 of group world (0 bytes) finished");
    assert_int_equal(times(&out, "rank 2 has died"), 1);
}

static void a_process_that_exits_is_named(void **state) {
    (void)state;
    static outcome out;
    start_failing("exit", &out);
    expect(&out, "rank 2 has died");
    expect(&out, "barrier #1 of group world");
}

static void a_process_that_sleeps_in_the_loader_is_named_after_the_timeout(void **state) {
    (void)state;
    static outcome out;
    start_failing("sleep", &out);
    expect(&out, "rank 2 has not come to all_reduce #2 of group world");
    expect(&out, "rank 2's last finished operation: barrier #1 of group world");
    expect(&out, "current: reading a batch");
}

static void a_rank_that_fails_ends_the_run_and_is_named(void **state) {
    (void)state;
    static outcome out;
    start_failing("fail", &out);
    expect(&out, "rank 2: the data set has a hole");
    expect(&out, "current: reading a batch");
    expect(&out, "barrier #1 of group world");
}

static void a_rank_that_returns_early_is_named(void **state) {
    (void)state;
    static outcome out;
    start_failing("early", &out);
    expect(&out, "rank 2 returned from its function without coming to all_reduce #2 of group world");
}

static void a_rank_that_does_not_return_is_named_after_the_timeout(void **state) {
    (void)state;
    static outcome out;
    start_failing("late", &out);
    expect(&out, "rank 2 has not come to all_reduce #1 of group end of the run");
}

static void a_rank_that_is_held_up_on_its_way_to_the_end_is_waited_for(void **state) {
    (void)state;
    static outcome out;
    start("-n 3 --bind-to none", "held-up", &out);
    if (out.status != 0)
        fail_msg("%s", out.text);
}

static void a_process_that_is_killed_at_the_end_is_named_by_ranks_that_wait_there(void **state) {
    (void)state;
    static outcome out;
    /* Such an mpirun sends no SIGTERM when a process dies, and may not mind. */
    start("-n 3 --bind-to none --enable-recovery", "end-kill", &out);
    expect(&out, "rank 2 has died; it was needed by all_reduce #1 of group end of the run");
}

static void a_process_that_is_killed_at_the_end_is_named_by_ranks_that_compute(void **state) {
    (void)state;
    static outcome out;
    start_failing("end-kill-busy", &out);
    expect(&out, "megaloom: rank 2 has died; its last finished operation: barrier #1 of group world");
    assert_int_equal(times(&out, "rank 2 has died"), 1);
}

static void expect_no_start(const char *name, const char *status, const char *reason) {
    static outcome out;
    char line[256];
    start_failing(name, &out);
    assert_int_equal(times(&out, "LOG 3 "), 1);
    snprintf(line, sizeof line, "LOG 3 rank 2 could not start: %s", reason);
    expect(&out, line);
    for (int rank = 0; rank < 2; rank++) {
        snprintf(line, sizeof line, "rank %d got LOOM_ERR_ABORTED: rank 2 could not start: %s", rank, reason);
        expect(&out, line);
    }
    snprintf(line, sizeof line, "rank 2 got %s: rank 2 could not start", status);
    expect(&out, line);
    assert_int_equal(times(&out, "Alarm clock"), 0);
}

static void a_rank_that_cannot_start_fails_all_and_is_logged_once(void **state) {
    (void)state;
    expect_no_start("own-single", "LOOM_ERR_STATE", "loom_run_mpi: MPI was initialised for single-threaded use");
    expect_no_start("own-options", "LOOM_ERR_ARGUMENT", "threads of a rank: found -1");
    expect_no_start("own-function", "LOOM_ERR_ARGUMENT", "loom_run_mpi: the function is NULL");
}

static void members_that_disagree_are_told_so(void **state) {
    (void)state;
    static outcome out;
    start_failing("disagree", &out);
    expect(&out, "group world");
    expect(&out, "disagree");
}

static void a_receive_of_another_count_is_an_error(void **state) {
    (void)state;
    static outcome out;
    start_failing("message", &out);
    expect(&out, "group tp");
    expect(&out, "3 elements of I64");
    expect(&out, "2 elements of I64");
}

static void ranks_that_fail_together_say_so_once_and_are_not_aborted(void **state) {
    (void)state;
    static outcome out;
    start_failing("together", &out);
    assert_int_equal(times(&out, "the disk is full"), 1);
    assert_int_equal(times(&out, "MPI_ABORT"), 0);
}

static void local_ranks_inside_an_mpi_run_are_refused(void **state) {
    (void)state;
    static outcome out;
    start_failing("local", &out);
    expect(&out, "loom_run_local was called inside an MPI run of 3 processes");
}

static void a_team_on_one_core_is_told_which_option_it_needs(void **state) {
    (void)state;
    if (sysconf(_SC_NPROCESSORS_ONLN) < 2) {
        print_message("one CPU: mpirun cannot bind to a part of it\n");
        skip();
    }
    static outcome out;
    start("-n 1 --bind-to core", "bound", &out);
    assert_int_equal(out.status, 0);
    expect(&out, "LOG 2 rank 0 has 2 compute threads, but the launcher bound it to 1 of");
    expect(&out, "mpirun --bind-to none");
}

int main(int argc, char **argv) {
    own_path = argv[0];
    if (argc > 1)
        return play(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_killed_process_is_named_with_its_operations),
        cmocka_unit_test(a_killed_process_is_named_by_ranks_that_compute),
        cmocka_unit_test(a_report_is_written_to_its_end_though_the_signal_to_end_comes_meanwhile),
        cmocka_unit_test(a_process_that_exits_is_named),
        cmocka_unit_test(a_process_that_sleeps_in_the_loader_is_named_after_the_timeout),
        cmocka_unit_test(a_rank_that_fails_ends_the_run_and_is_named),
        cmocka_unit_test(a_rank_that_returns_early_is_named),
        cmocka_unit_test(a_rank_that_does_not_return_is_named_after_the_timeout),
        cmocka_unit_test(a_rank_that_is_held_up_on_its_way_to_the_end_is_waited_for),
        cmocka_unit_test(a_process_that_is_killed_at_the_end_is_named_by_ranks_that_wait_there),
        cmocka_unit_test(a_process_that_is_killed_at_the_end_is_named_by_ranks_that_compute),
        cmocka_unit_test(a_rank_that_cannot_start_fails_all_and_is_logged_once),
        cmocka_unit_test(members_that_disagree_are_told_so),
        cmocka_unit_test(a_receive_of_another_count_is_an_error),
        cmocka_unit_test(ranks_that_fail_together_say_so_once_and_are_not_aborted),
        cmocka_unit_test(local_ranks_inside_an_mpi_run_are_refused),
        cmocka_unit_test(a_team_on_one_core_is_told_which_option_it_needs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

int main(void) {
    puts("left out: this build has no MPI");
    return 0;
}

#endif
