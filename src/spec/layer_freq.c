/* Which layers of a model have experts: every N-th, or as a list says, which Megatron writes as a Python expression of
 * lists, sums and repetitions. A list that has passed has one number for each layer, and a 1 among them; behind its end
 * are zeros, so that equal lists are equal bytes. */
#include "base/faults.h"
#include "spec/parameter.h"
#include <inttypes.h>
#include <string.h>

bool loom__layer_has_experts(const loom_model_config *config, int64_t layer) {
    const loom_moe_layer_freq *freq = &config->moe.moe_layer_freq;
    if (config->moe.num_moe_experts == 0)
        return false;
    if (freq->length > 0)
        return layer < freq->length && freq->list[layer];
    return layer % (freq->every > 0 ? freq->every : 1) == 0;
}

int64_t loom_model_expert_layers(const loom_model_config *config) {
    int64_t count = 0;
    for (int64_t layer = 0; layer < config->num_layers; layer++)
        count += loom__layer_has_experts(config, layer);
    return count;
}

bool loom__layers_differ(const loom_model_config *config) {
    const loom_moe_layer_freq *freq = &config->moe.moe_layer_freq;
    return config->moe.num_moe_experts > 0 && (freq->length > 0 || freq->every > 1);
}

void loom__moe_layer_freq_complete(loom_moe_layer_freq *freq, int64_t num_layers, struct loom__faults *faults) {
    int64_t ones = 0;
    if (freq->length == 0 && freq->every == 0)
        freq->every = 1;
    if (freq->length == 0 && freq->every < 1)
        loom__faults_add(faults, LOOM_ERR_CONFIG, "moe_layer_freq: found %" PRId64 ", expected 1 or more", freq->every);
    if (freq->length == 0)
        return;
    for (int64_t i = 0; i < freq->length && i < LOOM_MOE_LAYERS_MAX; i++)
        ones += freq->list[i] == 1;
    if (freq->length < 0 || freq->length != num_layers)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "moe_layer_freq: found a list of %" PRId64 " layers, expected one number for each of num_layers %" PRId64
            "%s",
            freq->length, num_layers, num_layers > LOOM_MOE_LAYERS_MAX ? " (a list has at most 512)" : "");
    else if (ones == 0)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "moe_layer_freq: found a list of zeros, expected a 1 for each layer with experts (without any, leave "
            "num_moe_experts out)");
}

/* ---- Megatron's text */

typedef struct parser {
    const char *at;
    int depth;
} parser;

static bool skip(parser *p, char wanted) {
    while (*p->at == ' ')
        p->at++;
    if (*p->at != wanted)
        return false;
    p->at++;
    return true;
}

static bool append(loom_moe_layer_freq *to, const uint8_t *list, int64_t length) {
    if (to->length + length > LOOM_MOE_LAYERS_MAX)
        return false;
    memmove(to->list + to->length, list, (size_t)length);
    to->length += length;
    return true;
}

static bool parse_sum(parser *p, loom_moe_layer_freq *out);

/* A list or a sum in parentheses. */
static bool parse_factor(parser *p, loom_moe_layer_freq *out) {
    enum { DEPTH_MAX = 16 };
    if (skip(p, '(')) {
        bool whole = p->depth < DEPTH_MAX;
        p->depth++;
        whole = whole && parse_sum(p, out) && skip(p, ')');
        p->depth--;
        return whole;
    }
    if (!skip(p, '['))
        return false;
    do {
        uint8_t one = skip(p, '1');
        if ((!one && !skip(p, '0')) || !append(out, &one, 1))
            return false;
    } while (skip(p, ','));
    return skip(p, ']');
}

static bool parse_times(parser *p, int64_t *times) {
    int digits = 0;
    *times = 0;
    while (*p->at == ' ')
        p->at++;
    for (; *p->at >= '0' && *p->at <= '9' && digits < 4; digits++)
        *times = *times * 10 + (*p->at++ - '0');
    return digits > 0;
}

static bool parse_term(parser *p, loom_moe_layer_freq *out) {
    if (!parse_factor(p, out))
        return false;
    while (skip(p, '*')) {
        loom_moe_layer_freq once = *out;
        int64_t times;
        if (!parse_times(p, &times))
            return false;
        *out = (loom_moe_layer_freq){0};
        for (int64_t i = 0; i < times; i++)
            if (!append(out, once.list, once.length))
                return false;
    }
    return true;
}

static bool parse_sum(parser *p, loom_moe_layer_freq *out) {
    do {
        loom_moe_layer_freq term = {0};
        if (!parse_term(p, &term) || !append(out, term.list, term.length))
            return false;
    } while (skip(p, '+'));
    return true;
}

bool loom__moe_layer_freq_parse(const char *text, loom_moe_layer_freq *freq) {
    parser p = {.at = text};
    loom_moe_layer_freq made = {0};
    if (!parse_sum(&p, &made) || made.length == 0)
        return false;
    while (*p.at == ' ')
        p.at++;
    if (*p.at)
        return false;
    *freq = made;
    return true;
}
