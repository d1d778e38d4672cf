/* LayerNorm and RMSNorm, row by row; the variance is taken around the mean in a second pass. Compiled four times
 * (ref.h). */
#ifndef REAL
#include "kernel/ref/ref.h"
#include <tgmath.h>

#include "kernel/ref/real32.h"

#include "kernel/ref/norm.c"

#include "kernel/ref/real64.h"

#include "kernel/ref/norm.c"

#include "kernel/ref/bf16.h"

#include "kernel/ref/norm.c"

#include "kernel/ref/f16.h"

#include "kernel/ref/norm.c"
#else

void REF(layernorm)(loom_team *team, int64_t rows, int64_t h, REAL eps, const ELEMENT *x, const REAL *weight,
    const REAL *bias, ELEMENT *y, REAL *mean, REAL *rstd) {
    (void)team;
    for (int64_t r = 0; r < rows; r++) {
        const ELEMENT *row = x + r * h;
        REAL sum = 0, squares = 0;
        for (int64_t c = 0; c < h; c++)
            sum += LOAD(row[c]);
        mean[r] = sum / (REAL)h;
        for (int64_t c = 0; c < h; c++)
            squares += (LOAD(row[c]) - mean[r]) * (LOAD(row[c]) - mean[r]);
        rstd[r] = 1 / sqrt(squares / (REAL)h + eps);
        for (int64_t c = 0; c < h; c++)
            STORE(y[r * h + c], (LOAD(row[c]) - mean[r]) * rstd[r] * weight[c] + bias[c]);
    }
}

/* With g = d_y weight: d_x = rstd (g - mean(g) - xhat mean(g xhat)). */
void REF(layernorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const ELEMENT *x, const REAL *weight,
    const REAL *mean, const REAL *rstd, const ELEMENT *d_y, ELEMENT *d_x) {
    (void)team;
    for (int64_t r = 0; r < rows; r++) {
        REAL sum = 0, dot = 0;
        for (int64_t c = 0; c < h; c++) {
            REAL g = LOAD(d_y[r * h + c]) * weight[c];
            sum += g;
            dot += g * (LOAD(x[r * h + c]) - mean[r]) * rstd[r];
        }
        for (int64_t c = 0; c < h; c++) {
            REAL g = LOAD(d_y[r * h + c]) * weight[c], xhat = (LOAD(x[r * h + c]) - mean[r]) * rstd[r];
            STORE(d_x[r * h + c], rstd[r] * (g - sum / (REAL)h - xhat * dot / (REAL)h));
        }
    }
}

void REF(layernorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const ELEMENT *x, const REAL *mean,
    const REAL *rstd, const ELEMENT *d_y, bool accumulate, REAL *d_weight, REAL *d_bias) {
    (void)team;
    for (int64_t c = 0; c < h; c++) {
        REAL weight_sum = 0, bias_sum = 0;
        for (int64_t r = 0; r < rows; r++) {
            weight_sum += LOAD(d_y[r * h + c]) * ((LOAD(x[r * h + c]) - mean[r]) * rstd[r]);
            bias_sum += LOAD(d_y[r * h + c]);
        }
        d_weight[c] = weight_sum + (accumulate ? d_weight[c] : 0);
        d_bias[c] = bias_sum + (accumulate ? d_bias[c] : 0);
    }
}

void REF(rmsnorm)(
    loom_team *team, int64_t rows, int64_t h, REAL eps, const ELEMENT *x, const REAL *weight, ELEMENT *y, REAL *rstd) {
    (void)team;
    for (int64_t r = 0; r < rows; r++) {
        REAL squares = 0;
        for (int64_t c = 0; c < h; c++)
            squares += LOAD(x[r * h + c]) * LOAD(x[r * h + c]);
        rstd[r] = 1 / sqrt(squares / (REAL)h + eps);
        for (int64_t c = 0; c < h; c++)
            STORE(y[r * h + c], LOAD(x[r * h + c]) * rstd[r] * weight[c]);
    }
}

/* With g = d_y weight: d_x = rstd (g - xhat mean(g xhat)). */
void REF(rmsnorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const ELEMENT *x, const REAL *weight,
    const REAL *rstd, const ELEMENT *d_y, ELEMENT *d_x) {
    (void)team;
    for (int64_t r = 0; r < rows; r++) {
        REAL dot = 0;
        for (int64_t c = 0; c < h; c++)
            dot += LOAD(d_y[r * h + c]) * weight[c] * LOAD(x[r * h + c]) * rstd[r];
        for (int64_t c = 0; c < h; c++) {
            REAL xhat = LOAD(x[r * h + c]) * rstd[r];
            STORE(d_x[r * h + c], rstd[r] * (LOAD(d_y[r * h + c]) * weight[c] - xhat * dot / (REAL)h));
        }
    }
}

void REF(rmsnorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const ELEMENT *x, const REAL *rstd,
    const ELEMENT *d_y, bool accumulate, REAL *d_weight) {
    (void)team;
    for (int64_t c = 0; c < h; c++) {
        REAL sum = 0;
        for (int64_t r = 0; r < rows; r++)
            sum += LOAD(d_y[r * h + c]) * (LOAD(x[r * h + c]) * rstd[r]);
        d_weight[c] = sum + (accumulate ? d_weight[c] : 0);
    }
}

#endif
