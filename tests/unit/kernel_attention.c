/* Attention of every table against the double reference: masks, groups, layouts, sizes around the tiles of 64, blocks
 * of keys taken one after the other or merged, gradients, dropout, teams.
 *
 * Tolerance: a score is a sum of d products, so its error is about d eps times the size of q and k, and it enters the
 * probability relatively; an output is a sum over s_kv keys. terms = d + s_kv in the common rule (kernel_support.h),
 * times 8 for what the scores' size (up to 10 here) multiplies. */
#include "kernel_support.h"

typedef struct attention_case {
    const char *name;
    int64_t b, n, g, d, s_q, s_kv, q_offset, kv_offset;
    bool causal, fused;
    int64_t window, document; /* length of the documents, 0 = none */
    float dropout;
} attention_case;

static const attention_case cases[] = {
    {"one key", 1, 1, 1, 1, 1, 1, 0, 0, true, false, 0, 0, 0},
    {"plain", 2, 2, 2, 5, 33, 47, 0, 0, false, false, 0, 0, 0},
    {"causal fused", 2, 4, 2, 16, 70, 70, 0, 0, true, true, 0, 0, 0},
    {"causal, tiles", 1, 2, 1, 64, 130, 130, 0, 0, true, true, 0, 0, 0},
    {"all heads in one group", 1, 6, 1, 8, 65, 65, 0, 0, true, true, 0, 0, 0},
    {"odd head dimension", 1, 2, 2, 80, 64, 128, 64, 0, true, false, 0, 0, 0},
    {"window", 1, 2, 1, 16, 200, 200, 0, 0, true, true, 37, 0, 0},
    {"window without causality", 1, 1, 1, 5, 90, 90, 0, 0, false, false, 10, 0, 0},
    {"documents", 2, 2, 1, 16, 150, 150, 0, 0, true, true, 0, 29, 0},
    {"documents and window", 2, 2, 1, 5, 150, 150, 0, 0, true, true, 11, 29, 0},
    {"keys after the queries", 1, 2, 1, 16, 20, 40, 10, 25, true, false, 0, 0, 0},
    {"dropout", 2, 4, 2, 16, 70, 70, 3, 3, true, true, 0, 0, 0.25f},
    {"dropout, keys not at a multiple of four", 1, 2, 1, 5, 30, 81, 90, 7, false, false, 0, 0, 0.5f},
    {"as many pairs of sample and group as items", 8, 8, 4, 4, 70, 70, 0, 0, true, true, 0, 0, 0},
    {"no queries", 1, 2, 1, 8, 0, 20, 0, 0, true, false, 0, 0, 0},
    {"no keys", 1, 2, 1, 8, 20, 0, 0, 0, true, false, 0, 0, 0},
};
enum { CASES = sizeof cases / sizeof *cases };

typedef struct setting {
    loom_attention_block block;
    int32_t *documents;
    int64_t at_k, at_v; /* of k and v from q in the one array that holds them all */
    int64_t out_stride;
    size_t inputs, outputs, queries;
    float *qkv, *d_out;
} setting;

static const int64_t samples[2] = {123456789012345, 3};

static setting setting_make(const attention_case *c) {
    int64_t per_group = c->n / c->g, rows = c->b * (c->s_q > c->s_kv ? c->s_q : c->s_kv);
    setting s = {.block = {.b = c->b,
                     .n = c->n,
                     .g = c->g,
                     .d = c->d,
                     .s_q = c->s_q,
                     .s_kv = c->s_kv,
                     .q_offset = c->q_offset,
                     .kv_offset = c->kv_offset,
                     .scale = 0.5f / sqrtf((float)c->d),
                     .causal = c->causal,
                     .window = c->window,
                     .dropout = {c->dropout, 99, 4, LOOM_DROPOUT_ATTENTION},
                     .sample = samples,
                     .head_offset = 6}};
    loom_attention_block *block = &s.block;
    if (c->fused) {
        block->q_stride = block->k_stride = block->v_stride = (c->n + 2 * c->g) * c->d;
        block->q_group_stride = block->kv_group_stride = (per_group + 2) * c->d;
        s.at_k = per_group * c->d;
        s.at_v = s.at_k + c->d;
        s.inputs = (size_t)(rows * block->q_stride);
    } else {
        block->q_stride = c->n * c->d + 3;
        block->k_stride = c->g * c->d + 1;
        block->v_stride = c->g * c->d;
        block->q_group_stride = per_group * c->d;
        block->kv_group_stride = c->d;
        s.at_k = rows * block->q_stride;
        s.at_v = s.at_k + rows * block->k_stride;
        s.inputs = (size_t)(s.at_v + rows * block->v_stride);
    }
    if (c->document) {
        s.documents = room_for((size_t)(c->b * c->s_q) * sizeof(int32_t));
        for (int64_t j = 0; j < c->b; j++)
            for (int64_t t = 0; t < c->s_q; t++)
                s.documents[j * c->s_q + t] = (int32_t)((c->q_offset + t + j) / c->document * c->document - j);
        block->document_start = s.documents;
    }
    s.out_stride = c->n * c->d + 2;
    s.queries = (size_t)(c->b * c->n * c->s_q);
    s.outputs = (size_t)(c->b * c->s_q * s.out_stride);
    s.qkv = numbers(s.inputs, 1);
    s.d_out = numbers(s.outputs, 2);
    return s;
}

