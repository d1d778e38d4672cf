/* Every backward kernel against central differences of its forward, all in double. With a step of 1e-5 the difference
 * quotient of a smooth function of size 1 is wrong by about 1e-10 (third derivative) plus 1e-16/1e-5 = 1e-11
 * (rounding); the bound of 1e-7 leaves room for derivatives of size up to a hundred. */
#include "kernel_support.h"

enum { ROWS = 4, H = 7, COUNT = ROWS * H, WIDE = 2 * COUNT };
static const double step = 1e-5, bound = 1e-7;

/* The scalar whose gradient is taken: sum of seed[i] output[i] for the output that forward(x) gives. */
typedef struct probe {
    void (*forward)(const struct probe *probe, double *out);
    double *parameter; /* the array that is varied */
    size_t parameters, outputs;
    const double *seed;
    void *context;
} probe;

static double probe_value(const probe *p) {
    double *out = room_for(p->outputs * sizeof *out), value = 0;
    p->forward(p, out);
    for (size_t i = 0; i < p->outputs; i++)
        value += p->seed[i] * out[i];
    free(out);
    return value;
}

static void assert_gradient(const char *what, probe p, const double *gradient) {
    for (size_t i = 0; i < p.parameters; i++) {
        double kept = p.parameter[i];
        p.parameter[i] = kept + step;
        double above = probe_value(&p);
        p.parameter[i] = kept - step;
        double below = probe_value(&p);
        p.parameter[i] = kept;
        double expected = (above - below) / (2 * step);
        if (!(fabs(gradient[i] - expected) < bound * (1 + fabs(expected))))
            fail_msg("%s: gradient %zu is %.12g, differences give %.12g", what, i, gradient[i], expected);
    }
}

static void random_double(double *x, size_t count, uint32_t seed) {
    float *narrow = numbers(count, seed);
    for (size_t i = 0; i < count; i++)
        x[i] = (double)narrow[i];
    free(narrow);
}

typedef struct numbers64 {
    double x[WIDE], weight[2 * H], bias[2 * H], d_y[WIDE], gradient[WIDE], mean[ROWS], rstd[ROWS];
    int variant;
    int64_t tokens[ROWS];
} numbers64;

static numbers64 numbers64_make(int variant) {
    numbers64 n = {.variant = variant, .tokens = {2, 5, 2, 9}};
    random_double(n.x, WIDE, 1);
    random_double(n.weight, 2 * H, 2);
    random_double(n.bias, 2 * H, 3);
    random_double(n.d_y, WIDE, 4);
    return n;
}

static void layernorm_forward(const probe *p, double *out) {
    numbers64 *n = p->context;
    loom__ref64_layernorm(NULL, ROWS, H, 1e-3, n->x, n->weight, n->bias, out, n->mean, n->rstd);
}

static void layernorm_backward_is_the_derivative(void **state) {
    (void)state;
    numbers64 n = numbers64_make(0);
    probe p = {layernorm_forward, n.x, COUNT, COUNT, n.d_y, &n};
    (void)probe_value(&p);
    double mean[ROWS], rstd[ROWS], d_weight[H] = {0}, d_bias[H] = {0};
    memcpy(mean, n.mean, sizeof mean);
    memcpy(rstd, n.rstd, sizeof rstd);
    loom__ref64_layernorm_backward_input(NULL, ROWS, H, n.x, n.weight, mean, rstd, n.d_y, n.gradient);
    assert_gradient("layernorm x", p, n.gradient);
    loom__ref64_layernorm_backward_weight(NULL, ROWS, H, n.x, mean, rstd, n.d_y, false, d_weight, d_bias);
    assert_gradient("layernorm weight", (probe){layernorm_forward, n.weight, H, COUNT, n.d_y, &n}, d_weight);
    assert_gradient("layernorm bias", (probe){layernorm_forward, n.bias, H, COUNT, n.d_y, &n}, d_bias);
}

static void rmsnorm_forward(const probe *p, double *out) {
    numbers64 *n = p->context;
    loom__ref64_rmsnorm(NULL, ROWS, H, 1e-3, n->x, n->weight, out, n->rstd);
}

