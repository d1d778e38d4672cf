/* Ring attention. Keys and values of a rank travel packed, [rows, b, g, k|v]; at step i a rank has those of the member
 * i places before it. Blocks that the mask hides are left out on both ranks' own arithmetic, never by message, so that
 * the exchange does not depend on data. In the backward the gradient of a piece travels with it, one step behind: each
 * rank adds its part and hands it on, and after a whole turn it is at home. Gradients are summed in fp32 whatever the
 * dtype. */
#include "parallel/common.h"
#include "parallel/context.h"
#include "runtime/spans.h"
#include "tensor/dtype.h"
#include <stdlib.h>
#include <string.h>

enum { TAG_KEYS = 0, TAG_GRADIENT = 1 };

typedef struct ring_state {
    loom_attention_block block; /* of one chunk of queries and one of keys, without offsets */
    loom_comm *comm;
    bool gather;
    int64_t chunks;
    int64_t *begin;          /* [members, chunks] */
    int32_t *document_start; /* [chunks, b, rows], or NULL */
    int64_t *sample;
} ring_state;

static void free_state(ring_state *state) {
    free(state->begin);
    free(state->document_start);
    free(state->sample);
}

static int64_t members_of(const ring_state *state) {
    return loom_comm_size(state->comm);
}

static int64_t packed_width(const ring_state *state) {
    return state->block.g * 2 * state->block.d;
}

/* Local rows. */
static int64_t rows_of(const ring_state *state) {
    return state->chunks * state->block.s_q;
}

/* ---- packing ---- */

/* Between the keys and values of fused [rows, b, …] and packed ones; both ways copy the same elements. */
static void copy_keys(const ring_state *state, size_t size, char *fused, char *packed, bool pack) {
    const loom_attention_block *block = &state->block;
    size_t run = (size_t)(2 * block->d) * size;
    char *from = fused + (size_t)(block->n / block->g * block->d) * size;
    for (int64_t row = 0; row < rows_of(state) * block->b; row++)
        for (int64_t group = 0; group < block->g; group++) {
            char *in = from + (size_t)(row * block->q_stride + group * block->q_group_stride) * size;
            char *out = packed + (size_t)(row * block->g + group) * run;
            memcpy(pack ? out : in, pack ? in : out, run);
        }
}

static loom_status create_packed(loom_tape *tape, const ring_state *state, loom_dtype dtype, loom_tensor **tensor) {
    return loom_tensor_create(
        loom_tape_rank(tape), dtype, 3, (int64_t[]){rows_of(state), state->block.b, packed_width(state)}, tensor);
}

static loom_status pack(loom_tape *tape, const ring_state *state, loom_tensor *qkv, loom_tensor **packed) {
    LOOM_TRY(create_packed(tape, state, qkv->dtype, packed));
    copy_keys(state, loom_dtype_size(qkv->dtype), qkv->data, (*packed)->data, true);
    return LOOM_OK;
}

/* ---- messages ---- */

/* A piece on its way to the next member, and the one that comes from the member before. */
typedef struct exchange {
    loom_rank *rank;
    loom_request *send, *receive;
    loom__span span;
} exchange;

static loom_status exchange_start(
    loom_tape *tape, const ring_state *state, int tag, const loom_tensor *out, loom_tensor *in, exchange *e) {
    int size = (int)members_of(state), me = loom_comm_rank(state->comm);
    int64_t count = loom_tensor_count(out);
    loom_span_kind kind = tag == TAG_KEYS ? LOOM_SPAN_KEY_EXCHANGE : LOOM_SPAN_GRADIENT_EXCHANGE;
    int64_t bytes = count * (int64_t)loom_dtype_size(out->dtype);
    *e = (exchange){.rank = loom_tape_rank(tape), .span = {.kind = kind, .bucket = -1, .bytes = bytes}};
    e->span.start = loom__span_clock(e->rank);
    LOOM_TRY(loom_receive_start(state->comm, in->data, count, in->dtype, (me + size - 1) % size, tag, &e->receive));
    if (e->span.start)
        loom__request_time(e->receive, &e->span.end);
    return loom_send_start(state->comm, out->data, count, out->dtype, (me + 1) % size, tag, &e->send);
}

static loom_status exchange_finish(exchange *e) {
    loom_status received = loom_wait(e->receive), sent = loom_wait(e->send);
    if (!received)
        loom__span_add(e->rank, &e->span);
    *e = (exchange){0};
    return received ? received : sent;
}

