/* The table. A line says everything about a field: a new feature becomes usable by changing its line here, and nothing
 * else in this room. Sections stand together, in the order in which the run file is printed. */
#include "config/field.h"
#include <string.h>

#define AT(member) offsetof(loom_run_config, member)
#define INT(name, member, text, ...)                                                                                   \
    { .path = (name), .kind = LOOM__FIELD_INT, .offset = AT(member), .preset = (text), __VA_ARGS__ }
#define REAL(name, member, text, ...)                                                                                  \
    { .path = (name), .kind = LOOM__FIELD_REAL, .offset = AT(member), .preset = (text), __VA_ARGS__ }
#define BOOL(name, member, text, ...)                                                                                  \
    { .path = (name), .kind = LOOM__FIELD_BOOL, .offset = AT(member), .preset = (text), __VA_ARGS__ }
#define STRING(name, member, text, ...)                                                                                \
    { .path = (name), .kind = LOOM__FIELD_STRING, .offset = AT(member), .preset = (text), __VA_ARGS__ }
#define CHOICE(name, member, text, list, ...)                                                                          \
    {                                                                                                                  \
        .path = (name), .kind = LOOM__FIELD_CHOICE, .offset = AT(member), .preset = (text), .choices = (list),         \
        .choice_count = sizeof(list) / sizeof *(list), __VA_ARGS__                                                     \
    }
#define ENUM(name, member, list, ...)                                                                                  \
    {                                                                                                                  \
        .path = (name), .kind = LOOM__FIELD_ENUM, .offset = AT(member), .choices = (list),                             \
        .choice_count = sizeof(list) / sizeof *(list), __VA_ARGS__                                                     \
    }
#define INTS(name, member, size, ...)                                                                                  \
    {                                                                                                                  \
        .path = (name), .kind = LOOM__FIELD_INTS, .offset = AT(member), .preset = "null", .nullable = true, .low = 1,  \
        .capacity = (size), __VA_ARGS__                                                                                \
    }
#define LAYERS(name, member, text, ...)                                                                                \
    { .path = (name), .kind = LOOM__FIELD_LAYERS, .offset = AT(member), .preset = (text), __VA_ARGS__ }
#define NAMES(name, member, size, text, list, ...)                                                                     \
    {                                                                                                                  \
        .path = (name), .kind = LOOM__FIELD_NAMES, .offset = AT(member), .preset = (text), .choices = (list),          \
        .choice_count = sizeof(list) / sizeof *(list), .capacity = (size), __VA_ARGS__                                 \
    }
#define REALS(name, member, count, size, text, ...)                                                                    \
    {                                                                                                                  \
        .path = (name), .kind = LOOM__FIELD_REALS, .offset = AT(member), .count_offset = AT(count), .preset = (text),  \
        .capacity = (size), __VA_ARGS__                                                                                \
    }
