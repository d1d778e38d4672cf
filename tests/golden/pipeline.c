/* Pipeline schedules against the lists that Megatron-Core's own functions produced (tests/golden/pipeline/README.md).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <megaloom/schedule.h>

#include "support/golden.h"

#define check(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            print_error(__VA_ARGS__);                                                                                  \
            print_error("\n");                                                                                         \
            fail();                                                                                                    \
        }                                                                                                              \
    } while (0)

typedef struct tally {
    int run, refused, left;
} tally;

static void each_case(const char *pattern, void (*run)(const json_t *item, tally *counts)) {
    glob_t found = golden_glob(pattern);
    tally total = {0};
    for (size_t f = 0; f < found.gl_pathc; f++) {
        json_t *file = golden_json(found.gl_pathv[f]);
        size_t i;
        json_t *item;
        json_array_foreach(json_object_get(file, "cases"), i, item) run(item, &total);
        json_decref(file);
    }
    print_message("%s: %zu files, %d cases ran (%d of them refused, as they must be), %d parts left out\n", pattern,
        found.gl_pathc, total.run, total.refused, total.left);
    if (!getenv("MEGALOOM_GOLDEN"))
        assert_true(found.gl_pathc > 0 && total.run > 0);
    globfree(&found);
}

static loom_schedule_config case_config(const json_t *item) {
    return (loom_schedule_config){
        .stages = golden_int(item, "pp", 0),
        .chunks = golden_int(item, "vp", 0),
        .microbatches = golden_int(item, "num_microbatches", 0),
        .group = golden_int(item, "group", 0),
        .forward_only = golden_int(item, "forward_only", 0) != 0,
        .align_sync = strcmp(golden_string(item, "mode", ""), "sync") == 0,
    };
}

static void order_case(const json_t *item, tally *counts) {
    const char *id = golden_string(item, "id", "?");
    loom_schedule_config config = case_config(item);
    loom_schedule_list list;
    counts->run++;
    if (golden_int(item, "error", 0)) {
        counts->refused++;
        loom_status status = loom_schedule_make(&config, 0, &list);
        check(status == LOOM_ERR_CONFIG, "%s: %s: status %s, expected LOOM_ERR_CONFIG", id,
            golden_string(item, "reason", ""), loom_status_name(status));
        check(strstr(loom_error_message(), "nearest legal"), "%s: '%s'", id, loom_error_message());
        return;
    }
    for (int64_t stage = 0; stage < config.stages; stage++) {
        loom_status status = loom_schedule_make(&config, stage, &list);
        check(status == LOOM_OK, "%s: refused: %s", id, loom_error_message());
        static const char *const keys[] = {"order", "full"};
        for (int k = 0; k < 2; k++) {
            const json_t *rows = json_object_get(item, keys[k]);
            if (!rows)
                continue;
            check(json_array_size(rows) == (size_t)config.stages, "%s: %s has %zu rows", id, keys[k],
                json_array_size(rows));
            const char *expected = json_string_value(json_array_get(rows, (size_t)stage));
            char *found = NULL;
            /* With a gradient-sync function messages were not recorded. */
            assert_int_equal(
                loom_schedule_notation(&config, &list, k == 1 && !config.align_sync, k == 1, &found), LOOM_OK);
            check(strcmp(found, expected) == 0, "%s: %s of stage %lld is\n%s\nexpected\n%s", id, keys[k],
                (long long)stage, found, expected);
            free(found);
        }
        loom_schedule_list_free(&list);
    }
}

static void check_counts(const json_t *item, const char *key, loom_schedule_config config) {
    const json_t *rows = json_object_get(item, key);
    const char *id = golden_string(item, "id", "?");
    for (size_t stage = 0; stage < json_array_size(rows); stage++) {
        loom_schedule_counts c;
        loom_schedule_count(&config, (int64_t)stage, &c);
        const int64_t found[4] = {c.total, c.all_in_warmup, c.warmup, c.remaining};
        for (size_t i = 0; i < 4; i++) {
            int64_t expected = json_integer_value(json_array_get(json_array_get(rows, stage), i));
            check(found[i] == expected, "%s: %s[%zu][%zu] is %lld, expected %lld", id, key, stage, i,
                (long long)found[i], (long long)expected);
        }
    }
}

static void tables_case(const json_t *item, tally *counts) {
    const char *id = golden_string(item, "id", "?");
    loom_schedule_config config = case_config(item);
    counts->run++;
    check_counts(item, "counts", config);
    config.forward_only = true;
    check_counts(item, "counts_forward_only", config);
    counts->left += json_object_get(item, "counts_overlap_moe") != NULL; /* a schedule that is not built */
    const json_t *microbatches = json_object_get(item, "microbatch"), *chunks = json_object_get(item, "chunk");
    for (size_t i = 0; i < json_array_size(microbatches); i++) {
        for (int backward = 0; backward < 2; backward++) {
            int64_t microbatch, chunk = json_integer_value(json_array_get(chunks, i));
            int32_t found;
            loom_schedule_virtual_microbatch(&config, (int64_t)i, backward, &microbatch, &found);
            if (backward)
                chunk = config.chunks - 1 - chunk;
            check(microbatch == json_integer_value(json_array_get(microbatches, i)) && found == chunk,
                "%s: %s %zu is (%lld, %d)", id, backward ? "backward" : "forward", i, (long long)microbatch, found);
        }
    }
}

static void lists_equal_the_reference_s(void **state) {
    (void)state;
    each_case("pipeline/order*.json", order_case);
}

static void counts_and_tables_equal_the_reference_s(void **state) {
    (void)state;
    each_case("pipeline/tables*.json", tables_case);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_equal_the_reference_s),
        cmocka_unit_test(counts_and_tables_equal_the_reference_s),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
