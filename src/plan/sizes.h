/* A configuration as the numbers that the estimates are made of, over the files of this room. */
#ifndef PLAN_SIZES_H
#define PLAN_SIZES_H

#include "spec/parameter.h"
#include <megaloom/plan.h>
#include <megaloom/schedule.h>

typedef struct loom__plan_sizes {
    const loom_run_config *config;
    loom_model_config model; /* completed */
    loom_layout layout;
    int64_t tp, cp, ep, etp, pp, chunks;
    int64_t dp;                    /* data-parallel ranks; replicas of dense parameters are dp * cp */
    int64_t edp;                   /* replicas of expert parameters */
    int64_t shards, expert_shards; /* of the optimizer; 1 = each rank has all */
    bool sharded, sequence_parallel;
    int64_t b, s;           /* samples of a microbatch, tokens of a sample on one context rank */
    int64_t rows, own_rows; /* tokens of a microbatch on a rank: between and outside the tensor-parallel regions */
    int64_t width, wire;    /* bytes of an activation, and of one between stages */
    loom_schedule_config schedule;
    loom_stage *stages;    /* [chunks, pp], in order of depth */
    int64_t most_forwards; /* of all stages, that lists and simulation may go through */
} loom__plan_sizes;

/* Errors: those of the layout, the model, the split and the schedule. loom__plan_sizes_free. */
loom_status loom__plan_sizes_make(const loom_run_config *config, int64_t world_size, loom__plan_sizes *sizes);
void loom__plan_sizes_free(loom__plan_sizes *sizes);

/* The stage's chunk. */
const loom_stage *loom__plan_chunk_of(const loom__plan_sizes *sizes, int64_t stage, int64_t chunk);
/* Layers of a chunk: *with_experts of them have experts. */
int64_t loom__plan_count_layers(const loom__plan_sizes *sizes, const loom_stage *chunk, int64_t *with_experts);

/* Of these, those behind the last one with experts; all of them where none has. */
int64_t loom__plan_layers_behind_experts(const loom__plan_sizes *sizes, const loom_stage *chunk);
/* The layers of a chunk up to the last one whose attention is of the type; 0 = none is. */
int64_t loom__plan_layers_up_to(const loom__plan_sizes *sizes, const loom_stage *chunk, loom__context_type type);
/* Ranks that exchange heads for rows in a layer of that type; 1 = none do. */
int64_t loom__plan_heads_exchanged_by(const loom__plan_sizes *sizes, loom__context_type type);
/* Rows that a rank sends to experts for a microbatch: one for each choice of a token that finds room. */
int64_t loom__plan_routed_rows(const loom__plan_sizes *sizes);
/* Whether all expert ranks get all rows, and take their own. */
bool loom__plan_gathers_experts(const loom__plan_sizes *sizes);

/* Parameters of a part of the model. */
typedef struct loom__plan_parameters {
    int64_t whole;         /* without padding */
    int64_t active;        /* that one token meets */
    int64_t rank;          /* on one rank, padding included */
    int64_t buffer;        /* their places in the gradient buffer of a rank; dense and expert */
    int64_t expert_buffer; /* the expert ones of these, where they are apart */
    int64_t partial;       /* on a rank: summed over tensor ranks at the end of a step */
} loom__plan_parameters;

typedef struct loom__plan_model {
    loom__plan_parameters embedding, layer, expert_layer, head; /* head: final norm and head; a tied head not counted */
    loom__plan_parameters tied_head;                            /* the copy of a last stage; zeros without a tie */
} loom__plan_model;

loom_status loom__plan_parameters_make(const loom__plan_sizes *sizes, loom__plan_model *model);
/* Of all chunks of a stage: the buffer with its gaps and ends. */
loom__plan_parameters loom__plan_stage_parameters(
    const loom__plan_sizes *sizes, const loom__plan_model *model, int64_t stage);

/* Bytes by kind: what is kept for backwards, what passes, logits. */
typedef struct loom__plan_bytes {
    double activations, buffers, logits;
} loom__plan_bytes;
static inline double loom__plan_bytes_sum(const loom__plan_bytes *bytes) {
    return bytes->activations + bytes->buffers + bytes->logits;
}

/* The memory of one chunk for one microbatch, from before its forward. */
typedef struct loom__plan_ledger {
    loom__plan_bytes forward;  /* at the worst moment of the forward, the input counted */
    loom__plan_bytes kept;     /* between forward and backward */
    loom__plan_bytes backward; /* at the worst moment of the backward, of its input half where it is in two */
    loom__plan_bytes halfway;  /* between the halves */
    loom__plan_bytes weights;  /* at the worst moment of the weight half */
} loom__plan_ledger;

