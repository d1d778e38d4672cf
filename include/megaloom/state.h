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

/* Which entries of the item `key` are stored: those of a module and the tensors of an optimizer by their keys in the
 * checkpoint (without the prefix of a second module), those of the DICT that an optimizer or a plain item is by their
 * own. "key/name" is the DICT that a plain item has under that name, "key/name/name" one in it, and so on. An entry is
 * stored when all filters of its key say yes. Every rank must give the same answers. */
typedef struct loom_state_filter {
    const char *key;
    bool (*keep)(void *context, const char *name);
    void *context;
} loom_state_filter;

/* Writes the state to the folder `path`, in Megatron-Core's form torch_dist: first to path.tmp, which is flushed to the
 * disk and renamed when all ranks have succeeded; a checkpoint that was there is replaced in one step. So a run that is
 * killed at any instant leaves `path` as it was, or whole and new. Each rank writes what no rank before it in its
 * data-parallel group holds as well; with the distributed optimizer each its own shard: of the buckets
 * (dp_reshardable), or with strategy.dist_ckpt_optim_fully_reshardable of the parameters. Weights are stored in the
 * dtype they are kept in, and masters beside 16-bit ones; with the optimizer also its loss scale, and the seed.
 *
 * A state may hold several modules, each with its optimizer or without. The tensors of the one with the key state_dict
 * (without one, of the first) have Megatron-Core's keys; those of another KEY have "KEY." in front, with which none of
 * the main one's may begin. A module that was not made by loom_gpt_create, on one pipeline stage, is stored by the
 * names of its parameters: NAME, and optimizer.state.exp_avg.NAME and so on, flat; a parameter that is a shard of the
 * tensor ranks has the rank as its first axis, and loads at the same number of them alone. Keys of items that are
 * neither modules nor optimizers are keys of the common state, except those that are its own: checkpoint_version,
 * content_metadata, optimizer, opt_param_scheduler and megaloom (the layout). With a module of loom_gpt_create the
 * folder context/ holds the run file that loom_load_model reads.
 *
 * Collective over all ranks. Errors: LOOM_ERR_ARGUMENT as for loom_fabric_load, and for a filter whose key the state
 * lacks or of a path where rank 0 has no DICT, or a key that is the common state's own; LOOM_ERR_IO, LOOM_ERR_MEMORY.
 * All ranks fail together. */
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

/* What becomes of what a load does not find (missing: asked for, and not in the checkpoint; misshaped ones too) and of
 * what it does not want (unexpected: tensors of the checkpoint that nobody has asked for). Names and meanings are
 * Megatron-Core's, except that it calls missing unexpected and unexpected missing. false and true, as NeMo has them,
 * are return_all and raise_all. */
typedef enum loom_strict {
    LOOM_STRICT_RETURN_ALL = false,   /* all is listed */
    LOOM_STRICT_RAISE_ALL = true,     /* either is an error with all names */
    LOOM_STRICT_ASSUME_OK_UNEXPECTED, /* what is missing is an error; the rest of the checkpoint is not looked at */
    LOOM_STRICT_LOG_UNEXPECTED,       /* rank 0 logs what is missing as a warning, and it is listed */
    LOOM_STRICT_LOG_ALL,              /* the same for both */
    LOOM_STRICT_RAISE_UNEXPECTED,     /* as assume_ok_unexpected: here all names are known before anything is read */
    LOOM_STRICT_RETURN_UNEXPECTED,    /* what is missing is listed */
    LOOM_STRICT_IGNORE_ALL            /* neither */
} loom_strict;
/* "return_all", … and back. LOOM_ERR_ARGUMENT names the levels and the nearest one. */
LOOM_API const char *loom_strict_name(loom_strict strict);
LOOM_API loom_status loom_strict_parse(const char *name, loom_strict *strict);

/* What a load found. Names are the report's, in Megatron-Core's spelling with layer numbers; so are values. */
typedef struct loom_load_report {
    int64_t iteration; /* of the common state; -1 = none */
    int64_t missing_count, unexpected_count, misshaped_count;
    char **missing;    /* asked for, and not in the checkpoint: left as they were */
    char **unexpected; /* tensors of the checkpoint that are nothing of the modules or optimizers that are loaded */
    char **misshaped;  /* tensors of another shape: not loaded, and missing too */
    const loom_value *leftover;        /* DICT: what the common state has beyond the state */
    struct loom_load_sources *sources; /* of the values */
} loom_load_report;
/* Frees what loom_fabric_load put in, values of the state's items included; a zeroed one is accepted. */
LOOM_API void loom_load_report_free(loom_load_report *report);

/* Loads the checkpoint at `path` (as loom_checkpoint_open finds it) into the state, at any tensor, pipeline, virtual
 * pipeline and data-parallel size and with or without the distributed optimizer, whatever layout wrote it. With an
 * optimizer also its moments, the master weights, its number of updates, its schedule, its loss scale, and the seed of
 * dropout. Weights of another dtype are converted; masters that the checkpoint lacks, and those of a model without its
 * optimizer, are the stored weights, before they are rounded. A vocabulary may be padded otherwise: rows that are not
 * there are zero. A state with one module takes the one that was saved under its key, or the only one, whatever its
 * key. Modules that were not made by loom_gpt_create: see loom_fabric_save.
 *
 * strict: a level, or a bool. Where what is missing is an error nothing has been changed; otherwise what there is is
 * loaded and the rest left as it was. Lists that the level ignores are empty. `_extra_state` and random states of other
 * programs are no concern.
 *
 * Collective over all ranks, which read the same files; memory beyond the state is that of the largest chunk. The
 * report is written on success alone. Errors: those of loom_checkpoint_open and loom_checkpoint_read; LOOM_ERR_ARGUMENT
 * for an optimizer without its module, for a key, module or optimizer that comes twice, and for a level that is none;
 * LOOM_ERR_NOT_FOUND for a strict load, LOOM_ERR_FORMAT for an optimizer state that cannot be. After an error while
 * chunks are read the state is partly loaded. */
LOOM_API loom_status loom_fabric_load(
    loom_fabric *fabric, const char *path, const loom_state *state, loom_strict strict, loom_load_report *report);

/* Loads a module's parameters from a DICT in memory of this rank's own tensors (F32, BF16 or F16, of loom_parameter's
 * local shapes) by loom_parameter's names, or from the one that it has under "state_dict"; what a module keeps beside
 * its parameters (the expert_bias of a router) by Megatron-Core's names. With virtual stages chunk i reads the DICT
 * model_i in it. Leading "module."s do not matter, on either side; `_extra_state` keys are no concern.
 * An optimizer's state is not touched. The report is this rank's; strict: as loom_fabric_load, but a level that raises
 * what is missing raises what is unexpected too. Collective over all ranks; an error leaves every rank's parameters as
 * they were. Errors: LOOM_ERR_ARGUMENT for what is no such DICT and for a parameter that comes twice;
 * LOOM_ERR_NOT_FOUND for a strict load. */
LOOM_API loom_status loom_fabric_load_module_state_dict(loom_fabric *fabric, loom_parallel *parallel,
    const loom_value *state_dict, loom_strict strict, loom_load_report *report);

#ifdef __cplusplus
}
#endif
#endif
