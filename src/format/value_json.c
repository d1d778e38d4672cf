/* A value as JSON, in the spelling that the golden manifests have. It is for people and for tests: large tensors and
 * long lists are named by their size, so that the text stays as short as what one wants to look at. */
#include "format/file.h"
#include "format/pickle.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SHOWN_ELEMENTS = 16, SHOWN_ITEMS = 100 };

static loom_status no_memory(void) {
    return loom_fail(LOOM_ERR_MEMORY, "out of memory for the JSON of a value");
}

/* Steals `value`, which may be NULL for no memory. */
static loom_status give(json_t *value, json_t **out) {
    *out = value;
    return value ? LOOM_OK : no_memory();
}

static loom_status wrap(const char *key, json_t *value, json_t **out) {
    json_t *object = json_object();
    if (!value || !object || json_object_set_new(object, key, value) != 0) {
        json_decref(object);
        return no_memory();
    }
    *out = object;
    return LOOM_OK;
}

static json_t *real(double number) {
    return isfinite(number) ? json_real(number) : json_string(isnan(number) ? "nan" : number > 0 ? "inf" : "-inf");
}

static json_t *element(const loom_value_tensor *tensor, int64_t index) {
    const unsigned char *at = (const unsigned char *)tensor->data + (size_t)index * loom_dtype_size(tensor->dtype);
    int64_t whole = 0;
    uint16_t narrow;
    float single;
    double wide;
    if (loom__widen(tensor->dtype, at, 0, 1, &whole))
        return tensor->dtype == LOOM_BOOL ? json_boolean(whole) : json_integer(whole);
    memcpy(&narrow, at, sizeof narrow);
    if (tensor->dtype == LOOM_F16 || tensor->dtype == LOOM_BF16)
        return real(tensor->dtype == LOOM_F16 ? loom_f16_to_f32(narrow) : loom_bf16_to_f32(narrow));
    if (tensor->dtype == LOOM_F32) {
        memcpy(&single, at, sizeof single);
        return real(single);
    }
    memcpy(&wide, at, sizeof wide);
    return real(wide);
}

/* The elements from *next on, as nested lists from axis `axis`; a scalar is a number. */
static json_t *elements(const loom_value_tensor *tensor, int axis, int64_t *next) {
    if (axis == tensor->dims)
        return element(tensor, (*next)++);
    json_t *list = json_array();
    for (int64_t i = 0; list && i < tensor->shape[axis]; i++)
        if (json_array_append_new(list, elements(tensor, axis + 1, next)) != 0) {
            json_decref(list);
            return NULL;
        }
    return list;
}

static loom_status of_tensor(const loom_value_tensor *tensor, json_t **out) {
    const char *name = loom__torch_dtype_name(tensor->dtype);
    int64_t next = 0;
    json_t *shape = json_array();
    LOOM_TRY(wrap("__tensor__", json_string(name ? name : loom_dtype_name(tensor->dtype)), out));
    bool sound = shape != NULL;
    for (int i = 0; i < tensor->dims && sound; i++)
        sound = json_array_append_new(shape, json_integer(tensor->shape[i])) == 0;
    sound = json_object_set_new(*out, "shape", shape) == 0 && sound;
    if (sound && tensor->elements > 0 && tensor->elements <= SHOWN_ELEMENTS && tensor->data)
        sound = json_object_set_new(*out, "values", elements(tensor, 0, &next)) == 0;
    return sound ? LOOM_OK : no_memory();
}

static loom_status of_value(const loom_value *value, int depth, json_t **out);

static loom_status of_items(const loom_value *value, int depth, json_t **out) {
    bool tuple = value->kind == LOOM_VALUE_TUPLE;
    if (value->count >= SHOWN_ITEMS) {
        char text[48];
        snprintf(text, sizeof text, "%lld items", (long long)value->count);
        return wrap(tuple ? "__tuple__" : "__list__", json_string(text), out);
    }
    json_t *list = json_array();
    loom_status status = list ? LOOM_OK : no_memory();
    for (int64_t i = 0; i < value->count && status == LOOM_OK; i++) {
        json_t *item = NULL;
        status = of_value(value->items[i], depth + 1, &item);
        if (status == LOOM_OK && json_array_append(list, item) != 0)
            status = no_memory();
        json_decref(item);
    }
    if (status != LOOM_OK) {
        json_decref(list);
        return status;
    }
    return tuple ? wrap("__tuple__", list, out) : give(list, out);
}

