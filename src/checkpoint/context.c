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

/* The run file, and what goes along of the Hugging Face directory that a model came from. */
static const char *const own[] = {LOOM__CONTEXT_FILE, LOOM__CONTEXT_FILE ".tmp", "config.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json", "merges.txt", "special_tokens_map.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json"};
enum { OWN = sizeof own / sizeof *own };

static bool is_own(const char *name) {
    bool found = strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
    for (size_t i = 0; i < OWN; i++)
        found = found || strcmp(name, own[i]) == 0;
    return found;
}

static loom_status make_folder(const char *path, char **folder) {
    *folder = loom__path_join(path, ".tmp/", LOOM__CONTEXT_FOLDER);
    if (!*folder)
        return no_memory(path);
    if (mkdir(*folder, 0777) != 0)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be made: %s", *folder, strerror(errno));
    return LOOM_OK;
}

loom_status loom__checkpoint_write_context(const char *path, const char *text, size_t length) {
    char *folder = NULL;
    loom_status status = make_folder(path, &folder);
    char *file = status ? NULL : loom__path_join(folder, "/", LOOM__CONTEXT_FILE);
    if (!status)
        status = file ? write_file(file, text, length) : no_memory(path);
    if (!status)
        status = sync_folder(folder);
    free(folder);
    free(file);
    return status;
}

static loom_status copy_file(const char *from, const char *to, const char *name) {
    char *source = loom__path_join(from, "/", name), *target = loom__path_join(to, "/", name);
    loom__mapping mapping = {0};
    loom_status status = source && target ? LOOM_OK : no_memory(from);
    bool there = !status && access(source, F_OK) == 0;
    if (there)
        status = loom__map_file(source, &mapping);
    if (there && !status)
        status = write_file(target, (const char *)mapping.data, mapping.bytes);
    loom__unmap_file(&mapping);
    free(source);
    free(target);
    return status;
}

loom_status loom__checkpoint_copy_context(const char *path, const char *context) {
    char *folder = NULL;
    loom_status status = make_folder(path, &folder);
    for (size_t i = 0; i < OWN && !status; i++)
        status = copy_file(context, folder, own[i]);
    if (!status)
        status = sync_folder(folder);
    free(folder);
    return status;
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
    char *path = loom__path_join(folder, "/", LOOM__CONTEXT_FOLDER);
    loom_status status = path ? LOOM_OK : no_memory(folder);
    for (size_t i = 0; i < OWN && !status; i++) {
        char *file = loom__path_join(path, "/", own[i]);
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
