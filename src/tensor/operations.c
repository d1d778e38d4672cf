/* The local operations: each is one kernel forward, one backward, and what has to be kept between them. Nothing here
 * communicates; `parallel` builds on the same door. */
#include "tensor/dtype.h"
#include <stdlib.h>
#include <string.h>

#define KERNELS(tape) loom_rank_kernels(loom_tape_rank(tape))
#define TEAM(tape) loom_rank_team(loom_tape_rank(tape))

static int64_t last_axis(const loom_tensor *x) {
    return x->dims ? x->shape[x->dims - 1] : 1;
}

static loom_status create_like(loom_tape *tape, const loom_tensor *like, loom_tensor **out) {
    return loom_tensor_create(loom_tape_rank(tape), like->dtype, like->dims, like->shape, out);
}

/* The end of every forward: on failure the output goes back, on success it is handed out. */
static loom_status finish(loom_status status, loom_tensor *made, loom_tensor **output) {
    if (status) {
        loom_tensor_release(made);
        return status;
    }
    *output = made;
    return LOOM_OK;
}

static loom_status save(loom_node *node, loom_tensor *const *tensors, int count) {
    for (int i = 0; i < count; i++)
        LOOM_TRY(loom_node_save(node, tensors[i]));
    return LOOM_OK;
}

/* A weight or bias over the last axis; NULL is none. */
static loom_status check_vector(const loom_op *op, const loom_tensor *x, loom_parameter *parameter) {
    int64_t width = last_axis(x);
    if (parameter && (parameter->dims != 1 || parameter->shape[0] != width))
        return loom_fail(LOOM_ERR_ARGUMENT, "%s has %lld elements, its input's last axis %lld", parameter->name,
            (long long)parameter->shape[0], (long long)width);
    LOOM_TRY(loom__check_parameter_dtype(op->name, x, parameter));
    return loom_parameter_ready(parameter);
}

static loom_status check_sample_numbers(const loom_dropout *dropout, const int64_t *sample) {
    if (!(dropout->probability >= 0 && dropout->probability < 1))
        return loom_fail(LOOM_ERR_ARGUMENT, "probability of a dropout: found %g, expected 0 or more and less than 1",
            (double)dropout->probability);
    if (dropout->probability > 0 && !sample)
        return loom_fail(LOOM_ERR_ARGUMENT, "a dropout of probability %g needs the sample numbers of its rows",
            (double)dropout->probability);
    return LOOM_OK;
}

/* ---- normalization ---- */

typedef struct norm_state {
    loom_parameter *weight, *bias; /* bias NULL: RMSNorm */
} norm_state;

static loom_status norm_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    loom_tensor *x = loom_node_saved(node, 0), *mean = loom_node_saved(node, 1), *rstd = loom_node_saved(node, 2);
    const loom_tensor *factor = loom_node_saved(node, 3);
    const norm_state *state = loom_node_state(node);
    const float *weight = factor ? loom_tensor_f32(factor) : state->weight->data;
    int64_t h = last_axis(x), rows = loom_tensor_count(x) / (h ? h : 1);
    loom_tensor *d_x;
    LOOM_TRY(create_like(tape, x, &d_x));
    if (mean)
        LOOM__KERNEL(tape, x->dtype, layernorm_backward_input, rows, h, x->data, weight, loom_tensor_f32(mean),
            loom_tensor_f32(rstd), d_y->data, d_x->data);
    else
        LOOM__KERNEL(tape, x->dtype, rmsnorm_backward_input, rows, h, x->data, weight, loom_tensor_f32(rstd), d_y->data,
            d_x->data);
    return loom_tape_give(tape, node, 0, d_x);
}

/* What a frozen parameter's gradient would be is thrown away. */
static void add_to_parameter(loom_tape *tape, loom_parameter *parameter, int64_t count, const float *gradient) {
    if (!parameter->grad)
        return;
    bool accumulate;
    float *grad = loom_parameter_begin_grad(parameter, &accumulate);
    if (accumulate)
        KERNELS(tape)->add(TEAM(tape), count, gradient, grad);
    else
        memcpy(grad, gradient, (size_t)count * sizeof *grad);
}

