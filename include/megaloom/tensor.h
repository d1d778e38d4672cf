/* Tensors, parameters, the tape, and the door for one's own operations.
 *
 * A tape records the operations of one forward pass of one microbatch through one model chunk, and walks them
 * backwards. It is seeded with a given gradient of its output; its leaves are inputs whose gradient can be read out (a
 * pipeline stage receives one and sends the other). Each operation has an input half of its backward (gradients of its
 * inputs) and a weight half (gradients of its parameters, added straight into parameter->grad); the weight half runs
 * right after the input half, or is queued and run later in the same order (deferred).
 *
 * Ownership: tensors are counted. An operation borrows its inputs and hands its output to the caller, who releases it;
 * what the backward needs is retained by the tape's node and released as the walk passes it. */
#ifndef MEGALOOM_TENSOR_H
#define MEGALOOM_TENSOR_H

#include <megaloom/rank.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { LOOM_MAX_DIMS = 4, LOOM_MAX_INPUTS = 4, LOOM_MAX_SAVED = 6, LOOM_NONFINITE_BYTES = 256 };

typedef struct loom_tape loom_tape;
typedef struct loom_node loom_node;
struct loom__storage;

/* Row-major, dense. Activations are [s, b, h]. Fields are read-only for users. */
typedef struct loom_tensor {
    loom_dtype dtype;
    int dims;
    int64_t shape[LOOM_MAX_DIMS];
    void *data;
    struct loom__storage *storage; /* who owns data */
    int64_t references;
    int64_t tape;          /* number of the tape whose value it is; 0 = no tape knows it, no gradient flows into it */
    int64_t value;         /* number of the value on that tape */
    loom_request *pending; /* communication that must finish before data may be read, or NULL; see loom_tensor_ready */
    struct loom_tensor *source; /* what that communication still reads: kept until it has finished */
} loom_tensor;

/* Uninitialised memory from the rank's allocator. Not collective. */
LOOM_API loom_status loom_tensor_create(
    loom_rank *rank, loom_dtype dtype, int dims, const int64_t *shape, loom_tensor **tensor);
LOOM_API loom_tensor *loom_tensor_retain(loom_tensor *tensor);
/* Gives one reference back; the memory goes back to the allocator with the last one. NULL is accepted. A pending
 * request is waited for first. */
LOOM_API void loom_tensor_release(loom_tensor *tensor);
/* The same memory under another shape of as many elements; on the same tape value. */
LOOM_API loom_status loom_tensor_view(loom_tensor *tensor, int dims, const int64_t *shape, loom_tensor **view);
/* Whether somebody else holds the tensor or a view of it: then its memory must not be changed in place. */
LOOM_API bool loom_tensor_is_shared(const loom_tensor *tensor);
/* Waits for the pending communication of the tensor, if any. Operations of the tape call it on what they read. */
LOOM_API loom_status loom_tensor_ready(loom_tensor *tensor);
LOOM_API int64_t loom_tensor_count(const loom_tensor *tensor);
static inline float *loom_tensor_f32(const loom_tensor *tensor) {
    return (float *)tensor->data;
}

/* What the rank's allocator holds. High water stops growing after the first step of a fixed shape. */
typedef struct loom_memory {
    size_t in_use, high_water, reserved; /* bytes handed out now, at most so far, taken from the system */
} loom_memory;
LOOM_API loom_memory loom_rank_memory(const loom_rank *rank);

/* A trainable tensor of this rank: its shard of a canonical parameter. data and grad are owned by whoever made the
 * parameter (nn at first; the gradient buffer once the module is wrapped). */
