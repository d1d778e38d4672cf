/* Writing a Hugging Face config.json and generation_config.json: the counterpart of huggingface_config.c. A family is a
 * row of the table: its class in transformers and the list of its members, each with the field of the configuration
 * that it spells. What a member of the list cannot spell has been refused by loom__hf_check before. Spellings of
 * transformers 4 and 5 stand side by side where they differ (torch_dtype and dtype, rope_theta and rope_parameters). */
#include "spec/huggingface.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum member_kind {
    MEMBER_SIZE,
    MEMBER_SIZE_OR_NULL, /* 0 is written as null */
    MEMBER_NUMBER,
    MEMBER_FLAG,
    MEMBER_ATTENTION_BIAS, /* of q, k, v and the output projection together */
    MEMBER_MLP_BIAS,
    MEMBER_QKV_BIAS,
    MEMBER_NORM_TOPK,   /* of the chosen experts' weights: where the softmax is not over all */
    MEMBER_EVERY_LAYER, /* 1: which layers have experts is said by the next */
    MEMBER_DENSE_LAYERS,
    MEMBER_FALSE, /* whatever the configuration: the family can do more than we */
    MEMBER_ACTIVATION,
    MEMBER_ROPE
} member_kind;

typedef struct member {
    const char *key;
    member_kind kind;
    size_t offset; /* in loom_model_config; of the rotary base for MEMBER_ROPE */
} member;

#define AT(field) offsetof(loom_model_config, field)
#define COUNT(array) (sizeof(array) / sizeof *(array))

static const member gpt2_members[] = {
    {"activation_function", MEMBER_ACTIVATION, AT(activation)},
    {"attn_pdrop", MEMBER_NUMBER, AT(attention_dropout)},
    {"embd_pdrop", MEMBER_NUMBER, AT(hidden_dropout)},
    {"initializer_range", MEMBER_NUMBER, AT(init_method_std)},
    {"layer_norm_epsilon", MEMBER_NUMBER, AT(layernorm_epsilon)},
    {"n_embd", MEMBER_SIZE, AT(hidden_size)},
    {"n_head", MEMBER_SIZE, AT(num_attention_heads)},
    {"n_inner", MEMBER_SIZE, AT(ffn_hidden_size)},
    {"n_layer", MEMBER_SIZE, AT(num_layers)},
    {"n_positions", MEMBER_SIZE, AT(max_position_embeddings)},
    {"resid_pdrop", MEMBER_NUMBER, AT(hidden_dropout)},
    {"tie_word_embeddings", MEMBER_FLAG, AT(share_embeddings_and_output_weights)},
    {"vocab_size", MEMBER_SIZE, AT(vocab_size)},
};

/* What llama and its kin have in common; then what each has of its own. */
static const member kin_members[] = {
    {"attention_dropout", MEMBER_NUMBER, AT(attention_dropout)},
    {"hidden_act", MEMBER_ACTIVATION, AT(activation)},
    {"hidden_size", MEMBER_SIZE, AT(hidden_size)},
    {"initializer_range", MEMBER_NUMBER, AT(init_method_std)},
    {"intermediate_size", MEMBER_SIZE, AT(ffn_hidden_size)},
    {"max_position_embeddings", MEMBER_SIZE, AT(max_position_embeddings)},
    {"num_attention_heads", MEMBER_SIZE, AT(num_attention_heads)},
    {"num_hidden_layers", MEMBER_SIZE, AT(num_layers)},
    {"num_key_value_heads", MEMBER_SIZE, AT(num_query_groups)},
    {"rms_norm_eps", MEMBER_NUMBER, AT(layernorm_epsilon)},
    {"rope_parameters", MEMBER_ROPE, AT(rotary_base)},
    {"rope_theta", MEMBER_NUMBER, AT(rotary_base)},
    {"tie_word_embeddings", MEMBER_FLAG, AT(share_embeddings_and_output_weights)},
    {"vocab_size", MEMBER_SIZE, AT(vocab_size)},
};

static const member llama_members[] = {
    {"attention_bias", MEMBER_ATTENTION_BIAS, 0},
    {"head_dim", MEMBER_SIZE, AT(kv_channels)},
    {"mlp_bias", MEMBER_MLP_BIAS, 0},
};

