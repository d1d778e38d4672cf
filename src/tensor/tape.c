/* The tape: a list of nodes in the order of the forward pass, walked from its end. Invariant of the walk: when a node's
 * turn comes, every later node has passed, so the gradient of its output is complete. A gradient tensor that somebody
 * else also holds, itself or as a view, is never changed in place. */
#include "tensor/tape.h"
#include "runtime/rank.h"
#include "tensor/dtype.h"
#include <stdlib.h>
#include <string.h>

loom_status loom__tape_reserve(void *array, int64_t *capacity, int64_t wanted, size_t element_bytes) {
    if (wanted <= *capacity)
        return LOOM_OK;
    int64_t grown = *capacity ? *capacity * 2 : 64;
    while (grown < wanted)
        grown *= 2;
    void *old, *memory;
    memcpy(&old, array, sizeof old);
    memory = realloc(old, (size_t)grown * element_bytes);
    if (!memory)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a tape of %lld entries", (long long)grown);
    memset((char *)memory + (size_t)*capacity * element_bytes, 0, (size_t)(grown - *capacity) * element_bytes);
    memcpy(array, &memory, sizeof memory);
    *capacity = grown;
    return LOOM_OK;
}

loom_status loom_tape_create(loom_rank *rank, const loom_tape_options *options, loom_tape **out) {
    loom_tape *tape = calloc(1, sizeof *tape);
    if (!tape)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a tape");
    tape->rank = rank;
    tape->number = ++rank->tapes;
    tape->options = *options;
    *out = tape;
    return LOOM_OK;
}

static void node_destroy(loom_node *node) {
    if (!node)
        return;
    if (node->op->release)
        node->op->release(node);
    for (int i = 0; i < node->saved_count; i++)
        loom_tensor_release(node->saved[i]);
    free(node->parameters);
    free(node);
}

/* A walk that was broken off, or never made, leaves uses behind that must not count in the next one. */
static void forget_uses(loom_tape *tape, loom_node *node) {
    if (node && !tape->nested)
        for (int64_t i = 0; i < node->parameter_count; i++)
            node->parameters[i]->pending_uses--;
}

void loom_tape_destroy(loom_tape *tape) {
    if (!tape)
        return;
    for (int64_t i = 0; i < tape->queue_count; i++) {
        forget_uses(tape, tape->queue[i].node);
        loom_tensor_release(tape->queue[i].d_output);
        node_destroy(tape->queue[i].node);
    }
    for (int64_t i = 0; i < tape->node_count; i++) {
        forget_uses(tape, tape->nodes[i]);
        node_destroy(tape->nodes[i]);
    }
    for (int64_t i = 0; i < tape->value_count; i++)
        loom_tensor_release(tape->gradients[i]);
    free(tape->queue);
    free(tape->nodes);
    free(tape->gradients);
    free(tape->is_leaf);
    free(tape);
}

loom_rank *loom_tape_rank(const loom_tape *tape) {
    return tape->rank;
}
bool loom_tape_records(const loom_tape *tape) {
    return tape->options.record;
}

void loom_tape_observe(loom_tape *tape, loom_tape_observer observer, void *context) {
    tape->observer = observer;
    tape->observer_context = context;
}

void loom_tape_scope(loom_tape *tape, const char *scope) {
    strncpy(tape->scope, scope, sizeof tape->scope - 1);
    tape->scope[sizeof tape->scope - 1] = '\0';
}

static loom_status new_value(loom_tape *tape, loom_tensor *tensor) {
    int64_t wanted = tape->value_count + 1, leaf_capacity = tape->value_capacity;
    LOOM_TRY(loom__tape_reserve(&tape->is_leaf, &leaf_capacity, wanted, sizeof *tape->is_leaf));
    LOOM_TRY(loom__tape_reserve(&tape->gradients, &tape->value_capacity, wanted, sizeof(loom_tensor *)));
    tensor->tape = tape->number;
    tensor->value = tape->value_count++;
    tape->gradients[tensor->value] = NULL;
    tape->is_leaf[tensor->value] = false;
    return LOOM_OK;
}

loom_status loom_tape_leaf(loom_tape *tape, loom_tensor *tensor) {
    LOOM_TRY(new_value(tape, tensor));
    tape->is_leaf[tensor->value] = true;
    return LOOM_OK;
}

