/* Lines of JSON lines, by jansson. What a line holds comes from anywhere, so that each fault is told with its place and
 * with what was found there. */
#include "data/json_line.h"

#include <stdio.h>
#include <string.h>

static bool is_blank(const char *line, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (line[i] != ' ' && line[i] != '\t' && line[i] != '\r' && line[i] != '\n')
            return false;
    return true;
}

static const char *kind_of(const json_t *value) {
    static const char *const kinds[] = {
        "an object", "a list", "a text", "a number", "a number", "true", "false", "null"};
    return kinds[json_typeof(value)];
}

loom_status loom__json_line_check_length(int64_t bytes) {
    if (bytes <= LOOM__JSON_LINE_BYTES)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_FORMAT, "the line has %lld bytes, expected at most %d (64 MiB)", (long long)bytes,
        LOOM__JSON_LINE_BYTES);
}

loom_status loom__json_line_parse(const char *line, size_t bytes, bool unique, json_t **object) {
    *object = NULL;
    LOOM_TRY(loom__json_line_check_length((int64_t)bytes));
    /* Editors put it before a file, and joining files puts it before a line. */
    size_t mark = bytes >= 3 && memcmp(line, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    line += mark;
    bytes -= mark;
    if (is_blank(line, bytes))
        return LOOM_OK;
    json_error_t error;
    json_t *root = json_loadb(line, bytes,
        JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL | JSON_DECODE_ANY | (unique ? JSON_REJECT_DUPLICATES : 0), &error);
    if (!root)
        return loom_fail(LOOM_ERR_FORMAT, "no JSON at byte %d: %s", error.position + (int)mark, error.text);
    if (!json_is_object(root)) {
        loom_status status = loom_fail(LOOM_ERR_FORMAT, "the line is %s, expected an object", kind_of(root));
        json_decref(root);
        return status;
    }
    *object = root;
    return LOOM_OK;
}

loom_status loom__json_line_text(const json_t *object, const char *key, const char **text, size_t *bytes) {
    const json_t *value = json_object_get(object, key);
    if (value && !json_is_string(value))
        return loom_fail(LOOM_ERR_FORMAT, "member '%.100s' is %s, expected a text", key, kind_of(value));
    if (!value) {
        char known[160] = "";
        size_t length = 0;
        const char *name;
        json_t *member;
        json_object_foreach((json_t *)(uintptr_t)object, name, member) {
            int more = snprintf(known + length, sizeof known - length, "%s%.40s", length ? ", " : "", name);
            if (more < 0 || length + (size_t)more >= sizeof known - 4) {
                memcpy(known + length, "…", sizeof "…");
                break;
            }
            length += (size_t)more;
        }
        return loom_fail(LOOM_ERR_FORMAT, "member '%.100s' is missing, found: %s", key, *known ? known : "none");
    }
    *text = json_string_value(value);
    *bytes = json_string_length(value);
    return LOOM_OK;
}
