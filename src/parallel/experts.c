/* Rows on their way to the experts and back. The way there: the rows of each destination lie together already, since
 * they are in the order of their experts; an all-to-all over ep takes them to the ranks that have the experts (or a
 * gather takes all to all, as moe_token_dispatcher_type says), a gather over etp to all ranks that have a slice of
 * them, and there they are put in the order of the experts. The way back is the reverse, with a sum over etp in place
 * of the gather. Every count follows from the table of all ranks' counts, which the router has gathered: no rank waits
 * for a number, and a rank or an expert without rows does what the others do.
 *
 * The all-to-all is started by one operation's half and waited for by the next one's, forward and backward: its rows
 * travel under whatever is recorded between the two. */
#include "parallel/experts.h"
#include "parallel/common.h"
#include "parallel/expert_rows.h"
#include <stdlib.h>
#include <string.h>

static int place_in(const loom_comm *group) {
    return group ? loom_comm_rank(group) : 0;
}

/* ---- counts ---- */

/* Rows of source q for the experts of ep rank p. */
static int64_t rows_between(const loom__routed *r, int64_t q, int64_t p) {
    int64_t rows = 0;
    for (int64_t e = 0; e < r->local_experts; e++)
        rows += r->source_counts[q * r->experts + p * r->local_experts + e];
    return rows;
}

static int64_t source(const loom__routed *r, int64_t ep, int64_t etp) {
    return ep * loom__group_size(r->groups.etp) + etp;
}

/* Rows that etp member t of this ep rank has received. */
static int64_t received_by(const loom__routed *r, int64_t t) {
    int64_t rows = 0;
    for (int64_t p = 0; p < loom__group_size(r->groups.ep); p++)
        rows += rows_between(r, source(r, p, t), place_in(r->groups.ep));
    return rows;
}

/* Rows of ep source p, with this rank's place in etp. */
static int64_t rows_of_source(const loom__routed *r, int64_t p) {
    int64_t rows = 0;
    for (int64_t q = 0; q < loom__group_size(r->groups.ep); q++)
        rows += rows_between(r, source(r, p, place_in(r->groups.etp)), q);
    return rows;
}

/* ---- the order of rows at the experts ---- */

static loom_status create_rows(loom_tape *tape, loom_dtype dtype, int64_t rows, int64_t h, loom_tensor **tensor) {
    return loom_tensor_create(loom_tape_rank(tape), dtype, 2, (int64_t[]){rows, h}, tensor);
}

/* Rows come in arrival order (etp member, ep source, expert, token); expert order is (expert, etp member, ep source,
 * token). Of one expert or one source they are the same. */
static bool arrive_in_order(const loom__routed *r) {
    return r->local_experts == 1 || r->sources == 1;
}

typedef struct ordering {
    const loom__routed *routed;
    size_t bytes; /* of a row */
    char *arrived, *ordered;
    bool to_experts; /* else back */
} ordering;

static void order_expert(void *argument, int64_t expert, int worker) {
    const ordering *o = argument;
    const loom__routed *r = o->routed;
    int64_t ep = loom__group_size(r->groups.ep), etp = loom__group_size(r->groups.etp), from = 0, at = 0;
    (void)worker;
    for (int64_t e = 0; e < expert; e++)
        at += r->local_counts[e];
    for (int64_t t = 0; t < etp; t++)
        for (int64_t p = 0; p < ep; p++) {
            const int64_t *counts = r->source_counts + source(r, p, t) * r->experts + r->first_expert;
            for (int64_t before = 0; before < expert; before++)
                from += counts[before];
            char *here = o->arrived + (size_t)from * o->bytes, *there = o->ordered + (size_t)at * o->bytes;
            memcpy(o->to_experts ? there : here, o->to_experts ? here : there, (size_t)counts[expert] * o->bytes);
            at += counts[expert];
            for (int64_t rest = expert; rest < r->local_experts; rest++)
                from += counts[rest];
        }
}

/* *out: the rows in the other order, which may be the same tensor. */
static loom_status order_rows(
    loom_tape *tape, const loom__routed *r, loom_tensor *rows, bool to_experts, loom_tensor **out) {
    if (arrive_in_order(r)) {
        *out = loom_tensor_retain(rows);
        return LOOM_OK;
    }
    loom_tensor *made;
    LOOM_TRY(create_rows(tape, rows->dtype, r->expert_rows, rows->shape[1], &made));
    ordering o = {r, (size_t)rows->shape[1] * loom_dtype_size(rows->dtype), to_experts ? rows->data : made->data,
        to_experts ? made->data : rows->data, to_experts};
    loom_team_run(TEAM(tape), order_expert, &o, r->local_experts);
    *out = made;
    return LOOM_OK;
}

/* ---- sizes of what travels ---- */

