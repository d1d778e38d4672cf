/* Megatron-LM's command line as fields of a run file. The text is cut into words as a shell does it, without expanding
 * anything; then one table says which option is which field. What the table does not know is listed, so that nobody
 * takes a plan for what it is not. */
#include "base/legal.h"
#include "plan/translation.h"
#include <errno.h>
#include <inttypes.h>
#include <megaloom/names.h>
#include <stdlib.h>
#include <string.h>

/* ---- words ---- */

typedef struct words {
    char *text; /* the words, each with its NUL */
    char **list;
    int64_t count;
} words;

typedef struct cutter {
    const char *name, *begin, *at, *end;
    char *to;
    bool open; /* within a word */
} cutter;

/* Of text that a message shows: within its line, and not much. */
static int shown_length(const char *from, const char *end) {
    int length = 0;
    while (from + length < end && length < 24 && from[length] != '\n')
        length++;
    return length;
}

static loom_status cut_quoted(cutter *c) {
    char quote = *c->at++;
    const char *from = c->at;
    while (c->at < c->end && *c->at != quote) {
        if (quote == '"' && *c->at == '\\' && c->at + 1 < c->end) {
            c->at++;
            if (*c->at == '\n') {
                c->at++;
                continue;
            }
            if (!strchr("\"\\$`", *c->at))
                *c->to++ = '\\';
        }
        *c->to++ = *c->at++;
    }
    if (c->at == c->end)
        return loom_fail(LOOM_ERR_FORMAT, "%s: the quote %c before \"%.*s\" does not end", c->name, quote,
            shown_length(from, c->end), from);
    c->at++;
    return LOOM_OK;
}

static void end_word(cutter *c, words *out) {
    if (!c->open)
        return;
    *c->to++ = '\0';
    c->open = false;
    out->count++;
}

static loom_status cut(cutter *c, words *out) {
    while (c->at < c->end) {
        char now = *c->at;
        if (now == '\0')
            return loom_fail(LOOM_ERR_FORMAT, "%s: byte %td is NUL, expected text", c->name, c->at - c->begin);
        if (now == '\\' && c->at + 1 < c->end && (c->at[1] == '\n' || c->at[1] == '\r')) {
            c->at += c->at[1] == '\r' && c->at + 2 < c->end && c->at[2] == '\n' ? 3 : 2;
        } else if (strchr(" \t\r\n;&|()", now)) {
            end_word(c, out);
            c->at++;
        } else if (now == '#' && !c->open) {
            while (c->at < c->end && *c->at != '\n')
                c->at++;
        } else {
            c->open = true;
            if (now == '\'' || now == '"') {
                LOOM_TRY(cut_quoted(c));
                continue;
            }
            c->at += now == '\\' && c->at + 1 < c->end;
            *c->to++ = *c->at++;
        }
    }
    end_word(c, out);
    return LOOM_OK;
}

static void words_free(words *w) {
    free(w->text);
    free(w->list);
}

static loom_status make_words(const char *name, const char *text, size_t length, words *out) {
    words made = {.text = calloc(length + 2, 1)};
    loom_status status = made.text ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", name);
    if (!status)
        status = cut(&(cutter){.name = name, .begin = text, .at = text, .end = text + length, .to = made.text}, &made);
    if (!status) {
        made.list = calloc((size_t)made.count + 1, sizeof *made.list);
        status = made.list ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "%s: out of memory", name);
    }
    if (status) {
        words_free(&made);
        return status;
    }
    char *at = made.text;
    for (int64_t i = 0; i < made.count; i++, at += strlen(at) + 1)
        made.list[i] = at;
    *out = made;
    return LOOM_OK;
}

/* ---- options ---- */

typedef enum takes { VALUE, FLAG, THREE, SOME, SPECIAL } takes; /* SOME: one, or a list */

typedef struct option {
    const char *name;
    takes takes;
    const char *field;
    const char *flag; /* what a flag gives the field */
} option;

#define SAME(option_name, path)                                                                                        \
    { option_name, VALUE, path, NULL }
#define SETS(option_name, path, to)                                                                                    \
    { option_name, FLAG, path, to }

