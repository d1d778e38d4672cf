/* A pickle is a program for a stack machine; this machine only makes values. Every opcode takes at least one byte and
 * makes at most one value (calls that copy one are counted), so memory is bounded by the length of the input; what
 * sharing through the memo could make of it (cycles, or a tree that doubles at every level) is measured at the end,
 * before anybody walks it. The invariant of the loop is mark <= top: nothing below the innermost mark is ever taken. */
#include "format/pickle.h"
#include "base/text.h"
#include "format/file.h"
#include "format/pickle_fold.h"

#include <stdio.h>
#include <stdlib.h>

enum { EXPANSION = 64, EXPANSION_FREE = 1 << 16 };

typedef struct machine {
    const char *what;
    const unsigned char *at, *begin, *end;
    loom_value_pool *pool;
    loom_value **stack;
    size_t top, stack_room;
    size_t *marks; /* heights of the stack */
    size_t mark_count, mark_room;
    loom_value **memo;
    size_t memo_room, memo_next;
    loom__pickled *out;
    size_t tensor_room;
    uint64_t copied; /* items and letters that folded calls took over */
} machine;

static unsigned long long position(const machine *m) {
    return (unsigned long long)(m->at - m->begin);
}

static loom_status need(const machine *m, uint64_t bytes) {
    if (bytes > (uint64_t)(m->end - m->at))
        return loom_fail(LOOM_ERR_FORMAT, "%s: the pickle ends at byte %llu, where %llu more are needed", m->what,
            position(m), (unsigned long long)bytes);
    return LOOM_OK;
}

/* `array` with room for one item more than `count`. */
static loom_status reserve(const machine *m, void *array, size_t *room, size_t count, size_t width) {
    if (count < *room)
        return LOOM_OK;
    size_t wanted = *room ? *room * 2 : 64;
    while (wanted <= count)
        wanted *= 2;
    void *old, *grown;
    memcpy(&old, array, sizeof old);
    if (wanted > SIZE_MAX / width || !(grown = realloc(old, wanted * width)))
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to read the pickle", m->what);
    memset((char *)grown + *room * width, 0, (wanted - *room) * width);
    memcpy(array, &grown, sizeof grown);
    *room = wanted;
    return LOOM_OK;
}

static loom_status push(machine *m, loom_value *value) {
    LOOM_TRY(reserve(m, &m->stack, &m->stack_room, m->top, sizeof *m->stack));
    m->stack[m->top++] = value;
    return LOOM_OK;
}

static size_t floor_of(const machine *m) {
    return m->mark_count ? m->marks[m->mark_count - 1] : 0;
}

static loom_status have(const machine *m, size_t count) {
    if (m->top - floor_of(m) < count)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: the opcode before byte %llu of the pickle takes %zu values, %zu are there", m->what, position(m),
            count, m->top - floor_of(m));
    return LOOM_OK;
}

static loom_status push_mark(machine *m) {
    LOOM_TRY(reserve(m, &m->marks, &m->mark_room, m->mark_count, sizeof *m->marks));
    m->marks[m->mark_count++] = m->top;
    return LOOM_OK;
}

/* The values above the innermost mark are stack[*first … top); the mark is gone afterwards. */
static loom_status pop_mark(machine *m, size_t *first) {
    if (m->mark_count == 0)
        return loom_fail(LOOM_ERR_FORMAT, "%s: the opcode before byte %llu of the pickle needs a mark, there is none",
            m->what, position(m));
    *first = m->marks[--m->mark_count];
    return LOOM_OK;
}

static loom_status push_new(machine *m, loom_value_kind kind) {
    loom_value *value = NULL;
    LOOM_TRY(loom__value_create(m->pool, kind, &value));
    return push(m, value);
}

static loom_status push_int(machine *m, int64_t of) {
    loom_value *value = NULL;
    LOOM_TRY(loom_value_int(m->pool, of, &value));
    return push(m, value);
}

