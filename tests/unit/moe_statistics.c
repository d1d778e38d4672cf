/* The collector of routers' statistics: what one rank adds, the sum over ranks, and what a step's numbers are. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "moe/statistics.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 16, EXPERTS = 4, CELLS = TOKENS * EXPERTS };

static const int64_t layers[] = {1, 3};

/* Routes tokens whose logits are `slope` * expert, and of equal logits (slope 0) the lower expert is the larger. */
static void route(loom__router_collector *collector, int64_t layer, const loom__router *router, double slope,
    const loom__router_losses *losses) {
    float logits[CELLS], probs[CELLS];
    uint8_t chosen[CELLS], map[CELLS];
    loom__routing routing = {probs, chosen, map, 0};
    for (int i = 0; i < CELLS; i++)
        logits[i] = (float)(slope * (i % EXPERTS));
    assert_int_equal(loom__route(router, TOKENS, logits, NULL, true, &routing), LOOM_OK);
    assert_int_equal(loom__router_collector_add(collector, layer, TOKENS, &routing, losses), LOOM_OK);
}

static loom__router_collector *make(bool limited) {
    loom__router_collector *collector;
    assert_int_equal(loom__router_collector_create(layers, 2, EXPERTS, limited, &collector), LOOM_OK);
    return collector;
}

static const loom__router_losses none;

static void what_finds_no_room_is_counted(void **state) {
    const loom__router one = {.experts = EXPERTS, .topk = 1, .pre_softmax = true, .capacity_factor = 1};
    const loom__router two = {.experts = EXPERTS, .topk = 2, .capacity_factor = 1};
    loom__router_collector *collector = make(true);
    (void)state;
    loom__router_collector_clear(collector);
    route(collector, 1, &one, 0, &none);
    route(collector, 3, &two, 1, &none);
    const loom_router_statistics *of = loom__router_collector_finish(collector, 1);
    assert_true(of->limited && of->layer_count == 2 && of->experts == EXPERTS);
    /* All 16 tokens at expert 0, which takes 16 / 4. */
    const loom_router_layer *first = &of->layers[0], *second = &of->layers[1];
    assert_int_equal(first->layer, 1);
    assert_int_equal(first->choices, 16);
    assert_int_equal(first->dropped, 12);
    assert_true(first->chosen[0] == 16 && first->kept[0] == 4 && first->chosen[1] == 0 && first->load == 4);
    /* Two experts of each token, and 16 * 2 / 4 places at each. */
    assert_int_equal(second->layer, 3);
    assert_int_equal(second->choices, 32);
    assert_int_equal(second->dropped, 16);
    assert_true(second->chosen[3] == 16 && second->kept[3] == 8 && second->kept[2] == 8 && second->load == 2);
    assert_true(of->choices == 48 && of->dropped == 28 && of->load == 4 && of->mean_load == 3);
    for (int i = 0; i < LOOM_ROUTER_LOSS_COUNT; i++)
        assert_true(isnan(of->losses[i]) && isnan(first->losses[i]));
    loom__router_collector_destroy(collector);
    loom__router_collector_destroy(NULL);
}

/* An expert with room takes tokens that did not choose it: rows, but nobody's choice. */
static void rows_that_fill_a_capacity_up_are_no_choices(void **state) {
    const loom__router padded = {
        .experts = EXPERTS, .topk = 1, .pre_softmax = true, .capacity_factor = 1, .pad_to_capacity = true};
    loom__router_collector *collector = make(true);
    (void)state;
    route(collector, 1, &padded, 0, &none);
    const loom_router_layer *layer = &loom__router_collector_finish(collector, 1)->layers[0];
    assert_true(layer->kept[0] == 4 && layer->kept[1] == 0 && layer->kept[3] == 0);
    assert_int_equal(layer->dropped, 12);
    loom__router_collector_destroy(collector);
}

