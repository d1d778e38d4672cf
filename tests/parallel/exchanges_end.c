/* A rank that goes in the middle of a ring, or between the two all-to-alls of a layer of experts: the others come back,
 * soon, with a message that says which rank and what they were doing in which group; and nothing that is lent to a
 * transfer is freed under it (the sanitizers look). Ranks are threads and the one that goes returns an error; or they
 * are processes of mpirun, which this program is started by, and it returns an error or is killed. */
#include "parallel/context.h"
#include "parallel/experts.h"
#include "support.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 3, GOES = 2, ROWS = 8, HEADS = 2, WIDTH = 16, EXPERTS = 6, H = 32, LIMIT = 30 };

typedef enum place { IN_RING, IN_RING_BACKWARD, IN_EXPERTS_START, IN_EXPERTS, IN_EXPERTS_BACKWARD, PLACES } place;

static const char *const names[PLACES] = {"ring", "ring-backward", "experts-start", "experts", "experts-backward"};

typedef struct scene {
    place place;
    bool killed;
} scene;

static loom_status go(loom_rank *rank, const scene *s) {
    loom_rank_note(rank, "reading a batch");
    if (s->killed)
        raise(SIGKILL);
    return loom_fail(LOOM_ERR_IO, "the data set has a hole");
}

static void fill(loom_tensor *x) {
    for (int64_t i = 0; i < loom_tensor_count(x); i++)
        loom_tensor_f32(x)[i] = (float)(i * 7 % 13) / 13.0f - 0.5f;
}

/* ---- a ring ---- */

/* The rank that goes has passed one piece on, and has begun to take in the next one. */
static loom_status part_of_a_round(loom_rank *rank, loom_comm *ring, const scene *s) {
    float mine[ROWS * HEADS * 2 * WIDTH] = {0}, other[ROWS * HEADS * 2 * WIDTH];
    const int64_t count = sizeof mine / sizeof *mine;
    loom_request *send, *receive;
    LOOM_TRY(loom_receive_start(ring, other, count, LOOM_F32, GOES - 1, 0, &receive));
    LOOM_TRY(loom_send_start(ring, mine, count, LOOM_F32, 0, 0, &send));
    LOOM_TRY(loom_wait(receive));
    LOOM_TRY(loom_wait(send));
    LOOM_TRY(loom_receive_start(ring, mine, count, LOOM_F32, GOES - 1, 0, &receive));
    loom_status status = go(rank, s);
    loom_cancel(receive, status);
    return status;
}

static loom_status through_ring(loom_rank *rank, loom_tape *tape, loom_comm *group, const scene *s, loom_tensor *x) {
    const int64_t begin[2 * RANKS] = {0, 20, 4, 16, 8, 12};
    const loom__ring ring = {.comm = group, .chunks = 2, .rows = ROWS / 2, .begin = begin};
    const loom_attention_options options = {.n = HEADS, .g = HEADS, .d = WIDTH, .scale = 0.25f, .causal = true};
    bool goes = loom_rank_index(rank) == GOES;
    loom_tensor *y;
    if (goes && s->place == IN_RING)
        return part_of_a_round(rank, group, s);
    LOOM_TRY(loom__ring_attention(tape, x, &options, &ring, &y));
    loom_tensor *d_y = NULL;
    loom_status status = loom_tensor_create(rank, LOOM_F32, 3, y->shape, &d_y);
    if (!status) {
        fill(d_y);
        status = goes ? part_of_a_round(rank, group, s) : loom_tape_backward(tape, y, d_y);
    }
    loom_tensor_release(d_y);
    loom_tensor_release(y);
    return status;
}

/* ---- experts ---- */

static loom_status come_back(
    loom_tape *tape, loom__routed *routed, loom_tensor *rows, loom_tensor *probs, loom_tensor **y) {
    loom_tensor *sum = NULL, *moved = NULL;
    loom_status status = loom__expert_return(tape, rows, routed, &sum);
    if (!status)
        status = loom__expert_exchange_start(tape, routed, false, sum, &moved);
    if (!status)
        status = loom__expert_combine(tape, moved, probs, routed, ROWS, 1, y);
    loom_tensor_release(sum);
    loom_tensor_release(moved);
    return status;
}

static loom_status through_experts(loom_rank *rank, loom_tape *tape, loom_comm *group, const scene *s, loom_tensor *x) {
    float weight[EXPERTS * H];
    loom_parameter router = {.name = "router", .dims = 2, .shape = {EXPERTS, H}, .data = weight};
    const loom__router_options options = {
        .router = {.experts = EXPERTS, .topk = 2}, .groups = {.ep = group, .all = group}, .training = true};
    bool goes = loom_rank_index(rank) == GOES;
    loom__routed *routed = NULL;
    loom_tensor *probs = NULL, *mine = NULL, *moved = NULL, *rows = NULL, *y = NULL, *d_y = NULL;
    for (int i = 0; i < EXPERTS * H; i++)
        weight[i] = (float)(i * 5 % 17) / 17.0f - 0.5f;
    loom_status status = loom__route_tokens(tape, x, &router, NULL, &options, &probs, &routed);
    if (!status)
        status = loom__expert_rows(tape, x, routed, &mine);
    if (!status)
        status = loom__expert_exchange_start(tape, routed, true, mine, &moved);
    /* The rows of the others are under way. */
    if (!status && goes && s->place == IN_EXPERTS_START)
        status = go(rank, s);
    if (!status)
        status = loom__expert_dispatch(tape, moved, routed, &rows);
    if (!status && goes && s->place == IN_EXPERTS)
        status = go(rank, s);
    if (!status)
        status = come_back(tape, routed, rows, probs, &y);
    if (!status)
        status = loom_tensor_create(rank, LOOM_F32, 3, y->shape, &d_y);
    if (!status) {
        fill(d_y);
        status = goes ? go(rank, s) : loom_tape_backward(tape, y, d_y);
    }
    loom_tensor_release(probs);
    loom_tensor_release(mine);
    loom_tensor_release(moved);
    loom_tensor_release(rows);
    loom_tensor_release(y);
    loom_tensor_release(d_y);
    loom__routed_release(routed);
    return status;
}

