/* Every kind of broken run file gives the exact line that repairs it. Each case is a text and the whole message. */
#include <megaloom/config.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void expect(
    const char *text, const char *const *overrides, int64_t count, loom_status status, const char *message) {
    loom_run_config *config = NULL;
    loom_status found = loom_run_config_from_text("run.yaml", text, strlen(text), overrides, count, &config);
    assert_string_equal(loom_error_message(), message);
    assert_int_equal(found, status);
    assert_null(config);
}

static void expect_file(const char *text, loom_status status, const char *message) {
    expect(text, NULL, 0, status, message);
}

static void expect_override(const char *override, loom_status status, const char *message) {
    expect("", &override, 1, status, message);
}

#define TEST(name) static void name(void **state)

TEST(text_that_is_no_yaml_is_named_by_place) {
    (void)state;
    expect_file("strategy:\n  a: [1, 2\nsteps: 3\n", LOOM_ERR_FORMAT,
        "run.yaml:3:6: did not find expected ',' or ']', while parsing a flow sequence");
}

TEST(bytes_that_are_no_utf8_are_named_by_offset) {
    (void)state;
    expect_file("seed: \xff\xfe\n", LOOM_ERR_FORMAT, "run.yaml: byte 6: invalid leading UTF-8 octet");
}

TEST(a_second_document_is_refused) {
    (void)state;
    expect_file(
        "seed: 1\n---\nseed: 2\n", LOOM_ERR_FORMAT, "run.yaml:2:1: a second document begins here, expected only one");
}

TEST(aliases_are_refused) {
    (void)state;
    expect_file(
        "output: &a x\ndevice: *a\n", LOOM_ERR_FORMAT, "run.yaml:2:9: aliases are not accepted; write the value twice");
}

TEST(an_alias_to_its_own_parent_is_refused) {
    (void)state;
    expect_file(
        "data: &a {path: *a}\n", LOOM_ERR_FORMAT, "run.yaml:1:17: aliases are not accepted; write the value twice");
}

TEST(tags_are_refused) {
    (void)state;
    expect_file("seed: !!python/object:os.system 1\n", LOOM_ERR_FORMAT, "run.yaml:1:7: tags (!…) are not accepted");
}

TEST(a_key_that_is_no_name_is_refused) {
    (void)state;
    expect_file("? [seed]\n: 1\n", LOOM_ERR_FORMAT, "run.yaml:1:3: a key must be a plain name");
}

TEST(deep_nesting_is_refused) {
    (void)state;
    expect_file("a: [[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]\n", LOOM_ERR_FORMAT,
        "run.yaml:1:19: nested more than 16 levels deep");
}

TEST(endless_nesting_ends_at_once) {
    (void)state;
    static char text[1 << 20];
    static const char *const pieces[] = {"[", "- ", "{a: ", "? "};
    for (size_t p = 0; p < sizeof pieces / sizeof *pieces; p++) {
        size_t length = strlen(pieces[p]);
        for (size_t i = 0; i < sizeof text; i++)
            text[i] = pieces[p][i % length];
        loom_run_config *config = NULL;
        assert_int_equal(loom_run_config_from_text("run.yaml", text, sizeof text, NULL, 0, &config), LOOM_ERR_FORMAT);
        assert_non_null(strstr(loom_error_message(), "nested more than 16 levels deep"));
    }
}

TEST(too_many_values_are_refused) {
    (void)state;
    static char text[300000];
    text[0] = '[';
    for (size_t i = 1; i < sizeof text; i++)
        text[i] = i % 2 ? '1' : ',';
    loom_run_config *config = NULL;
    assert_int_equal(loom_run_config_from_text("run.yaml", text, sizeof text, NULL, 0, &config), LOOM_ERR_FORMAT);
    assert_non_null(strstr(loom_error_message(), "more than 65536 values"));
}

