/* Small layouts written out by hand, refusals and what they say, and the edges of the arithmetic. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "layout/layout.h"
#include <stdio.h>
#include <string.h>

static loom_layout layout_of(loom_parallel_sizes sizes) {
    loom_layout layout;
    if (loom_layout_init(&sizes, &layout) != LOOM_OK)
        fail_msg("refused: %s", loom_error_message());
    return layout;
}

/* The groups of a kind as text: "0,2|1,3". */
static void assert_groups(const loom_layout *layout, loom_group_kind kind, const char *expected) {
    char text[512] = "";
    size_t used = 0;
    for (int64_t i = 0; i < loom_layout_group_count(layout, kind); i++) {
        for (int64_t p = 0; p < loom_layout_group_size(layout, kind, i); p++)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%lld",
                p > 0   ? ","
                : i > 0 ? "|"
                        : "",
                (long long)loom_layout_group_member(layout, kind, i, p));
    }
    assert_string_equal(text, expected);
}

static void context_groups_of_32_ranks_are_two_halves(void **state) {
    (void)state;
    loom_parallel_sizes sizes = loom_parallel_sizes_default(32);
    sizes.context = 16;
    loom_layout layout = layout_of(sizes);
    assert_groups(&layout, LOOM_GROUP_CP,
        "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15|16,17,18,19,20,21,22,23,24,25,26,27,28,"
        "29,30,31");
    assert_groups(&layout, LOOM_GROUP_DP,
        "0,16|1,17|2,18|3,19|4,20|5,21|6,22|7,23|8,24|9,25|10,26|11,27|12,28|13,29|"
        "14,30|15,31");
}

static void tensor_2_pipeline_2_of_8_ranks(void **state) {
    (void)state;
    loom_parallel_sizes sizes = loom_parallel_sizes_default(8);
    sizes.tensor = sizes.pipeline = 2;
    loom_layout layout = layout_of(sizes);
    assert_groups(&layout, LOOM_GROUP_TP, "0,1|2,3|4,5|6,7");
    assert_groups(&layout, LOOM_GROUP_DP, "0,2|1,3|4,6|5,7");
    assert_groups(&layout, LOOM_GROUP_PP, "0,4|1,5|2,6|3,7");
    sizes.use_tp_pp_dp_mapping = true;
    layout = layout_of(sizes);
    assert_groups(&layout, LOOM_GROUP_PP, "0,2|1,3|4,6|5,7");
    assert_groups(&layout, LOOM_GROUP_DP, "0,4|1,5|2,6|3,7");
}

static void tensor_2_context_2_pipeline_2_of_16_ranks(void **state) {
    (void)state;
    loom_parallel_sizes sizes = loom_parallel_sizes_default(16);
    sizes.tensor = sizes.context = sizes.pipeline = 2;
    loom_layout layout = layout_of(sizes);
    assert_groups(&layout, LOOM_GROUP_CP, "0,2|1,3|4,6|5,7|8,10|9,11|12,14|13,15");
    assert_groups(&layout, LOOM_GROUP_DP, "0,4|1,5|2,6|3,7|8,12|9,13|10,14|11,15");
}

static void an_encoder_rank_with_a_smaller_tensor_size_is_in_several_pipelines(void **state) {
    (void)state;
    loom_parallel_sizes sizes = loom_parallel_sizes_default(6);
    sizes.tensor = 2;
    sizes.encoder_tensor = sizes.encoder_pipeline = 1;
    loom_layout layout = layout_of(sizes);
    assert_groups(&layout, LOOM_GROUP_PP, "0,2|0,3|1,4|1,5");
    int64_t first = -1, place = -1, next, previous, head, last;
    assert_int_equal(loom_layout_groups_of(&layout, LOOM_GROUP_PP, 1, &first, &place), 2);
    assert_int_equal(first, 2);
    assert_int_equal(place, 0);
    assert_true(loom_layout_pipeline_describe(&layout, 1, 1, &next, &previous, &head, &last));
    assert_int_equal(next, 5);
    assert_false(loom_layout_pipeline_describe(&layout, 1, 2, &next, &previous, &head, &last));
}

