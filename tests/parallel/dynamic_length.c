/* Fine-tuning with steps as long as their longest sample: the losses are those of steps padded to the model's length.
 */
#include "parallel/small_model.h"
#include "parallel/support.h"
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

enum { SEQUENCE = 24, STEPS = 6, GLOBAL = 4 };

/* Positions of the samples: 5 2 3 7 | 2 2 3 2 | 17 4 2 2, so that data-parallel ranks differ in their longest. */
static const char text[] = "{\"input\": \"one\", \"output\": \"tw\"}\n"
                           "{\"input\": \"a\", \"output\": \"b\"}\n"
                           "{\"input\": \"a\", \"output\": \"bc\"}\n"
                           "{\"input\": \"hel\", \"output\": \"worl\"}\n"
                           "{\"input\": \"m\", \"output\": \"n\"}\n"
                           "{\"input\": \"q\", \"output\": \"r\"}\n"
                           "{\"input\": \"qr\", \"output\": \"s\"}\n"
                           "{\"input\": \"u\", \"output\": \"v\"}\n"
                           "{\"input\": \"a longer one\", \"output\": \"takes\"}\n"
                           "{\"input\": \"x\", \"output\": \"yzw\"}\n"
                           "{\"input\": \"k\", \"output\": \"l\"}\n"
                           "{\"input\": \"i\", \"output\": \"j\"}\n";
static const int64_t longest[3] = {7, 3, 17};

typedef struct tuning {
    const char *path;
    loom_megatron_strategy_config strategy;
    int64_t multiple, unit; /* asked, and what steps must come out as multiples of */
    int64_t ahead, micro;
    bool variable, random;
    double losses[STEPS];
} tuning;