/* ---- runs ---- */

static loom_status on_rank(loom_rank *rank, void *argument) {
    const scene *s = argument;
    const int ranks[RANKS] = {0, 1, 2};
    bool ring = s->place == IN_RING || s->place == IN_RING_BACKWARD;
    loom_comm *group;
    loom_tape *tape = NULL;
    loom_tensor *x = NULL;
    LOOM_TRY(loom_group_create(rank, ring ? "cp" : "ep", ranks, RANKS, &group));
    loom_status status = loom_tape_create(rank, &(loom_tape_options){.record = true}, &tape);
    if (!status)
        status = loom_tensor_create(
            rank, LOOM_F32, 3, (int64_t[]){ROWS, 1, ring ? (int64_t)HEADS * 3 * WIDTH : (int64_t)H}, &x);
    if (!status)
        status = loom_tape_leaf(tape, x);
    if (!status) {
        fill(x);
        status = ring ? through_ring(rank, tape, group, s, x) : through_experts(rank, tape, group, s, x);
    }
    loom_tensor_release(x);
    loom_tape_destroy(tape);
    return status;
}

static void on_threads(place where) {
    scene s = {.place = where};
    loom_run_options options = test_options();
    options.timeout = LIMIT;
    loom_status status = loom_run_local(RANKS, on_rank, &s, &options);
    if (status != LOOM_ERR_IO || !strstr(loom_error_message(), "rank 2: the data set has a hole"))
        fail_msg("%s: %s: %s", names[where], loom_status_name(status), loom_error_message());
}

static void threads_come_back_from_a_ring(void **state) {
    (void)state;
    on_threads(IN_RING);
    on_threads(IN_RING_BACKWARD);
}

static void threads_come_back_from_experts(void **state) {
    (void)state;
    on_threads(IN_EXPERTS_START);
    on_threads(IN_EXPERTS);
    on_threads(IN_EXPERTS_BACKWARD);
}

static void to_stderr(void *context, loom_log_level level, const char *line) {
    (void)context;
    if (level == LOOM_LOG_ERROR)
        fprintf(stderr, "%s\n", line);
}

/* This program as a process of mpirun. */
static int play(const char *name, const char *how) {
    scene s = {.killed = strcmp(how, "killed") == 0};
    while (s.place < PLACES && strcmp(names[s.place], name) != 0)
        s.place++;
    loom_run_options options = test_options();
    options.timeout = LIMIT;
    options.grace = 2;
    options.log = to_stderr;
    return loom_run_mpi(on_rank, &s, &options) == LOOM_OK ? 0 : 1;
}

static void on_mpi(const char *program, place where, bool killed) {
    const char *mpirun = getenv("MEGALOOM_MPIRUN");
    static char text[1 << 16];
    char command[2048];
    snprintf(command, sizeof command,
        "exec %s --allow-run-as-root --oversubscribe --bind-to none --mca btl_vader_single_copy_mechanism none -n %d "
        "'%s' %s %s 2>&1",
        mpirun, RANKS, program, names[where], killed ? "killed" : "fails");
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    text[fread(text, 1, sizeof text - 1, pipe)] = '\0';
    int status = pclose(pipe);
    const char *group = where == IN_RING || where == IN_RING_BACKWARD ? "of group cp" : "of group ep";
    const char *rank = killed ? "rank 2 has died" : "rank 2: the data set has a hole";
    /* Had only the watchdog ended it, the message would be its own. */
    if (status == 0 || !strstr(text, rank) || !strstr(text, group) || strstr(text, "did not finish within"))
        fail_msg("%s: exit status %d, \"%s\" or \"%s\" is missing: %s", names[where], status, rank, group, text);
}

static void processes_come_back(void **state) {
    if (!getenv("MEGALOOM_MPIRUN")) {
        puts("left out: no mpirun was named");
        skip();
    }
    for (place where = 0; where < PLACES; where++)
        for (int killed = 0; killed < 2; killed++)
            on_mpi(*state, where, killed);
}

int main(int argc, char **argv) {
    if (argc > 2)
        return play(argv[1], argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_come_back_from_a_ring),
        cmocka_unit_test(threads_come_back_from_experts),
        cmocka_unit_test_prestate(processes_come_back, argv[0]),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
