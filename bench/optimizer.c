/* The optimizer's step against the memory of the machine: a STREAM-like triad, the update alone, the norm alone and the
 * whole step take turns in one run, and medians are compared. Traffic is what must move: 12 bytes an element for the
 * triad, 4 for the norm, 28 for Adam with fp32 moments, 20 with bf16 ones. Beside the clock stands the process's own
 * time, since others may use the machine; with one thread it is what the clock would show on an idle one.
 *
 *   bench_optimizer [--elements N] [--rounds N] [--threads N] [--bf16]      (33554432, 15, 1)
 */
#include "ddp/buffer.h"
#include "measure.h"
#include "optim/optim.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TRIAD, UPDATE, NORM, STEP, KINDS, ROUNDS_MAX = 1000, ITEM = 16384 };

typedef struct bench {
    int64_t elements, rounds, threads;
    bool bf16;
    double wall[KINDS][ROUNDS_MAX], own[KINDS][ROUNDS_MAX];
} bench;

typedef struct triad {
    float *a;
    const float *b, *c;
    int64_t count;
} triad;

static void triad_item(void *argument, int64_t item, int worker) {
    const triad *p = argument;
    int64_t end = (item + 1) * ITEM < p->count ? (item + 1) * ITEM : p->count;
    (void)worker;
#pragma omp simd
    for (int64_t i = item * ITEM; i < end; i++)
        p->a[i] = p->b[i] + 0.5f * p->c[i];
}

/* What one round of each kind needs. */
typedef struct things {
    loom_rank *rank;
    loom_optimizer *optimizer;
    loom_parameter *parameter;
    void *scratch[3];
    void *m, *v;
} things;

static loom_status run_kind(const bench *of, const things *with, int kind) {
    loom_team *team = loom_rank_team(with->rank);
    const loom_kernels *kernels = loom_rank_kernels(with->rank);
    triad t = {with->scratch[0], with->scratch[1], with->scratch[2], of->elements};
    const loom_adamw adamw = {.lr = 1e-5,
        .weight_decay = 0.1,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .eps = 1e-8,
        .bias_correction1 = 0.5,
        .bias_correction2 = 0.5,
        .grad_scale = 1,
        .bf16_m = of->bf16,
        .bf16_v = of->bf16};
    switch (kind) {
    case TRIAD:
        loom_team_run(team, triad_item, &t, (of->elements + ITEM - 1) / ITEM);
        return LOOM_OK;
    case UPDATE:
        kernels->adamw(
            team, of->elements, &adamw, with->parameter->grad, with->parameter->data, with->m, with->v, NULL);
        return LOOM_OK;
    case NORM: {
        loom_exact_sum sum = {0};
        kernels->exact_sum(team, 2, of->elements, with->parameter->grad, &sum);
        return LOOM_OK;
    }
    default:
        return loom_optimizer_step(with->optimizer, NULL);
    }
}

static loom_status measure(bench *to, const things *with) {
    for (int64_t round = -1; round < to->rounds; round++) /* the first one warms up */
        for (int kind = 0; kind < KINDS; kind++) {
            double wall = seconds_of(CLOCK_MONOTONIC), own = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
            LOOM_TRY(run_kind(to, with, kind));
            if (round < 0)
                continue;
            to->wall[kind][round] = seconds_of(CLOCK_MONOTONIC) - wall;
            to->own[kind][round] = (seconds_of(CLOCK_PROCESS_CPUTIME_ID) - own) / (double)to->threads;
        }
    return LOOM_OK;
}

