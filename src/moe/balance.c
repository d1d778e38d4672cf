/* Losses that keep the load of experts even, and the bias that does it without a loss. A balance loss is the sum over
 * tokens and experts of a score times what that expert costs; what it costs depends on counts, through which no
 * gradient flows. Counts are whole numbers kept in double, so that their sum over ranks is exact in any order. */
#include "moe/router.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static loom_status scores_create(int64_t experts, double **score) {
    *score = malloc((size_t)experts * sizeof(double));
    return *score ? LOOM_OK
                  : loom_fail(LOOM_ERR_MEMORY, "out of memory for the scores of %" PRId64 " experts", experts);
}

void loom__balance_weights(
    const loom__balance *b, double coefficient, const double *counts, double total, double *weights) {
    const loom__router *r = b->router;
    int64_t sequences = b->per_sequence ? b->batch : 1;
    double factor = coefficient * (double)r->experts / ((double)r->topk * total * total) / (double)sequences;
    for (int64_t i = 0; i < sequences * r->experts; i++)
        weights[i] = total > 0 ? counts[i] * factor : 0;
}

#define REAL float
#define NAMED(name) name
#include "moe/balance_real.h"
#undef REAL
#undef NAMED

#define REAL double
#define NAMED(name) name##64
#include "moe/balance_real.h"

void loom__expert_bias_update(int64_t experts, const double *counts, double rate, float *bias) {
    double mean = 0;
    for (int64_t e = 0; e < experts; e++)
        mean += counts[e];
    mean /= (double)experts;
    for (int64_t e = 0; e < experts; e++)
        bias[e] += (float)(rate * (double)((mean > counts[e]) - (mean < counts[e])));
}
