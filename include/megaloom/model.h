/* The configuration of a decoder-only transformer (GPT-2, Llama and their kin), by Megatron-Core's field names. */
#ifndef MEGALOOM_MODEL_H
#define MEGALOOM_MODEL_H

#include <megaloom/kernels.h>
#include <megaloom/layout.h>
#include <megaloom/stages.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum loom_normalization { LOOM_LAYERNORM, LOOM_RMSNORM } loom_normalization;
typedef enum loom_position_embedding {
    LOOM_POSITION_LEARNED,
    LOOM_POSITION_ROPE,
    LOOM_POSITION_NONE
} loom_position_embedding;
/* How rotary positions are stretched beyond the length a model was first trained on, by the types of Hugging Face. */
typedef enum loom_rope_scaling {
    LOOM_ROPE_SCALING_NONE,
    LOOM_ROPE_SCALING_LINEAR, /* every frequency is divided by the factor */
    LOOM_ROPE_SCALING_LLAMA3  /* low frequencies are divided, high ones kept, those between blended */
} loom_rope_scaling;
typedef enum loom_recompute { LOOM_RECOMPUTE_NONE, LOOM_RECOMPUTE_SELECTIVE, LOOM_RECOMPUTE_FULL } loom_recompute;

/* Layers that a list of cp_comm_type may have. */
enum { LOOM_CONTEXT_LAYERS_MAX = 512 };

/* How a model is cut over pipeline ranks (see stages.h) and context ranks. */
typedef struct loom_model_parallel_config {
    int64_t num_layers_in_first_pipeline_stage; /* 0 = as all others */
    int64_t num_layers_in_last_pipeline_stage;
    bool account_for_embedding_in_pipeline_split;
    bool account_for_loss_in_pipeline_split;
    const char *pipeline_model_parallel_layout; /* NULL, or e.g. "E|t*3|(tt|)*2L"; borrowed */
    bool balanced_pipeline_split;               /* 30 layers on 4 stages: 8, 8, 7, 7 */
    bool variable_seq_lengths;
    /* How context ranks get at each other's keys and values: "p2p" (ring), "all_gather", "a2a", "a2a+p2p". NULL ends
     * the list: none, p2p; one, of all layers; else one of each of num_layers, entry i of layer i, counted from 0
     * (Megatron-Core 0.16 reads entry i + 1 for that layer). Borrowed. */
    const char *cp_comm_type[LOOM_CONTEXT_LAYERS_MAX];
    int64_t hierarchical_context_parallel_sizes[LOOM_LAYOUT_HCP_LEVELS]; /* innermost first; 0 ends the list */
} loom_model_parallel_config;

/* Which layers have experts in place of an MLP: those whose number is a multiple of `every`, or, where there is one, as
 * the list says. */
enum { LOOM_MOE_LAYERS_MAX = 512 };
typedef struct loom_moe_layer_freq {
    int64_t every;                     /* 0 = 1 where there is no list */
    int64_t length;                    /* of the list: 0 = none, else num_layers */
    uint8_t list[LOOM_MOE_LAYERS_MAX]; /* 1: the layer has experts, 0: an MLP; 0 behind its end */
} loom_moe_layer_freq;

/* Kinds of losses that keep the load of experts even: aux_loss, seq_aux_loss, global_aux_loss. */
enum { LOOM_MOE_BALANCES = 3 };

/* Mixture of experts, by the names of Megatron-Core's TransformerConfig. */
typedef struct loom_moe_config {
    int64_t num_moe_experts; /* 0 = a dense model */
    int64_t moe_ffn_hidden_size;
    loom_moe_layer_freq moe_layer_freq;
    int64_t moe_router_topk;
    int64_t moe_router_num_groups;
    int64_t moe_router_group_topk;
    int64_t moe_shared_expert_intermediate_size;
    const char *moe_router_load_balancing_type[LOOM_MOE_BALANCES]; /* NULL ends the list; none: aux_loss */
    const char *moe_router_score_function;
    const char *moe_router_dtype;
    const char *moe_token_dispatcher_type;
    const char *moe_token_drop_policy;
    double moe_router_topk_scaling_factor; /* 0 = none; so below */
    double moe_router_bias_update_rate;
    double moe_aux_loss_coeff[LOOM_MOE_BALANCES]; /* of each type */
    int64_t moe_aux_loss_coeff_count;             /* as many as there are types; 0 = 1 */
    double moe_z_loss_coeff;
    double moe_input_jitter_eps;
    double moe_expert_capacity_factor;
    bool moe_router_pre_softmax;
    bool moe_router_enable_expert_bias;
    bool moe_router_force_load_balancing;
    bool moe_pad_expert_input_to_capacity;
    bool moe_grouped_gemm;
    bool moe_shared_expert_gate; /* the shared expert's output is weighted by a sigmoid of the token */
    bool moe_shared_expert_overlap;
    bool moe_permute_fusion;
    bool moe_apply_probs_on_input;
    bool moe_layer_recompute;
    bool moe_per_layer_logging;
} loom_moe_config;

