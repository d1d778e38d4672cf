/* The directory of an export. It appears whole or not at all: everything is written into "PATH.tmp" beside it, which
 * takes the place of PATH at the end; what was at PATH stands at "PATH.old" for that moment. Nothing that an export did
 * not write is ever removed. A "PATH.tmp" is cleared away only while it holds the mark of an unfinished export, which
 * goes when all is written; a "PATH.old" only by the call that made it. A file is deleted by its name from the list of
 * names that an export gives, a directory only when that has left it empty. */
#include "model/huggingface_directory.h"
#include "base/text.h"
#include "format/file.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <megaloom/safetensors.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const companions[] = {"added_tokens.json", "chat_template.jinja", "generation_config.json",
    "merges.txt", "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "vocab.json"};
static const char *const weights[] = {"config.json", "model.safetensors", "model.safetensors.index.json",
    "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors"};

/* In PATH.tmp from its first moment until all is written; locked by the export that is at work. */
static const char mark[] = ".megaloom-unfinished";

static bool is_listed(const char *name, const char *const *patterns, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (fnmatch(patterns[i], name, 0) == 0)
            return true;
    return false;
}

/* Whether an export gives files that name, or its temporary form. */
static bool is_ours(const char *name) {
    char plain[NAME_MAX + 1];
    size_t length = strlen(name);
    if (length >= sizeof plain)
        return false;
    strcpy(plain, name);
    if (length > 4 && strcmp(plain + length - 4, ".tmp") == 0)
        plain[length - 4] = '\0';
    return strcmp(plain, mark) == 0 || is_listed(plain, weights, sizeof weights / sizeof *weights) ||
           is_listed(plain, companions, sizeof companions / sizeof *companions);
}

static loom_status no_memory(const char *path) {
    return loom_fail(LOOM_ERR_MEMORY, "%s: out of memory for a path", path);
}

/* Calls each(directory, name) for the entries. */
static loom_status for_entries(
    const char *directory, loom_status (*each)(const char *directory, const char *name, void *context), void *context) {
    DIR *handle = opendir(directory);
    if (!handle)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be read: %m", directory);
    loom_status status = LOOM_OK;
    for (struct dirent *entry; !status && (entry = readdir(handle));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            status = each(directory, entry->d_name, context);
    closedir(handle);
    return status;
}

/* Whether something is there, be it a link that leads nowhere. */
static loom_status look(const char *path, struct stat *found, bool *is_there) {
    *is_there = lstat(path, found) == 0;
    return *is_there || errno == ENOENT ? LOOM_OK : loom_fail(LOOM_ERR_IO, "%s: cannot be looked at: %m", path);
}

static loom_status check_entry(const char *directory, const char *name, void *context) {
    int64_t *count = context;
    struct stat found;
    bool is_there = false;
    char *path = loom__path_join(directory, "/", name);
    loom_status status = path ? look(path, &found, &is_there) : no_memory(directory);
    free(path);
    LOOM_TRY(status);
    ++*count;
    if (!is_ours(name) || (is_there && !S_ISREG(found.st_mode)))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "%s: holds %s, which no export wrote: it is not replaced; give another place, or remove it", directory,
            name);
    return LOOM_OK;
}

static loom_status check_producer(const char *path) {
    loom_safetensors *file;
    bool ours = false;
    if (loom_safetensors_open(path, &file) == LOOM_OK) {
        const char *producer = loom_safetensors_metadata(file, "producer");
        ours = producer && strcmp(producer, LOOM__HF_PRODUCER) == 0;
        loom_safetensors_close(file);
    }
    if (!ours)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "%s: holds a model that this program did not write: it is not replaced; give another place, or remove it",
            path);
    return LOOM_OK;
}

/* The neighbours of a directory that an export uses. */
typedef struct places {
    char *plain, *temporary, *old; /* "a/b//" is "a/b", "a/b.tmp", "a/b.old" */
} places;

static void places_free(places *of) {
    free(of->plain);
    free(of->temporary);
    free(of->old);
}

static loom_status places_make(const char *path, places *made) {
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/')
        length--;
    *made = (places){.plain = strndup(path, length)};
    if (!made->plain)
        return no_memory(path);
    const char *slash = strrchr(made->plain, '/'), *name = slash ? slash + 1 : made->plain;
    if (!*path)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the Hugging Face directory is empty");
    if (!*name || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "%s: has no name of its own: expected the name of the Hugging Face directory to make, such as %s%smodel",
            path, made->plain, *name ? "/" : "");
    made->temporary = loom__path_join(made->plain, "", ".tmp");
    made->old = loom__path_join(made->plain, "", ".old");
    return made->temporary && made->old ? LOOM_OK : no_memory(path);
}

