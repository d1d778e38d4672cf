/* Which gradient buffers a rank has: one for each pair of dtypes of dense and of expert parameters, laid out by
 * ddp/map.h. Pure arithmetic; the rules are those of Megatron-Core's DistributedDataParallel. */
#ifndef DDP_PLAN_H
#define DDP_PLAN_H

#include "ddp/map.h"

/* A parameter, in model order. */
typedef struct loom__ddp_parameter {
    loom__ddp_entry entry;
    loom_dtype dtype;
    bool expert; /* its gradient is reduced over the expert-data-parallel group */
    bool frozen; /* has no gradient, and no place in a buffer */
} loom__ddp_parameter;

typedef struct loom__ddp_plan_options {
    bool grad_reduce_in_fp32; /* gradients are fp32 also where parameters are not */
    bool overlap_grad_reduce; /* false: nothing ends a bucket by its size */
    bool disable_bucketing;   /* neither does it here: stages after the first */
    bool use_distributed_optimizer, pad_buckets_for_high_nccl_busbw;
    bool average_in_collective;
    int64_t bucket_size;                 /* elements; -1 = loom__ddp_default_bucket_size(data_parallel) */
    int64_t data_parallel;               /* without context parallelism */
    int64_t dense_shards, expert_shards; /* members of the groups that share out a bucket */
    int64_t dense_group;                 /* members of the group that dense gradients are reduced over */
    int64_t alignment;                   /* of places where nothing is shared out */
    int64_t first_bucket_size;           /* of PyTorch's rule; 0 = Megatron's */
} loom__ddp_plan_options;

typedef struct loom__ddp_plan_buffer {
    loom_dtype param_dtype, grad_dtype;
    bool expert;
    double scale;     /* by which the sum over its group is multiplied */
    int64_t count;    /* parameters */
    int64_t *indices; /* [count] in the list, in its order: place p holds indices[count-1-p] */
    loom__ddp_place *places;
    loom__ddp_bucket *buckets;
    int64_t bucket_count, elements;
} loom__ddp_plan_buffer;

enum { LOOM__DDP_BUFFERS = 8 };
/* Dense buffers first, each kind in the order of its first parameter. */
typedef struct loom__ddp_plan {
    int64_t bucket_size; /* as loom__ddp_map_options has it */
    int buffer_count;
    loom__ddp_plan_buffer buffers[LOOM__DDP_BUFFERS];
} loom__ddp_plan;

/* loom__ddp_plan_free frees what it made, also of a zeroed plan. Errors: those of loom__ddp_map, LOOM_ERR_ARGUMENT for
 * more dtypes than there are, LOOM_ERR_MEMORY. */
loom_status loom__ddp_plan_make(
    const loom__ddp_parameter *parameters, int64_t count, const loom__ddp_plan_options *options, loom__ddp_plan *plan);
void loom__ddp_plan_free(loom__ddp_plan *plan);

#endif
