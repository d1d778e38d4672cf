/* Time of each kernel at the shapes of a training step: GFLOP/s for the products, GB/s of necessary traffic for the
 * rest. "rate" is the best of several rounds. `bench_kernels [--json] [--table NAME] [--threads N]` (fast, 1). */
#include "base/team.h"
#include "measure.h"
#include <megaloom/kernels.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct model {
    const char *name;
    int64_t s, b, h, f, n, g, d, v;
} model;

typedef struct bench {
    const loom_kernels *kernels;
    loom_team *team;
    model m;
    int64_t rows, qkv;
    loom_attention_block block;
    loom_adamw adamw;
    float *arrays[8];
    int64_t *tokens;
    bool json, first;
} bench;

static const double MEASURE_SECONDS = 0.1;

static void report(bench *x, const char *what, double seconds, double work, const char *unit) {
    double rate = work / seconds * 1e-9;
    if (x->json)
        printf("%s\n  {\"model\": \"%s\", \"op\": \"%s\", \"microseconds\": %.2f, \"rate\": %.3f, \"unit\": \"%s\"}",
            x->first ? "" : ",", x->m.name, what, seconds * 1e6, rate, unit);
    else
        printf("%-8s %-28s %10.1f us %9.1f %s\n", x->m.name, what, seconds * 1e6, rate, unit);
    x->first = false;
    fflush(stdout);
}

/* Best time of one execution of the statement: each is timed alone, for MEASURE_SECONDS, so that one that the machine
 * left undisturbed is among them. */
#define MEASURE(x, what, work, unit, statement)                                                                        \
    do {                                                                                                               \
        double best = 1e30, begin = seconds_of(CLOCK_MONOTONIC);                                                       \
        for (int64_t i = 0; i < 3 || seconds_of(CLOCK_MONOTONIC) - begin < MEASURE_SECONDS; i++) {                     \
            double start = seconds_of(CLOCK_MONOTONIC);                                                                \
            statement;                                                                                                 \
            double each = seconds_of(CLOCK_MONOTONIC) - start;                                                         \
            best = each < best ? each : best;                                                                          \
        }                                                                                                              \
        report(x, what, best, (double)(work), unit);                                                                   \
    } while (0)

static void products(bench *x) {
    const loom_kernels *k = x->kernels;
    int64_t m = x->rows, h = x->m.h, f = x->m.f, qkv = x->qkv, v = x->m.v;
    float **a = x->arrays;
    MEASURE(x, "gemm forward qkv", 2 * m * h * qkv, "GFLOP/s",
        k->gemm(x->team, false, true, m, qkv, h, 1, a[0], h, a[1], h, false, a[2], qkv));
    MEASURE(x, "gemm forward mlp", 2 * m * h * 2 * f, "GFLOP/s",
        k->gemm(x->team, false, true, m, 2 * f, h, 1, a[0], h, a[1], h, false, a[2], 2 * f));
    MEASURE(x, "gemm input gradient mlp", 2 * m * h * 2 * f, "GFLOP/s",
        k->gemm(x->team, false, false, m, h, 2 * f, 1, a[0], 2 * f, a[1], h, false, a[2], h));
    MEASURE(x, "gemm weight gradient qkv", 2 * m * h * qkv, "GFLOP/s",
        k->gemm(x->team, true, false, qkv, h, m, 1, a[0], qkv, a[1], h, true, a[2], h));
    MEASURE(x, "gemm head", 2 * m * h * v, "GFLOP/s",
        k->gemm(x->team, false, true, m, v, h, 1, a[0], h, a[1], h, false, a[2], v));
}

