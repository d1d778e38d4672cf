/* A sigmoid of a token as the weight of its row: sigmoid(x . w) * y. The score of a token is kept in fp32 whatever the
 * activations are, as a router's is. Rows are independent of each other, so that a rank with some of them has whole
 * gradients of x and y, and of w its own part. */
#include "tensor/dtype.h"
#include <math.h>
#include <string.h>

#define KERNELS(tape) loom_rank_kernels(loom_tape_rank(tape))
#define TEAM(tape) loom_rank_team(loom_tape_rank(tape))

enum { X, Y, SCORES, PIECE = 256, ROWS_PER_ITEM = 8 };

typedef struct gate_state {
    loom_parameter *weight;
    loom_tensor *d_logits; /* [rows] in the dtype of x, for the weight half */
} gate_state;

/* ---- rows ---- */

typedef struct rows {
    int64_t count, h;
    const float *scores; /* [count] */
    const loom_tensor *y;
    loom_tensor *out;
    /* Of the backward alone. */
    const loom_tensor *d_out, *weight; /* weight: fp32 [h] */
    loom_tensor *d_x;
    float *d_logits; /* [count] */
} rows;

static const float *widened(const loom_tensor *t, int64_t at, int64_t n, float *wide) {
    if (t->dtype == LOOM_F32)
        return (const float *)t->data + at;
    const uint16_t *narrow = (const uint16_t *)t->data + at;
    for (int64_t i = 0; i < n; i++)
        wide[i] = t->dtype == LOOM_BF16 ? loom_bf16_to_f32(narrow[i]) : loom_f16_to_f32(narrow[i]);
    return wide;
}

static void put(loom_tensor *t, int64_t at, int64_t n, const float *values) {
    uint16_t *narrow = (uint16_t *)t->data + at;
    if (t->dtype == LOOM_F32)
        memcpy((float *)t->data + at, values, (size_t)n * sizeof *values);
    else
        for (int64_t i = 0; i < n; i++)
            narrow[i] = t->dtype == LOOM_BF16 ? loom_f32_to_bf16(values[i]) : loom_f32_to_f16(values[i]);
}

/* to[row] = factor * from[row]. */
static void scale_row(const loom_tensor *from, int64_t row, int64_t h, float factor, loom_tensor *to) {
    float wide[PIECE], scaled[PIECE];
    for (int64_t c = 0; c < h; c += PIECE) {
        int64_t n = h - c < PIECE ? h - c : PIECE;
        const float *values = widened(from, row * h + c, n, wide);
        for (int64_t i = 0; i < n; i++)
            scaled[i] = factor * values[i];
        put(to, row * h + c, n, scaled);
    }
}

static double dot_row(const loom_tensor *a, const loom_tensor *b, int64_t row, int64_t h) {
    float wide_a[PIECE], wide_b[PIECE];
    double sum = 0;
    for (int64_t c = 0; c < h; c += PIECE) {
        int64_t n = h - c < PIECE ? h - c : PIECE;
        const float *left = widened(a, row * h + c, n, wide_a), *right = widened(b, row * h + c, n, wide_b);
        for (int64_t i = 0; i < n; i++)
            sum += (double)left[i] * (double)right[i];
    }
    return sum;
}

static void forward_rows(void *argument, int64_t item, int worker) {
    const rows *r = argument;
    (void)worker;
    for (int64_t row = item * ROWS_PER_ITEM; row < (item + 1) * ROWS_PER_ITEM && row < r->count; row++)
        scale_row(r->y, row, r->h, r->scores[row], r->out);
}

static void logit_rows(void *argument, int64_t item, int worker) {
    const rows *r = argument;
    (void)worker;
    for (int64_t row = item * ROWS_PER_ITEM; row < (item + 1) * ROWS_PER_ITEM && row < r->count; row++) {
        double g = (double)r->scores[row];
        r->d_logits[row] = (float)(dot_row(r->d_out, r->y, row, r->h) * g * (1 - g));
    }
}