TEST(a_text_above_the_size_limit_is_refused) {
    (void)state;
    static char text[(1 << 20) + 2];
    memset(text, ' ', sizeof text - 1);
    loom_run_config *config = NULL;
    assert_int_equal(loom_run_config_from_text("run.yaml", text, sizeof text - 1, NULL, 0, &config), LOOM_ERR_FORMAT);
    assert_string_equal(loom_error_message(), "run.yaml: 1048577 bytes, expected at most 1048576");
}

TEST(a_nul_inside_a_string_is_refused) {
    (void)state;
    expect_file("output: \"a\\0b\"\n", LOOM_ERR_FORMAT, "run.yaml:1:9: a NUL character in a string");
}

TEST(a_list_in_place_of_the_whole_is_refused) {
    (void)state;
    expect_file("- seed\n- 1\n", LOOM_ERR_CONFIG, "run.yaml:1:1: found a list, expected a mapping of fields");
}

TEST(a_word_for_an_integer_is_named) {
    (void)state;
    expect_file("seed: 1\nstrategy:\n  tensor_model_parallel_size: two\n", LOOM_ERR_CONFIG,
        "run.yaml:3:31: strategy.tensor_model_parallel_size: found \"two\", expected an integer >= 1");
}

TEST(a_quoted_number_is_a_string) {
    (void)state;
    expect_file(
        "steps: \"3\"\n", LOOM_ERR_CONFIG, "run.yaml:1:8: steps: found \"3\", expected an integer >= 1, or null");
}

TEST(a_fraction_for_an_integer_is_named) {
    (void)state;
    expect_file("steps: 2.5\n", LOOM_ERR_CONFIG, "run.yaml:1:8: steps: found 2.5, expected an integer >= 1, or null");
}

TEST(an_integer_beyond_64_bits_is_named) {
    (void)state;
    expect_file("seed: 99999999999999999999\n", LOOM_ERR_CONFIG,
        "run.yaml:1:7: seed: found 99999999999999999999, expected an integer from 0 to 4294967295");
}

TEST(an_integer_below_its_range_is_named) {
    (void)state;
    expect_file("data: {micro_batch_size: 0}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:26: data.micro_batch_size: found 0, expected an integer >= 1");
}

TEST(a_number_outside_its_range_is_named) {
    (void)state;
    expect_file("model:\n  hidden_dropout: 1.0\noptim: {lr: 0.0}\n", LOOM_ERR_CONFIG,
        "run.yaml:2:19: model.hidden_dropout: found 1, expected a number from 0 to below 1 in fp32\n"
        "run.yaml:3:13: optim.lr: found 0, expected a number > 0");
}

TEST(infinity_is_no_number_here) {
    (void)state;
    expect_file(
        "optim:\n  lr: .inf\n", LOOM_ERR_CONFIG, "run.yaml:2:7: optim.lr: found \".inf\", expected a number > 0");
}

TEST(a_number_for_a_flag_is_named) {
    (void)state;
    expect_file("trace: 1\n", LOOM_ERR_CONFIG, "run.yaml:1:8: trace: found 1, expected true or false");
}

TEST(yes_is_a_string_by_the_core_schema) {
    (void)state;
    expect_file("trace: yes\n", LOOM_ERR_CONFIG, "run.yaml:1:8: trace: found \"yes\", expected true or false");
}

TEST(null_where_there_is_no_default_meaning_is_named) {
    (void)state;
    expect_file("device:\n", LOOM_ERR_CONFIG, "run.yaml:1:8: device: found null, expected one of cpu, cuda");
}

TEST(a_mapping_for_a_value_is_named) {
    (void)state;
    expect_file("seed: {a: 1}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:7: seed: found a mapping, expected an integer from 0 to 4294967295");
}

TEST(a_value_for_a_section_is_named) {
    (void)state;
    expect_file(
        "optim: adam\n", LOOM_ERR_CONFIG, "run.yaml:1:8: optim: found \"adam\", expected a mapping of its fields");
}

