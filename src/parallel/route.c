/* The router as an operation. Its logits are in fp32 or double whatever the activations are; its own losses have no
 * value in the model's loss: they add to the gradient of the logits, where the backward comes by. */
#include "moe/permutation.h"
#include "parallel/common.h"
#include "parallel/experts.h"
#include "parallel/logits.h"
#include <stdlib.h>
#include <string.h>

void loom__routed_release(loom__routed *routed) {
    if (!routed || --routed->references > 0)
        return;
    free(routed->routing.probs);
    free(routed->routing.chosen);
    free(routed->routing.map);
    free(routed->routing.probs64);
    loom_comm_free(routed->groups.all, routed->counts);
    free(routed->token);
    loom_comm_free(routed->groups.all, routed->source_counts);
    free(routed->local_counts);
    free(routed);
}

static loom_status out_of_memory(int64_t tokens, int64_t experts) {
    return loom_fail(LOOM_ERR_MEMORY, "out of memory for routing %lld tokens to %lld experts", (long long)tokens,
        (long long)experts);
}

static loom_status create_routed(int64_t tokens, const loom__router_options *options, loom__routed **out) {
    const int64_t experts = options->router.experts, sources = loom__group_size(options->groups.all);
    const int64_t ep = loom__group_size(options->groups.ep);
    const int64_t place = options->groups.ep ? loom_comm_rank(options->groups.ep) : 0;
    size_t cells = (size_t)(tokens * experts) + 1, columns = (size_t)experts;
    loom__routed *r = calloc(1, sizeof *r);
    if (!r)
        return out_of_memory(tokens, experts);
    *r = (loom__routed){.references = 1,
        .tokens = tokens,
        .experts = experts,
        .groups = options->groups,
        .routing = {.probs = malloc(cells * sizeof(float)),
            .chosen = malloc(cells),
            .map = malloc(cells),
            .probs64 = options->in_double ? malloc(cells * sizeof(double)) : NULL},
        .counts = calloc(columns, sizeof(int64_t)),
        .first_expert = experts / ep * place,
        .local_experts = experts / ep,
        .sources = sources,
        .source_counts = calloc(columns * (size_t)sources, sizeof(int64_t)),
        .local_counts = calloc(columns, sizeof(int64_t))};
    *out = r;
    return r->routing.probs && r->routing.chosen && r->routing.map && (r->routing.probs64 || !options->in_double) &&
                   r->counts && r->source_counts && r->local_counts
               ? LOOM_OK
               : out_of_memory(tokens, experts);
}

/* Which rows there are here, and how many come from where. */
static loom_status plan_rows(loom__routed *r) {
    r->rows = loom__permutation(r->tokens, r->experts, r->routing.map, 0, r->counts, NULL);
    r->token = malloc((size_t)(r->rows + 1) * sizeof *r->token);
    if (!r->token)
        return out_of_memory(r->tokens, r->experts);
    loom__permutation(r->tokens, r->experts, r->routing.map, 0, r->counts, r->token);
    if (r->sources > 1)
        LOOM_TRY(loom_all_gather(r->groups.all, r->counts, r->source_counts, r->experts, LOOM_I64));
    else
        memcpy(r->source_counts, r->counts, (size_t)r->experts * sizeof *r->counts);
    for (int64_t e = 0; e < r->local_experts; e++) {
        for (int64_t q = 0; q < r->sources; q++)
            r->local_counts[e] += r->source_counts[q * r->experts + r->first_expert + e];
        r->expert_rows += r->local_counts[e];
    }
    return LOOM_OK;
}

/* ---- the operation ---- */

typedef struct route_state {
    loom_parameter *weight, *bias; /* bias: or NULL */
    loom__router router;
    loom__routed *routed;
    struct balance_loss {
        loom__balance of;
        double *weights; /* NULL: no such loss */
        const loom_comm *group;
    } balance[LOOM__BALANCES];
    double z_coefficient, scale;
    loom_tensor *d_logits;
} route_state;

