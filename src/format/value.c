/* Values in a pool. All memory of a pool is cut from blocks that double in size and are freed together, so that values
 * may be shared by several containers (and by a pickle's memo) without anybody counting. A container's items grow to
 * the next power of two by moving, and the old array stays in the block: at most as much again. The invariant is that
 * `items` has room for the power of two at or above its count, so no capacity is stored. */
#include "format/value.h"
#include "base/text.h"

#include <stdlib.h>

enum { FIRST_BLOCK = 4096, LARGEST_BLOCK = 1 << 24 };

typedef struct block {
    struct block *next;
    size_t bytes, used; /* of what follows */
    _Alignas(16) unsigned char data[];
} block;

struct loom_value_pool {
    block *newest;
};

loom_status loom_value_pool_create(loom_value_pool **pool) {
    loom_value_pool *made = calloc(1, sizeof *made);
    if (!made)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for values");
    *pool = made;
    return LOOM_OK;
}

void loom_value_pool_destroy(loom_value_pool *pool) {
    if (!pool)
        return;
    for (block *next, *at = pool->newest; at; at = next) {
        next = at->next;
        free(at);
    }
    free(pool);
}

loom_status loom__value_allocate(loom_value_pool *pool, size_t bytes, void **memory) {
    size_t wanted;
    if (__builtin_add_overflow(bytes, 15, &wanted))
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a value of %zu bytes", bytes);
    wanted &= ~(size_t)15;
    block *in = pool->newest;
    if (!in || in->bytes - in->used < wanted) {
        size_t size = in ? in->bytes * 2 : FIRST_BLOCK;
        if (size > LARGEST_BLOCK)
            size = LARGEST_BLOCK;
        if (size < wanted)
            size = wanted;
        block *made;
        if (size > SIZE_MAX - sizeof *made || !(made = malloc(sizeof *made + size)))
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for values (%zu bytes)", size);
        *made = (block){.next = in, .bytes = size};
        pool->newest = in = made;
    }
    *memory = in->data + in->used;
    in->used += wanted;
    return LOOM_OK;
}

loom_status loom__value_create(loom_value_pool *pool, loom_value_kind kind, loom_value **value) {
    void *memory = NULL;
    LOOM_TRY(loom__value_allocate(pool, sizeof **value, &memory));
    *value = memory;
    **value = (loom_value){.kind = kind};
    return LOOM_OK;
}

loom_status loom__value_text_of(
    loom_value_pool *pool, loom_value_kind kind, const void *text, size_t bytes, loom_value **value) {
    void *memory = NULL;
    loom_value *made = NULL;
    LOOM_TRY(loom__value_allocate(pool, bytes + 1, &memory));
    LOOM_TRY(loom__value_create(pool, kind, &made));
    if (bytes)
        memcpy(memory, text, bytes);
    ((char *)memory)[bytes] = '\0';
    made->text = memory;
    made->count = kind == LOOM_VALUE_NAME ? 0 : (int64_t)bytes;
    *value = made;
    return LOOM_OK;
}

loom_status loom_value_none(loom_value_pool *pool, loom_value **value) {
    return loom__value_create(pool, LOOM_VALUE_NONE, value);
}

loom_status loom_value_bool(loom_value_pool *pool, bool of, loom_value **value) {
    LOOM_TRY(loom__value_create(pool, LOOM_VALUE_BOOL, value));
    (*value)->integer = of;
    return LOOM_OK;
}

loom_status loom_value_int(loom_value_pool *pool, int64_t of, loom_value **value) {
    LOOM_TRY(loom__value_create(pool, LOOM_VALUE_INT, value));
    (*value)->integer = of;
    return LOOM_OK;
}

loom_status loom_value_float(loom_value_pool *pool, double of, loom_value **value) {
    LOOM_TRY(loom__value_create(pool, LOOM_VALUE_FLOAT, value));
    (*value)->number = of;
    return LOOM_OK;
}