/* The kernel gives both gradients in one pass, straight into place where both are in the same state. */
static loom_status layernorm_weight(
    loom_tape *tape, const norm_state *state, loom_node *node, int64_t rows, int64_t h, loom_tensor *d_y) {
    loom_tensor *x = loom_node_saved(node, 0), *mean = loom_node_saved(node, 1), *rstd = loom_node_saved(node, 2);
    loom_parameter *weight = state->weight, *bias = state->bias;
    loom_tensor *both = NULL;
    bool direct = weight->grad && bias->grad && weight->grad_written == bias->grad_written, accumulate = false;
    if (!direct)
        LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 2, (int64_t[]){2, h}, &both));
    float *d_weight = direct ? loom_parameter_begin_grad(weight, &accumulate) : loom_tensor_f32(both);
    float *d_bias = direct ? loom_parameter_begin_grad(bias, &accumulate) : loom_tensor_f32(both) + h;
    LOOM__KERNEL(tape, x->dtype, layernorm_backward_weight, rows, h, x->data, loom_tensor_f32(mean),
        loom_tensor_f32(rstd), d_y->data, accumulate, d_weight, d_bias);
    if (!direct) {
        add_to_parameter(tape, weight, h, d_weight);
        add_to_parameter(tape, bias, h, d_bias);
    }
    loom_tensor_release(both);
    return LOOM_OK;
}

static loom_status norm_weight(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    const norm_state *state = loom_node_state(node);
    loom_tensor *x = loom_node_saved(node, 0), *rstd = loom_node_saved(node, 2);
    int64_t h = last_axis(x), rows = loom_tensor_count(x) / (h ? h : 1);
    if (state->bias)
        return layernorm_weight(tape, state, node, rows, h, d_y);
    bool accumulate;
    float *d_weight = loom_parameter_begin_grad(state->weight, &accumulate);
    LOOM__KERNEL(tape, x->dtype, rmsnorm_backward_weight, rows, h, x->data, loom_tensor_f32(rstd), d_y->data,
        accumulate, d_weight);
    return LOOM_OK;
}

static const loom_op norm_op = {"norm", norm_input, norm_weight, NULL};

static loom_status norm(loom_tape *tape, loom_tensor *x, loom_parameter *weight, loom_parameter *bias, float eps,
    bool zero_centered, loom_tensor **output) {
    LOOM_TRY(loom__check_dtype(tape, norm_op.name, x));
    LOOM_TRY(loom_tensor_ready(x));
    int64_t h = last_axis(x), rows = loom_tensor_count(x) / (h ? h : 1);
    if (!weight)
        return loom_fail(LOOM_ERR_ARGUMENT, "a norm needs its weight");
    LOOM_TRY(check_vector(&norm_op, x, weight));
    LOOM_TRY(check_vector(&norm_op, x, bias));
    loom_tensor *y = NULL, *mean = NULL, *rstd = NULL, *factor = NULL, *wide_bias = NULL;
    const float *used = NULL, *used_bias = NULL;
    loom_status status = create_like(tape, x, &y);
    if (!status)
        status = loom__vector(tape, weight, zero_centered ? 1.0f : 0.0f, &factor, &used);
    if (!status)
        status = loom__vector(tape, bias, 0, &wide_bias, &used_bias);
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 1, &rows, &rstd);
    if (!status && bias)
        status = loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 1, &rows, &mean);
    if (!status) {
        if (bias)
            LOOM__KERNEL(tape, x->dtype, layernorm, rows, h, eps, x->data, used, used_bias, y->data,
                loom_tensor_f32(mean), loom_tensor_f32(rstd));
        else
            LOOM__KERNEL(tape, x->dtype, rmsnorm, rows, h, eps, x->data, used, y->data, loom_tensor_f32(rstd));
        loom_node *node;
        status = loom_tape_record(tape, &norm_op, sizeof(norm_state), (loom_tensor *[]){x}, 1,
            (loom_parameter *[]){weight, bias}, bias ? 2 : 1, y, &node);
        if (!status && node) {
            *(norm_state *)loom_node_state(node) = (norm_state){weight, bias};
            status = save(node, (loom_tensor *[]){x, mean, rstd, factor}, 4);
        }
    }
    loom_tensor_release(factor);
    loom_tensor_release(wide_bias);
    loom_tensor_release(mean);
    loom_tensor_release(rstd);
    return finish(status, y, output);
}

