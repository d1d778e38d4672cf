/* Blockwise attention, one query and one key at a time. Scores are computed anew wherever they are needed, so that
 * nothing of the size of s*s exists here either. Compiled twice (ref.h). */
#ifndef REAL
#include "base/random.h"
#include "kernel/ref/ref.h"
#include <tgmath.h>

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
#else

static REAL REF(dot)(int64_t d, const REAL *x, const REAL *y) {
    REAL sum = 0;
    for (int64_t c = 0; c < d; c++)
        sum += x[c] * y[c];
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

static void REF(take_keys)(const loom_attention_block *block, int64_t j, int64_t head, int64_t t, const REAL *q,
    const REAL *k, const REAL *v, REAL *accumulator, REAL *maximum, REAL *sum) {
    int64_t d = block->d;
    const REAL *query = q + query_at(block, j, head, t);
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
    for (int64_t c = 0; c < d; c++)
        accumulator[c] *= rescale;
    for (int64_t u = 0; u < block->s_kv; u++)
        if (sees(block, j, t, u)) {
            REAL score = block->scale * REF(dot)(d, query, k + key_at(block, block->k_stride, j, head, u));
            REAL weight = exp(score - base), kept = weight * REF(factor)(block, j, head, t, u);
            *sum += weight;
            for (int64_t c = 0; c < d; c++)
                accumulator[c] += kept * v[key_at(block, block->v_stride, j, head, u) + c];
        }
    *maximum = highest;
}

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

void REF(attention_block)(loom_team *team, const loom_attention_block *block, const REAL *q, const REAL *k,
    const REAL *v, REAL *accumulator, REAL *maximum, REAL *sum) {
    (void)team;
    for (int64_t j = 0; j < block->b; j++)
        for (int64_t head = 0; head < block->n; head++)
            for (int64_t t = 0; t < block->s_q; t++) {
                int64_t i = (j * block->n + head) * block->s_q + t;
                REF(take_keys)(block, j, head, t, q, k, v, accumulator + i * block->d, maximum + i, sum + i);
            }
}

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

static void REF(finish_query)(
    int64_t d, const REAL *accumulator, REAL maximum, REAL sum, REAL *out, REAL *log_sum_exp) {
    for (int64_t c = 0; c < d; c++)
        out[c] = sum == 0 ? 0 : accumulator[c] / sum;
    *log_sum_exp = sum == 0 ? -(REAL)INFINITY : maximum + log(sum);
}

void REF(attention_finish)(loom_team *team, const loom_attention_block *block, const REAL *accumulator,
    const REAL *maximum, const REAL *sum, REAL *out, int64_t out_stride, REAL *log_sum_exp) {
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

void REF(attention)(loom_team *team, const loom_attention_block *block, const REAL *q, const REAL *k, const REAL *v,
    REAL *out, int64_t out_stride, REAL *log_sum_exp) {
    (void)team;
    int64_t d = block->d;
    for (int64_t j = 0; j < block->b; j++)
        for (int64_t head = 0; head < block->n; head++)
            for (int64_t t = 0; t < block->s_q; t++) {
                REAL *row = out + (t * block->b + j) * out_stride + head * d;
                REAL maximum = -(REAL)INFINITY, sum = 0;
                for (int64_t c = 0; c < d; c++)
                    row[c] = 0;
                REF(take_keys)(block, j, head, t, q, k, v, row, &maximum, &sum);
                REF(finish_query)(d, row, maximum, sum, row, log_sum_exp + (j * block->n + head) * block->s_q + t);
            }
}

void REF(attention_delta)(loom_team *team, const loom_attention_block *block, const REAL *out, const REAL *d_out,
    int64_t out_stride, REAL *delta) {
    (void)team;
    for (int64_t j = 0; j < block->b; j++)
        for (int64_t head = 0; head < block->n; head++)
            for (int64_t t = 0; t < block->s_q; t++) {
                int64_t at = (t * block->b + j) * out_stride + head * block->d;
                delta[(j * block->n + head) * block->s_q + t] = REF(dot)(block->d, out + at, d_out + at);
            }
}

/* With P = exp(scale q.k - log_sum_exp) and the dropout factor D: dV = (P D)^T dO; dP = D (dO V^T);
 * dS = scale P (dP - delta); dQ = dS K; dK = dS^T Q. */
void REF(attention_block_backward)(loom_team *team, const loom_attention_block *block, const REAL *q, const REAL *k,
    const REAL *v, const REAL *d_out, int64_t out_stride, const REAL *log_sum_exp, const REAL *delta, bool accumulate_q,
    bool accumulate_kv, REAL *d_q, REAL *d_k, REAL *d_v) {
    (void)team;
    int64_t d = block->d, per_group = block->g > 0 ? block->n / block->g : 0;
    for (int64_t j = 0; j < block->b; j++)
        for (int64_t head = 0; head < block->n; head++) {
            for (int64_t t = 0; !accumulate_q && t < block->s_q; t++)
                for (int64_t c = 0; c < d; c++)
                    d_q[query_at(block, j, head, t) + c] = 0;
            for (int64_t u = 0; !accumulate_kv && head % per_group == 0 && u < block->s_kv; u++)
                for (int64_t c = 0; c < d; c++) {
                    d_k[key_at(block, block->k_stride, j, head, u) + c] = 0;
                    d_v[key_at(block, block->v_stride, j, head, u) + c] = 0;
                }
            for (int64_t t = 0; t < block->s_q; t++)
                for (int64_t u = 0; u < block->s_kv; u++) {
                    if (!sees(block, j, t, u))
                        continue;
                    int64_t i = (j * block->n + head) * block->s_q + t, at_q = query_at(block, j, head, t);
                    int64_t at_k = key_at(block, block->k_stride, j, head, u);
                    int64_t at_v = key_at(block, block->v_stride, j, head, u);
                    const REAL *d_row = d_out + (t * block->b + j) * out_stride + head * d;
                    REAL factor = REF(factor)(block, j, head, t, u);
                    REAL p = exp(block->scale * REF(dot)(d, q + at_q, k + at_k) - log_sum_exp[i]);
                    REAL d_score = block->scale * p * (factor * REF(dot)(d, d_row, v + at_v) - delta[i]);
                    for (int64_t c = 0; c < d; c++) {
                        d_v[at_v + c] += p * factor * d_row[c];
                        d_q[at_q + c] += d_score * k[at_k + c];
                        d_k[at_k + c] += d_score * q[at_q + c];
                    }
                }
        }
}

#endif
