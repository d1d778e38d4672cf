/* The router as an operation, with what it keeps from call to call, against the numbers of Megatron-Core: the gradients
 * of its own losses come through its backward. With the unit matrix as its weight the activations are the logits. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "parallel/experts.h"
#include "router_case.h"
#include <megaloom/megaloom.h>

static loom__router_options options_of(const json_t *item) {
    const json_t *options = json_object_get(item, "options");
    return (loom__router_options){
        .router = router_of(item),
        .training = true,
        .balance_coefficient = {coefficient_of(options, "aux_loss"), coefficient_of(options, "seq_aux_loss"),
            coefficient_of(options, "global_aux_loss")},
        .z_coefficient = golden_number(options, "moe_z_loss_coeff", 0),
        .own_loss_scale = 1,
    };
}

/* A loss for each token is another scale, and a router of ours sees no padding. */
static bool is_left_out(const json_t *item) {
    return golden_int(item, "error", 0) || golden_int(item, "per_token_loss", 0) || json_object_get(item, "padding");
}

/* One call: probs, the gradient of the activations. Which of equal scores wins is nowhere defined. */
typedef struct call {
    const json_t *step;
    int64_t tokens, batch, experts;
    loom_parameter *weight;
    loom__router_options *options;
    const char *id;
} call;

static loom_status compare(const call *c, const loom__routed *routed, const float *found) {
    const json_t *rows = json_object_get(c->step, "map"), *expected = json_object_get(c->step, "grad_logits");
    for (int64_t t = 0; t < c->tokens; t++) {
        const char *digits = json_string_value(json_array_get(rows, (size_t)t));
        for (int64_t e = 0; e < c->experts; e++)
            if (routed->routing.map[t * c->experts + e] != (digits[e] == '1'))
                return LOOM_OK;
    }
    for (int64_t t = 0; t < c->tokens; t++)
        for (int64_t e = 0; e < c->experts; e++) {
            double wanted = number_at(json_array_get(expected, (size_t)t), e);
            double has = (double)found[t * c->experts + e];
            if (!(fabs(has - wanted) <= 3e-5 * fabs(wanted) + 4e-7))
                return loom_fail(LOOM_ERR_INTERNAL, "%s: gradient [%lld, %lld] is %.9g, expected %.9g", c->id,
                    (long long)t, (long long)e, has, wanted);
        }
    return LOOM_OK;
}

static void fill(const call *c, const json_t *rows, float *values) {
    for (int64_t t = 0; t < c->tokens; t++)
        for (int64_t e = 0; e < c->experts; e++)
            values[t * c->experts + e] = (float)number_at(json_array_get(rows, (size_t)t), e);
}

static loom_status run_call(loom_rank *rank, const call *c) {
    const int64_t shape[] = {c->tokens / c->batch, c->batch, c->experts};
    loom_tape_options recording = {.record = true};
    loom_tape *tape = NULL;
    loom_tensor *x = NULL, *probs = NULL, *d_probs = NULL;
    loom__routed *routed = NULL;
    loom__router_collector_clear(c->options->collector);
    loom_status status = loom_tape_create(rank, &recording, &tape);
    if (!status)
        status = loom_tensor_create(rank, LOOM_F32, 3, shape, &x);
    if (!status) {
        fill(c, json_object_get(c->step, "logits"), loom_tensor_f32(x));
        status = loom_tape_leaf(tape, x);
    }
    if (!status)
        status = loom__route_tokens(tape, x, c->weight, NULL, c->options, &probs, &routed);
    if (!status)
        status = loom_tensor_create(rank, LOOM_F32, 2, probs->shape, &d_probs);
    for (int64_t i = 0; !status && i < c->tokens * c->experts; i++)
        loom_tensor_f32(d_probs)[i] = (float)(i % 7 - 3) / 4;
    if (!status)
        status = loom_tape_backward(tape, probs, d_probs);
    if (!status)
        status = compare(c, routed, loom_tensor_f32(loom_tape_gradient(tape, x)));
    loom__routed_release(routed);
    loom_tensor_release(d_probs);
    loom_tensor_release(probs);
    loom_tensor_release(x);
    loom_tape_destroy(tape);
    return status;
}

