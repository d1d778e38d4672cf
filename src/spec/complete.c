/* Derived values and checks of a model configuration. The invariant that the rest of the library leans on: a
 * configuration that passed has every derived value filled in, every dimension in a range where products of three do
 * not overflow 64 bits, and divides over its tensor ranks. All faults are collected before any is reported. */
#include "base/faults.h"
#include "spec/architecture.h"
#include "spec/parameter.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* Largest values of one dimension: h*(n+2g)*d and v*h stay far below 2^63. */
enum { LAYERS_MAX = 1 << 16, HEADS_MAX = 1 << 16, CHANNELS_MAX = 1 << 16, WIDTH_MAX = 1 << 26, ROWS_MAX = 1 << 30 };

static void check_range(loom__faults *faults, const char *name, int64_t found, int64_t low, int64_t high) {
    if (found < low || found > high)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "%s: found %" PRId64 ", expected an integer from %" PRId64 " to %" PRId64, name, found, low, high);
}

static void check_share(loom__faults *faults, const char *name, double found, double low, double high, bool open) {
    if (!(found >= low && (open ? (float)found < (float)high : found <= high)))
        loom__faults_add(faults, LOOM_ERR_CONFIG, "%s: found %.9g, expected a number from %g to %s%g%s", name, found,
            low, open ? "below " : "", high, open ? " in fp32" : "");
}

static void check_tensor_size(loom__faults *faults, const loom_model_config *config, int64_t tp) {
    int64_t n = config->num_attention_heads, g = config->num_query_groups, f = config->ffn_hidden_size;
    if (n % tp != 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "tensor_model_parallel_size %" PRId64 " does not divide num_attention_heads %" PRId64, tp, n);
    if (f % tp != 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "tensor_model_parallel_size %" PRId64 " does not divide ffn_hidden_size %" PRId64, tp, f);
    if (g % tp != 0 && !(config->replicate_query_groups && tp % g == 0))
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "tensor_model_parallel_size %" PRId64 " does not divide num_query_groups %" PRId64 "%s", tp, g,
            config->replicate_query_groups ? ", nor the other way round"
            : tp % g == 0                  ? " (replicate_query_groups would let ranks share one)"
                                           : "");
}

static void check_vocabulary(loom__faults *faults, loom_model_config *config, int64_t tp) {
    check_range(faults, "vocab_size", config->vocab_size, 1, ROWS_MAX);
    check_range(faults, "make_vocab_size_divisible_by", config->make_vocab_size_divisible_by, 1, WIDTH_MAX);
    if (config->vocab_size < 1 || config->vocab_size > ROWS_MAX || config->make_vocab_size_divisible_by < 1 ||
        config->make_vocab_size_divisible_by > WIDTH_MAX)
        return;
    if (config->padded_vocab_size == 0) {
        int64_t multiple = config->make_vocab_size_divisible_by * tp;
        config->padded_vocab_size = (config->vocab_size + multiple - 1) / multiple * multiple;
    }
    check_range(faults, "padded_vocab_size", config->padded_vocab_size, config->vocab_size, 2 * (int64_t)ROWS_MAX);
    if (config->padded_vocab_size % tp != 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "padded_vocab_size %" PRId64 " is not divisible by tensor_model_parallel_size %" PRId64,
            config->padded_vocab_size, tp);
}

static void check_sequence(loom__faults *faults, loom_model_config *config, int64_t tp, bool sequence_parallel) {
    check_range(faults, "seq_length", config->seq_length, 1, ROWS_MAX);
    if (config->max_position_embeddings == 0)
        config->max_position_embeddings = config->seq_length;
    check_range(faults, "max_position_embeddings", config->max_position_embeddings, 1, ROWS_MAX);
    if (config->position_embedding_type == LOOM_POSITION_LEARNED &&
        config->max_position_embeddings < config->seq_length)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "seq_length %" PRId64 " is longer than the %" PRId64 " learned positions (max_position_embeddings)",
            config->seq_length, config->max_position_embeddings);
    if (sequence_parallel && config->seq_length % tp != 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "seq_length %" PRId64 " is not divisible by tensor_model_parallel_size %" PRId64
            ", as sequence_parallel asks",
            config->seq_length, tp);
}

static void check_enumerations(loom__faults *faults, const loom_model_config *config) {
    const struct {
        const char *name;
        int value, count;
    } fields[] = {{"normalization", (int)config->normalization, LOOM_RMSNORM + 1},
        {"activation", (int)config->activation, LOOM_ACTIVATION_COUNT},
        {"position_embedding_type", (int)config->position_embedding_type, LOOM_POSITION_NONE + 1},
        {"rope_scaling", (int)config->rope_scaling, LOOM_ROPE_SCALING_LLAMA3 + 1},
        {"recompute", (int)config->recompute, LOOM_RECOMPUTE_FULL + 1}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].value < 0 || fields[i].value >= fields[i].count)
            loom__faults_add(faults, LOOM_ERR_CONFIG, "%s: found number %d, expected 0 to %d", fields[i].name,
                fields[i].value, fields[i].count - 1);
}

static void check_rope_scaling(loom__faults *faults, const loom_model_config *config) {
    double factor = config->rope_scaling_factor, low = config->rope_scaling_low_freq_factor;
    double high = config->rope_scaling_high_freq_factor;
    if (config->rope_scaling == LOOM_ROPE_SCALING_NONE)
        return;
    if (!(factor > 0 && isfinite(factor)))
        loom__faults_add(faults, LOOM_ERR_CONFIG, "rope_scaling_factor: found %g, expected a number > 0", factor);
    if (config->rope_scaling != LOOM_ROPE_SCALING_LLAMA3)
        return;
    if (!(low > 0 && high > low && isfinite(high)))
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "rope_scaling_low_freq_factor %g, rope_scaling_high_freq_factor %g: expected numbers > 0, the second above "
            "the first",
            low, high);
    check_range(faults, "rope_scaling_original_max_position_embeddings",
        config->rope_scaling_original_max_position_embeddings, 1, ROWS_MAX);
}

