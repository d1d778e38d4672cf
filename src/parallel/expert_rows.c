/* A token's rows: copied, summed with weights, and the gradients of that. Work is cut into ranges of tokens, or of
 * rows, by shape alone. A range of tokens has one run of rows at each expert, as tokens ascend there: whoever sums a
 * token adds its experts in their order, and no two threads write the same row. */
#include "parallel/expert_rows.h"
#include "parallel/common.h"
#include <string.h>

enum {
    ITEM_ELEMENTS = 16384, /* of an item: it fits the cache and costs far more than its hand-out */
    LEAST_TOKENS = 16      /* of an item, which looks for its rows at every expert */
};

typedef struct job {
    const loom__routed *routed;
    int64_t h, each; /* tokens or rows of an item */
    const loom_tensor *x, *probs, *d_out;
    loom_tensor *out, *d_probs;
    loom_tensor *wide; /* scratch of create_wide */
} job;

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t per_item(int64_t h, int64_t least) {
    return larger(least, ITEM_ELEMENTS / larger(1, h));
}

static void run(loom_tape *tape, loom_team_function function, job *j, int64_t count) {
    loom_team_run(TEAM(tape), function, j, (count + j->each - 1) / j->each);
}

/* fp32 values of a row, in `wide` where the row is narrow. */
static const float *widened(loom_dtype dtype, const void *row, int64_t h, float *wide) {
    const uint16_t *narrow = row;
    if (dtype == LOOM_F32)
        return row;
    if (dtype == LOOM_BF16) {
#pragma omp simd
        for (int64_t c = 0; c < h; c++)
            wide[c] = loom_bf16_to_f32(narrow[c]);
    } else {
        for (int64_t c = 0; c < h; c++)
            wide[c] = loom_f16_to_f32(narrow[c]);
    }
    return wide;
}

static void narrowed(loom_dtype dtype, const float *wide, int64_t h, void *row) {
    uint16_t *narrow = row;
    if (dtype == LOOM_BF16) {
#pragma omp simd
        for (int64_t c = 0; c < h; c++)
            narrow[c] = loom_f32_to_bf16(wide[c]);
    } else {
        for (int64_t c = 0; c < h; c++)
            narrow[c] = loom_f32_to_f16(wide[c]);
    }
}

/* Room for `rows` rows of each worker, which fp32 does not need: *wide is NULL then. */
static loom_status create_wide(loom_tape *tape, loom_dtype dtype, int64_t rows, int64_t h, loom_tensor **wide) {
    *wide = NULL;
    if (dtype == LOOM_F32)
        return LOOM_OK;
    return loom_tensor_create(
        loom_tape_rank(tape), LOOM_F32, 2, (int64_t[]){loom_team_size(TEAM(tape)) * rows, h}, wide);
}

/* ---- copies ---- */

static void copy_item(void *argument, int64_t item, int worker) {
    const job *j = argument;
    const int64_t first = item * j->each, end = smaller(first + j->each, j->routed->rows);
    const size_t bytes = (size_t)j->h * loom_dtype_size(j->x->dtype);
    (void)worker;
    for (int64_t row = first; row < end; row++)
        memcpy(loom__element(j->out, row * j->h), loom__element(j->x, j->routed->token[row] * j->h), bytes);
}

void loom__copy_rows(loom_tape *tape, const loom__routed *r, const loom_tensor *x, loom_tensor *rows) {
    job j = {.routed = r, .h = rows->shape[1], .each = per_item(rows->shape[1], 1), .x = x, .out = rows};
    run(tape, copy_item, &j, r->rows);
}

/* ---- sums ---- */

/* The first of the expert's rows first … first+count-1 whose token is not before `token`. */
static int64_t first_row(const loom__routed *r, int64_t first, int64_t count, int64_t token) {
    int64_t end = first + count;
    while (first < end) {
        int64_t middle = first + (end - first) / 2;
        if (r->token[middle] < token)
            first = middle + 1;
        else
            end = middle;
    }
    return first;
}

