/* Layout: which rank is in which group, as pure arithmetic.
 *
 * A layout is made from the parallel sizes alone, without ranks, communication or memory; it is a value that may be
 * copied and read by any number of threads. Every question about a (rank, group) takes constant time, so a million
 * ranks can be asked in a moment. The groups and their order are those of Megatron-Core 0.16's
 * initialize_model_parallel; with an encoder, those of Megatron-LM v0.12.
 *
 * Ranks lie on a grid of the axes tp, cp, ep, dp, pp in the order of an order string, whose first axis varies fastest.
 * Two grids cover the same ranks: the dense one (tp, cp, dp, pp) and the expert one (expert tp, ep, expert dp, pp). A
 * group kind leaves some axes free: its groups are the ranks that agree on all other axes. An encoder has a pair of
 * grids of its own on the ranks before the decoder's.
 *
 * "place" is a rank's place in a group (its group rank), "index" the number of the group among those of its kind.
 * Members of a group are in ascending rank order. Passing a kind, rank, index or place out of range is answered by -1,
 * 0 or false as said at each function; nothing here is collective and nothing but loom_layout_init can fail. */
#ifndef MEGALOOM_LAYOUT_H
#define MEGALOOM_LAYOUT_H

#include <megaloom/types.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    LOOM_LAYOUT_AXES = 5,
    LOOM_LAYOUT_HCP_LEVELS = 8, /* levels of hierarchical context parallelism, at most */
    LOOM_LAYOUT_ORDER_BYTES = 32
};

/* The parallel sizes, in ranks. Start from loom_parallel_sizes_default(world). The field of the Python strategy that
 * a member stands for is named beside it; error messages use that name. */
typedef struct loom_parallel_sizes {
    int64_t world;               /* ranks in all, encoder ranks included */
    int64_t tensor;              /* tensor_model_parallel_size */
    int64_t pipeline;            /* pipeline_model_parallel_size (of the decoder) */
    int64_t virtual_pipeline;    /* virtual_pipeline_model_parallel_size; 0 = none */
    int64_t context;             /* context_parallel_size */
    int64_t expert;              /* expert_model_parallel_size */
    int64_t expert_tensor;       /* expert_tensor_parallel_size; 0 = absent, then = tensor */
    int64_t encoder_tensor;      /* encoder_tensor_model_parallel_size; 0 = tensor where there is an encoder */
    int64_t encoder_pipeline;    /* encoder_pipeline_model_parallel_size; 0 = no encoder ranks */
    int64_t optimizer_instances; /* num_distributed_optimizer_instances */
    int hierarchical_levels;     /* entries used in hierarchical_context; 0 = none */
    int64_t
        hierarchical_context[LOOM_LAYOUT_HCP_LEVELS]; /* hierarchical_context_parallel_sizes, innermost level first */
    /* Experts are cut over tensor x expert ranks in place of being shared out: a layout's own sizes have
     * expert_tensor = tensor * expert, expert = 1 and false here. */
    bool moe_extended_tp;
    bool use_tp_pp_dp_mapping;           /* order tp-cp-ep-pp-dp in place of tp-cp-ep-dp-pp */
    char order[LOOM_LAYOUT_ORDER_BYTES]; /* axes joined by '-', any case; "" = as use_tp_pp_dp_mapping says. An axis
                                            left out must have size 1 */
} loom_parallel_sizes;

/* All sizes 1, one optimizer instance, nothing optional. */
LOOM_API loom_parallel_sizes loom_parallel_sizes_default(int64_t world);

/* X(ENUM, name): the kinds of groups, in the order in which the reference first creates them; the names are the keys of
 * `megaloom topology --json`.
 *   dp_cp          data and context parallel: the ranks that share dense parameters; gradients are reduced over it
 *   intra_dp_cp    the part of dp_cp inside one optimizer instance (only with more than one instance, else use dp_cp)
 *   hcp_l0 …       levels of hierarchical context parallelism, innermost first (only where sizes are given)
 *   tp_pp          one replica of the model (of one context rank): encoder and decoder together
 *   pp             a pipeline: with an encoder its encoder stages, then its decoder stages
 *   embd           first and last stage of a pipeline (tied word embeddings); one rank where there is one stage
 *   pos_embd       first stage
 *   etp, ep, edp   expert tensor, expert, expert data parallel; etp_ep, etp_ep_pp joined
 *   intra_edp      the part of edp inside one optimizer instance; inter_edp: the same shard of all instances (only with
 *                  more than one instance)
 *   intra_dist_opt all ranks of one optimizer instance (not with an encoder) */
