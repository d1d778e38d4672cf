/* The journal of preprocessing: how far the input has become output that lies on the disk. It holds only if the work is
 * the same, so it begins with a fingerprint of all that decides about the output: configuration, tokenizer, and paths,
 * sizes and times of the input files. It is written after what it speaks of, and removed before anything else is
 * written under the same names, so that it never promises more than there is. */
#include "data/preprocess.h"
#include "format/file.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static uint64_t mix(uint64_t hash, const void *data, size_t bytes) { /* FNV-1a */
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static uint64_t mix_number(uint64_t hash, int64_t number) {
    return mix(hash, &number, sizeof number);
}

static uint64_t mix_text(uint64_t hash, const char *text) {
    return text ? mix(hash, text, strlen(text) + 1) : mix_number(hash, -1);
}

/* A tokenizer that was read from a file is named after it. */
static uint64_t mix_tokenizer(uint64_t hash, const loom_tokenizer *tokenizer) {
    struct stat found;
    hash = mix_text(hash, tokenizer->name);
    hash = mix_number(mix_number(hash, tokenizer->vocab_size), tokenizer->eod);
    if (stat(tokenizer->name, &found) != 0)
        return hash;
    hash = mix_number(mix_number(hash, found.st_size), found.st_mtim.tv_sec);
    return mix_number(hash, found.st_mtim.tv_nsec);
}

static uint64_t fingerprint(const loom__preprocess *job) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    hash = mix_tokenizer(hash, job->tokenizer);
    hash = mix_number(mix_number(hash, job->config.append_eod), (int64_t)job->config.format);
    hash = mix_text(mix_number(hash, job->config.strict), job->config.separator);
    for (int64_t k = 0; k < job->key_count; k++)
        hash = mix_text(hash, job->keys[k]);
    for (int64_t i = 0; i < job->files.count; i++) {
        const loom__text_file *file = &job->files.files[i];
        hash = mix_number(mix_number(mix_text(hash, file->path), file->bytes), file->changed);
    }
    return hash;
}

static char *path_of(const loom__preprocess *job) {
    return loom__path_join(job->config.output_prefix, "", ".preprocess");
}

static const char header[] = "megaloom preprocess 1\nfingerprint %016llx\nplace %lld %lld %lld\n"
                             "done %lld %lld %lld %lld %lld\n";
static const char mark[] = "dataset %lld %lld %lld\n";

static bool read_open(FILE *file, const loom__preprocess *job, loom__journal *journal, int64_t *other_bytes) {
    unsigned long long print;
    long long n[8];
    if (fscanf(file, header, &print, &n[0], &n[1], &n[2], &n[3], &n[4], &n[5], &n[6], &n[7]) != 9)
        return false;
    if (print != fingerprint(job)) {
        *other_bytes = n[7];
        return false;
    }
    journal->place = (loom__text_place){.file = n[0], .offset = n[1], .line = n[2]};
    journal->result = (loom_data_preprocess_result){
        .documents = n[3], .empty = n[4], .invalid = n[5], .tokens = n[6], .bytes = n[7], .dtype = job->dtype};
    if (n[0] < 0 || n[0] > job->files.count || n[1] < 0 || n[2] < 0 || n[7] < 0)
        return false;
    for (int64_t k = 0; k < job->key_count; k++) {
        if (fscanf(file, mark, &n[0], &n[1], &n[2]) != 3 || n[0] < 0 || n[1] < 0 || n[2] < 0)
            return false;
        journal->marks[k] = (loom__indexed_mark){.bin_bytes = (uint64_t)n[0], .sequences = n[1], .documents = n[2]};
    }
    char end[4] = "";
    return fscanf(file, "%3s", end) == 1 && strcmp(end, "end") == 0;
}

bool loom__journal_read(const loom__preprocess *job, loom__journal *journal, int64_t *other_bytes) {
    *other_bytes = 0;
    char *path = path_of(job);
    FILE *file = path ? fopen(path, "re") : NULL;
    free(path);
    if (!file)
        return false;
    bool good = read_open(file, job, journal, other_bytes);
    fclose(file);
    return good;
}

static loom_status put(loom__new_file *file, const char *format, ...) LOOM_PRINTF(2, 3);
static loom_status put(loom__new_file *file, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    int bytes = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return loom__new_file_write(file, text, (size_t)bytes);
}

static loom_status write_open(loom__new_file *file, const loom__preprocess *job, const loom__journal *journal) {
    const loom_data_preprocess_result *done = &journal->result;
    LOOM_TRY(put(file, header, (unsigned long long)fingerprint(job), (long long)journal->place.file,
        (long long)journal->place.offset, (long long)journal->place.line, (long long)done->documents,
        (long long)done->empty, (long long)done->invalid, (long long)done->tokens, (long long)done->bytes));
    for (int64_t k = 0; k < job->key_count; k++)
        LOOM_TRY(put(file, mark, (long long)journal->marks[k].bin_bytes, (long long)journal->marks[k].sequences,
            (long long)journal->marks[k].documents));
    LOOM_TRY(put(file, "end\n"));
    LOOM_TRY(loom__new_file_sync(file));
    return loom__new_file_commit(file);
}

loom_status loom__journal_write(const loom__preprocess *job, const loom__journal *journal) {
    char *path = path_of(job);
    if (!path)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory", job->config.output_prefix);
    loom__new_file file;
    loom_status status = loom__new_file_create(path, &file);
    free(path);
    LOOM_TRY(status);
    status = write_open(&file, job, journal);
    loom__new_file_destroy(&file);
    return status;
}

loom_status loom__journal_remove(const loom__preprocess *job) {
    char *path = path_of(job);
    if (!path)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory", job->config.output_prefix);
    loom_status status = LOOM_OK;
    if (unlink(path) != 0 && errno != ENOENT && errno != ENOTDIR)
        status = loom_fail(LOOM_ERR_IO, "%s: cannot be removed: %s", path, strerror(errno));
    free(path);
    return status;
}
