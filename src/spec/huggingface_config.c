/* Reading a Hugging Face config.json. The rule that keeps numbers honest: every member is either understood, or on the
 * list of those that cannot change logits, losses or gradients, or refused by name. So a new option of a future
 * transformers release is refused until somebody has looked at it. */
#include "base/faults.h"
#include "spec/architecture.h"
#include "spec/huggingface.h"
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

typedef struct reader {
    const char *name; /* of the file, for messages */
    const json_t *object;
    loom__faults *faults;
} reader;

static const char *type_name(const json_t *value) {
    static const char *const names[] = {
        "an object", "a list", "a string", "an integer", "a number", "true", "false", "null"};
    return names[json_typeof(value)];
}

/* Absent and null members are "not given" in both transformers 4 and 5. */
static const json_t *member(const reader *from, const char *key) {
    const json_t *value = json_object_get(from->object, key);
    return json_is_null(value) ? NULL : value;
}

static void wrong_type(const reader *from, const char *key, const json_t *value, const char *expected) {
    loom__faults_add(from->faults, LOOM_ERR_FORMAT, "%s: %s: found %s, expected %s", from->name, key,
        value ? type_name(value) : "nothing", expected);
}

static void not_built(const reader *from, const char *key, const char *what) {
    loom__faults_add(
        from->faults, LOOM_ERR_UNSUPPORTED, "%s: not supported yet: %s%s%s", from->name, key, *what ? " " : "", what);
}

static int64_t get_size(const reader *from, const char *key, int64_t otherwise) {
    const json_t *value = member(from, key);
    if (!value && otherwise >= 0)
        return otherwise;
    if (json_is_integer(value) && json_integer_value(value) < 1)
        loom__faults_add(from->faults, LOOM_ERR_FORMAT,
            "%s: %s: found %" JSON_INTEGER_FORMAT ", expected an integer >= 1", from->name, key,
            json_integer_value(value));
    else if (!json_is_integer(value))
        wrong_type(from, key, value, "an integer >= 1");
    return json_is_integer(value) && json_integer_value(value) >= 1 ? json_integer_value(value) : 1;
}

static double get_number(const reader *from, const char *key, double otherwise) {
    const json_t *value = member(from, key);
    if (value && !json_is_number(value))
        wrong_type(from, key, value, "a number");
    return json_is_number(value) ? json_number_value(value) : otherwise;
}

static bool get_bool(const reader *from, const char *key, bool otherwise) {
    const json_t *value = member(from, key);
    if (value && !json_is_boolean(value))
        wrong_type(from, key, value, "true or false");
    return json_is_boolean(value) ? json_is_true(value) : otherwise;
}

static const char *get_string(const reader *from, const char *key, const char *otherwise) {
    const json_t *value = member(from, key);
    if (value && !json_is_string(value))
        wrong_type(from, key, value, "a string");
    return json_is_string(value) ? json_string_value(value) : otherwise;
}

/* Members that describe files, tokens, generation, other heads or an implementation, not the model's mathematics. */
static const char *const harmless[] = {"_attn_implementation", "_attn_implementation_autoset", "_commit_hash",
    "_name_or_path", "architectures", "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens",
    "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
    "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label", "is_decoder",
    "is_encoder_decoder", "label2id", "length_penalty", "max_length", "max_sequence_length", "min_length", "model_type",
    "n_ctx", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_past", "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
    "remove_invalid_values", "reorder_and_upcast_attn", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sep_token_id", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unsloth_fixed", "use_bfloat16", "use_cache"};

static const char *const gpt2_members[] = {"activation_function", "attn_pdrop", "embd_pdrop", "initializer_range",
    "layer_norm_epsilon", "n_embd", "n_head", "n_inner", "n_layer", "n_positions", "resid_pdrop", "scale_attn_weights",
    "tie_word_embeddings", "vocab_size"};

/* Of Llama and all its kin. */
static const char *const kin_members[] = {"attention_bias", "attention_dropout", "head_dim", "hidden_act",
    "hidden_size", "initializer_range", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "tie_word_embeddings", "vocab_size"};