static void setting_free(setting *s) {
    free(s->documents);
    free(s->qkv);
    free(s->d_out);
}

static double attention_tolerance(const setting *s, double largest) {
    return 8 * tolerance_for(s->block.d + s->block.s_kv, largest);
}

/* Forward and backward: out, log_sum_exp, delta, gradient of everything in qkv. */
typedef struct result {
    float *out, *log_sum_exp, *delta, *d_qkv;
} result;

static result run(const setting *s, const loom_kernels *k, loom_team *team, bool accumulate) {
    const loom_attention_block *block = &s->block;
    result r = {numbers(s->outputs, 5), numbers(s->queries, 6), numbers(s->queries, 7), numbers(s->inputs, 8)};
    k->attention(team, block, s->qkv, s->qkv + s->at_k, s->qkv + s->at_v, r.out, s->out_stride, r.log_sum_exp);
    k->attention_delta(team, block, r.out, s->d_out, s->out_stride, r.delta);
    k->attention_block_backward(team, block, s->qkv, s->qkv + s->at_k, s->qkv + s->at_v, s->d_out, s->out_stride,
        r.log_sum_exp, r.delta, accumulate, accumulate, r.d_qkv, r.d_qkv + s->at_k, r.d_qkv + s->at_v);
    return r;
}

static void result_free(result *r) {
    free(r->out);
    free(r->log_sum_exp);
    free(r->delta);
    free(r->d_qkv);
}

static void every_table_is_near_the_double_reference(void **state) {
    (void)state;
    for (int i = 0; i < CASES; i++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            setting s = setting_make(&cases[i]);
            const loom_attention_block *block = &s.block;
            result prefill = {
                numbers(s.outputs, 5), numbers(s.queries, 6), numbers(s.queries, 7), numbers(s.inputs, 8)};
            double *qkv = widened(s.qkv, s.inputs), *d_out = widened(s.d_out, s.outputs);
            double *out = widened(prefill.out, s.outputs), *log_sum_exp = widened(prefill.log_sum_exp, s.queries);
            double *delta = widened(prefill.delta, s.queries), *d_qkv = widened(prefill.d_qkv, s.inputs);
            loom__ref64_attention(NULL, block, qkv, qkv + s.at_k, qkv + s.at_v, out, s.out_stride, log_sum_exp);
            loom__ref64_attention_delta(NULL, block, out, d_out, s.out_stride, delta);
            loom__ref64_attention_block_backward(NULL, block, qkv, qkv + s.at_k, qkv + s.at_v, d_out, s.out_stride,
                log_sum_exp, delta, accumulate, accumulate, d_qkv, d_qkv + s.at_k, d_qkv + s.at_v);
            for (int t = 0; t < TABLES; t++) {
                const loom_kernels *table = loom_kernels_find(table_names[t]);
                if (!table)
                    continue;
                result r = run(&s, table, NULL, accumulate);
                char what[200];
                snprintf(what, sizeof what, "%s of %s", cases[i].name, table->name);
                assert_close(what, r.out, out, s.outputs, attention_tolerance(&s, largest_of(out, s.outputs)));
                assert_close(what, r.log_sum_exp, log_sum_exp, s.queries,
                    attention_tolerance(&s, largest_of(log_sum_exp, s.queries)));
                assert_close(what, r.d_qkv, d_qkv, s.inputs, attention_tolerance(&s, largest_of(d_qkv, s.inputs)));
                result_free(&r);
            }
            result_free(&prefill);
            free(qkv);
            free(d_out);
            free(out);
            free(log_sum_exp);
            free(delta);
            free(d_qkv);
            setting_free(&s);
        }
}

static void assert_same(const char *what, const setting *s, const result *x, const result *y) {
    if (memcmp(x->out, y->out, s->outputs * sizeof(float)) != 0 ||
        memcmp(x->log_sum_exp, y->log_sum_exp, s->queries * sizeof(float)) != 0 ||
        memcmp(x->delta, y->delta, s->queries * sizeof(float)) != 0 ||
        memcmp(x->d_qkv, y->d_qkv, s->inputs * sizeof(float)) != 0)
        fail_msg("%s: other bits", what);
}

