/* Lists the files of text before any is read, so that their order is known and the same everywhere, and progress has a
 * whole. Links are followed, hidden files are skipped; a loop of links ends with an error. */
#include "data/text_files.h"
#include "base/text.h"
#include "format/file.h"

#include <dirent.h>
#include <errno.h>
#include <glob.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { MAX_DEPTH = 64 }; /* of directories: a loop of links ends here with an error */

static loom_status no_memory(const char *path) {
    return loom_fail(LOOM_ERR_MEMORY, "%s: no memory", path);
}

void loom__text_files_free(loom__text_files *files) {
    for (int64_t i = 0; i < files->count; i++)
        free(files->files[i].path);
    free(files->files);
    *files = (loom__text_files){0};
}

/* Takes over `path`. */
static loom_status append(loom__text_files *files, char *path, const struct stat *found) {
    if (files->count == files->capacity) {
        int64_t capacity = files->capacity ? 2 * files->capacity : 256;
        loom__text_file *grown = realloc(files->files, (size_t)capacity * sizeof *grown);
        if (!grown) {
            loom_status status = no_memory(path);
            free(path);
            return status;
        }
        files->files = grown;
        files->capacity = capacity;
    }
    int64_t changed = (int64_t)found->st_mtim.tv_sec * 1000000000 + found->st_mtim.tv_nsec;
    files->files[files->count++] = (loom__text_file){.path = path,
        .bytes = found->st_size,
        .changed = changed,
        .device = (uint64_t)found->st_dev,
        .number = (uint64_t)found->st_ino};
    files->bytes += found->st_size;
    return LOOM_OK;
}

static loom_status list_directory(const char *path, const char *suffix, int depth, loom__text_files *files);

/* An entry of a directory; takes over `path`. */
static loom_status list_entry(char *path, const char *suffix, int depth, loom__text_files *files) {
    struct stat status;
    loom_status result = LOOM_OK;
    if (stat(path, &status) != 0) {
        result = loom_fail(LOOM_ERR_IO, "%s: cannot be read: %s", path, strerror(errno));
    } else if (S_ISDIR(status.st_mode)) {
        result = list_directory(path, suffix, depth + 1, files);
    } else if (S_ISREG(status.st_mode) && (!suffix || loom__ends_with(path, suffix))) {
        return append(files, path, &status);
    }
    free(path);
    return result;
}

static loom_status list_directory(const char *path, const char *suffix, int depth, loom__text_files *files) {
    if (depth > MAX_DEPTH)
        return loom_fail(
            LOOM_ERR_IO, "%s: is nested more than %d directories deep: do its links form a loop?", path, MAX_DEPTH);
    DIR *directory = opendir(path);
    if (!directory)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be read: %s", path, strerror(errno));
    loom_status status = LOOM_OK;
    struct dirent *entry;
    errno = 0;
    while (status == LOOM_OK && (entry = readdir(directory)) != NULL) {
        if (entry->d_name[0] == '.')
            continue;
        char *full = loom__path_join(path, loom__ends_with(path, "/") ? "" : "/", entry->d_name);
        status = full ? list_entry(full, suffix, depth, files) : no_memory(path);
        errno = 0;
    }
    if (status == LOOM_OK && errno != 0)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be read: %s", path, strerror(errno));
    closedir(directory);
    return status;
}

static int compare_paths(const void *a, const void *b) {
    return strcmp(((const loom__text_file *)a)->path, ((const loom__text_file *)b)->path);
}

static loom_status add_path(const char *path, const struct stat *found, const char *suffix, loom__text_files *files) {
    if (S_ISREG(found->st_mode)) {
        char *copy = strdup(path);
        return copy ? append(files, copy, found) : no_memory(path);
    }
    if (!S_ISDIR(found->st_mode)) /* opening a pipe could wait for ever, and it cannot be read twice */
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: is no regular file, expected a file or a folder", path);
    int64_t first = files->count;
    LOOM_TRY(list_directory(path, suffix, 0, files));
    if (files->count > first)
        qsort(files->files + first, (size_t)(files->count - first), sizeof *files->files, compare_paths);
    return LOOM_OK;
}

loom_status loom__text_files_add(const char *input, const char *suffix, loom__text_files *files) {
    struct stat found;
    if (stat(input, &found) == 0)
        return add_path(input, &found, suffix, files);
    int error = errno;
    glob_t matches;
    if (strpbrk(input, "*?[") == NULL || glob(input, 0, NULL, &matches) != 0)
        return loom_fail(loom__errno_status(error), "%s: cannot be read: %s", input, strerror(error));
    loom_status status = LOOM_OK;
    for (size_t i = 0; i < matches.gl_pathc && status == LOOM_OK; i++) {
        if (stat(matches.gl_pathv[i], &found) != 0)
            status =
                loom_fail(loom__errno_status(errno), "%s: cannot be read: %s", matches.gl_pathv[i], strerror(errno));
        else
            status = add_path(matches.gl_pathv[i], &found, suffix, files);
    }
    globfree(&matches);
    return status;
}

loom_status loom__text_files_check(const loom__text_files *files) {
    static const char *const compressed[] = {".gz", ".zst", ".bz2", ".xz", ".zip"};
    for (int64_t i = 0; i < files->count; i++)
        for (size_t k = 0; k < sizeof compressed / sizeof *compressed; k++)
            if (loom__ends_with(files->files[i].path, compressed[k]))
                return loom_fail(LOOM_ERR_UNSUPPORTED, "%s: not supported yet: compressed text, there is: plain files",
                    files->files[i].path);
    return LOOM_OK;
}

void loom__text_files_drop(const char *path, loom__text_files *files) {
    struct stat found;
    if (stat(path, &found) != 0)
        return;
    int64_t kept = 0;
    for (int64_t i = 0; i < files->count; i++) {
        loom__text_file *file = &files->files[i];
        if (file->device == (uint64_t)found.st_dev && file->number == (uint64_t)found.st_ino) {
            files->bytes -= file->bytes;
            free(file->path);
        } else {
            files->files[kept++] = *file;
        }
    }
    files->count = kept;
}
