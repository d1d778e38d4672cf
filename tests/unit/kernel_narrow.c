/* 16-bit elements: conversions over every bit pattern, the product by widened panels and by the provider's own bf16,
 * and attention; each table of this machine, each dtype. (The kernels of rows are in kernel_tables.c.) */
#include "kernel_support.h"

typedef struct kind {
    const char *name;
    loom_dtype dtype;
    float half_ulp; /* the largest relative error of rounding a normal number */
    uint16_t (*round)(float x);
    float (*widen)(uint16_t x);
} kind;

static uint16_t round_bf16(float x) {
    return loom_f32_to_bf16(x);
}

static float widen_bf16(uint16_t x) {
    return loom_bf16_to_f32(x);
}

static const kind kinds[] = {{"bf16", LOOM_BF16, 0x1p-8f, round_bf16, widen_bf16},
    {"f16", LOOM_F16, 0x1p-11f, loom_f32_to_f16, loom_f16_to_f32}};
enum { KINDS = 2 };

static const loom_kernels16 *kernels_of(const loom_kernels *table, const kind *of) {
    return of->dtype == LOOM_BF16 ? table->bf16 : table->f16;
}

/* Rounds x in place, so that both forms hold the same numbers. Caller frees. */
static uint16_t *narrow_form(const kind *of, float *x, size_t count) {
    uint16_t *made = room_for(count * sizeof *made);
    for (size_t i = 0; i < count; i++) {
        made[i] = of->round(x[i]);
        x[i] = of->widen(made[i]);
    }
    return made;
}

static bool same(float x, float y) {
    return memcmp(&x, &y, sizeof x) == 0 || (isnan(x) && isnan(y));
}

static void every_bit_pattern_is_widened_exactly(void **state) {
    (void)state;
    enum { PATTERNS = 65536 };
    uint16_t *x = room_for(PATTERNS * sizeof *x);
    float *y = room_for(PATTERNS * sizeof *y);
    for (int i = 0; i < PATTERNS; i++)
        x[i] = (uint16_t)i;
    for (int t = 0; t < TABLES; t++)
        for (int i = 0; i < KINDS && loom_kernels_find(table_names[t]); i++) {
            kernels_of(loom_kernels_find(table_names[t]), &kinds[i])->widen(teams[2], PATTERNS, x, y);
            for (int bits = 0; bits < PATTERNS; bits++)
                assert_true(same(y[bits], kinds[i].widen(x[bits])));
        }
    free(x);
    free(y);
}

/* All upper halves, each with lower halves below, at and above the middle between two numbers of either dtype: ties go
 * to the even one, large ones to infinity, subnormal ones to their multiples, NaN stays. */
static void every_rounding_is_to_nearest_even(void **state) {
    (void)state;
    static const uint32_t lower[] = {
        0, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0xffff};
    enum { LOWER = sizeof lower / sizeof *lower, COUNT = 65536 * LOWER + 5 };
    float *x = room_for(COUNT * sizeof *x);
    uint16_t *y = room_for(COUNT * sizeof *y);
    for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t bits = i / LOWER << 16 | lower[i % LOWER];
        memcpy(&x[i], &bits, sizeof bits);
    }
    for (int t = 0; t < TABLES; t++)
        for (int i = 0; i < KINDS && loom_kernels_find(table_names[t]); i++) {
            kernels_of(loom_kernels_find(table_names[t]), &kinds[i])->narrow(teams[2], COUNT, x, y);
            for (int e = 0; e < COUNT; e++)
                if (!same(kinds[i].widen(y[e]), kinds[i].widen(kinds[i].round(x[e]))))
                    fail_msg("%s of %s: %.9g became %.9g, expected %.9g", kinds[i].name, table_names[t], (double)x[e],
                        (double)kinds[i].widen(y[e]), (double)kinds[i].widen(kinds[i].round(x[e])));
        }
    free(x);
    free(y);
}

