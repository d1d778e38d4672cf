/* Attention, backward: the probabilities of a tile are computed anew from log_sum_exp, then five small products per
 * tile give dV, dP, dK and dQ. A unit is one head and one block of queries; it owns its d_q. An item is a share of the
 * units of one (sample, group), which add their dK and dV to one buffer; where samples and groups are few, the units of
 * a group are dealt to several items with a buffer each, and the buffers are added in order. How many is a matter of
 * the shape, so the bits do not depend on the team. */
#include "kernel/fast/attention.h"
#include <string.h>

enum {
    ITEMS = 32,    /* items wanted before the units of a group are dealt to several */
    PARTS_MAX = 16 /* buffers of one group */
};

typedef struct backward_job {
    const loom_attention_block *block;
    const element *q, *d_out;
    const float *log_sum_exp, *delta;
    int64_t out_stride;
    bool accumulate_q, accumulate_kv;
    element *d_q, *d_k, *d_v;
    int64_t parts, query_blocks, width; /* width: d rounded up to LANES */
    packed_keys keys;
    float *sums; /* [b, g, parts] buffers of sums_floats, when parts > 1 */
    scratch scratch;
} backward_job;

typedef struct backward_buffers {
    float *queries, *d_outputs;           /* [QUERIES][width] */
    float *query_columns, *d_out_columns; /* [d][QUERIES] */
    float *d_query_columns;               /* [d][QUERIES] */
    float *weights, *d_scores;            /* [KEYS][QUERIES] */
    float *d_keys, *d_values;             /* [s_kv][width]: of the whole item */
} backward_buffers;

static int64_t sums_floats(const backward_job *p) {
    return 2 * p->block->s_kv * p->width;
}

static int64_t tile_floats(const backward_job *p) {
    return 2 * QUERIES * p->width + 3 * QUERIES * p->block->d + 2 * KEYS * QUERIES;
}

static backward_buffers backward_buffers_at(const backward_job *p, float *at, float *sums) {
    int64_t d = p->block->d;
    backward_buffers buffers;
    buffers.weights = at;
    buffers.d_scores = buffers.weights + KEYS * QUERIES;
    buffers.queries = buffers.d_scores + KEYS * QUERIES;
    buffers.d_outputs = buffers.queries + QUERIES * p->width;
    buffers.query_columns = buffers.d_outputs + QUERIES * p->width;
    buffers.d_out_columns = buffers.query_columns + QUERIES * d;
    buffers.d_query_columns = buffers.d_out_columns + QUERIES * d;
    buffers.d_keys = sums;
    buffers.d_values = sums + p->block->s_kv * p->width;
    return buffers;
}

/* Scores and dP of columns i … i+15 (at `weights` and `d_scores`) become P times its dropout factor, and dS / scale. */
INLINE void backward_columns(const backward_job *p, const query_block *q, const tile_dropout *drop, int64_t i,
    const rectangle *r, vf log_sum_exp, vf delta, float *weights, float *d_scores) {
    bool masked = r->masked, drops = drop->probability > 0;
    vi after = vi_load(q->after + i), until = vi_load(q->until + i);
    tile_draw draw = {.quad = -1};
    for (int64_t u = 0; u < r->keys; u++) {
        float *weight_at = weights + u * QUERIES, *d_score_at = d_scores + u * QUERIES;
        vf weight = v_exp(v_sub(v_load(weight_at, LANES), log_sum_exp)), d_weight = v_load(d_score_at, LANES);
        if (masked)
            weight = v_select(lanes_see(after, until, r->first + u), weight, v_zero());
        vf kept = weight;
        if (drops) {
            vf factor = tile_dropout_factor(drop, i, p->block->kv_offset + r->first + u, &draw);
            kept = v_mul(weight, factor);
            d_weight = v_mul(d_weight, factor);
        }
        v_store(weight_at, LANES, kept);
        v_store(d_score_at, LANES, v_mul(weight, v_sub(d_weight, delta)));
    }
}

