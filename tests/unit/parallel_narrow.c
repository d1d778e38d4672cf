/* What the linear layers and the ends of the model promise of bf16 and fp16 beyond being near fp32 (which nn_narrow.c
 * looks at): gradients of weights are added in fp32, mixtures of dtypes are refused, gathered logits are exact. */
#include "parallel_support.h"

#include "tensor/dtype.h"

enum { S = 4, B = 2, H = 8, O = 12 };

static loom_status narrow_tensor(loom_rank *rank, loom_dtype dtype, int64_t width, float value, loom_tensor **tensor) {
    LOOM_TRY(loom_tensor_create(rank, dtype, 3, (int64_t[]){S, B, width}, tensor));
    for (int64_t i = 0; i < S * B * width; i++)
        ((uint16_t *)(*tensor)->data)[i] = dtype == LOOM_BF16 ? loom_f32_to_bf16(value) : loom_f32_to_f16(value);
    return LOOM_OK;
}

typedef struct narrow_parameter {
    loom_parameter fp32;
    uint16_t bits[O * H];
} narrow_parameter;

static loom_status narrow_parameter_make(narrow_parameter *p, loom_dtype dtype, int64_t rows, int64_t cols) {
    float values[O * H];
    fill(values, O * H, 3);
    LOOM_TRY(parameter_make(&p->fp32, "weight", rows, cols, values));
    p->fp32.memory = p->fp32.data;
    loom__parameter_narrow(&p->fp32, dtype, p->bits);
    CHECK(!p->fp32.data && !p->fp32.memory && p->fp32.data16 == p->bits, "the fp32 values are still there");
    return LOOM_OK;
}

/* ---- gradients over several microbatches ---- */

