/* The state of a run, as checkpoints hold it: modules, optimizers and plain values by key. */
#ifndef MEGALOOM_STATE_H
#define MEGALOOM_STATE_H

#include <megaloom/optim.h>
#include <megaloom/strategy.h>
#include <megaloom/value.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One entry of a state: exactly one of module, optimizer and load is given, or none of them for a plain value. */
typedef struct loom_state_item {
    const char *key; /* "state_dict" and "optimizer" by custom for the model and its optimizer; borrowed */
    loom_parallel *module;
    loom_optimizer *optimizer;
    /* An object of the user's takes its value from the checkpoint's common state. */
    loom_status (*load)(void *context, const loom_value *value);
    void *context;
    const loom_value *value; /* replaced by what the common state has under the key */
} loom_state_item;

typedef struct loom_state {
    loom_state_item *items;
    int64_t count;
} loom_state;

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
