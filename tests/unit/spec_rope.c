/* The frequencies of rotary positions, against numbers worked out by transformers' own formula in double. */
#include "spec/rope.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* Frequencies 1, 1/2, 1/4 and 1/8: 5.09, 2.55, 1.27 and 0.64 turns over 32 positions. */
static loom_model_config four_pairs(loom_rope_scaling scaling) {
    return (loom_model_config){.kv_channels = 8,
        .rotary_base = 16,
        .rotary_percent = 1,
        .rope_scaling = scaling,
        .rope_scaling_factor = 8,
        .rope_scaling_low_freq_factor = 1,
        .rope_scaling_high_freq_factor = 4,
        .rope_scaling_original_max_position_embeddings = 32};
}

static void expect(loom_model_config config, const double *frequencies) {
    for (int i = 0; i < 4; i++) {
        double found = loom__rope_frequency(&config, i);
        if (!(fabs(found - frequencies[i]) <= 1e-14))
            fail_msg("pair %d: %.17g, expected %.17g", i, found, frequencies[i]);
    }
}

static void frequencies_fall_to_the_base(void **state) {
    (void)state;
    expect(four_pairs(LOOM_ROPE_SCALING_NONE), (double[]){1, 0.5, 0.25, 0.125});
}

static void linear_divides_every_frequency(void **state) {
    (void)state;
    expect(four_pairs(LOOM_ROPE_SCALING_LINEAR), (double[]){0.125, 0.0625, 0.03125, 0.015625});
}

static void llama3_keeps_blends_and_stretches(void **state) {
    (void)state;
    expect(four_pairs(LOOM_ROPE_SCALING_LLAMA3), (double[]){1.0, 0.2880282005477558, 0.05117371680360562, 0.015625});
}

static void the_rotated_share_is_even(void **state) {
    (void)state;
    loom_model_config config = {.kv_channels = 10, .rotary_percent = 0.5, .rotary_base = 16};
    assert_int_equal(loom__rope_channels(&config), 4);
    assert_true(fabs(loom__rope_frequency(&config, 1) - 0.25) <= 1e-15);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frequencies_fall_to_the_base),
        cmocka_unit_test(linear_divides_every_frequency),
        cmocka_unit_test(llama3_keeps_blends_and_stretches),
        cmocka_unit_test(the_rotated_share_is_even),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
