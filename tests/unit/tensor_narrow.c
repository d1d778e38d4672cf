/* Operations on bf16 and fp16 tensors against the same operations in fp32 on the same (rounded) numbers. Both compute
 * in fp32 and differ in that the 16-bit one rounds what it hands on: an output is off by half a unit of its size at
 * most, a gradient that was computed from such an output by a few. */
#include "tensor_support.h"

#include "tensor/dtype.h"

enum { S = 5, B = 2, GROUPS = 2, PER_GROUP = 2, D = 6, QKV = GROUPS * (PER_GROUP + 2) * D, H = 16, PARAMETERS = 2 };

static const loom_dtype dtypes[] = {LOOM_BF16, LOOM_F16};
enum { DTYPES = 2 };

static double unit_of(loom_dtype dtype) {
    return dtype == LOOM_BF16 ? 0x1p-8 : 0x1p-11;
}

static float widened(loom_dtype dtype, uint16_t x) {
    return dtype == LOOM_BF16 ? loom_bf16_to_f32(x) : loom_f16_to_f32(x);
}

static uint16_t rounded(loom_dtype dtype, float x) {
    return dtype == LOOM_BF16 ? loom_f32_to_bf16(x) : loom_f32_to_f16(x);
}

/* A tensor of these numbers, rounded to `holds`, kept in dtype. */
static loom_status make_rounded(loom_rank *rank, loom_dtype dtype, loom_dtype holds, int64_t width, uint32_t seed,
    float from, loom_tensor **tensor) {
    float values[S * B * QKV];
    fill(values, S * B * width, seed);
    LOOM_TRY(loom_tensor_create(rank, dtype, 3, (int64_t[]){S, B, width}, tensor));
    for (int64_t i = 0; i < S * B * width; i++) {
        uint16_t bits = rounded(holds, values[i] + from);
        if (dtype == LOOM_F32)
            loom_tensor_f32(*tensor)[i] = widened(holds, bits);
        else
            ((uint16_t *)(*tensor)->data)[i] = bits;
    }
    return LOOM_OK;
}

typedef struct narrow_vector {
    vector fp32;
    uint16_t bits[WIDEST];
} narrow_vector;

static void narrow_vector_make(narrow_vector *v, loom_dtype dtype, loom_dtype holds, int64_t width, uint32_t seed) {
    vector_make(&v->fp32, "weight", width, seed);
    for (int64_t i = 0; i < width; i++) {
        v->bits[i] = rounded(holds, v->fp32.data[i]);
        v->fp32.data[i] = widened(holds, v->bits[i]);
    }
    if (dtype != LOOM_F32)
        loom__parameter_narrow(&v->fp32.parameter, dtype, v->bits);
}

typedef struct given {
    loom_tensor *x, *other;
    loom_parameter *parameters[PARAMETERS];
} given;

typedef loom_status (*operation)(loom_tape *tape, const given *in, loom_tensor **y);

static const int64_t sample[B] = {3, 11};

static loom_status do_layernorm(loom_tape *tape, const given *in, loom_tensor **y) {
    return loom_norm(tape, in->x, in->parameters[0], in->parameters[1], 1e-2f, y);
}

static loom_status do_rmsnorm(loom_tape *tape, const given *in, loom_tensor **y) {
    return loom_norm(tape, in->x, in->parameters[0], NULL, 1e-2f, y);
}

static loom_status do_zero_centered(loom_tape *tape, const given *in, loom_tensor **y) {
    return loom_zero_centered_norm(tape, in->x, in->parameters[0], in->parameters[1], 1e-2f, y);
}

static loom_status do_qk_norm(loom_tape *tape, const given *in, loom_tensor **y) {
    return loom_qk_norm(tape, in->x, in->parameters[0], in->parameters[1], GROUPS, PER_GROUP, D, 1e-2f, false, y);
}

static loom_status do_zero_centered_qk_norm(loom_tape *tape, const given *in, loom_tensor **y) {
    return loom_qk_norm(tape, in->x, in->parameters[0], in->parameters[1], GROUPS, PER_GROUP, D, 1e-2f, true, y);
}

static loom_status do_gelu(loom_tape *tape, const given *in, loom_tensor **y) {
    return loom_activate(tape, LOOM_GELU_TANH, in->x, in->parameters[0], y);
}

static loom_status do_swiglu(loom_tape *tape, const given *in, loom_tensor **y) {
    return loom_activate(tape, LOOM_SWIGLU, in->x, NULL, y);
}

