/* The layout that wrote a checkpoint, found again from what it holds. Pure arithmetic. */
#ifndef CHECKPOINT_WRITTEN_H
#define CHECKPOINT_WRITTEN_H

#include "checkpoint/reshard.h"

typedef struct loom__written {
    loom__sharded_layout layout; /* its spec and stages are below */
    loom__model_spec *spec;
    loom_stage *stages;
} loom__written;

/* From the tensors of a dp_reshardable optimizer: tensor ranks are the row chunks of the word embeddings, pipeline
 * stages the data-parallel groups over those, chunks of a stage the buffers of a group; layers are cut evenly and
 * buckets as Megatron-Core does by default; ranks that share experts are the groups of experts over the pieces that the
 * columns of linear_fc2 are in. What that does not fit is refused where the buckets are read. `config` is
 * that of the model, completed for any layout. *found is false where the checkpoint has no buckets; then nothing is
 * written. Errors: LOOM_ERR_FORMAT for buckets without word embeddings or of a number that the ranks do not divide;
 * those of the configuration, LOOM_ERR_MEMORY. */
loom_status loom__written_find(const loom_model_config *config, const loom__stored_tensor *tensors, int64_t count,
    loom__written *written, bool *found);
/* The same from a layout that the checkpoint tells: spec is made for it, stages are copied. Errors: LOOM_ERR_FORMAT for
 * sizes that cannot be; those of the configuration, LOOM_ERR_MEMORY. */
loom_status loom__written_from(const loom_model_config *config, const loom__stored_tensor *tensors, int64_t count,
    const loom__sharded_layout *told, loom__written *written);
void loom__written_free(loom__written *written); /* also of a zeroed one */

#endif