typedef struct ways {
    int64_t *send, *receive; /* elements to and from each ep rank */
    int64_t *sources;        /* elements of each ep rank, wherever they go */
    int64_t *parts;          /* elements of each etp member */
} ways;

static void free_ways(ways *w) {
    free(w->send);
}

static loom_status make_ways(const loom__routed *r, int64_t h, ways *w) {
    int64_t ep = loom__group_size(r->groups.ep), etp = loom__group_size(r->groups.etp), me = place_in(r->groups.ep);
    int64_t mine = place_in(r->groups.etp), *counts = malloc((size_t)(3 * ep + etp) * sizeof *counts);
    if (!counts)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the ways of rows to their experts");
    *w = (ways){counts, counts + ep, counts + 2 * ep, counts + 3 * ep};
    for (int64_t p = 0; p < ep; p++) {
        w->send[p] = rows_between(r, source(r, me, mine), p) * h;
        w->receive[p] = rows_between(r, source(r, p, mine), me) * h;
        w->sources[p] = rows_of_source(r, p) * h;
    }
    for (int64_t t = 0; t < etp; t++)
        w->parts[t] = received_by(r, t) * h;
    return LOOM_OK;
}

/* ---- over ep: what an all-to-all does, or a gather of all rows, of which each rank takes its own ---- */

/* Between all sources' rows and those for this rank's experts, which lie together in each source's. */
static void copy_own(const loom__routed *r, size_t bytes, char *all, char *own, bool take) {
    const int64_t me = place_in(r->groups.ep), mine = place_in(r->groups.etp);
    for (int64_t p = 0; p < loom__group_size(r->groups.ep); p++) {
        int64_t before = 0, count = rows_between(r, source(r, p, mine), me);
        for (int64_t q = 0; q < me; q++)
            before += rows_between(r, source(r, p, mine), q);
        char *there = all + (size_t)before * bytes;
        memcpy(take ? own : there, take ? there : own, (size_t)count * bytes);
        own += (size_t)count * bytes;
        all += (size_t)rows_of_source(r, p) * bytes;
    }
}

/* *all [rows of all sources, h]. */
static loom_status create_gathered(
    loom_tape *tape, const loom__routed *r, loom_dtype dtype, int64_t h, const ways *w, loom_tensor **all) {
    int64_t rows = 0;
    for (int64_t p = 0; p < loom__group_size(r->groups.ep); p++)
        rows += w->sources[p] / h;
    return create_rows(tape, dtype, rows, h, all);
}

static loom_status take_of_gathered(
    loom_tape *tape, const loom__routed *r, const ways *w, loom_tensor *rows, loom_tensor *received) {
    const int64_t h = rows->shape[1];
    loom_tensor *all;
    LOOM_TRY(create_gathered(tape, r, rows->dtype, h, w, &all));
    loom_status status = loom_all_gather_v(r->groups.ep, rows->data, all->data, w->sources, rows->dtype);
    if (!status)
        copy_own(r, (size_t)h * loom_dtype_size(rows->dtype), all->data, received->data, true);
    loom_tensor_release(all);
    return status;
}

/* Back: each row has one rank that computed it, and zeros from the others. */
static loom_status scatter_back(
    loom_tape *tape, const loom__routed *r, const ways *w, loom_tensor *rows, loom_tensor *back) {
    const int64_t h = rows->shape[1];
    const size_t bytes = (size_t)h * loom_dtype_size(rows->dtype);
    loom_tensor *all;
    LOOM_TRY(create_gathered(tape, r, rows->dtype, h, w, &all));
    memset(all->data, 0, (size_t)all->shape[0] * bytes);
    copy_own(r, bytes, all->data, rows->data, false);
    loom_status status = loom_reduce_scatter_v(r->groups.ep, all->data, back->data, w->sources, rows->dtype, LOOM_SUM);
    loom_tensor_release(all);
    return status;
}

static loom_status start_exchange(
    loom_tape *tape, const loom__routed *r, const ways *w, bool to_experts, loom_tensor *rows, loom_tensor *moved) {
    if (r->groups.gather)
        return to_experts ? take_of_gathered(tape, r, w, rows, moved) : scatter_back(tape, r, w, rows, moved);
    const int64_t *send = to_experts ? w->send : w->receive, *receive = to_experts ? w->receive : w->send;
    LOOM_TRY(
        loom_all_to_all_v_start(r->groups.ep, rows->data, send, moved->data, receive, rows->dtype, &moved->pending));
    moved->source = loom_tensor_retain(rows);
    return LOOM_OK;
}

/* On the tape what has come stands for what was sent: whoever takes it gives the gradient of that, which it gets by the
 * reverse exchange. */
