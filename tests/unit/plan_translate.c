/* Files of Megatron-LM, NeMo and Megatron-Bridge: the fields they give, what is left out, and text that is broken. */
#include <megaloom/plan.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef loom_status (*translator)(const char *, const char *, size_t, loom_plan_translation *);

static loom_plan_translation translated(translator translate, const char *text) {
    loom_plan_translation made = {0};
    if (translate("file", text, strlen(text), &made))
        fail_msg("%s", loom_error_message());
    return made;
}

/* The last one of a field wins. */
static const char *value_of(const loom_plan_translation *t, const char *field) {
    size_t length = strlen(field);
    for (int64_t i = t->override_count - 1; i >= 0; i--)
        if (strncmp(t->overrides[i], field, length) == 0 && t->overrides[i][length] == '=')
            return t->overrides[i] + length + 1;
    return NULL;
}

static void expect(const loom_plan_translation *t, const char *field, const char *value) {
    const char *found = value_of(t, field);
    if (!found || strcmp(found, value) != 0)
        fail_msg("%s: found %s, expected %s", field, found ? found : "nothing", value);
}

static const char megatron[] = "#!/bin/bash\n# a job\n"
                               "torchrun --nproc_per_node=8 --nnodes 4 pretrain_gpt.py \\\n"
                               "  --num-layers 24 --hidden-size '1024' --num-attention-heads \"16\" \\\n"
                               "  --seq-length 2048 --max-position-embeddings 2048 --swiglu --disable-bias-linear \\\n"
                               "  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 \\\n"
                               "  --num-layers-per-virtual-pipeline-stage 3 --sequence-parallel \\\n"
                               "  --micro-batch-size 2 --global-batch-size 64 --rampup-batch-size 32 32 1000 \\\n"
                               "  --train-samples 6400 --bf16 --normalization RMSNorm --lr-decay-style cosine \\\n"
                               "  --data-path 'a b' --save $DIR --new-thing 1 2 --tokenizer-type GPT2BPETokenizer\n";

static void a_command_line_of_megatron_gives_the_fields_of_a_run_file(void **state) {
    (void)state;
    loom_plan_translation t = translated(loom_plan_translate_megatron, megatron);
    expect(&t, "model.num_layers", "24");
    expect(&t, "model.hidden_size", "1024");
    expect(&t, "model.num_attention_heads", "16");
    expect(&t, "model.activation", "swiglu");
    expect(&t, "model.add_bias_linear", "false");
    expect(&t, "model.normalization", "rmsnorm");
    expect(&t, "model.hidden_dropout", "0.1"); /* Megatron-LM's default */
    expect(&t, "model.ffn_hidden_size", "2688");
    expect(&t, "model.vocab_size", "50257");
    expect(&t, "strategy.tensor_model_parallel_size", "2");
    expect(&t, "strategy.virtual_pipeline_model_parallel_size", "2");
    expect(&t, "strategy.sequence_parallel", "true");
    expect(&t, "data.rampup_batch_size", "[32, 32, 1000]");
    expect(&t, "steps", "100");
    expect(&t, "precision", "bf16-mixed");
    expect(&t, "optim.schedule", "megatron-cosine");
    assert_int_equal(t.world_size, 32);
    assert_string_equal(t.left_out, "--new-thing has no field here");
    loom_plan_translation_free(&t);
}