static void nonfinite_values_are_found(void **state) {
    (void)state;
    enum { COUNT = 20000 };
    uint16_t *x = room_for(COUNT * sizeof *x);
    for (int t = 0; t < TABLES; t++)
        for (int i = 0; i < KINDS && loom_kernels_find(table_names[t]); i++) {
            const loom_kernels16 *kernels = kernels_of(loom_kernels_find(table_names[t]), &kinds[i]);
            static const float bad[] = {NAN, INFINITY, -INFINITY};
            for (int e = 0; e < COUNT; e++)
                x[e] = kinds[i].round(60000.0f);
            assert_false(kernels->has_nonfinite(teams[2], COUNT, x));
            for (int k = 0; k < 3; k++) {
                x[COUNT - 1] = kinds[i].round(bad[k]);
                assert_true(kernels->has_nonfinite(teams[2], COUNT, x));
                assert_false(kernels->has_nonfinite(teams[2], COUNT - 1, x));
            }
        }
    free(x);
}

/* ---- the product ---- */

typedef struct product_case {
    int64_t m, n, k;
    bool accumulate;
    float alpha;
} product_case;

/* Around the sides of the tiles and the depth of the panels (512). */
static const product_case cases[] = {{1, 1, 1, false, 1}, {3, 5, 7, true, 1}, {17, 33, 9, true, 0.5f},
    {130, 129, 20, false, 2}, {1, 700, 3, false, 1}, {513, 1, 5, false, 1}, {40, 30, 513, true, 1},
    {20, 24, 1200, false, 0.5f}, {0, 4, 4, false, 1}, {5, 6, 0, false, 1}, {5, 6, 0, true, 1}};

enum { PADDING = 3 };

typedef struct product_arrays {
    uint16_t *a, *b, *c;
    float *c_wide;
    double *expected;
    size_t c_count;
    int64_t lda, ldb, ldc;
    double sum_tolerance;
} product_arrays;

static product_arrays product_make(const kind *of, const product_case *p, bool trans_a, bool trans_b) {
    product_arrays x = {
        .lda = (trans_a ? p->m : p->k) + PADDING, .ldb = (trans_b ? p->k : p->n) + PADDING, .ldc = p->n + PADDING};
    size_t a_count = (size_t)((trans_a ? p->k : p->m) * x.lda), b_count = (size_t)((trans_b ? p->n : p->k) * x.ldb);
    x.c_count = (size_t)(p->m * x.ldc);
    float *a = numbers(a_count, 1), *b = numbers(b_count, 2);
    x.c_wide = numbers(x.c_count, 3);
    x.a = narrow_form(of, a, a_count);
    x.b = narrow_form(of, b, b_count);
    x.c = narrow_form(of, x.c_wide, x.c_count);
    double *a64 = widened(a, a_count), *b64 = widened(b, b_count);
    x.expected = widened(x.c_wide, x.c_count);
    loom__ref64_gemm(NULL, trans_a, trans_b, p->m, p->n, p->k, (double)p->alpha, a64, x.lda, b64, x.ldb, p->accumulate,
        x.expected, x.ldc);
    x.sum_tolerance = tolerance_for(p->k, largest_of(x.expected, x.c_count));
    free(a);
    free(b);
    free(a64);
    free(b64);
    return x;
}

static void product_free(product_arrays *x) {
    free(x->a);
    free(x->b);
    free(x->c);
    free(x->c_wide);
    free(x->expected);
}