loom_status loom__expert_exchange_start(
    loom_tape *tape, const loom__routed *r, bool to_experts, loom_tensor *rows, loom_tensor **moved) {
    if (loom__group_size(r->groups.ep) == 1) {
        *moved = loom_tensor_retain(rows);
        return LOOM_OK;
    }
    const int64_t h = rows->shape[1], count = to_experts ? received_by(r, place_in(r->groups.etp)) : r->rows;
    loom_tensor *made = NULL;
    ways w;
    LOOM_TRY(loom_tensor_ready(rows));
    LOOM_TRY(make_ways(r, h, &w));
    loom_status status = create_rows(tape, rows->dtype, count, h, &made);
    if (!status)
        status = start_exchange(tape, r, &w, to_experts, rows, made);
    free_ways(&w);
    if (status) {
        loom_tensor_release(made);
        return status;
    }
    made->tape = rows->tape;
    made->value = rows->value;
    *moved = made;
    return LOOM_OK;
}

/* ---- before and behind it: over etp, and the order of the experts ---- */

/* What has come over ep -> [expert_rows, h]. */
static loom_status gather_slices(loom_tape *tape, const loom__routed *r, loom_tensor *received, loom_tensor **out) {
    const int64_t h = received->shape[1];
    loom_tensor *all = NULL;
    LOOM_TRY(loom_tensor_ready(received));
    if (loom__group_size(r->groups.etp) == 1)
        return order_rows(tape, r, received, true, out);
    ways w;
    LOOM_TRY(make_ways(r, h, &w));
    loom_status status = create_rows(tape, received->dtype, r->expert_rows, h, &all);
    if (!status)
        status = loom_all_gather_v(r->groups.etp, received->data, all->data, w.parts, received->dtype);
    free_ways(&w);
    if (!status)
        status = order_rows(tape, r, all, true, out);
    loom_tensor_release(all);
    return status;
}

/* rows [expert_rows, h] -> their sum over etp, as it goes back over ep. */
static loom_status sum_slices(loom_tape *tape, const loom__routed *r, loom_tensor *rows, loom_tensor **out) {
    const int64_t h = rows->shape[1];
    loom_tensor *all = NULL, *sum = NULL;
    LOOM_TRY(order_rows(tape, r, rows, false, &all));
    if (loom__group_size(r->groups.etp) == 1) {
        *out = all;
        return LOOM_OK;
    }
    ways w = {0};
    loom_status status = make_ways(r, h, &w);
    if (!status)
        status = create_rows(tape, rows->dtype, received_by(r, place_in(r->groups.etp)), h, &sum);
    if (!status)
        status = loom_reduce_scatter_v(r->groups.etp, all->data, sum->data, w.parts, rows->dtype, LOOM_SUM);
    free_ways(&w);
    loom_tensor_release(all);
    if (status) {
        loom_tensor_release(sum);
        return status;
    }
    *out = sum;
    return LOOM_OK;
}

/* ---- the operations ---- */

typedef struct expert_state {
    loom__routed *routed;
    int64_t s, b;
} expert_state;

static void release_state(loom_node *node) {
    loom__routed_release(((expert_state *)loom_node_state(node))->routed);
}

/* node may be NULL: nothing is recorded. */
static void set_state(loom_node *node, loom__routed *routed, int64_t s, int64_t b) {
    if (!node)
        return;
    *(expert_state *)loom_node_state(node) = (expert_state){routed, s, b};
    routed->references++;
}

static loom_status rows_input(loom_tape *tape, loom_node *node, loom_tensor *d_rows) {
    const expert_state *state = loom_node_state(node);
    loom_tensor *d_x = NULL;
    loom_status status = loom_tensor_create(
        loom_tape_rank(tape), d_rows->dtype, 3, (int64_t[]){state->s, state->b, d_rows->shape[1]}, &d_x);
    if (!status)
        status = loom__sum_rows(tape, state->routed, d_rows, NULL, d_x);
    if (status) {
        loom_tensor_release(d_x);
        return status;
    }
    return loom_tape_give(tape, node, 0, d_x);
}

static const loom_op rows_op = {"expert rows", rows_input, NULL, release_state};

loom_status loom__expert_rows(loom_tape *tape, loom_tensor *x, loom__routed *routed, loom_tensor **rows) {
    LOOM_TRY(loom__check_dtype(tape, rows_op.name, x));
    LOOM_TRY(loom_tensor_ready(x));
    loom_tensor *made = NULL;
    loom_node *node = NULL;
    LOOM_TRY(create_rows(tape, x->dtype, routed->rows, x->shape[2], &made));
    loom__copy_rows(tape, routed, x, made);
    loom_status status =
        loom_tape_record(tape, &rows_op, sizeof(expert_state), (loom_tensor *[]){x}, 1, NULL, 0, made, &node);
    if (status) {
        loom_tensor_release(made);
        return status;
    }
    set_state(node, routed, x->shape[0], x->shape[1]);
    *rows = made;
    return LOOM_OK;
}

