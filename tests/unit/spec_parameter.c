/* The parameter list, the shard map and the checks of a model configuration. */
#include "spec/parameter.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static loom_model_config small(bool llama) {
    loom_model_config config = {.architecture = llama ? "llama" : "gpt2",
        .num_layers = 2,
        .hidden_size = 24,
        .ffn_hidden_size = 48,
        .num_attention_heads = 8,
        .num_query_groups = llama ? 2 : 0,
        .kv_channels = llama ? 6 : 0,
        .seq_length = 16,
        .vocab_size = 37,
        .make_vocab_size_divisible_by = 8,
        .normalization = llama ? LOOM_RMSNORM : LOOM_LAYERNORM,
        .layernorm_epsilon = 1e-5,
        .activation = llama ? LOOM_SWIGLU : LOOM_GELU_TANH,
        .position_embedding_type = llama ? LOOM_POSITION_ROPE : LOOM_POSITION_LEARNED,
        .rotary_base = 10000,
        .rotary_percent = 1,
        .add_bias_linear = !llama,
        .add_qkv_bias = !llama,
        .share_embeddings_and_output_weights = !llama,
        .init_method_std = 0.02,
        .use_scaled_init = true};
    return config;
}

static loom__model_spec *make(loom_model_config config, int64_t tp) {
    loom__model_spec *spec = NULL;
    if (loom__model_config_complete(&config, tp, false) != LOOM_OK)
        fail_msg("%s", loom_error_message());
    assert_int_equal(loom__model_spec_create(&config, &spec), LOOM_OK);
    return spec;
}

/* Writes the canonical index of each local element (-1 = padding) and checks that runs are in order and maximal. */
typedef struct picture {
    int64_t *canonical;
    int64_t used, last_canonical_end;
} picture;

static loom_status draw(void *context, int64_t local_first, int64_t canonical_first, int64_t count) {
    picture *to = context;
    if (local_first != to->used || count < 1)
        return loom_fail(LOOM_ERR_INTERNAL, "runs are not in local order");
    if (to->used && (canonical_first < 0 ? to->last_canonical_end < 0 : canonical_first == to->last_canonical_end))
        return loom_fail(LOOM_ERR_INTERNAL, "two runs that are one");
    for (int64_t i = 0; i < count; i++)
        to->canonical[to->used++] = canonical_first < 0 ? -1 : canonical_first + i;
    to->last_canonical_end = canonical_first < 0 ? -1 : canonical_first + count;
    return LOOM_OK;
}

#define TEST(name) static void name(void **state)

TEST(every_element_is_held_as_often_as_its_kind_says) {
    (void)state;
    for (int variant = 0; variant < 3; variant++) {
        loom_model_config config = small(variant > 0);
        config.replicate_query_groups = variant == 2;
        int64_t sizes[] = {1, 2, 4, 8};
        for (size_t t = 0; t < (variant == 1 ? 2u : 4u); t++) {
            int64_t tp = sizes[t];
            loom__model_spec *spec = make(config, tp);
            for (int64_t p = 0; p < spec->count; p++) {
                const loom__parameter_descriptor *parameter = &spec->parameters[p];
                int64_t total = parameter->shape[0] * parameter->shape[1], shape[2], owned = 0, padding = 0;
                int *held = calloc((size_t)total, sizeof *held), *counted = calloc((size_t)total, sizeof *counted);
                loom__parameter_local_shape(spec, parameter, tp, shape);
                int64_t *canonical = calloc((size_t)(shape[0] * shape[1]), sizeof *canonical);
                for (int64_t rank = 0; rank < tp; rank++) {
                    picture to = {.canonical = canonical};
                    if (loom__parameter_shard_runs(spec, parameter, tp, rank, draw, &to) != LOOM_OK)
                        fail_msg("%s, tp %lld: %s", parameter->name, (long long)tp, loom_error_message());
                    assert_int_equal(to.used, shape[0] * shape[1]);
                    int64_t mine = loom__parameter_owned_count(spec, parameter, tp, rank);
                    owned += mine;
                    for (int64_t i = 0; i < to.used; i++) {
                        padding += canonical[i] < 0;
                        if (canonical[i] >= 0) {
                            held[canonical[i]]++;
                            counted[canonical[i]] += i < mine;
                        }
                    }
                }
                int64_t copies = parameter->shard == LOOM__SHARD_NONE ? tp : 1;
                for (int64_t i = 0; i < total; i++) {
                    assert_int_equal(counted[i], 1);
                    if (!loom__parameter_is_replicated_kv(spec, parameter, tp))
                        assert_int_equal(held[i], copies);
                }
                assert_int_equal(padding, (parameter->padded_rows - parameter->shape[0]) * parameter->shape[1]);
                assert_int_equal(owned, parameter->padded_rows * parameter->shape[1]);
                free(held);
                free(counted);
                free(canonical);
            }
            loom__model_spec_destroy(spec);
        }
    }
}

