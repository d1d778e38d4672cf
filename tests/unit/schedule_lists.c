/* What makes a schedule and what does not, beside the golden lists: refusals, halves, sizes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <megaloom/schedule.h>

static void refused(loom_schedule_config config, loom_status expected, const char *message) {
    loom_schedule_list list;
    loom_error_clear();
    assert_int_equal(loom_schedule_make(&config, 0, &list), expected);
    if (!strstr(loom_error_message(), message)) {
        print_error("'%s' does not say '%s'\n", loom_error_message(), message);
        fail();
    }
}

static void refusals_name_the_sizes_and_the_nearest_legal_ones(void **state) {
    (void)state;
    refused((loom_schedule_config){0, 0, 8, 0, 0, false, false}, LOOM_ERR_CONFIG,
        "pipeline_model_parallel_size is 0: expected at least 1; nearest legal pipeline_model_parallel_size 1");
    refused((loom_schedule_config){1, 2, 8, 0, 0, false, false}, LOOM_ERR_CONFIG,
        "pipeline_model_parallel_size is 1: expected at least 2");
    refused((loom_schedule_config){4, 2, 3, 0, 0, false, false}, LOOM_ERR_CONFIG, "nearest legal microbatches 4");
    refused((loom_schedule_config){4, 2, 10, 0, 0, false, false}, LOOM_ERR_CONFIG,
        "last group of 2: expected none, or at least pipeline_model_parallel_size 4; nearest legal "
        "microbatches 8 or 12, microbatch_group_size_per_vp_stage 5");
    refused((loom_schedule_config){4, 2, 8, 3, 0, false, false}, LOOM_ERR_CONFIG,
        "nearest legal microbatch_group_size_per_vp_stage 4");
    refused((loom_schedule_config){2, 2, 4, 5, 0, false, false}, LOOM_ERR_CONFIG,
        "nearest legal microbatch_group_size_per_vp_stage 4");
    refused((loom_schedule_config){2, 0, 4, 4, 0, false, false}, LOOM_ERR_CONFIG,
        "nearest legal microbatch_group_size_per_vp_stage 2");
    refused((loom_schedule_config){2, 2, 4, 0, LOOM_SCHEDULE_ZERO_BUBBLE, false, false}, LOOM_ERR_UNSUPPORTED,
        "not supported yet: the zero-bubble schedule");
    refused((loom_schedule_config){2, 0, 4, 0, (loom_schedule_kind)7, false, false}, LOOM_ERR_CONFIG, "number 7");
    refused((loom_schedule_config){2, 2, INT64_MAX / 2, 0, 0, false, false}, LOOM_ERR_CONFIG, "expected at most");
    refused((loom_schedule_config){2, (int64_t)1 << 32, 4, 0, 0, false, false}, LOOM_ERR_CONFIG, "stages and chunks");
    /* All faults at once. */
    refused((loom_schedule_config){0, -1, -2, 0, 0, false, false}, LOOM_ERR_CONFIG, "the number of microbatches is -2");
    refused((loom_schedule_config){0, -1, -2, 0, 0, false, false}, LOOM_ERR_CONFIG,
        "virtual_pipeline_model_parallel_size is -1");
    loom_schedule_config good = {.stages = 2, .microbatches = 4};
    loom_schedule_list list;
    assert_int_equal(loom_schedule_make(&good, 2, &list), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_schedule_make(&good, -1, &list), LOOM_ERR_ARGUMENT);
}

static int64_t count_of(const loom_schedule_list *list, loom_instruction_kind kind) {
    int64_t count = 0;
    for (int64_t i = 0; i < list->count; i++)
        count += list->instructions[i].kind == kind;
    return count;
}

static void one_chunk_is_the_same_as_none(void **state) {
    (void)state;
    for (int64_t stage = 0; stage < 4; stage++) {
        loom_schedule_list plain, one;
        loom_schedule_config config = {.stages = 4, .microbatches = 6};
        assert_int_equal(loom_schedule_make(&config, stage, &plain), LOOM_OK);
        config.chunks = 1;
        assert_int_equal(loom_schedule_make(&config, stage, &one), LOOM_OK);
        assert_int_equal(plain.count, one.count);
        for (int64_t i = 0; i < plain.count; i++)
            assert_memory_equal(&plain.instructions[i], &one.instructions[i], sizeof(loom_instruction));
        loom_schedule_list_free(&plain);
        loom_schedule_list_free(&one);
    }
}

static void long_lists_have_every_virtual_microbatch_once(void **state) {
    (void)state;
    const loom_schedule_config config = {.stages = 64, .chunks = 8, .microbatches = 4096};
    for (int64_t stage = 0; stage < 64; stage++) {
        loom_schedule_list list;
        assert_int_equal(loom_schedule_make(&config, stage, &list), LOOM_OK);
        assert_int_equal(count_of(&list, LOOM_INSTRUCTION_FORWARD), 8 * 4096);
        assert_int_equal(count_of(&list, LOOM_INSTRUCTION_BACKWARD), 8 * 4096);
        loom_schedule_list_free(&list);
    }
    loom_schedule_list_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refusals_name_the_sizes_and_the_nearest_legal_ones),
        cmocka_unit_test(one_chunk_is_the_same_as_none),
        cmocka_unit_test(long_lists_have_every_virtual_microbatch_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
