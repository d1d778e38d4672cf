/* Attention, forward: tiles of 64 keys by 64 queries with a running maximum and sum (attention.h says how a tile lies).
 * An item is one sample, one query group, one block of queries and up to HEADS of the group's heads, which share the
 * keys and values. Invariant between tiles: accumulator = sum of p v and sum = sum of p over the keys seen so
 * far, both with p = exp(score - maximum); a query that saw none has maximum -inf and zeros. */
#include "kernel/fast/attention.h"
#include <math.h>
#include <string.h>

enum { HEADS = 4 };

typedef struct forward_job {
    const loom_attention_block *block;
    const element *q, *k, *v;
    float *accumulator, *maximum, *sum; /* the running state; accumulator is NULL when the whole is done at once */
    element *out;
    float *log_sum_exp;
    int64_t out_stride;
    int64_t heads, head_parts, query_blocks; /* of the cut */
    packed_keys keys;
    scratch scratch;
} forward_job;

/* The scratch of an item. */
typedef struct forward_buffers {
    float *queries[HEADS], *accumulator[HEADS]; /* [d][QUERIES] */
    float *maximum[HEADS], *sum[HEADS];         /* [QUERIES] */
    float *scores;                              /* [KEYS][QUERIES] */
    float *rows;                                /* [QUERIES][d rounded up to LANES] */
} forward_buffers;

static size_t forward_floats(int64_t d, int64_t heads) {
    return (size_t)(heads * (2 * d * QUERIES + 2 * QUERIES) + KEYS * QUERIES + QUERIES * round_up(d, LANES));
}

static forward_buffers forward_buffers_at(float *at, int64_t d, int64_t heads) {
    forward_buffers buffers;
    buffers.scores = at;
    buffers.rows = at + KEYS * QUERIES;
    at = buffers.rows + QUERIES * round_up(d, LANES);
    for (int64_t i = 0; i < heads; i++) {
        buffers.queries[i] = at;
        buffers.accumulator[i] = at + d * QUERIES;
        buffers.maximum[i] = at + 2 * d * QUERIES;
        buffers.sum[i] = buffers.maximum[i] + QUERIES;
        at += 2 * d * QUERIES + 2 * QUERIES;
    }
    return buffers;
}

/* Turns the scores of columns i … i+15 (at `scores`) into probabilities against the new maximum and brings the state to
 * it. */
INLINE void softmax_columns(const forward_job *p, const query_block *q, const tile_dropout *drop, int64_t i,
    const rectangle *r, float *scores, float *accumulator, float *maximum, float *sum) {
    bool drops = drop->probability > 0;
    int64_t first_key = r->first, keys = r->keys;
    vf lowest = v_set(-INFINITY), highest = lowest;
    if (r->masked) {
        vi after = vi_load(q->after + i), until = vi_load(q->until + i);
        for (int64_t u = 0; u < keys; u++) {
            vf score = v_select(lanes_see(after, until, first_key + u), v_load(scores + u * QUERIES, LANES), lowest);
            v_store(scores + u * QUERIES, LANES, score);
            highest = v_max(score, highest);
        }
    } else {
        for (int64_t u = 0; u < keys; u++)
            highest = v_max(v_load(scores + u * QUERIES, LANES), highest);
    }
    vf before = v_load(maximum + i, LANES);
    highest = v_max(before, highest);
    vf base = v_select(v_equal(highest, lowest), v_zero(), highest), rescale = v_exp(v_sub(before, base));
    vf total = v_mul(v_load(sum + i, LANES), rescale);
    if (drops) {
        tile_draw draw = {.quad = -1};
        for (int64_t u = 0; u < keys; u++) {
            vf weight = v_exp(v_sub(v_load(scores + u * QUERIES, LANES), base));
            total = v_add(total, weight);
            vf factor = tile_dropout_factor(drop, i, p->block->kv_offset + first_key + u, &draw);
            v_store(scores + u * QUERIES, LANES, v_mul(weight, factor));
        }
    } else {
        for (int64_t u = 0; u < keys; u++) {
            vf weight = v_exp(v_sub(v_load(scores + u * QUERIES, LANES), base));
            total = v_add(total, weight);
            v_store(scores + u * QUERIES, LANES, weight);
        }
    }
    v_store(maximum + i, LANES, highest);
    v_store(sum + i, LANES, total);
    for (int64_t c = 0; c < p->block->d; c++)
        v_store(accumulator + c * QUERIES + i, LANES, v_mul(v_load(accumulator + c * QUERIES + i, LANES), rescale));
}

