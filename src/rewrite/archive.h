/* The state that a checkpoint holds, asked for by parameters of any layout, without ranks. */
#ifndef REWRITE_ARCHIVE_H
#define REWRITE_ARCHIVE_H

#include "checkpoint/checkpoint.h"
#include "format/file.h"
#include "state/stored.h"
#include <megaloom/config.h>

typedef struct loom__archive {
    loom_checkpoint *checkpoint;
    loom_value_pool *pool;
    loom__model_spec *spec; /* of the whole model */
    loom_dtype param_dtype; /* of the weights */
    bool has_optimizer, has_masters;
    int moments;
    struct loom__sharded_moment moment[LOOM__STATE_MOMENTS];
    loom__optimizer_values optimizer; /* what there is of it */
    loom__stored stored;
} loom__archive;

/* Opens the checkpoint of a model of that configuration (as given, not completed). weights_only: as if it had no
 * optimizer. All weights must be there, of an
 * optimizer all of each moment, and no tensor that is nothing of both: LOOM_ERR_NOT_FOUND lists what is missing, too
 * much or of another shape. Errors also: those of loom_checkpoint_open and loom__reshard_source_create. */
loom_status loom__archive_open(
    const char *path, const loom_model_config *config, bool weights_only, loom__archive **archive);
void loom__archive_close(loom__archive *archive); /* NULL is accepted */

/* out = the elements that `want` names, of one of the tp that share the parameter in a model of `spec`, whose
 * vocabulary may be padded otherwise: rows that are not stored are zero. want->at is 0. Of masters that are not stored
 * the weights are given. dtype is that of the array as stored, or LOOM_F32. What is read lies in the mapping of the
 * checkpoint: no more memory than a deflated chunk takes. */
loom_status loom__archive_read(const loom__archive *archive, const loom__model_spec *spec, int64_t tp, int64_t tp_rank,
    const loom__reshard_want *want, loom_dtype dtype, void *out);

#endif
