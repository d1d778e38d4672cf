/* What is done to the rows around a router, on one rank: noise within its bounds, the same wherever a row is, weights
 * on the rows, and the gradients of both. */
#include "parallel/experts.h"
#include "parallel_support.h"

enum { S = 6, B = 2, H = 10, EXPERTS = 3, TOKENS = S * B };

static const double eps = 0.25;
static const int64_t samples[B] = {7, 1000000007};

static loom_status make(loom_rank *rank, int64_t s, uint32_t seed, loom_tensor **x) {
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 3, (int64_t[]){s, B, H}, x));
    fill(loom_tensor_f32(*x), s * B * H, seed);
    return LOOM_OK;
}

static loom_status jittered(loom_tape *tape, loom_tensor *x, loom_positions positions, int64_t layer, loom_tensor **y) {
    const loom__router_noise noise = {.seed = 3, .layer = layer, .sample = samples, .positions = positions};
    return loom__router_jitter(tape, x, eps, &noise, y);
}

/* Of a whole sequence, and of the two pieces of it that a context rank has. */
static loom_status check_jitter(loom_rank *rank, void *argument) {
    const loom_tape_options recording = {.record = true};
    loom_tape *tape = NULL;
    loom_tensor *x, *y, *again, *part, *of_part, *other, *d_y;
    double sum = 0;
    (void)argument;
    LOOM_TRY(loom_tape_create(rank, &recording, &tape));
    LOOM_TRY(make(rank, S, 1, &x));
    LOOM_TRY(loom_tape_leaf(tape, x));
    LOOM_TRY(jittered(tape, x, loom_positions_from(0), 5, &y));
    LOOM_TRY(jittered(tape, x, loom_positions_from(0), 5, &again));
    LOOM_TRY(jittered(tape, x, loom_positions_from(0), 6, &other));
    LOOM_TRY(make(rank, S, 2, &d_y));
    LOOM_TRY(loom_tape_backward(tape, y, d_y));
    const float *d_x = loom_tensor_f32(loom_tape_gradient(tape, x));
    int differ = 0;
    for (int64_t i = 0; i < TOKENS * H; i++) {
        double factor = (double)loom_tensor_f32(y)[i] / (double)loom_tensor_f32(x)[i];
        double back = (double)d_x[i] / (double)loom_tensor_f32(d_y)[i];
        CHECK(factor >= 1 - eps - 1e-6 && factor <= 1 + eps + 1e-6, "factor %lld is %g", (long long)i, factor);
        CHECK(fabs(factor - back) < 1e-6, "factor %lld is %g, in the gradient %g", (long long)i, factor, back);
        sum += factor;
        differ += loom_tensor_f32(y)[i] != loom_tensor_f32(other)[i];
    }
    CHECK(fabs(sum / (TOKENS * H) - 1) < 0.05, "the mean of the factors is %g", sum / (TOKENS * H));
    CHECK(differ > TOKENS * H / 2, "another layer has the same noise");
    CHECK(memcmp(y->data, again->data, TOKENS * H * sizeof(float)) == 0, "the noise is another the second time");
    /* Rows 1, 2 and 5 alone. */
    LOOM_TRY(make(rank, 3, 1, &part));
    const int64_t rows[] = {1, 2, 5};
    for (int i = 0; i < 3; i++)
        memcpy(loom_tensor_f32(part) + i * B * H, loom_tensor_f32(x) + rows[i] * B * H, B * H * sizeof(float));
    LOOM_TRY(jittered(tape, part, (loom_positions){1, 2, 5}, 5, &of_part));
    for (int i = 0; i < 3; i++)
        CHECK(memcmp(loom_tensor_f32(of_part) + i * B * H, loom_tensor_f32(y) + rows[i] * B * H,
                  B * H * sizeof(float)) == 0,
            "row %lld has other noise by itself", (long long)rows[i]);
    loom_tensor *all[] = {x, y, again, part, of_part, other, d_y};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        loom_tensor_release(all[i]);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

/* As many draws as make the mean and the variance tell. */
static loom_status check_logits(loom_rank *rank, void *argument) {
    enum { MANY = 4096 };
    loom_tensor *all, *part, *wide;
    double sum = 0, squares = 0;
    (void)argument;
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 2, (int64_t[]){MANY, EXPERTS}, &all));
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 2, (int64_t[]){2, EXPERTS}, &part));
    LOOM_TRY(loom_tensor_create(rank, LOOM_F64, 2, (int64_t[]){2, EXPERTS}, &wide));
    const float *logits = loom_tensor_f32(all);
    loom__router_noise noise = {.seed = 3, .layer = 2, .sample = samples, .positions = loom_positions_from(0)};
    LOOM_TRY(loom__random_logits(&noise, B, all));
    for (int64_t i = 0; i < MANY * EXPERTS; i++) {
        sum += (double)logits[i];
        squares += (double)logits[i] * (double)logits[i];
    }
    CHECK(fabs(sum / (MANY * EXPERTS)) < 0.03 && fabs(squares / (MANY * EXPERTS) - 1) < 0.05, "mean %g, variance %g",
        sum / (MANY * EXPERTS), squares / (MANY * EXPERTS));
    CHECK(memcmp(logits, logits + EXPERTS, EXPERTS * sizeof *logits) != 0, "two samples have the same logits");
    noise.positions = loom_positions_from(100);
    LOOM_TRY(loom__random_logits(&noise, B, part));
    LOOM_TRY(loom__random_logits(&noise, B, wide));
    for (int64_t i = 0; i < 2 * EXPERTS; i++) {
        const float expected = logits[100 * B * EXPERTS + i];
        CHECK(loom_tensor_f32(part)[i] == expected, "position 100 has other logits by itself");
        CHECK(((const double *)wide->data)[i] == (double)expected, "position 100 has other logits in double");
    }
    loom_tensor_release(all);
    loom_tensor_release(part);
    loom_tensor_release(wide);
    return LOOM_OK;
}

