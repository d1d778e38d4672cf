/* What a strategy is made of: each plug-in brought by the test, the life of a fabric, what is refused. */
#include "parallel/small_model.h"
#include "parallel/support.h"
#include "parallel/toy_module.h"
#include "runtime/rank.h"
#include <math.h>
#include <stdatomic.h>
#include <unistd.h>

static loom_megatron_strategy_config defaults(int tp) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    config.tensor_model_parallel_size = tp;
    return config;
}

/* ---- accelerator ---- */

typedef struct device_log {
    atomic_int setups, teardowns, tunes, lines, wrong_devices, fires;
} device_log;

static loom_status device_setup(void *context, loom_rank *rank, int device) {
    device_log *log = context;
    log->setups++;
    log->wrong_devices += device != loom_rank_local_index(rank);
    return LOOM_OK;
}

static void device_teardown(void *context, loom_rank *rank) {
    (void)rank;
    ((device_log *)context)->teardowns++;
}

static loom_status device_tune(void *context, loom_rank *rank, char *text, size_t bytes) {
    (void)rank;
    ((device_log *)context)->tunes++;
    snprintf(text, bytes, "abacus: oiled");
    return LOOM_OK;
}

static void count_lines(void *context, loom_log_level level, const char *line) {
    if (level == LOOM_LOG_INFO && strcmp(line, "abacus: oiled") == 0)
        ((device_log *)context)->lines++;
}

static loom_status accelerate(loom_rank *rank, void *argument) {
    loom_accelerator abacus = {"abacus", argument, device_setup, device_teardown, device_tune};
    loom_megatron_strategy_config config = defaults(2);
    loom_fabric *fabric;
    config.accelerator = &abacus;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &fabric));
    loom_status status = loom_fabric_launch(fabric);
    if (!status)
        status = loom_fabric_launch(fabric);
    loom_fabric_destroy(fabric);
    return status;
}

static void an_own_accelerator_is_set_up_once_tuned_once_and_torn_down(void **state) {
    device_log log = {0};
    loom_run_options options = test_options();
    (void)state;
    options.log = count_lines;
    options.log_context = &log;
    if (loom_run_local(2, accelerate, &log, &options))
        fail_msg("%s", loom_error_message());
    assert_int_equal(log.setups, 2);
    assert_int_equal(log.tunes, 2);
    assert_int_equal(log.teardowns, 2);
    assert_int_equal(log.wrong_devices, 0);
    assert_int_equal(log.lines, 1);
}

static loom_status device_broken(void *context, loom_rank *rank, int device) {
    (void)context;
    (void)rank;
    return loom_fail(LOOM_ERR_STATE, "device %d is on fire", device);
}

static loom_status break_device(loom_rank *rank, void *argument) {
    loom_accelerator broken = {"broken", argument, device_broken, device_teardown, NULL};
    loom_megatron_strategy_config config = defaults(1);
    loom_fabric *fabric;
    config.accelerator = &broken;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &fabric));
    loom_status status = loom_fabric_launch(fabric);
    bool named = strstr(loom_error_message(), "device 0 is on fire");
    loom_fabric_destroy(fabric);
    CHECK(status == LOOM_ERR_STATE && named, "found %s", loom_status_name(status));
    return LOOM_OK;
}

static void a_device_that_was_not_set_up_is_not_torn_down(void **state) {
    device_log log = {0};
    (void)state;
    must_run(1, break_device, &log);
    assert_int_equal(log.teardowns, 0);
}

static loom_status device_on_fire_once(void *context, loom_rank *rank, int device) {
    device_log *log = context;
    if (loom_rank_index(rank) == 1 && log->fires++ == 0)
        return device_broken(context, rank, device);
    return device_setup(context, rank, device);
}

static loom_status repair(loom_rank *rank, void *argument) {
    loom_accelerator abacus = {"abacus", argument, device_on_fire_once, device_teardown, device_tune};
    loom_megatron_strategy_config config = defaults(1);
    loom_fabric *fabric;
    config.accelerator = &abacus;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &fabric));
    loom_status first = loom_fabric_launch(fabric);
    for (int i = 0; i < 2; i++)
        LOOM_TRY(loom_fabric_launch(fabric));
    loom_fabric_destroy(fabric);
    CHECK(
        first == (loom_rank_index(rank) == 1 ? LOOM_ERR_STATE : LOOM_ERR_ABORTED), "found %s", loom_status_name(first));
    return LOOM_OK;
}

