/* Text files to an indexed dataset: list the files first (so that the order is known, the same everywhere, and progress
 * has a whole), then read one, encode it, append it. Memory is bounded by the longest file. */
#include "base/text.h"
#include "format/file.h"

#include <dirent.h>
#include <errno.h>
#include <megaloom/data.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { MAX_DEPTH = 64 }; /* of directories: a loop of links ends here with an error */

typedef struct listing {
    char **paths;
    int64_t count, capacity;
    int64_t bytes; /* of all files */
} listing;

static loom_status no_memory(const char *path) {
    return loom_fail(LOOM_ERR_MEMORY, "%s: no memory", path);
}

static void free_listing(listing *files) {
    for (int64_t i = 0; i < files->count; i++)
        free(files->paths[i]);
    free(files->paths);
}

/* Takes over `path`. */
static loom_status append(listing *files, char *path, int64_t bytes) {
    if (files->count == files->capacity) {
        int64_t capacity = files->capacity ? 2 * files->capacity : 256;
        char **paths = realloc(files->paths, (size_t)capacity * sizeof *paths);
        if (!paths) {
            loom_status status = no_memory(path);
            free(path);
            return status;
        }
        files->paths = paths;
        files->capacity = capacity;
    }
    files->paths[files->count++] = path;
    files->bytes += bytes;
    return LOOM_OK;
}

static loom_status list_directory(const char *path, const char *suffix, int depth, listing *files);

/* An entry of a directory; takes over `path`. */
static loom_status list_entry(char *path, const char *suffix, int depth, listing *files) {
    struct stat status;
    loom_status result = LOOM_OK;
    if (stat(path, &status) != 0) {
        result = loom_fail(LOOM_ERR_IO, "%s: cannot be read: %s", path, strerror(errno));
    } else if (S_ISDIR(status.st_mode)) {
        result = list_directory(path, suffix, depth + 1, files);
    } else if (S_ISREG(status.st_mode) && (!suffix || loom__ends_with(path, suffix))) {
        return append(files, path, status.st_size);
    }
    free(path);
    return result;
}

static loom_status list_directory(const char *path, const char *suffix, int depth, listing *files) {
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
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static loom_status list_input(const char *input, const char *suffix, listing *files) {
    struct stat status;
    if (stat(input, &status) != 0)
        return loom_fail(loom__errno_status(errno), "%s: cannot be read: %s", input, strerror(errno));
    if (!S_ISDIR(status.st_mode)) {
        char *path = strdup(input);
        return path ? append(files, path, status.st_size) : no_memory(input);
    }
    int64_t first = files->count;
    LOOM_TRY(list_directory(input, suffix, 0, files));
    if (files->count > first)
        qsort(files->paths + first, (size_t)(files->count - first), sizeof *files->paths, compare_paths);
    return LOOM_OK;
}

typedef struct work {
    const loom_data_preprocess_config *config;
    const loom_tokenizer *tokenizer;
    loom_indexed_writer *writer;
    int64_t *tokens; /* of one document */
    size_t capacity;
    loom_data_preprocess_result result;
} work;

static loom_status encode_document(work *job, const char *path, const loom__mapping *text) {
    size_t room = loom_tokenizer_room(job->tokenizer, text->bytes);
    size_t wanted = room < SIZE_MAX ? room + 1 : room; /* and the end of document */
    if (wanted > job->capacity) {
        int64_t *tokens = wanted > PTRDIFF_MAX / sizeof *tokens ? NULL : realloc(job->tokens, wanted * sizeof *tokens);
        if (!tokens)
            return no_memory(path);
        job->tokens = tokens;
        job->capacity = wanted;
    }
    const loom_tokenizer *tokenizer = job->tokenizer;
    size_t count = 0;
    LOOM_TRY(tokenizer->encode(
        tokenizer->context, (const char *)text->data, text->bytes, job->tokens, job->capacity - 1, &count));
    job->result.bytes += (int64_t)text->bytes;
    if (count == 0 || text->bytes == 0) { /* a tokenizer's begin of text alone is no document */
        job->result.empty++;
        return LOOM_OK;
    }
    if (tokenizer->eod >= 0)
        job->tokens[count++] = tokenizer->eod;
    LOOM_TRY(loom_indexed_writer_add_tokens(job->writer, job->tokens, (int64_t)count, 0));
    LOOM_TRY(loom_indexed_writer_end_document(job->writer));
    job->result.documents++;
    job->result.tokens += (int64_t)count;
    return LOOM_OK;
}

static loom_status write_documents(work *job, const listing *files) {
    for (int64_t i = 0; i < files->count; i++) {
        loom__mapping text;
        LOOM_TRY(loom__map_file(files->paths[i], &text));
        loom_status status = encode_document(job, files->paths[i], &text);
        loom__unmap_file(&text);
        if (status != LOOM_OK)
            return loom_fail_context(status, "%s: ", files->paths[i]);
        if (job->config->progress && (i % 64 == 63 || i + 1 == files->count))
            job->config->progress(
                job->config->progress_context, job->result.documents, job->result.bytes, files->bytes);
    }
    if (job->result.documents == 0)
        return loom_fail(LOOM_ERR_NOT_FOUND, "no text found: %lld files%s%s%s, %lld of them empty",
            (long long)files->count, job->config->suffix ? " ending in '" : "",
            job->config->suffix ? job->config->suffix : "", job->config->suffix ? "'" : "",
            (long long)job->result.empty);
    return loom_indexed_writer_finish(job->writer);
}

loom_status loom_data_preprocess_text(const loom_data_preprocess_config *config, loom_data_preprocess_result *result) {
    if (config->input_count < 1 || !config->inputs || !config->output_prefix || !*config->output_prefix)
        return loom_fail(LOOM_ERR_ARGUMENT, "preprocessing needs at least one input and an output prefix");
    work job = {.config = config, .tokenizer = config->tokenizer ? config->tokenizer : loom_tokenizer_byte()};
    job.result.dtype = loom_indexed_dtype_for_vocabulary(job.tokenizer->vocab_size);
    listing files = {0};
    loom_status status = LOOM_OK;
    for (int64_t i = 0; i < config->input_count && status == LOOM_OK; i++)
        status = list_input(config->inputs[i], config->suffix, &files);
    if (status == LOOM_OK)
        status = loom_indexed_writer_create(config->output_prefix, job.result.dtype, false, &job.writer);
    if (status == LOOM_OK)
        status = write_documents(&job, &files);
    loom_indexed_writer_destroy(job.writer);
    free(job.tokens);
    free_listing(&files);
    if (status == LOOM_OK)
        *result = job.result;
    return status;
}
