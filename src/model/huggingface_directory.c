/* The directory of an export. It appears whole or not at all: everything is written into "PATH.tmp" beside it, which
 * takes the place of PATH at the end. Nothing that an export did not write is ever removed: a file is deleted by its
 * name from the list of names that an export gives, a directory only when that has left it empty. */
#include "model/huggingface_directory.h"
#include "format/file.h"
#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <megaloom/safetensors.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const companions[] = {"added_tokens.json", "chat_template.jinja", "generation_config.json",
    "merges.txt", "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "vocab.json"};
static const char *const weights[] = {"config.json", "model.safetensors", "model.safetensors.index.json",
    "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors"};

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
    return is_listed(plain, weights, sizeof weights / sizeof *weights) ||
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

static loom_status check_entry(const char *directory, const char *name, void *context) {
    int64_t *count = context;
    ++*count;
    if (!is_ours(name))
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

loom_status loom__hf_directory_check(const char *path) {
    struct stat found;
    if (!*path)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the Hugging Face directory is empty");
    if (lstat(path, &found) != 0)
        return errno == ENOENT ? LOOM_OK : loom_fail(LOOM_ERR_IO, "%s: cannot be looked at: %m", path);
    if (!S_ISDIR(found.st_mode))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: is there and is no directory: it is not replaced", path);
    int64_t count = 0;
    LOOM_TRY(for_entries(path, check_entry, &count));
    return count ? check_producer(path) : LOOM_OK;
}

static loom_status remove_entry(const char *directory, const char *name, void *context) {
    (void)context;
    char *path = is_ours(name) ? loom__path_join(directory, "/", name) : NULL;
    if (path)
        (void)unlink(path); /* what stays makes the rmdir fail, which is looked at */
    free(path);
    return LOOM_OK;
}

/* Nothing there is good as well. */
static loom_status remove_ours(const char *directory) {
    if (access(directory, F_OK) != 0)
        return LOOM_OK;
    LOOM_TRY(for_entries(directory, remove_entry, NULL));
    if (rmdir(directory) != 0)
        return loom_fail(LOOM_ERR_IO, "%s: left over, and cannot be removed: %m", directory);
    return LOOM_OK;
}

/* "a/b//" as "a/b", with an ending. */
static char *beside(const char *path, const char *ending) {
    char *made = loom__path_join(path, "", "");
    if (!made)
        return NULL;
    for (size_t length = strlen(made); length > 1 && made[length - 1] == '/'; length--)
        made[length - 1] = '\0';
    char *with = loom__path_join(made, "", ending);
    free(made);
    return with;
}

loom_status loom__hf_directory_begin(const char *path, char **temporary) {
    LOOM_TRY(loom__hf_directory_check(path));
    char *made = beside(path, ".tmp");
    if (!made)
        return no_memory(path);
    loom_status status = remove_ours(made);
    if (!status && mkdir(made, 0777) != 0)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be made: %m", made);
    if (status)
        free(made);
    else
        *temporary = made;
    return status;
}

static loom_status move(const char *from, const char *to) {
    return rename(from, to) == 0 ? LOOM_OK : loom_fail(LOOM_ERR_IO, "%s: cannot be renamed to %s: %m", from, to);
}

loom_status loom__hf_directory_commit(const char *path, const char *temporary) {
    /* Looked at again: somebody may have put a file there meanwhile. */
    LOOM_TRY(loom__hf_directory_check(path));
    char *plain = beside(path, ""), *old = beside(path, ".old");
    loom_status status = plain && old ? remove_ours(old) : no_memory(path);
    bool replaces = !status && access(plain, F_OK) == 0;
    if (replaces)
        status = move(plain, old);
    if (!status)
        status = move(temporary, plain);
    if (!status && replaces)
        status = remove_ours(old);
    free(plain);
    free(old);
    return status;
}

void loom__hf_directory_discard(const char *temporary) {
    if (temporary)
        (void)remove_ours(temporary);
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

/* A file of any other name is a tokenizer.json. */
static size_t tokenizer_of_folder(const char *folder, const char *name) {
    size_t count = sizeof tokenizer_files / sizeof *tokenizer_files;
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