static const option options[] = {
    SAME("tensor-model-parallel-size", "strategy.tensor_model_parallel_size"),
    SAME("pipeline-model-parallel-size", "strategy.pipeline_model_parallel_size"),
    SAME("num-virtual-stages-per-pipeline-rank", "strategy.virtual_pipeline_model_parallel_size"),
    SAME("microbatch-group-size-per-virtual-pipeline-stage", "strategy.microbatch_group_size_per_vp_stage"),
    SAME("context-parallel-size", "strategy.context_parallel_size"),
    SAME("expert-model-parallel-size", "strategy.expert_model_parallel_size"),
    SAME("expert-tensor-parallel-size", "strategy.expert_tensor_parallel_size"),
    SETS("moe-extended-tp", "strategy.moe_extended_tp", "true"),
    SAME("encoder-tensor-model-parallel-size", "strategy.encoder_tensor_model_parallel_size"),
    SAME("encoder-pipeline-model-parallel-size", "strategy.encoder_pipeline_model_parallel_size"),
    SETS("sequence-parallel", "strategy.sequence_parallel", "true"),
    SETS("use-tp-pp-dp-mapping", "strategy.use_tp_pp_dp_mapping", "true"),
    SAME("num-distributed-optimizer-instances", "strategy.num_distributed_optimizer_instances"),
    SETS("use-distributed-optimizer", "strategy.ddp.use_distributed_optimizer", "true"),
    SETS("overlap-grad-reduce", "strategy.ddp.overlap_grad_reduce", "true"),
    SETS("no-align-grad-reduce", "strategy.ddp.align_grad_reduce", "false"),
    SETS("overlap-param-gather", "strategy.ddp.overlap_param_gather", "true"),
    SETS("align-param-gather", "strategy.ddp.align_param_gather", "true"),
    SAME("ddp-bucket-size", "strategy.ddp.bucket_size"),
    SETS("ddp-average-in-collective", "strategy.ddp.average_in_collective", "true"),
    SETS("ddp-pad-buckets-for-high-nccl-busbw", "strategy.ddp.pad_buckets_for_high_nccl_busbw", "true"),
    SETS("no-check-for-nan-in-loss-and-grad", "strategy.ddp.check_for_nan_in_grad", "false"),
    SETS("use-megatron-fsdp", "strategy.ddp.use_megatron_fsdp", "true"),
    SETS("use-custom-fsdp", "strategy.ddp.use_megatron_fsdp", "true"),
    SAME("data-parallel-sharding-strategy", "strategy.ddp.data_parallel_sharding_strategy"),
    SAME("num-layers", "model.num_layers"),
    SAME("hidden-size", "model.hidden_size"),
    SAME("ffn-hidden-size", "model.ffn_hidden_size"),
    SAME("num-attention-heads", "model.num_attention_heads"),
    SAME("num-query-groups", "model.num_query_groups"),
    SAME("kv-channels", "model.kv_channels"),
    SAME("seq-length", "model.seq_length"),
    SAME("encoder-seq-length", "model.seq_length"),
    SAME("max-position-embeddings", "model.max_position_embeddings"),
    SAME("vocab-size", "model.vocab_size"),
    SAME("make-vocab-size-divisible-by", "model.make_vocab_size_divisible_by"),
    SAME("padded-vocab-size", "model.padded_vocab_size"),
    SAME("normalization", "model.normalization"),
    SAME("norm-epsilon", "model.layernorm_epsilon"),
    SETS("apply-layernorm-1p", "model.layernorm_zero_centered_gamma", "true"),
    SETS("qk-layernorm", "model.qk_layernorm", "true"),
    SETS("swiglu", "model.activation", "swiglu"),
    SAME("position-embedding-type", "model.position_embedding_type"),
    SETS("use-rotary-position-embeddings", "model.position_embedding_type", "rope"),
    SETS("no-position-embedding", "model.position_embedding_type", "none"),
    SAME("rotary-base", "model.rotary_base"),
    SAME("rotary-percent", "model.rotary_percent"),
    SETS("use-rope-scaling", "model.rope_scaling", "llama3"),
    SAME("rope-scaling-factor", "model.rope_scaling_factor"),
    SETS("disable-bias-linear", "model.add_bias_linear", "false"),
    SETS("add-qkv-bias", "model.add_qkv_bias", "true"),
    SETS("untie-embeddings-and-output-weights", "model.share_embeddings_and_output_weights", "false"),
    SAME("attention-dropout", "model.attention_dropout"),
    SAME("hidden-dropout", "model.hidden_dropout"),
    SAME("init-method-std", "model.init_method_std"),
    SETS("recompute-activations", "model.recompute", "selective"),
    SAME("recompute-granularity", "model.recompute"),
    SAME("decoder-first-pipeline-num-layers", "model.num_layers_in_first_pipeline_stage"),
    SAME("decoder-last-pipeline-num-layers", "model.num_layers_in_last_pipeline_stage"),
    SETS("account-for-embedding-in-pipeline-split", "model.account_for_embedding_in_pipeline_split", "true"),
    SETS("account-for-loss-in-pipeline-split", "model.account_for_loss_in_pipeline_split", "true"),
    SAME("pipeline-model-parallel-layout", "model.pipeline_model_parallel_layout"),
    SETS("variable-seq-lengths", "model.variable_seq_lengths", "true"),
    {"cp-comm-type", SOME, "model.cp_comm_type", NULL},
    {"hierarchical-context-parallel-sizes", SOME, "model.hierarchical_context_parallel_sizes", NULL},
    SAME("num-experts", "model.num_moe_experts"),
    SAME("moe-ffn-hidden-size", "model.moe_ffn_hidden_size"),
    SAME("moe-layer-freq", "model.moe_layer_freq"),
    SAME("moe-router-topk", "model.moe_router_topk"),
    SAME("moe-router-num-groups", "model.moe_router_num_groups"),
    SAME("moe-router-group-topk", "model.moe_router_group_topk"),
    SAME("moe-shared-expert-intermediate-size", "model.moe_shared_expert_intermediate_size"),
    {"moe-router-load-balancing-type", SOME, "model.moe_router_load_balancing_type", NULL},
    SAME("moe-router-score-function", "model.moe_router_score_function"),
    SAME("moe-router-dtype", "model.moe_router_dtype"),
    SAME("moe-token-dispatcher-type", "model.moe_token_dispatcher_type"),
    SAME("moe-token-drop-policy", "model.moe_token_drop_policy"),
    SAME("moe-router-topk-scaling-factor", "model.moe_router_topk_scaling_factor"),
    SAME("moe-router-bias-update-rate", "model.moe_router_bias_update_rate"),
    {"moe-aux-loss-coeff", SOME, "model.moe_aux_loss_coeff", NULL},
    SAME("moe-z-loss-coeff", "model.moe_z_loss_coeff"),
    SAME("moe-input-jitter-eps", "model.moe_input_jitter_eps"),
    SAME("moe-expert-capacity-factor", "model.moe_expert_capacity_factor"),
    SETS("moe-router-pre-softmax", "model.moe_router_pre_softmax", "true"),
    SETS("moe-router-enable-expert-bias", "model.moe_router_enable_expert_bias", "true"),
    SETS("moe-router-force-load-balancing", "model.moe_router_force_load_balancing", "true"),
    SETS("moe-pad-expert-input-to-capacity", "model.moe_pad_expert_input_to_capacity", "true"),
    SETS("moe-grouped-gemm", "model.moe_grouped_gemm", "true"),
    SETS("moe-shared-expert-overlap", "model.moe_shared_expert_overlap", "true"),
    SETS("moe-permute-fusion", "model.moe_permute_fusion", "true"),
    SETS("moe-apply-probs-on-input", "model.moe_apply_probs_on_input", "true"),
    SETS("moe-layer-recompute", "model.moe_layer_recompute", "true"),
    SETS("moe-per-layer-logging", "model.moe_per_layer_logging", "true"),
    SETS("bf16", "precision", "bf16-mixed"),
    SETS("fp16", "precision", "16-mixed"),
    SAME("fp8-format", "precision.fp8"),
    SAME("fp8-margin", "precision.fp8_margin"),
    SAME("fp8-amax-history-len", "precision.fp8_amax_history_len"),
    SAME("fp8-amax-compute-algo", "precision.fp8_amax_compute_algo"),
    SETS("fp8-param-gather", "precision.fp8_param_gather", "true"),
    SAME("loss-scale", "precision.loss_scale"),
    SAME("initial-loss-scale", "precision.initial_loss_scale"),
    SAME("min-loss-scale", "precision.min_loss_scale"),
    SAME("loss-scale-window", "precision.loss_scale_window"),
    SAME("hysteresis", "precision.hysteresis"),
    SAME("micro-batch-size", "data.micro_batch_size"),
    SAME("global-batch-size", "data.global_batch_size"),
    {"rampup-batch-size", THREE, "data.rampup_batch_size", NULL},
    SETS("decrease-batch-size-if-needed", "data.decrease_batch_size_if_needed", "true"),
    SAME("dataloader-type", "data.dataloader_type"),
    SAME("train-iters", "steps"),
    SAME("seed", "seed"),
    SAME("optimizer", "optim.optimizer"),
    SAME("lr", "optim.lr"),
    SAME("min-lr", "optim.min_lr"),
    SAME("decoupled-lr", "optim.decoupled_lr"),
    SAME("decoupled-min-lr", "optim.decoupled_min_lr"),
    SAME("lr-decay-style", "optim.schedule"),
    SAME("lr-warmup-iters", "optim.warmup_steps"),
    SAME("lr-decay-iters", "optim.lr_decay_steps"),
    SAME("lr-warmup-init", "optim.init_lr"),
    SAME("lr-wsd-decay-style", "optim.lr_wsd_decay_style"),
    SAME("lr-wsd-decay-iters", "optim.wsd_decay_steps"),
    SAME("weight-decay", "optim.weight_decay"),
    SAME("adam-beta1", "optim.adam_beta1"),
    SAME("adam-beta2", "optim.adam_beta2"),
    SAME("adam-eps", "optim.adam_eps"),
    SAME("sgd-momentum", "optim.sgd_momentum"),
    SAME("clip-grad", "optim.clip_grad"),
    SAME("exp-avg-dtype", "optim.exp_avg_dtype"),
    SAME("exp-avg-sq-dtype", "optim.exp_avg_sq_dtype"),
    {"nproc-per-node", SPECIAL, NULL, NULL},
    {"nnodes", SPECIAL, NULL, NULL},
    {"num-layers-per-virtual-pipeline-stage", SPECIAL, NULL, NULL},
    {"train-samples", SPECIAL, NULL, NULL},
    {"tokenizer-type", SPECIAL, NULL, NULL},
};

