/* Reading and writing safetensors files, one or a set of shards.
 *
 * Reading maps the files and checks every field at open: what opens is sound, so that no later call can meet a bad
 * offset. No function here is collective; an open file may be read by many threads at once. Files must not shrink while
 * they are open (the data is mapped, not copied).
 *
 * Errors: LOOM_ERR_NOT_FOUND (no such file or tensor), LOOM_ERR_IO (cannot be read or written), LOOM_ERR_FORMAT (the
 * file breaks the format: the message names file, field, found, expected), LOOM_ERR_UNSUPPORTED (a dtype of the format
 * that Megaloom does not have), LOOM_ERR_ARGUMENT, LOOM_ERR_STATE, LOOM_ERR_MEMORY. */
#ifndef MEGALOOM_SAFETENSORS_H
#define MEGALOOM_SAFETENSORS_H

#include <megaloom/types.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { LOOM_SAFETENSORS_MAX_DIMS = 8 };

typedef struct loom_safetensors loom_safetensors;

/* A tensor of an open file; all pointers live as long as the file is open. */
typedef struct loom_safetensors_tensor {
    const char *name;
    const char *path; /* the file (shard) that holds it */
    loom_dtype dtype;
    int dims;                                 /* 0 = a scalar */
    int64_t shape[LOOM_SAFETENSORS_MAX_DIMS]; /* row-major; shape[dims…] are 1 */
    int64_t elements;                         /* product of the shape; may be 0 */
    const void *data;                         /* little-endian elements; not necessarily aligned */
    size_t bytes;                             /* elements * size of the dtype */
} loom_safetensors_tensor;

/* Opens, by what `path` is:
 * - a .safetensors file;
 * - an index ("….safetensors.index.json"): all shards it names, which must lie in the index's own directory and
 *   together hold exactly the tensors that the index lists, each in the shard it says;
 * - a directory: its model.safetensors, or else its model.safetensors.index.json, as transformers does.
 *
 * Close with loom_safetensors_close. */
LOOM_API loom_status loom_safetensors_open(const char *path, loom_safetensors **file);
/* Unmaps and frees; NULL is accepted. */
LOOM_API void loom_safetensors_close(loom_safetensors *file);

/* Number of tensors. */
LOOM_API int64_t loom_safetensors_count(const loom_safetensors *file);
/* Tensor number `index` in [0, count), in order of shard and then of place in the file; NULL outside that range. */
LOOM_API const loom_safetensors_tensor *loom_safetensors_get(const loom_safetensors *file, int64_t index);
/* The tensor of that name, or LOOM_ERR_NOT_FOUND naming the file, the tensor and the nearest name there is. */
LOOM_API loom_status loom_safetensors_find(
    const loom_safetensors *file, const char *name, const loom_safetensors_tensor **tensor);
/* True when there is a tensor of that name; writes no error record. */
LOOM_API bool loom_safetensors_has(const loom_safetensors *file, const char *name);
/* A value of the `__metadata__` of the (first) file, or NULL. */
LOOM_API const char *loom_safetensors_metadata(const loom_safetensors *file, const char *key);

/* out[i] = element first+i of the flattened tensor as fp32, i in [0, count). F64 (rounded to nearest), F32, F16, BF16;
 * other dtypes are LOOM_ERR_ARGUMENT, as is a range outside the tensor. */
LOOM_API loom_status loom_safetensors_read_f32(
    const loom_safetensors_tensor *tensor, int64_t first, int64_t count, float *out);
/* The same as int64, from I64, I32, I16, U16, I8, U8, BOOL. */
LOOM_API loom_status loom_safetensors_read_i64(
    const loom_safetensors_tensor *tensor, int64_t first, int64_t count, int64_t *out);

/* Writing: create, describe all tensors, then give the data in the order of the descriptions in pieces of any size,
 * then finish. Everything goes to `path`.tmp, which finish flushes to disk and renames: `path` is either the old file
 * or the whole new one. After a call that failed with LOOM_ERR_IO every later one fails too: what the file holds is
 * then unknown. */
typedef struct loom_safetensors_writer loom_safetensors_writer;

/* A writer of `path` (copied); nothing is there under that name until finish. loom_safetensors_writer_destroy. */
LOOM_API loom_status loom_safetensors_writer_create(const char *path, loom_safetensors_writer **writer);
/* An entry of `__metadata__`; before the first write. A key given twice is LOOM_ERR_ARGUMENT. */
LOOM_API loom_status loom_safetensors_writer_metadata(
    loom_safetensors_writer *writer, const char *key, const char *value);
/* Describes the next tensor; before the first write. dims in [0, 8], shape [dims] >= 0, borrowed for the call. */
LOOM_API loom_status loom_safetensors_writer_add(
    loom_safetensors_writer *writer, const char *name, loom_dtype dtype, int dims, const int64_t *shape);
/* The next `bytes` bytes of data (little-endian), of this or of several tensors. The first call fixes the header. */
LOOM_API loom_status loom_safetensors_writer_write(loom_safetensors_writer *writer, const void *data, size_t bytes);
/* Checks that all data was given (LOOM_ERR_STATE otherwise), makes the file durable and visible. Then destroy. */
LOOM_API loom_status loom_safetensors_writer_finish(loom_safetensors_writer *writer);
/* Frees; an unfinished file is removed. NULL is accepted. */
LOOM_API void loom_safetensors_writer_destroy(loom_safetensors_writer *writer);

#ifdef __cplusplus
}
#endif
#endif
