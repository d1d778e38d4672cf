/* The frequencies of rotary positions: a geometric row from 1 down to 1 / rotary_base, then a scaling that stretches
 * what turns slowly. */
#include "spec/rope.h"
#include <math.h>

int64_t loom__rope_channels(const loom_model_config *config) {
    return (int64_t)((double)config->kv_channels * config->rotary_percent) / 2 * 2;
}

/* Turns over the original length decide: fewer than `low` are stretched, more than `high` kept. */
static double llama3_frequency(const loom_model_config *config, double frequency) {
    double low = config->rope_scaling_low_freq_factor, high = config->rope_scaling_high_freq_factor;
    double turns =
        (double)config->rope_scaling_original_max_position_embeddings * frequency / (2 * 3.14159265358979323846);
    double kept = (turns - low) / (high - low);
    kept = kept < 0 ? 0 : kept > 1 ? 1 : kept;
    return (1 - kept) * frequency / config->rope_scaling_factor + kept * frequency;
}

double loom__rope_frequency(const loom_model_config *config, int64_t pair) {
    double half = (double)(loom__rope_channels(config) / 2), frequency = pow(config->rotary_base, -(double)pair / half);
    switch (config->rope_scaling) {
    case LOOM_ROPE_SCALING_LINEAR:
        return frequency / config->rope_scaling_factor;
    case LOOM_ROPE_SCALING_LLAMA3:
        return llama3_frequency(config, frequency);
    case LOOM_ROPE_SCALING_NONE:
        break;
    }
    return frequency;
}
