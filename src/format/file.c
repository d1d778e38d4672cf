/* Mapped input and all-or-nothing output. A new file lives under a temporary name until it is complete and on the disk;
 * the rename is the only moment at which anybody sees it, so a stopped program leaves the old file or none, and a write
 * that failed is never followed by a rename. */
#include "format/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BUFFER_BYTES = 1 << 18, DIRECT_BYTES = 1 << 23, DIRECT_BLOCK = 4096 };

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

loom_status loom__new_file_check(const char *path) {
    struct stat found;
    if (stat(path, &found) != 0 || S_ISREG(found.st_mode))
        return LOOM_OK;
    return loom_fail(LOOM_ERR_ARGUMENT, "%s: is %s, expected a name for a file", path,
        S_ISDIR(found.st_mode) ? "a directory" : "no regular file");
}

/* Frees what was made and leaves the temporary file, which is not ours. */
static loom_status fail_open(loom__new_file *made, loom_status status) {
    free(made->temporary);
    made->temporary = NULL;
    loom__new_file_destroy(made);
    return status;
}

static loom_status make_new_file(const char *path, size_t room, loom__new_file *file) {
    LOOM_TRY(loom__new_file_check(path));
    loom__new_file made = {.descriptor = -1, .room = room};
    made.path = strdup(path);
    made.temporary = loom__path_join(path, "", ".tmp");
    made.buffer = aligned_alloc(DIRECT_BLOCK, room);
    if (!made.path || !made.temporary || !made.buffer)
        return fail_open(&made, loom_fail(LOOM_ERR_MEMORY, "%s: no memory to write it", path));
    *file = made;
    return LOOM_OK;
}

/* Opens the temporary file for this writer alone. A lock is won on an open file, and until then another writer may have
 * renamed that file away: then it is no longer the one under the name, and must not be touched. */
