/* Values as checkpoints hold them beside tensors: what Python's pickle calls None, bool, int, float, str, bytes, list,
 * tuple, dict and objects, as a tree of plain data. Nothing is ever executed: an object is the name of its class and
 * what its constructor and its state were given.
 *
 * A pool owns the values that are made in it; they live until the pool is destroyed. A pool is not for two threads at
 * once; values that nobody changes any more may be read by many. */
#ifndef MEGALOOM_VALUE_H
#define MEGALOOM_VALUE_H

#include <megaloom/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum loom_value_kind {
    LOOM_VALUE_NONE,
    LOOM_VALUE_BOOL,
    LOOM_VALUE_INT,
    LOOM_VALUE_FLOAT,
    LOOM_VALUE_TEXT,
    LOOM_VALUE_BYTES,
    LOOM_VALUE_LIST,
    LOOM_VALUE_TUPLE,
    LOOM_VALUE_DICT,
    LOOM_VALUE_TENSOR,
    LOOM_VALUE_NAME,  /* a class or function, or a constant such as torch.float32 */
    LOOM_VALUE_OBJECT /* of a class that has no kind of its own */
} loom_value_kind;

enum { LOOM_VALUE_MAX_DIMS = 8 };

typedef struct loom_value loom_value;

/* Row-major, little-endian, not necessarily aligned. */
typedef struct loom_value_tensor {
    loom_dtype dtype;
    int dims;                           /* 0 = a scalar */
    int64_t shape[LOOM_VALUE_MAX_DIMS]; /* shape[dims…] are 1 */
    int64_t elements;
    const void *data;
} loom_value_tensor;

typedef struct loom_value_object {
    const char *name;            /* "argparse.Namespace" */
    const loom_value *arguments; /* TUPLE */
    const loom_value *state;     /* NULL = none was given */
    bool called;                 /* made by a call of the name rather than by its class without one */
} loom_value_object;

struct loom_value {
    loom_value_kind kind;
    int64_t count; /* TEXT, BYTES: bytes; LIST, TUPLE: items; DICT: pairs; otherwise 0 */
    union {
        int64_t integer;          /* INT; BOOL: 0 or 1 */
        double number;            /* FLOAT */
        const char *text;         /* TEXT (UTF-8), BYTES, NAME ("torch.float32"); a zero byte follows */
        const loom_value **items; /* LIST, TUPLE: [count]; DICT: [2 * count], each key before its value */
        const loom_value_tensor *tensor;
        loom_value_object *object;
    };
};

typedef struct loom_value_pool loom_value_pool;
LOOM_API loom_status loom_value_pool_create(loom_value_pool **pool);
/* Frees all values of the pool; NULL is accepted. */
LOOM_API void loom_value_pool_destroy(loom_value_pool *pool);

/* New values. Texts and tensors' data are copied; other values are referred to and must be of the same pool, or outlive
 * it. LOOM_ERR_MEMORY. */
LOOM_API loom_status loom_value_none(loom_value_pool *pool, loom_value **value);
LOOM_API loom_status loom_value_bool(loom_value_pool *pool, bool of, loom_value **value);
LOOM_API loom_status loom_value_int(loom_value_pool *pool, int64_t of, loom_value **value);
LOOM_API loom_status loom_value_float(loom_value_pool *pool, double of, loom_value **value);
/* LOOM_ERR_ARGUMENT when it is not UTF-8. */
LOOM_API loom_status loom_value_text(loom_value_pool *pool, const char *of, loom_value **value);
LOOM_API loom_status loom_value_bytes(loom_value_pool *pool, const void *of, size_t bytes, loom_value **value);
LOOM_API loom_status loom_value_name(loom_value_pool *pool, const char *of, loom_value **value);
/* Empty ones, to be filled with append and set. A tuple is filled like a list. */
LOOM_API loom_status loom_value_list(loom_value_pool *pool, loom_value **value);
LOOM_API loom_status loom_value_tuple(loom_value_pool *pool, loom_value **value);
LOOM_API loom_status loom_value_dict(loom_value_pool *pool, loom_value **value);
/* A list (or, with `tuple`, a tuple) of integers: of [count]. */
LOOM_API loom_status loom_value_ints(
    loom_value_pool *pool, bool tuple, const int64_t *of, int64_t count, loom_value **value);
/* data: product of shape [dims] elements. */
LOOM_API loom_status loom_value_tensor_copy(
    loom_value_pool *pool, loom_dtype dtype, int dims, const int64_t *shape, const void *data, loom_value **value);
/* arguments: a TUPLE, or NULL for an empty one; state may be NULL. */
LOOM_API loom_status loom_value_object_create(loom_value_pool *pool, const char *name, bool called,
    const loom_value *arguments, const loom_value *state, loom_value **value);

LOOM_API loom_status loom_value_append(loom_value_pool *pool, loom_value *list, const loom_value *item);
/* A new pair at the end of the dict; a key that is there already is not looked for, and the last one counts. */
LOOM_API loom_status loom_value_set(loom_value_pool *pool, loom_value *dict, const char *key, const loom_value *value);
LOOM_API loom_status loom_value_set_pair(
    loom_value_pool *pool, loom_value *dict, const loom_value *key, const loom_value *value);

/* The value of a text key of a DICT, or of the state of an OBJECT; NULL where there is none, where `from` is another
 * kind, or NULL. */
LOOM_API const loom_value *loom_value_get(const loom_value *from, const char *key);
/* True when the value is TEXT of exactly these bytes. */
LOOM_API bool loom_value_is_text(const loom_value *value, const char *text);
/* The value as JSON text, to be freed with free. What JSON does not have is written {"__tuple__": […]}, {"__dict__":
 * [[key, value], …]} (where a key is no text), {"__bytes__": length}, {"__object__": name, "state": …} ("arguments"
 * when there are any) and {"__tensor__": "float32", "shape": […]}, with "values" for up to 16 elements; tuples and
 * lists of 100 items and more are {"__tuple__": "N items"} and {"__list__": "N items"}; NaN and infinities are texts.
 * indent: blanks a level, 0 = one line. LOOM_ERR_ARGUMENT for what is nested more than 100 deep. */
LOOM_API loom_status loom_value_to_json(const loom_value *value, int indent, char **text);
/* A word for the kind: "dict". Never NULL. */
LOOM_API const char *loom_value_kind_name(loom_value_kind kind);

#ifdef __cplusplus
}
#endif
#endif