static loom_status logits_gradient(
    loom_tape *tape, const loom_node *node, const route_state *state, loom_tensor *d_probs, loom_tensor **out) {
    const loom_tensor *logits = loom_node_saved(node, 1);
    const loom__routed *r = state->routed;
    loom_tensor *made;
    double loss;
    LOOM_TRY(loom_tensor_create(loom_tape_rank(tape), logits->dtype, 2, logits->shape, &made));
    memset(made->data, 0, (size_t)loom_tensor_count(made) * loom_dtype_size(made->dtype));
    loom_status status =
        loom__logits_route_backward(logits, &state->router, &r->routing, loom_tensor_f32(d_probs), made);
    for (const struct balance_loss *b = state->balance; b < state->balance + LOOM__BALANCES && !status; b++)
        if (b->weights)
            status = loom__logits_balance_loss(logits, &b->of, b->weights, state->scale, &loss, made);
    if (!status && state->z_coefficient > 0)
        loom__logits_z_loss(logits, state->z_coefficient, state->scale, &loss, made);
    if (status) {
        loom_tensor_release(made);
        return status;
    }
    *out = made;
    return LOOM_OK;
}

static loom_status route_input(loom_tape *tape, loom_node *node, loom_tensor *d_probs) {
    route_state *state = loom_node_state(node);
    const loom_tensor *x = loom_node_saved(node, 0);
    loom_tensor *d_logits = NULL, *narrow = NULL, *d_x = NULL;
    LOOM_TRY(logits_gradient(tape, node, state, d_probs, &d_logits));
    loom_status status = loom__logits_for_products(tape, d_logits, x->dtype, &narrow);
    loom_tensor_release(d_logits);
    if (!status)
        status = loom_tensor_create(loom_tape_rank(tape), x->dtype, 3, x->shape, &d_x);
    if (!status)
        status = loom__logits_to_input(tape, narrow, state->weight, d_x);
    if (status)
        loom_tensor_release(d_x);
    else
        status = loom_tape_give(tape, node, 0, d_x);
    if (!status && loom_node_parameter(node, 0))
        state->d_logits = loom_tensor_retain(narrow);
    loom_tensor_release(narrow);
    return status;
}

static loom_status route_weight(loom_tape *tape, loom_node *node, loom_tensor *d_probs) {
    route_state *state = loom_node_state(node);
    loom_tensor *x = loom_node_saved(node, 0), *d_logits = NULL;
    if (!state->d_logits) {
        LOOM_TRY(logits_gradient(tape, node, state, d_probs, &d_logits));
        loom_status status = loom__logits_for_products(tape, d_logits, x->dtype, &state->d_logits);
        loom_tensor_release(d_logits);
        LOOM_TRY(status);
    }
    bool accumulate;
    float *grad = loom_parameter_begin_grad(state->weight, &accumulate);
    if (grad)
        loom__logits_to_weight(tape, state->d_logits, x, accumulate, grad);
    grad = state->bias ? loom_parameter_begin_grad(state->bias, &accumulate) : NULL;
    if (grad)
        loom__logits_to_bias(tape, state->d_logits, accumulate, grad);
    loom_tensor_release(state->d_logits);
    state->d_logits = NULL;
    return LOOM_OK;
}

static void free_state(route_state *state) {
    loom__routed_release(state->routed);
    loom_tensor_release(state->d_logits);
    for (const struct balance_loss *b = state->balance; b < state->balance + LOOM__BALANCES; b++)
        loom_comm_free(b->group, b->weights);
}

static void route_release(loom_node *node) {
    free_state(loom_node_state(node));
}

static const loom_op route_op = {"router", route_input, route_weight, route_release};

/* The mean over the calls of a step so far of what the group counted in each. */
static void average_calls(loom__router_memory *memory, double *counts) {
    memory->calls++;
    for (int64_t e = 0; e < memory->experts; e++) {
        memory->load[e] += counts[e];
        counts[e] = memory->load[e] / (double)memory->calls;
    }
}