/* A refusal whose message has every one of the words, and leaves the output alone. */
static void assert_refused(loom_parallel_sizes sizes, loom_status status, int lines, const char *const *words) {
    loom_layout layout, before;
    memset(&layout, 0x5a, sizeof layout);
    memcpy(&before, &layout, sizeof layout);
    assert_int_equal(loom_layout_init(&sizes, &layout), status);
    assert_memory_equal(&layout, &before, sizeof layout);
    int found = 1;
    for (const char *p = loom_error_message(); *p; p++)
        found += *p == '\n';
    if (found != lines)
        fail_msg("%d lines, expected %d: %s", found, lines, loom_error_message());
    for (; *words; words++) {
        if (!strstr(loom_error_message(), *words))
            fail_msg("'%s' does not say '%s'", loom_error_message(), *words);
    }
}
#define WORDS(...)                                                                                                     \
    (const char *const[]) {                                                                                            \
        __VA_ARGS__, NULL                                                                                              \
    }

static void a_refusal_names_field_numbers_and_nearest_legal_values(void **state) {
    (void)state;
    loom_parallel_sizes sizes = loom_parallel_sizes_default(8);
    sizes.tensor = 3;
    assert_refused(sizes, LOOM_ERR_CONFIG, 1,
        WORDS(
            "tensor_model_parallel_size 3", "world_size 8", "tensor_model_parallel_size 2 or 4", "world_size 6 or 9"));
    sizes = loom_parallel_sizes_default(8);
    sizes.expert = 3;
    assert_refused(sizes, LOOM_ERR_CONFIG, 1, WORDS("expert_model_parallel_size 3", "8 ranks", "2 or 4"));
    sizes = loom_parallel_sizes_default(12);
    sizes.optimizer_instances = 5;
    assert_refused(sizes, LOOM_ERR_CONFIG, 1,
        WORDS("num_distributed_optimizer_instances is 5", "size 12",
            "nearest legal num_distributed_optimizer_instances 4 or 6"));
    sizes = loom_parallel_sizes_default(8);
    sizes.context = 8;
    sizes.hierarchical_levels = 2;
    sizes.hierarchical_context[0] = sizes.hierarchical_context[1] = 2;
    assert_refused(sizes, LOOM_ERR_CONFIG, 1, WORDS("hierarchical_context_parallel_sizes [2, 2]", "size 8", "[2, 4]"));
    sizes = loom_parallel_sizes_default(8);
    sizes.context = 2;
    strcpy(sizes.order, "tp-dp-pp");
    assert_refused(sizes, LOOM_ERR_CONFIG, 1, WORDS("'tp-dp-pp' and lacks cp", "context_parallel_size is 2"));
    sizes = loom_parallel_sizes_default(10);
    sizes.tensor = 3;
    sizes.encoder_tensor = 2;
    sizes.encoder_pipeline = 1;
    assert_refused(sizes, LOOM_ERR_CONFIG, 1,
        WORDS("encoder_tensor_model_parallel_size is 2", "is 3", "nearest legal tensor_model_parallel_size 8"));
}

static void all_faults_are_named_at_once(void **state) {
    (void)state;
    loom_parallel_sizes sizes = loom_parallel_sizes_default(8);
    sizes.tensor = 3;
    sizes.virtual_pipeline = 2;
    sizes.expert = 0;
    sizes.optimizer_instances = -1;
    strcpy(sizes.order, "tp-xx-tp");
    assert_refused(sizes, LOOM_ERR_CONFIG, 6,
        WORDS("expert_model_parallel_size is 0", "num_distributed_optimizer_instances is -1", "'xx' is no axis",
            "tp stands there twice", "virtual_pipeline_model_parallel_size is 2", "tensor_model_parallel_size 3"));
}

static void sizes_beyond_64_bits_are_refused(void **state) {
    (void)state;
    loom_parallel_sizes sizes = loom_parallel_sizes_default(INT64_MAX);
    sizes.tensor = sizes.pipeline = sizes.context = (int64_t)1 << 40;
    assert_refused(sizes, LOOM_ERR_CONFIG, 1, WORDS("tensor_model_parallel_size 1099511627776", "2^63 or more"));
    sizes = loom_parallel_sizes_default(8);
    sizes.expert = sizes.expert_tensor = (int64_t)1 << 40;
    assert_refused(sizes, LOOM_ERR_CONFIG, 1, WORDS("expert_model_parallel_size 1099511627776", "8 ranks"));
    sizes = loom_parallel_sizes_default(8);
    sizes.hierarchical_levels = 9;
    assert_refused(sizes, LOOM_ERR_CONFIG, 1, WORDS("9 levels", "1 to 8"));
    sizes = loom_parallel_sizes_default(8);
    memset(sizes.order, 'p', sizeof sizes.order);
    assert_refused(sizes, LOOM_ERR_CONFIG, 1, WORDS("order is longer than 31"));
}

