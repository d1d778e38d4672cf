/* Megatron-style training inside your own loop: a small Llama on two ranks (threads of this process) that share every
 * layer by tensor and sequence parallelism, fed by a dataset of our own.
 *
 *     own_loop [RANKS]          RANKS: 1, 2 (default) or 4
 *
 * Every rank runs `train`; whatever it calls, the other ranks call as well. An error is a status and a message, and
 * loom_run_local says which rank had it. */
#include <megaloom/megaloom.h>
#include <stdio.h>
#include <stdlib.h>

enum { STEPS = 20, SEQUENCE = 32, VOCABULARY = 64 };

/* Our data: sample i counts upwards from i*7 in steps of i mod 3 + 1. A label is the next token. */
static loom_status count_upwards(void *context, int64_t index, const loom_sample_row *row) {
    (void)context;
    for (int64_t t = 0; t < SEQUENCE; t++) {
        row->tokens[t] = index < 0 ? 0 : (index * 7 + t * (index % 3 + 1)) % VOCABULARY;
        row->labels[t] = index < 0 ? 0 : (index * 7 + (t + 1) * (index % 3 + 1)) % VOCABULARY;
        row->loss_mask[t] = index < 0 ? 0.0f : 1.0f; /* a negative index asks for a row that does not count */
        row->position_ids[t] = t;
    }
    return LOOM_OK;
}

/* All that a rank makes, so that it can be freed in one place. */
typedef struct run {
    loom_fabric *fabric;
    loom_parallel *model;
    loom_batches *batches;
    loom_optimizer *optimizer; /* belongs to the model */
} run;

static loom_status set_up(loom_rank *rank, const loom_dataset *dataset, run *r) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    strategy.tensor_model_parallel_size = loom_rank_count(rank) > 1 ? 2 : 1;
    strategy.sequence_parallel = loom_rank_count(rank) > 1; /* ranks beyond two are data parallel */

    loom_model_config model = loom_model_config_default("llama");
    model.num_layers = 2;
    model.hidden_size = 64;
    model.ffn_hidden_size = 176;
    model.num_attention_heads = 4;
    model.num_query_groups = 2;
    model.seq_length = SEQUENCE;
    model.vocab_size = VOCABULARY;

    loom_optimizer_config optimizer = loom_optimizer_config_default();
    optimizer.lr = 3e-3;
    loom_optimizer_setup schedule = {.schedule = loom_lr_config_default(), .steps = STEPS};
    schedule.schedule.schedule = "cosine";
    schedule.schedule.warmup_steps = 2;

    /* 8 samples a step, of which each data-parallel rank takes its part in microbatches of 2. */
    loom_dataloader loader = {.dataset = dataset, .micro_batch_size = 2, .global_batch_size = 8};

    loom_module *module;
    LOOM_TRY(loom_fabric_create(rank, &strategy, NULL, &r->fabric));  /* names every fault of the configuration */
    LOOM_TRY(loom_fabric_launch(r->fabric));                          /* groups of ranks */
    LOOM_TRY(loom_gpt_create(r->fabric, &model, &module));            /* shapes only */
    LOOM_TRY(loom_fabric_setup_module(r->fabric, module, &r->model)); /* weights, gradient buffers */
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(r->fabric, r->model, &optimizer, &schedule, &r->optimizer));
    return loom_fabric_setup_dataloader(r->fabric, &loader, &r->batches);
}

static loom_status loop(loom_rank *rank, const run *r, double losses[STEPS]) {
    for (int step = 0; step < STEPS; step++) {
        loom_optimizer_outcome outcome;
        LOOM_TRY(loom_parallel_training_step(r->model, r->batches, &losses[step])); /* forward, backward, reduction */
        LOOM_TRY(loom_optimizer_step(r->optimizer, &outcome));
        if (loom_rank_index(rank) == 0)
            printf("step %2d  loss %.4f  gradient norm %.3f  rate %.2e\n", step + 1, losses[step], outcome.grad_norm,
                outcome.lr);
    }
    return LOOM_OK;
}

static loom_status train(loom_rank *rank, void *argument) {
    loom_dataset dataset = {.length = STEPS * 8, .sequence_length = SEQUENCE, .get = count_upwards};
    double losses[STEPS];
    run r = {0};
    (void)argument;
    loom_status status = set_up(rank, &dataset, &r);
    if (!status)
        status = loop(rank, &r, losses);
    loom_batches_destroy(r.batches);
    loom_parallel_destroy(r.model);
    loom_fabric_destroy(r.fabric);
    if (!status && !(losses[STEPS - 1] < losses[0]))
        status = loom_fail(LOOM_ERR_NUMERIC, "the loss went from %g to %g", losses[0], losses[STEPS - 1]);
    return status;
}

int main(int argc, char **argv) {
    int ranks = argc > 1 ? atoi(argv[1]) : 2;
    loom_status status = loom_run_local(ranks, train, NULL, NULL);
    if (status)
        fprintf(stderr, "own_loop: %s\n", loom_error_message());
    return status ? EXIT_FAILURE : EXIT_SUCCESS;
}