static void any_team_gives_the_same_bits(void **state) {
    (void)state;
    for (int i = 0; i < CASES; i++) {
        setting s = setting_make(&cases[i]);
        result alone = run(&s, loom_kernels_fast(), NULL, i % 2);
        for (int t = 1; t < TEAMS; t++) {
            result together = run(&s, loom_kernels_fast(), teams[t], i % 2);
            assert_same(cases[i].name, &s, &alone, &together);
            result_free(&together);
        }
        result_free(&alone);
        setting_free(&s);
    }
}

static void avx2_and_avx512_give_the_same_bits(void **state) {
    (void)state;
    const loom_kernels *narrow = loom_kernels_find("avx2"), *wide = loom_kernels_find("avx512");
    if (!narrow || !wide)
        skip();
    for (int i = 0; i < CASES; i++) {
        setting s = setting_make(&cases[i]);
        result x = run(&s, narrow, NULL, false), y = run(&s, wide, NULL, false);
        assert_same(cases[i].name, &s, &x, &y);
        result_free(&x);
        result_free(&y);
        setting_free(&s);
    }
}

/* The block of keys [first, first + count) of a setting. */
static loom_attention_block keys_of(const setting *s, int64_t first, int64_t count) {
    loom_attention_block block = s->block;
    block.kv_offset += first;
    block.s_kv = count;
    return block;
}

/* Ring attention in small: three blocks of keys, one after the other or each on its own and then merged, give what one
 * block gives; so do the gradients, added up. */
static void blocks_of_keys_make_the_whole(void **state) {
    (void)state;
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *k = loom_kernels_find(table_names[t]);
        for (int i = 0; k && i < CASES; i++) {
            setting s = setting_make(&cases[i]);
            result whole = run(&s, k, teams[2], false);
            int64_t cuts[4] = {0, s.block.s_kv / 5, s.block.s_kv / 5 * 3, s.block.s_kv}, n_d = s.block.d;
            size_t accumulators = s.queries * (size_t)n_d;
            float *accumulator[2], *maximum[2], *sum[2];
            for (int way = 0; way < 2; way++) {
                accumulator[way] = numbers(accumulators, 1);
                maximum[way] = numbers(s.queries, 2);
                sum[way] = numbers(s.queries, 3);
            }
            for (int way = 0; way < 2; way++) {
                k->attention_begin(NULL, &s.block, accumulator[0], maximum[0], sum[0]);
                for (int c = 0; c < 3; c++) {
                    loom_attention_block block = keys_of(&s, cuts[c], cuts[c + 1] - cuts[c]);
                    const float *keys = s.qkv + s.at_k + cuts[c] * block.b * block.k_stride;
                    const float *values = s.qkv + s.at_v + cuts[c] * block.b * block.v_stride;
                    if (way == 1)
                        k->attention_begin(NULL, &block, accumulator[1], maximum[1], sum[1]);
                    k->attention_block(NULL, &block, s.qkv, keys, values, accumulator[way], maximum[way], sum[way]);
                    if (way == 1)
                        k->attention_merge(
                            NULL, &block, accumulator[1], maximum[1], sum[1], accumulator[0], maximum[0], sum[0]);
                }
                float *out = numbers(s.outputs, 5), *log_sum_exp = numbers(s.queries, 6);
                k->attention_finish(NULL, &s.block, accumulator[0], maximum[0], sum[0], out, s.out_stride, log_sum_exp);
                double *expected = widened(whole.out, s.outputs), *expected_lse = widened(whole.log_sum_exp, s.queries);
                assert_close(cases[i].name, out, expected, s.outputs, attention_tolerance(&s, 2));
                assert_close(cases[i].name, log_sum_exp, expected_lse, s.queries,
                    attention_tolerance(&s, largest_of(expected_lse, s.queries)));
                free(out);
                free(log_sum_exp);
                free(expected);
                free(expected_lse);
            }
            float *d_qkv = numbers(s.inputs, 8);
            for (int c = 0; c < 3; c++) {
                loom_attention_block block = keys_of(&s, cuts[c], cuts[c + 1] - cuts[c]);
                int64_t at_k = s.at_k + cuts[c] * block.b * block.k_stride;
                int64_t at_v = s.at_v + cuts[c] * block.b * block.v_stride;
                k->attention_block_backward(NULL, &block, s.qkv, s.qkv + at_k, s.qkv + at_v, s.d_out, s.out_stride,
                    whole.log_sum_exp, whole.delta, c > 0, false, d_qkv, d_qkv + at_k, d_qkv + at_v);
            }
            double *expected = widened(whole.d_qkv, s.inputs);
            assert_close(
                cases[i].name, d_qkv, expected, s.inputs, attention_tolerance(&s, largest_of(expected, s.inputs)));
            free(expected);
            free(d_qkv);
            for (int way = 0; way < 2; way++) {
                free(accumulator[way]);
                free(maximum[way]);
                free(sum[way]);
            }
            result_free(&whole);
            setting_free(&s);
        }
    }
}

