/* The products of a rank's experts, each with its own rows: one after the other, with the whole team on each. An expert
 * without rows still writes its gradient, of zeros, when it is the first of a step. */
#include "parallel/common.h"
#include "parallel/experts.h"
#include <stdlib.h>
#include <string.h>

typedef struct linear_state {
    int64_t experts;
    int64_t *counts;          /* [experts] rows */
    loom_parameter **weights; /* [experts] */
} linear_state;

static loom_status linear_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    const linear_state *state = loom_node_state(node);
    const loom_tensor *x = loom_node_saved(node, 0);
    int64_t in = x->shape[1], out = d_y->shape[1], row = 0;
    loom_tensor *d_x;
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), x->dtype, 2, x->shape, &d_x));
    for (int64_t e = 0; e < state->experts; row += state->counts[e++])
        LOOM__KERNEL(tape, x->dtype, gemm, false, false, state->counts[e], in, out, 1.0f, loom__element(d_y, row * out),
            out, loom_parameter_values(state->weights[e]), in, false, loom__element(d_x, row * in), in);
    return loom_tape_give(tape, node, 0, d_x);
}

static loom_status linear_weight(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    const linear_state *state = loom_node_state(node);
    const loom_tensor *x = loom_node_saved(node, 0);
    int64_t in = x->shape[1], out = d_y->shape[1], row = 0;
    for (int64_t e = 0; e < state->experts; row += state->counts[e++]) {
        bool accumulate;
        float *grad = loom_parameter_begin_grad(state->weights[e], &accumulate);
        if (!grad)
            continue;
        const int64_t rows = state->counts[e];
        if (x->dtype == LOOM_F32)
            KERNELS(tape)->gemm(TEAM(tape), true, false, out, in, rows, 1.0f, loom__element(d_y, row * out), out,
                loom__element(x, row * in), in, accumulate, grad, in);
        else
            loom__kernels16(tape, x->dtype)
                ->gemm_f32(TEAM(tape), true, false, out, in, rows, 1.0f, loom__element(d_y, row * out), out,
                    loom__element(x, row * in), in, accumulate, grad, in);
    }
    return LOOM_OK;
}

static void free_state(linear_state *state) {
    free(state->counts);
    free(state->weights);
}

static void linear_release(loom_node *node) {
    free_state(loom_node_state(node));
}

static const loom_op linear_op = {"expert linear", linear_input, linear_weight, linear_release};

static loom_status make_state(const loom__routed *routed, loom_parameter *const *weights, linear_state *state) {
    size_t experts = (size_t)routed->local_experts;
    *state = (linear_state){
        routed->local_experts, malloc(experts * sizeof *state->counts), malloc(experts * sizeof(loom_parameter *))};
    if (!state->counts || !state->weights) {
        free_state(state);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld experts", (long long)routed->local_experts);
    }
    memcpy(state->counts, routed->local_counts, experts * sizeof *state->counts);
    memcpy(state->weights, weights, experts * sizeof(loom_parameter *));
    return LOOM_OK;
}

loom_status loom__expert_linear(loom_tape *tape, loom_tensor *rows, const loom__routed *routed,
    loom_parameter *const *weights, loom_tensor **output) {
    LOOM_TRY(loom__check_dtype(tape, linear_op.name, rows));
    LOOM_TRY(loom_tensor_ready(rows));
    int64_t in = rows->shape[1], out = weights[0]->shape[0], row = 0;
    for (int64_t e = 0; e < routed->local_experts; e++) {
        LOOM_TRY(loom__check_parameter_dtype(linear_op.name, rows, weights[e]));
        LOOM_TRY(loom_parameter_ready(weights[e]));
    }
    linear_state made;
    LOOM_TRY(make_state(routed, weights, &made));
    loom_tensor *y = NULL;
    loom_node *node = NULL;
    loom_status status = loom_tensor_create(loom_tape_rank(tape), rows->dtype, 2, (int64_t[]){rows->shape[0], out}, &y);
    for (int64_t e = 0; !status && e < made.experts; row += made.counts[e++])
        LOOM__KERNEL(tape, rows->dtype, gemm, false, true, made.counts[e], out, in, 1.0f, loom__element(rows, row * in),
            in, loom_parameter_values(made.weights[e]), in, false, loom__element(y, row * out), out);
    if (!status)
        status = loom_tape_record(
            tape, &linear_op, sizeof made, (loom_tensor *[]){rows}, 1, made.weights, (int)made.experts, y, &node);
    if (!status && node) {
        *(linear_state *)loom_node_state(node) = made;
        status = loom_node_save(node, rows);
    } else {
        free_state(&made);
    }
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    *output = y;
    return LOOM_OK;
}