#define LOOM_GROUP_LIST(X)                                                                                             \
    X(DP_CP, "dp_cp")                                                                                                  \
    X(INTRA_DP_CP, "intra_dp_cp")                                                                                      \
    X(DP, "dp")                                                                                                        \
    X(CP, "cp")                                                                                                        \
    X(HCP_L0, "hcp_l0")                                                                                                \
    X(HCP_L1, "hcp_l1")                                                                                                \
    X(HCP_L2, "hcp_l2")                                                                                                \
    X(HCP_L3, "hcp_l3")                                                                                                \
    X(HCP_L4, "hcp_l4")                                                                                                \
    X(HCP_L5, "hcp_l5")                                                                                                \
    X(HCP_L6, "hcp_l6")                                                                                                \
    X(HCP_L7, "hcp_l7")                                                                                                \
    X(TP_PP, "tp_pp")                                                                                                  \
    X(TP, "tp")                                                                                                        \
    X(PP, "pp")                                                                                                        \
    X(EMBD, "embd")                                                                                                    \
    X(POS_EMBD, "pos_embd")                                                                                            \
    X(TP_DP_CP, "tp_dp_cp")                                                                                            \
    X(TP_DP, "tp_dp")                                                                                                  \
    X(TP_CP, "tp_cp")                                                                                                  \
    X(EP, "ep")                                                                                                        \
    X(ETP, "etp")                                                                                                      \
    X(ETP_EP, "etp_ep")                                                                                                \
    X(ETP_EP_PP, "etp_ep_pp")                                                                                          \
    X(EDP, "edp")                                                                                                      \
    X(INTRA_EDP, "intra_edp")                                                                                          \
    X(INTER_EDP, "inter_edp")                                                                                          \
    X(INTRA_DIST_OPT, "intra_dist_opt")

typedef enum loom_group_kind {
#define LOOM_GROUP_ENUM(name, text) LOOM_GROUP_##name,
    LOOM_GROUP_LIST(LOOM_GROUP_ENUM)
#undef LOOM_GROUP_ENUM
        LOOM_GROUP_KIND_COUNT
} loom_group_kind;

/* "dp_cp" for LOOM_GROUP_DP_CP; "?" for a number that is no kind. */
LOOM_API const char *loom_layout_kind_name(loom_group_kind kind);
/* The kind of a name, or LOOM_GROUP_KIND_COUNT. */
LOOM_API loom_group_kind loom_layout_kind_from_name(const char *name);

/* One stretch of neighbouring axes of a grid, all free or all fixed in some kind; the rank is the sum of digit *
 * stride. */
typedef struct loom_layout_run {
    int64_t size;
    int64_t stride;
    bool free; /* its digit counts in the place, else in the index */
} loom_layout_run;

/* The groups of one kind on one grid. */
typedef struct loom_layout_lattice {
    int64_t offset; /* first rank of the grid */
    int64_t ranks;  /* of the grid; 0 = the kind has no groups here */
    int64_t size;   /* members of a group */
    int runs;
    loom_layout_run run[LOOM_LAYOUT_AXES + 1];
} loom_layout_lattice;

/* A checked layout. `sizes` may be read: its absent values are filled in (expert_tensor, encoder_tensor, order in lower
 * case with every axis). The other members belong to the functions below. */
typedef struct loom_layout {
    loom_parallel_sizes sizes;
    int64_t data;                                          /* data parallel size */
    int64_t expert_data;                                   /* expert data parallel size */
    int64_t encoder_ranks;                                 /* ranks 0 … encoder_ranks-1 are the encoder's */
    loom_layout_lattice lattice[2][LOOM_GROUP_KIND_COUNT]; /* [encoder, decoder] */
} loom_layout;

/* Checks the sizes and makes the layout. LOOM_ERR_CONFIG names every fault at once, one a line, each with the field,
 * the numbers and the nearest legal values; LOOM_ERR_UNSUPPORTED where the only faults are combinations that are not
 * built yet. *out is written only on success. */
