/* How much of what goes round the ring is hidden under attention: forward and backward of ring attention, on ranks that
 * are threads of this process or, under mpirun, processes.
 *
 *     bench_ring [--ranks N] [--rounds N] [--sequence N] [--heads N] [--groups N]
 *     mpirun -n N bench_ring …
 *
 * `computing` is the time inside of the blocks of queries and keys, `transfers` how long those of keys, and of their
 * gradients, were open, and `exposed` how long of that no block was computed. `alone` is what the same transfers take
 * when nothing is computed meanwhile, and `hidden` the share of it that was not exposed. Waiting for a message is also
 * waiting for a rank that another program has displaced, so the figures are of the round that took the least time, and
 * `alone` is the least of all rounds; in each round the rank with the most of it exposed counts. */
#include "parallel/context.h"
#include "runtime/rank.h"
#include "runtime/spans.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROUNDS = 400, MOST_RANKS = 64, MOST_SPANS = 4 * MOST_RANKS, D = 64, HALVES = 2 };

enum { COMPUTING, TRANSFERS, EXPOSED, ALONE, FIGURES };

typedef struct bench {
    int64_t rounds, sequence, heads, groups;
    double ms[HALVES][FIGURES][MOST_ROUNDS];
    double bytes[HALVES]; /* that a rank sends */
} bench;

static void fill(loom_tensor *x) {
    uint32_t state = 1;
    for (int64_t i = 0; i < loom_tensor_count(x); i++) {
        state = state * 1664525u + 1013904223u;
        loom_tensor_f32(x)[i] = (float)(state >> 8) * 0x1p-23f - 1.0f;
    }
}

/* Milliseconds of the span in which no block was computed. */
static double exposed(const loom__spans *spans, const loom__span *transfer) {
    uint64_t under = 0;
    for (int64_t i = 0; i < spans->count; i++) {
        const loom__span *at = &spans->spans[i];
        uint64_t begin = at->start > transfer->start ? at->start : transfer->start;
        uint64_t end = at->end < transfer->end ? at->end : transfer->end;
        under += at->kind == LOOM_SPAN_ATTENTION && end > begin ? end - begin : 0;
    }
    return (double)(transfer->end - transfer->start - under) * 1e-6;
}

/* What the spans of one direction say, in milliseconds. */
static void read_spans(const loom__spans *spans, double *figures, double *bytes) {
    figures[COMPUTING] = figures[TRANSFERS] = figures[EXPOSED] = *bytes = 0;
    for (int64_t i = 0; i < spans->count; i++) {
        const loom__span *at = &spans->spans[i];
        double ms = (double)(at->end - at->start) * 1e-6;
        *bytes += (double)at->bytes;
        if (at->kind == LOOM_SPAN_ATTENTION) {
            figures[COMPUTING] += ms;
        } else {
            figures[TRANSFERS] += ms;
            figures[EXPOSED] += exposed(spans, at);
        }
    }
}

/* The same messages with nothing under them. */
static loom_status exchange_alone(loom_rank *rank, int64_t rows, const bench *b, int half, double *ms) {
    loom_comm *world = loom_rank_world(rank);
    int size = loom_comm_size(world), me = loom_comm_rank(world);
    int64_t count = rows * b->groups * 2 * D, messages = half == 0 ? size - 1 : 2 * size - 1;
    loom_tensor *out = NULL, *in = NULL;
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 1, &count, &out));
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 1, &count, &in));
    memset(out->data, 0, (size_t)count * sizeof(float));
    LOOM_TRY(loom_barrier(world));
    uint64_t start = loom__clock();
    for (int64_t i = 0; i < messages; i++) {
        loom_request *send, *receive;
        LOOM_TRY(loom_receive_start(world, in->data, count, LOOM_F32, (me + size - 1) % size, 0, &receive));
        LOOM_TRY(loom_send_start(world, out->data, count, LOOM_F32, (me + 1) % size, 0, &send));
        LOOM_TRY(loom_wait(receive));
        LOOM_TRY(loom_wait(send));
    }
    *ms = (double)(loom__clock() - start) * 1e-6;
    loom_tensor_release(out);
    loom_tensor_release(in);
    return LOOM_OK;
}

