/* What is said of a pipeline before any rank starts: layers on stages, microbatches in a schedule, ramp-ups. */
#include <megaloom/config.h>
#include <megaloom/stages.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define TEST(name) static void name(void **state)

static const char sound[] =
    "steps: 10\nmodel: {architecture: llama, num_layers: 8, hidden_size: 64, ffn_hidden_size: 128,\n  "
    "num_attention_heads: 8, seq_length: 64}\ndata: {kind: mock, micro_batch_size: 2, global_batch_size: 16}\n";

enum { OVERRIDES_MAX = 8 };

static loom_run_config *load(const char *const overrides[]) {
    loom_run_config *config = NULL;
    int64_t count = 0;
    while (count < OVERRIDES_MAX && overrides[count])
        count++;
    if (loom_run_config_from_text("run.yaml", sound, strlen(sound), overrides, count, &config) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    return config;
}

static void expect(loom_run_config *config, int64_t world, loom_status status, const char *message) {
    loom_error_clear();
    loom_status found = loom_run_config_check(config, world);
    loom_run_config_destroy(config);
    assert_string_equal(loom_error_message(), message);
    assert_int_equal(found, status);
}

#define WITH(...) load((const char *const[OVERRIDES_MAX]){__VA_ARGS__})
#define PP(n) "strategy.pipeline_model_parallel_size=" #n
#define VP(n) "strategy.virtual_pipeline_model_parallel_size=" #n
#define GROUP(n) "strategy.microbatch_group_size_per_vp_stage=" #n
#define BATCH(n) "data.global_batch_size=" #n

TEST(sound_pipelines_pass) {
    (void)state;
    expect(WITH(PP(2)), 2, LOOM_OK, "");
    expect(WITH(PP(2)), 0, LOOM_OK, "");
    expect(WITH(PP(4), VP(2)), 4, LOOM_OK, "");
    expect(WITH(PP(2), VP(2), GROUP(4)), 2, LOOM_OK, "");
    expect(WITH(PP(2), "model.num_layers_in_first_pipeline_stage=3"), 2, LOOM_OK, "");
    expect(WITH(PP(3), "model.account_for_loss_in_pipeline_split=true"), 3, LOOM_OK, "");
    expect(WITH(PP(3), "model.balanced_pipeline_split=true"), 3, LOOM_OK, "");
    expect(WITH(PP(2), "model.pipeline_model_parallel_layout=\"E|t*4|t*4|L\""), 2, LOOM_OK, "");
    /* Without chunks any number of microbatches is a schedule. */
    expect(WITH(PP(8), BATCH(2)), 8, LOOM_OK, "");
}

TEST(layers_that_do_not_divide_are_refused_with_the_nearest_that_do) {
    (void)state;
    expect(WITH(PP(4), "model.num_layers=30"), 4, LOOM_ERR_CONFIG,
        "model.num_layers 30 is not a multiple of pipeline_model_parallel_size 4 (balanced_pipeline_split would make "
        "them 8, 8, 7, 7); nearest legal num_layers 28 or 32, pipeline_model_parallel_size 2, or "
        "balanced_pipeline_split true");
    expect(WITH("model.pipeline_model_parallel_layout=Et|tL", PP(2)), 2, LOOM_ERR_CONFIG,
        "model.pipeline_model_parallel_layout: 'Et|tL' places 2 layers (t), expected num_layers 8; nearest legal "
        "num_layers 2");
}

TEST(a_fault_that_several_parts_find_is_named_once) {
    (void)state;
    expect(WITH(VP(2)), 1, LOOM_ERR_CONFIG,
        "strategy.virtual_pipeline_model_parallel_size is 2, but pipeline_model_parallel_size is 1: expected at least "
        "2 pipeline stages, or no virtual ones; nearest legal virtual_pipeline_model_parallel_size null");
    expect(WITH(PP(4), GROUP(3), VP(2)), 4, LOOM_ERR_CONFIG,
        "strategy.microbatch_group_size_per_vp_stage: found 3, expected at least strategy.pipeline_model_parallel_size "
        "4, or null; nearest legal microbatch_group_size_per_vp_stage 4");
}

TEST(microbatches_that_make_no_schedule_are_refused_with_the_nearest_that_do) {
    (void)state;
    /* 4 stages of 2 chunks: 10 microbatches leave 2 for the last group, 8 leave none. */
    expect(WITH(PP(4), VP(2), BATCH(20)), 4, LOOM_ERR_CONFIG,
        "10 microbatches in groups of 4 (microbatch_group_size_per_vp_stage) leave a last group of 2: expected none, "
        "or at least pipeline_model_parallel_size 4 (data.global_batch_size 20, data.micro_batch_size 2, 1 "
        "data-parallel rank); nearest legal global_batch_size 16 or 24, or micro_batch_size 1 or 5");
    expect(WITH(PP(4), VP(2), BATCH(16)), 4, LOOM_OK, "");
    expect(WITH(PP(4), VP(2), BATCH(20), GROUP(6)), 4, LOOM_OK, "");
    /* Data-parallel ranks share the batch. */
    expect(WITH(PP(4), VP(2), BATCH(40)), 8, LOOM_ERR_CONFIG,
        "10 microbatches in groups of 4 (microbatch_group_size_per_vp_stage) leave a last group of 2: expected none, "
        "or at least pipeline_model_parallel_size 4 (data.global_batch_size 40, data.micro_batch_size 2, 2 "
        "data-parallel ranks); nearest legal global_batch_size 32 or 48, or micro_batch_size 1 or 5");
    expect(WITH(PP(2), VP(2), GROUP(9)), 2, LOOM_ERR_CONFIG,
        "strategy.microbatch_group_size_per_vp_stage is 9: expected from pipeline_model_parallel_size 2 to the 8 "
        "microbatches of a step (data.global_batch_size 16, data.micro_batch_size 2, 1 data-parallel rank); nearest "
        "legal microbatch_group_size_per_vp_stage 8, global_batch_size 18, or micro_batch_size 1");
    /* No batch size means one microbatch. */
    expect(WITH(PP(2), VP(2), "data.global_batch_size=null"), 2, LOOM_ERR_CONFIG,
        "1 microbatch with virtual_pipeline_model_parallel_size 2: expected at least one for each of the 2 stages of "
        "pipeline_model_parallel_size (data.global_batch_size null is 2, data.micro_batch_size 2, 1 data-parallel "
        "rank); nearest legal virtual_pipeline_model_parallel_size 1, or global_batch_size 4");
    /* Chunks that only the layout names. */
    expect(WITH(PP(2), BATCH(6), "model.pipeline_model_parallel_layout=\"E|t*4|t*4|L\""), 2, LOOM_ERR_CONFIG,
        "3 microbatches in groups of 2 (microbatch_group_size_per_vp_stage) leave a last group of 1: expected none, or "
        "at least pipeline_model_parallel_size 2 (data.global_batch_size 6, data.micro_batch_size 2, 1 data-parallel "
        "rank); nearest legal global_batch_size 4 or 8, or micro_batch_size 1 or 3");
}

/* An empty message: no size of the ramp-up is illegal for the pipeline. */
static void expect_ramp_up(const char *const overrides[], const int64_t ramp[3], int64_t world, const char *message) {
    loom_run_config *config = load(overrides);
    memcpy(config->data.rampup_batch_size, ramp, sizeof config->data.rampup_batch_size);
    loom_error_clear();
    loom_status status = loom_run_config_check(config, world);
    loom_run_config_destroy(config);
    if (*message ? !strstr(loom_error_message(), message) : strstr(loom_error_message(), "passes through") != NULL)
        fail_msg("%s", loom_error_message());
    if (*message)
        assert_int_equal(status, LOOM_ERR_CONFIG);
}

TEST(a_ramp_up_that_passes_through_an_illegal_size_is_refused_with_the_size) {
    (void)state;
    const char *const interleaved[OVERRIDES_MAX] = {PP(2), VP(2)};
    expect_ramp_up(interleaved, (const int64_t[]){4, 4, 48}, 4,
        "data.rampup_batch_size: [4, 4, 48] passes through batch size 4: 1 microbatch with "
        "virtual_pipeline_model_parallel_size 2: expected at least one for each of the 2 stages of "
        "pipeline_model_parallel_size");
    /* 8, 12: the second gives 3 microbatches. */
    expect_ramp_up(interleaved, (const int64_t[]){8, 4, 48}, 4, "passes through batch size 12: ");
    expect_ramp_up(interleaved, (const int64_t[]){8, 8, 48}, 4, "");
    const char *const plain[OVERRIDES_MAX] = {PP(2)};
    expect_ramp_up(plain, (const int64_t[]){4, 4, 48}, 4, "");
    /* Less than a microbatch a rank is a fault of the batch, told once. */
    expect_ramp_up(plain, (const int64_t[]){2, 2, 48}, 4,
        "data.rampup_batch_size: [2, 2, 48] on world_size 4: after 0 samples of the ramp-up: global_batch_size is 2, "
        "expected a multiple of micro_batch_size 2 x data-parallel size 2; nearest legal world_size 2, or "
        "micro_batch_size 1, or rampup_batch_size [4, 4, 48]");
    /* Endless ramps end at once. */
    const char *const huge[OVERRIDES_MAX] = {PP(2), VP(2), "data.micro_batch_size=1", BATCH(9007199254740992)};
    expect_ramp_up(huge, (const int64_t[]){2, 1, 48}, 2, "microbatches in");
    const char *const wide[OVERRIDES_MAX] = {PP(2), VP(2), "data.micro_batch_size=1", BATCH(536870912000)};
    expect_ramp_up(wide, (const int64_t[]){4, 2, 48}, 2, "");
    expect_ramp_up(wide, (const int64_t[]){4, INT64_MAX, 48}, 2, "");
    const char *const grouped[OVERRIDES_MAX] = {
        PP(2), VP(2), "data.micro_batch_size=1", BATCH(536870912000), GROUP(268435456000)};
    expect_ramp_up(
        grouped, (const int64_t[]){4, 2, 48}, 2, "passes through 268435455998 batch sizes, expected at most");
}

TEST(a_strategy_made_in_code_is_checked_in_the_same_words) {
    (void)state;
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    strategy.virtual_pipeline_model_parallel_size = 2;
    assert_int_equal(loom_megatron_strategy_config_check(&strategy), LOOM_ERR_CONFIG);
    assert_string_equal(loom_error_message(), "strategy.virtual_pipeline_model_parallel_size is 2, but "
                                              "pipeline_model_parallel_size is 1: expected at least 2 "
                                              "pipeline stages, or no virtual ones");
    strategy.pipeline_model_parallel_size = 2;
    assert_int_equal(loom_megatron_strategy_config_check(&strategy), LOOM_OK);
    strategy.microbatch_group_size_per_vp_stage = 1;
    assert_int_equal(loom_megatron_strategy_config_check(&strategy), LOOM_ERR_CONFIG);
}

/* Null is kept as 0, and a 0 that is written is not it. */
TEST(a_written_zero_is_no_null) {
    (void)state;
    static const char *const fields[] = {"strategy.virtual_pipeline_model_parallel_size",
        "strategy.microbatch_group_size_per_vp_stage", "steps", "strategy.bucket_cap_mb"};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        char override[96], text[160];
        const char *const overrides[] = {override};
        loom_run_config *config = NULL;
        snprintf(override, sizeof override, "%s=0", fields[i]);
        snprintf(text, sizeof text, "%s: found 0, expected a", fields[i]);
        assert_int_equal(loom_run_config_load(NULL, overrides, 1, &config), LOOM_ERR_CONFIG);
        assert_non_null(strstr(loom_error_message(), text));
        assert_non_null(strstr(loom_error_message(), "or null"));
        snprintf(override, sizeof override, "%s=null", fields[i]);
        assert_int_equal(loom_run_config_load(NULL, overrides, 1, &config), LOOM_OK);
        loom_run_config_destroy(config);
    }
}