/* *replaces: what is at PATH has to go. */
static loom_status check_target(const places *of, bool *replaces) {
    struct stat found;
    bool is_there;
    int64_t count = 0;
    *replaces = false;
    LOOM_TRY(look(of->plain, &found, &is_there));
    if (!is_there)
        return LOOM_OK;
    if (!S_ISDIR(found.st_mode))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: is there and is no directory: it is not replaced", of->plain);
    LOOM_TRY(for_entries(of->plain, check_entry, &count));
    if (count == 0)
        return LOOM_OK;
    LOOM_TRY(check_producer(of->plain));
    LOOM_TRY(look(of->old, &found, &is_there));
    if (is_there)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "%s: is there, where the model at %s would stand while it is replaced: give another place, or move it away",
            of->old, of->plain);
    *replaces = true;
    return LOOM_OK;
}

/* A file system that knows no locks does not keep exports from working. */
static loom_status lock_mark(const char *directory, const char *path, int *lock) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (descriptor < 0)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be opened: %m", path);
    if (flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        close(descriptor);
        return loom_fail(
            LOOM_ERR_ARGUMENT, "%s: another export is writing there: give another place, or wait for it", directory);
    }
    *lock = descriptor;
    return LOOM_OK;
}

/* Nothing, an empty directory, or what an export that was stopped has left. */
static loom_status check_temporary(const places *of, bool *is_there) {
    struct stat found;
    bool is_marked = false;
    int64_t count = 0;
    LOOM_TRY(look(of->temporary, &found, is_there));
    if (!*is_there)
        return LOOM_OK;
    if (!S_ISDIR(found.st_mode))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "%s: is there and is no directory: an export to %s is written there first; move it away", of->temporary,
            of->plain);
    LOOM_TRY(for_entries(of->temporary, check_entry, &count));
    char *path = loom__path_join(of->temporary, "/", mark);
    loom_status status = path ? look(path, &found, &is_marked) : no_memory(of->plain);
    int lock = -1;
    if (!status && is_marked)
        status = lock_mark(of->temporary, path, &lock);
    if (lock >= 0)
        close(lock);
    free(path);
    if (!status && count > 0 && !is_marked)
        status = loom_fail(LOOM_ERR_ARGUMENT,
            "%s: is there and is no unfinished export: an export to %s is written there first; move it away",
            of->temporary, of->plain);
    return status;
}

static loom_status check(const places *of, bool *has_left) {
    bool replaces;
    LOOM_TRY(check_target(of, &replaces));
    return check_temporary(of, has_left);
}

loom_status loom__hf_directory_check(const char *path) {
    places of;
    bool has_left;
    loom_status status = places_make(path, &of);
    if (!status)
        status = check(&of, &has_left);
    places_free(&of);
    return status;
}

/* The mark last, so that a removal that is stopped can be taken up again. */
static loom_status remove_entry(const char *directory, const char *name, void *context) {
    (void)context;
    char *path = is_ours(name) && strcmp(name, mark) != 0 ? loom__path_join(directory, "/", name) : NULL;
    if (path)
        (void)unlink(path); /* what stays makes the rmdir fail, which is looked at */
    free(path);
    return LOOM_OK;
}

static loom_status remove_mark(const char *directory) {
    char *path = loom__path_join(directory, "/", mark);
    if (!path)
        return no_memory(directory);
    loom_status status =
        unlink(path) == 0 || errno == ENOENT ? LOOM_OK : loom_fail(LOOM_ERR_IO, "%s: cannot be removed: %m", path);
    free(path);
    return status;
}

static loom_status remove_ours(const char *directory) {
    LOOM_TRY(for_entries(directory, remove_entry, NULL));
    LOOM_TRY(remove_mark(directory));
    return rmdir(directory) == 0 ? LOOM_OK
                                 : loom_fail(LOOM_ERR_IO, "%s: left over, and cannot be removed: %m", directory);
}

static loom_status mark_and_lock(const char *temporary, int *lock) {
    char *path = loom__path_join(temporary, "/", mark);
    if (!path)
        return no_memory(temporary);
    loom_status status = loom__hf_directory_write(temporary, mark, "");
    if (!status)
        status = lock_mark(temporary, path, lock);
    free(path);
    return status;
}

static loom_status begin(const places *of, int *lock) {
    bool has_left;
    LOOM_TRY(check(of, &has_left));
    if (has_left)
        LOOM_TRY(remove_ours(of->temporary));
    if (mkdir(of->temporary, 0777) != 0)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be made: %m", of->temporary);
    return mark_and_lock(of->temporary, lock);
}

loom_status loom__hf_directory_begin(const char *path, char **temporary, int *lock) {
    places of;
    loom_status status = places_make(path, &of);
    if (!status)
        status = begin(&of, lock);
    if (!status) {
        *temporary = of.temporary;
        of.temporary = NULL;
    }
    places_free(&of);
    return status;
}

static loom_status move(const char *from, const char *to) {
    return rename(from, to) == 0 ? LOOM_OK : loom_fail(LOOM_ERR_IO, "%s: cannot be renamed to %s: %m", from, to);
}

/* The directory is whole: whatever happens from here on, it is kept. */
static loom_status put_in_place(const places *of, bool *replaces) {
    /* Looked at again: somebody may have put a file there meanwhile. */
    LOOM_TRY(check_target(of, replaces));
    if (*replaces)
        LOOM_TRY(move(of->plain, of->old));
    return move(of->temporary, of->plain);
}

