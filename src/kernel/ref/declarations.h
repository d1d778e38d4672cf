/* The reference kernels of one build; included once for each. The contracts are those of <megaloom/kernels.h>. No
 * include guard: see ref.h. */
void REF(gemm)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, REAL alpha,
    const ELEMENT *a, int64_t lda, const ELEMENT *b, int64_t ldb, bool accumulate, ELEMENT *c, int64_t ldc);
void REF(gemm_grouped)(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
    int64_t lda, int64_t ldb, int64_t ldc);

void REF(bias_add)(loom_team *team, int64_t rows, int64_t cols, const ELEMENT *x, const REAL *bias, ELEMENT *y);
void REF(bias_gradient)(loom_team *team, int64_t rows, int64_t cols, const ELEMENT *d_y, bool accumulate, REAL *d_bias);
void REF(add)(loom_team *team, int64_t count, const ELEMENT *x, ELEMENT *y);
void REF(scale)(loom_team *team, int64_t count, REAL factor, const ELEMENT *x, ELEMENT *y);
void REF(activation)(
    loom_team *team, loom_activation act, int64_t rows, int64_t f, const ELEMENT *x, const REAL *bias, ELEMENT *y);
void REF(activation_backward)(loom_team *team, loom_activation act, int64_t rows, int64_t f, const ELEMENT *x,
    const REAL *bias, const ELEMENT *d_y, ELEMENT *d_x);
void REF(bias_dropout_add)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
    const ELEMENT *x, const REAL *bias, const ELEMENT *residual, ELEMENT *y);
void REF(dropout_backward)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
    const ELEMENT *d_y, ELEMENT *d_x);
bool REF(has_nonfinite)(loom_team *team, int64_t count, const ELEMENT *x);
#ifdef NARROW
void REF(widen)(loom_team *team, int64_t count, const ELEMENT *x, REAL *y);
void REF(narrow)(loom_team *team, int64_t count, const REAL *x, ELEMENT *y);
void REF(gemm_f32)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, REAL alpha,
    const ELEMENT *a, int64_t lda, const ELEMENT *b, int64_t ldb, bool accumulate, REAL *c, int64_t ldc);
void REF(gemm_grouped_f32)(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
    int64_t lda, int64_t ldb, int64_t ldc);
#else
void REF(exact_sum)(loom_team *team, int power, int64_t count, const REAL *x, loom_exact_sum *sum);
void REF(adamw)(
    loom_team *team, int64_t count, const loom_adamw *adamw, const REAL *d_w, REAL *w, void *m, void *v, REAL *v_max);
void REF(sgd)(loom_team *team, int64_t count, const loom_sgd *sgd, const REAL *d_w, REAL *w, REAL *momentum);
#endif

void REF(layernorm)(loom_team *team, int64_t rows, int64_t h, REAL eps, const ELEMENT *x, const REAL *weight,
    const REAL *bias, ELEMENT *y, REAL *mean, REAL *rstd);
void REF(layernorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const ELEMENT *x, const REAL *weight,
    const REAL *mean, const REAL *rstd, const ELEMENT *d_y, ELEMENT *d_x);
void REF(layernorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const ELEMENT *x, const REAL *mean,
    const REAL *rstd, const ELEMENT *d_y, bool accumulate, REAL *d_weight, REAL *d_bias);
void REF(rmsnorm)(
    loom_team *team, int64_t rows, int64_t h, REAL eps, const ELEMENT *x, const REAL *weight, ELEMENT *y, REAL *rstd);
void REF(rmsnorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const ELEMENT *x, const REAL *weight,
    const REAL *rstd, const ELEMENT *d_y, ELEMENT *d_x);
void REF(rmsnorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const ELEMENT *x, const REAL *rstd,
    const ELEMENT *d_y, bool accumulate, REAL *d_weight);

void REF(embedding)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
    int64_t table_rows, const ELEMENT *table, ELEMENT *y);
void REF(embedding_backward)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
    int64_t table_rows, const ELEMENT *d_y, bool accumulate, REAL *d_table);
void REF(rope)(loom_team *team, int64_t s, int64_t b, int64_t stride, int64_t groups, int64_t heads_per_group,
    int64_t group_stride, int64_t d, int64_t rotary_d, const REAL *cosine, const REAL *sine, const int32_t *positions,
    int64_t position_offset, bool inverse, ELEMENT *x);

void REF(cross_entropy_local)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, const ELEMENT *logits,
    const int64_t *targets, int64_t first_column, REAL *maximum, REAL *sum, REAL *target_logit);
void REF(cross_entropy_backward)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, ELEMENT *logits,
    const int64_t *targets, int64_t first_column, const REAL *maximum, const REAL *sum, const REAL *row_scale);

#ifndef NARROW
void REF(attention_begin)(
    loom_team *team, const loom_attention_block *block, REAL *accumulator, REAL *maximum, REAL *sum);
#endif
void REF(attention_block)(loom_team *team, const loom_attention_block *block, const ELEMENT *q, const ELEMENT *k,
    const ELEMENT *v, REAL *accumulator, REAL *maximum, REAL *sum);
#ifndef NARROW
void REF(attention_merge)(loom_team *team, const loom_attention_block *block, const REAL *other_accumulator,
    const REAL *other_maximum, const REAL *other_sum, REAL *accumulator, REAL *maximum, REAL *sum);
#endif
void REF(attention_finish)(loom_team *team, const loom_attention_block *block, const REAL *accumulator,
    const REAL *maximum, const REAL *sum, ELEMENT *out, int64_t out_stride, REAL *log_sum_exp);
void REF(attention_delta)(loom_team *team, const loom_attention_block *block, const ELEMENT *out, const ELEMENT *d_out,
    int64_t out_stride, REAL *delta);
void REF(attention_block_backward)(loom_team *team, const loom_attention_block *block, const ELEMENT *q,
    const ELEMENT *k, const ELEMENT *v, const ELEMENT *d_out, int64_t out_stride, const REAL *log_sum_exp,
    const REAL *delta, bool accumulate_q, bool accumulate_kv, ELEMENT *d_q, ELEMENT *d_k, ELEMENT *d_v);
void REF(attention)(loom_team *team, const loom_attention_block *block, const ELEMENT *q, const ELEMENT *k,
    const ELEMENT *v, ELEMENT *out, int64_t out_stride, REAL *log_sum_exp);
