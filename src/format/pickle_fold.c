/* What calls in a pickle mean, for the few names that are plain data by another way. The list is closed: a call that is
 * not on it, or has arguments that it does not have in a checkpoint, stays an object with a name. */
#include "format/pickle_fold.h"

static bool is_kind(const loom_value *value, loom_value_kind kind) {
    return value && value->kind == kind;
}

static const loom_value *argument(const loom_value *arguments, int64_t index) {
    return index < arguments->count ? arguments->items[index] : NULL;
}

/* A dict of a list of pairs; left alone where it is none. */
static loom_status fold_pairs(loom_value_pool *pool, const loom_value *pairs, loom_value **made) {
    loom_value *dict = NULL;
    LOOM_TRY(loom_value_dict(pool, &dict));
    for (int64_t i = 0; pairs && i < pairs->count; i++) {
        const loom_value *pair = pairs->items[i];
        if ((pair->kind != LOOM_VALUE_TUPLE && pair->kind != LOOM_VALUE_LIST) || pair->count != 2)
            return LOOM_OK;
        LOOM_TRY(loom_value_set_pair(pool, dict, pair->items[0], pair->items[1]));
    }
    *made = dict;
    return LOOM_OK;
}

/* Bytes that protocol 2 writes as a text of the letters U+0000 to U+00FF. */
static loom_status fold_latin1(loom_value_pool *pool, const loom_value *text, loom_value **made) {
    void *memory = NULL;
    loom_value *bytes = NULL;
    size_t count = 0;
    LOOM_TRY(loom__value_allocate(pool, (size_t)text->count + 1, &memory));
    unsigned char *to = memory;
    for (int64_t i = 0; i < text->count; i++) {
        unsigned lead = (unsigned char)text->text[i];
        if (lead > 0xc3)
            return LOOM_OK;
        if (lead >= 0x80)
            lead = (lead & 3) << 6 | ((unsigned char)text->text[++i] & 0x3f);
        to[count++] = (unsigned char)lead;
    }
    to[count] = 0;
    LOOM_TRY(loom__value_create(pool, LOOM_VALUE_BYTES, &bytes));
    bytes->text = memory;
    bytes->count = (int64_t)count;
    *made = bytes;
    return LOOM_OK;
}

static bool is_one_of(const char *name, const char *a, const char *b, const char *c, const char *d) {
    return strcmp(name, a) == 0 || strcmp(name, b) == 0 || strcmp(name, c) == 0 || strcmp(name, d) == 0;
}

loom_status loom__fold_call(loom_value_pool *pool, const char *name, const loom_value *arguments, loom_value **made) {
    const loom_value *first = argument(arguments, 0), *second = argument(arguments, 1);
    if (strcmp(name, "collections.OrderedDict") == 0) {
        if (arguments->count == 0 || (arguments->count == 1 && is_kind(first, LOOM_VALUE_LIST)))
            return fold_pairs(pool, first, made);
    } else if (strcmp(name, "collections.defaultdict") == 0) {
        if (arguments->count <= 1)
            return fold_pairs(pool, NULL, made);
    } else if (strcmp(name, "torch.Size") == 0) {
        if (arguments->count == 1 && (is_kind(first, LOOM_VALUE_TUPLE) || is_kind(first, LOOM_VALUE_LIST))) {
            LOOM_TRY(loom_value_tuple(pool, made));
            (*made)->items = first->items;
            (*made)->count = first->count;
        }
    } else if (strcmp(name, "_codecs.encode") == 0) {
        if (is_kind(first, LOOM_VALUE_TEXT) &&
            (loom_value_is_text(second, "latin1") || loom_value_is_text(second, "latin-1")))
            return fold_latin1(pool, first, made);
    } else if (is_one_of(name, "builtins.set", "builtins.frozenset", "__builtin__.set", "__builtin__.frozenset")) {
        if (arguments->count == 1 && is_kind(first, LOOM_VALUE_LIST)) {
            LOOM_TRY(loom_value_list(pool, made));
            for (int64_t i = 0; i < first->count; i++)
                LOOM_TRY(loom_value_append(pool, *made, first->items[i]));
        }
    } else if (strcmp(name, "torch._utils._rebuild_parameter") == 0) {
        if (is_kind(first, LOOM_VALUE_TENSOR)) {
            LOOM_TRY(loom__value_create(pool, LOOM_VALUE_TENSOR, made));
            (*made)->tensor = first->tensor;
        }
    }
    return LOOM_OK;
}

static loom_status fail_tensor(const char *what, const char *part) {
    return loom_fail(LOOM_ERR_FORMAT, "%s: a tensor of the pickle has %s", what, part);
}