static void options_of_several_values_give_lists(void **state) {
    (void)state;
    loom_plan_translation t =
        translated(loom_plan_translate_megatron, "--moe-router-load-balancing-type seq_aux_loss global_aux_loss "
                                                 "--moe-aux-loss-coeff 0.01 0.002 --moe-extended-tp");
    expect(&t, "model.moe_router_load_balancing_type", "[seq_aux_loss, global_aux_loss]");
    expect(&t, "model.moe_aux_loss_coeff", "[0.01, 0.002]");
    expect(&t, "strategy.moe_extended_tp", "true");
    loom_plan_translation_free(&t);
    t = translated(loom_plan_translate_megatron, "--moe-router-load-balancing-type none --moe-aux-loss-coeff=0");
    expect(&t, "model.moe_router_load_balancing_type", "none");
    expect(&t, "model.moe_aux_loss_coeff", "0");
    loom_plan_translation_free(&t);
    t = translated(loom_plan_translate_megatron,
        "--cp-comm-type p2p a2a+p2p all_gather a2a --hierarchical-context-parallel-sizes 2 4");
    expect(&t, "model.cp_comm_type", "[p2p, a2a+p2p, all_gather, a2a]");
    expect(&t, "model.hierarchical_context_parallel_sizes", "[2, 4]");
    loom_plan_translation_free(&t);
    t = translated(loom_plan_translate_megatron, "--cp-comm-type a2a");
    expect(&t, "model.cp_comm_type", "a2a");
    loom_plan_translation_free(&t);
}

/* A list may be as long as a model is deep. */
static void a_way_of_each_layer_is_translated_whole(void **state) {
    (void)state;
    enum { DEPTH = 300, BYTES = DEPTH * 12 + 64 };
    static const char *const readers[] = {"--cp-comm-type", "model: {cp_comm_type: ["};
    for (int nemo = 0; nemo < 2; nemo++) {
        char text[BYTES] = "", wanted[BYTES] = "[";
        strcpy(text, readers[nemo]);
        for (int layer = 0; layer < DEPTH; layer++) {
            snprintf(text + strlen(text), BYTES - strlen(text), "%sall_gather", nemo && layer ? ", " : " ");
            snprintf(wanted + strlen(wanted), BYTES - strlen(wanted), "%sall_gather", layer ? ", " : "");
        }
        strcat(text, nemo ? "]}" : "");
        strcat(wanted, "]");
        loom_plan_translation t = translated(nemo ? loom_plan_translate_nemo : loom_plan_translate_megatron, text);
        expect(&t, "model.cp_comm_type", wanted);
        loom_plan_translation_free(&t);
    }
}

static void the_translation_of_a_command_line_is_planned(void **state) {
    (void)state;
    loom_plan_translation t = translated(loom_plan_translate_megatron, megatron);
    loom_run_config *config = NULL;
    char *not_built = NULL;
    const loom_plan_check check = {.world_size = t.world_size};
    if (loom_run_config_load_planned(
            NULL, (const char *const *)t.overrides, t.override_count, &check, &config, &not_built))
        fail_msg("%s", loom_error_message());
    assert_int_equal(config->strategy.virtual_pipeline_model_parallel_size, 2);
    assert_false(config->model.config.add_qkv_bias);
    free(not_built);
    loom_run_config_destroy(config);
    loom_plan_translation_free(&t);
}

static void what_a_shell_would_expand_is_listed(void **state) {
    (void)state;
    loom_plan_translation t = translated(loom_plan_translate_megatron, "x --num-layers $N --hidden-size 8");
    assert_null(value_of(&t, "model.num_layers"));
    expect(&t, "model.hidden_size", "8");
    assert_string_equal(t.left_out, "--num-layers: \"$N\" is for a shell to expand, expected its value");
    loom_plan_translation_free(&t);
}

static void words_are_cut_as_a_shell_does(void **state) {
    (void)state;
    loom_plan_translation t = translated(loom_plan_translate_megatron,
        "--num-layers 1'2' # --num-layers 9\n--hidden-size \"6\\\n4\" --seq-length \\\n 32;--vocab-size 10|cat");
    expect(&t, "model.num_layers", "12");
    expect(&t, "model.hidden_size", "64");
    expect(&t, "model.seq_length", "32");
    expect(&t, "model.vocab_size", "10");
    loom_plan_translation_free(&t);
}

