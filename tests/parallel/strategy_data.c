/* Data under a strategy: ramp-up in real steps, readers ahead, loaders that take turns, and a reader that fails. */
#include "parallel/small_model.h"
#include "parallel/support.h"
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

static loom_megatron_strategy_config defaults(void) {
    return loom_megatron_strategy_config_default();
}

static loom_dataloader rampup_loader(const loom_dataset *dataset, int64_t consumed, int64_t ahead) {
    return (loom_dataloader){.dataset = dataset,
        .mode = LOOM_TRAINING,
        .micro_batch_size = 1,
        .global_batch_size = 8,
        .consumed_samples = consumed,
        .rampup_batch_size = {2, 2, 12},
        .stop_when_batch_size_changes = true,
        .prefetch_factor = ahead};
}

/* ---- ramp-up ---- */

enum { STEPS = 7 };

typedef struct ramp {
    int64_t ahead;
    double losses[STEPS];
} ramp;

/* On two ranks: 2 samples a step for the first 4, then 4, 6, and 8 from the twelfth on. */
static loom_status ramp_up(loom_rank *rank, void *argument) {
    static const int64_t microbatches[STEPS] = {1, 1, 2, 3, 4, 4, 4}, consumed[STEPS] = {2, 4, 8, 14, 22, 30, 38};
    ramp *own = argument;
    loom_megatron_strategy_config config = defaults();
    small_run run;
    LOOM_TRY(small_start(rank, &config, &run));
    loom_batches_destroy(run.batches);
    run.batches = NULL;
    loom_dataloader loader = rampup_loader(&run.dataset, 0, own->ahead);
    LOOM_TRY(loom_fabric_setup_dataloader(run.fabric, &loader, &run.batches));
    for (int i = 0; i < STEPS; i++) {
        loom_step_result result;
        LOOM_TRY(loom_parallel_step(run.parallel, LOOM_TRAINING, run.batches, NULL, NULL, NULL, &result));
        bool changed = i > 0 && microbatches[i] != microbatches[i - 1];
        CHECK(result.microbatches == microbatches[i] && result.stop == changed,
            "step %d has %lld microbatches and stop %d", i, (long long)result.microbatches, result.stop);
        int64_t now = loom_batches_get_state(run.batches).consumed_samples;
        CHECK(now == consumed[i], "%lld samples after step %d", (long long)now, i);
        if (loom_rank_index(rank) == 0)
            own->losses[i] = result.loss;
    }
    small_destroy(&run);
    return LOOM_OK;
}

static void a_rampup_trains_with_growing_batches_and_asks_to_stop_at_each_change(void **state) {
    (void)state;
    ramp without = {0}, with = {.ahead = 3};
    must_run(2, ramp_up, &without);
    must_run(2, ramp_up, &with);
    assert_memory_equal(without.losses, with.losses, sizeof with.losses);
}

static loom_status resume_in_rampup(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults();
    small_run run;
    loom_step_result result;
    (void)argument;
    LOOM_TRY(small_start(rank, &config, &run));
    loom_batches_destroy(run.batches);
    run.batches = NULL;
    loom_dataloader loader = rampup_loader(&run.dataset, 4, 2);
    LOOM_TRY(loom_fabric_setup_dataloader(run.fabric, &loader, &run.batches));
    LOOM_TRY(loom_parallel_step(run.parallel, LOOM_TRAINING, run.batches, NULL, NULL, NULL, &result));
    CHECK(result.microbatches == 2 && !result.stop, "%lld microbatches and stop %d after a resume at a change",
        (long long)result.microbatches, result.stop);
    LOOM_TRY(loom_parallel_step(run.parallel, LOOM_TRAINING, run.batches, NULL, NULL, NULL, &result));
    CHECK(result.stop, "the next change went unnoticed");
    small_destroy(&run);
    return LOOM_OK;
}

static void a_run_that_stopped_at_a_change_does_not_stop_there_again(void **state) {
    (void)state;
    must_run(2, resume_in_rampup, NULL);
}

/* ---- several loaders ---- */

