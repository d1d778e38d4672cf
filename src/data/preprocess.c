/* Text to indexed datasets. One thread, the caller's, reads blocks of documents and writes what workers made of them,
 * in the order in which they were read; the blocks go round in a ring, so that there are never more than a few for each
 * worker, and the output does not depend on how many workers there are. After every so many bytes of text, all that was
 * written is brought to the disk and the journal says so. */
#include "data/preprocess.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { JOURNAL_BYTES = 64 << 20, MOST_WORKERS = 1024, BLOCKS_A_WORKER = 3 };

/* ---- the ring ---- */

typedef struct ring {
    const loom__preprocess *job;
    loom__encoded_block *blocks; /* number n lies at n modulo count */
    bool *done;                  /* [count] encoded, not yet written */
    int64_t count;
    pthread_mutex_t lock;
    pthread_cond_t work, result; /* something to encode, or stop; something done */
    int64_t read, taken;         /* blocks handed out, and taken by workers */
    bool stop;
    pthread_t *threads;
    int64_t thread_count;
} ring;

static void *encode_blocks(void *argument) {
    ring *r = argument;
    loom__encode_scratch scratch = {0};
    pthread_mutex_lock(&r->lock);
    for (;;) {
        while (!r->stop && r->taken == r->read)
            pthread_cond_wait(&r->work, &r->lock);
        if (r->stop)
            break;
        int64_t at = r->taken++ % r->count;
        pthread_mutex_unlock(&r->lock);
        loom__encode_block(r->job, &r->blocks[at], &scratch);
        pthread_mutex_lock(&r->lock);
        r->done[at] = true;
        pthread_cond_signal(&r->result);
    }
    pthread_mutex_unlock(&r->lock);
    loom__encode_scratch_free(&scratch);
    return NULL;
}

static void ring_destroy(ring *r) {
    pthread_mutex_lock(&r->lock);
    r->stop = true;
    pthread_cond_broadcast(&r->work);
    pthread_mutex_unlock(&r->lock);
    for (int64_t i = 0; i < r->thread_count; i++)
        pthread_join(r->threads[i], NULL);
    for (int64_t i = 0; r->blocks && i < r->count; i++)
        loom__encoded_block_free(&r->blocks[i]);
    pthread_cond_destroy(&r->work);
    pthread_cond_destroy(&r->result);
    pthread_mutex_destroy(&r->lock);
    free(r->blocks);
    free(r->done);
    free(r->threads);
}

/* Leaves what ring_destroy can take down, also when it fails. */
static loom_status ring_create(const loom__preprocess *job, int64_t workers, ring *r) {
    *r = (ring){.job = job, .count = BLOCKS_A_WORKER * workers};
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->work, NULL);
    pthread_cond_init(&r->result, NULL);
    r->blocks = calloc((size_t)r->count, sizeof *r->blocks);
    r->done = calloc((size_t)r->count, sizeof *r->done);
    r->threads = calloc((size_t)workers, sizeof *r->threads);
    if (!r->blocks || !r->done || !r->threads)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for %lld workers", (long long)workers);
    for (; r->thread_count < workers; r->thread_count++) {
        int error = pthread_create(&r->threads[r->thread_count], NULL, encode_blocks, r);
        if (error != 0)
            return loom_fail(LOOM_ERR_IO, "worker %lld of %lld cannot be started: %s", (long long)r->thread_count,
                (long long)workers, strerror(error));
    }
    return LOOM_OK;
}

/* ---- writing ---- */

typedef struct work {
    loom__preprocess job;
    loom_indexed_writer *writers[LOOM__PREPROCESS_KEYS];
    loom__text_reader *reader;
    loom__journal at;                 /* what was written */
    int64_t journal_bytes, journaled; /* the distance between journals; the text done at the last one */
    bool has_journal;
} work;