static void exchange_cancel(exchange *e, loom_status why) {
    loom_cancel(e->receive, why);
    loom_cancel(e->send, why);
    *e = (exchange){0};
}

/* Between blocks, so that messages move while this rank computes. */
static loom_status advance(const exchange *e) {
    bool done;
    return e->receive ? loom_test(e->receive, &done) : LOOM_OK;
}

/* ---- blocks ---- */

static int64_t *begin_of(const ring_state *state, int64_t member) {
    return state->begin + member * state->chunks;
}

/* Whether any query of the chunk may see any key of the other. */
static bool sees(const loom_attention_block *block, int64_t query, int64_t key) {
    if (block->causal && key > query + block->s_q - 1)
        return false;
    return block->window == 0 || query - (key + block->s_kv - 1) < block->window;
}

/* The block of local chunk `q` and chunk `k` of a member; false where the mask hides all of it. */
static bool block_of(const ring_state *state, int64_t q, int64_t member, int64_t k, loom_attention_block *block) {
    *block = state->block;
    block->q_offset = begin_of(state, loom_comm_rank(state->comm))[q];
    block->kv_offset = begin_of(state, member)[k];
    if (state->document_start)
        block->document_start = state->document_start + q * block->b * block->s_q;
    return sees(block, block->q_offset, block->kv_offset);
}

/* What a trace shows of a piece's blocks, which its neighbours' messages pass under. */
static void add_span(loom_rank *rank, uint64_t start) {
    loom__span_add(
        rank, &(loom__span){.kind = LOOM_SPAN_ATTENTION, .bucket = -1, .start = start, .end = loom__span_clock(rank)});
}

/* ---- forward ---- */

typedef struct running {
    loom_tensor *accumulator, *maximum, *sum; /* [chunks, b, n, rows(, d)], fp32 */
} running;

static void running_release(running *r) {
    loom_tensor_release(r->accumulator);
    loom_tensor_release(r->maximum);
    loom_tensor_release(r->sum);
}

static loom_status running_create(loom_tape *tape, const ring_state *state, running *r) {
    const loom_attention_block *block = &state->block;
    int64_t queries = state->chunks * block->b * block->n * block->s_q;
    loom_rank *rank = loom_tape_rank(tape);
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 2, (int64_t[]){queries, block->d}, &r->accumulator));
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 1, &queries, &r->maximum));
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 1, &queries, &r->sum));
    for (int64_t q = 0, each = queries / state->chunks; q < state->chunks; q++)
        KERNELS(tape)->attention_begin(TEAM(tape), block, loom_tensor_f32(r->accumulator) + q * each * block->d,
            loom_tensor_f32(r->maximum) + q * each, loom_tensor_f32(r->sum) + q * each);
    return LOOM_OK;
}

/* Takes in the packed keys and values of a member. */
static loom_status attend(loom_tape *tape, const ring_state *state, loom_tensor *qkv, loom_tensor *packed,
    int64_t first, int64_t member, const exchange *under_way, running *r) {
    const int64_t b = state->block.b, s = state->block.s_q, d = state->block.d;
    const int64_t each = b * state->block.n * s;
    const uint64_t start = loom__span_clock(loom_tape_rank(tape));
    for (int64_t q = 0; q < state->chunks; q++)
        for (int64_t k = 0; k < state->chunks; k++) {
            loom_attention_block block;
            if (!block_of(state, q, member, k, &block))
                continue;
            int64_t keys = first + k * s * b * packed_width(state);
            LOOM__KERNEL(tape, qkv->dtype, attention_block, &block, loom__element(qkv, q * s * b * block.q_stride),
                loom__element(packed, keys), loom__element(packed, keys + d),
                loom_tensor_f32(r->accumulator) + q * each * d, loom_tensor_f32(r->maximum) + q * each,
                loom_tensor_f32(r->sum) + q * each);
            LOOM_TRY(advance(under_way));
        }
    add_span(loom_tape_rank(tape), start);
    return LOOM_OK;
}

static void finish_chunks(
    loom_tape *tape, const ring_state *state, const running *r, loom_tensor *out, loom_tensor *lse) {
    const loom_attention_block *block = &state->block;
    const int64_t s = block->s_q, width = block->n * block->d, each = block->b * block->n * s;
    for (int64_t q = 0; q < state->chunks; q++)
        LOOM__KERNEL(tape, out->dtype, attention_finish, block, loom_tensor_f32(r->accumulator) + q * each * block->d,
            loom_tensor_f32(r->maximum) + q * each, loom_tensor_f32(r->sum) + q * each,
            loom__element(out, q * s * block->b * width), width, loom_tensor_f32(lse) + q * each);
}

