/* Routing, balance losses and permutations against the numbers of Megatron-Core. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "moe/permutation.h"
#include "router_case.h"

static float *floats(const json_t *rows, int64_t count, int64_t width) {
    float *values = calloc((size_t)(count * width) + 1, sizeof(float));
    for (int64_t t = 0; t < count; t++)
        for (int64_t c = 0; c < width; c++) {
            const json_t *row = json_array_get(rows, (size_t)t);
            values[t * width + c] =
                (float)(width == 1 && !json_is_array(row) ? json_number_value(row) : number_at(row, c));
        }
    return values;
}

static uint8_t *digits(const json_t *rows, int64_t count, int64_t width) {
    uint8_t *values = calloc((size_t)(count * width) + 1, 1);
    for (int64_t t = 0; t < count; t++)
        for (int64_t c = 0; c < width; c++)
            values[t * width + c] = json_string_value(json_array_get(rows, (size_t)t))[c] == '1';
    return values;
}

static void compare(const char *id, const char *what, int64_t count, const float *found, const float *expected,
    double relative, double absolute) {
    for (int64_t i = 0; i < count; i++) {
        double off = fabs((double)found[i] - (double)expected[i]);
        if (!(off <= relative * fabs((double)expected[i]) + absolute))
            fail_msg(
                "%s: %s[%lld] is %.9g, expected %.9g", id, what, (long long)i, (double)found[i], (double)expected[i]);
    }
}

static void check_loss(const char *id, const json_t *step, const char *name, double found) {
    double expected = golden_number(json_object_get(step, "losses"), name, NAN);
    if (!(fabs(found - expected) <= 2e-6 * fabs(expected) + 1e-8))
        fail_msg("%s: %s is %.9g, expected %.9g", id, name, found, expected);
}

/* Counts of the global loss, which are averaged over the calls of a step. */
typedef struct running {
    double counts[64], steps;
} running;

static void add_losses(const json_t *item, const char *id, const json_t *step, const loom__router *router,
    const uint8_t *padding, const float *logits, running *global, float *d_logits) {
    static const char *const kinds[] = {"aux_loss", "seq_aux_loss", "global_aux_loss"};
    static const char *const names[] = {"load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss"};
    const json_t *options = json_object_get(item, "options");
    int64_t tokens = golden_int(item, "tokens", 0), batch = golden_int(item, "batch", 1);
    int64_t valid = 0;
    for (int64_t t = 0; t < tokens; t++)
        valid += !padding || !padding[t];
    double scale = golden_int(item, "per_token_loss", 0) ? (double)valid : 1.0, loss;
    double z = golden_number(options, "moe_z_loss_coeff", 0);
    if (z > 0) {
        loom__router_z_loss(tokens, router->experts, logits, padding, z, scale, &loss, d_logits);
        check_loss(id, step, "z_loss", loss / z);
    }
    for (int kind = 0; kind < 3; kind++) {
        double coefficient = coefficient_of(options, kinds[kind]);
        if (!(coefficient > 0))
            continue;
        const loom__balance balance = {router, tokens, batch, kind == 1, padding};
        double counts[64] = {0}, weights[64], total = (double)valid;
        assert_true(router->experts * batch <= 64);
        assert_int_equal(loom__balance_count(&balance, logits, counts), LOOM_OK);
        if (kind == 1) {
            total /= (double)batch;
            if (golden_int(item, "per_token_loss", 0))
                scale = total;
        }
        if (kind == 2) {
            global->steps += 1;
            for (int64_t e = 0; e < router->experts; e++) {
                global->counts[e] += counts[e];
                counts[e] = global->counts[e] / global->steps;
            }
        }
        loom__balance_weights(&balance, coefficient, counts, total, weights);
        assert_int_equal(loom__balance_loss(&balance, logits, weights, scale, &loss, d_logits), LOOM_OK);
        check_loss(id, step, names[kind], loss / coefficient);
        scale = golden_int(item, "per_token_loss", 0) ? (double)valid : 1.0;
    }
}

