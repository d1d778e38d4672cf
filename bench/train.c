/* The speed of training, measured as a user would train: one model, some steps on mock data, one line of JSON.
 *
 *     bench_train MODEL RANKS STEPS      MODEL: small (6 layers of 384), gpt2 (124M); RANKS: 1 of two threads, or 2 of
 *                                        one thread each with tensor and sequence parallelism
 *
 * bench/run-train repeats it and makes a table. The first two steps warm up and are left out; a step's time is the
 * median of the others. The yardstick is taken in the same process when the training is over, so that it adds nothing
 * to the peak of memory. Processor time is noted beside the clock's, since it tells more on a machine that others use.
 */
#include "measure.h"
#include <megaloom/megaloom.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WARM_UP = 2, MOST_STEPS = 1000, YARDSTICKS = 3 };

typedef struct bench {
    const char *name;
    loom_model_config model;
    int64_t microbatch;
    int ranks;
    int64_t steps;
} bench;

/* All that a rank makes. */
typedef struct run {
    loom_fabric *fabric;
    loom_parallel *model;
    loom_batches *batches;
    loom_optimizer *optimizer; /* belongs to the model */
    loom_dataset dataset;
} run;

typedef struct figures {
    double seconds, processor_seconds; /* of a step */
    double loss;
    double gemm_rate, gemm_processor_rate; /* FLOP/s of the clock; FLOP a second of one processor */
    double memory;                         /* bytes of all ranks: blocks of the allocator, parameters and their state */
} figures;

static bool choose_model(bench *b, const char *name) {
    loom_model_config *model = &b->model;
    *model = loom_model_config_default("gpt2");
    model->seq_length = 256;
    model->hidden_dropout = 0;
    model->attention_dropout = 0;
    b->name = name;
    if (strcmp(name, "small") == 0) {
        model->num_layers = 6;
        model->hidden_size = 384;
        model->num_attention_heads = 6;
        model->vocab_size = 8192;
        b->microbatch = 8;
        return true;
    }
    model->num_layers = 12;
    model->hidden_size = 768;
    model->num_attention_heads = 12;
    model->vocab_size = 50257;
    model->max_position_embeddings = 1024;
    b->microbatch = 4;
    return strcmp(name, "gpt2") == 0;
}

static loom_status set_up(loom_rank *rank, const bench *b, run *r) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    strategy.tensor_model_parallel_size = b->ranks;
    strategy.sequence_parallel = b->ranks > 1;
    loom_optimizer_config optimizer = loom_optimizer_config_default();
    optimizer.lr = 1e-4;
    optimizer.clip_grad = 1.0;
    loom_optimizer_setup schedule = {.schedule = loom_lr_config_default(), .steps = b->steps};
    loom_module *module;
    LOOM_TRY(loom_fabric_create(rank, &strategy, NULL, &r->fabric));
    LOOM_TRY(loom_fabric_launch(r->fabric));
    LOOM_TRY(loom_gpt_create(r->fabric, &b->model, &module));
    LOOM_TRY(loom_fabric_setup_module(r->fabric, module, &r->model));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(r->fabric, r->model, &optimizer, &schedule, &r->optimizer));
    LOOM_TRY(
        loom_mock_dataset_create(b->model.seq_length, b->model.vocab_size, 1, b->steps * b->microbatch, &r->dataset));
    loom_dataloader loader = {
        .dataset = &r->dataset, .micro_batch_size = b->microbatch, .global_batch_size = b->microbatch};
    return loom_fabric_setup_dataloader(r->fabric, &loader, &r->batches);
}

static loom_status train_steps(loom_rank *rank, const bench *b, const run *r, figures *f) {
    double seconds[MOST_STEPS], processor[MOST_STEPS];
    for (int64_t step = 0; step < b->steps; step++) {
        LOOM_TRY(loom_barrier(loom_rank_world(rank)));
        double start = seconds_of(CLOCK_MONOTONIC), start_processor = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
        LOOM_TRY(loom_parallel_training_step(r->model, r->batches, &f->loss));
        LOOM_TRY(loom_optimizer_step(r->optimizer, NULL));
        LOOM_TRY(loom_barrier(loom_rank_world(rank)));
        seconds[step] = seconds_of(CLOCK_MONOTONIC) - start;
        processor[step] = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - start_processor;
    }
    f->seconds = median(seconds + WARM_UP, b->steps - WARM_UP);
    f->processor_seconds = median(processor + WARM_UP, b->steps - WARM_UP);
    return LOOM_OK;
}

/* Blocks at their peak; weights, gradients and the two moments in fp32 beside them. */
static loom_status measure_memory(loom_rank *rank, const run *r, double *bytes) {
    loom_parameter *const *parameters;
    int64_t count;
    LOOM_TRY(loom_parallel_parameters(r->model, &parameters, &count));
    double mine = (double)loom_rank_memory(rank).high_water;
    for (int64_t i = 0; i < count; i++)
        mine += 4.0 * sizeof(float) * (double)loom_parameter_count(parameters[i]);
    return loom_all_reduce(loom_rank_world(rank), &mine, bytes, 1, LOOM_F64, LOOM_SUM);
}

