/* Which positions of a sequence each context rank has, against Megatron-Core's slices. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/faults.h"
#include "spec/parameter.h"
#include "support/golden.h"
#include <megaloom/layout.h>

static void check_rank(const char *id, const json_t *positions, int64_t s, int64_t cp, int64_t rank) {
    int64_t begin[2] = {0, s / 2}, rows = s / cp;
    if (cp > 1)
        loom_layout_context_chunks(s, cp, rank, begin);
    assert_int_equal(json_array_size(positions), rows);
    for (int64_t t = 0; t < rows; t++) {
        int64_t found = t < rows / 2 ? begin[0] + t : begin[1] + t - rows / 2;
        int64_t wanted = json_integer_value(json_array_get(positions, (size_t)t));
        if (found != wanted)
            fail_msg("%s: row %lld of rank %lld is position %lld, expected %lld", id, (long long)t, (long long)rank,
                (long long)found, (long long)wanted);
    }
}

static void check_case(const json_t *item) {
    const char *id = golden_string(item, "id", "?");
    int64_t cp = golden_int(item, "cp", 0), s = golden_int(item, "seq", 0);
    loom_model_config config = loom_model_config_default("gpt2");
    config.seq_length = s;
    loom__faults faults;
    loom__faults_begin(&faults);
    loom__model_context_faults(&config, 1, cp, false, &faults);
    bool refused = faults.count > 0;
    if (refused != (golden_int(item, "error", 0) != 0))
        fail_msg("%s: %s", id, refused ? faults.text : "accepted, the reference refuses it");
    const json_t *positions = json_object_get(item, "positions");
    for (int64_t rank = 0; !refused && rank < cp; rank++)
        check_rank(id, json_array_get(positions, (size_t)rank), s, cp, rank);
}

static void slices_are_those_of_megatron(void **state) {
    (void)state;
    glob_t files = golden_glob("cp/slices*.json");
    int ran = 0;
    for (size_t f = 0; f < files.gl_pathc; f++) {
        json_t *file = golden_json(files.gl_pathv[f]), *item;
        size_t i;
        json_array_foreach(json_object_get(file, "cases"), i, item) {
            check_case(item);
            ran++;
        }
        json_decref(file);
    }
    globfree(&files);
    printf("cp/slices*.json: %d cases ran, none left out\n", ran);
    assert_true(ran > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(slices_are_those_of_megatron)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
