/* How ranks can share a sequence. In a ring they keep all heads, so that nothing but the length matters; by an
 * all-to-all they share heads, of which each then needs a whole number, and as many query groups. */
#include "spec/parameter.h"
#include <string.h>

static const char default_type[] = "p2p";

bool loom__context_type_is(const loom_model_config *config, const char *type) {
    const char *given = config->parallel.cp_comm_type;
    return strcmp(given ? given : default_type, type) == 0;
}

static loom_status check_levels(const int64_t *sizes, int64_t cp) {
    if (sizes[0] >= 1 && sizes[1] >= 1 && sizes[2] == 0 && cp % sizes[0] == 0 && cp / sizes[0] == sizes[1])
        return LOOM_OK;
    return loom_fail(LOOM_ERR_CONFIG,
        "cp_comm_type a2a+p2p needs hierarchical_context_parallel_sizes of two levels, [a2a, p2p], whose product is "
        "context_parallel_size %lld: found [%lld, %lld%s]",
        (long long)cp, (long long)sizes[0], (long long)sizes[1], sizes[2] ? ", …" : "");
}

static loom_status check_length(int64_t s, int64_t cp) {
    int64_t unit = 2 * cp, below = s / unit * unit;
    if (s % unit == 0)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_CONFIG,
        "seq_length %lld cannot be cut into 2 chunks for each of the %lld ranks of context_parallel_size: expected a "
        "multiple of %lld; nearest legal %lld%s%lld",
        (long long)s, (long long)cp, (long long)unit, (long long)(below ? below : unit), below ? " or " : "…",
        (long long)(below + unit));
}

loom_status loom__model_config_check_context(const loom_model_config *config, int64_t tp, int64_t cp) {
    const loom_model_parallel_config *parallel = &config->parallel;
    bool levels = loom__context_type_is(config, "a2a+p2p"), heads = levels || loom__context_type_is(config, "a2a");
    if (cp == 1)
        return LOOM_OK;
    if (!heads && !loom__context_type_is(config, "p2p") && !loom__context_type_is(config, "all_gather"))
        return loom_fail(LOOM_ERR_CONFIG, "cp_comm_type is \"%s\": expected p2p, all_gather, a2a or a2a+p2p",
            parallel->cp_comm_type);
    LOOM_TRY(check_length(config->seq_length, cp));
    if (levels)
        LOOM_TRY(check_levels(parallel->hierarchical_context_parallel_sizes, cp));
    int64_t part = levels ? parallel->hierarchical_context_parallel_sizes[0] : heads ? cp : 1;
    int64_t n = config->num_attention_heads / tp, g = config->num_query_groups / tp;
    if (part == 1 || (n % part == 0 && g > 0 && g % part == 0))
        return LOOM_OK;
    return loom_fail(LOOM_ERR_CONFIG,
        "cp_comm_type %s: %lld context ranks cannot share the %lld heads and %lld query groups of a tensor rank "
        "(num_attention_heads %lld and num_query_groups %lld over tensor_model_parallel_size %lld); p2p and all_gather "
        "can",
        parallel->cp_comm_type, (long long)part, (long long)n, (long long)g, (long long)config->num_attention_heads,
        (long long)config->num_query_groups, (long long)tp);
}
