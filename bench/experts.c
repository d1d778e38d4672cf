/* The products of a layer's experts against one dense product of the same operations, taking turns in one process.
 *
 *     bench_experts [--table NAME] [--threads N] [--rounds N] [--dtype fp32|bf16|fp16]
 *                   [--experts N] [--hidden N] [--ffn N] [--tokens N]
 *
 * Each token goes to two experts. The two linear layers of a gated MLP, [2 ffn, hidden] and [hidden, ffn], go forward
 * and through both halves of the backward: with one expert that gets all rows, which is the dense product, with experts
 * that get the same number each, and with a load as uneven as that of a router that learns. Figures are medians over
 * the rounds; "of dense" is the median of each round's quotient, by the clock and by processor time, which tells more
 * on a machine that others use. */
#include "parallel/experts.h"
#include "measure.h"
#include <megaloom/rank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROUNDS = 400, MOST_EXPERTS = 256, TOPK = 2, WAYS = 3, LAYERS = 2, HALVES = 3 };

static const char *const way_names[WAYS] = {"dense", "even", "uneven"};
static const char *const half_names[HALVES] = {"forward", "input gradient", "weight gradient"};

typedef struct bench {
    loom_dtype dtype;
    int64_t experts, hidden, ffn, tokens, rounds;
    double clock[LAYERS][HALVES][WAYS][MOST_ROUNDS], processor[LAYERS][HALVES][WAYS][MOST_ROUNDS];
} bench;

typedef struct layer {
    int64_t in, out;
    loom_parameter parameters[MOST_EXPERTS], *weights[MOST_EXPERTS];
    loom_tensor *x, *d_y;
} layer;

static double median_of(const double *values, int64_t count) {
    double sorted[MOST_ROUNDS];
    memcpy(sorted, values, (size_t)count * sizeof *values);
    return median(sorted, count);
}

static double median_quotient(const double *over, const double *under, int64_t count) {
    double quotient[MOST_ROUNDS];
    for (int64_t i = 0; i < count; i++)
        quotient[i] = over[i] / under[i];
    return median(quotient, count);
}

/* Rows of each expert: all at the first, the same for each, or each with 3/4 of what the one before it has. */
static void share_rows(int way, int64_t rows, int64_t experts, int64_t *counts) {
    double weights = 0, weight = 1, factor = way == 1 ? 1.0 : 0.75;
    int64_t given = 0;
    if (way == 0)
        experts = 1;
    for (int64_t e = 0; e < experts; e++, weight *= factor)
        weights += weight;
    weight = 1;
    for (int64_t e = 0; e < experts; e++, weight *= factor) {
        counts[e] = (int64_t)((double)rows * weight / weights);
        given += counts[e];
    }
    counts[0] += rows - given;
}

static loom_status allocate(size_t bytes, void *memory) {
    void *made = malloc(bytes + 1);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %zu bytes", bytes);
    memcpy(memory, &made, sizeof made);
    return LOOM_OK;
}

static void fill(loom_dtype dtype, int64_t count, void *values) {
    uint32_t state = 1;
    for (int64_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        float value = (float)(state >> 8) * 0x1p-23f - 1.0f;
        if (dtype == LOOM_F32)
            ((float *)values)[i] = value;
        else
            ((uint16_t *)values)[i] = dtype == LOOM_BF16 ? loom_f32_to_bf16(value) : loom_f32_to_f16(value);
    }
}

static loom_status make_layer(loom_rank *rank, const bench *b, int64_t in, int64_t out, layer *l) {
    const int64_t rows = b->tokens * TOPK;
    *l = (layer){.in = in, .out = out};
    for (int64_t e = 0; e < b->experts; e++) {
        loom_parameter *p = l->weights[e] = &l->parameters[e];
        void *values = NULL;
        LOOM_TRY(allocate((size_t)(in * out) * loom_dtype_size(b->dtype), &values));
        LOOM_TRY(allocate((size_t)(in * out) * sizeof(float), &p->grad));
        fill(b->dtype, in * out, values);
        p->name = "expert";
        p->dims = 2;
        p->shape[0] = out;
        p->shape[1] = in;
        p->dtype = b->dtype;
        p->data = b->dtype == LOOM_F32 ? values : NULL;
        p->data16 = b->dtype == LOOM_F32 ? NULL : values;
    }
    LOOM_TRY(loom_tensor_create(rank, b->dtype, 2, (int64_t[]){rows, in}, &l->x));
    LOOM_TRY(loom_tensor_create(rank, b->dtype, 2, (int64_t[]){rows, out}, &l->d_y));
    fill(b->dtype, rows * in, l->x->data);
    fill(b->dtype, rows * out, l->d_y->data);
    return LOOM_OK;
}

static void free_layer(layer *l) {
    for (int64_t e = 0; e < MOST_EXPERTS; e++) {
        free(l->parameters[e].data);
        free(l->parameters[e].data16);
        free(l->parameters[e].grad);
    }
    loom_tensor_release(l->x);
    loom_tensor_release(l->d_y);
}

