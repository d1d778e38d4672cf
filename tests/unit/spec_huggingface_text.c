/* Hugging Face: the config.json that is written reads back to the same model, and the byte tokenizer's vocabulary. */
#include "spec/huggingface.h"
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TEST(name) static void name(void **state)

static const loom__hf_token_ids no_ids = {-1, -1, -1};

/* What both architectures fix, as a run file's defaults have it. */
static loom_model_config plain(const char *architecture) {
    bool gpt2 = strcmp(architecture, "gpt2") == 0;
    return (loom_model_config){
        .architecture = architecture,
        .make_vocab_size_divisible_by = 128,
        .normalization = gpt2 ? LOOM_LAYERNORM : LOOM_RMSNORM,
        .layernorm_epsilon = 1e-5,
        .activation = gpt2 ? LOOM_GELU_TANH : LOOM_SWIGLU,
        .position_embedding_type = gpt2 ? LOOM_POSITION_LEARNED : LOOM_POSITION_ROPE,
        .rotary_base = 10000,
        .rotary_percent = 1,
        .add_bias_linear = gpt2,
        .add_qkv_bias = gpt2,
        .share_embeddings_and_output_weights = gpt2,
        .init_method_std = 0.02,
    };
}

static loom_model_config sized(const char *architecture) {
    loom_model_config config = plain(architecture);
    config.num_layers = 3;
    config.hidden_size = 24;
    config.num_attention_heads = 4;
    config.vocab_size = 301;
    config.seq_length = 16;
    config.max_position_embeddings = 48;
    config.layernorm_epsilon = 1.25e-6;
    config.init_method_std = 0.0123;
    config.attention_dropout = 0.05;
    return config;
}

/* The text of a model; the caller's. */
static char *write_config(loom_model_config *config, loom_dtype dtype, const loom__hf_token_ids *ids) {
    loom__model_spec *spec;
    char *text = NULL;
    assert_int_equal(loom__model_config_complete(config, 1, false), LOOM_OK);
    assert_int_equal(loom__model_spec_create(config, &spec), LOOM_OK);
    assert_int_equal(loom__hf_config_text(spec, dtype, ids, &text), LOOM_OK);
    loom__model_spec_destroy(spec);
    return text;
}

static void assert_reads_back(loom_model_config config) {
    char *text = write_config(&config, LOOM_F32, &no_ids);
    /* What the file must decide is wrong before it is read. */
    loom_model_config found = {.seq_length = config.seq_length, .num_layers = 1, .rotary_percent = 0.5};
    assert_int_equal(loom__hf_model_config("config.json", text, strlen(text), &found), LOOM_OK);
    free(text);
    assert_string_equal(found.architecture, config.architecture);
    assert_int_equal(found.num_layers, config.num_layers);
    assert_int_equal(found.hidden_size, config.hidden_size);
    assert_int_equal(found.ffn_hidden_size, config.ffn_hidden_size);
    assert_int_equal(found.num_attention_heads, config.num_attention_heads);
    assert_int_equal(found.max_position_embeddings, config.max_position_embeddings);
    assert_int_equal(found.vocab_size, config.vocab_size);
    assert_int_equal(found.normalization, config.normalization);
    assert_int_equal(found.activation, config.activation);
    assert_int_equal(found.position_embedding_type, config.position_embedding_type);
    loom__biases biases = loom__model_biases(&config), read = loom__model_biases(&found);
    assert_true(read.qkv == biases.qkv && read.proj == biases.proj && read.mlp == biases.mlp);
    assert_int_equal(found.share_embeddings_and_output_weights, config.share_embeddings_and_output_weights);
    assert_true(found.layernorm_epsilon == config.layernorm_epsilon);
    assert_true(found.init_method_std == config.init_method_std);
    assert_true(found.hidden_dropout == config.hidden_dropout);
    assert_true(found.attention_dropout == config.attention_dropout);
    if (strcmp(config.architecture, "gpt2") == 0)
        return;
    assert_int_equal(found.num_query_groups, config.num_query_groups);
    assert_int_equal(found.kv_channels, config.kv_channels);
    assert_true(found.rotary_base == config.rotary_base);
    assert_true(found.rotary_percent == config.rotary_percent);
}