/* Walks the operations of a chunk that begins and ends as `chunk` does, with so many layers of each kind, whose
 * attention is of one type; no more than its arrays have room for (LOOM_ERR_INTERNAL). Of the dense ones as many as in
 * the chunk, at most three, come behind those with experts. split: the backward is in two halves. */
loom_status loom__plan_walk(const loom__plan_sizes *sizes, const loom_stage *chunk, loom__context_type context,
    int64_t dense, int64_t experts, bool split, loom__plan_ledger *ledger);
/* The same of the whole chunk. split: the backward is in two halves. */
loom_status loom__plan_ledger_make(
    const loom__plan_sizes *sizes, const loom_stage *chunk, bool split, loom__plan_ledger *ledger);

/* Fills in the stages but for flops and idle, memory_setup and `worst`. schedule: that of the sizes, perhaps of fewer
 * microbatches; NULL = counted by its formula. */
loom_status loom__plan_memory_make(const loom__plan_sizes *sizes, const loom__plan_model *model,
    const loom_schedule_config *schedule, loom_plan *plan);

/* Operations of one token in one part, forward alone. */
typedef struct loom__plan_flops {
    double layer, expert_layer, head; /* attention by half where it is causal */
    double full;                      /* what attention over the whole sequence adds to a layer */
    double attention;                 /* of a layer: what selective recomputation repeats */
    double expert_mlp;                /* of a layer of experts: what moe_layer_recompute repeats */
} loom__plan_flops;
loom__plan_flops loom__plan_flops_of(const loom__plan_sizes *sizes);

/* What moves over one kind of groups in one way. A kind of traffic has some of them. */
typedef enum loom__plan_flow {
    LOOM__FLOW_TENSOR,
    LOOM__FLOW_CONTEXT_RING,
    LOOM__FLOW_CONTEXT_HEADS,
    LOOM__FLOW_CONTEXT_OUTER_RING, /* of a2a+p2p; the next one too */
    LOOM__FLOW_CONTEXT_INNER_HEADS,
    LOOM__FLOW_EXPERTS,
    LOOM__FLOW_EXPERT_SLICES,
    LOOM__FLOW_PIPELINE,
    LOOM__FLOW_GRADIENTS,
    LOOM__FLOW_EXPERT_GRADIENTS,
    LOOM__FLOW_PARAMETERS,
    LOOM__FLOW_EXPERT_PARAMETERS,
    LOOM__FLOW_EMBEDDING,
    LOOM__FLOWS
} loom__plan_flow;
loom_plan_traffic_kind loom__plan_flow_kind(loom__plan_flow flow);

/* Where the flows of a layout go. */
typedef struct loom__plan_links {
    double across[LOOM__FLOWS];    /* the share of its bytes that go from node to node */
    double bandwidth[LOOM__FLOWS]; /* bytes a second that a rank sends: those of the network as soon as any go there */
} loom__plan_links;
loom__plan_links loom__plan_links_of(const loom__plan_sizes *sizes, const loom_plan_machine *machine);

/* Fills in traffic, and as exposed_seconds what the bytes of each kind take if nothing is computed meanwhile. */
void loom__plan_traffic_make(
    const loom__plan_sizes *sizes, const loom__plan_model *model, const loom__plan_links *links, loom_plan *plan);
/* Bytes that a rank sends for one microbatch in one chunk: forward, and backward. */
typedef struct loom__plan_chunk_traffic {
    double forward[LOOM__FLOWS], backward[LOOM__FLOWS];
} loom__plan_chunk_traffic;
loom__plan_chunk_traffic loom__plan_chunk_traffic_of(const loom__plan_sizes *sizes, const loom_stage *chunk);
/* Bytes of a message between stages. */
double loom__plan_message(const loom__plan_sizes *sizes);

/* A schedule whose lists can be made and simulated in a moment: that of the sizes, or, of so many microbatches that
 * this cannot, one of fewer whose worst moment is the same. False where there are too many stages even for that. */
bool loom__plan_short_schedule(const loom__plan_sizes *sizes, loom_schedule_config *schedule);
/* Fills in operations, bubble and times; after memory and traffic. schedule: as above. */
loom_status loom__plan_time_make(const loom__plan_sizes *sizes, const loom_plan_machine *machine,
    const loom__plan_links *links, const loom_schedule_config *schedule, loom_plan *plan);
/* loom_plan_make for so many forwards: see loom__plan_sizes. */
loom_status loom__plan_make(
    const loom_run_config *config, const loom_plan_options *options, int64_t most_forwards, loom_plan **plan);
/* Fills in the line of what binds; last. */
void loom__plan_binds(const loom__plan_sizes *sizes, loom_plan *plan);

#endif
