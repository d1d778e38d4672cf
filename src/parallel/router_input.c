/* What may be done to the rows around a router: noise on what it reads, logits drawn instead of computed, and a token's
 * weight put on its row before the expert. All is local to a token. The invariant: random numbers are keyed by layer,
 * sample, position and channel, so that no layout changes one, and a recomputation draws the same. */
#include "base/random.h"
#include "parallel/common.h"
#include "parallel/experts.h"
#include <stdlib.h>
#include <string.h>

/* Sites beside those of dropout (LOOM_DROPOUT_…), whose draws they must not share. */
enum { SITE_JITTER = 16, SITE_LOGITS = 17 };

/* Tokens of one item of a team's work, fixed so that the cut does not hang on the threads. */
enum { ITEM_TOKENS = 16 };

static int64_t position_of(const loom_positions *rows, int64_t row) {
    return row < rows->turn ? rows->first + row : rows->second + row - rows->turn;
}

/* ---- noise on the input ---- */

typedef struct jitter_state {
    double eps;
    loom__router_noise noise; /* its samples stand behind this struct */
    int64_t sample[];
} jitter_state;

typedef struct jitter_work {
    const jitter_state *state;
    const loom_tensor *from;
    loom_tensor *to;
} jitter_work;

static void jitter_item(void *argument, int64_t item, int worker) {
    const jitter_work *work = argument;
    const loom__router_noise *noise = &work->state->noise;
    const int64_t b = work->from->shape[1], h = work->from->shape[2], tokens = work->from->shape[0] * b;
    (void)worker;
    for (int64_t t = item * ITEM_TOKENS; t < (item + 1) * ITEM_TOKENS && t < tokens; t++) {
        const loom__dropout_row row = loom__dropout_row_make(noise->seed, (uint32_t)noise->layer, SITE_JITTER,
            work->state->sample[t % b], position_of(&noise->positions, t / b), 0);
        const void *from = loom__element(work->from, t * h);
        void *to = loom__element(work->to, t * h);
        for (int64_t c = 0; c < h; c += 4) {
            const loom__philox words = loom__dropout_words(&row, (uint32_t)(c / 4));
            for (int64_t k = c; k < c + 4 && k < h; k++) {
                double factor = 1 + work->state->eps * (((double)words.word[k - c] + 0.5) * 0x1p-31 - 1);
                loom__row_put(work->to->dtype, to, k, (float)factor * loom__row_get(work->from->dtype, from, k));
            }
        }
    }
}

static loom_status multiplied(loom_tape *tape, const jitter_state *state, const loom_tensor *from, loom_tensor **out) {
    loom_tensor *to;
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), from->dtype, 3, from->shape, &to));
    jitter_work work = {state, from, to};
    loom_team_run(TEAM(tape), jitter_item, &work, (from->shape[0] * from->shape[1] + ITEM_TOKENS - 1) / ITEM_TOKENS);
    *out = to;
    return LOOM_OK;
}

static loom_status jitter_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    loom_tensor *d_x;
    LOOM_TRY(multiplied(tape, loom_node_state(node), d_y, &d_x));
    return loom_tape_give(tape, node, 0, d_x);
}

static const loom_op jitter_op = {"router jitter", jitter_input, NULL, NULL};

static size_t jitter_bytes(int64_t b) {
    return sizeof(jitter_state) + (size_t)b * sizeof(int64_t);
}

static loom_status record_jitter(loom_tape *tape, loom_tensor *x, const jitter_state *state, loom_tensor *y) {
    loom_node *node = NULL;
    const size_t bytes = jitter_bytes(x->shape[1]);
    LOOM_TRY(loom_tape_record(tape, &jitter_op, bytes, (loom_tensor *[]){x}, 1, NULL, 0, y, &node));
    if (node)
        memcpy(loom_node_state(node), state, bytes);
    return LOOM_OK;
}

loom_status loom__router_jitter(
    loom_tape *tape, loom_tensor *x, double eps, const loom__router_noise *noise, loom_tensor **output) {
    LOOM_TRY(loom__check_dtype(tape, jitter_op.name, x));
    LOOM_TRY(loom_tensor_ready(x));
    const int64_t b = x->shape[1];
    loom_tensor *y = NULL;
    jitter_state *state = calloc(1, jitter_bytes(b));
    if (!state)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the samples of a microbatch");
    *state = (jitter_state){.eps = eps, .noise = *noise};
    for (int64_t j = 0; j < b; j++)
        state->sample[j] = noise->sample ? noise->sample[j] : j;
    loom_status status = multiplied(tape, state, x, &y);
    if (!status)
        status = record_jitter(tape, x, state, y);
    free(state);
    if (status) {
        loom_tensor_release(y);
        return status;
    }
    *output = y;
    return LOOM_OK;
}

/* ---- logits ---- */