/* Where data and checkpoints are, what is logged, which kernels run: nothing that a plan counts. A '*' ends a prefix.
 */
static const char *const without_effect[] = {"data-path", "data-cache-path", "split", "train-data-path",
    "valid-data-path", "test-data-path", "mock-data", "tokenizer-model", "tokenizer-*", "vocab-file", "merge-file",
    "vocab-extra-ids", "num-workers", "save", "load", "save-interval", "ckpt-*", "dist-ckpt-*", "async-save",
    "no-load-optim", "no-load-rng", "no-save-optim", "no-save-rng", "use-checkpoint-*", "auto-detect-ckpt-format",
    "log-*", "tensorboard-*", "wandb-*", "timing-log-*", "eval-interval", "eval-iters", "exit-*", "distributed-*",
    "use-mcore-models", "transformer-impl", "use-flash-attn", "attention-backend", "attention-softmax-in-fp32",
    "apply-query-key-layer-scaling", "no-*-fusion", "no-gradient-accumulation-fusion", "no-masked-softmax-fusion",
    "no-rope-fusion", "no-bias-gelu-fusion", "no-bias-swiglu-fusion", "no-bias-dropout-fusion",
    "cross-entropy-loss-fusion", "cross-entropy-fusion-impl", "tp-comm-overlap", "tp-comm-*", "manual-gc",
    "manual-gc-interval", "accumulate-allreduce-grads-in-fp32", "no-create-attention-mask-in-dataloader",
    "group-query-attention", "reset-position-ids", "reset-attention-mask", "eod-mask-loss", "profile", "profile-*",
    "use-pytorch-profiler", "deterministic-mode", "master-addr", "master-port", "node-rank", "rdzv-*", "rank",
    "local-rank", "lazy-mpu-init", "empty-unused-memory-level", "overlap-p2p-communication",
    "no-overlap-p2p-communication", "bias-*", "override-opt_param-scheduler", "use-checkpoint-opt_param-scheduler",
    "rotary-seq-len-interpolation-factor", "enable-experimental", "tee", "log-dir", "redirects"};

