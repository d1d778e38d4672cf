/* Column- and row-parallel linear layers against the unsharded layer.
 *
 * Every result is a sum of at most N products of numbers in [-2, 2]; whatever the order of the additions, it is off by
 * at most N eps times the sum of their sizes, 4 N: two orders differ by at most 8 N^2 2^-24. A product that is missing
 * or counted twice shows as 1 or so. */
#include "parallel_support.h"

enum { S = 12, B = 2, H = 8, O = 24, ROWS = S * B, N = ROWS };
static const double tolerance = 8.0 * N * N * 0x1p-24;

/* One layer with its data: x [S, B, in] and d_y [S, B, out] of the whole. */
typedef struct whole {
    float *x, *weight, *bias, *d_y;
} whole;

typedef struct result {
    loom_tensor *x, *y, *d_x;
    loom_parameter weight, bias;
    loom_tape *tape;
} result;

static void result_free(result *r) {
    loom_tensor_release(r->x);
    loom_tensor_release(r->y);
    loom_tape_destroy(r->tape);
    parameter_free(&r->weight);
    parameter_free(&r->bias);
}

/* Runs forward and backward on parts of the data; tp NULL is the twin. */
static loom_status run_layer(
    loom_rank *rank, loom_comm *tp, const layout *at, bool column, bool defer, const whole *w, result *r) {
    int size = tp ? loom_comm_size(tp) : 1, me = tp ? loom_comm_rank(tp) : 0;
    bool sp = tp && at->sequence_parallel;
    int64_t in = column ? H : O, out = column ? O : H;
    int64_t x_rows = sp && column ? S / size : S, y_rows = sp && !column ? S / size : S;
    int64_t local_in = column ? in : in / size, local_out = column ? out / size : out;
    const float *x_part = w->x + (x_rows < S ? me * x_rows * B * in : 0);
    const float *d_y_part = w->d_y + (y_rows < S ? me * y_rows * B * out : 0);
    float *x = columns(x_part, x_rows * B, in, column ? 0 : me * local_in, local_in);
    float *d_y = columns(d_y_part, y_rows * B, out, column ? me * local_out : 0, local_out);
    float *weight = column ? columns(w->weight + me * local_out * in, local_out, in, 0, in)
                           : columns(w->weight, out, in, me * local_in, local_in);
    loom_tape_options options = {.record = true, .defer_weights = defer};
    loom_tensor *d = NULL;
    *r = (result){0};
    loom_status status = x && d_y && weight ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory");
    if (!status)
        status = parameter_make(&r->weight, "weight", local_out, local_in, weight);
    if (!status)
        status = parameter_make(&r->bias, "bias", local_out, 0, w->bias + (column ? me * local_out : 0));
    if (!status)
        status = loom_tape_create(rank, &options, &r->tape);
    if (!status)
        status = tensor_make(rank, 3, (int64_t[]){x_rows, B, local_in}, x, &r->x);
    if (!status)
        status = loom_tape_leaf(r->tape, r->x);
    if (!status && column)
        status = loom__column_linear(r->tape, r->x, &r->weight, &r->bias, tp, sp, &r->y);
    if (!status && !column)
        status = loom__row_linear(r->tape, r->x, &r->weight, tp, sp, &r->y);
    if (!status)
        status = loom_tensor_ready(r->y);
    if (!status)
        status = tensor_make(rank, 3, (int64_t[]){y_rows, B, local_out}, d_y, &d);
    if (!status)
        status = loom_tape_backward(r->tape, r->y, d);
    if (!status && defer)
        status = loom_tape_run_weights(r->tape);
    if (!status)
        r->d_x = loom_tape_gradient(r->tape, r->x);
    loom_tensor_release(d);
    free(x);
    free(d_y);
    free(weight);
    return status;
}

static loom_status compare_column(const result *part, const result *twin, int size, int me, bool sp) {
    int64_t o = O / size, s = sp ? S / size : S;
    LOOM_TRY(compare("y", loom_tensor_f32(part->y), ROWS, o, loom_tensor_f32(twin->y), O, me * o, tolerance));
    CHECK(part->d_x && part->d_x->shape[0] == s, "d_x has not %lld rows", (long long)s);
    LOOM_TRY(compare("d_x", loom_tensor_f32(part->d_x), s * B, H,
        loom_tensor_f32(twin->d_x) + (sp ? me * s * B * H : 0), H, 0, tolerance));
    LOOM_TRY(compare("d_weight", part->weight.grad, o, H, twin->weight.grad + me * o * H, H, 0, tolerance));
    return compare("d_bias", part->bias.grad, 1, o, twin->bias.grad, O, me * o, tolerance);
}

static loom_status compare_row(const result *part, const result *twin, int size, int me, bool sp) {
    int64_t i = O / size, s = sp ? S / size : S;
    CHECK(part->y->shape[0] == s, "y has %lld rows, expected %lld", (long long)part->y->shape[0], (long long)s);
    LOOM_TRY(compare("y", loom_tensor_f32(part->y), s * B, H, loom_tensor_f32(twin->y) + (sp ? me * s * B * H : 0), H,
        0, tolerance));
    LOOM_TRY(compare("d_x", loom_tensor_f32(part->d_x), ROWS, i, loom_tensor_f32(twin->d_x), O, me * i, tolerance));
    return compare("d_weight", part->weight.grad, H, i, twin->weight.grad, O, me * i, tolerance);
}

enum { COLUMN, ROW, COLUMN_DEFERRED, ROW_DEFERRED };

