/* Table look-up, its gradient and rotary positions. The gradient adds rows in their order to a table row; workers share
 * the columns, not the rows, so they never meet. */
#include "kernel/fast/work.h"
#include <string.h>

enum { STRIP = 64 }; /* columns of one item of the gradient */

typedef struct job {
    int64_t rows, h, rows_per_item, first_row, table_rows;
    const int64_t *tokens;
    const element *x; /* the table, or the gradients of the rows */
    element *y;
    float *d_table;
} job;

static void embedding_rows(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    size_t bytes = (size_t)p->h * sizeof(element);
    for (int64_t r = item * p->rows_per_item; r < smaller((item + 1) * p->rows_per_item, p->rows); r++) {
        int64_t row = p->tokens[r] - p->first_row;
        if (row >= 0 && row < p->table_rows)
            memcpy(p->y + r * p->h, p->x + row * p->h, bytes);
        else
            memset(p->y + r * p->h, 0, bytes);
    }
}

void FAST(embedding)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
    int64_t table_rows, const element *table, element *y) {
    if (h <= 0)
        return;
    job p = {rows, h, rows_per_item(h), first_row, table_rows, tokens, table, y, NULL};
    loom_team_run(team, embedding_rows, &p, parts_of(rows, p.rows_per_item));
}

static void zero_rows(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    int64_t first = item * p->rows_per_item, last = smaller(first + p->rows_per_item, p->table_rows);
    memset(p->d_table + first * p->h, 0, (size_t)((last - first) * p->h) * sizeof(float));
}

static void embedding_strip(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    int64_t first = item * STRIP, last = smaller(first + STRIP, p->h);
    for (int64_t r = 0; r < p->rows; r++) {
        int64_t row = p->tokens[r] - p->first_row;
        if (row < 0 || row >= p->table_rows)
            continue;
        for (int64_t c = first; c < last; c += LANES) {
            float *to = p->d_table + row * p->h + c;
            v_store(to, last - c, v_add(v_load(to, last - c), e_load(p->x + r * p->h + c, last - c)));
        }
    }
}

void FAST(embedding_backward)(loom_team *team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row,
    int64_t table_rows, const element *d_y, bool accumulate, float *d_table) {
    if (h <= 0)
        return;
    job p = {rows, h, rows_per_item(h), first_row, table_rows, tokens, d_y, NULL, d_table};
    if (!accumulate)
        loom_team_run(team, zero_rows, &p, parts_of(table_rows, p.rows_per_item));
    loom_team_run(team, embedding_strip, &p, parts_of(h, STRIP));
}

typedef struct rope_job {
    int64_t s, b, rows_per_item, stride, groups, heads_per_group, group_stride, d, half, position_offset;
    const float *cosine, *sine;
    const int32_t *positions;
    bool inverse;
    element *x;
} rope_job;

static void rope_rows(void *argument, int64_t item, int worker) {
    const rope_job *p = argument;
    (void)worker;
    for (int64_t r = item * p->rows_per_item; r < smaller((item + 1) * p->rows_per_item, p->s * p->b); r++) {
        int64_t t = r / p->b, j = r % p->b,
                position = p->positions ? p->positions[j * p->s + t] : p->position_offset + t;
        for (int64_t c = 0; c < p->half; c += LANES) {
            int64_t left = p->half - c;
            vf cosine = v_load(p->cosine + position * p->half + c, left);
            vf sine = v_load(p->sine + position * p->half + c, left);
            if (p->inverse)
                sine = v_sub(v_zero(), sine);
            for (int64_t group = 0; group < p->groups; group++)
                for (int64_t head = 0; head < p->heads_per_group; head++) {
                    element *at = p->x + r * p->stride + group * p->group_stride + head * p->d + c;
                    vf low = e_load(at, left), high = e_load(at + p->half, left);
                    e_store(at, left, v_fnma(high, sine, v_mul(low, cosine)));
                    e_store(at + p->half, left, v_fma(low, sine, v_mul(high, cosine)));
                }
        }
    }
}

void FAST(rope)(loom_team *team, int64_t s, int64_t b, int64_t stride, int64_t groups, int64_t heads_per_group,
    int64_t group_stride, int64_t d, int64_t rotary_d, const float *cosine, const float *sine, const int32_t *positions,
    int64_t position_offset, bool inverse, element *x) {
    rope_job p = {s, b, rows_per_item(groups * heads_per_group * d), stride, groups, heads_per_group, group_stride, d,
        rotary_d / 2, position_offset, cosine, sine, positions, inverse, x};
    loom_team_run(team, rope_rows, &p, parts_of(s * b, p.rows_per_item));
}
