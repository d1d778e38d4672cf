/* Layout arithmetic for the other rooms; the public part is <megaloom/layout.h>. */
#ifndef LAYOUT_LAYOUT_H
#define LAYOUT_LAYOUT_H

#include "base/faults.h"
#include <megaloom/layout.h>
#include <megaloom/stages.h>

/* Uneven parts: n things in `parts` consecutive parts whose sizes differ by one at most, the longer ones first. Part
 * `index` is [*first, *first + *count). n >= 0, parts >= 1, 0 <= index < parts; a part may be empty. */
void loom__layout_range(int64_t n, int64_t parts, int64_t index, int64_t *first, int64_t *count);
/* The part that holds thing `i`, 0 <= i < n. */
int64_t loom__layout_range_part(int64_t n, int64_t parts, int64_t i);

/* The axes, in the reference's naming order; an order string is a permutation of them. */
typedef enum loom__axis { LOOM__AXIS_TP, LOOM__AXIS_CP, LOOM__AXIS_EP, LOOM__AXIS_DP, LOOM__AXIS_PP } loom__axis;

/* Sizes that passed all checks, with everything derived from them. */
typedef struct loom__layout_checked {
    loom_parallel_sizes sizes; /* absent values filled in, order complete and in lower case */
    loom__axis order[LOOM_LAYOUT_AXES];
    int64_t data, expert_data;
    int64_t encoder_ranks, decoder_ranks;
} loom__layout_checked;

/* All checks of loom_layout_init. *out is written where they find nothing; its `data` always, 0 where the ranks cannot
 * be divided. */
void loom__layout_faults(const loom_parallel_sizes *sizes, loom__layout_checked *out, loom__faults *faults);
/* The same, with the nearest legal values. */
loom_status loom__layout_check(const loom_parallel_sizes *sizes, loom__layout_checked *out);

/* Virtual stages want a pipeline; 0 = none. Sizes need not be legal otherwise. Errors: LOOM_ERR_CONFIG. */
loom_status loom__check_virtual_stages(int64_t virtual_pipeline, int64_t pipeline);

/* All checks of loom_stage_split_make. *chunks: of a stage, written where there are no faults of its number. */
void loom__stage_split_faults(const loom_stage_split *split, int64_t *chunks, loom__faults *faults);
/* The same, with the nearest legal values. */
loom_status loom__stage_split_check(const loom_stage_split *split);
/* Those of the number of chunks alone, which layers have no part in. */
void loom__stage_chunks_faults(const loom_stage_split *split, int64_t *chunks, loom__faults *faults);

#endif