static const loom__parameter_descriptor *find(const loom__model_spec *spec, const char *name) {
    for (int64_t i = 0; i < spec->count; i++)
        if (strcmp(spec->parameters[i].name, name) == 0)
            return &spec->parameters[i];
    return NULL;
}

TEST(replicated_groups_give_each_rank_its_heads_and_its_group) {
    (void)state;
    loom_model_config config = small(true);
    config.replicate_query_groups = true;
    loom__model_spec *spec = make(config, 4);
    const loom__parameter_descriptor *qkv = find(spec, "decoder.layers.1.self_attention.linear_qkv.weight");
    int64_t shape[2], canonical[4 * 6 * 24];
    loom__parameter_local_shape(spec, qkv, 4, shape);
    assert_int_equal(shape[0], (2 + 2) * 6);
    assert_true(loom__parameter_is_replicated_kv(spec, qkv, 4));
    assert_false(loom__parameter_is_replicated_kv(spec, qkv, 2));
    /* A group is 4 query heads, k, v: 36 rows. Rank 2 holds heads 0 and 1 of group 1. */
    picture to = {.canonical = canonical};
    assert_int_equal(loom__parameter_shard_runs(spec, qkv, 4, 2, draw, &to), LOOM_OK);
    assert_int_equal(canonical[0], 36 * 24);
    assert_int_equal(canonical[12 * 24], (36 + 24) * 24);
    assert_int_equal(canonical[18 * 24], (36 + 30) * 24);
    assert_int_equal(loom__parameter_owned_count(spec, qkv, 4, 2), 24 * 24);
    assert_int_equal(loom__parameter_owned_count(spec, qkv, 4, 3), 12 * 24);
    loom__model_spec_destroy(spec);
}

TEST(gpt2_has_its_parameters_in_megatrons_order) {
    (void)state;
    loom__model_spec *spec = make(small(false), 1);
    static const char *const names[] = {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight",
        "decoder.layers.0.input_layernorm.weight", "decoder.layers.0.input_layernorm.bias",
        "decoder.layers.0.self_attention.linear_proj.weight", "decoder.layers.0.self_attention.linear_proj.bias",
        "decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.0.pre_mlp_layernorm.bias",
        "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc1.bias",
        "decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.0.mlp.linear_fc2.bias"};
    assert_int_equal(spec->count, 2 + 2 * 12 + 2);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        assert_string_equal(spec->parameters[i].name, names[i]);
    assert_string_equal(spec->parameters[spec->count - 1].name, "decoder.final_layernorm.bias");
    assert_int_equal(spec->parameters[0].padded_rows, 40);
    assert_int_equal(spec->parameters[0].tie_group, 1);
    loom__model_spec_destroy(spec);
}

TEST(initial_values_and_decay_follow_the_kind) {
    (void)state;
    loom__model_spec *spec = make(small(false), 1);
    const loom__parameter_descriptor *norm = find(spec, "decoder.layers.0.input_layernorm.weight");
    const loom__parameter_descriptor *proj = find(spec, "decoder.layers.0.self_attention.linear_proj.weight");
    const loom__parameter_descriptor *fc1 = find(spec, "decoder.layers.1.mlp.linear_fc1.weight");
    const loom__parameter_descriptor *bias = find(spec, "decoder.layers.1.mlp.linear_fc2.bias");
    assert_int_equal(norm->initial, LOOM__INIT_ONE);
    assert_false(norm->decay);
    assert_true(norm->sequence_partial && bias->sequence_partial);
    assert_int_equal(bias->initial, LOOM__INIT_ZERO);
    assert_int_equal(fc1->layer, 1);
    assert_true(fc1->decay && fc1->std == 0.02 && !fc1->embedding_or_output);
    assert_true(find(spec, "embedding.word_embeddings.weight")->embedding_or_output);
    assert_false(find(spec, "embedding.position_embeddings.weight")->embedding_or_output);
    assert_true(proj->std == 0.01); /* 0.02 / sqrt(2*2) */
    assert_false(proj->sequence_partial);
    loom__model_spec_destroy(spec);
}

