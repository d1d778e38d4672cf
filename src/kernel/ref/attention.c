/* Blockwise attention, one query and one key at a time. Scores are computed anew wherever they are needed, so that
 * nothing of the size of s*s exists here either. Compiled four times (ref.h). */
#ifndef REAL
#include "base/random.h"
#include "kernel/ref/ref.h"
#include <tgmath.h>

enum { CHANNELS = 64 }; /* that are summed side by side: a row of them needs no memory of its own */

/* Whether query row t of sample j sees key row u of the block. */
static bool sees(const loom_attention_block *block, int64_t j, int64_t t, int64_t u) {
    int64_t query = block->q_offset + t, key = block->kv_offset + u;
    return (!block->causal || key <= query) && (block->window == 0 || query - key < block->window) &&
           (!block->document_start || key >= block->document_start[j * block->s_q + t]);
}

static int64_t query_at(const loom_attention_block *block, int64_t j, int64_t head, int64_t t) {
    int64_t per_group = block->n / block->g;
    return (t * block->b + j) * block->q_stride + head / per_group * block->q_group_stride +
           head % per_group * block->d;
}

/* Where key or value row u of the group of `head` begins; `stride` is that of k or of v. */
static int64_t key_at(const loom_attention_block *block, int64_t stride, int64_t j, int64_t head, int64_t u) {
    return (u * block->b + j) * stride + head / (block->n / block->g) * block->kv_group_stride;
}

#include "kernel/ref/real32.h"

#include "kernel/ref/attention.c"

#include "kernel/ref/real64.h"

#include "kernel/ref/attention.c"

#include "kernel/ref/bf16.h"

#include "kernel/ref/attention.c"

#include "kernel/ref/f16.h"

#include "kernel/ref/attention.c"
#else

static REAL REF(dot)(int64_t d, const ELEMENT *x, const ELEMENT *y) {
    REAL sum = 0;
    for (int64_t c = 0; c < d; c++)
        sum += LOAD(x[c]) * LOAD(y[c]);
    return sum;
}

/* What the probability of (query t, key u) is multiplied by: 1 without dropout. */
static REAL REF(factor)(const loom_attention_block *block, int64_t j, int64_t head, int64_t t, int64_t u) {
    const loom_dropout *dropout = &block->dropout;
    if (dropout->probability <= 0)
        return 1;
    loom__dropout_row row = loom__dropout_row_make(
        dropout->seed, dropout->layer, dropout->site, block->sample[j], block->q_offset + t, block->head_offset + head);
    int64_t key = block->kv_offset + u;
    loom__philox words = loom__dropout_words(&row, (uint32_t)(key / 4));
    if (words.word[key % 4] < loom__dropout_threshold(dropout->probability))
        return 0;
    return 1 / (1 - (REAL)dropout->probability);
}

/* Of the accumulator, `count` channels from `channel` on. */
static void REF(take_keys)(const loom_attention_block *block, int64_t j, int64_t head, int64_t t, const ELEMENT *q,
    const ELEMENT *k, const ELEMENT *v, int64_t channel, int64_t count, REAL *accumulator, REAL *maximum, REAL *sum) {
    int64_t d = block->d;
    const ELEMENT *query = q + query_at(block, j, head, t);
    REAL highest = *maximum;
    bool any = false;
    for (int64_t u = 0; u < block->s_kv; u++)
        if (sees(block, j, t, u)) {
            REAL score = block->scale * REF(dot)(d, query, k + key_at(block, block->k_stride, j, head, u));
            any = true;
            if (score > highest)
                highest = score;
        }
    if (!any)
        return;
    REAL base = highest == -(REAL)INFINITY ? 0 : highest, rescale = exp(*maximum - base);
    *sum *= rescale;
    for (int64_t c = 0; c < count; c++)
        accumulator[c] *= rescale;
    for (int64_t u = 0; u < block->s_kv; u++)
        if (sees(block, j, t, u)) {
            REAL score = block->scale * REF(dot)(d, query, k + key_at(block, block->k_stride, j, head, u));
            REAL weight = exp(score - base), kept = weight * REF(factor)(block, j, head, t, u);
            *sum += weight;
            for (int64_t c = 0; c < count; c++)
                accumulator[c] += kept * LOAD(v[key_at(block, block->v_stride, j, head, u) + channel + c]);
        }
    *maximum = highest;
}