static void after_a_device_failed_on_one_rank_all_are_tuned_by_the_next_launch(void **state) {
    device_log log = {0};
    loom_run_options options = test_options();
    (void)state;
    options.log = count_lines;
    options.log_context = &log;
    if (loom_run_local(2, repair, &log, &options))
        fail_msg("%s", loom_error_message());
    assert_int_equal(log.fires, 2);
    assert_int_equal(log.setups, 2);
    assert_int_equal(log.tunes, 2);
    assert_int_equal(log.teardowns, 2);
    assert_int_equal(log.lines, 1);
}

static loom_status tune_fails_once(void *context, loom_rank *rank, char *text, size_t bytes) {
    device_log *log = context;
    if (loom_rank_index(rank) == 1 && log->fires++ == 0)
        return loom_fail(LOOM_ERR_STATE, "the oil is out");
    return device_tune(context, rank, text, bytes);
}

static loom_status tune_again(loom_rank *rank, void *argument) {
    loom_accelerator abacus = {"abacus", argument, device_setup, device_teardown, tune_fails_once};
    loom_megatron_strategy_config config = defaults(1);
    loom_fabric *fabric;
    config.accelerator = &abacus;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &fabric));
    loom_status first = loom_fabric_launch(fabric);
    bool named = strstr(loom_error_message(), "the oil is out");
    loom_status second = loom_fabric_launch(fabric);
    loom_fabric_destroy(fabric);
    LOOM_TRY(second);
    CHECK(named && first == (loom_rank_index(rank) == 1 ? LOOM_ERR_STATE : LOOM_ERR_ABORTED), "found %s",
        loom_status_name(first));
    return LOOM_OK;
}

static void tuning_that_fails_on_one_rank_fails_the_launch_of_all(void **state) {
    device_log log = {0};
    (void)state;
    must_run(2, tune_again, &log);
    assert_int_equal(log.setups, 2);
    assert_int_equal(log.tunes, 3); /* rank 0 twice */
}

/* ---- cluster environment ---- */

typedef struct environment_lies {
    int world, global, local; /* added to the truth */
    const char *message;
} environment_lies;

static bool environment_external(void *context, loom_rank *rank) {
    (void)context;
    (void)rank;
    return true;
}
static int environment_world(void *context, loom_rank *rank) {
    return loom_rank_count(rank) + ((environment_lies *)context)->world;
}
static int environment_global(void *context, loom_rank *rank) {
    return loom_rank_index(rank) + ((environment_lies *)context)->global;
}
static int environment_local(void *context, loom_rank *rank) {
    return loom_rank_local_index(rank) + ((environment_lies *)context)->local;
}
static int environment_node(void *context, loom_rank *rank) {
    (void)context;
    (void)rank;
    return 0;
}
static const char *environment_address(void *context, loom_rank *rank) {
    (void)context;
    (void)rank;
    return "10.0.0.1";
}
static int environment_port(void *context, loom_rank *rank) {
    (void)context;
    (void)rank;
    return 1234;
}

static loom_status use_environment(loom_rank *rank, void *argument) {
    const environment_lies *lies = argument;
    loom_cluster_environment environment = {"abbey", argument, environment_external, environment_world,
        environment_global, environment_local, environment_node, environment_address, environment_port};
    loom_megatron_strategy_config config = defaults(1);
    loom_fabric *fabric;
    config.cluster_environment = &environment;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &fabric));
    loom_status status = loom_fabric_launch(fabric);
    char message[512];
    snprintf(message, sizeof message, "%s", loom_error_message());
    loom_fabric_destroy(fabric);
    if (!lies->message)
        return status;
    CHECK(status == LOOM_ERR_CONFIG && strstr(message, "abbey") &&
              (loom_rank_index(rank) || strstr(message, lies->message)),
        "found %s: %s", loom_status_name(status), message);
    return LOOM_OK;
}

static void an_own_cluster_environment_is_asked(void **state) {
    environment_lies none = {0};
    (void)state;
    must_run(2, use_environment, &none);
}