TEST(head_norms_come_behind_the_projection_and_are_partial_on_every_rank) {
    (void)state;
    loom_model_config config = small(true);
    config.qk_layernorm = true;
    loom__model_spec *spec = make(config, 2);
    const loom__parameter_descriptor *qkv = find(spec, "decoder.layers.1.self_attention.linear_qkv.weight");
    assert_string_equal(qkv[1].name, "decoder.layers.1.self_attention.q_layernorm.weight");
    assert_string_equal(qkv[2].name, "decoder.layers.1.self_attention.k_layernorm.weight");
    for (int i = 1; i <= 2; i++) {
        assert_int_equal(qkv[i].dims, 1);
        assert_int_equal(qkv[i].shape[0], 6);
        assert_int_equal(qkv[i].shard, LOOM__SHARD_NONE);
        assert_int_equal(qkv[i].initial, LOOM__INIT_ONE);
        assert_true(qkv[i].tensor_partial && !qkv[i].sequence_partial && !qkv[i].decay);
        assert_int_equal(loom__parameter_owned_count(spec, &qkv[i], 2, 0), 6);
        assert_int_equal(loom__parameter_owned_count(spec, &qkv[i], 2, 1), 0);
    }
    assert_false(qkv->tensor_partial || qkv[3].tensor_partial);
    loom__model_spec_destroy(spec);
}

TEST(zero_centered_weights_begin_at_zero) {
    (void)state;
    loom_model_config config = small(true);
    config.qk_layernorm = config.layernorm_zero_centered_gamma = true;
    loom__model_spec *spec = make(config, 1);
    assert_int_equal(find(spec, "decoder.layers.0.input_layernorm.weight")->initial, LOOM__INIT_ZERO);
    assert_int_equal(find(spec, "decoder.final_layernorm.weight")->initial, LOOM__INIT_ZERO);
    assert_int_equal(find(spec, "decoder.layers.0.self_attention.k_layernorm.weight")->initial, LOOM__INIT_ZERO);
    loom__model_spec_destroy(spec);
}

TEST(an_untied_llama_ends_with_its_head) {
    (void)state;
    loom__model_spec *spec = make(small(true), 2);
    const loom__parameter_descriptor *head = &spec->parameters[spec->count - 1];
    assert_string_equal(head->name, "output_layer.weight");
    assert_int_equal(head->padded_rows, 48);
    assert_int_equal(head->tie_group, 0);
    assert_null(find(spec, "decoder.layers.0.mlp.linear_fc1.bias"));
    assert_null(find(spec, "embedding.position_embeddings.weight"));
    loom__model_spec_destroy(spec);
}

/* A parameter as a layer of experts has it: where its name goes on behind "mlp.", and what it is like. */
typedef struct expected {
    const char *name;
    int64_t rows, expert;
    loom__shard_kind shard;
    bool sequence_partial;
    loom__initial initial;
} expected;