/* d_weight [EXPERTS, H] of sigmoids that weigh rows of x whose gradient is d_y. */
static loom_status check_router_gradient(
    const loom__routed *routed, const loom_tensor *probs, loom_tensor *x, loom_tensor *d_y, const float *grad) {
    double expected[EXPERTS * H] = {0};
    for (int64_t t = 0; t < TOKENS; t++)
        for (int64_t e = 0; e < EXPERTS; e++) {
            double p = (double)loom_tensor_f32(probs)[t * EXPERTS + e], dot = 0;
            for (int64_t c = 0; routed->routing.map[t * EXPERTS + e] && c < H; c++)
                dot += (double)loom_tensor_f32(x)[t * H + c] * (double)loom_tensor_f32(d_y)[t * H + c];
            for (int64_t c = 0; c < H; c++)
                expected[e * H + c] += dot * p * (1 - p) * (double)loom_tensor_f32(x)[t * H + c];
        }
    for (int64_t i = 0; i < EXPERTS * H; i++)
        CHECK(fabs((double)grad[i] - expected[i]) < 1e-4, "gradient %lld of the router is %g, expected %g",
            (long long)i, (double)grad[i], expected[i]);
    return LOOM_OK;
}

/* Tokens go to one expert each; the expert of some has no room. */
static loom_status check_weights(loom_rank *rank, void *argument) {
    const loom_tape_options recording = {.record = true};
    const loom__router_options options = {
        .router = {.experts = EXPERTS, .topk = 1, .score = LOOM__ROUTER_SIGMOID, .capacity_factor = 1}};
    float weight[EXPERTS * H], grad[EXPERTS * H];
    loom_parameter parameter = {.name = "router", .dims = 2, .shape = {EXPERTS, H}, .data = weight, .grad = grad};
    loom_tape *tape = NULL;
    loom_tensor *x, *y, *probs, *units, *d_y;
    loom__routed *routed;
    (void)argument;
    fill(weight, EXPERTS * H, 9);
    LOOM_TRY(loom_tape_create(rank, &recording, &tape));
    LOOM_TRY(make(rank, S, 1, &x));
    LOOM_TRY(make(rank, S, 2, &d_y));
    LOOM_TRY(loom__route_tokens(tape, x, &parameter, NULL, &options, &probs, &routed));
    CHECK(routed->routing.dropped > 0, "every token found room");
    LOOM_TRY(loom_tape_leaf(tape, x));
    LOOM_TRY(loom__weigh_tokens(tape, x, probs, routed, &y, &units));
    LOOM_TRY(loom_tape_backward(tape, y, d_y));
    const float *d_x = loom_tensor_f32(loom_tape_gradient(tape, x));
    for (int64_t t = 0; t < TOKENS; t++) {
        double p = 0, count = 0;
        for (int64_t e = 0; e < EXPERTS; e++) {
            p += (double)loom_tensor_f32(probs)[t * EXPERTS + e];
            count += (double)loom_tensor_f32(units)[t * EXPERTS + e];
            CHECK(loom_tensor_f32(units)[t * EXPERTS + e] == (routed->routing.map[t * EXPERTS + e] ? 1.0F : 0.0F),
                "token %lld goes to expert %lld with another weight", (long long)t, (long long)e);
        }
        CHECK(count == (p > 0 ? 1 : 0), "token %lld has %g experts and a weight of %g", (long long)t, count, p);
        for (int64_t i = t * H; i < (t + 1) * H; i++) {
            CHECK(fabs((double)loom_tensor_f32(y)[i] - p * (double)loom_tensor_f32(x)[i]) < 1e-6, "y[%lld] is %g",
                (long long)i, (double)loom_tensor_f32(y)[i]);
            CHECK(fabs((double)d_x[i] - p * (double)loom_tensor_f32(d_y)[i]) < 1e-6, "d_x[%lld] is %g", (long long)i,
                (double)d_x[i]);
        }
    }
    LOOM_TRY(check_router_gradient(routed, probs, x, d_y, grad));
    loom_tensor *all[] = {x, y, probs, units, d_y};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        loom_tensor_release(all[i]);
    loom__routed_release(routed);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

/* 1e8 + 3 - 1e8 is 0 in fp32, and so is its gradient's way back through weights of 1e8. */
static loom_status check_double(loom_rank *rank, void *argument) {
    const bool *in_double = argument;
    const loom_tape_options recording = {.record = true};
    const loom__router_options options = {
        .router = {.experts = 2, .topk = 2, .score = LOOM__ROUTER_SIGMOID}, .in_double = *in_double};
    float weight[6] = {1, 1, 1, 0, 1, 0}, grad[6];
    loom_parameter parameter = {.name = "router", .dims = 2, .shape = {2, 3}, .data = weight, .grad = grad};
    loom_tape *tape = NULL;
    loom_tensor *x, *probs;
    loom__routed *routed;
    LOOM_TRY(loom_tape_create(rank, &recording, &tape));
    LOOM_TRY(loom_tensor_create(rank, LOOM_F32, 3, (int64_t[]){1, 1, 3}, &x));
    memcpy(x->data, (const float[]){1e8F, 3, -1e8F}, 3 * sizeof(float));
    LOOM_TRY(loom__route_tokens(tape, x, &parameter, NULL, &options, &probs, &routed));
    /* Both experts have the logit 3 where the sum is right. */
    double first = (double)loom_tensor_f32(probs)[0];
    CHECK((fabs(first - 0.5) < 1e-7) == *in_double, "the weight of the first expert is %.9g", first);
    loom_tensor_release(x);
    loom_tensor_release(probs);
    loom__routed_release(routed);
    loom_tape_destroy(tape);
    return LOOM_OK;
}

static void alone(loom_rank_function function, void *argument) {
    loom_run_options options = loom_run_options_default();
    options.threads = 2;
    if (loom_run_local(1, function, argument, &options))
        fail_msg("%s", loom_error_message());
}

static void jitter_is_a_factor_near_1_that_only_the_place_of_a_row_decides(void **state) {
    (void)state;
    alone(check_jitter, NULL);
}

static void random_logits_are_normal_and_only_the_place_of_a_row_decides(void **state) {
    (void)state;
    alone(check_logits, NULL);
}

static void a_row_has_the_weight_of_its_expert_and_nothing_where_it_was_dropped(void **state) {
    (void)state;
    alone(check_weights, NULL);
}

static void logits_in_double_keep_what_fp32_loses(void **state) {
    bool narrow = false, wide = true;
    (void)state;
    alone(check_double, &wide);
    alone(check_double, &narrow);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(jitter_is_a_factor_near_1_that_only_the_place_of_a_row_decides),
        cmocka_unit_test(random_logits_are_normal_and_only_the_place_of_a_row_decides),
        cmocka_unit_test(a_row_has_the_weight_of_its_expert_and_nothing_where_it_was_dropped),
        cmocka_unit_test(logits_in_double_keep_what_fp32_loses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
