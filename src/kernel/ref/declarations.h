/* The reference kernels for one REAL; included once for each. The contracts are those of <megaloom/kernels.h>. No
 * include guard: see ref.h. */
void REF(gemm)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, REAL alpha, const REAL *a,
    int64_t lda, const REAL *b, int64_t ldb, bool accumulate, REAL *c, int64_t ldc);

void REF(bias_add)(loom_team *team, int64_t rows, int64_t cols, const REAL *x, const REAL *bias, REAL *y);
void REF(bias_gradient)(loom_team *team, int64_t rows, int64_t cols, const REAL *d_y, bool accumulate, REAL *d_bias);
void REF(add)(loom_team *team, int64_t count, const REAL *x, REAL *y);
void REF(scale)(loom_team *team, int64_t count, REAL factor, const REAL *x, REAL *y);
void REF(activation)(
    loom_team *team, loom_activation act, int64_t rows, int64_t f, const REAL *x, const REAL *bias, REAL *y);
void REF(activation_backward)(loom_team *team, loom_activation act, int64_t rows, int64_t f, const REAL *x,
    const REAL *bias, const REAL *d_y, REAL *d_x);
void REF(bias_dropout_add)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
    const REAL *x, const REAL *bias, const REAL *residual, REAL *y);
void REF(dropout_backward)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
    const REAL *d_y, REAL *d_x);
void REF(exact_sum)(loom_team *team, int power, int64_t count, const REAL *x, loom_exact_sum *sum);
bool REF(has_nonfinite)(loom_team *team, int64_t count, const REAL *x);
void REF(adamw)(
    loom_team *team, int64_t count, const loom_adamw *adamw, const REAL *d_w, REAL *w, void *m, void *v, REAL *v_max);
void REF(sgd)(loom_team *team, int64_t count, const loom_sgd *sgd, const REAL *d_w, REAL *w, REAL *momentum);

void REF(layernorm)(loom_team *team, int64_t rows, int64_t h, REAL eps, const REAL *x, const REAL *weight,
    const REAL *bias, REAL *y, REAL *mean, REAL *rstd);
void REF(layernorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const REAL *x, const REAL *weight,
    const REAL *mean, const REAL *rstd, const REAL *d_y, REAL *d_x);
void REF(layernorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const REAL *x, const REAL *mean,
    const REAL *rstd, const REAL *d_y, bool accumulate, REAL *d_weight, REAL *d_bias);
void REF(rmsnorm)(
    loom_team *team, int64_t rows, int64_t h, REAL eps, const REAL *x, const REAL *weight, REAL *y, REAL *rstd);
void REF(rmsnorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const REAL *x, const REAL *weight,
    const REAL *rstd, const REAL *d_y, REAL *d_x);
void REF(rmsnorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const REAL *x, const REAL *rstd,
    const REAL *d_y, bool accumulate, REAL *d_weight);

void REF(embedding)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
    int64_t table_rows, const REAL *table, REAL *y);
void REF(embedding_backward)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
    int64_t table_rows, const REAL *d_y, bool accumulate, REAL *d_table);
void REF(rope)(loom_team *team, int64_t s, int64_t b, int64_t stride, int64_t groups, int64_t heads_per_group,
    int64_t group_stride, int64_t d, int64_t rotary_d, const REAL *cosine, const REAL *sine, const int32_t *positions,
    int64_t position_offset, bool inverse, REAL *x);

void REF(cross_entropy_local)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, const REAL *logits,
    const int64_t *targets, int64_t first_column, REAL *maximum, REAL *sum, REAL *target_logit);
void REF(cross_entropy_backward)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, REAL *logits,
    const int64_t *targets, int64_t first_column, const REAL *maximum, const REAL *sum, const REAL *row_scale);

void REF(attention_begin)(
    loom_team *team, const loom_attention_block *block, REAL *accumulator, REAL *maximum, REAL *sum);
void REF(attention_block)(loom_team *team, const loom_attention_block *block, const REAL *q, const REAL *k,
    const REAL *v, REAL *accumulator, REAL *maximum, REAL *sum);
void REF(attention_merge)(loom_team *team, const loom_attention_block *block, const REAL *other_accumulator,
    const REAL *other_maximum, const REAL *other_sum, REAL *accumulator, REAL *maximum, REAL *sum);
void REF(attention_finish)(loom_team *team, const loom_attention_block *block, const REAL *accumulator,
    const REAL *maximum, const REAL *sum, REAL *out, int64_t out_stride, REAL *log_sum_exp);
void REF(attention_delta)(loom_team *team, const loom_attention_block *block, const REAL *out, const REAL *d_out,
    int64_t out_stride, REAL *delta);
void REF(attention_block_backward)(loom_team *team, const loom_attention_block *block, const REAL *q, const REAL *k,
    const REAL *v, const REAL *d_out, int64_t out_stride, const REAL *log_sum_exp, const REAL *delta, bool accumulate_q,
    bool accumulate_kv, REAL *d_q, REAL *d_k, REAL *d_v);
void REF(attention)(loom_team *team, const loom_attention_block *block, const REAL *q, const REAL *k, const REAL *v,
    REAL *out, int64_t out_stride, REAL *log_sum_exp);
