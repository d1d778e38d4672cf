/* The kernel table: the mathematics of a transformer on raw arrays.
 *
 * A kernel gets a team to work with (and its scratch) and raw row-major arrays; it knows no tensors, no ranks, no
 * communication. Two tables come with the library: the reference (plain loops, kept for ever, the definition of what is
 * meant) and the fast one (chosen for the instruction set at run time). A user may copy either and replace entries.
 *
 * Rules for every kernel, which a replacement must keep:
 *  - The result does not depend on the number of threads of the team: work is cut by shape.
 *  - Sums are accumulated in fp32 (loss and norm sums in double), in an order fixed by the shape.
 *  - Output arrays may not overlap inputs unless the entry says "in place".
 *  - `accumulate`: false writes the output, true adds to it. Gradients of parameters use it (the first contribution of
 * a step writes, later ones add).
 *  - Sizes may be 0: nothing is read; an output that would be written (not added to) is set to zero where it has
 * elements.
 *  - NaN and infinity pass through; nothing hides them. (Two things take no part at all, whatever they hold: padding
 * columns of the loss, and rows of it with row_scale 0. A key that a query does not see may still spread a NaN of its
 * value to that query, as 0 times NaN.)
 *  - Pointers are borrowed for the call; scratch comes from the team. A kernel that gets no scratch (memory is out)
 * does its work on a slower way that needs none; kernels do not fail.
 *  - Only the thread that owns the team calls. Results do not depend on the team, but may differ between tables.
 * Shape letters: rows = any number of independent rows; s sequence, b microbatch, h hidden, f ffn, v vocabulary,
 * n heads, g query groups, d head dimension. */
#ifndef MEGALOOM_KERNELS_H
#define MEGALOOM_KERNELS_H

#include <megaloom/team.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Activation of the MLP. The gated ones read [rows, 2f] = [gate | up] and give act(gate)*up in [rows, f]. */
typedef enum loom_activation {
    LOOM_GELU_TANH, /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) */
    LOOM_GELU_ERF,  /* 0.5 x (1 + erf(x / sqrt 2)) */
    LOOM_SWIGLU,    /* silu(gate) * up */
    LOOM_GEGLU,     /* gelu_tanh(gate) * up */
    LOOM_GEGLU_ERF, /* gelu_erf(gate) * up */
    LOOM_ACTIVATION_COUNT
} loom_activation;

static inline bool loom_activation_is_gated(loom_activation activation) {
    return activation == LOOM_SWIGLU || activation == LOOM_GEGLU || activation == LOOM_GEGLU_ERF;
}

/* A dropout site: which random stream, and with what probability. The mask bit of an element is a pure function of
 * (seed, layer, site, sample, position, channel), so it is the same under every layout. */
typedef struct loom_dropout {
    float
        probability; /* of being dropped; 0 = the site does nothing; kept values are multiplied by 1/(1-probability) */
    uint64_t seed;   /* of the run */
    uint32_t layer;  /* global layer number; 0xffffffff for the embedding */
    uint32_t site;   /* LOOM_DROPOUT_… */
} loom_dropout;

enum { LOOM_DROPOUT_EMBEDDING = 0, LOOM_DROPOUT_ATTENTION = 1, LOOM_DROPOUT_PROJECTION = 2, LOOM_DROPOUT_MLP = 3 };

/* Where the rows [s, b] of a local activation lie in the whole: local row (t, j) is position position_offset+t of
 * sample sample[j]. */
typedef struct loom_row_coordinates {
    int64_t s, b;
    int64_t position_offset;
    const int64_t *sample; /* [b] sample numbers in the consumed stream; not read where nothing is dropped */
} loom_row_coordinates;