static void sum_item(void *argument, int64_t item, int worker) {
    const job *j = argument;
    const loom__routed *r = j->routed;
    const int64_t h = j->h, first = item * j->each, end = smaller(first + j->each, r->tokens);
    const bool narrow = j->out->dtype != LOOM_F32;
    float *wide = narrow ? loom_tensor_f32(j->wide) + worker * (j->each + 1) * h : NULL;
    float *sums = narrow ? wide + h : loom_tensor_f32(j->out) + first * h;
    memset(sums, 0, (size_t)((end - first) * h) * sizeof *sums);
    for (int64_t e = 0, begin = 0; e < r->experts; begin += r->counts[e++])
        for (int64_t row = first_row(r, begin, r->counts[e], first); row < begin + r->counts[e] && r->token[row] < end;
             row++) {
            const float *from = widened(j->x->dtype, loom__element(j->x, row * h), h, wide);
            const float weight = j->probs ? loom_tensor_f32(j->probs)[r->token[row] * r->experts + e] : 1.0f;
            float *to = sums + (r->token[row] - first) * h;
#pragma omp simd
            for (int64_t c = 0; c < h; c++)
                to[c] += weight * from[c];
        }
    for (int64_t token = first; narrow && token < end; token++)
        narrowed(j->out->dtype, sums + (token - first) * h, h, loom__element(j->out, token * h));
}

loom_status loom__sum_rows(
    loom_tape *tape, const loom__routed *r, const loom_tensor *rows, const loom_tensor *probs, loom_tensor *out) {
    job j = {.routed = r, .h = rows->shape[1], .x = rows, .probs = probs, .out = out};
    j.each = per_item(j.h, LEAST_TOKENS);
    LOOM_TRY(create_wide(tape, out->dtype, j.each + 1, j.h, &j.wide));
    run(tape, sum_item, &j, r->tokens);
    loom_tensor_release(j.wide);
    return LOOM_OK;
}

/* ---- their gradients ---- */

static void gradient_item(void *argument, int64_t item, int worker) {
    const job *j = argument;
    const loom__routed *r = j->routed;
    const int64_t h = j->h, first = item * j->each, end = smaller(first + j->each, r->rows);
    const loom_dtype dtype = j->x->dtype;
    float *wide = dtype == LOOM_F32 ? NULL : loom_tensor_f32(j->wide) + worker * 3 * h;
    int64_t e = 0, behind = r->counts[0]; /* the first row behind those of expert e */
    for (int64_t row = first; row < end; row++) {
        while (row >= behind)
            behind += r->counts[++e];
        const int64_t token = r->token[row], at = token * r->experts + e;
        const float weight = loom_tensor_f32(j->probs)[at];
        const float *value = widened(dtype, loom__element(j->x, row * h), h, wide);
        const float *d = widened(dtype, loom__element(j->d_out, token * h), h, wide ? wide + h : NULL);
        float *d_row = dtype == LOOM_F32 ? loom_tensor_f32(j->out) + row * h : wide + 2 * h;
        double dot = 0;
        for (int64_t c = 0; c < h; c++)
            dot += (double)value[c] * (double)d[c];
        loom_tensor_f32(j->d_probs)[at] = (float)dot;
#pragma omp simd
        for (int64_t c = 0; c < h; c++)
            d_row[c] = weight * d[c];
        if (dtype != LOOM_F32)
            narrowed(dtype, d_row, h, loom__element(j->out, row * h));
    }
}

loom_status loom__sum_rows_backward(loom_tape *tape, const loom__routed *r, const loom_tensor *rows,
    const loom_tensor *probs, const loom_tensor *d_out, loom_tensor *d_probs, loom_tensor *d_rows) {
    job j = {
        .routed = r, .h = rows->shape[1], .x = rows, .probs = probs, .d_out = d_out, .out = d_rows, .d_probs = d_probs};
    j.each = per_item(j.h, 1);
    LOOM_TRY(create_wide(tape, rows->dtype, 3, j.h, &j.wide));
    memset(d_probs->data, 0, (size_t)loom_tensor_count(d_probs) * sizeof(float));
    run(tape, gradient_item, &j, r->rows);
    loom_tensor_release(j.wide);
    return LOOM_OK;
}
