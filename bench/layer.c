/* The forward and backward of transformer layers in fp32, bf16 and fp16, taking turns in one process.
 *
 *     bench_layer [--table NAME] [--threads N] [--rounds N] [--model gpt2|llama] [--tokens N]
 *
 * Each round runs every dtype once; a figure is the median over the rounds, by the clock and by processor time, which
 * tells more on a machine that others use. `kept` is what the rank's allocator has in use between forward and backward:
 * the activations. --table avx2 takes the products of widened panels, --table avx512 those of the processor, where it
 * multiplies bf16. */
#include "nn/layer.h"
#include "measure.h"
#include "tensor/dtype.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DTYPES = 3, MOST_ROUNDS = 100, LAYERS = 2 };

static const loom_dtype dtypes[DTYPES] = {LOOM_F32, LOOM_BF16, LOOM_F16};

typedef struct bench {
    loom_model_config config;
    int64_t rounds;
    double clock[DTYPES][MOST_ROUNDS], processor[DTYPES][MOST_ROUNDS];
    size_t kept[DTYPES];
} bench;

typedef struct stack {
    loom__model_spec *spec;
    loom__part *part;
    loom__parameter_set *set;
    loom__layer layers[LAYERS];
    float *cosine, *sine;
} stack;

static loom_status allocate(size_t bytes, void *memory) {
    void *made = malloc(bytes + 1);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %zu bytes", bytes);
    memcpy(memory, &made, sizeof made);
    return LOOM_OK;
}

static loom_status stack_make(const loom_model_config *config, loom_dtype dtype, stack *m) {
    int64_t half = config->kv_channels / 2, positions = config->seq_length;
    *m = (stack){0};
    LOOM_TRY(loom__model_spec_create(config, &m->spec));
    LOOM_TRY(loom__part_create(m->spec, 1, NULL, 0, &m->part));
    LOOM_TRY(loom__parameter_set_create(m->spec, m->part, &(loom__tensor_place){.tp = 1}, &m->set));
    LOOM_TRY(loom__parameter_set_initialize(m->set, 1));
    for (int64_t i = 0; i < m->set->count; i++) {
        loom_parameter *parameter = &m->set->parameters[i];
        size_t count = (size_t)loom_parameter_count(parameter);
        LOOM_TRY(allocate(count * sizeof(float), &parameter->grad));
        uint16_t *to = NULL;
        if (dtype != LOOM_F32) {
            LOOM_TRY(allocate(count * sizeof *to, &to));
            loom__parameter_narrow(parameter, dtype, to);
        }
    }
    for (int64_t i = 0; i < LAYERS; i++)
        LOOM_TRY(loom__layer_bind(m->set, config, i, &m->layers[i]));
    LOOM_TRY(allocate((size_t)(positions * half) * sizeof(float), &m->cosine));
    LOOM_TRY(allocate((size_t)(positions * half) * sizeof(float), &m->sine));
    for (int64_t i = 0; i < positions * half; i++) {
        double angle = (double)(i / half) * pow(10000, -(double)(i % half) / (double)half);
        m->cosine[i] = (float)cos(angle);
        m->sine[i] = (float)sin(angle);
    }
    return LOOM_OK;
}

static void stack_free(stack *m) {
    for (int64_t i = 0; i < LAYERS; i++)
        loom__layer_unbind(&m->layers[i]);
    for (int64_t i = 0; m->set && i < m->set->count; i++) {
        free(m->set->parameters[i].grad);
        free(m->set->parameters[i].data16);
    }
    loom__parameter_set_destroy(m->set);
    loom__part_destroy(m->part);
    loom__model_spec_destroy(m->spec);
    free(m->cosine);
    free(m->sine);
}

static loom_status make_tensor(loom_rank *rank, loom_dtype dtype, const loom_model_config *config, loom_tensor **x) {
    LOOM_TRY(loom_tensor_create(rank, dtype, 3, (int64_t[]){config->seq_length, 1, config->hidden_size}, x));
    uint32_t state = 1;
    for (int64_t i = 0; i < loom_tensor_count(*x); i++) {
        state = state * 1664525u + 1013904223u;
        float value = (float)(state >> 8) * 0x1p-23f - 1.0f;
        if (dtype == LOOM_F32)
            loom_tensor_f32(*x)[i] = value;
        else
            ((uint16_t *)(*x)->data)[i] = dtype == LOOM_BF16 ? loom_f32_to_bf16(value) : loom_f32_to_f16(value);
    }
    return LOOM_OK;
}