static void check_counts(
    const json_t *step, const char *id, int64_t tokens, int64_t experts, const uint8_t *map, const uint8_t *padding) {
    const json_t *expected = json_object_get(step, "right_tokens_per_expert");
    if (!expected)
        expected = json_object_get(step, "tokens_per_expert");
    for (int64_t e = 0; expected && e < experts; e++) {
        double count = 0;
        for (int64_t t = 0; t < tokens; t++)
            count += (!padding || !padding[t]) && map[t * experts + e];
        if (fabs(count - number_at(expected, e)) > 0)
            fail_msg("%s: expert %lld has %g tokens, expected %g", id, (long long)e, count, number_at(expected, e));
    }
}

/* Whether two rows of a map differ only between experts whose sigmoid is the same number: which of them come first is
 * nowhere defined. */
static bool equal_scores(int64_t experts, const float *logits, const uint8_t *left, const uint8_t *right) {
    double sum = 0;
    for (int64_t e = 0; e < experts; e++)
        sum += ((double)left[e] - (double)right[e]) * (double)(1.0f / (1.0f + expf(-logits[e])));
    return fabs(sum) <= 0;
}

static void check_step(const json_t *item, const char *id, const json_t *step, const loom__router *router,
    const float *bias, const uint8_t *padding, running *global) {
    int64_t tokens = golden_int(item, "tokens", 0), experts = router->experts, count = tokens * experts;
    float *logits = floats(json_object_get(step, "logits"), tokens, experts);
    float *expected = floats(json_object_get(step, "probs"), tokens, experts);
    float *gradient = floats(json_object_get(step, "grad_logits"), tokens, experts);
    uint8_t *map = digits(json_object_get(step, "map"), tokens, experts);
    float *d_probs = calloc((size_t)count, sizeof(float)), *d_logits = calloc((size_t)count, sizeof(float));
    loom__routing routing = {
        calloc((size_t)count, sizeof(float)), calloc((size_t)count, 1), calloc((size_t)count, 1), 0, NULL};
    assert_int_equal(loom__route(router, tokens, logits, bias, true, &routing), LOOM_OK);
    for (int64_t row = 0; row < count; row += experts) {
        if (memcmp(routing.map + row, map + row, (size_t)experts) == 0)
            compare(id, "probs", experts, routing.probs + row, expected + row, 3e-6, 1e-9);
        else if (router->score != LOOM__ROUTER_SIGMOID ||
                 !equal_scores(experts, logits + row, routing.map + row, map + row))
            fail_msg("%s: token %lld goes elsewhere", id, (long long)(row / experts));
    }
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t e = 0; e < experts; e++)
            d_probs[t * experts + e] = (float)((t * experts + e) % 7 - 3) / 4;
    assert_int_equal(loom__route_backward(router, tokens, logits, &routing, d_probs, d_logits), LOOM_OK);
    add_losses(item, id, step, router, padding, logits, global, d_logits);
    compare(id, "grad_logits", count, d_logits, gradient, 2e-5, 3e-7);
    check_counts(step, id, tokens, experts, routing.map, padding);
    free(logits);
    free(expected);
    free(gradient);
    free(map);
    free(d_probs);
    free(d_logits);
    free(routing.probs);
    free(routing.chosen);
    free(routing.map);
}

static void check_router(const json_t *item, const char *id) {
    loom__router router = router_of(item);
    const json_t *bias_json = json_object_get(item, "expert_bias"), *step,
                 *padding_json = json_object_get(item, "padding");
    bool refused = loom__router_check(&router, bias_json != NULL) != LOOM_OK;
    if (refused != (golden_int(item, "error", 0) != 0))
        fail_msg("%s: %s", id, refused ? loom_error_message() : "accepted, the reference refuses it");
    if (refused)
        return;
    int64_t tokens = golden_int(item, "tokens", 0);
    float *bias = bias_json ? floats(bias_json, router.experts, 1) : NULL;
    uint8_t *padding = padding_json ? calloc((size_t)tokens, 1) : NULL;
    for (int64_t t = 0; padding && t < tokens; t++)
        padding[t] = number_at(padding_json, t) > 0;
    if (router.capacity_factor > 0)
        assert_int_equal(loom__expert_capacity(tokens * router.topk, router.experts, router.capacity_factor, 0),
            golden_int(item, "capacity", -1));
    running global = {0};
    size_t i;
    json_array_foreach(json_object_get(item, "steps"), i, step)
        check_step(item, id, step, &router, bias, padding, &global);
    free(bias);
    free(padding);
}

