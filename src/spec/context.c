/* How ranks can share a sequence. In a ring they keep all heads, so that nothing but the length matters; by an
 * all-to-all they share heads, of which each then needs a whole number, and as many query groups. */
#include "base/faults.h"
#include "spec/parameter.h"
#include <inttypes.h>
#include <megaloom/layout.h>
#include <stdio.h>
#include <string.h>

static const char default_type[] = "p2p";

bool loom__context_type_is(const loom_model_config *config, const char *type) {
    const char *given = config->parallel.cp_comm_type;
    return strcmp(given ? given : default_type, type) == 0;
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

static void check_levels(loom__faults *faults, const int64_t *sizes, int64_t cp, bool used) {
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
            "cp_comm_type a2a+p2p needs hierarchical_context_parallel_sizes of two levels, [a2a, p2p], whose product "
            "is context_parallel_size %" PRId64 ": found %s",
            cp, found);
    else if (sizes[0] > 0 && product != cp)
        loom__faults_add(faults, LOOM_ERR_CONFIG,
            "hierarchical_context_parallel_sizes: found a product of %" PRId64
            ", expected context_parallel_size, %" PRId64,
            product, cp);
}

/* part: ranks that exchange heads for rows. */
static void check_share_of_heads(
    loom__faults *faults, const loom_model_config *config, const char *type, int64_t tp, int64_t part) {
    int64_t n = config->num_attention_heads / tp, g = config->num_query_groups / tp;
    /* What the tensor size does not divide has been told. */
    if (part == 1 || config->num_attention_heads % tp != 0 || (n % part == 0 && g > 0 && g % part == 0))
        return;
    loom__faults_add(faults, LOOM_ERR_CONFIG,
        "cp_comm_type %s: the %" PRId64 " ranks of %s cannot share the %" PRId64 " heads and %" PRId64
        " query groups of a tensor rank (num_attention_heads %" PRId64 " and num_query_groups %" PRId64
        " over tensor_model_parallel_size %" PRId64 "); p2p and all_gather can",
        type, part,
        strcmp(type, "a2a") == 0 ? "context_parallel_size" : "the inner level of hierarchical_context_parallel_sizes",
        n, g, config->num_attention_heads, config->num_query_groups, tp);
}

void loom__model_context_faults(
    const loom_model_config *config, int64_t tp, int64_t cp, bool sequence_parallel, loom__faults *faults) {
    const loom_model_parallel_config *parallel = &config->parallel;
    const int64_t *sizes = parallel->hierarchical_context_parallel_sizes;
    bool levels = loom__context_type_is(config, "a2a+p2p"), heads = levels || loom__context_type_is(config, "a2a");
    if (cp == 1)
        return;
    if (!heads && !loom__context_type_is(config, "p2p") && !loom__context_type_is(config, "all_gather"))
        loom__faults_add(faults, LOOM_ERR_CONFIG, "cp_comm_type is \"%s\": expected p2p, all_gather, a2a or a2a+p2p",
            parallel->cp_comm_type);
    check_length(faults, config->seq_length, tp, cp, sequence_parallel);
    check_levels(faults, sizes, cp, levels);
    if (heads && (!levels || sizes[0] > 0))
        check_share_of_heads(faults, config, parallel->cp_comm_type, tp, levels ? sizes[0] : cp);
}
