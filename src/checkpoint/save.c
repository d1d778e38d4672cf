/* From an unfinished folder to a checkpoint. All files are on the disk before the one rename that makes them a
 * checkpoint, and the pointer to it moves after that: whoever is stopped at any instant leaves the checkpoint that was
 * there, or the new one, and never a folder under its final name that is not whole. */
#include "checkpoint/context.h"
#include "checkpoint/writer.h"
#include "format/torch_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static loom_status no_memory(const char *path) {
    return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for the names of its files", path);
}

/* A folder's entries, and what it is called in, are durable. */
static loom_status sync_folder(const char *path) {
    int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be opened: %s", path, strerror(errno));
    int failed = fsync(descriptor) != 0 && errno != EINVAL && errno != ENOTSUP; /* not every file system can */
    int error = errno;
    close(descriptor);
    return failed ? loom_fail(LOOM_ERR_IO, "%s: flushing to the disk failed: %s", path, strerror(error)) : LOOM_OK;
}

static loom_status sync_parent(const char *path) {
    const char *slash = strrchr(path, '/');
    char *parent = !slash ? strdup(".") : slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
    loom_status status = parent ? sync_folder(parent) : no_memory(path);
    free(parent);
    return status;
}

/* ---- removing ---- */

/* Files that a save makes, finished or not. */
static bool is_own_name(const char *name) {
    static const char *const names[] = {".metadata", "common.pt", "metadata.json"};
    size_t length = strlen(name);
    if (length > 4 && strcmp(name + length - 4, ".tmp") == 0)
        length -= 4;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i]) == length && memcmp(names[i], name, length) == 0)
            return true;
    long long rank, number;
    int end = 0;
    return sscanf(name, "__%lld_%lld.distcp%n", &rank, &number, &end) == 2 && (size_t)end == length;
}

static bool is_dots(const char *name) {
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

static loom_status check_own(const char *path, DIR *folder) {
    for (const struct dirent *entry; (entry = readdir(folder));)
        if (strcmp(entry->d_name, LOOM__CONTEXT_FOLDER) == 0)
            LOOM_TRY(loom__context_check(path));
        else if (!is_dots(entry->d_name) && !is_own_name(entry->d_name))
            return loom_fail(
                LOOM_ERR_STATE, "%s: holds %s, which no checkpoint has: nothing was removed", path, entry->d_name);
    rewinddir(folder);
    return LOOM_OK;
}

static loom_status remove_files(const char *path, DIR *folder) {
    int descriptor = dirfd(folder);
    LOOM_TRY(check_own(path, folder));
    if (unlinkat(descriptor, "metadata.json", 0) != 0 && errno != ENOENT)
        return loom_fail(LOOM_ERR_IO, "%s/metadata.json: cannot be removed: %s", path, strerror(errno));
    LOOM_TRY(loom__context_remove(path));
    rewinddir(folder);
    for (const struct dirent *entry; (entry = readdir(folder));)
        if (!is_dots(entry->d_name) && unlinkat(descriptor, entry->d_name, 0) != 0 && errno != ENOENT)
            return loom_fail(LOOM_ERR_IO, "%s/%s: cannot be removed: %s", path, entry->d_name, strerror(errno));
    return LOOM_OK;
}

loom_status loom__checkpoint_remove(const char *path) {
    DIR *folder = opendir(path);
    if (!folder && errno == ENOENT)
        return LOOM_OK;
    if (!folder)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be opened: %s", path, strerror(errno));
    loom_status status = remove_files(path, folder);
    closedir(folder);
    LOOM_TRY(status);
    if (rmdir(path) != 0)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be removed: %s", path, strerror(errno));
    return LOOM_OK;
}

/* ---- saving ---- */

static loom_status temporary_of(const char *path, char **temporary) {
    size_t length = strlen(path);
    if (length == 0 || path[length - 1] == '/')
        return loom_fail(LOOM_ERR_ARGUMENT, "the checkpoint's path '%s' is empty or ends with a slash", path);
    *temporary = loom__path_join(path, "", ".tmp");
    return *temporary ? LOOM_OK : no_memory(path);
}

static loom_status make_empty(const char *temporary) {
    LOOM_TRY(loom__checkpoint_remove(temporary));
    if (mkdir(temporary, 0777) != 0)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be made: %s", temporary, strerror(errno));
    return LOOM_OK;
}

loom_status loom__checkpoint_begin(const char *path) {
    char *temporary = NULL;
    LOOM_TRY(temporary_of(path, &temporary));
    loom_status status = make_empty(temporary);
    free(temporary);
    return status;
}

loom_status loom__checkpoint_abandon(const char *path) {
    char *temporary = NULL;
    LOOM_TRY(temporary_of(path, &temporary));
    loom_status status = loom__checkpoint_remove(temporary);
    free(temporary);
    return status;
}

static loom_status write_file(const char *folder, const char *name, const void *data, size_t bytes) {
    loom__new_file file = {.descriptor = -1};
    char *path = loom__path_join(folder, "/", name);
    loom_status status = path ? loom__new_file_create(path, &file) : no_memory(folder);
    if (status == LOOM_OK)
        status = loom__new_file_write(&file, data, bytes);
    if (status == LOOM_OK)
        status = loom__new_file_sync(&file);
    if (status == LOOM_OK)
        status = loom__new_file_commit(&file);
    loom__new_file_destroy(&file);
    free(path);
    return status;
}

loom_status loom__checkpoint_common_create(const char *path, const loom_value *common, loom__new_file *out) {
    loom__new_file file = {.descriptor = -1};
    uint64_t bytes = 0;
    if (common->kind != LOOM_VALUE_DICT)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: its common state is a %s, expected a dict", path,
            loom_value_kind_name(common->kind));
    char *name = loom__path_join(path, ".tmp/", "common.pt");
    loom_status status = name ? loom__new_file_create(name, &file) : no_memory(path);
    if (status == LOOM_OK)
        status = loom__torch_write(&file, common, &bytes);
    free(name);
    if (status == LOOM_OK)
        *out = file;
    else
        loom__new_file_destroy(&file);
    return status;
}