/* Attention between one block of queries and one block of keys and values.
 * q, k, v are read in place from activations: element (t, j, head, c) of q is at q[(t*b + j)*q_stride +
 * q_head_offset(head) + c]; for fused projections in Megatron's layout each group holds [its n/g query heads][k][v] of
 * d each, which is expressed by q_group_stride, kv_group_stride: q_head_offset(head) = (head / (n/g)) * q_group_stride
 * + (head mod (n/g)) * d, and the offset of group `i` in k and v is i * kv_group_stride. Separate arrays have
 * q_group_stride = (n/g)*d, kv_group_stride = d. A query at global position i sees the key at global position j iff
 *     (not causal or j <= i) and (window == 0 or i - j < window) and j >= document_start[sample][i].
 */
typedef struct loom_attention_block {
    int64_t b, n, g, d;                   /* g divides n */
    int64_t s_q, s_kv;                    /* rows of this block of queries, of this block of keys (each below 2^31) */
    int64_t q_offset;                     /* global position of the first query row */
    int64_t kv_offset;                    /* global position of the first key row */
    int64_t q_stride, k_stride, v_stride; /* elements from one (t, j) row to the next */
    int64_t q_group_stride, kv_group_stride;
    float scale; /* of q.k, usually 1/sqrt(d) */
    bool causal;
    int64_t window;                /* 0 = none; positions seen, the query's own included */
    const int32_t *document_start; /* [b, s_q] global position where the document of query row t begins, at [j*s_q + t];
                                      NULL = no boundaries */
    loom_dropout dropout;          /* on the probabilities */
    const int64_t *sample;         /* [b] sample numbers, for dropout; may be NULL when its probability is 0 */
    int64_t head_offset;           /* global number of local head 0, for dropout */
} loom_attention_block;

/* Adam with decoupled weight decay, as torch.optim.AdamW:
 *   g = d_w * grad_scale;  w *= 1 - lr*weight_decay;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;
 *   w -= lr/(1-b1^step) * m / (sqrt(v)/sqrt(1-b2^step) + eps)
 * The coefficients are double because 1 - beta2 of a float beta2 would be off in the fifth digit; each derived factor
 * (1 - b1, lr/(1-b1^step), …) is computed in double and rounded to fp32 once, the elements are fp32 throughout.
 * With coupled_decay it is torch.optim.Adam: g = d_w * grad_scale + weight_decay*w, and w is not multiplied. With v_max
 * (amsgrad) v_max = max(v_max, v) takes the place of v in the last line. A moment that is bf16 in memory is rounded
 * behind its use, to the nearest; v_max is fp32. */
typedef struct loom_adamw {
    double lr, weight_decay, beta1, beta2, eps;
    double bias_correction1; /* 1 - beta1^step */
    double bias_correction2; /* 1 - beta2^step */
    float grad_scale;        /* e.g. the clip factor times the token-mean factor */
    bool coupled_decay;
    bool bf16_m, bf16_v; /* m, v point to bf16 numbers (uint16_t), else to fp32 ones */
} loom_adamw;

/* As torch.optim.SGD:
 *   g = d_w * grad_scale + weight_decay*w;  b = first ? g : momentum*b + (1-dampening) g;  w -= lr*b
 * where b is the momentum buffer; without one w -= lr*g. */
typedef struct loom_sgd {
    double lr, weight_decay, momentum, dampening;
    bool first; /* the buffer holds nothing yet */
    float grad_scale;
} loom_sgd;

/* One of the products of gemm_grouped: C [m, n] = op(A) op(B) + (accumulate ? C : 0). */
typedef struct loom_product {
    int64_t m, n, k;
    const void *a, *b; /* in the dtype of the table */
    void *c;
    bool accumulate;
} loom_product;

/* A sum of squares or of absolute values of fp32 numbers that nothing rounds: the order of the terms, who adds them and
 * where an array is cut make no difference. All members are sums, so that two of these are added member by member; 2^30
 * of them may be before one is carried. */
enum { LOOM_EXACT_LIMBS = 20 };
typedef struct loom_exact_sum {
    int64_t limbs[LOOM_EXACT_LIMBS]; /* digits to the base 2^32, the least first, in units of 2^-149 or (2^-149)^2 */
    int64_t nonfinite;               /* NaNs and infinities, which the digits leave out */
    int64_t zeros;
} loom_exact_sum;
/* The sum as a double, rounded the same way for the same sum; `power` as when it was made. */
LOOM_API double loom_exact_sum_value(const loom_exact_sum *sum, int power);