TEST(experts_have_biases_in_the_order_of_megatron) {
    (void)state;
    static const expected all[] = {
        {"router.weight", 2, -1, LOOM__SHARD_NONE, true, LOOM__INIT_NORMAL},
        {"router.bias", 2, -1, LOOM__SHARD_NONE, true, LOOM__INIT_NORMAL},
        {"experts.local_experts.0.linear_fc1.weight", 40, 0, LOOM__SHARD_GATE_UP, false, LOOM__INIT_NORMAL},
        {"experts.local_experts.0.linear_fc1.bias", 40, 0, LOOM__SHARD_GATE_UP, false, LOOM__INIT_ZERO},
        {"experts.local_experts.0.linear_fc2.weight", 24, 0, LOOM__SHARD_SLICE, false, LOOM__INIT_NORMAL},
        {"experts.local_experts.0.linear_fc2.bias", 24, 0, LOOM__SHARD_NONE, false, LOOM__INIT_ZERO},
        {"experts.local_experts.1.linear_fc1.weight", 40, 1, LOOM__SHARD_GATE_UP, false, LOOM__INIT_NORMAL},
        {"experts.local_experts.1.linear_fc1.bias", 40, 1, LOOM__SHARD_GATE_UP, false, LOOM__INIT_ZERO},
        {"experts.local_experts.1.linear_fc2.weight", 24, 1, LOOM__SHARD_SLICE, false, LOOM__INIT_NORMAL},
        {"experts.local_experts.1.linear_fc2.bias", 24, 1, LOOM__SHARD_NONE, false, LOOM__INIT_ZERO},
        {"shared_experts.gate_weight", 1, -1, LOOM__SHARD_NONE, true, LOOM__INIT_NORMAL},
        {"shared_experts.linear_fc1.weight", 24, -1, LOOM__SHARD_GATE_UP, false, LOOM__INIT_NORMAL},
        {"shared_experts.linear_fc1.bias", 24, -1, LOOM__SHARD_GATE_UP, false, LOOM__INIT_ZERO},
        {"shared_experts.linear_fc2.weight", 24, -1, LOOM__SHARD_SLICE, false, LOOM__INIT_NORMAL},
        {"shared_experts.linear_fc2.bias", 24, -1, LOOM__SHARD_NONE, true, LOOM__INIT_ZERO},
    };
    for (int linear = 0; linear < 2; linear++) {
        loom_model_config config = small(true);
        config.add_bias_linear = linear;
        config.add_mlp_bias = true;
        config.moe = (loom_moe_config){.num_moe_experts = 2,
            .moe_ffn_hidden_size = 20,
            .moe_layer_freq.every = 1,
            .moe_shared_expert_intermediate_size = 12,
            .moe_shared_expert_gate = true};
        loom__model_spec *spec = make(config, 1);
        const loom__parameter_descriptor *at = find(spec, "decoder.layers.1.pre_mlp_layernorm.weight") + 1;
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
            char name[LOOM__PARAMETER_NAME_MAX];
            bool bias = strcmp(strrchr(all[i].name, '.'), ".bias") == 0;
            /* add_mlp_bias is of linear layers alone. */
            if (!linear && strcmp(all[i].name, "router.bias") == 0)
                continue;
            snprintf(name, sizeof name, "decoder.layers.1.mlp.%s", all[i].name);
            assert_string_equal(at->name, name);
            assert_int_equal(at->shape[0], all[i].rows);
            assert_int_equal(at->dims, bias ? 1 : 2);
            assert_int_equal(at->decay, !bias);
            assert_int_equal(at->expert, all[i].expert);
            assert_int_equal(at->shard, all[i].shard);
            assert_int_equal(at->sequence_partial, all[i].sequence_partial);
            assert_int_equal(at->initial, all[i].initial);
            at++;
        }
        assert_string_equal(at->name, "decoder.final_layernorm.weight");
        loom__model_spec_destroy(spec);
    }
}

static void refused(loom_model_config config, int64_t tp, bool sequence_parallel, const char *message) {
    loom_model_config before = config;
    loom_status status = loom__model_config_complete(&config, tp, sequence_parallel);
    assert_string_equal(loom_error_message(), message);
    assert_int_equal(status, LOOM_ERR_CONFIG);
    assert_int_equal(config.padded_vocab_size, before.padded_vocab_size);
    assert_int_equal(config.max_position_embeddings, before.max_position_embeddings);
}

TEST(illegal_tensor_sizes_name_the_legal_ones) {
    (void)state;
    loom_model_config config = small(true);
    refused(config, 8, false,
        "tensor_model_parallel_size 8 does not divide num_query_groups 2 (replicate_query_groups would let ranks share "
        "one); nearest legal tensor_model_parallel_size 2, num_query_groups 8, or replicate_query_groups true");
    refused(config, 3, false,
        "tensor_model_parallel_size 3 does not divide num_attention_heads 8; nearest legal tensor_model_parallel_size "
        "2\ntensor_model_parallel_size 3 does not divide num_query_groups 2; nearest legal tensor_model_parallel_size "
        "2");
    config.ffn_hidden_size = 50;
    config.num_query_groups = 8;
    refused(config, 4, false,
        "tensor_model_parallel_size 4 does not divide ffn_hidden_size 50; nearest legal tensor_model_parallel_size 2, "
        "or ffn_hidden_size 48 or 52");
}

