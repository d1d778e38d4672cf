/* Routing in one type of real numbers. router.c includes this once for each, with REAL the type, NAMED(name) the name
 * of a function or type in it, and PROBS(routing) where its weights lie. Functions of <tgmath.h> take the type of their
 * argument: in fp32 all is rounded to fp32 at every step, but sums, which are in double. */
#define mark_largest NAMED(mark_largest)
#define sigmoid NAMED(sigmoid)
#define softmax NAMED(softmax)
#define scratch NAMED(scratch)
#define scratch_create NAMED(scratch_create)
#define choose NAMED(choose)
#define weigh NAMED(weigh)
#define sinkhorn_columns NAMED(sinkhorn_columns)
#define candidate NAMED(candidate)
#define by_rank NAMED(by_rank)
#define limit_to_capacity NAMED(limit_to_capacity)
#define route NAMED(route)
#define loom__route_backward NAMED(loom__route_backward)

/* The k largest of value[0 … count) among those allowed (NULL: all), marked with 1; equal ones by number. */
static void mark_largest(int64_t count, const REAL *value, const uint8_t *allowed, int64_t k, uint8_t *mark) {
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

static REAL sigmoid(REAL x) {
    return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x));
}

/* The softmax over the marked entries (NULL: all), 0 elsewhere. */
static void softmax(int64_t count, const REAL *x, const uint8_t *mark, REAL *y) {
    REAL maximum = -INFINITY;
    for (int64_t i = 0; i < count; i++)
        if (!mark || mark[i])
            maximum = x[i] > maximum || isnan(x[i]) ? x[i] : maximum;
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        y[i] = !mark || mark[i] ? exp(x[i] - maximum) : 0;
        sum += (double)y[i];
    }
    for (int64_t i = 0; i < count; i++)
        y[i] = (REAL)((double)y[i] / sum);
}

typedef struct scratch {
    REAL *key, *score; /* [experts] */
    REAL *group;       /* [groups] */
    uint8_t *allowed;  /* [experts] */
    uint8_t *mark;     /* [experts], also of groups */
} scratch;

static loom_status scratch_create(int64_t experts, scratch *s) {
    size_t n = (size_t)experts;
    REAL *memory = malloc(n * (3 * sizeof(REAL) + 2));
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
        const REAL *key = s->key + g * size;
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

/* score [experts] = the weights before scaling, of all experts with SOFTMAX_OF_ALL and SIGMOID, else of the chosen
 * ones. *sum = the divisor of SIGMOID_SHARE. */
static void weigh(const loom__router *r, const REAL *logits, const uint8_t *chosen, REAL *score, double *sum) {
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
        score[e] = chosen[e] ? (REAL)((double)score[e] / *sum) : 0;
}

/* Balanced scores: rows and columns of exp(logits) are scaled in turn until the columns stand still. The factor of a
 * row changes no order among the experts of a token, so the key is exp(logit) times the factor of the column. */
static loom_status sinkhorn_columns(const loom__router *r, int64_t tokens, const REAL *logits, double **columns) {
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
            const REAL *x = logits + t * r->experts;
            double sum = 0;
            for (int64_t e = 0; e < r->experts; e++)
                sum += column[e] * (double)exp(x[e]);
            double row = 1.0 / (double)tokens / (sum + 1e-8);
            for (int64_t e = 0; e < r->experts; e++)
                next[e] += row * (double)exp(x[e]);
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
    REAL prob;
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
            REAL prob = r->drop == LOOM__DROP_BY_PROBS ? PROBS(routing)[t * experts + e] : 0;
            candidates[count++] = (candidate){t, prob, chosen};
        }
        qsort(candidates, (size_t)count, sizeof *candidates, by_rank);
        for (int64_t i = 0; i < count; i++) {
            int64_t at = candidates[i].token * experts + e;
            if (i < capacity) {
                routing->map[at] = 1;
            } else {
                routing->dropped += candidates[i].chosen;
                PROBS(routing)[at] = 0;
            }
        }
    }
}

static loom_status route(const loom__router *r, int64_t tokens, const REAL *logits, const float *bias, bool training,
    loom__routing *routing) {
    scratch s;
    double *columns = NULL, sum;
    LOOM_TRY(scratch_create(r->experts, &s));
    loom_status status = r->sinkhorn && training ? sinkhorn_columns(r, tokens, logits, &columns) : LOOM_OK;
    REAL factor = (REAL)factor_of(r);
    for (int64_t t = 0; t < tokens && !status; t++) {
        const REAL *x = logits + t * r->experts;
        uint8_t *chosen = routing->chosen + t * r->experts;
        for (int64_t e = 0; e < r->experts; e++)
            s.key[e] = columns ? exp(x[e]) * (REAL)columns[e] : x[e];
        /* Sigmoids are rounded, so that equal ones may come from different logits: the choice is on what is rounded. */
        if (!columns && !r->sinkhorn && r->score == LOOM__ROUTER_SIGMOID)
            for (int64_t e = 0; e < r->experts; e++)
                s.key[e] = sigmoid(x[e]) + (bias ? (REAL)bias[e] : 0);
        else if (!columns && weighing_of(r) == SOFTMAX_OF_ALL)
            softmax(r->experts, x, NULL, s.key);
        choose(r, &s, chosen);
        weigh(r, x, chosen, s.score, &sum);
        for (int64_t e = 0; e < r->experts; e++)
            PROBS(routing)[t * r->experts + e] = chosen[e] ? s.score[e] * factor : 0;
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

loom_status loom__route_backward(const loom__router *r, int64_t tokens, const REAL *logits,
    const loom__routing *routing, const float *d_probs, REAL *d_logits) {
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
            s.key[e] = goes ? (REAL)((double)d_probs[row + e] * factor) : 0;
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
            d_logits[row + e] += (REAL)d;
        }
    }
    free(s.key);
    return LOOM_OK;
}

#undef mark_largest
#undef sigmoid
#undef softmax
#undef scratch
#undef scratch_create
#undef choose
#undef weigh
#undef sinkhorn_columns
#undef candidate
#undef by_rank
#undef limit_to_capacity
#undef route
#undef loom__route_backward
