/* Bias, activation, dropout and norm sums: one element after the other. Compiled four times (ref.h).
 */
#ifndef REAL
#include "base/random.h"
#include "kernel/exact_sum.h"
#include "kernel/ref/ref.h"
#include <tgmath.h>

enum { CARRY_EVERY = 1 << 20 };

#include "kernel/ref/real32.h"

#include "kernel/ref/elementwise.c"

#include "kernel/ref/real64.h"

#include "kernel/ref/elementwise.c"

#include "kernel/ref/bf16.h"

#include "kernel/ref/elementwise.c"

#include "kernel/ref/f16.h"

#include "kernel/ref/elementwise.c"
#else

void REF(bias_add)(loom_team *team, int64_t rows, int64_t cols, const ELEMENT *x, const REAL *bias, ELEMENT *y) {
    (void)team;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            STORE(y[r * cols + c], LOAD(x[r * cols + c]) + bias[c]);
}

void REF(bias_gradient)(
    loom_team *team, int64_t rows, int64_t cols, const ELEMENT *d_y, bool accumulate, REAL *d_bias) {
    (void)team;
    for (int64_t c = 0; c < cols; c++) {
        REAL sum = 0;
        for (int64_t r = 0; r < rows; r++)
            sum += LOAD(d_y[r * cols + c]);
        d_bias[c] = sum + (accumulate ? d_bias[c] : 0);
    }
}

void REF(add)(loom_team *team, int64_t count, const ELEMENT *x, ELEMENT *y) {
    (void)team;
    for (int64_t i = 0; i < count; i++)
        STORE(y[i], LOAD(x[i]) + LOAD(y[i]));
}

void REF(scale)(loom_team *team, int64_t count, REAL factor, const ELEMENT *x, ELEMENT *y) {
    (void)team;
    for (int64_t i = 0; i < count; i++)
        STORE(y[i], factor * LOAD(x[i]));
}

/* The value and the derivative of the non-linearity that `act` applies to its only input, or to its gate. */
static REAL REF(nonlinear)(loom_activation act, REAL x, REAL *derivative) {
    switch (act) {
    case LOOM_GELU_TANH:
    case LOOM_GEGLU: {
        REAL root = (REAL)0.79788456080286535588, cubic = (REAL)0.044715; /* sqrt(2/pi) */
        REAL t = tanh(root * (x + cubic * x * x * x));
        *derivative = (1 + t) / 2 + x / 2 * (1 - t * t) * root * (1 + 3 * cubic * x * x);
        return x / 2 * (1 + t);
    }
    case LOOM_GELU_ERF:
    case LOOM_GEGLU_ERF: {
        REAL below = (1 + erf(x * (REAL)0.70710678118654752440)) / 2;
        *derivative = below + x * exp(-x * x / 2) * (REAL)0.39894228040143267794; /* 1/sqrt(2 pi) */
        return x * below;
    }
    default: {
        REAL sigmoid = 1 / (1 + exp(-x));
        *derivative = sigmoid * (1 + x * (1 - sigmoid));
        return x / (1 + exp(-x));
    }
    }
}

void REF(activation)(
    loom_team *team, loom_activation act, int64_t rows, int64_t f, const ELEMENT *x, const REAL *bias, ELEMENT *y) {
    (void)team;
    bool gated = loom_activation_is_gated(act);
    int64_t width = gated ? 2 * f : f;
    REAL ignored;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < f; c++) {
            REAL value = REF(nonlinear)(act, LOAD(x[r * width + c]) + (bias ? bias[c] : 0), &ignored);
            if (gated)
                value *= LOAD(x[r * width + f + c]) + (bias ? bias[f + c] : 0);
            STORE(y[r * f + c], value);
        }
}

void REF(activation_backward)(loom_team *team, loom_activation act, int64_t rows, int64_t f, const ELEMENT *x,
    const REAL *bias, const ELEMENT *d_y, ELEMENT *d_x) {
    (void)team;
    bool gated = loom_activation_is_gated(act);
    int64_t width = gated ? 2 * f : f;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < f; c++) {
            REAL derivative, value = REF(nonlinear)(act, LOAD(x[r * width + c]) + (bias ? bias[c] : 0), &derivative);
            REAL gradient = LOAD(d_y[r * f + c]);
            if (gated) {
                STORE(d_x[r * width + f + c], gradient * value);
                gradient *= LOAD(x[r * width + f + c]) + (bias ? bias[f + c] : 0);
            }
            STORE(d_x[r * width + c], gradient * derivative);
        }
}

/* What a kept or a dropped element is multiplied by; a dropped NaN stays NaN. */
static REAL REF(dropout_factor)(const loom_dropout *dropout, const loom__dropout_row *row, int64_t channel) {
    loom__philox words = loom__dropout_words(row, (uint32_t)(channel / 4));
    if (words.word[channel % 4] < loom__dropout_threshold(dropout->probability))
        return 0;
    return 1 / (1 - (REAL)dropout->probability);
}

static loom__dropout_row REF(activation_row)(
    const loom_row_coordinates *rows, const loom_dropout *dropout, int64_t t, int64_t j) {
    return loom__dropout_row_make(
        dropout->seed, dropout->layer, dropout->site, rows->sample[j], rows->position_offset + t, 0);
}

void REF(bias_dropout_add)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
    const ELEMENT *x, const REAL *bias, const ELEMENT *residual, ELEMENT *y) {
    (void)team;
    bool drops = dropout && dropout->probability > 0;
    for (int64_t t = 0; t < rows->s; t++)
        for (int64_t j = 0; j < rows->b; j++) {
            int64_t first = (t * rows->b + j) * h;
            loom__dropout_row row = {0};
            if (drops)
                row = REF(activation_row)(rows, dropout, t, j);
            for (int64_t c = 0; c < h; c++) {
                REAL value = LOAD(x[first + c]) + (bias ? bias[c] : 0);
                if (drops)
                    value *= REF(dropout_factor)(dropout, &row, c);
                STORE(y[first + c], value + (residual ? LOAD(residual[first + c]) : 0));
            }
        }
}

void REF(dropout_backward)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
    const ELEMENT *d_y, ELEMENT *d_x) {
    REF(bias_dropout_add)(team, rows, h, dropout, d_y, NULL, NULL, d_x);
}

bool REF(has_nonfinite)(loom_team *team, int64_t count, const ELEMENT *x) {
    (void)team;
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(LOAD(x[i])))
            return true;
    return false;
}

#ifdef NARROW
void REF(widen)(loom_team *team, int64_t count, const ELEMENT *x, REAL *y) {
    (void)team;
    for (int64_t i = 0; i < count; i++)
        y[i] = LOAD(x[i]);
}

void REF(narrow)(loom_team *team, int64_t count, const REAL *x, ELEMENT *y) {
    (void)team;
    for (int64_t i = 0; i < count; i++)
        STORE(y[i], x[i]);
}
#else
/* fp32 numbers, whatever REAL is. */
void REF(exact_sum)(loom_team *team, int power, int64_t count, const REAL *x, loom_exact_sum *sum) {
    (void)team;
    for (int64_t i = 0; i < count; i++) {
        loom__exact_sum_element(power, (float)x[i], sum);
        if (i % CARRY_EVERY == CARRY_EVERY - 1)
            loom__exact_sum_carry(sum);
    }
    loom__exact_sum_carry(sum);
}

#endif

#endif