TEST(an_unknown_name_offers_the_nearest) {
    (void)state;
    expect_file("optim: {schedule: consine}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:19: optim.schedule: found \"consine\", expected one of cosine, megatron-constant, megatron-linear, "
        "megatron-cosine, megatron-inverse-square-root, megatron-WSD, CosineAnnealing, WarmupAnnealing, WarmupPolicy, "
        "WarmupHoldPolicy, SquareAnnealing, SquareRootAnnealing, NoamAnnealing, NoamHoldAnnealing, "
        "InverseSquareRootAnnealing, T5InverseSquareRootAnnealing, PolynomialDecayAnnealing, "
        "PolynomialHoldDecayAnnealing, WarmupHoldAnnealLinear, WarmupHoldAnnealOneMinusSquareRoot; did you mean "
        "cosine?");
}

TEST(an_unknown_ddp_says_what_is_accepted) {
    (void)state;
    expect_file("strategy: {ddp: fsdp}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:17: strategy.ddp: found \"fsdp\", expected one of megatron, pytorch, or a mapping of its fields");
}

TEST(an_unknown_field_offers_the_nearest_of_its_section) {
    (void)state;
    expect_file("model:\n  num_layer: 4\n", LOOM_ERR_CONFIG,
        "run.yaml:2:3: model.num_layer: unknown field; did you mean model.num_layers?");
}

TEST(an_unknown_section_offers_the_nearest) {
    (void)state;
    expect_file("stategy: {}\n", LOOM_ERR_CONFIG, "run.yaml:1:1: stategy: unknown field; did you mean strategy?");
}

TEST(a_field_in_the_wrong_section_is_sent_to_its_own) {
    (void)state;
    expect_file("tensor_model_parallel_size: 2\n", LOOM_ERR_CONFIG,
        "run.yaml:1:1: tensor_model_parallel_size: unknown field; did you mean strategy.tensor_model_parallel_size?");
}

TEST(a_field_that_resembles_nothing_is_just_unknown) {
    (void)state;
    expect_file("wibble_wobble: 2\n", LOOM_ERR_CONFIG, "run.yaml:1:1: wibble_wobble: unknown field");
}

TEST(a_field_given_twice_is_named_with_both_lines) {
    (void)state;
    expect_file("seed: 1\nsteps: 2\nseed: 1\n", LOOM_ERR_CONFIG, "run.yaml:3:1: seed: given twice, first on line 1");
}

TEST(a_section_given_twice_is_named_with_both_lines) {
    (void)state;
    expect_file("log: {every: 1}\nlog: {tensorboard: false}\n", LOOM_ERR_CONFIG,
        "run.yaml:2:1: log: given twice, first on line 1");
}

TEST(a_blend_without_a_weight_is_named) {
    (void)state;
    expect_file("data: {path: [1, a, b, c]}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:21: data.path: the weight of c: found \"b\", expected a number > 0");
    expect_file("data: {path: [0, a]}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:15: data.path: the weight of a: found 0, expected a number > 0");
    expect_file("data: {path: [-1, a, 2, b, nan, c]}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:15: data.path: the weight of a: found -1, expected a number > 0\n"
        "run.yaml:1:28: data.path: the weight of c: found \"nan\", expected a number > 0");
}

