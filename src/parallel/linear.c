/* Column- and row-parallel linear layers. The communication of each half is started as early and finished as late as
 * its data allow: the column layer computes its own rows while the others' arrive, and the sum of d_x travels while the
 * weight gradient is computed. Weight gradients go by GEMM straight into parameter->grad. */
#include "parallel/common.h"
#include <stdlib.h>

typedef struct linear_state {
    loom_comm *tp;
    bool sequence_parallel;
    loom_parameter *weight, *bias;
    loom_tensor *gathered; /* column: x of the whole sequence; row: d_y of the whole sequence; between the two halves */
} linear_state;

static void linear_release(loom_node *node) {
    loom_tensor_release(((linear_state *)loom_node_state(node))->gathered);
}

static int64_t rows_of(const loom_tensor *x) {
    return x->shape[0] * x->shape[1];
}

/* y[first rows..] = x W^T for `rows` rows. */
static void multiply_rows(loom_tape *tape, const loom_parameter *weight, int64_t rows, const void *x, void *y) {
    int64_t o = weight->shape[0], h = weight->shape[1];
    LOOM__KERNEL(
        tape, weight->dtype, gemm, false, true, rows, o, h, 1.0f, x, h, loom_parameter_values(weight), h, false, y, o);
}

/* d_W (+)= d_y^T x. */
static void weight_gradient(
    loom_tape *tape, loom_parameter *weight, int64_t rows, const loom_tensor *x, const loom_tensor *d_y) {
    bool accumulate;
    float *grad = loom_parameter_begin_grad(weight, &accumulate);
    int64_t o = weight->shape[0], h = weight->shape[1];
    if (x->dtype == LOOM_F32)
        KERNELS(tape)->gemm(TEAM(tape), true, false, o, h, rows, 1.0f, d_y->data, o, x->data, h, accumulate, grad, h);
    else
        loom__kernels16(tape, x->dtype)
            ->gemm_f32(TEAM(tape), true, false, o, h, rows, 1.0f, d_y->data, o, x->data, h, accumulate, grad, h);
}

static loom_status check_input(const loom_tape *tape, loom_parameter *weight, const loom_tensor *x, const char *what) {
    if (x->dims != 3 || x->shape[2] != weight->shape[1])
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: the input of %s has width %lld, expected %lld", what, weight->name,
            (long long)(x->dims ? x->shape[x->dims - 1] : 0), (long long)weight->shape[1]);
    LOOM_TRY(loom__check_dtype(tape, what, x));
    LOOM_TRY(loom__check_parameter_dtype(what, x, weight));
    return loom_parameter_ready(weight);
}

/* ---- column ---- */

static loom_status column_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    linear_state *state = loom_node_state(node);
    const loom_parameter *weight = state->weight;
    int64_t rows = rows_of(d_y), o = weight->shape[0], h = weight->shape[1];
    bool wants_weight = weight->grad != NULL;
    if (state->sequence_parallel && wants_weight)
        LOOM_TRY(loom__gather_sequence_start(tape, loom_node_saved(node, 0), state->tp, &state->gathered));
    loom_tensor *d_full, *d_x;
    LOOM_TRY(
        loom_tensor_create(loom_tape_rank(tape), d_y->dtype, 3, (int64_t[]){d_y->shape[0], d_y->shape[1], h}, &d_full));
    LOOM__KERNEL(tape, d_y->dtype, gemm, false, false, rows, h, o, 1.0f, d_y->data, o, loom_parameter_values(weight), h,
        false, d_full->data, h);
    loom_status status = loom__reduce_start(tape, d_full, state->tp, state->sequence_parallel, &d_x);
    loom_tensor_release(d_full);
    return status ? status : loom_tape_give(tape, node, 0, d_x);
}

static loom_status column_weight(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    linear_state *state = loom_node_state(node);
    loom_tensor *x = loom_node_saved(node, 0);
    if (state->bias && state->bias->grad) {
        bool accumulate;
        float *grad = loom_parameter_begin_grad(state->bias, &accumulate);
        LOOM__KERNEL(tape, d_y->dtype, bias_gradient, rows_of(d_y), state->bias->shape[0], d_y->data, accumulate, grad);
    }
    if (!state->weight->grad)
        return LOOM_OK;
    if (state->sequence_parallel) {
        if (!state->gathered)
            LOOM_TRY(loom__gather_sequence_start(tape, x, state->tp, &state->gathered));
        LOOM_TRY(loom_tensor_ready(state->gathered));
        x = state->gathered;
    }
    weight_gradient(tape, state->weight, rows_of(d_y), x, d_y);
    loom_tensor_release(state->gathered);
    state->gathered = NULL;
    return LOOM_OK;
}

static const loom_op column_op = {"column-parallel linear", column_input, column_weight, linear_release};