typedef struct loom_parameter {
    const char *name; /* Megatron-Core's module name with the global layer number */
    int dims;
    int64_t shape[2];     /* local: h/tp etc. */
    loom_dtype dtype;     /* in which operations see its values: F32, BF16 or F16; their inputs must have the same */
    float *data;          /* the values where dtype is F32 */
    uint16_t *data16;     /* the values where it is BF16 or F16; operations do not read data then */
    void *memory;         /* what the maker got from malloc for data, or NULL; who moves data elsewhere frees it */
    float *grad;          /* fp32 whatever dtype is. NULL until someone provides it; a weight half then writes or adds
                             there */
    bool grad_written;    /* false: the next contribution writes (beta 0); true: it adds */
    int64_t pending_uses; /* uses recorded on tapes that are alive whose weight half has not run */
    /* Its place in the model: */
    bool tensor_parallel;     /* a shard; false = the same value on every tensor-parallel rank */
    bool sequence_partial;    /* its gradient is a partial sum on each tp rank and must be added over tp */
    bool tensor_partial;      /* the same for another reason: each tp rank has only its heads, whatever the sequence */
    bool decay;               /* default decay class */
    bool embedding_or_output; /* has the rate optim.decoupled_lr where that is given */
    int64_t chunk;            /* of this rank's chunks of the model; 0 without interleaving */
    bool shared_ends;         /* a copy on the first and on the last stage (tied word embeddings): the two gradients are
                                 added, and only the first stage's owns elements */
    /* One of an expert's weights (allreduce false in Megatron-Core): its gradient is reduced over the
     * expert-data-parallel group alone, and in a norm it is counted over the expert-model-parallel group. */
    bool expert_parallel;
    int64_t owned; /* leading local elements that this rank counts in a norm, so that over the tensor group each
                      canonical element is counted once: all of a shard, all or none of a replica */
    /* Set while other ranks have newer values than data; see loom_parameter_ready. */
    loom_status (*await_data)(void *context, int64_t place);
    void *await_context;
    int64_t await_place;
    const void *descriptor; /* the spec's descriptor, or NULL for a user's own parameter */
    int64_t index;          /* place in the module's list */
} loom_parameter;

/* Waits until data is whole: a distributed optimizer may still be gathering it from other ranks. Operations call it on
 * the parameters that their forward reads. NULL is ready. */
static inline loom_status loom_parameter_ready(loom_parameter *parameter) {
    return parameter && parameter->await_data ? parameter->await_data(parameter->await_context, parameter->await_place)
                                              : LOOM_OK;
}

/* Elements of this rank's shard. */
static inline int64_t loom_parameter_count(const loom_parameter *parameter) {
    return parameter->shape[0] * (parameter->dims == 2 ? parameter->shape[1] : 1);
}

/* The values in the parameter's dtype. */
static inline void *loom_parameter_values(const loom_parameter *parameter) {
    return parameter->dtype == LOOM_F32 ? (void *)parameter->data : (void *)parameter->data16;
}

typedef struct loom_tape_options {
    bool record;        /* false: inference, nothing is kept */
    bool defer_weights; /* weight halves are queued for loom_tape_run_weights */
    /* Called when all recorded uses of the parameter have passed, on this tape and on the others that are alive (with
     * several microbatches in flight: once, when the last of them has added its part). May be NULL. */
    void (*parameter_ready)(void *context, loom_parameter *parameter);
    void *context;
    bool check_finite; /* every output is checked; the first NaN or infinity is an error naming operation and scope */
    /* Not NULL (LOOM_NONFINITE_BYTES bytes, empty at first): the message goes there instead, and the forward goes on,
     * as it must where other ranks wait in its collectives. */
    char *nonfinite;
} loom_tape_options;

/* An empty tape on the rank; options are copied. Not collective; loom_tape_destroy. */
LOOM_API loom_status loom_tape_create(loom_rank *rank, const loom_tape_options *options, loom_tape **tape);
LOOM_API void loom_tape_destroy(loom_tape *tape); /* NULL is accepted */
LOOM_API loom_rank *loom_tape_rank(const loom_tape *tape);
LOOM_API bool loom_tape_records(const loom_tape *tape);
/* Sees the output of each operation that is recorded from now on, before another one reads it (its communication may be
 * pending: loom_tensor_ready); must not change it. An error ends the operation with it. What a recomputation runs is
 * seen when it runs first. NULL ends it. */
typedef loom_status (*loom_tape_observer)(void *context, const char *scope, const char *operation, loom_tensor *output);
LOOM_API void loom_tape_observe(loom_tape *tape, loom_tape_observer observer, void *context);
/* Where operations now belong ("decoder.layers.3"), for messages; copied, at most 95 characters. */
LOOM_API void loom_tape_scope(loom_tape *tape, const char *scope);
/* Makes the tensor a leaf: its gradient can be read after the backward. A tensor that is a value already is cut off
 * from what it came from. */
LOOM_API loom_status loom_tape_leaf(loom_tape *tape, loom_tensor *tensor);
/* Walks back from `output` with d_output as its gradient (same shape and dtype; borrowed, not changed). May be called
 * once. */
