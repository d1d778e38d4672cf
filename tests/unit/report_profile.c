/* A profile as a table and as a file of all ranks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <math.h>
#include <megaloom/profile.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* 10 s: half in products at 2 GFLOP/s, a quarter in a collective, the rest in no operation, and one that is too short
 * for a line. */
static loom_profile example(loom_profile_entry *entries) {
    entries[0] = (loom_profile_entry){LOOM_PROFILE_FORWARD, "gemm", "", 100, 5, 1e10, 0};
    entries[1] = (loom_profile_entry){LOOM_PROFILE_REDUCTION, "all_reduce", "dp", 4, 2.5, 0, 5e9};
    entries[2] = (loom_profile_entry){LOOM_PROFILE_OTHER, "rest", "", 0, 2.499, 0, 0};
    entries[3] = (loom_profile_entry){LOOM_PROFILE_FORWARD, "scale", "", 7, 0.001, 0, 0};
    return (loom_profile){entries, 4, 10};
}

static void the_named_share_leaves_out_the_rest(void **state) {
    (void)state;
    loom_profile_entry entries[4];
    loom_profile profile = example(entries);
    assert_true(fabs(loom_profile_named_share(&profile) - 0.7501) < 1e-9);
}

static void the_table_has_rates_and_joins_what_is_short(void **state) {
    (void)state;
    loom_profile_entry entries[4];
    loom_profile profile = example(entries);
    char *text = NULL;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    assert_non_null(file);
    loom_profile_print(file, &profile, 5);
    fclose(file);
    assert_non_null(strstr(text, "gemm                                     100   1000.000   50.0%       2.0"));
    assert_non_null(
        strstr(text, "all_reduce of group dp                     4    500.000   25.0%                 2.0"));
    assert_null(strstr(text, "scale"));
    assert_non_null(strstr(text, "all shorter ones                           7      0.200    0.0%"));
    assert_non_null(strstr(text, "5 steps of 2000.000 ms; named operations explain 75.0%"));
    free(text);
}

static loom_status write_all(loom_rank *rank, void *argument) {
    loom_profile_entry entries[4];
    loom_profile profile = example(entries);
    entries[0].calls = 100 + loom_rank_index(rank);
    return loom_profile_write(argument, loom_rank_world(rank), &profile, 5);
}

static void the_file_holds_every_rank(void **state) {
    (void)state;
    char path[] = MEGALOOM_BUILD "/profile-XXXXXX";
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.timeout = 60;
    close(mkstemp(path));
    if (loom_run_local(3, write_all, path, &options))
        fail_msg("%s", loom_error_message());
    json_t *file = json_load_file(path, 0, NULL);
    assert_non_null(file);
    assert_int_equal(json_integer_value(json_object_get(file, "steps")), 5);
    json_t *ranks = json_object_get(file, "ranks");
    assert_int_equal(json_array_size(ranks), 3);
    for (size_t i = 0; i < 3; i++) {
        json_t *rank = json_array_get(ranks, i), *entries = json_object_get(rank, "entries");
        json_t *gemm = json_array_get(entries, 0), *reduce = json_array_get(entries, 1);
        assert_int_equal(json_integer_value(json_object_get(rank, "rank")), i);
        assert_int_equal(json_integer_value(json_object_get(gemm, "calls")), 100 + i);
        assert_string_equal(json_string_value(json_object_get(gemm, "phase")), "forward");
        assert_true(json_real_value(json_object_get(gemm, "flops_per_second")) == 2e9);
        assert_null(json_object_get(gemm, "bytes_per_second"));
        assert_string_equal(json_string_value(json_object_get(reduce, "group")), "dp");
    }
    json_decref(file);
    unlink(path);
}

static void a_file_that_cannot_be_written_fails_all_ranks_and_is_named(void **state) {
    (void)state;
    char path[] = MEGALOOM_BUILD "/no-such-folder/profile.json";
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.timeout = 60;
    assert_int_equal(loom_run_local(2, write_all, path, &options), LOOM_ERR_IO);
    assert_non_null(strstr(loom_error_message(), "no-such-folder/profile.json: cannot be written"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_named_share_leaves_out_the_rest),
        cmocka_unit_test(the_table_has_rates_and_joins_what_is_short),
        cmocka_unit_test(the_file_holds_every_rank),
        cmocka_unit_test(a_file_that_cannot_be_written_fails_all_ranks_and_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