/* The kernels on arrays of 16-bit elements, one table for bf16 and one for fp16: uint16_t is an element of that dtype.
 * An entry means what its namesake in loom_kernels means: elements are widened as they are read (exactly), everything
 * is computed and summed in fp32, and what is written is rounded once, to nearest even (fp16 beyond 65504 becomes
 * infinity). What is not an activation or a matrix stays float: weights and biases of a row (they are few: callers
 * widen them), statistics, the state of attention, and gradients of parameters, which are added up in fp32. */
typedef struct loom_kernels16 {
    /* y[i] = x[i], exactly; y[i] = x[i] rounded. */
    void (*widen)(loom_team *team, int64_t count, const uint16_t *x, float *y);
    void (*narrow)(loom_team *team, int64_t count, const float *x, uint16_t *y);

    /* gemm with C in the same dtype, and with C in fp32 (gradients of weights). */
    void (*gemm)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
        const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, bool accumulate, uint16_t *c, int64_t ldc);
    void (*gemm_f32)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
        const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, bool accumulate, float *c, int64_t ldc);
    void (*gemm_grouped)(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
        int64_t lda, int64_t ldb, int64_t ldc);
    void (*gemm_grouped_f32)(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
        int64_t lda, int64_t ldb, int64_t ldc);

    void (*bias_add)(loom_team *team, int64_t rows, int64_t cols, const uint16_t *x, const float *bias, uint16_t *y);
    void (*bias_gradient)(
        loom_team *team, int64_t rows, int64_t cols, const uint16_t *d_y, bool accumulate, float *d_bias);
    void (*add)(loom_team *team, int64_t count, const uint16_t *x, uint16_t *y);
    void (*scale)(loom_team *team, int64_t count, float factor, const uint16_t *x, uint16_t *y);

    void (*layernorm)(loom_team *team, int64_t rows, int64_t h, float eps, const uint16_t *x, const float *weight,
        const float *bias, uint16_t *y, float *mean, float *rstd);
    void (*layernorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const uint16_t *x, const float *weight,
        const float *mean, const float *rstd, const uint16_t *d_y, uint16_t *d_x);
    void (*layernorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const uint16_t *x, const float *mean,
        const float *rstd, const uint16_t *d_y, bool accumulate, float *d_weight, float *d_bias);
    void (*rmsnorm)(loom_team *team, int64_t rows, int64_t h, float eps, const uint16_t *x, const float *weight,
        uint16_t *y, float *rstd);
    void (*rmsnorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const uint16_t *x, const float *weight,
        const float *rstd, const uint16_t *d_y, uint16_t *d_x);
    void (*rmsnorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const uint16_t *x, const float *rstd,
        const uint16_t *d_y, bool accumulate, float *d_weight);

    void (*activation)(loom_team *team, loom_activation act, int64_t rows, int64_t f, const uint16_t *x,
        const float *bias, uint16_t *y);
    void (*activation_backward)(loom_team *team, loom_activation act, int64_t rows, int64_t f, const uint16_t *x,
        const float *bias, const uint16_t *d_y, uint16_t *d_x);
    void (*bias_dropout_add)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
        const uint16_t *x, const float *bias, const uint16_t *residual, uint16_t *y);
    void (*dropout_backward)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
        const uint16_t *d_y, uint16_t *d_x);

    void (*embedding)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
        int64_t table_rows, const uint16_t *table, uint16_t *y);
    void (*embedding_backward)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
        int64_t table_rows, const uint16_t *d_y, bool accumulate, float *d_table);
    void (*rope)(loom_team *team, int64_t s, int64_t b, int64_t stride, int64_t groups, int64_t heads_per_group,
        int64_t group_stride, int64_t d, int64_t rotary_d, const float *cosine, const float *sine,
        const int32_t *positions, int64_t position_offset, bool inverse, uint16_t *x);

    void (*cross_entropy_local)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, const uint16_t *logits,
        const int64_t *targets, int64_t first_column, float *maximum, float *sum, float *target_logit);
    void (*cross_entropy_backward)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, uint16_t *logits,
        const int64_t *targets, int64_t first_column, const float *maximum, const float *sum, const float *row_scale);

    /* The running state is fp32: attention_begin and attention_merge are those of loom_kernels. */
    void (*attention_block)(loom_team *team, const loom_attention_block *block, const uint16_t *q, const uint16_t *k,
        const uint16_t *v, float *accumulator, float *maximum, float *sum);
    void (*attention_finish)(loom_team *team, const loom_attention_block *block, const float *accumulator,
        const float *maximum, const float *sum, uint16_t *out, int64_t out_stride, float *log_sum_exp);
    void (*attention_delta)(loom_team *team, const loom_attention_block *block, const uint16_t *out,
        const uint16_t *d_out, int64_t out_stride, float *delta);
    void (*attention_block_backward)(loom_team *team, const loom_attention_block *block, const uint16_t *q,
        const uint16_t *k, const uint16_t *v, const uint16_t *d_out, int64_t out_stride, const float *log_sum_exp,
        const float *delta, bool accumulate_q, bool accumulate_kv, uint16_t *d_q, uint16_t *d_k, uint16_t *d_v);
    void (*attention)(loom_team *team, const loom_attention_block *block, const uint16_t *q, const uint16_t *k,
        const uint16_t *v, uint16_t *out, int64_t out_stride, float *log_sum_exp);

    bool (*has_nonfinite)(loom_team *team, int64_t count, const uint16_t *x);
} loom_kernels16;