static bool is_listed(const char *key, const char *const *list, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(key, list[i]) == 0)
            return true;
    return false;
}

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* An unknown member is passed over only where its value switches nothing on. */
static bool switches_nothing(const json_t *value) {
    return json_is_null(value) || json_is_false(value) || (json_is_object(value) && json_object_size(value) == 0) ||
           (json_is_array(value) && json_array_size(value) == 0);
}

static void refuse_unknown(const reader *from, const char *const *members, size_t count) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)from->object, key, value) {
        if (is_listed(key, harmless, COUNT(harmless)) || is_listed(key, members, count) || switches_nothing(value))
            continue;
        not_built(from, key, "(an option that may change the numbers)");
    }
}

typedef struct activation_name {
    const char *name;
    loom_activation plain, gated;
} activation_name;

static const activation_name activation_names[] = {{"gelu_new", LOOM_GELU_TANH, LOOM_GEGLU},
    {"gelu_pytorch_tanh", LOOM_GELU_TANH, LOOM_GEGLU}, {"gelu_fast", LOOM_GELU_TANH, LOOM_GEGLU},
    {"gelu", LOOM_GELU_ERF, LOOM_GEGLU_ERF}, {"gelu_python", LOOM_GELU_ERF, LOOM_GEGLU_ERF},
    {"silu", LOOM_ACTIVATION_COUNT, LOOM_SWIGLU}, {"swish", LOOM_ACTIVATION_COUNT, LOOM_SWIGLU}};

static loom_activation get_activation(const reader *from, const char *key, const char *otherwise, bool gated) {
    const char *name = get_string(from, key, otherwise);
    for (size_t i = 0; i < COUNT(activation_names); i++) {
        loom_activation found = gated ? activation_names[i].gated : activation_names[i].plain;
        if (strcmp(activation_names[i].name, name) == 0 && found != LOOM_ACTIVATION_COUNT)
            return found;
    }
    loom__faults_add(from->faults, LOOM_ERR_UNSUPPORTED, "%s: not supported yet: %s \"%s\"; %s are", from->name, key,
        name, gated ? "silu, gelu, gelu_new" : "gelu_new, gelu");
    return gated ? LOOM_SWIGLU : LOOM_GELU_TANH;
}

static void read_gpt2(const reader *from, loom_model_config *model) {
    refuse_unknown(from, gpt2_members, COUNT(gpt2_members));
    model->architecture = "gpt2";
    model->num_layers = get_size(from, "n_layer", 12);
    model->hidden_size = get_size(from, "n_embd", 768);
    model->ffn_hidden_size = get_size(from, "n_inner", 0);
    model->num_attention_heads = get_size(from, "n_head", 12);
    model->num_query_groups = 0;
    model->kv_channels = 0;
    model->max_position_embeddings = get_size(from, "n_positions", 1024);
    model->vocab_size = get_size(from, "vocab_size", 50257);
    model->normalization = LOOM_LAYERNORM;
    model->layernorm_epsilon = get_number(from, "layer_norm_epsilon", 1e-5);
    model->activation = get_activation(from, "activation_function", "gelu_new", false);
    model->position_embedding_type = LOOM_POSITION_LEARNED;
    model->add_bias_linear = true;
    model->add_qkv_bias = model->add_proj_bias = model->add_mlp_bias = true;
    model->share_embeddings_and_output_weights = get_bool(from, "tie_word_embeddings", true);
    model->window_size = 0;
    model->init_method_std = get_number(from, "initializer_range", 0.02);
    model->attention_dropout = get_number(from, "attn_pdrop", 0.1);
    model->hidden_dropout = get_number(from, "resid_pdrop", 0.1);
    double embedding_dropout = get_number(from, "embd_pdrop", 0.1);
    if (embedding_dropout != model->hidden_dropout)
        loom__faults_add(from->faults, LOOM_ERR_UNSUPPORTED,
            "%s: not supported yet: embd_pdrop %g beside resid_pdrop %g; equal ones are", from->name, embedding_dropout,
            model->hidden_dropout);
    if (!get_bool(from, "scale_attn_weights", true))
        not_built(from, "scale_attn_weights", "false");
}