static void optimizer_instances_with_an_encoder_are_not_supported_yet(void **state) {
    (void)state;
    loom_parallel_sizes sizes = loom_parallel_sizes_default(8);
    sizes.encoder_pipeline = 1;
    sizes.optimizer_instances = 2;
    assert_refused(sizes, LOOM_ERR_UNSUPPORTED, 1, WORDS("not supported yet: num_distributed_optimizer_instances 2"));
}

static void questions_out_of_range_are_answered_by_nothing(void **state) {
    (void)state;
    loom_layout layout = layout_of(loom_parallel_sizes_default(4));
    int64_t index = 77, place = 77;
    loom_layout_rank rank = {.tp = 77};
    assert_false(loom_layout_group_of(&layout, LOOM_GROUP_TP, 4, &index, &place));
    assert_false(loom_layout_group_of(&layout, LOOM_GROUP_TP, -1, &index, &place));
    assert_false(loom_layout_group_of(&layout, LOOM_GROUP_HCP_L0, 0, &index, &place));
    assert_false(loom_layout_group_of(&layout, LOOM_GROUP_INTRA_EDP, 0, &index, &place));
    assert_false(loom_layout_group_of(&layout, LOOM_GROUP_KIND_COUNT, 0, &index, &place));
    assert_false(loom_layout_rank_describe(&layout, 4, &rank));
    assert_int_equal(index, 77);
    assert_int_equal(place, 77);
    assert_int_equal(rank.tp, 77);
    assert_int_equal(loom_layout_group_count(&layout, LOOM_GROUP_KIND_COUNT), 0);
    assert_int_equal(loom_layout_group_count(&layout, LOOM_GROUP_INTRA_DP_CP), 0);
    assert_int_equal(loom_layout_group_size(&layout, LOOM_GROUP_TP, 4), 0);
    assert_int_equal(loom_layout_group_member(&layout, LOOM_GROUP_TP, 0, 1), -1);
    assert_int_equal(loom_layout_group_member(&layout, LOOM_GROUP_TP, -1, 0), -1);
    assert_int_equal(loom_layout_group_listed(&layout, LOOM_GROUP_INTRA_DIST_OPT, 0, 4), -1);
}

static void kind_names_go_there_and_back(void **state) {
    (void)state;
    for (int kind = 0; kind < LOOM_GROUP_KIND_COUNT; kind++)
        assert_int_equal(loom_layout_kind_from_name(loom_layout_kind_name((loom_group_kind)kind)), kind);
    assert_string_equal(loom_layout_kind_name(LOOM_GROUP_KIND_COUNT), "?");
    assert_int_equal(loom_layout_kind_from_name("tpx"), LOOM_GROUP_KIND_COUNT);
}

static void absent_sizes_are_filled_in(void **state) {
    (void)state;
    loom_parallel_sizes sizes = loom_parallel_sizes_default(12);
    sizes.tensor = 2;
    sizes.encoder_pipeline = 1;
    strcpy(sizes.order, "TP-DP");
    loom_layout layout = layout_of(sizes);
    assert_int_equal(layout.sizes.expert_tensor, 2);
    assert_int_equal(layout.sizes.encoder_tensor, 2);
    assert_string_equal(layout.sizes.order, "tp-dp-cp-ep-pp");
}

