/* What a run file means: defaults, architectures, spellings, overrides, printing, and checks over several fields. */
#include "base/nearest.h"
#include "config/field.h"
#include <locale.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static loom_run_config *load_with(const char *text, const char *const *overrides, int64_t count) {
    loom_run_config *config = NULL;
    if (loom_run_config_from_text("run.yaml", text, strlen(text), overrides, count, &config) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    return config;
}

static loom_run_config *load(const char *text) {
    return load_with(text, NULL, 0);
}

static void assert_same(const loom_run_config *a, const loom_run_config *b) {
    char text_a[1024], text_b[1024];
    for (int64_t i = 0; i < loom__field_count; i++) {
        loom__field_text(&loom__fields[i], a, text_a, sizeof text_a);
        loom__field_text(&loom__fields[i], b, text_b, sizeof text_b);
        if (strcmp(text_a, text_b) != 0)
            fail_msg("%s: %s, then %s", loom__fields[i].path, text_a, text_b);
    }
}

static loom_status reload(void *context, const char *text, size_t length) {
    return loom_run_config_from_text("printed", text, length, NULL, 0, context);
}

#define TEST(name) static void name(void **state)

TEST(edit_distance_counts_inserts_deletes_replacements_and_swaps) {
    (void)state;
    assert_int_equal(loom__edit_distance("steps", "steps", 3), 0);
    assert_int_equal(loom__edit_distance("step", "steps", 3), 1);
    assert_int_equal(loom__edit_distance("stpes", "steps", 3), 1);
    assert_int_equal(loom__edit_distance("stops", "steps", 3), 1);
    assert_int_equal(loom__edit_distance("", "abc", 3), 3);
    assert_int_equal(loom__edit_distance("kitten", "sitting", 5), 3);
    assert_int_equal(loom__edit_distance("abcdefgh", "stuvwxyz", 2), 3);
    char endless[200];
    memset(endless, 'a', sizeof endless - 1);
    endless[sizeof endless - 1] = '\0';
    assert_int_equal(loom__edit_distance(endless, "a", 4), 5);
}

TEST(every_field_has_a_default_its_own_reader_accepts) {
    (void)state;
    for (int64_t i = 0; i < loom__field_count; i++) {
        const loom__field *field = &loom__fields[i];
        loom_run_config config = loom_run_config_default();
        loom__yaml_node preset = {.kind = LOOM__YAML_SCALAR, .plain = true, .text = field->preset};
        if (!loom__field_set(field, NULL, &preset, &config))
            fail_msg("%s: the default %s is not of its type", field->path, field->preset);
        for (int a = 0; a < LOOM__ARCHITECTURE_COUNT; a++) {
            preset.text = field->by_architecture[a];
            if (preset.text && !loom__field_set(field, NULL, &preset, &config))
                fail_msg("%s: the default %s is not of its type", field->path, preset.text);
        }
        assert_true(field->doc && *field->doc);
        assert_int_equal(loom__field_find(field->path), i);
    }
    loom__faults faults;
    loom__faults_begin(&faults);
    loom_run_config config = loom_run_config_default();
    loom__fields_check(&config, "", &faults);
    assert_string_equal(faults.text, "");
}