loom_status loom_norm(
    loom_tape *tape, loom_tensor *x, loom_parameter *weight, loom_parameter *bias, float eps, loom_tensor **output) {
    return norm(tape, x, weight, bias, eps, false, output);
}

loom_status loom_zero_centered_norm(
    loom_tape *tape, loom_tensor *x, loom_parameter *weight, loom_parameter *bias, float eps, loom_tensor **output) {
    return norm(tape, x, weight, bias, eps, true, output);
}

/* ---- activation ---- */

typedef struct activate_state {
    loom_activation act;
    const loom_parameter *bias;
    loom_tensor *d_x; /* the weight half sums its rows */
} activate_state;

static int64_t activation_width(loom_activation act, const loom_tensor *x) {
    return loom_activation_is_gated(act) ? last_axis(x) / 2 : last_axis(x);
}

static loom_status activate_gradient(loom_tape *tape, loom_node *node, loom_tensor *d_y, loom_tensor **d_x) {
    activate_state *state = loom_node_state(node);
    loom_tensor *x = loom_node_saved(node, 0), *wide, *made = NULL;
    int64_t f = activation_width(state->act, x), rows = loom_tensor_count(x) / (last_axis(x) ? last_axis(x) : 1);
    const float *bias;
    LOOM_TRY(loom__vector(tape, state->bias, 0, &wide, &bias));
    loom_status status = create_like(tape, x, &made);
    if (!status)
        LOOM__KERNEL(tape, x->dtype, activation_backward, state->act, rows, f, x->data, bias, d_y->data, made->data);
    loom_tensor_release(wide);
    return finish(status, made, d_x);
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
    int64_t width = last_axis(state->d_x);
    bool accumulate;
    float *d_bias = loom_parameter_begin_grad(loom_node_parameter(node, 0), &accumulate);
    LOOM__KERNEL(tape, state->d_x->dtype, bias_gradient, loom_tensor_count(state->d_x) / (width ? width : 1), width,
        state->d_x->data, accumulate, d_bias);
    loom_tensor_release(state->d_x);
    state->d_x = NULL;
    return LOOM_OK;
}

static void activate_release(loom_node *node) {
    loom_tensor_release(((activate_state *)loom_node_state(node))->d_x);
}

static const loom_op activate_op = {"activation", activate_input, activate_weight, activate_release};

loom_status loom_activate(
    loom_tape *tape, loom_activation act, loom_tensor *x, loom_parameter *bias, loom_tensor **output) {
    LOOM_TRY(loom__check_dtype(tape, activate_op.name, x));
    if (x->dims < 1)
        return loom_fail(LOOM_ERR_ARGUMENT, "an activation needs at least one axis, found none");
    LOOM_TRY(loom_tensor_ready(x));
    int64_t width = last_axis(x), f = activation_width(act, x), shape[LOOM_MAX_DIMS];
    if (loom_activation_is_gated(act) && width % 2)
        return loom_fail(
            LOOM_ERR_ARGUMENT, "a gated activation needs [gate | up], found an odd width of %lld", (long long)width);
    LOOM_TRY(check_vector(&activate_op, x, bias));
    memcpy(shape, x->shape, sizeof shape);
    shape[x->dims - 1] = f;
    loom_tensor *y, *wide = NULL;
    const float *used_bias;
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), x->dtype, x->dims, shape, &y));
    loom_status status = loom__vector(tape, bias, 0, &wide, &used_bias);
    if (status)
        return finish(status, y, output);
    LOOM__KERNEL(
        tape, x->dtype, activation, act, loom_tensor_count(x) / (width ? width : 1), f, x->data, used_bias, y->data);
    loom_tensor_release(wide);
    loom_node *node;
    status = loom_tape_record(tape, &activate_op, sizeof(activate_state), (loom_tensor *[]){x}, 1,
        (loom_parameter *[]){bias}, bias ? 1 : 0, y, &node);
    if (!status && node) {
        *(activate_state *)loom_node_state(node) = (activate_state){act, bias, NULL};
        status = loom_node_save(node, x);
    }
    return finish(status, y, output);
}

/* ---- bias, dropout and residual ---- */

typedef struct dropout_state {
    loom_dropout dropout;
    loom_positions positions;
    int64_t *sample;
    int64_t s, b, h;
    loom_tensor *d_x;
} dropout_state;