static void an_environment_that_contradicts_the_ranks_is_refused(void **state) {
    environment_lies lies[] = {{.world = 1, .message = "rank 0 of 3, but this is rank 0 of 2"},
        {.global = 1, .message = "rank 1 of 2, but this is rank 0 of 2"},
        {.local = 2, .message = "local rank 2 of rank 0, expected 0 to 1"},
        {.local = -9, .message = "local rank -9 of rank 0, expected 0 to 1"}};
    (void)state;
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++)
        must_run(2, use_environment, &lies[i]);
}

/* ---- precision ---- */

typedef struct hook_log {
    char text[64]; /* one letter a call */
    char fails;    /* the letter of the hook that fails */
} hook_log;

static loom_status hook(void *context, char letter) {
    hook_log *log = context;
    size_t used = strlen(log->text);
    if (used + 1 < sizeof log->text)
        log->text[used] = letter;
    return log->fails == letter ? loom_fail(LOOM_ERR_STATE, "hook %c was told to fail", letter) : LOOM_OK;
}

static loom_status hook_config(void *context, loom_model_config *model, loom_ddp_config *ddp) {
    ddp->bucket_size = 1234;
    model->init_method_std = 0.5;
    return hook(context, 'c');
}
static loom_status hook_module(void *context, loom_module *module) {
    (void)module;
    return hook(context, 'm');
}
static loom_status hook_optimizer_config(void *context, loom_optimizer_config *optimizer) {
    optimizer->lr *= 2;
    return hook(context, 'o');
}
static loom_status hook_optimizer(void *context, loom_optimizer *optimizer) {
    (void)optimizer;
    return hook(context, 's');
}
static loom_status hook_input(void *context, const loom_batch *batch) {
    (void)batch;
    return hook(context, 'i');
}
static loom_status hook_output(void *context, loom_tape *tape, loom_tensor **output) {
    (void)tape;
    (void)output;
    return hook(context, 'u');
}

static loom_status use_precision(loom_rank *rank, void *argument) {
    const char fails = *(const char *)argument;
    hook_log log = {.fails = fails == 'i' || loom_rank_index(rank) == 0 ? fails : 0};
    loom_precision_plugin plugin = {"own", &log, hook_config, hook_module, hook_optimizer_config, hook_optimizer,
        hook_input, hook_output, LOOM_F32};
    loom_megatron_strategy_config config = defaults(2);
    loom_optimizer_outcome outcome;
    small_run run;
    double loss = 0;
    config.precision = &plugin;
    loom_status status = small_start(rank, &config, &run);
    if (!status) {
        double std = loom_parallel_model_config(run.parallel)->init_method_std;
        status = std == 0.5 ? LOOM_OK : loom_fail(LOOM_ERR_INTERNAL, "the model did not take the hook's value");
    }
    if (!status)
        status = loom_parallel_training_step(run.parallel, run.batches, &loss);
    if (!status)
        status = loom_optimizer_step(run.optimizer, &outcome);
    if (!status && outcome.lr != 0.02)
        status = loom_fail(LOOM_ERR_INTERNAL, "the optimizer did not take the hook's rate");
    small_destroy(&run);
    if (!fails) {
        LOOM_TRY(status);
        CHECK(strcmp(log.text, "cmosiu") == 0, "the hooks ran in the order %s", log.text);
        return LOOM_OK;
    }
    /* All ranks fail together, whoever's hook it was. */
    bool own = log.fails != 0;
    CHECK(status == (own ? LOOM_ERR_STATE : LOOM_ERR_ABORTED) && strstr(loom_error_message(), "was told to fail"),
        "hook %c: found %s: %s", fails, loom_status_name(status), loom_error_message());
    return LOOM_OK;
}

static void the_precision_hooks_run_in_their_order(void **state) {
    char none = 0;
    (void)state;
    must_run(2, use_precision, &none);
}

static void a_precision_hook_that_fails_on_one_rank_fails_the_set_up_of_all(void **state) {
    (void)state;
    must_run(2, use_precision, (char[]){'c'});
    must_run(2, use_precision, (char[]){'m'});
    must_run(2, use_precision, (char[]){'i'});
}

/* ---- sampler ---- */

static loom_status backward_batch(
    void *context, const loom_data_sampler_config *config, int64_t batch, int64_t *samples, int64_t *count) {
    const loom_data_sampler *single = loom_data_sampler_single();
    (void)context;
    LOOM_TRY(single->batch(single->context, config, batch, samples, count));
    for (int64_t i = 0; i < *count; i++)
        samples[i] = config->total_samples - 1 - samples[i];
    return LOOM_OK;
}