/* Both outputs of one table and dtype, for every team; the bits are those of the first team. */
static void check_product(const loom_kernels *table, const kind *of, const product_case *p, int transpositions) {
    bool trans_a = transpositions & 1, trans_b = transpositions & 2;
    product_arrays x = product_make(of, p, trans_a, trans_b);
    const loom_kernels16 *kernels = kernels_of(table, of);
    uint16_t *alone = room_for(x.c_count * sizeof *alone), *c = room_for(x.c_count * sizeof *c);
    float *alone_wide = room_for(x.c_count * sizeof *alone_wide), *wide = room_for(x.c_count * sizeof *wide);
    for (int team = 0; team < TEAMS; team++) {
        memcpy(c, x.c, x.c_count * sizeof *c);
        memcpy(wide, x.c_wide, x.c_count * sizeof *wide);
        kernels->gemm(
            teams[team], trans_a, trans_b, p->m, p->n, p->k, p->alpha, x.a, x.lda, x.b, x.ldb, p->accumulate, c, x.ldc);
        kernels->gemm_f32(teams[team], trans_a, trans_b, p->m, p->n, p->k, p->alpha, x.a, x.lda, x.b, x.ldb,
            p->accumulate, wide, x.ldc);
        assert_close(table->name, wide, x.expected, x.c_count, x.sum_tolerance);
        for (size_t i = 0; i < x.c_count; i++) {
            float found = of->widen(c[i]);
            assert_close(table->name, &found, &x.expected[i], 1,
                fabs(x.expected[i]) * (double)of->half_ulp + 2 * x.sum_tolerance);
        }
        if (team > 0) {
            assert_memory_equal(c, alone, x.c_count * sizeof *c);
            assert_memory_equal(wide, alone_wide, x.c_count * sizeof *wide);
        }
        memcpy(alone, c, x.c_count * sizeof *c);
        memcpy(alone_wide, wide, x.c_count * sizeof *wide);
    }
    free(alone);
    free(c);
    free(alone_wide);
    free(wide);
    product_free(&x);
}

static void product_is_near_the_double_reference_for_any_team(void **state) {
    (void)state;
    for (int t = 0; t < TABLES; t++)
        for (int i = 0; i < KINDS && loom_kernels_find(table_names[t]); i++)
            for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
                for (int transpositions = 0; transpositions < 4; transpositions++)
                    check_product(loom_kernels_find(table_names[t]), &kinds[i], &cases[c], transpositions);
}

/* Unlike products of one group, an empty one among them. The bits are those of the first team. */
static void check_group(const loom_kernels *table, const kind *of, bool trans_a, bool trans_b) {
    enum { PRODUCTS = 4, SIDE = 160, EACH = SIDE * SIDE, ALL = PRODUCTS * EACH };
    static const int64_t rows[PRODUCTS] = {SIDE, 0, 7, 65}, depths[PRODUCTS] = {9, SIDE, 0, SIDE};
    const loom_kernels16 *kernels = kernels_of(table, of);
    float *a = numbers(ALL, 1), *b = numbers(ALL, 2), *c = numbers(ALL, 3), *wide = room_for(ALL * sizeof *wide);
    uint16_t *a16 = narrow_form(of, a, ALL), *b16 = narrow_form(of, b, ALL), *c16 = narrow_form(of, c, ALL);
    uint16_t *narrow = room_for(ALL * sizeof *narrow), *first = NULL;
    double *a64 = widened(a, ALL), *b64 = widened(b, ALL), *expected = widened(c, ALL);
    loom_product exact[PRODUCTS], found[PRODUCTS], found_wide[PRODUCTS];
    for (int i = 0; i < PRODUCTS; i++) {
        exact[i] =
            (loom_product){rows[i], SIDE, depths[i], a64 + i * EACH, b64 + i * EACH, expected + i * EACH, i == 0};
        found[i] = found_wide[i] = exact[i];
        found[i].a = found_wide[i].a = a16 + i * EACH;
        found[i].b = found_wide[i].b = b16 + i * EACH;
        found[i].c = narrow + i * EACH;
        found_wide[i].c = wide + i * EACH;
    }
    loom__ref64_gemm_grouped(NULL, trans_a, trans_b, PRODUCTS, exact, SIDE, SIDE, SIDE);
    const double tolerance = tolerance_for(SIDE, largest_of(expected, ALL));
    for (int team = 0; team < TEAMS; team++) {
        memcpy(narrow, c16, ALL * sizeof *narrow);
        memcpy(wide, c, ALL * sizeof *wide);
        kernels->gemm_grouped(teams[team], trans_a, trans_b, PRODUCTS, found, SIDE, SIDE, SIDE);
        kernels->gemm_grouped_f32(teams[team], trans_a, trans_b, PRODUCTS, found_wide, SIDE, SIDE, SIDE);
        assert_close(table->name, wide, expected, ALL, tolerance);
        for (size_t i = 0; i < ALL; i++) {
            float value = of->widen(narrow[i]);
            assert_close(
                table->name, &value, &expected[i], 1, fabs(expected[i]) * (double)of->half_ulp + 2 * tolerance);
        }
        if (first)
            assert_memory_equal(narrow, first, ALL * sizeof *narrow);
        else
            memcpy(first = room_for(ALL * sizeof *first), narrow, ALL * sizeof *first);
    }
    void *const made[] = {a, b, c, wide, a16, b16, c16, narrow, first, a64, b64, expected};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        free(made[i]);
}