static loom_status take_turns(loom_rank *rank, void *argument) {
    /* three samples of one and two of the other: the longer decides, the shorter begins again */
    static const int64_t index[6] = {0, 0, 1, 1, 2, 0};
    int64_t ahead = *(const int64_t *)argument;
    loom_megatron_strategy_config config = defaults();
    config.output_data_idx = true;
    small_run run = {0};
    loom_dataset other = {0};
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(loom_mock_dataset_create(SMALL_SEQUENCE, SMALL_VOCABULARY, 3, 3, &run.dataset));
    LOOM_TRY(loom_mock_dataset_create(SMALL_SEQUENCE, SMALL_VOCABULARY, 4, 2, &other));
    loom_dataloader loaders[2] = {
        {.dataset = &run.dataset, .mode = LOOM_VALIDATION, .micro_batch_size = 1, .prefetch_factor = ahead},
        {.dataset = &other, .mode = LOOM_VALIDATION, .micro_batch_size = 1, .prefetch_factor = ahead}};
    LOOM_TRY(loom_fabric_setup_dataloaders(run.fabric, loaders, 2, &run.batches));
    for (int round = 0; round < 2; round++) {
        for (int64_t i = 0; i < 6; i++) {
            const loom_batch *batch;
            LOOM_TRY(loom_batches_next(run.batches, &batch));
            CHECK(batch->index[0] == index[i] && batch->loader_index == i % 2 && batch->batch_index == i / 2,
                "microbatch %lld is sample %lld, number %lld of loader %lld", (long long)i, (long long)batch->index[0],
                (long long)batch->batch_index, (long long)batch->loader_index);
        }
        const loom_batch *none;
        CHECK(loom_batches_get_state(run.batches).done, "not done after all");
        CHECK(loom_batches_next(run.batches, &none) == LOOM_END, "more than there is");
        LOOM_TRY(loom_batches_reset(run.batches));
    }
    loaders[0].pad_seq_length_to_mult = 4;
    loom_batches *refused;
    CHECK(loom_fabric_setup_dataloaders(run.fabric, loaders, 2, &refused) == LOOM_ERR_UNSUPPORTED &&
              strstr(loom_error_message(), "pad_seq_length_to_mult with 2 data loaders"),
        "lengths with two loaders: %s", loom_error_message());
    small_destroy(&run);
    loom_dataset_destroy(&other);
    return LOOM_OK;
}

static void the_longest_loader_decides_and_batches_say_whose_they_are(void **state) {
    (void)state;
    for (int64_t ahead = 0; ahead < 3; ahead++)
        must_run(1, take_turns, &ahead);
}

/* Two loaders of 20 and 12 samples on two ranks: the sizes are those of one loader's ramp-up over the samples of both.
 * Of the 20 microbatches 17 make whole steps. */