static bool read_ints(const loom_value *tuple, int64_t *out) {
    for (int64_t i = 0; i < tuple->count; i++) {
        if (tuple->items[i]->kind != LOOM_VALUE_INT || tuple->items[i]->integer < 0)
            return false;
        out[i] = tuple->items[i]->integer;
    }
    return true;
}

static loom_status read_storage(
    const char *what, const loom_value *storage, loom_value_tensor *tensor, loom__pickled_tensor *pickled) {
    const loom_value *id = is_kind(storage, LOOM_VALUE_OBJECT) && strcmp(storage->object->name, LOOM__PERSISTENT) == 0
                               ? storage->object->arguments->items[0]
                               : NULL;
    if (!is_kind(id, LOOM_VALUE_TUPLE) || id->count < 5 || !loom_value_is_text(id->items[0], "storage") ||
        !is_kind(id->items[1], LOOM_VALUE_NAME) || !is_kind(id->items[2], LOOM_VALUE_TEXT) ||
        !is_kind(id->items[4], LOOM_VALUE_INT) || id->items[4]->integer < 0)
        return fail_tensor(what, "no storage of the form ('storage', class, key, device, elements)");
    const char *name = id->items[1]->text, *torch = "torch.";
    tensor->dtype =
        strncmp(name, torch, strlen(torch)) == 0 ? loom__torch_storage_dtype(name + strlen(torch)) : LOOM_DTYPE_COUNT;
    if (tensor->dtype == LOOM_DTYPE_COUNT)
        return loom_fail(
            LOOM_ERR_UNSUPPORTED, "not supported yet: %s: a tensor with a storage of class %s", what, name);
    pickled->storage = id->items[2]->text;
    pickled->storage_elements = id->items[4]->integer;
    return LOOM_OK;
}

/* The last element that the strides reach lies in the storage, and the tensor has no more elements than it. */
static loom_status check_extent(
    const char *what, const loom_value_tensor *tensor, const loom__pickled_tensor *pickled) {
    int64_t last = pickled->first;
    if (tensor->elements == 0)
        return LOOM_OK;
    for (int i = 0; i < tensor->dims; i++) {
        int64_t reach;
        if (__builtin_mul_overflow(tensor->shape[i] - 1, pickled->strides[i], &reach) ||
            __builtin_add_overflow(last, reach, &last))
            return fail_tensor(what, "strides that reach beyond 2^63 elements");
    }
    if (last >= pickled->storage_elements || tensor->elements > pickled->storage_elements)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: a tensor of the pickle has %lld elements up to number %lld of a storage of %lld", what,
            (long long)tensor->elements, (long long)last, (long long)pickled->storage_elements);
    return LOOM_OK;
}

loom_status loom__fold_tensor(const char *what, loom_value_pool *pool, const loom_value *arguments,
    loom__pickled_tensor *pickled, loom_value **made) {
    loom_value_tensor tensor = {.elements = 1};
    const loom_value *first = argument(arguments, 1), *size = argument(arguments, 2), *strides = argument(arguments, 3);
    LOOM_TRY(read_storage(what, argument(arguments, 0), &tensor, pickled));
    if (!is_kind(first, LOOM_VALUE_INT) || first->integer < 0)
        return fail_tensor(what, "no offset into its storage");
    if (!is_kind(size, LOOM_VALUE_TUPLE) || !is_kind(strides, LOOM_VALUE_TUPLE) || size->count != strides->count)
        return fail_tensor(what, "no size with as many strides");
    if (size->count > LOOM_VALUE_MAX_DIMS)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: %s: a tensor of %lld dimensions, at most %d", what,
            (long long)size->count, LOOM_VALUE_MAX_DIMS);
    pickled->first = first->integer;
    tensor.dims = (int)size->count;
    for (int i = 0; i < LOOM_VALUE_MAX_DIMS; i++)
        tensor.shape[i] = 1;
    if (!read_ints(size, tensor.shape) || !read_ints(strides, pickled->strides))
        return fail_tensor(what, "a size or stride that is no whole number of at least 0");
    for (int i = 0; i < tensor.dims; i++)
        if (__builtin_mul_overflow(tensor.elements, tensor.shape[i], &tensor.elements))
            return fail_tensor(what, "a size whose product exceeds 2^63");
    LOOM_TRY(check_extent(what, &tensor, pickled));
    void *memory = NULL;
    LOOM_TRY(loom__value_allocate(pool, sizeof tensor, &memory));
    memcpy(memory, &tensor, sizeof tensor);
    pickled->tensor = memory;
    LOOM_TRY(loom__value_create(pool, LOOM_VALUE_TENSOR, made));
    (*made)->tensor = memory;
    return LOOM_OK;
}
