/* Hugging Face: config.json in both spellings, what is refused, and the index map as a bijection. */
#include "spec/huggingface.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static loom_model_config base(void) {
    return (loom_model_config){
        .make_vocab_size_divisible_by = 1, .seq_length = 8, .rotary_base = 1, .use_scaled_init = true};
}

static loom_status read_config(const char *text, loom_model_config *model) {
    *model = base();
    return loom__hf_model_config("config.json", text, strlen(text), model);
}

#define KIN(type, more)                                                                                                \
    "{\"model_type\": \"" type "\", \"num_hidden_layers\": 2, \"hidden_size\": 24, \"intermediate_size\": 20,"         \
    "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 8, \"vocab_size\": 19" more "}"
#define SPARSE ", \"num_experts\": 4, \"moe_intermediate_size\": 6, \"num_experts_per_tok\": 3"
#define SHARED SPARSE ", \"shared_expert_intermediate_size\": 10"
#define LLAMA(more) KIN("llama", more)
#define GPT2(more)                                                                                                     \
    "{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_embd\": 24, \"n_head\": 4, \"n_positions\": 16, \"vocab_size\": "  \
    "19,"                                                                                                              \
    "\"resid_pdrop\": 0.0, \"embd_pdrop\": 0.0, \"attn_pdrop\": 0.0" more "}"

#define TEST(name) static void name(void **state)

TEST(both_spellings_of_rotary_base_are_read) {
    (void)state;
    loom_model_config model;
    assert_int_equal(
        read_config(LLAMA(", \"rope_theta\": 5e5, \"rope_scaling\": null, \"torch_dtype\": \"bfloat16\""), &model),
        LOOM_OK);
    assert_true(model.rotary_base == 500000);
    assert_int_equal(
        read_config(
            LLAMA(", \"rope_parameters\": {\"rope_theta\": 7e5, \"rope_type\": \"default\"}, \"dtype\": \"float32\""),
            &model),
        LOOM_OK);
    assert_true(model.rotary_base == 700000);
    assert_int_equal(read_config(LLAMA(""), &model), LOOM_OK);
    assert_true(model.rotary_base == 10000);
}

TEST(llama_fields_are_read) {
    (void)state;
    loom_model_config model;
    assert_int_equal(read_config(LLAMA(", \"attention_bias\": true, \"mlp_bias\": true, \"tie_word_embeddings\": true, "
                                       "\"hidden_act\": \"gelu_pytorch_tanh\", \"rms_norm_eps\": 1e-3"),
                         &model),
        LOOM_OK);
    assert_string_equal(model.architecture, "llama");
    assert_int_equal(model.kv_channels, 8);
    assert_int_equal(model.num_query_groups, 2);
    assert_int_equal(model.activation, LOOM_GEGLU);
    assert_true(model.add_bias_linear && model.share_embeddings_and_output_weights);
    assert_true(model.layernorm_epsilon == 1e-3);
    assert_int_equal(model.seq_length, 8);
}

TEST(attention_bias_and_mlp_bias_are_read_apart) {
    (void)state;
    loom_model_config model;
    assert_int_equal(read_config(LLAMA(", \"attention_bias\": true"), &model), LOOM_OK);
    assert_true(model.add_qkv_bias && model.add_proj_bias);
    assert_false(model.add_mlp_bias || model.add_bias_linear);
    assert_int_equal(read_config(LLAMA(", \"mlp_bias\": true"), &model), LOOM_OK);
    assert_true(model.add_mlp_bias);
    assert_false(model.add_qkv_bias || model.add_proj_bias || model.add_bias_linear);
}

TEST(gpt2_fields_are_read_with_null_inner_size) {
    (void)state;
    loom_model_config model;
    assert_int_equal(read_config(GPT2(", \"n_inner\": null, \"activation_function\": \"gelu\""), &model), LOOM_OK);
    assert_int_equal(model.ffn_hidden_size, 0);
    assert_int_equal(model.activation, LOOM_GELU_ERF);
    assert_int_equal(model.max_position_embeddings, 16);
    assert_true(model.share_embeddings_and_output_weights);
    assert_int_equal(loom__model_config_complete(&model, 1, false), LOOM_OK);
    assert_int_equal(model.ffn_hidden_size, 96);
}

