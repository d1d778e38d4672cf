/* Files of a save, and the threads that write them. Chunks go to the file that has the fewest bytes so far. The
 * invariant: after start nothing of the caller's is read but the data of chunks that were not copied; keys are copied
 * too, so that a job in the background may outlive the state that it saves. */
#include "checkpoint/job.h"
#include "base/record.h"
#include "checkpoint/task.h"
#include <stdio.h>
#include <stdlib.h>

enum { FILE_LEAST = 1 << 20, COPY_ITEM = 1 << 22, ALIGNMENT = 64 };

typedef struct chunk {
    const loom_checkpoint_shard *from; /* while the job starts */
    loom_checkpoint_shard shard;
    size_t bytes, at; /* at: in the copy */
    int file;
} chunk;

typedef struct file {
    struct loom__save_job *job;
    int number;
    loom__checkpoint_writer *writer;
    loom__checkpoint_description description;
    loom__task task;
} file;

struct loom__save_job {
    char *path;
    loom__save_job_config config;
    chunk *chunks;
    int64_t chunk_count;
    char *keys;
    size_t bytes;
    file *files;
    int file_count;
};

static loom_status no_memory(const loom__save_job *job) {
    return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to write it", job->path);
}

static size_t round_up(size_t bytes, size_t to) {
    return (bytes + to - 1) / to * to;
}

static size_t bytes_of(const loom_checkpoint_shard *shard) {
    size_t bytes = loom_dtype_size(shard->dtype);
    for (int i = 0; i < shard->dims; i++)
        bytes *= (size_t)shard->sizes[i];
    return bytes;
}

static loom_status list_chunks(loom__save_job *job, const loom_checkpoint_content *content, const bool *mine) {
    size_t key_bytes = 1;
    for (int64_t i = 0; i < content->shard_count; i++)
        key_bytes += mine[i] ? strlen(content->shards[i].key) + 1 : 0;
    job->chunks = calloc((size_t)content->shard_count + 1, sizeof *job->chunks);
    char *key = job->keys = malloc(key_bytes);
    if (!job->chunks || !key)
        return no_memory(job);
    for (int64_t i = 0; i < content->shard_count; i++) {
        if (!mine[i])
            continue;
        chunk *made = &job->chunks[job->chunk_count++];
        made->from = &content->shards[i];
        made->shard = content->shards[i];
        made->shard.key = strcpy(key, content->shards[i].key);
        key += strlen(key) + 1;
        made->bytes = bytes_of(&made->shard);
        made->at = job->bytes;
        job->bytes += round_up(made->bytes, ALIGNMENT);
    }
    return LOOM_OK;
}

/* ---- the copy */

typedef struct copying {
    const chunk *chunks;
    const int64_t *first_item; /* [chunks + 1] */
    int64_t count;
    char *to;
} copying;

static void copy_item(void *argument, int64_t item, int worker) {
    const copying *c = argument;
    int64_t low = 0, high = c->count;
    (void)worker;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        *(c->first_item[middle] <= item ? &low : &high) = middle;
    }
    const chunk *of = &c->chunks[low];
    size_t first = (size_t)(item - c->first_item[low]) * COPY_ITEM;
    size_t bytes = of->bytes - first < COPY_ITEM ? of->bytes - first : COPY_ITEM;
    if (of->from->data)
        loom__copy_past_caches(c->to + of->at + first, (const char *)of->from->data + first, bytes);
    else
        memset(c->to + of->at + first, 0, bytes);
}

static loom_status copy_chunks(loom__save_job *job) {
    int64_t items = 0;
    int64_t *first = calloc((size_t)job->chunk_count + 1, sizeof *first);
    if (!first)
        return no_memory(job);
    loom_status status = loom__copy_memory_reserve(job->config.memory, job->path, job->bytes);
    for (int64_t i = 0; i < job->chunk_count; i++) {
        first[i] = items;
        items += (int64_t)((job->chunks[i].bytes + COPY_ITEM - 1) / COPY_ITEM);
    }
    copying c = {job->chunks, first, job->chunk_count, job->config.memory->data};
    if (!status && items > 0)
        loom_team_run(job->config.team, copy_item, &c, items);
    for (int64_t i = 0; i < job->chunk_count && !status; i++)
        job->chunks[i].shard.data = c.to + job->chunks[i].at;
    free(first);
    return status;
}

/* ---- the files */