static loom_status backward_length(void *context, const loom_data_sampler_config *config, int64_t *batches) {
    const loom_data_sampler *single = loom_data_sampler_single();
    (void)context;
    return single->length(single->context, config, batches);
}

static const loom_data_sampler backward_sampler = {
    .name = "backward", .length = backward_length, .batch = backward_batch};

static const loom_data_sampler *give_sampler(void *context) {
    ++*(int *)context;
    return &backward_sampler;
}

static loom_status note_setup(void *context) {
    *(int *)context += 100;
    return LOOM_OK;
}

/* how: 0 the default, 1 from the configuration, 2 adopted from a data module, 3 both. */
static loom_status sample(loom_rank *rank, void *argument) {
    int how = *(int *)argument, calls = 0;
    loom_megatron_strategy_config config = defaults(1);
    loom_datamodule module = {&calls, note_setup, give_sampler};
    small_run run = {0};
    const loom_batch *batch;
    if (how & 1)
        config.data_sampler = &backward_sampler;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    if (how & 2)
        LOOM_TRY(loom_fabric_process_datamodule(run.fabric, &module));
    LOOM_TRY(small_data(&run, LOOM_TRAINING, 8, 2, 4));
    LOOM_TRY(loom_batches_next(run.batches, &batch));
    int64_t first = loom_rank_index(rank) * 2, expected = how ? 7 - first : first;
    CHECK(batch->index[0] == expected, "sample %lld, expected %lld", (long long)batch->index[0], (long long)expected);
    CHECK(calls == (how & 2 ? 100 : 0) + (how == 2), "the data module was asked %d", calls);
    small_destroy(&run);
    return LOOM_OK;
}

static void an_own_sampler_chooses_and_one_of_a_data_module_is_adopted(void **state) {
    (void)state;
    for (int how = 0; how < 4; how++)
        must_run(2, sample, &how);
}

/* ---- the life of a fabric ---- */

static loom_status live(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(2);
    toy own = {.parameters = 1, .uses = 1};
    small_run run = {0};
    (void)argument;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run.fabric));
    CHECK(loom_fabric_group(run.fabric, LOOM_GROUP_TP) == NULL, "a group before the launch");
    CHECK(loom_fabric_setup_module(run.fabric, toy_module(&own), &run.parallel) == LOOM_ERR_STATE &&
              strstr(loom_error_message(), "has not been launched"),
        "a module before the launch: %s", loom_error_message());
    CHECK(own.freed == 1, "the refused module was destroyed %d times", own.freed);
    loom_dataloader loader = {0};
    CHECK(loom_fabric_setup_dataloader(run.fabric, &loader, &run.batches) == LOOM_ERR_STATE, "data before the launch");
    for (int i = 0; i < 3; i++) {
        LOOM_TRY(loom_fabric_launch(run.fabric));
        CHECK(loom_comm_size(loom_fabric_group(run.fabric, LOOM_GROUP_TP)) == 2, "another tensor group");
        CHECK(loom_comm_size(loom_fabric_group(run.fabric, LOOM_GROUP_DP)) == 2, "another data group");
    }
    CHECK(!loom_fabric_group(run.fabric, LOOM_GROUP_KIND_COUNT), "a group of no kind");
    LOOM_TRY(small_model(&run));
    CHECK(loom_fabric_launch(run.fabric) == LOOM_ERR_STATE && strstr(loom_error_message(), "1 module"),
        "launched under a module: %s", loom_error_message());
    LOOM_TRY(loom_fabric_module_to_device(run.fabric, run.parallel));
    LOOM_TRY(small_data(&run, LOOM_TRAINING, 16, 2, 0));
    double loss;
    LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    loom_optimizer *second;
    loom_optimizer_config optim = loom_optimizer_config_default();
    optim.lr = 1;
    CHECK(loom_fabric_setup_megatron_optimizer(run.fabric, run.parallel, &optim, NULL, &second) == LOOM_ERR_STATE,
        "a second optimizer");
    loom_parallel_destroy(run.parallel);
    run.parallel = NULL;
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(small_model(&run));
    LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
    small_destroy(&run);
    return LOOM_OK;
}

static void launching_again_is_safe_and_every_call_has_its_time(void **state) {
    (void)state;
    must_run(4, live, NULL);
}

/* ---- callbacks ---- */