static void grouped_products_are_near_the_double_reference_for_any_team(void **state) {
    (void)state;
    for (int t = 0; t < TABLES; t++)
        for (int i = 0; i < KINDS && loom_kernels_find(table_names[t]); i++)
            for (int transpositions = 0; transpositions < 4; transpositions++)
                check_group(
                    loom_kernels_find(table_names[t]), &kinds[i], transpositions & 1, (transpositions & 2) != 0);
}

/* 1 + 4096 times 2^-12 is 2; in bf16 the sum would stay at 1 from the first step on, in fp16 too. */
static void sums_are_kept_in_fp32(void **state) {
    (void)state;
    enum { K = 4097 };
    for (int t = 0; t < TABLES; t++)
        for (int i = 0; i < KINDS && loom_kernels_find(table_names[t]); i++) {
            const loom_kernels16 *kernels = kernels_of(loom_kernels_find(table_names[t]), &kinds[i]);
            uint16_t a[K], b[K], c = 0;
            float wide = 1;
            for (int k = 0; k < K; k++) {
                a[k] = kinds[i].round(k ? 0x1p-6f : 1);
                b[k] = a[k];
            }
            kernels->gemm(NULL, false, true, 1, 1, K, 1, a, K, b, K, false, &c, 1);
            kernels->gemm_f32(NULL, false, true, 1, 1, K - 1, 1, a + 1, K, b + 1, K, true, &wide, 1);
            assert_true(kinds[i].widen(c) == 2 && wide == 2);
        }
}

static void output_that_is_not_accumulated_is_never_read(void **state) {
    (void)state;
    for (int t = 0; t < TABLES; t++)
        for (int i = 0; i < KINDS && loom_kernels_find(table_names[t]); i++) {
            const loom_kernels16 *kernels = kernels_of(loom_kernels_find(table_names[t]), &kinds[i]);
            float *a = numbers(400, 1), wide[400];
            uint16_t *x = narrow_form(&kinds[i], a, 400), c[400];
            for (int e = 0; e < 400; e++) {
                wide[e] = NAN;
                c[e] = kinds[i].round(NAN);
            }
            kernels->gemm(NULL, false, false, 20, 20, 20, 1, x, 20, x, 20, false, c, 20);
            kernels->gemm_f32(NULL, false, false, 20, 20, 20, 1, x, 20, x, 20, false, wide, 20);
            for (int e = 0; e < 400; e++)
                assert_true(isfinite(wide[e]) && isfinite(kinds[i].widen(c[e])));
            x[5 * 20 + 3] = kinds[i].round(NAN);
            kernels->gemm(NULL, false, false, 20, 20, 20, 1, x, 20, x, 20, false, c, 20);
            for (int e = 0; e < 20; e++)
                assert_true(isnan(kinds[i].widen(c[5 * 20 + e])));
            free(a);
            free(x);
        }
}

/* ---- attention ---- */

typedef struct attention_case {
    int64_t b, n, g, d, s, document, window;
    bool causal;
    float dropout;
} attention_case;

static const attention_case attention_cases[] = {{1, 1, 1, 1, 1, 0, 0, true, 0}, {2, 4, 2, 16, 70, 0, 0, true, 0},
    {1, 2, 1, 80, 130, 29, 0, true, 0}, {2, 2, 2, 5, 33, 0, 9, false, 0.25f}, {1, 6, 1, 24, 65, 0, 0, true, 0.5f}};
