/* The products of a rank's experts, each with its own rows, as one group of products for the whole team. An expert
 * without rows still writes its gradient, of zeros, when it is the first of a step. Where an expert's slices are on
 * several ranks their products are summed later: one of the ranks adds the bias, and all of them have its gradient,
 * since all have the gradients of all rows, in the same order. */
#include "parallel/common.h"
#include "parallel/experts.h"
#include <stdlib.h>
#include <string.h>

typedef struct linear_state {
    int64_t experts;
    bool biased;
    int64_t *counts;             /* [experts] rows */
    loom_parameter **parameters; /* [experts] weights, and as many biases where it is biased */
    loom_product *products;      /* [experts] of the group that is computed */
} linear_state;

/* The outputs [rows, width] of each expert's rows, from inputs [rows, depth] and its weight. */
static void set_products(const linear_state *state, loom_tensor *in, loom_tensor *out) {
    const int64_t depth = in->shape[1], width = out->shape[1];
    for (int64_t e = 0, row = 0; e < state->experts; row += state->counts[e++])
        state->products[e] = (loom_product){.m = state->counts[e],
            .n = width,
            .k = depth,
            .a = loom__element(in, row * depth),
            .b = loom_parameter_values(state->parameters[e]),
            .c = loom__element(out, row * width)};
}

static loom_status linear_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    const linear_state *state = loom_node_state(node);
    const loom_tensor *x = loom_node_saved(node, 0);
    int64_t in = x->shape[1], out = d_y->shape[1];
    loom_tensor *d_x;
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), x->dtype, 2, x->shape, &d_x));
    set_products(state, d_y, d_x);
    LOOM__KERNEL(tape, x->dtype, gemm_grouped, false, false, state->experts, state->products, out, in, in);
    return loom_tape_give(tape, node, 0, d_x);
}

static loom_status linear_weight(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    const linear_state *state = loom_node_state(node);
    const loom_tensor *x = loom_node_saved(node, 0);
    int64_t in = x->shape[1], out = d_y->shape[1], count = 0;
    for (int64_t e = 0, row = 0; e < state->experts; row += state->counts[e++]) {
        bool accumulate;
        float *grad = loom_parameter_begin_grad(state->parameters[e], &accumulate);
        if (grad)
            state->products[count++] = (loom_product){.m = out,
                .n = in,
                .k = state->counts[e],
                .a = loom__element(d_y, row * out),
                .b = loom__element(x, row * in),
                .c = grad,
                .accumulate = accumulate};
    }
    if (x->dtype == LOOM_F32)
        KERNELS(tape)->gemm_grouped(TEAM(tape), true, false, count, state->products, out, in, in);
    else
        loom__kernels16(tape, x->dtype)->gemm_grouped_f32(TEAM(tape), true, false, count, state->products, out, in, in);
    if (state->biased)
        loom__expert_bias_gradients(tape, state->experts, state->counts, state->parameters + state->experts, d_y);
    return LOOM_OK;
}

static void free_state(linear_state *state) {
    free(state->counts);
    free(state->parameters);
    free(state->products);
}

static void linear_release(loom_node *node) {
    free_state(loom_node_state(node));
}

static const loom_op linear_op = {"expert linear", linear_input, linear_weight, linear_release};

static loom_status make_state(
    const loom__routed *routed, loom_parameter *const *weights, loom_parameter *const *biases, linear_state *state) {
    size_t experts = (size_t)routed->local_experts;
    *state = (linear_state){routed->local_experts, biases != NULL, malloc(experts * sizeof *state->counts),
        malloc(2 * experts * sizeof(loom_parameter *)), malloc(experts * sizeof *state->products)};
    if (!state->counts || !state->parameters || !state->products) {
        free_state(state);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld experts", (long long)routed->local_experts);
    }
    memcpy(state->counts, routed->local_counts, experts * sizeof *state->counts);
    memcpy(state->parameters, weights, experts * sizeof(loom_parameter *));
    if (biases)
        memcpy(state->parameters + experts, biases, experts * sizeof(loom_parameter *));
    return LOOM_OK;
}

static loom_status add_biases(loom_tape *tape, const linear_state *state, loom_tensor *y) {
    const int64_t width = y->shape[1];
    for (int64_t e = 0, row = 0; e < state->experts; row += state->counts[e++]) {
        loom_tensor *wide;
        const float *bias;
        void *rows = loom__element(y, row * width);
        LOOM_TRY(loom__vector(tape, state->parameters[state->experts + e], 0, &wide, &bias));
        LOOM__KERNEL(tape, y->dtype, bias_add, state->counts[e], width, rows, bias, rows);
        loom_tensor_release(wide);
    }
    return LOOM_OK;
}

loom_status loom__expert_linear(loom_tape *tape, loom_tensor *rows, const loom__routed *routed,
    loom_parameter *const *weights, loom_parameter *const *biases, loom_tensor **output) {
    LOOM_TRY(loom__check_dtype(tape, linear_op.name, rows));
    LOOM_TRY(loom_tensor_ready(rows));
    int64_t in = rows->shape[1], out = weights[0]->shape[0];
    for (int64_t e = 0; e < routed->local_experts; e++) {
        LOOM_TRY(loom__check_parameter_dtype(linear_op.name, rows, weights[e]));
        LOOM_TRY(loom_parameter_ready(weights[e]));
    }
    LOOM_TRY(loom__expert_biases_ready(linear_op.name, rows->dtype, routed, biases, out));
    linear_state made;
    LOOM_TRY(make_state(routed, weights, biases, &made));
    loom_tensor *y = NULL;
    loom_node *node = NULL;
    const bool adds = biases && (!routed->groups.etp || loom_comm_rank(routed->groups.etp) == 0);
    loom_status status = loom_tensor_create(loom_tape_rank(tape), rows->dtype, 2, (int64_t[]){rows->shape[0], out}, &y);
    if (!status) {
        set_products(&made, rows, y);
        LOOM__KERNEL(tape, rows->dtype, gemm_grouped, false, true, made.experts, made.products, in, in, out);
    }
    if (!status && adds)
        status = add_biases(tape, &made, y);
    if (!status)
        status = loom_tape_record(tape, &linear_op, sizeof made, (loom_tensor *[]){rows}, 1, made.parameters,
            (int)(biases ? 2 * made.experts : made.experts), y, &node);
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