/* clock, processor [HALVES]: seconds of each. */
static loom_status go(loom_rank *rank, const bench *b, layer *l, int way, double *clock, double *processor) {
    int64_t counts[MOST_EXPERTS];
    loom__routed routed = {.local_experts = way == 0 ? 1 : b->experts,
        .expert_rows = b->tokens * TOPK,
        .experts = b->experts,
        .local_counts = counts};
    loom_tape *tape;
    loom_tensor *y = NULL;
    share_rows(way, b->tokens * TOPK, b->experts, counts);
    LOOM_TRY(loom_tape_create(rank, &(loom_tape_options){.record = true, .defer_weights = true}, &tape));
    LOOM_TRY(loom_tape_leaf(tape, l->x));
    for (int half = 0; half < HALVES; half++) {
        double clock_before = seconds_of(CLOCK_MONOTONIC), processor_before = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
        if (half == 0)
            LOOM_TRY(loom__expert_linear(tape, l->x, &routed, l->weights, NULL, &y));
        else
            LOOM_TRY(half == 1 ? loom_tape_backward(tape, y, l->d_y) : loom_tape_run_weights(tape));
        clock[half] = seconds_of(CLOCK_MONOTONIC) - clock_before;
        processor[half] = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - processor_before;
    }
    loom_tensor_release(y);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static loom_status measure(loom_rank *rank, void *argument) {
    bench *b = argument;
    layer *layers = calloc(LAYERS, sizeof *layers);
    if (!layers)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %d layers", LAYERS);
    LOOM_TRY(make_layer(rank, b, b->hidden, 2 * b->ffn, &layers[0]));
    LOOM_TRY(make_layer(rank, b, b->ffn, b->hidden, &layers[1]));
    /* The first round pays for memory and for what the provider compiles. */
    for (int64_t round = -1; round < b->rounds; round++)
        for (int i = 0; i < LAYERS; i++)
            for (int way = 0; way < WAYS; way++) {
                double clock[HALVES], processor[HALVES];
                LOOM_TRY(go(rank, b, &layers[i], way, clock, processor));
                for (int half = 0; round >= 0 && half < HALVES; half++) {
                    b->clock[i][half][way][round] = clock[half];
                    b->processor[i][half][way][round] = processor[half];
                }
            }
    for (int i = 0; i < LAYERS; i++)
        free_layer(&layers[i]);
    free(layers);
    return LOOM_OK;
}

static void print(const bench *b) {
    const double gflop = 2e-9 * (double)(b->tokens * TOPK) * (double)b->hidden * (double)b->ffn;
    printf("%-28s %-7s %9s %9s %13s %13s\n", "", "load", "ms", "GFLOP/s", "of dense", "by processor");
    for (int i = 0; i < LAYERS; i++)
        for (int half = 0; half < HALVES; half++)
            for (int way = 0; way < WAYS; way++) {
                const double *clock = b->clock[i][half][way], *processor = b->processor[i][half][way];
                double seconds = median_of(clock, b->rounds);
                char name[64];
                snprintf(name, sizeof name, "%s: %s", i == 0 ? "fc1" : "fc2", half_names[half]);
                printf("%-28s %-7s %9.2f %9.1f %13.3f %13.3f\n", way == 0 ? name : "", way_names[way], seconds * 1e3,
                    (i == 0 ? 2 : 1) * gflop / seconds, median_quotient(b->clock[i][half][0], clock, b->rounds),
                    median_quotient(b->processor[i][half][0], processor, b->rounds));
            }
    for (int way = 1; way < WAYS; way++) {
        double all[MOST_ROUNDS] = {0}, dense[MOST_ROUNDS] = {0};
        for (int64_t round = 0; round < b->rounds; round++)
            for (int i = 0; i < LAYERS; i++)
                for (int half = 0; half < HALVES; half++) {
                    all[round] += b->processor[i][half][way][round];
                    dense[round] += b->processor[i][half][0][round];
                }
        printf("together, %s load: %.3f of the dense rate by processor time\n", way_names[way],
            median_quotient(dense, all, b->rounds));
    }
}

static int usage(void) {
    fprintf(stderr, "usage: bench_experts [--table NAME] [--threads N] [--rounds N] [--dtype fp32|bf16|fp16] "
                    "[--experts N] [--hidden N] [--ffn N] [--tokens N]\n");
    return 2;
}

int main(int argc, char **argv) {
    bench *b = calloc(1, sizeof *b);
    if (!b)
        return 1;
    *b = (bench){.experts = 8, .hidden = 384, .ffn = 1024, .tokens = 2048, .rounds = 41};
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.kernels = loom_kernels_fast();
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (strcmp(name, "--table") == 0)
            options.kernels = loom_kernels_find(value);
        else if (strcmp(name, "--threads") == 0)
            options.threads = atoi(value);
        else if (strcmp(name, "--rounds") == 0)
            b->rounds = atoi(value);
        else if (strcmp(name, "--dtype") == 0)
            b->dtype = strcmp(value, "bf16") == 0 ? LOOM_BF16 : strcmp(value, "fp16") == 0 ? LOOM_F16 : LOOM_F32;
        else if (strcmp(name, "--experts") == 0)
            b->experts = atoi(value);
        else if (strcmp(name, "--hidden") == 0)
            b->hidden = atoi(value);
        else if (strcmp(name, "--ffn") == 0)
            b->ffn = atoi(value);
        else if (strcmp(name, "--tokens") == 0)
            b->tokens = atoi(value);
        else
            return usage();
    }
    if (argc % 2 == 0 || !options.kernels || b->rounds < 1 || b->rounds > MOST_ROUNDS || b->experts < 1 ||
        b->experts > MOST_EXPERTS || b->hidden < 1 || b->ffn < 1 || b->tokens < 1)
        return usage();
    if (loom_run_local(1, measure, b, &options)) {
        fprintf(stderr, "%s\n", loom_error_message());
        return 1;
    }
    printf("%lld experts of [%lld, %lld], %lld tokens to %d each, %s, kernels %s, %d thread(s), %lld rounds\n",
        (long long)b->experts, (long long)b->hidden, (long long)b->ffn, (long long)b->tokens, TOPK,
        loom_dtype_name(b->dtype), options.kernels->name, options.threads, (long long)b->rounds);
    print(b);
    free(b);
    return 0;
}
