/* Experts of the walk. How many rows an expert gets depends on the data; the walk gives each as many as any other, as
 * balance losses aim at. */
#include "plan/walk.h"

/* Rows of this rank's tokens, one for each expert that a token goes to and finds room at. */
static int64_t own_rows(const walk *w) {
    return loom__plan_routed_rows(w->sizes);
}

/* Rows that the experts of a rank take; its own and those of the other ranks of its slices. */
static int64_t expert_rows(const walk *w) {
    return own_rows(w) * w->sizes->etp;
}

static int64_t row_bytes(const walk *w, int64_t rows) {
    return rows * w->sizes->model.hidden_size * w->sizes->width;
}

/* fp32, of each token and expert. */
static int64_t score_bytes(const walk *w) {
    return 4 * w->sizes->own_rows * w->sizes->model.moe.num_moe_experts;
}

static void drop_sums(walk *w) {
    drop(w, make(w, PASSING, 4 * (w->sizes->own_rows + 1) * w->sizes->model.hidden_size));
}

/* What comes of the rows of all expert ranks; on the tape it stands for what was sent. The dispatcher that gathers has
 * the rows of all for the moment, the other one what it sends until all has come. */
static int exchange(walk *w, int rows) {
    const loom__plan_sizes *s = w->sizes;
    if (s->ep == 1)
        return hold(w, rows);
    ready(w, rows);
    int moved = make(w, PASSING, row_bytes(w, own_rows(w)));
    if (loom__plan_gathers_experts(s))
        drop(w, make(w, PASSING, row_bytes(w, own_rows(w) * s->ep)));
    else
        w->tensors[moved].source = hold(w, rows);
    w->tensors[moved].value = w->tensors[rows].value;
    return moved;
}

/* Between the order in which rows come and that of the experts, where they are two. */
static int order(walk *w, int rows) {
    const loom__plan_sizes *s = w->sizes;
    return s->model.moe.num_moe_experts == s->ep || s->ep * s->etp == 1
               ? hold(w, rows)
               : make(w, PASSING, row_bytes(w, expert_rows(w)));
}

static int gather_slices(walk *w, int received) {
    ready(w, received);
    int all = w->sizes->etp > 1 ? make(w, PASSING, row_bytes(w, expert_rows(w))) : hold(w, received);
    int ordered = order(w, all);
    drop(w, all);
    return ordered;
}

static int sum_slices(walk *w, int rows) {
    int all = order(w, rows);
    int sum = w->sizes->etp > 1 ? make(w, PASSING, row_bytes(w, own_rows(w))) : hold(w, all);
    drop(w, all);
    return sum;
}

static int route(walk *w, tape *t, int x) {
    ready(w, x);
    int logits = make(w, PASSING, score_bytes(w)), probs = make(w, PASSING, score_bytes(w));
    node *n = record(w, t, ROUTE, x, -1, probs, true);
    save(w, n, x);
    save(w, n, logits);
    drop(w, logits);
    return probs;
}

static int take_rows(walk *w, tape *t, int x) {
    ready(w, x);
    int mine = make(w, PASSING, row_bytes(w, own_rows(w)));
    record(w, t, EXPERT_ROWS, x, -1, mine, false);
    return mine;
}

static int dispatch(walk *w, tape *t, int moved) {
    int rows = gather_slices(w, moved);
    record(w, t, DISPATCH, moved, -1, rows, false);
    return rows;
}

/* Biases are widened one after the other. */
static int expert_linear(walk *w, tape *t, int rows, int64_t width, bool bias) {
    ready(w, rows);
    int y = make(w, PASSING, expert_rows(w) * width * w->sizes->width);
    drop(w, widened(w, width, bias));
    save(w, record(w, t, EXPERT_LINEAR, rows, -1, y, true), rows);
    return y;
}

static int send_back(walk *w, tape *t, int rows) {
    ready(w, rows);
    int sum = sum_slices(w, rows);
    record(w, t, RETURN, rows, -1, sum, false);
    return sum;
}

static int combine(walk *w, tape *t, int moved, int probs) {
    ready(w, moved);
    int y = make(w, PASSING, own_hidden(w));
    drop_sums(w);
    node *n = record(w, t, COMBINE, moved, probs, y, false);
    save(w, n, moved);
    save(w, n, probs);
    return y;
}

/* The weighting of the shared one's output y; takes the hold of y. */
static int gate(walk *w, tape *t, int x, int y) {
    ready(w, x);
    ready(w, y);
    int scores = make(w, PASSING, 4 * w->sizes->own_rows), out = make(w, PASSING, own_hidden(w));
    node *n = record(w, t, GATE, x, y, out, true);
    save(w, n, x);
    save(w, n, y);
    save(w, n, scores);
    drop(w, scores);
    drop(w, y);
    return out;
}

static int finish_shared(walk *w, tape *t, int x, int active) {
    int shared = loom__walk_narrow(w, t, active);
    if (!w->sizes->model.moe.moe_shared_expert_gate)
        return shared;
    if (loom__model_biases(&w->sizes->model).mlp) {
        int narrow = shared;
        shared = loom__walk_residual(w, t, narrow, -1, true);
        drop(w, narrow);
    }
    return gate(w, t, x, shared);
}