/* The product of the yardstick once more, by processor time. */
static loom_status measure_processor_rate(loom_rank *rank, double *rate) {
    enum { SIZE = 2048 };
    size_t count = (size_t)SIZE * SIZE;
    float *a = calloc(2 * count, sizeof *a);
    LOOM_TRY(loom_agree(loom_rank_world(rank), a ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory")));
    for (int i = 0; i < YARDSTICKS + 1; i++) {
        loom_status status = loom_barrier(loom_rank_world(rank));
        double start = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
        if (!status)
            loom_rank_kernels(rank)->gemm(
                loom_rank_team(rank), false, false, SIZE, SIZE, SIZE, 1, a, SIZE, a, SIZE, false, a + count, SIZE);
        if (!status)
            status = loom_barrier(loom_rank_world(rank));
        double each = 2.0 * SIZE * SIZE * SIZE * loom_rank_count(rank) / (seconds_of(CLOCK_PROCESS_CPUTIME_ID) - start);
        *rate = each > *rate ? each : *rate;
        if (status) {
            free(a);
            return status;
        }
    }
    free(a);
    return LOOM_OK;
}

/* VmHWM of /proc/self/status: the most memory that this process has had, in bytes; 0 where the system does not say. */
static double peak_of_process(void) {
    char line[256];
    double kilobytes = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "VmHWM: %lf kB", &kilobytes) == 1)
            break;
    if (file)
        fclose(file);
    return kilobytes * 1024;
}

static loom_status measure(loom_rank *rank, const bench *b, run *r) {
    figures f = {0};
    LOOM_TRY(set_up(rank, b, r));
    LOOM_TRY(train_steps(rank, b, r, &f));
    LOOM_TRY(measure_memory(rank, r, &f.memory));
    double peak = peak_of_process();
    for (int i = 0; i < YARDSTICKS; i++) {
        double rate;
        LOOM_TRY(loom_measure_gemm_rate(rank, loom_rank_world(rank), &rate));
        f.gemm_rate = rate > f.gemm_rate ? rate : f.gemm_rate;
    }
    LOOM_TRY(measure_processor_rate(rank, &f.gemm_processor_rate));
    if (loom_rank_index(rank) != 0)
        return LOOM_OK;
    double tokens = (double)(b->microbatch * b->model.seq_length);
    double flops = tokens * loom_model_flops_per_token(loom_parallel_model_config(r->model));
    printf("{\"program\": \"megaloom\", \"model\": \"%s\", \"ranks\": %d, \"threads\": %d, \"steps\": %lld, "
           "\"loss\": %.6f, \"step_seconds\": %.5f, \"tokens_per_second\": %.1f, \"processor_seconds\": %.5f, "
           "\"flops_per_token\": %.0f, \"gemm_rate\": %.4g, \"gemm_share\": %.4f, \"processor_gemm_share\": %.4f, "
           "\"memory_bytes\": %.0f, \"process_peak_bytes\": %.0f}\n",
        b->name, b->ranks, loom_team_size(loom_rank_team(rank)), (long long)b->steps, f.loss, f.seconds,
        tokens / f.seconds, f.processor_seconds, flops / tokens, f.gemm_rate, flops / f.seconds / f.gemm_rate,
        flops / f.processor_seconds / f.gemm_processor_rate, f.memory, peak);
    return LOOM_OK;
}

static loom_status train(loom_rank *rank, void *argument) {
    run r = {0};
    loom_status status = measure(rank, argument, &r);
    loom_batches_destroy(r.batches);
    loom_parallel_destroy(r.model);
    loom_dataset_destroy(&r.dataset);
    loom_fabric_destroy(r.fabric);
    return status;
}

int main(int argc, char **argv) {
    bench b = {.ranks = argc > 2 ? atoi(argv[2]) : 0, .steps = argc > 3 ? atoll(argv[3]) : 0};
    if (argc != 4 || !choose_model(&b, argv[1]) || (b.ranks != 1 && b.ranks != 2) || b.steps <= WARM_UP ||
        b.steps > MOST_STEPS) {
        fprintf(stderr, "usage: bench_train small|gpt2 1|2 STEPS    (STEPS: %d to %d)\n", WARM_UP + 1, MOST_STEPS);
        return 2;
    }
    loom_run_options options = loom_run_options_default();
    options.threads = b.ranks == 1 ? 2 : 1;
    loom_status status = loom_run_local(b.ranks, train, &b, &options);
    if (status)
        fprintf(stderr, "bench_train: %s\n", loom_error_message());
    return status ? EXIT_FAILURE : EXIT_SUCCESS;
}
