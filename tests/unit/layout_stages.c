/* Layers on stages: what is refused and in which words, texts from anyone, and what holds of every split. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "layout/layout.h"
#include <megaloom/stages.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEST(name) static void name(void **state)
#define SPLIT(...) ((loom_stage_split){__VA_ARGS__})
#define LAYOUT(text, l, pp)                                                                                            \
    SPLIT(.layers = (l), .pipeline_model_parallel_size = (pp), .pipeline_model_parallel_layout = (text))

static void expect_layers(loom_stage_split split, const char *expected) {
    loom_stage stages[64];
    char text[512] = "";
    int64_t chunks;
    assert_int_equal(loom_stage_split_chunks(&split, &chunks), LOOM_OK);
    assert_true(chunks * split.pipeline_model_parallel_size <= 64);
    assert_int_equal(loom_stage_split_make(&split, stages), LOOM_OK);
    for (int64_t i = 0; i < chunks * split.pipeline_model_parallel_size; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%lld", i ? " " : "", (long long)stages[i].layers);
    assert_string_equal(text, expected);
}

static void expect_refused(loom_stage_split split, loom_status status, const char *message) {
    loom_error_clear();
    assert_int_equal(loom_stage_split_make(&split, NULL), status);
    assert_string_equal(loom_error_message(), message);
}

TEST(what_does_not_divide_is_refused_with_the_nearest_that_does) {
    (void)state;
    expect_refused(SPLIT(.layers = 30, .pipeline_model_parallel_size = 4), LOOM_ERR_CONFIG,
        "num_layers 30 is not a multiple of pipeline_model_parallel_size 4 (balanced_pipeline_split would make them 8, "
        "8, 7, 7); nearest legal num_layers 28 or 32, pipeline_model_parallel_size 3 or 5, or balanced_pipeline_split "
        "true");
    expect_refused(SPLIT(.layers = 10, .pipeline_model_parallel_size = 3), LOOM_ERR_CONFIG,
        "num_layers 10 is not a multiple of pipeline_model_parallel_size 3 (balanced_pipeline_split would make them 4, "
        "3, 3); nearest legal num_layers 9 or 12, pipeline_model_parallel_size 2 or 5, or balanced_pipeline_split "
        "true");
    expect_refused(SPLIT(.layers = 7, .pipeline_model_parallel_size = 2), LOOM_ERR_CONFIG,
        "num_layers 7 is not a multiple of pipeline_model_parallel_size 2 (balanced_pipeline_split would make them 4, "
        "3); nearest legal num_layers 6 or 8, pipeline_model_parallel_size 1 or 7, or balanced_pipeline_split true");
    expect_refused(SPLIT(.layers = 12, .pipeline_model_parallel_size = 4, .virtual_pipeline_model_parallel_size = 2),
        LOOM_ERR_CONFIG,
        "num_layers 12 is not a multiple of pipeline_model_parallel_size 4 x virtual_pipeline_model_parallel_size 2 = "
        "8 chunks (balanced_pipeline_split would make them 2, 2, 2, 2, 1, 1, 1, 1); nearest legal num_layers 8 or 16, "
        "pipeline_model_parallel_size 3 or 6, virtual_pipeline_model_parallel_size 1 or 3, or balanced_pipeline_split "
        "true");
}

TEST(a_balanced_split_gives_the_larger_parts_first) {
    (void)state;
    expect_layers(SPLIT(.layers = 30, .pipeline_model_parallel_size = 4, .balanced_pipeline_split = true), "8 8 7 7");
    expect_layers(SPLIT(.layers = 10, .pipeline_model_parallel_size = 3, .balanced_pipeline_split = true), "4 3 3");
    expect_layers(SPLIT(.layers = 7, .pipeline_model_parallel_size = 2, .balanced_pipeline_split = true), "4 3");
    expect_layers(SPLIT(.layers = 30, .pipeline_model_parallel_size = 4, .virtual_pipeline_model_parallel_size = 2,
                      .balanced_pipeline_split = true),
        "4 4 4 4 4 4 3 3");
    expect_refused(SPLIT(.layers = 3, .pipeline_model_parallel_size = 4, .balanced_pipeline_split = true),
        LOOM_ERR_CONFIG,
        "num_layers 3 are too few for pipeline_model_parallel_size 4: balanced_pipeline_split gives each at least one "
        "layer; nearest legal num_layers 4, or pipeline_model_parallel_size 3");
}

TEST(embedding_and_loss_count_as_layers) {
    (void)state;
    expect_layers(SPLIT(.layers = 6, .pipeline_model_parallel_size = 4, .virtual_pipeline_model_parallel_size = 2,
                      .account_for_embedding_in_pipeline_split = true, .account_for_loss_in_pipeline_split = true),
        "0 1 1 1 1 1 1 0");
    expect_refused(SPLIT(.layers = 8, .pipeline_model_parallel_size = 4, .account_for_loss_in_pipeline_split = true),
        LOOM_ERR_CONFIG,
        "num_layers 8 and the loss, counted as a layer, make 9, which is not a multiple of "
        "pipeline_model_parallel_size 4; nearest legal num_layers 7 or 11, or pipeline_model_parallel_size 3 or 9");
}

TEST(ends_that_leave_no_even_middle_are_refused_with_ends_that_do) {
    (void)state;
    expect_refused(SPLIT(.layers = 14, .pipeline_model_parallel_size = 4, .num_layers_in_first_pipeline_stage = 3,
                       .num_layers_in_last_pipeline_stage = 2),
        LOOM_ERR_CONFIG,
        "num_layers 14 with num_layers_in_first_pipeline_stage 3 and num_layers_in_last_pipeline_stage 2 on "
        "pipeline_model_parallel_size 4: expected besides these 5 a positive multiple of 2 for the other stages; "
        "nearest legal num_layers 13 or 15, num_layers_in_first_pipeline_stage 2 or 4, "
        "num_layers_in_last_pipeline_stage 1 or 3, or pipeline_model_parallel_size 3 or 5");
    /* Every layer at one end is no pipeline. */
    expect_refused(SPLIT(.layers = 7, .pipeline_model_parallel_size = 3, .num_layers_in_first_pipeline_stage = 7),
        LOOM_ERR_CONFIG,
        "num_layers 7 with num_layers_in_first_pipeline_stage 7 on pipeline_model_parallel_size 3: expected besides "
        "these 7 a positive multiple of 2 for the other stages; nearest legal num_layers 9, "
        "num_layers_in_first_pipeline_stage 5, or pipeline_model_parallel_size 1");
    /* Here the reference divides by zero. */
    expect_layers(SPLIT(.layers = 10, .pipeline_model_parallel_size = 2, .virtual_pipeline_model_parallel_size = 2,
                      .num_layers_in_first_pipeline_stage = 4, .num_layers_in_last_pipeline_stage = 6),
        "2 3 2 3");
    expect_refused(SPLIT(.layers = 5, .pipeline_model_parallel_size = 2,
                       .num_layers_in_first_pipeline_stage = INT64_MAX, .num_layers_in_last_pipeline_stage = INT64_MAX),
        LOOM_ERR_CONFIG,
        "num_layers 5 with num_layers_in_first_pipeline_stage 9223372036854775807 and "
        "num_layers_in_last_pipeline_stage 9223372036854775807 on pipeline_model_parallel_size 2: expected these "
        "9223372036854775807 to be all");
}