TEST(numbers_and_prefixes_that_do_not_take_turns_are_named) {
    (void)state;
    static const char *const odd[][2] = {{"0.3", "1"}, {"0.3, a, 0.7", "3"}, {"a, nan, b", "3"}, {"-.inf", "1"}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        char text[128], message[400];
        snprintf(text, sizeof text, "data: {path: [%s]}\n", odd[i][0]);
        snprintf(message, sizeof message,
            "run.yaml:1:14: data.path: found %s entries and numbers among them, expected a weight before each prefix, "
            "or "
            "prefixes alone (in quotes where they look like numbers)",
            odd[i][1]);
        expect_file(text, LOOM_ERR_CONFIG, message);
    }
    expect_file("data: {path: [nan, a]}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:15: data.path: the weight of a: found \"nan\", expected a number > 0");
    expect_file("data: {path: [inf, a]}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:15: data.path: the weight of a: found \"inf\", expected a number > 0");
    expect_file("data: {path: [a, 0.3]}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:15: data.path: the weight of 0.3: found \"a\", expected a number > 0\n"
        "run.yaml:1:18: data.path: entry 2: found 0.3, expected a prefix (in quotes where it looks like something "
        "else)");
    expect_file("data: {path: [a, null]}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:18: data.path: entry 2: found null, expected a prefix (in quotes where it looks like something "
        "else)");
    expect_file("data: {path: [true, a]}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:15: data.path: entry 1: found true, expected a prefix (in quotes where it looks like something "
        "else)");
    expect_file("data: {path: [a, [b]]}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:18: data.path: entry 2: found a list, expected a prefix");
}

TEST(a_mapping_is_no_blend) {
    (void)state;
    static const char message[] =
        "run.yaml:1:14: data.path: found a mapping, expected a prefix, a list of prefixes, or of weights > 0 "
        "and prefixes in turn, or null";
    expect_file("data: {path: {0.7: books, 0.3: web}}\n", LOOM_ERR_CONFIG, message);
    expect_file("data: {path: {0.7: books}}\n", LOOM_ERR_CONFIG, message);
    expect_file("data: {path: {}}\n", LOOM_ERR_CONFIG, message);
    expect_file("data: {path: []}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:14: data.path: found a list, expected a prefix, a list of prefixes, or of weights > 0 and prefixes "
        "in turn, or null");
}

TEST(a_wrong_list_is_told_with_its_entries) {
    (void)state;
    expect_file("model: {moe_router_load_balancing_type: [aux_loss, foo]}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:41: model.moe_router_load_balancing_type: found [\"aux_loss\", \"foo\"], expected one of aux_loss, "
        "seq_aux_loss, global_aux_loss, sinkhorn, none, or a list of at most 3 of them");
    expect_file("model: {moe_layer_freq: [0, [1], {a: b}, null]}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:25: model.moe_layer_freq: found [0, a list, a mapping, null], expected an integer >= 1, or a list "
        "of 0 and 1, one for each layer, of at most 512");
    expect_file(
        "model: {moe_layer_freq: [0, 1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000, 1000000000, "
        "10000000000, 100000000000, 1000000000000, 10000000000000, 100000000000000, 1000000000000000]}\n",
        LOOM_ERR_CONFIG,
        "run.yaml:1:25: model.moe_layer_freq: found a list, expected an integer >= 1, or a list of 0 and 1, one for "
        "each layer, of at most 512");
}

TEST(what_would_fail_in_the_run_is_named_before_it) {
    (void)state;
    expect_file("seed: 5000000000\n", LOOM_ERR_CONFIG,
        "run.yaml:1:7: seed: found 5000000000, expected an integer from 0 to 4294967295");
    expect_file(
        "ranks: 5000\n", LOOM_ERR_CONFIG, "run.yaml:1:8: ranks: found 5000, expected an integer from 1 to 4096");
    expect_file("optim: {adam_eps: 0}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:19: optim.adam_eps: found 0, expected a number > 0 in fp32");
    expect_file("optim: {adam_eps: 1e-60}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:19: optim.adam_eps: found 1e-60, expected a number > 0 in fp32");
    expect_file("model: {hidden_dropout: 0.99999999}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:25: model.hidden_dropout: found 0.99999999, expected a number from 0 to below 1 in fp32");
}

TEST(an_object_cannot_come_from_a_file) {
    (void)state;
    expect_file("strategy: {accelerator: cpu}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:25: strategy.accelerator: found \"cpu\", expected nothing: it is an object that only code can set");
}

TEST(model_fields_beside_hf_are_refused) {
    (void)state;
    expect_file("model:\n  hf: gpt2-small\n  num_layers: 3\n", LOOM_ERR_CONFIG,
        "run.yaml:3:15: model.num_layers: decided by model.hf; leave one of the two out");
}

