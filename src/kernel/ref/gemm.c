/* Matrix product, one dot product an element: the definition. Compiled four times (ref.h). */
#ifndef REAL
#include "kernel/ref/ref.h"

#include "kernel/ref/real32.h"

#include "kernel/ref/gemm.c"

#include "kernel/ref/real64.h"

#include "kernel/ref/gemm.c"

#include "kernel/ref/bf16.h"

#include "kernel/ref/gemm.c"

#include "kernel/ref/f16.h"

#include "kernel/ref/gemm.c"
#else

static REAL REF(dot_product)(bool trans_a, bool trans_b, int64_t k, const ELEMENT *a, int64_t lda, const ELEMENT *b,
    int64_t ldb, int64_t i, int64_t j) {
    REAL sum = 0;
    for (int64_t l = 0; l < k; l++)
        sum += LOAD(trans_a ? a[l * lda + i] : a[i * lda + l]) * LOAD(trans_b ? b[j * ldb + l] : b[l * ldb + j]);
    return sum;
}

void REF(gemm)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, REAL alpha,
    const ELEMENT *a, int64_t lda, const ELEMENT *b, int64_t ldb, bool accumulate, ELEMENT *c, int64_t ldc) {
    (void)team;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            REAL sum = REF(dot_product)(trans_a, trans_b, k, a, lda, b, ldb, i, j);
            STORE(c[i * ldc + j], alpha * sum + (accumulate ? LOAD(c[i * ldc + j]) : 0));
        }
}

void REF(gemm_grouped)(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
    int64_t lda, int64_t ldb, int64_t ldc) {
    for (const loom_product *p = products; p < products + count; p++)
        REF(gemm)(team, trans_a, trans_b, p->m, p->n, p->k, 1, p->a, lda, p->b, ldb, p->accumulate, p->c, ldc);
}

#ifdef NARROW
void REF(gemm_f32)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, REAL alpha,
    const ELEMENT *a, int64_t lda, const ELEMENT *b, int64_t ldb, bool accumulate, REAL *c, int64_t ldc) {
    (void)team;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            REAL sum = REF(dot_product)(trans_a, trans_b, k, a, lda, b, ldb, i, j);
            c[i * ldc + j] = alpha * sum + (accumulate ? c[i * ldc + j] : 0);
        }
}

void REF(gemm_grouped_f32)(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
    int64_t lda, int64_t ldb, int64_t ldc) {
    for (const loom_product *p = products; p < products + count; p++)
        REF(gemm_f32)(team, trans_a, trans_b, p->m, p->n, p->k, 1, p->a, lda, p->b, ldb, p->accumulate, p->c, ldc);
}
#endif

#endif
