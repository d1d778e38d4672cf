/* A small GPT on a strategy, for tests that need a whole model. */
#ifndef TESTS_PARALLEL_SMALL_MODEL_H
#define TESTS_PARALLEL_SMALL_MODEL_H

#include <megaloom/megaloom.h>

enum { SMALL_SEQUENCE = 8, SMALL_VOCABULARY = 19 };

static inline loom_model_config small_config(void) {
    loom_model_config config = loom_model_config_default("gpt2");
    config.num_layers = 2;
    config.hidden_size = 16;
    config.ffn_hidden_size = 32;
    config.num_attention_heads = 4;
    config.num_query_groups = 4;
    config.seq_length = SMALL_SEQUENCE;
    config.vocab_size = SMALL_VOCABULARY;
    config.make_vocab_size_divisible_by = 4;
    config.hidden_dropout = config.attention_dropout = 0;
    return config;
}

/* All parts of a run; destroy also after an error. */
typedef struct small_run {
    loom_fabric *fabric;
    loom_parallel *parallel;
    loom_optimizer *optimizer;
    loom_dataset dataset;
    loom_batches *batches;
} small_run;

static inline void small_destroy(small_run *run) {
    loom_batches_destroy(run->batches);
    loom_parallel_destroy(run->parallel);
    loom_fabric_destroy(run->fabric);
    loom_dataset_destroy(&run->dataset);
    *run = (small_run){0};
}

static inline loom_status small_model(small_run *run) {
    loom_model_config config = small_config();
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_module *module;
    optim.lr = 0.01;
    LOOM_TRY(loom_gpt_create(run->fabric, &config, &module));
    LOOM_TRY(loom_fabric_setup_module(run->fabric, module, &run->parallel));
    return loom_fabric_setup_megatron_optimizer(run->fabric, run->parallel, &optim, NULL, &run->optimizer);
}

static inline loom_status small_data(
    small_run *run, loom_step_mode mode, int64_t samples, int64_t micro, int64_t global) {
    loom_batches_destroy(run->batches);
    loom_dataset_destroy(&run->dataset);
    run->batches = NULL;
    LOOM_TRY(loom_mock_dataset_create(SMALL_SEQUENCE, SMALL_VOCABULARY, 3, samples, &run->dataset));
    loom_dataloader loader = {
        .dataset = &run->dataset, .mode = mode, .micro_batch_size = micro, .global_batch_size = global};
    return loom_fabric_setup_dataloader(run->fabric, &loader, &run->batches);
}

static inline loom_status small_start(loom_rank *rank, const loom_megatron_strategy_config *config, small_run *run) {
    *run = (small_run){0};
    LOOM_TRY(loom_fabric_create(rank, config, NULL, &run->fabric));
    LOOM_TRY(loom_fabric_launch(run->fabric));
    LOOM_TRY(small_model(run));
    return small_data(run, LOOM_TRAINING, 64, 2, 0);
}

#endif