static void backward_rows(void *argument, int64_t item, int worker) {
    const rows *r = argument;
    (void)worker;
    for (int64_t row = item * ROWS_PER_ITEM; row < (item + 1) * ROWS_PER_ITEM && row < r->count; row++) {
        scale_row(r->d_out, row, r->h, r->scores[row], r->out);
        float scaled[PIECE];
        for (int64_t c = 0; c < r->h; c += PIECE) {
            int64_t n = r->h - c < PIECE ? r->h - c : PIECE;
            for (int64_t i = 0; i < n; i++)
                scaled[i] = r->d_logits[row] * ((const float *)r->weight->data)[c + i];
            put(r->d_x, row * r->h + c, n, scaled);
        }
    }
}

static void run_rows(loom_tape *tape, void (*body)(void *, int64_t, int), rows *r) {
    loom_team_run(TEAM(tape), body, r, (r->count + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM);
}

/* ---- the operation ---- */

/* w as fp32 [h]. */
static loom_status wide_weight(loom_tape *tape, const loom_parameter *weight, loom_tensor **wide) {
    int64_t h = loom_parameter_count(weight);
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 1, &h, wide));
    if (weight->dtype == LOOM_F32)
        memcpy((*wide)->data, weight->data, (size_t)h * sizeof(float));
    else
        loom__kernels16(tape, weight->dtype)->widen(TEAM(tape), h, weight->data16, loom_tensor_f32(*wide));
    return LOOM_OK;
}

static loom_status scores_of(loom_tape *tape, loom_tensor *x, const loom_parameter *weight, loom_tensor **scores) {
    int64_t count = x->shape[0] * x->shape[1], h = x->shape[2];
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 1, &count, scores));
    float *out = loom_tensor_f32(*scores);
    if (x->dtype == LOOM_F32)
        KERNELS(tape)->gemm(
            TEAM(tape), false, true, count, 1, h, 1, loom_tensor_f32(x), h, weight->data, h, false, out, 1);
    else
        loom__kernels16(tape, x->dtype)
            ->gemm_f32(TEAM(tape), false, true, count, 1, h, 1, x->data, h, weight->data16, h, false, out, 1);
    for (int64_t i = 0; i < count; i++)
        out[i] = (float)(1 / (1 + exp(-(double)out[i])));
    return LOOM_OK;
}

/* d_logits in fp32 -> in the dtype of the activations. */
static loom_status as_activations(loom_tape *tape, loom_tensor *d_logits, loom_dtype dtype, loom_tensor **out) {
    if (dtype == LOOM_F32) {
        *out = loom_tensor_retain(d_logits);
        return LOOM_OK;
    }
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), dtype, 1, d_logits->shape, out));
    loom__kernels16(tape, dtype)
        ->narrow(TEAM(tape), loom_tensor_count(d_logits), loom_tensor_f32(d_logits), (*out)->data);
    return LOOM_OK;
}

/* What every half begins with: fp32 [rows], and in *kept as the activations are. */
static loom_status logits_gradient(
    loom_tape *tape, const loom_node *node, const loom_tensor *d_out, loom_tensor **d_logits, loom_tensor **kept) {
    const loom_tensor *y = loom_node_saved(node, Y);
    int64_t count = y->shape[0] * y->shape[1];
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 1, &count, d_logits));
    run_rows(tape, logit_rows,
        &(rows){.count = count,
            .h = y->shape[2],
            .scores = loom_tensor_f32(loom_node_saved(node, SCORES)),
            .y = y,
            .d_out = d_out,
            .d_logits = loom_tensor_f32(*d_logits)});
    return as_activations(tape, *d_logits, y->dtype, kept);
}

static loom_status gate_input(loom_tape *tape, loom_node *node, loom_tensor *d_out) {
    gate_state *state = loom_node_state(node);
    const loom_tensor *y = loom_node_saved(node, Y);
    int64_t count = y->shape[0] * y->shape[1], h = y->shape[2];
    loom_tensor *wide = NULL, *d_logits = NULL, *d_x = NULL, *d_y = NULL;
    loom_status status = wide_weight(tape, state->weight, &wide);
    if (!status)
        status = logits_gradient(tape, node, d_out, &d_logits, &state->d_logits);
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), y->dtype, 3, y->shape, &d_x);
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), y->dtype, 3, y->shape, &d_y);
    if (!status) {
        run_rows(tape, backward_rows,
            &(rows){.count = count,
                .h = h,
                .scores = loom_tensor_f32(loom_node_saved(node, SCORES)),
                .out = d_y,
                .d_out = d_out,
                .weight = wide,
                .d_x = d_x,
                .d_logits = loom_tensor_f32(d_logits)});
        status = loom_tape_give(tape, node, X, loom_tensor_retain(d_x));
        if (!status)
            status = loom_tape_give(tape, node, Y, loom_tensor_retain(d_y));
    }
    loom_tensor_release(wide);
    loom_tensor_release(d_logits);
    loom_tensor_release(d_x);
    loom_tensor_release(d_y);
    return status;
}

