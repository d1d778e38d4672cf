/* What an operation of few bytes costs, on ranks that are threads of this process or, under mpirun, processes: medians
 * over rounds of the mean time of an operation in a round.
 *
 *     bench_collectives [--ranks N] [--rounds N] [--operations N]
 *     mpirun -n N bench_collectives …
 *
 * A round has the operations of one kind and size after one another, and kinds and sizes take turns, so that a change
 * of the machine's mood meets all alike. The slowest rank counts. */
#include "measure.h"
#include <megaloom/rank.h>
#include <stdio.h>
#include <string.h>

enum { SIZES = 4, KINDS = 4, MOST_ROUNDS = 2000, MOST_RANKS = 64, LARGEST = 64 * 1024 };

static const int64_t sizes[SIZES] = {8, 512, 4096, LARGEST};
static const char *const kinds[KINDS] = {"all_reduce", "all_gather", "broadcast", "ring of messages"};

typedef struct bench {
    int64_t rounds, operations;
    double us[KINDS][SIZES][MOST_ROUNDS];
} bench;

static loom_status one(loom_comm *world, int kind, int64_t bytes, char *in, char *out) {
    int size = loom_comm_size(world), me = loom_comm_rank(world);
    loom_request *send, *receive;
    switch (kind) {
    case 0:
        return loom_all_reduce(world, in, out, bytes / 8, LOOM_F64, LOOM_MAX);
    case 1:
        return loom_all_gather(world, in, out, bytes / size, LOOM_U8);
    case 2:
        return loom_broadcast(world, in, bytes, LOOM_U8, 0);
    default:
        LOOM_TRY(loom_receive_start(world, out, bytes, LOOM_U8, (me + size - 1) % size, 0, &receive));
        LOOM_TRY(loom_send_start(world, in, bytes, LOOM_U8, (me + 1) % size, 0, &send));
        LOOM_TRY(loom_wait(receive));
        return loom_wait(send);
    }
}

static void print(bench *b, int ranks) {
    printf("%d ranks, %lld rounds of %lld operations; us of one\n%-18s", ranks, (long long)b->rounds,
        (long long)b->operations, "bytes");
    for (int size = 0; size < SIZES; size++)
        printf(" %9lld", (long long)sizes[size]);
    for (int kind = 0; kind < KINDS; kind++) {
        printf("\n%-18s", kinds[kind]);
        for (int size = 0; size < SIZES; size++)
            printf(" %9.2f", median(b->us[kind][size], b->rounds));
    }
    printf("\n");
}

static loom_status measure(loom_rank *rank, void *argument) {
    bench *b = argument;
    loom_comm *world = loom_rank_world(rank);
    char *in = calloc(1, LARGEST), *out = calloc(1, LARGEST);
    LOOM_TRY(loom_agree(world, in && out ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for buffers")));
    /* The first round pays for memory. */
    for (int64_t round = -1; round < b->rounds; round++)
        for (int at = 0; at < KINDS * SIZES; at++) {
            LOOM_TRY(loom_barrier(world));
            double start = seconds_of(CLOCK_MONOTONIC);
            for (int64_t i = 0; i < b->operations; i++)
                LOOM_TRY(one(world, at / SIZES, sizes[at % SIZES], in, out));
            double us = (seconds_of(CLOCK_MONOTONIC) - start) * 1e6 / (double)b->operations;
            LOOM_TRY(loom_all_reduce(world, &us, &us, 1, LOOM_F64, LOOM_MAX));
            if (round >= 0 && loom_rank_index(rank) == 0)
                b->us[at / SIZES][at % SIZES][round] = us;
        }
    if (loom_rank_index(rank) == 0)
        print(b, loom_rank_count(rank));
    free(in);
    free(out);
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
    b->rounds = 50;
    b->operations = 200;
    int64_t ranks = 2;
    bool bad = argc % 2 == 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        static const char *const names[] = {"--ranks", "--rounds", "--operations"};
        int64_t *const values[] = {&ranks, &b->rounds, &b->operations};
        int at = 0;
        while (at < 3 && strcmp(argv[i], names[at]) != 0)
            at++;
        bad |= at == 3 || atoll(argv[i + 1]) < 1;
        if (at < 3)
            *values[at] = atoll(argv[i + 1]);
    }
    int size;
    bool mpi = loom_mpi_launched(&size);
    ranks = mpi ? size : ranks;
    if (bad || ranks < 2 || ranks > MOST_RANKS || b->rounds > MOST_ROUNDS) {
        fprintf(stderr, "usage: bench_collectives [--ranks N] [--rounds N] [--operations N]\n");
        free(b);
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
