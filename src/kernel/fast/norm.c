/* LayerNorm and RMSNorm. A row is read from memory once and then stays in the first-level cache for the passes that
 * need it again; its sums are kept in sixteen lanes. Weight gradients are sums over rows (rowsums.h). */
#include "kernel/fast/rowsums.h"
#include "kernel/fast/work.h"
#include <math.h>

typedef struct job {
    int64_t rows, h, rows_per_item;
    float eps;
    const element *x, *d_y;
    const float *weight, *bias, *mean, *rstd;
    element *y;
    float *mean_out, *rstd_out;
} job;

static void layernorm_rows(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    int64_t h = p->h;
    for (int64_t r = item * p->rows_per_item; r < smaller((item + 1) * p->rows_per_item, p->rows); r++) {
        const element *row = p->x + r * h;
        vf sum = v_zero(), squares = v_zero();
        for (int64_t c = 0; c < h; c += LANES)
            sum = v_add(sum, e_load(row + c, h - c));
        float mean = v_sum(sum) / (float)h;
        for (int64_t c = 0; c < h; c += LANES) {
            vf centred = v_keep(h - c, v_sub(e_load(row + c, h - c), v_set(mean)));
            squares = v_fma(centred, centred, squares);
        }
        float rstd = 1.0f / sqrtf(v_sum(squares) / (float)h + p->eps);
        for (int64_t c = 0; c < h; c += LANES) {
            vf xhat = v_mul(v_sub(e_load(row + c, h - c), v_set(mean)), v_set(rstd));
            e_store(p->y + r * h + c, h - c, v_fma(xhat, v_load(p->weight + c, h - c), v_load(p->bias + c, h - c)));
        }
        p->mean_out[r] = mean;
        p->rstd_out[r] = rstd;
    }
}

void FAST(layernorm)(loom_team *team, int64_t rows, int64_t h, float eps, const element *x, const float *weight,
    const float *bias, element *y, float *mean, float *rstd) {
    job p = {.rows = rows,
        .h = h,
        .rows_per_item = rows_per_item(h),
        .eps = eps,
        .x = x,
        .weight = weight,
        .bias = bias,
        .y = y,
        .mean_out = mean,
        .rstd_out = rstd};
    loom_team_run(team, layernorm_rows, &p, parts_of(rows, p.rows_per_item));
}

static void layernorm_backward_rows(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    int64_t h = p->h;
    for (int64_t r = item * p->rows_per_item; r < smaller((item + 1) * p->rows_per_item, p->rows); r++) {
        const element *row = p->x + r * h, *d_row = p->d_y + r * h;
        vf mean = v_set(p->mean[r]), rstd = v_set(p->rstd[r]), sum = v_zero(), dot = v_zero();
        for (int64_t c = 0; c < h; c += LANES) {
            vf g = v_mul(e_load(d_row + c, h - c), v_load(p->weight + c, h - c));
            sum = v_add(sum, g);
            dot = v_fma(g, v_mul(v_sub(e_load(row + c, h - c), mean), rstd), dot);
        }
        vf g_mean = v_set(v_sum(sum) / (float)h), dot_mean = v_set(v_sum(dot) / (float)h);
        for (int64_t c = 0; c < h; c += LANES) {
            vf g = v_mul(e_load(d_row + c, h - c), v_load(p->weight + c, h - c));
            vf xhat = v_mul(v_sub(e_load(row + c, h - c), mean), rstd);
            e_store(p->y + r * h + c, h - c, v_mul(rstd, v_fnma(xhat, dot_mean, v_sub(g, g_mean))));
        }
    }
}

void FAST(layernorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const element *x, const float *weight,
    const float *mean, const float *rstd, const element *d_y, element *d_x) {
    job p = {.rows = rows,
        .h = h,
        .rows_per_item = rows_per_item(h),
        .x = x,
        .weight = weight,
        .mean = mean,
        .rstd = rstd,
        .d_y = d_y,
        .y = d_x};
    loom_team_run(team, layernorm_backward_rows, &p, parts_of(rows, p.rows_per_item));
}

static void layernorm_chunk(void *argument, int64_t item, int worker) {
    const row_sums *p = argument;
    (void)worker;
    int64_t first = item * ROW_CHUNK, last = smaller(first + ROW_CHUNK, p->rows);
    float *weight_partial = p->partial + item * 2 * p->cols, *bias_partial = weight_partial + p->cols;
    for (int64_t group = first; group < last; group += ROW_GROUP)
        for (int64_t c = 0; c < p->cols; c += LANES) {
            int64_t left = p->cols - c;
            vf weight_sum = group == first ? v_zero() : v_load(weight_partial + c, left);
            vf bias_sum = group == first ? v_zero() : v_load(bias_partial + c, left);
            for (int64_t r = group; r < smaller(group + ROW_GROUP, last); r++) {
                vf g = e_load(p->d_y + r * p->cols + c, left), x = e_load(p->x + r * p->cols + c, left);
                weight_sum = v_fma(g, v_mul(v_sub(x, v_set(p->mean[r])), v_set(p->rstd[r])), weight_sum);
                bias_sum = v_add(bias_sum, g);
            }
            v_store(weight_partial + c, left, weight_sum);
            v_store(bias_partial + c, left, bias_sum);
        }
}

