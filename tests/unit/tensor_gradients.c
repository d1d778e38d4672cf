/* Every operation of the tape against central differences of its own forward.
 *
 * L = sum w_i y_i with fixed weights of size 1; D = (L(x + h) - L(x - h)) / 2h. Only the outputs that depend on the
 * element differ between the two sums, the others cancel to the bit; there are at most M = 100 of them here, each wrong
 * by some 8 roundings of values of size V <= 4: the difference is off by about sqrt(M) 8 V 2^-24 = 2e-5, D by 2e-5/2h.
 * The truncation is h^2/6 times a third derivative, which stays below 30 for inputs in [-2, 2] and weights of size 1.
 * h = 2^-6 gives 6e-4 and 1.2e-3; the tolerance is 2^-8 = 4e-3 of the largest gradient, or of 1. */
#include "tensor_support.h"

enum { MAX_INPUTS = 2, MAX_VECTORS = 2, STEP_BITS = 6 };
enum { G = 2, PER_GROUP = 2, D = 4, POSITIONS = 12, FUSED = G * (PER_GROUP + 2) * D };

typedef struct problem {
    const char *name;
    int inputs;
    int64_t shape[3]; /* of every input */
    int vectors;
    int64_t width; /* of every vector */
    loom_status (*run)(loom_tape *tape, const struct problem *problem, loom_tensor **x, loom_parameter *const *p,
        loom_tensor **output);
    int kind; /* read by run */
    float probability;
    float cosine[POSITIONS * D / 2], sine[POSITIONS * D / 2]; /* of the rotation */
} problem;

typedef struct values {
    float *x[MAX_INPUTS];
    vector vectors[MAX_VECTORS];
    float *weights; /* of the outputs */
} values;

static int64_t count_of(const problem *p) {
    return p->shape[0] * p->shape[1] * p->shape[2];
}

/* ---- the operations ---- */

static loom_status run_norm(
    loom_tape *tape, const problem *p, loom_tensor **x, loom_parameter *const *v, loom_tensor **output) {
    return loom_norm(tape, x[0], v[0], p->vectors > 1 ? v[1] : NULL, 1e-5f, output);
}

static loom_status run_zero_centered_norm(
    loom_tape *tape, const problem *p, loom_tensor **x, loom_parameter *const *v, loom_tensor **output) {
    return loom_zero_centered_norm(tape, x[0], v[0], p->vectors > 1 ? v[1] : NULL, 1e-5f, output);
}

/* kind: whether the weights are zero-centred. */
static loom_status run_qk_norm(
    loom_tape *tape, const problem *p, loom_tensor **x, loom_parameter *const *v, loom_tensor **output) {
    return loom_qk_norm(tape, x[0], v[0], v[1], G, PER_GROUP, D, 1e-2f, p->kind, output);
}

static loom_status run_scale(
    loom_tape *tape, const problem *p, loom_tensor **x, loom_parameter *const *v, loom_tensor **output) {
    (void)p;
    (void)v;
    return loom_scale(tape, x[0], -1.7f, output);
}

static loom_status run_activate(
    loom_tape *tape, const problem *p, loom_tensor **x, loom_parameter *const *v, loom_tensor **output) {
    return loom_activate(tape, (loom_activation)p->kind, x[0], p->vectors ? v[0] : NULL, output);
}

static const int64_t samples[] = {17, 3};

static loom_status run_dropout(
    loom_tape *tape, const problem *p, loom_tensor **x, loom_parameter *const *v, loom_tensor **output) {
    loom_dropout dropout = {p->probability, 77, 3, LOOM_DROPOUT_MLP};
    return loom_bias_dropout_add(tape, x[0], p->vectors ? v[0] : NULL, p->inputs > 1 ? x[1] : NULL, &dropout,
        p->probability > 0 ? samples : NULL, (loom_positions){5, 1, 40}, output);
}