LOOM_API loom_status loom_tape_backward(loom_tape *tape, loom_tensor *output, loom_tensor *d_output);
/* Runs the queued weight halves, oldest first. */
LOOM_API loom_status loom_tape_run_weights(loom_tape *tape);
/* The gradient of a leaf, borrowed; NULL when nothing flowed into it. Valid until the tape is destroyed. */
LOOM_API loom_tensor *loom_tape_gradient(const loom_tape *tape, const loom_tensor *leaf);

/* One's own operation. */
typedef struct loom_op {
    const char *name;
    /* Computes gradients of the inputs from that of the output and gives them with loom_tape_give. NULL when no input
     * can have one. d_output is borrowed and must not be changed when loom_tensor_is_shared says so. */
    loom_status (*backward_input)(loom_tape *tape, loom_node *node, loom_tensor *d_output);
    /* Adds to the gradients of the parameters (loom_parameter_begin_grad). NULL when there are none. */
    loom_status (*backward_weight)(loom_tape *tape, loom_node *node, loom_tensor *d_output);
    /* Frees what the state holds beyond saved tensors; may be NULL. */
    void (*release)(loom_node *node);
} loom_op;

/* Records an operation whose forward has been computed: `output` becomes its value. state_bytes of zeroed state live in
 * the node. *node is NULL when nothing needs to be kept: the tape does not record, or neither an input nor a parameter
 * wants a gradient; then the operation is done. Scope checks (check_finite) happen here. */
LOOM_API loom_status loom_tape_record(loom_tape *tape, const loom_op *op, size_t state_bytes,
    loom_tensor *const *inputs, int input_count, loom_parameter *const *parameters, int parameter_count,
    loom_tensor *output, loom_node **node);
LOOM_API void *loom_node_state(loom_node *node);
/* Keeps a tensor for the backward (retained, NULL is kept as NULL), at most LOOM_MAX_SAVED of them; read it back by the
 * number of the call, from 0. */
LOOM_API loom_status loom_node_save(loom_node *node, loom_tensor *tensor);
LOOM_API loom_tensor *loom_node_saved(const loom_node *node, int number); /* NULL for a number that is none */
/* Takes a saved tensor out of the node, with its reference (for backwards that work in place). */
LOOM_API loom_tensor *loom_node_take(loom_node *node, int number);
/* Whether input `number` wants a gradient. */
LOOM_API bool loom_node_wants(const loom_node *node, int number);
/* Of the recorded parameters that want a gradient (frozen ones, whose grad is NULL, are left out) number `number`; NULL
 * behind the last. */
LOOM_API loom_parameter *loom_node_parameter(const loom_node *node, int number);
/* Hands over (takes the reference of) the gradient of input `number`. It may be d_output itself, retained. Several
 * gradients of one value are added. */
LOOM_API loom_status loom_tape_give(loom_tape *tape, loom_node *node, int number, loom_tensor *gradient);
/* Where a weight half puts its contribution; *accumulate is false for the first one of the step. NULL when the
 * parameter is frozen (has no grad). */
LOOM_API float *loom_parameter_begin_grad(loom_parameter *parameter, bool *accumulate);

/* Local operations. Shapes as said. F32, BF16 or F16: inputs and parameters of one dtype, which is the output's too; a
 * gradient has the dtype of its value. In 16 bits each operation computes in fp32 and rounds what it gives once.
 * Another dtype is LOOM_ERR_UNSUPPORTED, a mixture LOOM_ERR_ARGUMENT. Each gives *output (the caller releases it). */

/* LayerNorm (bias not NULL) or RMSNorm (bias NULL) over the last axis h; weight, bias [h]. */
LOOM_API loom_status loom_norm(
    loom_tape *tape, loom_tensor *x, loom_parameter *weight, loom_parameter *bias, float eps, loom_tensor **output);
/* The same with the weight stored as w and used as 1 + w. */
LOOM_API loom_status loom_zero_centered_norm(
    loom_tape *tape, loom_tensor *x, loom_parameter *weight, loom_parameter *bias, float eps, loom_tensor **output);
/* RMSNorm over the d channels of every query head and every key head of fused qkv [s, b, g*(n/g + 2)*d] (Megatron's
 * layout); values pass unchanged. q_weight, k_weight [d], used as 1 + w where zero_centered. Each head gives the
 * weights' gradients its part, so that a rank with some of the heads has partial sums (tensor_partial). */
