/* Mapped input and all-or-nothing output. A new file lives under a temporary name until it is complete and on the disk;
 * the rename is the only moment at which anybody sees it, so a stopped program leaves the old file or none, and a write
 * that failed is never followed by a rename. */
#include "format/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BUFFER_BYTES = 1 << 18 };

bool loom__widen(loom_dtype dtype, const void *data, int64_t first, int64_t count, int64_t *out) {
#define WIDEN(type)                                                                                                    \
    do {                                                                                                               \
        const unsigned char *from = (const unsigned char *)data + (size_t)first * sizeof(type);                        \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            type value;                                                                                                \
            memcpy(&value, from + (size_t)i * sizeof value, sizeof value);                                             \
            out[i] = value;                                                                                            \
        }                                                                                                              \
        return true;                                                                                                   \
    } while (0)
    switch (dtype) {
    case LOOM_I64:
        WIDEN(int64_t);
    case LOOM_I32:
        WIDEN(int32_t);
    case LOOM_I16:
        WIDEN(int16_t);
    case LOOM_U16:
        WIDEN(uint16_t);
    case LOOM_I8:
        WIDEN(int8_t);
    case LOOM_U8:
    case LOOM_BOOL:
        WIDEN(uint8_t);
    default:
        return false;
    }
#undef WIDEN
}

loom_status loom__errno_status(int error) {
    return error == ENOENT || error == ENOTDIR ? LOOM_ERR_NOT_FOUND : LOOM_ERR_IO;
}

loom_status loom__map_file(const char *path, loom__mapping *mapping) {
    struct stat status;
    /* A pipe that nobody writes to would keep a blocking open for ever. */
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0)
        return loom_fail(loom__errno_status(errno), "%s: cannot be opened: %s", path, strerror(errno));
    if (fstat(descriptor, &status) != 0) {
        int error = errno;
        close(descriptor);
        return loom_fail(LOOM_ERR_IO, "%s: cannot be opened: %s", path, strerror(error));
    }
    if (!S_ISREG(status.st_mode)) {
        close(descriptor);
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: is %s, expected a file", path,
            S_ISDIR(status.st_mode) ? "a directory" : "no regular file");
    }
    if (status.st_size == 0) {
        close(descriptor);
        *mapping = (loom__mapping){.data = (const unsigned char *)"", .bytes = 0};
        return LOOM_OK;
    }
    void *data = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, descriptor, 0);
    int error = errno;
    close(descriptor);
    if (data == MAP_FAILED)
        return loom_fail(
            LOOM_ERR_IO, "%s: cannot be mapped (%lld bytes): %s", path, (long long)status.st_size, strerror(error));
    *mapping = (loom__mapping){.data = data, .bytes = (size_t)status.st_size};
    return LOOM_OK;
}

void loom__unmap_file(loom__mapping *mapping) {
    if (mapping->bytes > 0)
        munmap((void *)(uintptr_t)mapping->data, mapping->bytes);
    *mapping = (loom__mapping){0};
}

char *loom__path_join(const char *a, const char *between, const char *b) {
    char *path = NULL;
    return asprintf(&path, "%s%s%s", a, between, b) < 0 ? NULL : path;
}

loom_status loom__new_file_create(const char *path, loom__new_file *file) {
    loom__new_file made = {.descriptor = -1};
    made.path = strdup(path);
    made.temporary = loom__path_join(path, "", ".tmp");
    made.buffer = malloc(BUFFER_BYTES);
    if (!made.path || !made.temporary || !made.buffer) {
        loom__new_file_destroy(&made);
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to write it", path);
    }
    made.descriptor = open(made.temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (made.descriptor < 0) {
        loom_status status = loom_fail(LOOM_ERR_IO, "%s: cannot be created: %s", made.temporary, strerror(errno));
        free(made.temporary); /* so that destroy does not remove what is not ours */
        made.temporary = NULL;
        loom__new_file_destroy(&made);
        return status;
    }
    *file = made;
    return LOOM_OK;
}

static loom_status check_sound(const loom__new_file *file) {
    if (file->failed != LOOM_OK)
        return loom_fail(file->failed, "%s: an earlier write failed", file->temporary);
    return LOOM_OK;
}

/* Fails for good. */
static loom_status fail_errno(loom__new_file *file, const char *what) {
    file->failed = loom_fail(LOOM_ERR_IO, "%s: %s failed: %s", file->temporary, what, strerror(errno));
    return file->failed;
}

static loom_status write_all(loom__new_file *file, const unsigned char *data, size_t bytes) {
    while (bytes > 0) {
        ssize_t done = write(file->descriptor, data, bytes);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return fail_errno(file, "writing");
        data += done;
        bytes -= (size_t)done;
    }
    return LOOM_OK;
}

loom_status loom__new_file_write(loom__new_file *file, const void *data, size_t bytes) {
    LOOM_TRY(check_sound(file));
    if (bytes == 0)
        return LOOM_OK;
    if (file->buffered + bytes > BUFFER_BYTES) {
        LOOM_TRY(write_all(file, file->buffer, file->buffered));
        file->buffered = 0;
    }
    if (bytes >= BUFFER_BYTES) {
        LOOM_TRY(write_all(file, data, bytes));
    } else {
        memcpy(file->buffer + file->buffered, data, bytes);
        file->buffered += bytes;
    }
    file->bytes += bytes;
    return LOOM_OK;
}

loom_status loom__new_file_sync(loom__new_file *file) {
    LOOM_TRY(check_sound(file));
    LOOM_TRY(write_all(file, file->buffer, file->buffered));
    file->buffered = 0;
    if (fsync(file->descriptor) != 0)
        return fail_errno(file, "flushing to the disk");
    int closed = close(file->descriptor);
    file->descriptor = -1;
    if (closed != 0)
        return fail_errno(file, "closing");
    return LOOM_OK;
}

/* A renamed file is durable only when its folder is; a file system that cannot do it is no reason to fail. */
static void sync_folder(const char *path) {
    const char *slash = strrchr(path, '/');
    char *folder = !slash ? strdup(".") : slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
    int descriptor = folder ? open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (descriptor >= 0) {
        (void)fsync(descriptor);
        close(descriptor);
    }
    free(folder);
}

loom_status loom__new_file_commit(loom__new_file *file) {
    LOOM_TRY(check_sound(file));
    if (rename(file->temporary, file->path) != 0) {
        file->failed =
            loom_fail(LOOM_ERR_IO, "%s: cannot be renamed to %s: %s", file->temporary, file->path, strerror(errno));
        return file->failed;
    }
    free(file->temporary);
    file->temporary = NULL;
    sync_folder(file->path);
    return LOOM_OK;
}

void loom__new_file_destroy(loom__new_file *file) {
    if (file->descriptor >= 0 && file->path)
        close(file->descriptor);
    if (file->temporary)
        unlink(file->temporary);
    free(file->path);
    free(file->temporary);
    free(file->buffer);
    *file = (loom__new_file){.descriptor = -1};
}
