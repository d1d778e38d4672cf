/* The distributed optimizer against the plain one on whole models: the same bits of losses, norms and weights, whatever
 * is reduced or gathered meanwhile. */
#include "parallel/pipeline_support.h"
#include "parallel/toy_module.h"

static void must_equal_plain(const pipe_case *cases, size_t count) {
    for (size_t i = 0; i < count; i++) {
        pipe_case plain = cases[i];
        plain.overlap = false;
        pipe_result wanted = pipe_run(&plain);
        for (int variant = 0; variant < 6; variant++) {
            pipe_case sharded = cases[i];
            sharded.sharded = true;
            sharded.overlap = cases[i].overlap || variant > 0;
            sharded.gather = variant > 1;
            sharded.align = variant == 3 || variant == 5;
            sharded.align_reduction = variant > 3;
            pipe_result found = pipe_run(&sharded);
            pipe_must_be_equal(&sharded, &found, &wanted);
        }
    }
}

static void shards_over_data_parallel_ranks_change_no_bit(void **state) {
    (void)state;
    static const pipe_case cases[] = {
        {.ranks = 1},
        {.ranks = 2},
        {.ranks = 3, .global = 6},
        {.ranks = 4, .untied = true},
        {.ranks = 4, .average = true, .dropout = 0.1},
    };
    must_equal_plain(cases, sizeof cases / sizeof *cases);
}

static void shards_beside_tensor_parallelism_change_no_bit(void **state) {
    (void)state;
    static const pipe_case cases[] = {
        {.ranks = 4, .tp = 2},
        {.ranks = 4, .tp = 2, .sp = true, .dropout = 0.1},
    };
    must_equal_plain(cases, sizeof cases / sizeof *cases);
}

static void shards_beside_a_pipeline_change_no_bit(void **state) {
    (void)state;
    static const pipe_case cases[] = {
        {.ranks = 4, .pp = 2},
        {.ranks = 4, .pp = 2, .untied = true, .schedule = "zero-bubble"},
        {.ranks = 4, .pp = 2, .vpp = 2, .overlap = true},
        {.ranks = 8, .tp = 2, .pp = 2, .sp = true},
    };
    must_equal_plain(cases, sizeof cases / sizeof *cases);
}

static void several_instances_have_the_bits_of_the_plain_optimizer(void **state) {
    (void)state;
    static const int64_t instances[] = {2, 4};
    pipe_case plain = {.ranks = 4};
    pipe_result wanted = pipe_run(&plain);
    for (size_t i = 0; i < 2; i++)
        for (int variant = 0; variant < 3; variant++) {
            pipe_case c = plain;
            c.sharded = true;
            c.instances = instances[i];
            c.overlap = variant > 0;
            c.gather = variant > 1;
            pipe_result found = pipe_run(&c);
            pipe_must_be_equal(&c, &found, &wanted);
        }
    pipe_case staged = {.ranks = 8, .pp = 2, .untied = true}, shared = staged;
    shared.sharded = shared.overlap = shared.gather = true;
    shared.instances = 2;
    pipe_result all = pipe_run(&staged), found = pipe_run(&shared);
    pipe_must_be_equal(&shared, &found, &all);
}

