/* Writing the checkpoint that the ranks of a layout would write, without them. */
#ifndef REWRITE_OFFLINE_H
#define REWRITE_OFFLINE_H

#include "checkpoint/reshard.h"
#include "checkpoint/sharded.h"
#include "state/state.h"
#include <megaloom/checkpoint_tools.h>
#include <megaloom/value.h>

/* Gives the elements that a want names (its `at` is 0) of one of the tensor ranks that share the parameter (of an
 * expert: of the expert tensor ranks), as loom__archive_read. */
typedef loom_status (*loom__offline_read)(void *context, const loom__model_spec *spec, int64_t tp, int64_t tp_rank,
    const loom__reshard_want *want, loom_dtype dtype, void *out);

/* All ranks of a run, as far as a checkpoint shows them. */
typedef struct loom__offline_layout {
    loom_layout ranks;
    loom__model_spec *spec;
    loom_stage *stages;
    loom__sharded_layout sharded; /* borrows the two above */
} loom__offline_layout;

/* Of a run of `world` ranks with that model and strategy, both as given. Errors: those of the configuration, with all
 * faults. loom__offline_layout_free. */
loom_status loom__offline_layout_make(const loom_run_config *config, int64_t world, loom__offline_layout *layout);
void loom__offline_layout_free(loom__offline_layout *layout); /* a zeroed one is accepted */

typedef struct loom__offline_save {
    const char *path;
    const loom__offline_layout *layout;
    const loom__sharded_options *options;
    const loom__optimizer_values *optimizer; /* NULL: none */
    const loom_value *common;                /* DICT */
    const char *context;                     /* text of context/run.yaml */
    const char *companions; /* folder whose tokenizer files and config.json go along into context/, or NULL */
    loom__offline_read read;
    void *read_context;
    const loom_tool_progress *progress; /* or NULL */
} loom__offline_save;

/* Writes the checkpoint as loom_fabric_save does: to path.tmp, which is renamed at the end and removed on an error.
 * Memory beyond the plan of a rank is that of the largest chunk. */
loom_status loom__offline_write(const loom__offline_save *save);

/* OUT is written as a new folder: LOOM_ERR_ARGUMENT where something is at `out`, or where it is `in`. */
loom_status loom__tool_check_paths(const char *in, const char *out);

/* Removes what a tool that failed has left at path.tmp; the error stays the first one, and is returned. */
loom_status loom__tool_discard(const char *path, loom_status status);

/* Copies config.json of the directory `source` into `folder`. */
loom_status loom__tool_copy_config(const char *source, const char *folder);

/* Sets `tensors` and `bytes` to what the checkpoint at `path` holds. */
loom_status loom__tool_measure(const char *path, loom_tool_outcome *outcome);

/* The common state `from` (or NULL) with this layout and the optimizer, if any, in the form of the options; what else
 * it has goes along. */
loom_status loom__offline_common(loom_value_pool *pool, const loom_value *from, const loom__offline_layout *layout,
    const loom__sharded_options *options, const loom__optimizer_values *optimizer, const loom_value **common);

#endif