static loom_status check_replaceable(const char *path) {
    DIR *folder = opendir(path);
    if (!folder)
        return loom_fail(LOOM_ERR_IO, "%s: is there and cannot be replaced: %s", path, strerror(errno));
    loom_status status = check_own(path, folder);
    closedir(folder);
    return status;
}

/* A folder is exchanged with what stands under its name in one step, and the old one removed then. */
static loom_status rename_folder(const char *temporary, const char *path) {
    struct stat status;
    if (lstat(path, &status) == 0) {
        LOOM_TRY(check_replaceable(path));
        if (renameat2(AT_FDCWD, temporary, AT_FDCWD, path, RENAME_EXCHANGE) != 0)
            return loom_fail(LOOM_ERR_IO, "%s: cannot be exchanged with %s: %s", temporary, path, strerror(errno));
        LOOM_TRY(sync_parent(path));
        return loom__checkpoint_remove(temporary);
    }
    if (rename(temporary, path) != 0)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be renamed to %s: %s", temporary, path, strerror(errno));
    return sync_parent(path);
}

static loom_status commit(
    const char *path, const char *temporary, const void *pickle, size_t bytes, loom__new_file *common) {
    static const char config[] = "{\"sharded_backend\": \"torch_dist\", \"sharded_backend_version\": 1, "
                                 "\"common_backend\": \"torch\", \"common_backend_version\": 1}";
    LOOM_TRY(write_file(temporary, ".metadata", pickle, bytes));
    LOOM_TRY(loom__new_file_sync(common));
    LOOM_TRY(loom__new_file_commit(common));
    LOOM_TRY(write_file(temporary, "metadata.json", config, sizeof config - 1));
    LOOM_TRY(sync_folder(temporary));
    return rename_folder(temporary, path);
}

loom_status loom__checkpoint_commit_created(
    const char *path, const loom__checkpoint_description *descriptions, int64_t count, loom__new_file *common) {
    void *pickle = NULL;
    size_t bytes = 0;
    char *temporary = NULL;
    LOOM_TRY(loom__checkpoint_make_metadata(path, descriptions, count, &pickle, &bytes));
    loom_status status = temporary_of(path, &temporary);
    if (status == LOOM_OK)
        status = commit(path, temporary, pickle, bytes, common);
    free(temporary);
    free(pickle);
    return status;
}

loom_status loom__checkpoint_commit(
    const char *path, const loom__checkpoint_description *descriptions, int64_t count, const loom_value *common) {
    loom__new_file file = {.descriptor = -1};
    LOOM_TRY(loom__checkpoint_common_create(path, common, &file));
    loom_status status = loom__checkpoint_commit_created(path, descriptions, count, &file);
    loom__new_file_destroy(&file);
    return status;
}

static loom_status write_iteration(const char *folder, const char *name, int64_t iteration) {
    char text[24];
    int bytes = snprintf(text, sizeof text, "%lld", (long long)iteration);
    return write_file(folder, name, text, (size_t)bytes);
}

loom_status loom__checkpoint_set_latest(const char *folder, int64_t iteration) {
    return write_iteration(folder, "latest_checkpointed_iteration.txt", iteration);
}

loom_status loom__checkpoint_set_best(const char *folder, int64_t iteration) {
    return write_iteration(folder, "best_checkpointed_iteration.txt", iteration);
}