#ifndef NARROW
void REF(attention_begin)(
    loom_team *team, const loom_attention_block *block, REAL *accumulator, REAL *maximum, REAL *sum) {
    (void)team;
    int64_t queries = block->b * block->n * block->s_q;
    for (int64_t i = 0; i < queries * block->d; i++)
        accumulator[i] = 0;
    for (int64_t i = 0; i < queries; i++) {
        maximum[i] = -(REAL)INFINITY;
        sum[i] = 0;
    }
}
#endif

void REF(attention_block)(loom_team *team, const loom_attention_block *block, const ELEMENT *q, const ELEMENT *k,
    const ELEMENT *v, REAL *accumulator, REAL *maximum, REAL *sum) {
    (void)team;
    for (int64_t j = 0; j < block->b; j++)
        for (int64_t head = 0; head < block->n; head++)
            for (int64_t t = 0; t < block->s_q; t++) {
                int64_t i = (j * block->n + head) * block->s_q + t;
                REF(take_keys)
                (block, j, head, t, q, k, v, 0, block->d, accumulator + i * block->d, maximum + i, sum + i);
            }
}

#ifndef NARROW
void REF(attention_merge)(loom_team *team, const loom_attention_block *block, const REAL *other_accumulator,
    const REAL *other_maximum, const REAL *other_sum, REAL *accumulator, REAL *maximum, REAL *sum) {
    (void)team;
    for (int64_t i = 0; i < block->b * block->n * block->s_q; i++) {
        REAL highest = other_maximum[i] > maximum[i] ? other_maximum[i] : maximum[i];
        REAL base = highest == -(REAL)INFINITY ? 0 : highest;
        REAL mine = exp(maximum[i] - base), theirs = exp(other_maximum[i] - base);
        for (int64_t c = i * block->d; c < (i + 1) * block->d; c++)
            accumulator[c] = accumulator[c] * mine + other_accumulator[c] * theirs;
        sum[i] = sum[i] * mine + other_sum[i] * theirs;
        maximum[i] = highest;
    }
}
#endif

static void REF(finish_query)(
    int64_t d, const REAL *accumulator, REAL maximum, REAL sum, ELEMENT *out, REAL *log_sum_exp) {
    for (int64_t c = 0; c < d; c++)
        STORE(out[c], sum == 0 ? 0 : accumulator[c] / sum);
    *log_sum_exp = sum == 0 ? -(REAL)INFINITY : maximum + log(sum);
}

void REF(attention_finish)(loom_team *team, const loom_attention_block *block, const REAL *accumulator,
    const REAL *maximum, const REAL *sum, ELEMENT *out, int64_t out_stride, REAL *log_sum_exp) {
    (void)team;
    int64_t d = block->d;
    for (int64_t j = 0; j < block->b; j++)
        for (int64_t head = 0; head < block->n; head++)
            for (int64_t t = 0; t < block->s_q; t++) {
                int64_t i = (j * block->n + head) * block->s_q + t;
                REF(finish_query)
                (d, accumulator + i * d, maximum[i], sum[i], out + (t * block->b + j) * out_stride + head * d,
                    log_sum_exp + i);
            }
}

void REF(attention)(loom_team *team, const loom_attention_block *block, const ELEMENT *q, const ELEMENT *k,
    const ELEMENT *v, ELEMENT *out, int64_t out_stride, REAL *log_sum_exp) {
    (void)team;
    int64_t d = block->d;
    for (int64_t j = 0; j < block->b; j++)
        for (int64_t head = 0; head < block->n; head++)
            for (int64_t t = 0; t < block->s_q; t++)
                for (int64_t channel = 0; channel < d; channel += CHANNELS) {
                    REAL row[CHANNELS] = {0}, maximum = -(REAL)INFINITY, sum = 0;
                    int64_t count = d - channel < CHANNELS ? d - channel : CHANNELS;
                    REF(take_keys)(block, j, head, t, q, k, v, channel, count, row, &maximum, &sum);
                    REF(finish_query)
                    (count, row, maximum, sum, out + (t * block->b + j) * out_stride + head * d + channel,
                        log_sum_exp + (j * block->n + head) * block->s_q + t);
                }
}

void REF(attention_delta)(loom_team *team, const loom_attention_block *block, const ELEMENT *out, const ELEMENT *d_out,
    int64_t out_stride, REAL *delta) {
    (void)team;
    for (int64_t j = 0; j < block->b; j++)
        for (int64_t head = 0; head < block->n; head++)
            for (int64_t t = 0; t < block->s_q; t++) {
                int64_t at = (t * block->b + j) * out_stride + head * block->d;
                delta[(j * block->n + head) * block->s_q + t] = REF(dot)(block->d, out + at, d_out + at);
            }
}

/* P times its dropout factor, and dS, of a query that sees the key. */
typedef struct REF(score) {
    REAL kept, d_score;
} REF(score);