static void rmsnorm_backward_is_the_derivative(void **state) {
    (void)state;
    numbers64 n = numbers64_make(0);
    probe p = {rmsnorm_forward, n.x, COUNT, COUNT, n.d_y, &n};
    (void)probe_value(&p);
    double rstd[ROWS], d_weight[H];
    memcpy(rstd, n.rstd, sizeof rstd);
    loom__ref64_rmsnorm_backward_input(NULL, ROWS, H, n.x, n.weight, rstd, n.d_y, n.gradient);
    assert_gradient("rmsnorm x", p, n.gradient);
    loom__ref64_rmsnorm_backward_weight(NULL, ROWS, H, n.x, rstd, n.d_y, false, d_weight);
    assert_gradient("rmsnorm weight", (probe){rmsnorm_forward, n.weight, H, COUNT, n.d_y, &n}, d_weight);
}

static void activation_forward(const probe *p, double *out) {
    numbers64 *n = p->context;
    loom__ref64_activation(NULL, (loom_activation)n->variant, ROWS, H, n->x, n->bias, out);
}

static void activation_backward_is_the_derivative(void **state) {
    (void)state;
    for (int act = 0; act < LOOM_ACTIVATION_COUNT; act++) {
        numbers64 n = numbers64_make(act);
        size_t inputs = loom_activation_is_gated((loom_activation)act) ? WIDE : COUNT;
        loom__ref64_activation_backward(NULL, (loom_activation)act, ROWS, H, n.x, n.bias, n.d_y, n.gradient);
        assert_gradient("activation", (probe){activation_forward, n.x, inputs, COUNT, n.d_y, &n}, n.gradient);
    }
}

static const int64_t samples[2] = {40, 7};
static const loom_row_coordinates coordinates = {2, 2, 9, samples};
static const loom_dropout dropout = {0.4f, 5, 2, LOOM_DROPOUT_PROJECTION};

static void dropout_forward(const probe *p, double *out) {
    numbers64 *n = p->context;
    loom__ref64_bias_dropout_add(NULL, &coordinates, H, &dropout, n->x, n->bias, n->d_y, out);
}

static void dropout_backward_is_the_derivative(void **state) {
    (void)state;
    numbers64 n = numbers64_make(0);
    loom__ref64_dropout_backward(NULL, &coordinates, H, &dropout, n.d_y, n.gradient);
    assert_gradient("dropout x", (probe){dropout_forward, n.x, COUNT, COUNT, n.d_y, &n}, n.gradient);
    double d_bias[H];
    loom__ref64_bias_gradient(NULL, ROWS, H, n.gradient, false, d_bias);
    assert_gradient("dropout bias", (probe){dropout_forward, n.bias, H, COUNT, n.d_y, &n}, d_bias);
}

static void embedding_forward(const probe *p, double *out) {
    numbers64 *n = p->context;
    loom__ref64_embedding(NULL, ROWS, H, n->tokens, 2, 4, n->x, out);
}

static void embedding_backward_is_the_derivative(void **state) {
    (void)state;
    numbers64 n = numbers64_make(0);
    loom__ref64_embedding_backward(NULL, ROWS, H, n.tokens, 2, 4, n.d_y, false, n.gradient);
    assert_gradient("embedding table", (probe){embedding_forward, n.x, 4 * H, COUNT, n.d_y, &n}, n.gradient);
}

static const double cosine[] = {0.6, 0.28, 0.8, -0.6, 0.96, 1, 0.6, 0.8, 0},
                    sine[] = {0.8, 0.96, 0.6, 0.8, 0.28, 0, -0.8, 0.6, 1};

static void rope_forward(const probe *p, double *out) {
    numbers64 *n = p->context;
    memcpy(out, n->x, COUNT * sizeof *out);
    loom__ref64_rope(NULL, 2, 2, H, 1, 1, H, H, 6, cosine, sine, NULL, 1, n->variant, out);
}

static void inverse_rope_is_the_derivative_of_rope(void **state) {
    (void)state;
    numbers64 n = numbers64_make(0), back = numbers64_make(1);
    probe inverse = {rope_forward, back.x, COUNT, COUNT, NULL, &back};
    memcpy(back.x, n.d_y, sizeof back.x);
    rope_forward(&inverse, n.gradient);
    assert_gradient("rope", (probe){rope_forward, n.x, COUNT, COUNT, n.d_y, &n}, n.gradient);
}