static loom_status run(loom_rank *rank, void *argument) {
    bench *to = argument;
    loom_optimizer_config config = loom_optimizer_config_default();
    loom_parameter parameter = {
        .name = "weights", .dims = 1, .shape = {to->elements, 1}, .tensor_parallel = true, .decay = true};
    loom_parameter *list[] = {&parameter};
    const loom_lr_config lr = {.schedule = "megatron-constant"};
    const loom__ddp_options ddp_options = loom__ddp_options_default();
    const loom__optimizer_options options = {.steps = 1000, .model_parallel = loom_rank_world(rank)};
    things with = {.rank = rank, .parameter = &parameter};
    loom__ddp *ddp = NULL;
    loom_status status = LOOM_OK;
    config.lr = 1e-5;
    config.exp_avg_dtype = config.exp_avg_sq_dtype = to->bf16 ? "bf16" : "fp32";
    parameter.data = parameter.memory = calloc((size_t)to->elements, sizeof(float));
    for (int i = 0; i < 3 && !status; i++)
        status = loom__buffer_create(rank, LOOM_F32, to->elements, "an array of the triad", &with.scratch[i]);
    if (!status)
        status = loom__ddp_create(rank, &ddp_options, list, 1, loom_rank_world(rank), &ddp);
    if (!status)
        status = loom__optimizer_create(rank, &config, &lr, ddp, &options, &with.optimizer);
    if (!status) {
        for (int64_t i = 0; i < to->elements; i++)
            parameter.grad[i] = 1e-3f * sinf((float)i);
        with.m = loom__optimizer_state_of(with.optimizer)->arrays[0].values;
        with.v = loom__optimizer_state_of(with.optimizer)->arrays[1].values;
        status = measure(to, &with);
    }
    loom__optimizer_destroy(with.optimizer);
    loom__ddp_destroy(ddp);
    for (int i = 0; i < 3; i++)
        loom__buffer_destroy(rank, with.scratch[i]);
    return status;
}

static void print_table(bench *of) {
    static const char *const names[KINDS] = {"triad", "update", "norm", "step"};
    double moments = of->bf16 ? 8 : 16;
    const double bytes[KINDS] = {12, 12 + moments, 4, 16 + moments};
    double wall[KINDS], own[KINDS];
    printf("%lld elements, %lld threads, %lld rounds, medians\n", (long long)of->elements, (long long)of->threads,
        (long long)of->rounds);
    printf("%-8s %10s %8s %10s %10s %8s %10s\n", "", "clock ms", "GB/s", "of triad", "own ms", "GB/s", "of triad");
    for (int kind = 0; kind < KINDS; kind++) {
        double traffic = bytes[kind] * (double)of->elements * 1e-9;
        double ms_wall = 1e3 * median(of->wall[kind], of->rounds), ms_own = 1e3 * median(of->own[kind], of->rounds);
        wall[kind] = 1e3 * traffic / ms_wall;
        own[kind] = 1e3 * traffic / ms_own;
        printf("%-8s %10.2f %8.2f %9.0f%% %10.2f %8.2f %9.0f%%\n", names[kind], ms_wall, wall[kind],
            100 * wall[kind] / wall[TRIAD], ms_own, own[kind], 100 * own[kind] / own[TRIAD]);
    }
}

static bool take_number(const char *text, int64_t high, int64_t *to) {
    char *end;
    errno = 0;
    *to = strtoll(text, &end, 10);
    return !errno && end != text && !*end && *to >= 1 && *to <= high;
}

int main(int argc, char **argv) {
    static bench all = {.elements = 1 << 25, .rounds = 15, .threads = 1};
    loom_run_options options = loom_run_options_default();
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        bool known = true;
        if (strcmp(argv[i], "--bf16") == 0)
            all.bf16 = true;
        else if (strcmp(argv[i], "--elements") == 0)
            known = take_number(value, (int64_t)1 << 32, &all.elements) && ++i;
        else if (strcmp(argv[i], "--rounds") == 0)
            known = take_number(value, ROUNDS_MAX, &all.rounds) && ++i;
        else if (strcmp(argv[i], "--threads") == 0)
            known = take_number(value, 1024, &all.threads) && ++i;
        else
            known = false;
        if (!known) {
            fprintf(stderr, "usage: %s [--elements N] [--rounds N] [--threads N] [--bf16]\n", argv[0]);
            return 2;
        }
    }
    options.threads = (int)all.threads;
    if (loom_run_local(1, run, &all, &options)) {
        fprintf(stderr, "%s\n", loom_error_message());
        return 1;
    }
    print_table(&all);
    return 0;
}