TEST(one_stage_has_no_chunks) {
    (void)state;
    expect_refused(SPLIT(.layers = 8, .pipeline_model_parallel_size = 1, .virtual_pipeline_model_parallel_size = 2),
        LOOM_ERR_CONFIG,
        "virtual_pipeline_model_parallel_size is 2, but pipeline_model_parallel_size is 1: expected at least 2 "
        "pipeline stages, or no virtual ones; nearest legal virtual_pipeline_model_parallel_size null, or "
        "pipeline_model_parallel_size 2");
    expect_refused(LAYOUT("Et|tL", 2, 1), LOOM_ERR_CONFIG,
        "pipeline_model_parallel_layout: 'Et|tL' has 2 stages, but pipeline_model_parallel_size is 1: expected one "
        "stage, or a pipeline size that divides their number; nearest legal pipeline_model_parallel_size 2");
}

TEST(all_faults_are_named_at_once) {
    (void)state;
    expect_refused(SPLIT(.layers = 0, .pipeline_model_parallel_size = 4, .virtual_pipeline_model_parallel_size = -1,
                       .num_layers_in_first_pipeline_stage = 2, .balanced_pipeline_split = true,
                       .account_for_loss_in_pipeline_split = true, .pipeline_model_parallel_layout = "EttL|"),
        LOOM_ERR_CONFIG,
        "virtual_pipeline_model_parallel_size: found -1, expected at least 1, or null; nearest legal "
        "virtual_pipeline_model_parallel_size 1\n"
        "pipeline_model_parallel_layout: 'EttL|' has L, the loss, in the middle: expected it as the last symbol\n"
        "num_layers: found 0, expected 1 to 9007199254740992; nearest legal num_layers 1\n"
        "balanced_pipeline_split: found together with pipeline_model_parallel_layout, expected one way to cut the "
        "layers; nearest legal balanced_pipeline_split false\n"
        "num_layers_in_first_pipeline_stage: found together with pipeline_model_parallel_layout, expected one way to "
        "cut the layers; nearest legal num_layers_in_first_pipeline_stage null\n"
        "account_for_loss_in_pipeline_split: found together with pipeline_model_parallel_layout, expected one way to "
        "cut the layers; nearest legal account_for_loss_in_pipeline_split false");
}

