/* The context of a checkpoint lies in a folder of its own, as NeMo has it, and becomes part of the checkpoint by the
 * same rename as the rest. The invariant: only files that were written here are ever removed. */
#include "checkpoint/context.h"
#include "format/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static loom_status no_memory(const char *path) {
    return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for the names of its files", path);
}

static loom_status write_file(const char *path, const char *text, size_t length) {
    loom__new_file file = {.descriptor = -1};
    loom_status status = loom__new_file_create(path, &file);
    if (status == LOOM_OK)
        status = loom__new_file_write(&file, text, length);
    if (status == LOOM_OK)
        status = loom__new_file_sync(&file);
    if (status == LOOM_OK)
        status = loom__new_file_commit(&file);
    loom__new_file_destroy(&file);
    return status;
}

static loom_status sync_folder(const char *folder) {
    int descriptor = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool failed = descriptor < 0 || (fsync(descriptor) != 0 && errno != EINVAL && errno != ENOTSUP);
    int error = errno;
    if (descriptor >= 0)
        close(descriptor);
    return failed ? loom_fail(LOOM_ERR_IO, "%s: flushing to the disk failed: %s", folder, strerror(error)) : LOOM_OK;
}

loom_status loom__checkpoint_write_context(const char *path, const char *text, size_t length) {
    char *folder = loom__path_join(path, ".tmp/", LOOM__CONTEXT_FOLDER);
    char *file = folder ? loom__path_join(folder, "/", LOOM__CONTEXT_FILE) : NULL;
    loom_status status = file ? LOOM_OK : no_memory(path);
    if (!status && mkdir(folder, 0777) != 0)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be made: %s", folder, strerror(errno));
    if (!status)
        status = write_file(file, text, length);
    if (!status)
        status = sync_folder(folder);
    free(folder);
    free(file);
    return status;
}

static bool is_own(const char *name) {
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || strcmp(name, LOOM__CONTEXT_FILE) == 0 ||
           strcmp(name, LOOM__CONTEXT_FILE ".tmp") == 0;
}

loom_status loom__context_check(const char *folder) {
    char *path = loom__path_join(folder, "/", LOOM__CONTEXT_FOLDER);
    DIR *entries = path ? opendir(path) : NULL;
    loom_status status = path ? LOOM_OK : no_memory(folder);
    if (path && !entries && errno != ENOENT)
        status = loom_fail(LOOM_ERR_STATE, "%s: cannot be opened: %s: nothing was removed", path, strerror(errno));
    for (const struct dirent *entry; entries && !status && (entry = readdir(entries));)
        if (!is_own(entry->d_name))
            status = loom_fail(
                LOOM_ERR_STATE, "%s: holds %s, which no checkpoint has: nothing was removed", path, entry->d_name);
    if (entries)
        closedir(entries);
    free(path);
    return status;
}

loom_status loom__context_remove(const char *folder) {
    static const char *const names[] = {
        LOOM__CONTEXT_FOLDER "/" LOOM__CONTEXT_FILE ".tmp", LOOM__CONTEXT_FOLDER "/" LOOM__CONTEXT_FILE};
    char *path = loom__path_join(folder, "/", LOOM__CONTEXT_FOLDER);
    loom_status status = path ? LOOM_OK : no_memory(folder);
    for (size_t i = 0; i < sizeof names / sizeof *names && !status; i++) {
        char *file = loom__path_join(folder, "/", names[i]);
        if (!file)
            status = no_memory(folder);
        else if (unlink(file) != 0 && errno != ENOENT)
            status = loom_fail(LOOM_ERR_IO, "%s: cannot be removed: %s", file, strerror(errno));
        free(file);
    }
    if (!status && rmdir(path) != 0 && errno != ENOENT)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be removed: %s", path, strerror(errno));
    free(path);
    return status;
}