loom_tensor *loom_tape_gradient(const loom_tape *tape, const loom_tensor *leaf) {
    return leaf->tape == tape->number ? tape->gradients[leaf->value] : NULL;
}

static bool wants_gradient(const loom_tape *tape, const loom_tensor *tensor) {
    return tensor && tensor->tape == tape->number;
}

loom_status loom__node_add_parameter(loom_node *node, loom_parameter *parameter) {
    LOOM_TRY(loom__tape_reserve(
        &node->parameters, &node->parameter_capacity, node->parameter_count + 1, sizeof(loom_parameter *)));
    node->parameters[node->parameter_count++] = parameter;
    return LOOM_OK;
}

static loom_status check_output(const loom_tape *tape, const loom_op *op, loom_tensor *output) {
    const loom_kernels16 *narrow = loom__kernels16(tape, output->dtype);
    if (!tape->options.check_finite || (output->dtype != LOOM_F32 && !narrow))
        return LOOM_OK;
    LOOM_TRY(loom_tensor_ready(output));
    loom_team *team = loom_rank_team(tape->rank);
    int64_t count = loom_tensor_count(output);
    if (!(narrow ? narrow->has_nonfinite(team, count, output->data)
                 : loom_rank_kernels(tape->rank)->has_nonfinite(team, count, output->data)))
        return LOOM_OK;
    const char *scope = tape->scope[0] ? tape->scope : "the model";
    int rank = loom_rank_index(tape->rank);
    char *note = tape->options.nonfinite;
    if (!note)
        return loom_fail(
            LOOM_ERR_NUMERIC, "the output of %s in %s has a NaN or an infinity (rank %d)", op->name, scope, rank);
    if (!note[0])
        snprintf(note, LOOM_NONFINITE_BYTES, "the output of %s in %s has a NaN or an infinity (rank %d)", op->name,
            scope, rank);
    return LOOM_OK;
}

static loom_status node_create(loom_tape *tape, const loom_op *op, size_t state_bytes, loom_node **out) {
    loom_node *node = calloc(1, sizeof *node + state_bytes);
    if (!node)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a node of %s", op->name);
    node->op = op;
    memcpy(node->scope, tape->scope, sizeof node->scope);
    *out = node;
    return LOOM_OK;
}

loom_status loom_tape_record(loom_tape *tape, const loom_op *op, size_t state_bytes, loom_tensor *const *inputs,
    int input_count, loom_parameter *const *parameters, int parameter_count, loom_tensor *output, loom_node **out) {
    if (input_count < 0 || input_count > LOOM_MAX_INPUTS)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "inputs of %s: found %d, expected 0 to %d", op->name, input_count, LOOM_MAX_INPUTS);
    LOOM_TRY(check_output(tape, op, output));
    if (tape->observer)
        LOOM_TRY(tape->observer(tape->observer_context, tape->scope, op->name, output));
    *out = NULL;
    bool wanted = false;
    for (int i = 0; i < input_count; i++)
        wanted = wanted || wants_gradient(tape, inputs[i]);
    for (int i = 0; i < parameter_count; i++) {
        if (!parameters[i] || !parameters[i]->grad)
            continue;
        wanted = true;
        if (tape->collector)
            LOOM_TRY(loom__node_add_parameter(tape->collector, parameters[i]));
    }
    if (!tape->options.record || !wanted)
        return LOOM_OK;
    loom_node *node = NULL;
    LOOM_TRY(loom__tape_reserve(&tape->nodes, &tape->node_capacity, tape->node_count + 1, sizeof(loom_node *)));
    LOOM_TRY(node_create(tape, op, state_bytes, &node));
    /* Before the output gets its number: an operation that works in place has its input as its output. */
    node->input_count = input_count;
    for (int i = 0; i < input_count; i++)
        node->inputs[i] = wants_gradient(tape, inputs[i]) ? inputs[i]->value : -1;
    loom_status status = new_value(tape, output);
    for (int i = 0; i < parameter_count && !status; i++)
        if (parameters[i] && parameters[i]->grad)
            status = loom__node_add_parameter(node, parameters[i]);
    if (status) {
        free(node->parameters);
        free(node);
        return status;
    }
    for (int64_t i = 0; i < node->parameter_count && !tape->nested; i++)
        node->parameters[i]->pending_uses++;
    node->output = output->value;
    tape->nodes[tape->node_count++] = node;
    *out = node;
    return LOOM_OK;
}

