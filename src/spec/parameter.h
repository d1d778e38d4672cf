/* A model as a list of parameter descriptors: everything anyone must know about a parameter, without ranks. nn
 * materialises it; checkpoint, ddp, plan, describe and conversion read it. Nobody else knows a parameter's name. */
#ifndef SPEC_PARAMETER_H
#define SPEC_PARAMETER_H

#include "moe/router.h"
#include <megaloom/model.h>

/* How a tensor-parallel rank's shard relates to the canonical tensor along the shard axis. */
typedef enum loom__shard_kind {
    LOOM__SHARD_NONE,      /* replicated */
    LOOM__SHARD_SLICE,     /* rank r holds the contiguous slice r of the axis */
    LOOM__SHARD_GATE_UP,   /* canonical [gate; up]; rank r holds [gate_r; up_r] */
    LOOM__SHARD_QKV_GROUPS /* canonical: per query group [its q heads][k][v]; rank r holds whole groups; with more ranks
                              than groups (replication), its q heads and a copy of their group's k and v */
} loom__shard_kind;

/* What of the model uses a parameter, and which part of a cut model it goes with. */
typedef enum loom__place { LOOM__PLACE_EMBEDDING, LOOM__PLACE_LAYER, LOOM__PLACE_HEAD } loom__place;

typedef enum loom__initial { LOOM__INIT_NORMAL, LOOM__INIT_ZERO, LOOM__INIT_ONE } loom__initial;

enum { LOOM__PARAMETER_NAME_MAX = 96 };

typedef struct loom__parameter_descriptor {
    char name[LOOM__PARAMETER_NAME_MAX]; /* Megatron-Core module name with the global layer number:
                                            "decoder.layers.0.self_attention.linear_qkv.weight" */
    int dims;                            /* 1 or 2 */
    int64_t shape[2];                    /* canonical: unsharded, unpadded; shape[1] = 1 where dims = 1 */
    int64_t padded_rows;                 /* rows of axis 0 after vocabulary padding; = shape[0] where there is none */
    int shard_axis;                      /* meaningless for LOOM__SHARD_NONE */
    loom__shard_kind shard;
    loom__initial initial;
    double std;            /* of LOOM__INIT_NORMAL */
    bool decay;            /* default decay class: two or more dimensions */
    bool sequence_partial; /* with sequence parallelism its gradient is partial on each tp rank and must be summed over
                              tp */
    bool tensor_partial;   /* so it is on more than one tp rank under any layout: each sees its own heads alone */
    bool embedding_or_output; /* word embeddings and head, which may have a learning rate of their own */
    loom__place place;
    int64_t layer;  /* global layer, −1 outside the layers */
    int64_t expert; /* number among the layer's experts; −1: not of one. Its tensor ranks are those of the experts */
    int tie_group;  /* > 0: the value is used at several places of the model; the number of tied_head */
} loom__parameter_descriptor;

/* Elements of the canonical tensor. */
static inline int64_t loom__descriptor_count(const loom__parameter_descriptor *descriptor) {
    return descriptor->shape[0] * (descriptor->dims == 2 ? descriptor->shape[1] : 1);
}

typedef struct loom__model_spec {
    loom_model_config config; /* every derived value filled in (ffn, groups, channels, padded vocabulary) */
    int64_t count;
    loom__parameter_descriptor *parameters;      /* in model order: embedding, layers, final norm, head; behind them */
    int64_t module_buffers;                      /* so many that are no parameters: fp32 whatever the precision is,
                                                    without a gradient, saved with the model; replicated, 1 dimension */
    const loom__parameter_descriptor *tied_head; /* not one of `count`: the copy of tied word embeddings that a last
                                                    stage holds where it is not the first; NULL without a tie */
} loom__model_spec;

/* Parameters and module buffers. */
static inline int64_t loom__spec_tensors(const loom__model_spec *spec) {
    return spec->count + spec->module_buffers;
}

/* The ranks that share a model: sizes of their groups, 1 where there is none. */
typedef struct loom__model_ranks {
    int64_t tensor, context, expert, expert_tensor;
    bool sequence_parallel; /* the tensor ranks share the rows of a sequence */
} loom__model_ranks;

/* Fills in the derived values of a configuration for these ranks and checks it; every fault is named, with the nearest
 * legal values of the configuration and of the ranks. */
loom_status loom__model_config_complete_on(loom_model_config *config, const loom__model_ranks *ranks);
/* The same for tp tensor ranks alone. */
loom_status loom__model_config_complete(loom_model_config *config, int64_t tp, bool sequence_parallel);
/* The same of a model that is planned and not trained: what is not built yet is no fault; without nearest values. */
loom_status loom__model_config_complete_planned(loom_model_config *config, int64_t tp, bool sequence_parallel);

