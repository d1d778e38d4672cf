/* Operations wait for the parameters that their forward reads: a distributed optimizer may still be gathering them. The
 * values are NaN until they are waited for. */
#include "parallel_support.h"

enum { S = 2, B = 1, WIDTH = 4, PARAMETERS = 2 };

typedef struct late {
    loom_parameter parameters[PARAMETERS];
    int waits[PARAMETERS];
} late;

static loom_status arrive(void *context, int64_t place) {
    late *all = context;
    loom_parameter *parameter = &all->parameters[place];
    int64_t count = loom_parameter_count(parameter);
    all->waits[place]++;
    for (int64_t i = 0; i < count; i++)
        parameter->data[i] = 1.0f;
    parameter->await_data = NULL;
    return LOOM_OK;
}

static loom_status make_late(late *all, int place, int64_t rows, int64_t cols) {
    const float nothing[WIDTH * WIDTH] = {
        NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN};
    loom_parameter *parameter = &all->parameters[place];
    LOOM_TRY(parameter_make(parameter, place ? "second" : "first", rows, cols, nothing));
    parameter->await_data = arrive;
    parameter->await_context = all;
    parameter->await_place = place;
    return LOOM_OK;
}

typedef enum operation {
    COLUMN,
    ROW,
    WORDS,
    POSITIONS,
    NORM,
    CENTERED_NORM,
    HEADS_NORM,
    ACTIVATION,
    DROPOUT,
    OPERATIONS
} operation;

static loom_status call(operation which, loom_tape *tape, loom_tensor *x, late *all, loom_tensor **y) {
    loom_parameter *first = &all->parameters[0], *second = &all->parameters[1];
    const loom_dropout dropout = {.probability = 0};
    const int64_t tokens[S] = {0, 3};
    switch (which) {
    case COLUMN:
        return loom__column_linear(tape, x, first, second, NULL, false, y);
    case ROW:
        return loom__row_linear(tape, x, first, NULL, false, y);
    case WORDS:
        return loom__vocab_embedding(tape, tokens, B, S, first, 0, WIDTH, NULL, false, y);
    case POSITIONS:
        return loom__position_embedding(tape, x, first, NULL, 0, y);
    case NORM:
        return loom_norm(tape, x, first, second, 1e-5f, y);
    case CENTERED_NORM:
        return loom_zero_centered_norm(tape, x, first, second, 1e-5f, y);
    case HEADS_NORM: /* two query heads, one of keys and one of values, of one channel each */
        return loom_qk_norm(tape, x, first, second, 1, 2, 1, 1e-5f, false, y);
    case ACTIVATION:
        return loom_activate(tape, LOOM_GELU_ERF, x, first, y);
    default:
        return loom_bias_dropout_add(tape, x, first, NULL, &dropout, NULL, loom_positions_from(0), y);
    }
}

/* Rows and columns (0 = a vector) of both parameters; 0 rows = none. */
static const int64_t shapes[OPERATIONS][PARAMETERS][2] = {
    [COLUMN] = {{WIDTH, WIDTH}, {WIDTH, 0}},
    [ROW] = {{WIDTH, WIDTH}},
    [WORDS] = {{WIDTH, WIDTH}},
    [POSITIONS] = {{WIDTH, WIDTH}},
    [NORM] = {{WIDTH, 0}, {WIDTH, 0}},
    [CENTERED_NORM] = {{WIDTH, 0}, {WIDTH, 0}},
    [HEADS_NORM] = {{1, 0}, {1, 0}},
    [ACTIVATION] = {{WIDTH, 0}},
    [DROPOUT] = {{WIDTH, 0}},
};

static loom_status run_all(loom_rank *rank, void *argument) {
    const loom_tape_options options = {.record = true};
    const int64_t shape[] = {S, B, WIDTH};
    (void)argument;
    for (int which = 0; which < OPERATIONS; which++) {
        late all = {0};
        float values[S * B * WIDTH];
        loom_tape *tape;
        loom_tensor *x, *y = NULL;
        int made = 0;
        fill(values, S * B * WIDTH, 3);
        for (; made < PARAMETERS && shapes[which][made][0]; made++)
            LOOM_TRY(make_late(&all, made, shapes[which][made][0], shapes[which][made][1]));
        LOOM_TRY(loom_tape_create(rank, &options, &tape));
        LOOM_TRY(tensor_make(rank, 3, shape, values, &x));
        LOOM_TRY(call((operation)which, tape, x, &all, &y));
        LOOM_TRY(loom_tensor_ready(y));
        for (int i = 0; i < made; i++)
            CHECK(all.waits[i] == 1, "operation %d waited %d times for parameter %d", which, all.waits[i], i);
        for (int64_t i = 0; i < loom_tensor_count(y); i++)
            CHECK(isfinite(loom_tensor_f32(y)[i]), "operation %d has read before it waited", which);
        loom_tensor_release(y);
        loom_tensor_release(x);
        loom_tape_destroy(tape);
        for (int i = 0; i < made; i++)
            parameter_free(&all.parameters[i]);
    }
    return LOOM_OK;
}

static void every_operation_waits_for_its_parameters_before_it_reads_them(void **state) {
    (void)state;
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    if (loom_run_local(1, run_all, NULL, &options))
        fail_msg("%s", loom_error_message());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_waits_for_its_parameters_before_it_reads_them),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
