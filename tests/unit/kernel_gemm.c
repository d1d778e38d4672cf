/* The matrix product of every table: all transpositions, strides, alpha, accumulation, empty sizes, teams. */
#include "kernel_support.h"

typedef struct product_case {
    int64_t m, n, k;
    bool accumulate;
    float alpha;
} product_case;

/* Sizes around the tile's sides (128, 512), sizes that divide by nothing, the tall and flat shapes of weight gradients.
 */
static const product_case cases[] = {{1, 1, 1, false, 1}, {3, 5, 7, false, 1}, {17, 33, 9, true, 0.5f},
    {130, 129, 20, false, 2}, {300, 40, 33, true, 1}, {1, 700, 3, false, 1}, {513, 1, 5, false, 1},
    {96, 288, 301, true, 1}, {0, 4, 4, false, 1}, {4, 0, 4, false, 1}, {5, 6, 0, false, 1}, {5, 6, 0, true, 1}};

enum { PADDING = 3 }; /* leading dimensions are larger than the rows */

/* The result of another team, which goes on as `alone` where there is none yet; else it is freed. */
static float *must_be_the_same(float *alone, float *found, size_t count) {
    if (!alone)
        return found;
    assert_memory_equal(alone, found, count * sizeof *found);
    free(found);
    return alone;
}

static void product_is_near_the_double_reference(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int transpositions = 0; transpositions < 4; transpositions++) {
            product_case p = cases[i];
            bool trans_a = transpositions & 1, trans_b = transpositions & 2;
            int64_t lda = (trans_a ? p.m : p.k) + PADDING, ldb = (trans_b ? p.k : p.n) + PADDING, ldc = p.n + PADDING;
            size_t a_count = (size_t)((trans_a ? p.k : p.m) * lda), b_count = (size_t)((trans_b ? p.n : p.k) * ldb);
            size_t c_count = (size_t)(p.m * ldc);
            float *a = numbers(a_count, 1), *b = numbers(b_count, 2), *c = numbers(c_count, 3);
            double *a64 = widened(a, a_count), *b64 = widened(b, b_count), *c64 = widened(c, c_count);
            loom__ref64_gemm(
                NULL, trans_a, trans_b, p.m, p.n, p.k, (double)p.alpha, a64, lda, b64, ldb, p.accumulate, c64, ldc);
            for (int t = 0; t < TABLES; t++) {
                const loom_kernels *table = loom_kernels_find(table_names[t]);
                float *alone = NULL;
                for (int team = 0; table && team < TEAMS; team++) {
                    float *found = room_for(c_count * sizeof *found);
                    memcpy(found, c, c_count * sizeof *c);
                    table->gemm(teams[team], trans_a, trans_b, p.m, p.n, p.k, p.alpha, a, lda, b, ldb, p.accumulate,
                        found, ldc);
                    /* Products of numbers up to 2: k roundings of partial sums, which stay below 4 sqrt(k). */
                    assert_close(table->name, found, c64, c_count, tolerance_for(p.k, largest_of(c64, c_count)));
                    alone = must_be_the_same(alone, found, c_count);
                }
                free(alone);
            }
            free(a);
            free(b);
            free(c);
            free(a64);
            free(b64);
            free(c64);
        }
}

/* Large enough for many tiles and for the provider's own threading, were it on. */
static void any_team_gives_the_same_bits(void **state) {
    (void)state;
    const int64_t shapes[][3] = {{600, 520, 70}, {256, 768, 512}};
    for (int i = 0; i < 2; i++) {
        int64_t m = shapes[i][0], n = shapes[i][1], k = shapes[i][2];
        float *a = numbers((size_t)(m * k), 1), *b = numbers((size_t)(n * k), 2);
        float *alone = numbers((size_t)(m * n), 3), *together = numbers((size_t)(m * n), 3);
        loom_kernels_fast()->gemm(NULL, true, false, m, n, k, 1, a, m, b, n, false, alone, n);
        for (int t = 1; t < TEAMS; t++) {
            fill(together, (size_t)(m * n), 4);
            loom_kernels_fast()->gemm(teams[t], true, false, m, n, k, 1, a, m, b, n, false, together, n);
            assert_memory_equal(alone, together, (size_t)(m * n) * sizeof(float));
        }
        free(a);
        free(b);
        free(alone);
        free(together);
    }
}