TEST(gpt2_reads_back) {
    (void)state;
    loom_model_config config = sized("gpt2");
    config.hidden_dropout = 0.07;
    assert_reads_back(config);
    config.activation = LOOM_GELU_ERF;
    config.ffn_hidden_size = 40;
    config.share_embeddings_and_output_weights = false;
    assert_reads_back(config);
}

TEST(llama_reads_back) {
    (void)state;
    loom_model_config config = sized("llama");
    config.num_query_groups = 2;
    config.kv_channels = 10;
    config.rotary_base = 500000;
    assert_reads_back(config);
    config.share_embeddings_and_output_weights = !config.share_embeddings_and_output_weights;
    config.add_qkv_bias = config.add_proj_bias = true;
    assert_reads_back(config);
    config.add_qkv_bias = config.add_proj_bias = false;
    config.add_mlp_bias = true;
    assert_reads_back(config);
    config.add_bias_linear = true;
    config.activation = LOOM_GEGLU;
    assert_reads_back(config);
    config.activation = LOOM_GEGLU_ERF;
    assert_reads_back(config);
}

TEST(names_are_those_that_transformers_asks_for) {
    (void)state;
    loom_model_config gpt2 = sized("gpt2"), llama = sized("llama");
    char *text = write_config(&gpt2, LOOM_F16, &no_ids);
    assert_non_null(strstr(text, "\"GPT2LMHeadModel\""));
    assert_non_null(strstr(text, "\"dtype\": \"float16\""));
    free(text);
    text = write_config(&llama, LOOM_BF16, &no_ids);
    assert_non_null(strstr(text, "\"LlamaForCausalLM\""));
    assert_non_null(strstr(text, "\"torch_dtype\": \"bfloat16\""));
    assert_non_null(strstr(text, "\"rms_norm_eps\": 1.25e-6,"));
    free(text);
}

TEST(token_ids_go_there_and_back_and_none_is_null) {
    (void)state;
    loom_model_config config = sized("llama");
    loom__hf_token_ids ids = {7, 256, -1}, found = {0, 0, 0};
    char *text = write_config(&config, LOOM_F32, &ids), *generation = NULL;
    assert_non_null(strstr(text, "\"pad_token_id\": null"));
    assert_int_equal(loom__hf_read_token_ids("config.json", text, strlen(text), &found), LOOM_OK);
    assert_int_equal(found.bos, 7);
    assert_int_equal(found.eos, 256);
    assert_int_equal(found.pad, -1);
    free(text);
    assert_int_equal(loom__hf_generation_text(&ids, &generation), LOOM_OK);
    assert_non_null(strstr(generation, "\"eos_token_id\": 256"));
    assert_null(strstr(generation, "pad_token_id"));
    free(generation);
    const char *list = "{\"eos_token_id\": [5, 6]}";
    assert_int_equal(loom__hf_read_token_ids("config.json", list, strlen(list), &found), LOOM_OK);
    assert_int_equal(found.eos, 5);
    assert_int_equal(loom__hf_read_token_ids("config.json", "{", 1, &found), LOOM_ERR_FORMAT);
}

TEST(what_a_hugging_face_model_cannot_be_is_refused) {
    (void)state;
    loom_model_config config = sized("gpt2");
    config.normalization = LOOM_RMSNORM;
    loom__model_spec *spec;
    char *text;
    assert_int_equal(loom__model_config_complete(&config, 1, false), LOOM_OK);
    assert_int_equal(loom__model_spec_create(&config, &spec), LOOM_OK);
    assert_int_equal(loom__hf_config_text(spec, LOOM_F32, &no_ids, &text), LOOM_ERR_UNSUPPORTED);
    assert_non_null(strstr(loom_error_message(), "rmsnorm"));
    loom__model_spec_destroy(spec);
}

