/* Routing. A token's choice is made on keys (logits, or scores with their bias), its weights on scores without the
 * bias; the two meet only in `chosen`. Invariant: chosen has topk ones in each row whatever the numbers are (NaN
 * included), so that counts of rows never depend on data being sane; a NaN shows in probs. */
#include "moe/router.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static loom_status check_groups(const loom__router *r) {
    if (r->groups == 0 && r->group_topk == 0)
        return LOOM_OK;
    if (r->groups < 1 || r->group_topk < 1)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "moe_router_num_groups is %" PRId64 " and moe_router_group_topk %" PRId64 ": both are needed, or none",
            r->groups, r->group_topk);
    if (r->experts % r->groups != 0)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "num_moe_experts is %" PRId64 ": not a multiple of moe_router_num_groups, which is %" PRId64, r->experts,
            r->groups);
    if (r->group_topk > r->groups)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "moe_router_group_topk is %" PRId64 ": more than the %" PRId64 " groups of moe_router_num_groups",
            r->group_topk, r->groups);
    if (r->topk < r->group_topk || r->topk / r->group_topk > r->experts / r->groups ||
        r->topk > r->experts / r->groups * r->group_topk)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "moe_router_topk is %" PRId64 ": expected %" PRId64 " to %" PRId64 " with moe_router_group_topk %" PRId64
            " of groups of %" PRId64 " experts",
            r->topk, r->group_topk, r->experts / r->groups * r->group_topk, r->group_topk, r->experts / r->groups);
    return LOOM_OK;
}

loom_status loom__router_check(const loom__router *r, bool has_bias) {
    if (r->experts < 1)
        return loom_fail(LOOM_ERR_ARGUMENT, "num_moe_experts is %" PRId64 ": expected 1 or more", r->experts);
    if (r->topk < 1 || r->topk > r->experts)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "moe_router_topk is %" PRId64 ": expected 1 to the %" PRId64 " of num_moe_experts", r->topk, r->experts);
    if (r->score == LOOM__ROUTER_SOFTMAX && !r->sinkhorn && !r->pre_softmax && r->topk == 1)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "moe_router_topk is 1 with a softmax over the chosen experts, which is then always 1: set "
            "moe_router_pre_softmax to true, or moe_router_score_function to sigmoid");
    if (has_bias && (r->score != LOOM__ROUTER_SIGMOID || r->sinkhorn))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "moe_router_enable_expert_bias needs moe_router_score_function sigmoid, and no sinkhorn");
    return check_groups(r);
}

/* The k largest of value[0 … count) among those allowed (NULL: all), marked with 1; equal ones by number. */
static void mark_largest(int64_t count, const float *value, const uint8_t *allowed, int64_t k, uint8_t *mark) {
    memset(mark, 0, (size_t)count);
    for (int64_t round = 0; round < k; round++) {
        int64_t best = -1;
        for (int64_t i = 0; i < count; i++)
            if (!mark[i] && (!allowed || allowed[i]) && (best < 0 || value[i] > value[best]))
                best = i;
        if (best < 0)
            return;
        mark[best] = 1;
    }
}

static float sigmoid(float x) {
    return x >= 0 ? 1.0f / (1.0f + expf(-x)) : expf(x) / (1.0f + expf(x));
}

/* The softmax over the marked entries (NULL: all), 0 elsewhere. */
static void softmax(int64_t count, const float *x, const uint8_t *mark, float *y) {
    float maximum = -INFINITY;
    for (int64_t i = 0; i < count; i++)
        if (!mark || mark[i])
            maximum = x[i] > maximum || isnan(x[i]) ? x[i] : maximum;
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        y[i] = !mark || mark[i] ? expf(x[i] - maximum) : 0.0f;
        sum += (double)y[i];
    }
    for (int64_t i = 0; i < count; i++)
        y[i] = (float)((double)y[i] / sum);
}

typedef struct scratch {
    float *key, *score; /* [experts] */
    float *group;       /* [groups] */
    uint8_t *allowed;   /* [experts] */
    uint8_t *mark;      /* [experts], also of groups */
} scratch;

static loom_status scratch_create(int64_t experts, scratch *s) {
    size_t n = (size_t)experts;
    float *memory = malloc(n * (3 * sizeof(float) + 2));
    if (!memory)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for routing to %" PRId64 " experts", experts);
    s->key = memory;
    s->score = memory + n;
    s->group = memory + 2 * n;
    s->allowed = (uint8_t *)(memory + 3 * n);
    s->mark = s->allowed + n;
    return LOOM_OK;
}