/* The rows before the turn and those behind it; one of the two may be empty. */
typedef struct row_run {
    loom_row_coordinates rows;
    int64_t element; /* where they begin */
} row_run;

static int row_runs(const dropout_state *state, row_run runs[2]) {
    const loom_positions *at = &state->positions;
    int64_t before = at->turn < state->s ? at->turn : state->s;
    runs[0] = (row_run){{before, state->b, at->first, state->sample}, 0};
    runs[1] = (row_run){{state->s - before, state->b, at->second, state->sample}, before * state->b * state->h};
    return before < state->s ? 2 : 1;
}

static loom_status dropout_gradient(loom_tape *tape, dropout_state *state, loom_tensor *d_y, loom_tensor **d_x) {
    if (state->dropout.probability == 0) {
        *d_x = loom_tensor_retain(d_y);
        return LOOM_OK;
    }
    LOOM_TRY(create_like(tape, d_y, d_x));
    row_run runs[2];
    for (int i = 0, count = row_runs(state, runs); i < count; i++)
        LOOM__KERNEL(tape, d_y->dtype, dropout_backward, &runs[i].rows, state->h, &state->dropout,
            loom__element(d_y, runs[i].element), loom__element(*d_x, runs[i].element));
    return LOOM_OK;
}

static loom_status dropout_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    dropout_state *state = loom_node_state(node);
    if (loom_node_wants(node, 1))
        LOOM_TRY(loom_tape_give(tape, node, 1, loom_tensor_retain(d_y)));
    if (!loom_node_wants(node, 0))
        return LOOM_OK;
    loom_tensor *d_x;
    LOOM_TRY(dropout_gradient(tape, state, d_y, &d_x));
    if (loom_node_parameter(node, 0) && d_x != d_y)
        state->d_x = loom_tensor_retain(d_x);
    return loom_tape_give(tape, node, 0, d_x);
}

static loom_status dropout_weight(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    dropout_state *state = loom_node_state(node);
    if (!state->d_x)
        LOOM_TRY(dropout_gradient(tape, state, d_y, &state->d_x));
    bool accumulate;
    float *d_bias = loom_parameter_begin_grad(loom_node_parameter(node, 0), &accumulate);
    LOOM__KERNEL(
        tape, state->d_x->dtype, bias_gradient, state->s * state->b, state->h, state->d_x->data, accumulate, d_bias);
    loom_tensor_release(state->d_x);
    state->d_x = NULL;
    return LOOM_OK;
}

static void dropout_release(loom_node *node) {
    dropout_state *state = loom_node_state(node);
    loom_tensor_release(state->d_x);
    free(state->sample);
}

static const loom_op dropout_op = {"bias, dropout and residual", dropout_input, dropout_weight, dropout_release};

loom_status loom_bias_dropout_add(loom_tape *tape, loom_tensor *x, loom_parameter *bias, loom_tensor *residual,
    const loom_dropout *dropout, const int64_t *sample, loom_positions positions, loom_tensor **output) {
    if (x->dims != 3)
        return loom_fail(LOOM_ERR_ARGUMENT, "dropout expects [s, b, h], found %d dimensions", x->dims);
    LOOM_TRY(loom__check_dtype(tape, dropout_op.name, x));
    LOOM_TRY(loom__check_same_dtype(dropout_op.name, x, residual));
    LOOM_TRY(check_vector(&dropout_op, x, bias));
    LOOM_TRY(check_sample_numbers(dropout, sample));
    if (residual && loom_tensor_count(residual) != loom_tensor_count(x))
        return loom_fail(LOOM_ERR_ARGUMENT, "a residual of %lld elements for %lld",
            (long long)loom_tensor_count(residual), (long long)loom_tensor_count(x));
    LOOM_TRY(loom_tensor_ready(x));
    if (residual)
        LOOM_TRY(loom_tensor_ready(residual));
    int64_t s = x->shape[0], b = x->shape[1], h = x->shape[2];
    dropout_state made = {.dropout = *dropout, .positions = positions, .s = s, .b = b, .h = h};
    if (dropout->probability > 0) {
        made.sample = malloc((size_t)(b ? b : 1) * sizeof *made.sample);
        if (!made.sample)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for the sample numbers of a dropout");
        memcpy(made.sample, sample, (size_t)b * sizeof *made.sample);
    }
    loom_tensor *y = NULL, *wide = NULL;
    const float *used_bias = NULL;
    loom_node *node = NULL;
    loom_status status = create_like(tape, x, &y);
    if (!status)
        status = loom__vector(tape, bias, 0, &wide, &used_bias);
    if (!status) {
        row_run runs[2];
        for (int i = 0, count = row_runs(&made, runs); i < count; i++)
            LOOM__KERNEL(tape, x->dtype, bias_dropout_add, &runs[i].rows, h, dropout, loom__element(x, runs[i].element),
                used_bias, residual ? loom__element(residual, runs[i].element) : NULL,
                loom__element(y, runs[i].element));
        status = loom_tape_record(tape, &dropout_op, sizeof(dropout_state), (loom_tensor *[]){x, residual}, 2,
            (loom_parameter *[]){bias}, bias ? 1 : 0, y, &node);
    }
    if (!status && node)
        *(dropout_state *)loom_node_state(node) = made;
    else
        free(made.sample);
    loom_tensor_release(wide);
    return finish(status, y, output);
}

