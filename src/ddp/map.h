/* Where each parameter lies in the gradient buffer, where buckets end, and which part of them belongs to whom. Pure
 * arithmetic. */
#ifndef DDP_MAP_H
#define DDP_MAP_H

#include <megaloom/types.h>

enum { LOOM__DDP_ALIGNMENT = 16 }; /* elements: 64 bytes of fp32 */

/* A parameter, in model order. */
typedef struct loom__ddp_entry {
    int64_t count;         /* elements */
    int64_t chunk;         /* of the model; never less than before */
    bool shared_embedding; /* a copy on the first and on the last stage: both cut it into the same shards */
} loom__ddp_entry;

typedef struct loom__ddp_map_options {
    /* Elements; a bucket ends with the parameter that makes it hold as many or more, and with its chunk; chunks after
     * the first are one bucket each. -1: none ends by its size; 0: each with its first parameter. */
    int64_t bucket_size;
    /* Of the places, in elements; a gap counts for nothing. Megatron-Core's plain buffer has 1. With shards it is 64,
     * gaps count for the size of a bucket, and a shared embedding has a bucket of its own. */
    int64_t alignment;
    int64_t shards; /* members that each hold an equal part of every bucket; 0 = no shards */
    /* With shards: buckets end at multiples of 2^16 elements as well as of 128 and the number of shards. */
    bool pad_for_high_busbw;
    /* PyTorch's rule: the first bucket of a chunk ends by this size; 0 = by bucket_size. All chunks are bucketed. */
    int64_t first_bucket_size;
} loom__ddp_map_options;

/* The buffer is cut in places, one a parameter, next to each other: place p holds parameter count-1-p of the list. A
 * place starts at a multiple of the alignment; the gap before the next one holds zeros. */
typedef struct loom__ddp_place {
    int64_t start, count; /* elements */
    int64_t bucket;
} loom__ddp_place;

typedef struct loom__ddp_bucket {
    int64_t start, end; /* elements of the buffer, gaps included; end is the next bucket's start */
    int64_t unpadded;   /* elements to the end of its last place; before a shared embedding to where that could start */
    int64_t first_place, places; /* consecutive places */
    bool expert;                 /* of expert parameters; loom__ddp_map leaves it false */
} loom__ddp_bucket;

/* The elements of one place that one shard holds; count may be 0. `state` is where they lie when the parts of all
 * buckets stand next to each other, as a sharded optimizer keeps them. */
typedef struct loom__ddp_part {
    int64_t start, count; /* elements of the buffer */
    int64_t state;
} loom__ddp_part;

/* The default of Megatron-Core: max(40e6, 1e6 * dp) elements; dp without context parallelism. */
int64_t loom__ddp_default_bucket_size(int64_t dp);

/* Lays out `count` parameters. places and buckets have room for `count` entries each. *bucket_count is 0 only for count
 * 0; *elements is the whole length. LOOM_ERR_ARGUMENT names what does not fit. */
loom_status loom__ddp_map(const loom__ddp_entry *entries, int64_t count, const loom__ddp_map_options *options,
    loom__ddp_place *places, loom__ddp_bucket *buckets, int64_t *bucket_count, int64_t *elements);

/* What shard `shard` of `shards` holds of a place in its bucket, whose length is a multiple of `shards`. */
loom__ddp_part loom__ddp_part_of(
    const loom__ddp_place *place, const loom__ddp_bucket *bucket, int64_t shards, int64_t shard);

#endif
