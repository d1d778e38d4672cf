/* What an expert has room for, and who finds it taken. */
#include "moe/router.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { TOKENS = 16, EXPERTS = 4 };

static void the_room_is_the_even_share_times_the_factor(void **state) {
    (void)state;
    assert_int_equal(loom__expert_capacity(16 * 2, EXPERTS, 1, 0), 8);
    assert_int_equal(loom__expert_capacity(16 * 1, EXPERTS, 1, 0), 4);
    assert_int_equal(loom__expert_capacity(10 * 1, EXPERTS, 1.25, 0), 4); /* 3.125 */
}

/* All tokens want expert 0, and token t the more the larger want[t] is. */
static void route(loom__drop_policy drop, const float want[TOKENS], uint8_t kept[TOKENS], int64_t *dropped) {
    const loom__router router = {
        .experts = EXPERTS, .topk = 1, .pre_softmax = true, .capacity_factor = 1, .drop = drop};
    float logits[TOKENS * EXPERTS] = {0}, probs[TOKENS * EXPERTS];
    uint8_t chosen[TOKENS * EXPERTS], map[TOKENS * EXPERTS];
    loom__routing routing = {.probs = probs, .chosen = chosen, .map = map};
    for (int t = 0; t < TOKENS; t++)
        logits[t * EXPERTS] = want[t];
    assert_int_equal(loom__route(&router, TOKENS, logits, NULL, true, &routing), LOOM_OK);
    *dropped = routing.dropped;
    for (int t = 0; t < TOKENS; t++) {
        kept[t] = map[t * EXPERTS];
        assert_int_equal(chosen[t * EXPERTS], 1);
        assert_true((probs[t * EXPERTS] > 0) == (kept[t] == 1));
        for (int e = 1; e < EXPERTS; e++)
            assert_int_equal(map[t * EXPERTS + e], 0);
    }
}

static void of_sixteen_tokens_twelve_find_no_room(void **state) {
    static const float want[TOKENS] = {1, 5, 2, 4, 9, 3, 1.5f, 7, 2.5f, 8, 3.5f, 1.25f, 6, 2.25f, 4.5f, 0.5f};
    uint8_t kept[TOKENS];
    int64_t dropped;
    (void)state;
    route(LOOM__DROP_BY_POSITION, want, kept, &dropped);
    assert_int_equal(dropped, 12);
    for (int t = 0; t < TOKENS; t++)
        assert_int_equal(kept[t], t < 4);
    route(LOOM__DROP_BY_PROBS, want, kept, &dropped);
    assert_int_equal(dropped, 12);
    for (int t = 0; t < TOKENS; t++)
        assert_int_equal(kept[t], want[t] >= 6); /* the four largest: tokens 4, 9, 7, 12 */
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_room_is_the_even_share_times_the_factor),
        cmocka_unit_test(of_sixteen_tokens_twelve_find_no_room)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