static loom_status count_step(void *context, loom_step *step) {
    (void)context;
    step->number++;
    return LOOM_OK;
}

static loom_status keep_callback(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(1);
    loom_step step = {0};
    small_run run;
    (void)argument;
    LOOM_TRY(small_start(rank, &config, &run));
    loom_callbacks *callbacks = loom_fabric_callbacks(run.fabric);
    loom_callback own = {.context = run.parallel, .event = {[LOOM_EVENT_STEP_END] = count_step}}, other = own;
    other.event[LOOM_EVENT_STEP_END] = NULL;
    LOOM_TRY(loom_callbacks_add(callbacks, &own));
    int64_t count = loom_callbacks_count(callbacks);
    loom_parallel_destroy(run.parallel);
    run.parallel = NULL;
    CHECK(loom_callbacks_count(callbacks) == count - 1, "%lld of %lld callbacks are left",
        (long long)loom_callbacks_count(callbacks), (long long)count);
    loom_callbacks_remove(callbacks, &other);
    LOOM_TRY(loom_callbacks_call(callbacks, LOOM_EVENT_STEP_END, &step));
    CHECK(step.number == 1, "the own callback was called %lld times", (long long)step.number);
    loom_callbacks_remove(callbacks, &own);
    LOOM_TRY(loom_callbacks_call(callbacks, LOOM_EVENT_STEP_END, &step));
    CHECK(step.number == 1, "a callback that was taken out is called");
    small_destroy(&run);
    return LOOM_OK;
}

static void a_callback_about_a_module_outlives_it(void **state) {
    (void)state;
    must_run(1, keep_callback, NULL);
}

/* ---- contexts ---- */

typedef struct context_body {
    small_run *run;
    loom_status fails;
    float largest; /* weight after the set-up */
} context_body;

static loom_status largest_weight(
    void *context, const char *name, int dims, const int64_t *shape, const float *values) {
    float *largest = context;
    (void)name;
    for (int64_t i = 0; i < shape[0] * (dims == 2 ? shape[1] : 1); i++)
        *largest = fabsf(values[i]) > *largest ? fabsf(values[i]) : *largest;
    return LOOM_OK;
}

static loom_status set_up_inside(void *argument) {
    context_body *body = argument;
    if (body->fails)
        return loom_fail(body->fails, "as the body was told to");
    LOOM_TRY(small_model(body->run));
    body->largest = 0;
    LOOM_TRY(loom_gpt_visit(body->run->parallel, false, largest_weight, &body->largest));
    loom_parallel_destroy(body->run->parallel);
    body->run->parallel = NULL;
    return LOOM_OK;
}

static loom_status enter(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(2);
    small_run run = {0};
    context_body body = {.run = &run};
    (void)argument;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(loom_fabric_megatron_context(run.fabric, set_up_inside, &body));
    CHECK(body.largest == 0, "weights up to %g without initialisation", (double)body.largest);
    LOOM_TRY(set_up_inside(&body));
    CHECK(body.largest > 0, "the context outlives its body");
    body.fails = LOOM_ERR_IO;
    CHECK(loom_fabric_megatron_context(run.fabric, set_up_inside, &body) == LOOM_ERR_IO, "the body's error was lost");
    body.fails = LOOM_OK;
    LOOM_TRY(set_up_inside(&body));
    CHECK(body.largest > 0, "the context outlives an error of its body");
    LOOM_TRY(loom_fabric_module_init_context(run.fabric, true, set_up_inside, &body));
    CHECK(body.largest == 0, "an empty init has weights");
    LOOM_TRY(loom_fabric_module_init_context(run.fabric, false, set_up_inside, &body));
    CHECK(body.largest > 0, "an init that is not empty has none");
    small_destroy(&run);
    return LOOM_OK;
}

static void contexts_skip_the_initialisation_and_restore_it_also_after_an_error(void **state) {
    (void)state;
    must_run(2, enter, NULL);
}

/* ---- what is copied, what is refused ---- */

