/* Matrix product, one dot product an element: the definition. Compiled twice (ref.h). */
#ifndef REAL
#include "kernel/ref/ref.h"

#include "kernel/ref/real32.h"

#include "kernel/ref/gemm.c"

#include "kernel/ref/real64.h"

#include "kernel/ref/gemm.c"
#else

void REF(gemm)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, REAL alpha, const REAL *a,
    int64_t lda, const REAL *b, int64_t ldb, bool accumulate, REAL *c, int64_t ldc) {
    (void)team;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            REAL sum = 0;
            for (int64_t l = 0; l < k; l++)
                sum += (trans_a ? a[l * lda + i] : a[i * lda + l]) * (trans_b ? b[j * ldb + l] : b[l * ldb + j]);
            c[i * ldc + j] = alpha * sum + (accumulate ? c[i * ldc + j] : 0);
        }
}

#endif