static void output_that_is_not_accumulated_is_never_read(void **state) {
    (void)state;
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *table = loom_kernels_find(table_names[t]);
        if (!table)
            continue;
        for (int64_t k = 0; k < 3; k++) {
            float *a = numbers(100, 1), *b = numbers(100, 2), c[400];
            for (int i = 0; i < 400; i++)
                c[i] = NAN;
            table->gemm(NULL, false, false, 20, 20, k, 1, a, 5, b, 20, false, c, 20);
            for (int i = 0; i < 400; i++)
                assert_true(k == 0 ? c[i] == 0 : isfinite(c[i]));
            free(a);
            free(b);
        }
    }
}

static void nan_in_a_factor_shows_in_its_row(void **state) {
    (void)state;
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *table = loom_kernels_find(table_names[t]);
        if (!table)
            continue;
        float *a = numbers(400, 1), *b = numbers(400, 2), *c = numbers(400, 3);
        a[5 * 20 + 3] = NAN;
        table->gemm(NULL, false, false, 20, 20, 20, 1, a, 20, b, 20, false, c, 20);
        for (int i = 0; i < 400; i++)
            assert_int_equal(isnan(c[i]) != 0, i / 20 == 5);
        free(a);
        free(b);
        free(c);
    }
}

/* Small, large, empty and deep products of one group, in every transposition. */
static void grouped_products_are_near_the_double_reference(void **state) {
    enum { PRODUCTS = 6, N = 150, FEW = 3, MOST = 700 };
    static const int64_t rows[PRODUCTS] = {1, 0, MOST, 40, 0, 130};
    (void)state;
    /* How many rows a product has is its m, or its k as in the gradients of weights. */
    for (int choice = 0; choice < 8; choice++) {
        bool trans_a = choice & 1, trans_b = choice & 2, deep = choice & 4;
        int64_t lda = MOST + PADDING, ldb = MOST + PADDING, ldc = N + PADDING;
        size_t each = (size_t)(MOST * lda), c_each = (size_t)(MOST * ldc), c_count = PRODUCTS * c_each;
        float *a = numbers(PRODUCTS * each, 1), *b = numbers(PRODUCTS * each, 2), *c = numbers(c_count, 3);
        double *a64 = widened(a, PRODUCTS * each), *b64 = widened(b, PRODUCTS * each), *c64 = widened(c, c_count);
        loom_product products[PRODUCTS], products64[PRODUCTS];
        for (int i = 0; i < PRODUCTS; i++) {
            products[i] = (loom_product){deep ? FEW : rows[i], N, deep ? rows[i] : FEW, a + (size_t)i * each,
                b + (size_t)i * each, NULL, i % 2 == 1};
            products64[i] = products[i];
            products64[i].a = a64 + (size_t)i * each;
            products64[i].b = b64 + (size_t)i * each;
            products64[i].c = c64 + (size_t)i * c_each;
        }
        loom__ref64_gemm_grouped(NULL, trans_a, trans_b, PRODUCTS, products64, lda, ldb, ldc);
        for (int t = 0; t < TABLES; t++) {
            const loom_kernels *table = loom_kernels_find(table_names[t]);
            float *alone = NULL;
            for (int team = 0; table && team < TEAMS; team++) {
                float *found = room_for(c_count * sizeof *found);
                memcpy(found, c, c_count * sizeof *c);
                for (int i = 0; i < PRODUCTS; i++)
                    products[i].c = found + (size_t)i * c_each;
                table->gemm_grouped(teams[team], trans_a, trans_b, PRODUCTS, products, lda, ldb, ldc);
                assert_close(table->name, found, c64, c_count, tolerance_for(MOST, largest_of(c64, c_count)));
                alone = must_be_the_same(alone, found, c_count);
            }
            free(alone);
        }
        free(a);
        free(b);
        free(c);
        free(a64);
        free(b64);
        free(c64);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(product_is_near_the_double_reference),
        cmocka_unit_test(grouped_products_are_near_the_double_reference),
        cmocka_unit_test(any_team_gives_the_same_bits),
        cmocka_unit_test(output_that_is_not_accumulated_is_never_read),
        cmocka_unit_test(nan_in_a_factor_shows_in_its_row),
    };
    return cmocka_run_group_tests(tests, start_teams, stop_teams);
}