/* The way back of the gradient: what rows_input waits for. */
static loom_status dispatch_input(loom_tape *tape, loom_node *node, loom_tensor *d_rows) {
    const expert_state *state = loom_node_state(node);
    loom_tensor *sum = NULL, *back = NULL;
    LOOM_TRY(sum_slices(tape, state->routed, d_rows, &sum));
    loom_status status = loom__expert_exchange_start(tape, state->routed, false, sum, &back);
    loom_tensor_release(sum);
    return status ? status : loom_tape_give(tape, node, 0, back);
}

static const loom_op dispatch_op = {"expert dispatch", dispatch_input, NULL, release_state};

loom_status loom__expert_dispatch(loom_tape *tape, loom_tensor *moved, loom__routed *routed, loom_tensor **output) {
    loom_tensor *out = NULL;
    loom_node *node = NULL;
    LOOM_TRY(gather_slices(tape, routed, moved, &out));
    loom_status status =
        loom_tape_record(tape, &dispatch_op, sizeof(expert_state), (loom_tensor *[]){moved}, 1, NULL, 0, out, &node);
    if (status) {
        loom_tensor_release(out);
        return status;
    }
    set_state(node, routed, 0, 0);
    *output = out;
    return LOOM_OK;
}

static loom_status return_input(loom_tape *tape, loom_node *node, loom_tensor *d_sum) {
    const expert_state *state = loom_node_state(node);
    loom_tensor *d_rows = NULL;
    LOOM_TRY(gather_slices(tape, state->routed, d_sum, &d_rows));
    return loom_tape_give(tape, node, 0, d_rows);
}

static const loom_op return_op = {"expert return", return_input, NULL, release_state};

loom_status loom__expert_return(loom_tape *tape, loom_tensor *rows, loom__routed *routed, loom_tensor **output) {
    LOOM_TRY(loom__check_dtype(tape, return_op.name, rows));
    LOOM_TRY(loom_tensor_ready(rows));
    loom_tensor *sum = NULL;
    loom_node *node = NULL;
    LOOM_TRY(sum_slices(tape, routed, rows, &sum));
    loom_status status =
        loom_tape_record(tape, &return_op, sizeof(expert_state), (loom_tensor *[]){rows}, 1, NULL, 0, sum, &node);
    if (status) {
        loom_tensor_release(sum);
        return status;
    }
    set_state(node, routed, 0, 0);
    *output = sum;
    return LOOM_OK;
}

/* The rows' gradient goes to the experts, where return_input waits for it. */
static loom_status combine_input(loom_tape *tape, loom_node *node, loom_tensor *d_out) {
    const expert_state *state = loom_node_state(node);
    const loom__routed *r = state->routed;
    loom_tensor *rows = loom_node_saved(node, 0), *probs = loom_node_saved(node, 1);
    loom_tensor *d_probs = NULL, *d_mine = NULL, *d_sum = NULL;
    loom_status status = create_rows(tape, LOOM_F32, r->tokens, r->experts, &d_probs);
    if (!status)
        status = create_rows(tape, rows->dtype, r->rows, rows->shape[1], &d_mine);
    if (!status)
        status = loom__sum_rows_backward(tape, r, rows, probs, d_out, d_probs, d_mine);
    if (!status)
        status = loom__expert_exchange_start(tape, r, true, d_mine, &d_sum);
    loom_tensor_release(d_mine);
    if (!status)
        status = loom_tape_give(tape, node, 0, d_sum);
    if (status) {
        loom_tensor_release(d_probs);
        return status;
    }
    return loom_tape_give(tape, node, 1, d_probs);
}

static const loom_op combine_op = {"expert combination", combine_input, NULL, release_state};

loom_status loom__expert_combine(loom_tape *tape, loom_tensor *moved, loom_tensor *probs, loom__routed *routed,
    int64_t s, int64_t b, loom_tensor **output) {
    loom_tensor *out = NULL;
    loom_node *node = NULL;
    LOOM_TRY(loom_tensor_ready(moved));
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), moved->dtype, 3, (int64_t[]){s, b, moved->shape[1]}, &out));
    loom_status status = loom__sum_rows(tape, routed, moved, probs, out);
    if (!status)
        status = loom_tape_record(
            tape, &combine_op, sizeof(expert_state), (loom_tensor *[]){moved, probs}, 2, NULL, 0, out, &node);
    if (status) {
        loom_tensor_release(out);
        return status;
    }
    set_state(node, routed, s, b);
    if (node)
        status = loom_node_save(node, moved);
    if (node && !status)
        status = loom_node_save(node, probs);
    if (status) {
        loom_tensor_release(out);
        return status;
    }
    *output = out;
    return LOOM_OK;
}