static char *prefix_of(const loom__preprocess *job, int64_t key) {
    char *prefix = NULL;
    int made = job->key_count == 1 ? asprintf(&prefix, "%s", job->config.output_prefix)
                                   : asprintf(&prefix, "%s_%s_document", job->config.output_prefix, job->keys[key]);
    return made < 0 ? NULL : prefix;
}

/* All writers at the marks of the journal, or, without one, at the beginning. */
static loom_status open_writers(work *w, bool resume) {
    loom_status status = LOOM_OK;
    for (int64_t k = 0; k < w->job.key_count && status == LOOM_OK; k++) {
        char *prefix = prefix_of(&w->job, k);
        if (!prefix)
            return loom_fail(LOOM_ERR_MEMORY, "no memory to write datasets");
        status = resume ? loom__indexed_writer_resume(prefix, w->job.dtype, false, &w->at.marks[k], &w->writers[k])
                        : loom_indexed_writer_create(prefix, w->job.dtype, false, &w->writers[k]);
        free(prefix);
    }
    return status;
}

static void abandon_writers(work *w) {
    for (int64_t k = 0; k < w->job.key_count; k++) {
        loom__indexed_writer_abandon(w->writers[k]);
        w->writers[k] = NULL;
    }
}

/* Goes on where an earlier run was stopped, where there is enough of it. */
static loom_status begin(work *w) {
    loom__journal nothing = {.result = {.dtype = w->job.dtype}};
    if (loom__journal_read(&w->job, &w->at, &nothing.result.discarded_bytes)) {
        loom_status status = open_writers(w, true);
        if (status == LOOM_OK) {
            w->at.result.resumed_bytes = w->journaled = w->at.result.bytes;
            w->has_journal = true;
            return LOOM_OK;
        }
        abandon_writers(w);
        if (status != LOOM_ERR_NOT_FOUND)
            return status;
    }
    w->at = nothing;
    LOOM_TRY(open_writers(w, false));
    return loom__journal_remove(&w->job);
}

static loom_status write_journal(work *w) {
    for (int64_t k = 0; k < w->job.key_count; k++)
        LOOM_TRY(loom__indexed_writer_mark(w->writers[k], &w->at.marks[k]));
    LOOM_TRY(loom__journal_write(&w->job, &w->at));
    w->has_journal = true;
    w->journaled = w->at.result.bytes;
    return LOOM_OK;
}

static loom_status write_key(work *w, const loom__encoded_block *block, int64_t key) {
    const unsigned char *elements = block->elements[key].data;
    for (int64_t i = 0; i < block->text.count; i++) {
        const int64_t *lengths = block->lengths + i * w->job.key_count;
        if (lengths[0] == LOOM__DOCUMENT_SKIPPED)
            continue;
        if (lengths[key] > 0)
            LOOM_TRY(loom_indexed_writer_add(w->writers[key], elements, lengths[key], 0));
        if (lengths[key] > 0)
            elements += (size_t)lengths[key] * w->job.size;
        LOOM_TRY(loom_indexed_writer_end_document(w->writers[key]));
        w->at.result.tokens += lengths[key];
        w->at.result.documents += key == 0;
    }
    return LOOM_OK;
}

static int64_t bytes_before(const loom__text_files *files, const loom__text_place *place) {
    int64_t bytes = place->offset;
    for (int64_t i = 0; i < place->file; i++)
        bytes += files->files[i].bytes;
    return bytes;
}

static loom_status write_block(work *w, const loom__encoded_block *block) {
    const loom_data_preprocess_config *config = &w->job.config;
    if (block->status != LOOM_OK)
        return loom_fail(block->status, "%s", block->error);
    for (int64_t k = 0; k < w->job.key_count; k++)
        LOOM_TRY(write_key(w, block, k));
    w->at.place = block->text.end;
    w->at.result.empty += block->empty;
    w->at.result.invalid += block->invalid;
    w->at.result.bytes = bytes_before(&w->job.files, &w->at.place);
    for (int i = 0; config->skipped && i < block->message_count; i++)
        config->skipped(config->progress_context, block->messages[i]);
    if (config->progress)
        config->progress(config->progress_context, w->at.result.documents, w->at.result.bytes, w->job.files.bytes);
    return w->at.result.bytes - w->journaled >= w->journal_bytes ? write_journal(w) : LOOM_OK;
}