/* Index of a query in the running state, [b, n, s_q]. */
static int64_t state_index(const loom_attention_block *block, const query_block *q, int64_t head) {
    return (q->j * block->n + head) * block->s_q + q->first_query;
}

static void load_state(
    const forward_job *p, const query_block *q, int64_t head, float *accumulator, float *maximum, float *sum) {
    int64_t d = p->block->d;
    for (int64_t i = 0; i < QUERIES; i++) {
        maximum[i] = -INFINITY;
        sum[i] = 0;
    }
    memset(accumulator, 0, (size_t)(d * QUERIES) * sizeof(float));
    if (p->accumulator) {
        int64_t at = state_index(p->block, q, head);
        transpose_from_rows(q->queries, d, p->accumulator + at * d, d, accumulator, QUERIES);
        memcpy(maximum, p->maximum + at, (size_t)q->queries * sizeof(float));
        memcpy(sum, p->sum + at, (size_t)q->queries * sizeof(float));
    }
}

static float log_sum(float maximum, float sum) {
    return sum == 0 ? -INFINITY : maximum + logf(sum);
}

static void store_state(const forward_job *p, const query_block *q, int64_t head, float *accumulator,
    const float *maximum, const float *sum, float *rows) {
    const loom_attention_block *block = p->block;
    int64_t d = block->d, at = state_index(block, q, head);
    if (p->accumulator) {
        transpose_to_rows(d, q->queries, accumulator, QUERIES, p->accumulator + at * d, d);
        memcpy(p->maximum + at, maximum, (size_t)q->queries * sizeof(float));
        memcpy(p->sum + at, sum, (size_t)q->queries * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < q->columns; i += LANES) {
        vf total = v_load(sum + i, LANES);
        vf inverse = v_select(v_equal(total, v_zero()), v_zero(), v_div(v_set(1.0f), total));
        for (int64_t c = 0; c < d; c++)
            v_store(accumulator + c * QUERIES + i, LANES, v_mul(v_load(accumulator + c * QUERIES + i, LANES), inverse));
    }
    int64_t width = round_up(d, LANES);
    transpose_to_rows(d, q->queries, accumulator, QUERIES, rows, width);
    for (int64_t i = 0; i < q->queries; i++) {
        element *out = p->out + ((q->first_query + i) * block->b + q->j) * p->out_stride + head * d;
        for (int64_t c = 0; c < d; c += LANES)
            e_store(out + c, d - c, v_load(rows + i * width + c, d - c));
        p->log_sum_exp[at + i] = log_sum(maximum[i], sum[i]);
    }
}

static void forward_item(void *argument, int64_t item, int worker) {
    const forward_job *p = argument;
    const loom_attention_block *block = p->block;
    int64_t d = block->d, per_group = block->n / block->g, across = block->b * block->g * p->head_parts;
    /* The last queries see the most keys: they go first, and the short items fill the gaps at the end. */
    int64_t query_index = p->query_blocks - 1 - item / across, rest = item % across;
    int64_t j = rest / (block->g * p->head_parts), group = rest / p->head_parts % block->g;
    int64_t first_head = rest % p->head_parts * p->heads, heads = smaller(p->heads, per_group - first_head);
    int64_t width = round_up(d, LANES);
    query_block q = query_block_make(block, j, query_index * QUERIES);
    forward_buffers buffers = forward_buffers_at(scratch_of(&p->scratch, worker), d, heads);
    tile_dropout drop[HEADS];
    first_head += group * per_group;
    for (int64_t i = 0; i < heads; i++) {
        pack_rows(d, &q, p->q + query_offset(block, j, q.first_query, first_head + i), block->b * block->q_stride,
            block->scale, width, buffers.rows);
        pack_columns(d, &q, buffers.rows, width, buffers.queries[i]);
        load_state(p, &q, first_head + i, buffers.accumulator[i], buffers.maximum[i], buffers.sum[i]);
        tile_dropout_make(block, &q, first_head + i, &drop[i]);
    }
    for (int64_t first = q.whole.lowest / KEYS * KEYS; first < q.whole.highest; first += KEYS) {
        rectangle rectangles[PANELS];
        int count = tile_rectangles(&q, first, smaller(first + KEYS, block->s_kv), rectangles);
        for (int64_t i = 0; i < heads; i++)
            for (const rectangle *r = rectangles; r < rectangles + count; r++) {
                int64_t keys_at = packed_at(block, j, group, r->first);
                tile_product(r->keys, r->columns, d, p->keys.packed_k + keys_at, d, 1, buffers.queries[i] + r->column,
                    QUERIES, false, buffers.scores, QUERIES);
                for (int64_t c = 0; c < r->columns; c += LANES)
                    softmax_columns(p, &q, &drop[i], r->column + c, r, buffers.scores + c, buffers.accumulator[i],
                        buffers.maximum[i], buffers.sum[i]);
                tile_product(d, r->columns, r->keys, p->keys.packed_v + keys_at, 1, d, buffers.scores, QUERIES, true,
                    buffers.accumulator[i] + r->column, QUERIES);
            }
    }
    for (int64_t i = 0; i < heads; i++)
        store_state(p, &q, first_head + i, buffers.accumulator[i], buffers.maximum[i], buffers.sum[i], buffers.rows);
}

/* False, with nothing done, when there is no memory for scratch. */
static bool forward_run(loom_team *team, forward_job *p) {
    const loom_attention_block *block = p->block;
    if (block->b <= 0 || block->n <= 0 || block->s_q <= 0)
        return true;
    int64_t per_group = block->n / block->g;
    p->heads = smaller(HEADS, per_group);
    p->head_parts = parts_of(per_group, p->heads);
    p->query_blocks = parts_of(block->s_q, QUERIES);
    if (!scratch_reserve(&p->scratch, team, (size_t)(2 * packed_floats(block)) * sizeof(float),
            forward_floats(block->d, p->heads) * sizeof(float)))
        return false;
    p->keys = pack_keys(team, block, p->k, p->v, p->scratch.shared);
    loom_team_run(team, forward_item, p, block->b * block->g * p->head_parts * p->query_blocks);
    return true;
}

void FAST(attention_block)(loom_team *team, const loom_attention_block *block, const element *q, const element *k,
    const element *v, float *accumulator, float *maximum, float *sum) {
    forward_job p = {
        .block = block, .q = q, .k = k, .v = v, .accumulator = accumulator, .maximum = maximum, .sum = sum};
    if (!forward_run(team, &p))
        SLOW(attention_block)(team, block, q, k, v, accumulator, maximum, sum);
}

void FAST(attention)(loom_team *team, const loom_attention_block *block, const element *q, const element *k,
    const element *v, element *out, int64_t out_stride, float *log_sum_exp) {
    forward_job p = {
        .block = block, .q = q, .k = k, .v = v, .out = out, .out_stride = out_stride, .log_sum_exp = log_sum_exp};
    if (!forward_run(team, &p))
        SLOW(attention)(team, block, q, k, v, out, out_stride, log_sum_exp);
}

/* The rest are walks over the running state: an item is a run of queries. */
typedef struct state_job {
    const loom_attention_block *block;
    int64_t queries, per_item;
    const float *other_accumulator, *other_maximum, *other_sum; /* a state that is only read */
    float *accumulator, *maximum, *sum;
    const element *out_in, *d_out;
    element *out;
    float *log_sum_exp, *delta;
    int64_t out_stride;
} state_job;

static void state_run(loom_team *team, loom_team_function function, state_job *p) {
    p->queries = p->block->b * p->block->n * p->block->s_q;
    p->per_item = rows_per_item(p->block->d);
    loom_team_run(team, function, p, parts_of(p->queries, p->per_item));
}

/* Where the output of query i of the state begins. */
static int64_t output_at(const state_job *p, int64_t i) {
    const loom_attention_block *block = p->block;
    int64_t t = i % block->s_q, head = i / block->s_q % block->n, j = i / block->s_q / block->n;
    return (t * block->b + j) * p->out_stride + head * block->d;
}

#ifndef LOOM_NARROW

static void begin_item(void *argument, int64_t item, int worker) {
    const state_job *p = argument;
    int64_t d = p->block->d, first = item * p->per_item, last = smaller(first + p->per_item, p->queries);
    (void)worker;
    memset(p->accumulator + first * d, 0, (size_t)((last - first) * d) * sizeof(float));
    memset(p->sum + first, 0, (size_t)(last - first) * sizeof(float));
    for (int64_t i = first; i < last; i++)
        p->maximum[i] = -INFINITY;
}

void FAST(attention_begin)(
    loom_team *team, const loom_attention_block *block, float *accumulator, float *maximum, float *sum) {
    state_job p = {.block = block, .accumulator = accumulator, .maximum = maximum, .sum = sum};
    state_run(team, begin_item, &p);
}

static void merge_item(void *argument, int64_t item, int worker) {
    const state_job *p = argument;
    int64_t d = p->block->d;
    (void)worker;
    for (int64_t i = item * p->per_item; i < smaller((item + 1) * p->per_item, p->queries); i++) {
        float highest = p->other_maximum[i] > p->maximum[i] ? p->other_maximum[i] : p->maximum[i];
        float base = highest == -INFINITY ? 0.0f : highest;
        float mine = expf(p->maximum[i] - base), theirs = expf(p->other_maximum[i] - base);
        for (int64_t c = i * d; c < (i + 1) * d; c += LANES) {
            int64_t left = (i + 1) * d - c;
            vf scaled = v_mul(v_load(p->accumulator + c, left), v_set(mine));
            v_store(p->accumulator + c, left, v_fma(v_load(p->other_accumulator + c, left), v_set(theirs), scaled));
        }
        p->sum[i] = p->sum[i] * mine + p->other_sum[i] * theirs;
        p->maximum[i] = highest;
    }
}

void FAST(attention_merge)(loom_team *team, const loom_attention_block *block, const float *other_accumulator,
    const float *other_maximum, const float *other_sum, float *accumulator, float *maximum, float *sum) {
    state_job p = {.block = block,
        .other_accumulator = other_accumulator,
        .other_maximum = other_maximum,
        .other_sum = other_sum,
        .accumulator = accumulator,
        .maximum = maximum,
        .sum = sum};
    state_run(team, merge_item, &p);
}

#endif

static void finish_item(void *argument, int64_t item, int worker) {
    const state_job *p = argument;
    int64_t d = p->block->d;
    (void)worker;
    for (int64_t i = item * p->per_item; i < smaller((item + 1) * p->per_item, p->queries); i++) {
        float inverse = p->other_sum[i] == 0 ? 0.0f : 1.0f / p->other_sum[i];
        element *out = p->out + output_at(p, i);
        for (int64_t c = 0; c < d; c += LANES)
            e_store(out + c, d - c, v_mul(v_load(p->other_accumulator + i * d + c, d - c), v_set(inverse)));
        p->log_sum_exp[i] = log_sum(p->other_maximum[i], p->other_sum[i]);
    }
}

void FAST(attention_finish)(loom_team *team, const loom_attention_block *block, const float *accumulator,
    const float *maximum, const float *sum, element *out, int64_t out_stride, float *log_sum_exp) {
    state_job p = {.block = block,
        .other_accumulator = accumulator,
        .other_maximum = maximum,
        .other_sum = sum,
        .out = out,
        .out_stride = out_stride,
        .log_sum_exp = log_sum_exp};
    state_run(team, finish_item, &p);
}

static void delta_item(void *argument, int64_t item, int worker) {
    const state_job *p = argument;
    int64_t d = p->block->d;
    (void)worker;
    for (int64_t i = item * p->per_item; i < smaller((item + 1) * p->per_item, p->queries); i++) {
        int64_t at = output_at(p, i);
        vf sum = v_zero();
        for (int64_t c = 0; c < d; c += LANES)
            sum = v_fma(e_load(p->out_in + at + c, d - c), e_load(p->d_out + at + c, d - c), sum);
        p->delta[i] = v_sum(sum);
    }
}

void FAST(attention_delta)(loom_team *team, const loom_attention_block *block, const element *out, const element *d_out,
    int64_t out_stride, float *delta) {
    state_job p = {.block = block, .out_in = out, .d_out = d_out, .out_stride = out_stride, .delta = delta};
    state_run(team, delta_item, &p);
}
