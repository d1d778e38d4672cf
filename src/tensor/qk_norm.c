/* The norm of query and key heads inside a fused projection. The heads of all positions are packed next to each other,
 * so that the kernels of RMSNorm see plain rows of d; what is kept for the backward are the packed heads, not the fused
 * tensor, and the output is a tensor of its own: a rotation may turn it in place. */
#include "tensor/dtype.h"
#include <string.h>

#define TEAM(tape) loom_rank_team(loom_tape_rank(tape))

enum { Q, K, PARTS, ROWS_PER_ITEM = 16 };

typedef struct qk_state {
    int64_t rows, groups, heads_per_group, d;
    loom_parameter *weights[PARTS];
} qk_state;

/* Heads of a part in one row. */
static int64_t heads_of(const qk_state *state, int part) {
    return part == Q ? state->groups * state->heads_per_group : state->groups;
}

/* ---- between fused and packed ---- */

typedef struct move {
    const qk_state *state;
    int64_t element; /* bytes */
    char *fused, *packed[PARTS];
    const char *values; /* fused, where v comes from; NULL: from fused to packed */
} move;

static void copy(bool to_packed, char *fused, char *packed, int64_t bytes) {
    memcpy(to_packed ? packed : fused, to_packed ? fused : packed, (size_t)bytes);
}

static void move_rows(void *argument, int64_t item, int worker) {
    const move *m = argument;
    const qk_state *state = m->state;
    int64_t d = state->d * m->element, queries = state->heads_per_group * d, width = queries + 2 * d;
    int64_t first = item * ROWS_PER_ITEM * state->groups, end = first + ROWS_PER_ITEM * state->groups;
    (void)worker;
    for (int64_t i = first; i < end && i < state->rows * state->groups; i++) {
        char *group = m->fused + i * width;
        copy(!m->values, group, m->packed[Q] + i * queries, queries);
        copy(!m->values, group + queries, m->packed[K] + i * d, d);
        if (m->values)
            memcpy(group + queries + d, m->values + i * width + queries + d, (size_t)d);
    }
}

static void move_all(loom_tape *tape, const move *m) {
    loom_team_run(TEAM(tape), move_rows, (void *)(uintptr_t)m, (m->state->rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM);
}

static void release_parts(loom_tensor *const *parts) {
    for (int part = 0; part < PARTS; part++)
        loom_tensor_release(parts[part]);
}

static loom_status create_parts(loom_tape *tape, const qk_state *state, loom_dtype dtype, loom_tensor **parts) {
    for (int part = 0; part < PARTS; part++)
        parts[part] = NULL;
    for (int part = 0; part < PARTS; part++)
        LOOM_TRY(loom_tensor_create(
            loom_tape_rank(tape), dtype, 2, (int64_t[]){state->rows * heads_of(state, part), state->d}, &parts[part]));
    return LOOM_OK;
}

static loom_status pack(loom_tape *tape, const qk_state *state, const loom_tensor *fused, loom_tensor **parts) {
    LOOM_TRY(create_parts(tape, state, fused->dtype, parts));
    int64_t element = (int64_t)loom_dtype_size(fused->dtype);
    move_all(tape, &(move){state, element, fused->data, {parts[Q]->data, parts[K]->data}, NULL});
    return LOOM_OK;
}

/* A fused tensor of these heads, with the values of another one. */
static loom_status unpack(
    loom_tape *tape, const qk_state *state, loom_tensor *const *parts, const loom_tensor *values, loom_tensor **fused) {
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), values->dtype, values->dims, values->shape, fused));
    int64_t element = (int64_t)loom_dtype_size(values->dtype);
    move_all(tape, &(move){state, element, (*fused)->data, {parts[Q]->data, parts[K]->data}, values->data});
    return LOOM_OK;
}

/* ---- the operation: saved are the packed heads, their rstd, and w, where it is not the parameter as it is ---- */

enum { SAVED_HEADS = 0, SAVED_RSTD = PARTS, SAVED_FACTOR = 2 * PARTS };

static loom_status qk_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    const qk_state *state = loom_node_state(node);
    loom_tensor *d_parts[PARTS] = {NULL}, *d_heads[PARTS] = {NULL}, *d_x = NULL;
    loom_status status = pack(tape, state, d_y, d_parts);
    if (!status)
        status = create_parts(tape, state, d_y->dtype, d_heads);
    for (int part = 0; !status && part < PARTS; part++) {
        const loom_tensor *factor = loom_node_saved(node, SAVED_FACTOR + part);
        LOOM__KERNEL(tape, d_y->dtype, rmsnorm_backward_input, state->rows * heads_of(state, part), state->d,
            loom_node_saved(node, SAVED_HEADS + part)->data,
            factor ? loom_tensor_f32(factor) : state->weights[part]->data,
            loom_tensor_f32(loom_node_saved(node, SAVED_RSTD + part)), d_parts[part]->data, d_heads[part]->data);
    }
    if (!status)
        status = unpack(tape, state, d_heads, d_y, &d_x);
    release_parts(d_parts);
    release_parts(d_heads);
    return status ? status : loom_tape_give(tape, node, 0, d_x);
}