static loom_status ramp_up_in_turns(loom_rank *rank, void *argument) {
    static const int64_t microbatches[6] = {1, 1, 2, 3, 4, 4}, consumed[6] = {2, 4, 8, 14, 22, 30};
    int64_t ahead = *(const int64_t *)argument;
    loom_megatron_strategy_config config = defaults();
    config.output_data_idx = true;
    small_run run;
    loom_dataset sets[2];
    LOOM_TRY(small_start(rank, &config, &run));
    loom_batches_destroy(run.batches);
    run.batches = NULL;
    LOOM_TRY(loom_mock_dataset_create(SMALL_SEQUENCE, SMALL_VOCABULARY, 3, 20, &sets[0]));
    LOOM_TRY(loom_mock_dataset_create(SMALL_SEQUENCE, SMALL_VOCABULARY, 4, 12, &sets[1]));
    loom_dataloader loaders[2] = {rampup_loader(&sets[0], 0, ahead), rampup_loader(&sets[1], 0, ahead)};
    LOOM_TRY(loom_fabric_setup_dataloaders(run.fabric, loaders, 2, &run.batches));
    CHECK(loom_batches_get_state(run.batches).length == 15, "%lld microbatches",
        (long long)loom_batches_get_state(run.batches).length);
    for (int i = 0; i < 6; i++) {
        loom_step_result result;
        LOOM_TRY(loom_parallel_step(run.parallel, LOOM_TRAINING, run.batches, NULL, NULL, NULL, &result));
        CHECK(
            result.microbatches == microbatches[i] && result.stop == (i > 0 && microbatches[i] != microbatches[i - 1]),
            "step %d has %lld microbatches and stop %d", i, (long long)result.microbatches, result.stop);
        loom_batches_state now = loom_batches_get_state(run.batches);
        CHECK(now.consumed_samples == consumed[i], "%lld samples after step %d", (long long)now.consumed_samples, i);
    }
    loom_step_result none;
    CHECK(loom_parallel_step(run.parallel, LOOM_TRAINING, run.batches, NULL, NULL, NULL, &none) == LOOM_END,
        "a step that cannot be whole");
    loom_data_loader_config cut;
    LOOM_TRY(loom_batches_data_config(run.batches, 1, &cut));
    CHECK(cut.data_parallel_rank == loom_rank_index(rank) && cut.data_parallel_size == 2 &&
              cut.global_batch_size == 8 && cut.micro_batch_size == 1 && cut.rampup_batch_size[2] == 12 &&
              cut.drop_last,
        "loader 1 was cut otherwise");
    CHECK(loom_batches_data_config(run.batches, 2, &cut) == LOOM_ERR_ARGUMENT &&
              strstr(loom_error_message(), "loader 2, expected 0 to 1"),
        "a third loader: %s", loom_error_message());
    loom_batches *refused;
    loaders[1].rampup_batch_size[2] = 24;
    CHECK(loom_fabric_setup_dataloaders(run.fabric, loaders, 2, &refused) == LOOM_ERR_CONFIG &&
              strstr(loom_error_message(), "expected one ramp-up for all"),
        "two ramp-ups: %s", loom_error_message());
    loaders[1].rampup_batch_size[2] = 12;
    loaders[1].sampler = loom_data_sampler_batch();
    CHECK(loom_fabric_setup_dataloaders(run.fabric, loaders, 2, &refused) == LOOM_ERR_UNSUPPORTED &&
              strstr(loom_error_message(), "the sampler batch"),
        "a sampler of global batches: %s", loom_error_message());
    small_destroy(&run);
    loom_dataset_destroy(&sets[0]);
    loom_dataset_destroy(&sets[1]);
    return LOOM_OK;
}

static void a_rampup_of_several_loaders_counts_the_samples_of_all(void **state) {
    (void)state;
    for (int64_t ahead = 0; ahead < 3; ahead += 2)
        must_run(2, ramp_up_in_turns, &ahead);
}

/* ---- a reader that fails ---- */

static loom_status broken_get(void *context, int64_t index, const loom_sample_row *row) {
    (void)context;
    for (int64_t i = 0; i < SMALL_SEQUENCE; i++) {
        row->tokens[i] = row->labels[i] = 1;
        row->loss_mask[i] = 1.0f;
        row->position_ids[i] = i;
    }
    return index == 3 ? loom_fail(LOOM_ERR_IO, "corpus.bin: the disk is gone") : LOOM_OK;
}

static loom_status read_broken(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults();
    small_run run;
    double loss;
    LOOM_TRY(small_start(rank, &config, &run));
    loom_batches_destroy(run.batches);
    loom_dataset_destroy(&run.dataset);
    run.batches = NULL;
    run.dataset = (loom_dataset){.length = 8, .sequence_length = SMALL_SEQUENCE, .get = broken_get};
    loom_dataloader loader = {.dataset = &run.dataset,
        .mode = LOOM_TRAINING,
        .micro_batch_size = 1,
        .prefetch_factor = *(const int64_t *)argument};
    loom_status status = loom_fabric_setup_dataloader(run.fabric, &loader, &run.batches);
    for (int i = 0; !status && i < 4; i++)
        status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    small_destroy(&run);
    return status;
}

