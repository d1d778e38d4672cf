/* How ranks can share a sequence, which each layer may do in another way. In a ring they keep all heads, so that
 * nothing but the length matters; by an all-to-all they share heads, of which each then needs a whole number, and as
 * many query groups. Whatever the way, a layer takes and gives the same rows, so that ways need not agree between
 * layers. */
#include "base/faults.h"
#include "spec/parameter.h"
#include <inttypes.h>
#include <megaloom/layout.h>
#include <stdio.h>
#include <string.h>

static const char *const type_names[LOOM__CONTEXT_TYPES] = {[LOOM__CONTEXT_P2P] = "p2p",
    [LOOM__CONTEXT_ALL_GATHER] = "all_gather",
    [LOOM__CONTEXT_A2A] = "a2a",
    [LOOM__CONTEXT_LEVELS] = "a2a+p2p"};

static int64_t list_length(const loom_model_config *config) {
    const char *const *list = config->parallel.cp_comm_type;
    int64_t length = 0;
    while (length < LOOM_CONTEXT_LAYERS_MAX && list[length])
        length++;
    return length;
}

/* LOOM__CONTEXT_TYPES where there is none of that name. */
static loom__context_type find_type(const char *name) {
    int type = 0;
    while (type < LOOM__CONTEXT_TYPES && strcmp(type_names[type], name) != 0)
        type++;
    return (loom__context_type)type;
}

loom__context_type loom__context_type_of(const loom_model_config *config, int64_t layer) {
    const char *const *list = config->parallel.cp_comm_type;
    if (!list[0])
        return LOOM__CONTEXT_P2P;
    loom__context_type type = find_type(list[layer < LOOM_CONTEXT_LAYERS_MAX && list[1] && list[layer] ? layer : 0]);
    return type == LOOM__CONTEXT_TYPES ? LOOM__CONTEXT_P2P : type;
}

int64_t loom__context_layers(
    const loom_model_config *config, loom__context_type type, int64_t first_layer, int64_t layers) {
    int64_t count = 0;
    for (int64_t i = 0; i < layers; i++)
        count += loom__context_type_of(config, first_layer + i) == type;
    return count;
}

/* " of layers 0, 2 to 5" for those of the type in a list; "" where there is one for all. */
static const char *name_layers(const loom_model_config *config, loom__context_type type, char *text, size_t bytes) {
    const char *const *list = config->parallel.cp_comm_type;
    int64_t length = list_length(config), count = 0;
    size_t used = 0;
    text[0] = '\0';
    for (int64_t i = 0; i < length && length > 1; i++)
        count += find_type(list[i]) == type;
    for (int64_t i = 0, run; i < length && count > 0 && used + 56 < bytes; i += run + 1) {
        for (run = 0; i + run < length && find_type(list[i + run]) == type; run++)
            continue;
        if (run > 0)
            used += (size_t)snprintf(text + used, bytes - used, "%s%" PRId64,
                used > 0    ? ", "
                : count > 1 ? " of layers "
                            : " of layer ",
                i);
        if (run > 1)
            used += (size_t)snprintf(text + used, bytes - used, " to %" PRId64, i + run - 1);
    }
    return text;
}

/* *uses: which types are among them. */
static void check_list(loom__faults *faults, const loom_model_config *config, bool uses[LOOM__CONTEXT_TYPES + 1]) {
    const char *const *list = config->parallel.cp_comm_type;
    int64_t length = list_length(config), layers = config->num_layers;
    char most[40] = "";
    for (int64_t i = 0; i < length; i++) {
        loom__context_type type = find_type(list[i]);
        if (type == LOOM__CONTEXT_TYPES && !uses[type])
            loom__faults_add(
                faults, LOOM_ERR_CONFIG, "cp_comm_type is \"%s\": expected p2p, all_gather, a2a or a2a+p2p", list[i]);
        uses[type] = true;
    }
    if (layers > LOOM_CONTEXT_LAYERS_MAX)
        snprintf(most, sizeof most, " (a list has at most %d)", LOOM_CONTEXT_LAYERS_MAX);
    if (length > 1 && layers > 0 && length != layers)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "cp_comm_type: found a list of %" PRId64 ", expected one for each of num_layers %" PRId64
            " or one for all%s",
            length, layers, most);
}