static const member mistral_members[] = {
    {"head_dim", MEMBER_SIZE, AT(kv_channels)},
    {"sliding_window", MEMBER_SIZE_OR_NULL, AT(window_size)},
};

static const member mixtral_members[] = {
    {"head_dim", MEMBER_SIZE, AT(kv_channels)},
    {"intermediate_size", MEMBER_SIZE, AT(moe.moe_ffn_hidden_size)}, /* of an expert: there is nothing else */
    {"num_experts_per_tok", MEMBER_SIZE, AT(moe.moe_router_topk)},
    {"num_local_experts", MEMBER_SIZE, AT(moe.num_moe_experts)},
    {"router_aux_loss_coef", MEMBER_NUMBER, AT(moe.moe_aux_loss_coeff)},
    {"sliding_window", MEMBER_SIZE_OR_NULL, AT(window_size)},
};

/* Its head_dim is always hidden_size / num_attention_heads. */
static const member qwen2_members[] = {
    {"use_sliding_window", MEMBER_FALSE, 0},
};

static const member qwen3_members[] = {
    {"attention_bias", MEMBER_FALSE, 0},
    {"head_dim", MEMBER_SIZE, AT(kv_channels)},
    {"use_sliding_window", MEMBER_FALSE, 0},
};

static const member qwen2_moe_members[] = {
    {"decoder_sparse_step", MEMBER_EVERY_LAYER, 0},
    {"head_dim", MEMBER_SIZE, AT(kv_channels)},
    {"mlp_only_layers", MEMBER_DENSE_LAYERS, 0},
    {"moe_intermediate_size", MEMBER_SIZE, AT(moe.moe_ffn_hidden_size)},
    {"norm_topk_prob", MEMBER_NORM_TOPK, AT(moe.moe_router_pre_softmax)},
    {"num_experts", MEMBER_SIZE, AT(moe.num_moe_experts)},
    {"num_experts_per_tok", MEMBER_SIZE, AT(moe.moe_router_topk)},
    {"qkv_bias", MEMBER_QKV_BIAS, 0},
    {"router_aux_loss_coef", MEMBER_NUMBER, AT(moe.moe_aux_loss_coeff)},
    {"shared_expert_intermediate_size", MEMBER_SIZE, AT(moe.moe_shared_expert_intermediate_size)},
    {"use_sliding_window", MEMBER_FALSE, 0},
};

static const member qwen3_moe_members[] = {
    {"attention_bias", MEMBER_ATTENTION_BIAS, 0},
    {"decoder_sparse_step", MEMBER_EVERY_LAYER, 0},
    {"head_dim", MEMBER_SIZE, AT(kv_channels)},
    {"mlp_only_layers", MEMBER_DENSE_LAYERS, 0},
    {"moe_intermediate_size", MEMBER_SIZE, AT(moe.moe_ffn_hidden_size)},
    {"norm_topk_prob", MEMBER_NORM_TOPK, AT(moe.moe_router_pre_softmax)},
    {"num_experts", MEMBER_SIZE, AT(moe.num_moe_experts)},
    {"num_experts_per_tok", MEMBER_SIZE, AT(moe.moe_router_topk)},
    {"router_aux_loss_coef", MEMBER_NUMBER, AT(moe.moe_aux_loss_coeff)},
    {"use_sliding_window", MEMBER_FALSE, 0},
};

/* hidden_act is what old versions read, hidden_activation what decides. */
static const member gemma_members[] = {
    {"attention_bias", MEMBER_FALSE, 0},
    {"head_dim", MEMBER_SIZE, AT(kv_channels)},
    {"hidden_activation", MEMBER_ACTIVATION, AT(activation)},
};

/* The architecture's name is its model_type. */
typedef struct family {
    const char *architecture, *class_name;
    struct {
        const member *members;
        size_t count;
    } lists[2];
} family;

#define LIST(array)                                                                                                    \
    { array, COUNT(array) }