static void loss_forward(const probe *p, double *out) {
    numbers64 *n = p->context;
    double maximum[ROWS], sum[ROWS], logit[ROWS];
    loom__ref64_cross_entropy_local(NULL, ROWS, H, H - 2, n->x, n->tokens, 0, maximum, sum, logit);
    for (int r = 0; r < ROWS; r++)
        out[r] = maximum[r] + log(sum[r]) - logit[r];
}

static void cross_entropy_backward_is_the_derivative(void **state) {
    (void)state;
    numbers64 n = numbers64_make(0);
    double maximum[ROWS], sum[ROWS], logit[ROWS];
    n.tokens[1] = 4;
    n.tokens[3] = 0;
    loom__ref64_cross_entropy_local(NULL, ROWS, H, H - 2, n.x, n.tokens, 0, maximum, sum, logit);
    memcpy(n.gradient, n.x, sizeof n.gradient);
    loom__ref64_cross_entropy_backward(NULL, ROWS, H, H - 2, n.gradient, n.tokens, 0, maximum, sum, n.d_y);
    assert_gradient("loss", (probe){loss_forward, n.x, COUNT, ROWS, n.d_y, &n}, n.gradient);
}

/* Attention of two samples, four heads in two groups, five queries over seven keys, in the fused layout. */
enum { S = 7, B = 2, HEADS = 4, GROUPS = 2, D = 3, ROW = (HEADS + 2 * GROUPS) * D, OUT = HEADS * D, QUERIES = 5 };

typedef struct attention_probe {
    loom_attention_block block;
    double qkv[S * B * ROW], log_sum_exp[B * HEADS * QUERIES];
} attention_probe;

static void attention_forward(const probe *p, double *out) {
    attention_probe *a = p->context;
    loom__ref64_attention(NULL, &a->block, a->qkv, a->qkv + 2 * D, a->qkv + 3 * D, out, OUT, a->log_sum_exp);
}

static void attention_backward_is_the_derivative(void **state) {
    (void)state;
    static const int32_t documents[B * QUERIES] = {0, 0, 3, 3, 3, 0, 1, 2, 3, 4};
    for (int variant = 0; variant < 16; variant++) {
        attention_probe a = {.block = {.b = B,
                                 .n = HEADS,
                                 .g = GROUPS,
                                 .d = D,
                                 .s_q = QUERIES,
                                 .s_kv = S,
                                 .q_offset = 2,
                                 .kv_offset = 1,
                                 .q_stride = ROW,
                                 .k_stride = ROW,
                                 .v_stride = ROW,
                                 .q_group_stride = 4 * D,
                                 .kv_group_stride = 4 * D,
                                 .scale = 0.7f,
                                 .causal = variant & 1,
                                 .window = variant & 2 ? 3 : 0,
                                 .document_start = variant & 4 ? documents : NULL,
                                 .sample = samples}};
        if (variant & 8)
            a.block.dropout = dropout;
        double out[QUERIES * B * OUT], seed[QUERIES * B * OUT], delta[B * HEADS * QUERIES];
        double gradient[S * B * ROW] = {0};
        random_double(a.qkv, S * B * ROW, 1);
        random_double(seed, QUERIES * B * OUT, 2);
        probe p = {attention_forward, a.qkv, S * B * ROW, QUERIES * B * OUT, seed, &a};
        attention_forward(&p, out);
        double log_sum_exp[B * HEADS * QUERIES];
        memcpy(log_sum_exp, a.log_sum_exp, sizeof log_sum_exp);
        loom__ref64_attention_delta(NULL, &a.block, out, seed, OUT, delta);
        loom__ref64_attention_block_backward(NULL, &a.block, a.qkv, a.qkv + 2 * D, a.qkv + 3 * D, seed, OUT,
            log_sum_exp, delta, false, false, gradient, gradient + 2 * D, gradient + 3 * D);
        assert_gradient("attention", p, gradient);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layernorm_backward_is_the_derivative),
        cmocka_unit_test(rmsnorm_backward_is_the_derivative),
        cmocka_unit_test(activation_backward_is_the_derivative),
        cmocka_unit_test(dropout_backward_is_the_derivative),
        cmocka_unit_test(embedding_backward_is_the_derivative),
        cmocka_unit_test(inverse_rope_is_the_derivative_of_rope),
        cmocka_unit_test(cross_entropy_backward_is_the_derivative),
        cmocka_unit_test(attention_backward_is_the_derivative),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