/* The packed pieces of all members, [members, …]. */
static loom_status gather(loom_tape *tape, const ring_state *state, loom_tensor *packed, loom_tensor **all) {
    int64_t count = loom_tensor_count(packed);
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), packed->dtype, 2, (int64_t[]){members_of(state), count}, all));
    return loom_all_gather(state->comm, packed->data, (*all)->data, count, packed->dtype);
}

static loom_status attend_gathered(
    loom_tape *tape, const ring_state *state, loom_tensor *qkv, loom_tensor *own, running *r) {
    loom_tensor *all = NULL;
    loom_status status = gather(tape, state, own, &all);
    for (int64_t member = 0; !status && member < members_of(state); member++)
        status = attend(tape, state, qkv, all, member * loom_tensor_count(own), member, &(exchange){0}, r);
    loom_tensor_release(all);
    return status;
}

static void swap(loom_tensor **a, loom_tensor **b) {
    loom_tensor *held = *a;
    *a = *b;
    *b = held;
}

/* `own` is one of the two buffers that the pieces go through. */
static loom_status attend_round(
    loom_tape *tape, const ring_state *state, loom_tensor *qkv, loom_tensor *own, running *r) {
    int64_t size = members_of(state), me = loom_comm_rank(state->comm);
    loom_tensor *now = loom_tensor_retain(own), *next = NULL;
    exchange e = {0};
    loom_status status = create_packed(tape, state, own->dtype, &next);
    for (int64_t step = 0; !status && step < size; step++) {
        bool last = step + 1 == size;
        if (!last)
            status = exchange_start(tape, state, TAG_KEYS, now, next, &e);
        if (!status)
            status = attend(tape, state, qkv, now, 0, (me + size - step) % size, &e, r);
        if (!status && !last) {
            status = exchange_finish(&e);
            swap(&now, &next);
        }
    }
    exchange_cancel(&e, status);
    loom_tensor_release(now);
    loom_tensor_release(next);
    return status;
}

/* ---- backward ---- */

typedef struct backward {
    const ring_state *state;
    loom_tape *tape;
    loom_tensor *qkv, *d_out, *lse, *delta;
    loom_tensor *d_fused;            /* fp32 [rows, b, fused]: the queries' gradients add up here */
    loom_tensor *part, *part_wide;   /* scratch of 16-bit dtypes: a block's gradients of queries … */
    loom_tensor *piece, *piece_wide; /* … and of keys and values */
} backward;

static loom_status create_zeroed(loom_tape *tape, loom_dtype dtype, int64_t count, loom_tensor **tensor) {
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), dtype, 1, &count, tensor));
    memset((*tensor)->data, 0, (size_t)count * loom_dtype_size(dtype));
    return LOOM_OK;
}

/* sum += scratch, which is in the dtype of the activations. */
static void add_wide(const backward *w, int64_t count, const loom_tensor *narrow, loom_tensor *wide, float *sum) {
    loom__kernels16(w->tape, narrow->dtype)->widen(TEAM(w->tape), count, narrow->data, loom_tensor_f32(wide));
    KERNELS(w->tape)->add(TEAM(w->tape), count, loom_tensor_f32(wide), sum);
}