enum { ATTENTION_CASES = sizeof attention_cases / sizeof *attention_cases, ALL = 5 };

/* What attention makes, in one form: out, its log_sum_exp, delta, d_qkv, and out by way of the running state. */
typedef struct attention_results {
    float *of[ALL];
    size_t count[ALL];
} attention_results;

typedef struct attention_problem {
    loom_attention_block block;
    int32_t *documents;
    float *qkv, *d_out;
    size_t inputs, outputs, queries;
} attention_problem;

static const int64_t samples[2] = {77, 3};

static attention_problem attention_make(const attention_case *c) {
    int64_t per_group = c->n / c->g, width = (c->n + 2 * c->g) * c->d;
    attention_problem p = {.block = {.b = c->b,
                               .n = c->n,
                               .g = c->g,
                               .d = c->d,
                               .s_q = c->s,
                               .s_kv = c->s,
                               .q_stride = width,
                               .k_stride = width,
                               .v_stride = width,
                               .q_group_stride = (per_group + 2) * c->d,
                               .kv_group_stride = (per_group + 2) * c->d,
                               .scale = 0.5f / sqrtf((float)c->d),
                               .causal = c->causal,
                               .window = c->window,
                               .dropout = {c->dropout, 99, 4, LOOM_DROPOUT_ATTENTION},
                               .sample = samples},
        .inputs = (size_t)(c->s * c->b * width),
        .outputs = (size_t)(c->s * c->b * c->n * c->d),
        .queries = (size_t)(c->b * c->n * c->s)};
    if (c->document) {
        p.documents = room_for((size_t)(c->b * c->s) * sizeof *p.documents);
        for (int64_t i = 0; i < c->b * c->s; i++)
            p.documents[i] = (int32_t)(i % c->s / c->document * c->document);
        p.block.document_start = p.documents;
    }
    p.qkv = numbers(p.inputs, 5);
    p.d_out = numbers(p.outputs, 6);
    return p;
}

static attention_results results_make(const attention_problem *p) {
    attention_results r = {.count = {p->outputs, p->queries, p->queries, p->inputs, p->outputs}};
    for (int i = 0; i < ALL; i++)
        r.of[i] = room_for(r.count[i] * sizeof(float));
    return r;
}

static void results_free(attention_results *r) {
    for (int i = 0; i < ALL; i++)
        free(r->of[i]);
}

/* The running state after two blocks of keys, at places 0, 1, 2. */
typedef struct running {
    float *accumulator, *maximum, *sum;
} running;

static running running_make(const attention_problem *p) {
    return (running){room_for(p->queries * (size_t)p->block.d * sizeof(float)), room_for(p->queries * sizeof(float)),
        room_for(p->queries * sizeof(float))};
}

static void running_free(running *r) {
    free(r->accumulator);
    free(r->maximum);
    free(r->sum);
}

#define PARTS(block, base)                                                                                             \
    (base), (base) + (block)->q_group_stride - 2 * (block)->d, (base) + (block)->q_group_stride - (block)->d

/* In fp32, on inputs that a 16-bit dtype holds; what a later step reads is rounded as it would be. */
static attention_results attend_wide(const loom_kernels *k, const kind *of, const attention_problem *p) {
    attention_results r = results_make(p);
    const loom_attention_block *block = &p->block;
    int64_t stride = block->n * block->d;
    running state = running_make(p);
    k->attention(NULL, block, PARTS(block, p->qkv), r.of[0], stride, r.of[1]);
    free(narrow_form(of, r.of[0], p->outputs));
    k->attention_delta(NULL, block, r.of[0], p->d_out, stride, r.of[2]);
    k->attention_block_backward(
        NULL, block, PARTS(block, p->qkv), p->d_out, stride, r.of[1], r.of[2], false, false, PARTS(block, r.of[3]));
    k->attention_begin(NULL, block, state.accumulator, state.maximum, state.sum);
    k->attention_block(NULL, block, PARTS(block, p->qkv), state.accumulator, state.maximum, state.sum);
    k->attention_finish(NULL, block, state.accumulator, state.maximum, state.sum, r.of[4], stride, r.of[1]);
    free(narrow_form(of, r.of[3], p->inputs));
    free(narrow_form(of, r.of[4], p->outputs));
    running_free(&state);
    return r;
}