struct loom__faults;
/* The checks without nearest values: *config is written where they find nothing. */
void loom__model_complete_faults(
    loom_model_config *config, int64_t tp, bool sequence_parallel, struct loom__faults *faults);
/* Whether cp ranks can share a sequence of the configuration, which is complete, in the way that cp_comm_type says.
 * sequence_parallel: the tp tensor ranks of each share its rows. */
void loom__model_context_faults(
    const loom_model_config *config, int64_t tp, int64_t cp, bool sequence_parallel, struct loom__faults *faults);
/* Whether ep ranks can share the experts, and etp ranks each of them. */
void loom__model_expert_ranks_faults(
    const loom_model_config *config, int64_t ep, int64_t etp, struct loom__faults *faults);
/* How the attention of one layer shares it: keys and values go round a ring, or are gathered, or heads are exchanged
 * for rows, or heads within parts of the group and then keys and values round them. */
typedef enum loom__context_type {
    LOOM__CONTEXT_P2P,
    LOOM__CONTEXT_ALL_GATHER,
    LOOM__CONTEXT_A2A,
    LOOM__CONTEXT_LEVELS, /* a2a+p2p */
    LOOM__CONTEXT_TYPES
} loom__context_type;
/* As cp_comm_type says; a ring where it says nothing. */
loom__context_type loom__context_type_of(const loom_model_config *config, int64_t layer);
/* How many of the layers from first_layer on have the type. */
int64_t loom__context_layers(
    const loom_model_config *config, loom__context_type type, int64_t first_layer, int64_t layers);

/* Whether the layer has experts in place of an MLP. */
bool loom__layer_has_experts(const loom_model_config *config, int64_t layer);
/* Whether layers count as not alike: with a list, or where `every` is more than 1, as Megatron-Core has it. */
bool loom__layers_differ(const loom_model_config *config);
/* Megatron's text of a list: "[1, 0, 1]", "([0]*2+[1]*6)*4". False where it is no such text, or has more layers than a
 * list may have. */
bool loom__moe_layer_freq_parse(const char *text, loom_moe_layer_freq *freq);
/* Fills in `every` and checks a list against the number of layers. */
void loom__moe_layer_freq_complete(loom_moe_layer_freq *freq, int64_t num_layers, struct loom__faults *faults);
/* How their router chooses. */
loom__router loom__model_router(const loom_model_config *config);
/* The coefficient of that type of balance loss; 0 where the configuration has not chosen it. */
double loom__balance_coefficient(const loom_moe_config *moe, const char *type);
/* Fills in and checks the fields of experts; every fault is added to `faults`. */
void loom__model_config_complete_experts(
    loom_model_config *config, int64_t tp, bool sequence_parallel, struct loom__faults *faults);

/* Which linear layers have a bias. */
typedef struct loom__biases {
    bool qkv, proj, mlp, router; /* mlp: fc1 and fc2, also of each expert and of the shared ones */
} loom__biases;
loom__biases loom__model_biases(const loom_model_config *config);

/* The parameters of a completed configuration. */
loom_status loom__model_spec_create(const loom_model_config *completed, loom__model_spec **spec);
void loom__model_spec_destroy(loom__model_spec *spec);

/* The local shape of a parameter on one of tp ranks. */
void loom__parameter_local_shape(
    const loom__model_spec *spec, const loom__parameter_descriptor *parameter, int64_t tp, int64_t shape[2]);

/* The shard map: calls run(context, local_first, canonical_first, count) for each maximal run of elements that lies
 * contiguously both in rank `tp_rank`'s local tensor and in the canonical one (flat row-major indices), in local order.
 * canonical_first is −1 for a run of padding rows (which are zero). */
typedef loom_status (*loom__shard_run)(void *context, int64_t local_first, int64_t canonical_first, int64_t count);
loom_status loom__parameter_shard_runs(const loom__model_spec *spec, const loom__parameter_descriptor *parameter,
    int64_t tp, int64_t tp_rank, loom__shard_run run, void *context);

/* True when copies of this parameter's k and v rows live on several tp ranks (replicated query groups, tp > g). Their
 * gradients must be summed over the ranks that share a group. */
bool loom__parameter_is_replicated_kv(
    const loom__model_spec *spec, const loom__parameter_descriptor *parameter, int64_t tp);

/* How many leading elements of rank `tp_rank`'s local tensor this rank counts where each element must count once
 * (norms, checkpoints); the rest are copies that a lower tp rank counts. Replicated parameters are counted by tp rank
 * 0, replicated k and v rows (the last 2d local rows) by the first rank of their group. Padding rows are counted by
 * their holder. */
int64_t loom__parameter_owned_count(
    const loom__model_spec *spec, const loom__parameter_descriptor *parameter, int64_t tp, int64_t tp_rank);

#endif