static loom_status on_rank(loom_rank *rank, void *argument) {
    const layout *at = argument;
    bool column = at->kind == COLUMN || at->kind == COLUMN_DEFERRED, defer = at->kind >= COLUMN_DEFERRED;
    loom_comm *tp = loom_rank_world(rank);
    whole w = {
        numbers(ROWS * (column ? H : O), 1), numbers(O * H, 2), numbers(O, 3), numbers(ROWS * (column ? O : H), 4)};
    CHECK(w.x && w.weight && w.bias && w.d_y, "out of memory");
    result part, twin;
    loom_status status = run_layer(rank, tp, at, column, defer, &w, &part);
    if (!status)
        status = run_layer(rank, NULL, at, column, false, &w, &twin);
    if (!status)
        status = (column ? compare_column : compare_row)(
            &part, &twin, loom_comm_size(tp), loom_comm_rank(tp), at->sequence_parallel);
    if (!status) {
        result_free(&part);
        result_free(&twin);
        if (loom_rank_memory(rank).in_use)
            status = loom_fail(LOOM_ERR_INTERNAL, "%zu bytes are still in use", loom_rank_memory(rank).in_use);
    }
    free(w.x);
    free(w.weight);
    free(w.bias);
    free(w.d_y);
    return status;
}

static void column_linear_equals_the_unsharded_layer(void **state) {
    (void)state;
    on_all_layouts(on_rank, COLUMN);
}

static void row_linear_equals_the_unsharded_layer(void **state) {
    (void)state;
    on_all_layouts(on_rank, ROW);
}

static void deferred_weight_gradients_equal_the_unsharded_layer(void **state) {
    (void)state;
    on_all_layouts(on_rank, COLUMN_DEFERRED);
    on_all_layouts(on_rank, ROW_DEFERRED);
}

/* A frozen weight: the input still gets its gradient, a trainable bias its own, and no gather is left behind. */
static loom_status frozen_on_rank(loom_rank *rank, void *argument) {
    const layout *at = argument;
    loom_comm *tp = loom_rank_world(rank);
    int64_t o = O / loom_comm_size(tp), s = at->sequence_parallel ? S / loom_comm_size(tp) : S;
    float *values = numbers(ROWS * O, 5);
    loom_parameter weight, bias;
    loom_tape_options options = {.record = true};
    loom_tape *tape;
    loom_tensor *x, *y;
    CHECK(values, "out of memory");
    LOOM_TRY(parameter_make(&weight, "weight", o, H, values));
    LOOM_TRY(parameter_make(&bias, "bias", o, 0, values));
    float *frozen = weight.grad;
    weight.grad = NULL;
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(tensor_make(rank, 3, (int64_t[]){s, B, H}, values, &x));
    LOOM_TRY(loom_tape_leaf(tape, x));
    LOOM_TRY(loom__column_linear(tape, x, &weight, &bias, tp, at->sequence_parallel, &y));
    LOOM_TRY(loom_tape_backward(tape, y, y));
    CHECK(loom_tape_gradient(tape, x), "the input has no gradient");
    for (int64_t i = 0; i < o; i++)
        CHECK(isfinite(bias.grad[i]), "the bias has no gradient");
    CHECK(isnan(frozen[0]) && !weight.grad_written, "the frozen weight has a gradient");
    loom_tensor_release(x);
    loom_tensor_release(y);
    loom_tape_destroy(tape);
    weight.grad = frozen;
    parameter_free(&weight);
    parameter_free(&bias);
    free(values);
    return LOOM_OK;
}

static void a_frozen_weight_passes_the_gradient_on(void **state) {
    (void)state;
    on_all_layouts(frozen_on_rank, 0);
}

/* All ranks see the same wrong shapes, so all refuse before anything has started. */
static loom_status refuse_on_rank(loom_rank *rank, void *argument) {
    const layout *at = argument;
    loom_comm *tp = loom_rank_world(rank);
    int size = loom_comm_size(tp);
    float *values = numbers(ROWS * O, 6);
    loom_parameter weight;
    loom_tape_options options = {.record = true};
    loom_tape *tape;
    loom_tensor *x, *odd, *y = NULL;
    CHECK(values, "out of memory");
    LOOM_TRY(parameter_make(&weight, "qkv.weight", O, H, values));
    LOOM_TRY(loom_tape_create(rank, &options, &tape));
    LOOM_TRY(tensor_make(rank, 3, (int64_t[]){S, B, H + 1}, values, &x));
    CHECK(loom__column_linear(tape, x, &weight, NULL, tp, false, &y) == LOOM_ERR_ARGUMENT &&
              strstr(loom_error_message(), "qkv.weight has width 9, expected 8"),
        "a wrong width: %s", loom_error_message());
    CHECK(loom__row_linear(tape, x, &weight, tp, false, &y) == LOOM_ERR_ARGUMENT, "a wrong width");
    LOOM_TRY(tensor_make(rank, 3, (int64_t[]){S + 1, B, H}, values, &odd));
    if (at->sequence_parallel)
        CHECK(loom__row_linear(tape, odd, &weight, tp, true, &y) == LOOM_ERR_CONFIG &&
                  strstr(loom_error_message(), "13") && strstr(loom_error_message(), "nearest"),
            "%d ranks took 13 positions: %s", size, loom_error_message());
    loom_tensor_release(x);
    loom_tensor_release(odd);
    loom_tape_destroy(tape);
    parameter_free(&weight);
    free(values);
    return LOOM_OK;
}

static void widths_and_sequences_that_do_not_fit_are_refused(void **state) {
    (void)state;
    on_all_layouts(refuse_on_rank, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(column_linear_equals_the_unsharded_layer),
        cmocka_unit_test(row_linear_equals_the_unsharded_layer),
        cmocka_unit_test(deferred_weight_gradients_equal_the_unsharded_layer),
        cmocka_unit_test(a_frozen_weight_passes_the_gradient_on),
        cmocka_unit_test(widths_and_sequences_that_do_not_fit_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
