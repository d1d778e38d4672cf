/* Rectangles of a tensor, and where their elements lie in an array: what saving, loading and resharding are made of.
 * Pure arithmetic. */
#ifndef CHECKPOINT_BOX_H
#define CHECKPOINT_BOX_H

#include "spec/parameter.h"

/* Rows and columns of a canonical tensor, whose rows may go on into the padding of the vocabulary. A tensor of one
 * dimension has one column. */
typedef struct loom__box {
    int64_t first[2], count[2];
    int64_t at;     /* place of the first element in the array */
    int64_t stride; /* elements from one row to the next in the array */
} loom__box;

/* What one tensor rank holds of a parameter: up to two boxes whose rows follow each other in the local tensor, each as
 * wide as that. */
enum { LOOM__SHARD_BOXES = 2 };
typedef struct loom__shard_box {
    loom__box box;   /* in the local tensor */
    int64_t replica; /* 0 on the one tensor rank that stands for this box; on others, which hold copies, above 0 */
} loom__shard_box;

/* Writes the boxes in local order and returns how many. 0 <= tp_rank < tp. */
int loom__shard_boxes(const loom__model_spec *spec, const loom__parameter_descriptor *parameter, int64_t tp,
    int64_t tp_rank, loom__shard_box boxes[LOOM__SHARD_BOXES]);

/* The part of a box whose elements lie in [first, first + count) of its array, where its rows follow each other without
 * a gap: a piece of a row, whole rows, a piece of a row. In `out` the element at `first` lies at `at` of another array,
 * the others behind it. Returns how many boxes there are. */
enum { LOOM__RANGE_BOXES = 3 };
int loom__box_range(const loom__box *box, int64_t first, int64_t count, int64_t at, loom__box out[LOOM__RANGE_BOXES]);

/* What is to be copied from one array to another; all in elements. */
typedef struct loom__box_copy {
    int64_t rows, columns;
    int64_t from, from_stride, to, to_stride;
} loom__box_copy;

/* The elements that both boxes have; false where there are none. */
bool loom__box_meet(const loom__box *from, const loom__box *to, loom__box_copy *copy);

#endif