LOOM_API loom_status loom_qk_norm(loom_tape *tape, loom_tensor *x, loom_parameter *q_weight, loom_parameter *k_weight,
    int64_t groups, int64_t heads_per_group, int64_t d, float eps, bool zero_centered, loom_tensor **output);
/* factor * x. */
LOOM_API loom_status loom_scale(loom_tape *tape, loom_tensor *x, float factor, loom_tensor **output);
/* act(x + bias): x [s, b, f or 2f]; bias may be NULL; its gradient is taken in the weight half. */
LOOM_API loom_status loom_activate(
    loom_tape *tape, loom_activation act, loom_tensor *x, loom_parameter *bias, loom_tensor **output);
/* Where local rows lie in the sequence: row t is at position first + t before row `turn`, and at second + t - turn from
 * there on (context parallelism gives a rank two chunks). */
typedef struct loom_positions {
    int64_t first, turn, second;
} loom_positions;
/* Rows one after the other from `first` on. */
static inline loom_positions loom_positions_from(int64_t first) {
    loom_positions positions = {first, INT64_MAX, 0};
    return positions;
}

/* residual + dropout(x + bias), all [s, b, h]; bias and residual may be NULL; dropout->probability may be 0. sample:
 * [b], copied. */
LOOM_API loom_status loom_bias_dropout_add(loom_tape *tape, loom_tensor *x, loom_parameter *bias, loom_tensor *residual,
    const loom_dropout *dropout, const int64_t *sample, loom_positions positions, loom_tensor **output);
/* x in another dtype: F32 to BF16 or F16, rounded to nearest even, or back, exactly. In x's own dtype the output is x
 * itself, retained. The gradient comes back in the dtype of x. */
LOOM_API loom_status loom_cast(loom_tape *tape, loom_tensor *x, loom_dtype dtype, loom_tensor **output);
/* sigmoid(x . weight) * y, row by row: x, y, *output [s, b, h], weight [1, h] or [h]. The score of a row
 * is in fp32. */
LOOM_API loom_status loom_sigmoid_gate(
    loom_tape *tape, loom_tensor *x, loom_parameter *weight, loom_tensor *y, loom_tensor **output);
/* x + y, of one shape. */
LOOM_API loom_status loom_add(loom_tape *tape, loom_tensor *x, loom_tensor *y, loom_tensor **output);

/* Rotary embedding tables: cosine and sine [positions, rotary_d/2], borrowed until the tape is destroyed. rotary_d is
 * even and at most the head dimension. */
typedef struct loom_rope_table {
    int64_t positions, rotary_d;
    const float *cosine, *sine;
} loom_rope_table;
/* Rotates q and k of fused qkv [s, b, g*(n/g + 2)*d] (Megatron's layout) in place: the output shares x's memory and x
 * must not be read again. positions [b, s] (copied) or NULL for position_offset + t. */
LOOM_API loom_status loom_rope(loom_tape *tape, loom_tensor *x, const loom_rope_table *table, int64_t groups,
    int64_t heads_per_group, int64_t d, const int32_t *positions, int64_t position_offset, loom_tensor **output);

typedef struct loom_attention_options {
    int64_t n, g, d; /* local heads, local query groups, head dimension */
    float scale;
    bool causal;
    int64_t window;
    const int32_t *document_start; /* [b, s], copied; or NULL */
    loom_dropout dropout;
    const int64_t *sample; /* [b], copied; or NULL without dropout */
    int64_t head_offset;
} loom_attention_options;
/* Self attention from fused qkv [s, b, g*(n/g+2)*d] to [s, b, n*d]. */
LOOM_API loom_status loom_attention(
    loom_tape *tape, loom_tensor *qkv, const loom_attention_options *options, loom_tensor **output);

/* Recomputation: runs `function` without keeping what it makes, and again when the backward comes. function(tape,
 * argument, x, output) must do the same both times and must not change x (loom_rope works in place: not on x itself);
 * argument is borrowed until the node has passed, then, or at once where nothing is kept, free_argument(argument) is
 * called (may be NULL). */
typedef loom_status (*loom_recomputed)(loom_tape *tape, void *argument, loom_tensor *x, loom_tensor **output);
LOOM_API loom_status loom_recompute_call(loom_tape *tape, loom_recomputed function, void *argument,
    void (*free_argument)(void *argument), loom_tensor *x, loom_tensor **output);

#ifdef __cplusplus
}
#endif
#endif
