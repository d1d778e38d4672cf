/* What all parts of reading a tokenizer.json share: how a fault is told, with the place in the file, what was found and
 * what there is; and the readings of single members. Nothing here knows what a member means. */
#include "data/tokenizer_reader.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

loom_status loom__reader_wrong(const loom__reader *r, const char *where, const json_t *found, const char *expected) {
    char *text = found ? json_dumps(found, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII) : NULL;
    loom_status status =
        loom_fail(LOOM_ERR_FORMAT, "%s: %s is %.100s, expected %s", r->name, where, text ? text : "missing", expected);
    free(text);
    return status;
}

loom_status loom__reader_refuse(const loom__reader *r, const char *where, const json_t *found, const char *built) {
    char *text = found ? json_dumps(found, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII) : NULL;
    loom_status status = loom_fail(LOOM_ERR_UNSUPPORTED, "%s: not supported yet: %s %.100s, there is: %s", r->name,
        where, text ? text : "null", built);
    free(text);
    return status;
}

loom_status loom__reader_check_members(const loom__reader *r, const char *where, json_t *object, const char *known) {
    const char *key;
    json_t *value;
    if (!json_is_object(object))
        return loom__reader_wrong(r, where, object, "an object");
    json_object_foreach(object, key, value) {
        char spaced[80];
        int length = snprintf(spaced, sizeof spaced, " %s ", key);
        if (length >= (int)sizeof spaced || strchr(key, ' ') || !strstr(known, spaced))
            return loom_fail(LOOM_ERR_UNSUPPORTED, "%s: not supported yet: member '%.100s' of %s, there is:%s", r->name,
                key, where, known);
    }
    return LOOM_OK;
}

static const char *type_of(const json_t *object) {
    const char *type = json_string_value(json_object_get(object, "type"));
    return type ? type : "";
}

bool loom__reader_is_type(const json_t *object, const char *type) {
    return strcmp(type_of(object), type) == 0;
}

loom_status loom__reader_bool(
    const loom__reader *r, const char *where, const json_t *object, const char *key, bool otherwise, bool *value) {
    const json_t *found = json_object_get(object, key);
    char place[128];
    snprintf(place, sizeof place, "%s.%s", where, key);
    if (found && !json_is_boolean(found))
        return loom__reader_wrong(r, place, found, "true or false");
    *value = found ? json_is_true(found) : otherwise;
    return LOOM_OK;
}

loom_status loom__reader_require_bool(
    const loom__reader *r, const char *where, const json_t *object, const char *key, bool otherwise, bool wanted) {
    bool value;
    char place[128];
    snprintf(place, sizeof place, "%s.%s", where, key);
    LOOM_TRY(loom__reader_bool(r, where, object, key, otherwise, &value));
    return value == wanted ? LOOM_OK
                           : loom__reader_refuse(r, place, json_object_get(object, key), wanted ? "true" : "false");
}

loom_status loom__reader_affix(const loom__reader *r, const char *where, const json_t *object, const char *key,
    bool may_be_empty, loom__affix *affix) {
    const json_t *found = json_object_get(object, key);
    char place[128];
    snprintf(place, sizeof place, "%s.%s", where, key);
    size_t bytes = json_string_length(found);
    if (!json_is_string(found) || (bytes == 0 && !may_be_empty) || bytes > sizeof affix->text)
        return loom__reader_wrong(r, place, found, "a text of 1 to 64 bytes");
    memcpy(affix->text, json_string_value(found), bytes);
    affix->bytes = bytes;
    return LOOM_OK;
}

loom_status loom__reader_steps(
    const loom__reader *r, const char *where, json_t *object, const char *member, json_t **steps, int *count) {
    *count = 0;
    if (!object || json_is_null(object))
        return LOOM_OK;
    if (!loom__reader_is_type(object, "Sequence")) {
        steps[(*count)++] = object;
        return LOOM_OK;
    }
    char known[64];
    snprintf(known, sizeof known, " type %s ", member);
    LOOM_TRY(loom__reader_check_members(r, where, object, known));
    json_t *list = json_object_get(object, member);
    if (!json_is_array(list))
        return loom__reader_wrong(r, where, object, "a list of steps");
    if (json_array_size(list) > LOOM__TOKENIZER_STEPS)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "%s: not supported yet: %s of %zu steps, there is: up to %d", r->name,
            where, json_array_size(list), LOOM__TOKENIZER_STEPS);
    for (; *count < (int)json_array_size(list); ++*count)
        steps[*count] = json_array_get(list, (size_t)*count);
    return LOOM_OK;
}
