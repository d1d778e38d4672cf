/* The memory of a chunk, by walking the operations that training runs on it with their tensors: each operation makes,
 * keeps and gives back what its namesake in `tensor` and `parallel` does, in the same order, so that the worst moment
 * is found and not guessed. The invariant is that of the tape: an output's memory lives while somebody holds it. */
#include "plan/sizes.h"
#include <stdlib.h>
#include <string.h>

enum { TENSORS = 1024, NODES = 160, VALUES = 192, SAVED = 12, LINE = 64 };

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
    MIXTURE,
    AGAIN_ATTENTION, /* recomputed */
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
    piece pieces[TENSORS];
    tensor tensors[TENSORS];
    int made;              /* tensors; each has a piece or shares one */
    bool overflow, failed; /* too much to walk; out of memory */
    double now[KINDS], peak[KINDS];
    tape outer;
} walk;

/* ---- tensors ---- */

static double sum(const double *by_kind) {
    return by_kind[KEPT] + by_kind[PASSING] + by_kind[LOGITS];
}

static int new_tensor(walk *w, int piece_number) {
    if (w->made == TENSORS) {
        w->overflow = true;
        return 0;
    }
    w->tensors[w->made] = (tensor){piece_number < 0 ? w->made : piece_number, 1, -1, -1};
    return w->made++;
}

static int make(walk *w, kind of, int64_t bytes) {
    bytes = bytes > 0 ? (bytes + LINE - 1) / LINE * LINE : LINE;
    int made = new_tensor(w, -1);
    w->pieces[made] = (piece){bytes, of, 1};
    w->now[of] += (double)bytes;
    if (sum(w->now) > sum(w->peak))
        memcpy(w->peak, w->now, sizeof w->peak);
    return made;
}

static int hold(walk *w, int t) {
    w->tensors[t].holders++;
    return t;
}

static void drop(walk *w, int t);

/* Waits for what writes it. */
static void ready(walk *w, int t) {
    int source = w->tensors[t].source;
    w->tensors[t].source = -1;
    drop(w, source);
}

static void drop(walk *w, int t) {
    if (t < 0 || --w->tensors[t].holders > 0)
        return;
    ready(w, t);
    piece *p = &w->pieces[w->tensors[t].piece];
    if (--p->holders == 0)
        w->now[p->kind] -= (double)p->bytes;
}

static int view(walk *w, int t) {
    ready(w, t);
    int made = new_tensor(w, w->tensors[t].piece);
    w->pieces[w->tensors[t].piece].holders++;
    return made;
}

static int64_t bytes_of(const walk *w, int t) {
    return w->pieces[w->tensors[t].piece].bytes;
}

static bool is_shared(const walk *w, int t) {
    return w->tensors[t].holders > 1 || w->pieces[w->tensors[t].piece].holders > 1;
}

/* What was made for the moment is kept for a backward from here on. */
static void keep(walk *w, int t) {
    piece *p = &w->pieces[w->tensors[t].piece];
    if (p->kind != PASSING)
        return;
    w->now[PASSING] -= (double)p->bytes;
    w->now[KEPT] += (double)p->bytes;
    p->kind = KEPT;
}

/* ---- sizes ---- */

static int64_t hidden(const walk *w, int64_t rows) {
    return rows * w->sizes->model.hidden_size * w->sizes->width;
}

static int64_t own_hidden(const walk *w) {
    return hidden(w, w->sizes->own_rows);
}

static int64_t full_hidden(const walk *w) {
    return hidden(w, w->sizes->rows);
}

static bool scatters(const walk *w) {
    return w->sizes->sequence_parallel;
}

/* A vector of fp32 that a 16-bit parameter is widened into for the call. */
static int widened(walk *w, int64_t elements, bool there) {
    return there && w->sizes->width < 4 ? make(w, PASSING, 4 * elements) : -1;
}

static int64_t heads(const walk *w) {
    return w->sizes->model.num_attention_heads / w->sizes->tp;
}

static int64_t groups(const walk *w) {
    int64_t g = w->sizes->model.num_query_groups / w->sizes->tp;
    return g > 0 ? g : 1;
}

static int64_t context_bytes(const walk *w) {
    return w->sizes->rows * heads(w) * w->sizes->model.kv_channels * w->sizes->width;
}

static int64_t head_bytes(const walk *w, int part) {
    const loom__plan_sizes *s = w->sizes;
    return s->rows * (part ? groups(w) : heads(w)) * s->model.kv_channels * s->width;
}

