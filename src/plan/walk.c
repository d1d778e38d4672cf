/* The memory of a chunk, by walking the operations that training runs on it with their tensors: each operation makes,
 * keeps and gives back what its namesake in `tensor` and `parallel` does, in the same order, so that the worst moment
 * is found and not guessed. The invariant is that of the tape: an output's memory lives while somebody holds it. */
#include "plan/walk.h"
#include <stdlib.h>

enum { BEHIND_MOST = 3 }; /* dense layers behind those with experts */

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

int loom__walk_residual(walk *w, tape *t, int x, int before, bool bias) {
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

int loom__walk_activate(walk *w, tape *t, int x, int64_t rows, int64_t width, bool bias) {
    ready(w, x);
    int y = make(w, KEPT, rows * width * w->sizes->width), wide = widened(w, gates(w) * width, bias);
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
    node *n = record(w, t, op, x, -1, y, op != AGAIN_ATTENTION);
    if (n)
        n->expert_layer = expert_layer;
    save(w, n, x);
    return y;
}

static int run_attention(walk *w, tape *t, int x, bool expert_layer) {
    (void)expert_layer;
    return loom__walk_attention(w, t, x);
}

/* ---- a layer ---- */

/* The reference of *x is given up. */
static void replace(walk *w, int *x, int made) {
    drop(w, *x);
    *x = made;
}

int loom__walk_widen(walk *w, tape *t, int x, int64_t width) {
    bool bias = loom__model_biases(&w->sizes->model).mlp;
    int at = column(w, t, x, gates(w) * width, false, KEPT);
    replace(w, &at, loom__walk_activate(w, t, at, w->sizes->rows, width, bias));
    return at;
}

int loom__walk_narrow(walk *w, tape *t, int active) {
    return row(w, t, active);
}

static int dense_mlp(walk *w, tape *t, int x, int64_t width) {
    int at = loom__walk_widen(w, t, x, width);
    replace(w, &at, loom__walk_narrow(w, t, at));
    return at;
}

static int experts(walk *w, tape *t, int x, bool expert_layer) {
    (void)expert_layer;
    return loom__walk_experts(w, t, x);
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
        replace(w, &at, loom__walk_attention(w, t, at));
    replace(w, &at, row(w, t, at));
    replace(w, &at, loom__walk_residual(w, t, at, x, biases.proj));
    int middle = hold(w, at);
    replace(w, &at, norm(w, t, at));
    if (!expert_layer)
        replace(w, &at, dense_mlp(w, t, at, f));
    else if (model->moe.moe_layer_recompute)
        replace(w, &at, again(w, t, AGAIN_EXPERTS, experts, at, true));
    else
        replace(w, &at, experts(w, t, at, true));
    bool shared = model->moe.moe_shared_expert_intermediate_size > 0 && !model->moe.moe_shared_expert_gate;
    replace(w, &at, loom__walk_residual(w, t, at, middle, biases.mlp && (!expert_layer || shared)));
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
        replace(w, &at, loom__walk_residual(w, t, at, -1, false));
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
    int y = n->op == AGAIN_LAYER     ? layer(w, inner, x, n->expert_layer)
            : n->op == AGAIN_EXPERTS ? experts(w, inner, x, true)
                                     : loom__walk_attention(w, inner, x);
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
    case EXCHANGE:
        loom__walk_attention_backward(w, t, n, d_y);
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
    case ROUTE:
    case EXPERT_ROWS:
    case DISPATCH:
    case EXPERT_LINEAR:
    case RETURN:
    case COMBINE:
    case GATE:
        loom__walk_routed_backward(w, t, n, d_y);
        break;
    case ADD:
        give(w, t, n->inputs[0], hold(w, d_y));
        give(w, t, n->inputs[1], hold(w, d_y));
        break;
    case AGAIN_ATTENTION:
    case AGAIN_EXPERTS:
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
    int64_t behind = loom__plan_layers_behind_experts(w->sizes, chunk);
    behind = behind < BEHIND_MOST ? behind : BEHIND_MOST;
    int64_t before = dense > behind ? dense - behind : 0;
    for (int64_t i = 0; i < dense + experts; i++)
        replace(w, &x, layer_forward(w, t, x, i >= before && i < before + experts));
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

loom_status loom__plan_walk(const loom__plan_sizes *sizes, const loom_stage *chunk, loom__context_type context,
    int64_t dense, int64_t experts, bool split, loom__plan_ledger *ledger) {
    walk *w = calloc(1, sizeof *w);
    if (!w)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a plan's operations");
    w->sizes = sizes;
    w->context = context;
    walk_chunk(w, chunk, dense, experts, split, ledger);
    bool overflow = w->overflow, failed = w->failed;
    free(w);
    if (failed)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a plan's operations");
    return overflow ? loom_fail(LOOM_ERR_INTERNAL, "a layer has more tensors than a plan walks") : LOOM_OK;
}
