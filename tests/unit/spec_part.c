/* Which parameters a stage holds: together the stages hold each parameter once, and a copy of tied word embeddings. */
#include "spec/part.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { LAYERS = 6, STAGES = 3 };

static loom_model_config config_of(bool tied) {
    return (loom_model_config){.architecture = "gpt2",
        .num_layers = LAYERS,
        .hidden_size = 24,
        .num_attention_heads = 4,
        .seq_length = 16,
        .vocab_size = 37,
        .make_vocab_size_divisible_by = 8,
        .normalization = LOOM_LAYERNORM,
        .layernorm_epsilon = 1e-5,
        .activation = LOOM_GELU_TANH,
        .position_embedding_type = LOOM_POSITION_LEARNED,
        .add_bias_linear = true,
        .add_qkv_bias = true,
        .share_embeddings_and_output_weights = tied,
        .init_method_std = 0.02};
}

static loom__model_spec *spec_of(loom_model_config *config) {
    loom__model_spec *spec = NULL;
    if (loom__model_config_complete(config, 1, false) || loom__model_spec_create(config, &spec))
        fail_msg("%s", loom_error_message());
    return spec;
}

static loom__model_spec *make_spec(bool tied) {
    loom_model_config config = config_of(tied);
    return spec_of(&config);
}

/* E t|t|t, t|t|t L: chunk c of stage r is chunks[r][c]. */
static const loom_stage chunks[STAGES][2] = {
    {{0, 1, true, false}, {3, 1, false, false}},
    {{1, 1, false, false}, {4, 1, false, false}},
    {{2, 1, false, false}, {5, 1, false, true}},
};

static loom__part *make_part(const loom__model_spec *spec, int64_t stages, const loom_stage *of, int64_t count) {
    loom__part *part = NULL;
    if (loom__part_create(spec, stages, of, count, &part))
        fail_msg("%s", loom_error_message());
    return part;
}

static void the_stages_hold_every_parameter_once_in_the_order_of_chunks(void **state) {
    (void)state;
    for (int tied = 0; tied < 2; tied++) {
        loom__model_spec *spec = make_spec(tied);
        int held[256] = {0};
        for (int r = 0; r < STAGES; r++) {
            loom__part *part = make_part(spec, STAGES, chunks[r], 2);
            for (int64_t i = 0; i < part->count; i++) {
                const loom__part_entry *entry = &part->entries[i], *before = i ? entry - 1 : NULL;
                held[entry->canonical] += !entry->copy;
                if (before && !entry->copy)
                    assert_true(before->chunk <= entry->chunk && before->canonical < entry->canonical);
                if (entry->descriptor->layer >= 0)
                    assert_int_equal(entry->descriptor->layer, chunks[r][entry->chunk].first_layer);
                if (!entry->copy)
                    assert_ptr_equal(entry->descriptor, &spec->parameters[entry->canonical]);
            }
            loom__part_destroy(part);
        }
        for (int64_t i = 0; i < spec->count; i++)
            if (held[i] != 1)
                fail_msg("%s is held %d times", spec->parameters[i].name, held[i]);
        loom__model_spec_destroy(spec);
    }
}

static void the_last_stage_holds_a_copy_of_tied_word_embeddings(void **state) {
    (void)state;
    loom__model_spec *spec = make_spec(true);
    loom__part *first = make_part(spec, STAGES, chunks[0], 2), *middle = make_part(spec, STAGES, chunks[1], 2);
    loom__part *last = make_part(spec, STAGES, chunks[2], 2);
    const loom__part_entry *copy = &last->entries[last->count - 1];
    assert_string_equal(copy->descriptor->name, "output_layer.weight");
    assert_true(copy->copy && copy->shared_ends && copy->chunk == 1 && copy->canonical == 0);
    assert_int_equal(copy->descriptor->padded_rows, spec->parameters[0].padded_rows);
    assert_true(first->entries[0].shared_ends && !first->entries[0].copy);
    for (int64_t i = 1; i < first->count; i++)
        assert_false(first->entries[i].shared_ends || first->entries[i].copy);
    for (int64_t i = 0; i < middle->count; i++)
        assert_false(middle->entries[i].shared_ends || middle->entries[i].copy);
    loom__part_destroy(first);
    loom__part_destroy(middle);
    loom__part_destroy(last);
    loom__model_spec_destroy(spec);
}

