/* What a checkpoint stores of one module, sorted to the parameters of a model. */
#ifndef STATE_STORED_H
#define STATE_STORED_H

#include "checkpoint/written.h"
#include "state/state.h"

typedef struct loom__stored {
    const loom_checkpoint *checkpoint;
    loom__stored_tensor *tensors;
    loom__stored_chunk **chunks; /* [count] */
    int64_t *numbers;            /* [count] of the checkpoint's tensors */
    int64_t count;
    loom__written written;
    loom__reshard_source *source;
} loom__stored;

/* The tensors of the scope, without an optimizer's where the weights alone are asked for. Their names are borrowed from
 * the checkpoint. LOOM_ERR_MEMORY; loom__stored_free also after an error. */
loom_status loom__stored_list(const loom__load_scope *scope, bool weights_alone, loom__stored *stored);
/* Makes the source; spec and options are borrowed for its life. An optimizer's buckets are understood by the layout
 * that the checkpoint tells, or as they look. Errors: those of loom__reshard_source_create and loom__layout_read. */
loom_status loom__stored_sort(const loom__load_scope *scope, const loom__model_spec *spec,
    const loom__sharded_options *options, loom__stored *stored);
void loom__stored_free(loom__stored *stored); /* a zeroed one is accepted */

/* The plan of an array of every parameter of the model, whole: its `missing` are numbers of parameters. */
loom_status loom__stored_plan_whole(
    const loom__stored *stored, const loom__model_spec *spec, int array, loom__reshard_plan **plan);

static inline const loom_checkpoint_tensor *loom__stored_tensor_of(const loom__stored *stored, int64_t number) {
    return loom_checkpoint_tensor_at(stored->checkpoint, stored->numbers[number]);
}

#endif