static loom_status do_dropout(loom_tape *tape, const given *in, loom_tensor **y) {
    loom_dropout dropout = {0.25f, 7, 2, LOOM_DROPOUT_MLP};
    return loom_bias_dropout_add(
        tape, in->x, in->parameters[0], in->other, &dropout, sample, loom_positions_from(3), y);
}

static loom_status do_residual(loom_tape *tape, const given *in, loom_tensor **y) {
    loom_dropout none = {0};
    return loom_bias_dropout_add(tape, in->x, NULL, in->other, &none, NULL, loom_positions_from(0), y);
}

static loom_status do_add(loom_tape *tape, const given *in, loom_tensor **y) {
    return loom_add(tape, in->x, in->other, y);
}

static loom_status do_gate(loom_tape *tape, const given *in, loom_tensor **y) {
    return loom_sigmoid_gate(tape, in->x, in->parameters[0], in->other, y);
}

static loom_status do_scale(loom_tape *tape, const given *in, loom_tensor **y) {
    return loom_scale(tape, in->x, -1.25f, y);
}

/* The gradient of x is a sum of two. */
static loom_status do_twice(loom_tape *tape, const given *in, loom_tensor **y) {
    loom_tensor *scaled;
    LOOM_TRY(loom_scale(tape, in->x, 3.0f, &scaled));
    loom_status status = loom_add(tape, in->x, scaled, y);
    loom_tensor_release(scaled);
    return status;
}

static loom_status do_rope(loom_tape *tape, const given *in, loom_tensor **y) {
    static const float cosine[S * D / 2] = {1, 1, 1, .8f, .6f, .5f, .5f, .4f, .9f, 0, -.5f, .1f, .2f, .3f, .4f};
    static const float sine[S * D / 2] = {0, 0, 0, .6f, .8f, .86f, .86f, .9f, .4f, 1, .86f, .99f, .98f, .95f, .9f};
    loom_rope_table table = {S, D, cosine, sine};
    loom_tensor *moved;
    LOOM_TRY(loom_scale(tape, in->x, 1.0f, &moved)); /* it turns its input in place */
    loom_status status = loom_rope(tape, moved, &table, GROUPS, PER_GROUP, D, NULL, 0, y);
    loom_tensor_release(moved);
    return status;
}

static loom_status do_attention(loom_tape *tape, const given *in, loom_tensor **y) {
    loom_attention_options options = {
        .n = GROUPS * PER_GROUP, .g = GROUPS, .d = D, .scale = 0.4f, .causal = true, .sample = sample};
    return loom_attention(tape, in->x, &options, y);
}

static loom_status recomputed(loom_tape *tape, void *argument, loom_tensor *x, loom_tensor **y) {
    given in = *(given *)argument;
    in.x = x;
    return do_layernorm(tape, &in, y);
}

static loom_status do_recompute(loom_tape *tape, const given *in, loom_tensor **y) {
    return loom_recompute_call(tape, recomputed, (void *)(uintptr_t)in, NULL, in->x, y);
}

typedef struct operation_case {
    const char *name;
    operation run;
    int64_t x_width, y_width, parameter_width;
} operation_case;

static const operation_case cases[] = {
    {"layernorm", do_layernorm, H, H, H},
    {"rmsnorm", do_rmsnorm, H, H, H},
    {"zero-centered norm", do_zero_centered, H, H, H},
    {"norm of heads", do_qk_norm, QKV, QKV, D},
    {"zero-centered norm of heads", do_zero_centered_qk_norm, QKV, QKV, D},
    {"gelu with a bias", do_gelu, H, H, H},
    {"swiglu", do_swiglu, 2 * H, H, 1},
    {"bias, dropout and residual", do_dropout, H, H, H},
    {"residual", do_residual, H, H, 1},
    {"add", do_add, H, H, 1},
    {"gate", do_gate, H, H, H},
    {"scale", do_scale, H, H, 1},
    {"a value used twice", do_twice, H, H, 1},
    {"rotation", do_rope, QKV, QKV, 1},
    {"attention", do_attention, QKV, GROUPS *PER_GROUP *D, 1},
    {"recomputation", do_recompute, H, H, H},
};
enum { CASES = sizeof cases / sizeof *cases, MOST = S * B * QKV };

