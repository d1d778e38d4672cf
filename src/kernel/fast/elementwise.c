/* Operations of independent elements, and sums over rows. Elements go sixteen at a time; items are
 * blocks of about ITEM_ELEMENTS. Sums over rows (bias gradients) are made of chunks of ROW_CHUNK rows, whose partial
 * sums are added in order, so that any team gives the same bits. */
#include "kernel/fast/dropout.h"
#include "kernel/fast/math.h"
#include "kernel/fast/rowsums.h"
#include "kernel/fast/work.h"
#include <stdatomic.h>

typedef struct job {
    int64_t rows, cols, rows_per_item;
    const element *x, *other;
    const float *bias;
    element *y;
    float factor;
    loom_activation act;
} job;

static void bias_add_rows(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    for (int64_t r = item * p->rows_per_item; r < smaller((item + 1) * p->rows_per_item, p->rows); r++)
        for (int64_t c = 0; c < p->cols; c += LANES) {
            int64_t left = p->cols - c, at = r * p->cols + c;
            e_store(p->y + at, left, v_add(e_load(p->x + at, left), v_load(p->bias + c, left)));
        }
}

void FAST(bias_add)(loom_team *team, int64_t rows, int64_t cols, const element *x, const float *bias, element *y) {
    job p = {.rows = rows, .cols = cols, .rows_per_item = rows_per_item(cols), .x = x, .bias = bias, .y = y};
    loom_team_run(team, bias_add_rows, &p, parts_of(rows, p.rows_per_item));
}

static void bias_chunk(void *argument, int64_t item, int worker) {
    const row_sums *p = argument;
    (void)worker;
    int64_t first = item * ROW_CHUNK, last = smaller(first + ROW_CHUNK, p->rows);
    float *partial = p->partial + item * p->cols;
    for (int64_t group = first; group < last; group += ROW_GROUP)
        for (int64_t c = 0; c < p->cols; c += LANES) {
            int64_t left = p->cols - c;
            vf sum = group == first ? v_zero() : v_load(partial + c, left);
            for (int64_t r = group; r < smaller(group + ROW_GROUP, last); r++)
                sum = v_add(sum, e_load(p->d_y + r * p->cols + c, left));
            v_store(partial + c, left, sum);
        }
}

void FAST(bias_gradient)(
    loom_team *team, int64_t rows, int64_t cols, const element *d_y, bool accumulate, float *d_bias) {
    row_sums p = {.rows = rows, .cols = cols, .d_y = d_y, .accumulate = accumulate, .out = {d_bias}};
    if (!row_sums_run(team, &p, bias_chunk))
        SLOW(bias_gradient)(team, rows, cols, d_y, accumulate, d_bias);
}

static void add_block(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    for (int64_t i = item * ITEM_ELEMENTS; i < smaller((item + 1) * ITEM_ELEMENTS, p->cols); i += LANES) {
        int64_t left = p->cols - i;
        e_store(p->y + i, left, v_add(e_load(p->x + i, left), e_load(p->y + i, left)));
    }
}

void FAST(add)(loom_team *team, int64_t count, const element *x, element *y) {
    job p = {.cols = count, .x = x, .y = y};
    loom_team_run(team, add_block, &p, parts_of(count, ITEM_ELEMENTS));
}

static void scale_block(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    for (int64_t i = item * ITEM_ELEMENTS; i < smaller((item + 1) * ITEM_ELEMENTS, p->cols); i += LANES)
        e_store(p->y + i, p->cols - i, v_mul(v_set(p->factor), e_load(p->x + i, p->cols - i)));
}

void FAST(scale)(loom_team *team, int64_t count, float factor, const element *x, element *y) {
    job p = {.cols = count, .x = x, .y = y, .factor = factor};
    loom_team_run(team, scale_block, &p, parts_of(count, ITEM_ELEMENTS));
}

/* The non-linearity of the input, or of the gate, and its derivative. tanh form: (1 + tanh z)/2 is the sigmoid of 2z,
 * so the value is x sigmoid(2z), which keeps its relative accuracy for negative x. `act` is a constant wherever this is
 * used. */