/* What each expert's score costs, from the load over all ranks of the group. */
static loom_status balance(const loom__router_options *options, const loom_tensor *x, const loom_tensor *logits,
    route_state *state, loom__balance_kind kind) {
    struct balance_loss *loss = &state->balance[kind];
    double coefficient = options->balance_coefficient[kind];
    bool per_sequence = kind == LOOM__BALANCE_SEQUENCE, global = kind == LOOM__BALANCE_GLOBAL;
    loom_comm *group = global ? options->step_group : options->balance_group;
    int64_t b = x->shape[1], sequences = per_sequence ? b : 1, size = loom__group_size(group);
    int64_t count = sequences * options->router.experts;
    loss->of = (loom__balance){&state->router, state->routed->tokens, b, per_sequence, NULL};
    loss->weights = calloc((size_t)count + 1, sizeof(double));
    if (!loss->weights)
        return out_of_memory(state->routed->tokens, options->router.experts);
    loss->group = group;
    double *weights = loss->weights;
    LOOM_TRY(loom__logits_balance_count(logits, &loss->of, weights));
    if (size > 1)
        LOOM_TRY(loom_all_reduce(group, weights, weights, count, LOOM_F64, LOOM_SUM));
    if (global && options->memory)
        average_calls(options->memory, weights);
    /* The parts of data ranks are averaged with the gradients, but are to add up. */
    if (global)
        coefficient *= (double)size / loom__group_size(options->balance_group);
    double total = (double)(state->routed->tokens * size) / (double)sequences;
    loom__balance_weights(&loss->of, coefficient, weights, total, weights);
    return LOOM_OK;
}

/* The losses have no value in the forward but this one. */
static loom_status losses_of(const loom__router_options *options, const route_state *state, const loom_tensor *logits,
    loom__router_losses *losses) {
    static const loom_router_loss names[LOOM__BALANCES] = {[LOOM__BALANCE_MICROBATCH] = LOOM_ROUTER_LOAD_BALANCING,
        [LOOM__BALANCE_SEQUENCE] = LOOM_ROUTER_SEQ_LOAD_BALANCING,
        [LOOM__BALANCE_GLOBAL] = LOOM_ROUTER_GLOBAL_LOAD_BALANCING};
    for (int kind = 0; kind < LOOM__BALANCES; kind++) {
        const struct balance_loss *b = &state->balance[kind];
        losses->has[names[kind]] = b->weights != NULL;
        if (!b->weights)
            continue;
        LOOM_TRY(loom__logits_balance_loss(logits, &b->of, b->weights, 0, &losses->part[names[kind]], NULL));
        losses->part[names[kind]] /= options->balance_coefficient[kind];
    }
    losses->has[LOOM_ROUTER_Z] = state->z_coefficient > 0;
    if (state->z_coefficient > 0) {
        loom__logits_z_loss(logits, state->z_coefficient, 0, &losses->part[LOOM_ROUTER_Z], NULL);
        losses->part[LOOM_ROUTER_Z] /= options->z_coefficient;
    }
    return LOOM_OK;
}

/* A recomputation comes by twice, and records once: so it is counted once, here and in the layer's memory. */
static loom_status collect(
    const loom_tape *tape, const loom__router_options *options, const route_state *state, const loom_tensor *logits) {
    loom__router_losses losses = {{false}, {0}};
    if (!options->collector || !options->training || !loom_tape_records(tape))
        return LOOM_OK;
    LOOM_TRY(losses_of(options, state, logits, &losses));
    return loom__router_collector_add(
        options->collector, options->layer, state->routed->tokens, &state->routed->routing, &losses);
}