TEST(the_other_architectures_default_beside_hf_is_refused) {
    (void)state;
    expect_file("model:\n  hf: llama-dir\n  normalization: layernorm\n  activation: gelu_tanh\n", LOOM_ERR_CONFIG,
        "run.yaml:3:18: model.normalization: decided by model.hf; leave one of the two out\n"
        "run.yaml:4:15: model.activation: decided by model.hf; leave one of the two out");
}

TEST(all_faults_are_reported_at_once) {
    (void)state;
    expect_file("seed: -1\nstep: 3\ntrace: maybe\n", LOOM_ERR_CONFIG,
        "run.yaml:2:1: step: unknown field; did you mean steps?\n"
        "run.yaml:3:8: trace: found \"maybe\", expected true or false\n"
        "run.yaml:1:7: seed: found -1, expected an integer from 0 to 4294967295");
}

TEST(a_thousand_faults_end_in_a_short_message) {
    (void)state;
    char text[32 * 1024];
    size_t used = 0;
    for (int i = 0; i < 1000; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "wibble_wobble_%d: 1\n", i);
    loom_run_config *config = NULL;
    assert_int_equal(loom_run_config_from_text("run.yaml", text, used, NULL, 0, &config), LOOM_ERR_CONFIG);
    int lines = 0;
    for (const char *c = loom_error_message(); *c; c++)
        lines += *c == '\n';
    assert_in_range(lines, 40, 50);
}

TEST(what_is_not_built_is_refused_by_name) {
    (void)state;
    expect_file("precision: {precision: bf16-mixed, fp8: hybrid, fp4: e2m1}\n", LOOM_ERR_UNSUPPORTED,
        "run.yaml:1:54: not supported yet: precision.fp4=e2m1 (fp4); only null works\n"
        "run.yaml:1:41: not supported yet: precision.fp8=hybrid (fp8); only null works");
    expect_file("strategy: {ddp: {use_megatron_fsdp: true}}\n", LOOM_ERR_UNSUPPORTED,
        "run.yaml:1:37: not supported yet: strategy.ddp.use_megatron_fsdp=true (fully sharded data parallelism); only "
        "false works");
    expect_file("model: {architecture: t5}\n", LOOM_ERR_UNSUPPORTED,
        "run.yaml:1:23: not supported yet: model.architecture=t5 (the architecture); what works: gpt2, llama, "
        "mistral, mixtral, qwen2, qwen3, qwen2_moe, qwen3_moe, gemma");
    expect_file("checkpoint: {save_ckpt_format: zarr}\n", LOOM_ERR_UNSUPPORTED,
        "run.yaml:1:32: not supported yet: checkpoint.save_ckpt_format=zarr (an outdated form, which Megatron-Core has "
        "given up); what works: torch_dist");
    expect_file("strategy: {start_method: fork}\n", LOOM_ERR_UNSUPPORTED,
        "run.yaml:1:26: not supported yet: strategy.start_method=fork (the launcher); what works: popen");
}

TEST(a_fault_outweighs_not_supported_yet) {
    (void)state;
    expect_file("seed: x\nstrategy: {start_method: fork}\n", LOOM_ERR_CONFIG,
        "run.yaml:1:7: seed: found \"x\", expected an integer from 0 to 4294967295\n"
        "run.yaml:2:26: not supported yet: strategy.start_method=fork (the launcher); what works: popen");
}