static loom_status run_add(
    loom_tape *tape, const problem *p, loom_tensor **x, loom_parameter *const *v, loom_tensor **output) {
    (void)v;
    return loom_add(tape, x[0], x[p->inputs - 1], output);
}

static loom_status run_gate(
    loom_tape *tape, const problem *p, loom_tensor **x, loom_parameter *const *v, loom_tensor **output) {
    return loom_sigmoid_gate(tape, x[0], v[0], x[p->inputs - 1], output);
}

/* kind: how many of a head's channels are rotated; negative: by positions of each row. */
static loom_status run_rope(
    loom_tape *tape, const problem *p, loom_tensor **x, loom_parameter *const *v, loom_tensor **output) {
    static const int32_t positions[] = {0, 3, 1, 11, 7, 7};
    loom_rope_table table = {POSITIONS, abs(p->kind), p->cosine, p->sine};
    (void)v;
    return loom_rope(tape, x[0], &table, G, PER_GROUP, D, p->kind < 0 ? positions : NULL, 2, output);
}

enum { CAUSAL = 1, WINDOW = 2, DOCUMENTS = 4 };

static loom_status run_attention(
    loom_tape *tape, const problem *p, loom_tensor **x, loom_parameter *const *v, loom_tensor **output) {
    static const int32_t starts[] = {0, 0, 2, 2, 2, 0, 0, 0, 0, 4};
    (void)v;
    loom_attention_options options = {
        .n = G * PER_GROUP,
        .g = G,
        .d = D,
        .scale = 0.5f,
        .causal = p->kind & CAUSAL,
        .window = p->kind & WINDOW ? 3 : 0,
        .document_start = p->kind & DOCUMENTS ? starts : NULL,
        .dropout = {p->probability, 5, 1, LOOM_DROPOUT_ATTENTION},
        .sample = p->probability > 0 ? samples : NULL,
        .head_offset = 4,
    };
    return loom_attention(tape, x[0], &options, output);
}

/* One value read by three operations, one of which reads it twice. */
static loom_status run_three_uses(
    loom_tape *tape, const problem *p, loom_tensor **x, loom_parameter *const *v, loom_tensor **output) {
    (void)p;
    loom_tensor *value = NULL, *a = NULL, *b = NULL, *c = NULL, *ab = NULL;
    loom_status status = loom_norm(tape, x[0], v[0], NULL, 1e-5f, &value);
    if (!status)
        status = loom_activate(tape, LOOM_GELU_TANH, value, v[1], &a);
    if (!status)
        status = loom_norm(tape, value, v[0], v[1], 1e-5f, &b);
    if (!status)
        status = loom_add(tape, value, value, &c);
    if (!status)
        status = loom_add(tape, a, b, &ab);
    if (!status)
        status = loom_add(tape, ab, c, output);
    loom_tensor_release(value);
    loom_tensor_release(a);
    loom_tensor_release(b);
    loom_tensor_release(c);
    loom_tensor_release(ab);
    return status;
}

/* A user's own operation: y = p_c x^2. */
static loom_status square_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    loom_tensor *x = loom_node_saved(node, 0), *d_x;
    const loom_parameter *p = *(loom_parameter **)loom_node_state(node);
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), LOOM_F32, x->dims, x->shape, &d_x));
    for (int64_t i = 0; i < loom_tensor_count(x); i++)
        loom_tensor_f32(d_x)[i] = 2 * p->data[i % p->shape[0]] * loom_tensor_f32(x)[i] * loom_tensor_f32(d_y)[i];
    return loom_tape_give(tape, node, 0, d_x);
}

static loom_status square_weight(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    loom_tensor *x = loom_node_saved(node, 0);
    loom_parameter *p = loom_node_parameter(node, 0);
    bool accumulate;
    (void)tape;
    float *grad = loom_parameter_begin_grad(p, &accumulate);
    for (int64_t i = 0; i < p->shape[0] && !accumulate; i++)
        grad[i] = 0;
    for (int64_t i = 0; i < loom_tensor_count(x); i++)
        grad[i % p->shape[0]] += loom_tensor_f32(x)[i] * loom_tensor_f32(x)[i] * loom_tensor_f32(d_y)[i];
    return LOOM_OK;
}

