/* Greedy choice, and drawing by the Gumbel rule: the largest of score + noise has exactly the softmax distribution, and
 * unlike the inverse of a cumulative sum it compares two tokens without the rounding of all others between them.
 * Everything is ordered by (score, then the smaller id), so that equal logits are no ambiguity. */
#include "generate/sample.h"
#include "base/random.h"
#include <math.h>
#include <stdlib.h>

static int better_first(const void *left, const void *right) {
    const loom__candidate *a = left, *b = right;
    if (a->score != b->score)
        return a->score > b->score ? -1 : 1;
    return a->token < b->token ? -1 : a->token > b->token;
}

static loom_status largest(const float *logits, int64_t v, int64_t row, int64_t position, int64_t *token) {
    int64_t best = 0;
    for (int64_t i = 0; i < v; i++) {
        if (!isfinite(logits[i]))
            return loom_fail(LOOM_ERR_NUMERIC, "the logit of token %lld at position %lld of row %lld is %g",
                (long long)i, (long long)position, (long long)row, (double)logits[i]);
        if (logits[i] > logits[best])
            best = i;
    }
    *token = best;
    return LOOM_OK;
}

/* How many of the candidates, best first, are left by top_k and then top_p. */
static int64_t cut(const loom_generate_options *options, const loom__candidate *candidates, int64_t count) {
    if (options->top_k > 0 && options->top_k < count)
        count = options->top_k;
    if (options->top_p >= 1)
        return count;
    double sum = 0, reached = 0;
    for (int64_t i = 0; i < count; i++)
        sum += exp(candidates[i].score);
    for (int64_t i = 0; i < count; i++) {
        reached += exp(candidates[i].score);
        if (reached >= options->top_p * sum)
            return i + 1;
    }
    return count;
}

loom_status loom__sample_token(const loom_generate_options *options, const float *logits, int64_t v, int64_t row,
    int64_t position, loom__candidate *candidates, int64_t *token) {
    int64_t best = 0, count = v;
    LOOM_TRY(largest(logits, v, row, position, &best));
    if (options->temperature > 0) {
        for (int64_t i = 0; i < v; i++) {
            double below = (double)logits[i] - (double)logits[best];
            candidates[i] = (loom__candidate){below < 0 ? below / options->temperature : 0, i};
        }
        if (options->top_k > 0 || options->top_p < 1) {
            qsort(candidates, (size_t)v, sizeof *candidates, better_first);
            count = cut(options, candidates, count);
        }
        loom__candidate winner = {-INFINITY, best};
        for (int64_t i = 0; i < count; i++) {
            loom__candidate drawn = candidates[i];
            drawn.score += loom__gumbel(options->seed, row, position, drawn.token);
            if (better_first(&drawn, &winner) < 0)
                winner = drawn;
        }
        best = winner.token;
    }
    *token = best;
    return LOOM_OK;
}