static int64_t gates(const walk *w) {
    return loom_activation_is_gated(w->sizes->model.activation) ? 2 : 1;
}

/* ---- the tape ---- */

static int new_value(walk *w, tape *t, int made) {
    if (t->values == VALUES) {
        w->overflow = true;
        return 0;
    }
    t->gradients[t->values] = -1;
    return w->tensors[made].value = t->values++;
}

static int value_of(const walk *w, int t) {
    return t < 0 ? -1 : w->tensors[t].value;
}

/* NULL where nothing is recorded. */
static node *record(walk *w, tape *t, operation op, int x, int y, int output, bool weights) {
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

static void save(walk *w, node *n, int t) {
    if (n && t >= 0) {
        keep(w, t);
        n->saved[n->saved_count++] = hold(w, t);
    }
}

static void end_node(walk *w, node *n) {
    for (int i = 0; i < n->saved_count; i++)
        drop(w, n->saved[i]);
    n->saved_count = 0;
}

static void give(walk *w, tape *t, int value, int gradient) {
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

/* ---- between the regions of tensor parallelism ---- */

static int gather(walk *w, int x) {
    ready(w, x);
    int full = make(w, PASSING, bytes_of(w, x) * w->sizes->tp);
    w->tensors[full].source = hold(w, x);
    return full;
}

static int reduce(walk *w, int x, kind of) {
    if (w->sizes->tp == 1 || !scatters(w))
        return hold(w, x);
    int part = make(w, of, bytes_of(w, x) / w->sizes->tp);
    w->tensors[part].source = hold(w, x);
    return part;
}

/* ---- forwards: each gives its output, and leaves its input to the caller ---- */

static int norm(walk *w, tape *t, int x) {
    const loom_model_config *model = &w->sizes->model;
    bool centred = model->layernorm_zero_centered_gamma, bias = model->normalization == LOOM_LAYERNORM;
    int64_t rows = w->sizes->own_rows, h = model->hidden_size;
    ready(w, x);
    int y = make(w, KEPT, bytes_of(w, x));
    int factor = centred ? make(w, PASSING, 4 * h) : widened(w, h, true), wide = widened(w, h, bias);
    int rstd = make(w, PASSING, 4 * rows), mean = bias ? make(w, PASSING, 4 * rows) : -1;
    node *n = record(w, t, NORM, x, -1, y, true);
    save(w, n, x);
    save(w, n, mean);
    save(w, n, rstd);
    save(w, n, factor);
    drop(w, factor);
    drop(w, wide);
    drop(w, mean);
    drop(w, rstd);
    return y;
}

static int column(walk *w, tape *t, int x, int64_t outputs, bool bias, kind of) {
    const loom__plan_sizes *s = w->sizes;
    ready(w, x);
    int y = make(w, of, s->rows * outputs * s->width), wide = widened(w, outputs, bias);
    if (scatters(w))
        drop(w, gather(w, x));
    node *n = record(w, t, COLUMN, x, -1, y, true);
    save(w, n, x);
    drop(w, wide);
    return y;
}

static int row(walk *w, tape *t, int x) {
    ready(w, x);
    int partial = make(w, PASSING, full_hidden(w)), y = reduce(w, partial, PASSING);
    drop(w, partial);
    node *n = record(w, t, ROW, x, -1, y, true);
    if (n)
        n->bytes = bytes_of(w, x);
    save(w, n, x);
    return y;
}

static int residual(walk *w, tape *t, int x, int before, bool bias) {
    ready(w, x);
    if (before >= 0)
        ready(w, before);
    int y = make(w, PASSING, bytes_of(w, x)), wide = widened(w, w->sizes->model.hidden_size, bias);
    node *n = record(w, t, RESIDUAL, x, before, y, bias);
    if (n)
        n->bytes = bytes_of(w, x);
    drop(w, wide);
    return y;
}

static int attention(walk *w, tape *t, int qkv) {
    int64_t lse_bytes = 4 * w->sizes->rows * heads(w);
    ready(w, qkv);
    int out = make(w, KEPT, context_bytes(w)), lse = make(w, PASSING, lse_bytes);
    /* Keys and values of another context rank, which are worked on, and those that come next. */
    int block = w->sizes->cp > 1 ? make(w, PASSING, 4 * head_bytes(w, 1)) : -1;
    drop(w, block);
    node *n = record(w, t, ATTENTION, qkv, -1, out, false);
    save(w, n, qkv);
    save(w, n, out);
    save(w, n, lse);
    drop(w, lse);
    return out;
}

static int head_norms(walk *w, tape *t, int x) {
    const loom__plan_sizes *s = w->sizes;
    int packed[2], normed[2], rstd[2], factor[2];
    for (int part = 0; part < 2; part++)
        packed[part] = make(w, PASSING, head_bytes(w, part));
    for (int part = 0; part < 2; part++)
        normed[part] = make(w, PASSING, head_bytes(w, part));
    for (int part = 0; part < 2; part++) {
        rstd[part] = make(w, PASSING, 4 * s->rows * (part ? groups(w) : heads(w)));
        factor[part] = s->model.layernorm_zero_centered_gamma ? make(w, PASSING, 4 * s->model.kv_channels)
                                                              : widened(w, s->model.kv_channels, true);
    }
    int y = make(w, PASSING, bytes_of(w, x));
    node *n = record(w, t, HEAD_NORMS, x, -1, y, true);
    for (int part = 0; part < 2; part++) {
        save(w, n, packed[part]);
        save(w, n, rstd[part]);
        save(w, n, factor[part]);
    }
    for (int part = 0; part < 2; part++) {
        drop(w, packed[part]);
        drop(w, normed[part]);
        drop(w, rstd[part]);
        drop(w, factor[part]);
    }
    return y;
}

static int rope(walk *w, tape *t, int x) {
    int y = view(w, x);
    record(w, t, ROPE, x, -1, y, false);
    return y;
}

static int activate(walk *w, tape *t, int x, int64_t width, bool bias) {
    const loom__plan_sizes *s = w->sizes;
    ready(w, x);
    int y = make(w, KEPT, s->rows * width * s->width), wide = widened(w, gates(w) * width, bias);
    drop(w, wide);
    node *n = record(w, t, ACTIVATE, x, -1, y, bias);
    if (n)
        n->bias = bias ? gates(w) * width : 0;
    save(w, n, x);
    return y;
}

static int scale(walk *w, tape *t, int x) {
    ready(w, x);
    int y = make(w, PASSING, bytes_of(w, x));
    record(w, t, SCALE, x, -1, y, false);
    return y;
}

/* Runs a forward without recording, keeping x alone. */
static int again(walk *w, tape *t, operation op, int (*run)(walk *, tape *, int, bool), int x, bool expert_layer) {
    bool recorded = t->record;
    t->record = false;
    int y = run(w, t, x, expert_layer);
    t->record = recorded;
    node *n = record(w, t, op, x, -1, y, op == AGAIN_LAYER);
    if (n)
        n->expert_layer = expert_layer;
    save(w, n, x);
    return y;
}

static int run_attention(walk *w, tape *t, int x, bool expert_layer) {
    (void)expert_layer;
    return attention(w, t, x);
}

/* ---- experts ---- */

/* Tokens that a rank's experts take, spread evenly. */
static int64_t expert_rows(const walk *w) {
    const loom__plan_sizes *s = w->sizes;
    const loom_moe_config *moe = &s->model.moe;
    int64_t rows = s->own_rows * moe->moe_router_topk * s->etp;
    bool padded = moe->moe_pad_expert_input_to_capacity && moe->moe_expert_capacity_factor > 0;
    return padded ? (int64_t)((double)rows * moe->moe_expert_capacity_factor) : rows;
}

static int64_t expert_bytes(const walk *w, int64_t width) {
    return expert_rows(w) * width * w->sizes->width;
}

static int mixture(walk *w, tape *t, int x) {
    const loom__plan_sizes *s = w->sizes;
    const loom_moe_config *moe = &s->model.moe;
    int64_t f = loom__plan_expert_width(s) / s->etp, h = s->model.hidden_size;
    int64_t shared = moe->moe_shared_expert_intermediate_size / s->tp;
    int router = make(w, PASSING, 4 * s->own_rows * (moe->num_moe_experts + moe->moe_router_topk));
    int permuted = make(w, PASSING, expert_bytes(w, h)), wide = make(w, PASSING, expert_bytes(w, gates(w) * f));
    int active = make(w, PASSING, expert_bytes(w, f)), narrow = make(w, PASSING, expert_bytes(w, h));
    int beside = shared ? make(w, PASSING, s->rows * (gates(w) + 1) * shared * s->width) : -1;
    int y = make(w, PASSING, bytes_of(w, x));
    node *n = record(w, t, MIXTURE, x, -1, y, true);
    save(w, n, x);
    save(w, n, router);
    const int large[] = {permuted, wide, active, narrow, beside};
    for (int i = 0; i < 5; i++) {
        if (!moe->moe_layer_recompute)
            save(w, n, large[i]);
        drop(w, large[i]);
    }
    drop(w, router);
    return y;
}

static void mixture_backward(walk *w, tape *t, node *n) {
    const loom__plan_sizes *s = w->sizes;
    int64_t f = loom__plan_expert_width(s) / s->etp, h = s->model.hidden_size;
    int64_t wide_bytes = expert_bytes(w, gates(w) * f);
    int remade[4] = {-1, -1, -1, -1};
    if (s->model.moe.moe_layer_recompute) {
        remade[0] = make(w, PASSING, expert_bytes(w, h));
        remade[1] = make(w, PASSING, wide_bytes);
        remade[2] = make(w, PASSING, expert_bytes(w, f));
        remade[3] = make(w, PASSING, expert_bytes(w, h));
    }
    int d_narrow = make(w, PASSING, expert_bytes(w, h)), d_active = make(w, PASSING, expert_bytes(w, f));
    drop(w, d_narrow);
    int d_wide = make(w, PASSING, wide_bytes);
    drop(w, d_active);
    int d_permuted = make(w, PASSING, expert_bytes(w, h));
    drop(w, d_wide);
    int d_x = make(w, PASSING, own_hidden(w));
    drop(w, d_permuted);
    for (int i = 0; i < 4; i++)
        drop(w, remade[i]);
    give(w, t, n->inputs[0], d_x);
}

/* ---- a layer ---- */

/* The reference of *x is given up. */
static void replace(walk *w, int *x, int made) {
    drop(w, *x);
    *x = made;
}

static int layer(walk *w, tape *t, int x, bool expert_layer) {
    const loom__plan_sizes *s = w->sizes;
    const loom_model_config *model = &s->model;
    loom__biases biases = loom__model_biases(model);
    int64_t qkv_width = (heads(w) + 2 * groups(w)) * model->kv_channels, f = model->ffn_hidden_size / s->tp;
    int at = norm(w, t, x);
    replace(w, &at, column(w, t, at, qkv_width, biases.qkv, KEPT));
    if (model->qk_layernorm)
        replace(w, &at, head_norms(w, t, at));
    if (model->position_embedding_type == LOOM_POSITION_ROPE)
        replace(w, &at, rope(w, t, at));
    if (model->recompute == LOOM_RECOMPUTE_SELECTIVE)
        replace(w, &at, again(w, t, AGAIN_ATTENTION, run_attention, at, false));
    else
        replace(w, &at, attention(w, t, at));
    replace(w, &at, row(w, t, at));
    replace(w, &at, residual(w, t, at, x, biases.proj));
    int middle = hold(w, at);
    replace(w, &at, norm(w, t, at));
    if (expert_layer) {
        replace(w, &at, mixture(w, t, at));
    } else {
        replace(w, &at, column(w, t, at, gates(w) * f, false, KEPT));
        replace(w, &at, activate(w, t, at, f, biases.mlp));
        replace(w, &at, row(w, t, at));
    }
    replace(w, &at, residual(w, t, at, middle, biases.mlp));
    drop(w, middle);
    return at;
}

static int layer_forward(walk *w, tape *t, int x, bool expert_layer) {
    return w->sizes->model.recompute == LOOM_RECOMPUTE_FULL ? again(w, t, AGAIN_LAYER, layer, x, expert_layer)
                                                            : layer(w, t, x, expert_layer);
}

/* ---- the ends of the model ---- */

static int embed(walk *w, tape *t) {
    const loom_model_config *model = &w->sizes->model;
    int partial = make(w, PASSING, full_hidden(w)), at = reduce(w, partial, PASSING);
    drop(w, partial);
    record(w, t, EMBEDDING, -1, -1, at, true);
    if (model->scale_embeddings)
        replace(w, &at, scale(w, t, at));
    if (model->position_embedding_type == LOOM_POSITION_LEARNED) {
        ready(w, at);
        int placed = make(w, PASSING, bytes_of(w, at));
        record(w, t, POSITION, at, -1, placed, true);
        replace(w, &at, placed);
    }
    if (model->hidden_dropout > 0)
        replace(w, &at, residual(w, t, at, -1, false));
    return at;
}

static int head(walk *w, tape *t, int x) {
    const loom__plan_sizes *s = w->sizes;
    int normed = norm(w, t, x);
    int logits = column(w, t, normed, s->model.padded_vocab_size / s->tp, false, LOGITS);
    drop(w, normed);
    ready(w, logits);
    int maximum = make(w, PASSING, 4 * s->rows), pair = make(w, PASSING, 8 * s->rows),
        y = make(w, PASSING, 4 * s->rows);
    node *n = record(w, t, ENTROPY, logits, -1, y, false);
    save(w, n, logits);
    save(w, n, maximum);
    save(w, n, pair);
    drop(w, logits);
    drop(w, maximum);
    drop(w, pair);
    return y;
}

/* ---- backwards ---- */

static void backward(walk *w, tape *t);
static void run_weights(walk *w, tape *t);

static void end_recomputed(walk *w, node *n) {
    tape *inner = n->recomputed;
    if (!inner)
        return;
    run_weights(w, inner);
    for (int i = 0; i < inner->values; i++)
        drop(w, inner->gradients[i]);
    free(inner);
    n->recomputed = NULL;
}

static void replay(walk *w, tape *t, node *n, int d_output) {
    tape *inner = n->recomputed = calloc(1, sizeof *inner);
    if (!inner) {
        w->failed = true;
        return;
    }
    inner->record = true;
    inner->split = t->split;
    int x = view(w, n->saved[0]);
    if (n->inputs[0] >= 0)
        new_value(w, inner, x);
    int y = n->op == AGAIN_LAYER ? layer(w, inner, x, n->expert_layer) : attention(w, inner, x);
    inner->gradients[w->tensors[y].value] = hold(w, d_output);
    backward(w, inner);
    int d_x = n->inputs[0] >= 0 ? inner->gradients[w->tensors[x].value] : -1;
    if (d_x >= 0)
        give(w, t, n->inputs[0], hold(w, d_x));
    drop(w, y);
    drop(w, x);
}

static void column_backward(walk *w, tape *t, node *n) {
    if (scatters(w))
        n->gathered = gather(w, n->saved[0]);
    int full = make(w, PASSING, full_hidden(w)), d_x = reduce(w, full, PASSING);
    drop(w, full);
    give(w, t, n->inputs[0], d_x);
}

static void head_norms_backward(walk *w, tape *t, node *n, int d_y) {
    int d_parts[2], d_heads[2];
    for (int part = 0; part < 2; part++)
        d_parts[part] = make(w, PASSING, head_bytes(w, part));
    for (int part = 0; part < 2; part++)
        d_heads[part] = make(w, PASSING, head_bytes(w, part));
    int d_x = make(w, PASSING, bytes_of(w, d_y));
    for (int part = 0; part < 2; part++) {
        drop(w, d_parts[part]);
        drop(w, d_heads[part]);
    }
    give(w, t, n->inputs[0], d_x);
}

static void input_half(walk *w, tape *t, node *n, int d_y) {
    int made, other;
    switch (n->op) {
    case NORM:
    case SCALE:
        give(w, t, n->inputs[0], make(w, PASSING, bytes_of(w, d_y)));
        break;
    case HEAD_NORMS:
        head_norms_backward(w, t, n, d_y);
        break;
    case COLUMN:
        column_backward(w, t, n);
        break;
    case ROW:
        if (scatters(w)) {
            n->gathered = gather(w, d_y);
            ready(w, n->gathered);
        }
        give(w, t, n->inputs[0], make(w, PASSING, n->bytes));
        break;
    case RESIDUAL:
        if (n->inputs[1] >= 0)
            give(w, t, n->inputs[1], hold(w, d_y));
        if (n->inputs[0] >= 0)
            give(w, t, n->inputs[0],
                w->sizes->model.hidden_dropout > 0 ? make(w, PASSING, bytes_of(w, d_y)) : hold(w, d_y));
        break;
    case ATTENTION:
        other = make(w, PASSING, bytes_of(w, n->saved[2]));
        made = make(w, PASSING, bytes_of(w, n->saved[0]));
        give(w, t, n->inputs[0], made);
        drop(w, other);
        break;
    case ROPE:
        give(w, t, n->inputs[0], is_shared(w, d_y) ? make(w, PASSING, bytes_of(w, d_y)) : hold(w, d_y));
        break;
    case ACTIVATE:
        other = widened(w, n->bias, n->bias > 0);
        made = make(w, PASSING, bytes_of(w, n->saved[0]));
        drop(w, other);
        if (n->weights)
            n->gathered = hold(w, made);
        give(w, t, n->inputs[0], made);
        break;
    case POSITION:
        give(w, t, n->inputs[0], hold(w, d_y));
        break;
    case ENTROPY:
        made = n->saved[0];
        memmove(n->saved, n->saved + 1, sizeof *n->saved * (size_t)--n->saved_count);
        drop(w, make(w, PASSING, 4 * w->sizes->rows));
        give(w, t, n->inputs[0], made);
        break;
    case MIXTURE:
        mixture_backward(w, t, n);
        break;
    case AGAIN_ATTENTION:
    case AGAIN_LAYER:
        replay(w, t, n, d_y);
        break;
    case EMBEDDING:
        break;
    }
}

static void weight_half(walk *w, node *n, int d_y) {
    if (n->op == EMBEDDING && scatters(w)) {
        int full = gather(w, d_y);
        ready(w, full);
        drop(w, full);
    }
    end_recomputed(w, n);
    drop(w, n->gathered);
    n->gathered = -1;
}

static void backward(walk *w, tape *t) {
    for (int i = t->node_count - 1; i >= 0; i--) {
        node *n = &t->nodes[i];
        int d_y = t->gradients[n->output];
        t->gradients[n->output] = -1;
        if (d_y >= 0) {
            ready(w, d_y);
            if (n->inputs[0] >= 0 || n->inputs[1] >= 0)
                input_half(w, t, n, d_y);
            if (t->split && n->weights) {
                n->d_output = hold(w, d_y);
                t->queue[t->queue_count++] = i;
            } else {
                weight_half(w, n, d_y);
            }
            drop(w, d_y);
        }
        if (n->d_output < 0)
            end_node(w, n);
    }
}

static void run_weights(walk *w, tape *t) {
    for (int i = 0; i < t->queue_count; i++) {
        node *n = &t->nodes[t->queue[i]];
        weight_half(w, n, n->d_output);
        drop(w, n->d_output);
        n->d_output = -1;
        end_node(w, n);
    }
    t->queue_count = 0;
}

/* ---- a chunk ---- */

static loom__plan_bytes bytes_by_kind(const double *from) {
    return (loom__plan_bytes){from[KEPT], from[PASSING], from[LOGITS]};
}

/* Starts looking for the next worst moment. */
static loom__plan_bytes take_peak(walk *w) {
    loom__plan_bytes peak = bytes_by_kind(w->peak);
    memcpy(w->peak, w->now, sizeof w->peak);
    return peak;
}

static void walk_chunk(
    walk *w, const loom_stage *chunk, int64_t dense, int64_t experts, bool split, loom__plan_ledger *ledger) {
    tape *t = &w->outer;
    t->record = true;
    t->split = split;
    int x = -1, d_output = -1;
    if (!chunk->embedding) {
        x = make(w, KEPT, own_hidden(w));
        new_value(w, t, x);
    } else {
        x = embed(w, t);
    }
    for (int64_t i = 0; i < dense + experts; i++)
        replace(w, &x, layer_forward(w, t, x, i < experts));
    int output = chunk->loss ? head(w, t, x) : hold(w, x);
    drop(w, x);
    if (chunk->loss)
        d_output = make(w, PASSING, bytes_of(w, output));
    int value = w->tensors[output].value;
    drop(w, output);
    ledger->forward = take_peak(w);
    ledger->kept = bytes_by_kind(w->now);
    if (d_output < 0)
        d_output = make(w, PASSING, own_hidden(w));
    if (value >= 0)
        t->gradients[value] = hold(w, d_output);
    backward(w, t);
    drop(w, d_output);
    ledger->backward = take_peak(w);
    ledger->halfway = bytes_by_kind(w->now);
    run_weights(w, t);
    ledger->weights = take_peak(w);
}

loom_status loom__plan_walk(const loom__plan_sizes *sizes, const loom_stage *chunk, int64_t dense, int64_t experts,
    bool split, loom__plan_ledger *ledger) {
    walk *w = calloc(1, sizeof *w);
    if (!w)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a plan's operations");
    w->sizes = sizes;
    walk_chunk(w, chunk, dense, experts, split, ledger);
    bool overflow = w->overflow, failed = w->failed;
    free(w);
    if (failed)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a plan's operations");
    return overflow ? loom_fail(LOOM_ERR_INTERNAL, "a layer has more tensors than a plan walks") : LOOM_OK;
}
