/* Files as the format readers and writers want them: mapped read-only, or written beside their name and renamed. */
#ifndef FORMAT_FILE_H
#define FORMAT_FILE_H

#include <megaloom/types.h>
#include <string.h>

/* Little-endian loads from any address (the formats do not align their fields, and the hosts are little-endian). */
_Static_assert(
    __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the formats are read in place: a little-endian host is needed");
static inline uint64_t loom__load_u64(const void *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}
static inline int64_t loom__load_i64(const void *at) {
    int64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}
static inline int32_t loom__load_i32(const void *at) {
    int32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* out[i] = element first+i of the integer array at `data` (any address), i in [0, count); false when dtype is no
 * integer. */
bool loom__widen(loom_dtype dtype, const void *data, int64_t first, int64_t count, int64_t *out);

/* A regular file mapped read-only; an empty file has a valid pointer and 0 bytes. */
typedef struct loom__mapping {
    const unsigned char *data;
    size_t bytes;
} loom__mapping;

/* LOOM_ERR_NOT_FOUND for a path that leads nowhere, else LOOM_ERR_IO. */
loom_status loom__errno_status(int error);
loom_status loom__map_file(const char *path, loom__mapping *mapping);
/* A cleared mapping is accepted. */
void loom__unmap_file(loom__mapping *mapping);

/* A file that is written to `path`.tmp in a stream and renamed to `path` by commit. After a failure its content is
 * unknown, so that every later call but destroy fails with the same status. Until then the temporary file is locked: a
 * second writer of the same path, in this process or another, is refused (LOOM_ERR_IO). */
typedef struct loom__new_file {
    char *path, *temporary;
    int descriptor; /* -1 once committed */
    unsigned char *buffer;
    size_t room, buffered;
    bool direct;        /* written past the page cache: at multiples of its block, and so only whole buffers */
    uint64_t bytes;     /* written so far, the buffered ones included */
    loom_status failed; /* what the first failed write, sync or commit returned: nothing may follow it */
} loom__new_file;

loom_status loom__new_file_create(const char *path, loom__new_file *file);
/* The same for a large file that nobody reads soon: it goes past the page cache, where the file system can do that, in
 * blocks of 8 MiB, until it is synced. */
loom_status loom__new_file_create_direct(const char *path, loom__new_file *file);
/* LOOM_ERR_ARGUMENT where something stands at `path` that a file must not take the place of, such as a directory, a
 * device or a pipe; create does the same, this is for those who have long work to do before. */
loom_status loom__new_file_check(const char *path);
/* Goes on behind the first `bytes` of a temporary file that was left; LOOM_ERR_NOT_FOUND where it is missing or
 * shorter.
 */
loom_status loom__new_file_resume(const char *path, uint64_t bytes, loom__new_file *file);
loom_status loom__new_file_write(loom__new_file *file, const void *data, size_t bytes);
/* Writes out and flushes to the disk; the file still has its temporary name. */
loom_status loom__new_file_sync(loom__new_file *file);
/* Hands all that was written so far to `take`, in order, in parts of a whole number of 8-byte elements but the last.
 * The file may be written to further. */
loom_status loom__new_file_read_back(
    loom__new_file *file, loom_status (*take)(void *context, const void *data, size_t bytes), void *context);
/* Renames a synced file to its name and makes the name durable. */
loom_status loom__new_file_commit(loom__new_file *file);
/* Frees; what was not committed is removed. A cleared struct is accepted. */
void loom__new_file_destroy(loom__new_file *file);
/* Frees and leaves the temporary file, for loom__new_file_resume. */
void loom__new_file_abandon(loom__new_file *file);

/* a + b as a new path joined by `between` ("/", ""), or NULL when memory is short. Free with free. */
char *loom__path_join(const char *a, const char *between, const char *b);

#endif