/* What a run gives, in fp32. */
typedef struct results {
    float y[MOST], d_x[MOST], d_other[MOST], grads[PARAMETERS][WIDEST];
    bool has_other, has_grad[PARAMETERS];
} results;

static loom_status take(loom_dtype dtype, const loom_tensor *from, float *to) {
    CHECK(from->dtype == dtype, "a result is kept in %s, expected %s", loom_dtype_name(from->dtype),
        loom_dtype_name(dtype));
    for (int64_t i = 0; i < loom_tensor_count(from); i++)
        to[i] = dtype == LOOM_F32 ? loom_tensor_f32(from)[i] : widened(dtype, ((uint16_t *)from->data)[i]);
    return LOOM_OK;
}

/* Runs one case on numbers that `holds` can hold, kept in dtype. */
static loom_status run_case(loom_rank *rank, const operation_case *c, loom_dtype dtype, loom_dtype holds, results *r) {
    narrow_vector weights[PARAMETERS];
    given in = {0};
    *r = (results){0};
    for (int i = 0; i < PARAMETERS; i++) {
        narrow_vector_make(&weights[i], dtype, holds, c->parameter_width, (uint32_t)i + 5);
        in.parameters[i] = &weights[i].fp32.parameter;
    }
    loom_tensor *y = NULL, *d_y = NULL;
    loom_tape *tape;
    loom_tape_options options = {.record = true, .check_finite = true};
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(make_rounded(rank, dtype, holds, c->x_width, 1, 0, &in.x));
    LOOM_TRY(make_rounded(rank, dtype, holds, c->y_width, 2, 0, &in.other));
    LOOM_TRY(make_rounded(rank, dtype, holds, c->y_width, 3, 0, &d_y));
    LOOM_TRY(loom_tape_leaf(tape, in.x));
    LOOM_TRY(loom_tape_leaf(tape, in.other));
    LOOM_TRY(c->run(tape, &in, &y));
    LOOM_TRY(take(dtype, y, r->y));
    LOOM_TRY(loom_tape_backward(tape, y, d_y));
    LOOM_TRY(take(dtype, loom_tape_gradient(tape, in.x), r->d_x));
    r->has_other = loom_tape_gradient(tape, in.other) != NULL;
    if (r->has_other)
        LOOM_TRY(take(dtype, loom_tape_gradient(tape, in.other), r->d_other));
    for (int i = 0; i < PARAMETERS; i++) {
        r->has_grad[i] = weights[i].fp32.parameter.grad_written;
        memcpy(r->grads[i], weights[i].fp32.grad, sizeof r->grads[i]);
    }
    loom_tensor_release(y);
    loom_tensor_release(d_y);
    loom_tensor_release(in.x);
    loom_tensor_release(in.other);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static loom_status near(
    const char *name, const char *what, const float *found, const float *expected, int64_t count, double units) {
    double largest = 0;
    for (int64_t i = 0; i < count; i++)
        largest = fmax(largest, fabs((double)expected[i]));
    CHECK(largest > 0.1, "%s: %s is all but zero, nothing is compared", name, what);
    for (int64_t i = 0; i < count; i++)
        CHECK(fabs((double)found[i] - (double)expected[i]) <= units * largest,
            "%s: element %lld of %s is %.9g, in fp32 %.9g (allowed %.3g)", name, (long long)i, what, (double)found[i],
            (double)expected[i], units * largest);
    return LOOM_OK;
}

static loom_status compare_case(loom_rank *rank, const operation_case *c, loom_dtype dtype) {
    static const int64_t rows = S * B;
    double unit = unit_of(dtype);
    results *found = malloc(sizeof *found), *expected = malloc(sizeof *expected);
    CHECK(found && expected, "out of memory");
    LOOM_TRY(run_case(rank, c, dtype, dtype, found));
    LOOM_TRY(run_case(rank, c, LOOM_F32, dtype, expected));
    LOOM_TRY(near(c->name, "y", found->y, expected->y, rows * c->y_width, unit));
    LOOM_TRY(near(c->name, "d_x", found->d_x, expected->d_x, rows * c->x_width, 4 * unit));
    CHECK(found->has_other == expected->has_other, "%s: the second input's gradient is missing", c->name);
    if (found->has_other)
        LOOM_TRY(near(c->name, "d_other", found->d_other, expected->d_other, rows * c->y_width, 2 * unit));
    for (int i = 0; i < PARAMETERS; i++) {
        CHECK(found->has_grad[i] == expected->has_grad[i], "%s: gradient %d of a weight is missing", c->name, i);
        if (found->has_grad[i])
            LOOM_TRY(near(c->name, "the gradient of a weight", found->grads[i], expected->grads[i], c->parameter_width,
                4 * unit));
    }
    free(found);
    free(expected);
    return LOOM_OK;
}

static loom_status compare_all(loom_rank *rank, void *argument) {
    (void)argument;
    for (int d = 0; d < DTYPES; d++)
        for (int c = 0; c < CASES; c++)
            LOOM_TRY(compare_case(rank, &cases[c], dtypes[d]));
    return LOOM_OK;
}

static void operations_round_what_they_give_in_fp32(void **state) {
    (void)state;
    must_run(compare_all, NULL);
}

/* ---- between dtypes ---- */

/* y = 3 x in fp32, x and the gradients that reach it in 16 bits. */
static loom_status there_and_back(loom_rank *rank, void *argument) {
    (void)argument;
    for (int d = 0; d < DTYPES; d++) {
        loom_tape *tape;
        loom_tensor *x, *wide, *scaled, *y, *same, *d_y;
        LOOM_TRY(loom_tape_create(rank, &(loom_tape_options){.record = true}, &tape));
        LOOM_TRY(make_rounded(rank, dtypes[d], dtypes[d], H, 1, 0, &x));
        LOOM_TRY(make_rounded(rank, dtypes[d], dtypes[d], H, 2, 0, &d_y));
        LOOM_TRY(loom_tape_leaf(tape, x));
        LOOM_TRY(loom_cast(tape, x, LOOM_F32, &wide));
        LOOM_TRY(loom_scale(tape, wide, 3, &scaled));
        LOOM_TRY(loom_cast(tape, scaled, dtypes[d], &y));
        LOOM_TRY(loom_cast(tape, y, dtypes[d], &same));
        CHECK(same == y, "a cast to the same dtype made something new");
        LOOM_TRY(loom_tape_backward(tape, y, d_y));
        const loom_tensor *d_x = loom_tape_gradient(tape, x);
        CHECK(y->dtype == dtypes[d] && d_x && d_x->dtype == dtypes[d], "a result has another dtype");
        for (int64_t i = 0; i < S * B * H; i++) {
            uint16_t from = ((uint16_t *)x->data)[i], d_from = ((uint16_t *)d_y->data)[i];
            CHECK(((uint16_t *)y->data)[i] == rounded(dtypes[d], 3 * widened(dtypes[d], from)), "y is another number");
            CHECK(((uint16_t *)d_x->data)[i] == rounded(dtypes[d], 3 * widened(dtypes[d], d_from)),
                "d_x is another number");
        }
        loom_tensor *const all[] = {x, wide, scaled, y, same, d_y};
        for (int i = 0; i < 6; i++)
            loom_tensor_release(all[i]);
        loom_tape_destroy(tape);
    }
    return LOOM_OK;
}

static void casts_round_on_the_way_there_and_take_gradients_back(void **state) {
    (void)state;
    must_run(there_and_back, NULL);
}

/* ---- refusals ---- */

static loom_status expect(loom_status status, loom_status wanted, const char *first, const char *second) {
    CHECK(status == wanted, "found status %d, expected %d", (int)status, (int)wanted);
    CHECK(strstr(loom_error_message(), first) && strstr(loom_error_message(), second),
        "\"%s\" or \"%s\" is missing in: %s", first, second, loom_error_message());
    return LOOM_OK;
}

static loom_status mixtures(loom_rank *rank, void *argument) {
    narrow_vector fp32, bf16;
    loom_dropout none = {0};
    loom_tape *tape;
    loom_tensor *x = NULL, *wide = NULL, *y = NULL, *f64 = NULL;
    (void)argument;
    narrow_vector_make(&fp32, LOOM_F32, LOOM_BF16, H, 1);
    narrow_vector_make(&bf16, LOOM_BF16, LOOM_BF16, H, 1);
    loom_parameter *weight = &fp32.fp32.parameter, *narrow = &bf16.fp32.parameter;
    loom_tape_options options = {.record = true};
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(make_rounded(rank, LOOM_BF16, LOOM_BF16, H, 1, 0, &x));
    LOOM_TRY(make_rounded(rank, LOOM_F32, LOOM_BF16, H, 1, 0, &wide));
    LOOM_TRY(loom_tensor_create(rank, LOOM_F64, 3, (int64_t[]){1, 1, H}, &f64));
    LOOM_TRY(expect(loom_norm(tape, x, weight, NULL, 1e-5f, &y), LOOM_ERR_ARGUMENT, "weight is kept in F32", "BF16"));
    LOOM_TRY(expect(loom_norm(tape, wide, narrow, NULL, 1e-5f, &y), LOOM_ERR_ARGUMENT, "in BF16", "input in F32"));
    LOOM_TRY(expect(loom_activate(tape, LOOM_GELU_TANH, x, weight, &y), LOOM_ERR_ARGUMENT, "activation", "F32"));
    LOOM_TRY(expect(loom_add(tape, x, wide, &y), LOOM_ERR_ARGUMENT, "add: one input is kept in BF16", "F32"));
    LOOM_TRY(expect(loom_bias_dropout_add(tape, x, NULL, wide, &none, NULL, loom_positions_from(0), &y),
        LOOM_ERR_ARGUMENT, "residual", "expected one dtype"));
    LOOM_TRY(expect(
        loom_scale(tape, f64, 2, &y), LOOM_ERR_UNSUPPORTED, "not supported yet: scale of F64", "F32, BF16, F16"));
    LOOM_TRY(expect(loom_cast(tape, x, LOOM_F16, &y), LOOM_ERR_UNSUPPORTED, "cast of BF16 to F16", "F32"));
    LOOM_TRY(expect(loom_cast(tape, x, LOOM_I64, &y), LOOM_ERR_UNSUPPORTED, "cast of I64", "F32, BF16, F16"));
    LOOM_TRY(loom_tape_leaf(tape, x));
    LOOM_TRY(loom_scale(tape, x, 2, &y));
    LOOM_TRY(expect(loom_tape_backward(tape, y, wide), LOOM_ERR_ARGUMENT, "gradient given is kept in F32", "BF16"));
    loom_tensor_release(x);
    loom_tensor_release(y);
    loom_tensor_release(wide);
    loom_tensor_release(f64);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static void mixtures_of_dtypes_are_refused_by_name(void **state) {
    (void)state;
    must_run(mixtures, NULL);
}

static loom_status with_fp32_kernels(loom_rank *rank, void *argument) {
    loom_tape *tape;
    loom_tensor *x = NULL, *y = NULL;
    (void)argument;
    LOOM_TRY(loom_tape_create(rank, &(loom_tape_options){.record = true}, &tape));
    LOOM_TRY(make_rounded(rank, LOOM_BF16, LOOM_BF16, H, 1, 0, &x));
    LOOM_TRY(expect(loom_scale(tape, x, 2, &y), LOOM_ERR_UNSUPPORTED, "scale of BF16", "kernels 'mine'"));
    loom_tensor_release(x);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static void kernels_without_16_bit_tables_refuse_such_tensors(void **state) {
    (void)state;
    loom_kernels mine = *loom_kernels_reference();
    mine.name = "mine";
    mine.bf16 = mine.f16 = NULL;
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.kernels = &mine;
    if (loom_run_local(1, with_fp32_kernels, NULL, &options))
        fail_msg("%s", loom_error_message());
}

static loom_status overflows(loom_rank *rank, void *argument) {
    loom_tape *tape;
    loom_tensor *x = NULL, *y = NULL;
    (void)argument;
    LOOM_TRY(loom_tape_create(rank, &(loom_tape_options){.record = true, .check_finite = true}, &tape));
    LOOM_TRY(make_rounded(rank, LOOM_F16, LOOM_F16, H, 1, 40000.0f, &x));
    loom_tape_scope(tape, "decoder.layers.3");
    LOOM_TRY(expect(loom_add(tape, x, x, &y), LOOM_ERR_NUMERIC, "output of add", "decoder.layers.3"));
    loom_tensor_release(x);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static void an_overflow_of_fp16_is_found_where_it_happens(void **state) {
    (void)state;
    must_run(overflows, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(operations_round_what_they_give_in_fp32),
        cmocka_unit_test(casts_round_on_the_way_there_and_take_gradients_back),
        cmocka_unit_test(mixtures_of_dtypes_are_refused_by_name),
        cmocka_unit_test(kernels_without_16_bit_tables_refuse_such_tensors),
        cmocka_unit_test(an_overflow_of_fp16_is_found_where_it_happens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
