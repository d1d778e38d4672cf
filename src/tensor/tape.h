/* The inside of a tape, for the files of this room. */
#ifndef TENSOR_TAPE_H
#define TENSOR_TAPE_H

#include <megaloom/tensor.h>

enum { LOOM__SCOPE_BYTES = 96 };

struct loom_node {
    const loom_op *op;
    int64_t output;                  /* value number */
    int64_t inputs[LOOM_MAX_INPUTS]; /* value numbers; −1 = wants no gradient */
    int input_count;
    loom_tensor *saved[LOOM_MAX_SAVED];
    int saved_count;
    loom_parameter **parameters;
    int64_t parameter_count, parameter_capacity;
    char scope[LOOM__SCOPE_BYTES];
    _Alignas(16) unsigned char state[];
};

typedef struct loom__queued {
    loom_node *node;
    loom_tensor *d_output;
} loom__queued;

struct loom_tape {
    loom_rank *rank;
    int64_t number; /* of this rank's tapes, from 1: an address may come back, a number does not */
    loom_tape_options options;
    bool nested; /* a recomputation's tape: the uses of parameters are counted by the outer one */
    bool walked;
    loom_node *collector; /* while a recomputed function runs for the first time: who notes the parameters it uses */
    loom_tape_observer observer; /* NULL = none */
    void *observer_context;
    char scope[LOOM__SCOPE_BYTES];
    int64_t value_count, value_capacity;
    loom_tensor **gradients; /* [value_count] */
    bool *is_leaf;           /* [value_count] */
    int64_t node_count, node_capacity;
    loom_node **nodes;
    int64_t queue_count, queue_capacity;
    loom__queued *queue;
};

/* Grows *array (of element_bytes) so that it can hold `wanted` elements; new ones are zero. */
loom_status loom__tape_reserve(void *array, int64_t *capacity, int64_t wanted, size_t element_bytes);
loom_status loom__node_add_parameter(loom_node *node, loom_parameter *parameter);
/* One use of each parameter of the node has passed. */
void loom__tape_uses_passed(loom_tape *tape, loom_node *node);

#endif
