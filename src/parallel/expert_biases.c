/* The biases of a rank's experts: what their gradients are, and the non-linearity between an expert's two products,
 * which adds the bias of the first one in passing. Each expert's rows are a tensor of their own to the kernels, so that
 * the sum over them has an order that depends on the number of these rows alone. */
#include "parallel/common.h"
#include "parallel/experts.h"
#include <stdlib.h>
#include <string.h>

loom_status loom__expert_biases_ready(
    const char *op, loom_dtype dtype, const loom__routed *routed, loom_parameter *const *biases, int64_t width) {
    for (int64_t e = 0; biases && e < routed->local_experts; e++) {
        const loom_parameter *bias = biases[e];
        if (bias->dims != 1 || bias->shape[0] != width)
            return loom_fail(LOOM_ERR_ARGUMENT, "%s: %s has %lld elements, the rows of its expert %lld", op, bias->name,
                (long long)bias->shape[0], (long long)width);
        LOOM_TRY(loom__check_parameter_dtype(op, &(loom_tensor){.dtype = dtype}, bias));
        LOOM_TRY(loom_parameter_ready(biases[e]));
    }
    return LOOM_OK;
}

void loom__expert_bias_gradients(
    loom_tape *tape, int64_t experts, const int64_t *counts, loom_parameter *const *biases, loom_tensor *d_y) {
    const int64_t width = d_y->shape[1];
    for (int64_t e = 0, row = 0; e < experts; row += counts[e++]) {
        bool accumulate;
        float *grad = loom_parameter_begin_grad(biases[e], &accumulate);
        if (grad)
            LOOM__KERNEL(
                tape, d_y->dtype, bias_gradient, counts[e], width, loom__element(d_y, row * width), accumulate, grad);
    }
}

typedef struct activate_state {
    loom_activation act;
    int64_t experts;
    int64_t *counts;         /* [experts] rows */
    loom_parameter **biases; /* [experts] */
    loom_tensor *d_x;        /* the weight half sums its rows */
} activate_state;

static loom_status activate_gradient(loom_tape *tape, loom_node *node, loom_tensor *d_y, loom_tensor **d_x) {
    const activate_state *state = loom_node_state(node);
    const loom_tensor *x = loom_node_saved(node, 0);
    const int64_t width = x->shape[1], f = d_y->shape[1];
    loom_tensor *made;
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), x->dtype, 2, x->shape, &made));
    for (int64_t e = 0, row = 0; e < state->experts; row += state->counts[e++]) {
        loom_tensor *wide;
        const float *bias;
        loom_status status = loom__vector(tape, state->biases[e], 0, &wide, &bias);
        if (status) {
            loom_tensor_release(made);
            return status;
        }
        LOOM__KERNEL(tape, x->dtype, activation_backward, state->act, state->counts[e], f,
            loom__element(x, row * width), bias, loom__element(d_y, row * f), loom__element(made, row * width));
        loom_tensor_release(wide);
    }
    *d_x = made;
    return LOOM_OK;
}

static loom_status activate_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    activate_state *state = loom_node_state(node);
    loom_tensor *d_x;
    LOOM_TRY(activate_gradient(tape, node, d_y, &d_x));
    if (loom_node_parameter(node, 0))
        state->d_x = loom_tensor_retain(d_x);
    return loom_tape_give(tape, node, 0, d_x);
}

static loom_status activate_weight(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    activate_state *state = loom_node_state(node);
    if (!state->d_x)
        LOOM_TRY(activate_gradient(tape, node, d_y, &state->d_x));
    loom__expert_bias_gradients(tape, state->experts, state->counts, state->biases, state->d_x);
    loom_tensor_release(state->d_x);
    state->d_x = NULL;
    return LOOM_OK;
}

static void free_state(activate_state *state) {
    free(state->counts);
    free(state->biases);
    loom_tensor_release(state->d_x);
}

static void activate_release(loom_node *node) {
    free_state(loom_node_state(node));
}

static const loom_op activate_op = {"expert activation", activate_input, activate_weight, activate_release};

static loom_status make_state(
    loom_activation act, const loom__routed *routed, loom_parameter *const *biases, activate_state *state) {
    const size_t experts = (size_t)routed->local_experts;
    *state = (activate_state){.act = act,
        .experts = routed->local_experts,
        .counts = malloc(experts * sizeof *state->counts),
        .biases = malloc(experts * sizeof(loom_parameter *))};
    if (!state->counts || !state->biases) {
        free_state(state);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld experts", (long long)routed->local_experts);
    }
    memcpy(state->counts, routed->local_counts, experts * sizeof *state->counts);
    memcpy(state->biases, biases, experts * sizeof(loom_parameter *));
    return LOOM_OK;
}

static loom_status activate_rows(loom_tape *tape, const activate_state *state, const loom_tensor *x, loom_tensor *y) {
    const int64_t width = x->shape[1], f = y->shape[1];
    for (int64_t e = 0, row = 0; e < state->experts; row += state->counts[e++]) {
        loom_tensor *wide;
        const float *bias;
        LOOM_TRY(loom__vector(tape, state->biases[e], 0, &wide, &bias));
        LOOM__KERNEL(tape, x->dtype, activation, state->act, state->counts[e], f, loom__element(x, row * width), bias,
            loom__element(y, row * f));
        loom_tensor_release(wide);
    }
    return LOOM_OK;
}

loom_status loom__expert_activate(loom_tape *tape, loom_activation act, loom_tensor *rows, const loom__routed *routed,
    loom_parameter *const *biases, loom_tensor **output) {
    if (!biases)
        return loom_activate(tape, act, rows, NULL, output);
    LOOM_TRY(loom__check_dtype(tape, activate_op.name, rows));
    LOOM_TRY(loom_tensor_ready(rows));
    const int64_t width = rows->shape[1], f = loom_activation_is_gated(act) ? width / 2 : width;
    LOOM_TRY(loom__expert_biases_ready(activate_op.name, rows->dtype, routed, biases, width));
    activate_state made;
    LOOM_TRY(make_state(act, routed, biases, &made));
    loom_tensor *y = NULL;
    loom_node *node = NULL;
    loom_status status = loom_tensor_create(loom_tape_rank(tape), rows->dtype, 2, (int64_t[]){rows->shape[0], f}, &y);
    if (!status)
        status = activate_rows(tape, &made, rows, y);
    if (!status)
        status = loom_tape_record(
            tape, &activate_op, sizeof made, (loom_tensor *[]){rows}, 1, made.biases, (int)made.experts, y, &node);
    if (!status && node) {
        *(activate_state *)loom_node_state(node) = made;
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