/* Two ranks share the tokens of a microbatch, and a third and a fourth those of another: a mean over both. */
static void the_sum_over_ranks_is_that_of_the_step(void **state) {
    const loom__router router = {.experts = EXPERTS, .topk = 1, .pre_softmax = true};
    loom__router_collector *ranks[4];
    int64_t count;
    (void)state;
    for (int rank = 0; rank < 4; rank++) {
        loom__router_losses losses = {{false}, {0}};
        losses.has[LOOM_ROUTER_Z] = true;
        losses.part[LOOM_ROUTER_Z] = 1 + rank;
        ranks[rank] = make(false);
        for (int microbatch = 0; microbatch < 2; microbatch++)
            route(ranks[rank], 1, &router, rank % 2 ? 1 : -1, &losses);
        /* The other layer is on ranks of their own. */
        if (rank < 2)
            route(ranks[rank], 3, &router, 1, &losses);
    }
    double *sums = loom__router_collector_sums(ranks[0], &count);
    for (int rank = 1; rank < 4; rank++) {
        int64_t other;
        const double *more = loom__router_collector_sums(ranks[rank], &other);
        assert_int_equal(other, count);
        for (int64_t i = 0; i < count; i++)
            sums[i] += more[i];
    }
    const loom_router_statistics *of = loom__router_collector_finish(ranks[0], 2);
    const loom_router_layer *layer = &of->layers[0];
    assert_true(layer->chosen[0] == 4 * TOKENS && layer->chosen[3] == 4 * TOKENS && layer->kept[3] == 4 * TOKENS);
    assert_true(layer->choices == 8 * TOKENS && layer->dropped == 0 && layer->load == 2);
    /* (1 + 2) of the first two ranks and (3 + 4) of the others. */
    assert_true(layer->losses[LOOM_ROUTER_Z] == 5 && isnan(layer->losses[LOOM_ROUTER_LOAD_BALANCING]));
    assert_true(of->layers[1].losses[LOOM_ROUTER_Z] == 3 && of->losses[LOOM_ROUTER_Z] == 4);
    for (int rank = 0; rank < 4; rank++)
        loom__router_collector_destroy(ranks[rank]);
}

static void a_step_begins_with_nothing(void **state) {
    const loom__router router = {.experts = EXPERTS, .topk = 2};
    loom__router_collector *collector = make(false);
    (void)state;
    route(collector, 3, &router, 1, &none);
    assert_int_equal(loom__router_collector_finish(collector, 1)->choices, 32);
    loom__router_collector_clear(collector);
    const loom_router_statistics *of = loom__router_collector_finish(collector, 1);
    assert_true(of->choices == 0 && isnan(of->layers[1].load));
    loom__router_collector_destroy(collector);
}

static void a_layer_without_experts_is_an_error(void **state) {
    const loom__routing empty = {0};
    loom__router_collector *collector = make(false);
    (void)state;
    assert_int_equal(loom__router_collector_add(collector, 2, 0, &empty, &none), LOOM_ERR_INTERNAL);
    assert_non_null(strstr(loom_error_message(), "layer 2"));
    loom__router_collector_destroy(collector);
}

static void losses_have_the_names_of_megatron(void **state) {
    (void)state;
    assert_string_equal(loom_router_loss_name(LOOM_ROUTER_LOAD_BALANCING), "load_balancing_loss");
    assert_string_equal(loom_router_loss_name(LOOM_ROUTER_Z), "z_loss");
    assert_string_equal(loom_router_loss_name(LOOM_ROUTER_LOSS_COUNT), "?");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_finds_no_room_is_counted),
        cmocka_unit_test(rows_that_fill_a_capacity_up_are_no_choices),
        cmocka_unit_test(the_sum_over_ranks_is_that_of_the_step),
        cmocka_unit_test(a_step_begins_with_nothing),
        cmocka_unit_test(a_layer_without_experts_is_an_error),
        cmocka_unit_test(losses_have_the_names_of_megatron),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
