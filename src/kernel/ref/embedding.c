/* Table look-up, its gradient, and rotary positions. Compiled four times (ref.h). */
#ifndef REAL
#include "kernel/ref/ref.h"

#include "kernel/ref/real32.h"

#include "kernel/ref/embedding.c"

#include "kernel/ref/real64.h"

#include "kernel/ref/embedding.c"

#include "kernel/ref/bf16.h"

#include "kernel/ref/embedding.c"

#include "kernel/ref/f16.h"

#include "kernel/ref/embedding.c"
#else

void REF(embedding)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
    int64_t table_rows, const ELEMENT *table, ELEMENT *y) {
    (void)team;
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = tokens[r] - first_row;
        for (int64_t c = 0; c < h; c++)
            STORE(y[r * h + c], row >= 0 && row < table_rows ? LOAD(table[row * h + c]) : 0);
    }
}

void REF(embedding_backward)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
    int64_t table_rows, const ELEMENT *d_y, bool accumulate, REAL *d_table) {
    (void)team;
    for (int64_t i = 0; !accumulate && i < table_rows * h; i++)
        d_table[i] = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = tokens[r] - first_row;
        for (int64_t c = 0; row >= 0 && row < table_rows && c < h; c++)
            d_table[row * h + c] += LOAD(d_y[r * h + c]);
    }
}

void REF(rope)(loom_team *team, int64_t s, int64_t b, int64_t stride, int64_t groups, int64_t heads_per_group,
    int64_t group_stride, int64_t d, int64_t rotary_d, const REAL *cosine, const REAL *sine, const int32_t *positions,
    int64_t position_offset, bool inverse, ELEMENT *x) {
    (void)team;
    int64_t half = rotary_d / 2;
    for (int64_t t = 0; t < s; t++)
        for (int64_t j = 0; j < b; j++) {
            int64_t position = positions ? positions[j * s + t] : position_offset + t;
            for (int64_t head = 0; head < groups * heads_per_group; head++) {
                ELEMENT *at =
                    x + (t * b + j) * stride + head / heads_per_group * group_stride + head % heads_per_group * d;
                for (int64_t i = 0; i < half; i++) {
                    REAL low = LOAD(at[i]), high = LOAD(at[i + half]), c = cosine[position * half + i];
                    REAL z = inverse ? -sine[position * half + i] : sine[position * half + i];
                    STORE(at[i], low * c - high * z);
                    STORE(at[i + half], high * c + low * z);
                }
            }
        }
}

#endif
