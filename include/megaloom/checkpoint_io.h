/* Checkpoint I/O: who turns what the ranks hold into files, and back. A plug-in like the others of the strategy: the
 * Megatron one writes and reads torch_dist, and wrappers around it or around each other see each call first.
 *
 *     loom_checkpoint_io_config io_config = loom_checkpoint_io_config_default();
 *     io_config.async_save = true;
 *     loom_checkpoint_io io = loom_checkpoint_io_megatron(&io_config);
 *     config.checkpoint_io = &io;                  // of loom_megatron_strategy_config; NULL: the same with defaults
 *
 * A fabric copies the whole chain, so that each rank has its own; `self` below is that copy. */
#ifndef MEGALOOM_CHECKPOINT_IO_H
#define MEGALOOM_CHECKPOINT_IO_H

#include <megaloom/checkpoint.h>
#include <megaloom/strategy.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A chunk of a tensor that this rank holds, be it alone or with others, who have the same bits. */
typedef struct loom_checkpoint_shard {
    const char *key;
    bool main; /* of all ranks that hold this chunk exactly one says so */
    loom_dtype dtype;
    int dims; /* the chunk is the box [offsets, +sizes) of a tensor of `shape`, all [dims], row-major */
    int64_t shape[LOOM_CHECKPOINT_MAX_DIMS], offsets[LOOM_CHECKPOINT_MAX_DIMS], sizes[LOOM_CHECKPOINT_MAX_DIMS];
    const void *data; /* NULL: zeros */
} loom_checkpoint_shard;

/* An object that this rank alone stands for. */
typedef struct loom_checkpoint_value {
    const char *key;
    const loom_value *value;
} loom_checkpoint_value;

/* What one rank brings to a save. Everything is borrowed until `save` returns. */
typedef struct loom_checkpoint_content {
    const loom_checkpoint_shard *shards;
    int64_t shard_count;
    const loom_checkpoint_value *objects;
    int64_t object_count;
    const loom_value *common; /* the common state, a DICT, on rank 0; NULL on others */
    const char *context;      /* on rank 0 the text of a run file that makes the model; NULL: not known */
    size_t context_bytes;     /* without its final zero */
} loom_checkpoint_content;

/* Functions of a wrapper that are NULL go to what it wraps; of others, `setup`, `finalize` and `teardown` may be NULL
 * (nothing to do). Collective over all ranks, which call them in the same order: save, finalize, load, remove. */
typedef struct loom_checkpoint_io loom_checkpoint_io;
struct loom_checkpoint_io {
    const char *name; /* "megatron" */
    void *context;    /* shared by all ranks of a process, unless setup replaces it */
    bool wraps;
    const loom_checkpoint_io *checkpoint_io; /* what a wrapper has inside; NULL: the fabric puts the Megatron one there
                                              */
    loom_status (*setup)(loom_checkpoint_io *self, loom_fabric *fabric); /* the inner ones first; before any rank meets
                                                                            another */
    void (*teardown)(loom_checkpoint_io *self);                          /* after a setup that succeeded */
    /* Makes the checkpoint `path`. It may return before it is whole: then finalize tells when it is. No other save is
     * begun, and none loaded, until then. All ranks fail together. */
    loom_status (*save)(const loom_checkpoint_io *self, const char *path, const loom_checkpoint_content *content);
    /* Moves a save that goes on; *pending, the same on all ranks: it is not whole yet. blocking: waits until it is.
     * What the save failed of is returned by the call that finds it, on all ranks; then nothing is pending. */
    loom_status (*finalize)(const loom_checkpoint_io *self, bool blocking, bool *pending);
    /* Opens a checkpoint, for loom_checkpoint_close by the caller. Not collective by itself: what one rank alone is
     * told, it tells the others. */
    loom_status (*load)(const loom_checkpoint_io *self, const char *path, loom_checkpoint **checkpoint);
    /* Removes a checkpoint; one that is not there is no error. */
    loom_status (*remove)(const loom_checkpoint_io *self, const char *path);
};

/* The Megatron one: writes and reads torch_dist. config is copied when a fabric sets it up, until which it is borrowed;
 * NULL = the defaults. Its faults are those of loom_fabric_create.
 *
 * A save is first written to path.tmp, by storage_writers_per_rank threads of each rank, past the page cache where the
 * file system can do that, and flushed; when all ranks have succeeded rank 0 writes the metadata and renames the
 * folder. So whoever is killed at any instant leaves the checkpoint that was there, or the new one. Where one fails,
 * path.tmp is removed.
 *
 * With async_save `save` copies the state (memory for the copy is kept for the next save) and returns. Threads that
 * never communicate write the copy; each finalize looks, by one small reduction, whether those of all ranks are back.
 * A fabric that is destroyed before that loses the save. */
LOOM_API loom_checkpoint_io loom_checkpoint_io_megatron(const loom_checkpoint_io_config *config);

/* What a wrapper calls of the one inside it; a NULL function of that one passes the call on further. */
LOOM_API loom_status loom_checkpoint_io_save(
    const loom_checkpoint_io *io, const char *path, const loom_checkpoint_content *content);
LOOM_API loom_status loom_checkpoint_io_finalize(const loom_checkpoint_io *io, bool blocking, bool *pending);
LOOM_API loom_status loom_checkpoint_io_load(
    const loom_checkpoint_io *io, const char *path, loom_checkpoint **checkpoint);
LOOM_API loom_status loom_checkpoint_io_remove(const loom_checkpoint_io *io, const char *path);

/* The fabric's own copy: the outermost, and the one inside all wrappers. Not collective. */
LOOM_API const loom_checkpoint_io *loom_fabric_checkpoint_io(const loom_fabric *fabric);
LOOM_API const loom_checkpoint_io *loom_fabric_unwrapped_checkpoint_io(const loom_fabric *fabric);

#ifdef __cplusplus
}
#endif
#endif