/* d_packed (fp32, of the member's whole piece) += the gradient through this rank's queries. */
static loom_status attend_backward(
    const backward *w, loom_tensor *packed, int64_t first, int64_t member, const exchange *under_way, float *d_packed) {
    const ring_state *state = w->state;
    loom_tape *tape = w->tape;
    const loom_dtype dtype = w->qkv->dtype;
    const int64_t b = state->block.b, s = state->block.s_q, d = state->block.d, n = state->block.n;
    const int64_t each = b * n * s, fused = s * b * state->block.q_stride, piece = s * b * packed_width(state);
    const uint64_t start = loom__span_clock(loom_tape_rank(tape));
    for (int64_t q = 0; q < state->chunks; q++)
        for (int64_t k = 0; k < state->chunks; k++) {
            loom_attention_block block;
            if (!block_of(state, q, member, k, &block))
                continue;
            void *queries = loom__element(w->qkv, q * fused), *keys = loom__element(packed, first + k * piece);
            void *key_values = loom__element(packed, first + k * piece + d);
            void *d_out = loom__element(w->d_out, q * s * b * n * d);
            const float *lse = loom_tensor_f32(w->lse) + q * each, *delta = loom_tensor_f32(w->delta) + q * each;
            float *d_queries = loom_tensor_f32(w->d_fused) + q * fused, *d_keys = d_packed + k * piece;
            if (dtype == LOOM_F32) {
                KERNELS(tape)->attention_block_backward(TEAM(tape), &block, queries, keys, key_values, d_out, n * d,
                    lse, delta, true, true, d_queries, d_keys, d_keys + d);
            } else {
                uint16_t *d_q16 = w->part->data, *d_kv16 = w->piece->data;
                loom__kernels16(tape, dtype)
                    ->attention_block_backward(TEAM(tape), &block, queries, keys, key_values, d_out, n * d, lse, delta,
                        false, false, d_q16, d_kv16, d_kv16 + d);
                add_wide(w, fused, w->part, w->part_wide, d_queries);
                add_wide(w, piece, w->piece, w->piece_wide, d_keys);
            }
            LOOM_TRY(advance(under_way));
        }
    add_span(loom_tape_rank(tape), start);
    return LOOM_OK;
}

static loom_status backward_gathered(const backward *w, loom_tensor *own, loom_tensor **d_own) {
    const ring_state *state = w->state;
    int64_t count = loom_tensor_count(own), size = members_of(state);
    loom_tensor *all = NULL, *d_all = NULL, *mine = NULL;
    loom_status status = gather(w->tape, state, own, &all);
    if (!status)
        status = create_zeroed(w->tape, LOOM_F32, size * count, &d_all);
    for (int64_t member = 0; !status && member < size; member++)
        status =
            attend_backward(w, all, member * count, member, &(exchange){0}, loom_tensor_f32(d_all) + member * count);
    loom_tensor_release(all);
    if (!status)
        status = loom_tensor_create(loom_tape_rank(w->tape), LOOM_F32, 1, &count, &mine);
    if (!status)
        status = loom_reduce_scatter(state->comm, d_all->data, mine->data, count, LOOM_F32, LOOM_SUM);
    loom_tensor_release(d_all);
    *d_own = mine;
    return status;
}

/* One turn with keys and gradients. d_now is this rank's sum of the step, d_before the one that the member before it
 * has made of the same piece. `own` is one of the two buffers that the pieces go through. */
static loom_status backward_round(const backward *w, loom_tensor *own, loom_tensor **d_own) {
    const ring_state *state = w->state;
    int64_t size = members_of(state), me = loom_comm_rank(state->comm), count = loom_tensor_count(own);
    loom_tensor *now = loom_tensor_retain(own), *next = NULL;
    loom_tensor *d_now = NULL, *d_sent = NULL, *d_before = NULL;
    exchange keys = {0}, gradients = {0};
    loom_status status = create_packed(w->tape, state, own->dtype, &next);
    if (!status)
        status = create_zeroed(w->tape, LOOM_F32, count, &d_now);
    if (!status)
        status = create_zeroed(w->tape, LOOM_F32, count, &d_sent);
    if (!status)
        status = create_zeroed(w->tape, LOOM_F32, count, &d_before);
    for (int64_t step = 0; !status && step < size; step++) {
        bool last = step + 1 == size;
        if (!last)
            status = exchange_start(w->tape, state, TAG_KEYS, now, next, &keys);
        memset(d_now->data, 0, (size_t)count * sizeof(float));
        if (!status)
            status = attend_backward(w, now, 0, (me + size - step) % size, &keys, loom_tensor_f32(d_now));
        if (!status && step > 0) {
            status = exchange_finish(&gradients);
            KERNELS(w->tape)->add(TEAM(w->tape), count, loom_tensor_f32(d_before), loom_tensor_f32(d_now));
        }
        if (!status && size > 1)
            status = exchange_start(w->tape, state, TAG_GRADIENT, d_now, d_before, &gradients);
        swap(&d_now, &d_sent);
        if (!status && !last) {
            status = exchange_finish(&keys);
            swap(&now, &next);
        }
    }
    if (!status && size > 1)
        status = exchange_finish(&gradients);
    exchange_cancel(&keys, status);
    exchange_cancel(&gradients, status);
    if (!status)
        *d_own = loom_tensor_retain(size > 1 ? d_before : d_sent);
    loom_tensor *const made[] = {now, next, d_now, d_sent, d_before};
    for (int i = 0; i < 5; i++)
        loom_tensor_release(made[i]);
    return status;
}