TEST(dropout_that_is_1_in_fp32_is_refused) {
    (void)state;
    loom_model_config config = small(false);
    config.hidden_dropout = 0.99999999;
    refused(config, 1, false, "hidden_dropout: found 0.99999999, expected a number from 0 to below 1 in fp32");
    config.hidden_dropout = 0;
    config.layernorm_epsilon = 1e-60;
    refused(config, 1, false, "layernorm_epsilon: found 1e-60, expected a number > 0 in fp32");
}

TEST(a_vocabulary_that_is_given_padded_must_divide) {
    (void)state;
    loom_model_config config = small(true);
    config.padded_vocab_size = 41;
    refused(config, 2, false,
        "padded_vocab_size 41 is not divisible by tensor_model_parallel_size 2; nearest legal padded_vocab_size 40 or "
        "42, or tensor_model_parallel_size 1");
    config.padded_vocab_size = 38;
    assert_int_equal(loom__model_config_complete(&config, 2, false), LOOM_OK);
    assert_int_equal(config.padded_vocab_size, 38);
}

TEST(sequence_lengths_must_divide_and_fit_the_positions) {
    (void)state;
    loom_model_config config = small(false);
    config.seq_length = 3;
    refused(config, 2, true,
        "seq_length 3 is not divisible by tensor_model_parallel_size 2, as sequence_parallel asks; nearest legal "
        "seq_length 2 or 4, or sequence_parallel false");
    config.max_position_embeddings = 2;
    refused(config, 1, false,
        "seq_length 3 is longer than the 2 learned positions (max_position_embeddings); nearest legal seq_length 2, or "
        "max_position_embeddings 3");
    refused(small(true), 1, true,
        "sequence_parallel needs tensor_model_parallel_size > 1, found 1; nearest legal sequence_parallel false, or "
        "tensor_model_parallel_size 2");
}

TEST(head_sizes_must_divide) {
    (void)state;
    loom_model_config config = small(false);
    config.hidden_size = 28;
    refused(config, 1, false,
        "hidden_size 28 is not divisible by num_attention_heads 8, and kv_channels is not given; nearest legal "
        "hidden_size 24 or 32, num_attention_heads 7 or 14, or kv_channels 2 or 3");
    config = small(true);
    config.num_query_groups = 3;
    config.kv_channels = 5;
    refused(config, 1, false,
        "num_query_groups 3 does not divide num_attention_heads 8; nearest legal num_query_groups 2 or 4, or "
        "num_attention_heads 6 or 9\nkv_channels 5 with rotary_percent 1: rotary positions turn pairs, so that an even "
        "number of channels is needed; nearest legal kv_channels 4 or 6");
}

TEST(absurd_sizes_are_refused_without_overflow) {
    (void)state;
    const int64_t absurd[] = {0, -1, INT64_MIN, INT64_MAX, (int64_t)1 << 40};
    for (size_t i = 0; i < sizeof absurd / sizeof *absurd; i++)
        for (int field = 0; field < 9; field++) {
            loom_model_config config = small(true);
            int64_t *const fields[] = {&config.num_layers, &config.hidden_size, &config.ffn_hidden_size,
                &config.num_attention_heads, &config.num_query_groups, &config.kv_channels, &config.seq_length,
                &config.vocab_size, &config.make_vocab_size_divisible_by};
            *fields[field] = absurd[i];
            bool zero_is_derived = absurd[i] == 0 && (field == 2 || field == 4 || field == 5);
            loom_status status = loom__model_config_complete(&config, 2, true);
            if (!zero_is_derived)
                assert_int_equal(status, LOOM_ERR_CONFIG);
        }
    loom_model_config config = small(true);
    assert_int_equal(loom__model_config_complete(&config, INT64_MAX, false), LOOM_ERR_CONFIG);
    assert_int_equal(loom__model_config_complete(&config, 0, false), LOOM_ERR_CONFIG);
}

TEST(scalings_of_rotary_positions_need_sound_numbers) {
    (void)state;
    loom_model_config config = small(true);
    config.rope_scaling = LOOM_ROPE_SCALING_LINEAR;
    refused(config, 1, false, "rope_scaling_factor: found 0, expected a number > 0");
    config.rope_scaling_factor = 2;
    loom_model_config linear = config;
    assert_int_equal(loom__model_config_complete(&linear, 1, false), LOOM_OK);
    config.rope_scaling = LOOM_ROPE_SCALING_LLAMA3;
    config.rope_scaling_low_freq_factor = config.rope_scaling_high_freq_factor = 4;
    refused(config, 1, false,
        "rope_scaling_low_freq_factor 4, rope_scaling_high_freq_factor 4: expected numbers > 0, the second above the "
        "first\n"
        "rope_scaling_original_max_position_embeddings: found 0, expected an integer from 1 to 1073741824");
}