typedef struct loom_model_config {
    const char *architecture; /* "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe" or
                                 "gemma": which defaults and Hugging Face names; borrowed */
    int64_t num_layers;
    int64_t hidden_size;                  /* h */
    int64_t ffn_hidden_size;              /* f; 0 = 4h */
    int64_t num_attention_heads;          /* n */
    int64_t num_query_groups;             /* g; 0 = n */
    int64_t kv_channels;                  /* d; 0 = h/n */
    int64_t seq_length;                   /* s of training */
    int64_t max_position_embeddings;      /* rows of the learned positions; 0 = seq_length */
    int64_t vocab_size;                   /* v, unpadded */
    int64_t make_vocab_size_divisible_by; /* v is padded to a multiple of this times tp */
    int64_t padded_vocab_size;            /* 0 = computed from the above; otherwise exactly this many rows */
    loom_normalization normalization;
    double layernorm_epsilon;
    bool layernorm_zero_centered_gamma; /* norm weights are stored as w and used as 1 + w */
    bool qk_layernorm;                  /* a norm over the d channels of each query and key head, before the rotation */
    bool scale_embeddings;              /* word embeddings are multiplied by sqrt(h) */
    loom_activation activation;
    loom_position_embedding position_embedding_type;
    double rotary_base;
    double rotary_percent; /* share of d that is rotated */
    loom_rope_scaling rope_scaling;
    double rope_scaling_factor; /* > 0; read where there is a scaling; so below, for llama3 alone */
    /* A wavelength above original / low is low frequency, one below original / high is high frequency. */
    double rope_scaling_low_freq_factor, rope_scaling_high_freq_factor;
    int64_t rope_scaling_original_max_position_embeddings;
    bool add_bias_linear; /* biases of qkv, proj, fc1, fc2 and routers; what follows adds one where this is false */
    bool add_qkv_bias, add_proj_bias;
    bool add_mlp_bias; /* of fc1 and fc2, also of experts */
    bool share_embeddings_and_output_weights;
    int64_t window_size; /* sliding window, 0 = none */
    double hidden_dropout, attention_dropout;
    double init_method_std; /* 0.02 */
    bool use_scaled_init;   /* proj and fc2 get std / sqrt(2 num_layers) */
    loom_recompute recompute;
    bool replicate_query_groups;  /* allow tp > g */
    bool padded_vocab_in_softmax; /* true = exactly Megatron-Core's loss */
    loom_model_parallel_config parallel;
    loom_moe_config moe;
} loom_model_config;

/* The defaults of an architecture ("gpt2": LayerNorm, tanh GeLU, learned positions, biases, tied head; "llama":
 * RMSNorm, SwiGLU, rotary positions, no biases, untied head; "mistral": the same; "mixtral": the same,
 * with experts where moe.num_moe_experts is set; "qwen2": llama's with a bias of qkv;
 * "qwen3": llama's with norms of query and key heads; "qwen2_moe", "qwen3_moe": the same with experts where
 * moe.num_moe_experts is set, the shared ones of qwen2_moe with a gate; "gemma": llama's with GeGLU, zero-centred
 * norms, scaled embeddings and a tied head); sizes are 0 and must be set. Another name, or NULL, gets gpt2's defaults
 * and is refused by name where the configuration is used. `architecture` is borrowed. */
LOOM_API loom_model_config loom_model_config_default(const char *architecture);

/* Floating point operations of the matrix products of one token in training, forward and backward (3 times the
 * forward), causal attention counted by half, recomputation not counted. All sizes of the configuration must be filled
 * in. */
LOOM_API double loom_model_flops_per_token(const loom_model_config *config);

/* The parameters of a model by kind: whole tensors, without the padding rows of the vocabulary. A tied head is counted
 * with the embedding. */
typedef struct loom_model_description {
    int64_t embedding, attention, mlp, norms, head, total;
    int64_t tensors; /* in Megatron-Core's form */
} loom_model_description;
/* Derived values of the configuration may still be 0. Errors: those of the configuration. */
LOOM_API loom_status loom_model_describe(const loom_model_config *config, loom_model_description *description);
/* The same of one chunk of a pipeline. The chunk of the loss, where it is not that of the embedding, holds a copy of a
 * tied embedding, counted as its head: so the chunks of a model with a tied head have more together than the model. */
LOOM_API loom_status loom_model_describe_stage(
    const loom_model_config *config, const loom_stage *stage, loom_model_description *description);
/* How many of the layers have experts. */
LOOM_API int64_t loom_model_expert_layers(const loom_model_config *config);
/* The tensor-parallel sizes the model can be cut into, ascending: sizes[0…min(count, capacity)). Returns their count, 0
 * for a configuration with faults. Follows config->replicate_query_groups. */
LOOM_API int64_t loom_model_tensor_sizes(const loom_model_config *config, int64_t *sizes, int64_t capacity);

#ifdef __cplusplus
}
#endif
#endif
