/* The exact sum: any order, any cut, any team, and the right number at both ends of fp32. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/team.h"
#include "optim/exact_sum.h"

enum { COUNT = 200003 };

static double sum_of(bool squares, int64_t count, const float *x) {
    loom__exact_sum sum = {0};
    assert_int_equal(loom__exact_sum_add(NULL, squares, count, x, &sum), LOOM_OK);
    assert_int_equal(sum.nonfinite, 0);
    return loom__exact_sum_value(&sum, squares);
}

/* Of very different sizes, some below the normal ones, some zero. */
static float *numbers(void) {
    float *x = malloc(COUNT * sizeof *x);
    uint32_t state = 1;
    assert_non_null(x);
    for (int64_t i = 0; i < COUNT; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = ldexpf((float)(state >> 8) * 0x1p-22f - 2.0f, (int)(state >> 3 & 255) - 140);
        if (i % 1000 == 0)
            x[i] = 0.0f;
    }
    return x;
}

static void any_order_and_any_cut_give_the_same_bits(void **state) {
    (void)state;
    float *x = numbers(), *reversed = malloc(COUNT * sizeof *x);
    assert_non_null(reversed);
    for (int64_t i = 0; i < COUNT; i++)
        reversed[i] = x[COUNT - 1 - i];
    for (int squares = 0; squares < 2; squares++) {
        loom__exact_sum whole = {0}, cut = {0}, backwards = {0};
        assert_int_equal(loom__exact_sum_add(NULL, squares, COUNT, x, &whole), LOOM_OK);
        assert_int_equal(loom__exact_sum_add(NULL, squares, COUNT, reversed, &backwards), LOOM_OK);
        for (int64_t at = 0, length = 1; at < COUNT; at += length, length = length * 3 % 7919 + 1) {
            length = length < COUNT - at ? length : COUNT - at;
            assert_int_equal(loom__exact_sum_add(NULL, squares, length, x + at, &cut), LOOM_OK);
        }
        assert_memory_equal(&cut, &whole, sizeof cut);
        assert_memory_equal(&backwards, &whole, sizeof cut);
        for (int threads = 1; threads <= 3; threads++) {
            loom_team *team;
            loom__exact_sum together = {0};
            assert_int_equal(loom__team_create(threads, NULL, &team), LOOM_OK);
            assert_int_equal(loom__exact_sum_add(team, squares, COUNT, x, &together), LOOM_OK);
            assert_memory_equal(&together, &whole, sizeof whole);
            loom__team_destroy(team);
        }
        assert_int_equal(whole.zeros, 201);
    }
    free(x);
    free(reversed);
}

static void the_sum_is_right_at_both_ends_of_fp32(void **state) {
    (void)state;
    float *many = malloc(COUNT * sizeof *many);
    assert_non_null(many);
    for (int64_t i = 0; i < COUNT; i++)
        many[i] = -FLT_MAX;
    assert_true(fabs(sum_of(true, COUNT, many) / (COUNT * (double)FLT_MAX * (double)FLT_MAX) - 1) < 1e-15);
    assert_true(fabs(sum_of(false, COUNT, many) / (COUNT * (double)FLT_MAX) - 1) < 1e-15);
    for (int64_t i = 0; i < COUNT; i++)
        many[i] = 0x1p-149f;
    assert_true(sum_of(true, COUNT, many) == COUNT * 0x1p-298);
    assert_true(sum_of(false, COUNT, many) == COUNT * 0x1p-149);
    const float small[] = {3, -4, 12}, far[] = {0x1p60f, 1, -1, 0x1p-60f};
    assert_true(sum_of(true, 3, small) == 169 && sum_of(false, 3, small) == 19);
    assert_true(sum_of(false, 4, far) == 0x1p60 && sum_of(false, 3, far + 1) == 2);
    assert_true(sum_of(true, 0, small) == 0);
    free(many);
}

static void a_nan_and_an_infinity_are_counted_apart(void **state) {
    (void)state;
    const float x[] = {1, NAN, -INFINITY, 2, -0.0f, 0x1p-140f};
    loom__exact_sum sum = {0};
    assert_int_equal(loom__exact_sum_add(NULL, true, 6, x, &sum), LOOM_OK);
    assert_true(sum.nonfinite > 0 && sum.zeros == 1);
    assert_true(loom__exact_sum_value(&sum, true) == 5);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_order_and_any_cut_give_the_same_bits),
        cmocka_unit_test(the_sum_is_right_at_both_ends_of_fp32),
        cmocka_unit_test(a_nan_and_an_infinity_are_counted_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