static void store_query_gradient(
    const backward_job *p, const query_block *q, int64_t head, const float *columns, float *rows) {
    const loom_attention_block *block = p->block;
    int64_t d = block->d;
    transpose_to_rows(d, q->queries, columns, QUERIES, rows, p->width);
    for (int64_t i = 0; i < q->queries; i++) {
        element *to = p->d_q + query_offset(block, q->j, q->first_query + i, head);
        for (int64_t c = 0; c < d; c += LANES) {
            vf gradient = v_mul(v_load(rows + i * p->width + c, d - c), v_set(block->scale));
            e_store(to + c, d - c, p->accumulate_q ? v_add(e_load(to + c, d - c), gradient) : gradient);
        }
    }
}

static void backward_unit(const backward_job *p, int64_t j, int64_t group, int64_t head, int64_t query_index,
    const backward_buffers *buffers) {
    const loom_attention_block *block = p->block;
    int64_t d = block->d, width = p->width;
    query_block q = query_block_make(block, j, query_index * QUERIES);
    tile_dropout drop;
    tile_dropout_make(block, &q, head, &drop);
    int64_t state = (j * block->n + head) * block->s_q + q.first_query;
    const element *queries = p->q + query_offset(block, j, q.first_query, head);
    const element *d_out = p->d_out + (q.first_query * block->b + j) * p->out_stride + head * d;
    pack_rows(d, &q, queries, block->b * block->q_stride, block->scale, width, buffers->queries);
    pack_rows(d, &q, d_out, block->b * p->out_stride, 1.0f, width, buffers->d_outputs);
    pack_columns(d, &q, buffers->queries, width, buffers->query_columns);
    pack_columns(d, &q, buffers->d_outputs, width, buffers->d_out_columns);
    memset(buffers->d_query_columns, 0, (size_t)(d * QUERIES) * sizeof(float));
    for (int64_t first = q.whole.lowest / KEYS * KEYS; first < q.whole.highest; first += KEYS) {
        rectangle rectangles[PANELS];
        int count = tile_rectangles(&q, first, smaller(first + KEYS, block->s_kv), rectangles);
        for (const rectangle *r = rectangles; r < rectangles + count; r++) {
            int64_t keys_at = packed_at(block, j, group, r->first);
            const float *k_at = p->keys.packed_k + keys_at, *v_at = p->keys.packed_v + keys_at;
            float *weights = buffers->weights, *d_scores = buffers->d_scores;
            tile_product(r->keys, r->columns, d, k_at, d, 1, buffers->query_columns + r->column, QUERIES, false,
                weights, QUERIES);
            tile_product(r->keys, r->columns, d, v_at, d, 1, buffers->d_out_columns + r->column, QUERIES, false,
                d_scores, QUERIES);
            for (int64_t c = 0; c < r->columns; c += LANES) {
                int64_t i = r->column + c;
                vf log_sum_exp = v_load(p->log_sum_exp + state + i, q.queries - i);
                /* A query that saw no key at all has -inf here; its probabilities are 0, not exp(score + inf). */
                log_sum_exp = v_select(v_equal(log_sum_exp, v_set(-INFINITY)), v_set(INFINITY), log_sum_exp);
                vf delta = v_load(p->delta + state + i, q.queries - i);
                backward_columns(p, &q, &drop, i, r, log_sum_exp, delta, weights + c, d_scores + c);
            }
            tile_product(r->keys, width, r->columns, weights, QUERIES, 1, buffers->d_outputs + r->column * width, width,
                true, buffers->d_values + r->first * width, width);
            tile_product(r->keys, width, r->columns, d_scores, QUERIES, 1, buffers->queries + r->column * width, width,
                true, buffers->d_keys + r->first * width, width);
            tile_product(d, r->columns, r->keys, k_at, 1, d, d_scores, QUERIES, true,
                buffers->d_query_columns + r->column, QUERIES);
        }
    }
    store_query_gradient(p, &q, head, buffers->d_query_columns, buffers->queries);
}

