/* The yardstick of the machine: what its matrix products reach in this run, with these threads, beside these
 * neighbours. */
#include <megaloom/report.h>
#include <stdlib.h>
#include <sys/sysinfo.h>
#include <time.h>

enum { SIZE = 2048, FEWEST_TRIES = 2, MOST_TRIES = 3 };
#define ENOUGH_SECONDS 1.0 /* after which no further try is made */

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

loom_status loom_measure_gemm_rate(loom_rank *rank, loom_comm *comm, double *flops_per_second) {
    size_t count = (size_t)SIZE * SIZE;
    /* More ranks than cores take turns on them: as many as there are cores show all that the machine has. */
    bool measures = loom_rank_local_index(rank) < get_nprocs();
    float *memory = measures ? malloc(3 * count * sizeof *memory) : NULL;
    loom_status status = loom_agree(
        comm, memory || !measures ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for measuring the GEMM rate"));
    double best = 0;
    if (!status)
        status = loom_barrier(comm);
    if (!status && measures) {
        const float *a = memory, *b = memory + count;
        float *c = memory + 2 * count;
        for (size_t i = 0; i < 2 * count; i++)
            memory[i] = (float)(i % 17) - 8.0f;
        double begin = now();
        for (int i = 0; i < FEWEST_TRIES || (i < MOST_TRIES && now() - begin < ENOUGH_SECONDS); i++) {
            double start = now();
            loom_rank_kernels(rank)->gemm(
                loom_rank_team(rank), false, false, SIZE, SIZE, SIZE, 1.0f, a, SIZE, b, SIZE, false, c, SIZE);
            double rate = 2.0 * SIZE * SIZE * SIZE / (now() - start);
            best = rate > best ? rate : best;
        }
    }
    free(memory);
    if (!status)
        status = loom_all_reduce(comm, &best, &best, 1, LOOM_F64, LOOM_SUM);
    if (!status)
        *flops_per_second = best;
    return status;
}
