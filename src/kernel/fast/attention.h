/* What attention's forward and backward share: how queries and keys are cut, which keys a query sees, and the dropout
 * of a tile.
 *
 * A tile is kept transposed: rows are keys, columns (the vector lanes) are queries. So the maximum, the sum and the
 * rescaling of a query are vertical operations on lanes, and K and V are only ever read element by element, as they
 * stand. */
#ifndef KERNEL_FAST_ATTENTION_H
#define KERNEL_FAST_ATTENTION_H

#include "kernel/fast/dropout.h"
#include "kernel/fast/math.h"
#include "kernel/fast/tile.h"
#include "kernel/fast/work.h"

enum {
    QUERIES = 64,
    KEYS = 64,
    PANEL = 32,
    PANELS = QUERIES / PANEL
}; /* of one tile; a tile is cut in panels of columns */

/* The keys of this block that a panel's queries see. */
typedef struct key_range {
    int64_t lowest, highest;  /* seen by any query: lowest <= u < highest; none when not lowest < highest */
    int64_t all_from, all_to; /* seen by every query */
} key_range;

/* One block of queries of one sample: row t (from first_query on) is a column. */
typedef struct query_block {
    int64_t j, first_query;
    int64_t queries;                        /* at most QUERIES */
    int64_t columns;                        /* rounded up to LANES; columns without a query see no key */
    int32_t after[QUERIES], until[QUERIES]; /* a column sees the keys after < u < until of this block of keys */
    key_range panel[PANELS], whole;
} query_block;

INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

INLINE void key_range_take(key_range *range, int64_t low, int64_t high) {
    if (low < high) {
        range->lowest = smaller(range->lowest, low);
        range->highest = larger(range->highest, high);
    }
    range->all_from = larger(range->all_from, low);
    range->all_to = smaller(range->all_to, high);
}

static inline query_block query_block_make(const loom_attention_block *block, int64_t j, int64_t first_query) {
    key_range none = {.lowest = block->s_kv, .highest = 0, .all_from = 0, .all_to = block->s_kv};
    query_block q = {.j = j,
        .first_query = first_query,
        .queries = smaller(QUERIES, block->s_q - first_query),
        .panel = {none, none},
        .whole = none};
    q.columns = round_up(q.queries, LANES);
    for (int64_t i = 0; i < q.queries; i++) {
        int64_t t = first_query + i, position = block->q_offset + t - block->kv_offset; /* counted from the first key */
        int64_t low = 0, high = block->s_kv;
        if (block->causal)
            high = clamp(position + 1, 0, high);
        if (block->window)
            low = clamp(position - block->window + 1, low, block->s_kv);
        if (block->document_start)
            low = clamp(block->document_start[j * block->s_q + t] - block->kv_offset, low, block->s_kv);
        q.after[i] = (int32_t)low - 1;
        q.until[i] = (int32_t)high;
        key_range_take(&q.panel[i / PANEL], low, high);
        key_range_take(&q.whole, low, high);
    }
    for (int64_t i = q.queries; i < q.columns; i++)
        q.after[i] = q.until[i] = 0;
    return q;
}

/* One rectangle of a tile: columns [column, column + columns) and the keys [first, first + keys) that they see. */
typedef struct rectangle {
    int64_t column, columns, first, keys;
    bool masked; /* not all of its queries see all of its keys */
} rectangle;

/* Cuts the tile of keys [first, last) into at most PANELS rectangles: one when all panels see the same keys of it, else
 * one a panel, without the keys that its queries do not see. */
static inline int tile_rectangles(const query_block *q, int64_t first, int64_t last, rectangle rectangles[PANELS]) {
    int count = 0;
    for (int64_t panel = 0; panel < parts_of(q->columns, PANEL); panel++) {
        const key_range *range = &q->panel[panel];
        int64_t from = larger(first, range->lowest), to = smaller(last, range->highest), column = panel * PANEL;
        if (from >= to)
            continue;
        rectangle r = {
            column, smaller(PANEL, q->columns - column), from, to - from, from < range->all_from || to > range->all_to};
        rectangle *before = count ? &rectangles[count - 1] : NULL;
        if (before && before->first == r.first && before->keys == r.keys &&
            before->column + before->columns == column && before->masked == r.masked)
            before->columns += r.columns;
        else
            rectangles[count++] = r;
    }
    return count;
}

/* The lanes that see key u. */
INLINE vm lanes_see(vi after, vi until, int64_t u) {
    vi key = vi_set((uint32_t)u);
    return vm_and(vi_greater(key, after), vi_greater(until, key));
}

/* Dropout of one head's tile: the counters of each column, and the words of the four keys that share a draw. */
typedef struct tile_dropout {
    float probability;
    uint32_t k0, k1;
    uint32_t c1[QUERIES], c2[QUERIES], c3[QUERIES];
} tile_dropout;