#define PATHS(name, ...)                                                                                               \
    {                                                                                                                  \
        .path = "data." #name, .kind = LOOM__FIELD_PATHS, .offset = AT(data.name),                                     \
        .count_offset = AT(data.name##_count), .preset = "null", .nullable = true, __VA_ARGS__                         \
    }
#define OBJECT(name, member, ...)                                                                                      \
    {                                                                                                                  \
        .path = (name), .kind = LOOM__FIELD_OBJECT, .offset = AT(member), .preset = "null", .nullable = true,          \
        __VA_ARGS__                                                                                                    \
    }

#define MODEL(name, member) "model." name, model.config.member
#define SPLIT(name) "model." #name, model.config.parallel.name
#define MOE(name) "model." #name, model.config.moe.name
#define STRATEGY(name) "strategy." #name, strategy.name
#define DDP(name) "strategy.ddp." #name, strategy.ddp_config.name
#define PRECISION(name) "precision." #name, precision.name
#define DATA(name) "data." #name, data.name
#define OPTIM(name) "optim." #name, optim.name
#define LR(name) "optim." #name, lr.name
#define EXPAND(macro, ...) macro(__VA_ARGS__)

#define NONE_YET(what) .not_built = (what)
#define NULLABLE .nullable = true
#define FROM(least) .low = (least)
#define ABOVE(least) .low = (least), .positive = true
#define BELOW(end) .high = (end), .open = true
#define SINGLE .single = true
#define DOC(text) .doc = (text)
#define OF_HF .of_hf = true

static const loom__choice devices[] = {{.name = "cpu"}, {.name = "cuda", .not_built = "GPU kernels"}};
static const loom__choice pipelines[] = {{.name = "1f1b"}, {.name = "zero-bubble"}};
static const loom__choice wires[] = {{.name = "fp32"}, {.name = "bf16"}, {.name = "fp16"},
    {.name = "float32", .means = "fp32"}, {.name = "bfloat16", .means = "bf16"}, {.name = "float16", .means = "fp16"}};

static const loom__choice architectures[] = {{.name = "gpt2"}, {.name = "llama"}, {.name = "mistral"},
    {.name = "mixtral"}, {.name = "qwen2"}, {.name = "qwen3"}, {.name = "qwen2_moe"}, {.name = "qwen3_moe"},
    {.name = "gemma"}, {.name = "t5", .not_built = "the architecture"}};
static const loom__choice normalizations[] = {
    {.name = "layernorm", .value = LOOM_LAYERNORM}, {.name = "rmsnorm", .value = LOOM_RMSNORM}};
static const loom__choice activations[] = {{.name = "gelu_tanh", .value = LOOM_GELU_TANH},
    {.name = "gelu_erf", .value = LOOM_GELU_ERF}, {.name = "swiglu", .value = LOOM_SWIGLU},
    {.name = "geglu", .value = LOOM_GEGLU}, {.name = "geglu_erf", .value = LOOM_GEGLU_ERF},
    {.name = "gelu", .value = LOOM_GELU_ERF, .means = "gelu_erf"},
    {.name = "gelu_new", .value = LOOM_GELU_TANH, .means = "gelu_tanh"}};
static const loom__choice positions[] = {{.name = "learned", .value = LOOM_POSITION_LEARNED},
    {.name = "rope", .value = LOOM_POSITION_ROPE}, {.name = "none", .value = LOOM_POSITION_NONE},
    {.name = "learned_absolute", .value = LOOM_POSITION_LEARNED, .means = "learned"}};
static const loom__choice rope_scalings[] = {{.name = "none", .value = LOOM_ROPE_SCALING_NONE},
    {.name = "linear", .value = LOOM_ROPE_SCALING_LINEAR}, {.name = "llama3", .value = LOOM_ROPE_SCALING_LLAMA3}};
static const loom__choice recomputations[] = {{.name = "none", .value = LOOM_RECOMPUTE_NONE},
    {.name = "selective", .value = LOOM_RECOMPUTE_SELECTIVE}, {.name = "full", .value = LOOM_RECOMPUTE_FULL}};

static const loom__choice wrappers[] = {{.name = "megatron"}, {.name = "pytorch"}};
static const loom__choice starts[] = {{.name = "popen"}, {.name = "spawn", .not_built = "the launcher"},
    {.name = "fork", .not_built = "the launcher"}, {.name = "forkserver", .not_built = "the launcher"}};

static const loom__choice precisions[] = {{.name = "32"}, {.name = "fp32", .means = "32"},
    {.name = "32-true", .means = "32"}, {.name = "bf16-mixed"}, {.name = "bf16", .means = "bf16-mixed"},
    {.name = "16-mixed"}, {.name = "16", .means = "16-mixed"}, {.name = "fp16", .means = "16-mixed"}};

static const char outdated[] = "an outdated form, which Megatron-Core has given up";
static const loom__choice formats[] = {{.name = "torch_dist"}, {.name = "zarr", .not_built = outdated}};

static const loom__choice data_kinds[] = {{.name = "gpt"}, {.name = "fixed"}, {.name = "mock"}, {.name = "finetune"}};
static const loom__choice samplers[] = {
    {.name = "single"}, {.name = "cyclic"}, {.name = "batch"}, {.name = "random_batch"}};

static const loom__choice optimizers[] = {{.name = "adam"}, {.name = "sgd"}};
static const loom__choice moments[] = {{.name = "fp32"}, {.name = "bf16"}};
static const loom__choice norms[] = {{.name = "2"}, {.name = "1"}, {.name = "inf"}};
static const loom__choice schedules[] = {{.name = "cosine"}, {.name = "megatron-constant"}, {.name = "megatron-linear"},
    {.name = "megatron-cosine"}, {.name = "megatron-inverse-square-root"}, {.name = "megatron-WSD"},
    {.name = "CosineAnnealing"}, {.name = "WarmupAnnealing"}, {.name = "WarmupPolicy"}, {.name = "WarmupHoldPolicy"},
    {.name = "SquareAnnealing"}, {.name = "SquareRootAnnealing"}, {.name = "NoamAnnealing"},
    {.name = "NoamHoldAnnealing"}, {.name = "InverseSquareRootAnnealing"}, {.name = "T5InverseSquareRootAnnealing"},
    {.name = "PolynomialDecayAnnealing"}, {.name = "PolynomialHoldDecayAnnealing"}, {.name = "WarmupHoldAnnealLinear"},
    {.name = "WarmupHoldAnnealOneMinusSquareRoot"}};
static const loom__choice wsd_styles[] = {
    {.name = "exponential"}, {.name = "linear"}, {.name = "cosine"}, {.name = "minus_sqrt"}};
static const loom__choice ramps[] = {{.name = "constant"}, {.name = "linear"}, {.name = "cosine"}};

static const loom__choice balances[] = {{.name = "aux_loss"}, {.name = "seq_aux_loss"}, {.name = "global_aux_loss"},
    {.name = "sinkhorn"}, {.name = "none"}};

static const loom__choice context_types[] = {
    {.name = "p2p"}, {.name = "all_gather"}, {.name = "a2a"}, {.name = "a2a+p2p"}};

static const char fsdp[] = "fully sharded data parallelism", encoder[] = "encoder-decoder models",
                  backends[] = "backend choice";

const loom__field loom__fields[] = {
    INT("seed", seed, "1234", .high = 4294967295, DOC("of initial weights, dropout and data order")),
    INT("ranks", ranks, "1", FROM(1), .high = 4096,
        DOC("thread ranks where no launcher started us; ignored under MPI, where the launcher decides")),
    INT("threads", threads, "null", NULLABLE, FROM(1), .high = 4096,
        DOC("compute threads a rank; null: allowed cores / local ranks")),
    INT("steps", steps, "null", NULLABLE, FROM(1), DOC("training steps; must be given to train")),
    STRING("output", output, "runs/run", DOC("folder of metrics.jsonl and all else a run writes")),
    BOOL("export", export_model, "true", DOC("at the end write the model to OUTPUT/model, a Hugging Face directory")),
    CHOICE("device", device, "cpu", devices, DOC("where tensors live")),

    STRING("model.hf", model.hf, "null", NULLABLE,
        DOC("Hugging Face directory: its config.json and weights decide the fields marked (hf)")),
    STRING("model.from", model.from, "null", NULLABLE,
        DOC("checkpoint to start from: its context decides the fields marked (hf), its weights are loaded")),
    CHOICE("model.architecture", model.config.architecture, "null", architectures, NULLABLE, OF_HF,
        DOC("(hf) must be given without hf; decides the defaults written as null below")),
    INT("model.num_layers", model.config.num_layers, "null", NULLABLE, FROM(1), OF_HF,
        DOC("(hf) must be given without hf")),
    INT("model.hidden_size", model.config.hidden_size, "null", NULLABLE, FROM(1), OF_HF,
        DOC("(hf) h; must be given without hf")),
    INT("model.ffn_hidden_size", model.config.ffn_hidden_size, "null", NULLABLE, FROM(1), OF_HF,
        DOC("(hf) f; null: 4h")),
    INT("model.num_attention_heads", model.config.num_attention_heads, "null", NULLABLE, FROM(1), OF_HF,
        DOC("(hf) n; must be given without hf")),
    INT("model.num_query_groups", model.config.num_query_groups, "null", NULLABLE, FROM(1), OF_HF,
        DOC("(hf) g, divides n; null: n")),
    INT("model.kv_channels", model.config.kv_channels, "null", NULLABLE, FROM(1), OF_HF,
        DOC("(hf) d, channels of a head; null: h/n")),
    INT("model.seq_length", model.config.seq_length, "null", NULLABLE, FROM(1),
        DOC("s, tokens of a sample; must be given without hf; null with hf: the positions of the model")),
    INT("model.max_position_embeddings", model.config.max_position_embeddings, "null", NULLABLE, FROM(1), OF_HF,
        DOC("(hf) rows of the learned positions; null: seq_length")),
    INT("model.vocab_size", model.config.vocab_size, "null", NULLABLE, FROM(1), OF_HF,
        DOC("(hf) v; null: the tokens of data.tokenizer, 257 for byte")),
    INT("model.make_vocab_size_divisible_by", model.config.make_vocab_size_divisible_by, "128", FROM(1),
        DOC("vocabulary rows are padded to a multiple of this times the tensor size")),
    INT("model.padded_vocab_size", model.config.padded_vocab_size, "null", NULLABLE, FROM(1),
        DOC("exactly this many vocabulary rows; null: from the field above")),
    ENUM("model.normalization", model.config.normalization, normalizations, .preset = "null",
        .by_architecture = {"layernorm", "rmsnorm"}, NULLABLE, OF_HF, DOC("(hf) layernorm, rmsnorm")),
    REAL("model.layernorm_epsilon", model.config.layernorm_epsilon, "null",
        .by_architecture = {[LOOM__GPT2] = "1.0e-5",
            [LOOM__LLAMA] = "1.0e-5",
            [LOOM__QWEN2] = "1.0e-6",
            [LOOM__QWEN3] = "1.0e-6",
            [LOOM__QWEN2_MOE] = "1.0e-6",
            [LOOM__QWEN3_MOE] = "1.0e-6",
            [LOOM__GEMMA] = "1.0e-6"},
        NULLABLE, ABOVE(0), SINGLE, OF_HF, DOC("(hf) added to the variance")),
    BOOL("model.layernorm_zero_centered_gamma", model.config.layernorm_zero_centered_gamma, "null",
        .by_architecture = {"false", "false", [LOOM__GEMMA] = "true"}, NULLABLE, OF_HF,
        DOC("(hf) norm weights are used as 1 + w")),
    BOOL("model.qk_layernorm", model.config.qk_layernorm, "null",
        .by_architecture = {"false", "false", [LOOM__QWEN3] = "true", [LOOM__QWEN3_MOE] = "true"}, NULLABLE, OF_HF,
        DOC("(hf) norm of each query and key head")),
    BOOL("model.scale_embeddings", model.config.scale_embeddings, "null",
        .by_architecture = {"false", "false", [LOOM__GEMMA] = "true"}, NULLABLE, OF_HF,
        DOC("(hf) word embeddings are multiplied by the root of h")),
    ENUM("model.activation", model.config.activation, activations, .preset = "null",
        .by_architecture = {"gelu_tanh", "swiglu", [LOOM__GEMMA] = "geglu"}, NULLABLE, OF_HF,
        DOC("(hf) gelu_tanh, gelu_erf, swiglu, geglu, geglu_erf")),
    ENUM("model.position_embedding_type", model.config.position_embedding_type, positions, .preset = "null",
        .by_architecture = {"learned", "rope"}, NULLABLE, OF_HF, DOC("(hf) learned, rope, none")),
    REAL("model.rotary_base", model.config.rotary_base, "null",
        .by_architecture = {"10000", "10000", [LOOM__QWEN2] = "1000000", [LOOM__QWEN3] = "1000000",
            [LOOM__QWEN2_MOE] = "1000000", [LOOM__QWEN3_MOE] = "1000000"},
        NULLABLE, ABOVE(0), OF_HF, DOC("(hf) of rotary positions")),
    REAL("model.rotary_percent", model.config.rotary_percent, "1.0", FROM(0), .high = 1, OF_HF,
        DOC("(hf) share of a head's channels that is rotated")),
    ENUM("model.rope_scaling", model.config.rope_scaling, rope_scalings, .preset = "none", OF_HF,
        DOC("(hf) how rotary positions are stretched: none, linear, llama3")),
    REAL(
        "model.rope_scaling_factor", model.config.rope_scaling_factor, "8.0", ABOVE(0), OF_HF, DOC("(hf) by how much")),
    REAL("model.rope_scaling_low_freq_factor", model.config.rope_scaling_low_freq_factor, "1.0", ABOVE(0), OF_HF,
        DOC("(hf) llama3: fewer turns over the original length are stretched")),
    REAL("model.rope_scaling_high_freq_factor", model.config.rope_scaling_high_freq_factor, "4.0", ABOVE(0), OF_HF,
        DOC("(hf) llama3: more turns are kept")),
    INT("model.rope_scaling_original_max_position_embeddings",
        model.config.rope_scaling_original_max_position_embeddings, "8192", FROM(1), OF_HF,
        DOC("(hf) llama3: the length first trained on")),
    BOOL("model.add_bias_linear", model.config.add_bias_linear, "null", .by_architecture = {"true", "false"}, NULLABLE,
        OF_HF, DOC("(hf) biases of all linear layers, also of experts and routers")),
    BOOL("model.add_qkv_bias", model.config.add_qkv_bias, "null",
        .by_architecture = {"true", "false", [LOOM__QWEN2] = "true", [LOOM__QWEN2_MOE] = "true"}, NULLABLE, OF_HF,
        DOC("(hf) bias of the query, key and value projection")),
    BOOL("model.add_proj_bias", model.config.add_proj_bias, "false", OF_HF,
        DOC("(hf) bias of attention's output projection; add_bias_linear has it too")),
    BOOL("model.add_mlp_bias", model.config.add_mlp_bias, "false", OF_HF,
        DOC("(hf) biases of the linear layers of MLPs and experts; add_bias_linear has them too")),
    BOOL("model.share_embeddings_and_output_weights", model.config.share_embeddings_and_output_weights, "null",
        .by_architecture = {"true", "false", [LOOM__GEMMA] = "true"}, NULLABLE, OF_HF, DOC("(hf) tied head")),
    INT("model.window_size", model.config.window_size, "null", NULLABLE, FROM(1), OF_HF,
        DOC("(hf) sliding window, positions seen; null: all")),
    REAL("model.hidden_dropout", model.config.hidden_dropout, "0.0", FROM(0), BELOW(1), SINGLE,
        DOC("on embeddings and residual branches; from hf unless given")),
    REAL("model.attention_dropout", model.config.attention_dropout, "0.0", FROM(0), BELOW(1), SINGLE,
        DOC("on attention probabilities; from hf unless given")),
    REAL("model.init_method_std", model.config.init_method_std, "0.02", FROM(0), OF_HF, DOC("(hf) of initial weights")),
    BOOL("model.use_scaled_init", model.config.use_scaled_init, "true",
        DOC("residual projections start with std / sqrt(2 num_layers)")),
    ENUM("model.recompute", model.config.recompute, recomputations, .preset = "none",
        DOC("activations made again in the backward: none, selective (attention), full (layers)")),
    BOOL("model.replicate_query_groups", model.config.replicate_query_groups, "false",
        DOC("allow a tensor size above the number of query groups")),
    BOOL("model.padded_vocab_in_softmax", model.config.padded_vocab_in_softmax, "false",
        DOC("true: padded vocabulary rows take part in the loss, exactly as in Megatron-Core")),
    EXPAND(INT, SPLIT(num_layers_in_first_pipeline_stage), "null", NULLABLE, FROM(1),
        DOC("layers of the first stage where they differ")),
    EXPAND(INT, SPLIT(num_layers_in_last_pipeline_stage), "null", NULLABLE, FROM(1),
        DOC("layers of the last stage where they differ")),
    EXPAND(BOOL, SPLIT(account_for_embedding_in_pipeline_split), "false",
        DOC("the embedding counts as a layer of the first stage")),
    EXPAND(BOOL, SPLIT(account_for_loss_in_pipeline_split), "false",
        DOC("the head and loss count as a layer of the last stage")),
    EXPAND(STRING, SPLIT(pipeline_model_parallel_layout), "null", NULLABLE,
        DOC("stages written out: E embedding, t layer, L loss, | next stage, x*n and (..)*n repeat: "
            "\"E|t*3|(tt|)*2L\"")),
    EXPAND(BOOL, SPLIT(balanced_pipeline_split), "false",
        DOC("uneven where layers do not divide: 30 on 4 stages give 8,8,7,7")),
    EXPAND(BOOL, SPLIT(variable_seq_lengths), "false",
        DOC("microbatches may be shorter than seq_length; stages tell each other the shapes")),
    EXPAND(NAMES, SPLIT(cp_comm_type), LOOM_CONTEXT_LAYERS_MAX, "p2p", context_types,
        DOC("p2p (ring), all_gather, a2a, a2a+p2p; of all layers, or a list of one for each")),
    EXPAND(INTS, SPLIT(hierarchical_context_parallel_sizes), LOOM_LAYOUT_HCP_LEVELS, DOC("innermost level first")),
    EXPAND(INT, MOE(num_moe_experts), "null", NULLABLE, FROM(1), OF_HF, DOC("(hf) experts a layer")),
    EXPAND(INT, MOE(moe_ffn_hidden_size), "null", NULLABLE, FROM(1), OF_HF, DOC("(hf) of an expert")),
    EXPAND(LAYERS, MOE(moe_layer_freq), "1", OF_HF,
        DOC("(hf) every how many layers has experts; or a list, 1 for a layer with experts, 0 for one without: "
            "[0, 1, 1, 1], \"([0]*1+[1]*3)\"")),
    EXPAND(INT, MOE(moe_router_topk), "2", FROM(1), OF_HF, DOC("(hf) experts a token")),
    EXPAND(INT, MOE(moe_router_num_groups), "null", NULLABLE, FROM(1), DOC("groups of experts")),
    EXPAND(INT, MOE(moe_router_group_topk), "null", NULLABLE, FROM(1), DOC("groups a token")),
    EXPAND(INT, MOE(moe_shared_expert_intermediate_size), "null", NULLABLE, FROM(1), OF_HF,
        DOC("(hf) width of the shared expert")),
    EXPAND(BOOL, MOE(moe_shared_expert_gate), "null", .by_architecture = {"false", "false", [LOOM__QWEN2_MOE] = "true"},
        NULLABLE, OF_HF, DOC("(hf) the shared expert is weighted by a sigmoid of the token")),
    EXPAND(NAMES, MOE(moe_router_load_balancing_type), LOOM_MOE_BALANCES, "aux_loss", balances,
        DOC("aux_loss, seq_aux_loss, global_aux_loss or a list of them; sinkhorn, none")),
    EXPAND(STRING, MOE(moe_router_score_function), "softmax", DOC("softmax, sigmoid")),
    EXPAND(STRING, MOE(moe_router_dtype), "null", NULLABLE, DOC("of logits and routing: fp32, fp64; null: fp32")),
    EXPAND(STRING, MOE(moe_token_dispatcher_type), "allgather", DOC("allgather, alltoall")),
    EXPAND(STRING, MOE(moe_token_drop_policy), "probs", DOC("probs, position")),
    EXPAND(REAL, MOE(moe_router_topk_scaling_factor), "null", NULLABLE, ABOVE(0), DOC("of routing weights")),
    EXPAND(REAL, MOE(moe_router_bias_update_rate), "1.0e-3", FROM(0), DOC("by which a step moves an expert's bias")),
    EXPAND(REALS, MOE(moe_aux_loss_coeff), model.config.moe.moe_aux_loss_coeff_count, LOOM_MOE_BALANCES, "0.0", FROM(0),
        DOC("of the load-balancing loss; of several types as many, a list")),
    EXPAND(REAL, MOE(moe_z_loss_coeff), "null", NULLABLE, ABOVE(0), DOC("of the router's z loss")),
    EXPAND(REAL, MOE(moe_input_jitter_eps), "null", NULLABLE, ABOVE(0),
        DOC("in training the router's input is multiplied by 1 - eps to 1 + eps")),
    EXPAND(REAL, MOE(moe_expert_capacity_factor), "null", NULLABLE, ABOVE(0),
        DOC("tokens an expert takes, over the even share")),
    EXPAND(BOOL, MOE(moe_router_pre_softmax), "false", OF_HF, DOC("(hf) softmax before the choice")),
    EXPAND(BOOL, MOE(moe_router_enable_expert_bias), "false",
        DOC("balance without a loss: experts with few tokens gain in the choice; sigmoid alone")),
    EXPAND(BOOL, MOE(moe_router_force_load_balancing), "false", DOC("random routing, for timing")),
    EXPAND(BOOL, MOE(moe_pad_expert_input_to_capacity), "false", DOC("equal work for all experts")),
    EXPAND(BOOL, MOE(moe_grouped_gemm), "false", DOC("true and false are the same: all experts' products go at once")),
    EXPAND(
        BOOL, MOE(moe_shared_expert_overlap), "false", DOC("alltoall: the shared expert computes while rows travel")),
    EXPAND(BOOL, MOE(moe_permute_fusion), "false", DOC("true and false are the same: rows are moved once")),
    EXPAND(BOOL, MOE(moe_apply_probs_on_input), "false", DOC("weights before the expert, of moe_router_topk 1 alone")),
    EXPAND(BOOL, MOE(moe_layer_recompute), "false",
        DOC("router and experts of a layer are made again in the backward; not with recompute full")),
    EXPAND(BOOL, MOE(moe_per_layer_logging), "false",
        DOC("metrics tell of each layer's router beside those of all together")),

    EXPAND(INT, STRATEGY(tensor_model_parallel_size), "1", FROM(1), DOC("ranks that share each layer")),
    EXPAND(INT, STRATEGY(pipeline_model_parallel_size), "1", FROM(1), DOC("stages, each with a part of the layers")),
    EXPAND(INT, STRATEGY(virtual_pipeline_model_parallel_size), "null", NULLABLE, FROM(1),
        DOC("chunks of layers a stage, run in turn; null: one, or as the layout says")),
    EXPAND(STRING, STRATEGY(pipeline_model_parallel_comm_backend), "null", NULLABLE, NONE_YET(backends),
        DOC("backend of the stages' sends")),
    EXPAND(INT, STRATEGY(microbatch_group_size_per_vp_stage), "null", NULLABLE, FROM(1),
        DOC("microbatches that pass one chunk before the next; null: the pipeline size")),
    EXPAND(INT, STRATEGY(context_parallel_size), "1", FROM(1), DOC("ranks that share a sequence")),
    EXPAND(BOOL, STRATEGY(sequence_parallel), "false",
        DOC("norms and dropout on s/tp rows a rank; needs a tensor size above 1")),
    EXPAND(INT, STRATEGY(expert_model_parallel_size), "1", FROM(1),
        DOC("ranks that share experts out; above 1 for a model with experts alone")),
    EXPAND(BOOL, STRATEGY(moe_extended_tp), "false",
        DOC("experts are not shared out but each cut over tensor x expert_model_parallel_size ranks")),
    EXPAND(INT, STRATEGY(expert_tensor_parallel_size), "null", NULLABLE, FROM(1),
        DOC("ranks that share an expert; null: the tensor size")),
    EXPAND(INT, STRATEGY(encoder_tensor_model_parallel_size), "0", NONE_YET(encoder), DOC("of an encoder")),
    EXPAND(INT, STRATEGY(encoder_pipeline_model_parallel_size), "0", NONE_YET(encoder), DOC("of an encoder")),
    EXPAND(OBJECT, STRATEGY(data_sampler), DOC("object")),
    EXPAND(OBJECT, STRATEGY(accelerator), DOC("object")),
    EXPAND(OBJECT, STRATEGY(parallel_devices), NONE_YET("a choice of devices"), DOC("object")),
    EXPAND(OBJECT, STRATEGY(cluster_environment), DOC("object")),
    EXPAND(OBJECT, STRATEGY(checkpoint_io), DOC("object")),
    EXPAND(OBJECT, STRATEGY(precision), DOC("object; the run file's precision stands outside the strategy")),
    EXPAND(OBJECT, STRATEGY(megatron_callbacks), DOC("object")),
    CHOICE("strategy.ddp", strategy.ddp, "megatron", wrappers, .section_key = "",
        DOC("megatron, pytorch, or a mapping of DDP fields")),
    EXPAND(BOOL, DDP(grad_reduce_in_fp32), "false", DOC("precision.grad_reduce_in_fp32 takes its place")),
    EXPAND(BOOL, DDP(overlap_grad_reduce), "false", DOC("reduce buckets while the backward goes on")),
    EXPAND(BOOL, DDP(overlap_param_gather), "false", DOC("gather parameters during the next forward")),
    EXPAND(BOOL, DDP(align_param_gather), "false", DOC("gathers all start at once, on all stages")),
    EXPAND(BOOL, DDP(align_grad_reduce), "false", DOC("reductions of a chunk start at once, on all stages")),
    EXPAND(BOOL, DDP(use_distributed_optimizer), "false", DOC("each rank keeps and updates a shard")),
    EXPAND(INT, DDP(num_distributed_optimizer_instances), "1", FROM(1), DOC("1, or that of the strategy")),
    EXPAND(BOOL, DDP(check_for_nan_in_grad), "true", DOC("a NaN or infinity in a gradient is an error")),
    EXPAND(BOOL, DDP(check_for_large_grads), "false",
        DOC("warn of a bucket whose gradient has 10 times the norm of all of the first 100")),
    EXPAND(INT, DDP(bucket_size), "null", NULLABLE, FROM(1), DOC("elements; null: max(40e6, 1e6 data-parallel ranks)")),
    EXPAND(BOOL, DDP(pad_buckets_for_high_nccl_busbw), "false", DOC("sharded buckets end at multiples of 65536")),
    EXPAND(BOOL, DDP(average_in_collective), "false", DOC("take the mean while reducing")),
    EXPAND(BOOL, DDP(fp8_param_gather), "false", NONE_YET("fp8"), DOC("gather parameters in fp8")),
    EXPAND(BOOL, DDP(reuse_grad_buf_for_mxfp8_param_ag), "false", NONE_YET("fp8"),
        DOC("save memory with mxfp8 parameters")),
    EXPAND(BOOL, DDP(use_megatron_fsdp), "false", NONE_YET(fsdp), DOC("shard parameters as well")),
    EXPAND(STRING, DDP(data_parallel_sharding_strategy), "no_shard", NONE_YET(fsdp), DOC("what FSDP shards")),
    EXPAND(BOOL, DDP(gradient_reduce_div_fusion), "true", NONE_YET(fsdp), DOC("FSDP: divide while reducing")),
    EXPAND(INT, DDP(suggested_communication_unit_size), "null", NULLABLE, FROM(1), NONE_YET(fsdp),
        DOC("FSDP: elements a transfer")),
    EXPAND(BOOL, DDP(preserve_fp32_weights), "true", NONE_YET(fsdp), DOC("FSDP: keep fp32 masters")),
    EXPAND(BOOL, DDP(keep_fp8_transpose_cache), "false", NONE_YET("fp8"), DOC("FSDP: keep transposed fp8 weights")),
    EXPAND(BOOL, DDP(nccl_ub), "false", NONE_YET("NCCL"), DOC("NCCL user buffers")),
    EXPAND(BOOL, DDP(fsdp_double_buffer), "false", NONE_YET(fsdp), DOC("FSDP: two buffers in turn")),
    EXPAND(BOOL, DDP(delay_wgrad_compute), "false", NONE_YET("schedule=zero-bubble delays them"),
        DOC("weight gradients later, during sends")),
    EXPAND(STRING, STRATEGY(process_group_backend), "null", NULLABLE, NONE_YET(backends), DOC("null: by the launcher")),
    EXPAND(REAL, STRATEGY(timeout), "1800", ABOVE(0), DOC("seconds a wait may take")),
    EXPAND(CHOICE, STRATEGY(start_method), "popen", starts, DOC("how ranks are started; thread ranks need no start")),
    EXPAND(BOOL, STRATEGY(no_ddp_communication_hook), "true",
        NONE_YET("a hook of ddp pytorch, which code alone can set"),
        DOC("only ddp pytorch has such a hook, and it is off there until code sets it")),
    EXPAND(BOOL, STRATEGY(output_data_idx), "false", DOC("batches carry their batch index and loader index")),
    EXPAND(CHOICE, STRATEGY(pipeline_dtype), "null", wires, NULLABLE,
        DOC("of activations and gradients between stages: fp32, bf16, fp16; null: the precision's")),
    EXPAND(BOOL, STRATEGY(init_model_parallel), "true", NONE_YET("models that are set up by hand"),
        DOC("prepare the model for parallel ranks")),
    EXPAND(BOOL, STRATEGY(use_tp_pp_dp_mapping), "false", DOC("rank order tp-cp-ep-pp-dp in place of tp-cp-ep-dp-pp")),
    EXPAND(INT, STRATEGY(num_distributed_optimizer_instances), "1", FROM(1), DOC("replicas of the optimizer's shards")),
    EXPAND(BOOL, STRATEGY(dist_ckpt_optim_fully_reshardable), "false",
        DOC("save a distributed optimizer like its parameters, not as its buckets")),
    EXPAND(STRING, STRATEGY(nccl_communicator_config_path), "null", NULLABLE, NONE_YET("NCCL"),
        DOC("YAML file of NCCL settings")),
    EXPAND(REAL, STRATEGY(bucket_cap_mb), "null", NULLABLE, ABOVE(0), DOC("ddp pytorch: MiB a bucket; null: 25")),
    EXPAND(BOOL, STRATEGY(find_unused_parameters), "false",
        DOC("ddp pytorch: buckets do not wait for what a backward does not use")),
    EXPAND(BOOL, STRATEGY(gradient_as_bucket_view), "false",
        DOC("ddp pytorch: gradients lie in their buckets; they always do, so both mean the same")),
    EXPAND(BOOL, STRATEGY(static_graph), "false", DOC("ddp pytorch: what the first step does not use no step uses")),

    CHOICE("schedule", strategy.schedule, "1f1b", pipelines,
        DOC("of the pipeline: 1f1b (interleaved where there are chunks), zero-bubble")),

    CHOICE("precision", precision.precision, "32", precisions, .section_key = "precision",
        DOC("32, bf16-mixed, 16-mixed, or a mapping of the precision plugin's fields")),
    EXPAND(CHOICE, PRECISION(params_dtype), "fp32", wires,
        DOC("in which initial values are made; with 16 bits the fp32 masters start from rounded ones")),
    EXPAND(CHOICE, PRECISION(pipeline_dtype), "null", wires, NULLABLE,
        DOC("of activations and gradients between stages; null: the strategy's, else bf16 with bf16-mixed, fp32")),
    EXPAND(CHOICE, PRECISION(autocast_dtype), "null", wires, NULLABLE, DOC("of products; null: that of the weights")),
    EXPAND(BOOL, PRECISION(autocast_enabled), "false",
        DOC("cast inputs of products to autocast_dtype; no difference where weights have it")),
    EXPAND(BOOL, PRECISION(grad_reduce_in_fp32), "true",
        DOC("false: gradients travel between data-parallel ranks in the weights' dtype")),
    EXPAND(REAL, PRECISION(loss_scale), "null", NULLABLE, ABOVE(0), SINGLE, DOC("of 16-mixed, fixed; null: dynamic")),
    EXPAND(REAL, PRECISION(initial_loss_scale), "4294967296", ABOVE(0), SINGLE,
        DOC("first dynamic loss scale of 16-mixed, 2^32")),
    EXPAND(REAL, PRECISION(min_loss_scale), "1.0", ABOVE(0), SINGLE,
        DOC("lowest one; where gradients overflow at it the run ends")),
    EXPAND(INT, PRECISION(loss_scale_window), "1000", FROM(1), DOC("good steps before it doubles")),
    EXPAND(INT, PRECISION(hysteresis), "2", FROM(1), DOC("bad steps before it is halved")),
    EXPAND(STRING, PRECISION(fp4), "null", NULLABLE, NONE_YET("fp4"), DOC("e2m1")),
    EXPAND(STRING, PRECISION(fp8), "null", NULLABLE, NONE_YET("fp8"), DOC("e4m3, hybrid")),
    EXPAND(INT, PRECISION(fp8_margin), "0", NONE_YET("fp8"), DOC("of the scaling factor")),
    EXPAND(INT, PRECISION(fp8_amax_history_len), "1", FROM(1), NONE_YET("fp8"), DOC("steps of maxima kept")),
    EXPAND(STRING, PRECISION(fp8_amax_compute_algo), "most_recent", NONE_YET("fp8"), DOC("most_recent, max")),
    EXPAND(BOOL, PRECISION(fp8_wgrad), "true", NONE_YET("fp8"), DOC("weight gradients in fp8")),
    EXPAND(BOOL, PRECISION(fp8_dot_product_attention), "false", NONE_YET("fp8"), DOC("attention in fp8")),
    EXPAND(BOOL, PRECISION(fp8_multi_head_attention), "false", NONE_YET("fp8"),
        DOC("attention with its projections in fp8")),
    EXPAND(BOOL, PRECISION(fp8_params), "false", NONE_YET("fp8"), DOC("old name of the next")),
    EXPAND(BOOL, PRECISION(fp8_param_gather), "false", NONE_YET("fp8"), DOC("gather parameters in fp8")),

    EXPAND(CHOICE, DATA(kind), "gpt", data_kinds,
        DOC("gpt, fixed (replay batches of a safetensors file), finetune (JSON lines of input and output or of "
            "messages), "
            "mock")),
    PATHS(path, DOC("a prefix, a list of prefixes, or weights and prefixes in turn: [0.7, books, 0.3, web]")),
    PATHS(train_path, DOC("the same for training alone, all of it: data.split is not used then")),
    PATHS(valid_path, DOC("the same for validation alone, all of it")),
    PATHS(test_path, DOC("the same for the test at the end alone, all of it")),
    EXPAND(STRING, DATA(split), "969,30,1", DOC("shares of training, validation and test documents")),
    EXPAND(STRING, DATA(tokenizer), "null", NULLABLE,
        DOC("null: byte, of whose tokens data.kind gpt may use fewer; byte: 256 bytes and an end of document; or the "
            "path of a tokenizer.json, vocab.json or tokenizer.model "
            "(tiktoken's, or SentencePiece's where its library was there at the build), or of its directory")),
    EXPAND(INT, DATA(micro_batch_size), "1", FROM(1), DOC("samples a rank takes at once")),
    EXPAND(INT, DATA(global_batch_size), "null", NULLABLE, FROM(1),
        DOC("samples a step; null: micro_batch_size data-parallel ranks, or the fixed file's")),
    EXPAND(INTS, DATA(rampup_batch_size), 3,
        DOC("[start, increment, samples]: the global batch grows from start to global_batch_size")),
    EXPAND(BOOL, DATA(decrease_batch_size_if_needed), "false", DOC("round batch sizes that do not divide down")),
    EXPAND(BOOL, DATA(stop_when_batch_size_changes), "false", DOC("end the run where ramp-up has changed the batch")),
    EXPAND(CHOICE, DATA(dataloader_type), "single", samplers,
        DOC("order of samples: single and batch as they are, cyclic and random_batch shuffled in each epoch")),
    EXPAND(
        INT, DATA(max_epochs), "null", NULLABLE, FROM(1), DOC("epochs of a corpus; a run that needs more is refused")),
    EXPAND(BOOL, DATA(reset_position_ids), "false", DOC("positions count from the beginning of each document")),
    EXPAND(BOOL, DATA(reset_attention_mask), "false", DOC("attention stops at the end of a document")),
    EXPAND(BOOL, DATA(eod_mask_loss), "false", DOC("no loss where the token is an end of document")),
    EXPAND(BOOL, DATA(pack_sequences), "false", DOC("of kind finetune: several samples in a sequence, kept apart")),
    EXPAND(INT, DATA(pad_seq_length_to_mult), "null", NULLABLE, FROM(1),
        DOC("of kind finetune: each global batch is as long as its longest sample, rounded up to a multiple of this; "
            "null: model.seq_length")),
    EXPAND(STRING, DATA(index_mapping_dir), "null", NULLABLE,
        DOC("folder where the orders of documents and samples are kept; null: built anew in memory")),
    EXPAND(INT, DATA(prefetch_factor), "2", FROM(0), .high = 4096,
        DOC("microbatches read ahead in the background; 0: read when they are needed")),

    EXPAND(CHOICE, OPTIM(optimizer), "adam", optimizers, DOC("adam, sgd")),
    EXPAND(REAL, OPTIM(lr), "1.0e-3", ABOVE(0), DOC("highest learning rate")),
    EXPAND(REAL, OPTIM(min_lr), "0.0", FROM(0), DOC("lowest learning rate of a decay")),
    EXPAND(CHOICE, LR(schedule), "cosine", schedules,
        DOC("cosine; megatron-{constant,linear,cosine,inverse-square-root,WSD}, whose first step has init_lr; NeMo's "
            "policies by their names")),
    EXPAND(INT, LR(warmup_steps), "0", DOC("steps of linear warm-up")),
    EXPAND(REAL, LR(init_lr), "0.0", FROM(0), DOC("where Megatron's warm-up starts")),
    EXPAND(INT, LR(lr_decay_steps), "null", NULLABLE, FROM(1), DOC("of Megatron's schedules; null: steps")),
    EXPAND(CHOICE, LR(lr_wsd_decay_style), "exponential", wsd_styles, DOC("how megatron-WSD ends")),
    EXPAND(INT, LR(wsd_decay_steps), "null", NULLABLE, FROM(1), DOC("length of that end")),
    EXPAND(INT, LR(max_steps), "null", NULLABLE, FROM(1), DOC("of NeMo's policies; null: steps")),
    EXPAND(REAL, LR(warmup_ratio), "0.0", FROM(0), .high = 1, DOC("policies: warm-up as a share of max_steps")),
    EXPAND(INT, LR(hold_steps), "null", NULLABLE, FROM(1), DOC("policies with Hold: steps at lr after the warm-up")),
    EXPAND(REAL, LR(hold_ratio), "0.0", FROM(0), .high = 1, DOC("the same as a share of max_steps")),
    EXPAND(INT, LR(constant_steps), "null", NULLABLE, FROM(1),
        DOC("CosineAnnealing: steps at min_lr at the end; T5InverseSquareRootAnnealing: constant steps at the start")),
    EXPAND(REAL, LR(constant_ratio), "0.0", FROM(0), .high = 1, DOC("the same as a share of max_steps")),
    EXPAND(REAL, LR(power), "1.0", ABOVE(0), DOC("of Polynomial…Annealing")),
    EXPAND(BOOL, LR(cycle), "false", DOC("of Polynomial…Annealing: the rate rises again at the end")),
    EXPAND(REAL, LR(decay_rate), "0.5", ABOVE(0), DOC("of NoamHoldAnnealing")),
    EXPAND(INT, LR(d_model), "null", NULLABLE, FROM(1), DOC("width of NoamAnnealing, which needs it")),
    EXPAND(REAL, OPTIM(weight_decay), "0.01", FROM(0), DOC("of tensors of two or more dimensions")),
    EXPAND(CHOICE, LR(weight_decay_incr_style), "constant", ramps, DOC("how weight decay grows over the run")),
    EXPAND(REAL, LR(start_weight_decay), "0.0", FROM(0), DOC("where linear and cosine start")),
    EXPAND(REAL, LR(end_weight_decay), "null", NULLABLE, ABOVE(0), DOC("where they end; null: weight_decay")),
    EXPAND(INT, LR(wd_incr_steps), "null", NULLABLE, FROM(1), DOC("how long they take; null: steps")),
    EXPAND(BOOL, LR(override_opt_param_scheduler), "false",
        DOC("a schedule that is loaded gives the step alone, the values stay those of this file")),
    EXPAND(BOOL, LR(use_checkpoint_opt_param_scheduler), "false",
        DOC("a schedule that is loaded gives all values; neither of the two: they must agree")),
    EXPAND(BOOL, OPTIM(decoupled_weight_decay), "true",
        DOC("adam takes the decay off the weight (AdamW); false: adds it to the gradient")),
    EXPAND(REAL, OPTIM(adam_beta1), "0.9", FROM(0), .high = 0.99999999, DOC("decay of the first moment")),
    EXPAND(REAL, OPTIM(adam_beta2), "0.999", FROM(0), .high = 0.99999999, DOC("decay of the second moment")),
    EXPAND(REAL, OPTIM(adam_eps), "1.0e-8", ABOVE(0), SINGLE, DOC("added to the root of the second moment")),
    EXPAND(BOOL, OPTIM(amsgrad), "false", DOC("adam divides by the largest second moment so far")),
    EXPAND(CHOICE, OPTIM(exp_avg_dtype), "fp32", moments, DOC("of adam's first moment in memory: fp32, bf16")),
    EXPAND(CHOICE, OPTIM(exp_avg_sq_dtype), "fp32", moments, DOC("of adam's second moment in memory: fp32, bf16")),
    EXPAND(REAL, OPTIM(sgd_momentum), "0.9", FROM(0), .high = 0.99999999, DOC("of optimizer sgd; 0: none")),
    EXPAND(REAL, OPTIM(sgd_dampening), "0.0", FROM(0), .high = 1, DOC("of that momentum")),
    EXPAND(BOOL, OPTIM(maximize), "false", DOC("step up the gradient")),
    EXPAND(REAL, OPTIM(clip_grad), "1.0", FROM(0), DOC("global norm that gradients are clipped to; 0: not clipped")),
    EXPAND(CHOICE, OPTIM(clip_norm_type), "2", norms, DOC("that norm: 2, 1, inf")),
    EXPAND(REAL, OPTIM(decoupled_lr), "null", NULLABLE, ABOVE(0),
        DOC("learning rate of word embeddings and head; null: lr")),
    EXPAND(REAL, OPTIM(decoupled_min_lr), "null", NULLABLE, ABOVE(0), DOC("its lowest value; null: min_lr")),
    EXPAND(BOOL, OPTIM(log_num_zeros_in_grad), "false", DOC("zeros in the gradient as a metric")),

    INT("validation.every", validation.every, "0", DOC("steps between validations; 0: none")),
    INT("validation.batches", validation.batches, "8", FROM(1), DOC("global batches a validation")),
    BOOL("validation.test", validation.test, "false",
        DOC("the loss of the test data, once all of them, when training has ended; of a blend with weights and of mock "
            "data validation.batches")),
    INT("checkpoint.every", checkpoint.every, "0", FROM(0),
        DOC("steps between checkpoints in OUTPUT/checkpoints; 0: none")),
    INT("checkpoint.keep_last", checkpoint.keep_last, "2", FROM(1), DOC("checkpoints kept")),
    INT("checkpoint.keep_best", checkpoint.keep_best, "0", FROM(0),
        DOC("checkpoints of the lowest validation loss that are kept as well; 0: none")),
    REAL("checkpoint.time_limit", checkpoint.time_limit, "null", NULLABLE, ABOVE(0),
        DOC("seconds that the run may take: it saves and stops before; null: no limit")),
    CHOICE("checkpoint.save_ckpt_format", checkpoint.io.save_ckpt_format, "torch_dist", formats,
        DOC("the form of checkpoints")),
    BOOL("checkpoint.async_save", checkpoint.io.async_save, "false",
        DOC("a save copies the state, and a thread writes the copy while training goes on")),
    BOOL("checkpoint.load_directly_on_device", checkpoint.io.load_directly_on_device, "true",
        DOC("on the CPU true and false are the same")),
    INT("checkpoint.storage_writers_per_rank", checkpoint.io.storage_writers_per_rank, "2", FROM(1), .high = 64,
        DOC("threads of a rank that write, a file each")),
    BOOL("checkpoint.parallel_save", checkpoint.io.parallel_save, "true",
        DOC("ranks that hold the same share its writing")),
    BOOL("checkpoint.parallel_save_within_dp", checkpoint.io.parallel_save_within_dp, "false",
        DOC("only inside of a data-parallel group")),
    BOOL("checkpoint.parallel_load", checkpoint.io.parallel_load, "false",
        DOC("of a data-parallel group one rank reads a chunk and sends it to the others")),
    BOOL("checkpoint.assume_constant_structure", checkpoint.io.assume_constant_structure, "false",
        DOC("who writes what is found out once and kept while the tensors are the same")),
    INT("log.every", log.every, "10", FROM(1), DOC("steps between progress lines")),
    BOOL("log.tensorboard", log.tensorboard, "false", DOC("write event files to OUTPUT/tensorboard, for TensorBoard")),
    BOOL("trace", trace, "false",
        DOC("what each stage did and when: OUTPUT/trace.json for Perfetto, OUTPUT/timeline.svg of the last step")),
    BOOL("profile", profile, "false", DOC("a table of the time of each operation at the end")),
};

const int64_t loom__field_count = sizeof loom__fields / sizeof *loom__fields;

const char *loom__section_doc(const char *section) {
    static const char *const docs[][2] = {
        {"model", "one of: hf, from, or the fields marked (hf)"},
        {"strategy", "how the ranks share the work"},
        {"strategy.ddp", "megatron, pytorch, or these fields"},
        {"precision", "32, bf16-mixed, 16-mixed, or these fields"},
    };
    for (size_t i = 0; i < sizeof docs / sizeof *docs; i++)
        if (strcmp(docs[i][0], section) == 0)
            return docs[i][1];
    return NULL;
}

int64_t loom__field_find(const char *path) {
    if (strcmp(path, "precision.precision") == 0)
        path = "precision";
    for (int64_t i = 0; i < loom__field_count; i++)
        if (strcmp(loom__fields[i].path, path) == 0)
            return i;
    return -1;
}

bool loom__field_is_section(const char *path) {
    size_t length = strlen(path);
    for (int64_t i = 0; i < loom__field_count; i++)
        if (strncmp(loom__fields[i].path, path, length) == 0 && loom__fields[i].path[length] == '.')
            return true;
    return false;
}
