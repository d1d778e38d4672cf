/* The kernels of one build, which is an instruction set and an element; this header is read with LOOM_ISA set to its
 * name. */
#ifndef KERNEL_FAST_FAST_H
#define KERNEL_FAST_FAST_H

#include "kernel/fast/element.h"
#include "kernel/fast/simd.h"

void FAST(bias_add)(loom_team *team, int64_t rows, int64_t cols, const element *x, const float *bias, element *y);
void FAST(bias_gradient)(
    loom_team *team, int64_t rows, int64_t cols, const element *d_y, bool accumulate, float *d_bias);
void FAST(add)(loom_team *team, int64_t count, const element *x, element *y);
void FAST(scale)(loom_team *team, int64_t count, float factor, const element *x, element *y);
void FAST(activation)(
    loom_team *team, loom_activation act, int64_t rows, int64_t f, const element *x, const float *bias, element *y);
void FAST(activation_backward)(loom_team *team, loom_activation act, int64_t rows, int64_t f, const element *x,
    const float *bias, const element *d_y, element *d_x);
void FAST(bias_dropout_add)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
    const element *x, const float *bias, const element *residual, element *y);
void FAST(dropout_backward)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
    const element *d_y, element *d_x);
bool FAST(has_nonfinite)(loom_team *team, int64_t count, const element *x);
void FAST(layernorm)(loom_team *team, int64_t rows, int64_t h, float eps, const element *x, const float *weight,
    const float *bias, element *y, float *mean, float *rstd);
void FAST(layernorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const element *x, const float *weight,
    const float *mean, const float *rstd, const element *d_y, element *d_x);
void FAST(layernorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const element *x, const float *mean,
    const float *rstd, const element *d_y, bool accumulate, float *d_weight, float *d_bias);
void FAST(rmsnorm)(loom_team *team, int64_t rows, int64_t h, float eps, const element *x, const float *weight,
    element *y, float *rstd);
void FAST(rmsnorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const element *x, const float *weight,
    const float *rstd, const element *d_y, element *d_x);
void FAST(rmsnorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const element *x, const float *rstd,
    const element *d_y, bool accumulate, float *d_weight);

void FAST(embedding)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
    int64_t table_rows, const element *table, element *y);
void FAST(embedding_backward)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
    int64_t table_rows, const element *d_y, bool accumulate, float *d_table);
void FAST(rope)(loom_team *team, int64_t s, int64_t b, int64_t stride, int64_t groups, int64_t heads_per_group,
    int64_t group_stride, int64_t d, int64_t rotary_d, const float *cosine, const float *sine, const int32_t *positions,
    int64_t position_offset, bool inverse, element *x);

void FAST(cross_entropy_local)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, const element *logits,
    const int64_t *targets, int64_t first_column, float *maximum, float *sum, float *target_logit);
void FAST(cross_entropy_backward)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, element *logits,
    const int64_t *targets, int64_t first_column, const float *maximum, const float *sum, const float *row_scale);

void FAST(attention_block)(loom_team *team, const loom_attention_block *block, const element *q, const element *k,
    const element *v, float *accumulator, float *maximum, float *sum);
void FAST(attention_finish)(loom_team *team, const loom_attention_block *block, const float *accumulator,
    const float *maximum, const float *sum, element *out, int64_t out_stride, float *log_sum_exp);
void FAST(attention_delta)(loom_team *team, const loom_attention_block *block, const element *out, const element *d_out,
    int64_t out_stride, float *delta);
void FAST(attention_block_backward)(loom_team *team, const loom_attention_block *block, const element *q,
    const element *k, const element *v, const element *d_out, int64_t out_stride, const float *log_sum_exp,
    const float *delta, bool accumulate_q, bool accumulate_kv, element *d_q, element *d_k, element *d_v);
void FAST(attention)(loom_team *team, const loom_attention_block *block, const element *q, const element *k,
    const element *v, element *out, int64_t out_stride, float *log_sum_exp);

#ifdef LOOM_NARROW
void FAST(widen)(loom_team *team, int64_t count, const element *x, float *y);
void FAST(narrow)(loom_team *team, int64_t count, const float *x, element *y);
void FAST(gemm)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
    const element *a, int64_t lda, const element *b, int64_t ldb, bool accumulate, element *c, int64_t ldc);
void FAST(gemm_f32)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
    const element *a, int64_t lda, const element *b, int64_t ldb, bool accumulate, float *c, int64_t ldc);
void FAST(gemm_grouped)(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
    int64_t lda, int64_t ldb, int64_t ldc);
void FAST(gemm_grouped_f32)(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
    int64_t lda, int64_t ldb, int64_t ldc);

extern const loom_kernels16 FAST(kernels);
#else
void FAST(exact_sum)(loom_team *team, int power, int64_t count, const float *x, loom_exact_sum *sum);
void FAST(adamw)(loom_team *team, int64_t count, const loom_adamw *adamw, const float *d_w, float *w, void *m, void *v,
    float *v_max);
void FAST(sgd)(loom_team *team, int64_t count, const loom_sgd *sgd, const float *d_w, float *w, float *momentum);
void FAST(attention_begin)(
    loom_team *team, const loom_attention_block *block, float *accumulator, float *maximum, float *sum);
void FAST(attention_merge)(loom_team *team, const loom_attention_block *block, const float *other_accumulator,
    const float *other_maximum, const float *other_sum, float *accumulator, float *maximum, float *sum);

extern const loom_kernels FAST(kernels);
#endif

#endif
