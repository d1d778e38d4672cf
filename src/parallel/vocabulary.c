/* The two ends of the model, whose tables are split over the vocabulary: the embedding looks up the rows it has and the
 * sum over tp brings the others' in (adding zeros is exact); the cross-entropy combines each rank's maximum and sum of
 * exponentials, so that no rank ever sees the whole row of logits. */
#include "parallel/common.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct embedding_state {
    loom_comm *tp;
    bool sequence_parallel;
    int64_t first_row;
    loom_parameter *table;
    int64_t *tokens; /* [s, b] */
} embedding_state;

/* [b, s] -> [s, b]; NULL when memory is out. */
static int64_t *transposed(const int64_t *tokens, int64_t b, int64_t s) {
    int64_t *out = malloc((size_t)(b * s + 1) * sizeof *out);
    for (int64_t t = 0; out && t < s; t++)
        for (int64_t j = 0; j < b; j++)
            out[t * b + j] = tokens[j * s + t];
    return out;
}

static loom_status embedding_weight(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    embedding_state *state = loom_node_state(node);
    loom_tensor *full = loom_tensor_retain(d_y);
    loom_status status = LOOM_OK;
    if (state->sequence_parallel) {
        loom_tensor_release(full);
        LOOM_TRY(loom__gather_sequence_start(tape, d_y, state->tp, &full));
        status = loom_tensor_ready(full);
    }
    if (!status) {
        bool accumulate;
        float *grad = loom_parameter_begin_grad(state->table, &accumulate);
        LOOM__KERNEL(tape, full->dtype, embedding_backward, full->shape[0] * full->shape[1], full->shape[2],
            state->tokens, state->first_row, state->table->shape[0], full->data, accumulate, grad);
    }
    loom_tensor_release(full);
    return status;
}

static void embedding_release(loom_node *node) {
    free(((embedding_state *)loom_node_state(node))->tokens);
}

static const loom_op embedding_op = {"vocabulary-parallel embedding", NULL, embedding_weight, embedding_release};

loom_status loom__vocab_embedding(loom_tape *tape, const int64_t *tokens, int64_t b, int64_t s, loom_parameter *table,
    int64_t first_row, int64_t vocabulary, loom_comm *tp, bool sequence_parallel, loom_tensor **output) {
    for (int64_t i = 0; i < b * s; i++)
        if (tokens[i] < 0 || tokens[i] >= vocabulary)
            return loom_fail(LOOM_ERR_ARGUMENT, "token %lld at position %lld of row %lld: expected 0 to %lld",
                (long long)tokens[i], (long long)(i % s), (long long)(i / s), (long long)(vocabulary - 1));
    LOOM_TRY(loom_parameter_ready(table));
    embedding_state made = {tp, sequence_parallel, first_row, table, transposed(tokens, b, s)};
    if (!made.tokens)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld tokens", (long long)(b * s));
    int64_t h = table->shape[1];
    loom_tensor *partial = NULL, *y = NULL;
    loom_node *node = NULL;
    loom_status status = loom_tensor_create(loom_tape_rank(tape), table->dtype, 3, (int64_t[]){s, b, h}, &partial);
    if (!status)
        status = loom__check_dtype(tape, embedding_op.name, partial);
    if (!status) {
        LOOM__KERNEL(tape, table->dtype, embedding, s * b, h, made.tokens, first_row, table->shape[0],
            loom_parameter_values(table), partial->data);
        status = loom__reduce_start(tape, partial, tp, sequence_parallel, &y);
    }
    loom_tensor_release(partial);
    if (!status)
        status = loom_tape_record(tape, &embedding_op, sizeof made, NULL, 0, (loom_parameter *[]){table}, 1, y, &node);
    if (!status && node)
        *(embedding_state *)loom_node_state(node) = made;
    else
        free(made.tokens);
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    *output = y;
    return LOOM_OK;
}

/* ---- learned positions ---- */

static loom_status position_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    return loom_tape_give(tape, node, 0, loom_tensor_retain(d_y));
}

static loom_status position_weight(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    embedding_state *state = loom_node_state(node);
    bool accumulate;
    float *grad = loom_parameter_begin_grad(state->table, &accumulate);
    LOOM__KERNEL(tape, d_y->dtype, embedding_backward, d_y->shape[0] * d_y->shape[1], d_y->shape[2], state->tokens, 0,
        state->table->shape[0], d_y->data, accumulate, grad);
    return LOOM_OK;
}

static const loom_op position_op = {"position embedding", position_input, position_weight, embedding_release};