static const family families[] = {
    {"gpt2", "GPT2LMHeadModel", {LIST(gpt2_members)}},
    {"llama", "LlamaForCausalLM", {LIST(kin_members), LIST(llama_members)}},
    {"mistral", "MistralForCausalLM", {LIST(kin_members), LIST(mistral_members)}},
    {"mixtral", "MixtralForCausalLM", {LIST(kin_members), LIST(mixtral_members)}},
    {"qwen2", "Qwen2ForCausalLM", {LIST(kin_members), LIST(qwen2_members)}},
    {"qwen3", "Qwen3ForCausalLM", {LIST(kin_members), LIST(qwen3_members)}},
    {"qwen2_moe", "Qwen2MoeForCausalLM", {LIST(kin_members), LIST(qwen2_moe_members)}},
    {"qwen3_moe", "Qwen3MoeForCausalLM", {LIST(kin_members), LIST(qwen3_moe_members)}},
    {"gemma", "GemmaForCausalLM", {LIST(kin_members), LIST(gemma_members)}},
};
#undef LIST

/* Member number `index` of a family, or NULL behind its last. */
static const member *member_of(const family *of, size_t index) {
    for (size_t list = 0; list < COUNT(of->lists); list++) {
        if (index < of->lists[list].count)
            return &of->lists[list].members[index];
        index -= of->lists[list].count;
    }
    return NULL;
}

static const char *activation_name(loom_activation activation) {
    switch (activation) {
    case LOOM_GELU_TANH:
        return "gelu_new";
    case LOOM_GELU_ERF:
    case LOOM_GEGLU_ERF:
        return "gelu";
    case LOOM_GEGLU:
        return "gelu_pytorch_tanh";
    default:
        return "silu";
    }
}

static const char *dtype_name(loom_dtype dtype) {
    return dtype == LOOM_BF16 ? "bfloat16" : dtype == LOOM_F16 ? "float16" : "float32";
}

static json_t *rope_parameters(const loom_model_config *config, double base) {
    switch (config->rope_scaling) {
    case LOOM_ROPE_SCALING_LINEAR:
        return json_pack(
            "{s:f, s:s, s:f}", "rope_theta", base, "rope_type", "linear", "factor", config->rope_scaling_factor);
    case LOOM_ROPE_SCALING_LLAMA3:
        return json_pack("{s:f, s:s, s:f, s:f, s:f, s:I}", "rope_theta", base, "rope_type", "llama3", "factor",
            config->rope_scaling_factor, "low_freq_factor", config->rope_scaling_low_freq_factor, "high_freq_factor",
            config->rope_scaling_high_freq_factor, "original_max_position_embeddings",
            (json_int_t)config->rope_scaling_original_max_position_embeddings);
    default:
        return json_pack("{s:f, s:s}", "rope_theta", base, "rope_type", "default");
    }
}

/* The numbers of layers without experts. */
static json_t *dense_layers(const loom_model_config *config) {
    json_t *list = json_array();
    for (int64_t i = 0; list && i < config->num_layers; i++)
        if (!loom__layer_has_experts(config, i) && json_array_append_new(list, json_integer(i)) != 0) {
            json_decref(list);
            return NULL;
        }
    return list;
}

static json_t *member_value(const member *from, const loom_model_config *config) {
    const char *at = (const char *)config + from->offset;
    switch (from->kind) {
    case MEMBER_SIZE:
        return json_integer(*(const int64_t *)(const void *)at);
    case MEMBER_SIZE_OR_NULL:
        return *(const int64_t *)(const void *)at ? json_integer(*(const int64_t *)(const void *)at) : json_null();
    case MEMBER_FALSE:
        return json_false();
    case MEMBER_NUMBER:
        return json_real(*(const double *)(const void *)at);
    case MEMBER_FLAG:
        return json_boolean(*(const bool *)(const void *)at);
    case MEMBER_ATTENTION_BIAS:
        return json_boolean(loom__model_biases(config).proj);
    case MEMBER_QKV_BIAS:
        return json_boolean(loom__model_biases(config).qkv);
    case MEMBER_NORM_TOPK:
        return json_boolean(!*(const bool *)(const void *)at);
    case MEMBER_EVERY_LAYER:
        return json_integer(1);
    case MEMBER_DENSE_LAYERS:
        return dense_layers(config);
    case MEMBER_MLP_BIAS:
        return json_boolean(loom__model_biases(config).mlp);
    case MEMBER_ACTIVATION:
        return json_string(activation_name(*(const loom_activation *)(const void *)at));
    case MEMBER_ROPE:
        return rope_parameters(config, *(const double *)(const void *)at);
    }
    return NULL;
}