/* ---- rotary positions ---- */

/* A number that a scaling must have. */
static double need_number(const reader *from, const char *key) {
    const json_t *value = member(from, key);
    if (!json_is_number(value))
        wrong_type(from, key, value, "a number");
    return json_is_number(value) ? json_number_value(value) : 1;
}

static void read_scaling(const reader *rope, const char *type, loom_model_config *model) {
    static const char *const linear[] = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "factor"};
    static const char *const llama3[] = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "factor",
        "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"};
    model->rope_scaling_factor = need_number(rope, "factor");
    if (strcmp(type, "linear") == 0) {
        model->rope_scaling = LOOM_ROPE_SCALING_LINEAR;
        refuse_unknown(rope, linear, COUNT(linear));
        return;
    }
    model->rope_scaling = LOOM_ROPE_SCALING_LLAMA3;
    model->rope_scaling_low_freq_factor = need_number(rope, "low_freq_factor");
    model->rope_scaling_high_freq_factor = need_number(rope, "high_freq_factor");
    model->rope_scaling_original_max_position_embeddings = get_size(rope, "original_max_position_embeddings", -1);
    refuse_unknown(rope, llama3, COUNT(llama3));
}

/* rope_parameters (transformers 5), or rope_theta beside rope_scaling (4). */
static void read_rope(const reader *from, loom_model_config *model) {
    static const char *const known[] = {"rope_theta", "rope_type", "type", "partial_rotary_factor"};
    model->position_embedding_type = LOOM_POSITION_ROPE;
    model->rotary_percent = 1.0;
    model->rotary_base = get_number(from, "rope_theta", 10000.0);
    for (int i = 0; i < 2; i++) {
        const char *key = i ? "rope_scaling" : "rope_parameters";
        const json_t *value = member(from, key);
        if (!value)
            continue;
        if (!json_is_object(value)) {
            wrong_type(from, key, value, "an object or null");
            continue;
        }
        reader rope = {.name = from->name, .object = value, .faults = from->faults};
        const char *type = get_string(&rope, "rope_type", get_string(&rope, "type", "default"));
        model->rotary_base = get_number(&rope, "rope_theta", model->rotary_base);
        if (get_number(&rope, "partial_rotary_factor", 1.0) != 1.0)
            not_built(from, "partial_rotary_factor", "other than 1");
        if (strcmp(type, "linear") == 0 || strcmp(type, "llama3") == 0)
            read_scaling(&rope, type, model);
        else if (strcmp(type, "default") == 0)
            refuse_unknown(&rope, known, COUNT(known));
        else
            loom__faults_add(from->faults, LOOM_ERR_UNSUPPORTED,
                "%s: not supported yet: rope_type \"%s\"; default, linear and llama3 are", from->name, type);
    }
}

/* ---- Llama and its kin ---- */

/* What transformers takes where a file says nothing. */
typedef struct family {
    loom__architecture architecture;
    const char *const *members; /* of config.json, beside those of all */
    size_t member_count;
    int64_t num_layers, hidden_size, ffn_hidden_size, num_attention_heads;
    int64_t num_query_groups, kv_channels; /* 0 = derived */
    int64_t max_position_embeddings, vocab_size;
    bool tied;
} family;

static const char *const mistral_members[] = {"sliding_window"};
static const char *const mixtral_members[] = {"num_experts_per_tok", "num_local_experts", "output_router_logits",
    "router_aux_loss_coef", "router_jitter_noise", "sliding_window"};
