/* What the datasets of this room share. */
#ifndef DATA_DATASET_H
#define DATA_DATASET_H

#include <megaloom/data.h>

/* For messages. */
static inline const char *loom__split_name(loom_split split) {
    return split == LOOM_SPLIT_TRAIN ? "train" : split == LOOM_SPLIT_VALID ? "valid" : "test";
}

/* Every label masked: for padding rows. */
static inline void loom__mask_row(const loom_sample_row *row, int64_t s) {
    for (int64_t i = 0; i < s; i++)
        row->loss_mask[i] = 0.0f;
}

#endif
