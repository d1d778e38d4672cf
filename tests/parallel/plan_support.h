/* A run of a plan's configuration: a few steps on mock data, looked at from within. */
#ifndef TESTS_PARALLEL_PLAN_SUPPORT_H
#define TESTS_PARALLEL_PLAN_SUPPORT_H

#include "parallel/support.h"
#include <megaloom/plan.h>
#include <stdlib.h>

enum { PLANNED_STEPS = 2, PLANNED_FIELDS = 16, PLANNED_FIELDS_MAX = 48 };

typedef struct planned_case {
    const char *name;
    const char *fields[PLANNED_FIELDS];
} planned_case;

typedef struct planned_run planned_run;
struct planned_run {
    const char *name;
    loom_run_config *config;
    loom_plan *plan;
    void *context;
    /* Either may be NULL. prepare: before the last step; inspect: behind it. */
    loom_status (*prepare)(planned_run *run, loom_rank *rank, loom_parallel *parallel);
    loom_status (*inspect)(planned_run *run, loom_rank *rank, loom_parallel *parallel, loom_optimizer *optimizer);
};

static inline loom_status train_planned(loom_rank *rank, void *argument) {
    planned_run *run = argument;
    const loom_run_config *config = run->config;
    loom_fabric *fabric = NULL;
    loom_module *module = NULL;
    loom_parallel *parallel = NULL;
    loom_optimizer *optimizer = NULL;
    loom_batches *batches = NULL;
    loom_dataset dataset = {0};
    LOOM_TRY(loom_fabric_create(rank, &config->strategy, &config->precision, &fabric));
    LOOM_TRY(loom_fabric_launch(fabric));
    LOOM_TRY(loom_gpt_create(fabric, &config->model.config, &module));
    LOOM_TRY(loom_fabric_setup_module(fabric, module, &parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(fabric, parallel, &config->optim, NULL, &optimizer));
    LOOM_TRY(
        loom_mock_dataset_create(config->model.config.seq_length, config->model.config.vocab_size, 3, 256, &dataset));
    loom_dataloader loader = {.dataset = &dataset,
        .mode = LOOM_TRAINING,
        .micro_batch_size = config->data.micro_batch_size,
        .global_batch_size = config->data.global_batch_size};
    LOOM_TRY(loom_fabric_setup_dataloader(fabric, &loader, &batches));
    for (int step = 0; step < PLANNED_STEPS; step++) {
        double loss;
        loom_optimizer_outcome outcome;
        if (step == PLANNED_STEPS - 1 && run->prepare)
            LOOM_TRY(run->prepare(run, rank, parallel));
        LOOM_TRY(loom_parallel_training_step(parallel, batches, &loss));
        LOOM_TRY(loom_optimizer_step(optimizer, &outcome));
    }
    loom_status status = run->inspect ? run->inspect(run, rank, parallel, optimizer) : LOOM_OK;
    loom_batches_destroy(batches);
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    loom_dataset_destroy(&dataset);
    return status;
}

/* Plans the common fields and those of the case, and trains so many ranks as they say. */
static inline void run_planned(const char *const *common, int64_t count, const planned_case *of, planned_run *run) {
    const char *fields[PLANNED_FIELDS_MAX];
    const loom_plan_check check = {0};
    const loom_plan_options options = loom_plan_options_default();
    char *not_built = NULL;
    run->name = of->name;
    for (int64_t i = 0; i < count; i++)
        fields[i] = common[i];
    for (int f = 0; f < PLANNED_FIELDS && of->fields[f]; f++)
        fields[count++] = of->fields[f];
    if (loom_run_config_load_planned(NULL, fields, count, &check, &run->config, &not_built))
        fail_msg("%s: %s", run->name, loom_error_message());
    assert_string_equal(not_built, "");
    free(not_built);
    if (loom_plan_make(run->config, &options, &run->plan))
        fail_msg("%s: %s", run->name, loom_error_message());
    must_run((int)run->config->ranks, train_planned, run);
}

static inline void forget_planned(planned_run *run) {
    loom_plan_destroy(run->plan);
    loom_run_config_destroy(run->config);
}

#endif
