/* Writing a value as a pickle of protocol 2, the one that torch.save uses and every loader reads. Only names are put in
 * the memo: they are what repeats in a checkpoint's metadata, and a reader that knows no memo of ours finds each other
 * value where it is used. */
#include "format/pickle.h"

#include <stdio.h>
#include <stdlib.h>

enum { NAMES_MAX = 128 };

typedef struct writer {
    loom__buffer *to;
    loom__tensor_list *tensors;
    const char *names[NAMES_MAX];
    int name_count;
} writer;

static loom_status put(writer *w, const void *data, size_t bytes) {
    return loom__buffer_append(w->to, data, bytes);
}

static loom_status put_opcode(writer *w, unsigned char opcode) {
    return put(w, &opcode, 1);
}

/* An opcode, and the low `width` bytes of a number. */
static loom_status put_number(writer *w, unsigned char opcode, uint64_t number, size_t width) {
    LOOM_TRY(put_opcode(w, opcode));
    return put(w, &number, width);
}

static loom_status put_int(writer *w, int64_t value) {
    if (value >= 0 && value <= UINT8_MAX)
        return put_number(w, 'K', (uint64_t)value, 1);
    if (value >= 0 && value <= UINT16_MAX)
        return put_number(w, 'M', (uint64_t)value, 2);
    if (value >= INT32_MIN && value <= INT32_MAX)
        return put_number(w, 'J', (uint64_t)value, 4);
    LOOM_TRY(put_number(w, 0x8a, 8, 1));
    return put(w, &value, 8);
}

static loom_status put_float(writer *w, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return put_number(w, 'G', __builtin_bswap64(bits), 8);
}

static loom_status put_text(writer *w, const char *text, size_t bytes) {
    if (bytes > UINT32_MAX)
        return loom_fail(LOOM_ERR_ARGUMENT, "a text of %zu bytes is too long for a pickle", bytes);
    LOOM_TRY(put_number(w, 'X', bytes, 4));
    return put(w, text, bytes);
}

static loom_status put_name(writer *w, const char *name) {
    for (int i = 0; i < w->name_count; i++)
        if (strcmp(w->names[i], name) == 0)
            return put_number(w, 'h', (uint64_t)i, 1);
    const char *dot = strrchr(name, '.');
    if (!dot || strchr(name, '\n'))
        return loom_fail(LOOM_ERR_ARGUMENT, "'%.80s' is no name of the form module.name", name);
    LOOM_TRY(put_opcode(w, 'c'));
    LOOM_TRY(put(w, name, (size_t)(dot - name)));
    LOOM_TRY(put(w, "\n", 1));
    LOOM_TRY(put(w, dot + 1, strlen(dot + 1)));
    LOOM_TRY(put(w, "\n", 1));
    if (w->name_count == NAMES_MAX)
        return LOOM_OK;
    w->names[w->name_count] = name;
    return put_number(w, 'q', (uint64_t)w->name_count++, 1);
}

/* Protocol 2 has no bytes: they go as letters U+0000 to U+00FF, and as a call that makes bytes of them. */
static loom_status put_bytes(writer *w, const unsigned char *bytes, size_t count) {
    loom__buffer text = {0};
    loom_status status = LOOM_OK;
    for (size_t i = 0; i < count && status == LOOM_OK; i++) {
        unsigned char letter[2] = {(unsigned char)(0xc0 | bytes[i] >> 6), (unsigned char)(0x80 | (bytes[i] & 0x3f))};
        status = bytes[i] < 0x80 ? loom__buffer_append(&text, &bytes[i], 1) : loom__buffer_append(&text, letter, 2);
    }
    if (status == LOOM_OK)
        status = put_name(w, "_codecs.encode");
    if (status == LOOM_OK)
        status = put_text(w, (const char *)text.bytes, text.count);
    free(text.bytes);
    LOOM_TRY(status);
    LOOM_TRY(put_text(w, "latin1", 6));
    return put(w, "\x86R", 2);
}

static loom_status put_ints(writer *w, const int64_t *of, int count) {
    LOOM_TRY(put_opcode(w, '('));
    for (int i = 0; i < count; i++)
        LOOM_TRY(put_int(w, of[i]));
    return put_opcode(w, 't');
}