loom_status loom_value_text(loom_value_pool *pool, const char *of, loom_value **value) {
    if (!loom__is_utf8(of))
        return loom_fail(LOOM_ERR_ARGUMENT, "the text '%.80s' is not UTF-8", of);
    return loom__value_text_of(pool, LOOM_VALUE_TEXT, of, strlen(of), value);
}

loom_status loom_value_bytes(loom_value_pool *pool, const void *of, size_t bytes, loom_value **value) {
    return loom__value_text_of(pool, LOOM_VALUE_BYTES, of, bytes, value);
}

loom_status loom_value_name(loom_value_pool *pool, const char *of, loom_value **value) {
    return loom__value_text_of(pool, LOOM_VALUE_NAME, of, strlen(of), value);
}

loom_status loom_value_list(loom_value_pool *pool, loom_value **value) {
    return loom__value_create(pool, LOOM_VALUE_LIST, value);
}

loom_status loom_value_tuple(loom_value_pool *pool, loom_value **value) {
    return loom__value_create(pool, LOOM_VALUE_TUPLE, value);
}

loom_status loom_value_dict(loom_value_pool *pool, loom_value **value) {
    return loom__value_create(pool, LOOM_VALUE_DICT, value);
}

loom_status loom_value_ints(loom_value_pool *pool, bool tuple, const int64_t *of, int64_t count, loom_value **value) {
    loom_value *made = NULL;
    LOOM_TRY(loom__value_create(pool, tuple ? LOOM_VALUE_TUPLE : LOOM_VALUE_LIST, &made));
    for (int64_t i = 0; i < count; i++) {
        loom_value *item = NULL;
        LOOM_TRY(loom_value_int(pool, of[i], &item));
        LOOM_TRY(loom_value_append(pool, made, item));
    }
    *value = made;
    return LOOM_OK;
}

loom_status loom_value_tensor_copy(
    loom_value_pool *pool, loom_dtype dtype, int dims, const int64_t *shape, const void *data, loom_value **value) {
    loom_value_tensor tensor = {.dtype = dtype, .dims = dims, .elements = 1};
    if (dims < 0 || dims > LOOM_VALUE_MAX_DIMS || loom_dtype_size(dtype) == 0)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "a tensor value of dtype %s and %d dimensions: expected a dtype and 0 to %d", loom_dtype_name(dtype), dims,
            LOOM_VALUE_MAX_DIMS);
    for (int i = 0; i < LOOM_VALUE_MAX_DIMS; i++) {
        tensor.shape[i] = i < dims ? shape[i] : 1;
        if (tensor.shape[i] < 0 || __builtin_mul_overflow(tensor.elements, tensor.shape[i], &tensor.elements))
            return loom_fail(LOOM_ERR_ARGUMENT,
                "a tensor value's shape[%d] is %lld: negative, or the product of the "
                "shape exceeds 2^63",
                i, (long long)tensor.shape[i]);
    }
    size_t bytes;
    void *copy = NULL, *memory = NULL;
    if (__builtin_mul_overflow((size_t)tensor.elements, loom_dtype_size(dtype), &bytes))
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a tensor value");
    LOOM_TRY(loom__value_allocate(pool, bytes, &copy));
    LOOM_TRY(loom__value_allocate(pool, sizeof tensor, &memory));
    if (bytes)
        memcpy(copy, data, bytes);
    tensor.data = copy;
    memcpy(memory, &tensor, sizeof tensor);
    LOOM_TRY(loom__value_create(pool, LOOM_VALUE_TENSOR, value));
    (*value)->tensor = memory;
    return LOOM_OK;
}