static loom_status write_all(work *w, ring *r) {
    int64_t read = 0, written = 0;
    for (bool end = false; !end || written < read;) {
        pthread_mutex_lock(&r->lock);
        bool room = !end && read - written < r->count;
        while (!room && !r->done[written % r->count])
            pthread_cond_wait(&r->result, &r->lock);
        bool ready = written < read && r->done[written % r->count];
        if (ready)
            r->done[written % r->count] = false;
        pthread_mutex_unlock(&r->lock);
        if (ready) {
            LOOM_TRY(write_block(w, &r->blocks[written % r->count]));
            written++;
            continue;
        }
        loom_status status = loom__text_reader_next(w->reader, &r->blocks[read % r->count].text);
        end = status == LOOM_END;
        if (end)
            continue;
        LOOM_TRY(status);
        read++;
        pthread_mutex_lock(&r->lock);
        r->read = read;
        pthread_cond_signal(&r->work);
        pthread_mutex_unlock(&r->lock);
    }
    return LOOM_OK;
}

static loom_status finish(work *w) {
    const loom_data_preprocess_result *done = &w->at.result;
    const char *suffix = w->job.config.suffix;
    if (done->documents == 0)
        return loom_fail(LOOM_ERR_NOT_FOUND,
            "%s%s: no text found: %lld file%s%s%s%s, %lld empty and %lld invalid documents", w->job.config.inputs[0],
            w->job.config.input_count > 1 ? " and further inputs" : "", (long long)w->job.files.count,
            w->job.files.count == 1 ? "" : "s", suffix ? " ending in '" : "", suffix ? suffix : "", suffix ? "'" : "",
            (long long)done->empty, (long long)done->invalid);
    for (int64_t k = 0; k < w->job.key_count; k++)
        LOOM_TRY(loom_indexed_writer_finish(w->writers[k]));
    return loom__journal_remove(&w->job);
}

/* What this or an earlier run wrote is no input, though it may lie in a folder that is searched: with it, each run
 * would have other input than the one before. */
static loom_status drop_outputs(work *w) {
    static const char *const suffixes[] = {".bin", ".idx", ".bin.tmp", ".idx.tmp", ".idx.lengths.tmp",
        ".idx.documents.tmp", ".preprocess", ".preprocess.tmp"};
    for (int64_t k = -1; k < w->job.key_count; k++) /* the journal has the name of the prefix itself */
        for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
            char *prefix = k < 0 ? strdup(w->job.config.output_prefix) : prefix_of(&w->job, k), *path = NULL;
            if (!prefix || asprintf(&path, "%s%s", prefix, suffixes[i]) < 0) {
                free(prefix);
                return loom_fail(LOOM_ERR_MEMORY, "no memory to list files");
            }
            loom__text_files_drop(path, &w->job.files);
            free(prefix);
            free(path);
        }
    return LOOM_OK;
}

static loom_status run(work *w, int64_t workers, size_t block_bytes) {
    const loom_data_preprocess_config *config = &w->job.config;
    for (int64_t i = 0; i < config->input_count; i++)
        LOOM_TRY(loom__text_files_add(config->inputs[i], config->suffix, &w->job.files));
    LOOM_TRY(loom__text_files_check(&w->job.files));
    LOOM_TRY(drop_outputs(w));
    LOOM_TRY(begin(w));
    LOOM_TRY(loom__text_reader_create(
        &w->job.files, config->format, config->separator, block_bytes, w->at.place, &w->reader));
    ring r;
    loom_status status = ring_create(&w->job, workers, &r);
    if (status == LOOM_OK)
        status = write_all(w, &r);
    ring_destroy(&r);
    LOOM_TRY(status);
    return finish(w);
}

/* ---- configuration ---- */