static loom_status create_files(loom__save_job *job, const loom_checkpoint_content *content) {
    size_t most = job->bytes / FILE_LEAST + 1;
    int count = most < (size_t)job->config.writers ? (int)most : job->config.writers;
    if (job->chunk_count + content->object_count == 0)
        return LOOM_OK;
    job->files = calloc((size_t)count, sizeof *job->files);
    size_t *filled = calloc((size_t)count, sizeof *filled);
    loom_status status = job->files && filled ? LOOM_OK : no_memory(job);
    for (int i = 0; i < count && !status; i++, job->file_count++) {
        job->files[i] = (file){.job = job, .number = i};
        status = loom__checkpoint_file_create(job->path, job->config.rank, i, &job->files[i].writer);
    }
    for (int64_t i = 0; i < job->chunk_count && !status; i++) {
        int least = 0;
        for (int f = 1; f < count; f++)
            least = filled[f] < filled[least] ? f : least;
        job->chunks[i].file = least;
        filled[least] += job->chunks[i].bytes;
    }
    free(filled);
    for (int64_t i = 0; i < content->object_count && !status; i++)
        status = loom__checkpoint_file_object(job->files[0].writer, content->objects[i].key, content->objects[i].value);
    return status;
}

static loom_status write_zeros(file *to, const chunk *of) {
    void *zeros = calloc(of->bytes ? of->bytes : 1, 1);
    const loom_checkpoint_shard *shard = &of->shard;
    if (!zeros)
        return no_memory(to->job);
    loom_status status = loom__checkpoint_file_tensor(
        to->writer, shard->key, shard->dtype, shard->dims, shard->shape, shard->offsets, shard->sizes, zeros);
    free(zeros);
    return status;
}

static loom_status write_file(void *context) {
    file *to = context;
    const loom__save_job *job = to->job;
    for (int64_t i = 0; i < job->chunk_count; i++) {
        const loom_checkpoint_shard *shard = &job->chunks[i].shard;
        if (job->chunks[i].file != to->number)
            continue;
        if (!shard->data)
            LOOM_TRY(write_zeros(to, &job->chunks[i]));
        else
            LOOM_TRY(loom__checkpoint_file_tensor(to->writer, shard->key, shard->dtype, shard->dims, shard->shape,
                shard->offsets, shard->sizes, shard->data));
    }
    return loom__checkpoint_file_finish(to->writer, &to->description);
}

static loom_status start(loom__save_job *job, const loom_checkpoint_content *content, const bool *mine) {
    LOOM_TRY(list_chunks(job, content, mine));
    LOOM_TRY(create_files(job, content));
    if (job->config.memory)
        LOOM_TRY(copy_chunks(job));
    for (int i = job->config.background ? 0 : 1; i < job->file_count; i++)
        loom__task_start(&job->files[i].task, job->config.team, write_file, &job->files[i]);
    return LOOM_OK;
}

loom_status loom__save_job_start(const char *path, const loom_checkpoint_content *content, const bool *mine,
    const loom__save_job_config *config, loom__save_job **out) {
    loom__save_job *job = calloc(1, sizeof *job);
    if (!job || !(job->path = strdup(path))) {
        free(job);
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to write it", path);
    }
    job->config = *config;
    loom_status status = start(job, content, mine);
    if (status)
        loom__save_job_destroy(job);
    else
        *out = job;
    return status;
}

bool loom__save_job_finished(const loom__save_job *job) {
    for (int i = 0; i < job->file_count; i++)
        if (!loom__task_finished(&job->files[i].task))
            return false;
    return true;
}

static loom_status gather(const loom__save_job *job, loom__checkpoint_description *description) {
    size_t bytes = 0, at = 0;
    for (int i = 0; i < job->file_count; i++)
        bytes += job->files[i].description.bytes;
    char *all = malloc(bytes + 1);
    if (!all)
        return no_memory(job);
    for (int i = 0; i < job->file_count; i++) {
        const loom__checkpoint_description *part = &job->files[i].description;
        memcpy(all + at, part->data, part->bytes);
        at += part->bytes;
    }
    *description = (loom__checkpoint_description){all, bytes};
    return LOOM_OK;
}

loom_status loom__save_job_wait(loom__save_job *job, loom__checkpoint_description *description) {
    char first[LOOM__RECORD_BYTES];
    loom_status status = LOOM_OK;
    if (!job->config.background && job->file_count > 0)
        loom__task_run(&job->files[0].task, write_file, &job->files[0]);
    for (int i = 0; i < job->file_count; i++) {
        loom_status one = loom__task_wait(&job->files[i].task);
        if (!status && one)
            snprintf(first, sizeof first, "%s", loom_error_message());
        status = status ? status : one;
    }
    return status ? loom_fail(status, "%s", first) : gather(job, description);
}

void loom__save_job_destroy(loom__save_job *job) {
    if (!job)
        return;
    for (int i = 0; i < job->file_count; i++) {
        loom__task_drop(&job->files[i].task);
        loom__checkpoint_writer_destroy(job->files[i].writer);
        free(job->files[i].description.data);
    }
    free(job->files);
    free(job->chunks);
    free(job->keys);
    free(job->path);
    free(job);
}
