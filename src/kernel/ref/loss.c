/* The local part of the vocabulary-parallel cross-entropy: maximum first, then the sum. Compiled four times (ref.h). */
#ifndef REAL
#include "kernel/ref/ref.h"
#include <tgmath.h>

#include "kernel/ref/real32.h"

#include "kernel/ref/loss.c"

#include "kernel/ref/real64.h"

#include "kernel/ref/loss.c"

#include "kernel/ref/bf16.h"

#include "kernel/ref/loss.c"

#include "kernel/ref/f16.h"

#include "kernel/ref/loss.c"
#else

void REF(cross_entropy_local)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, const ELEMENT *logits,
    const int64_t *targets, int64_t first_column, REAL *maximum, REAL *sum, REAL *target_logit) {
    (void)team;
    for (int64_t r = 0; r < rows; r++) {
        const ELEMENT *row = logits + r * v_local;
        int64_t target = targets[r] - first_column;
        maximum[r] = -(REAL)INFINITY;
        sum[r] = 0;
        for (int64_t c = 0; c < v_valid; c++)
            if (LOAD(row[c]) > maximum[r])
                maximum[r] = LOAD(row[c]);
        REAL base = maximum[r] == -(REAL)INFINITY ? 0 : maximum[r];
        for (int64_t c = 0; c < v_valid; c++)
            sum[r] += exp(LOAD(row[c]) - base);
        target_logit[r] = target >= 0 && target < v_valid ? LOAD(row[target]) : 0;
    }
}

void REF(cross_entropy_backward)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, ELEMENT *logits,
    const int64_t *targets, int64_t first_column, const REAL *maximum, const REAL *sum, const REAL *row_scale) {
    (void)team;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < v_local; c++) {
            ELEMENT *logit = logits + r * v_local + c;
            if (c >= v_valid || row_scale[r] == 0)
                STORE(*logit, 0);
            else
                STORE(*logit,
                    (exp(LOAD(*logit) - maximum[r]) / sum[r] - (c == targets[r] - first_column)) * row_scale[r]);
        }
}

#endif