TEST(the_byte_tokenizer_has_each_byte_once) {
    (void)state;
    char *text = NULL;
    assert_int_equal(loom__hf_byte_tokenizer_text(&text), LOOM_OK);
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    const json_t *vocabulary = json_object_get(json_object_get(root, "model"), "vocab");
    bool seen[256] = {false};
    assert_int_equal(json_object_size(vocabulary), 256);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)vocabulary, key, value) {
        json_int_t id = json_integer_value(value);
        assert_in_range(id, 0, 255);
        assert_false(seen[id]);
        seen[id] = true;
        if (id > ' ' && id < 0x7f) {
            assert_int_equal(key[0], id);
            assert_int_equal(key[1], 0);
        }
    }
    /* GPT-2's spelling of the blank and of the line's end. */
    assert_int_equal(json_integer_value(json_object_get(vocabulary, "\xc4\xa0")), ' ');
    assert_int_equal(json_integer_value(json_object_get(vocabulary, "\xc4\x8a")), '\n');
    json_decref(root);
    free(text);
}

/* ---- describing ---- */

TEST(gpt2_has_the_published_number_of_parameters) {
    (void)state;
    loom_model_config config = plain("gpt2");
    config.num_layers = 12;
    config.hidden_size = 768;
    config.num_attention_heads = 12;
    config.vocab_size = 50257;
    config.seq_length = config.max_position_embeddings = 1024;
    loom_model_description found;
    assert_int_equal(loom_model_describe(&config, &found), LOOM_OK);
    assert_int_equal(found.total, 124439808);
    assert_int_equal(found.embedding, (50257 + 1024) * 768);
    assert_int_equal(found.norms, (2 * 12 + 1) * 2 * 768);
    assert_int_equal(found.attention, 12 * (4 * 768 * 768 + 4 * 768));
    assert_int_equal(found.mlp, 12 * (8 * 768 * 768 + 5 * 768));
    assert_int_equal(found.head, 0);
}

TEST(llama_7b_has_the_published_number_of_parameters) {
    (void)state;
    loom_model_config config = plain("llama");
    config.num_layers = 32;
    config.hidden_size = 4096;
    config.ffn_hidden_size = 11008;
    config.num_attention_heads = 32;
    config.vocab_size = 32000;
    config.seq_length = 2048;
    loom_model_description found;
    assert_int_equal(loom_model_describe(&config, &found), LOOM_OK);
    assert_int_equal(found.total, 6738415616);
    assert_int_equal(found.head, 32000 * 4096);
    assert_int_equal(found.embedding + found.attention + found.mlp + found.norms + found.head, found.total);
}

TEST(tensor_sizes_divide_heads_groups_and_mlp) {
    (void)state;
    loom_model_config config = sized("llama");
    config.hidden_size = 96;
    config.num_attention_heads = 8;
    config.num_query_groups = 2;
    config.ffn_hidden_size = 64;
    int64_t sizes[4] = {0};
    assert_int_equal(loom_model_tensor_sizes(&config, sizes, 4), 2);
    assert_int_equal(sizes[1], 2);
    config.replicate_query_groups = true;
    assert_int_equal(loom_model_tensor_sizes(&config, sizes, 3), 4);
    assert_int_equal(sizes[2], 4);
    assert_int_equal(sizes[3], 0);
    config.ffn_hidden_size = 61;
    assert_int_equal(loom_model_tensor_sizes(&config, sizes, 4), 1);
    assert_string_equal(loom_error_message(), "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt2_reads_back),
        cmocka_unit_test(llama_reads_back),
        cmocka_unit_test(names_are_those_that_transformers_asks_for),
        cmocka_unit_test(token_ids_go_there_and_back_and_none_is_null),
        cmocka_unit_test(what_a_hugging_face_model_cannot_be_is_refused),
        cmocka_unit_test(the_byte_tokenizer_has_each_byte_once),
        cmocka_unit_test(gpt2_has_the_published_number_of_parameters),
        cmocka_unit_test(llama_7b_has_the_published_number_of_parameters),
        cmocka_unit_test(tensor_sizes_divide_heads_groups_and_mlp),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