static int64_t allowed_cores(void) {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

static loom_status check_keys(const loom__preprocess *job) {
    if (job->key_count < 1 || job->key_count > LOOM__PREPROCESS_KEYS)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "%lld JSON keys, expected 1 to %d", (long long)job->key_count, LOOM__PREPROCESS_KEYS);
    for (int64_t k = 0; k < job->key_count; k++) {
        if (!job->keys[k] || !*job->keys[k] || (job->key_count > 1 && strchr(job->keys[k], '/')))
            return loom_fail(LOOM_ERR_ARGUMENT, "JSON key %lld is '%s', expected a name%s", (long long)k,
                job->keys[k] ? job->keys[k] : "", job->key_count > 1 ? " that can be part of a file's" : "");
        for (int64_t other = 0; other < k; other++)
            if (strcmp(job->keys[k], job->keys[other]) == 0)
                return loom_fail(LOOM_ERR_ARGUMENT, "JSON key '%s' is given twice", job->keys[k]);
    }
    if (job->key_count > 1 && job->config.format != LOOM_TEXT_JSON)
        return loom_fail(LOOM_ERR_ARGUMENT, "%lld JSON keys, expected 1 where the format is not JSON lines",
            (long long)job->key_count);
    return LOOM_OK;
}

static loom_status check(const loom__preprocess *job) {
    const loom_data_preprocess_config *config = &job->config;
    if (config->input_count < 1 || !config->inputs || !config->output_prefix || !*config->output_prefix)
        return loom_fail(LOOM_ERR_ARGUMENT, "preprocessing needs at least one input and an output prefix");
    if (config->workers < 0 || config->workers > MOST_WORKERS)
        return loom_fail(LOOM_ERR_ARGUMENT, "workers is %lld, expected 0 (one a core) to %d",
            (long long)config->workers, MOST_WORKERS);
    if (config->append_eod && job->tokenizer->eod < 0)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "an end of document is to be appended, but tokenizer %s has none: expected eos_token in its "
            "tokenizer_config.json or special_tokens_map.json, or a token of a known name such as <|endoftext|>",
            job->tokenizer->name);
    LOOM_TRY(loom__text_check_separator(config->format, config->separator));
    return check_keys(job);
}

loom_status loom__preprocess_text(const loom_data_preprocess_config *config, size_t block_bytes, int64_t journal_bytes,
    loom_data_preprocess_result *result) {
    static const char *const text_key[] = {"text"};
    const loom_tokenizer *tokenizer = config->tokenizer ? config->tokenizer : loom_tokenizer_byte();
    loom_dtype dtype = loom_indexed_dtype_for_vocabulary(tokenizer->vocab_size);
    work w = {.job = {.config = *config,
                  .tokenizer = tokenizer,
                  .keys = config->json_key_count ? config->json_keys : text_key,
                  .key_count = config->json_key_count ? config->json_key_count : 1,
                  .dtype = dtype,
                  .size = loom_dtype_size(dtype)},
        .journal_bytes = journal_bytes};
    if (w.job.key_count > 1 && config->format == LOOM_TEXT_AUTO)
        w.job.config.format = LOOM_TEXT_JSON;
    LOOM_TRY(check(&w.job));
    loom_status status = run(&w, config->workers ? config->workers : allowed_cores(), block_bytes);
    /* Where there is a journal the work is not lost: another run goes on with it. */
    if (status != LOOM_OK && w.has_journal)
        abandon_writers(&w);
    for (int64_t k = 0; k < w.job.key_count; k++)
        loom_indexed_writer_destroy(w.writers[k]);
    loom__text_reader_destroy(w.reader);
    loom__text_files_free(&w.job.files);
    if (status == LOOM_OK)
        *result = w.at.result;
    return status;
}

loom_status loom_data_preprocess_text(const loom_data_preprocess_config *config, loom_data_preprocess_result *result) {
    return loom__preprocess_text(config, LOOM__TEXT_BLOCK_BYTES, JOURNAL_BYTES, result);
}
