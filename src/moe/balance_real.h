/* Balance losses of logits in one type of real numbers. balance.c includes this once for each, with REAL the type and
 * NAMED(name) the name of a function in it; what is computed is in double in both. */
#define scores_of NAMED(scores_of)
#define log_sum_exp NAMED(log_sum_exp)
#define loom__balance_count NAMED(loom__balance_count)
#define loom__balance_loss NAMED(loom__balance_loss)
#define loom__router_z_loss NAMED(loom__router_z_loss)

/* The scores of one token: a softmax, or sigmoids over their sum; *sum is that sum (1 for a softmax). */
static void scores_of(const loom__router *r, const REAL *x, double *score, double *sum) {
    double maximum = -INFINITY, total = 0;
    bool softmax = r->score == LOOM__ROUTER_SOFTMAX;
    for (int64_t e = 0; e < r->experts; e++)
        maximum = (double)x[e] > maximum ? (double)x[e] : maximum;
    for (int64_t e = 0; e < r->experts; e++) {
        score[e] = softmax ? exp((double)x[e] - maximum) : 1 / (1 + exp(-(double)x[e]));
        total += score[e];
    }
    *sum = softmax ? 1 : total + 1e-20;
    for (int64_t e = 0; e < r->experts; e++)
        score[e] /= softmax ? total : *sum;
}

loom_status loom__balance_count(const loom__balance *b, const REAL *logits, double *counts) {
    const loom__router *r = b->router;
    double *score, sum;
    LOOM_TRY(scores_create(r->experts, &score));
    for (int64_t t = 0; t < b->tokens; t++) {
        if (b->padding && b->padding[t])
            continue;
        scores_of(r, logits + t * r->experts, score, &sum);
        double *count = counts + (b->per_sequence ? t % b->batch * r->experts : 0);
        for (int64_t round = 0; round < r->topk; round++) {
            int64_t best = -1;
            for (int64_t e = 0; e < r->experts; e++)
                if (!signbit(score[e]) && (best < 0 || (REAL)score[e] > (REAL)score[best]))
                    best = e;
            if (best < 0)
                break;
            score[best] = -1; /* no score is negative: counted */
            count[best] += 1;
        }
    }
    free(score);
    return LOOM_OK;
}

loom_status loom__balance_loss(
    const loom__balance *b, const REAL *logits, const double *weights, double scale, double *loss, REAL *d_logits) {
    const loom__router *r = b->router;
    double *score, sum, whole = 0;
    LOOM_TRY(scores_create(r->experts, &score));
    for (int64_t t = 0; t < b->tokens; t++) {
        if (b->padding && b->padding[t])
            continue;
        const double *weight = weights + (b->per_sequence ? t % b->batch * r->experts : 0);
        double mean = 0;
        scores_of(r, logits + t * r->experts, score, &sum);
        for (int64_t e = 0; e < r->experts; e++)
            mean += score[e] * weight[e];
        whole += mean;
        for (int64_t e = 0; d_logits && e < r->experts; e++) {
            double slope = r->score == LOOM__ROUTER_SOFTMAX ? score[e] : score[e] * (1 - score[e] * sum);
            d_logits[t * r->experts + e] += (REAL)(scale * slope * (weight[e] - mean));
        }
    }
    free(score);
    *loss = whole;
    return LOOM_OK;
}

static double log_sum_exp(int64_t count, const REAL *x) {
    double maximum = (double)x[0], sum = 1;
    for (int64_t i = 1; i < count; i++) {
        double value = (double)x[i];
        if (value > maximum) {
            sum = sum * exp(maximum - value) + 1;
            maximum = value;
        } else {
            sum += exp(value - maximum);
        }
    }
    return maximum + log(sum);
}

void loom__router_z_loss(int64_t tokens, int64_t experts, const REAL *logits, const uint8_t *padding,
    double coefficient, double scale, double *loss, REAL *d_logits) {
    int64_t valid = 0;
    for (int64_t t = 0; t < tokens; t++)
        valid += !padding || !padding[t];
    double whole = 0, share = coefficient / (double)(valid > 0 ? valid : 1);
    for (int64_t t = 0; t < tokens; t++) {
        if (padding && padding[t])
            continue;
        const REAL *x = logits + t * experts;
        double log_sum = log_sum_exp(experts, x);
        whole += log_sum * log_sum;
        for (int64_t e = 0; d_logits && e < experts; e++)
            d_logits[t * experts + e] += (REAL)(scale * share * 2 * log_sum * exp((double)x[e] - log_sum));
    }
    *loss = whole * share;
}

#undef scores_of
#undef log_sum_exp
#undef loom__balance_count
#undef loom__balance_loss
#undef loom__router_z_loss