static void attention(bench *x) {
    const loom_kernels *k = x->kernels;
    const loom_attention_block *block = &x->block;
    int64_t d = x->m.d, group = (x->m.n / x->m.g + 2) * d, out_stride = x->m.n * d;
    float *q = x->arrays[0], *key = q + group - 2 * d, *value = q + group - d, *d_q = x->arrays[1];
    /* Products over the half of the square that the causal mask leaves: two forward, five backward. */
    double product = 2.0 * (double)(x->m.b * x->m.n * d) * (double)x->m.s * (double)(x->m.s + 1) / 2;
    MEASURE(x, "attention", 2 * product, "GFLOP/s",
        k->attention(x->team, block, q, key, value, x->arrays[2], out_stride, x->arrays[3]));
    MEASURE(x, "attention_block_backward", 5 * product, "GFLOP/s",
        k->attention_block_backward(x->team, block, q, key, value, x->arrays[4], out_stride, x->arrays[3], x->arrays[5],
            false, false, d_q, d_q + group - 2 * d, d_q + group - d));
    loom_attention_block drops = *block;
    drops.dropout = (loom_dropout){.probability = 0.1f, .seed = 1, .site = LOOM_DROPOUT_ATTENTION};
    drops.sample = x->tokens;
    MEASURE(x, "attention with dropout", 2 * product, "GFLOP/s",
        k->attention(x->team, &drops, q, key, value, x->arrays[2], out_stride, x->arrays[3]));
}

static void memory_bound(bench *x) {
    const loom_kernels *k = x->kernels;
    int64_t m = x->rows, h = x->m.h, f = x->m.f, v = x->m.v;
    double rh = 4.0 * (double)(m * h), rf = 4.0 * (double)(m * f), rv = 4.0 * (double)(m * v);
    float **a = x->arrays;
    loom_row_coordinates rows = {x->m.s, x->m.b, 0, x->tokens};
    loom_dropout none = {0}, some = {.probability = 0.1f, .seed = 1, .site = LOOM_DROPOUT_MLP};
    MEASURE(x, "rmsnorm", 2 * rh, "GB/s", k->rmsnorm(x->team, m, h, 1e-5f, a[0], a[1], a[2], a[3]));
    MEASURE(x, "rmsnorm_backward_input", 3 * rh, "GB/s",
        k->rmsnorm_backward_input(x->team, m, h, a[0], a[1], a[3], a[2], a[4]));
    MEASURE(x, "rmsnorm_backward_weight", 2 * rh, "GB/s",
        k->rmsnorm_backward_weight(x->team, m, h, a[0], a[3], a[2], false, a[4]));
    MEASURE(x, "layernorm", 2 * rh, "GB/s", k->layernorm(x->team, m, h, 1e-5f, a[0], a[1], a[1], a[2], a[3], a[4]));
    MEASURE(x, "bias_gradient", rh, "GB/s", k->bias_gradient(x->team, m, h, a[0], false, a[1]));
    MEASURE(x, "swiglu", 3 * rf, "GB/s", k->activation(x->team, LOOM_SWIGLU, m, f, a[0], NULL, a[1]));
    MEASURE(x, "swiglu backward", 5 * rf, "GB/s",
        k->activation_backward(x->team, LOOM_SWIGLU, m, f, a[0], NULL, a[1], a[2]));
    MEASURE(x, "gelu_tanh", 2 * rf, "GB/s", k->activation(x->team, LOOM_GELU_TANH, m, f, a[0], a[3], a[1]));
    MEASURE(x, "gelu_erf", 2 * rf, "GB/s", k->activation(x->team, LOOM_GELU_ERF, m, f, a[0], a[3], a[1]));
    MEASURE(x, "gelu_erf backward", 3 * rf, "GB/s",
        k->activation_backward(x->team, LOOM_GELU_ERF, m, f, a[0], a[3], a[1], a[2]));
    MEASURE(x, "bias_dropout_add p=0", 3 * rh, "GB/s",
        k->bias_dropout_add(x->team, &rows, h, &none, a[0], NULL, a[1], a[2]));
    MEASURE(x, "bias_dropout_add p=0.1", 3 * rh, "GB/s",
        k->bias_dropout_add(x->team, &rows, h, &some, a[0], NULL, a[1], a[2]));
    double rope = 8.0 * (double)(m * (x->m.n + x->m.g) * x->m.d);
    int64_t per_group = x->m.n / x->m.g;
    MEASURE(x, "rope", rope, "GB/s",
        k->rope(x->team, x->m.s, x->m.b, x->qkv, x->m.g, per_group + 1, (per_group + 2) * x->m.d, x->m.d, x->m.d, a[3],
            a[4], NULL, 0, false, a[0]));
    MEASURE(x, "embedding", 2 * rh, "GB/s", k->embedding(x->team, m, h, x->tokens, 0, 256, a[0], a[1]));
    MEASURE(x, "embedding_backward", 3 * rh, "GB/s",
        k->embedding_backward(x->team, m, h, x->tokens, 0, 256, a[0], true, a[1]));
    MEASURE(x, "cross_entropy_local", rv, "GB/s",
        k->cross_entropy_local(x->team, m, v, v - 7, a[0], x->tokens, 0, a[1], a[2], a[3]));
    MEASURE(x, "cross_entropy_backward", 2 * rv, "GB/s",
        k->cross_entropy_backward(x->team, m, v, v - 7, a[0], x->tokens, 0, a[1], a[2], a[3]));
    int64_t weights = 8 * h * h;
    MEASURE(x, "adamw", 28.0 * (double)weights, "GB/s",
        k->adamw(x->team, weights, &x->adamw, a[0], a[1], a[2], a[3], NULL));
    loom_exact_sum sum = {0};
    MEASURE(x, "exact_sum", 4.0 * (double)weights, "GB/s", k->exact_sum(x->team, 2, weights, a[6], &sum));
    MEASURE(x, "has_nonfinite", 4.0 * (double)weights, "GB/s", (void)k->has_nonfinite(x->team, weights, a[6]));
}