loom_status loom_value_object_create(loom_value_pool *pool, const char *name, bool called, const loom_value *arguments,
    const loom_value *state, loom_value **value) {
    void *memory = NULL, *text = NULL;
    loom_value *none = NULL, *made = NULL;
    if (!arguments) {
        LOOM_TRY(loom_value_tuple(pool, &none));
        arguments = none;
    }
    if (arguments->kind != LOOM_VALUE_TUPLE)
        return loom_fail(LOOM_ERR_ARGUMENT, "arguments of the object %s: found a %s, expected a tuple", name,
            loom_value_kind_name(arguments->kind));
    LOOM_TRY(loom__value_allocate(pool, strlen(name) + 1, &text));
    memcpy(text, name, strlen(name) + 1);
    LOOM_TRY(loom__value_allocate(pool, sizeof(loom_value_object), &memory));
    LOOM_TRY(loom__value_create(pool, LOOM_VALUE_OBJECT, &made));
    made->object = memory;
    *made->object = (loom_value_object){text, arguments, state, called};
    *value = made;
    return LOOM_OK;
}

/* Room for one more of `width` items each. */
static loom_status grow(loom_value_pool *pool, loom_value *container, size_t width) {
    int64_t count = container->count;
    if (count > 0 && (count & (count - 1)) != 0)
        return LOOM_OK;
    size_t room = count ? (size_t)count * 2 : 1;
    void *memory = NULL;
    LOOM_TRY(loom__value_allocate(pool, room * width * sizeof *container->items, &memory));
    if (count)
        memcpy(memory, container->items, (size_t)count * width * sizeof *container->items);
    container->items = memory;
    return LOOM_OK;
}

loom_status loom_value_append(loom_value_pool *pool, loom_value *list, const loom_value *item) {
    if (list->kind != LOOM_VALUE_LIST && list->kind != LOOM_VALUE_TUPLE)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "appending to a %s: expected a list or a tuple", loom_value_kind_name(list->kind));
    LOOM_TRY(grow(pool, list, 1));
    list->items[list->count++] = item;
    return LOOM_OK;
}

loom_status loom_value_set_pair(
    loom_value_pool *pool, loom_value *dict, const loom_value *key, const loom_value *value) {
    if (dict->kind != LOOM_VALUE_DICT)
        return loom_fail(LOOM_ERR_ARGUMENT, "setting a key of a %s: expected a dict", loom_value_kind_name(dict->kind));
    LOOM_TRY(grow(pool, dict, 2));
    dict->items[2 * dict->count] = key;
    dict->items[2 * dict->count + 1] = value;
    dict->count++;
    return LOOM_OK;
}

loom_status loom_value_set(loom_value_pool *pool, loom_value *dict, const char *key, const loom_value *value) {
    loom_value *text = NULL;
    LOOM_TRY(loom_value_text(pool, key, &text));
    return loom_value_set_pair(pool, dict, text, value);
}

bool loom_value_is_text(const loom_value *value, const char *text) {
    size_t bytes = strlen(text);
    return value && value->kind == LOOM_VALUE_TEXT && (size_t)value->count == bytes &&
           memcmp(value->text, text, bytes) == 0;
}

const loom_value *loom_value_get(const loom_value *from, const char *key) {
    if (from && from->kind == LOOM_VALUE_OBJECT)
        from = from->object->state;
    if (!from || from->kind != LOOM_VALUE_DICT)
        return NULL;
    for (int64_t i = from->count - 1; i >= 0; i--)
        if (loom_value_is_text(from->items[2 * i], key))
            return from->items[2 * i + 1];
    return NULL;
}

const char *loom_value_kind_name(loom_value_kind kind) {
    static const char *const names[] = {[LOOM_VALUE_NONE] = "None",
        [LOOM_VALUE_BOOL] = "bool",
        [LOOM_VALUE_INT] = "int",
        [LOOM_VALUE_FLOAT] = "float",
        [LOOM_VALUE_TEXT] = "text",
        [LOOM_VALUE_BYTES] = "bytes",
        [LOOM_VALUE_LIST] = "list",
        [LOOM_VALUE_TUPLE] = "tuple",
        [LOOM_VALUE_DICT] = "dict",
        [LOOM_VALUE_TENSOR] = "tensor",
        [LOOM_VALUE_NAME] = "name",
        [LOOM_VALUE_OBJECT] = "object"};
    return (size_t)kind < sizeof names / sizeof *names ? names[kind] : "unknown kind";
}