static loom_status run_square(
    loom_tape *tape, const problem *p, loom_tensor **x, loom_parameter *const *v, loom_tensor **output) {
    static const loom_op square = {"square", square_input, square_weight, NULL};
    loom_tensor *y;
    loom_node *node;
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 3, p->shape, &y));
    for (int64_t i = 0; i < loom_tensor_count(y); i++)
        loom_tensor_f32(y)[i] = v[0]->data[i % p->width] * loom_tensor_f32(x[0])[i] * loom_tensor_f32(x[0])[i];
    loom_status status =
        loom_tape_record(tape, &square, sizeof(loom_parameter *), x, 1, (loom_parameter *[]){v[0]}, 1, y, &node);
    if (!status && node) {
        *(loom_parameter **)loom_node_state(node) = v[0];
        status = loom_node_save(node, x[0]);
    }
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    *output = y;
    return LOOM_OK;
}

static loom_status recomputed_inner(loom_tape *tape, void *argument, loom_tensor *x, loom_tensor **output) {
    vector *const *v = argument;
    return loom_activate(tape, LOOM_GELU_ERF, x, &v[1]->parameter, output);
}

/* norm, then a recomputed activation inside the recomputed whole. */
static loom_status recomputed_outer(loom_tape *tape, void *argument, loom_tensor *x, loom_tensor **output) {
    vector *const *v = argument;
    loom_tensor *normed;
    LOOM_TRY(loom_norm(tape, x, &v[0]->parameter, NULL, 1e-5f, &normed));
    loom_status status = loom_recompute_call(tape, recomputed_inner, argument, NULL, normed, output);
    loom_tensor_release(normed);
    return status;
}

static loom_status run_recompute(
    loom_tape *tape, const problem *p, loom_tensor **x, loom_parameter *const *v, loom_tensor **output) {
    /* The parameter is the first member of its vector. */
    vector **both = malloc(2 * sizeof *both);
    CHECK(both && p->vectors == 2, "two vectors are needed");
    both[0] = (vector *)(void *)v[0];
    both[1] = (vector *)(void *)v[1];
    return loom_recompute_call(tape, recomputed_outer, both, free, x[0], output);
}

/* ---- the comparison ---- */

static void free_values(values *at) {
    for (int i = 0; i < MAX_INPUTS; i++)
        free(at->x[i]);
    free(at->weights);
}

static loom_status make_values(const problem *p, values *at) {
    *at = (values){0};
    for (int i = 0; i < MAX_INPUTS; i++) {
        at->x[i] = malloc((size_t)count_of(p) * sizeof(float));
        CHECK(at->x[i], "out of memory");
        fill(at->x[i], count_of(p), 10 + (uint32_t)i);
    }
    at->weights = malloc((size_t)count_of(p) * sizeof(float));
    CHECK(at->weights, "out of memory");
    fill(at->weights, count_of(p), 99);
    for (int i = 0; i < MAX_VECTORS; i++)
        vector_make(&at->vectors[i], i ? "bias" : "weight", p->width, 20 + (uint32_t)i);
    return LOOM_OK;
}

/* Runs the forward on fresh tensors; the caller releases x and output. */
static loom_status forward(
    loom_rank *rank, loom_tape *tape, const problem *p, values *at, loom_tensor **x, loom_tensor **output) {
    loom_parameter *parameters[MAX_VECTORS];
    for (int i = 0; i < MAX_VECTORS; i++)
        parameters[i] = &at->vectors[i].parameter;
    for (int i = 0; i < p->inputs; i++) {
        LOOM_TRY(make_tensor(rank, 3, p->shape, at->x[i], &x[i]));
        LOOM_TRY(loom_tape_leaf(tape, x[i]));
    }
    return p->run(tape, p, x, parameters, output);
}