/* One token's at a time, in fp32 whatever the logits are. */
loom_status loom__random_logits(const loom__router_noise *noise, int64_t b, loom_tensor *logits) {
    const int64_t tokens = logits->shape[0], experts = logits->shape[1];
    float *drawn = malloc((size_t)experts * sizeof *drawn);
    if (!drawn)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the logits of %lld experts", (long long)experts);
    for (int64_t t = 0; t < tokens; t++) {
        const int64_t key[] = {noise->layer, SITE_LOGITS, noise->sample ? noise->sample[t % b] : t % b};
        loom__normal_fill(noise->seed, loom__hash_bytes(LOOM__HASH_BEGIN, key, sizeof key),
            (noise->each ? noise->each[t] : position_of(&noise->positions, t / b)) * experts, experts, 0, 1, drawn);
        for (int64_t e = 0; e < experts; e++) {
            if (logits->dtype == LOOM_F64)
                ((double *)logits->data)[t * experts + e] = (double)drawn[e];
            else
                ((float *)logits->data)[t * experts + e] = drawn[e];
        }
    }
    free(drawn);
    return LOOM_OK;
}

/* ---- weights before the expert ---- */

typedef struct weigh_state {
    loom__routed *routed;
} weigh_state;

static bool goes(const loom__routed *r, int64_t at) {
    return r->routing.chosen[at] && r->routing.map[at];
}

/* Of the one expert that it goes to. */
static float weight_of(const loom__routed *r, const loom_tensor *probs, int64_t token) {
    float weight = 0;
    for (int64_t at = token * r->experts; at < (token + 1) * r->experts; at++)
        weight += goes(r, at) ? loom_tensor_f32(probs)[at] : 0;
    return weight;
}

static void weigh_rows(const loom__routed *r, const loom_tensor *probs, const loom_tensor *from, loom_tensor *to) {
    const int64_t h = from->shape[2];
    for (int64_t t = 0; t < r->tokens; t++) {
        const float weight = weight_of(r, probs, t);
        for (int64_t c = 0; c < h; c++)
            loom__row_put(to->dtype, loom__element(to, t * h), c,
                weight * loom__row_get(from->dtype, loom__element(from, t * h), c));
    }
}

static loom_status weigh_input(loom_tape *tape, loom_node *node, loom_tensor *d_y) {
    const loom__routed *r = ((const weigh_state *)loom_node_state(node))->routed;
    const loom_tensor *x = loom_node_saved(node, 0), *probs = loom_node_saved(node, 1);
    const int64_t h = x->shape[2];
    loom_tensor *d_x = NULL, *d_probs = NULL;
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), x->dtype, 3, x->shape, &d_x));
    weigh_rows(r, probs, d_y, d_x);
    LOOM_TRY(loom_tape_give(tape, node, 0, d_x));
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 2, probs->shape, &d_probs));
    for (int64_t t = 0; t < r->tokens; t++) {
        double dot = 0;
        for (int64_t c = 0; c < h; c++)
            dot += (double)loom__row_get(x->dtype, loom__element(x, t * h), c) *
                   (double)loom__row_get(d_y->dtype, loom__element(d_y, t * h), c);
        for (int64_t at = t * r->experts; at < (t + 1) * r->experts; at++)
            loom_tensor_f32(d_probs)[at] = goes(r, at) ? (float)dot : 0;
    }
    return loom_tape_give(tape, node, 1, d_probs);
}

static void weigh_release(loom_node *node) {
    loom__routed_release(((weigh_state *)loom_node_state(node))->routed);
}

static const loom_op weigh_op = {"token weights", weigh_input, NULL, weigh_release};

static loom_status record_weights(
    loom_tape *tape, loom_tensor *x, loom_tensor *probs, loom__routed *routed, loom_tensor *y) {
    loom_node *node = NULL;
    LOOM_TRY(loom_tape_record(tape, &weigh_op, sizeof(weigh_state), (loom_tensor *[]){x, probs}, 2, NULL, 0, y, &node));
    if (!node)
        return LOOM_OK;
    ((weigh_state *)loom_node_state(node))->routed = routed;
    routed->references++;
    LOOM_TRY(loom_node_save(node, x));
    return loom_node_save(node, probs);
}

loom_status loom__weigh_tokens(loom_tape *tape, loom_tensor *x, loom_tensor *probs, loom__routed *routed,
    loom_tensor **output, loom_tensor **units) {
    LOOM_TRY(loom__check_dtype(tape, weigh_op.name, x));
    LOOM_TRY(loom_tensor_ready(x));
    loom_tensor *y = NULL, *ones = NULL;
    loom_status status = loom_tensor_create(loom_tape_rank(tape), x->dtype, 3, x->shape, &y);
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 2, probs->shape, &ones);
    for (int64_t at = 0; !status && at < routed->tokens * routed->experts; at++)
        loom_tensor_f32(ones)[at] = goes(routed, at) ? 1 : 0;
    if (!status) {
        weigh_rows(routed, probs, x, y);
        status = record_weights(tape, x, probs, routed, y);
    }
    if (status) {
        loom_tensor_release(y);
        loom_tensor_release(ones);
        return status;
    }
    *output = y;
    *units = ones;
    return LOOM_OK;
}
