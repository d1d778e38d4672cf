/* The 16-bit tables of the portable build: the reference loops, with the products of widened panels. */
#include "kernel/portable16.h"
#include "kernel/gemm16.h"
#include "kernel/ref/ref.h"

#define FORM(dtype)                                                                                                    \
    static void widen_##dtype(int64_t count, const uint16_t *x, float *y) {                                            \
        loom__ref_##dtype##_widen(NULL, count, x, y);                                                                  \
    }                                                                                                                  \
    static void narrow_##dtype(int64_t count, const float *x, uint16_t *y) {                                           \
        loom__ref_##dtype##_narrow(NULL, count, x, y);                                                                 \
    }                                                                                                                  \
    static const loom__narrow_form form_##dtype = {                                                                    \
        widen_##dtype, narrow_##dtype, loom__ref_##dtype##_gemm, loom__ref_##dtype##_gemm_f32, false};                 \
    static void gemm_##dtype(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,             \
        float alpha, const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, bool accumulate, uint16_t *c,     \
        int64_t ldc) {                                                                                                 \
        loom__gemm16(team, &form_##dtype, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, accumulate, c, NULL, ldc); \
    }                                                                                                                  \
    static void gemm_f32_##dtype(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,         \
        float alpha, const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, bool accumulate, float *c,        \
        int64_t ldc) {                                                                                                 \
        loom__gemm16(team, &form_##dtype, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, accumulate, NULL, c, ldc); \
    }                                                                                                                  \
    static void gemm_grouped_##dtype(loom_team *team, bool trans_a, bool trans_b, int64_t count,                       \
        const loom_product *products, int64_t lda, int64_t ldb, int64_t ldc) {                                         \
        loom__gemm16_grouped(team, &form_##dtype, trans_a, trans_b, 1, count, products, lda, ldb, false, ldc);         \
    }                                                                                                                  \
    static void gemm_grouped_f32_##dtype(loom_team *team, bool trans_a, bool trans_b, int64_t count,                   \
        const loom_product *products, int64_t lda, int64_t ldb, int64_t ldc) {                                         \
        loom__gemm16_grouped(team, &form_##dtype, trans_a, trans_b, 1, count, products, lda, ldb, true, ldc);          \
    }

/* What both tables take from the reference. */
#define ENTRIES(dtype)                                                                                                 \
    .widen = loom__ref_##dtype##_widen, .narrow = loom__ref_##dtype##_narrow,                                          \
    .bias_add = loom__ref_##dtype##_bias_add, .bias_gradient = loom__ref_##dtype##_bias_gradient,                      \
    .add = loom__ref_##dtype##_add, .scale = loom__ref_##dtype##_scale, .layernorm = loom__ref_##dtype##_layernorm,    \
    .layernorm_backward_input = loom__ref_##dtype##_layernorm_backward_input,                                          \
    .layernorm_backward_weight = loom__ref_##dtype##_layernorm_backward_weight,                                        \
    .rmsnorm = loom__ref_##dtype##_rmsnorm, .rmsnorm_backward_input = loom__ref_##dtype##_rmsnorm_backward_input,      \
    .rmsnorm_backward_weight = loom__ref_##dtype##_rmsnorm_backward_weight,                                            \
    .activation = loom__ref_##dtype##_activation, .activation_backward = loom__ref_##dtype##_activation_backward,      \
    .bias_dropout_add = loom__ref_##dtype##_bias_dropout_add,                                                          \
    .dropout_backward = loom__ref_##dtype##_dropout_backward, .embedding = loom__ref_##dtype##_embedding,              \
    .embedding_backward = loom__ref_##dtype##_embedding_backward, .rope = loom__ref_##dtype##_rope,                    \
    .cross_entropy_local = loom__ref_##dtype##_cross_entropy_local,                                                    \
    .cross_entropy_backward = loom__ref_##dtype##_cross_entropy_backward,                                              \
    .attention_block = loom__ref_##dtype##_attention_block, .attention_finish = loom__ref_##dtype##_attention_finish,  \
    .attention_delta = loom__ref_##dtype##_attention_delta,                                                            \
    .attention_block_backward = loom__ref_##dtype##_attention_block_backward,                                          \
    .attention = loom__ref_##dtype##_attention, .has_nonfinite = loom__ref_##dtype##_has_nonfinite

#define TABLES(dtype)                                                                                                  \
    FORM(dtype)                                                                                                        \
    const loom_kernels16 loom__reference_##dtype##_kernels = {.gemm = loom__ref_##dtype##_gemm,                        \
        .gemm_f32 = loom__ref_##dtype##_gemm_f32,                                                                      \
        .gemm_grouped = loom__ref_##dtype##_gemm_grouped,                                                              \
        .gemm_grouped_f32 = loom__ref_##dtype##_gemm_grouped_f32,                                                      \
        ENTRIES(dtype)};                                                                                               \
    const loom_kernels16 loom__portable_##dtype##_kernels = {.gemm = gemm_##dtype,                                     \
        .gemm_f32 = gemm_f32_##dtype,                                                                                  \
        .gemm_grouped = gemm_grouped_##dtype,                                                                          \
        .gemm_grouped_f32 = gemm_grouped_f32_##dtype,                                                                  \
        ENTRIES(dtype)};

TABLES(bf16)
TABLES(f16)