static void choose(const loom__router *r, scratch *s, uint8_t *chosen) {
    if (r->groups == 0) {
        mark_largest(r->experts, s->key, NULL, r->topk, chosen);
        return;
    }
    /* A group counts as much as its best experts, as many as each chosen group gives on average. */
    int64_t size = r->experts / r->groups, each = r->topk / r->group_topk;
    for (int64_t g = 0; g < r->groups; g++) {
        const float *key = s->key + g * size;
        mark_largest(size, key, NULL, each, s->mark);
        s->group[g] = 0;
        for (int64_t i = 0; i < size; i++)
            if (s->mark[i])
                s->group[g] += key[i];
    }
    mark_largest(r->groups, s->group, NULL, r->group_topk, s->mark);
    for (int64_t e = 0; e < r->experts; e++)
        s->allowed[e] = s->mark[e / size];
    mark_largest(r->experts, s->key, s->allowed, r->topk, chosen);
}

/* Which function of the logits weighs the chosen experts. */
typedef enum weighing { SOFTMAX_OF_ALL, SOFTMAX_OF_CHOSEN, SIGMOID, SIGMOID_SHARE } weighing;

static weighing weighing_of(const loom__router *r) {
    if (r->sinkhorn)
        return r->topk == 1 ? SIGMOID : SOFTMAX_OF_ALL;
    if (r->score == LOOM__ROUTER_SIGMOID)
        return r->topk == 1 ? SIGMOID : SIGMOID_SHARE;
    return r->pre_softmax ? SOFTMAX_OF_ALL : SOFTMAX_OF_CHOSEN;
}

static double factor_of(const loom__router *r) {
    return r->scaling > 0 && !r->sinkhorn ? r->scaling : 1.0;
}

/* score [experts] = the weights before scaling, of all experts with SOFTMAX_OF_ALL and SIGMOID, else of the chosen
 * ones. *sum = the divisor of SIGMOID_SHARE. */
static void weigh(const loom__router *r, const float *logits, const uint8_t *chosen, float *score, double *sum) {
    weighing how = weighing_of(r);
    *sum = 1;
    if (how == SOFTMAX_OF_ALL || how == SOFTMAX_OF_CHOSEN) {
        softmax(r->experts, logits, how == SOFTMAX_OF_CHOSEN ? chosen : NULL, score);
        return;
    }
    double total = 0;
    for (int64_t e = 0; e < r->experts; e++) {
        score[e] = sigmoid(logits[e]);
        total += chosen[e] ? (double)score[e] : 0;
    }
    if (how == SIGMOID)
        return;
    *sum = total + 1e-20;
    for (int64_t e = 0; e < r->experts; e++)
        score[e] = chosen[e] ? (float)((double)score[e] / *sum) : 0.0f;
}

/* Balanced scores: rows and columns of exp(logits) are scaled in turn until the columns stand still. Per token only
 * the factor of its row would change the order of nothing, so the key is logit + log(factor of the column). */
static loom_status sinkhorn_columns(const loom__router *r, int64_t tokens, const float *logits, double **columns) {
    double *column = calloc((size_t)r->experts * 2, sizeof(double));
    if (!column)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for routing to %" PRId64 " experts", r->experts);
    double *next = column + r->experts, moved = INFINITY;
    for (int64_t e = 0; e < r->experts; e++)
        column[e] = 1;
    /* NaN ends the loop as well. */
    while (moved > 1e-4) {
        memset(next, 0, (size_t)r->experts * sizeof(double));
        for (int64_t t = 0; t < tokens; t++) {
            const float *x = logits + t * r->experts;
            double sum = 0;
            for (int64_t e = 0; e < r->experts; e++)
                sum += column[e] * (double)expf(x[e]);
            double row = 1.0 / (double)tokens / (sum + 1e-8);
            for (int64_t e = 0; e < r->experts; e++)
                next[e] += row * (double)expf(x[e]);
        }
        moved = 0;
        for (int64_t e = 0; e < r->experts; e++) {
            double value = 1.0 / (double)r->experts / (next[e] + 1e-8);
            moved += fabs(value - column[e]);
            column[e] = value;
        }
        moved /= (double)r->experts;
    }
    *columns = column;
    return LOOM_OK;
}

typedef struct candidate {
    int64_t token;
    float prob;
    uint8_t chosen;
} candidate;

static int by_rank(const void *left, const void *right) {
    const candidate *a = left, *b = right;
    if (a->chosen != b->chosen)
        return a->chosen ? -1 : 1;
    if (a->prob > b->prob || a->prob < b->prob)
        return a->prob > b->prob ? -1 : 1;
    return a->token < b->token ? -1 : 1;
}

