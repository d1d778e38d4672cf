/* Attention of the walk, wherever the rows of the sequence are: on this rank, on ranks that pass keys and values on or
 * gather them, on ranks that exchange heads for rows, or both. An exchange changes the shape of what it moves and not
 * its size, so that a ring behind it has the sizes of one before it. */
#include "plan/walk.h"

typedef struct ways {
    int64_t inner, members; /* ranks that exchange heads, and those of a ring */
    bool gather;
} ways;

static ways ways_of(const walk *w) {
    int64_t inner = loom__plan_heads_exchanged_by(w->sizes, w->context);
    return (ways){inner, w->sizes->cp / inner, w->context == LOOM__CONTEXT_ALL_GATHER};
}

/* Of keys and values as they travel. */
static int64_t packed_bytes(const walk *w) {
    return 2 * head_bytes(w, 1);
}

static int64_t as_f32(const walk *w, int64_t bytes) {
    return bytes / w->sizes->width * 4;
}

static int64_t query_bytes(const walk *w) {
    return 4 * w->sizes->rows * heads(w);
}

static void drop_all(walk *w, const int *tensors, int count) {
    for (int i = 0; i < count; i++)
        drop(w, tensors[i]);
}

static int exchange(walk *w, tape *t, int x) {
    ready(w, x);
    int send = make(w, PASSING, bytes_of(w, x)), receive = make(w, PASSING, bytes_of(w, x));
    int y = make(w, PASSING, bytes_of(w, x));
    drop(w, send);
    drop(w, receive);
    record(w, t, EXCHANGE, x, -1, y, false);
    return y;
}

/* What a ring holds while it computes: the running sums, this rank's piece, and that of others. */
static void ring(walk *w, const ways *by, int *out, int *lse) {
    int64_t packed = packed_bytes(w);
    int own = make(w, PASSING, packed), accumulator = make(w, PASSING, as_f32(w, context_bytes(w)));
    int maximum = make(w, PASSING, query_bytes(w)), total = make(w, PASSING, query_bytes(w));
    drop(w, make(w, PASSING, by->gather ? by->members * packed : packed));
    drop(w, own);
    *out = make(w, KEPT, context_bytes(w));
    *lse = make(w, PASSING, query_bytes(w));
    drop_all(w, (const int[]){accumulator, maximum, total}, 3);
}

static int attend(walk *w, tape *t, const ways *by, int qkv) {
    int out, lse;
    ready(w, qkv);
    if (by->members > 1) {
        ring(w, by, &out, &lse);
    } else {
        out = make(w, KEPT, context_bytes(w));
        lse = make(w, PASSING, query_bytes(w));
    }
    node *n = record(w, t, ATTENTION, qkv, -1, out, false);
    save(w, n, qkv);
    save(w, n, out);
    save(w, n, lse);
    drop(w, lse);
    return out;
}

int loom__walk_attention(walk *w, tape *t, int qkv) {
    ways by = ways_of(w);
    if (by.inner == 1)
        return attend(w, t, &by, qkv);
    int part = exchange(w, t, qkv), context = attend(w, t, &by, part);
    drop(w, part);
    int out = exchange(w, t, context);
    drop(w, context);
    return out;
}

/* Gradients are summed in fp32; in 16 bits a block's own are made beside them. */
static void ring_backward(walk *w, tape *t, node *n, const ways *by) {
    int64_t fused = bytes_of(w, n->saved[0]), packed = packed_bytes(w), chunks = 2 * by->inner;
    bool narrow = w->sizes->width < 4;
    int delta = make(w, PASSING, query_bytes(w)), d_fused = make(w, PASSING, as_f32(w, fused)), scratch[4], d_own;
    for (int i = 0; i < 4; i++) {
        int64_t block = (i < 2 ? fused : packed) / chunks;
        scratch[i] = narrow ? make(w, PASSING, i % 2 ? as_f32(w, block) : block) : -1;
    }
    int own = make(w, PASSING, packed);
    if (by->gather) {
        int all = make(w, PASSING, by->members * packed), d_all = make(w, PASSING, as_f32(w, by->members * packed));
        drop(w, all);
        d_own = make(w, PASSING, as_f32(w, packed));
        drop(w, d_all);
    } else {
        int next = make(w, PASSING, packed), d_now = make(w, PASSING, as_f32(w, packed));
        int d_sent = make(w, PASSING, as_f32(w, packed));
        d_own = make(w, PASSING, as_f32(w, packed));
        drop_all(w, (const int[]){next, d_now, d_sent}, 3);
    }
    give(w, t, n->inputs[0], make(w, PASSING, fused));
    drop_all(w, (const int[]){own, d_own, delta, d_fused}, 4);
    drop_all(w, scratch, 4);
}

void loom__walk_attention_backward(walk *w, tape *t, node *n, int d_y) {
    ways by = ways_of(w);
    if (n->op == EXCHANGE) {
        int send = make(w, PASSING, bytes_of(w, d_y)), receive = make(w, PASSING, bytes_of(w, d_y));
        int d_x = make(w, PASSING, bytes_of(w, d_y));
        drop(w, send);
        drop(w, receive);
        give(w, t, n->inputs[0], d_x);
    } else if (by.members > 1) {
        ring_backward(w, t, n, &by);
    } else {
        int delta = make(w, PASSING, bytes_of(w, n->saved[2]));
        give(w, t, n->inputs[0], make(w, PASSING, bytes_of(w, n->saved[0])));
        drop(w, delta);
    }
}