static int through_experts(walk *w, tape *t, int rows) {
    const loom__plan_sizes *s = w->sizes;
    int64_t f = s->model.moe.moe_ffn_hidden_size / s->etp;
    bool bias = loom__model_biases(&s->model).mlp;
    int wide = expert_linear(w, t, rows, gates(w) * f, false);
    int active = loom__walk_activate(w, t, wide, expert_rows(w), f, bias);
    drop(w, wide);
    int narrow = expert_linear(w, t, active, s->model.hidden_size, bias);
    drop(w, active);
    return narrow;
}

/* width: of the shared expert where it is computed while rows travel, its output then in *shared; else 0. */
static int routed(walk *w, tape *t, int x, int64_t width, int *shared) {
    int probs = route(w, t, x), mine = take_rows(w, t, x), moved = exchange(w, mine), active = -1;
    drop(w, mine);
    if (width > 0)
        active = loom__walk_widen(w, t, x, width);
    int rows = dispatch(w, t, moved);
    drop(w, moved);
    int narrow = through_experts(w, t, rows);
    drop(w, rows);
    int sum = send_back(w, t, narrow);
    moved = exchange(w, sum);
    drop(w, sum);
    if (width > 0)
        *shared = finish_shared(w, t, x, active);
    int y = combine(w, t, moved, probs);
    drop(w, moved);
    drop(w, narrow);
    drop(w, active);
    drop(w, probs);
    return y;
}

int loom__walk_experts(walk *w, tape *t, int x) {
    const loom_moe_config *moe = &w->sizes->model.moe;
    int64_t width = moe->moe_shared_expert_intermediate_size / w->sizes->tp;
    int shared = -1, of_routed = routed(w, t, x, moe->moe_shared_expert_overlap ? width : 0, &shared);
    if (width == 0)
        return of_routed;
    if (shared < 0) {
        int active = loom__walk_widen(w, t, x, width);
        shared = finish_shared(w, t, x, active);
        drop(w, active);
    }
    ready(w, of_routed);
    ready(w, shared);
    int y = make(w, PASSING, bytes_of(w, of_routed));
    record(w, t, ADD, of_routed, shared, y, false);
    drop(w, of_routed);
    drop(w, shared);
    return y;
}

static void gate_backward(walk *w, tape *t, node *n) {
    const loom__plan_sizes *s = w->sizes;
    int wide = make(w, PASSING, 4 * s->model.hidden_size), d_logits = make(w, PASSING, 4 * s->own_rows);
    n->gathered = s->width < 4 ? make(w, PASSING, s->own_rows * s->width) : hold(w, d_logits);
    int d_x = make(w, PASSING, own_hidden(w)), d_y = make(w, PASSING, own_hidden(w));
    give(w, t, n->inputs[0], d_x);
    give(w, t, n->inputs[1], d_y);
    drop(w, wide);
    drop(w, d_logits);
}

static void route_backward(walk *w, tape *t, node *n) {
    const loom__plan_sizes *s = w->sizes;
    int d_logits = make(w, PASSING, score_bytes(w));
    int narrow = s->width < 4 ? make(w, PASSING, score_bytes(w) / 4 * s->width) : hold(w, d_logits);
    drop(w, d_logits);
    n->gathered = narrow; /* for the gradient of the weight */
    give(w, t, n->inputs[0], make(w, PASSING, own_hidden(w)));
}

static void combine_backward(walk *w, tape *t, node *n) {
    int d_probs = make(w, PASSING, score_bytes(w)), d_mine = make(w, PASSING, row_bytes(w, own_rows(w)));
    drop(w, make(w, PASSING, 4 * 3 * w->sizes->model.hidden_size));
    int d_sum = exchange(w, d_mine);
    drop(w, d_mine);
    give(w, t, n->inputs[0], d_sum);
    give(w, t, n->inputs[1], d_probs);
}

static void dispatch_backward(walk *w, tape *t, node *n, int d_rows) {
    int sum = sum_slices(w, d_rows), back = exchange(w, sum);
    drop(w, sum);
    give(w, t, n->inputs[0], back);
}

void loom__walk_routed_backward(walk *w, tape *t, node *n, int d_y) {
    int d_x;
    switch (n->op) {
    case ROUTE:
        route_backward(w, t, n);
        break;
    case EXPERT_ROWS:
        d_x = make(w, PASSING, own_hidden(w));
        drop_sums(w);
        give(w, t, n->inputs[0], d_x);
        break;
    case DISPATCH:
        dispatch_backward(w, t, n, d_y);
        break;
    case RETURN:
        give(w, t, n->inputs[0], gather_slices(w, d_y));
        break;
    case GATE:
        gate_backward(w, t, n);
        break;
    case EXPERT_LINEAR:
        give(w, t, n->inputs[0], make(w, PASSING, bytes_of(w, n->saved[0])));
        break;
    default:
        combine_backward(w, t, n);
        break;
    }
}