/* "keys after the queries": queries 10 … 24 see nothing, later ones do. */
static void a_query_that_sees_no_key_gives_zero_and_minus_infinity(void **state) {
    (void)state;
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *k = loom_kernels_find(table_names[t]);
        if (!k)
            continue;
        setting s = setting_make(&cases[10]);
        result r = run(&s, k, NULL, false);
        for (int64_t head = 0; head < 2; head++)
            for (int64_t row = 0; row < s.block.s_q; row++) {
                bool blind = row < 15;
                assert_int_equal(r.log_sum_exp[head * s.block.s_q + row] == -INFINITY, blind);
                for (int64_t c = 0; blind && c < s.block.d; c++) {
                    assert_true(r.out[row * s.out_stride + head * s.block.d + c] == 0);
                    assert_true(r.d_qkv[row * s.block.q_stride + head * s.block.d + c] == 0);
                }
            }
        result_free(&r);
        setting_free(&s);
    }
}

static void nan_in_a_query_key_or_value_shows(void **state) {
    (void)state;
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *k = loom_kernels_find(table_names[t]);
        for (int which = 0; k && which < 3; which++) {
            setting s = setting_make(&cases[1]);
            s.qkv[(which == 0 ? 0 : which == 1 ? s.at_k : s.at_v) + 2] = NAN;
            result r = run(&s, k, NULL, false);
            bool shows = false, shows_back = false;
            for (size_t i = 0; i < s.outputs; i++)
                shows = shows || isnan(r.out[i]);
            for (size_t i = 0; i < s.inputs; i++)
                shows_back = shows_back || isnan(r.d_qkv[i]);
            assert_true(shows && shows_back);
            result_free(&r);
            setting_free(&s);
        }
    }
}

/* With v = 1 for one key and 0 for the others, and equal scores, the output shows which probabilities were kept. */
static void dropout_masks_are_the_same_bits_in_every_table(void **state) {
    (void)state;
    enum { S = 70, N = 2 };
    loom_attention_block block = {.b = 1,
        .n = N,
        .g = 1,
        .d = S,
        .s_q = S,
        .s_kv = S,
        .q_offset = 5,
        .kv_offset = 2,
        .q_stride = N * S,
        .k_stride = S,
        .v_stride = S,
        .q_group_stride = N * S,
        .kv_group_stride = S,
        .scale = 1,
        .dropout = {0.3f, 17, 2, LOOM_DROPOUT_ATTENTION},
        .sample = samples,
        .head_offset = 4};
    float *zeros = calloc(S * N * S, sizeof(float)), *one_hot = calloc(S * S, sizeof(float)), log_sum_exp[N * S];
    assert_non_null(zeros);
    assert_non_null(one_hot);
    for (int i = 0; i < S; i++)
        one_hot[i * S + i] = 1;
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *k = loom_kernels_find(table_names[t]);
        if (!k)
            continue;
        float *out = numbers(S * N * S, 1);
        int kept = 0;
        k->attention(teams[2], &block, zeros, zeros, one_hot, out, N * S, log_sum_exp);
        for (int row = 0; row < S; row++)
            for (int head = 0; head < N; head++) {
                loom__dropout_row stream =
                    loom__dropout_row_make(17, 2, LOOM_DROPOUT_ATTENTION, samples[0], 5 + row, 4 + head);
                for (int key = 0; key < S; key++) {
                    loom__philox words = loom__dropout_words(&stream, (uint32_t)(key + 2) / 4);
                    bool expected = words.word[(key + 2) % 4] >= loom__dropout_threshold(0.3f);
                    assert_int_equal(out[(row * N + head) * S + key] != 0, expected);
                    kept += expected;
                }
            }
        /* 9800 draws with probability 0.7: five standard deviations are 227. */
        assert_in_range(kept, 6860 - 227, 6860 + 227);
        free(out);
    }
    free(zeros);
    free(one_hot);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_table_is_near_the_double_reference),
        cmocka_unit_test(any_team_gives_the_same_bits),
        cmocka_unit_test(avx2_and_avx512_give_the_same_bits),
        cmocka_unit_test(blocks_of_keys_make_the_whole),
        cmocka_unit_test(a_query_that_sees_no_key_gives_zero_and_minus_infinity),
        cmocka_unit_test(nan_in_a_query_key_or_value_shows),
        cmocka_unit_test(dropout_masks_are_the_same_bits_in_every_table),
    };
    return cmocka_run_group_tests(tests, start_teams, stop_teams);
}
