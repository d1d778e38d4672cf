/* Finding and reading golden numbers. MEGALOOM_GOLDEN points every golden test at another tree of the same form. */
#ifndef TESTS_SUPPORT_GOLDEN_H
#define TESTS_SUPPORT_GOLDEN_H

#include <glob.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline const char *golden_root(void) {
    const char *root = getenv("MEGALOOM_GOLDEN");
    return root && *root ? root : MEGALOOM_TESTS "/golden";
}

/* All files that match root/pattern, sorted; gl_pathc may be 0. Free with globfree. */
static inline glob_t golden_glob(const char *pattern) {
    char path[4096];
    glob_t found = {0};
    snprintf(path, sizeof path, "%s/%s", golden_root(), pattern);
    if (glob(path, 0, NULL, &found) != 0)
        found.gl_pathc = 0;
    return found;
}

/* The JSON of a file; ends the test program with a message when it cannot be read. Free with json_decref. */
static inline json_t *golden_json(const char *path) {
    json_error_t error;
    json_t *json = json_load_file(path, 0, &error);
    if (!json) {
        fprintf(stderr, "%s:%d: %s\n", path, error.line, error.text);
        exit(2);
    }
    return json;
}

/* An integer member; `otherwise` where it is missing or null. */
static inline long long golden_int(const json_t *object, const char *key, long long otherwise) {
    json_t *value = json_object_get(object, key);
    return json_is_integer(value) ? (long long)json_integer_value(value) : otherwise;
}

static inline double golden_number(const json_t *object, const char *key, double otherwise) {
    json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : otherwise;
}

static inline const char *golden_string(const json_t *object, const char *key, const char *otherwise) {
    json_t *value = json_object_get(object, key);
    return json_is_string(value) ? json_string_value(value) : otherwise;
}

#endif