static attention_results attend_narrow(
    const loom_kernels *table, const kind *of, loom_team *team, const attention_problem *p) {
    attention_results r = results_make(p);
    const loom_kernels16 *k = kernels_of(table, of);
    const loom_attention_block *block = &p->block;
    int64_t stride = block->n * block->d;
    running state = running_make(p);
    uint16_t *qkv = narrow_form(of, p->qkv, p->inputs), *d_out = narrow_form(of, p->d_out, p->outputs);
    uint16_t *out = room_for(p->outputs * sizeof *out), *d_qkv = room_for(p->inputs * sizeof *d_qkv);
    k->attention(team, block, PARTS(block, qkv), out, stride, r.of[1]);
    k->attention_delta(team, block, out, d_out, stride, r.of[2]);
    k->attention_block_backward(
        team, block, PARTS(block, qkv), d_out, stride, r.of[1], r.of[2], false, false, PARTS(block, d_qkv));
    for (size_t i = 0; i < p->outputs; i++)
        r.of[0][i] = of->widen(out[i]);
    table->attention_begin(team, block, state.accumulator, state.maximum, state.sum);
    k->attention_block(team, block, PARTS(block, qkv), state.accumulator, state.maximum, state.sum);
    k->attention_finish(team, block, state.accumulator, state.maximum, state.sum, out, stride, r.of[1]);
    for (size_t i = 0; i < p->outputs; i++)
        r.of[4][i] = of->widen(out[i]);
    for (size_t i = 0; i < p->inputs; i++)
        r.of[3][i] = of->widen(d_qkv[i]);
    running_free(&state);
    free(qkv);
    free(d_out);
    free(out);
    free(d_qkv);
    return r;
}

/* Widening is exact and rounding comes last, so no bit may differ. */
static void attention_gives_the_rounded_results_of_fp32(void **state) {
    (void)state;
    for (int t = 0; t < TABLES; t++)
        for (int i = 0; i < KINDS && loom_kernels_find(table_names[t]); i++)
            for (int c = 0; c < ATTENTION_CASES; c++) {
                const loom_kernels *table = loom_kernels_find(table_names[t]);
                attention_problem p = attention_make(&attention_cases[c]);
                free(narrow_form(&kinds[i], p.qkv, p.inputs));
                free(narrow_form(&kinds[i], p.d_out, p.outputs));
                attention_results expected = attend_wide(table, &kinds[i], &p);
                for (int team = 0; team < TEAMS; team++) {
                    attention_results found = attend_narrow(table, &kinds[i], teams[team], &p);
                    for (int of = 0; of < ALL; of++)
                        for (size_t e = 0; e < found.count[of]; e++)
                            if (!same(found.of[of][e], expected.of[of][e]))
                                fail_msg("%s of %s, case %d, team %d, result %d: element %zu is %.9g, expected %.9g",
                                    kinds[i].name, table->name, c, team, of, e, (double)found.of[of][e],
                                    (double)expected.of[of][e]);
                    results_free(&found);
                }
                results_free(&expected);
                free(p.documents);
                free(p.qkv);
                free(p.d_out);
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_bit_pattern_is_widened_exactly),
        cmocka_unit_test(every_rounding_is_to_nearest_even),
        cmocka_unit_test(nonfinite_values_are_found),
        cmocka_unit_test(product_is_near_the_double_reference_for_any_team),
        cmocka_unit_test(grouped_products_are_near_the_double_reference_for_any_team),
        cmocka_unit_test(sums_are_kept_in_fp32),
        cmocka_unit_test(output_that_is_not_accumulated_is_never_read),
        cmocka_unit_test(attention_gives_the_rounded_results_of_fp32),
    };
    return cmocka_run_group_tests(tests, start_teams, stop_teams);
}
