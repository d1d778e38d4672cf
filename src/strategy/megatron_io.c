/* The Megatron checkpoint I/O. A save has two parts that threads do and nobody waits for who does not want to: every
 * rank's files, then rank 0's metadata and rename. Between them, and after them, all ranks meet. The invariant: the
 * second part is begun only when the first has succeeded on all ranks, so that a rank that failed or died leaves what
 * was there. Only the rank's own thread communicates. */
#include "strategy/megatron_io.h"
#include "base/record.h"
#include "checkpoint/context.h"
#include "checkpoint/job.h"
#include "checkpoint/task.h"
#include "strategy/save_plan.h"
#include <stdio.h>
#include <stdlib.h>

/* What rank 0 makes of the files. */
typedef struct committing {
    const char *path;
    loom__checkpoint_description all;
    loom__new_file common; /* of rank 0; made with the files, since values are borrowed for the save alone */
    char *context;         /* a copy, for the same reason; NULL: none */
    size_t context_bytes;
    loom__task task;
} committing;

typedef struct megatron_io {
    loom_fabric *fabric;
    loom_checkpoint_io_config config;
    char *format; /* of the config */
    loom__save_plan plan;
    loom__copy_memory memory;
    char *path;          /* of the save that goes on; NULL: none */
    loom__save_job *job; /* NULL once its files are written */
    committing commit;
} megatron_io;

static loom_comm *world_of(const megatron_io *io) {
    return loom_rank_world(io->fabric->rank);
}

static bool is_first(const megatron_io *io) {
    return loom_rank_index(io->fabric->rank) == 0;
}

/* ---- the first part */

static loom_status copy_context(committing *c, const loom_checkpoint_content *content) {
    c->context = malloc(content->context_bytes + 1);
    if (!c->context)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for its context", c->path);
    memcpy(c->context, content->context, content->context_bytes);
    c->context_bytes = content->context_bytes;
    return LOOM_OK;
}

static loom_status start(megatron_io *io, const char *path, const loom_checkpoint_content *content) {
    loom__save_job_config config = {.rank = loom_rank_index(io->fabric->rank),
        .writers = (int)io->config.storage_writers_per_rank,
        .background = io->config.async_save,
        .memory = io->config.async_save ? &io->memory : NULL,
        .team = loom_rank_team(io->fabric->rank)};
    io->path = strdup(path);
    if (!io->path)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to write it", path);
    io->commit = (committing){.path = io->path, .common.descriptor = -1};
    if (is_first(io))
        LOOM_TRY(loom__checkpoint_common_create(path, content->common, &io->commit.common));
    if (is_first(io) && content->context)
        LOOM_TRY(copy_context(&io->commit, content));
    return loom__save_job_start(path, content, io->plan.mine, &config, &io->job);
}

static void end(megatron_io *io) {
    loom__save_job_destroy(io->job);
    loom__task_drop(&io->commit.task);
    loom__new_file_destroy(&io->commit.common);
    free(io->commit.all.data);
    free(io->commit.context);
    io->commit = (committing){.common.descriptor = -1};
    free(io->path);
    io->path = NULL;
    io->job = NULL;
}

/* Ends the save with what it failed of. What it left is removed when no rank has a file open any more. */
static loom_status fail_save(megatron_io *io, loom_status status) {
    char text[LOOM__RECORD_BYTES];
    char *path = io->path;
    snprintf(text, sizeof text, "%s", loom_error_message());
    io->path = NULL;
    end(io);
    /* A world that has been aborted answers with an error, and then there is nothing to wait for. */
    if (loom_barrier(world_of(io)) == LOOM_OK && is_first(io) && path)
        (void)loom__checkpoint_abandon(path);
    free(path);
    return loom_fail(status, "%s", text);
}

/* ---- the second part */

static loom_status write_metadata(void *argument) {
    committing *c = argument;
    if (c->context)
        LOOM_TRY(loom__checkpoint_write_context(c->path, c->context, c->context_bytes));
    return loom__checkpoint_commit_created(c->path, &c->all, 1, &c->common);
}