/* Adds the buffers of a (sample, group) in order and hands rows first … last-1 to d_k and d_v. */
static void store_key_gradients(
    const backward_job *p, int64_t j, int64_t group, int64_t first, int64_t last, const float *sums) {
    const loom_attention_block *block = p->block;
    int64_t d = block->d, part_floats = sums_floats(p);
    for (int64_t u = first; u < last; u++)
        for (int64_t c = 0; c < d; c += LANES) {
            const float *from = sums + u * p->width + c;
            vf d_key = v_zero(), d_value = v_zero();
            for (int64_t part = 0; part < p->parts; part++) {
                d_key = v_add(d_key, v_load(from + part * part_floats, LANES));
                d_value = v_add(d_value, v_load(from + part * part_floats + block->s_kv * p->width, LANES));
            }
            element *to_k = p->d_k + (u * block->b + j) * block->k_stride + group * block->kv_group_stride + c;
            element *to_v = p->d_v + (u * block->b + j) * block->v_stride + group * block->kv_group_stride + c;
            if (p->accumulate_kv) {
                d_key = v_add(e_load(to_k, d - c), d_key);
                d_value = v_add(e_load(to_v, d - c), d_value);
            }
            e_store(to_k, d - c, d_key);
            e_store(to_v, d - c, d_value);
        }
}

static float *shared_sums(const backward_job *p, int64_t pair) {
    return p->sums + pair * p->parts * sums_floats(p);
}

static void backward_item(void *argument, int64_t item, int worker) {
    const backward_job *p = argument;
    const loom_attention_block *block = p->block;
    int64_t per_group = block->n / block->g, part = item % p->parts, pair = item / p->parts;
    int64_t j = pair / block->g, group = pair % block->g;
    float *tiles = scratch_of(&p->scratch, worker);
    float *sums = p->parts == 1 ? tiles + tile_floats(p) : shared_sums(p, pair) + part * sums_floats(p);
    backward_buffers buffers = backward_buffers_at(p, tiles, sums);
    memset(sums, 0, (size_t)sums_floats(p) * sizeof(float));
    for (int64_t unit = part; unit < per_group * p->query_blocks; unit += p->parts)
        backward_unit(
            p, j, group, group * per_group + unit % per_group, p->query_blocks - 1 - unit / per_group, &buffers);
    if (p->parts == 1)
        store_key_gradients(p, j, group, 0, block->s_kv, sums);
}

static void total_item(void *argument, int64_t item, int worker) {
    const backward_job *p = argument;
    const loom_attention_block *block = p->block;
    int64_t tiles = parts_of(block->s_kv, KEYS), pair = item / tiles, first = item % tiles * KEYS;
    (void)worker;
    store_key_gradients(
        p, pair / block->g, pair % block->g, first, smaller(first + KEYS, block->s_kv), shared_sums(p, pair));
}

void FAST(attention_block_backward)(loom_team *team, const loom_attention_block *block, const element *q,
    const element *k, const element *v, const element *d_out, int64_t out_stride, const float *log_sum_exp,
    const float *delta, bool accumulate_q, bool accumulate_kv, element *d_q, element *d_k, element *d_v) {
    if (block->b <= 0 || block->n <= 0)
        return;
    backward_job p = {.block = block,
        .q = q,
        .d_out = d_out,
        .log_sum_exp = log_sum_exp,
        .delta = delta,
        .out_stride = out_stride,
        .accumulate_q = accumulate_q,
        .accumulate_kv = accumulate_kv,
        .d_q = d_q,
        .d_k = d_k,
        .d_v = d_v,
        .query_blocks = parts_of(block->s_q, QUERIES),
        .width = round_up(block->d, LANES)};
    int64_t pairs = block->b * block->g, units = block->n / block->g * p.query_blocks;
    p.parts = clamp(parts_of(ITEMS, pairs), 1, larger(1, smaller(PARTS_MAX, units)));
    int64_t packed = 2 * packed_floats(block), shared = packed + (p.parts == 1 ? 0 : pairs * p.parts * sums_floats(&p));
    int64_t private = tile_floats(&p) + (p.parts == 1 ? sums_floats(&p) : 0);
    if (!scratch_reserve(&p.scratch, team, (size_t)shared * sizeof(float), (size_t) private * sizeof(float))) {
        SLOW(attention_block_backward)
        (team, block, q, k, v, d_out, out_stride, log_sum_exp, delta, accumulate_q, accumulate_kv, d_q, d_k, d_v);
        return;
    }
    p.keys = pack_keys(team, block, k, v, p.scratch.shared);
    p.sums = (float *)p.scratch.shared + packed;
    loom_team_run(team, backward_item, &p, pairs * p.parts);
    if (p.parts > 1)
        loom_team_run(team, total_item, &p, pairs * parts_of(block->s_kv, KEYS));
}