static loom_status put_tensor(writer *w, const loom_value_tensor *tensor) {
    char key[24];
    int64_t strides[LOOM_VALUE_MAX_DIMS];
    if (!w->tensors)
        return loom_fail(LOOM_ERR_ARGUMENT, "a tensor among values that are written without tensors");
    const char *class = loom__torch_storage_name(tensor->dtype);
    if (!class)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: writing a tensor of %s in torch's format",
            loom_dtype_name(tensor->dtype));
    void *grown = realloc((void *)w->tensors->items, (size_t)(w->tensors->count + 1) * sizeof *w->tensors->items);
    if (!grown)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a list of tensors");
    w->tensors->items = grown;
    snprintf(key, sizeof key, "%lld", (long long)w->tensors->count);
    w->tensors->items[w->tensors->count++] = tensor;
    for (int i = tensor->dims - 1; i >= 0; i--)
        strides[i] = i + 1 < tensor->dims ? strides[i + 1] * (tensor->shape[i + 1] > 0 ? tensor->shape[i + 1] : 1) : 1;
    LOOM_TRY(put_name(w, "torch._utils._rebuild_tensor_v2"));
    LOOM_TRY(put(w, "((", 2));
    LOOM_TRY(put_text(w, "storage", 7));
    LOOM_TRY(put_opcode(w, 'c'));
    LOOM_TRY(put(w, "torch\n", 6));
    LOOM_TRY(put(w, class, strlen(class)));
    LOOM_TRY(put(w, "\n", 1));
    LOOM_TRY(put_text(w, key, strlen(key)));
    LOOM_TRY(put_text(w, "cpu", 3));
    LOOM_TRY(put_int(w, tensor->elements));
    LOOM_TRY(put(w, "tQK\0", 4));
    LOOM_TRY(put_ints(w, tensor->shape, tensor->dims));
    LOOM_TRY(put_ints(w, strides, tensor->dims));
    LOOM_TRY(put_opcode(w, 0x89));
    LOOM_TRY(put_name(w, "collections.OrderedDict"));
    return put(w, ")RtR", 4);
}

static loom_status put_value(writer *w, const loom_value *value, int depth);

static loom_status put_items(writer *w, const loom_value **items, int64_t count, unsigned char end, int depth) {
    LOOM_TRY(put_opcode(w, '('));
    for (int64_t i = 0; i < count; i++)
        LOOM_TRY(put_value(w, items[i], depth));
    return put_opcode(w, end);
}

static loom_status put_object(writer *w, const loom_value_object *object, int depth) {
    LOOM_TRY(put_name(w, object->name));
    LOOM_TRY(put_value(w, object->arguments, depth));
    LOOM_TRY(put_opcode(w, object->called ? 'R' : 0x81));
    if (!object->state)
        return LOOM_OK;
    LOOM_TRY(put_value(w, object->state, depth));
    return put_opcode(w, 'b');
}

static loom_status put_value(writer *w, const loom_value *value, int depth) {
    if (depth > LOOM__PICKLE_MAX_DEPTH)
        return loom_fail(LOOM_ERR_ARGUMENT, "values contain one another more than %d deep", LOOM__PICKLE_MAX_DEPTH);
    switch (value->kind) {
    case LOOM_VALUE_NONE:
        return put_opcode(w, 'N');
    case LOOM_VALUE_BOOL:
        return put_opcode(w, value->integer ? 0x88 : 0x89);
    case LOOM_VALUE_INT:
        return put_int(w, value->integer);
    case LOOM_VALUE_FLOAT:
        return put_float(w, value->number);
    case LOOM_VALUE_TEXT:
        return put_text(w, value->text, (size_t)value->count);
    case LOOM_VALUE_BYTES:
        return put_bytes(w, (const unsigned char *)value->text, (size_t)value->count);
    case LOOM_VALUE_LIST:
        LOOM_TRY(put_opcode(w, ']'));
        return value->count ? put_items(w, value->items, value->count, 'e', depth + 1) : LOOM_OK;
    case LOOM_VALUE_TUPLE:
        return value->count ? put_items(w, value->items, value->count, 't', depth + 1) : put_opcode(w, ')');
    case LOOM_VALUE_DICT:
        LOOM_TRY(put_opcode(w, '}'));
        return value->count ? put_items(w, value->items, 2 * value->count, 'u', depth + 1) : LOOM_OK;
    case LOOM_VALUE_TENSOR:
        return put_tensor(w, value->tensor);
    case LOOM_VALUE_NAME:
        return put_name(w, value->text);
    case LOOM_VALUE_OBJECT:
        return put_object(w, value->object, depth + 1);
    }
    return loom_fail(LOOM_ERR_ARGUMENT, "a value of an unknown kind (%d)", (int)value->kind);
}

loom_status loom__pickle_write(const loom_value *value, loom__tensor_list *tensors, loom__buffer *buffer) {
    writer w = {.to = buffer, .tensors = tensors};
    LOOM_TRY(put_number(&w, 0x80, 2, 1));
    LOOM_TRY(put_value(&w, value, 0));
    return put_opcode(&w, '.');
}
