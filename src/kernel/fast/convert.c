/* Whole arrays from 16 bits to fp32 and back, for what is short or rare, and the rows of the matrix product's panels.
 */
#include "kernel/fast/work.h"
#include "kernel/gemm16.h"

#ifdef LOOM_NARROW

typedef struct job {
    int64_t count;
    const element *from;
    float *wide;
    const float *from_wide;
    element *to;
} job;

static void widen_row(int64_t count, const element *x, float *y) {
    for (int64_t i = 0; i < count; i += LANES)
        v_store(y + i, count - i, e_load(x + i, count - i));
}

static void narrow_row(int64_t count, const float *x, element *y) {
    for (int64_t i = 0; i < count; i += LANES)
        e_store(y + i, count - i, v_load(x + i, count - i));
}

static void widen_item(void *argument, int64_t item, int worker) {
    const job *p = argument;
    int64_t first = item * ITEM_ELEMENTS;
    (void)worker;
    widen_row(smaller(ITEM_ELEMENTS, p->count - first), p->from + first, p->wide + first);
}

void FAST(widen)(loom_team *team, int64_t count, const element *x, float *y) {
    job p = {.count = count, .from = x, .wide = y};
    loom_team_run(team, widen_item, &p, parts_of(count, ITEM_ELEMENTS));
}

static void narrow_item(void *argument, int64_t item, int worker) {
    const job *p = argument;
    int64_t first = item * ITEM_ELEMENTS;
    (void)worker;
    narrow_row(smaller(ITEM_ELEMENTS, p->count - first), p->from_wide + first, p->to + first);
}

void FAST(narrow)(loom_team *team, int64_t count, const float *x, element *y) {
    job p = {.count = count, .from_wide = x, .to = y};
    loom_team_run(team, narrow_item, &p, parts_of(count, ITEM_ELEMENTS));
}

static const loom__narrow_form form = {
    .widen = widen_row,
    .narrow = narrow_row,
    .gemm = SLOW(gemm),
    .gemm_f32 = SLOW(gemm_f32),
#if defined(LOOM_ELEMENT_BF16) && defined(__AVX512F__)
    .native = true,
#endif
};

void FAST(gemm)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
    const element *a, int64_t lda, const element *b, int64_t ldb, bool accumulate, element *c, int64_t ldc) {
    loom__gemm16(team, &form, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, accumulate, c, NULL, ldc);
}

void FAST(gemm_f32)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
    const element *a, int64_t lda, const element *b, int64_t ldb, bool accumulate, float *c, int64_t ldc) {
    loom__gemm16(team, &form, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, accumulate, NULL, c, ldc);
}

void FAST(gemm_grouped)(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
    int64_t lda, int64_t ldb, int64_t ldc) {
    loom__gemm16_grouped(team, &form, trans_a, trans_b, 1, count, products, lda, ldb, false, ldc);
}

void FAST(gemm_grouped_f32)(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
    int64_t lda, int64_t ldb, int64_t ldc) {
    loom__gemm16_grouped(team, &form, trans_a, trans_b, 1, count, products, lda, ldb, true, ldc);
}

#endif
