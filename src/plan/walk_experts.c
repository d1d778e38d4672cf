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

/* The dispatcher that gathers has the rows of all expert ranks for the moment. */
static void pass_all(walk *w) {
    if (w->sizes->ep > 1 && loom__plan_gathers_experts(w->sizes))
        drop(w, make(w, PASSING, row_bytes(w, own_rows(w) * w->sizes->ep)));
}

/* This rank's rows to where their experts are. */
static int to_experts(walk *w, int rows) {
    const loom__plan_sizes *s = w->sizes;
    int received = s->ep > 1 ? make(w, PASSING, row_bytes(w, own_rows(w))) : hold(w, rows);
    pass_all(w);
    int all = s->etp > 1 ? make(w, PASSING, row_bytes(w, expert_rows(w))) : hold(w, received);
    int ordered = make(w, PASSING, row_bytes(w, expert_rows(w)));
    drop(w, received);
    drop(w, all);
    return ordered;
}

static int from_experts(walk *w) {
    const loom__plan_sizes *s = w->sizes;
    int all = make(w, PASSING, row_bytes(w, expert_rows(w)));
    int sum = s->etp > 1 ? make(w, PASSING, row_bytes(w, own_rows(w))) : hold(w, all);
    int back = s->ep > 1 ? make(w, PASSING, row_bytes(w, own_rows(w))) : hold(w, sum);
    pass_all(w);
    drop(w, all);
    drop(w, sum);
    return back;
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

static int dispatch(walk *w, tape *t, int x) {
    ready(w, x);
    int mine = make(w, PASSING, row_bytes(w, own_rows(w))), rows = to_experts(w, mine);
    drop(w, mine);
    record(w, t, DISPATCH, x, -1, rows, false);
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

static int combine(walk *w, tape *t, int rows, int probs) {
    ready(w, rows);
    int mine = from_experts(w), y = make(w, PASSING, own_hidden(w));
    drop_sums(w);
    node *n = record(w, t, COMBINE, rows, probs, y, false);
    save(w, n, mine);
    save(w, n, probs);
    drop(w, mine);
    return y;
}

int loom__walk_routed(walk *w, tape *t, int x) {
    const loom__plan_sizes *s = w->sizes;
    int64_t f = s->model.moe.moe_ffn_hidden_size / s->etp;
    bool bias = loom__model_biases(&s->model).mlp;
    int probs = route(w, t, x), rows = dispatch(w, t, x);
    int wide = expert_linear(w, t, rows, gates(w) * f, false);
    int active = loom__walk_activate(w, t, wide, expert_rows(w), f, bias);
    drop(w, wide);
    int narrow = expert_linear(w, t, active, s->model.hidden_size, bias);
    drop(w, active);
    drop(w, rows);
    int y = combine(w, t, narrow, probs);
    drop(w, narrow);
    drop(w, probs);
    return y;
}

int loom__walk_gate(walk *w, tape *t, int x, int y) {
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
    int scratch = make(w, PASSING, 4 * 3 * w->sizes->model.hidden_size), d_probs = make(w, PASSING, score_bytes(w));
    int d_mine = make(w, PASSING, row_bytes(w, own_rows(w))), d_rows = to_experts(w, d_mine);
    drop(w, scratch);
    drop(w, d_mine);
    give(w, t, n->inputs[0], d_rows);
    give(w, t, n->inputs[1], d_probs);
}

void loom__walk_routed_backward(walk *w, tape *t, node *n) {
    int mine, d_x;
    switch (n->op) {
    case ROUTE:
        route_backward(w, t, n);
        break;
    case DISPATCH:
        mine = from_experts(w);
        d_x = make(w, PASSING, own_hidden(w));
        drop_sums(w);
        drop(w, mine);
        give(w, t, n->inputs[0], d_x);
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