static loom_status push_bool(machine *m, bool of) {
    loom_value *value = NULL;
    LOOM_TRY(loom_value_bool(m->pool, of, &value));
    return push(m, value);
}

static loom_status push_float(machine *m) {
    uint64_t bits;
    double number;
    loom_value *value = NULL;
    LOOM_TRY(need(m, 8));
    bits = __builtin_bswap64(loom__load_u64(m->at));
    memcpy(&number, &bits, sizeof number);
    m->at += 8;
    LOOM_TRY(loom_value_float(m->pool, number, &value));
    return push(m, value);
}

/* Two's complement of any length. */
static loom_status push_long(machine *m, uint64_t bytes) {
    LOOM_TRY(need(m, bytes));
    if (bytes > 8)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: %s: a whole number of %llu bytes at byte %llu of the pickle, at most 8", m->what,
            (unsigned long long)bytes, position(m));
    uint64_t number = bytes && (m->at[bytes - 1] & 0x80) ? UINT64_MAX : 0;
    memcpy(&number, m->at, (size_t)bytes);
    m->at += bytes;
    return push_int(m, (int64_t)number);
}

/* Zero bytes are letters like others to Python. */
static bool is_utf8(const char *text, size_t bytes) {
    for (size_t at = 0; at <= bytes; at += strlen(text + at) + 1)
        if (!loom__is_utf8(text + at))
            return false;
    return true;
}

static loom_status push_text(machine *m, loom_value_kind kind, uint64_t bytes) {
    loom_value *value = NULL;
    LOOM_TRY(need(m, bytes));
    LOOM_TRY(loom__value_text_of(m->pool, kind, m->at, (size_t)bytes, &value));
    if (kind == LOOM_VALUE_TEXT && !is_utf8(value->text, (size_t)bytes))
        return loom_fail(LOOM_ERR_FORMAT, "%s: the text at byte %llu of the pickle is not UTF-8", m->what, position(m));
    m->at += bytes;
    return push(m, value);
}

/* `width` bytes of length, then that many of text. */
static loom_status push_sized(machine *m, loom_value_kind kind, size_t width) {
    uint64_t bytes = 0;
    LOOM_TRY(need(m, width));
    memcpy(&bytes, m->at, width);
    m->at += width;
    return push_text(m, kind, bytes);
}

static loom_status push_name(machine *m, const char *module, size_t module_bytes, const char *name, size_t name_bytes) {
    void *text = NULL;
    loom_value *value = NULL;
    if (memchr(module, 0, module_bytes) || memchr(name, 0, name_bytes) || module_bytes + name_bytes > 1000)
        return loom_fail(LOOM_ERR_FORMAT, "%s: the name before byte %llu of the pickle is none", m->what, position(m));
    LOOM_TRY(loom__value_allocate(m->pool, module_bytes + name_bytes + 2, &text));
    snprintf(text, module_bytes + name_bytes + 2, "%.*s.%.*s", (int)module_bytes, module, (int)name_bytes, name);
    if (!loom__is_utf8(text))
        return loom_fail(
            LOOM_ERR_FORMAT, "%s: the name before byte %llu of the pickle is not UTF-8", m->what, position(m));
    LOOM_TRY(loom__value_create(m->pool, LOOM_VALUE_NAME, &value));
    value->text = text;
    return push(m, value);
}

static loom_status read_line(machine *m, const char **line, size_t *bytes) {
    const unsigned char *end = memchr(m->at, '\n', (size_t)(m->end - m->at));
    if (!end)
        return loom_fail(LOOM_ERR_FORMAT, "%s: the name at byte %llu of the pickle has no end", m->what, position(m));
    *line = (const char *)m->at;
    *bytes = (size_t)(end - m->at);
    m->at = end + 1;
    return LOOM_OK;
}

static loom_status push_global(machine *m) {
    const char *module = NULL, *name = NULL;
    size_t module_bytes = 0, name_bytes = 0;
    LOOM_TRY(read_line(m, &module, &module_bytes));
    LOOM_TRY(read_line(m, &name, &name_bytes));
    return push_name(m, module, module_bytes, name, name_bytes);
}