static bool has_text_keys(const loom_value *dict) {
    for (int64_t i = 0; i < dict->count; i++) {
        const loom_value *key = dict->items[2 * i];
        if (key->kind != LOOM_VALUE_TEXT || strlen(key->text) != (size_t)key->count)
            return false;
    }
    return true;
}

/* Puts one pair into an object, or as [key, value] into a list. */
static loom_status put_pair(json_t *into, const loom_value *key, const loom_value *value, int depth) {
    json_t *item = NULL, *name = NULL;
    loom_status status = of_value(value, depth, &item);
    if (status == LOOM_OK && json_is_object(into)) {
        if (json_object_set(into, key->text, item) != 0)
            status = no_memory();
    } else if (status == LOOM_OK) {
        status = of_value(key, depth, &name);
        json_t *pair = json_array();
        if (status == LOOM_OK && (!pair || json_array_append(pair, name) != 0 || json_array_append(pair, item) != 0 ||
                                     json_array_append(into, pair) != 0))
            status = no_memory();
        json_decref(pair);
    }
    json_decref(item);
    json_decref(name);
    return status;
}

static loom_status of_dict(const loom_value *dict, int depth, json_t **out) {
    bool plain = has_text_keys(dict);
    json_t *made = plain ? json_object() : json_array();
    loom_status status = made ? LOOM_OK : no_memory();
    for (int64_t i = 0; i < dict->count && status == LOOM_OK; i++)
        status = put_pair(made, dict->items[2 * i], dict->items[2 * i + 1], depth + 1);
    if (status != LOOM_OK) {
        json_decref(made);
        return status;
    }
    return plain ? give(made, out) : wrap("__dict__", made, out);
}

static loom_status set_value(json_t *object, const char *key, const loom_value *value, int depth) {
    json_t *item = NULL;
    loom_status status = of_value(value, depth, &item);
    if (status == LOOM_OK && json_object_set(object, key, item) != 0)
        status = no_memory();
    json_decref(item);
    return status;
}

static loom_status of_object(const loom_value_object *object, int depth, json_t **out) {
    LOOM_TRY(wrap("__object__", json_string(object->name), out));
    if (object->arguments->count > 0)
        LOOM_TRY(set_value(*out, "arguments", object->arguments, depth + 1));
    return object->state ? set_value(*out, "state", object->state, depth + 1) : LOOM_OK;
}

static loom_status of_text(const loom_value *value, json_t **out) {
    return give(json_stringn(value->text, (size_t)value->count), out);
}

/* On failure *out may hold a part, which the caller releases. */
static loom_status of_value(const loom_value *value, int depth, json_t **out) {
    if (depth > LOOM__PICKLE_MAX_DEPTH)
        return loom_fail(LOOM_ERR_ARGUMENT, "values contain one another more than %d deep", LOOM__PICKLE_MAX_DEPTH);
    switch (value->kind) {
    case LOOM_VALUE_NONE:
        return give(json_null(), out);
    case LOOM_VALUE_BOOL:
        return give(json_boolean(value->integer), out);
    case LOOM_VALUE_INT:
        return give(json_integer(value->integer), out);
    case LOOM_VALUE_FLOAT:
        return give(real(value->number), out);
    case LOOM_VALUE_TEXT:
        return of_text(value, out);
    case LOOM_VALUE_BYTES:
        return wrap("__bytes__", json_integer(value->count), out);
    case LOOM_VALUE_LIST:
    case LOOM_VALUE_TUPLE:
        return of_items(value, depth, out);
    case LOOM_VALUE_DICT:
        return of_dict(value, depth, out);
    case LOOM_VALUE_TENSOR:
        return of_tensor(value->tensor, out);
    case LOOM_VALUE_NAME:
        return give(json_string(value->text), out);
    case LOOM_VALUE_OBJECT:
        return of_object(value->object, depth, out);
    }
    return loom_fail(LOOM_ERR_ARGUMENT, "a value of an unknown kind (%d)", (int)value->kind);
}

loom_status loom_value_to_json(const loom_value *value, int indent, char **text) {
    json_t *json = NULL;
    loom_status status = of_value(value, 0, &json);
    if (status == LOOM_OK) {
        size_t flags = JSON_ENCODE_ANY | JSON_REAL_PRECISION(17);
        char *made = json_dumps(json, indent > 0 ? flags | JSON_INDENT((size_t)indent) : flags);
        if (made)
            *text = made;
        else
            status = no_memory();
    }
    json_decref(json);
    return status;
}
