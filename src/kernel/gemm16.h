/* The matrix product of 16-bit elements: tiles as those of fp32, from widened panels or by the provider's own bf16. */
#ifndef KERNEL_GEMM16_H
#define KERNEL_GEMM16_H

#include <megaloom/kernels.h>

/* What one element and instruction set bring to it. */
typedef struct loom__narrow_form {
    void (*widen)(int64_t count, const uint16_t *x, float *y);
    void (*narrow)(int64_t count, const float *x, uint16_t *y);
    /* The reference, for a tile that gets no scratch. */
    void (*gemm)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
        const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, bool accumulate, uint16_t *c, int64_t ldc);
    void (*gemm_f32)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
        const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, bool accumulate, float *c, int64_t ldc);
    bool native; /* bf16 that the provider multiplies itself, where the processor can */
} loom__narrow_form;

/* loom_kernels16's gemm into c, or gemm_f32 into c32: the other one is NULL. */
void loom__gemm16(loom_team *team, const loom__narrow_form *form, bool trans_a, bool trans_b, int64_t m, int64_t n,
    int64_t k, float alpha, const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, bool accumulate,
    uint16_t *c, float *c32, int64_t ldc);
/* gemm_grouped, or gemm_grouped_f32 where C is wide. */
void loom__gemm16_grouped(loom_team *team, const loom__narrow_form *form, bool trans_a, bool trans_b, float alpha,
    int64_t count, const loom_product *products, int64_t lda, int64_t ldb, bool wide, int64_t ldc);

/* Whether the processor and the provider multiply bf16 themselves. */
bool loom__gemm_bf16_is_native(void);
/* One product of bf16 in the calling thread, into c or c32; false, with nothing done, where the provider cannot. */
bool loom__gemm_bf16(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const uint16_t *a,
    int64_t lda, const uint16_t *b, int64_t ldb, bool accumulate, uint16_t *c, float *c32, int64_t ldc);

#endif