static loom_status push_stack_global(machine *m) {
    LOOM_TRY(have(m, 2));
    const loom_value *module = m->stack[m->top - 2], *name = m->stack[m->top - 1];
    if (module->kind != LOOM_VALUE_TEXT || name->kind != LOOM_VALUE_TEXT)
        return loom_fail(LOOM_ERR_FORMAT, "%s: a name is made of a %s and a %s before byte %llu of the pickle", m->what,
            loom_value_kind_name(module->kind), loom_value_kind_name(name->kind), position(m));
    m->top -= 2;
    return push_name(m, module->text, (size_t)module->count, name->text, (size_t)name->count);
}

/* The top `count` values become one tuple. */
static loom_status push_tuple(machine *m, size_t first) {
    loom_value *tuple = NULL;
    LOOM_TRY(loom_value_tuple(m->pool, &tuple));
    for (size_t i = first; i < m->top; i++)
        LOOM_TRY(loom_value_append(m->pool, tuple, m->stack[i]));
    m->top = first;
    return push(m, tuple);
}

static loom_status push_tuple_of(machine *m, size_t count) {
    LOOM_TRY(have(m, count));
    return push_tuple(m, m->top - count);
}

/* Puts stack[first … top) into the list or dict below them. */
static loom_status fill(machine *m, size_t first, bool pairs) {
    if (first <= floor_of(m))
        return loom_fail(LOOM_ERR_FORMAT, "%s: nothing to fill before byte %llu of the pickle", m->what, position(m));
    loom_value *container = m->stack[first - 1];
    if (container->kind != (pairs ? LOOM_VALUE_DICT : LOOM_VALUE_LIST))
        return loom_fail(LOOM_ERR_FORMAT, "%s: %s before byte %llu of the pickle go into a %s", m->what,
            pairs ? "keys and values" : "items", position(m), loom_value_kind_name(container->kind));
    if (pairs && (m->top - first) % 2 != 0)
        return loom_fail(
            LOOM_ERR_FORMAT, "%s: a key without a value before byte %llu of the pickle", m->what, position(m));
    for (size_t i = first; i < m->top; i += pairs ? 2 : 1)
        LOOM_TRY(pairs ? loom_value_set_pair(m->pool, container, m->stack[i], m->stack[i + 1])
                       : loom_value_append(m->pool, container, m->stack[i]));
    m->top = first;
    return LOOM_OK;
}

static loom_status fill_top(machine *m, size_t count, bool pairs) {
    LOOM_TRY(have(m, count + 1));
    return fill(m, m->top - count, pairs);
}

static loom_status fill_marked(machine *m, bool pairs) {
    size_t first = 0;
    LOOM_TRY(pop_mark(m, &first));
    return fill(m, first, pairs);
}

/* A container that is made and filled by one opcode. */
static loom_status push_filled(machine *m, loom_value_kind kind) {
    size_t first = 0;
    loom_value *made = NULL;
    LOOM_TRY(pop_mark(m, &first));
    LOOM_TRY(loom__value_create(m->pool, kind, &made));
    LOOM_TRY(push(m, made));
    memmove(m->stack + first + 1, m->stack + first, (m->top - 1 - first) * sizeof *m->stack);
    m->stack[first] = made;
    return fill(m, first + 1, kind == LOOM_VALUE_DICT);
}

static loom_status put_memo(machine *m, uint64_t index) {
    LOOM_TRY(have(m, 1));
    if (index >= (uint64_t)(m->end - m->begin))
        return loom_fail(LOOM_ERR_FORMAT, "%s: memo number %llu before byte %llu of the pickle is beyond its %zu bytes",
            m->what, (unsigned long long)index, position(m), (size_t)(m->end - m->begin));
    LOOM_TRY(reserve(m, &m->memo, &m->memo_room, (size_t)index, sizeof *m->memo));
    m->memo[index] = m->stack[m->top - 1];
    return LOOM_OK;
}