/* x is read, and its routing decided; *logits [tokens, experts]. state has the parameters. */
static loom_status decide(
    loom_tape *tape, loom_tensor *x, const loom__router_options *options, route_state *state, loom_tensor **logits) {
    const int64_t tokens = x->shape[0] * x->shape[1];
    state->router = options->router;
    state->scale = options->own_loss_scale;
    LOOM_TRY(create_routed(tokens, options, &state->routed));
    LOOM_TRY(loom__logits_create(tape, x, state->weight, state->bias, options->in_double, logits));
    if (options->random_logits)
        LOOM_TRY(loom__random_logits(&options->noise, x->shape[1], *logits));
    const float *of_choice = options->memory ? options->memory->bias : NULL;
    LOOM_TRY(loom__logits_route(*logits, &state->router, of_choice, options->training, &state->routed->routing));
    if (options->memory && options->training && loom_tape_records(tape))
        loom__router_memory_count(options->memory, tokens, state->routed->routing.map);
    if (options->training)
        state->z_coefficient = options->z_coefficient / loom__group_size(options->balance_group);
    for (int kind = 0; kind < LOOM__BALANCES && options->training && loom_tape_records(tape); kind++)
        if (options->balance_coefficient[kind] > 0)
            LOOM_TRY(balance(options, x, *logits, state, (loom__balance_kind)kind));
    LOOM_TRY(collect(tape, options, state, *logits));
    return plan_rows(state->routed);
}

static loom_status copy_probs(loom_tape *tape, const loom__routed *routed, loom_tensor **probs) {
    LOOM_TRY(
        loom_tensor_create(loom_tape_rank(tape), LOOM_F32, 2, (int64_t[]){routed->tokens, routed->experts}, probs));
    memcpy((*probs)->data, routed->routing.probs, (size_t)loom_tensor_count(*probs) * sizeof(float));
    return LOOM_OK;
}

static loom_status check_parameters(
    const loom_tensor *x, loom_parameter *weight, loom_parameter *bias, const loom__router_options *options) {
    LOOM_TRY(loom__check_parameter_dtype(route_op.name, x, weight));
    LOOM_TRY(loom__check_parameter_dtype(route_op.name, x, bias));
    if (x->dims != 3 || x->shape[2] != weight->shape[1] || weight->shape[0] != options->router.experts)
        return loom_fail(LOOM_ERR_ARGUMENT, "router: found %s [%lld, %lld] for rows of width %lld and %lld experts",
            weight->name, (long long)weight->shape[0], (long long)weight->shape[1], (long long)x->shape[2],
            (long long)options->router.experts);
    if (bias && (bias->dims != 1 || bias->shape[0] != options->router.experts))
        return loom_fail(LOOM_ERR_ARGUMENT, "router: %s has %lld elements for %lld experts", bias->name,
            (long long)bias->shape[0], (long long)options->router.experts);
    LOOM_TRY(loom_parameter_ready(weight));
    return loom_parameter_ready(bias);
}

loom_status loom__route_tokens(loom_tape *tape, loom_tensor *x, loom_parameter *weight, loom_parameter *bias,
    const loom__router_options *options, loom_tensor **probs, loom__routed **routed) {
    LOOM_TRY(loom__check_dtype(tape, route_op.name, x));
    LOOM_TRY(check_parameters(x, weight, bias, options));
    LOOM_TRY(loom_tensor_ready(x));
    route_state made = {.weight = weight, .bias = bias};
    loom_tensor *logits = NULL, *out = NULL;
    loom_node *node = NULL;
    loom_status status = decide(tape, x, options, &made, &logits);
    if (!status)
        status = copy_probs(tape, made.routed, &out);
    if (!status)
        status = loom_tape_record(tape, &route_op, sizeof made, (loom_tensor *[]){x}, 1,
            (loom_parameter *[]){weight, bias}, bias ? 2 : 1, out, &node);
    if (!status) {
        *routed = made.routed;
        made.routed->references++;
    }
    if (!status && node) {
        route_state *kept = loom_node_state(node);
        *kept = made;
        for (int kind = 0; kind < LOOM__BALANCES; kind++)
            kept->balance[kind].of.router = &kept->router;
        status = loom_node_save(node, x);
        if (!status)
            status = loom_node_save(node, logits);
    } else {
        free_state(&made);
    }
    loom_tensor_release(logits);
    if (status) {
        loom_tensor_release(out);
        return status;
    }
    *probs = out;
    return LOOM_OK;
}