void *loom_node_state(loom_node *node) {
    return node->state;
}

loom_status loom_node_save(loom_node *node, loom_tensor *tensor) {
    if (node->saved_count == LOOM_MAX_SAVED)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "%s saves more than the %d tensors that a node holds", node->op->name, LOOM_MAX_SAVED);
    node->saved[node->saved_count++] = tensor ? loom_tensor_retain(tensor) : NULL;
    return LOOM_OK;
}

loom_tensor *loom_node_saved(const loom_node *node, int number) {
    return number >= 0 && number < node->saved_count ? node->saved[number] : NULL;
}

loom_tensor *loom_node_take(loom_node *node, int number) {
    loom_tensor *tensor = loom_node_saved(node, number);
    if (tensor)
        node->saved[number] = NULL;
    return tensor;
}

bool loom_node_wants(const loom_node *node, int number) {
    return number >= 0 && number < node->input_count && node->inputs[number] >= 0;
}

loom_parameter *loom_node_parameter(const loom_node *node, int number) {
    return number >= 0 && number < node->parameter_count ? node->parameters[number] : NULL;
}

float *loom_parameter_begin_grad(loom_parameter *parameter, bool *accumulate) {
    *accumulate = parameter->grad_written;
    parameter->grad_written = true;
    return parameter->grad;
}

/* sum = a + b, into whichever of them nobody else holds, or into a new tensor. Takes both references. */
static loom_status add_gradients(loom_tape *tape, loom_tensor *a, loom_tensor *b, loom_tensor **sum) {
    int64_t count = loom_tensor_count(a);
    loom_status status = loom_tensor_ready(a);
    if (!status)
        status = loom_tensor_ready(b);
    if (!status && count != loom_tensor_count(b))
        status = loom_fail(LOOM_ERR_INTERNAL, "two gradients of one value have %lld and %lld elements",
            (long long)count, (long long)loom_tensor_count(b));
    if (!status)
        status = loom__check_same_dtype("sum of the gradients of one value", a, b);
    loom_tensor *made = NULL;
    if (!status && loom_tensor_is_shared(a) && loom_tensor_is_shared(b)) {
        status = loom_tensor_create(tape->rank, a->dtype, a->dims, a->shape, &made);
        if (!status)
            memcpy(made->data, a->data, (size_t)count * loom_dtype_size(a->dtype));
    }
    if (status) {
        loom_tensor_release(a);
        loom_tensor_release(b);
        return status;
    }
    if (made) {
        LOOM__KERNEL(tape, made->dtype, add, count, b->data, made->data);
        loom_tensor_release(a);
        loom_tensor_release(b);
        *sum = made;
        return LOOM_OK;
    }
    loom_tensor *kept = loom_tensor_is_shared(a) ? b : a, *other = kept == a ? b : a;
    LOOM__KERNEL(tape, kept->dtype, add, count, other->data, kept->data);
    loom_tensor_release(other);
    *sum = kept;
    return LOOM_OK;
}

loom_status loom_tape_give(loom_tape *tape, loom_node *node, int number, loom_tensor *gradient) {
    if (!loom_node_wants(node, number)) {
        loom_tensor_release(gradient);
        return LOOM_OK;
    }
    int64_t value = node->inputs[number];
    loom_tensor *present = tape->gradients[value];
    tape->gradients[value] = gradient;
    return present ? add_gradients(tape, present, gradient, &tape->gradients[value]) : LOOM_OK;
}

void loom__tape_uses_passed(loom_tape *tape, loom_node *node) {
    if (tape->nested)
        return;
    for (int64_t i = 0; i < node->parameter_count; i++) {
        loom_parameter *parameter = node->parameters[i];
        if (--parameter->pending_uses == 0 && tape->options.parameter_ready)
            tape->options.parameter_ready(tape->options.context, parameter);
    }
    node->parameter_count = 0;
}