loom_status loom__position_embedding(loom_tape *tape, loom_tensor *x, loom_parameter *table, const int64_t *positions,
    int64_t position_offset, loom_tensor **output) {
    LOOM_TRY(loom__check_dtype(tape, position_op.name, x));
    LOOM_TRY(loom__check_parameter_dtype(position_op.name, x, table));
    LOOM_TRY(loom_tensor_ready(x));
    LOOM_TRY(loom_parameter_ready(table));
    int64_t s = x->shape[0], b = x->shape[1], h = x->shape[2];
    int64_t *rows = malloc((size_t)(s * b + 1) * sizeof *rows);
    if (!rows)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld positions", (long long)(s * b));
    for (int64_t t = 0; t < s; t++)
        for (int64_t j = 0; j < b; j++)
            rows[t * b + j] = positions ? positions[j * s + t] : position_offset + t;
    for (int64_t i = 0; i < s * b; i++)
        if (rows[i] < 0 || rows[i] >= table->shape[0]) {
            loom_status failed = loom_fail(LOOM_ERR_ARGUMENT, "position %lld: %s has %lld rows", (long long)rows[i],
                table->name, (long long)table->shape[0]);
            free(rows);
            return failed;
        }
    embedding_state made = {.table = table, .tokens = rows};
    loom_tensor *y = NULL;
    loom_node *node = NULL;
    loom_status status = loom_tensor_create(loom_tape_rank(tape), x->dtype, 3, x->shape, &y);
    if (!status) {
        LOOM__KERNEL(
            tape, x->dtype, embedding, s * b, h, rows, 0, table->shape[0], loom_parameter_values(table), y->data);
        LOOM__KERNEL(tape, x->dtype, add, s * b * h, x->data, y->data);
        status = loom_tape_record(
            tape, &position_op, sizeof made, (loom_tensor *[]){x}, 1, (loom_parameter *[]){table}, 1, y, &node);
    }
    if (!status && node)
        *(embedding_state *)loom_node_state(node) = made;
    else
        free(rows);
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    *output = y;
    return LOOM_OK;
}

/* ---- cross-entropy ---- */

typedef struct entropy_state {
    int64_t first_column, valid;
    int64_t *targets; /* [s, b]; ignored ones are −1 */
} entropy_state;

static loom_status entropy_input(loom_tape *tape, loom_node *node, loom_tensor *d_losses) {
    entropy_state *state = loom_node_state(node);
    loom_tensor *maximum = loom_node_saved(node, 1), *sum = loom_node_saved(node, 2);
    int64_t rows = loom_tensor_count(d_losses);
    loom_tensor *logits = loom_node_take(node, 0), *scale = NULL;
    loom_status status = LOOM_OK;
    /* In place where nobody else looks at the logits; an evaluation that kept them gets to keep them. */
    if (loom_tensor_is_shared(logits)) {
        loom_tensor *copy = NULL;
        status = loom_tensor_create(loom_tape_rank(tape), logits->dtype, logits->dims, logits->shape, &copy);
        if (!status)
            memcpy(copy->data, logits->data, (size_t)loom_tensor_count(logits) * loom_dtype_size(logits->dtype));
        loom_tensor_release(logits);
        logits = copy;
    }
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 1, &rows, &scale);
    if (status) {
        loom_tensor_release(logits);
        return status;
    }
    for (int64_t r = 0; r < rows; r++)
        loom_tensor_f32(scale)[r] = state->targets[r] < 0 ? 0.0f : loom_tensor_f32(d_losses)[r];
    int64_t v = logits->shape[2];
    LOOM__KERNEL(tape, logits->dtype, cross_entropy_backward, rows, v, state->valid, logits->data, state->targets,
        state->first_column, loom_tensor_f32(maximum), loom_tensor_f32(sum), loom_tensor_f32(scale));
    loom_tensor_release(scale);
    return loom_tape_give(tape, node, 0, logits);
}

static void entropy_release(loom_node *node) {
    free(((entropy_state *)loom_node_state(node))->targets);
}

static const loom_op entropy_op = {"vocabulary-parallel cross-entropy", entropy_input, NULL, entropy_release};

/* Makes the maximum, the sum and the target's logit those of the whole vocabulary. pair: [2, rows] = sum, target. */
static loom_status combine(loom_comm *tp, int64_t rows, float *maximum, float *pair) {
    if (loom__group_size(tp) == 1)
        return LOOM_OK;
    float *local = malloc((size_t)(rows + 1) * sizeof *local);
    if (!local)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a cross-entropy");
    memcpy(local, maximum, (size_t)rows * sizeof *local);
    loom_status status = loom_all_reduce(tp, maximum, maximum, rows, LOOM_F32, LOOM_MAX);
    /* Where this rank has no valid column its sum is 0 already; a NaN among its logits leaves maximum -inf and sum NaN,
     * which must stay. */
    for (int64_t r = 0; !status && r < rows; r++)
        if (local[r] > -INFINITY)
            pair[r] *= expf(local[r] - maximum[r]);
    free(local);
    return status ? status : loom_all_reduce(tp, pair, pair, 2 * rows, LOOM_F32, LOOM_SUM);
}