static loom_status copy(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(2);
    loom_fabric *fabric;
    (void)argument;
    config.sequence_parallel = true;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &fabric));
    config = defaults(1); /* the fabric has its own */
    loom_parallelism p = loom_fabric_parallelism(fabric);
    CHECK(p.tensor_model_parallel_size == 2 && p.sequence_parallel, "the tensor fields are not those given");
    CHECK(p.pipeline_model_parallel_size == 1 && p.virtual_pipeline_model_parallel_size == 0 &&
              p.context_parallel_size == 1 && p.expert_model_parallel_size == 1,
        "the other sizes are not the defaults");
    CHECK(p.microbatch_group_size_per_vp_stage == 1, "absent means the pipeline size");
    CHECK(p.expert_tensor_parallel_size == 2, "absent means the tensor size");
    loom_fabric_destroy(fabric);
    return LOOM_OK;
}

static void parallelism_is_a_copy_with_its_defaults_filled_in(void **state) {
    (void)state;
    must_run(2, copy, NULL);
}

static loom_status cut_badly(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(1);
    loom_fabric *fabric;
    loom_module *module = NULL;
    (void)argument;
    config.pipeline_model_parallel_size = 2;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &fabric));
    loom_model_config model = small_config();
    model.num_layers = 3;
    CHECK(loom_gpt_create(fabric, &model, &module) == LOOM_ERR_CONFIG && !module &&
              strstr(loom_error_message(), "num_layers 3 is not a multiple of pipeline_model_parallel_size 2"),
        "3 layers on 2 stages: %s", loom_error_message());
    CHECK(loom_fabric_parallelism(fabric).num_layers_in_first_pipeline_stage == 0, "a refused split was kept");
    model.parallel.num_layers_in_first_pipeline_stage = 1;
    LOOM_TRY(loom_gpt_create(fabric, &model, &module));
    CHECK(loom_fabric_parallelism(fabric).num_layers_in_first_pipeline_stage == 1, "the split of the model was lost");
    module->destroy(module->context);
    loom_fabric_destroy(fabric);
    return LOOM_OK;
}

static void a_model_that_does_not_fit_the_stages_is_refused_without_a_run_file(void **state) {
    (void)state;
    must_run(2, cut_badly, NULL);
}

static loom_status refused(loom_rank *rank, const loom_megatron_strategy_config *config,
    const loom_precision_config *precision, loom_status wanted, const char *text) {
    loom_fabric *fabric = NULL;
    loom_status status = loom_fabric_create(rank, config, precision, &fabric);
    CHECK(status == wanted && !fabric && strstr(loom_error_message(), text), "expected %s with \"%s\", found %s: %s",
        loom_status_name(wanted), text, loom_status_name(status), loom_error_message());
    return LOOM_OK;
}

static loom_status refuse(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(1);
    loom_precision_config precision = loom_precision_config_default();
    int something = 0;
    (void)argument;
    precision.fp8 = "hybrid";
    LOOM_TRY(refused(rank, &config, &precision, LOOM_ERR_UNSUPPORTED, "precision.fp8=hybrid"));
    precision.fp8 = NULL;
    precision.precision = "33";
    LOOM_TRY(refused(rank, &config, &precision, LOOM_ERR_CONFIG, "33"));
    config.sequence_parallel = true;
    LOOM_TRY(refused(rank, &config, NULL, LOOM_ERR_CONFIG, "sequence_parallel"));
    config = defaults(0);
    config.timeout = -1;
    LOOM_TRY(refused(rank, &config, NULL, LOOM_ERR_CONFIG, "timeout"));
    LOOM_TRY(refused(rank, &config, NULL, LOOM_ERR_CONFIG, "tensor_model_parallel_size"));
    config = defaults(1);
    config.pipeline_model_parallel_size = 2;
    LOOM_TRY(refused(rank, &config, NULL, LOOM_ERR_CONFIG, "pipeline_model_parallel_size 2"));
    config.microbatch_group_size_per_vp_stage = 1;
    LOOM_TRY(refused(rank, &config, NULL, LOOM_ERR_CONFIG, "strategy.microbatch_group_size_per_vp_stage: found 1"));
    config = defaults(1);
    config.virtual_pipeline_model_parallel_size = 2;
    LOOM_TRY(refused(rank, &config, NULL, LOOM_ERR_CONFIG, "expected at least 2 pipeline stages"));
    config = defaults(1);
    config.ddp = "deepspeed";
    LOOM_TRY(refused(rank, &config, NULL, LOOM_ERR_CONFIG, "deepspeed"));
    config = defaults(1);
    config.parallel_devices = &something;
    LOOM_TRY(refused(rank, &config, NULL, LOOM_ERR_UNSUPPORTED, "strategy.parallel_devices"));
    config = defaults(1);
    config.start_method = "fork";
    LOOM_TRY(refused(rank, &config, NULL, LOOM_ERR_UNSUPPORTED, "start_method"));
    return LOOM_OK;
}