static void backward_release(backward *w) {
    loom_tensor *const made[] = {w->delta, w->d_fused, w->part, w->part_wide, w->piece, w->piece_wide};
    for (int i = 0; i < 6; i++)
        loom_tensor_release(made[i]);
}

static loom_status backward_prepare(backward *w, loom_tensor *out) {
    const loom_attention_block *block = &w->state->block;
    const int64_t s = block->s_q, width = block->n * block->d, each = block->b * block->n * s;
    const int64_t fused = s * block->b * block->q_stride, piece = s * block->b * packed_width(w->state);
    LOOM_TRY(create_zeroed(w->tape, LOOM_F32, w->state->chunks * each, &w->delta));
    for (int64_t q = 0; q < w->state->chunks; q++)
        LOOM__KERNEL(w->tape, out->dtype, attention_delta, block, loom__element(out, q * s * block->b * width),
            loom__element(w->d_out, q * s * block->b * width), width, loom_tensor_f32(w->delta) + q * each);
    LOOM_TRY(create_zeroed(w->tape, LOOM_F32, w->state->chunks * fused, &w->d_fused));
    if (w->qkv->dtype == LOOM_F32)
        return LOOM_OK;
    LOOM_TRY(create_zeroed(w->tape, w->qkv->dtype, fused, &w->part));
    LOOM_TRY(create_zeroed(w->tape, LOOM_F32, fused, &w->part_wide));
    LOOM_TRY(create_zeroed(w->tape, w->qkv->dtype, piece, &w->piece));
    return create_zeroed(w->tape, LOOM_F32, piece, &w->piece_wide);
}

/* The fused gradient in the dtype of qkv. */
static loom_status assemble(backward *w, loom_tensor *d_own, loom_tensor **d_qkv) {
    copy_keys(w->state, sizeof(float), w->d_fused->data, d_own->data, false);
    LOOM_TRY(loom_tensor_create(loom_tape_rank(w->tape), w->qkv->dtype, 3, w->qkv->shape, d_qkv));
    int64_t count = loom_tensor_count(*d_qkv);
    if (w->qkv->dtype == LOOM_F32)
        memcpy((*d_qkv)->data, w->d_fused->data, (size_t)count * sizeof(float));
    else
        loom__kernels16(w->tape, w->qkv->dtype)
            ->narrow(TEAM(w->tape), count, loom_tensor_f32(w->d_fused), (*d_qkv)->data);
    return LOOM_OK;
}

static loom_status ring_input(loom_tape *tape, loom_node *node, loom_tensor *d_out) {
    const ring_state *state = loom_node_state(node);
    backward w = {
        .state = state, .tape = tape, .qkv = loom_node_saved(node, 0), .lse = loom_node_saved(node, 2), .d_out = d_out};
    loom_tensor *own = NULL, *d_own = NULL, *d_qkv = NULL;
    loom_status status = backward_prepare(&w, loom_node_saved(node, 1));
    if (!status)
        status = pack(tape, state, w.qkv, &own);
    if (!status)
        status = state->gather ? backward_gathered(&w, own, &d_own) : backward_round(&w, own, &d_own);
    if (!status)
        status = assemble(&w, d_own, &d_qkv);
    if (!status)
        status = loom_tape_give(tape, node, 0, d_qkv);
    loom_tensor_release(own);
    loom_tensor_release(d_own);
    backward_release(&w);
    return status;
}

static void ring_release(loom_node *node) {
    free_state(loom_node_state(node));
}

static const loom_op ring_op = {"ring attention", ring_input, NULL, ring_release};

/* ---- the operation ---- */

static loom_status check(const loom_tensor *qkv, const loom_attention_options *options, const loom__ring *ring) {
    if (options->g < 1 || options->n % options->g)
        return loom_fail(LOOM_ERR_ARGUMENT, "attention: %lld heads are not a multiple of %lld query groups",
            (long long)options->n, (long long)options->g);
    int64_t width = options->g * (options->n / options->g + 2) * options->d;
    if (qkv->dims != 3 || qkv->shape[0] != ring->chunks * ring->rows || qkv->shape[2] != width)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "ring attention: found qkv [%lld, …, %lld], expected %lld rows (%lld chunks of %lld) of width %lld",
            (long long)qkv->shape[0], (long long)qkv->shape[2], (long long)(ring->chunks * ring->rows),
            (long long)ring->chunks, (long long)ring->rows, (long long)width);
    if (options->dropout.probability > 0 && !options->sample)
        return loom_fail(LOOM_ERR_ARGUMENT, "a dropout of %g needs the sample numbers of its rows",
            (double)options->dropout.probability);
    return LOOM_OK;
}