typedef struct loom_kernels {
    const char *name; /* "reference", "avx2", "avx512", … */

    /* The same on 16-bit elements; NULL in a table that cannot: operations then refuse such tensors. */
    const loom_kernels16 *bf16, *f16;

    /* C[m,n] = alpha op(A) op(B) + (accumulate ? C : 0), row-major. trans_a: A is stored [k,m] (row stride lda), else
     * [m,k]; trans_b: B is stored [n,k], else [k,n]. k = 0 gives zeros (or C unchanged). */
    void (*gemm)(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
        const float *a, int64_t lda, const float *b, int64_t ldb, bool accumulate, float *c, int64_t ldc);
    /* products[0, count), each as gemm computes it with alpha 1, in one go; none writes what another one reads or
     * writes. Their rounding may depend on the shapes of all, as tiles may. */
    void (*gemm_grouped)(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
        int64_t lda, int64_t ldb, int64_t ldc);

    /* y[r,c] = x[r,c] + bias[c]. In place (y == x) allowed. */
    void (*bias_add)(loom_team *team, int64_t rows, int64_t cols, const float *x, const float *bias, float *y);
    /* d_bias[c] (+)= sum over r of d_y[r,c]. */
    void (*bias_gradient)(
        loom_team *team, int64_t rows, int64_t cols, const float *d_y, bool accumulate, float *d_bias);
    /* y[i] = x[i] + y[i]. */
    void (*add)(loom_team *team, int64_t count, const float *x, float *y);
    /* y[i] = factor * x[i]; in place allowed. */
    void (*scale)(loom_team *team, int64_t count, float factor, const float *x, float *y);

    /* y = (x - mean)/sqrt(var + eps) * weight + bias over the last axis; mean and rstd [rows] are kept for backward. */
    void (*layernorm)(loom_team *team, int64_t rows, int64_t h, float eps, const float *x, const float *weight,
        const float *bias, float *y, float *mean, float *rstd);
    void (*layernorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const float *x, const float *weight,
        const float *mean, const float *rstd, const float *d_y, float *d_x);
    /* d_weight[c] (+)= sum_r d_y * xhat, d_bias[c] (+)= sum_r d_y. */
    void (*layernorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const float *x, const float *mean,
        const float *rstd, const float *d_y, bool accumulate, float *d_weight, float *d_bias);

    /* y = x / sqrt(mean(x^2) + eps) * weight; rstd [rows] is kept for backward. */
    void (*rmsnorm)(loom_team *team, int64_t rows, int64_t h, float eps, const float *x, const float *weight, float *y,
        float *rstd);
    void (*rmsnorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const float *x, const float *weight,
        const float *rstd, const float *d_y, float *d_x);
    void (*rmsnorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const float *x, const float *rstd,
        const float *d_y, bool accumulate, float *d_weight);

    /* y[rows,f] = act(x + bias): x is [rows,f], or [rows,2f] = [gate|up] when gated; bias (same width as x) may be
     * NULL. */
    void (*activation)(
        loom_team *team, loom_activation act, int64_t rows, int64_t f, const float *x, const float *bias, float *y);
    /* d_x (width of x) from d_y [rows,f]. In place is not allowed. */
    void (*activation_backward)(loom_team *team, loom_activation act, int64_t rows, int64_t f, const float *x,
        const float *bias, const float *d_y, float *d_x);

    /* y = residual + dropout(x + bias): all [s*b, h]; bias [h] and residual may be NULL; dropout NULL drops nothing.
     * The mask coordinate of an element is (sample, position, channel c); a dropped element is multiplied by 0, a kept
     * one by 1/(1-p). */
    void (*bias_dropout_add)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
        const float *x, const float *bias, const float *residual, float *y);
    /* d_x = d_y * mask/(1-p). (The residual's gradient is d_y itself.) */
    void (*dropout_backward)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
        const float *d_y, float *d_x);

    /* y[r,:] = table[tokens[r] - first_row,:] where that row is in [0, table_rows), zeros elsewhere. */
    void (*embedding)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
        int64_t table_rows, const float *table, float *y);
    /* d_table[tokens[r]-first_row,:] += d_y[r,:], in order of r for each row; with accumulate false the table is zeroed
     * first. */
    void (*embedding_backward)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
        int64_t table_rows, const float *d_y, bool accumulate, float *d_table);

    /* Rotary embedding, rotated halves (x[i], x[i + rotary_d/2]), in place on `heads` heads of d elements that start at
     * x[row*stride + head offset]; the heads are given in groups: heads_per_group heads of d next to each other, groups
     * group_stride apart (so that fused q|k|v is rotated in place: q and k of a group are neighbours). cosine and sine:
     * [positions, rotary_d/2]; row (t, j) of [s, b] uses table row positions[j*s + t], or position_offset + t where
     * positions is NULL. backward: inverse = true rotates back. */
    void (*rope)(loom_team *team, int64_t s, int64_t b, int64_t stride, int64_t groups, int64_t heads_per_group,
        int64_t group_stride, int64_t d, int64_t rotary_d, const float *cosine, const float *sine,
        const int32_t *positions, int64_t position_offset, bool inverse, float *x);

    /* Vocabulary-parallel cross-entropy, local part. logits [rows, v_local]; columns >= v_valid are padding and take no
     * part. Each row gives maximum[r] (−inf when v_valid is 0), sum[r] = sum exp(logit − maximum[r]), and
     * target_logit[r] = logits[r, targets[r] − first_column] when that column is here and valid, else 0. One pass over
     * the logits. */
    void (*cross_entropy_local)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, const float *logits,
        const int64_t *targets, int64_t first_column, float *maximum, float *sum, float *target_logit);
    /* In place: logits[r,c] = (exp(logits[r,c] − maximum[r]) / sum[r] − [c is the target]) * row_scale[r]; columns >=
     * v_valid become 0. maximum and sum are those of the whole vocabulary. row_scale 0 gives exact zeros. */
    void (*cross_entropy_backward)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, float *logits,
        const int64_t *targets, int64_t first_column, const float *maximum, const float *sum, const float *row_scale);

    /* Blockwise attention. The running state of each query (head-major: index [j, head, t] = (j*n + head)*s_q + t):
     * accumulator [b, n, s_q, d] (not yet divided), maximum [b, n, s_q], sum [b, n, s_q].
     * begin: accumulator 0, maximum −inf, sum 0. block: takes one block of keys in. merge: takes the state of other
     * blocks of keys in. finish: output (t, j, head, c) = accumulator/sum at out[(t*b + j)*out_stride + head*d + c] (0
     * for a query that saw no key) and log_sum_exp [b, n, s_q] = maximum + log(sum) (−inf likewise). No s×s matrix is
     * ever stored. */
    void (*attention_begin)(
        loom_team *team, const loom_attention_block *block, float *accumulator, float *maximum, float *sum);
    void (*attention_block)(loom_team *team, const loom_attention_block *block, const float *q, const float *k,
        const float *v, float *accumulator, float *maximum, float *sum);
    void (*attention_merge)(loom_team *team, const loom_attention_block *block, const float *other_accumulator,
        const float *other_maximum, const float *other_sum, float *accumulator, float *maximum, float *sum);
    void (*attention_finish)(loom_team *team, const loom_attention_block *block, const float *accumulator,
        const float *maximum, const float *sum, float *out, int64_t out_stride, float *log_sum_exp);
    /* delta [b, n, s_q] = sum over c of out * d_out: once for each query, before the backward of its blocks. */
    void (*attention_delta)(loom_team *team, const loom_attention_block *block, const float *out, const float *d_out,
        int64_t out_stride, float *delta);
    /* Adds this block's part to d_q, d_k, d_v, which have the strides of q, k, v. `accumulate` false writes them
     * instead: d_q at every query row, d_k and d_v at every key row of this block. */
    void (*attention_block_backward)(loom_team *team, const loom_attention_block *block, const float *q, const float *k,
        const float *v, const float *d_out, int64_t out_stride, const float *log_sum_exp, const float *delta,
        bool accumulate_q, bool accumulate_kv, float *d_q, float *d_k, float *d_v);

    /* The whole of attention over one block of keys, as begin, block and finish in one pass (what a rank without
     * context parallelism runs); log_sum_exp [b, n, s_q]. */
    void (*attention)(loom_team *team, const loom_attention_block *block, const float *q, const float *k,
        const float *v, float *out, int64_t out_stride, float *log_sum_exp);

    /* Adds |x|^power of each element, power 1 or 2, to the sum, and carries. */
    void (*exact_sum)(loom_team *team, int power, int64_t count, const float *x, loom_exact_sum *sum);
    /* True when any element is NaN or infinite. */
    bool (*has_nonfinite)(loom_team *team, int64_t count, const float *x);
    /* v_max NULL: no amsgrad. */
    void (*adamw)(loom_team *team, int64_t count, const loom_adamw *adamw, const float *d_w, float *w, void *m, void *v,
        float *v_max);
    /* momentum NULL: none. */
    void (*sgd)(loom_team *team, int64_t count, const loom_sgd *sgd, const float *d_w, float *w, float *momentum);
} loom_kernels;

/* The reference table: plain C loops. */
LOOM_API const loom_kernels *loom_kernels_reference(void);
/* The best table for this machine: avx512 (F, BW, DQ, VL), else avx2 (with FMA and F16C), else "portable": the
 * reference loops with the BLAS library's matrix product. All but gemm gives the same bits in avx2 and avx512 (but for
 * the payload of a NaN). In avx512 the product of bf16 is oneDNN's own where it uses bf16 instructions, which take
 * subnormal numbers for zero; in the other tables, and of fp16, panels are widened into scratch for the fp32 product.
 * We read no environment; see loom_kernels_find. */
LOOM_API const loom_kernels *loom_kernels_fast(void);
/* A table by name ("reference", "portable", "avx2", "avx512", "fast"), or NULL when this machine or build has none of
 * that name. */
LOOM_API const loom_kernels *loom_kernels_find(const char *name);

#ifdef __cplusplus
}
#endif
#endif