static loom_status create(const tuning *own, loom_rank *rank, small_run *run) {
    loom_model_config model = small_config();
    loom_optimizer_config optim = loom_optimizer_config_default();
    loom_finetune_dataset_config data = loom_finetune_dataset_config_default();
    loom_module *module;
    LOOM_TRY(loom_fabric_create(rank, &own->strategy, NULL, &run->fabric));
    LOOM_TRY(loom_fabric_launch(run->fabric));
    model.seq_length = data.sequence_length = SEQUENCE;
    model.vocab_size = data.vocab_size = LOOM_BYTE_VOCABULARY;
    model.parallel.variable_seq_lengths = own->variable;
    optim.lr = 0.01;
    data.paths = &own->path;
    data.count = 1;
    data.tokenizer = loom_tokenizer_byte();
    LOOM_TRY(loom_finetune_dataset_create(&data, &run->dataset));
    LOOM_TRY(loom_gpt_create(run->fabric, &model, &module));
    LOOM_TRY(loom_fabric_setup_module(run->fabric, module, &run->parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(run->fabric, run->parallel, &optim, NULL, &run->optimizer));
    loom_dataloader loader = {.dataset = &run->dataset,
        .mode = LOOM_TRAINING,
        .micro_batch_size = own->micro,
        .global_batch_size = GLOBAL,
        .cycle = true,
        .sampler = own->random ? loom_data_sampler_random_batch() : loom_data_sampler_batch(),
        .prefetch_factor = own->ahead,
        .pad_seq_length_to_mult = own->multiple};
    return loom_fabric_setup_dataloader(run->fabric, &loader, &run->batches);
}

static loom_status tune(loom_rank *rank, void *argument) {
    tuning *own = argument;
    small_run run = {0};
    LOOM_TRY(create(own, rank, &run));
    for (int i = 0; i < STEPS; i++) {
        loom_optimizer_outcome outcome;
        double loss;
        int64_t s = loom_batches_get_state(run.batches).seq_length, unit = own->unit;
        int64_t expected = own->multiple ? (longest[i % 3] + unit - 1) / unit * unit : SEQUENCE;
        CHECK(own->random || s == expected, "step %d has %lld positions, expected %lld", i, (long long)s,
            (long long)expected);
        LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
        const loom_batch *last = loom_batches_get_state(run.batches).last;
        CHECK(last->s == s, "step %d of %lld positions has a batch of %lld", i, (long long)s, (long long)last->s);
        LOOM_TRY(loom_optimizer_step(run.optimizer, &outcome));
        if (loom_rank_index(rank) == 0)
            own->losses[i] = loss;
    }
    small_destroy(&run);
    return LOOM_OK;
}

/* Runs both ways on `ranks`. */
static void compare(int ranks, tuning *own) {
    char path[] = "/tmp/loom-test-XXXXXX";
    int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    assert_int_equal(write(descriptor, text, sizeof text - 1), sizeof text - 1);
    close(descriptor);
    own->path = path;
    own->micro = own->micro ? own->micro : 1;
    tuning fixed = *own;
    fixed.multiple = 0;
    must_run(ranks, tune, &fixed);
    must_run(ranks, tune, own);
    unlink(path);
    for (int i = 0; i < STEPS; i++)
        if (!(fabs(own->losses[i] / fixed.losses[i] - 1) < 1e-6))
            fail_msg("step %d: loss %.9g, padded to %d it is %.9g", i, own->losses[i], SEQUENCE, fixed.losses[i]);
    assert_true(own->losses[STEPS - 1] < own->losses[2]);
}

static tuning plain(int64_t multiple, int64_t unit) {
    return (tuning){.strategy = loom_megatron_strategy_config_default(), .multiple = multiple, .unit = unit};
}

static void data_parallel_ranks_of_unlike_samples_take_one_length(void **state) {
    (void)state;
    for (int64_t ahead = 0; ahead < 3; ahead += 2) {
        tuning own = plain(1, 1);
        own.ahead = ahead;
        compare(2, &own);
    }
    tuning shuffled = plain(1, 1);
    shuffled.random = true;
    compare(2, &shuffled);
}

static void rows_of_a_microbatch_do_not_run_into_each_other(void **state) {
    (void)state;
    tuning own = plain(2, 2);
    own.micro = 4;
    compare(1, &own);
}

static void sequence_parallelism_rounds_the_length_up(void **state) {
    (void)state;
    tuning own = plain(3, 6);
    own.strategy.tensor_model_parallel_size = 2;
    own.strategy.sequence_parallel = true;
    compare(2, &own);
}

static void stages_agree_on_the_length_of_each_step(void **state) {
    (void)state;
    for (int variable = 0; variable < 2; variable++) {
        tuning own = plain(1, 1);
        own.strategy.pipeline_model_parallel_size = 2;
        own.variable = variable;
        own.ahead = 2;
        compare(2, &own);
        compare(4, &own);
    }
}

static loom_status refuse(loom_rank *rank, void *argument) {
    tuning *own = argument;
    small_run run = {0};
    loom_batches *none;
    LOOM_TRY(create(own, rank, &run));
    loom_dataloader loader = {.dataset = &run.dataset, .micro_batch_size = 1, .pad_seq_length_to_mult = 1};
    CHECK(loom_fabric_setup_dataloader(run.fabric, &loader, &none) == LOOM_ERR_CONFIG &&
              strstr(loom_error_message(), "with the sampler single, expected batch or random_batch"),
        "the sampler single: %s", loom_error_message());
    loader.sampler = loom_data_sampler_batch();
    loader.mode = LOOM_TRAINING;
    loader.global_batch_size = 4;
    loader.rampup_batch_size[0] = loader.rampup_batch_size[1] = 2;
    loader.rampup_batch_size[2] = 4;
    CHECK(loom_fabric_setup_dataloader(run.fabric, &loader, &none) == LOOM_ERR_UNSUPPORTED &&
              strstr(loom_error_message(), "pad_seq_length_to_mult 1 with rampup_batch_size"),
        "with a ramp-up: %s", loom_error_message());
    loader.rampup_batch_size[0] = loader.rampup_batch_size[1] = loader.rampup_batch_size[2] = 0;
    loader.pad_seq_length_to_mult = -1;
    CHECK(loom_fabric_setup_dataloader(run.fabric, &loader, &none) == LOOM_ERR_CONFIG, "a negative multiple is taken");
    loom_dataset mock;
    LOOM_TRY(loom_mock_dataset_create(SEQUENCE, LOOM_BYTE_VOCABULARY, 1, 8, &mock));
    loader.dataset = &mock;
    loader.pad_seq_length_to_mult = 1;
    CHECK(loom_fabric_setup_dataloader(run.fabric, &loader, &none) == LOOM_ERR_CONFIG &&
              strstr(loom_error_message(), "does not tell how long its samples are"),
        "samples of one length: %s", loom_error_message());
    loom_dataset_destroy(&mock);
    small_destroy(&run);
    return LOOM_OK;
}

static void what_has_no_length_of_its_own_is_refused_by_name(void **state) {
    (void)state;
    char path[] = "/tmp/loom-test-XXXXXX";
    int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    assert_int_equal(write(descriptor, text, sizeof text - 1), sizeof text - 1);
    close(descriptor);
    tuning own = plain(0, 1);
    own.path = path;
    own.micro = 1;
    must_run(1, refuse, &own);
    unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(data_parallel_ranks_of_unlike_samples_take_one_length),
        cmocka_unit_test(rows_of_a_microbatch_do_not_run_into_each_other),
        cmocka_unit_test(sequence_parallelism_rounds_the_length_up),
        cmocka_unit_test(stages_agree_on_the_length_of_each_step),
        cmocka_unit_test(what_has_no_length_of_its_own_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