TEST(the_defaults_file_loads_back_equal) {
    (void)state;
    loom_run_config standard = loom_run_config_default(), *config = NULL;
    if (loom_run_config_print_defaults(reload, &config) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    assert_same(&standard, config);
    loom_run_config_destroy(config);
}

static const char rich[] =
    "seed: 0x10\nsteps: 0o17\nthreads: 3\noutput: \"runs/a b: \\\"c\\\" #d\\n\"\n"
    "model: {architecture: llama, num_layers: 4, hidden_size: 256, ffn_hidden_size: 704, num_attention_heads: 8,\n"
    "  num_query_groups: 4, seq_length: 256, hidden_dropout: 0.1, recompute: full, window_size: 64}\n"
    "strategy: {tensor_model_parallel_size: 2, sequence_parallel: true, ddp: {bucket_size: 1000}, timeout: 1.5e+1}\n"
    "data: {path: [0.7, books, .3, \"web 2\"], split: \"98,1,1\", micro_batch_size: 8, global_batch_size: 16}\n"
    "optim: {lr: 3e-4, min_lr: 1.0e-5, schedule: megatron-WSD, wsd_decay_steps: 4, adam_beta2: 0.95}\n"
    "validation: {every: 5}\n";

TEST(what_is_printed_loads_back_equal) {
    (void)state;
    loom_run_config *config = load(rich), *again = NULL;
    if (loom_run_config_print(config, reload, &again) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    assert_same(config, again);
    loom_run_config_destroy(again);
    loom_run_config_destroy(config);
}

TEST(letters_that_yaml_takes_for_something_else_survive_printing) {
    (void)state;
    static const char letters[] = "a\xc2\x85"
                                  "b\xe2\x80\xa8\xe2\x80\xa9\xef\xbb\xbf"
                                  "c\xc2\x80\xc2\x9f\xef\xbf\xbe\xef\xbf\xbf\xc3\xa9\x7f\t\n\"\\";
    loom_run_config config = loom_run_config_default(), *again = NULL;
    config.output = letters;
    if (loom_run_config_print(&config, reload, &again) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    assert_string_equal(again->output, letters);
    loom_run_config_destroy(again);
}

TEST(values_arrive_in_the_structs) {
    (void)state;
    loom_run_config *config = load(rich);
    assert_int_equal(config->seed, 16);
    assert_int_equal(config->steps, 15);
    assert_string_equal(config->output, "runs/a b: \"c\" #d\n");
    assert_string_equal(config->model.config.architecture, "llama");
    assert_int_equal(config->model.config.recompute, LOOM_RECOMPUTE_FULL);
    assert_int_equal(config->model.config.window_size, 64);
    assert_true(config->strategy.sequence_parallel);
    assert_int_equal(config->strategy.ddp_config.bucket_size, 1000);
    assert_true(config->strategy.timeout == 15.0);
    assert_int_equal(config->data.path_count, 2);
    assert_true(config->data.path[0].weight == 0.7 && config->data.path[1].weight == 0.3);
    assert_string_equal(config->data.path[1].prefix, "web 2");
    assert_string_equal(config->data.split, "98,1,1");
    assert_true(config->optim.lr == 3e-4 && config->optim.min_lr == 1e-5);
    assert_string_equal(config->lr.schedule, "megatron-WSD");
    assert_int_equal(config->lr.wsd_decay_steps, 4);
    loom_run_config_destroy(config);
}

TEST(one_prefix_is_a_blend_of_one) {
    (void)state;
    loom_run_config *config = load("data: {path: runs/corpus}");
    assert_int_equal(config->data.path_count, 1);
    assert_true(config->data.path[0].weight == 1);
    assert_string_equal(config->data.path[0].prefix, "runs/corpus");
    loom_run_config_destroy(config);
}

TEST(architectures_bring_their_own_defaults) {
    (void)state;
    loom_run_config *gpt2 = load("model: {architecture: gpt2}"), *llama = load("model: {architecture: llama}");
    const loom_model_config *g = &gpt2->model.config, *l = &llama->model.config;
    assert_int_equal(g->normalization, LOOM_LAYERNORM);
    assert_int_equal(l->normalization, LOOM_RMSNORM);
    assert_int_equal(g->activation, LOOM_GELU_TANH);
    assert_int_equal(l->activation, LOOM_SWIGLU);
    assert_int_equal(g->position_embedding_type, LOOM_POSITION_LEARNED);
    assert_int_equal(l->position_embedding_type, LOOM_POSITION_ROPE);
    assert_true(g->add_bias_linear && g->add_qkv_bias && g->share_embeddings_and_output_weights);
    assert_false(l->add_bias_linear || l->add_qkv_bias || l->share_embeddings_and_output_weights);
    assert_int_equal(l->vocab_size, 257);
    loom_model_config made = loom_model_config_default("llama");
    assert_int_equal(made.normalization, LOOM_RMSNORM);
    assert_false(made.add_bias_linear);
    assert_false(made.qk_layernorm || made.layernorm_zero_centered_gamma || made.scale_embeddings);
    assert_int_equal(made.rope_scaling, LOOM_ROPE_SCALING_NONE);
    assert_true(made.rotary_base == 10000);
    loom_run_config_destroy(gpt2);
    loom_run_config_destroy(llama);
}

TEST(the_kin_of_llama_differ_where_their_table_says) {
    (void)state;
    loom_model_config mistral = loom_model_config_default("mistral"), qwen2 = loom_model_config_default("qwen2");
    loom_model_config qwen3 = loom_model_config_default("qwen3"), gemma = loom_model_config_default("gemma");
    assert_int_equal(mistral.normalization, LOOM_RMSNORM);
    assert_int_equal(mistral.activation, LOOM_SWIGLU);
    assert_true(qwen2.add_qkv_bias && !qwen2.add_bias_linear && !qwen2.qk_layernorm);
    assert_true(qwen2.rotary_base == 1000000 && qwen2.layernorm_epsilon == 1e-6);
    assert_true(qwen3.qk_layernorm && !qwen3.add_qkv_bias);
    assert_true(gemma.layernorm_zero_centered_gamma && gemma.scale_embeddings);
    assert_true(gemma.share_embeddings_and_output_weights && !qwen3.share_embeddings_and_output_weights);
    assert_int_equal(gemma.activation, LOOM_GEGLU);
    assert_true(gemma.rotary_base == 10000);
}

TEST(the_file_wins_over_the_architecture_and_overrides_over_the_file) {
    (void)state;
    const char *const overrides[] = {"model.normalization=layernorm", "model.add_bias_linear=null", "seed=7"};
    loom_run_config *config =
        load_with("seed: 5\nmodel: {architecture: llama, activation: geglu, add_bias_linear: true}", overrides, 3);
    assert_int_equal(config->model.config.activation, LOOM_GEGLU);
    assert_int_equal(config->model.config.normalization, LOOM_LAYERNORM);
    assert_false(config->model.config.add_bias_linear);
    assert_int_equal(config->seed, 7);
    loom_run_config_destroy(config);
}

TEST(overrides_take_lists_mappings_and_bare_strings) {
    (void)state;
    const char *const overrides[] = {"data.path=[1, a, 2, b]", "strategy.ddp={overlap_grad_reduce: true}",
        "strategy.ddp.bucket_size=64", "output=runs/a: b", "data.split=98,1,1", "data.kind=mock"};
    loom_run_config *config = load_with("", overrides, 6);
    assert_int_equal(config->data.path_count, 2);
    assert_true(config->strategy.ddp_config.overlap_grad_reduce);
    assert_int_equal(config->strategy.ddp_config.bucket_size, 64);
    assert_string_equal(config->output, "runs/a: b");
    assert_string_equal(config->data.split, "98,1,1");
    assert_string_equal(config->data.kind, "mock");
    loom_run_config_destroy(config);
}

TEST(spellings_of_fp32_mean_the_same) {
    (void)state;
    const char *const texts[] = {"precision: 32", "precision: \"32\"", "precision: fp32", "precision: 32-true",
        "precision: {precision: 32, grad_reduce_in_fp32: false}", ""};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        loom_run_config *config = load(texts[i]);
        assert_string_equal(config->precision.precision, "32");
        loom_run_config_destroy(config);
    }
}

TEST(spellings_of_16_bits_mean_the_same) {
    (void)state;
    const char *const texts[][2] = {{"precision: bf16-mixed", "bf16-mixed"}, {"precision: bf16", "bf16-mixed"},
        {"precision: {precision: bf16, params_dtype: bfloat16}", "bf16-mixed"}, {"precision: 16", "16-mixed"},
        {"precision: fp16", "16-mixed"}, {"precision: \"16-mixed\"", "16-mixed"},
        {"precision: {precision: 16, loss_scale: 128}", "16-mixed"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        loom_run_config *config = load(texts[i][0]);
        assert_string_equal(config->precision.precision, texts[i][1]);
        loom_run_config_destroy(config);
    }
}

TEST(values_equal_to_the_default_are_always_accepted) {
    (void)state;
    loom_run_config *config = load("strategy: {pipeline_model_parallel_size: 1, context_parallel_size: 1,\n"
                                   "  virtual_pipeline_model_parallel_size: null, accelerator: null, ddp: megatron}\n"
                                   "trace: false\nmodel:\n");
    loom_run_config_destroy(config);
}

TEST(a_decimal_comma_of_the_program_changes_nothing) {
    (void)state;
    static const char *const names[] = {"de_DE.UTF-8", "fr_FR.UTF-8", "de_DE"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (setlocale(LC_ALL, names[i]))
            break;
    loom_run_config *config = load("optim: {lr: 2.5e-1}"), *again = NULL;
    assert_true(config->optim.lr == 0.25);
    assert_int_equal(loom_run_config_print(config, reload, &again), LOOM_OK);
    assert_true(again->optim.lr == 0.25);
    setlocale(LC_ALL, "C");
    loom_run_config_destroy(again);
    loom_run_config_destroy(config);
}

static const char sound[] =
    "steps: 10\nmodel: {architecture: llama, num_layers: 2, hidden_size: 64, ffn_hidden_size: 128,\n"
    "  num_attention_heads: 8, seq_length: 64}\ndata: {kind: mock, micro_batch_size: 2}\n";

static void check_gives(
    const char *const *overrides, int64_t count, int64_t world, loom_status status, const char *message) {
    loom_run_config *config = load_with(sound, overrides, count);
    loom_error_clear();
    loom_status found = loom_run_config_check(config, world);
    loom_run_config_destroy(config);
    assert_string_equal(loom_error_message(), message);
    assert_int_equal(found, status);
}

TEST(a_sound_run_passes) {
    (void)state;
    check_gives(NULL, 0, 4, LOOM_OK, "");
    check_gives(NULL, 0, 0, LOOM_OK, "");
}

TEST(too_few_query_groups_are_named_with_legal_sizes) {
    (void)state;
    const char *const overrides[] = {"model.num_query_groups=2", "strategy.tensor_model_parallel_size=8"};
    check_gives(overrides, 2, 8, LOOM_ERR_CONFIG,
        "strategy.tensor_model_parallel_size 8 does not divide num_query_groups 2 (replicate_query_groups would let "
        "ranks share one); nearest legal tensor_model_parallel_size 2, num_query_groups 8, or replicate_query_groups "
        "true");
    const char *const replicated[] = {overrides[0], overrides[1], "model.replicate_query_groups=true"};
    check_gives(replicated, 3, 8, LOOM_OK, "");
}

TEST(a_batch_that_does_not_divide_names_the_nearest) {
    (void)state;
    const char *const overrides[] = {"data.global_batch_size=10"};
    check_gives(overrides, 1, 2, LOOM_ERR_CONFIG,
        "data.global_batch_size: found 10, expected a multiple of 4 (data.micro_batch_size 2 times 2 data-parallel "
        "ranks); nearest legal global_batch_size 8 or 12, or micro_batch_size 1 or 5");
    const char *const small[] = {"data.global_batch_size=1"};
    check_gives(small, 1, 1, LOOM_ERR_CONFIG,
        "data.global_batch_size: found 1, expected a multiple of 2 (data.micro_batch_size 2 times 1 data-parallel "
        "rank); nearest legal global_batch_size 2, or micro_batch_size 1");
}

TEST(sequence_parallel_needs_tensor_ranks_and_a_length_that_divides) {
    (void)state;
    const char *const alone[] = {"strategy.sequence_parallel=true"};
    check_gives(alone, 1, 1, LOOM_ERR_CONFIG,
        "strategy.sequence_parallel: found true with strategy.tensor_model_parallel_size 1, expected at least 2 tensor "
        "ranks to share rows; nearest legal sequence_parallel false");
    const char *const odd[] = {
        "strategy.sequence_parallel=true", "strategy.tensor_model_parallel_size=4", "model.seq_length=30"};
    check_gives(odd, 3, 4, LOOM_ERR_CONFIG,
        "model.seq_length 30 is not divisible by tensor_model_parallel_size 4, as sequence_parallel asks; nearest "
        "legal seq_length 28 or 32, tensor_model_parallel_size 2, or sequence_parallel false");
}

TEST(a_world_that_does_not_fit_is_refused) {
    (void)state;
    const char *const overrides[] = {"strategy.tensor_model_parallel_size=2"};
    loom_run_config *config = load_with(sound, overrides, 1);
    assert_int_equal(loom_run_config_check(config, 3), LOOM_ERR_CONFIG);
    assert_non_null(strstr(loom_error_message(), "strategy.tensor_model_parallel_size 2"));
    assert_non_null(strstr(loom_error_message(), "3"));
    loom_run_config_destroy(config);
}

TEST(data_that_would_fail_when_opened_is_refused_before) {
    (void)state;
    const char *const split[] = {"data.split=abc"};
    check_gives(split, 1, 1, LOOM_ERR_CONFIG,
        "data.split is 'abc': a share is no plain number, expected up to three shares of train, valid and test, such "
        "as "
        "98,1,1");
    const char *const validation[] = {"validation.every=5", "data.kind=fixed", "data.path=a"};
    check_gives(validation, 3, 1, LOOM_ERR_CONFIG,
        "data.valid_path: missing, expected a file to validate with, since validation.every is set");
    const char *const alone[] = {"validation.every=5", "data.kind=gpt", "data.train_path=a"};
    check_gives(alone, 3, 1, LOOM_ERR_CONFIG,
        "data.valid_path: missing, expected a prefix to validate with, since data.path is not given");
}

static loom_status write_to(void *context, const char *text, size_t length) {
    return fwrite(text, 1, length, context) == length ? LOOM_OK : LOOM_ERR_IO;
}

/* A list of a run file as it is written back. */
static void written_back(const char *list, const char *expected) {
    char override[128], wanted[128], *text = NULL;
    size_t bytes;
    snprintf(override, sizeof override, "data.path=%s", list);
    snprintf(wanted, sizeof wanted, "\n  path: %s\n", expected);
    const char *const overrides[] = {"data.kind=gpt", override};
    loom_run_config *config = load_with(sound, overrides, 2);
    FILE *to = open_memstream(&text, &bytes);
    assert_int_equal(loom_run_config_print(config, write_to, to), LOOM_OK);
    fclose(to);
    assert_non_null(strstr(text, wanted));
    free(text);
    loom_run_config_destroy(config);
}

TEST(blends_have_weights_or_none) {
    (void)state;
    written_back("[1, a, 2, b]", "[1, a, 2, b]");
    written_back("[a, b]", "[a, b]");
    written_back("[a, b, c]", "[a, b, c]");
    written_back("[\"1\", \"2\", \"nan\"]", "[\"1\", \"2\", \"nan\"]");
    written_back("[0.5, a]", "[0.5, a]");
    written_back("[1.0, a]", "a");
    written_back("[a]", "a");
    const char *const half[] = {"data.kind=gpt", "data.path=[1, a, x, b]"};
    loom_run_config *config = NULL;
    assert_int_equal(loom_run_config_load(NULL, half, 2, &config), LOOM_ERR_CONFIG);
    assert_non_null(strstr(loom_error_message(), "data.path"));
    const char *const files[] = {"data.kind=fixed", "data.path=[a, b]"};
    check_gives(files, 2, 1, LOOM_ERR_CONFIG, "data.path: found 2 files, expected one for data.kind fixed");
}

/* Fields of experts as they are written back. */
static void balance_gives(const char *types, const char *coefficients, const char *expected) {
    char first[128], second[128], *text = NULL;
    size_t bytes;
    snprintf(first, sizeof first, "model.moe_router_load_balancing_type=%s", types);
    snprintf(second, sizeof second, "model.moe_aux_loss_coeff=%s", coefficients);
    const char *const overrides[] = {"model.num_moe_experts=4", first, second};
    loom_run_config *config = load_with(sound, overrides, 3);
    if (loom_run_config_check(config, 1))
        fail_msg("%s", loom_error_message());
    FILE *to = open_memstream(&text, &bytes);
    assert_int_equal(loom_run_config_print(config, write_to, to), LOOM_OK);
    fclose(to);
    snprintf(first, sizeof first, "\n  moe_router_load_balancing_type: %s\n", expected ? expected : types);
    snprintf(second, sizeof second, "\n  moe_aux_loss_coeff: %s\n", coefficients);
    assert_non_null(strstr(text, first));
    assert_non_null(strstr(text, second));
    free(text);
    loom_run_config_destroy(config);
}

static void balance_fails(const char *types, const char *coefficients, const char *message) {
    char first[128], second[128];
    snprintf(first, sizeof first, "model.moe_router_load_balancing_type=%s", types);
    snprintf(second, sizeof second, "model.moe_aux_loss_coeff=%s", coefficients);
    const char *const overrides[] = {"model.num_moe_experts=4", first, second};
    loom_run_config *config = NULL;
    if (loom_run_config_from_text("run.yaml", sound, strlen(sound), overrides, 3, &config) == LOOM_OK)
        assert_int_not_equal(loom_run_config_check(config, 1), LOOM_OK);
    if (!strstr(loom_error_message(), message))
        fail_msg("found \"%s\", expected \"%s\"", loom_error_message(), message);
    loom_run_config_destroy(config);
}

static void context_types_give(const char *types, int64_t layers, loom_status wanted, const char *text) {
    char first[128], second[64], line[160], *printed = NULL;
    size_t bytes;
    snprintf(first, sizeof first, "model.cp_comm_type=%s", types);
    snprintf(second, sizeof second, "model.num_layers=%lld", (long long)layers);
    const char *const overrides[] = {first, second};
    loom_run_config *config = load_with(sound, overrides, 2), *again = NULL;
    assert_int_equal(loom_run_config_check(config, 1), wanted);
    if (wanted) {
        assert_non_null(strstr(loom_error_message(), text));
        loom_run_config_destroy(config);
        return;
    }
    FILE *to = open_memstream(&printed, &bytes);
    assert_int_equal(loom_run_config_print(config, write_to, to), LOOM_OK);
    fclose(to);
    snprintf(line, sizeof line, "\n  cp_comm_type: %s\n", text);
    assert_non_null(strstr(printed, line));
    assert_int_equal(loom_run_config_from_text("printed", printed, strlen(printed), NULL, 0, &again), LOOM_OK);
    for (int64_t i = 0; i < LOOM_CONTEXT_LAYERS_MAX; i++) {
        const char *before = config->model.config.parallel.cp_comm_type[i];
        const char *after = again->model.config.parallel.cp_comm_type[i];
        assert_true(before ? after && strcmp(before, after) == 0 : !after);
    }
    free(printed);
    loom_run_config_destroy(config);
    loom_run_config_destroy(again);
}

TEST(context_ranks_share_a_sequence_in_one_way_or_one_of_each_layer) {
    (void)state;
    context_types_give("a2a+p2p", 2, LOOM_OK, "a2a+p2p");
    context_types_give("[a2a]", 2, LOOM_OK, "a2a");
    context_types_give("[p2p, a2a+p2p, all_gather]", 3, LOOM_OK, "[p2p, a2a+p2p, all_gather]");
    context_types_give("[p2p, p2p]", 3, LOOM_ERR_CONFIG,
        "cp_comm_type: found a list of 2, expected one for each of num_layers 3 or one for all");
    context_types_give(
        "[p2p, p2p]", 600, LOOM_ERR_CONFIG, "num_layers 600 or one for all (a list has at most 512); nearest legal");
}

TEST(balance_losses_stand_alone_or_in_a_list_with_as_many_coefficients) {
    (void)state;
    balance_gives("global_aux_loss", "0.25", NULL);
    balance_gives("[seq_aux_loss]", "0.25", "seq_aux_loss");
    balance_gives("[aux_loss, global_aux_loss]", "[0.25, 0.5]", NULL);
    balance_gives("[aux_loss, seq_aux_loss, global_aux_loss]", "[0.25, 0, 0.5]", NULL);
    balance_fails("[aux_loss, seq_aux_loss]", "0.25",
        "moe_aux_loss_coeff: found 1 for the 2 of moe_router_load_balancing_type, expected as many");
    balance_fails("aux_loss", "[0.25, 0.5]", "moe_aux_loss_coeff: found 2 for the 1 of moe_router_load_balancing_type");
    balance_fails("[aux_loss, none]", "[0.25, 0.5]", "found none in a list of 2, expected it alone");
    balance_fails("[aux_loss, even]", "[0.25, 0.5]",
        "expected one of aux_loss, seq_aux_loss, global_aux_loss, sinkhorn, none, or a list of at most 3 of them");
    balance_fails("aux_loss", "[0.25, -1]", "found [0.25, -1], expected a number >= 0, or a list of at most 3");
    balance_fails("aux_loss", "[0, 0, 0, 0]", "expected a number >= 0, or a list of at most 3");
}

TEST(every_size_of_a_rampup_is_checked_before_the_run) {
    (void)state;
    const char *const good[] = {
        "data.micro_batch_size=2", "data.global_batch_size=16", "data.rampup_batch_size=[4, 4, 48]"};
    loom_run_config *config = load_with(sound, good, 3);
    assert_int_equal(loom_run_config_check(config, 2), LOOM_OK);
    assert_int_equal(loom_run_config_check(config, 4), LOOM_ERR_CONFIG); /* 4 is no multiple of 8 */
    assert_string_equal(loom_error_message(),
        "data.rampup_batch_size: [4, 4, 48] on world_size 4: after 0 samples of the ramp-up: "
        "global_batch_size is 4, expected a multiple of micro_batch_size 2 x data-parallel size "
        "4; nearest legal world_size 2, or micro_batch_size 1, or rampup_batch_size [8, 8, 48]");
    config->data.decrease_batch_size_if_needed = true;
    config->data.rampup_batch_size[0] = 8;
    config->data.rampup_batch_size[1] = 4;
    assert_int_equal(loom_run_config_check(config, 4), LOOM_OK);
    loom_run_config_destroy(config);
    /* The first size gives one microbatch, and the interleaved schedule of two stages takes them in twos. */
    const char *const stages[] = {good[0], good[1], good[2], "model.num_layers=4"};
    config = load_with(sound, stages, 4);
    config->strategy.pipeline_model_parallel_size = 2;
    config->strategy.virtual_pipeline_model_parallel_size = 2;
    assert_true(loom_run_config_check(config, 4) != LOOM_OK);
    assert_non_null(strstr(
        loom_error_message(), "data.rampup_batch_size: [4, 4, 48] passes through batch size 4: 1 microbatch with"));
    loom_run_config_destroy(config);
}

TEST(an_architecture_that_is_not_built_is_named_once) {
    (void)state;
    loom_run_config *config = load_with(sound, NULL, 0);
    config->model.config.architecture = "t5";
    assert_int_equal(loom_run_config_check(config, 1), LOOM_ERR_UNSUPPORTED);
    assert_string_equal(loom_error_message(),
        "not supported yet: model.architecture=t5 (the architecture); what works: gpt2, llama, mistral, "
        "mixtral, qwen2, qwen3, qwen2_moe, qwen3_moe, gemma");
    loom_run_config_destroy(config);
}

TEST(the_best_checkpoints_need_a_validation_at_each) {
    (void)state;
    loom_run_config *config = load_with(sound, NULL, 0);
    config->checkpoint.every = 6;
    config->checkpoint.keep_best = 1;
    config->validation.every = 4;
    assert_int_equal(loom_run_config_check(config, 1), LOOM_ERR_CONFIG);
    assert_non_null(strstr(loom_error_message(),
        "checkpoint.keep_best: found 1 with checkpoint.every 6 and validation.every 4; expected"));
    loom_run_config_destroy(config);
}

TEST(missing_required_fields_are_all_named) {
    (void)state;
    loom_run_config *config = load("");
    assert_int_equal(loom_run_config_check(config, 1), LOOM_ERR_CONFIG);
    assert_string_equal(loom_error_message(),
        "steps: missing, expected an integer >= 1\n"
        "model.architecture: missing, expected one of gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen2_moe, "
        "qwen3_moe and gemma (or "
        "model.hf)\n"
        "model.num_layers: missing, expected an integer >= 1 (or model.hf)\n"
        "model.hidden_size: missing, expected an integer >= 1 (or model.hf)\n"
        "model.num_attention_heads: missing, expected an integer >= 1 (or model.hf)\n"
        "model.seq_length: missing, expected an integer >= 1\n"
        "model.vocab_size: missing, expected an integer >= 1\n"
        "data.path: missing, expected a prefix, or weights and prefixes in turn");
    loom_run_config_destroy(config);
}

TEST(schedule_fields_are_checked_together) {
    (void)state;
    const char *const idle[] = {"optim.init_lr=1e-5"};
    check_gives(idle, 1, 1, LOOM_ERR_CONFIG, "optim.init_lr: used only by the schedules megatron-…");
    const char *const long_warmup[] = {"optim.schedule=megatron-linear", "optim.warmup_steps=10"};
    check_gives(long_warmup, 2, 1, LOOM_ERR_CONFIG,
        "optim.warmup_steps: found 10, expected less than the 10 steps of the schedule");
    const char *const wsd[] = {"optim.schedule=megatron-WSD"};
    check_gives(wsd, 1, 1, LOOM_ERR_CONFIG, "optim.wsd_decay_steps: missing, schedule megatron-WSD needs it");
    const char *const noam[] = {"optim.schedule=NoamAnnealing", "optim.hold_steps=3"};
    check_gives(noam, 2, 1, LOOM_ERR_CONFIG,
        "optim.hold_steps: used only by policies with Hold in their names\n"
        "optim.d_model: missing, schedule NoamAnnealing needs it");
    const char *const both[] = {"optim.schedule=WarmupPolicy", "optim.warmup_steps=3", "optim.warmup_ratio=0.1"};
    check_gives(both, 3, 1, LOOM_ERR_CONFIG,
        "optim.warmup_ratio: found together with optim.warmup_steps, expected one of them");
    const char *const ramp[] = {"optim.end_weight_decay=0.2"};
    check_gives(ramp, 1, 1, LOOM_ERR_CONFIG,
        "optim.end_weight_decay: used only by optim.weight_decay_incr_style linear and cosine");
    const char *const resumed[] = {
        "optim.override_opt_param_scheduler=true", "optim.use_checkpoint_opt_param_scheduler=true"};
    check_gives(resumed, 2, 1, LOOM_ERR_CONFIG,
        "optim.override_opt_param_scheduler: found true together with optim.use_checkpoint_opt_param_scheduler, "
        "expected one of them at most");
    const char *const other[] = {"optim.optimizer=sgd", "optim.amsgrad=true", "optim.exp_avg_dtype=bf16"};
    check_gives(other, 3, 1, LOOM_ERR_CONFIG,
        "optim.amsgrad: used only by optim.optimizer adam\noptim.exp_avg_dtype: used only by optim.optimizer adam");
    const char *const momentum[] = {"optim.sgd_momentum=0.5", "optim.decoupled_min_lr=1e-5"};
    check_gives(momentum, 2, 1, LOOM_ERR_CONFIG,
        "optim.sgd_momentum: used only by optim.optimizer sgd\n"
        "optim.decoupled_min_lr: used only with optim.decoupled_lr");
    const char *const above[] = {"optim.min_lr=1"};
    check_gives(above, 1, 1, LOOM_ERR_CONFIG, "optim.min_lr: found 1, expected at most optim.lr, 0.001");
}

TEST(structs_made_in_code_are_checked_in_the_same_words) {
    (void)state;
    loom_megatron_strategy_config strategy = loom_megatron_strategy_config_default();
    assert_int_equal(loom_megatron_strategy_config_check(&strategy), LOOM_OK);
    strategy.ddp = "fsdp";
    strategy.tensor_model_parallel_size = 0;
    strategy.timeout = -1;
    assert_int_equal(loom_megatron_strategy_config_check(&strategy), LOOM_ERR_CONFIG);
    assert_string_equal(loom_error_message(),
        "strategy.tensor_model_parallel_size: found 0, expected an integer >= 1\n"
        "strategy.ddp: found fsdp, expected one of megatron, pytorch, or a mapping of its fields\n"
        "strategy.timeout: found -1, expected a number > 0");
    strategy = loom_megatron_strategy_config_default();
    int device = 0;
    strategy.parallel_devices = &device;
    strategy.encoder_pipeline_model_parallel_size = 2;
    assert_int_equal(loom_megatron_strategy_config_check(&strategy), LOOM_ERR_UNSUPPORTED);
    assert_string_equal(loom_error_message(),
        "not supported yet: strategy.encoder_pipeline_model_parallel_size=2 (encoder-decoder models); only 0 works\n"
        "not supported yet: strategy.parallel_devices=(object) (a choice of devices); only NULL works");
    loom_optimizer_config optimizer = loom_optimizer_config_default();
    assert_int_equal(loom_optimizer_config_check(&optimizer), LOOM_ERR_CONFIG);
    assert_string_equal(loom_error_message(), "optim.lr: found 0, expected a number > 0");
    loom_precision_config precision = loom_precision_config_default();
    precision.fp8 = "hybrid";
    assert_int_equal(loom_precision_config_check(&precision), LOOM_ERR_UNSUPPORTED);
    loom_model_config model = loom_model_config_default("llama");
    assert_int_equal(loom_model_config_check(&model), LOOM_OK);
    model.architecture = "t5";
    assert_int_equal(loom_model_config_check(&model), LOOM_ERR_UNSUPPORTED);
}

TEST(the_strategy_defaults_are_those_of_the_reference) {
    (void)state;
    loom_megatron_strategy_config s = loom_megatron_strategy_config_default();
    assert_int_equal(s.tensor_model_parallel_size, 1);
    assert_int_equal(s.pipeline_model_parallel_size, 1);
    assert_int_equal(s.virtual_pipeline_model_parallel_size, 0);
    assert_int_equal(s.context_parallel_size, 1);
    assert_int_equal(s.expert_model_parallel_size, 1);
    assert_int_equal(s.encoder_tensor_model_parallel_size, 0);
    assert_int_equal(s.num_distributed_optimizer_instances, 1);
    assert_false(s.sequence_parallel || s.moe_extended_tp || s.output_data_idx || s.use_tp_pp_dp_mapping);
    assert_true(s.init_model_parallel && s.no_ddp_communication_hook);
    assert_string_equal(s.ddp, "megatron");
    assert_string_equal(s.start_method, "popen");
    assert_true(s.timeout == 1800);
    assert_null(s.data_sampler);
    assert_null(s.accelerator);
    assert_null(s.cluster_environment);
    assert_null(s.process_group_backend);
}

static const char hf_llama[] =
    "{\"model_type\": \"llama\", \"num_hidden_layers\": 2, \"hidden_size\": 64, \"intermediate_size\": 128,"
    "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"vocab_size\": 256, \"max_position_embeddings\": 128,"
    "\"attention_dropout\": 0.25}";

TEST(a_hugging_face_directory_fills_the_model) {
    (void)state;
    char folder[] = "/tmp/megaloom-config-XXXXXX", path[64], override[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/config.json", folder);
    snprintf(override, sizeof override, "model.hf=%s", folder);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(hf_llama, file);
    fclose(file);
    const char *const overrides[] = {override, "model.seq_length=32", "data.kind=mock", "steps=1"};
    loom_run_config *config = NULL, *plain = NULL;
    loom_status status = loom_run_config_load(NULL, overrides, 4, &config);
    loom_status again = loom_run_config_load(NULL, overrides, 1, &plain);
    remove(path);
    rmdir(folder);
    assert_int_equal(status, LOOM_OK);
    assert_int_equal(again, LOOM_OK);
    assert_string_equal(config->model.config.architecture, "llama");
    assert_int_equal(config->model.config.num_query_groups, 2);
    assert_int_equal(config->model.config.seq_length, 32);
    assert_int_equal(plain->model.config.seq_length, 128);
    assert_true(config->model.config.attention_dropout == 0.25);
    assert_int_equal(loom_run_config_check(config, 2), LOOM_OK);
    loom_run_config_destroy(plain);
    loom_run_config_destroy(config);
    assert_int_equal(loom_run_config_load(NULL, overrides, 1, &config), LOOM_ERR_IO);
}

/* Null is kept as 0: a 0 that is written would be null in silence. Where nothing is built yet the two are both "off".
 */
TEST(a_written_zero_is_null_in_no_number_of_the_table) {
    (void)state;
    int64_t numbers = 0;
    for (int64_t i = 0; i < loom__field_count; i++) {
        const loom__field *field = &loom__fields[i];
        if (!field->nullable || field->not_built || (field->kind != LOOM__FIELD_INT && field->kind != LOOM__FIELD_REAL))
            continue;
        char override[160];
        const char *const overrides[] = {override};
        loom_run_config *config = NULL;
        snprintf(override, sizeof override, "%s=0", field->path);
        loom_error_clear();
        if (loom_run_config_from_text("run.yaml", "", 0, overrides, 1, &config) != LOOM_ERR_CONFIG)
            fail_msg("%s is taken", override);
        if (!strstr(loom_error_message(), "found 0, expected a"))
            fail_msg("%s: %s", override, loom_error_message());
        numbers++;
    }
    assert_true(numbers > 20);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(edit_distance_counts_inserts_deletes_replacements_and_swaps),
        cmocka_unit_test(a_written_zero_is_null_in_no_number_of_the_table),
        cmocka_unit_test(every_field_has_a_default_its_own_reader_accepts),
        cmocka_unit_test(the_defaults_file_loads_back_equal),
        cmocka_unit_test(what_is_printed_loads_back_equal),
        cmocka_unit_test(letters_that_yaml_takes_for_something_else_survive_printing),
        cmocka_unit_test(values_arrive_in_the_structs),
        cmocka_unit_test(one_prefix_is_a_blend_of_one),
        cmocka_unit_test(architectures_bring_their_own_defaults),
        cmocka_unit_test(the_kin_of_llama_differ_where_their_table_says),
        cmocka_unit_test(the_file_wins_over_the_architecture_and_overrides_over_the_file),
        cmocka_unit_test(overrides_take_lists_mappings_and_bare_strings),
        cmocka_unit_test(spellings_of_fp32_mean_the_same),
        cmocka_unit_test(spellings_of_16_bits_mean_the_same),
        cmocka_unit_test(values_equal_to_the_default_are_always_accepted),
        cmocka_unit_test(a_decimal_comma_of_the_program_changes_nothing),
        cmocka_unit_test(a_sound_run_passes),
        cmocka_unit_test(too_few_query_groups_are_named_with_legal_sizes),
        cmocka_unit_test(a_batch_that_does_not_divide_names_the_nearest),
        cmocka_unit_test(sequence_parallel_needs_tensor_ranks_and_a_length_that_divides),
        cmocka_unit_test(a_world_that_does_not_fit_is_refused),
        cmocka_unit_test(data_that_would_fail_when_opened_is_refused_before),
        cmocka_unit_test(blends_have_weights_or_none),
        cmocka_unit_test(balance_losses_stand_alone_or_in_a_list_with_as_many_coefficients),
        cmocka_unit_test(context_ranks_share_a_sequence_in_one_way_or_one_of_each_layer),
        cmocka_unit_test(every_size_of_a_rampup_is_checked_before_the_run),
        cmocka_unit_test(an_architecture_that_is_not_built_is_named_once),
        cmocka_unit_test(the_best_checkpoints_need_a_validation_at_each),
        cmocka_unit_test(missing_required_fields_are_all_named),
        cmocka_unit_test(schedule_fields_are_checked_together),
        cmocka_unit_test(structs_made_in_code_are_checked_in_the_same_words),
        cmocka_unit_test(the_strategy_defaults_are_those_of_the_reference),
        cmocka_unit_test(a_hugging_face_directory_fills_the_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