static loom_status gate_weight(loom_tape *tape, loom_node *node, loom_tensor *d_out) {
    gate_state *state = loom_node_state(node);
    loom_tensor *x = loom_node_saved(node, X);
    int64_t count = x->shape[0] * x->shape[1], h = x->shape[2];
    bool accumulate;
    if (!state->d_logits) {
        loom_tensor *wide = NULL;
        loom_status status = logits_gradient(tape, node, d_out, &wide, &state->d_logits);
        loom_tensor_release(wide);
        LOOM_TRY(status);
    }
    float *grad = loom_parameter_begin_grad(state->weight, &accumulate);
    if (grad && x->dtype == LOOM_F32)
        KERNELS(tape)->gemm(TEAM(tape), true, false, 1, h, count, 1, loom_tensor_f32(state->d_logits), 1,
            loom_tensor_f32(x), h, accumulate, grad, h);
    else if (grad)
        loom__kernels16(tape, x->dtype)
            ->gemm_f32(
                TEAM(tape), true, false, 1, h, count, 1, state->d_logits->data, 1, x->data, h, accumulate, grad, h);
    loom_tensor_release(state->d_logits);
    state->d_logits = NULL;
    return LOOM_OK;
}

static void gate_release(loom_node *node) {
    loom_tensor_release(((gate_state *)loom_node_state(node))->d_logits);
}

static const loom_op gate_op = {"sigmoid gate", gate_input, gate_weight, gate_release};

static loom_status check(const loom_tape *tape, const loom_tensor *x, loom_parameter *weight, const loom_tensor *y) {
    LOOM_TRY(loom__check_dtype(tape, gate_op.name, x));
    LOOM_TRY(loom__check_same_dtype(gate_op.name, x, y));
    LOOM_TRY(loom__check_parameter_dtype(gate_op.name, x, weight));
    if (x->dims != 3 || y->dims != 3 || memcmp(x->shape, y->shape, 3 * sizeof *x->shape) != 0 ||
        loom_parameter_count(weight) != x->shape[2])
        return loom_fail(LOOM_ERR_ARGUMENT,
            "%s: expected x and y of one shape [s, b, h] and a weight of h elements, found widths %lld and %lld, and "
            "%lld elements of %s",
            gate_op.name, (long long)(x->dims ? x->shape[x->dims - 1] : 0),
            (long long)(y->dims ? y->shape[y->dims - 1] : 0), (long long)loom_parameter_count(weight), weight->name);
    return LOOM_OK;
}

loom_status loom_sigmoid_gate(
    loom_tape *tape, loom_tensor *x, loom_parameter *weight, loom_tensor *y, loom_tensor **output) {
    LOOM_TRY(check(tape, x, weight, y));
    LOOM_TRY(loom_tensor_ready(x));
    LOOM_TRY(loom_tensor_ready(y));
    LOOM_TRY(loom_parameter_ready(weight));
    loom_tensor *scores = NULL, *out = NULL;
    loom_node *node = NULL;
    loom_status status = scores_of(tape, x, weight, &scores);
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), y->dtype, 3, y->shape, &out);
    if (!status) {
        run_rows(tape, forward_rows,
            &(rows){.count = x->shape[0] * x->shape[1],
                .h = x->shape[2],
                .scores = loom_tensor_f32(scores),
                .y = y,
                .out = out});
        status = loom_tape_record(tape, &gate_op, sizeof(gate_state), (loom_tensor *[]){x, y}, 2,
            (loom_parameter *[]){weight}, 1, out, &node);
    }
    if (!status && node) {
        ((gate_state *)loom_node_state(node))->weight = weight;
        loom_tensor *const kept[] = {[X] = x, [Y] = y, [SCORES] = scores};
        for (int i = 0; i < 3 && !status; i++)
            status = loom_node_save(node, kept[i]);
    }
    loom_tensor_release(scores);
    if (status) {
        loom_tensor_release(out);
        return status;
    }
    *output = out;
    return LOOM_OK;
}