TEST(a_layout_repeats_symbols_and_groups_also_nested) {
    (void)state;
    expect_layers(LAYOUT("E|t*3|(tt|)*2L", 7, 5), "0 3 2 2 0");
    expect_layers(LAYOUT("E(t*5|)*2,ttL", 12, 3), "5 5 2");
    expect_layers(LAYOUT("E((t)*2|)*3tL", 7, 2), "2 2 2 1");
    expect_layers(LAYOUT("E(tt)*2t|L", 5, 2), "5 0");   /* the symbol behind a group is not of the group */
    expect_layers(LAYOUT("Et(|t)*2tL", 4, 3), "1 1 2"); /* nor of the run before the group */
    expect_layers(LAYOUT("Et|*3tL", 2, 4), "1 0 0 1");
    expect_layers(LAYOUT(",E,,t,|,t,L,", 2, 2), "1 1");
}

TEST(a_layout_must_place_the_layers_of_the_model_on_the_stages_of_the_run) {
    (void)state;
    expect_refused(LAYOUT("Ett|ttL", 5, 2), LOOM_ERR_CONFIG,
        "pipeline_model_parallel_layout: 'Ett|ttL' places 4 layers (t), expected num_layers 5; nearest legal "
        "num_layers 4");
    expect_refused(LAYOUT("Ett|t|tL", 4, 2), LOOM_ERR_CONFIG,
        "pipeline_model_parallel_layout: 'Ett|t|tL' has 3 stages, expected a multiple of pipeline_model_parallel_size "
        "2; nearest legal pipeline_model_parallel_size 3");
    expect_refused(SPLIT(.layers = 8, .pipeline_model_parallel_size = 2, .virtual_pipeline_model_parallel_size = 3,
                       .pipeline_model_parallel_layout = "Ett|tt|tt|ttL"),
        LOOM_ERR_CONFIG,
        "virtual_pipeline_model_parallel_size: found 3, but pipeline_model_parallel_layout 'Ett|tt|tt|ttL' has 4 "
        "stages for pipeline_model_parallel_size 2: expected 2, or null; nearest legal "
        "virtual_pipeline_model_parallel_size 2");
    expect_refused(LAYOUT("Et|tmL", 2, 2), LOOM_ERR_UNSUPPORTED,
        "not supported yet: pipeline_model_parallel_layout 'Et|tmL' with m (multi-token prediction layers); only E, t "
        "and "
        "L work");
}

TEST(each_slip_in_a_layout_is_named_by_place) {
    (void)state;
    static const char *const slips[][2] = {{"E t", "character 2: found ' ', expected E, t, m, L, |, (…)*n or *n"},
        {"Ett(|tt", "character 8: found the end, expected ')'"},
        {"Ett)|tt", "character 4: found ')', expected no ')' without '('"},
        {"Et|()*2t", "character 5: found ')', expected something between '(' and ')'"},
        {"Et|(,)*2t", "character 6: found ')', expected something between '(' and ')'"},
        {"E(tt)|tL", "character 6: found '|', expected *n, the number of repeats, behind ')'"},
        {"Et*|L", "character 4: found '|', expected a number of repeats >= 1"},
        {"Et*0|L", "character 4: found '0', expected a number of repeats >= 1"},
        {"Et*-1|L", "character 4: found '-', expected a number of repeats >= 1"},
        {"Et*2*2|L", "character 5: found '*', expected E, t, m, L, |, (…)*n or *n"},
        {"Et*1,2|L", "character 6: found '2', expected E, t, m, L, |, (…)*n or *n"},
        {"E\xff", "character 2: found byte 0xff, expected E, t, m, L, |, (…)*n or *n"}};
    for (size_t i = 0; i < sizeof slips / sizeof *slips; i++) {
        char message[256];
        snprintf(message, sizeof message, "pipeline_model_parallel_layout: '%s', %s", slips[i][0], slips[i][1]);
        expect_refused(LAYOUT(slips[i][0], 8, 2), LOOM_ERR_CONFIG, message);
    }
    expect_refused(LAYOUT("", 8, 2), LOOM_ERR_CONFIG,
        "pipeline_model_parallel_layout: '' has 0 E, the embedding: expected one, the first symbol\n"
        "pipeline_model_parallel_layout: '' has 0 L, the loss: expected one, the last symbol");
}