/* An id that is none is written as null: transformers would put its own default for a member that is absent. */
static bool set_token_ids(json_t *object, const loom__hf_token_ids *ids, bool nulls) {
    const struct {
        const char *key;
        int64_t id;
    } members[] = {{"bos_token_id", ids->bos}, {"eos_token_id", ids->eos}, {"pad_token_id", ids->pad}};
    bool whole = true;
    for (size_t i = 0; i < COUNT(members); i++)
        if (members[i].id >= 0)
            whole &= json_object_set_new(object, members[i].key, json_integer(members[i].id)) == 0;
        else if (nulls)
            whole &= json_object_set_new(object, members[i].key, json_null()) == 0;
    return whole;
}

/* The fewest digits with which every number of the members reads back to the same double: 1e-5, not
 * 1.0000000000000001e-5. */
static size_t digits_needed(const family *of, const loom_model_config *config) {
    size_t digits = 1;
    const member *from;
    for (size_t i = 0; (from = member_of(of, i)) != NULL; i++) {
        if (from->kind != MEMBER_NUMBER && from->kind != MEMBER_ROPE)
            continue;
        double value = *(const double *)(const void *)((const char *)config + from->offset);
        char text[40];
        while (digits < 17 && (snprintf(text, sizeof text, "%.*g", (int)digits, value), strtod(text, NULL) != value))
            digits++;
    }
    return digits;
}

/* Takes the object. The text ends with a newline. */
static loom_status print(json_t *object, bool whole, size_t digits, char **text) {
    char *made = whole ? json_dumps(object, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(digits)) : NULL;
    json_decref(object);
    size_t length = made ? strlen(made) : 0;
    char *longer = made ? realloc(made, length + 2) : NULL;
    if (!longer) {
        free(made);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the text of a config.json");
    }
    memcpy(longer + length, "\n", 2);
    *text = longer;
    return LOOM_OK;
}

loom_status loom__hf_config_text(
    const loom__model_spec *spec, loom_dtype dtype, const loom__hf_token_ids *ids, char **text) {
    LOOM_TRY(loom__hf_check(spec));
    const family *found = NULL;
    for (size_t i = 0; i < COUNT(families); i++)
        if (strcmp(families[i].architecture, spec->config.architecture) == 0)
            found = &families[i];
    if (!found)
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: the config.json of architecture \"%s\"",
            spec->config.architecture);
    json_t *object = json_pack("{s:[s], s:s, s:s, s:s, s:b}", "architectures", found->class_name, "model_type",
        found->architecture, "dtype", dtype_name(dtype), "torch_dtype", dtype_name(dtype), "use_cache", 1);
    bool whole = object != NULL && set_token_ids(object, ids, true);
    const member *from;
    for (size_t i = 0; whole && (from = member_of(found, i)) != NULL; i++)
        whole = json_object_set_new(object, from->key, member_value(from, &spec->config)) == 0;
    return print(object, whole, digits_needed(found, &spec->config), text);
}

loom_status loom__hf_generation_text(const loom__hf_token_ids *ids, char **text) {
    json_t *object = json_pack("{s:b}", "_from_model_config", 1);
    return print(object, object != NULL && set_token_ids(object, ids, false), 17, text);
}

loom_status loom__hf_read_token_ids(const char *name, const char *text, size_t length, loom__hf_token_ids *ids) {
    json_error_t error;
    json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (!root)
        return loom_fail(LOOM_ERR_FORMAT, "%s:%d:%d: %s", name, error.line, error.column, error.text);
    const struct {
        const char *key;
        int64_t *id;
    } members[] = {{"bos_token_id", &ids->bos}, {"eos_token_id", &ids->eos}, {"pad_token_id", &ids->pad}};
    for (size_t i = 0; i < COUNT(members); i++) {
        const json_t *value = json_object_get(root, members[i].key);
        /* A list of ends: the first is the end of a text, the others of a turn; generation_config.json keeps them. */
        if (json_is_array(value))
            value = json_array_get(value, 0);
        *members[i].id = json_is_integer(value) ? (int64_t)json_integer_value(value) : -1;
    }
    json_decref(root);
    return LOOM_OK;
}