static loom_status get_memo(machine *m, uint64_t index) {
    if (index >= m->memo_room || !m->memo[index])
        return loom_fail(LOOM_ERR_FORMAT, "%s: memo number %llu before byte %llu of the pickle was never set", m->what,
            (unsigned long long)index, position(m));
    return push(m, m->memo[index]);
}

static loom_status read_number(machine *m, size_t width, uint64_t *number) {
    *number = 0;
    LOOM_TRY(need(m, width));
    memcpy(number, m->at, width);
    m->at += width;
    return LOOM_OK;
}

static loom_status push_object(machine *m, bool called) {
    LOOM_TRY(have(m, 2));
    loom_value *name = m->stack[m->top - 2], *arguments = m->stack[m->top - 1], *made = NULL;
    if (name->kind != LOOM_VALUE_NAME || arguments->kind != LOOM_VALUE_TUPLE)
        return loom_fail(LOOM_ERR_FORMAT, "%s: an object is made of a %s and a %s before byte %llu of the pickle",
            m->what, loom_value_kind_name(name->kind), loom_value_kind_name(arguments->kind), position(m));
    m->top -= 2;
    if (called && strcmp(name->text, "torch._utils._rebuild_tensor_v2") == 0) {
        LOOM_TRY(reserve(m, &m->out->tensors, &m->tensor_room, (size_t)m->out->tensor_count, sizeof *m->out->tensors));
        LOOM_TRY(loom__fold_tensor(m->what, m->pool, arguments, &m->out->tensors[m->out->tensor_count], &made));
        m->out->tensor_count++;
        return push(m, made);
    }
    if (called) {
        LOOM_TRY(loom__fold_call(m->pool, name->text, arguments, &made));
        m->copied += made && arguments->count ? (uint64_t)arguments->items[0]->count : 0;
        if (m->copied > (uint64_t)(m->end - m->begin) * EXPANSION)
            return loom_fail(LOOM_ERR_FORMAT,
                "%s: calls before byte %llu of the pickle copy more than %d times its bytes", m->what, position(m),
                EXPANSION);
    }
    if (!made)
        LOOM_TRY(loom_value_object_create(m->pool, name->text, called, arguments, NULL, &made));
    return push(m, made);
}

static loom_status push_persistent(machine *m) {
    loom_value *made = NULL, *arguments = NULL;
    LOOM_TRY(have(m, 1));
    LOOM_TRY(loom_value_tuple(m->pool, &arguments));
    LOOM_TRY(loom_value_append(m->pool, arguments, m->stack[--m->top]));
    LOOM_TRY(loom_value_object_create(m->pool, LOOM__PERSISTENT, true, arguments, NULL, &made));
    return push(m, made);
}

static loom_status build(machine *m) {
    LOOM_TRY(have(m, 2));
    loom_value *object = m->stack[m->top - 2];
    if (object->kind != LOOM_VALUE_OBJECT || object->object->state)
        return loom_fail(LOOM_ERR_FORMAT, "%s: a state before byte %llu of the pickle goes to a %s", m->what,
            position(m),
            object->kind == LOOM_VALUE_OBJECT ? "object that has one" : loom_value_kind_name(object->kind));
    object->object->state = m->stack[--m->top];
    return LOOM_OK;
}

static loom_status pop(machine *m) {
    if (m->top == floor_of(m) && m->mark_count > 0) {
        m->mark_count--;
        return LOOM_OK;
    }
    LOOM_TRY(have(m, 1));
    m->top--;
    return LOOM_OK;
}