static loom_status add_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    LOOM_TRY(loom_tape_give(tape, node, 0, loom_tensor_retain(d_y)));
    return loom_tape_give(tape, node, 1, loom_tensor_retain(d_y));
}

static const loom_op add_op = {"add", add_input, NULL, NULL};

loom_status loom_add(loom_tape *tape, loom_tensor *x, loom_tensor *y, loom_tensor **output) {
    LOOM_TRY(loom__check_dtype(tape, add_op.name, x));
    LOOM_TRY(loom__check_same_dtype(add_op.name, x, y));
    LOOM_TRY(loom_tensor_ready(x));
    LOOM_TRY(loom_tensor_ready(y));
    int64_t count = loom_tensor_count(x);
    if (count != loom_tensor_count(y))
        return loom_fail(
            LOOM_ERR_ARGUMENT, "adding %lld elements to %lld", (long long)loom_tensor_count(y), (long long)count);
    loom_tensor *sum;
    LOOM_TRY(create_like(tape, x, &sum));
    memcpy(sum->data, x->data, (size_t)count * loom_dtype_size(x->dtype));
    LOOM__KERNEL(tape, x->dtype, add, count, y->data, sum->data);
    loom_node *node;
    loom_status status = loom_tape_record(tape, &add_op, 0, (loom_tensor *[]){x, y}, 2, NULL, 0, sum, &node);
    return finish(status, sum, output);
}

static loom_status scale_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    loom_tensor *d_x;
    LOOM_TRY(create_like(tape, d_y, &d_x));
    LOOM__KERNEL(
        tape, d_y->dtype, scale, loom_tensor_count(d_y), *(float *)loom_node_state(node), d_y->data, d_x->data);
    return loom_tape_give(tape, node, 0, d_x);
}

static const loom_op scale_op = {"scale", scale_input, NULL, NULL};

loom_status loom_scale(loom_tape *tape, loom_tensor *x, float factor, loom_tensor **output) {
    LOOM_TRY(loom__check_dtype(tape, scale_op.name, x));
    LOOM_TRY(loom_tensor_ready(x));
    loom_tensor *y;
    LOOM_TRY(create_like(tape, x, &y));
    LOOM__KERNEL(tape, x->dtype, scale, loom_tensor_count(x), factor, x->data, y->data);
    loom_node *node;
    loom_status status = loom_tape_record(tape, &scale_op, sizeof factor, (loom_tensor *[]){x}, 1, NULL, 0, y, &node);
    if (!status && node)
        *(float *)loom_node_state(node) = factor;
    return finish(status, y, output);
}

/* ---- rotary positions ---- */

typedef struct rope_state {
    loom_rope_table table;
    int64_t groups, heads_per_group, d, position_offset;
    int32_t *positions;
} rope_state;

static void rotate(loom_tape *tape, const rope_state *state, bool inverse, loom_tensor *x) {
    /* q heads and k of a group are neighbours in the fused layout: one run of heads_per_group + 1 heads. */
    LOOM__KERNEL(tape, x->dtype, rope, x->shape[0], x->shape[1], x->shape[2], state->groups, state->heads_per_group + 1,
        (state->heads_per_group + 2) * state->d, state->d, state->table.rotary_d, state->table.cosine,
        state->table.sine, state->positions, state->position_offset, inverse, x->data);
}

