/* The plan's memory against the resident size of a process: peak less what is resident after the ranks were launched.
 *
 *   bench_plan RUN.yaml [FIELD=VALUE...]
 *
 * Trains a few steps on mock data and prints one line of JSON: bytes found and planned, over all ranks. Linux alone:
 * sizes are read from /proc/self/status. */
#include <inttypes.h>
#include <megaloom/megaloom.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 2, SAMPLES = 4096 };

typedef struct work {
    const loom_run_config *config;
    double launched; /* bytes resident when all ranks were there */
} work;

/* "VmHWM:   1234 kB" */
static double status_bytes(const char *field) {
    char line[256];
    double kilobytes = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, field, strlen(field)) == 0)
            kilobytes = strtod(line + strlen(field) + 1, NULL);
    if (file)
        fclose(file);
    return 1024 * kilobytes;
}

static loom_status train_steps(const loom_run_config *config, loom_fabric *fabric, loom_parallel *parallel,
    loom_optimizer *optimizer, loom_dataset *dataset) {
    loom_batches *batches = NULL;
    loom_dataloader loader = {.dataset = dataset,
        .mode = LOOM_TRAINING,
        .micro_batch_size = config->data.micro_batch_size,
        .global_batch_size = config->data.global_batch_size};
    loom_status status = loom_fabric_setup_dataloader(fabric, &loader, &batches);
    for (int step = 0; step < STEPS && !status; step++) {
        double loss;
        loom_optimizer_outcome outcome;
        status = loom_parallel_training_step(parallel, batches, &loss);
        if (!status)
            status = loom_optimizer_step(optimizer, &outcome);
    }
    loom_batches_destroy(batches);
    return status;
}

static loom_status train(loom_rank *rank, void *argument) {
    work *w = argument;
    const loom_run_config *config = w->config;
    loom_fabric *fabric = NULL;
    loom_module *module = NULL;
    loom_parallel *parallel = NULL;
    loom_optimizer *optimizer = NULL;
    loom_dataset dataset = {0};
    LOOM_TRY(loom_fabric_create(rank, &config->strategy, &config->precision, &fabric));
    LOOM_TRY(loom_fabric_launch(fabric));
    LOOM_TRY(loom_barrier(loom_rank_world(rank)));
    if (loom_rank_index(rank) == 0)
        w->launched = status_bytes("VmRSS:");
    LOOM_TRY(loom_barrier(loom_rank_world(rank)));
    LOOM_TRY(loom_gpt_create(fabric, &config->model.config, &module));
    loom_status status = loom_fabric_setup_module(fabric, module, &parallel);
    if (!status)
        status = loom_fabric_setup_megatron_optimizer(fabric, parallel, &config->optim, NULL, &optimizer);
    if (!status)
        status = loom_mock_dataset_create(
            config->model.config.seq_length, config->model.config.vocab_size, 3, SAMPLES, &dataset);
    if (!status)
        status = train_steps(config, fabric, parallel, optimizer, &dataset);
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    loom_dataset_destroy(&dataset);
    return status;
}

static double planned_bytes(const loom_plan *plan) {
    double sum = 0;
    for (int64_t stage = 0; stage < plan->stage_count; stage++)
        sum += plan->stages[stage].memory.total * (double)(plan->world / plan->stage_count);
    double setup = plan->memory_setup * (double)plan->world;
    return sum > setup ? sum : setup;
}

static loom_status run(int argc, char **argv) {
    const bool file = !strchr(argv[1], '=');
    const loom_plan_check check = {.world_size = 0};
    const loom_plan_options options = loom_plan_options_default();
    loom_run_options run_options = loom_run_options_default();
    loom_run_config *config = NULL;
    loom_plan *plan = NULL;
    char *not_built = NULL;
    LOOM_TRY(loom_run_config_load_planned(
        file ? argv[1] : NULL, (const char *const *)argv + 1 + file, argc - 1 - file, &check, &config, &not_built));
    LOOM_TRY(loom_plan_make(config, &options, &plan));
    work w = {.config = config};
    run_options.threads = 1;
    loom_status status = loom_run_local((int)config->ranks, train, &w, &run_options);
    if (!status) {
        double found = status_bytes("VmHWM:") - w.launched, planned = planned_bytes(plan);
        printf("{\"ranks\": %" PRId64 ", \"found\": %.0f, \"planned\": %.0f, \"found_a_rank\": %.0f, \"off\": %.4f}\n",
            plan->world, found, planned, found / (double)plan->world, planned / found - 1);
    }
    loom_plan_destroy(plan);
    free(not_built);
    loom_run_config_destroy(config);
    return status;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: bench_plan [RUN.yaml] [FIELD=VALUE...]\n");
        return 2;
    }
    loom_status status = run(argc, argv);
    if (status)
        fprintf(stderr, "bench_plan: %s\n", loom_error_message());
    return status ? 1 : 0;
}