TEST(head_norms_with_a_mean_are_not_supported_yet) {
    (void)state;
    loom_model_config config = small(false);
    config.qk_layernorm = true;
    assert_int_equal(loom__model_config_complete(&config, 1, false), LOOM_ERR_UNSUPPORTED);
    assert_string_equal(
        loom_error_message(), "not supported yet: qk_layernorm with normalization layernorm; with rmsnorm it is");
}

TEST(other_architectures_are_not_supported_yet) {
    (void)state;
    loom_model_config config = small(true);
    config.architecture = "t5";
    assert_int_equal(loom__model_config_complete(&config, 1, false), LOOM_ERR_UNSUPPORTED);
    assert_string_equal(loom_error_message(),
        "not supported yet: architecture \"t5\"; gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen2_moe, "
        "qwen3_moe and gemma are");
}

static int64_t count_stage(const loom_model_config *config, loom_stage stage, loom_model_description *found) {
    assert_int_equal(loom_model_describe_stage(config, &stage, found), LOOM_OK);
    assert_int_equal(found->embedding + found->attention + found->mlp + found->norms + found->head, found->total);
    return found->total;
}

static void the_stages_of_a_model_hold_each_parameter_once_and_a_tied_head_twice(void **state) {
    (void)state;
    for (int llama = 0; llama <= 1; llama++) {
        loom_model_config config = small(llama);
        loom_model_description whole, first, last, alone;
        assert_int_equal(loom_model_describe(&config, &whole), LOOM_OK);
        int64_t sum = count_stage(&config, (loom_stage){.layers = 2, .embedding = true}, &first) +
                      count_stage(&config, (loom_stage){.first_layer = 2, .loss = true}, &last);
        int64_t words = config.vocab_size * config.hidden_size;
        assert_int_equal(sum, whole.total + (llama ? 0 : words));
        assert_int_equal(last.head, words);
        assert_int_equal(first.embedding, whole.embedding);
        assert_int_equal(first.attention, whole.attention);
        /* One layer of two, with neither end. */
        count_stage(&config, (loom_stage){.first_layer = 1, .layers = 1}, &alone);
        assert_int_equal(alone.mlp * 2, whole.mlp);
        assert_true(alone.embedding == 0 && alone.head == 0);
        assert_int_equal(
            count_stage(&config, (loom_stage){.layers = 2, .embedding = true, .loss = true}, &alone), whole.total);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_element_is_held_as_often_as_its_kind_says),
        cmocka_unit_test(replicated_groups_give_each_rank_its_heads_and_its_group),
        cmocka_unit_test(gpt2_has_its_parameters_in_megatrons_order),
        cmocka_unit_test(initial_values_and_decay_follow_the_kind),
        cmocka_unit_test(head_norms_come_behind_the_projection_and_are_partial_on_every_rank),
        cmocka_unit_test(zero_centered_weights_begin_at_zero),
        cmocka_unit_test(an_untied_llama_ends_with_its_head),
        cmocka_unit_test(the_stages_of_a_model_hold_each_parameter_once_and_a_tied_head_twice),
        cmocka_unit_test(illegal_tensor_sizes_name_the_legal_ones),
        cmocka_unit_test(dropout_that_is_1_in_fp32_is_refused),
        cmocka_unit_test(a_vocabulary_that_is_given_padded_must_divide),
        cmocka_unit_test(sequence_lengths_must_divide_and_fit_the_positions),
        cmocka_unit_test(head_sizes_must_divide),
        cmocka_unit_test(absurd_sizes_are_refused_without_overflow),
        cmocka_unit_test(experts_have_biases_in_the_order_of_megatron),
        cmocka_unit_test(scalings_of_rotary_positions_need_sound_numbers),
        cmocka_unit_test(head_norms_with_a_mean_are_not_supported_yet),
        cmocka_unit_test(other_architectures_are_not_supported_yet),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