TEST(an_uneven_split_has_the_parameters_of_the_model) {
    (void)state;
    static const int64_t layers_on_stages[][2] = {{30, 4}, {10, 3}, {7, 2}};
    for (size_t i = 0; i < sizeof layers_on_stages / sizeof *layers_on_stages; i++) {
        loom_run_config *config = load((const char *const[OVERRIDES_MAX]){NULL});
        loom_model_config model = config->model.config;
        model.num_layers = layers_on_stages[i][0];
        loom_stage_split split = {.layers = model.num_layers,
            .pipeline_model_parallel_size = layers_on_stages[i][1],
            .balanced_pipeline_split = true};
        loom_stage stages[4];
        loom_model_description whole, stage;
        int64_t parameters = 0;
        model.vocab_size = 257;
        assert_int_equal(loom_stage_split_make(&split, stages), LOOM_OK);
        assert_int_equal(loom_model_describe(&model, &whole), LOOM_OK);
        for (int64_t s = 0; s < layers_on_stages[i][1]; s++) {
            assert_int_equal(loom_model_describe_stage(&model, &stages[s], &stage), LOOM_OK);
            parameters += stage.total;
        }
        assert_int_equal(parameters, whole.total);
        loom_run_config_destroy(config);
    }
}

TEST(all_faults_of_a_pipeline_are_named_at_once) {
    (void)state;
    expect(WITH(PP(4), VP(2), BATCH(20), "model.num_layers=30", "model.num_layers_in_first_pipeline_stage=3",
               "model.account_for_loss_in_pipeline_split=true"),
        4, LOOM_ERR_CONFIG,
        "model.account_for_loss_in_pipeline_split: found together with num_layers_in_first_pipeline_stage, expected "
        "one way to cut the layers\n10 microbatches in groups of 4 (microbatch_group_size_per_vp_stage) leave a last "
        "group of 2: expected none, or at least pipeline_model_parallel_size 4 (data.global_batch_size 20, "
        "data.micro_batch_size 2, 1 data-parallel rank); nearest legal global_batch_size 16 or 24, or micro_batch_size "
        "1 or 5");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sound_pipelines_pass),
        cmocka_unit_test(layers_that_do_not_divide_are_refused_with_the_nearest_that_do),
        cmocka_unit_test(a_fault_that_several_parts_find_is_named_once),
        cmocka_unit_test(microbatches_that_make_no_schedule_are_refused_with_the_nearest_that_do),
        cmocka_unit_test(a_ramp_up_that_passes_through_an_illegal_size_is_refused_with_the_size),
        cmocka_unit_test(a_strategy_made_in_code_is_checked_in_the_same_words),
        cmocka_unit_test(a_written_zero_is_no_null),
        cmocka_unit_test(an_uneven_split_has_the_parameters_of_the_model),
        cmocka_unit_test(all_faults_of_a_pipeline_are_named_at_once),
    };
    return cmocka_run_group_tests_name("unit.config_pipeline", tests, NULL, NULL);
}