static void run_model(bench *x) {
    model m = x->m;
    x->rows = m.s * m.b;
    x->qkv = (m.n + 2 * m.g) * m.d;
    int64_t per_group = m.n / m.g, widest = m.v;
    widest = widest < 2 * m.f ? 2 * m.f : widest;
    widest = widest < x->qkv ? x->qkv : widest;
    size_t count = (size_t)(x->rows * widest);
    if (count < (size_t)(8 * m.h * m.h))
        count = (size_t)(8 * m.h * m.h);
    for (int i = 0; i < 8; i++) {
        x->arrays[i] = malloc(count * sizeof(float));
        if (!x->arrays[i])
            exit(1);
        uint32_t state = 12345u + (uint32_t)i;
        for (size_t e = 0; e < count; e++) {
            state = state * 1664525u + 1013904223u;
            x->arrays[i][e] = (float)(state >> 8) * 0x1p-24f + 0.01f;
        }
    }
    x->tokens = malloc((size_t)x->rows * sizeof(int64_t));
    if (!x->tokens)
        exit(1);
    for (int64_t i = 0; i < x->rows; i++)
        x->tokens[i] = i * 7919 % 256;
    x->block = (loom_attention_block){.b = m.b,
        .n = m.n,
        .g = m.g,
        .d = m.d,
        .s_q = m.s,
        .s_kv = m.s,
        .q_stride = x->qkv,
        .k_stride = x->qkv,
        .v_stride = x->qkv,
        .q_group_stride = (per_group + 2) * m.d,
        .kv_group_stride = (per_group + 2) * m.d,
        .scale = 0.1f,
        .causal = true};
    x->adamw = (loom_adamw){.lr = 1e-4,
        .weight_decay = 0.1,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .eps = 1e-8,
        .bias_correction1 = 0.1,
        .bias_correction2 = 0.05,
        .grad_scale = 1};
    products(x);
    attention(x);
    memory_bound(x);
    for (int i = 0; i < 8; i++)
        free(x->arrays[i]);
    free(x->tokens);
}

int main(int argc, char **argv) {
    static const model models[] = {
        {"small", 256, 8, 256, 704, 8, 4, 32, 384},
        {"large", 512, 4, 1024, 2816, 16, 8, 64, 32000},
    };
    bench x = {.kernels = loom_kernels_fast(), .first = true};
    int threads = 1;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) {
            x.json = true;
        } else if (strcmp(argv[i], "--table") == 0 && i + 1 < argc) {
            x.kernels = loom_kernels_find(argv[++i]);
        } else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc) {
            threads = atoi(argv[++i]);
        } else {
            fprintf(stderr, "usage: bench_kernels [--json] [--table NAME] [--threads N]\n");
            return 2;
        }
    }
    if (!x.kernels) {
        fprintf(stderr, "no such table on this machine\n");
        return 2;
    }
    if (loom__team_create(threads, NULL, &x.team) != LOOM_OK) {
        fprintf(stderr, "%s\n", loom_error_message());
        return 1;
    }
    if (x.json)
        printf("[");
    else
        printf("table %s, threads %d\n", x.kernels->name, threads);
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        x.m = models[i];
        run_model(&x);
    }
    if (x.json)
        printf("\n]\n");
    loom__team_destroy(x.team);
    return 0;
}
