/* What the files of the gradient buffer share. */
#ifndef DDP_STATE_H
#define DDP_STATE_H

#include "ddp/ddp.h"
#include "ddp/plan.h"
#include <megaloom/timeline.h>

enum { LOOM__DDP_MESSAGE = 1024 };

typedef struct loom__ddp_lookup {
    const loom_parameter *parameter;
    int64_t place;
} loom__ddp_lookup;

/* Of a collective, for the trace; started is 0 while none is recorded. */
typedef struct loom__ddp_times {
    uint64_t started, ended;
} loom__ddp_times;

typedef struct loom__ddp_bucket_state {
    int64_t waiting;       /* parameters that are not ready */
    loom_request *request; /* of the gradients */
    bool widen;            /* its sum lies in reduced16 */
    loom_request *gather;  /* of the parameters */
    bool stale;            /* other members have newer parameters than those here */
    loom__ddp_times reduction, gathering;
} loom__ddp_bucket_state;

/* The buckets of one buffer, and how far they have come. */
typedef struct loom__ddp_region {
    int64_t first, end;
    int64_t next;         /* of those before it the reduction has started in this step */
    int64_t gathers_left; /* those before it have no gather under way or done since the last update */
} loom__ddp_region;

struct loom__ddp {
    loom_rank *rank;
    loom__ddp_options options;
    loom__ddp_view view;
    loom__ddp_region region[LOOM__DDP_KINDS];
    float scale[LOOM__DDP_KINDS]; /* by which a sum is multiplied */
    loom__ddp_place *places;
    loom__ddp_bucket *buckets;
    loom__ddp_part *parts;
    loom_parameter **parameters;  /* in the order of the places */
    loom__ddp_lookup *by_address; /* sorted */
    bool *ready;                  /* of each place, in this step */
    bool *unused;                 /* of each place: no gradient in the step that made the graph static */
    uint16_t *reduced16;          /* [elements] what is reduced; NULL where gradients are reduced in fp32 */
    const loom_kernels16 *narrow; /* of the parameters' dtype; NULL for F32 */
    loom__ddp_bucket_state *states;
    int64_t *part_counts; /* [most shards] elements of one bucket's parts */
    int64_t chunks;       /* of the model, on this rank */
    bool last, graph_known;
    int64_t norms_seen;     /* by check_for_large_grads, at most as many as it learns from */
    double largest_norm;    /* of those */
    int64_t bad_microbatch; /* the first one of this step after which a gradient was not finite; -1 = none known */
    loom_status failure;    /* the first one of this step; reported by finish */
    char message[LOOM__DDP_MESSAGE];
    char nonfinite[LOOM__DDP_MESSAGE]; /* the first note of this step, or empty */
};

/* Of a parameter, or -1. */
int64_t loom__ddp_find_place(const loom__ddp *ddp, const loom_parameter *parameter);
/* To the trace, if there is one: a collective of the bucket that is complete. */
void loom__ddp_add_span(loom__ddp *ddp, int64_t index, loom_span_kind kind, const loom__ddp_times *times);
/* Waits for every reduction under way, also after one has failed. */
loom_status loom__ddp_wait_reductions(loom__ddp *ddp);
/* Starts the gathers of chunks up to this one that no use has asked for yet; of all chunks before anything else is
 * started on their group. */
loom_status loom__ddp_start_gathers(loom__ddp *ddp, int64_t chunk);
/* Waits for those under way, whatever becomes of them. */
void loom__ddp_drop_gathers(loom__ddp *ddp);

static inline const loom__ddp_share *loom__ddp_share_of(const loom__ddp *ddp, const loom__ddp_bucket *bucket) {
    return &ddp->view.share[bucket->expert ? LOOM__DDP_EXPERT : LOOM__DDP_DENSE];
}

static inline loom__ddp_region *loom__ddp_region_of(loom__ddp *ddp, int64_t index) {
    return &ddp->region[ddp->buckets[index].expert ? LOOM__DDP_EXPERT : LOOM__DDP_DENSE];
}

/* Of the model, to which all parameters of the bucket belong. */
static inline int64_t loom__ddp_chunk_of(const loom__ddp *ddp, int64_t index) {
    return ddp->parameters[ddp->buckets[index].first_place]->chunk;
}

/* Elements of the bucket that one shard holds. */
static inline int64_t loom__ddp_part_length(const loom__ddp *ddp, const loom__ddp_bucket *bucket) {
    return (bucket->end - bucket->start) / loom__ddp_share_of(ddp, bucket)->shards;
}

#endif