static loom_status run_weight_half(loom_tape *tape, loom_node *node, loom_tensor *d_output) {
    loom_profile_phase before = loom__profile_phase(tape->rank, LOOM_PROFILE_WEIGHT_GRADIENT);
    loom_status status = LOOM_OK;
    if (node->op->backward_weight && node->parameter_count > 0)
        status = node->op->backward_weight(tape, node, d_output);
    if (!status)
        loom__tape_uses_passed(tape, node);
    loom__profile_phase(tape->rank, before);
    return status;
}

static loom_status pass_node(loom_tape *tape, int64_t index) {
    loom_node *node = tape->nodes[index];
    loom_tensor *d_output = tape->gradients[node->output];
    loom_status status = LOOM_OK;
    bool queued = false;
    if (d_output) {
        tape->gradients[node->output] = NULL;
        bool any = false;
        for (int i = 0; i < node->input_count; i++)
            any = any || node->inputs[i] >= 0;
        status = loom_tensor_ready(d_output);
        if (!status && any && node->op->backward_input)
            status = node->op->backward_input(tape, node, d_output);
        if (!status && tape->options.defer_weights && node->op->backward_weight && node->parameter_count > 0) {
            status =
                loom__tape_reserve(&tape->queue, &tape->queue_capacity, tape->queue_count + 1, sizeof(loom__queued));
            if (!status) {
                tape->queue[tape->queue_count++] = (loom__queued){node, loom_tensor_retain(d_output)};
                tape->nodes[index] = NULL;
                queued = true;
            }
        } else if (!status) {
            status = run_weight_half(tape, node, d_output);
        }
        loom_tensor_release(d_output);
    } else {
        loom__tape_uses_passed(tape, node);
    }
    if (status && status != LOOM_ERR_ABORTED)
        loom_fail_context(status, "backward of %s in %s: ", node->op->name, node->scope[0] ? node->scope : "the model");
    if (!queued && !status) {
        node_destroy(node);
        tape->nodes[index] = NULL;
    }
    return status;
}

loom_status loom_tape_backward(loom_tape *tape, loom_tensor *output, loom_tensor *d_output) {
    if (tape->walked)
        return loom_fail(LOOM_ERR_STATE, "this tape has been walked already");
    if (output->tape != tape->number)
        return loom_fail(LOOM_ERR_ARGUMENT, "the output does not depend on anything that this tape recorded");
    if (loom_tensor_count(output) != loom_tensor_count(d_output))
        return loom_fail(LOOM_ERR_ARGUMENT, "the gradient given has %lld elements, the output %lld",
            (long long)loom_tensor_count(d_output), (long long)loom_tensor_count(output));
    if (output->dtype != d_output->dtype)
        return loom_fail(LOOM_ERR_ARGUMENT, "the gradient given is kept in %s, the output in %s; expected one dtype",
            loom_dtype_name(d_output->dtype), loom_dtype_name(output->dtype));
    tape->walked = true;
    tape->gradients[output->value] = loom_tensor_retain(d_output);
    loom_profile_phase before = loom__profile_phase(tape->rank, LOOM_PROFILE_INPUT_GRADIENT);
    loom_status status = LOOM_OK;
    for (int64_t i = tape->node_count - 1; i >= 0 && !status; i--)
        status = pass_node(tape, i);
    loom__profile_phase(tape->rank, before);
    LOOM_TRY(status);
    for (int64_t i = 0; i < tape->value_count; i++) {
        if (tape->is_leaf[i] && tape->gradients[i])
            LOOM_TRY(loom_tensor_ready(tape->gradients[i]));
        if (!tape->is_leaf[i]) {
            loom_tensor_release(tape->gradients[i]);
            tape->gradients[i] = NULL;
        }
    }
    return LOOM_OK;
}

loom_status loom_tape_run_weights(loom_tape *tape) {
    for (int64_t i = 0; i < tape->queue_count; i++) {
        loom__queued *queued = &tape->queue[i];
        if (!queued->node) /* done by a call that failed later */
            continue;
        LOOM_TRY(run_weight_half(tape, queued->node, queued->d_output));
        loom_tensor_release(queued->d_output);
        node_destroy(queued->node);
        *queued = (loom__queued){0};
    }
    tape->queue_count = 0;
    return LOOM_OK;
}