static void a_reader_that_fails_ends_the_run_and_names_rank_and_sample(void **state) {
    (void)state;
    for (int64_t ahead = 0; ahead < 3; ahead += 2) {
        loom_run_options options = test_options();
        assert_true(loom_run_local(2, read_broken, &ahead, &options) == LOOM_ERR_IO);
        assert_non_null(strstr(loom_error_message(), "data-parallel rank 1, sample 3: corpus.bin: the disk is gone"));
    }
}

/* ---- packing ---- */

enum { TUNING_SEQUENCE = 16, TUNING_STEPS = 4 };

typedef struct tuning {
    const char *path;
    bool pack;
    int64_t rows; /* a step has all of them */
    double losses[TUNING_STEPS];
} tuning;

static loom_status tune(loom_rank *rank, void *argument) {
    tuning *own = argument;
    loom_megatron_strategy_config config = defaults();
    loom_model_config model = small_config();
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_finetune_dataset_config data = loom_finetune_dataset_config_default();
    small_run run = {0};
    loom_module *module;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    model.seq_length = data.sequence_length = TUNING_SEQUENCE;
    model.vocab_size = data.vocab_size = LOOM_BYTE_VOCABULARY;
    optim.lr = 0.01;
    data.paths = &own->path;
    data.count = 1;
    data.tokenizer = loom_tokenizer_byte();
    data.pack = own->pack;
    LOOM_TRY(loom_finetune_dataset_create(&data, &run.dataset));
    CHECK(run.dataset.length == own->rows, "%lld rows", (long long)run.dataset.length);
    LOOM_TRY(loom_gpt_create(run.fabric, &model, &module));
    LOOM_TRY(loom_fabric_setup_module(run.fabric, module, &run.parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(run.fabric, run.parallel, &optim, NULL, &run.optimizer));
    loom_dataloader loader = {.dataset = &run.dataset,
        .mode = LOOM_TRAINING,
        .micro_batch_size = 1,
        .global_batch_size = own->rows,
        .cycle = true};
    LOOM_TRY(loom_fabric_setup_dataloader(run.fabric, &loader, &run.batches));
    for (int i = 0; i < TUNING_STEPS; i++) {
        loom_optimizer_outcome outcome;
        LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &own->losses[i]));
        LOOM_TRY(loom_optimizer_step(run.optimizer, &outcome));
    }
    small_destroy(&run);
    return LOOM_OK;
}

static void packed_samples_train_as_they_do_alone(void **state) {
    (void)state;
    static const char text[] = "{\"input\": \"one\", \"output\": \"two\"}\n"
                               "{\"input\": \"a\", \"output\": \"bcd\"}\n"
                               "{\"input\": \"xyz\", \"output\": \"q\"}\n"
                               "{\"input\": \"hello\", \"output\": \"world\"}\n"
                               "{\"input\": \"m\", \"output\": \"nop\"}\n";
    char path[] = "/tmp/loom-test-XXXXXX";
    int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    assert_int_equal(write(descriptor, text, sizeof text - 1), sizeof text - 1);
    close(descriptor);
    tuning alone = {.path = path, .rows = 5}, packed = {.path = path, .pack = true, .rows = 2};
    must_run(1, tune, &alone);
    must_run(1, tune, &packed);
    unlink(path);
    for (int i = 0; i < TUNING_STEPS; i++)
        assert_true(fabs(packed.losses[i] / alone.losses[i] - 1) < 1e-5);
    assert_true(alone.losses[TUNING_STEPS - 1] < alone.losses[0]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rampup_trains_with_growing_batches_and_asks_to_stop_at_each_change),
        cmocka_unit_test(a_run_that_stopped_at_a_change_does_not_stop_there_again),
        cmocka_unit_test(the_longest_loader_decides_and_batches_say_whose_they_are),
        cmocka_unit_test(a_reader_that_fails_ends_the_run_and_names_rank_and_sample),
        cmocka_unit_test(a_rampup_of_several_loaders_counts_the_samples_of_all),
        cmocka_unit_test(packed_samples_train_as_they_do_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
