/* An all-to-all between "my rows of all columns" and "all rows of my columns". Packed by destination before, and put in
 * the order of positions behind: member m's first chunk is number m of all, its second number 2*size - 1 - m. The two
 * directions are each other's backward. */
#include "parallel/common.h"
#include "parallel/context.h"
#include <string.h>

/* Where a run of `part` columns of row (half, t, j) of member m lies in the whole sequence. */
static int64_t sequence_row(int64_t size, int64_t rows, int64_t member, int64_t row) {
    int64_t half = row / rows, chunk = half == 0 ? member : 2 * size - 1 - member;
    return chunk * rows + row % rows;
}

/* Copies between local [s, b, w] and packed [size, s, b, w/size], the piece of each member. */
static void copy_columns(int64_t size, int64_t lines, size_t part, char *local, char *packed, bool pack) {
    for (int64_t m = 0; m < size; m++)
        for (int64_t line = 0; line < lines; line++) {
            char *in = local + (size_t)(line * size + m) * part, *out = packed + (size_t)(m * lines + line) * part;
            memcpy(pack ? out : in, pack ? in : out, part);
        }
}

/* Copies between packed [size, s, b, part] and the sequence [size*s, b, part]. */
static void copy_rows(int64_t size, int64_t s, size_t row, char *sequence, char *packed, bool pack) {
    for (int64_t m = 0; m < size; m++)
        for (int64_t t = 0; t < s; t++) {
            char *in = sequence + (size_t)sequence_row(size, s / 2, m, t) * row,
                 *out = packed + (size_t)(m * s + t) * row;
            memcpy(pack ? out : in, pack ? in : out, row);
        }
}

static loom_status exchange(loom_tape *tape, loom_tensor *x, loom_comm *comm, bool to_rows, loom_tensor **output) {
    const int64_t size = loom_comm_size(comm), s = to_rows ? x->shape[0] : x->shape[0] / size, b = x->shape[1];
    const int64_t width = to_rows ? x->shape[2] / size : x->shape[2], count = s * b * width;
    const size_t element = loom_dtype_size(x->dtype), part = (size_t)width * element;
    const int64_t rows_shape[] = {size * s, b, width}, columns_shape[] = {s, b, size * width};
    loom_rank *rank = loom_tape_rank(tape);
    loom_tensor *out = NULL, *send = NULL, *receive = NULL;
    loom_status status = loom_tensor_create(rank, x->dtype, 3, x->shape, &send);
    if (!status)
        status = loom_tensor_create(rank, x->dtype, 3, x->shape, &receive);
    if (!status)
        status = loom_tensor_create(rank, x->dtype, 3, to_rows ? rows_shape : columns_shape, &out);
    if (!status && to_rows)
        copy_columns(size, s * b, part, x->data, send->data, true);
    else if (!status)
        copy_rows(size, s, (size_t)b * part, x->data, send->data, true);
    if (!status)
        status = loom_all_to_all(comm, send->data, receive->data, count, x->dtype);
    if (!status && to_rows)
        copy_rows(size, s, (size_t)b * part, out->data, receive->data, false);
    else if (!status)
        copy_columns(size, s * b, part, out->data, receive->data, false);
    loom_tensor_release(send);
    loom_tensor_release(receive);
    if (status) {
        loom_tensor_release(out);
        return status;
    }
    *output = out;
    return LOOM_OK;
}

typedef struct exchange_state {
    loom_comm *comm;
    bool to_rows;
} exchange_state;

static loom_status exchange_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    const exchange_state *state = loom_node_state(node);
    loom_tensor *d_x;
    LOOM_TRY(exchange(tape, d_y, state->comm, !state->to_rows, &d_x));
    return loom_tape_give(tape, node, 0, d_x);
}

static const loom_op exchange_op = {"all-to-all of heads", exchange_input, NULL, NULL};

static loom_status record(loom_tape *tape, loom_tensor *x, loom_comm *comm, bool to_rows, loom_tensor **output) {
    int64_t size = loom_comm_size(comm), divided = to_rows ? x->shape[2] : x->shape[0];
    if (x->dims != 3 || divided % size || (to_rows && x->shape[0] % 2))
        return loom_fail(LOOM_ERR_ARGUMENT, "all-to-all of heads: found [%lld, %lld, %lld] for %lld ranks",
            (long long)x->shape[0], (long long)x->shape[1], (long long)x->shape[2], (long long)size);
    LOOM_TRY(loom__check_dtype(tape, exchange_op.name, x));
    LOOM_TRY(loom_tensor_ready(x));
    loom_tensor *y;
    LOOM_TRY(exchange(tape, x, comm, to_rows, &y));
    loom_node *node;
    loom_status status =
        loom_tape_record(tape, &exchange_op, sizeof(exchange_state), (loom_tensor *[]){x}, 1, NULL, 0, y, &node);
    if (!status && node)
        *(exchange_state *)loom_node_state(node) = (exchange_state){comm, to_rows};
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    *output = y;
    return LOOM_OK;
}

loom_status loom__heads_for_rows(loom_tape *tape, loom_tensor *x, loom_comm *comm, loom_tensor **output) {
    return record(tape, x, comm, true, output);
}

loom_status loom__rows_for_heads(loom_tape *tape, loom_tensor *x, loom_comm *comm, loom_tensor **output) {
    return record(tape, x, comm, false, output);
}
