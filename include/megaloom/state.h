/* The state of a run, as checkpoints hold it: modules, optimizers and plain values by key. */
#ifndef MEGALOOM_STATE_H
#define MEGALOOM_STATE_H

#include <megaloom/optim.h>
#include <megaloom/strategy.h>
#include <megaloom/value.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One entry of a state: a module, an optimizer, an object of the user's (load, save), or none of them for a plain
 * value.
 */
typedef struct loom_state_item {
    const char *key; /* "state_dict" and "optimizer" by custom for the model and its optimizer; borrowed */
    loom_parallel *module;
    loom_optimizer *optimizer;
    /* An object of the user's takes its value from the checkpoint's common state, and makes it in `pool`. Every rank
     * takes it; what rank 0 makes is stored. */
    loom_status (*load)(void *context, const loom_value *value);
    loom_status (*save)(void *context, loom_value_pool *pool, const loom_value **value);
    void *context;
    const loom_value *value; /* replaced at a load by what the common state has under the key; rank 0's is stored */
} loom_state_item;

typedef struct loom_state {
    loom_state_item *items;
    int64_t count;
} loom_state;

/* Which entries of the item `key` are stored: tensors by their keys in the checkpoint, those of a plain DICT by their
 * own. Every rank must give the same answers. */
typedef struct loom_state_filter {
    const char *key;
    bool (*keep)(void *context, const char *name);
    void *context;
} loom_state_filter;

/* Writes the state to the folder `path`, in Megatron-Core's form torch_dist: first to path.tmp, which is flushed to the
 * disk and renamed when all ranks have succeeded; a checkpoint that was there is replaced in one step. So a run that is
 * killed at any instant leaves `path` as it was, or whole and new. Each rank writes what no rank before it in its
 * data-parallel group holds as well; with the distributed optimizer each its own shard of the buckets
 * (dp_reshardable). Keys of items that are neither modules nor optimizers are keys of the common state, except those
 * that are its own: checkpoint_version, content_metadata, optimizer, opt_param_scheduler and megaloom (the layout).
 *
 * Collective over all ranks. Errors: LOOM_ERR_ARGUMENT as for loom_fabric_load, and for a filter whose key the state
 * lacks or a key that is the common state's own; LOOM_ERR_IO, LOOM_ERR_MEMORY. All ranks fail together. */
LOOM_API loom_status loom_fabric_save(loom_fabric *fabric, const char *path, const loom_state *state,
    const loom_state_filter *filters, int64_t filter_count);

/* Saves to folder/iter_NNNNNNN, which is `iteration`, then lets folder/latest_checkpointed_iteration.txt name it, then
 * removes the oldest checkpoints until keep_last are left (0: none is removed); never the new one. `folder` is made
 * where it is not there, its parent is not. Under an asynchronous save the two steps that follow come when the
 * checkpoint is whole. loom_checkpoint_open of `folder` finds the checkpoint that is named: one that is whole, whenever
 * a run is killed. Collective over all ranks; errors as of loom_fabric_save. */
LOOM_API loom_status loom_fabric_save_iteration(
    loom_fabric *fabric, const char *folder, int64_t iteration, int64_t keep_last, const loom_state *state);

/* What is kept of a folder's checkpoints: the newest and, of the others, the last ones and the best ones. */
typedef struct loom_keep {
    int64_t last;           /* the newest so many; 0 = all */
    int64_t best;           /* and so many of those whose validation loss is lowest */
    double validation_loss; /* of the one that is saved; NaN = not known: then it is never one of the best */
} loom_keep;

/* loom_fabric_save_iteration with that. The loss is stored as `validation_loss` of the common state, and where any
 * checkpoint has one, folder/best_checkpointed_iteration.txt names the one whose is lowest. */
LOOM_API loom_status loom_fabric_save_and_keep(
    loom_fabric *fabric, const char *folder, int64_t iteration, const loom_keep *keep, const loom_state *state);

/* Moves a save that goes on in the background (checkpoint I/O with async_save): when all ranks have written, and the
 * checkpoint stands under its name, its pointer file moves and old ones are removed. *pending, the same on all ranks:
 * it is not so far. What the save failed of is returned on all ranks by the call that finds it; checkpoints that were
 * there are as they were, and nothing is pending then. Each training step, save and load begins with such a call, and
 * saves and loads wait. blocking: waits; to be called so at the end of a run, since a fabric that is destroyed drops a
 * save that is not whole. Collective over all ranks; without a pending save it does nothing. */
LOOM_API loom_status loom_fabric_finalize_saves(loom_fabric *fabric, bool blocking, bool *pending);

/* What a load found. Names are the report's, in Megatron-Core's spelling with layer numbers; so are values. */
typedef struct loom_load_report {
    int64_t iteration; /* of the common state; -1 = none */
    int64_t missing_count, unexpected_count, misshaped_count;
    char **missing;    /* asked for, and not in the checkpoint: left as they were */
    char **unexpected; /* tensors of the checkpoint that are nothing of the model or optimizer that is loaded */
    char **misshaped;  /* tensors of another shape: not loaded, and missing too */
    const loom_value *leftover;        /* DICT: what the common state has beyond the state */
    struct loom_load_sources *sources; /* of the values */
} loom_load_report;
/* Frees what loom_fabric_load put in, values of the state's items included; a zeroed one is accepted. */
LOOM_API void loom_load_report_free(loom_load_report *report);

/* Loads the checkpoint at `path` (as loom_checkpoint_open finds it) into the state, at any tensor, pipeline, virtual
 * pipeline and data-parallel size and with or without the distributed optimizer, whatever layout wrote it. Modules are
 * those of loom_gpt_create. With an optimizer also its moments, the master weights, its number of updates and its
 * schedule. A vocabulary may be padded otherwise: rows that are not there are zero.
 *
 * strict: what is missing, unexpected or misshaped is an error with all names, and nothing has been changed. Otherwise
 * what there is is loaded and the rest listed. `_extra_state` and random states of other programs are no concern.
 *
 * Collective over all ranks, which read the same files; memory beyond the state is that of the largest chunk. The
 * report is written on success alone. Errors: those of loom_checkpoint_open and loom_checkpoint_read; LOOM_ERR_ARGUMENT
 * for an optimizer without its module, for a module that was not made by loom_gpt_create, and for a key that comes
 * twice; LOOM_ERR_NOT_FOUND for a strict load, LOOM_ERR_FORMAT for an optimizer state that cannot be. After an error
 * while chunks are read the state is partly loaded. */
LOOM_API loom_status loom_fabric_load(
    loom_fabric *fabric, const char *path, const loom_state *state, bool strict, loom_load_report *report);

#ifdef __cplusplus
}
#endif
#endif