static loom_status rope_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    loom_tensor *d_x;
    if (!loom_tensor_is_shared(d_y)) {
        d_x = loom_tensor_retain(d_y);
    } else {
        LOOM_TRY(create_like(tape, d_y, &d_x));
        memcpy(d_x->data, d_y->data, (size_t)loom_tensor_count(d_y) * loom_dtype_size(d_y->dtype));
    }
    rotate(tape, loom_node_state(node), true, d_x);
    return loom_tape_give(tape, node, 0, d_x);
}

static void rope_release(loom_node *node) {
    free(((rope_state *)loom_node_state(node))->positions);
}

static const loom_op rope_op = {"rotary embedding", rope_input, NULL, rope_release};

static loom_status check_fused(const loom_tape *tape, const loom_op *op, const loom_tensor *x, int64_t groups,
    int64_t heads_per_group, int64_t d) {
    LOOM_TRY(loom__check_dtype(tape, op->name, x));
    if (x->dims != 3 || x->shape[2] != groups * (heads_per_group + 2) * d)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "fused qkv of %lld groups of %lld heads of %lld: found width %lld, expected %lld", (long long)groups,
            (long long)heads_per_group, (long long)d, (long long)x->shape[2],
            (long long)(groups * (heads_per_group + 2) * d));
    return LOOM_OK;
}

loom_status loom_rope(loom_tape *tape, loom_tensor *x, const loom_rope_table *table, int64_t groups,
    int64_t heads_per_group, int64_t d, const int32_t *positions, int64_t position_offset, loom_tensor **output) {
    LOOM_TRY(check_fused(tape, &rope_op, x, groups, heads_per_group, d));
    if (table->rotary_d < 0 || table->rotary_d > d || table->rotary_d % 2)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "rotary_d: found %lld, expected an even number of at most %lld (the head dimension)",
            (long long)table->rotary_d, (long long)d);
    LOOM_TRY(loom_tensor_ready(x));
    rope_state made = {*table, groups, heads_per_group, d, position_offset, NULL};
    int64_t s = x->shape[0], b = x->shape[1], nearest = position_offset, farthest = position_offset + s - 1;
    for (int64_t i = 0; positions && i < s * b; i++) {
        nearest = positions[i] < nearest || i == 0 ? positions[i] : nearest;
        farthest = positions[i] > farthest || i == 0 ? positions[i] : farthest;
    }
    if (s > 0 && b > 0 && (nearest < 0 || farthest >= table->positions))
        return loom_fail(LOOM_ERR_ARGUMENT, "rotary embedding: position %lld, expected 0 to %lld",
            (long long)(nearest < 0 ? nearest : farthest), (long long)(table->positions - 1));
    if (positions) {
        made.positions = malloc((size_t)(s * b + 1) * sizeof *made.positions);
        if (!made.positions)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for the positions of a rotary embedding");
        memcpy(made.positions, positions, (size_t)(s * b) * sizeof *made.positions);
    }
    loom_tensor *y = NULL;
    loom_node *node = NULL;
    loom_status status = loom_tensor_view(x, x->dims, x->shape, &y);
    if (!status) {
        y->tape = 0;
        rotate(tape, &made, false, y);
        status = loom_tape_record(tape, &rope_op, sizeof(rope_state), (loom_tensor *[]){x}, 1, NULL, 0, y, &node);
    }
    if (!status && node)
        *(rope_state *)loom_node_state(node) = made;
    else
        free(made.positions);
    return finish(status, y, output);
}

/* ---- attention ---- */

typedef struct attention_state {
    loom_attention_block block;
    int32_t *document_start;
    int64_t *sample;
} attention_state;

typedef struct fused_parts {
    void *q, *k, *v;
} fused_parts;

static fused_parts parts_of(const loom_attention_block *block, const loom_tensor *fused) {
    int64_t q_width = block->n / block->g * block->d;
    return (fused_parts){
        loom__element(fused, 0), loom__element(fused, q_width), loom__element(fused, q_width + block->d)};
}