static loom_status go(loom_rank *rank, const bench *b, double figures[HALVES][FIGURES], double *bytes) {
    static const int64_t chunks = 2;
    loom_comm *world = loom_rank_world(rank);
    int64_t size = loom_comm_size(world), rows = b->sequence / size, begin[2 * MOST_RANKS];
    loom__span memory[MOST_SPANS];
    loom__spans spans = {.spans = memory, .capacity = MOST_SPANS};
    loom_attention_options options = {.n = b->heads, .g = b->groups, .d = D, .scale = 0.125f, .causal = true};
    loom__ring ring = {.comm = world, .chunks = chunks, .rows = rows / chunks, .begin = begin};
    loom_tape *tape;
    loom_tensor *x, *y, *d_y;
    for (int64_t m = 0; m < size; m++) {
        begin[2 * m] = m * ring.rows;
        begin[2 * m + 1] = (2 * size - 1 - m) * ring.rows;
    }
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 3, (int64_t[]){rows, 1, (b->heads + 2 * b->groups) * D}, &x));
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 3, (int64_t[]){rows, 1, b->heads * D}, &d_y));
    fill(x);
    fill(d_y);
    LOOM_TRY(loom_tape_create(rank, &(loom_tape_options){.record = true}, &tape));
    LOOM_TRY(loom_tape_leaf(tape, x));
    rank->spans = &spans;
    for (int half = 0; half < HALVES; half++) {
        spans.count = 0;
        LOOM_TRY(loom_barrier(world));
        LOOM_TRY(half == 0 ? loom__ring_attention(tape, x, &options, &ring, &y) : loom_tape_backward(tape, y, d_y));
        read_spans(&spans, figures[half], &bytes[half]);
    }
    rank->spans = NULL;
    loom_tensor_release(x);
    loom_tensor_release(y);
    loom_tensor_release(d_y);
    loom_tape_destroy(tape);
    for (int half = 0; half < HALVES; half++)
        LOOM_TRY(exchange_alone(rank, rows, b, half, &figures[half][ALONE]));
    return LOOM_OK;
}

static void print(const bench *b, int ranks) {
    printf("%d ranks, sequence %lld, %lld heads of %d in %lld groups, %lld rounds; ms\n", ranks, (long long)b->sequence,
        (long long)b->heads, D, (long long)b->groups, (long long)b->rounds);
    printf("%-9s %8s %10s %10s %10s %10s %8s\n", "", "MB sent", "computing", "transfers", "exposed", "alone", "hidden");
    for (int half = 0; half < HALVES; half++) {
        const double(*ms)[MOST_ROUNDS] = b->ms[half];
        int64_t quiet = 0, alone = 0;
        for (int64_t round = 1; round < b->rounds; round++) {
            if (ms[COMPUTING][round] + ms[EXPOSED][round] < ms[COMPUTING][quiet] + ms[EXPOSED][quiet])
                quiet = round;
            alone = ms[ALONE][round] < ms[ALONE][alone] ? round : alone;
        }
        printf("%-9s %8.2f %10.2f %10.2f %10.2f %10.2f %8.2f\n", half == 0 ? "forward" : "backward",
            b->bytes[half] * 1e-6, ms[COMPUTING][quiet], ms[TRANSFERS][quiet], ms[EXPOSED][quiet], ms[ALONE][alone],
            1 - ms[EXPOSED][quiet] / ms[ALONE][alone]);
    }
}

static loom_status measure(loom_rank *rank, void *argument) {
    const bench *given = argument;
    bench *b = malloc(sizeof *b);
    loom_comm *world = loom_rank_world(rank);
    if (!b)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the figures");
    *b = *given;
    /* The first round pays for memory. */
    for (int64_t round = -1; round < b->rounds; round++) {
        double figures[HALVES][FIGURES], all[MOST_RANKS][HALVES][FIGURES];
        LOOM_TRY(go(rank, b, figures, b->bytes));
        LOOM_TRY(loom_all_gather(world, figures, all, HALVES * FIGURES, LOOM_F64));
        for (int half = 0; round >= 0 && half < HALVES; half++) {
            int longest = 0;
            for (int r = 1; r < loom_rank_count(rank); r++)
                longest = all[r][half][EXPOSED] > all[longest][half][EXPOSED] ? r : longest;
            for (int figure = 0; figure < FIGURES; figure++)
                b->ms[half][figure][round] = all[longest][half][figure];
        }
    }
    if (loom_rank_index(rank) == 0)
        print(b, loom_rank_count(rank));
    free(b);
    return LOOM_OK;
}

static void say(void *context, loom_log_level level, const char *line) {
    (void)context;
    if (level == LOOM_LOG_ERROR)
        fprintf(stderr, "%s\n", line);
}

int main(int argc, char **argv) {
    bench *b = calloc(1, sizeof *b);
    if (!b)
        return 1;
    *b = (bench){.rounds = 41, .sequence = 2048, .heads = 6, .groups = 6};
    int64_t ranks = 2;
    bool bad = argc % 2 == 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        static const char *const names[] = {"--ranks", "--rounds", "--sequence", "--heads", "--groups"};
        int64_t *const values[] = {&ranks, &b->rounds, &b->sequence, &b->heads, &b->groups};
        int at = 0;
        while (at < 5 && strcmp(argv[i], names[at]) != 0)
            at++;
        bad |= at == 5 || atoll(argv[i + 1]) < 1;
        if (at < 5)
            *values[at] = atoll(argv[i + 1]);
    }
    int size;
    bool mpi = loom_mpi_launched(&size);
    ranks = mpi ? size : ranks;
    if (bad || ranks < 2 || ranks > MOST_RANKS || b->rounds > MOST_ROUNDS || b->sequence % (2 * ranks) ||
        b->heads % b->groups) {
        fprintf(stderr, "usage: bench_ring [--ranks N] [--rounds N] [--sequence N] [--heads N] [--groups N]\n");
        return 2;
    }
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.log = say;
    loom_status status = mpi ? loom_run_mpi(measure, b, &options) : loom_run_local((int)ranks, measure, b, &options);
    if (status && !mpi)
        fprintf(stderr, "%s\n", loom_error_message());
    free(b);
    return status != LOOM_OK;
}
