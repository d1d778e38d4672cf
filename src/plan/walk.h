/* What the parts of the walk share: tensors with their holders, and a tape of the operations that made them. Numbers
 * stand for pointers: of a tensor in `tensors`, of a value on a tape. */
#ifndef PLAN_WALK_H
#define PLAN_WALK_H

#include "plan/sizes.h"
#include <string.h>

enum { TENSORS = 2048, NODES = 224, VALUES = 288, SAVED = 12, LINE = 64 };

typedef enum kind { KEPT, PASSING, LOGITS, KINDS } kind;

typedef enum operation {
    NORM,
    HEAD_NORMS,
    COLUMN,
    ROW,
    RESIDUAL, /* bias, dropout and residual */
    ATTENTION,
    ROPE,
    ACTIVATE,
    EMBEDDING,
    POSITION,
    SCALE,
    ENTROPY,
    EXCHANGE, /* of heads for rows */
    ROUTE,
    EXPERT_ROWS,
    DISPATCH,
    EXPERT_LINEAR,
    RETURN,
    COMBINE,
    GATE, /* of a shared expert */
    ADD,
    AGAIN_ATTENTION, /* recomputed */
    AGAIN_EXPERTS,
    AGAIN_LAYER
} operation;

typedef struct piece {
    int64_t bytes;
    kind kind;
    int holders;
} piece;

typedef struct tensor {
    int piece, holders;
    int value;  /* of the tape that it belongs to; -1 = of none */
    int source; /* held until a reduction or gather that writes this tensor is over; -1 = none */
} tensor;

typedef struct node {
    operation op;
    int inputs[2], output; /* values */
    int saved[SAVED], saved_count;
    int d_output; /* in the queue of weight halves */
    int gathered;
    bool weights;            /* it has parameters, so a weight half */
    int64_t bytes;           /* of x */
    int64_t bias;            /* elements of a bias that is widened again */
    struct tape *recomputed; /* between the halves */
    bool expert_layer;
} node;

typedef struct tape {
    node nodes[NODES];
    int node_count, queue[NODES], queue_count;
    int gradients[VALUES], values;
    bool record, split;
} tape;

typedef struct walk {
    const loom__plan_sizes *sizes;
    loom__context_type context; /* of all layers */
    piece pieces[TENSORS];
    tensor tensors[TENSORS];
    int made;              /* tensors; each has a piece or shares one */
    bool overflow, failed; /* too much to walk; out of memory */
    double now[KINDS], peak[KINDS];
    tape outer;
} walk;

/* ---- tensors ---- */

static inline double sum(const double *by_kind) {
    return by_kind[KEPT] + by_kind[PASSING] + by_kind[LOGITS];
}

static inline int new_tensor(walk *w, int piece_number) {
    if (w->made == TENSORS) {
        w->overflow = true;
        return 0;
    }
    w->tensors[w->made] = (tensor){piece_number < 0 ? w->made : piece_number, 1, -1, -1};
    return w->made++;
}

static inline int make(walk *w, kind of, int64_t bytes) {
    bytes = bytes > 0 ? (bytes + LINE - 1) / LINE * LINE : LINE;
    int made = new_tensor(w, -1);
    w->pieces[made] = (piece){bytes, of, 1};
    w->now[of] += (double)bytes;
    if (sum(w->now) > sum(w->peak))
        memcpy(w->peak, w->now, sizeof w->peak);
    return made;
}

static inline int hold(walk *w, int t) {
    w->tensors[t].holders++;
    return t;
}

static inline void drop(walk *w, int t);

/* Waits for what writes it. */
static inline void ready(walk *w, int t) {
    int source = w->tensors[t].source;
    w->tensors[t].source = -1;
    drop(w, source);
}

static inline void drop(walk *w, int t) {
    if (t < 0 || --w->tensors[t].holders > 0)
        return;
    ready(w, t);
    piece *p = &w->pieces[w->tensors[t].piece];
    if (--p->holders == 0)
        w->now[p->kind] -= (double)p->bytes;
}

static inline int view(walk *w, int t) {
    ready(w, t);
    int made = new_tensor(w, w->tensors[t].piece);
    w->pieces[w->tensors[t].piece].holders++;
    return made;
}

static inline int64_t bytes_of(const walk *w, int t) {
    return w->pieces[w->tensors[t].piece].bytes;
}

static inline bool is_shared(const walk *w, int t) {
    return w->tensors[t].holders > 1 || w->pieces[w->tensors[t].piece].holders > 1;
}