static loom_status qk_weight(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    const qk_state *state = loom_node_state(node);
    loom_tensor *d_parts[PARTS] = {NULL};
    loom_status status = pack(tape, state, d_y, d_parts);
    for (int part = 0; !status && part < PARTS; part++) {
        bool accumulate;
        float *d_weight = loom_parameter_begin_grad(state->weights[part], &accumulate);
        if (d_weight)
            LOOM__KERNEL(tape, d_y->dtype, rmsnorm_backward_weight, state->rows * heads_of(state, part), state->d,
                loom_node_saved(node, SAVED_HEADS + part)->data,
                loom_tensor_f32(loom_node_saved(node, SAVED_RSTD + part)), d_parts[part]->data, accumulate, d_weight);
    }
    release_parts(d_parts);
    return status;
}

static const loom_op qk_op = {"norm of query and key heads", qk_input, qk_weight, NULL};

static loom_status check_weight(const loom_tensor *x, loom_parameter *weight, const char *what, int64_t d) {
    if (!weight)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s: a norm of heads needs the weight of its %s", qk_op.name, what);
    if (weight->dims != 1 || weight->shape[0] != d)
        return loom_fail(LOOM_ERR_ARGUMENT, "%s has %lld elements, a head %lld channels", weight->name,
            (long long)weight->shape[0], (long long)d);
    LOOM_TRY(loom__check_parameter_dtype(qk_op.name, x, weight));
    return loom_parameter_ready(weight);
}

static loom_status check(const loom_tape *tape, const loom_tensor *x, const qk_state *state) {
    int64_t width = state->groups * (state->heads_per_group + 2) * state->d;
    LOOM_TRY(loom__check_dtype(tape, qk_op.name, x));
    if (state->groups < 1 || state->heads_per_group < 1 || state->d < 1 || x->dims != 3 || x->shape[2] != width)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "%s: expected [s, b, %lld] for %lld groups of %lld heads of %lld, found %d dimensions, the last of %lld",
            qk_op.name, (long long)width, (long long)state->groups, (long long)state->heads_per_group,
            (long long)state->d, x->dims, (long long)(x->dims ? x->shape[x->dims - 1] : 0));
    LOOM_TRY(check_weight(x, state->weights[Q], "queries", state->d));
    return check_weight(x, state->weights[K], "keys", state->d);
}

/* One part: its heads are read, y is written, rstd and factor are made. */
static loom_status norm_part(loom_tape *tape, const qk_state *state, int part, float eps, bool zero_centered,
    loom_tensor *const *heads, loom_tensor *const *y, loom_tensor **rstd, loom_tensor **factor) {
    int64_t rows = state->rows * heads_of(state, part);
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 1, &rows, &rstd[part]));
    const float *used;
    LOOM_TRY(loom__vector(tape, state->weights[part], zero_centered ? 1.0f : 0.0f, &factor[part], &used));
    LOOM__KERNEL(tape, heads[part]->dtype, rmsnorm, rows, state->d, eps, heads[part]->data, used, y[part]->data,
        loom_tensor_f32(rstd[part]));
    return LOOM_OK;
}

static loom_status record(loom_tape *tape, const qk_state *state, loom_tensor *x, loom_tensor *y,
    loom_tensor *const *heads, loom_tensor *const *rstd, loom_tensor *const *factor) {
    loom_node *node;
    LOOM_TRY(loom_tape_record(tape, &qk_op, sizeof *state, (loom_tensor *[]){x}, 1,
        (loom_parameter *[]){state->weights[Q], state->weights[K]}, PARTS, y, &node));
    if (!node)
        return LOOM_OK;
    *(qk_state *)loom_node_state(node) = *state;
    loom_tensor *const *const all[] = {heads, rstd, factor};
    for (int kind = 0; kind < 3; kind++)
        for (int part = 0; part < PARTS; part++)
            LOOM_TRY(loom_node_save(node, all[kind][part]));
    return LOOM_OK;
}

loom_status loom_qk_norm(loom_tape *tape, loom_tensor *x, loom_parameter *q_weight, loom_parameter *k_weight,
    int64_t groups, int64_t heads_per_group, int64_t d, float eps, bool zero_centered, loom_tensor **output) {
    qk_state state = {0, groups, heads_per_group, d, {q_weight, k_weight}};
    LOOM_TRY(check(tape, x, &state));
    state.rows = x->shape[0] * x->shape[1];
    LOOM_TRY(loom_tensor_ready(x));
    loom_tensor *heads[PARTS] = {NULL}, *normed[PARTS] = {NULL}, *rstd[PARTS] = {NULL}, *factor[PARTS] = {NULL};
    loom_tensor *y = NULL;
    loom_status status = pack(tape, &state, x, heads);
    if (!status)
        status = create_parts(tape, &state, x->dtype, normed);
    for (int part = 0; !status && part < PARTS; part++)
        status = norm_part(tape, &state, part, eps, zero_centered, heads, normed, rstd, factor);
    if (!status)
        status = unpack(tape, &state, normed, x, &y);
    if (!status)
        status = record(tape, &state, x, y, heads, rstd, factor);
    release_parts(heads);
    release_parts(normed);
    release_parts(rstd);
    release_parts(factor);
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    *output = y;
    return LOOM_OK;
}
