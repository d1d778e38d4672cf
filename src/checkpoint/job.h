/* One rank's part of a save: its chunks and objects in some files, each written by a thread that communicates with
 * nobody. */
#ifndef CHECKPOINT_JOB_H
#define CHECKPOINT_JOB_H

#include "checkpoint/copy.h"
#include "checkpoint/writer.h"
#include <megaloom/checkpoint_io.h>
#include <megaloom/team.h>

typedef struct loom__save_job_config {
    int rank;
    int writers;               /* at most so many files, and as many threads */
    bool background;           /* start returns while threads write; false: wait has the calling thread write as well */
    loom__copy_memory *memory; /* chunks are copied here first; NULL: they stay the caller's until the wait */
    loom_team *team;           /* which copies; its owner calls */
} loom__save_job_config;

typedef struct loom__save_job loom__save_job;

/* Makes the files of path.tmp, writes the objects, copies the chunks (those with `mine`, [shard_count]) and starts to
 * write. Only the content's keys and, without memory for copies, data are borrowed after this call; keys until the
 * destroy. */
loom_status loom__save_job_start(const char *path, const loom_checkpoint_content *content, const bool *mine,
    const loom__save_job_config *config, loom__save_job **job);
/* Whether the wait would return at once. */
bool loom__save_job_finished(const loom__save_job *job);
/* The first failure of a file; when all are on the disk, the description of them together. */
loom_status loom__save_job_wait(loom__save_job *job, loom__checkpoint_description *description);
/* Waits, frees, and removes files that are not finished. NULL is accepted. */
void loom__save_job_destroy(loom__save_job *job);

#endif
