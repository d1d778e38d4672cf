/* One transformer layer (pre-norm; GPT-2, Llama and their kin), on any number of tensor ranks. */
#ifndef NN_LAYER_H
#define NN_LAYER_H

#include "nn/cache.h"
#include "nn/parameters.h"
#include "parallel/context.h"
#include "parallel/experts.h"

/* How attention gets at rows of other ranks, in layers of one type. Without context parallelism all types are alike. */
typedef struct loom__context_way {
    /* heads_group exchanges heads for rows (a2a), then ring passes keys and values. NULL: not done. */
    loom_comm *heads_group;
    const loom__ring *ring;
    const int32_t *document_start; /* [b, rows that attention works on] or NULL */
    void *memory; /* of ring, and of document_start where more rows are attended to than are here; owned */
} loom__context_way;

/* What a forward needs to know beside its activations. Shared by all layers of one microbatch; counted, because a
 * recomputation needs it again in the backward. */
typedef struct loom__microbatch {
    int64_t references;
    loom_comm *tp;
    bool sequence_parallel;
    bool training;
    uint64_t seed;
    int64_t b, s;
    loom_positions rows;      /* where the s rows of this rank lie in the sequence */
    const int64_t *sample;    /* [b] */
    const int32_t *positions; /* [b, s] or NULL where row t is at position t */
    loom_rope_table rope;
    loom__router_options router;                    /* of layers of experts */
    loom__context_way context[LOOM__CONTEXT_TYPES]; /* of the types that a layer of the chunk has */
    loom__kv_cache *cache; /* of generation, borrowed: attention reads what came before from it; or NULL */
} loom__microbatch;

typedef struct loom__layer {
    int64_t number; /* global, from 0 */
    const loom_model_config *config;
    loom_parameter *input_norm, *input_norm_bias, *qkv, *qkv_bias, *q_norm, *k_norm, *proj, *proj_bias;
    /* fc1, fc2 and their biases are those of the shared experts in a layer of experts, or NULL there. */
    loom_parameter *mlp_norm, *mlp_norm_bias, *fc1, *fc1_bias, *fc2, *fc2_bias;
    /* Of a layer of experts: the router, the gate of the shared experts where they have one, and the weights and biases
     * of this rank's experts in order; NULL elsewhere, and biases where there are none. The lists are the layer's own.
     */
    loom_parameter *router, *router_bias, *shared_gate;
    loom_parameter **experts_fc1, **experts_fc2, **experts_fc1_bias, **experts_fc2_bias;
    loom__router_memory *router_memory; /* the layer's own */
    int64_t expert_count;
} loom__layer;

/* Finds the parameters of layer `number` in the set. */
loom_status loom__layer_bind(
    const loom__parameter_set *set, const loom_model_config *config, int64_t number, loom__layer *layer);

void loom__layer_unbind(loom__layer *layer);

/* x, *output: [s, b, h], or [s/tp, b, h] with sequence parallelism. Recomputation as configured. */
loom_status loom__layer_forward(
    const loom__layer *layer, loom_tape *tape, loom__microbatch *microbatch, loom_tensor *x, loom_tensor **output);

/* The norm that the configuration asks for, over the last axis; bias NULL where it has none. */
loom_status loom__norm(loom_tape *tape, const loom_model_config *config, loom_tensor *x, loom_parameter *weight,
    loom_parameter *bias, loom_tensor **output);

/* Number of the first of this rank's s rows that a tensor has which is sharded over the tensor ranks; 0 without
 * sequence parallelism. */
int64_t loom__first_row(const loom__microbatch *microbatch);
/* Where the rows of such a tensor lie in the sequence. */
loom_positions loom__row_positions(const loom__microbatch *microbatch);

void loom__microbatch_release(void *microbatch);

#endif