static loom_status step(loom_rank *rank, const bench *b, const stack *m, loom_dtype dtype, size_t *kept) {
    static const int64_t sample[1] = {0};
    loom__microbatch microbatch = {.references = 1,
        .tp = loom_rank_world(rank),
        .training = true,
        .b = 1,
        .s = b->config.seq_length,
        .sample = sample,
        .rope = {b->config.seq_length, b->config.kv_channels, m->cosine, m->sine}};
    loom_tape *tape;
    loom_tensor *x, *d, *next;
    LOOM_TRY(make_tensor(rank, dtype, &b->config, &x));
    LOOM_TRY(make_tensor(rank, dtype, &b->config, &d));
    LOOM_TRY(loom_tape_create(rank, &(loom_tape_options){.record = true}, &tape));
    LOOM_TRY(loom_tape_leaf(tape, x));
    for (int64_t i = 0; i < LAYERS; i++) {
        LOOM_TRY(loom__layer_forward(&m->layers[i], tape, &microbatch, x, &next));
        loom_tensor_release(x);
        x = next;
    }
    *kept = loom_rank_memory(rank).in_use;
    LOOM_TRY(loom_tape_backward(tape, x, d));
    loom_tensor_release(x);
    loom_tensor_release(d);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static loom_status measure(loom_rank *rank, void *argument) {
    bench *b = argument;
    stack models[DTYPES];
    LOOM_TRY(loom__model_config_complete(&b->config, 1, false));
    for (int i = 0; i < DTYPES; i++) {
        LOOM_TRY(stack_make(&b->config, dtypes[i], &models[i]));
        LOOM_TRY(step(rank, b, &models[i], dtypes[i], &b->kept[i]));
    }
    for (int64_t round = 0; round < b->rounds; round++)
        for (int i = 0; i < DTYPES; i++) {
            double clock = seconds_of(CLOCK_MONOTONIC), processor = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
            LOOM_TRY(step(rank, b, &models[i], dtypes[i], &b->kept[i]));
            b->clock[i][round] = seconds_of(CLOCK_MONOTONIC) - clock;
            b->processor[i][round] = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - processor;
        }
    for (int i = 0; i < DTYPES; i++)
        stack_free(&models[i]);
    return LOOM_OK;
}

static loom_model_config config_of(const char *model, int64_t tokens) {
    bool llama = strcmp(model, "llama") == 0;
    return (loom_model_config){.architecture = llama ? "llama" : "gpt2",
        .num_layers = LAYERS,
        .hidden_size = 768,
        .ffn_hidden_size = llama ? 2048 : 3072,
        .num_attention_heads = 12,
        .num_query_groups = llama ? 4 : 12,
        .seq_length = tokens,
        .max_position_embeddings = tokens,
        .vocab_size = 128,
        .make_vocab_size_divisible_by = 1,
        .normalization = llama ? LOOM_RMSNORM : LOOM_LAYERNORM,
        .layernorm_epsilon = 1e-5,
        .activation = llama ? LOOM_SWIGLU : LOOM_GELU_TANH,
        .position_embedding_type = llama ? LOOM_POSITION_ROPE : LOOM_POSITION_LEARNED,
        .rotary_base = 10000,
        .rotary_percent = 1,
        .add_bias_linear = !llama,
        .add_qkv_bias = !llama,
        .share_embeddings_and_output_weights = !llama,
        .init_method_std = 0.02};
}

static int usage(void) {
    fprintf(stderr,
        "usage: bench_layer [--table NAME] [--threads N] [--rounds N, at most %d] [--model gpt2|llama] "
        "[--tokens N]\n",
        MOST_ROUNDS);
    return 2;
}

int main(int argc, char **argv) {
    bench *b = calloc(1, sizeof *b);
    const char *model = "gpt2";
    int64_t tokens = 1024;
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.kernels = loom_kernels_fast();
    if (!b)
        return 1;
    b->rounds = 9;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc)
            return usage();
        if (strcmp(argv[i], "--table") == 0)
            options.kernels = loom_kernels_find(argv[i + 1]);
        else if (strcmp(argv[i], "--threads") == 0)
            options.threads = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--rounds") == 0)
            b->rounds = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--model") == 0)
            model = argv[i + 1];
        else if (strcmp(argv[i], "--tokens") == 0)
            tokens = atoi(argv[i + 1]);
        else
            return usage();
    }
    if (!options.kernels || b->rounds < 1 || b->rounds > MOST_ROUNDS || tokens < 1)
        return usage();
    b->config = config_of(model, tokens);
    if (loom_run_local(1, measure, b, &options)) {
        fprintf(stderr, "%s\n", loom_error_message());
        return 1;
    }
    printf("%d layers of %s, %lld tokens, kernels %s, %d thread(s), %lld rounds\n", LAYERS, model, (long long)tokens,
        options.kernels->name, options.threads, (long long)b->rounds);
    double clock = median(b->clock[0], b->rounds), processor = median(b->processor[0], b->rounds);
    for (int i = 0; i < DTYPES; i++) {
        double mine = median(b->clock[i], b->rounds), cpu = median(b->processor[i], b->rounds);
        printf("%-5s %8.1f ms (%.2f of fp32's speed) %8.1f CPU ms (%.2f) %8.1f MB kept (%.3f)\n",
            loom_dtype_name(dtypes[i]), mine * 1e3, clock / mine, cpu * 1e3, processor / cpu, (double)b->kept[i] / 1e6,
            (double)b->kept[i] / (double)b->kept[0]);
    }
    free(b);
    return 0;
}