static loom_status weighted_sum(loom_rank *rank, const problem *p, values *at, double *sum) {
    loom_tape_options options = {0};
    loom_tape *tape;
    loom_tensor *x[MAX_INPUTS] = {0}, *y = NULL;
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(forward(rank, tape, p, at, x, &y));
    *sum = 0;
    for (int64_t i = 0; i < loom_tensor_count(y); i++)
        *sum += (double)at->weights[i] * (double)loom_tensor_f32(y)[i];
    for (int i = 0; i < MAX_INPUTS; i++)
        loom_tensor_release(x[i]);
    loom_tensor_release(y);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static loom_status compare(
    loom_rank *rank, const problem *p, values *at, const char *what, float *element, int64_t count, const float *d) {
    float largest = 1;
    for (int64_t i = 0; i < count; i++)
        largest = fabsf(d[i]) > largest ? fabsf(d[i]) : largest;
    for (int64_t i = 0; i < count; i++) {
        float middle = element[i], step = ldexpf(1, -STEP_BITS);
        double above, below;
        element[i] = middle + step;
        double width = (double)element[i];
        LOOM_TRY(weighted_sum(rank, p, at, &above));
        element[i] = middle - step;
        width -= (double)element[i];
        LOOM_TRY(weighted_sum(rank, p, at, &below));
        element[i] = middle;
        double expected = (above - below) / width;
        CHECK(fabs(expected - (double)d[i]) <= 0x1p-8 * (double)largest,
            "%s: gradient %lld of %s is %.7g, differences give %.7g", p->name, (long long)i, what, (double)d[i],
            expected);
    }
    return LOOM_OK;
}

/* The gradients by the tape, twice: the second walk must add to the parameters' first. */
static loom_status check_problem(loom_rank *rank, const problem *p, values *at) {
    loom_tape_options options = {.record = true};
    float first[MAX_VECTORS][WIDEST];
    for (int walk = 0; walk < 2; walk++) {
        loom_tape *tape;
        loom_tensor *x[MAX_INPUTS] = {0}, *y = NULL, *d_y;
        LOOM_TRY(loom_tape_create(rank, &options, &tape));
        LOOM_TRY(forward(rank, tape, p, at, x, &y));
        LOOM_TRY(make_tensor(rank, y->dims, y->shape, at->weights, &d_y));
        LOOM_TRY(loom_tape_backward(tape, y, d_y));
        CHECK(memcmp(d_y->data, at->weights, (size_t)loom_tensor_count(d_y) * sizeof(float)) == 0,
            "%s: the walk changed the gradient it was given", p->name);
        for (int i = 0; i < p->inputs && walk == 0; i++) {
            loom_tensor *d_x = loom_tape_gradient(tape, x[i]);
            CHECK(d_x && loom_tensor_count(d_x) == count_of(p), "%s: input %d has no gradient", p->name, i);
            LOOM_TRY(compare(rank, p, at, i ? "x1" : "x0", at->x[i], count_of(p), loom_tensor_f32(d_x)));
        }
        for (int i = 0; i < p->vectors; i++) {
            vector *v = &at->vectors[i];
            CHECK(v->parameter.grad_written && v->parameter.pending_uses == 0, "%s: %s was not written", p->name,
                v->parameter.name);
            if (walk == 0) {
                memcpy(first[i], v->grad, sizeof first[i]);
                LOOM_TRY(compare(rank, p, at, v->parameter.name, v->data, p->width, v->grad));
            }
            for (int64_t e = 0; e < p->width && walk; e++)
                CHECK(fabsf(v->grad[e] - 2 * first[i][e]) <= 1e-4f * (1 + fabsf(first[i][e])),
                    "%s: element %lld of %s is %g after two walks, %g after one", p->name, (long long)e,
                    v->parameter.name, (double)v->grad[e], (double)first[i][e]);
        }
        for (int i = 0; i < MAX_INPUTS; i++)
            loom_tensor_release(x[i]);
        loom_tensor_release(y);
        loom_tensor_release(d_y);
        loom_tape_destroy(tape);
    }
    return LOOM_OK;
}

static loom_status on_rank(loom_rank *rank, void *argument) {
    values at;
    loom_status status = make_values(argument, &at);
    if (!status)
        status = check_problem(rank, argument, &at);
    free_values(&at);
    return status;
}

static void fill_rotation(problem *p) {
    for (int i = 0; i < POSITIONS * D / 2; i++) {
        p->cosine[i] = cosf(0.37f * (float)i);
        p->sine[i] = sinf(0.37f * (float)i);
    }
}

#define CLAIM(claim, ...)                                                                                              \
    static void claim(void **state) {                                                                                  \
        problem p = {.name = #claim, __VA_ARGS__};                                                                     \
        (void)state;                                                                                                   \
        fill_rotation(&p);                                                                                             \
        must_run(on_rank, &p);                                                                                         \
    }

#define SMALL .inputs = 1, .shape = {3, 2, 6}
#define QKV .inputs = 1, .shape = {5, 2, FUSED}

CLAIM(layer_norm_has_its_derivative, SMALL, .vectors = 2, .width = 6, .run = run_norm)
CLAIM(rms_norm_has_its_derivative, SMALL, .vectors = 1, .width = 6, .run = run_norm)
CLAIM(zero_centered_layer_norm_has_its_derivative, SMALL, .vectors = 2, .width = 6, .run = run_zero_centered_norm)
CLAIM(zero_centered_rms_norm_has_its_derivative, SMALL, .vectors = 1, .width = 6, .run = run_zero_centered_norm)
CLAIM(
    norm_of_heads_has_its_derivative, .inputs = 1, .shape = {3, 2, FUSED}, .vectors = 2, .width = D, .run = run_qk_norm)
CLAIM(zero_centered_norm_of_heads_has_its_derivative, .inputs = 1, .shape = {3, 2, FUSED}, .vectors = 2, .width = D,
    .run = run_qk_norm, .kind = true)
CLAIM(scaling_has_its_derivative, SMALL, .run = run_scale)
CLAIM(gelu_tanh_has_its_derivative, SMALL, .vectors = 1, .width = 6, .run = run_activate, .kind = LOOM_GELU_TANH)
CLAIM(gelu_erf_has_its_derivative, SMALL, .vectors = 1, .width = 6, .run = run_activate, .kind = LOOM_GELU_ERF)
CLAIM(swiglu_has_its_derivative, SMALL, .vectors = 1, .width = 6, .run = run_activate, .kind = LOOM_SWIGLU)
CLAIM(geglu_has_its_derivative, SMALL, .vectors = 1, .width = 6, .run = run_activate, .kind = LOOM_GEGLU)
CLAIM(geglu_erf_has_its_derivative, SMALL, .vectors = 1, .width = 6, .run = run_activate, .kind = LOOM_GEGLU_ERF)
CLAIM(swiglu_without_bias_has_its_derivative, SMALL, .run = run_activate, .kind = LOOM_SWIGLU)
CLAIM(bias_and_residual_have_their_derivative, .inputs = 2, .shape = {3, 2, 6}, .vectors = 1, .width = 6,
    .run = run_dropout)
CLAIM(dropout_drops_the_same_elements_backwards, .inputs = 2, .shape = {3, 2, 6}, .vectors = 1, .width = 6,
    .run = run_dropout, .probability = 0.3f)
CLAIM(dropout_alone_has_its_derivative, SMALL, .run = run_dropout, .probability = 0.3f)
CLAIM(sums_have_their_derivative, .inputs = 2, .shape = {3, 2, 6}, .run = run_add)
CLAIM(a_value_added_to_itself_gets_both_gradients, SMALL, .run = run_add)
CLAIM(a_gate_has_its_derivative, .inputs = 2, .shape = {3, 2, 6}, .vectors = 1, .width = 6, .run = run_gate)
CLAIM(a_value_that_gates_itself_gets_both_gradients, SMALL, .vectors = 1, .width = 6, .run = run_gate)
CLAIM(rotation_has_its_derivative, .inputs = 1, .shape = {3, 2, FUSED}, .run = run_rope, .kind = D)
CLAIM(partial_rotation_has_its_derivative, .inputs = 1, .shape = {3, 2, FUSED}, .run = run_rope, .kind = D / 2)
CLAIM(rotation_by_given_positions_has_its_derivative, .inputs = 1, .shape = {3, 2, FUSED}, .run = run_rope, .kind = -D)
CLAIM(attention_to_all_has_its_derivative, QKV, .run = run_attention)
CLAIM(causal_attention_has_its_derivative, QKV, .run = run_attention, .kind = CAUSAL)
CLAIM(windowed_attention_has_its_derivative, QKV, .run = run_attention, .kind = CAUSAL | WINDOW)
CLAIM(attention_inside_documents_has_its_derivative, QKV, .run = run_attention, .kind = CAUSAL | DOCUMENTS)
CLAIM(attention_drops_the_same_elements_backwards, QKV, .run = run_attention, .kind = CAUSAL | WINDOW | DOCUMENTS,
    .probability = 0.3f)
CLAIM(a_value_of_three_uses_gets_all_gradients, SMALL, .vectors = 2, .width = 6, .run = run_three_uses)
CLAIM(a_recomputation_in_a_recomputation_has_its_derivative, SMALL, .vectors = 2, .width = 6, .run = run_recompute)
CLAIM(an_operation_of_ones_own_has_its_derivative, SMALL, .vectors = 1, .width = 6, .run = run_square)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layer_norm_has_its_derivative),
        cmocka_unit_test(rms_norm_has_its_derivative),
        cmocka_unit_test(zero_centered_layer_norm_has_its_derivative),
        cmocka_unit_test(zero_centered_rms_norm_has_its_derivative),
        cmocka_unit_test(norm_of_heads_has_its_derivative),
        cmocka_unit_test(zero_centered_norm_of_heads_has_its_derivative),
        cmocka_unit_test(scaling_has_its_derivative),
        cmocka_unit_test(gelu_tanh_has_its_derivative),
        cmocka_unit_test(gelu_erf_has_its_derivative),
        cmocka_unit_test(swiglu_has_its_derivative),
        cmocka_unit_test(geglu_has_its_derivative),
        cmocka_unit_test(geglu_erf_has_its_derivative),
        cmocka_unit_test(swiglu_without_bias_has_its_derivative),
        cmocka_unit_test(bias_and_residual_have_their_derivative),
        cmocka_unit_test(dropout_drops_the_same_elements_backwards),
        cmocka_unit_test(dropout_alone_has_its_derivative),
        cmocka_unit_test(sums_have_their_derivative),
        cmocka_unit_test(a_value_added_to_itself_gets_both_gradients),
        cmocka_unit_test(a_gate_has_its_derivative),
        cmocka_unit_test(a_value_that_gates_itself_gets_both_gradients),
        cmocka_unit_test(rotation_has_its_derivative),
        cmocka_unit_test(partial_rotation_has_its_derivative),
        cmocka_unit_test(rotation_by_given_positions_has_its_derivative),
        cmocka_unit_test(attention_to_all_has_its_derivative),
        cmocka_unit_test(causal_attention_has_its_derivative),
        cmocka_unit_test(windowed_attention_has_its_derivative),
        cmocka_unit_test(attention_inside_documents_has_its_derivative),
        cmocka_unit_test(attention_drops_the_same_elements_backwards),
        cmocka_unit_test(a_value_of_three_uses_gets_all_gradients),
        cmocka_unit_test(a_recomputation_in_a_recomputation_has_its_derivative),
        cmocka_unit_test(an_operation_of_ones_own_has_its_derivative),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
