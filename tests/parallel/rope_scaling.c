/* Linear scaling of rotary positions, for which there are no numbers of other programs here: a factor of two with every
 * position doubled is the plain model, to the bit (halving a frequency and doubling a position are exact in double). */
#include "parallel/small_model.h"
#include "parallel/support.h"
#include <math.h>

enum { STEPS = 3 };

typedef struct stretched {
    loom_dataset inner;
    int64_t factor;
} stretched;

static loom_status stretched_get(void *context, int64_t index, const loom_sample_row *row) {
    const stretched *data = context;
    LOOM_TRY(data->inner.get(data->inner.context, index, row));
    for (int64_t t = 0; t < SMALL_SEQUENCE; t++)
        row->position_ids[t] *= data->factor;
    return LOOM_OK;
}

typedef struct losses {
    loom_rope_scaling scaling;
    int64_t position_factor;
    double loss[STEPS];
} losses;

static loom_status train(loom_fabric *fabric, losses *to) {
    stretched data = {.factor = to->position_factor};
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_model_config config = loom_model_config_default("llama");
    loom_module *module;
    loom_parallel *parallel = NULL;
    loom_optimizer *optimizer;
    loom_batches *batches = NULL;
    config.num_layers = 2;
    config.hidden_size = 16;
    config.ffn_hidden_size = 32;
    config.num_attention_heads = 4;
    config.seq_length = SMALL_SEQUENCE;
    config.max_position_embeddings = 2 * SMALL_SEQUENCE;
    config.vocab_size = SMALL_VOCABULARY;
    config.init_method_std = 0.3; /* wide, so that positions matter */
    config.rope_scaling = to->scaling;
    config.rope_scaling_factor = 2;
    optim.lr = 0.01;
    LOOM_TRY(loom_mock_dataset_create(SMALL_SEQUENCE, SMALL_VOCABULARY, 3, 64, &data.inner));
    loom_dataset dataset = {.context = &data, .length = 64, .sequence_length = SMALL_SEQUENCE, .get = stretched_get};
    loom_dataloader loader = {.dataset = &dataset, .micro_batch_size = 2, .global_batch_size = 4};
    loom_status status = loom_gpt_create(fabric, &config, &module);
    if (!status)
        status = loom_fabric_setup_module(fabric, module, &parallel);
    if (!status)
        status = loom_fabric_setup_megatron_optimizer(fabric, parallel, &optim, NULL, &optimizer);
    if (!status)
        status = loom_fabric_setup_dataloader(fabric, &loader, &batches);
    for (int step = 0; !status && step < STEPS; step++) {
        loom_optimizer_outcome outcome;
        status = loom_parallel_training_step(parallel, batches, &to->loss[step]);
        if (!status)
            status = loom_optimizer_step(optimizer, &outcome);
    }
    loom_batches_destroy(batches);
    loom_parallel_destroy(parallel);
    loom_dataset_destroy(&data.inner);
    return status;
}

static loom_status on_rank(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    loom_fabric *fabric;
    LOOM_TRY(loom_fabric_create(rank, &strategy, NULL, &fabric));
    loom_status status = loom_fabric_launch(fabric);
    if (!status)
        status = train(fabric, argument);
    loom_fabric_destroy(fabric);
    return status;
}

static void a_linear_scaling_of_stretched_positions_changes_no_bit(void **state) {
    (void)state;
    losses plain = {.position_factor = 1}, scaled = {LOOM_ROPE_SCALING_LINEAR, 2, {0}};
    must_run(1, on_rank, &plain);
    must_run(1, on_rank, &scaled);
    assert_memory_equal(plain.loss, scaled.loss, sizeof plain.loss);
}

static void a_linear_scaling_changes_the_losses(void **state) {
    (void)state;
    losses plain = {.position_factor = 1}, scaled = {LOOM_ROPE_SCALING_LINEAR, 1, {0}};
    must_run(1, on_rank, &plain);
    must_run(1, on_rank, &scaled);
    assert_true(fabs(plain.loss[0] - scaled.loss[0]) > 1e-4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_linear_scaling_of_stretched_positions_changes_no_bit),
        cmocka_unit_test(a_linear_scaling_changes_the_losses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
