/* Pickles as data. Reading runs nothing: a closed list of opcodes makes values, a call or an instance becomes an OBJECT
 * that names what would have been called. A few names that stand for plain data are folded into it: OrderedDict and
 * defaultdict (DICT), torch.Size (TUPLE), set and frozenset (LIST), _codecs.encode (BYTES), torch's tensors (TENSOR).
 */
#ifndef FORMAT_PICKLE_H
#define FORMAT_PICKLE_H

#include "format/value.h"

enum {
    LOOM__PICKLE_MAX_DEPTH = 100 /* containers in one another */
};

/* A tensor of a pickle, whose elements lie elsewhere. */
typedef struct loom__pickled_tensor {
    loom_value_tensor *tensor; /* data is NULL until somebody sets it */
    const char *storage;       /* its key */
    int64_t storage_elements, first;
    int64_t strides[LOOM_VALUE_MAX_DIMS];
} loom__pickled_tensor;

typedef struct loom__pickled {
    const loom_value *root;
    loom__pickled_tensor *tensors; /* [tensor_count], of the pool */
    int64_t tensor_count;
} loom__pickled;

/* The value of a pickle of protocol 2 to 5 (borrowed for the call); `what` is for messages. It has no cycles, is at
 * most LOOM__PICKLE_MAX_DEPTH deep, and written out without sharing at most some 64 times as long as its bytes. Every
 * tensor's elements lie inside its storage. LOOM_ERR_FORMAT; LOOM_ERR_UNSUPPORTED naming the opcode or the dtype. */
loom_status loom__pickle_read(
    const char *what, const void *data, size_t bytes, loom_value_pool *pool, loom__pickled *pickled);

/* Text that grows. Cleared before its first use; free(bytes) after the last. */
typedef struct loom__buffer {
    unsigned char *bytes;
    size_t count, room;
} loom__buffer;
loom_status loom__buffer_append(loom__buffer *buffer, const void *data, size_t bytes);

/* Appends the pickle of a value, in protocol 2 as torch.save has it. Tensors become storages "0", "1", … in the order
 * in which they appear; `tensors` gets them (NULL: a tensor is LOOM_ERR_ARGUMENT). */
typedef struct loom__tensor_list {
    const loom_value_tensor **items;
    int64_t count;
} loom__tensor_list;
loom_status loom__pickle_write(const loom_value *value, loom__tensor_list *tensors, loom__buffer *buffer);

/* dtype of "FloatStorage" or "float32"; LOOM_DTYPE_COUNT for none. And back. */
loom_dtype loom__torch_storage_dtype(const char *name);
loom_dtype loom__torch_dtype(const char *name);
const char *loom__torch_storage_name(loom_dtype dtype);
const char *loom__torch_dtype_name(loom_dtype dtype);

#endif
