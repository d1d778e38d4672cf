/* The tags of messages between stages: one each for whatever may be under way between two ranks. */
#include "pipeline/exchange.h"
#include <megaloom/comm.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

/* Every message that two stages with chunks may have under way at once, of both flows and both parts, since there both
 * neighbours are one rank: nothing but the tag tells them apart. */
static void messages_of_one_window_have_tags_of_their_own(void **state) {
    static const int64_t chunks[] = {1, 2, 3, 4, 7, 8, 16, 250};
    (void)state;
    for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
        loom__exchange exchange;
        assert_int_equal(loom__exchange_open(&exchange, NULL, NULL, chunks[c], LOOM_F32, LOOM_F32, true), LOOM_OK);
        assert_true(exchange.window >= 8);
        for (int64_t first = 0; first <= exchange.window + 3; first += exchange.window + 3) {
            bool used[LOOM_TAG_COUNT] = {false};
            for (int flow = LOOM__FLOW_ACTIVATION; flow <= LOOM__FLOW_GRADIENT; flow++)
                for (int part = LOOM__PART_DATA; part <= LOOM__PART_SHAPE; part++)
                    for (int64_t boundary = 0; boundary < chunks[c]; boundary++)
                        for (int64_t i = 0; i < exchange.window; i++) {
                            const loom__message message = {(loom__flow)flow, 1, boundary, first + i};
                            int tag = loom__exchange_tag(&exchange, &message, (loom__part)part);
                            assert_in_range(tag, 0, LOOM_TAG_COUNT - 1);
                            assert_false(used[tag]);
                            used[tag] = true;
                        }
        }
    }
}

/* So a sender finds the message that it must wait for. */
static void messages_a_window_apart_share_a_tag(void **state) {
    (void)state;
    loom__exchange exchange;
    assert_int_equal(loom__exchange_open(&exchange, NULL, NULL, 3, LOOM_F32, LOOM_F32, false), LOOM_OK);
    const loom__message early = {LOOM__FLOW_GRADIENT, 1, 2, 5};
    loom__message late = early;
    late.microbatch += exchange.window;
    assert_int_equal(
        loom__exchange_tag(&exchange, &early, LOOM__PART_DATA), loom__exchange_tag(&exchange, &late, LOOM__PART_DATA));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_of_one_window_have_tags_of_their_own),
        cmocka_unit_test(messages_a_window_apart_share_a_tag),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