/* They are saved with the model, and nobody who trains it meets them. */
static void biases_of_experts_stand_behind_the_parameters_of_their_stage(void **state) {
    (void)state;
    for (int tied = 0; tied < 2; tied++) {
        loom_model_config config = config_of(tied);
        config.add_bias_linear = false;
        config.moe = (loom_moe_config){.num_moe_experts = 4, .moe_router_topk = 2, .moe_layer_freq.every = 2};
        loom__model_spec *plain = spec_of(&config);
        config.moe.moe_router_score_function = "sigmoid";
        config.moe.moe_router_enable_expert_bias = true;
        loom__model_spec *spec = spec_of(&config);
        assert_int_equal(spec->count, plain->count);
        assert_int_equal(spec->module_buffers, 3);
        assert_string_equal(spec->parameters[spec->count + 1].name, "decoder.layers.2.mlp.router.expert_bias");
        assert_true(!tied || strcmp(spec->tied_head->name, "output_layer.weight") == 0);
        loom__part *part = make_part(spec, STAGES, chunks[1], 2);
        int64_t held = 0;
        for (int c = 0; c < 2; c++)
            held += chunks[1][c].first_layer % 2 == 0;
        assert_int_equal(part->module_buffers, held);
        int64_t before = part->count;
        loom__part_keep_experts(part, 2, 2);
        assert_int_equal(part->count, before - held * 4);
        for (int64_t i = part->count; i < part->count + held; i++) {
            const loom__part_entry *entry = &part->entries[i];
            assert_non_null(strstr(entry->descriptor->name, "expert_bias"));
            assert_int_equal(entry->descriptor->layer, chunks[1][entry->chunk].first_layer);
            assert_ptr_equal(entry->descriptor, &spec->parameters[entry->canonical]);
        }
        loom__part_destroy(part);
        loom__model_spec_destroy(spec);
        loom__model_spec_destroy(plain);
    }
}

static void one_stage_and_an_untied_model_have_no_copy(void **state) {
    (void)state;
    const loom_stage two[] = {{0, 4, true, false}, {4, 2, false, true}};
    for (int tied = 0; tied < 2; tied++) {
        loom__model_spec *spec = make_spec(tied);
        loom__part *whole = make_part(spec, 1, NULL, 0), *cut = make_part(spec, 1, two, 2);
        assert_int_equal(whole->count, spec->count);
        assert_int_equal(cut->count, spec->count);
        for (int64_t i = 0; i < spec->count; i++) {
            assert_false(whole->entries[i].shared_ends || cut->entries[i].shared_ends || cut->entries[i].copy);
            assert_ptr_equal(whole->entries[i].descriptor, &spec->parameters[i]);
            assert_ptr_equal(cut->entries[i].descriptor, &spec->parameters[i]);
        }
        loom__part_destroy(whole);
        loom__part_destroy(cut);
        loom__model_spec_destroy(spec);
    }
    loom__model_spec *spec = make_spec(false);
    loom__part *last = make_part(spec, STAGES, chunks[2], 2);
    const loom__part_entry *head = &last->entries[last->count - 1];
    assert_string_equal(head->descriptor->name, "output_layer.weight");
    assert_false(head->copy || head->shared_ends);
    loom__part_destroy(last);
    loom__model_spec_destroy(spec);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_stages_hold_every_parameter_once_in_the_order_of_chunks),
        cmocka_unit_test(the_last_stage_holds_a_copy_of_tied_word_embeddings),
        cmocka_unit_test(one_stage_and_an_untied_model_have_no_copy),
        cmocka_unit_test(biases_of_experts_stand_behind_the_parameters_of_their_stage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