static void check_length(loom__faults *faults, int64_t s, int64_t tp, int64_t cp, bool sequence_parallel) {
    /* Two chunks for each context rank, and whole rows of what a rank has for each of its tensor ranks. */
    int64_t rows = !sequence_parallel ? 2 : tp % 2 == 0 ? tp : 2 * tp, unit;
    char expected[64] = "more of them than can be";
    bool fits = !__builtin_mul_overflow(cp, rows, &unit);
    if (fits && s % unit == 0)
        return;
    if (fits)
        snprintf(expected, sizeof expected, "a multiple of %" PRId64, unit);
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "seq_length %" PRId64 " cannot be cut into 2 chunks for each of the %" PRId64
        " ranks of context_parallel_size%s: expected %s",
        s, cp,
        sequence_parallel ? " and rows for each rank of tensor_model_parallel_size, as sequence_parallel asks" : "",
        expected);
}

/* of: which layers need them, if that has to be said. */
static void check_levels(loom__faults *faults, const int64_t *sizes, int64_t cp, bool used, const char *of) {
    int64_t product = 1;
    for (int level = 0; level < LOOM_LAYOUT_HCP_LEVELS && sizes[level] > 0; level++)
        if (__builtin_mul_overflow(product, sizes[level], &product))
            product = INT64_MAX;
    char found[80] = "null";
    for (int level = 0, at = 0; level < 3 && sizes[level] > 0; level++)
        at += snprintf(found + at, sizeof found - (size_t)at, "%s%" PRId64 "%s", level > 0 ? ", " : "[", sizes[level],
            sizes[level + 1] <= 0 ? "]"
            : level == 2          ? ", …]"
                                  : "");
    if (used && (sizes[0] < 1 || sizes[1] < 1 || sizes[2] != 0 || product != cp))
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "cp_comm_type a2a+p2p%s needs hierarchical_context_parallel_sizes of two levels, [a2a, p2p], whose product "
            "is context_parallel_size %" PRId64 ": found %s",
            of, cp, found);
    else if (sizes[0] > 0 && product != cp)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "hierarchical_context_parallel_sizes: found a product of %" PRId64
            ", expected context_parallel_size, %" PRId64,
            product, cp);
}

/* part: ranks that exchange heads for rows. */
static void check_share_of_heads(
    loom__faults *faults, const loom_model_config *config, loom__context_type type, int64_t tp, int64_t part) {
    char of[200];
    int64_t n = config->num_attention_heads / tp, g = config->num_query_groups / tp;
    /* What the tensor size does not divide has been told. */
    if (part == 1 || config->num_attention_heads % tp != 0 || (n % part == 0 && g > 0 && g % part == 0))
        return;
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "cp_comm_type %s%s: the %" PRId64 " ranks of %s cannot share the %" PRId64 " heads and %" PRId64
        " query groups of a tensor rank (num_attention_heads %" PRId64 " and num_query_groups %" PRId64
        " over tensor_model_parallel_size %" PRId64 "); p2p and all_gather can",
        type_names[type], name_layers(config, type, of, sizeof of), part,
        type == LOOM__CONTEXT_A2A ? "context_parallel_size" : "the inner level of hierarchical_context_parallel_sizes",
        n, g, config->num_attention_heads, config->num_query_groups, tp);
}

void loom__model_context_faults(
    const loom_model_config *config, int64_t tp, int64_t cp, bool sequence_parallel, loom__faults *faults) {
    const int64_t *sizes = config->parallel.hierarchical_context_parallel_sizes;
    bool uses[LOOM__CONTEXT_TYPES + 1] = {false};
    char of[200];
    check_list(faults, config, uses);
    if (cp == 1)
        return;
    check_length(faults, config->seq_length, tp, cp, sequence_parallel);
    check_levels(
        faults, sizes, cp, uses[LOOM__CONTEXT_LEVELS], name_layers(config, LOOM__CONTEXT_LEVELS, of, sizeof of));
    if (uses[LOOM__CONTEXT_A2A])
        check_share_of_heads(faults, config, LOOM__CONTEXT_A2A, tp, cp);
    if (uses[LOOM__CONTEXT_LEVELS] && sizes[0] > 0)
        check_share_of_heads(faults, config, LOOM__CONTEXT_LEVELS, tp, sizes[0]);
}