INLINE vf nonlinear(loom_activation act, vf x, vf *derivative) {
    vf one = v_set(1.0f);
    switch (act) {
    case LOOM_GELU_TANH:
    case LOOM_GEGLU: {
        float root = 1.5957691216f, cubic = 1.5957691216f * 0.044715f; /* 2 sqrt(2/pi) */
        vf square = v_mul(x, x);
        vf s = v_sigmoid(v_mul(x, v_fma(square, v_set(cubic), v_set(root))));
        vf slope = v_fma(square, v_set(3 * cubic), v_set(root));
        *derivative = v_fma(v_mul(v_mul(x, slope), v_sub(one, s)), s, s);
        return v_mul(x, s);
    }
    case LOOM_GELU_ERF:
    case LOOM_GEGLU_ERF: {
        vf bell, below = v_normal_below(x, &bell);
        *derivative = v_fma(v_mul(x, bell), v_set(0.3989422804f), below);
        return v_mul(x, below);
    }
    default: {
        vf s = v_sigmoid(x);
        *derivative = v_mul(s, v_fma(x, v_sub(one, s), one));
        return v_mul(x, s);
    }
    }
}

INLINE void activation_rows(const job *p, loom_activation act, int64_t item) {
    bool gated = loom_activation_is_gated(act);
    int64_t f = p->cols, width = gated ? 2 * f : f;
    for (int64_t r = item * p->rows_per_item; r < smaller((item + 1) * p->rows_per_item, p->rows); r++)
        for (int64_t c = 0; c < f; c += LANES) {
            int64_t left = f - c;
            const element *at = p->x + r * width + c;
            vf ignored, x = e_load(at, left);
            if (p->bias)
                x = v_add(x, v_load(p->bias + c, left));
            vf value = nonlinear(act, x, &ignored);
            if (gated) {
                vf up = e_load(at + f, left);
                if (p->bias)
                    up = v_add(up, v_load(p->bias + f + c, left));
                value = v_mul(value, up);
            }
            e_store(p->y + r * f + c, left, value);
        }
}

INLINE void activation_backward_rows(const job *p, loom_activation act, int64_t item) {
    bool gated = loom_activation_is_gated(act);
    int64_t f = p->cols, width = gated ? 2 * f : f;
    for (int64_t r = item * p->rows_per_item; r < smaller((item + 1) * p->rows_per_item, p->rows); r++)
        for (int64_t c = 0; c < f; c += LANES) {
            int64_t left = f - c, at = r * width + c;
            vf derivative, x = e_load(p->x + at, left), gradient = e_load(p->other + r * f + c, left);
            if (p->bias)
                x = v_add(x, v_load(p->bias + c, left));
            vf value = nonlinear(act, x, &derivative);
            if (gated) {
                vf up = e_load(p->x + at + f, left);
                if (p->bias)
                    up = v_add(up, v_load(p->bias + f + c, left));
                e_store(p->y + at + f, left, v_mul(gradient, value));
                gradient = v_mul(gradient, up);
            }
            e_store(p->y + at, left, v_mul(gradient, derivative));
        }
}

/* One body for each activation, with `act` folded in. */
#define EACH_ACTIVATION(body)                                                                                          \
    switch (p->act) {                                                                                                  \
    case LOOM_GELU_TANH:                                                                                               \
        body(p, LOOM_GELU_TANH, item);                                                                                 \
        break;                                                                                                         \
    case LOOM_GELU_ERF:                                                                                                \
        body(p, LOOM_GELU_ERF, item);                                                                                  \
        break;                                                                                                         \
    case LOOM_SWIGLU:                                                                                                  \
        body(p, LOOM_SWIGLU, item);                                                                                    \
        break;                                                                                                         \
    case LOOM_GEGLU:                                                                                                   \
        body(p, LOOM_GEGLU, item);                                                                                     \
        break;                                                                                                         \
    case LOOM_GEGLU_ERF:                                                                                               \
        body(p, LOOM_GEGLU_ERF, item);                                                                                 \
        break;                                                                                                         \
    case LOOM_ACTIVATION_COUNT:                                                                                        \
        break;                                                                                                         \
    }

static void activation_item(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    EACH_ACTIVATION(activation_rows)
}

static void activation_backward_item(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    EACH_ACTIVATION(activation_backward_rows)
}

void FAST(activation)(
    loom_team *team, loom_activation act, int64_t rows, int64_t f, const element *x, const float *bias, element *y) {
    job p = {.rows = rows, .cols = f, .rows_per_item = rows_per_item(f), .x = x, .bias = bias, .y = y, .act = act};
    loom_team_run(team, activation_item, &p, parts_of(rows, p.rows_per_item));
}

