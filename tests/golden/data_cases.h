/* What the golden tests of data share: a walk over the cases of data/<name>, and checks that name the case. */
#ifndef GOLDEN_DATA_CASES_H
#define GOLDEN_DATA_CASES_H

#include "support/golden.h"
#include <megaloom/status.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static int ran, left_out;

static void report(const char *what) {
    print_message("%s: %d cases ran, %d left out (not supported yet)\n", what, ran, left_out);
    if (ran == 0 && getenv("MEGALOOM_GOLDEN")) /* another tree need not have every file; our own must */
        skip();
    assert_true(ran > 0);
    ran = left_out = 0;
}

#define assert_ok(call)                                                                                                \
    do {                                                                                                               \
        if ((call) != LOOM_OK)                                                                                         \
            fail_msg("%s: %s", id, loom_error_message());                                                              \
    } while (0)

#define expect(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            fail_msg("%s: %s (%s)", id, #condition, loom_error_message());                                             \
    } while (0)

static json_int_t at(const json_t *array, int64_t index) {
    return json_integer_value(json_array_get(array, (size_t)index));
}

static int64_t size_of(const json_t *array) {
    return (int64_t)json_array_size(array);
}

/* Calls `run` for each case of data/<name>. */
static void each_case(const char *name, void (*run)(const json_t *entry, const char *id)) {
    char pattern[256];
    snprintf(pattern, sizeof pattern, "data/%s", name);
    glob_t files = golden_glob(pattern);
    for (size_t f = 0; f < files.gl_pathc; f++) {
        json_t *root = golden_json(files.gl_pathv[f]);
        size_t i;
        json_t *entry;
        json_array_foreach(json_object_get(root, "cases"), i, entry) run(entry, golden_string(entry, "id", "?"));
        json_decref(root);
    }
    globfree(&files);
    report(name);
}

#endif