static bool is_without_effect(const char *name) {
    for (size_t i = 0; i < sizeof without_effect / sizeof *without_effect; i++) {
        const char *star = strchr(without_effect[i], '*');
        if (star ? strncmp(name, without_effect[i], (size_t)(star - without_effect[i])) == 0 && star[1] == '\0'
                 : strcmp(name, without_effect[i]) == 0)
            return true;
    }
    return false;
}

static const option *find(const char *name) {
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (strcmp(options[i].name, name) == 0)
            return &options[i];
    return NULL;
}

/* What several options say together. */
typedef struct sums {
    int64_t per_node, nodes, layers, stages, layers_a_chunk, samples, global, hidden;
    bool gated, ffn, vocabulary, steps, bf16, fp16;
    bool ranks_unknown; /* a shell would know them */
} sums;

static int64_t number(const char *text) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    return end != text && !*end && !errno && value > 0 ? value : 0;
}

static void note(sums *s, const char *name, const char *value) {
    const struct {
        const char *name;
        int64_t *to;
    } numbers[] = {{"nproc-per-node", &s->per_node}, {"nnodes", &s->nodes}, {"num-layers", &s->layers},
        {"pipeline-model-parallel-size", &s->stages}, {"num-layers-per-virtual-pipeline-stage", &s->layers_a_chunk},
        {"train-samples", &s->samples}, {"global-batch-size", &s->global}, {"hidden-size", &s->hidden}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (strcmp(name, numbers[i].name) == 0)
            *numbers[i].to = number(value);
    s->bf16 = s->bf16 || strcmp(name, "bf16") == 0;
    s->fp16 = s->fp16 || strcmp(name, "fp16") == 0;
    s->gated = s->gated || strcmp(name, "swiglu") == 0;
    s->ffn = s->ffn || strcmp(name, "ffn-hidden-size") == 0;
    s->vocabulary = s->vocabulary || strcmp(name, "vocab-size") == 0 || strcmp(name, "padded-vocab-size") == 0;
    s->steps = s->steps || strcmp(name, "train-iters") == 0;
}

static void add_number(loom__translator *t, const char *field, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, value);
    loom__translator_add(t, field, text);
}