/* What was made for the moment is kept for a backward from here on. */
static inline void keep(walk *w, int t) {
    piece *p = &w->pieces[w->tensors[t].piece];
    if (p->kind != PASSING)
        return;
    w->now[PASSING] -= (double)p->bytes;
    w->now[KEPT] += (double)p->bytes;
    p->kind = KEPT;
}

/* ---- sizes ---- */

static inline int64_t hidden(const walk *w, int64_t rows) {
    return rows * w->sizes->model.hidden_size * w->sizes->width;
}

static inline int64_t own_hidden(const walk *w) {
    return hidden(w, w->sizes->own_rows);
}

static inline int64_t full_hidden(const walk *w) {
    return hidden(w, w->sizes->rows);
}

static inline bool scatters(const walk *w) {
    return w->sizes->sequence_parallel;
}

/* A vector of fp32 that a 16-bit parameter is widened into for the call. */
static inline int widened(walk *w, int64_t elements, bool there) {
    return there && w->sizes->width < 4 ? make(w, PASSING, 4 * elements) : -1;
}

static inline int64_t heads(const walk *w) {
    return w->sizes->model.num_attention_heads / w->sizes->tp;
}

static inline int64_t groups(const walk *w) {
    int64_t g = w->sizes->model.num_query_groups / w->sizes->tp;
    return g > 0 ? g : 1;
}

static inline int64_t context_bytes(const walk *w) {
    return w->sizes->rows * heads(w) * w->sizes->model.kv_channels * w->sizes->width;
}

static inline int64_t head_bytes(const walk *w, int part) {
    const loom__plan_sizes *s = w->sizes;
    return s->rows * (part ? groups(w) : heads(w)) * s->model.kv_channels * s->width;
}

static inline int64_t gates(const walk *w) {
    return loom_activation_is_gated(w->sizes->model.activation) ? 2 : 1;
}

/* ---- the tape ---- */

static inline int new_value(walk *w, tape *t, int made) {
    if (t->values == VALUES) {
        w->overflow = true;
        return 0;
    }
    t->gradients[t->values] = -1;
    return w->tensors[made].value = t->values++;
}

static inline int value_of(const walk *w, int t) {
    return t < 0 ? -1 : w->tensors[t].value;
}

/* NULL where nothing is recorded. */
static inline node *record(walk *w, tape *t, operation op, int x, int y, int output, bool weights) {
    if (!t->record || (value_of(w, x) < 0 && value_of(w, y) < 0 && !weights))
        return NULL;
    if (t->node_count == NODES) {
        w->overflow = true;
        return NULL;
    }
    node *made = &t->nodes[t->node_count++];
    *made = (node){
        .op = op, .inputs = {value_of(w, x), value_of(w, y)}, .d_output = -1, .gathered = -1, .weights = weights};
    made->output = new_value(w, t, output);
    return made;
}

static inline void save(walk *w, node *n, int t) {
    if (n && t >= 0) {
        keep(w, t);
        n->saved[n->saved_count++] = hold(w, t);
    }
}

static inline void end_node(walk *w, node *n) {
    for (int i = 0; i < n->saved_count; i++)
        drop(w, n->saved[i]);
    n->saved_count = 0;
}

static inline void give(walk *w, tape *t, int value, int gradient) {
    if (value < 0) {
        drop(w, gradient);
        return;
    }
    int present = t->gradients[value];
    t->gradients[value] = gradient;
    if (present < 0)
        return;
    ready(w, present);
    ready(w, gradient);
    int total = is_shared(w, present) ? gradient : present;
    if (is_shared(w, present) && is_shared(w, gradient)) {
        total = make(w, PASSING, bytes_of(w, present));
        drop(w, present);
        drop(w, gradient);
    } else {
        drop(w, total == present ? gradient : present);
    }
    t->gradients[value] = total;
}

/* ---- the parts: a forward gives its output and leaves its input to the caller ---- */

/* x with its bias, and `before` (-1: nothing) beside it. */
int loom__walk_residual(walk *w, tape *t, int x, int before, bool bias);
int loom__walk_activate(walk *w, tape *t, int x, int64_t rows, int64_t width, bool bias);
/* qkv -> heads, wherever the rows of the sequence are. */
int loom__walk_attention(walk *w, tape *t, int qkv);
/* The wide half of an MLP of that width, and the narrow one. */
int loom__walk_widen(walk *w, tape *t, int x, int64_t width);
int loom__walk_narrow(walk *w, tape *t, int active);
/* The router and its experts, and beside them the shared one where there is one. */
int loom__walk_experts(walk *w, tape *t, int x);
/* The input halves of their operations. */
void loom__walk_attention_backward(walk *w, tape *t, node *n, int d_y);
void loom__walk_routed_backward(walk *w, tape *t, node *n, int d_y);

#endif