static void check_numbers(loom__faults *faults, const loom_model_config *config) {
    check_share(faults, "hidden_dropout", config->hidden_dropout, 0, 1, true);
    check_share(faults, "attention_dropout", config->attention_dropout, 0, 1, true);
    if (!((float)config->layernorm_epsilon > 0 && isfinite((float)config->layernorm_epsilon)))
        loom__faults_add(faults, LOOM_ERR_CONFIG, "layernorm_epsilon: found %g, expected a number > 0 in fp32",
            config->layernorm_epsilon);
    if (!(config->init_method_std >= 0 && isfinite(config->init_method_std)))
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "init_method_std: found %g, expected a number >= 0", config->init_method_std);
    check_range(faults, "window_size", config->window_size, 0, ROWS_MAX);
    if (config->qk_layernorm && config->normalization != LOOM_RMSNORM)
        loom__faults_add(faults, LOOM_ERR_UNSUPPORTED,
            "not supported yet: qk_layernorm with normalization layernorm; with rmsnorm it is");
    if (config->position_embedding_type != LOOM_POSITION_ROPE)
        return;
    if (!(config->rotary_base > 0 && isfinite(config->rotary_base)))
        loom__faults_add(faults, LOOM_ERR_CONFIG, "rotary_base: found %g, expected a number > 0", config->rotary_base);
    check_rope_scaling(faults, config);
    check_share(faults, "rotary_percent", config->rotary_percent, 0, 1, false);
    if (config->kv_channels > 0 && config->kv_channels <= CHANNELS_MAX && config->rotary_percent >= 0 &&
        config->rotary_percent <= 1 && (int64_t)((double)config->kv_channels * config->rotary_percent) % 2 != 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "kv_channels %" PRId64 " with rotary_percent %g: rotary positions turn pairs, so that an even number of "
            "channels is needed",
            config->kv_channels, config->rotary_percent);
}

static void check_heads(loom__faults *faults, loom_model_config *config) {
    check_range(faults, "num_attention_heads", config->num_attention_heads, 1, HEADS_MAX);
    if (config->num_query_groups == 0)
        config->num_query_groups = config->num_attention_heads;
    check_range(faults, "num_query_groups", config->num_query_groups, 1, HEADS_MAX);
    int64_t n = config->num_attention_heads, g = config->num_query_groups, h = config->hidden_size;
    if (n > 0 && g > 0 && n % g != 0)
        loom__faults_add(
            faults, LOOM_ERR_CONFIG, "num_query_groups %" PRId64 " does not divide num_attention_heads %" PRId64, g, n);
    if (config->kv_channels == 0 && n > 0) {
        if (h > 0 && h <= WIDTH_MAX && n <= HEADS_MAX && h % n != 0)
            loom__faults_add(faults, LOOM_ERR_CONFIG,
                "hidden_size %" PRId64 " is not divisible by num_attention_heads %" PRId64
                ", and kv_channels is not given",
                h, n);
        config->kv_channels = h < 1 || h > WIDTH_MAX ? 0 : h / n > 0 ? h / n : 1;
    }
    if (config->kv_channels != 0)
        check_range(faults, "kv_channels", config->kv_channels, 1, CHANNELS_MAX);
}

void loom__model_complete_faults(loom_model_config *config, int64_t tp, bool sequence_parallel, loom__faults *faults) {
    int64_t before = faults->count;
    loom_model_config made = *config;
    if (!made.architecture)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "architecture: missing, expected one of " LOOM__ARCHITECTURES_BUILT);
    else if (loom__architecture_find(made.architecture) == LOOM__ARCHITECTURE_UNKNOWN)
        loom__faults_add(faults, LOOM_ERR_UNSUPPORTED,
            "not supported yet: architecture \"%s\"; " LOOM__ARCHITECTURES_BUILT " are", made.architecture);
    check_range(faults, "tensor_model_parallel_size", tp, 1, WIDTH_MAX);
    if (tp < 1 || tp > WIDTH_MAX)
        return;
    check_range(faults, "num_layers", made.num_layers, 1, LAYERS_MAX);
    check_range(faults, "hidden_size", made.hidden_size, 1, WIDTH_MAX);
    /* What follows from a size that is refused is not told. */
    bool sound = made.hidden_size > 0 && made.hidden_size <= WIDTH_MAX;
    if (made.ffn_hidden_size == 0 && sound)
        made.ffn_hidden_size = 4 * made.hidden_size;
    if (made.ffn_hidden_size != 0)
        check_range(faults, "ffn_hidden_size", made.ffn_hidden_size, 1, 4 * (int64_t)WIDTH_MAX);
    check_heads(faults, &made);
    check_vocabulary(faults, &made, tp);
    check_sequence(faults, &made, tp, sequence_parallel);
    check_enumerations(faults, &made);
    check_numbers(faults, &made);
    loom__model_config_complete_experts(&made, tp, sequence_parallel, faults);
    if (sequence_parallel && tp == 1)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "sequence_parallel needs tensor_model_parallel_size > 1, found 1");
    /* Only sizes that are sound on their own can be compared with each other. */
    if (made.num_attention_heads > 0 && made.num_attention_heads <= HEADS_MAX && made.num_query_groups > 0 &&
        made.ffn_hidden_size > 0)
        check_tensor_size(faults, &made, tp);
    if (faults->count == before)
        *config = made;
}