static void broken_command_lines_are_named(void **state) {
    static const struct {
        const char *text, *faults;
    } cases[] = {
        {"--num-layers", "file: --num-layers: found no value, expected one"},
        {"--num-layers --bf16", "file: --num-layers: found no value, expected one"},
        {"--rampup-batch-size 1 2 --seq-length", "file: --rampup-batch-size: found 2 values, expected three\n"
                                                 "file: --seq-length: found no value, expected one"},
        {"torchrun --nproc_per_node=eight --nnodes 0 x.py --num-layers 2",
            "file: --nproc-per-node: found eight, expected an integer from 1 to 2147483647\n"
            "file: --nnodes: found 0, expected an integer from 1 to 2147483647"},
        {"--num-layers 24 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 5",
            "file: --num-layers-per-virtual-pipeline-stage: found 5, expected a divisor of the 12 layers of a stage: "
            "the nearest legal 4 or 6"},
        {"torchrun --nproc_per_node=2147483647 --nnodes 3 x.py",
            "file: found 2147483647 ranks on each of 3 nodes, expected at most 2147483647"},
        {"--bf16 --fp16", "file: --fp16: found together with --bf16, expected one of them"},
        {"--num-layers 24 --num-layers-per-virtual-pipeline-stage 24", ""},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        loom_plan_translation t = translated(loom_plan_translate_megatron, cases[i].text);
        assert_string_equal(t.faults, cases[i].faults);
        loom_plan_translation_free(&t);
    }
    loom_plan_translation t = {0};
    static const char open[] = "--num-layers '12\n3";
    assert_int_equal(loom_plan_translate_megatron("file", open, strlen(open), &t), LOOM_ERR_FORMAT);
    assert_string_equal(loom_error_message(), "file: the quote ' before \"12\" does not end");
}