/* Each expert keeps its best candidates. */
static void limit_to_capacity(const loom__router *r, int64_t tokens, candidate *candidates, loom__routing *routing) {
    int64_t experts = r->experts;
    int64_t capacity = loom__expert_capacity(tokens * r->topk, experts, r->capacity_factor, 0);
    memset(routing->map, 0, (size_t)(tokens * experts));
    for (int64_t e = 0; e < experts; e++) {
        int64_t count = 0;
        for (int64_t t = 0; t < tokens; t++) {
            uint8_t chosen = routing->chosen[t * experts + e];
            if (!chosen && !r->pad_to_capacity)
                continue;
            float prob = r->drop == LOOM__DROP_BY_PROBS ? routing->probs[t * experts + e] : 0.0f;
            candidates[count++] = (candidate){t, prob, chosen};
        }
        qsort(candidates, (size_t)count, sizeof *candidates, by_rank);
        for (int64_t i = 0; i < count; i++) {
            int64_t at = candidates[i].token * experts + e;
            if (i < capacity) {
                routing->map[at] = 1;
            } else {
                routing->dropped += candidates[i].chosen;
                routing->probs[at] = 0;
            }
        }
    }
}

loom_status loom__route(const loom__router *r, int64_t tokens, const float *logits, const float *bias, bool training,
    loom__routing *routing) {
    scratch s;
    double *columns = NULL, sum;
    LOOM_TRY(scratch_create(r->experts, &s));
    loom_status status = r->sinkhorn && training ? sinkhorn_columns(r, tokens, logits, &columns) : LOOM_OK;
    float factor = (float)factor_of(r);
    for (int64_t t = 0; t < tokens && !status; t++) {
        const float *x = logits + t * r->experts;
        uint8_t *chosen = routing->chosen + t * r->experts;
        for (int64_t e = 0; e < r->experts; e++)
            s.key[e] = columns ? expf(x[e]) * (float)columns[e] : x[e];
        /* Sigmoids are rounded, so that equal ones may come from different logits: the choice is on what is rounded. */
        if (!columns && !r->sinkhorn && r->score == LOOM__ROUTER_SIGMOID)
            for (int64_t e = 0; e < r->experts; e++)
                s.key[e] = sigmoid(x[e]) + (bias ? bias[e] : 0.0f);
        else if (!columns && weighing_of(r) == SOFTMAX_OF_ALL)
            softmax(r->experts, x, NULL, s.key);
        choose(r, &s, chosen);
        weigh(r, x, chosen, s.score, &sum);
        for (int64_t e = 0; e < r->experts; e++)
            routing->probs[t * r->experts + e] = chosen[e] ? s.score[e] * factor : 0.0f;
    }
    free(columns);
    free(s.key);
    LOOM_TRY(status);
    routing->dropped = 0;
    if (r->capacity_factor <= 0) {
        memcpy(routing->map, routing->chosen, (size_t)(tokens * r->experts));
        return LOOM_OK;
    }
    candidate *candidates = malloc((size_t)(tokens + 1) * sizeof *candidates);
    if (!candidates)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the capacity of %" PRId64 " tokens", tokens);
    limit_to_capacity(r, tokens, candidates, routing);
    free(candidates);
    return LOOM_OK;
}

loom_status loom__route_backward(const loom__router *r, int64_t tokens, const float *logits,
    const loom__routing *routing, const float *d_probs, float *d_logits) {
    scratch s;
    LOOM_TRY(scratch_create(r->experts, &s));
    weighing how = weighing_of(r);
    double factor = factor_of(r);
    for (int64_t t = 0; t < tokens; t++) {
        const int64_t row = t * r->experts;
        double sum, mean = 0;
        weigh(r, logits + row, routing->chosen + row, s.score, &sum);
        for (int64_t e = 0; e < r->experts; e++) {
            bool goes = routing->chosen[row + e] && routing->map[row + e];
            s.key[e] = goes ? (float)((double)d_probs[row + e] * factor) : 0.0f;
            mean += (double)s.key[e] * (double)s.score[e];
        }
        for (int64_t e = 0; e < r->experts; e++) {
            double g = (double)s.key[e], p = (double)s.score[e], d;
            if (how == SOFTMAX_OF_ALL || how == SOFTMAX_OF_CHOSEN) {
                d = p * (g - mean);
            } else if (how == SIGMOID) {
                d = g * p * (1 - p);
            } else {
                double raw = p * sum;
                d = routing->chosen[row + e] ? (g - mean) / sum * raw * (1 - raw) : 0;
            }
            d_logits[row + e] += (float)d;
        }
    }
    free(s.key);
    return LOOM_OK;
}

int64_t loom__expert_capacity(int64_t choices, int64_t experts, double factor, int64_t minimum) {
    double capacity = ceil((double)choices / (double)experts * factor);
    return capacity < (double)minimum ? minimum : (int64_t)capacity;
}