/* Megatron-LM's defaults where a run file has others. */
static void add_defaults(loom__translator *t) {
    static const char *const defaults[][2] = {{"model.architecture", "gpt2"}, {"model.hidden_dropout", "0.1"},
        {"model.attention_dropout", "0.1"}, {"model.add_qkv_bias", "false"}, {"data.kind", "mock"},
        {"optim.schedule", "megatron-linear"}};
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++)
        loom__translator_add(t, defaults[i][0], defaults[i][1]);
}

/* Stages of so many layers a chunk: how many chunks a stage has. */
static void add_chunks(loom__translator *t, const sums *s, int64_t stages) {
    int64_t of_stage = s->layers / stages;
    if (s->layers_a_chunk == 0 || of_stage == 0)
        return;
    if (of_stage % s->layers_a_chunk == 0) {
        add_number(t, "strategy.virtual_pipeline_model_parallel_size", of_stage / s->layers_a_chunk);
        return;
    }
    loom__translator_fault(t,
        "--num-layers-per-virtual-pipeline-stage: found %" PRId64 ", expected a divisor of the %" PRId64
        " layers of a stage: the nearest legal %s",
        s->layers_a_chunk, of_stage, loom__nearest_divisors(of_stage, s->layers_a_chunk).text);
}

static void add_sums(loom__translator *t, const sums *s, const char *tokenizer) {
    int64_t stages = s->stages > 0 ? s->stages : 1;
    if (!s->ranks_unknown) /* torchrun's default is one of each */
        loom__translator_set_ranks(t, s->per_node, s->nodes);
    if (s->bf16 && s->fp16)
        loom__translator_fault(t, "--fp16: found together with --bf16, expected one of them");
    add_chunks(t, s, stages);
    /* Gated layers keep the size of those that are not: two thirds, in 64s. */
    if (s->gated && !s->ffn && s->hidden > 0)
        add_number(t, "model.ffn_hidden_size", 4 * s->hidden * 2 / 3 / 64 * 64);
    if (!s->steps)
        add_number(t, "steps", s->samples > 0 && s->global > 0 ? (s->samples + s->global - 1) / s->global : 1);
    if (!s->vocabulary && tokenizer && strncmp(tokenizer, "GPT2BPE", 7) == 0)
        add_number(t, "model.vocab_size", 50257);
}

/* "--Name_of=value" -> "name-of" and where the value begins, NULL without one. */
static const char *split_name(const char *word, char *name, size_t bytes) {
    const char *equals = strchr(word, '=');
    size_t length = equals ? (size_t)(equals - word) : strlen(word);
    length = length < bytes ? length : bytes - 1;
    for (size_t i = 0; i < length; i++)
        name[i] = word[i] == '_' ? '-' : word[i];
    name[length] = '\0';
    return equals ? equals + 1 : NULL;
}

static bool is_option(const char *word) {
    return strncmp(word, "--", 2) == 0 && word[2];
}

static bool is_expanded(const char *value) {
    return strchr(value, '$') || strchr(value, '`');
}

static bool is_one_of(const char *name, const char *const *names) {
    for (; *names; names++)
        if (strcmp(name, *names) == 0)
            return true;
    return false;
}