/* Faults of the text and those of the configuration come together. */
static void faults_of_a_translation_are_told_with_the_others(void **state) {
    (void)state;
    loom_plan_translation t = translated(loom_plan_translate_megatron,
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --vocab-size 9 --bf16 --fp16 --lr 0");
    loom_run_config *config = NULL;
    char *not_built = NULL;
    const loom_plan_check check = {.source = "file", .translated = t.override_count, .faults = t.faults};
    assert_int_equal(loom_run_config_load_planned(
                         NULL, (const char *const *)t.overrides, t.override_count, &check, &config, &not_built),
        LOOM_ERR_CONFIG);
    assert_string_equal(loom_error_message(), "file: --fp16: found together with --bf16, expected one of them\n"
                                              "file: optim.lr: found 0, expected a number > 0");
    loom_plan_translation_free(&t);
}

static void a_mistyped_option_is_shown_what_was_meant(void **state) {
    (void)state;
    loom_plan_translation t = translated(loom_plan_translate_megatron,
        "--tensor-model-paralel-size 8 --num-layer 2 --zzz --recompute-method uniform --recompute-num-layers 1");
    assert_string_equal(t.left_out,
        "--tensor-model-paralel-size has no field here; did you mean --tensor-model-parallel-size?\n"
        "--num-layer has no field here; did you mean --num-layers?\n--zzz has no field here");
    loom_plan_translation_free(&t);
    t = translated(loom_plan_translate_megatron, "--recompute-method block --recompute-num-layers 4");
    assert_string_equal(t.left_out, "--recompute-method has no field here\n--recompute-num-layers has no field here");
    loom_plan_translation_free(&t);
    t = translated(loom_plan_translate_nemo,
        "model: {normalisation: x, recompute_num_layers: 4, fp32_residual_connection: false,\n"
        "  recompute_method: uniform}\noptimizer: {weight_decai: 0.1}\n");
    assert_string_equal(t.left_out, "line 1: model.normalisation has no field here; did you mean normalization?\n"
                                    "line 1: model.recompute_num_layers has no field here\n"
                                    "line 3: optimizer.weight_decai has no field here; did you mean weight_decay?");
    loom_plan_translation_free(&t);
}

/* Half of an answer would be taken for the whole. */
static void ranks_that_are_known_elsewhere_are_not_guessed(void **state) {
    static const struct {
        translator translate;
        const char *text;
        int64_t world;
        const char *left_out;
    } cases[] = {
        {loom_plan_translate_megatron, "torchrun --nproc_per_node 8 --nnodes $N x.py", 0,
            "--nnodes: \"$N\" is for a shell to expand, expected its value"},
        {loom_plan_translate_megatron, "torchrun --nproc_per_node 8 x.py", 8, ""},
        {loom_plan_translate_megatron, "torchrun --nnodes 2 x.py", 2, ""},
        {loom_plan_translate_nemo, "trainer: {devices: 8, num_nodes: '${nodes}'}", 0,
            "line 1: num_nodes: \"${nodes}\" is for NeMo to find out, expected a number"},
        {loom_plan_translate_nemo, "trainer: {devices: -1, num_nodes: 4}", 0,
            "line 1: devices: \"-1\" is for NeMo to find out, expected a number"},
        {loom_plan_translate_nemo, "trainer: {devices: 8, num_nodes: 4}", 32, ""},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        loom_plan_translation t = translated(cases[i].translate, cases[i].text);
        assert_int_equal(t.world_size, cases[i].world);
        assert_string_equal(t.left_out, cases[i].left_out);
        loom_plan_translation_free(&t);
    }
    loom_plan_translation t = translated(loom_plan_translate_nemo, "trainer: {devices: 8, num_nodes: 0}");
    assert_string_equal(t.faults, "file: line 1: num_nodes: found 0, expected an integer from 1 to 2147483647");
    loom_plan_translation_free(&t);
}

static const char nemo[] = "trainer: {devices: 8, num_nodes: 2, precision: bf16, max_steps: 50}\n"
                           "exp_manager: {name: x}\n"
                           "model:\n"
                           "  micro_batch_size: 1\n"
                           "  tensor_model_parallel_size: 4\n"
                           "  encoder_seq_length: 512\n"
                           "  num_layers: 4\n"
                           "  hidden_size: 256\n"
                           "  num_attention_heads: 8\n"
                           "  vocab_size: 1000\n"
                           "  normalization: layernorm1p\n"
                           "  activation: fast-swiglu\n"
                           "  bias: false\n"
                           "  brand_new: 3\n"
                           "  other: ${model.hidden_size}\n"
                           "  num_query_groups: ${x}\n"
                           "  optim: {name: distributed_fused_adam, lr: 1e-3, sched: {name: CosineAnnealing}}\n";

static void a_file_of_nemo_gives_the_fields_of_a_run_file(void **state) {
    (void)state;
    loom_plan_translation t = translated(loom_plan_translate_nemo, nemo);
    expect(&t, "steps", "50");
    expect(&t, "precision", "bf16");
    expect(&t, "strategy.tensor_model_parallel_size", "4");
    expect(&t, "model.seq_length", "512");
    expect(&t, "model.normalization", "layernorm");
    expect(&t, "model.layernorm_zero_centered_gamma", "true");
    expect(&t, "model.activation", "swiglu");
    expect(&t, "model.add_bias_linear", "false");
    expect(&t, "optim.optimizer", "adam");
    expect(&t, "optim.schedule", "CosineAnnealing");
    expect(&t, "strategy.ddp.use_distributed_optimizer", "true");
    expect(&t, "data.micro_batch_size", "1");
    assert_int_equal(t.world_size, 16);
    assert_string_equal(t.left_out,
        "line 14: model.brand_new has no field here\nline 15: model.other has no field here\n"
        "line 16: model.num_query_groups: \"${x}\" is for NeMo to expand, expected its value");
    loom_plan_translation_free(&t);
}

static void a_file_of_bridge_gives_the_fields_of_a_run_file(void **state) {
    (void)state;
    loom_plan_translation t = translated(loom_plan_translate_nemo,
        "model: {_target_: x.Provider, num_layers: 2, hidden_size: 8, recompute_granularity: full, gated_linear_unit: "
        "true}\ntrain: {micro_batch_size: 2, global_batch_size: 16, train_iters: 7}\n"
        "optimizer: {optimizer: adam, lr: 0.1, use_distributed_optimizer: true}\n"
        "ddp: {overlap_grad_reduce: true}\ndataset: {sequence_length: 64}\nmixed_precision: bf16_mixed\n"
        "scheduler: {lr_decay_style: cosine}\n");
    expect(&t, "model.recompute", "full");
    expect(&t, "model.activation", "swiglu");
    expect(&t, "model.seq_length", "64");
    expect(&t, "data.global_batch_size", "16");
    expect(&t, "steps", "7");
    expect(&t, "strategy.ddp.use_distributed_optimizer", "true");
    expect(&t, "strategy.ddp.overlap_grad_reduce", "true");
    expect(&t, "precision", "bf16-mixed");
    expect(&t, "optim.schedule", "megatron-cosine");
    assert_string_equal(t.left_out, "");
    loom_plan_translation_free(&t);
}

static void a_file_of_nemo_is_recognised(void **state) {
    (void)state;
    assert_true(loom_plan_is_nemo(nemo, strlen(nemo)));
    assert_false(loom_plan_is_nemo("steps: 3\nmodel: {num_layers: 2}\n", 33));
    assert_false(loom_plan_is_nemo("[1", 2));
    assert_false(loom_plan_is_nemo("", 0));
}

static void every_beginning_of_a_file_is_taken_or_refused(void **state) {
    static const struct {
        translator translate;
        const char *text;
    } files[] = {{loom_plan_translate_megatron, megatron}, {loom_plan_translate_nemo, nemo}};
    (void)state;
    for (size_t f = 0; f < sizeof files / sizeof *files; f++)
        for (size_t length = 0; length < strlen(files[f].text); length++) {
            loom_plan_translation t = {0};
            char *text = malloc(length + 1); /* so that a sanitizer sees what is read beyond it */
            assert_non_null(text);
            memcpy(text, files[f].text, length);
            loom_status status = files[f].translate("file", text, length, &t);
            assert_true(status == LOOM_OK || status == LOOM_ERR_FORMAT);
            loom_plan_translation_free(&t);
            free(text);
        }
}

static void too_much_text_is_refused(void **state) {
    enum { BYTES = (1 << 20) + 1 };
    (void)state;
    char *text = malloc(BYTES);
    assert_non_null(text);
    memset(text, 'a', BYTES);
    loom_plan_translation t = {0};
    assert_int_equal(loom_plan_translate_megatron("file", text, BYTES, &t), LOOM_ERR_FORMAT);
    assert_int_equal(loom_plan_translate_nemo("file", text, BYTES, &t), LOOM_ERR_FORMAT);
    text[7] = '\0';
    assert_int_equal(loom_plan_translate_megatron("file", text, 9, &t), LOOM_ERR_FORMAT);
    assert_string_equal(loom_error_message(), "file: byte 7 is NUL, expected text");
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_command_line_of_megatron_gives_the_fields_of_a_run_file),
        cmocka_unit_test(options_of_several_values_give_lists),
        cmocka_unit_test(a_way_of_each_layer_is_translated_whole),
        cmocka_unit_test(the_translation_of_a_command_line_is_planned),
        cmocka_unit_test(what_a_shell_would_expand_is_listed),
        cmocka_unit_test(words_are_cut_as_a_shell_does),
        cmocka_unit_test(broken_command_lines_are_named),
        cmocka_unit_test(faults_of_a_translation_are_told_with_the_others),
        cmocka_unit_test(a_mistyped_option_is_shown_what_was_meant),
        cmocka_unit_test(ranks_that_are_known_elsewhere_are_not_guessed),
        cmocka_unit_test(a_file_of_nemo_gives_the_fields_of_a_run_file),
        cmocka_unit_test(a_file_of_bridge_gives_the_fields_of_a_run_file),
        cmocka_unit_test(a_file_of_nemo_is_recognised),
        cmocka_unit_test(every_beginning_of_a_file_is_taken_or_refused),
        cmocka_unit_test(too_much_text_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