static const char *const llama_members[] = {"mlp_bias"};
static const char *const qwen_members[] = {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"};
static const char *const gemma_members[] = {"hidden_activation"};

static const family families[] = {
    {LOOM__LLAMA, llama_members, COUNT(llama_members), 32, 4096, 11008, 32, 0, 0, 2048, 32000, false},
    {LOOM__MISTRAL, mistral_members, COUNT(mistral_members), 32, 4096, 14336, 32, 8, 0, 131072, 32000, false},
    {LOOM__MIXTRAL, mixtral_members, COUNT(mixtral_members), 32, 4096, 14336, 32, 8, 0, 131072, 32000, false},
    {LOOM__QWEN2, qwen_members, COUNT(qwen_members), 32, 4096, 22016, 32, 32, 0, 32768, 151936, false},
    {LOOM__QWEN3, qwen_members, COUNT(qwen_members), 32, 4096, 22016, 32, 32, 128, 32768, 151936, false},
    {LOOM__GEMMA, gemma_members, COUNT(gemma_members), 28, 3072, 24576, 16, 16, 256, 8192, 256000, true},
};

/* Null is "derived", absent is the default of transformers. */
static int64_t get_derived_size(const reader *from, const char *key, int64_t otherwise) {
    return json_is_null(json_object_get(from->object, key)) ? 0 : get_size(from, key, otherwise);
}

/* attention_bias is of q, k, v and the output projection; Qwen 2 always has one of q, k and v alone. */
static void read_biases(const reader *from, loom_model_config *model, loom__architecture architecture) {
    bool qwen2 = architecture == LOOM__QWEN2, llama = architecture == LOOM__LLAMA;
    bool attention_bias = get_bool(from, "attention_bias", qwen2);
    model->add_qkv_bias = attention_bias;
    model->add_proj_bias = llama && attention_bias;
    model->add_mlp_bias = llama && get_bool(from, "mlp_bias", false);
    model->add_bias_linear = model->add_proj_bias && model->add_mlp_bias;
    if (!llama && attention_bias != qwen2)
        not_built(from, "attention_bias", attention_bias ? "true" : "false");
}

/* Every layer of Mistral has its window (4096 where the file does not say); Qwen has one in some layers alone. */
static void read_window(const reader *from, loom_model_config *model, loom__architecture architecture) {
    model->window_size = architecture == LOOM__MISTRAL   ? get_derived_size(from, "sliding_window", 4096)
                         : architecture == LOOM__MIXTRAL ? get_derived_size(from, "sliding_window", 0)
                                                         : 0;
    if (architecture != LOOM__QWEN2 && architecture != LOOM__QWEN3)
        return;
    if (get_bool(from, "use_sliding_window", false))
        not_built(from, "use_sliding_window", "true");
    const json_t *types = member(from, "layer_types"), *type;
    size_t index;
    if (types && !json_is_array(types))
        wrong_type(from, "layer_types", types, "a list");
    json_array_foreach((json_t *)(uintptr_t)types, index, type) {
        if (json_is_string(type) && strcmp(json_string_value(type), "full_attention") == 0)
            continue;
        not_built(from, "layer_types", "other than full_attention");
        return;
    }
}

/* The file's balance loss counts where its model is asked for the router's logits. */
static void read_experts(const reader *from, loom_model_config *model) {
    loom_moe_config *moe = &model->moe;
    moe->num_moe_experts = get_size(from, "num_local_experts", 8);
    moe->moe_router_topk = get_size(from, "num_experts_per_tok", 2);
    moe->moe_ffn_hidden_size = model->ffn_hidden_size;
    moe->moe_layer_freq = 1;
    if (get_bool(from, "output_router_logits", false))
        moe->moe_aux_loss_coeff[0] = get_number(from, "router_aux_loss_coef", 0.001);
    if (get_number(from, "router_jitter_noise", 0) != 0)
        not_built(from, "router_jitter_noise", "other than 0");
}

/* Gemma's gate is the tanh form: its first files said "gelu" and meant that one (transformers reads hidden_activation,
 * or takes the tanh form where it is missing). */
static loom_activation gemma_activation(const reader *from) {
    if (member(from, "hidden_activation"))
        return get_activation(from, "hidden_activation", "gelu_pytorch_tanh", true);
    loom_activation named = get_activation(from, "hidden_act", "gelu_pytorch_tanh", true);
    return named == LOOM_GEGLU_ERF ? LOOM_GEGLU : named;
}

static void read_family(const reader *from, const family *kin, loom_model_config *model) {
    const char *members[COUNT(kin_members) + COUNT(mixtral_members)];
    memcpy(members, kin_members, sizeof kin_members);
    memcpy(members + COUNT(kin_members), kin->members, kin->member_count * sizeof *kin->members);
    refuse_unknown(from, members, COUNT(kin_members) + kin->member_count);
    bool gemma = kin->architecture == LOOM__GEMMA;
    model->architecture = loom__architecture_name(kin->architecture);
    model->num_layers = get_size(from, "num_hidden_layers", kin->num_layers);
    model->hidden_size = get_size(from, "hidden_size", kin->hidden_size);
    model->ffn_hidden_size = get_size(from, "intermediate_size", kin->ffn_hidden_size);
    model->num_attention_heads = get_size(from, "num_attention_heads", kin->num_attention_heads);
    model->num_query_groups = get_derived_size(from, "num_key_value_heads", kin->num_query_groups);
    model->kv_channels = get_derived_size(from, "head_dim", kin->kv_channels);
    model->max_position_embeddings = get_size(from, "max_position_embeddings", kin->max_position_embeddings);
    model->vocab_size = get_size(from, "vocab_size", kin->vocab_size);
    model->normalization = LOOM_RMSNORM;
    model->layernorm_epsilon = get_number(from, "rms_norm_eps", 1e-6);
    model->layernorm_zero_centered_gamma = gemma;
    model->scale_embeddings = gemma;
    model->qk_layernorm = kin->architecture == LOOM__QWEN3;
    model->activation = gemma ? gemma_activation(from) : get_activation(from, "hidden_act", "silu", true);
    read_biases(from, model, kin->architecture);
    read_window(from, model, kin->architecture);
    if (kin->architecture == LOOM__MIXTRAL)
        read_experts(from, model);
    model->share_embeddings_and_output_weights = get_bool(from, "tie_word_embeddings", kin->tied);
    model->init_method_std = get_number(from, "initializer_range", 0.02);
    model->attention_dropout = get_number(from, "attention_dropout", 0.0);
    model->hidden_dropout = 0.0;
    read_rope(from, model);
}

/* What the file decides although most of them say nothing about it. */
static void clear_kin_fields(loom_model_config *model) {
    model->moe.num_moe_experts = 0;
    model->layernorm_zero_centered_gamma = model->qk_layernorm = model->scale_embeddings = false;
    model->rope_scaling = LOOM_ROPE_SCALING_NONE;
    model->rope_scaling_factor = 8;
    model->rope_scaling_low_freq_factor = 1;
    model->rope_scaling_high_freq_factor = 4;
    model->rope_scaling_original_max_position_embeddings = 8192;
}

static void read_architecture(const reader *from, loom_model_config *model) {
    const json_t *type = member(from, "model_type");
    if (!json_is_string(type)) {
        wrong_type(from, "model_type", type, "a string such as \"gpt2\" or \"llama\"");
        return;
    }
    loom__architecture architecture = loom__architecture_find(json_string_value(type));
    if (architecture == LOOM__ARCHITECTURE_UNKNOWN)
        loom__faults_add(from->faults, LOOM_ERR_UNSUPPORTED,
            "%s: not supported yet: model_type \"%s\"; " LOOM__ARCHITECTURES_BUILT " are", from->name,
            json_string_value(type));
    else
        clear_kin_fields(model);
    if (architecture == LOOM__GPT2)
        read_gpt2(from, model);
    for (size_t i = 0; i < COUNT(families); i++)
        if (families[i].architecture == architecture)
            read_family(from, &families[i], model);
}

loom_status loom__hf_model_config(const char *name, const char *text, size_t length, loom_model_config *model) {
    json_error_t error;
    json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (!root)
        return loom_fail(LOOM_ERR_FORMAT, "%s:%d:%d: %s", name, error.line, error.column, error.text);
    loom__faults faults;
    loom__faults_begin(&faults);
    loom_model_config made = *model;
    reader from = {.name = name, .object = root, .faults = &faults};
    if (json_is_object(root))
        read_architecture(&from, &made);
    else
        loom__faults_add(&faults, LOOM_ERR_FORMAT, "%s: found %s, expected an object", name, type_name(root));
    json_decref(root);
    LOOM_TRY(loom__faults_end(&faults));
    *model = made;
    return LOOM_OK;
}
