/* Tensors of a checkpoint under their own names in another form. */
#ifndef REWRITE_CONVERT_H
#define REWRITE_CONVERT_H

#include <megaloom/checkpoint_tools.h>

typedef enum loom__raw_form { LOOM__RAW_DCP, LOOM__RAW_SAFETENSORS } loom__raw_form;

/* All tensors of `in`, read a block at a time. Of dcp also objects and common state; `dropped_objects` counts what is
 * left out. */
loom_status loom__convert_raw(const char *in, const char *out, loom__raw_form form, const loom_tool_progress *progress,
    loom_tool_outcome *outcome);

/* Calls block(context, offsets, sizes, elements) for row-major pieces of the box [offsets, +sizes) of a tensor,
 * in order, each of at most some millions of elements, or one row. */
typedef loom_status (*loom__block)(void *context, const int64_t *offsets, const int64_t *sizes, int64_t elements);
loom_status loom__walk_blocks(int dims, const int64_t *offsets, const int64_t *sizes, loom__block block, void *context);

#endif