typedef struct tile_draw {
    int64_t quad;
    vi words[4];
} tile_draw;

static inline void tile_dropout_make(
    const loom_attention_block *block, const query_block *q, int64_t head, tile_dropout *drop) {
    const loom_dropout *dropout = &block->dropout;
    drop->probability = dropout->probability;
    for (int64_t i = 0; dropout->probability > 0 && i < q->columns; i++) {
        loom__dropout_row row = loom__dropout_row_make(dropout->seed, dropout->layer, dropout->site,
            block->sample[q->j], block->q_offset + q->first_query + i, block->head_offset + head);
        drop->k0 = row.k0;
        drop->k1 = row.k1;
        drop->c1[i] = row.c1;
        drop->c2[i] = row.c2;
        drop->c3[i] = row.c3;
    }
}

/* The factors of columns i … i+15 for the key at global position `key`; keys come in order, `draw` starts at quad -1.
 */
INLINE vf tile_dropout_factor(const tile_dropout *drop, int64_t i, int64_t key, tile_draw *draw) {
    if (key / 4 != draw->quad) {
        draw->quad = key / 4;
        v_philox(vi_set((uint32_t)draw->quad), vi_load(drop->c1 + i), vi_load(drop->c2 + i), vi_load(drop->c3 + i),
            drop->k0, drop->k1, draw->words);
    }
    return v_dropout_factor(draw->words[key % 4], drop->probability);
}

/* k and v as contiguous rows of d, [b, g, s_kv, d], made once for a call: in an activation the rows of one group lie a
 * large power of two apart as often as not, where neither caches nor prefetchers work, so they are read in the order in
 * which they lie. */
typedef struct packed_keys {
    const loom_attention_block *block;
    const element *k, *v;
    float *packed_k, *packed_v;
} packed_keys;

enum { PACK_ROWS = 16 }; /* of an item */

INLINE int64_t packed_floats(const loom_attention_block *block) {
    return block->b * block->g * block->s_kv * block->d;
}

/* Where the packed row `u` of a sample and group is, in packed_k as in packed_v. */
INLINE int64_t packed_at(const loom_attention_block *block, int64_t j, int64_t group, int64_t u) {
    return ((j * block->g + group) * block->s_kv + u) * block->d;
}

static void pack_item(void *argument, int64_t item, int worker) {
    const packed_keys *p = argument;
    const loom_attention_block *block = p->block;
    (void)worker;
    for (int64_t u = item * PACK_ROWS; u < smaller((item + 1) * PACK_ROWS, block->s_kv); u++)
        for (int64_t j = 0; j < block->b; j++)
            for (int64_t group = 0; group < block->g; group++) {
                const element *k = p->k + (u * block->b + j) * block->k_stride + group * block->kv_group_stride;
                const element *v = p->v + (u * block->b + j) * block->v_stride + group * block->kv_group_stride;
                int64_t at = packed_at(block, j, group, u);
                for (int64_t c = 0; c < block->d; c += LANES) {
                    v_store(p->packed_k + at + c, block->d - c, e_load(k + c, block->d - c));
                    v_store(p->packed_v + at + c, block->d - c, e_load(v + c, block->d - c));
                }
            }
}

/* Packs into `to`, which has room for 2 * packed_floats. */
static inline packed_keys pack_keys(
    loom_team *team, const loom_attention_block *block, const element *k, const element *v, float *to) {
    packed_keys p = {block, k, v, to, to + packed_floats(block)};
    loom_team_run(team, pack_item, &p, parts_of(block->s_kv, PACK_ROWS));
    return p;
}

/* Copies one head's queries (or output gradients), times a factor, to rows of `width`, a multiple of LANES; zeros in
 * the rest of a row and in the rows up to q->columns, where no query is. */
static inline void pack_rows(
    int64_t d, const query_block *q, const element *from, int64_t row_stride, float factor, int64_t width, float *to) {
    for (int64_t i = 0; i < q->columns; i++)
        for (int64_t c = 0; c < width; c += LANES) {
            vf row = i < q->queries ? e_load(from + i * row_stride + c, d - c) : v_zero();
            v_store(to + i * width + c, LANES, v_mul(row, v_set(factor)));
        }
}

/* Such rows as columns, to[c][QUERIES]. */
static inline void pack_columns(int64_t d, const query_block *q, const float *rows, int64_t width, float *to) {
    transpose_from_rows(q->columns, d, rows, width, to, QUERIES);
}

INLINE int64_t query_offset(const loom_attention_block *block, int64_t j, int64_t t, int64_t head) {
    int64_t per_group = block->n / block->g;
    return (t * block->b + j) * block->q_stride + head / per_group * block->q_group_stride +
           head % per_group * block->d;
}

#endif