void FAST(activation_backward)(loom_team *team, loom_activation act, int64_t rows, int64_t f, const element *x,
    const float *bias, const element *d_y, element *d_x) {
    job p = {.rows = rows,
        .cols = f,
        .rows_per_item = rows_per_item(f),
        .x = x,
        .bias = bias,
        .other = d_y,
        .y = d_x,
        .act = act};
    loom_team_run(team, activation_backward_item, &p, parts_of(rows, p.rows_per_item));
}

typedef struct dropout_job {
    const loom_row_coordinates *at;
    const loom_dropout *dropout;
    int64_t rows, cols, rows_per_item;
    const element *x, *residual;
    const float *bias;
    element *y;
} dropout_job;

/* The factors of channels first … first+63 of a row. */
static void dropout_factors(const loom__dropout_row *row, float probability, int64_t first, float factors[4 * LANES]) {
    uint32_t quads[LANES];
    float by_word[4][LANES];
    vi words[4];
    for (uint32_t i = 0; i < LANES; i++)
        quads[i] = (uint32_t)(first / 4) + i;
    v_philox(vi_load(quads), vi_set(row->c1), vi_set(row->c2), vi_set(row->c3), row->k0, row->k1, words);
    for (int i = 0; i < 4; i++)
        v_store(by_word[i], LANES, v_dropout_factor(words[i], probability));
    for (int i = 0; i < 4 * LANES; i++)
        factors[i] = by_word[i % 4][i / 4];
}

static void dropout_item(void *argument, int64_t item, int worker) {
    const dropout_job *p = argument;
    const loom_dropout *dropout = p->dropout;
    bool drops = dropout && dropout->probability > 0;
    (void)worker;
    for (int64_t r = item * p->rows_per_item; r < smaller((item + 1) * p->rows_per_item, p->rows); r++) {
        loom__dropout_row row = {0};
        float factors[4 * LANES];
        if (drops)
            row = loom__dropout_row_make(dropout->seed, dropout->layer, dropout->site, p->at->sample[r % p->at->b],
                p->at->position_offset + r / p->at->b, 0);
        for (int64_t c = 0; c < p->cols; c += LANES) {
            int64_t left = p->cols - c, at = r * p->cols + c;
            vf value = e_load(p->x + at, left);
            if (p->bias)
                value = v_add(value, v_load(p->bias + c, left));
            if (drops) {
                if (c % (4 * LANES) == 0)
                    dropout_factors(&row, dropout->probability, c, factors);
                value = v_mul(value, v_load(factors + c % (4 * LANES), LANES));
            }
            if (p->residual)
                value = v_add(value, e_load(p->residual + at, left));
            e_store(p->y + at, left, value);
        }
    }
}

void FAST(bias_dropout_add)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
    const element *x, const float *bias, const element *residual, element *y) {
    dropout_job p = {rows, dropout, rows->s * rows->b, h, rows_per_item(h), x, residual, bias, y};
    loom_team_run(team, dropout_item, &p, parts_of(p.rows, p.rows_per_item));
}

void FAST(dropout_backward)(loom_team *team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,
    const element *d_y, element *d_x) {
    FAST(bias_dropout_add)(team, rows, h, dropout, d_y, NULL, NULL, d_x);
}

typedef struct nonfinite_job {
    int64_t count;
    const element *x;
    atomic_bool found;
} nonfinite_job;

static void nonfinite_item(void *argument, int64_t item, int worker) {
    nonfinite_job *p = argument;
    (void)worker;
    if (atomic_load_explicit(&p->found, memory_order_relaxed))
        return;
    vi exponent = vi_set(0x7f800000u);
    for (int64_t i = item * ITEM_ELEMENTS; i < smaller((item + 1) * ITEM_ELEMENTS, p->count); i += LANES)
        if (vm_any(vi_equal(vi_and(vi_bits(e_load(p->x + i, p->count - i)), exponent), exponent))) {
            atomic_store_explicit(&p->found, true, memory_order_relaxed);
            return;
        }
}

bool FAST(has_nonfinite)(loom_team *team, int64_t count, const element *x) {
    nonfinite_job p = {.count = count, .x = x};
    loom_team_run(team, nonfinite_item, &p, parts_of(count, ITEM_ELEMENTS));
    return atomic_load(&p.found);
}