static loom_status open_locked(const char *temporary, int flags, int *descriptor) {
    for (;;) {
        int opened = open(temporary, O_RDWR | O_CLOEXEC | flags, 0666);
        if (opened < 0)
            return loom_fail(flags & O_CREAT ? LOOM_ERR_IO : loom__errno_status(errno), "%s: cannot be %s: %s",
                temporary, flags & O_CREAT ? "created" : "opened", strerror(errno));
        if (flock(opened, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
            close(opened);
            return loom_fail(LOOM_ERR_IO, "%s: is being written by another process", temporary);
        }
        struct stat held, named;
        if (fstat(opened, &held) == 0 && stat(temporary, &named) == 0 && held.st_ino == named.st_ino &&
            held.st_dev == named.st_dev) {
            *descriptor = opened;
            return LOOM_OK;
        }
        close(opened);
    }
}

static loom_status create(const char *path, size_t room, loom__new_file *file) {
    loom__new_file made;
    LOOM_TRY(make_new_file(path, room, &made));
    loom_status status = open_locked(made.temporary, O_CREAT, &made.descriptor);
    if (status == LOOM_OK && ftruncate(made.descriptor, 0) != 0)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be emptied: %s", made.temporary, strerror(errno));
    if (status != LOOM_OK)
        return fail_open(&made, status);
    *file = made;
    return LOOM_OK;
}

loom_status loom__new_file_create(const char *path, loom__new_file *file) {
    return create(path, BUFFER_BYTES, file);
}

static bool set_direct(const loom__new_file *file, bool on) {
    int flags = fcntl(file->descriptor, F_GETFL);
    return flags >= 0 && fcntl(file->descriptor, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

loom_status loom__new_file_create_direct(const char *path, loom__new_file *file) {
    LOOM_TRY(create(path, DIRECT_BYTES, file));
    file->direct = set_direct(file, true);
    return LOOM_OK;
}

loom_status loom__new_file_resume(const char *path, uint64_t bytes, loom__new_file *file) {
    loom__new_file made;
    LOOM_TRY(make_new_file(path, BUFFER_BYTES, &made));
    loom_status status = open_locked(made.temporary, 0, &made.descriptor);
    struct stat found;
    if (status == LOOM_OK && fstat(made.descriptor, &found) != 0)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be read: %s", made.temporary, strerror(errno));
    if (status == LOOM_OK && (uint64_t)found.st_size < bytes)
        status = loom_fail(LOOM_ERR_NOT_FOUND, "%s: has %lld bytes, expected at least %llu", made.temporary,
            (long long)found.st_size, (unsigned long long)bytes);
    if (status == LOOM_OK &&
        (ftruncate(made.descriptor, (off_t)bytes) != 0 || lseek(made.descriptor, (off_t)bytes, SEEK_SET) < 0))
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be cut to %llu bytes: %s", made.temporary,
            (unsigned long long)bytes, strerror(errno));
    if (status != LOOM_OK)
        return fail_open(&made, status);
    made.bytes = bytes;
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
        /* A file system may accept the flag and refuse the write, or write a part that is no whole block. */
        if (file->direct && (done < 0 ? errno == EINVAL : done % DIRECT_BLOCK != 0)) {
            file->direct = false;
            if (!set_direct(file, false))
                return fail_errno(file, "writing");
            done = done < 0 ? 0 : done;
        }
        if (done < 0)
            return fail_errno(file, "writing");
        data += done;
        bytes -= (size_t)done;
    }
    return LOOM_OK;
}

/* All that is buffered. Behind a last part that is no whole block nothing can be written directly. */
static loom_status flush(loom__new_file *file) {
    size_t whole = file->direct ? file->buffered / DIRECT_BLOCK * DIRECT_BLOCK : file->buffered;
    LOOM_TRY(write_all(file, file->buffer, whole));
    if (whole < file->buffered) {
        if (file->direct && !set_direct(file, false))
            return fail_errno(file, "writing");
        file->direct = false;
        LOOM_TRY(write_all(file, file->buffer + whole, file->buffered - whole));
    }
    file->buffered = 0;
    return LOOM_OK;
}

/* Through the buffer, which is written when it is full. */
static loom_status write_direct(loom__new_file *file, const unsigned char *data, size_t bytes) {
    file->bytes += bytes;
    while (bytes > 0) {
        size_t part = file->room - file->buffered < bytes ? file->room - file->buffered : bytes;
        memcpy(file->buffer + file->buffered, data, part);
        file->buffered += part;
        data += part;
        bytes -= part;
        if (file->buffered == file->room)
            LOOM_TRY(flush(file));
    }
    return LOOM_OK;
}

loom_status loom__new_file_write(loom__new_file *file, const void *data, size_t bytes) {
    LOOM_TRY(check_sound(file));
    if (bytes == 0)
        return LOOM_OK;
    if (file->direct)
        return write_direct(file, data, bytes);
    if (file->buffered + bytes > file->room)
        LOOM_TRY(flush(file));
    if (bytes >= file->room) {
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
    LOOM_TRY(flush(file));
    return fsync(file->descriptor) != 0 ? fail_errno(file, "flushing to the disk") : LOOM_OK;
}

loom_status loom__new_file_read_back(
    loom__new_file *file, loom_status (*take)(void *context, const void *data, size_t bytes), void *context) {
    LOOM_TRY(check_sound(file));
    if (file->buffered == file->bytes)
        return file->bytes > 0 ? take(context, file->buffer, file->buffered) : LOOM_OK;
    LOOM_TRY(flush(file));
    if (file->direct && !set_direct(file, false))
        return fail_errno(file, "reading back");
    file->direct = false;
    for (uint64_t at = 0; at < file->bytes;) {
        size_t wanted = file->bytes - at < file->room ? (size_t)(file->bytes - at) : file->room;
        for (size_t have = 0; have < wanted;) {
            ssize_t got = pread(file->descriptor, file->buffer + have, wanted - have, (off_t)(at + have));
            if (got < 0 && errno == EINTR)
                continue;
            if (got == 0)
                errno = EIO;
            if (got <= 0)
                return fail_errno(file, "reading back");
            have += (size_t)got;
        }
        LOOM_TRY(take(context, file->buffer, wanted));
        at += wanted;
    }
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
    /* Its lock held until the name was changed, so that no other writer got at it in between. */
    close(file->descriptor);
    file->descriptor = -1;
    sync_folder(file->path);
    return LOOM_OK;
}

void loom__new_file_abandon(loom__new_file *file) {
    free(file->temporary);
    file->temporary = NULL;
    loom__new_file_destroy(file);
}

void loom__new_file_destroy(loom__new_file *file) {
    if (file->temporary)
        unlink(file->temporary);
    if (file->descriptor >= 0 && file->path)
        close(file->descriptor);
    free(file->path);
    free(file->temporary);
    free(file->buffer);
    *file = (loom__new_file){.descriptor = -1};
}
