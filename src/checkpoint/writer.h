/* Writing a checkpoint in the form torch_dist. Every rank writes data files of its own into an unfinished folder beside
 * the final one; the descriptions of what they hold go to one rank, which writes the metadata and renames the folder.
 * Nothing here is collective: whoever saves does, between these steps,
 *
 *   one rank:    loom__checkpoint_begin
 *   every rank:  loom__checkpoint_file_create, _object…, _tensor…, _finish   (any number of files)
 *   one rank:    loom__checkpoint_commit with the descriptions of all, then loom__checkpoint_set_latest
 *
 * and commits only when all ranks have succeeded. */
#ifndef CHECKPOINT_WRITER_H
#define CHECKPOINT_WRITER_H

#include "format/file.h"
#include <megaloom/checkpoint.h>

/* Makes path.tmp, empty: what an earlier save left there is removed. LOOM_ERR_STATE when it holds files that are not of
 * a checkpoint; nothing is removed then. */
loom_status loom__checkpoint_begin(const char *path);

/* What files hold, as bytes to be sent to the rank that commits. Free with free. */
typedef struct loom__checkpoint_description {
    void *data;
    size_t bytes;
} loom__checkpoint_description;

/* The file "__RANK_NUMBER.distcp" of path.tmp. */
typedef struct loom__checkpoint_writer loom__checkpoint_writer;
loom_status loom__checkpoint_file_create(const char *path, int rank, int number, loom__checkpoint_writer **writer);
/* An object; they come before the tensors of a file (LOOM_ERR_STATE otherwise). Megatron-Core keeps them in a list of
 * one: that is the caller's. */
loom_status loom__checkpoint_file_object(loom__checkpoint_writer *writer, const char *name, const loom_value *value);
/* A chunk: the box [offsets, +sizes) of a tensor of `shape`, all [dims]; data [sizes…] row-major, of `dtype`. */
loom_status loom__checkpoint_file_tensor(loom__checkpoint_writer *writer, const char *name, loom_dtype dtype, int dims,
    const int64_t *shape, const int64_t *offsets, const int64_t *sizes, const void *data);
/* Flushes the file to the disk under its name and gives its description. Then destroy. */
loom_status loom__checkpoint_file_finish(loom__checkpoint_writer *writer, loom__checkpoint_description *description);
/* Frees; an unfinished file is removed. NULL is accepted. */
void loom__checkpoint_writer_destroy(loom__checkpoint_writer *writer);

/* Writes .metadata, common.pt and, last, metadata.json into path.tmp, all flushed to the disk, and renames it to
 * `path`; a checkpoint that is there already is replaced in one step. Before anything is written, what the descriptions
 * [count] say must be a whole checkpoint: every tensor covered by its chunks, without overlap. common: a DICT. */
loom_status loom__checkpoint_commit(
    const char *path, const loom__checkpoint_description *descriptions, int64_t count, const loom_value *common);

/* The same in two steps, for who keeps no values until the commit: common.pt in path.tmp, not flushed yet, and the
 * commit of it. file: for loom__new_file_destroy at the end. */
loom_status loom__checkpoint_common_create(const char *path, const loom_value *common, loom__new_file *file);
loom_status loom__checkpoint_commit_created(
    const char *path, const loom__checkpoint_description *descriptions, int64_t count, loom__new_file *common);

/* Removes what a save that failed has left in path.tmp. */
loom_status loom__checkpoint_abandon(const char *path);

/* Replaces the text of folder/latest_checkpointed_iteration.txt, flushed to the disk. */
loom_status loom__checkpoint_set_latest(const char *folder, int64_t iteration);

/* The same for folder/best_checkpointed_iteration.txt. */
loom_status loom__checkpoint_set_best(const char *folder, int64_t iteration);

/* Removes the folder of a checkpoint, metadata.json first, so that what a stopped removal leaves is known to be no
 * checkpoint. A folder with files that are not of a checkpoint is LOOM_ERR_STATE, and keeps all. One that is not there
 * is LOOM_OK. */
loom_status loom__checkpoint_remove(const char *path);

/* The .metadata that the descriptions make, checked: a pickle in memory to be freed with free. `what` is for messages.
 */
loom_status loom__checkpoint_make_metadata(
    const char *what, const loom__checkpoint_description *descriptions, int64_t count, void **pickle, size_t *bytes);

#endif
