/* Choosing a token from logits. */
#ifndef GENERATE_SAMPLE_H
#define GENERATE_SAMPLE_H

#include <megaloom/generate.h>

typedef struct loom__candidate {
    double score; /* (logit - largest logit) / temperature */
    int64_t token;
} loom__candidate;

/* The token at `position` of row `row`, from its logits [v]. candidates: room for v of them, or NULL for a greedy
 * choice. LOOM_ERR_NUMERIC where a logit is not finite. */
loom_status loom__sample_token(const loom_generate_options *options, const float *logits, int64_t v, int64_t row,
    int64_t position, loom__candidate *candidates, int64_t *token);

#endif
