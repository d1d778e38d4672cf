/* The archives that torch.save writes: a pickle, and the storages of its tensors. */
#ifndef FORMAT_TORCH_FILE_H
#define FORMAT_TORCH_FILE_H

#include "format/pickle.h"
#include "format/zip.h"

/* Whether the checksums of storages are compared; that of the pickle always is. */
typedef enum loom__torch_check { LOOM__TORCH_TRUST, LOOM__TORCH_CHECK } loom__torch_check;

/* The value of an archive in memory. Tensors' data is row-major; it points into the given bytes, which must live as
 * long as the pool, where it lies there so. */
loom_status loom__torch_read(const char *what, const void *data, size_t bytes, loom__torch_check check,
    loom_value_pool *pool, const loom_value **value);

/* Appends an archive to an open file; *bytes is its length. */
loom_status loom__torch_write(loom__new_file *file, const loom_value *value, uint64_t *bytes);

#endif
