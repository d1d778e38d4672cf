/* Data-parallel gradients: one buffer for all parameters of a rank, cut in buckets whose reduction overlaps with the
 * rest of the backward. A bucket never holds parameters of two chunks of the model, so that the reduction of a chunk
 * need not wait for the backward of another.
 *
 * A step: loom__ddp_begin_step; then backwards, with loom__ddp_expect_last(ddp, true) before the last one of a chunk
 * and loom__ddp_parameter_ready as the tape's hook; then loom__ddp_finish. Only a rank's own thread may call.
 *
 * With use_distributed_optimizer each member of an instance holds one shard of every bucket: finish leaves the sum in
 * that part of grad alone, the optimizer updates that part of the parameters, and loom__ddp_gather hands the parts
 * round. */
#ifndef DDP_DDP_H
#define DDP_DDP_H

#include "ddp/map.h"
#include <megaloom/tensor.h>

typedef struct loom__ddp loom__ddp;

typedef struct loom__ddp_options {
    bool overlap_grad_reduce;   /* buckets start inside the last backward; false: one bucket, started by finish */
    int64_t bucket_size;        /* elements; 0 = Megatron's default, max(40e6, 1e6 * data-parallel size) */
    int64_t data_parallel_size; /* of that default: without context parallelism; 0 = the size of dp */
    loom_dtype param_dtype;     /* F32, BF16 or F16: in which parameters are kept from now on; F32 masters stay */
    bool grad_reduce_in_fp32;   /* false: gradients travel in param_dtype; they are fp32 before and behind it */
    bool average_in_collective; /* the sum over dp is multiplied by 1/dp (in fp32) */
    bool check_for_nan_in_grad; /* each rank's gradients are checked before they are reduced */
    bool check_for_large_grads; /* a bucket whose norm, before it is reduced, is 10 times the largest of the first 100
                                   that this rank looked at, or more, is logged as a warning */
    bool microbatches_noted;    /* loom__ddp_note_microbatch is called: its messages then name the microbatch */
    bool note_nonfinite;        /* what that finds is no failure, but noted: see loom__ddp_nonfinite */
    bool disable_bucketing;     /* a chunk is one bucket (pipeline stages after the first); chunks after the first
                                   always are */
    bool use_distributed_optimizer;
    bool pad_buckets_for_high_nccl_busbw;
    loom_comm *instance; /* members that share out the optimizer: consecutive places of dp, as many as divide it; NULL =
                            dp */
    loom_comm *expert;   /* over which gradients of expert parameters are reduced; NULL: there can be none */
    loom_comm *expert_instance; /* of that group what instance is of dp */
    bool overlap_param_gather;  /* gathers go on during the next forward (loom_parameter_ready waits); false: gather
                                   waits for them */
    bool align_param_gather;    /* all start at once; false: each when the one before it is wanted */
    bool gathers_by_chunk;      /* loom__ddp_sync_parameters starts them, at the latest who wants them */
    /* PyTorch's wrapper: */
    int64_t first_bucket_size;   /* elements of the first bucket of a chunk; 0 = Megatron's rule */
    bool find_unused_parameters; /* a parameter that no tape of the last backward uses is ready from its beginning */
    bool static_graph;           /* so is, from the second step on, one that was not used in the first */
    bool leave_reduction;        /* nothing is reduced */
} loom__ddp_options;

/* overlap_grad_reduce true, the rest off. */
loom__ddp_options loom__ddp_options_default(void);

/* Dense parameters and expert ones have a buffer each, the dense one first; they lie in one piece of memory. */
enum { LOOM__DDP_DENSE, LOOM__DDP_EXPERT, LOOM__DDP_KINDS };

/* Over whom a buffer is reduced, and who holds its shards. */
typedef struct loom__ddp_share {
    loom_comm *group;      /* NULL where there is no such buffer */
    loom_comm *instance;   /* whose members hold the shards; group where there is one instance */
    int64_t shards, shard; /* 1 and 0 where nothing is shared out */
} loom__ddp_share;

/* What the optimizer and checkpoints walk; owned by the ddp, constant during its life. */
typedef struct loom__ddp_view {
    loom__ddp_share share[LOOM__DDP_KINDS];
    int64_t elements; /* of all buffers, gaps included */
    float *grad;      /* [elements]; it and the next have one map, whose gaps hold zeros */
    loom_dtype dtype; /* of the parameters */
    float *data;      /* [elements] where that is F32, else NULL */
    uint16_t *data16; /* [elements] where it is BF16 or F16, else NULL */
    float *master;    /* [state_elements], in the order of the parts: the values of which data16 is rounded, or NULL */
    bool has_experts;
    int64_t place_count;               /* = parameters */
    const loom__ddp_place *places;     /* [place_count] */
    loom_parameter *const *parameters; /* [place_count] in the order of the places: of each buffer the
                                          reverse of the list */
    int64_t bucket_count;
    const loom__ddp_bucket *buckets; /* [bucket_count] */
    bool sharded;
    const loom__ddp_part *parts; /* [place_count] what this rank updates of each place: all of it, or its shard */
    int64_t state_elements;      /* of an array in which `state` of the parts is a place */
} loom__ddp_view;

