/* What still comes when a rank has given an operation up. The program starts mpirun with itself, the name of a scene
 * and an MPI of its own, which it goes on to use after the run has failed: ranks 0 and 1 wait for rank 2, give up and
 * use the memory of their buffers for something else; then rank 2 comes to the operation, and what it has to do with
 * theirs happens as soon as they call MPI again, in a second run. */
#include "comm/comm.h"
#include "runtime/rank.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#if MEGALOOM_MPI
enum { RANKS = 3, LATE = 2, BYTES = LOOM_COPIED_BYTES / RANKS / 8 * 8, USED = 0x5a };

typedef struct scene {
    const char *name;
    loom_status (*operate)(loom_comm *world, char *in, char *out);
    bool message; /* the late rank starts them before the others do, and moves them on when those have gone */
} scene;

typedef struct part {
    const scene *scene;
    char in[RANKS * BYTES], out[RANKS * BYTES];
} part;

static char byte_of(int rank) {
    return (char)(0x10 + rank);
}

static loom_status gather(loom_comm *world, char *in, char *out) {
    return loom_all_gather(world, in, out, BYTES, LOOM_U8);
}

static loom_status broadcast(loom_comm *world, char *in, char *out) {
    return loom_broadcast(world, loom_comm_rank(world) == LATE ? in : out, RANKS * BYTES, LOOM_U8, LATE);
}

static loom_status exchange(loom_comm *world, char *in, char *out) {
    return loom_all_to_all(world, in, out, BYTES, LOOM_U8);
}

static loom_status add(loom_comm *world, char *in, char *out) {
    return loom_all_reduce(world, in, out, RANKS * BYTES / 8, LOOM_I64, LOOM_MAX);
}

static loom_status add_parts(loom_comm *world, char *in, char *out) {
    return loom_reduce_scatter(world, in, out, BYTES / 8, LOOM_I64, LOOM_MAX);
}

static loom_status take_from_late(loom_comm *world, char *in, char *out) {
    (void)in;
    return loom_receive(world, out, BYTES, LOOM_U8, LATE, 0);
}

static loom_status give_to_late(loom_comm *world, char *in, char *out) {
    (void)out;
    return loom_send(world, in, BYTES, LOOM_U8, LATE, 1);
}

static const scene scenes[] = {{"gather", gather, false}, {"broadcast", broadcast, false},
    {"exchange", exchange, false}, {"add", add, false}, {"add-parts", add_parts, false},
    {"take-from-late", take_from_late, true}, {"give-to-late", give_to_late, true}};

static const scene *find_scene(const char *name) {
    size_t at = 0;
    while (strcmp(scenes[at].name, name) != 0)
        at++;
    return &scenes[at];
}

static void nap(void) {
    nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
}

static bool runs(const loom__page *page) {
    return atomic_load(&page->state) == LOOM__RANK_RUNNING;
}

/* Until what the others had in their buffers is gone. */
static void wait_for_all_to_give_up(const loom_rank *rank) {
    const loom__board *board = rank->endpoint->board;
    while (runs(&board->page[0]) || runs(&board->page[1]))
        nap();
}

/* Until the late rank moves no operation on any more: in the barrier it moved on what it had started before. */
static void wait_for_late_past_the_barrier(const loom_rank *rank) {
    const loom__page *page = &rank->endpoint->board->page[LATE];
    while (runs(page) && (atomic_load(&page->last.state) != LOOM__RECORD_FINISHED ||
                             atomic_load(&page->last.operation) != LOOM__BARRIER))
        nap();
}

/* The late rank's own sides of the messages, to and from each of the others. */
static loom_status start_messages(loom_comm *world, part *p, loom_request *requests[LATE]) {
    for (int i = 0; i < LATE; i++)
        LOOM_TRY(p->scene->operate == take_from_late
                     ? loom_send_start(world, p->in, BYTES, LOOM_U8, i, 0, &requests[i])
                     : loom_receive_start(world, p->out + i * BYTES, BYTES, LOOM_U8, i, 1, &requests[i]));
    return LOOM_OK;
}

/* What has arrived, if it has, is what was given and not what the memory was used for since. */
static loom_status check_received(const part *p, int from, const char *bytes) {
    for (int i = 0; i < BYTES; i++)
        if (bytes[i] != byte_of(from)) {
            fprintf(stderr, "scene %s: the late rank has got %#x of rank %d\n", p->scene->name, bytes[i], from);
            return loom_fail(LOOM_ERR_INTERNAL, "wrong bytes");
        }
    return LOOM_OK;
}

static loom_status be_late(loom_rank *rank, part *p) {
    loom_comm *world = loom_rank_world(rank);
    loom_request *requests[LATE] = {NULL};
    loom_status status = LOOM_OK;
    if (p->scene->message)
        LOOM_TRY(start_messages(world, p, requests));
    LOOM_TRY(loom_barrier(world));
    wait_for_all_to_give_up(rank);
    if (!p->scene->message) {
        LOOM_TRY(p->scene->operate(world, p->in, p->out));
        for (int i = 0; i < RANKS && (p->scene->operate == gather || p->scene->operate == exchange); i++)
            LOOM_TRY(check_received(p, i, p->out + i * BYTES));
        return p->scene->operate == add || p->scene->operate == add_parts ? check_received(p, LATE, p->out) : LOOM_OK;
    }
    for (int i = 0; i < LATE; i++) {
        loom_status ended = loom_wait(requests[i]);
        if (!ended && p->scene->operate == give_to_late)
            ended = check_received(p, i, p->out + i * BYTES);
        status = status ? status : ended;
    }
    return status;
}