static loom_status make_state(
    const loom_tensor *qkv, const loom_attention_options *options, const loom__ring *ring, ring_state *state) {
    int64_t per_group = options->n / options->g, d = options->d, b = qkv->shape[1], s = ring->rows;
    size_t begins = (size_t)(loom_comm_size(ring->comm) * ring->chunks);
    *state = (ring_state){
        .block = {.b = b,
            .n = options->n,
            .g = options->g,
            .d = d,
            .s_q = s,
            .s_kv = s,
            .q_stride = qkv->shape[2],
            .k_stride = options->g * 2 * d,
            .v_stride = options->g * 2 * d,
            .q_group_stride = (per_group + 2) * d,
            .kv_group_stride = 2 * d,
            .scale = options->scale,
            .causal = options->causal,
            .window = options->window,
            .dropout = options->dropout,
            .head_offset = options->head_offset},
        .comm = ring->comm,
        .gather = ring->gather,
        .chunks = ring->chunks,
    };
    state->begin = malloc((begins + 1) * sizeof *state->begin);
    if (options->document_start)
        state->document_start = malloc((size_t)(ring->chunks * b * s + 1) * sizeof(int32_t));
    if (options->sample)
        state->sample = malloc((size_t)(b + 1) * sizeof(int64_t));
    if (!state->begin || (options->document_start && !state->document_start) || (options->sample && !state->sample)) {
        free_state(state);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for an attention");
    }
    memcpy(state->begin, ring->begin, begins * sizeof *state->begin);
    if (options->sample)
        memcpy(state->sample, options->sample, (size_t)b * sizeof(int64_t));
    state->block.sample = state->sample;
    for (int64_t q = 0; options->document_start && q < ring->chunks; q++)
        for (int64_t j = 0; j < b; j++)
            memcpy(state->document_start + (q * b + j) * s, options->document_start + j * ring->chunks * s + q * s,
                (size_t)s * sizeof(int32_t));
    return LOOM_OK;
}

static loom_status compute(
    loom_tape *tape, const ring_state *state, loom_tensor *qkv, loom_tensor **out, loom_tensor **lse) {
    const loom_attention_block *block = &state->block;
    loom_rank *rank = loom_tape_rank(tape);
    loom_tensor *own = NULL;
    running r = {0};
    loom_status status = pack(tape, state, qkv, &own);
    if (!status)
        status = running_create(tape, state, &r);
    if (!status)
        status = state->gather ? attend_gathered(tape, state, qkv, own, &r) : attend_round(tape, state, qkv, own, &r);
    loom_tensor_release(own);
    if (!status)
        status =
            loom_tensor_create(rank, qkv->dtype, 3, (int64_t[]){rows_of(state), block->b, block->n * block->d}, out);
    if (!status)
        status =
            loom_tensor_create(rank, LOOM_F32, 1, (int64_t[]){state->chunks * block->b * block->n * block->s_q}, lse);
    if (!status)
        finish_chunks(tape, state, &r, *out, *lse);
    running_release(&r);
    return status;
}

loom_status loom__ring_attention(loom_tape *tape, loom_tensor *qkv, const loom_attention_options *options,
    const loom__ring *ring, loom_tensor **output) {
    LOOM_TRY(loom__check_dtype(tape, ring_op.name, qkv));
    LOOM_TRY(check(qkv, options, ring));
    LOOM_TRY(loom_tensor_ready(qkv));
    ring_state made;
    LOOM_TRY(make_state(qkv, options, ring, &made));
    loom_tensor *out = NULL, *lse = NULL;
    loom_node *node = NULL;
    loom_status status = compute(tape, &made, qkv, &out, &lse);
    if (!status)
        status = loom_tape_record(tape, &ring_op, sizeof made, (loom_tensor *[]){qkv}, 1, NULL, 0, out, &node);
    if (!status && node) {
        *(ring_state *)loom_node_state(node) = made;
        loom_tensor *const saved[] = {qkv, out, lse};
        for (int i = 0; !status && i < 3; i++)
            status = loom_node_save(node, saved[i]);
    } else {
        free_state(&made);
    }
    loom_tensor_release(lse);
    if (status) {
        loom_tensor_release(out);
        return status;
    }
    *output = out;
    return LOOM_OK;
}
