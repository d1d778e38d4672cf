/* The matrix product of the optimized tables: provider tiles run by the team. */
#ifndef KERNEL_GEMM_H
#define KERNEL_GEMM_H

#include <megaloom/kernels.h>

/* Once before the first product: called wherever a table with loom__gemm is handed out, which is before the ranks of a
 * run start. Switches OpenBLAS's own threading off for the process. */
void loom__gemm_prepare(void);
void loom__gemm(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
    const float *a, int64_t lda, const float *b, int64_t ldb, bool accumulate, float *c, int64_t ldc);

#endif