static void the_pytorch_wrapper_has_the_bits_of_the_plain_optimizer(void **state) {
    (void)state;
    static const pipe_case cases[] = {{.ranks = 2}, {.ranks = 3, .global = 6}, {.ranks = 4, .tp = 2, .sp = true},
        {.ranks = 4, .pp = 2, .vpp = 2}, {.ranks = 4, .pp = 2, .untied = true, .schedule = "zero-bubble"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pipe_result wanted = pipe_run(&cases[i]);
        for (int variant = 0; variant < 3; variant++) {
            pipe_case c = cases[i];
            c.pytorch = true;
            c.find_unused = variant == 1;
            c.fixed = variant == 2;
            pipe_result found = pipe_run(&c);
            pipe_must_be_equal(&c, &found, &wanted);
        }
    }
}

/* The group's sum in the order of its ranks, as the wrapper has it. */
static loom_status reduce_by_hand(small_run *run) {
    loom_parameter *const *parameters;
    int64_t count;
    loom_comm *dp = loom_fabric_group(run->fabric, LOOM_GROUP_DP);
    LOOM_TRY(loom_parallel_parameters(run->parallel, &parameters, &count));
    for (int64_t i = 0; i < count; i++)
        LOOM_TRY(loom_all_reduce(
            dp, parameters[i]->grad, parameters[i]->grad, loom_parameter_count(parameters[i]), LOOM_F32, LOOM_SUM));
    return LOOM_OK;
}

static loom_status train_by_hand(loom_rank *rank, void *argument) {
    const pipe_result *wanted = argument;
    pipe_case c = {.ranks = 2, .pytorch = true};
    pipe_case filled = pipe_filled(&c);
    loom_megatron_strategy_config strategy = pipe_strategy(&filled);
    loom_model_config model = pipe_model(&filled);
    loom_optimizer_config optim = loom_optimizer_config_default();
    small_run run = {0};
    loom_module *module;
    uint64_t weights = 0xcbf29ce484222325u;
    optim.lr = 0.01;
    LOOM_TRY(loom_fabric_create(rank, &strategy, NULL, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(loom_fabric_set_no_ddp_communication_hook(run.fabric, true));
    LOOM_TRY(loom_gpt_create(run.fabric, &model, &module));
    LOOM_TRY(loom_fabric_setup_module(run.fabric, module, &run.parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(run.fabric, run.parallel, &optim, NULL, &run.optimizer));
    LOOM_TRY(small_data(&run, LOOM_TRAINING, PIPE_STEPS * filled.global, filled.micro, filled.global));
    for (int t = 0; t < PIPE_STEPS; t++) {
        double loss;
        loom_optimizer_outcome outcome;
        LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
        LOOM_TRY(reduce_by_hand(&run));
        LOOM_TRY(loom_optimizer_step(run.optimizer, &outcome));
        CHECK(loss == wanted->loss[t] && outcome.grad_norm == wanted->norm[t], "step %d: loss %.17g, norm %.17g", t,
            loss, outcome.grad_norm);
    }
    LOOM_TRY(loom_gpt_visit(run.parallel, false, pipe_hash, &weights));
    CHECK(weights == wanted->weights, "the weights differ");
    small_destroy(&run);
    return LOOM_OK;
}

static void who_reduces_by_hand_has_the_same_bits(void **state) {
    (void)state;
    const pipe_case plain = {.ranks = 2};
    pipe_result wanted = pipe_run(&plain);
    must_run(2, train_by_hand, &wanted);
}

static loom_status ask_for_the_hook(loom_rank *rank, void *argument) {
    (void)argument;
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    loom_fabric *fabric;
    LOOM_TRY(loom_fabric_create(rank, &strategy, NULL, &fabric));
    CHECK(loom_fabric_set_no_ddp_communication_hook(fabric, true) == LOOM_ERR_CONFIG &&
              strstr(loom_error_message(), "expected ddp pytorch"),
        "%s", loom_error_message());
    CHECK(!loom_fabric_set_no_ddp_communication_hook(fabric, false), "%s", loom_error_message());
    loom_fabric_destroy(fabric);
    return LOOM_OK;
}

static void megatrons_wrapper_has_no_hook_to_leave_out(void **state) {
    (void)state;
    must_run(1, ask_for_the_hook, NULL);
}

/* Gradients and parameters read from outside, between steps. */
static loom_status read_from_outside(loom_rank *rank, void *argument) {
    const bool *sharded = argument;
    pipe_case c = {.ranks = 4, .sharded = *sharded, .overlap = true, .gather = *sharded};
    pipe_case filled = pipe_filled(&c);
    small_run run;
    LOOM_TRY(pipe_start(rank, &filled, &run));
    LOOM_TRY(small_data(&run, LOOM_TRAINING, PIPE_STEPS * filled.global, filled.micro, filled.global));
    loom_comm *world = loom_rank_world(rank);
    for (int t = 0; t < PIPE_STEPS; t++) {
        double loss;
        uint64_t hash[2] = {1, 1}, first[2];
        loom_parameter *const *parameters;
        int64_t count;
        LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &loss));
        LOOM_TRY(loom_parallel_gather_gradients(run.parallel));
        LOOM_TRY(loom_gpt_visit(run.parallel, true, pipe_hash, &hash[0]));
        LOOM_TRY(loom_optimizer_step(run.optimizer, NULL));
        LOOM_TRY(loom_parallel_parameters(run.parallel, &parameters, &count));
        for (int64_t i = 0; i < count; i++)
            LOOM_TRY(pipe_hash(
                &hash[1], parameters[i]->name, parameters[i]->dims, parameters[i]->shape, parameters[i]->data));
        memcpy(first, hash, sizeof hash);
        LOOM_TRY(loom_broadcast(world, first, 2, LOOM_I64, 0));
        CHECK(memcmp(first, hash, sizeof hash) == 0, "step %d: rank %d reads other numbers than rank 0", t,
            loom_rank_index(rank));
    }
    small_destroy(&run);
    return LOOM_OK;
}

static void gradients_and_parameters_are_whole_for_who_asks(void **state) {
    (void)state;
    bool sharded = false;
    must_run(4, read_from_outside, &sharded);
    sharded = true;
    must_run(4, read_from_outside, &sharded);
}

/* The toy's operations read parameters without a word, and it has four of one element each. */
static const int toy_labels[8][TOY_SEQUENCE] = {
    {1, 2, 3}, {4, -1, -1}, {1, 1, 1}, {2, 2, 2}, {3, 1, 2}, {5, 5, -1}, {1, 4, 1}, {2, 2, 6}};

typedef struct toy_job {
    bool sharded;
    double losses[4]; /* training and validation by turns */
} toy_job;

static loom_status train_toy(loom_rank *rank, void *argument) {
    toy_job *job = argument;
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    toy own = {.parameters = 4, .uses = 4, .initial = 2, .use = {{0, 1}, {1, -2}, {2, 0}, {3, 0.5f}}};
    toy_rows rows = {toy_labels};
    loom_dataset dataset = toy_dataset(&rows, 8);
    loom_dataloader loader = {.dataset = &dataset, .micro_batch_size = 1, .global_batch_size = 2};
    loom_optimizer_config optim = loom_optimizer_config_default();
    small_run run = {0};
    double losses[4];
    optim.lr = 0.1;
    config.ddp_config.use_distributed_optimizer = config.ddp_config.overlap_param_gather = job->sharded;
    /* A bucket a parameter: what is not waited for has not been started. */
    config.ddp_config.overlap_grad_reduce = true;
    config.ddp_config.bucket_size = 1;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &run.fabric));
    LOOM_TRY(loom_fabric_launch(run.fabric));
    LOOM_TRY(loom_fabric_setup_module(run.fabric, toy_module(&own), &run.parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(run.fabric, run.parallel, &optim, NULL, &run.optimizer));
    LOOM_TRY(loom_fabric_setup_dataloader(run.fabric, &loader, &run.batches));
    for (int t = 0; t < 4; t += 2) {
        LOOM_TRY(loom_parallel_training_step(run.parallel, run.batches, &losses[t]));
        LOOM_TRY(loom_optimizer_step(run.optimizer, NULL));
        LOOM_TRY(loom_parallel_validation_step(run.parallel, run.batches, &losses[t + 1]));
    }
    if (loom_rank_index(rank) == 0)
        memcpy(job->losses, losses, sizeof losses);
    small_destroy(&run);
    return LOOM_OK;
}

static void a_module_of_ones_own_reads_whole_parameters(void **state) {
    (void)state;
    toy_job plain = {.sharded = false}, sharded = {.sharded = true};
    must_run(2, train_toy, &plain);
    must_run(2, train_toy, &sharded);
    for (int t = 0; t < 4; t++)
        assert_true(sharded.losses[t] == plain.losses[t]);
    assert_true(plain.losses[1] != plain.losses[3]);
}

static void three_data_parallel_ranks_follow_one_rank(void **state) {
    (void)state;
    const pipe_case alone = {.ranks = 1, .global = 6}, three = {.ranks = 3, .global = 6, .sharded = true};
    pipe_result wanted = pipe_run(&alone), found = pipe_run(&three);
    pipe_must_be_near(&three, &found, &wanted);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_over_data_parallel_ranks_change_no_bit),
        cmocka_unit_test(shards_beside_tensor_parallelism_change_no_bit),
        cmocka_unit_test(shards_beside_a_pipeline_change_no_bit),
        cmocka_unit_test(several_instances_have_the_bits_of_the_plain_optimizer),
        cmocka_unit_test(three_data_parallel_ranks_follow_one_rank),
        cmocka_unit_test(gradients_and_parameters_are_whole_for_who_asks),
        cmocka_unit_test(a_module_of_ones_own_reads_whole_parameters),
        cmocka_unit_test(the_pytorch_wrapper_has_the_bits_of_the_plain_optimizer),
        cmocka_unit_test(who_reduces_by_hand_has_the_same_bits),
        cmocka_unit_test(megatrons_wrapper_has_no_hook_to_leave_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