/* Wraps the parameters, in model order, for the group dp (the same list on every member; expert parameters the same on
 * every member of options->expert). Makes a gradient buffer and a
 * parameter buffer of one map; each parameter's values are copied into the latter, rounded to param_dtype, and data (or
 * data16) and grad then point into the buffers, which the ddp owns. With 16 bits the masters are made first, of values
 * that nothing has rounded yet where the parameters are F32. parameter->memory is freed; where it is NULL the memory
 * that the values lay in stays the caller's. dp, rank and the parameters must outlive the ddp. Not collective. */
loom_status loom__ddp_create(loom_rank *rank, const loom__ddp_options *options, loom_parameter *const *parameters,
    int64_t count, loom_comm *dp, loom__ddp **ddp);
/* Waits for what is still outstanding; the parameters' values and grad become NULL. NULL is accepted. */
void loom__ddp_destroy(loom__ddp *ddp);

/* Every gradient counts as not written (the next contribution writes, beta 0) and no bucket as started. */
void loom__ddp_begin_step(loom__ddp *ddp);
/* Whether the backwards that come are the last ones of their chunks in the step. Buckets start only in those. */
void loom__ddp_expect_last(loom__ddp *ddp, bool last);
/* loom_tape_options.parameter_ready, with the ddp as its context. In the last backward a bucket starts as soon as all
 * parameters of it and of all earlier buckets of its buffer are ready: in index order on every rank, whatever order
 * they become ready in. Parameters that the ddp does not hold are ignored. What fails here is returned by
 * loom__ddp_finish. */
void loom__ddp_parameter_ready(void *ddp, loom_parameter *parameter);
/* Starts the reductions of this chunk and those behind it, whose last backwards are over, for schedules in which all
 * stages do so at once (LOOM_INSTRUCTION_GRAD_SYNC). Nothing without overlap_grad_reduce. What fails here, and
 * in the next one, is returned by loom__ddp_finish. */
void loom__ddp_sync_gradients(loom__ddp *ddp, int64_t chunk);
/* Starts the gathers of this chunk and those before it (LOOM_INSTRUCTION_PARAM_SYNC). */
void loom__ddp_sync_parameters(loom__ddp *ddp, int64_t chunk);
/* The backward of a microbatch is over on this rank, on all its chunks: where gradients have a NaN or an infinity now,
 * the messages about them name it. */
void loom__ddp_note_microbatch(loom__ddp *ddp, int64_t microbatch);
/* Starts the buckets that have not started (a gradient that nobody wrote is zero) and waits for all: grad, of shards
 * this rank's part of it, then holds the sum over its group in group-rank order, or with average_in_collective that sum
 * over the size of dp, of experts too: a step's seed has that size for all. Collective over both groups. Errors:
 * LOOM_ERR_NUMERIC names parameter, microbatch, bucket and rank of a NaN or infinity (check_for_nan_in_grad; other
 * members get LOOM_ERR_ABORTED and the message); LOOM_ERR_STATE when a parameter became ready twice in the last
 * backward, or when one that static_graph has left out is used; those of the communication. */
loom_status loom__ddp_finish(loom__ddp *ddp);

/* With note_nonfinite: parameter, microbatch, bucket and rank of the first NaN or infinity that this rank's gradients
 * had before the last reduction; NULL where there was none. */
const char *loom__ddp_nonfinite(const loom__ddp *ddp);

/* The parts of the parameters have changed, after a loom__ddp_wait_parameters: every member gets all of them, at once
 * or, with overlap_param_gather, until the next loom__ddp_wait_parameters. Does nothing without shards. Collective over
 * the instances. */
loom_status loom__ddp_gather(loom__ddp *ddp);
/* All parameters are whole on this rank. NULL: nobody changes them. Collective over the instance. */
loom_status loom__ddp_wait_parameters(loom__ddp *ddp);
/* The reduced gradients are whole on every member, for who reads them beside the optimizer. Does nothing without
 * shards. Collective over the instance, between finish and the next step. */
loom_status loom__ddp_gather_gradients(loom__ddp *ddp);

const loom__ddp_view *loom__ddp_view_of(const loom__ddp *ddp);

#endif
