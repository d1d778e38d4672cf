/* The record of one chunk or object in a description. */
#ifndef CHECKPOINT_DESCRIPTION_H
#define CHECKPOINT_DESCRIPTION_H

#include "checkpoint/writer.h"
#include "format/pickle.h"

typedef struct loom__checkpoint_record {
    int32_t dtype; /* -1 = an object */
    int32_t dims;
    int64_t shape[LOOM_CHECKPOINT_MAX_DIMS], offsets[LOOM_CHECKPOINT_MAX_DIMS], sizes[LOOM_CHECKPOINT_MAX_DIMS];
    uint64_t position, bytes;
    uint32_t file_bytes, name_bytes; /* of the texts that follow, each with its zero byte */
} loom__checkpoint_record;

#endif