static void check_group_loss(const json_t *item, const char *id) {
    loom__router router = {.experts = golden_int(item, "experts", 0), .topk = golden_int(item, "topk", 0)};
    router.score = strcmp(golden_string(item, "score", ""), "sigmoid") == 0;
    const json_t *ranks = json_object_get(item, "per_rank"), *rank;
    const char *type = golden_string(item, "type", "");
    int64_t tokens = golden_int(item, "tokens", 0), batch = golden_int(item, "batch", 1),
            count = tokens * router.experts;
    double coefficient = golden_number(item, "coeff", 0), whole = 0, counts[64] = {0};
    const loom__balance balance = {&router, tokens, batch, strcmp(type, "seq_aux_loss") == 0, NULL};
    assert_true(router.experts * batch <= 64);
    size_t i;
    json_array_foreach(ranks, i, rank) {
        float *logits = floats(json_object_get(rank, "logits"), tokens, router.experts);
        assert_int_equal(loom__balance_count(&balance, logits, counts), LOOM_OK);
        free(logits);
    }
    double total = (double)(tokens * (int64_t)json_array_size(ranks)) / (balance.per_sequence ? (double)batch : 1);
    loom__balance_weights(&balance, coefficient, counts, total, counts);
    json_array_foreach(ranks, i, rank) {
        float *logits = floats(json_object_get(rank, "logits"), tokens, router.experts);
        float *expected = floats(json_object_get(rank, "grad_logits"), tokens, router.experts);
        float *found = calloc((size_t)count, sizeof(float));
        double loss;
        assert_int_equal(loom__balance_loss(&balance, logits, counts, 1, &loss, found), LOOM_OK);
        whole += loss;
        compare(id, "grad_logits", count, found, expected, 2e-5, 1e-9);
        double own = golden_number(rank, "loss_over_coeff", NAN);
        if (!isnan(own) && fabs(loss / coefficient - own) > 2e-6 * own)
            fail_msg("%s: rank %zu's part is %.9g, expected %.9g", id, i, loss / coefficient, own);
        free(logits);
        free(expected);
        free(found);
    }
    double expected = golden_number(item, "loss_over_coeff", NAN);
    if (!isnan(expected) && fabs(whole / coefficient - expected) > 2e-6 * expected)
        fail_msg("%s: the loss is %.9g, expected %.9g", id, whole / coefficient, expected);
}

static void check_bias_update(const json_t *item, const char *id) {
    const json_t *counts_json = json_object_get(item, "tokens_per_expert");
    int64_t experts = (int64_t)json_array_size(counts_json);
    double counts[64];
    float *bias = floats(json_object_get(item, "bias"), experts, 1);
    float *expected = floats(json_object_get(item, "updated"), experts, 1);
    for (int64_t e = 0; e < experts; e++)
        counts[e] = number_at(counts_json, e);
    loom__expert_bias_update(experts, counts, golden_number(item, "rate", 0), bias);
    compare(id, "bias", experts, bias, expected, 1e-6, 0);
    free(bias);
    free(expected);
}

static void check_capacity(const json_t *item, const char *id) {
    int64_t found = loom__expert_capacity(golden_int(item, "tokens", 0), golden_int(item, "experts", 1),
        golden_number(item, "factor", 0), golden_int(item, "min", 0));
    if (found != golden_int(item, "capacity", -1))
        fail_msg("%s: the capacity is %lld", id, (long long)found);
}