void FAST(layernorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const element *x, const float *mean,
    const float *rstd, const element *d_y, bool accumulate, float *d_weight, float *d_bias) {
    row_sums p = {.rows = rows,
        .cols = h,
        .x = x,
        .mean = mean,
        .rstd = rstd,
        .d_y = d_y,
        .accumulate = accumulate,
        .out = {d_weight, d_bias}};
    if (!row_sums_run(team, &p, layernorm_chunk))
        SLOW(layernorm_backward_weight)(team, rows, h, x, mean, rstd, d_y, accumulate, d_weight, d_bias);
}

static void rmsnorm_rows(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    int64_t h = p->h;
    for (int64_t r = item * p->rows_per_item; r < smaller((item + 1) * p->rows_per_item, p->rows); r++) {
        const element *row = p->x + r * h;
        vf squares = v_zero();
        for (int64_t c = 0; c < h; c += LANES) {
            vf x = e_load(row + c, h - c);
            squares = v_fma(x, x, squares);
        }
        float rstd = 1.0f / sqrtf(v_sum(squares) / (float)h + p->eps);
        for (int64_t c = 0; c < h; c += LANES)
            e_store(p->y + r * h + c, h - c,
                v_mul(v_mul(e_load(row + c, h - c), v_set(rstd)), v_load(p->weight + c, h - c)));
        p->rstd_out[r] = rstd;
    }
}

void FAST(rmsnorm)(loom_team *team, int64_t rows, int64_t h, float eps, const element *x, const float *weight,
    element *y, float *rstd) {
    job p = {.rows = rows,
        .h = h,
        .rows_per_item = rows_per_item(h),
        .eps = eps,
        .x = x,
        .weight = weight,
        .y = y,
        .rstd_out = rstd};
    loom_team_run(team, rmsnorm_rows, &p, parts_of(rows, p.rows_per_item));
}

static void rmsnorm_backward_rows(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    int64_t h = p->h;
    for (int64_t r = item * p->rows_per_item; r < smaller((item + 1) * p->rows_per_item, p->rows); r++) {
        const element *row = p->x + r * h, *d_row = p->d_y + r * h;
        vf rstd = v_set(p->rstd[r]), dot = v_zero();
        for (int64_t c = 0; c < h; c += LANES) {
            vf g = v_mul(e_load(d_row + c, h - c), v_load(p->weight + c, h - c));
            dot = v_fma(g, v_mul(e_load(row + c, h - c), rstd), dot);
        }
        vf dot_mean = v_set(v_sum(dot) / (float)h);
        for (int64_t c = 0; c < h; c += LANES) {
            vf g = v_mul(e_load(d_row + c, h - c), v_load(p->weight + c, h - c));
            vf xhat = v_mul(e_load(row + c, h - c), rstd);
            e_store(p->y + r * h + c, h - c, v_mul(rstd, v_fnma(xhat, dot_mean, g)));
        }
    }
}

void FAST(rmsnorm_backward_input)(loom_team *team, int64_t rows, int64_t h, const element *x, const float *weight,
    const float *rstd, const element *d_y, element *d_x) {
    job p = {.rows = rows,
        .h = h,
        .rows_per_item = rows_per_item(h),
        .x = x,
        .weight = weight,
        .rstd = rstd,
        .d_y = d_y,
        .y = d_x};
    loom_team_run(team, rmsnorm_backward_rows, &p, parts_of(rows, p.rows_per_item));
}

static void rmsnorm_chunk(void *argument, int64_t item, int worker) {
    const row_sums *p = argument;
    (void)worker;
    int64_t first = item * ROW_CHUNK, last = smaller(first + ROW_CHUNK, p->rows);
    float *partial = p->partial + item * p->cols;
    for (int64_t group = first; group < last; group += ROW_GROUP)
        for (int64_t c = 0; c < p->cols; c += LANES) {
            int64_t left = p->cols - c;
            vf sum = group == first ? v_zero() : v_load(partial + c, left);
            for (int64_t r = group; r < smaller(group + ROW_GROUP, last); r++) {
                vf xhat = v_mul(e_load(p->x + r * p->cols + c, left), v_set(p->rstd[r]));
                sum = v_fma(e_load(p->d_y + r * p->cols + c, left), xhat, sum);
            }
            v_store(partial + c, left, sum);
        }
}

void FAST(rmsnorm_backward_weight)(loom_team *team, int64_t rows, int64_t h, const element *x, const float *rstd,
    const element *d_y, bool accumulate, float *d_weight) {
    row_sums p = {
        .rows = rows, .cols = h, .x = x, .rstd = rstd, .d_y = d_y, .accumulate = accumulate, .out = {d_weight}};
    if (!row_sums_run(team, &p, rmsnorm_chunk))
        SLOW(rmsnorm_backward_weight)(team, rows, h, x, rstd, d_y, accumulate, d_weight);
}