static loom_status attention_input(loom_tape *tape, loom_node *node, loom_tensor *d_out) {
    attention_state *state = loom_node_state(node);
    const loom_attention_block *block = &state->block;
    loom_tensor *qkv = loom_node_saved(node, 0), *out = loom_node_saved(node, 1), *lse = loom_node_saved(node, 2);
    loom_tensor *delta = NULL, *d_qkv = NULL;
    LOOM_TRY(create_like(tape, lse, &delta));
    loom_status status = create_like(tape, qkv, &d_qkv);
    if (!status) {
        int64_t out_stride = block->n * block->d;
        fused_parts x = parts_of(block, qkv), d_x = parts_of(block, d_qkv);
        LOOM__KERNEL(
            tape, out->dtype, attention_delta, block, out->data, d_out->data, out_stride, loom_tensor_f32(delta));
        LOOM__KERNEL(tape, out->dtype, attention_block_backward, block, x.q, x.k, x.v, d_out->data, out_stride,
            loom_tensor_f32(lse), loom_tensor_f32(delta), false, false, d_x.q, d_x.k, d_x.v);
        status = loom_tape_give(tape, node, 0, d_qkv);
    }
    loom_tensor_release(delta);
    return status;
}

static void attention_release(loom_node *node) {
    attention_state *state = loom_node_state(node);
    free(state->document_start);
    free(state->sample);
}

static const loom_op attention_op = {"attention", attention_input, NULL, attention_release};

static void *copy_of(const void *source, size_t bytes) {
    void *copy = malloc(bytes ? bytes : 1);
    if (copy)
        memcpy(copy, source, bytes);
    return copy;
}

loom_status loom_attention(
    loom_tape *tape, loom_tensor *qkv, const loom_attention_options *options, loom_tensor **output) {
    if (options->g < 1 || options->n % options->g)
        return loom_fail(LOOM_ERR_ARGUMENT, "attention: %lld heads are not a multiple of %lld query groups",
            (long long)options->n, (long long)options->g);
    int64_t per_group = options->n / options->g, d = options->d;
    LOOM_TRY(check_fused(tape, &attention_op, qkv, options->g, per_group, d));
    LOOM_TRY(check_sample_numbers(&options->dropout, options->sample));
    LOOM_TRY(loom_tensor_ready(qkv));
    int64_t s = qkv->shape[0], b = qkv->shape[1], width = qkv->shape[2], group_stride = (per_group + 2) * d;
    attention_state made = {
        .block = {.b = b,
            .n = options->n,
            .g = options->g,
            .d = d,
            .s_q = s,
            .s_kv = s,
            .q_stride = width,
            .k_stride = width,
            .v_stride = width,
            .q_group_stride = group_stride,
            .kv_group_stride = group_stride,
            .scale = options->scale,
            .causal = options->causal,
            .window = options->window,
            .dropout = options->dropout,
            .head_offset = options->head_offset},
    };
    loom_tensor *out = NULL, *lse = NULL;
    loom_node *node = NULL;
    loom_status status = LOOM_OK;
    if (options->document_start)
        made.block.document_start = made.document_start =
            copy_of(options->document_start, (size_t)(b * s) * sizeof(int32_t));
    if (options->sample)
        made.block.sample = made.sample = copy_of(options->sample, (size_t)b * sizeof(int64_t));
    if ((options->document_start && !made.document_start) || (options->sample && !made.sample))
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory for an attention");
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), qkv->dtype, 3, (int64_t[]){s, b, options->n * d}, &out);
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 3, (int64_t[]){b, options->n, s}, &lse);
    if (!status) {
        fused_parts x = parts_of(&made.block, qkv);
        LOOM__KERNEL(
            tape, qkv->dtype, attention, &made.block, x.q, x.k, x.v, out->data, options->n * d, loom_tensor_f32(lse));
        status = loom_tape_record(
            tape, &attention_op, sizeof(attention_state), (loom_tensor *[]){qkv}, 1, NULL, 0, out, &node);
    }
    if (!status && node) {
        *(attention_state *)loom_node_state(node) = made;
        status = save(node, (loom_tensor *[]){qkv, out, lse}, 3);
    } else {
        free(made.document_start);
        free(made.sample);
    }
    loom_tensor_release(lse);
    return finish(status, out, output);
}