TEST(fields_of_the_wrapper_that_is_not_used_are_named) {
    (void)state;
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    config.num_distributed_optimizer_instances = 2;
    config.ddp_config.num_distributed_optimizer_instances = 4;
    config.ddp_config.overlap_param_gather = true;
    config.bucket_cap_mb = 5;
    config.static_graph = true;
    assert_int_equal(loom_megatron_strategy_config_check(&config), LOOM_ERR_CONFIG);
    assert_string_equal(loom_error_message(),
        "strategy.num_distributed_optimizer_instances: found 2, expected 1 without "
        "strategy.ddp.use_distributed_optimizer\n"
        "strategy.ddp.num_distributed_optimizer_instances: found 4, expected 1 or that of "
        "strategy.num_distributed_optimizer_instances, 2\n"
        "strategy.ddp.overlap_param_gather: found true without strategy.ddp.use_distributed_optimizer, which gathers "
        "parameters; expected false\n"
        "strategy.bucket_cap_mb: only strategy.ddp pytorch uses it\n"
        "strategy.static_graph: only strategy.ddp pytorch uses it");
    config.bucket_cap_mb = 0;
    config.static_graph = false;
    config.ddp_config.align_grad_reduce = true;
    assert_int_equal(loom_megatron_strategy_config_check(&config), LOOM_ERR_CONFIG);
    assert_non_null(strstr(loom_error_message(),
        "strategy.ddp.align_grad_reduce: found true without strategy.ddp.overlap_grad_reduce, whose reductions it "
        "aligns; expected false"));
    config.ddp_config.overlap_grad_reduce = true;
    config.ddp_config.use_distributed_optimizer = true;
    config.ddp_config.num_distributed_optimizer_instances = 2;
    assert_int_equal(loom_megatron_strategy_config_check(&config), LOOM_OK);
    config = loom_megatron_strategy_config_default();
    config.ddp_config.align_param_gather = true;
    assert_int_equal(loom_megatron_strategy_config_check(&config), LOOM_ERR_CONFIG);
    assert_string_equal(loom_error_message(),
        "strategy.ddp.align_param_gather: found true without strategy.ddp.overlap_param_gather, whose gathers it "
        "aligns; expected false");
    config = loom_megatron_strategy_config_default();
    config.ddp = "pytorch";
    config.find_unused_parameters = config.gradient_as_bucket_view = true;
    assert_int_equal(loom_megatron_strategy_config_check(&config), LOOM_OK);
}

TEST(ddp_fields_beside_pytorch_are_refused_not_ignored) {
    (void)state;
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    config.ddp = "pytorch";
    config.ddp_config.bucket_size = 4;
    config.ddp_config.check_for_nan_in_grad = false;
    assert_int_equal(loom_megatron_strategy_config_check(&config), LOOM_ERR_CONFIG);
    assert_string_equal(loom_error_message(),
        "strategy.ddp.check_for_nan_in_grad: found false, expected true with strategy.ddp pytorch, which has no DDP "
        "configuration\n"
        "strategy.ddp.bucket_size: found 4, expected null with strategy.ddp pytorch, which has no DDP configuration");
    config.ddp = "megatron";
    assert_int_equal(loom_megatron_strategy_config_check(&config), LOOM_OK);
}

TEST(override_faults_are_named) {
    (void)state;
    expect_override("steps", LOOM_ERR_CONFIG, "override: found \"steps\", expected field=value");
    expect_override("=3", LOOM_ERR_CONFIG, "override: found \"=3\", expected field=value");
    expect_override(
        "steps=many", LOOM_ERR_CONFIG, "override: steps: found \"many\", expected an integer >= 1, or null");
    expect_override("model.numlayers=3", LOOM_ERR_CONFIG,
        "override: model.numlayers: unknown field; did you mean model.num_layers?");
    expect_override("modle.num_layers=3", LOOM_ERR_CONFIG, "override: modle: unknown field; did you mean model?");
    expect_override("seed.x=3", LOOM_ERR_CONFIG, "override: seed.x: unknown field; seed is a value, not a section");
    expect_override("data.path=[1, a", LOOM_ERR_CONFIG,
        "override data.path:2:1: did not find expected ',' or ']', while parsing a flow sequence");
    expect_override("strategy.nccl_communicator_config_path=a", LOOM_ERR_UNSUPPORTED,
        "override: not supported yet: strategy.nccl_communicator_config_path=a (NCCL); only null works");
}

