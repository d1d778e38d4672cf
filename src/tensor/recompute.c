/* Recomputation as an operation: the forward runs on the outer tape with recording off, noting only which parameters
 * are used; the backward runs the function again on a tape of its own and walks that. Random masks come out the same
 * because they are keyed by global coordinates. The outer tape counts the parameters' uses, once for each use inside.
 */
#include "tensor/tape.h"
#include <stdlib.h>

typedef struct recompute_state {
    loom_recomputed function;
    void *argument;
    void (*free_argument)(void *argument);
    loom_tape *inner; /* between the input half and the weight half */
} recompute_state;

/* Runs the function again and walks what it records. The input half does it, or the weight half of a call whose input
 * wants no gradient. */
static loom_status replay(loom_tape *tape, loom_node *node, loom_tensor *d_output) {
    recompute_state *state = loom_node_state(node);
    loom_tensor *x = loom_node_saved(node, 0), *inner_x = NULL, *y = NULL;
    loom_tape_options options = {.record = true, .defer_weights = tape->options.defer_weights};
    LOOM_TRY(loom_tape_create(tape->rank, &options, &state->inner));
    state->inner->nested = true;
    loom_tape_scope(state->inner, node->scope);
    LOOM_TRY(loom_tensor_view(x, x->dims, x->shape, &inner_x));
    inner_x->tape = 0;
    loom_status status = LOOM_OK;
    if (loom_node_wants(node, 0))
        status = loom_tape_leaf(state->inner, inner_x);
    if (!status)
        status = state->function(state->inner, state->argument, inner_x, &y);
    if (!status)
        status = loom_tape_backward(state->inner, y, d_output);
    loom_tensor *d_x = status ? NULL : loom_tape_gradient(state->inner, inner_x);
    if (d_x)
        status = loom_tape_give(tape, node, 0, loom_tensor_retain(d_x));
    loom_tensor_release(y);
    loom_tensor_release(inner_x);
    return status;
}

static loom_status recompute_weight(loom_tape *tape, loom_node *node, loom_tensor *d_output) {
    recompute_state *state = loom_node_state(node);
    if (!state->inner)
        LOOM_TRY(replay(tape, node, d_output));
    return loom_tape_run_weights(state->inner);
}

static void recompute_release(loom_node *node) {
    recompute_state *state = loom_node_state(node);
    loom_tape_destroy(state->inner);
    if (state->free_argument)
        state->free_argument(state->argument);
}

static const loom_op recompute_op = {"recompute", replay, recompute_weight, recompute_release};

loom_status loom_recompute_call(loom_tape *tape, loom_recomputed function, void *argument,
    void (*free_argument)(void *argument), loom_tensor *x, loom_tensor **output) {
    loom_node *collector = calloc(1, sizeof *collector), *outer = tape->collector, *node = NULL;
    bool recording = tape->options.record;
    loom_tensor *y = NULL;
    loom_status status = collector ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for a recomputation");
    if (!status) {
        tape->options.record = false;
        tape->collector = collector;
        status = function(tape, argument, x, &y);
        tape->options.record = recording;
        tape->collector = outer;
    }
    /* The function may have ended in what it was given; a value of its own keeps the two apart. */
    if (!status && y == x) {
        loom_tensor *copy = NULL;
        status = loom_tensor_view(x, x->dims, x->shape, &copy);
        loom_tensor_release(y);
        y = copy;
    }
    if (!status) {
        y->tape = 0;
        loom_tensor *inputs[] = {x};
        /* The first parameter makes the tape keep the node, and is noted by an outer collector; the others follow. */
        status = loom_tape_record(tape, &recompute_op, sizeof(recompute_state), inputs, 1, collector->parameters,
            collector->parameter_count > 0, y, &node);
    }
    if (!status && node) {
        status = loom_node_save(node, x);
        *(recompute_state *)loom_node_state(node) = (recompute_state){function, argument, free_argument, NULL};
    } else if (free_argument) {
        free_argument(argument);
    }
    for (int64_t i = 1; !status && i < collector->parameter_count; i++) {
        loom_parameter *parameter = collector->parameters[i];
        if (outer)
            status = loom__node_add_parameter(outer, parameter);
        if (!status && node)
            status = loom__node_add_parameter(node, parameter);
        if (!status && node && !tape->nested)
            parameter->pending_uses++;
    }
    if (collector)
        free(collector->parameters);
    free(collector);
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    *output = y;
    return LOOM_OK;
}