static loom_status check_counts(const call *c, const json_t *step) {
    const json_t *expected = json_object_get(step, "tokens_per_expert");
    for (int64_t e = 0; expected && e < c->experts; e++)
        if (fabs(c->options->memory->tokens[e] - number_at(expected, e)) > 0)
            return loom_fail(LOOM_ERR_INTERNAL, "%s: expert %lld has %g tokens, expected %g", c->id, (long long)e,
                c->options->memory->tokens[e], number_at(expected, e));
    return LOOM_OK;
}

/* As logged: without their coefficients. */
static loom_status check_losses(const call *c) {
    const loom_router_statistics *found = loom__router_collector_finish(c->options->collector, 1);
    const json_t *losses = json_object_get(c->step, "losses");
    for (int i = 0; i < LOOM_ROUTER_LOSS_COUNT; i++) {
        const char *name = loom_router_loss_name((loom_router_loss)i);
        double wanted = golden_number(losses, name, NAN);
        if (isnan(wanted) != isnan(found->losses[i]) || fabs(found->losses[i] - wanted) > 2e-6 * fabs(wanted) + 1e-8)
            return loom_fail(LOOM_ERR_INTERNAL, "%s: %s is %.9g, expected %.9g", c->id, name, found->losses[i], wanted);
    }
    return LOOM_OK;
}

typedef struct routing_job {
    const json_t *item;
    bool in_double;
} routing_job;

static loom_status run_calls(loom_rank *rank, void *argument) {
    const routing_job *job = argument;
    const json_t *item = job->item, *bias_json = json_object_get(item, "expert_bias"), *step;
    float bias[64] = {0}, weight[64 * 64] = {0};
    loom__router_options options = options_of(item);
    int64_t experts = options.router.experts, layer = 0;
    size_t i;
    options.in_double = job->in_double;
    for (int64_t e = 0; e < experts; e++) {
        bias[e] = bias_json ? (float)number_at(bias_json, e) : 0;
        weight[e * experts + e] = 1;
    }
    loom_parameter parameter = {.name = "router", .dims = 2, .shape = {experts, experts}, .data = weight};
    LOOM_TRY(loom__router_memory_create(
        experts, bias_json ? bias : NULL, options.balance_coefficient[LOOM__BALANCE_GLOBAL] > 0, &options.memory));
    loom_status status =
        loom__router_collector_create(&layer, 1, experts, options.router.capacity_factor > 0, &options.collector);
    json_array_foreach(json_object_get(item, "steps"), i, step) {
        call c = {step, golden_int(item, "tokens", 0), golden_int(item, "batch", 1), experts, &parameter, &options,
            golden_string(item, "id", "?")};
        status = status ? status : run_call(rank, &c);
        status = status ? status : check_counts(&c, step);
        status = status ? status : check_losses(&c);
    }
    loom__router_memory_destroy(options.memory);
    loom__router_collector_destroy(options.collector);
    return status;
}

static void gradients_of_all_losses_are_those_of_megatron(void **state) {
    (void)state;
    glob_t files = golden_glob("moe/router*.json");
    int ran = 0, left_out = 0;
    for (size_t f = 0; f < files.gl_pathc; f++) {
        json_t *file = golden_json(files.gl_pathv[f]), *item;
        size_t i;
        json_array_foreach(json_object_get(file, "cases"), i, item) {
            loom_run_options options = loom_run_options_default();
            options.threads = 1;
            if (is_left_out(item)) {
                left_out++;
                continue;
            }
            assert_true(golden_int(item, "experts", 0) <= 64);
            for (int wide = 0; wide < 2; wide++)
                if (loom_run_local(1, run_calls, &(routing_job){item, wide}, &options))
                    fail_msg("%s: %s", wide ? "fp64" : "fp32", loom_error_message());
            ran++;
        }
        json_decref(file);
    }
    globfree(&files);
    printf("moe/router*.json: %d cases ran, %d left out (padding, a loss for each token, refused)\n", ran, left_out);
    assert_true(ran > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(gradients_of_all_losses_are_those_of_megatron)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