static void refused(const char *text, loom_status status, const char *message) {
    loom_model_config model;
    loom_status found = read_config(text, &model);
    assert_string_equal(loom_error_message(), message);
    assert_int_equal(found, status);
    assert_null(model.architecture);
    assert_int_equal(model.num_layers, 0);
}

TEST(what_would_change_the_numbers_is_refused_by_name) {
    (void)state;
    refused("{\"model_type\": \"t5\"}", LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: model_type \"t5\"; gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen2_moe, "
        "qwen3_moe and gemma are");
    refused(LLAMA(", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.0, \"attention_factor\": 3}"),
        LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: attention_factor (an option that may change the numbers)");
    refused(LLAMA(", \"rope_parameters\": {\"rope_type\": \"yarn\"}"), LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: rope_type \"yarn\"; default, linear and llama3 are");
    refused(LLAMA(", \"rope_parameters\": {\"partial_rotary_factor\": 0.5}"), LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: partial_rotary_factor other than 1");
    refused(LLAMA(", \"sliding_window\": 16"), LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: sliding_window (an option that may change the numbers)");
    refused(LLAMA(", \"hidden_act\": \"relu\""), LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: hidden_act \"relu\"; silu, gelu, gelu_new are");
    refused(LLAMA(", \"quantization_config\": {\"bits\": 4}"), LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: quantization_config (an option that may change the numbers)");
    refused(GPT2(", \"scale_attn_weights\": false"), LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: scale_attn_weights false");
    refused(GPT2(", \"scale_attn_by_inverse_layer_idx\": true, \"add_cross_attention\": true"), LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: scale_attn_by_inverse_layer_idx (an option that may change the numbers)\n"
        "config.json: not supported yet: add_cross_attention (an option that may change the numbers)");
    refused("{\"model_type\": \"gpt2\", \"resid_pdrop\": 0.5}", LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: embd_pdrop 0.1 beside resid_pdrop 0.5; equal ones are");
}

TEST(what_would_change_the_numbers_of_the_kin_is_refused_by_name) {
    (void)state;
    refused(KIN("mistral", ", \"attention_bias\": true"), LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: attention_bias true");
    refused(
        KIN("qwen2", ", \"use_sliding_window\": true, \"layer_types\": [\"full_attention\", \"sliding_attention\"]"),
        LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: use_sliding_window true\n"
        "config.json: not supported yet: layer_types other than full_attention");
    refused(KIN("qwen2", ", \"attention_bias\": false"), LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: attention_bias false");
    refused(KIN("qwen3", ", \"attention_bias\": true, \"mlp_bias\": true"), LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: mlp_bias (an option that may change the numbers)\n"
        "config.json: not supported yet: attention_bias true");
    refused(KIN("qwen3", ", \"layer_types\": 3"), LOOM_ERR_FORMAT,
        "config.json: layer_types: found an integer, expected a list");
    refused(KIN("gemma", ", \"use_bidirectional_attention\": true"), LOOM_ERR_UNSUPPORTED,
        "config.json: not supported yet: use_bidirectional_attention (an option that may change the numbers)");
}

TEST(scalings_of_rotary_positions_are_read) {
    (void)state;
    loom_model_config model;
    assert_int_equal(
        read_config(LLAMA(", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.5}"), &model), LOOM_OK);
    assert_int_equal(model.rope_scaling, LOOM_ROPE_SCALING_LINEAR);
    assert_true(model.rope_scaling_factor == 2.5);
    assert_int_equal(read_config(LLAMA(", \"rope_theta\": 5e5, \"rope_scaling\": {\"rope_type\": \"llama3\", "
                                       "\"factor\": 32, \"low_freq_factor\": 1.5, \"high_freq_factor\": 6, "
                                       "\"original_max_position_embeddings\": 64}"),
                         &model),
        LOOM_OK);
    assert_int_equal(model.rope_scaling, LOOM_ROPE_SCALING_LLAMA3);
    assert_true(model.rope_scaling_factor == 32 && model.rotary_base == 500000);
    assert_true(model.rope_scaling_low_freq_factor == 1.5 && model.rope_scaling_high_freq_factor == 6);
    assert_int_equal(model.rope_scaling_original_max_position_embeddings, 64);
    refused(LLAMA(", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": \"8\"}"), LOOM_ERR_FORMAT,
        "config.json: factor: found a string, expected a number\n"
        "config.json: low_freq_factor: found nothing, expected a number\n"
        "config.json: high_freq_factor: found nothing, expected a number\n"
        "config.json: original_max_position_embeddings: found nothing, expected an integer >= 1");
}

TEST(the_kin_of_llama_are_read) {
    (void)state;
    loom_model_config model;
    assert_int_equal(read_config(KIN("mistral", ", \"sliding_window\": 16"), &model), LOOM_OK);
    assert_string_equal(model.architecture, "mistral");
    assert_int_equal(model.window_size, 16);
    /* Absent is the default of transformers, null is none. */
    assert_int_equal(read_config(KIN("mistral", ""), &model), LOOM_OK);
    assert_int_equal(model.window_size, 4096);
    assert_int_equal(read_config(KIN("mistral", ", \"sliding_window\": null"), &model), LOOM_OK);
    assert_int_equal(model.window_size, 0);

    assert_int_equal(read_config(KIN("qwen2", ", \"use_sliding_window\": false, \"sliding_window\": 32768, "
                                              "\"layer_types\": [\"full_attention\"], \"max_window_layers\": 28"),
                         &model),
        LOOM_OK);
    assert_true(model.add_qkv_bias && !model.add_bias_linear && !model.qk_layernorm);
    assert_int_equal(model.window_size, 0);

    assert_int_equal(read_config("{\"model_type\": \"qwen3\", \"head_dim\": null}", &model), LOOM_OK);
    assert_true(model.qk_layernorm && !model.add_qkv_bias);
    assert_int_equal(model.kv_channels, 0);
    assert_int_equal(read_config("{\"model_type\": \"qwen3\"}", &model), LOOM_OK);
    assert_int_equal(model.kv_channels, 128);

    assert_int_equal(read_config(KIN("gemma", ""), &model), LOOM_OK);
    assert_true(model.layernorm_zero_centered_gamma && model.scale_embeddings);
    assert_true(model.share_embeddings_and_output_weights);
    /* A Llama read into the same struct is no Gemma. */
    assert_int_equal(loom__hf_model_config("config.json", LLAMA(""), strlen(LLAMA("")), &model), LOOM_OK);
    assert_false(model.layernorm_zero_centered_gamma || model.scale_embeddings || model.qk_layernorm);
}

static void expect_layers(const char *text, const char *layers) {
    loom_model_config model;
    if (read_config(text, &model) || loom__model_config_complete(&model, 1, false))
        fail_msg("%s", loom_error_message());
    for (int64_t i = 0; i < model.num_layers; i++)
        assert_int_equal(loom__layer_has_experts(&model, i), layers[i] == '1');
}

TEST(qwen_with_experts_is_read) {
    (void)state;
    loom_model_config model;
    assert_int_equal(read_config(KIN("qwen2_moe", SHARED ", \"norm_topk_prob\": true, \"output_router_logits\": true, "
                                                         "\"router_aux_loss_coef\": 0.25"),
                         &model),
        LOOM_OK);
    assert_int_equal(model.ffn_hidden_size, 20);
    assert_int_equal(model.moe.moe_ffn_hidden_size, 6);
    assert_int_equal(model.moe.moe_shared_expert_intermediate_size, 10);
    assert_true(model.moe.moe_shared_expert_gate && model.add_qkv_bias && !model.qk_layernorm);
    assert_true(model.moe.moe_aux_loss_coeff[0] == 0.25 && !model.moe.moe_router_pre_softmax);
    assert_int_equal(read_config(KIN("qwen2_moe", SHARED ", \"qkv_bias\": false"), &model), LOOM_OK);
    assert_true(!model.add_qkv_bias && model.moe.moe_router_pre_softmax);
    assert_true(model.moe.moe_aux_loss_coeff[0] == 0);
    assert_int_equal(read_config("{\"model_type\": \"qwen3_moe\", \"num_local_experts\": 12}", &model), LOOM_OK);
    assert_int_equal(model.moe.num_moe_experts, 12);
    assert_int_equal(model.moe.moe_router_topk, 8);
    assert_int_equal(model.moe.moe_shared_expert_intermediate_size, 0);
    assert_true(model.qk_layernorm && !model.add_qkv_bias && !model.moe.moe_shared_expert_gate);
}

TEST(layers_without_experts_are_those_that_the_file_names) {
    (void)state;
#define LAYERS(type, more)                                                                                             \
    "{\"model_type\": \"" type "\", \"num_hidden_layers\": 6, \"hidden_size\": 64, \"vocab_size\": 19" more "}"
    expect_layers(LAYERS("qwen3_moe", ""), "111111");
    expect_layers(LAYERS("qwen3_moe", ", \"decoder_sparse_step\": 2"), "010101");
    expect_layers(LAYERS("qwen3_moe", ", \"decoder_sparse_step\": 4"), "000100");
    expect_layers(LAYERS("qwen2_moe", ", \"mlp_only_layers\": [0, 4]"), "011101");
    expect_layers(LAYERS("qwen2_moe", ", \"mlp_only_layers\": [1, 9], \"decoder_sparse_step\": 2"), "000101");
    refused(LAYERS("qwen2_moe", ", \"mlp_only_layers\": [\"a\"]"), LOOM_ERR_FORMAT,
        "config.json: mlp_only_layers: found a string, expected numbers of layers");
    refused(LAYERS("qwen2_moe", ", \"mlp_only_layers\": 3"), LOOM_ERR_FORMAT,
        "config.json: mlp_only_layers: found an integer, expected a list");
    refused("{\"model_type\": \"qwen3_moe\", \"num_hidden_layers\": 600, \"decoder_sparse_step\": 2}",
        LOOM_ERR_UNSUPPORTED, "config.json: not supported yet: decoder_sparse_step with more than 512 layers");
}

TEST(gemma_gates_with_the_tanh_form_whatever_its_old_files_say) {
    (void)state;
    loom_model_config model;
    assert_int_equal(read_config(KIN("gemma", ", \"hidden_act\": \"gelu\""), &model), LOOM_OK);
    assert_int_equal(model.activation, LOOM_GEGLU);
    assert_int_equal(
        read_config(KIN("gemma", ", \"hidden_act\": \"gelu\", \"hidden_activation\": \"gelu_pytorch_tanh\""), &model),
        LOOM_OK);
    assert_int_equal(model.activation, LOOM_GEGLU);
    assert_int_equal(read_config(KIN("gemma", ", \"hidden_activation\": \"gelu\""), &model), LOOM_OK);
    assert_int_equal(model.activation, LOOM_GEGLU_ERF);
}

TEST(options_that_switch_nothing_are_passed_over) {
    (void)state;
    loom_model_config model;
    assert_int_equal(read_config(LLAMA(", \"sliding_window\": null, \"some_future_flag\": false, \"pruned_heads\": {}, "
                                       "\"use_cache\": true, \"bos_token_id\": 1, \"pretraining_tp\": 1"),
                         &model),
        LOOM_OK);
}

TEST(broken_files_are_named) {
    (void)state;
    refused("[1]", LOOM_ERR_FORMAT, "config.json: found a list, expected an object");
    refused("{}", LOOM_ERR_FORMAT,
        "config.json: model_type: found nothing, expected a string such as \"gpt2\" or \"llama\"");
    refused("{\"model_type\": \"gpt2\", \"n_layer\": \"two\", \"n_head\": 0, \"layer_norm_epsilon\": true}",
        LOOM_ERR_FORMAT,
        "config.json: n_layer: found a string, expected an integer >= 1\n"
        "config.json: n_head: found 0, expected an integer >= 1\n"
        "config.json: layer_norm_epsilon: found true, expected a number");
    loom_model_config model;
    assert_int_equal(read_config("{\"model_type\": \"gpt2\", \"model_type\": \"llama\"}", &model), LOOM_ERR_FORMAT);
    assert_int_equal(read_config("{\"model_type\"", &model), LOOM_ERR_FORMAT);
    assert_int_equal(read_config("", &model), LOOM_ERR_FORMAT);
}

/* Which Hugging Face elements were met, tensor by tensor. */
enum { TENSORS_MAX = 128 };
typedef struct inventory {
    loom__hf_tensor tensor[TENSORS_MAX];
    int *met[TENSORS_MAX];
    int count;
    int64_t next; /* canonical element that must come next */
} inventory;

static loom_status note_tensor(void *context, const loom__hf_tensor *tensor) {
    inventory *all = context;
    for (int i = 0; i < all->count; i++)
        if (strcmp(all->tensor[i].name, tensor->name) == 0)
            return loom_fail(LOOM_ERR_INTERNAL, "%s twice", tensor->name);
    all->tensor[all->count] = *tensor;
    all->met[all->count++] = calloc((size_t)(tensor->shape[0] * tensor->shape[1]), sizeof(int));
    return LOOM_OK;
}

static loom_status note_run(
    void *context, int64_t canonical_first, int64_t count, const char *name, int64_t first, int64_t stride) {
    inventory *all = context;
    if (canonical_first != all->next || count < 1)
        return loom_fail(LOOM_ERR_INTERNAL, "canonical elements out of order in %s", name);
    all->next += count;
    for (int i = 0; i < all->count; i++)
        if (strcmp(all->tensor[i].name, name) == 0) {
            int64_t total = all->tensor[i].shape[0] * all->tensor[i].shape[1];
            for (int64_t k = 0; k < count; k++) {
                int64_t at = first + k * stride;
                if (at < 0 || at >= total)
                    return loom_fail(LOOM_ERR_INTERNAL, "outside %s", name);
                all->met[i][at]++;
            }
            return LOOM_OK;
        }
    return loom_fail(LOOM_ERR_INTERNAL, "unknown tensor %s", name);
}

static void expect_bijection(const char *text, int tensors) {
    loom_model_config model;
    inventory all = {.count = 0};
    loom__model_spec *spec = NULL;
    assert_int_equal(read_config(text, &model), LOOM_OK);
    assert_int_equal(loom__model_config_complete(&model, 1, false), LOOM_OK);
    assert_int_equal(loom__model_spec_create(&model, &spec), LOOM_OK);
    for (int64_t p = 0; p < spec->count; p++) {
        const loom__parameter_descriptor *parameter = &spec->parameters[p];
        if (loom__hf_parameter_tensors(spec, parameter, note_tensor, &all) != LOOM_OK)
            fail_msg("%s", loom_error_message());
        all.next = 0;
        if (loom__hf_source_runs(spec, parameter, note_run, &all) != LOOM_OK)
            fail_msg("%s: %s", parameter->name, loom_error_message());
        assert_int_equal(all.next, parameter->shape[0] * parameter->shape[1]);
    }
    assert_int_equal(all.count, tensors);
    for (int i = 0; i < all.count; i++) {
        for (int64_t k = 0; k < all.tensor[i].shape[0] * all.tensor[i].shape[1]; k++)
            assert_int_equal(all.met[i][k], 1);
        free(all.met[i]);
    }
    loom__model_spec_destroy(spec);
}

TEST(every_hugging_face_element_has_exactly_one_canonical_place) {
    (void)state;
    expect_bijection(LLAMA(""), 2 * 9 + 3);
    expect_bijection(
        LLAMA(", \"tie_word_embeddings\": true, \"attention_bias\": true, \"mlp_bias\": true"), 2 * 16 + 2);
    expect_bijection(LLAMA(", \"attention_bias\": true"), 2 * 13 + 3);
    expect_bijection(LLAMA(", \"mlp_bias\": true"), 2 * 12 + 3);
    expect_bijection(KIN("mistral", ""), 2 * 9 + 3);
    expect_bijection(KIN("qwen2", ", \"tie_word_embeddings\": true"), 2 * 12 + 2);
    expect_bijection(KIN("qwen3", ""), 2 * 11 + 3);
    expect_bijection(KIN("gemma", ""), 2 * 9 + 2);
    expect_bijection(KIN("mixtral", ", \"num_local_experts\": 4"), 2 * (7 + 4 * 3) + 3);
    expect_bijection(KIN("qwen2_moe", SHARED), 2 * (10 + 4 + 4 * 3) + 3);
    expect_bijection(KIN("qwen2_moe", SHARED ", \"mlp_only_layers\": [0]"), 13 - 1 + 10 + 4 + 4 * 3 + 3);
    expect_bijection(KIN("qwen3_moe", SPARSE ", \"attention_bias\": true"), 2 * (13 + 4 * 3) + 3);
    expect_bijection(GPT2(""), 2 * 12 + 4);
    expect_bijection(GPT2(", \"tie_word_embeddings\": false, \"n_inner\": 20"), 2 * 12 + 5);
}

static loom_status keep_first_name(void *context, const loom__hf_tensor *tensor) {
    loom__hf_tensor *to = context;
    if (!*to->name)
        *to = *tensor;
    return LOOM_OK;
}

TEST(conv1d_weights_are_in_by_out) {
    (void)state;
    loom_model_config model;
    loom__model_spec *spec = NULL;
    assert_int_equal(read_config(GPT2(""), &model), LOOM_OK);
    assert_int_equal(loom__model_config_complete(&model, 1, false), LOOM_OK);
    assert_int_equal(loom__model_spec_create(&model, &spec), LOOM_OK);
    for (int64_t p = 0; p < spec->count; p++) {
        loom__hf_tensor tensor = {.name = ""};
        if (strcmp(spec->parameters[p].name, "decoder.layers.1.self_attention.linear_qkv.weight") != 0)
            continue;
        assert_int_equal(loom__hf_parameter_tensors(spec, &spec->parameters[p], keep_first_name, &tensor), LOOM_OK);
        assert_string_equal(tensor.name, "transformer.h.1.attn.c_attn.weight");
        assert_int_equal(tensor.shape[0], 24);
        assert_int_equal(tensor.shape[1], 72);
        assert_string_equal(loom__hf_other_name(spec, tensor.name), "h.1.attn.c_attn.weight");
    }
    assert_null(loom__hf_other_name(spec, "lm_head.weight"));
    assert_true(loom__hf_is_ignorable(spec, "lm_head.weight"));
    assert_true(loom__hf_is_ignorable(spec, "h.0.attn.bias"));
    assert_false(loom__hf_is_ignorable(spec, "h.0.attn.c_attn.bias"));
    assert_false(loom__hf_is_ignorable(spec, "h.0.ln_1.bias"));
    loom__model_spec_destroy(spec);
}

TEST(models_without_a_hugging_face_form_are_refused) {
    (void)state;
    loom_model_config model;
    loom__model_spec *spec = NULL;
    assert_int_equal(read_config(GPT2(""), &model), LOOM_OK);
    model.position_embedding_type = LOOM_POSITION_ROPE;
    model.rotary_percent = 1;
    assert_int_equal(loom__model_config_complete(&model, 1, false), LOOM_OK);
    assert_int_equal(loom__model_spec_create(&model, &spec), LOOM_OK);
    assert_int_equal(loom__hf_check(spec), LOOM_ERR_UNSUPPORTED);
    assert_string_equal(loom_error_message(),
        "not supported yet: Hugging Face files of a gpt2 model with positions that are not learned");
    assert_int_equal(loom__hf_source_runs(spec, &spec->parameters[0], note_run, NULL), LOOM_ERR_UNSUPPORTED);
    loom__model_spec_destroy(spec);
}

/* Completes what a file of the family gave, changed by `change`, and expects the refusal. */
static void cannot_be_written(const char *text, void (*change)(loom_model_config *), const char *what) {
    loom_model_config model;
    loom__model_spec *spec = NULL;
    assert_int_equal(read_config(text, &model), LOOM_OK);
    change(&model);
    assert_int_equal(loom__model_config_complete(&model, 1, false), LOOM_OK);
    assert_int_equal(loom__model_spec_create(&model, &spec), LOOM_OK);
    assert_int_equal(loom__hf_check(spec), LOOM_ERR_UNSUPPORTED);
    assert_non_null(strstr(loom_error_message(), what));
    loom__model_spec_destroy(spec);
}

static void toggle_head_norms(loom_model_config *model) {
    model->qk_layernorm = !model->qk_layernorm;
}

static void toggle_qkv_bias(loom_model_config *model) {
    model->add_qkv_bias = !model->add_qkv_bias;
}

static void toggle_centre(loom_model_config *model) {
    model->layernorm_zero_centered_gamma = !model->layernorm_zero_centered_gamma;
}

static void toggle_scale(loom_model_config *model) {
    model->scale_embeddings = !model->scale_embeddings;
}

static void set_window(loom_model_config *model) {
    model->window_size = 4;
}

static void set_biases(loom_model_config *model) {
    model->add_bias_linear = true;
}

static void set_proj_bias(loom_model_config *model) {
    model->add_proj_bias = true;
}

static void set_mlp_biases(loom_model_config *model) {
    model->add_mlp_bias = true;
}

static void remove_gate(loom_model_config *model) {
    model->moe.moe_shared_expert_gate = false;
}

static void share_an_expert(loom_model_config *model) {
    model->moe.moe_shared_expert_intermediate_size = 8;
}

static void set_pre_softmax(loom_model_config *model) {
    model->moe.moe_router_pre_softmax = true;
}

static void set_sigmoid(loom_model_config *model) {
    model->moe.moe_router_score_function = "sigmoid";
}

static void set_sparse(loom_model_config *model) {
    model->moe.moe_layer_freq.every = 2;
}

static void remove_experts(loom_model_config *model) {
    model->moe = (loom_moe_config){0};
}

TEST(what_the_files_of_a_family_cannot_say_is_refused) {
    (void)state;
    cannot_be_written(KIN("qwen2_moe", SHARED), remove_gate, "a qwen2_moe model with shared experts without a gate");
    cannot_be_written(KIN("qwen2_moe", SHARED), remove_experts, "a qwen2_moe model with no experts");
    cannot_be_written(KIN("qwen3_moe", SPARSE), share_an_expert, "a qwen3_moe model with shared experts");
    cannot_be_written(KIN("mixtral", ""), set_pre_softmax, "a mixtral model with moe_router_pre_softmax true");
    cannot_be_written(KIN("mixtral", ""), set_sparse, "a mixtral model with layers without experts");
    cannot_be_written(KIN("mixtral", ""), set_sigmoid, "a moe_router_score_function that is not softmax");
    cannot_be_written(LLAMA(""), toggle_head_norms, "a llama model with qk_layernorm true");
    cannot_be_written(KIN("qwen3", ""), toggle_head_norms, "a qwen3 model with qk_layernorm false");
    cannot_be_written(KIN("qwen2", ""), toggle_qkv_bias, "a qwen2 model with no bias of qkv");
    cannot_be_written(KIN("mistral", ""), toggle_qkv_bias, "a mistral model with a bias of qkv alone");
    cannot_be_written(KIN("gemma", ""), toggle_centre, "a gemma model with layernorm_zero_centered_gamma false");
    cannot_be_written(LLAMA(""), toggle_scale, "a llama model with scale_embeddings true");
    cannot_be_written(LLAMA(""), set_window, "a llama model with a sliding window");
    cannot_be_written(KIN("mistral", ""), set_biases, "a mistral model with add_bias_linear true");
    cannot_be_written(LLAMA(""), toggle_qkv_bias, "a llama model with a bias of qkv alone");
    cannot_be_written(LLAMA(""), set_proj_bias, "a llama model with a bias of attention's output projection alone");
    cannot_be_written(KIN("qwen2", ""), set_proj_bias, "a qwen2 model with a bias of attention's output projection");
    cannot_be_written(KIN("gemma", ""), set_mlp_biases, "a gemma model with biases of the MLP");
    for (int linear = 0; linear < 2; linear++)
        cannot_be_written(KIN("mixtral", ", \"num_local_experts\": 4, \"num_experts_per_tok\": 2"),
            linear ? set_biases : set_mlp_biases,
            "a mixtral model with biases of experts (add_bias_linear or add_mlp_bias true), for which its files have "
            "no tensors");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_spellings_of_rotary_base_are_read),
        cmocka_unit_test(llama_fields_are_read),
        cmocka_unit_test(attention_bias_and_mlp_bias_are_read_apart),
        cmocka_unit_test(gpt2_fields_are_read_with_null_inner_size),
        cmocka_unit_test(what_would_change_the_numbers_is_refused_by_name),
        cmocka_unit_test(what_would_change_the_numbers_of_the_kin_is_refused_by_name),
        cmocka_unit_test(scalings_of_rotary_positions_are_read),
        cmocka_unit_test(the_kin_of_llama_are_read),
        cmocka_unit_test(qwen_with_experts_is_read),
        cmocka_unit_test(layers_without_experts_are_those_that_the_file_names),
        cmocka_unit_test(gemma_gates_with_the_tanh_form_whatever_its_old_files_say),
        cmocka_unit_test(options_that_switch_nothing_are_passed_over),
        cmocka_unit_test(broken_files_are_named),
        cmocka_unit_test(every_hugging_face_element_has_exactly_one_canonical_place),
        cmocka_unit_test(conv1d_weights_are_in_by_out),
        cmocka_unit_test(what_the_files_of_a_family_cannot_say_is_refused),
        cmocka_unit_test(models_without_a_hugging_face_form_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