static loom_status run_that_fails(loom_rank *rank, void *argument) {
    part *p = argument;
    loom_comm *world = loom_rank_world(rank);
    memset(p->in, byte_of(loom_rank_index(rank)), sizeof p->in);
    memset(p->out, 0, sizeof p->out);
    if (loom_rank_index(rank) == LATE)
        return be_late(rank, p);
    loom_status status = loom_barrier(world);
    wait_for_late_past_the_barrier(rank);
    if (!status)
        status = p->scene->operate(world, p->in, p->out);
    memset(p->in, USED, sizeof p->in);
    memset(p->out, USED, sizeof p->out);
    return status;
}

static loom_status run_behind_it(loom_rank *rank, void *argument) {
    const part *p = argument;
    int me = loom_rank_index(rank);
    /* Messages that are large to MPI take several turns of all who have to do with them. */
    for (int i = 0; i < 10; i++)
        LOOM_TRY(loom_barrier(loom_rank_world(rank)));
    for (int i = 0; me != LATE && i < RANKS * BYTES; i++)
        if (p->in[i] != USED || p->out[i] != USED)
            return loom_fail(
                LOOM_ERR_INTERNAL, "scene %s: byte %d of rank %d's memory has changed", p->scene->name, i, me);
    fprintf(stderr, "rank %d goes on\n", me);
    return loom_barrier(loom_rank_world(rank));
}

/* MPI of the program's own. <mpi.h> is for the backend alone; these two are the same in every MPI. */
int MPI_Init_thread(int *argc, char ***argv, int required, int *provided);
int MPI_Finalize(void);

static void to_stderr(void *context, loom_log_level level, const char *line) {
    (void)context;
    if (level == LOOM_LOG_ERROR)
        fprintf(stderr, "LOG %s\n", line);
}

static int play(const char *name) {
    enum { FUNNELED = 1 };
    part *p = calloc(1, sizeof *p);
    int level;
    if (!p)
        return 1;
    alarm(60); /* where ranks wait for one that has gone, nothing else ends them */
    p->scene = find_scene(name);
    MPI_Init_thread(NULL, NULL, FUNNELED, &level);
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.timeout = 1;
    options.log = to_stderr;
    if (loom_run_mpi(run_that_fails, p, &options) != LOOM_OK)
        fprintf(stderr, "a rank gave up: %s\n", loom_error_message());
    options.timeout = 30;
    loom_status status = loom_run_mpi(run_behind_it, p, &options);
    MPI_Finalize();
    free(p);
    return status != LOOM_OK;
}

/* The tests. */

static const char *own_path;

typedef struct outcome {
    char text[1 << 16];
    int status;
} outcome;

static int times(const outcome *out, const char *what) {
    int count = 0;
    for (const char *at = out->text; (at = strstr(at, what)); at++)
        count++;
    return count;
}

/* The three ranks fail together with the run, and afterwards each has what it had. */
static void expect_a_run_behind(const char *flags, const char *name) {
    static outcome out;
    char command[2048];
    const char *mpirun = getenv("MEGALOOM_MPIRUN");
    snprintf(command, sizeof command,
        "exec %s --allow-run-as-root --oversubscribe --bind-to none --mca btl_vader_single_copy_mechanism none %s -n "
        "%d "
        "'%s' %s 2>&1",
        mpirun && *mpirun ? mpirun : "mpirun", flags, RANKS, own_path, name);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    size_t length = fread(out.text, 1, sizeof out.text - 1, pipe);
    out.text[length] = '\0';
    out.status = pclose(pipe);
    if (out.status != 0 || times(&out, "a rank gave up") != RANKS || times(&out, "goes on") != RANKS ||
        strstr(out.text, "the late rank has got"))
        fail_msg("scene %s %s:\n%s", name, flags, out.text);
}

static void a_late_message_does_not_come_into_memory_that_was_used_again(void **state) {
    (void)state;
    expect_a_run_behind("", "gather");
    expect_a_run_behind("", "take-from-late");
}

/* To such an MPI a message of this size is large: it is read when its receiver has come. */
static void no_operation_writes_to_or_reads_from_memory_that_was_used_again(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++)
        expect_a_run_behind("--mca btl_vader_eager_limit 256", scenes[i].name);
}

int main(int argc, char **argv) {
    own_path = argv[0];
    if (argc > 1)
        return play(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_late_message_does_not_come_into_memory_that_was_used_again),
        cmocka_unit_test(no_operation_writes_to_or_reads_from_memory_that_was_used_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

int main(void) {
    puts("left out: this build has no MPI");
    return 0;
}

#endif