static void check_sorted(const json_t *item, const char *id) {
    int64_t tokens = golden_int(item, "tokens", 0), experts = golden_int(item, "experts", 0);
    int64_t capacity = golden_int(item, "capacity", 0), counts[64], token[1024];
    const json_t *sorted = json_object_get(item, "sorted_indices"),
                 *per_expert = json_object_get(item, "tokens_per_expert");
    uint8_t *map = digits(json_object_get(item, "map"), tokens, experts);
    int64_t rows = loom__permutation(tokens, experts, map, capacity, counts, NULL);
    assert_int_equal(rows, (int64_t)json_array_size(sorted));
    assert_true(rows <= 1024);
    assert_int_equal(loom__permutation(tokens, experts, map, capacity, counts, token), rows);
    for (int64_t i = 0; i < rows; i++)
        if (token[i] != (int64_t)number_at(sorted, i))
            fail_msg(
                "%s: row %lld is token %lld, expected %g", id, (long long)i, (long long)token[i], number_at(sorted, i));
    for (int64_t e = 0; e < experts; e++)
        assert_int_equal(counts[e], capacity > 0 ? capacity : (int64_t)number_at(per_expert, e));
    free(map);
}

static void check_chunks(const json_t *item) {
    const json_t *sizes_json = json_object_get(item, "sizes"), *order_json = json_object_get(item, "order");
    const json_t *expected = json_object_get(item, "probs");
    int64_t chunks = (int64_t)json_array_size(sizes_json), sizes[16], order[16];
    int64_t rows = golden_int(item, "input_rows", 0);
    float in[64], out[64];
    assert_true(chunks <= 16 && rows <= 64);
    for (int64_t c = 0; c < chunks; c++) {
        sizes[c] = (int64_t)number_at(sizes_json, c);
        order[c] = (int64_t)number_at(order_json, c);
    }
    for (int64_t i = 0; i < rows; i++)
        in[i] = (float)i;
    loom__sort_chunks(chunks, sizes, order, 1, in, out);
    for (int64_t i = 0; i < rows; i++)
        assert_float_equal(out[i], (float)number_at(expected, i), 0);
}

static void check_permutation(const json_t *item, const char *id) {
    const char *what = golden_string(item, "what", "");
    if (strncmp(what, "permute", 7) == 0) {
        check_sorted(item, id);
    } else if (strcmp(what, "sort_chunks") == 0) {
        check_chunks(item);
    } else {
        const json_t *rows = json_object_get(item, "map");
        int64_t tokens = (int64_t)json_array_size(rows);
        int64_t experts = (int64_t)strlen(json_string_value(json_array_get(rows, 0)));
        uint8_t *map = digits(rows, tokens, experts),
                *expected = digits(json_object_get(item, "padded"), tokens, experts);
        loom__pad_routing_map(tokens, experts, golden_int(item, "multiple", 1), map);
        if (memcmp(map, expected, (size_t)(tokens * experts)) != 0)
            fail_msg("%s: padded otherwise", id);
        free(map);
        free(expected);
    }
}

static void each_case(const char *pattern, void (*check)(const json_t *item, const char *id)) {
    glob_t files = golden_glob(pattern);
    int ran = 0;
    for (size_t f = 0; f < files.gl_pathc; f++) {
        json_t *file = golden_json(files.gl_pathv[f]), *item;
        size_t i;
        json_array_foreach(json_object_get(file, "cases"), i, item) {
            check(item, golden_string(item, "id", "?"));
            ran++;
        }
        json_decref(file);
    }
    globfree(&files);
    printf("%s: %d cases ran, none left out\n", pattern, ran);
    assert_true(ran > 0);
}

static void routing_is_that_of_megatron(void **state) {
    (void)state;
    each_case("moe/router*.json", check_router);
}

static void losses_of_a_group_are_those_of_megatron(void **state) {
    (void)state;
    each_case("moe/group_loss*.json", check_group_loss);
}

static void bias_updates_are_those_of_megatron(void **state) {
    (void)state;
    each_case("moe/bias_update*.json", check_bias_update);
}

static void capacities_are_those_of_megatron(void **state) {
    (void)state;
    each_case("moe/capacity*.json", check_capacity);
}

static void permutations_are_those_of_megatron(void **state) {
    (void)state;
    each_case("moe/permute*.json", check_permutation);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(routing_is_that_of_megatron),
        cmocka_unit_test(losses_of_a_group_are_those_of_megatron),
        cmocka_unit_test(bias_updates_are_those_of_megatron),
        cmocka_unit_test(capacities_are_those_of_megatron),
        cmocka_unit_test(permutations_are_those_of_megatron),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