/* What the files of all ranks hold, on every rank. */
static loom_status gather(megatron_io *io, const loom__checkpoint_description *mine) {
    loom_comm *world = world_of(io);
    int ranks = loom_comm_size(world);
    int64_t bytes = (int64_t)mine->bytes, total = 0;
    int64_t *counts = calloc((size_t)ranks, sizeof *counts);
    loom_status status = loom_agree(
        world, counts ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for the sizes of %d files", ranks));
    if (!status)
        status = loom_all_gather(world, &bytes, counts, 1, LOOM_I64);
    for (int i = 0; i < ranks && !status; i++)
        total += counts[i];
    void *all = status ? NULL : malloc((size_t)total + 1);
    if (!status)
        status = loom_agree(
            world, all ? LOOM_OK
                       : loom_fail(LOOM_ERR_MEMORY, "out of memory for the descriptions of a checkpoint (%lld bytes)",
                             (long long)total));
    if (!status)
        status = loom_all_gather_v(world, mine->data, all, counts, LOOM_U8);
    loom_comm_free(world, counts);
    if (status)
        loom_comm_free(world, all);
    else
        io->commit.all = (loom__checkpoint_description){all, (size_t)total};
    return status;
}

static loom_status end_files(megatron_io *io) {
    loom__checkpoint_description mine = {0};
    loom_status status = loom_agree(world_of(io), loom__save_job_wait(io->job, &mine));
    if (!status)
        status = gather(io, &mine);
    loom_comm_free(world_of(io), mine.data);
    LOOM_TRY(status);
    loom__save_job_destroy(io->job);
    io->job = NULL;
    if (is_first(io) && io->config.async_save)
        loom__task_start(&io->commit.task, loom_rank_team(io->fabric->rank), write_metadata, &io->commit);
    else if (is_first(io))
        loom__task_run(&io->commit.task, write_metadata, &io->commit);
    return LOOM_OK;
}

/* Whether the part that goes on has ended on all ranks. */
static loom_status part_ended(const megatron_io *io, bool *ended) {
    bool mine = io->job ? loom__save_job_finished(io->job) : loom__task_finished(&io->commit.task);
    int64_t working = !mine, any = 0;
    LOOM_TRY(loom_all_reduce(world_of(io), &working, &any, 1, LOOM_I64, LOOM_MAX));
    *ended = any == 0;
    return LOOM_OK;
}

static loom_status move_on(megatron_io *io, bool blocking, bool *pending) {
    bool ended = true;
    *pending = true;
    if (!blocking)
        LOOM_TRY(part_ended(io, &ended));
    if (ended && io->job) {
        LOOM_TRY(end_files(io));
        ended = blocking;
    }
    if (!ended)
        return LOOM_OK;
    LOOM_TRY(loom_agree(world_of(io), loom__task_wait(&io->commit.task)));
    *pending = false;
    return LOOM_OK;
}

/* ---- the plug-in */

static loom_status finalize(const loom_checkpoint_io *self, bool blocking, bool *pending) {
    megatron_io *io = self->context;
    *pending = false;
    if (!io->path)
        return LOOM_OK;
    loom_status status = move_on(io, blocking, pending);
    if (status) {
        *pending = false;
        return fail_save(io, status);
    }
    if (!*pending)
        end(io);
    return LOOM_OK;
}

static loom_status save(const loom_checkpoint_io *self, const char *path, const loom_checkpoint_content *content) {
    megatron_io *io = self->context;
    loom_comm *world = world_of(io), *group = NULL;
    bool pending;
    LOOM_TRY(finalize(self, true, &pending));
    if (io->config.parallel_save)
        group = io->config.parallel_save_within_dp ? io->fabric->groups[LOOM_GROUP_DP_CP] : world;
    LOOM_TRY(loom_agree(world, loom__save_plan_make(group, content, io->config.assume_constant_structure, &io->plan)));
    LOOM_TRY(loom_agree(world, is_first(io) ? loom__checkpoint_begin(path) : LOOM_OK));
    loom_status status = loom_agree(world, start(io, path, content));
    if (status)
        return fail_save(io, status);
    return io->config.async_save ? LOOM_OK : finalize(self, true, &pending);
}

static loom_status load(const loom_checkpoint_io *self, const char *path, loom_checkpoint **checkpoint) {
    (void)self;
    return loom_checkpoint_open(path, checkpoint);
}

static loom_status remove_checkpoint(const loom_checkpoint_io *self, const char *path) {
    megatron_io *io = self->context;
    return loom_agree(world_of(io), is_first(io) ? loom__checkpoint_remove(path) : LOOM_OK);
}

static void teardown(loom_checkpoint_io *self) {
    megatron_io *io = self->context;
    end(io);
    loom__save_plan_free(&io->plan);
    loom__copy_memory_free(&io->memory);
    free(io->format);
    free(io);
}

static loom_status setup(loom_checkpoint_io *self, loom_fabric *fabric) {
    const loom_checkpoint_io_config *given = self->context;
    loom_checkpoint_io_config config = given ? *given : loom_checkpoint_io_config_default();
    LOOM_TRY(loom_checkpoint_io_config_check(&config));
    megatron_io *io = calloc(1, sizeof *io);
    if (!io || !(io->format = strdup(config.save_ckpt_format))) {
        free(io);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a checkpoint I/O");
    }
    io->fabric = fabric;
    io->config = config;
    io->config.save_ckpt_format = io->format;
    io->commit.common.descriptor = -1;
    self->context = io;
    return LOOM_OK;
}

loom_checkpoint_io loom_checkpoint_io_megatron(const loom_checkpoint_io_config *config) {
    return (loom_checkpoint_io){.name = "megatron",
        .context = (void *)(uintptr_t)config,
        .setup = setup,
        .teardown = teardown,
        .save = save,
        .finalize = finalize,
        .load = load,
        .remove = remove_checkpoint};
}

void loom__megatron_io_prepare(const loom_checkpoint_io *io, size_t bytes) {
    megatron_io *own = io->context;
    if (own->config.async_save && !own->path)
        loom__copy_memory_prepare(&own->memory, loom_rank_team(own->fabric->rank), bytes);
}

const loom_checkpoint_io_config *loom__megatron_io_config(const loom_checkpoint_io *io) {
    return io->setup == setup ? &((const megatron_io *)io->context)->config : NULL;
}