static void extended_experts_are_cut_over_tensor_and_expert_ranks(void **state) {
    (void)state;
    loom_parallel_sizes sizes = loom_parallel_sizes_default(16);
    sizes.tensor = 2;
    sizes.expert = 4;
    sizes.moe_extended_tp = true;
    loom_layout layout = layout_of(sizes);
    assert_int_equal(layout.sizes.expert_tensor, 8);
    assert_int_equal(layout.sizes.expert, 1);
    assert_int_equal(layout.expert_data, 2);
    /* A layout of what a layout says is the same. */
    loom_layout again = layout_of(layout.sizes);
    assert_int_equal(again.sizes.expert_tensor, 8);
    int64_t index, place;
    assert_true(loom_layout_group_of(&layout, LOOM_GROUP_ETP, 13, &index, &place));
    assert_int_equal(index, 1);
    assert_int_equal(place, 5);
    assert_true(loom_layout_group_of(&layout, LOOM_GROUP_TP, 13, &index, &place));
    assert_int_equal(place, 1);
    sizes.expert_tensor = 4;
    assert_int_equal(loom_layout_init(&sizes, &layout), LOOM_ERR_CONFIG);
    assert_string_equal(loom_error_message(),
        "expert_tensor_parallel_size: found 4 with moe_extended_tp, which cuts experts over tensor x expert ranks; "
        "expected null; nearest legal expert_tensor_parallel_size 2, or moe_extended_tp false");
    sizes.expert_tensor = 0;
    sizes.expert = (int64_t)1 << 62;
    assert_int_equal(loom_layout_init(&sizes, &layout), LOOM_ERR_CONFIG);
}

static void a_million_ranks_find_themselves_in_every_kind(void **state) {
    (void)state;
    loom_parallel_sizes sizes = loom_parallel_sizes_default((int64_t)1 << 20);
    sizes.tensor = 8;
    sizes.pipeline = 16;
    sizes.context = 4;
    sizes.expert = 8;
    sizes.expert_tensor = 2;
    sizes.optimizer_instances = 4;
    sizes.hierarchical_levels = 2;
    sizes.hierarchical_context[0] = sizes.hierarchical_context[1] = 2;
    loom_layout layout = layout_of(sizes);
    int64_t lost = 0, found = 0;
    for (int kind = 0; kind < LOOM_GROUP_KIND_COUNT; kind++) {
        for (int64_t rank = 0; rank < sizes.world; rank++) {
            int64_t index, place;
            if (!loom_layout_group_of(&layout, (loom_group_kind)kind, rank, &index, &place))
                continue;
            found++;
            lost += loom_layout_group_member(&layout, (loom_group_kind)kind, index, place) != rank;
        }
    }
    assert_int_equal(lost, 0);
    /* 20 kinds hold every rank; embd holds two of 16 stages, pos_embd one; six hierarchical levels are not there. */
    assert_int_equal(found, sizes.world * 20 + sizes.world * 3 / 16);
}

static void uneven_ranges_are_consecutive_and_differ_by_one(void **state) {
    (void)state;
    for (int64_t n = 0; n <= 40; n++) {
        for (int64_t parts = 1; parts <= 12; parts++) {
            int64_t next = 0;
            for (int64_t part = 0; part < parts; part++) {
                int64_t first, count;
                loom__layout_range(n, parts, part, &first, &count);
                assert_int_equal(first, next);
                assert_true(count == n / parts || (count == n / parts + 1 && part < n % parts));
                for (int64_t i = first; i < first + count; i++)
                    assert_int_equal(loom__layout_range_part(n, parts, i), part);
                next = first + count;
            }
            assert_int_equal(next, n);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(context_groups_of_32_ranks_are_two_halves),
        cmocka_unit_test(tensor_2_pipeline_2_of_8_ranks),
        cmocka_unit_test(tensor_2_context_2_pipeline_2_of_16_ranks),
        cmocka_unit_test(an_encoder_rank_with_a_smaller_tensor_size_is_in_several_pipelines),
        cmocka_unit_test(a_refusal_names_field_numbers_and_nearest_legal_values),
        cmocka_unit_test(all_faults_are_named_at_once),
        cmocka_unit_test(sizes_beyond_64_bits_are_refused),
        cmocka_unit_test(optimizer_instances_with_an_encoder_are_not_supported_yet),
        cmocka_unit_test(questions_out_of_range_are_answered_by_nothing),
        cmocka_unit_test(kind_names_go_there_and_back),
        cmocka_unit_test(absent_sizes_are_filled_in),
        cmocka_unit_test(extended_experts_are_cut_over_tensor_and_expert_ranks),
        cmocka_unit_test(a_million_ranks_find_themselves_in_every_kind),
        cmocka_unit_test(uneven_ranges_are_consecutive_and_differ_by_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