loom_status loom__vocab_cross_entropy(loom_tape *tape, loom_tensor *logits, const int64_t *labels, int64_t first_column,
    int64_t valid, int64_t vocabulary, loom_comm *tp, loom_tensor **losses) {
    LOOM_TRY(loom__check_dtype(tape, entropy_op.name, logits));
    LOOM_TRY(loom_tensor_ready(logits));
    int64_t s = logits->shape[0], b = logits->shape[1], v = logits->shape[2], rows = s * b;
    loom_tensor *maximum = NULL, *pair = NULL, *y = NULL;
    loom_node *node = NULL;
    entropy_state made = {first_column, valid, transposed(labels, b, s)};
    loom_status status = made.targets ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for a cross-entropy");
    for (int64_t r = 0; !status && r < rows; r++)
        if (made.targets[r] >= vocabulary)
            made.targets[r] = -1;
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 1, &rows, &maximum);
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 2, (int64_t[]){2, rows}, &pair);
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 2, (int64_t[]){s, b}, &y);
    if (!status) {
        float *sum = loom_tensor_f32(pair), *target = sum + rows;
        LOOM__KERNEL(tape, logits->dtype, cross_entropy_local, rows, v, valid, logits->data, made.targets, first_column,
            loom_tensor_f32(maximum), sum, target);
        status = combine(tp, rows, loom_tensor_f32(maximum), sum);
        for (int64_t r = 0; !status && r < rows; r++)
            loom_tensor_f32(y)[r] = made.targets[r] < 0 ? 0.0f : logf(sum[r]) + loom_tensor_f32(maximum)[r] - target[r];
    }
    if (!status)
        status = loom_tape_record(tape, &entropy_op, sizeof made, (loom_tensor *[]){logits}, 1, NULL, 0, y, &node);
    if (!status && node) {
        *(entropy_state *)loom_node_state(node) = made;
        loom_tensor *kept[] = {logits, maximum, pair};
        for (int i = 0; !status && i < 3; i++)
            status = loom_node_save(node, kept[i]);
    } else {
        free(made.targets);
    }
    loom_tensor_release(maximum);
    loom_tensor_release(pair);
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    *losses = y;
    return LOOM_OK;
}

/* `count` elements in fp32. */
static void widen(loom_dtype dtype, const void *from, int64_t count, float *to) {
    const uint16_t *narrow = from;
    if (dtype == LOOM_F32)
        memcpy(to, from, (size_t)count * sizeof *to);
    else
        for (int64_t i = 0; i < count; i++)
            to[i] = dtype == LOOM_BF16 ? loom_bf16_to_f32(narrow[i]) : loom_f16_to_f32(narrow[i]);
}

loom_status loom__gather_logits(loom_tensor *logits, int64_t vocabulary, loom_comm *tp, float *out) {
    LOOM_TRY(loom_tensor_ready(logits));
    int64_t s = logits->shape[0], b = logits->shape[1], v = logits->shape[2], size = loom__group_size(tp);
    int64_t count = s * b * v;
    size_t element = loom_dtype_size(logits->dtype);
    if (logits->dtype != LOOM_F32 && !loom_dtype_is_narrow(logits->dtype))
        return loom_fail(LOOM_ERR_UNSUPPORTED, "not supported yet: gathering %s logits; what works: F32, BF16, F16",
            loom_dtype_name(logits->dtype));
    char *all = malloc((size_t)(count * size + 1) * element);
    if (!all)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld logits", (long long)(count * size));
    loom_status status = LOOM_OK;
    if (size > 1)
        status = loom_all_gather(tp, logits->data, all, count, logits->dtype);
    else
        memcpy(all, logits->data, (size_t)count * element);
    for (int64_t r = 0; !status && r < size; r++)
        for (int64_t row = 0; row < s * b; row++) {
            int64_t first = r * v, width = first + v <= vocabulary ? v : vocabulary - first;
            if (width > 0)
                widen(logits->dtype, all + (size_t)(r * count + row * v) * element, width,
                    out + (row % b * s + row / b) * vocabulary + first);
        }
    loom_comm_free(tp, all);
    return status;
}
