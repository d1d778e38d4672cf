/* A module of one's own for tests: every parameter is one number, and the loss of a token is a sum of parameter times
 * coefficient, so that losses, gradients and norms can be said in advance. */
#ifndef TESTS_PARALLEL_TOY_MODULE_H
#define TESTS_PARALLEL_TOY_MODULE_H

#include <megaloom/megaloom.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOY_PARAMETERS = 4, TOY_USES = 6 };

typedef struct toy_use {
    int parameter;
    float coefficient; /* 0 = the token's label */
} toy_use;

typedef struct toy {
    loom_module module;
    int parameters, uses;
    toy_use use[TOY_USES];
    bool shard[TOY_PARAMETERS];         /* of the tensor ranks; otherwise a replica */
    float shard_factor[2];              /* a shard's coefficient is multiplied by that of its tensor rank; 0 = 1 */
    float initial;                      /* value of every parameter */
    loom_status failure;                /* what forward returns instead, once training begins */
    int materialized, finalized, freed; /* calls */
    loom_comm *tensor_group;
    loom_parameter parameter[TOY_PARAMETERS];
    loom_parameter *list[TOY_PARAMETERS];
    float memory[TOY_PARAMETERS];
    char name[TOY_PARAMETERS][16]; /* "p0", … */
} toy;

static inline loom_status toy_materialize(void *context, const loom_module_environment *environment) {
    toy *t = context;
    t->materialized++;
    t->tensor_group = environment->tensor_group;
    for (int i = 0; i < t->parameters; i++) {
        bool owns = t->shard[i] || loom_comm_rank(environment->tensor_group) == 0;
        snprintf(t->name[i], sizeof t->name[i], "p%d", i);
        t->memory[i] = environment->perform_initialization ? t->initial : 0;
        t->parameter[i] = (loom_parameter){.name = t->name[i],
            .dims = 1,
            .shape = {1, 1},
            .data = &t->memory[i],
            .tensor_parallel = t->shard[i],
            .owned = owns,
            .index = i};
        t->list[i] = &t->parameter[i];
    }
    return LOOM_OK;
}

static inline loom_status toy_parameters(void *context, loom_parameter *const **parameters, int64_t *count) {
    toy *t = context;
    *parameters = t->list;
    *count = t->parameters;
    return LOOM_OK;
}

static inline loom_status toy_backward(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    const loom_tensor *coefficients = loom_node_saved(node, 0);
    bool accumulate;
    (void)tape;
    float *grad = loom_parameter_begin_grad(loom_node_parameter(node, 0), &accumulate), sum = 0;
    for (int64_t i = 0; i < loom_tensor_count(d_y); i++)
        sum += loom_tensor_f32(coefficients)[i] * loom_tensor_f32(d_y)[i];
    *grad = accumulate ? *grad + sum : sum;
    return LOOM_OK;
}

static inline float toy_value(const loom_parameter *parameter) {
    return parameter->dtype == LOOM_F32    ? *parameter->data
           : parameter->dtype == LOOM_BF16 ? loom_bf16_to_f32(*parameter->data16)
                                           : loom_f16_to_f32(*parameter->data16);
}

static inline loom_status toy_term(
    toy *t, loom_tape *tape, const loom_batch *batch, const toy_use *use, loom_tensor **output) {
    static const loom_op op = {"toy term", NULL, toy_backward, NULL};
    loom_parameter *parameter = &t->parameter[use->parameter];
    float factor = t->shard[use->parameter] ? t->shard_factor[loom_comm_rank(t->tensor_group)] : 1;
    int64_t shape[2] = {batch->s, batch->b};
    loom_tensor *coefficients = NULL, *y = NULL;
    loom_node *node = NULL;
    loom_status status = loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 2, shape, &coefficients);
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 2, shape, &y);
    for (int64_t i = 0; !status && i < batch->s * batch->b; i++) {
        float label = (float)batch->labels[i % batch->b * batch->s + i / batch->b];
        float coefficient = (use->coefficient != 0 ? use->coefficient : label) * (factor != 0 ? factor : 1);
        loom_tensor_f32(coefficients)[i] = coefficient;
        loom_tensor_f32(y)[i] = coefficient * toy_value(parameter);
    }
    if (!status)
        status = loom_tape_record(tape, &op, 0, NULL, 0, &parameter, 1, y, &node);
    if (!status && node)
        status = loom_node_save(node, coefficients);
    loom_tensor_release(coefficients);
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    *output = y;
    return LOOM_OK;
}

static inline loom_status toy_forward(
    void *context, loom_tape *tape, const loom_forward *forward, loom_tensor **output) {
    toy *t = context;
    loom_tensor *sum = NULL;
    if (t->failure && forward->training)
        return loom_fail(t->failure, "the toy was told to fail");
    loom_tape_scope(tape, "toy");
    for (int i = 0; i < t->uses; i++) {
        loom_tensor *term = NULL, *next = NULL;
        loom_status status = toy_term(t, tape, forward->batch, &t->use[i], &term);
        if (!status && sum)
            status = loom_add(tape, sum, term, &next);
        if (sum) {
            loom_tensor_release(sum);
            loom_tensor_release(term);
            sum = next;
        } else {
            sum = term;
        }
        if (status) {
            loom_tensor_release(sum);
            return status;
        }
    }
    *output = sum;
    return LOOM_OK;
}

static inline loom_status toy_finalize(void *context) {
    ((toy *)context)->finalized++;
    return LOOM_OK;
}

static inline void toy_free(void *context) {
    ((toy *)context)->freed++;
}

/* The toy stays the caller's; its module may be given to setup_module once. */
static inline loom_module *toy_module(toy *t) {
    t->module = (loom_module){.context = t,
        .materialize = toy_materialize,
        .parameters = toy_parameters,
        .forward = toy_forward,
        .finalize_gradients = toy_finalize,
        .destroy = toy_free};
    return &t->module;
}

/* ---- rows of labels as a dataset */

enum { TOY_SEQUENCE = 3 };

/* labels[row][t] < 0: does not count. */
typedef struct toy_rows {
    const int (*labels)[TOY_SEQUENCE];
} toy_rows;

static inline loom_status toy_get(void *context, int64_t index, const loom_sample_row *row) {
    const toy_rows *rows = context;
    for (int t = 0; t < TOY_SEQUENCE; t++) {
        int label = index < 0 ? -1 : rows->labels[index][t];
        row->tokens[t] = 0;
        row->labels[t] = label < 0 ? 7 : label;
        row->loss_mask[t] = label < 0 ? 0.0f : 1.0f;
        row->position_ids[t] = t;
    }
    return LOOM_OK;
}

static inline loom_dataset toy_dataset(toy_rows *rows, int64_t count) {
    return (loom_dataset){.context = rows, .length = count, .sequence_length = TOY_SEQUENCE, .get = toy_get};
}

#endif