static void expect_fault(const char *text, const char *words) {
    loom_stage_split split = LAYOUT(text, INT64_C(1) << 53, 2);
    loom_error_clear();
    assert_int_equal(loom_stage_split_make(&split, NULL), LOOM_ERR_CONFIG);
    if (!strstr(loom_error_message(), words))
        fail_msg("'%s' does not say '%s'", loom_error_message(), words);
}

TEST(hostile_layouts_are_refused_without_being_written_out) {
    (void)state;
    expect_fault("E(((((t*99999999|)*99999999)*99999999)*99999999)*99999999)*99999999L", "more than 1048576 stages");
    expect_fault("Et*9007199254740992|L", "more than 1048576 layers");
    expect_fault("Et*99999999999999999999999999999999|L", "more than 1048576 layers");
    expect_fault("E|*18446744073709551617L", "more than 1048576 stages");
    expect_fault("E*18446744073709551617|L", "at least 2097152 E");
    enum { LONG = 100000 };
    char *text = malloc(LONG + 1);
    assert_non_null(text);
    memset(text, '(', LONG);
    text[LONG] = '\0';
    expect_fault(text, "at most 32 groups one in another");
    for (int i = 0; i < LONG; i++)
        text[i] = i % 2 ? '|' : 't';
    expect_fault(text, "more than 4096 parts");
    memset(text, 't', LONG);
    expect_fault(text, "has 0 E"); /* a run is one part, however long */
    free(text);
}

/* Asked without the nearest legal values, which most of the thousands of splits below would be searched for. */
static bool is_accepted(const loom_stage_split *split) {
    loom__faults faults;
    int64_t chunks;
    loom__faults_begin(&faults);
    loom__stage_split_faults(split, &chunks, &faults);
    return faults.count == 0;
}

/* Whatever is accepted places each layer once, in the order of depth. */
TEST(every_layer_is_placed_exactly_once) {
    (void)state;
    loom_stage stages[64];
    int accepted = 0;
    for (int64_t layers = 1; layers <= 20; layers++)
        for (int64_t pp = 1; pp <= 5; pp++)
            for (int64_t vp = 0; vp <= 3; vp++)
                for (int64_t first = 0; first <= 4; first++)
                    for (int64_t last = 0; last <= 4; last++)
                        for (int flags = 0; flags < 8; flags++) {
                            loom_stage_split split = SPLIT(.layers = layers, .pipeline_model_parallel_size = pp,
                                .virtual_pipeline_model_parallel_size = vp, .num_layers_in_first_pipeline_stage = first,
                                .num_layers_in_last_pipeline_stage = last,
                                .account_for_embedding_in_pipeline_split = flags & 1,
                                .account_for_loss_in_pipeline_split = flags & 2, .balanced_pipeline_split = flags & 4);
                            if (!is_accepted(&split))
                                continue;
                            assert_int_equal(loom_stage_split_make(&split, stages), LOOM_OK);
                            int64_t depth = 0, chunks = vp ? vp : 1;
                            for (int64_t i = 0; i < pp * chunks; i++) {
                                assert_true(stages[i].layers >= 0 && stages[i].first_layer == depth);
                                assert_true(
                                    stages[i].embedding == (i == 0) && stages[i].loss == (i == pp * chunks - 1));
                                depth += stages[i].layers;
                            }
                            assert_int_equal(depth, layers);
                            accepted++;
                        }
    assert_true(accepted > 500);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_does_not_divide_is_refused_with_the_nearest_that_does),
        cmocka_unit_test(a_balanced_split_gives_the_larger_parts_first),
        cmocka_unit_test(embedding_and_loss_count_as_layers),
        cmocka_unit_test(ends_that_leave_no_even_middle_are_refused_with_ends_that_do),
        cmocka_unit_test(one_stage_has_no_chunks),
        cmocka_unit_test(all_faults_are_named_at_once),
        cmocka_unit_test(a_layout_repeats_symbols_and_groups_also_nested),
        cmocka_unit_test(a_layout_must_place_the_layers_of_the_model_on_the_stages_of_the_run),
        cmocka_unit_test(each_slip_in_a_layout_is_named_by_place),
        cmocka_unit_test(hostile_layouts_are_refused_without_being_written_out),
        cmocka_unit_test(every_layer_is_placed_exactly_once),
    };
    return cmocka_run_group_tests_name("unit.layout_stages", tests, NULL, NULL);
}