LOOM_API loom_status loom_layout_init(const loom_parallel_sizes *sizes, loom_layout *out);

/* Ranks in all, encoder ranks included. */
LOOM_API int64_t loom_layout_world_size(const loom_layout *layout);
/* world / (tensor*pipeline*context), or with an encoder world / (both models' ranks). */
LOOM_API int64_t loom_layout_data_parallel_size(const loom_layout *layout);
/* Decoder ranks / (expert tensor * expert * pipeline). */
LOOM_API int64_t loom_layout_expert_data_parallel_size(const loom_layout *layout);
/* tensor * pipeline, as NeMo counts it: without context ranks and encoder. */
LOOM_API int64_t loom_layout_model_parallel_size(const loom_layout *layout);
/* The virtual pipeline rank that every rank starts with: 0 with virtual stages, -1 (none) without. */
LOOM_API int64_t loom_layout_virtual_pipeline_rank(const loom_layout *layout);

/* Groups of the kind; 0 where this layout has none of it. */
LOOM_API int64_t loom_layout_group_count(const loom_layout *layout, loom_group_kind kind);
/* Members of group `index`; 0 for an index that is none. */
LOOM_API int64_t loom_layout_group_size(const loom_layout *layout, loom_group_kind kind, int64_t index);
/* Global rank of member `place` of group `index`; -1 for a place that is none. */
LOOM_API int64_t loom_layout_group_member(
    const loom_layout *layout, loom_group_kind kind, int64_t index, int64_t place);
/* The same group in the sequence in which the reference lists it: differs from the members' order for intra_dist_opt
 * alone (instance members are listed replica by replica). -1 for a position that is none. */
LOOM_API int64_t loom_layout_group_listed(
    const loom_layout *layout, loom_group_kind kind, int64_t index, int64_t position);
/* The group of the kind that holds the rank, and the rank's place in it. False, with nothing written, where it is in
 * none. Where it is in several (see loom_layout_groups_of) the first. */
LOOM_API bool loom_layout_group_of(
    const loom_layout *layout, loom_group_kind kind, int64_t rank, int64_t *index, int64_t *place);
/* How many groups of the kind hold the rank: 0, 1, or, for an encoder rank with a smaller tensor size than the
 * decoder's and the kinds pp, embd and pos_embd, several; they are *first, *first + 1, … and the rank has the same
 * place in each. Nothing is written for 0. */
LOOM_API int64_t loom_layout_groups_of(
    const loom_layout *layout, loom_group_kind kind, int64_t rank, int64_t *first, int64_t *place);

/* What a rank is. Places count from 0. */
typedef struct loom_layout_rank {
    int64_t tp, cp, dp, dp_cp, pp, ep, etp, edp; /* place in its group of that kind */
    int64_t tp_size, pp_size;                    /* of its own groups (an encoder's tensor size is its own) */
    int64_t tp_src, mp_src, dp_src;              /* first rank of its tp, tp_pp and dp group */
    int64_t pipelines;                           /* pipelines that it is in */
    int64_t pp_next, pp_prev;                    /* neighbours in its first pipeline; they wrap round */
    int64_t pp_first, pp_last;                   /* ends of its first pipeline */
    bool embd, pos_embd;                         /* is in a group of that kind */
    bool encoder;                                /* is one of the encoder's ranks */
} loom_layout_rank;

/* False, with nothing written, for a rank that is none. */
LOOM_API bool loom_layout_rank_describe(const loom_layout *layout, int64_t rank, loom_layout_rank *out);
/* The neighbours and ends of the rank's pipeline number `which` (0 … pipelines-1). False where there is none. */
LOOM_API bool loom_layout_pipeline_describe(const loom_layout *layout, int64_t rank, int64_t which, int64_t *next,
    int64_t *previous, int64_t *first, int64_t *last);

/* Context parallelism cuts a sequence into 2*cp equal chunks; rank `place` of a context group holds chunk `place` and
 * chunk 2*cp - 1 - place, so that all have as much causal attention to compute. begin[0] < begin[1] = the positions
 * where its two chunks begin. cp >= 2, s a multiple of 2*cp. */
LOOM_API void loom_layout_context_chunks(int64_t s, int64_t cp, int64_t place, int64_t begin[2]);

#ifdef __cplusplus
}
#endif
#endif
