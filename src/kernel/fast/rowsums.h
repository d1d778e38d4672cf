/* Gradients of parameters that every row used: sums over rows. Rows are cut into chunks, an item writes its chunk's
 * sums to partial[chunk][output][cols], and the chunks are added in order, first to last. */
#ifndef KERNEL_FAST_ROWSUMS_H
#define KERNEL_FAST_ROWSUMS_H

#include "kernel/fast/work.h"

enum {
    ROW_CHUNK = 64,
    ROW_GROUP = 4, /* rows read side by side: the running sums come and go once for all of them */
    COLUMNS_PER_ITEM = 512
};

typedef struct row_sums {
    int64_t rows, cols;
    const float *mean, *rstd;
    const element *x, *d_y;
    bool accumulate;
    float *out[2]; /* the second may be NULL */
    float *partial;
} row_sums;

INLINE int row_sums_outputs(const row_sums *p) {
    return p->out[1] ? 2 : 1;
}

static void row_sums_total(void *argument, int64_t item, int worker) {
    const row_sums *p = argument;
    (void)worker;
    int64_t chunks = parts_of(p->rows, ROW_CHUNK), outputs = row_sums_outputs(p);
    for (int64_t output = 0; output < outputs; output++)
        for (int64_t c = item * COLUMNS_PER_ITEM; c < smaller((item + 1) * COLUMNS_PER_ITEM, p->cols); c += LANES) {
            int64_t left = p->cols - c;
            vf sum = v_zero();
            for (int64_t chunk = 0; chunk < chunks; chunk++)
                sum = v_add(sum, v_load(p->partial + (chunk * outputs + output) * p->cols + c, left));
            if (p->accumulate)
                sum = v_add(v_load(p->out[output] + c, left), sum);
            v_store(p->out[output] + c, left, sum);
        }
}

/* False, with nothing done, when there is no memory for the partial sums. */
static inline bool row_sums_run(loom_team *team, row_sums *p, loom_team_function chunk) {
    int64_t chunks = parts_of(p->rows, ROW_CHUNK);
    scratch s;
    if (!scratch_reserve(&s, team, (size_t)(chunks * row_sums_outputs(p) * p->cols) * sizeof(float), 0))
        return false;
    p->partial = s.shared;
    loom_team_run(team, chunk, p, chunks);
    loom_team_run(team, row_sums_total, p, parts_of(p->cols, COLUMNS_PER_ITEM));
    return true;
}

#endif