TEST(a_missing_file_is_named) {
    (void)state;
    loom_run_config *config = NULL;
    assert_int_equal(loom_run_config_load("/nonexistent/run.yaml", NULL, 0, &config), LOOM_ERR_IO);
    assert_string_equal(loom_error_message(), "/nonexistent/run.yaml: No such file or directory");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_that_is_no_yaml_is_named_by_place),
        cmocka_unit_test(bytes_that_are_no_utf8_are_named_by_offset),
        cmocka_unit_test(a_second_document_is_refused),
        cmocka_unit_test(aliases_are_refused),
        cmocka_unit_test(an_alias_to_its_own_parent_is_refused),
        cmocka_unit_test(tags_are_refused),
        cmocka_unit_test(a_key_that_is_no_name_is_refused),
        cmocka_unit_test(deep_nesting_is_refused),
        cmocka_unit_test(endless_nesting_ends_at_once),
        cmocka_unit_test(too_many_values_are_refused),
        cmocka_unit_test(a_text_above_the_size_limit_is_refused),
        cmocka_unit_test(a_nul_inside_a_string_is_refused),
        cmocka_unit_test(a_list_in_place_of_the_whole_is_refused),
        cmocka_unit_test(a_word_for_an_integer_is_named),
        cmocka_unit_test(a_quoted_number_is_a_string),
        cmocka_unit_test(a_fraction_for_an_integer_is_named),
        cmocka_unit_test(an_integer_beyond_64_bits_is_named),
        cmocka_unit_test(an_integer_below_its_range_is_named),
        cmocka_unit_test(a_number_outside_its_range_is_named),
        cmocka_unit_test(infinity_is_no_number_here),
        cmocka_unit_test(a_number_for_a_flag_is_named),
        cmocka_unit_test(yes_is_a_string_by_the_core_schema),
        cmocka_unit_test(null_where_there_is_no_default_meaning_is_named),
        cmocka_unit_test(a_mapping_for_a_value_is_named),
        cmocka_unit_test(a_value_for_a_section_is_named),
        cmocka_unit_test(an_unknown_name_offers_the_nearest),
        cmocka_unit_test(an_unknown_ddp_says_what_is_accepted),
        cmocka_unit_test(an_unknown_field_offers_the_nearest_of_its_section),
        cmocka_unit_test(an_unknown_section_offers_the_nearest),
        cmocka_unit_test(a_field_in_the_wrong_section_is_sent_to_its_own),
        cmocka_unit_test(a_field_that_resembles_nothing_is_just_unknown),
        cmocka_unit_test(a_field_given_twice_is_named_with_both_lines),
        cmocka_unit_test(a_section_given_twice_is_named_with_both_lines),
        cmocka_unit_test(a_blend_without_a_weight_is_named),
        cmocka_unit_test(numbers_and_prefixes_that_do_not_take_turns_are_named),
        cmocka_unit_test(a_mapping_is_no_blend),
        cmocka_unit_test(a_wrong_list_is_told_with_its_entries),
        cmocka_unit_test(what_would_fail_in_the_run_is_named_before_it),
        cmocka_unit_test(an_object_cannot_come_from_a_file),
        cmocka_unit_test(model_fields_beside_hf_are_refused),
        cmocka_unit_test(the_other_architectures_default_beside_hf_is_refused),
        cmocka_unit_test(all_faults_are_reported_at_once),
        cmocka_unit_test(a_thousand_faults_end_in_a_short_message),
        cmocka_unit_test(what_is_not_built_is_refused_by_name),
        cmocka_unit_test(a_fault_outweighs_not_supported_yet),
        cmocka_unit_test(fields_of_the_wrapper_that_is_not_used_are_named),
        cmocka_unit_test(ddp_fields_beside_pytorch_are_refused_not_ignored),
        cmocka_unit_test(override_faults_are_named),
        cmocka_unit_test(a_missing_file_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