static void what_is_not_built_or_not_legal_is_refused_by_name(void **state) {
    (void)state;
    must_run(1, refuse, NULL);
}

/* ---- timeout ---- */

static loom_status oversleep(loom_rank *rank, void *argument) {
    loom_megatron_strategy_config config = defaults(2);
    loom_fabric *fabric;
    (void)argument;
    config.timeout = 0.2;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &fabric));
    loom_status status = loom_fabric_launch(fabric);
    if (!status && loom_rank_index(rank) == 1)
        usleep(1000000);
    if (!status)
        status = loom_barrier(loom_fabric_group(fabric, LOOM_GROUP_TP));
    loom_fabric_destroy(fabric);
    return status;
}

static void the_timeout_of_the_strategy_ends_a_wait(void **state) {
    loom_run_options options = test_options();
    (void)state;
    assert_int_equal(loom_run_local(2, oversleep, NULL, &options), LOOM_ERR_TIMEOUT);
    assert_non_null(strstr(loom_error_message(), "rank 1"));
}

/* order: which of the two is launched first, and which is destroyed first. */
static loom_status limit_twice(loom_rank *rank, void *argument) {
    static const double seconds[2] = {20, 10};
    const int *order = argument;
    double whole = rank->endpoint->timeout;
    loom_megatron_strategy_config config = defaults(1);
    loom_fabric *fabrics[2];
    for (int i = 0; i < 2; i++) {
        config.timeout = seconds[i];
        LOOM_TRY(loom_fabric_create(rank, &config, NULL, &fabrics[i]));
    }
    CHECK(rank->endpoint->timeout == whole, "a limit before the launch");
    for (int i = 0; i < 4; i++) { /* each twice: launching again is no second limit */
        int launched = i < 2 ? order[0] : !order[0];
        LOOM_TRY(loom_fabric_launch(fabrics[launched]));
        CHECK(
            rank->endpoint->timeout == (i < 2 ? seconds[launched] : 10), "launch %d: %g s", i, rank->endpoint->timeout);
    }
    loom_fabric_destroy(fabrics[order[1]]);
    CHECK(rank->endpoint->timeout == seconds[!order[1]], "one is left: %g s", rank->endpoint->timeout);
    loom_fabric_destroy(fabrics[!order[1]]);
    CHECK(rank->endpoint->timeout == whole, "none is left: %g s", rank->endpoint->timeout);
    return LOOM_OK;
}

static void the_shortest_timeout_of_the_living_holds_in_whatever_order_they_go(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++)
        must_run(2, limit_twice, (int[]){i % 2, i / 2});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_own_accelerator_is_set_up_once_tuned_once_and_torn_down),
        cmocka_unit_test(a_device_that_was_not_set_up_is_not_torn_down),
        cmocka_unit_test(tuning_that_fails_on_one_rank_fails_the_launch_of_all),
        cmocka_unit_test(after_a_device_failed_on_one_rank_all_are_tuned_by_the_next_launch),
        cmocka_unit_test(an_own_cluster_environment_is_asked),
        cmocka_unit_test(an_environment_that_contradicts_the_ranks_is_refused),
        cmocka_unit_test(the_precision_hooks_run_in_their_order),
        cmocka_unit_test(a_precision_hook_that_fails_on_one_rank_fails_the_set_up_of_all),
        cmocka_unit_test(an_own_sampler_chooses_and_one_of_a_data_module_is_adopted),
        cmocka_unit_test(launching_again_is_safe_and_every_call_has_its_time),
        cmocka_unit_test(a_callback_about_a_module_outlives_it),
        cmocka_unit_test(contexts_skip_the_initialisation_and_restore_it_also_after_an_error),
        cmocka_unit_test(parallelism_is_a_copy_with_its_defaults_filled_in),
        cmocka_unit_test(a_model_that_does_not_fit_the_stages_is_refused_without_a_run_file),
        cmocka_unit_test(what_is_not_built_or_not_legal_is_refused_by_name),
        cmocka_unit_test(the_timeout_of_the_strategy_ends_a_wait),
        cmocka_unit_test(the_shortest_timeout_of_the_living_holds_in_whatever_order_they_go),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