static loom_status step(machine *m, unsigned char opcode) {
    uint64_t number = 0;
    size_t first = 0;
    switch (opcode) {
    case 0x80: /* PROTO */
        LOOM_TRY(read_number(m, 1, &number));
        if (number < 2 || number > 5)
            return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: %s: a pickle of protocol %llu, expected 2 to 5",
                m->what, (unsigned long long)number);
        return LOOM_OK;
    case 0x95: /* FRAME */
        LOOM_TRY(read_number(m, 8, &number));
        return need(m, number);
    case '(':
        return push_mark(m);
    case '0':
        return pop(m);
    case '1': /* POP_MARK */
        LOOM_TRY(pop_mark(m, &first));
        m->top = first;
        return LOOM_OK;
    case '2': /* DUP */
        LOOM_TRY(have(m, 1));
        return push(m, m->stack[m->top - 1]);
    case 'N':
        return push_new(m, LOOM_VALUE_NONE);
    case 0x88: /* NEWTRUE */
    case 0x89: /* NEWFALSE */
        return push_bool(m, opcode == 0x88);
    case 'J': /* BININT */
        LOOM_TRY(read_number(m, 4, &number));
        return push_int(m, (int32_t)(uint32_t)number);
    case 'K': /* BININT1 */
    case 'M': /* BININT2 */
        LOOM_TRY(read_number(m, opcode == 'K' ? 1 : 2, &number));
        return push_int(m, (int64_t)number);
    case 0x8a: /* LONG1 */
    case 0x8b: /* LONG4 */
        LOOM_TRY(read_number(m, opcode == 0x8a ? 1 : 4, &number));
        return push_long(m, number);
    case 'G': /* BINFLOAT */
        return push_float(m);
    case 0x8c: /* SHORT_BINUNICODE */
        return push_sized(m, LOOM_VALUE_TEXT, 1);
    case 'X': /* BINUNICODE */
        return push_sized(m, LOOM_VALUE_TEXT, 4);
    case 0x8d: /* BINUNICODE8 */
        return push_sized(m, LOOM_VALUE_TEXT, 8);
    case 'C': /* SHORT_BINBYTES */
        return push_sized(m, LOOM_VALUE_BYTES, 1);
    case 'B': /* BINBYTES */
        return push_sized(m, LOOM_VALUE_BYTES, 4);
    case 0x8e: /* BINBYTES8 */
    case 0x96: /* BYTEARRAY8 */
        return push_sized(m, LOOM_VALUE_BYTES, 8);
    case ']':
        return push_new(m, LOOM_VALUE_LIST);
    case 'a': /* APPEND */
        return fill_top(m, 1, false);
    case 'e':  /* APPENDS */
    case 0x90: /* ADDITEMS */
        return fill_marked(m, false);
    case 'l':  /* LIST */
    case 0x91: /* FROZENSET */
        return push_filled(m, LOOM_VALUE_LIST);
    case 0x8f: /* EMPTY_SET */
        return push_new(m, LOOM_VALUE_LIST);
    case ')':
        return push_new(m, LOOM_VALUE_TUPLE);
    case 't': /* TUPLE */
        LOOM_TRY(pop_mark(m, &first));
        return push_tuple(m, first);
    case 0x85: /* TUPLE1 */
    case 0x86: /* TUPLE2 */
    case 0x87: /* TUPLE3 */
        return push_tuple_of(m, opcode - 0x84u);
    case '}':
        return push_new(m, LOOM_VALUE_DICT);
    case 'd': /* DICT */
        return push_filled(m, LOOM_VALUE_DICT);
    case 's': /* SETITEM */
        return fill_top(m, 2, true);
    case 'u': /* SETITEMS */
        return fill_marked(m, true);
    case 'c': /* GLOBAL */
        return push_global(m);
    case 0x93: /* STACK_GLOBAL */
        return push_stack_global(m);
    case 'R': /* REDUCE */
        return push_object(m, true);
    case 0x81: /* NEWOBJ */
        return push_object(m, false);
    case 'b': /* BUILD */
        return build(m);
    case 'Q': /* BINPERSID */
        return push_persistent(m);
    case 0x94: /* MEMOIZE */
        return put_memo(m, m->memo_next++);
    case 'q': /* BINPUT */
    case 'r': /* LONG_BINPUT */
        LOOM_TRY(read_number(m, opcode == 'q' ? 1 : 4, &number));
        return put_memo(m, number);
    case 'h': /* BINGET */
    case 'j': /* LONG_BINGET */
        LOOM_TRY(read_number(m, opcode == 'h' ? 1 : 4, &number));
        return get_memo(m, number);
    default:
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: %s: opcode 0x%02x at byte %llu of the pickle is not among those that checkpoints use",
            m->what, opcode, position(m) - 1);
    }
}