typedef struct REF(backward) {
    const loom_attention_block *block;
    const ELEMENT *q, *k, *v, *d_out;
    int64_t out_stride;
    const REAL *log_sum_exp, *delta;
} REF(backward);

static const ELEMENT *REF(output_row)(const REF(backward) * p, int64_t j, int64_t head, int64_t t) {
    return p->d_out + (t * p->block->b + j) * p->out_stride + head * p->block->d;
}

static REF(score) REF(score_of)(const REF(backward) * p, int64_t j, int64_t head, int64_t t, int64_t u) {
    const loom_attention_block *block = p->block;
    int64_t i = (j * block->n + head) * block->s_q + t, d = block->d;
    const ELEMENT *key = p->k + key_at(block, block->k_stride, j, head, u);
    const ELEMENT *value = p->v + key_at(block, block->v_stride, j, head, u);
    REAL factor = REF(factor)(block, j, head, t, u);
    REAL weight = exp(block->scale * REF(dot)(d, p->q + query_at(block, j, head, t), key) - p->log_sum_exp[i]);
    REAL d_weight = factor * REF(dot)(d, REF(output_row)(p, j, head, t), value);
    return (REF(score)){weight * factor, block->scale * weight * (d_weight - p->delta[i])};
}

static void REF(put)(int64_t count, const REAL *sum, bool accumulate, ELEMENT *to) {
    for (int64_t c = 0; c < count; c++)
        STORE(to[c], sum[c] + (accumulate ? LOAD(to[c]) : 0));
}

/* With P = exp(scale q.k - log_sum_exp) and the dropout factor D: dV = (P D)^T dO; dP = D (dO V^T);
 * dS = scale P (dP - delta); dQ = dS K; dK = dS^T Q. First d_q, query by query, then d_k and d_v, key by key, a few
 * channels at a time. */
void REF(attention_block_backward)(loom_team *team, const loom_attention_block *block, const ELEMENT *q,
    const ELEMENT *k, const ELEMENT *v, const ELEMENT *d_out, int64_t out_stride, const REAL *log_sum_exp,
    const REAL *delta, bool accumulate_q, bool accumulate_kv, ELEMENT *d_q, ELEMENT *d_k, ELEMENT *d_v) {
    (void)team;
    const REF(backward) p = {block, q, k, v, d_out, out_stride, log_sum_exp, delta};
    int64_t d = block->d, per_group = block->g > 0 ? block->n / block->g : 0;
    for (int64_t channel = 0; channel < d; channel += CHANNELS) {
        int64_t count = d - channel < CHANNELS ? d - channel : CHANNELS;
        for (int64_t j = 0; j < block->b; j++) {
            for (int64_t head = 0; head < block->n; head++)
                for (int64_t t = 0; t < block->s_q; t++) {
                    REAL d_query[CHANNELS] = {0};
                    for (int64_t u = 0; u < block->s_kv; u++) {
                        if (!sees(block, j, t, u))
                            continue;
                        const ELEMENT *key = k + key_at(block, block->k_stride, j, head, u) + channel;
                        REAL d_score = REF(score_of)(&p, j, head, t, u).d_score;
                        for (int64_t c = 0; c < count; c++)
                            d_query[c] += d_score * LOAD(key[c]);
                    }
                    REF(put)(count, d_query, accumulate_q, d_q + query_at(block, j, head, t) + channel);
                }
            for (int64_t first = 0; per_group > 0 && first < block->n; first += per_group)
                for (int64_t u = 0; u < block->s_kv; u++) {
                    REAL d_key[CHANNELS] = {0}, d_value[CHANNELS] = {0};
                    for (int64_t head = first; head < first + per_group; head++)
                        for (int64_t t = 0; t < block->s_q; t++) {
                            if (!sees(block, j, t, u))
                                continue;
                            const ELEMENT *query = q + query_at(block, j, head, t) + channel;
                            const ELEMENT *d_row = REF(output_row)(&p, j, head, t) + channel;
                            REF(score) score = REF(score_of)(&p, j, head, t, u);
                            for (int64_t c = 0; c < count; c++) {
                                d_key[c] += score.d_score * LOAD(query[c]);
                                d_value[c] += score.kept * LOAD(d_row[c]);
                            }
                        }
                    REF(put)(count, d_key, accumulate_kv, d_k + key_at(block, block->k_stride, j, first, u) + channel);
                    REF(put)
                    (count, d_value, accumulate_kv, d_v + key_at(block, block->v_stride, j, first, u) + channel);
                }
        }
    }
}

#endif