/* One microbatch in which every element of the weight's gradient is S * B * value. */
static loom_status one_microbatch(loom_rank *rank, loom_dtype dtype, bool column, loom_parameter *weight, float value) {
    int64_t in = column ? H : O, out = column ? O : H;
    loom_tape *tape;
    loom_tensor *x, *d_y, *y;
    LOOM_TRY(loom_tape_create(rank, &(loom_tape_options){.record = true}, &tape));
    LOOM_TRY(narrow_tensor(rank, dtype, in, value, &x));
    LOOM_TRY(narrow_tensor(rank, dtype, out, 1, &d_y));
    LOOM_TRY(loom_tape_leaf(tape, x));
    if (column)
        LOOM_TRY(loom__column_linear(tape, x, weight, NULL, NULL, false, &y));
    else
        LOOM_TRY(loom__row_linear(tape, x, weight, NULL, false, &y));
    CHECK(y->dtype == dtype, "the output is kept in %s", loom_dtype_name(y->dtype));
    LOOM_TRY(loom_tape_backward(tape, y, d_y));
    CHECK(loom_tape_gradient(tape, x)->dtype == dtype, "d_x is kept in %s",
        loom_dtype_name(loom_tape_gradient(tape, x)->dtype));
    loom_tensor_release(x);
    loom_tensor_release(y);
    loom_tensor_release(d_y);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

/* 8 + 4 * 2^-9 * 8: bf16 would keep 8, and fp16 too. */
static loom_status add_small_gradients(loom_rank *rank, void *argument) {
    static const loom_dtype dtypes[] = {LOOM_BF16, LOOM_F16};
    (void)argument;
    for (int d = 0; d < 2; d++)
        for (int column = 0; column < 2; column++) {
            narrow_parameter weight;
            LOOM_TRY(narrow_parameter_make(&weight, dtypes[d], column ? O : H, column ? H : O));
            LOOM_TRY(one_microbatch(rank, dtypes[d], column, &weight.fp32, 1));
            for (int i = 0; i < 4; i++)
                LOOM_TRY(one_microbatch(rank, dtypes[d], column, &weight.fp32, 0x1p-12f));
            for (int i = 0; i < O * H; i++)
                CHECK(weight.fp32.grad[i] == 8 + 4 * 0x1p-9f, "%s: element %d of the gradient is %.9g",
                    loom_dtype_name(dtypes[d]), i, (double)weight.fp32.grad[i]);
            free(weight.fp32.grad);
        }
    return LOOM_OK;
}

static void run(int ranks, loom_rank_function function) {
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.timeout = 60;
#if defined(__SANITIZE_THREAD__)
    options.kernels = loom_kernels_reference(); /* a library's product is not instrumented */
#endif
    if (loom_run_local(ranks, function, NULL, &options))
        fail_msg("%d ranks: %s", ranks, loom_error_message());
}

static void gradients_of_narrow_weights_are_added_in_fp32(void **state) {
    (void)state;
    run(1, add_small_gradients);
}

/* ---- refusals ---- */

static loom_status expect(loom_status status, const char *first, const char *second) {
    CHECK(status == LOOM_ERR_ARGUMENT, "found status %d, expected %d", (int)status, LOOM_ERR_ARGUMENT);
    CHECK(strstr(loom_error_message(), first) && strstr(loom_error_message(), second),
        "\"%s\" or \"%s\" is missing in: %s", first, second, loom_error_message());
    return LOOM_OK;
}

static loom_status mixtures(loom_rank *rank, void *argument) {
    narrow_parameter column, row, bias, table;
    float values[S * B * O];
    loom_tape *tape;
    loom_tensor *x, *narrow, *y;
    (void)argument;
    fill(values, S * B * O, 1);
    LOOM_TRY(loom_tape_create(rank, &(loom_tape_options){.record = true}, &tape));
    LOOM_TRY(tensor_make(rank, 3, (int64_t[]){S, B, H}, values, &x));
    LOOM_TRY(narrow_tensor(rank, LOOM_BF16, H, 1, &narrow));
    LOOM_TRY(narrow_parameter_make(&column, LOOM_BF16, O, H));
    LOOM_TRY(narrow_parameter_make(&row, LOOM_F16, O, H));
    LOOM_TRY(narrow_parameter_make(&bias, LOOM_F16, O, 0));
    LOOM_TRY(narrow_parameter_make(&table, LOOM_BF16, S, H));
    LOOM_TRY(expect(loom__column_linear(tape, x, &column.fp32, NULL, NULL, false, &y), "column-parallel linear",
        "weight is kept in BF16, its input in F32"));
    LOOM_TRY(expect(loom__column_linear(tape, narrow, &column.fp32, &bias.fp32, NULL, false, &y), "kept in F16",
        "its input in BF16"));
    LOOM_TRY(expect(loom__row_linear(tape, narrow, &row.fp32, NULL, false, &y), "row-parallel linear", "F16"));
    LOOM_TRY(
        expect(loom__position_embedding(tape, x, &table.fp32, NULL, 0, &y), "position embedding", "its input in F32"));
    loom_tensor_release(x);
    loom_tensor_release(narrow);
    loom_tape_destroy(tape);
    free(column.fp32.grad);
    free(row.fp32.grad);
    free(bias.fp32.grad);
    free(table.fp32.grad);
    return LOOM_OK;
}

static void weights_of_another_dtype_are_refused_by_name(void **state) {
    (void)state;
    run(1, mixtures);
}

/* ---- logits ---- */

static loom_status gather(loom_rank *rank, void *argument) {
    enum { COLUMNS = 5, VOCABULARY = 8 };
    loom_comm *tp = loom_rank_world(rank);
    float out[B * S * VOCABULARY];
    loom_tensor *logits;
    (void)argument;
    for (int d = 0; d < 2; d++) {
        loom_dtype dtype = d ? LOOM_F16 : LOOM_BF16;
        LOOM_TRY(narrow_tensor(rank, dtype, COLUMNS, 0, &logits));
        for (int64_t row = 0; row < S * B; row++)
            for (int64_t c = 0; c < COLUMNS; c++) {
                float value = (float)(row * 10 + c + COLUMNS * loom_comm_rank(tp));
                ((uint16_t *)logits->data)[row * COLUMNS + c] = d ? loom_f32_to_f16(value) : loom_f32_to_bf16(value);
            }
        LOOM_TRY(loom__gather_logits(logits, VOCABULARY, tp, out));
        for (int64_t row = 0; row < S * B; row++)
            for (int64_t c = 0; c < VOCABULARY; c++)
                CHECK(out[(row % B * S + row / B) * VOCABULARY + c] == (float)(row * 10 + c),
                    "logit %lld of row %lld is %g", (long long)c, (long long)row,
                    (double)out[(row % B * S + row / B) * VOCABULARY + c]);
        loom_tensor_release(logits);
    }
    return LOOM_OK;
}

static void narrow_logits_are_gathered_exactly(void **state) {
    (void)state;
    run(2, gather);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_of_narrow_weights_are_added_in_fp32),
        cmocka_unit_test(weights_of_another_dtype_are_refused_by_name),
        cmocka_unit_test(narrow_logits_are_gathered_exactly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