/* Walks the value as a tree. */
static loom_status measure(const machine *m, const loom_value *value, int depth, uint64_t *left) {
    const loom_value **items = NULL;
    int64_t count = 0;
    if (depth > LOOM__PICKLE_MAX_DEPTH)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: the pickle's values contain one another more than %d deep, or themselves", m->what,
            LOOM__PICKLE_MAX_DEPTH);
    if (*left == 0)
        return loom_fail(LOOM_ERR_FORMAT,
            "%s: the pickle's values contain one another so often that they are more than %d times its %zu bytes",
            m->what, EXPANSION, (size_t)(m->end - m->begin));
    --*left;
    if (value->kind == LOOM_VALUE_LIST || value->kind == LOOM_VALUE_TUPLE)
        items = value->items, count = value->count;
    else if (value->kind == LOOM_VALUE_DICT)
        items = value->items, count = 2 * value->count;
    else if (value->kind == LOOM_VALUE_OBJECT) {
        LOOM_TRY(measure(m, value->object->arguments, depth + 1, left));
        if (value->object->state)
            LOOM_TRY(measure(m, value->object->state, depth + 1, left));
    }
    for (int64_t i = 0; i < count; i++)
        LOOM_TRY(measure(m, items[i], depth + 1, left));
    return LOOM_OK;
}

static loom_status run(machine *m) {
    for (;;) {
        LOOM_TRY(need(m, 1));
        unsigned char opcode = *m->at++;
        if (opcode == '.')
            break;
        LOOM_TRY(step(m, opcode));
    }
    if (m->at != m->end)
        return loom_fail(LOOM_ERR_FORMAT, "%s: the pickle ends at byte %llu, %zu more bytes follow", m->what,
            position(m), (size_t)(m->end - m->at));
    if (m->top != 1 || m->mark_count != 0)
        return loom_fail(LOOM_ERR_FORMAT, "%s: the pickle ends with %zu values and %zu marks, expected one value",
            m->what, m->top, m->mark_count);
    uint64_t left = (uint64_t)(m->end - m->begin) * EXPANSION + EXPANSION_FREE;
    LOOM_TRY(measure(m, m->stack[0], 0, &left));
    m->out->root = m->stack[0];
    return LOOM_OK;
}

/* The pool frees it with the values. */
static loom_status keep_tensors(const machine *m, loom__pickled *pickled) {
    void *copy = NULL;
    size_t bytes = (size_t)pickled->tensor_count * sizeof *pickled->tensors;
    LOOM_TRY(loom__value_allocate(m->pool, bytes, &copy));
    if (bytes)
        memcpy(copy, pickled->tensors, bytes);
    pickled->tensors = copy;
    return LOOM_OK;
}

loom_status loom__pickle_read(
    const char *what, const void *data, size_t bytes, loom_value_pool *pool, loom__pickled *pickled) {
    loom__pickled made = {0};
    machine m = {.what = what, .at = data, .begin = data, .end = (const unsigned char *)data + bytes, .pool = pool};
    m.out = &made;
    loom_status status = run(&m);
    void *tensors = made.tensors;
    if (status == LOOM_OK)
        status = keep_tensors(&m, &made);
    free(m.stack);
    free(m.marks);
    free(m.memo);
    free(tensors);
    if (status == LOOM_OK)
        *pickled = made;
    return status;
}