/* The whole product of a sequence-parallel input: own rows first, while the gather of the others is on its way. */
static loom_status multiply_gathered(
    loom_tape *tape, const loom_parameter *weight, loom_tensor *x, loom_comm *tp, loom_tensor *y) {
    loom_tensor *full;
    LOOM_TRY(loom__gather_sequence_start(tape, x, tp, &full));
    int64_t own = rows_of(x), before = own * loom_comm_rank(tp), after = rows_of(y) - before - own;
    int64_t h = weight->shape[1], o = weight->shape[0];
    multiply_rows(tape, weight, own, x->data, loom__element(y, before * o));
    loom_status status = loom_tensor_ready(full);
    if (!status) {
        multiply_rows(tape, weight, before, full->data, y->data);
        multiply_rows(
            tape, weight, after, loom__element(full, (before + own) * h), loom__element(y, (before + own) * o));
    }
    loom_tensor_release(full);
    return status;
}

loom_status loom__column_linear(loom_tape *tape, loom_tensor *x, loom_parameter *weight, loom_parameter *bias,
    loom_comm *tp, bool sequence_parallel, loom_tensor **output) {
    LOOM_TRY(check_input(tape, weight, x, column_op.name));
    if (bias)
        LOOM_TRY(loom__check_parameter_dtype(column_op.name, x, bias));
    LOOM_TRY(loom_parameter_ready(bias));
    LOOM_TRY(loom_tensor_ready(x));
    int64_t s = sequence_parallel ? x->shape[0] * loom__group_size(tp) : x->shape[0], o = weight->shape[0];
    loom_tensor *y, *wide = NULL;
    const float *used_bias;
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), x->dtype, 3, (int64_t[]){s, x->shape[1], o}, &y));
    loom_status status = loom__vector(tape, bias, 0, &wide, &used_bias);
    if (!status && sequence_parallel)
        status = multiply_gathered(tape, weight, x, tp, y);
    else if (!status)
        multiply_rows(tape, weight, rows_of(x), x->data, y->data);
    loom_node *node = NULL;
    if (!status) {
        if (bias)
            LOOM__KERNEL(tape, y->dtype, bias_add, rows_of(y), o, y->data, used_bias, y->data);
        status = loom_tape_record(tape, &column_op, sizeof(linear_state), (loom_tensor *[]){x}, 1,
            (loom_parameter *[]){weight, bias}, bias ? 2 : 1, y, &node);
    }
    if (!status && node) {
        *(linear_state *)loom_node_state(node) = (linear_state){tp, sequence_parallel, weight, bias, NULL};
        status = loom_node_save(node, x);
    }
    loom_tensor_release(wide);
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    *output = y;
    return LOOM_OK;
}

/* ---- row ---- */

/* d_y of the whole sequence, which both halves need. */
static loom_status row_gradient(loom_tape *tape, linear_state *state, loom_tensor *d_y, loom_tensor **full) {
    if (!state->sequence_parallel) {
        *full = d_y;
        return LOOM_OK;
    }
    if (!state->gathered)
        LOOM_TRY(loom__gather_sequence_start(tape, d_y, state->tp, &state->gathered));
    *full = state->gathered;
    return loom_tensor_ready(state->gathered);
}

static loom_status row_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    linear_state *state = loom_node_state(node);
    const loom_parameter *weight = state->weight;
    int64_t o = weight->shape[0], i = weight->shape[1];
    loom_tensor *full, *d_x;
    LOOM_TRY(row_gradient(tape, state, d_y, &full));
    LOOM_TRY(
        loom_tensor_create(loom_tape_rank(tape), full->dtype, 3, (int64_t[]){full->shape[0], full->shape[1], i}, &d_x));
    LOOM__KERNEL(tape, full->dtype, gemm, false, false, rows_of(full), i, o, 1.0f, full->data, o,
        loom_parameter_values(weight), i, false, d_x->data, i);
    return loom_tape_give(tape, node, 0, d_x);
}

static loom_status row_weight(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    linear_state *state = loom_node_state(node);
    loom_tensor *x = loom_node_saved(node, 0), *full;
    LOOM_TRY(row_gradient(tape, state, d_y, &full));
    weight_gradient(tape, state->weight, rows_of(x), x, full);
    loom_tensor_release(state->gathered);
    state->gathered = NULL;
    return LOOM_OK;
}

static const loom_op row_op = {"row-parallel linear", row_input, row_weight, linear_release};

loom_status loom__row_linear(loom_tape *tape, loom_tensor *x, loom_parameter *weight, loom_comm *tp,
    bool sequence_parallel, loom_tensor **output) {
    LOOM_TRY(check_input(tape, weight, x, row_op.name));
    LOOM_TRY(loom_tensor_ready(x));
    loom_tensor *partial, *y;
    LOOM_TRY(loom_tensor_create(
        loom_tape_rank(tape), x->dtype, 3, (int64_t[]){x->shape[0], x->shape[1], weight->shape[0]}, &partial));
    multiply_rows(tape, weight, rows_of(x), x->data, partial->data);
    loom_status status = loom__reduce_start(tape, partial, tp, sequence_parallel, &y);
    loom_tensor_release(partial);
    if (status)
        return status;
    loom_node *node = NULL;
    status = loom_tape_record(
        tape, &row_op, sizeof(linear_state), (loom_tensor *[]){x}, 1, (loom_parameter *[]){weight}, 1, y, &node);
    if (!status && node) {
        *(linear_state *)loom_node_state(node) = (linear_state){tp, sequence_parallel, weight, NULL, NULL};
        status = loom_node_save(node, x);
    }
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    *output = y;
    return LOOM_OK;
}