static void leave_out(loom__translator *t, const char *name, const char *value) {
    const char *names[sizeof options / sizeof *options];
    int64_t count = sizeof options / sizeof *options;
    /* Every layer is recomputed here, one by one: so much these say as well. */
    if ((strcmp(name, "recompute-method") == 0 && value && strcmp(value, "uniform") == 0) ||
        (strcmp(name, "recompute-num-layers") == 0 && value && strcmp(value, "1") == 0) || is_without_effect(name))
        return;
    for (int64_t i = 0; i < count; i++)
        names[i] = options[i].name;
    const char *meant = loom_nearest_name(name, names, count);
    loom__translator_leave_out(t, "--%s has no field here%s%s%s", name, meant ? "; did you mean --" : "",
        meant ? meant : "", meant ? "?" : "");
}

/* A number that this file computes with; others are judged where their fields are. */
static void check_number(loom__translator *t, const char *name, const char *value) {
    static const char *const numbers[] = {
        "nproc-per-node", "nnodes", "num-layers-per-virtual-pipeline-stage", "train-samples", NULL};
    int64_t most = name[0] == 'n' && name[1] != 'u' ? INT32_MAX : INT64_MAX, found = number(value);
    if (is_one_of(name, numbers) && (found < 1 || found > most))
        loom__translator_fault(t, "--%s: found %.60s, expected an integer from 1 to %" PRId64, name, value, most);
}

/* "[1, 2]" of the words first … last. */
static void list_of(const words *w, int64_t first, int64_t last, char *text, size_t bytes) {
    size_t used = 0;
    for (int64_t i = first; i <= last && used + 34 < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%.30s", i > first ? ", " : "[", w->list[i]);
    snprintf(text + used, bytes - used, "]");
}

/* Takes one option and its values; *at is left at the last word that it has used. */
static void take(loom__translator *t, const words *w, int64_t *at, sums *s, const char **tokenizer) {
    static const char *const ranks[] = {"nproc-per-node", "nnodes", NULL};
    char name[96], list[16 * LOOM_CONTEXT_LAYERS_MAX];
    const char *value = split_name(w->list[*at] + 2, name, sizeof name);
    const option *known = find(name);
    int64_t first = *at;
    bool several = !known || known->takes == THREE || (known->takes == SOME && !value);
    if (!value && *at + 1 < w->count && !is_option(w->list[*at + 1]) && (!known || known->takes != FLAG))
        value = w->list[++*at];
    /* Values of a list, or of an option that is not known. */
    while (*at + 1 < w->count && !is_option(w->list[*at + 1]) && several)
        ++*at;
    if (!known) {
        leave_out(t, name, value);
        return;
    }
    if (known->takes == FLAG) {
        note(s, name, "");
        loom__translator_add(t, known->field, known->flag);
        return;
    }
    if (!value) {
        loom__translator_fault(t, "--%s: found no value, expected one", name);
        return;
    }
    if (is_expanded(value)) {
        s->ranks_unknown = s->ranks_unknown || is_one_of(name, ranks);
        loom__translator_leave_out(t, "--%s: \"%.60s\" is for a shell to expand, expected its value", name, value);
        return;
    }
    note(s, name, value);
    check_number(t, name, value);
    if (known->takes == THREE) {
        if (*at - first != 3) {
            loom__translator_fault(
                t, "--%s: found %" PRId64 " value%s, expected three", name, *at - first, *at - first == 1 ? "" : "s");
            return;
        }
    }
    if (several && *at - first > 1) {
        list_of(w, first + 1, *at, list, sizeof list);
        value = list;
    }
    if (strcmp(name, "tokenizer-type") == 0)
        *tokenizer = value;
    if (known->field)
        loom__translator_add(t, known->field, loom__translated_value(known->field, value));
}

loom_status loom_plan_translate_megatron(
    const char *name, const char *text, size_t length, loom_plan_translation *translation) {
    loom__translator t;
    words w = {0};
    sums s = {0};
    const char *tokenizer = NULL;
    loom_status status = loom__translator_begin(&t, name, length);
    if (!status)
        status = make_words(name, text, length, &w);
    if (!status)
        add_defaults(&t);
    for (int64_t i = 0; i < w.count && !status; i++)
        if (is_option(w.list[i]))
            take(&t, &w, &i, &s, &tokenizer);
    if (!status)
        add_sums(&t, &s, tokenizer);
    words_free(&w);
    return loom__translator_end(&t, status, translation);
}