static loom_status commit(const places *of) {
    bool replaces;
    LOOM_TRY(remove_mark(of->temporary));
    loom_status status = put_in_place(of, &replaces);
    if (status)
        return loom_fail_context(status, "the model is whole and stays at %s: ", of->temporary);
    return replaces ? remove_ours(of->old) : LOOM_OK;
}

loom_status loom__hf_directory_commit(const char *path) {
    places of;
    loom_status status = places_make(path, &of);
    if (!status)
        status = commit(&of);
    places_free(&of);
    return status;
}

void loom__hf_directory_discard(const char *temporary) {
    char *path = temporary ? loom__path_join(temporary, "/", mark) : NULL;
    if (path && access(path, F_OK) == 0)
        (void)remove_ours(temporary);
    free(path);
}

loom_status loom__hf_directory_write(const char *directory, const char *name, const char *text) {
    char *path = loom__path_join(directory, "/", name);
    if (!path)
        return no_memory(directory);
    loom__new_file file = {.descriptor = -1};
    loom_status status = loom__new_file_create(path, &file);
    free(path);
    LOOM_TRY(status);
    status = loom__new_file_write(&file, text, strlen(text));
    if (!status)
        status = loom__new_file_sync(&file);
    if (!status)
        status = loom__new_file_commit(&file);
    loom__new_file_destroy(&file);
    return status;
}

static loom_status copy(const char *from, const char *to) {
    loom__mapping mapping;
    loom__new_file file = {.descriptor = -1};
    LOOM_TRY(loom__map_file(from, &mapping));
    loom_status status = loom__new_file_create(to, &file);
    if (!status)
        status = loom__new_file_write(&file, mapping.data, mapping.bytes);
    if (!status)
        status = loom__new_file_sync(&file);
    if (!status)
        status = loom__new_file_commit(&file);
    loom__new_file_destroy(&file);
    loom__unmap_file(&mapping);
    return status;
}

/* The file is optional. */
static loom_status copy_into(const char *source, const char *name, const char *directory) {
    char *from = loom__path_join(source, "/", name), *to = loom__path_join(directory, "/", name);
    loom_status status = LOOM_OK;
    if (!from || !to)
        status = no_memory(directory);
    else if (access(from, F_OK) == 0)
        status = copy(from, to);
    free(from);
    free(to);
    return status;
}

loom_status loom__hf_directory_copy_companions(const char *source, const char *directory) {
    for (size_t i = 0; i < sizeof companions / sizeof *companions; i++)
        LOOM_TRY(copy_into(source, companions[i], directory));
    return LOOM_OK;
}

/* Which of them a tokenizer that was opened by `path` lies in: [i][0], and its name in a Hugging Face directory. */
static const char *const tokenizer_files[][2] = {{"tokenizer.json", "tokenizer.json"}, {"vocab.json", "vocab.json"},
    {"encoder.json", "vocab.json"}, {"tokenizer.model", "tokenizer.model"}};
/* What goes along, where it is there. */
static const char *const beside_tokenizers[][2] = {{"merges.txt", "merges.txt"}, {"vocab.bpe", "merges.txt"},
    {"special_tokens_map.json", "special_tokens_map.json"}, {"tokenizer_config.json", "tokenizer_config.json"}};

/* A file of any other name is a tokenizer.json, or by its ending a model. */
static size_t tokenizer_of_folder(const char *folder, const char *name) {
    size_t count = sizeof tokenizer_files / sizeof *tokenizer_files;
    if (name && loom__ends_with(name, ".model"))
        return count - 1;
    for (size_t i = 0; i < count; i++) {
        char *path = name ? NULL : loom__path_join(folder, "/", tokenizer_files[i][0]);
        bool found = name ? strcmp(name, tokenizer_files[i][0]) == 0 : path && access(path, F_OK) == 0;
        free(path);
        if (found)
            return i;
    }
    return 0;
}

static loom_status copy_as(const char *from, const char *directory, const char *name) {
    char *to = loom__path_join(directory, "/", name);
    loom_status status = from && to ? copy(from, to) : no_memory(directory);
    free(to);
    return status;
}

loom_status loom__hf_directory_copy_tokenizer(const char *path, const char *directory) {
    struct stat found;
    bool is_folder = stat(path, &found) == 0 && S_ISDIR(found.st_mode);
    const char *slash = strrchr(path, '/');
    char *folder = is_folder ? strdup(path) : slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    if (!folder)
        return no_memory(directory);
    size_t which = tokenizer_of_folder(folder, is_folder ? NULL : slash ? slash + 1 : path);
    char *file = is_folder ? loom__path_join(folder, "/", tokenizer_files[which][0]) : strdup(path);
    loom_status status = copy_as(file, directory, tokenizer_files[which][1]);
    free(file);
    for (size_t i = 0; !status && i < sizeof beside_tokenizers / sizeof *beside_tokenizers; i++) {
        file = loom__path_join(folder, "/", beside_tokenizers[i][0]);
        if (!file || access(file, F_OK) == 0)
            status = copy_as(file, directory, beside_tokenizers[i][1]);
        free(file);
    }
    free(folder);
    return status;
}
