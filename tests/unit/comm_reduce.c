/* The arithmetic of reductions against plain loops. */
#include "base/parts.h"
#include "comm/reduce.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MEMBERS = 40, COUNT = 2500 };

static float value(int member, int i) {
    uint32_t x = (uint32_t)(member * 7919 + i) * 2654435761u;
    x ^= x >> 15;
    return ldexpf((float)(x & 0xffff) - 32768.0f, (int)(x >> 28) - 20);
}

static void f32_sums_in_group_order_with_blocks_of_16(void **state) {
    (void)state;
    static float x[MEMBERS][COUNT], y[COUNT];
    const void *inputs[MEMBERS];
    for (int m = 0; m < MEMBERS; m++) {
        inputs[m] = x[m];
        for (int i = 0; i < COUNT; i++)
            x[m][i] = value(m, i);
    }
    int differs = 0;
    for (int members = 1; members <= MEMBERS; members++) {
        loom__reduce(LOOM_F32, LOOM_SUM, members, inputs, COUNT, y);
        for (int i = 0; i < COUNT; i++) {
            volatile float total = 0, plain = x[0][i];
            for (int m = 1; m < members; m++)
                plain += x[m][i];
            for (int begin = 0; begin < members; begin += 16) {
                volatile float block = x[begin][i];
                for (int m = begin + 1; m < begin + 16 && m < members; m++)
                    block += x[m][i];
                total = begin == 0 ? block : total + block;
            }
            float expected = total, chain = plain;
            assert_memory_equal(&y[i], &expected, sizeof expected);
            differs += chain != expected;
        }
    }
    /* Otherwise the data could not tell blocks from a plain chain. */
    assert_true(differs > 1000);
}

static void bf16_is_rounded_once_at_the_end(void **state) {
    (void)state;
    /* 1 + 2^-9 + 2^-9 + … : each step alone would round back to 1. */
    uint16_t one = loom_f32_to_bf16(1.0f), small = loom_f32_to_bf16(0x1p-9f), y;
    const void *inputs[9] = {&one, &small, &small, &small, &small, &small, &small, &small, &small};
    loom__reduce(LOOM_BF16, LOOM_SUM, 9, inputs, 1, &y);
    assert_int_equal(y, loom_f32_to_bf16(1.0f + 8 * 0x1p-9f));
    assert_int_not_equal(y, one);
}

static void the_length_of_the_array_does_not_change_a_sum(void **state) {
    (void)state;
    static float x[5][COUNT], whole[COUNT], part[COUNT];
    const void *inputs[5];
    for (int m = 0; m < 5; m++)
        for (int i = 0; i < COUNT; i++)
            x[m][i] = value(m, i);
    for (int m = 0; m < 5; m++)
        inputs[m] = x[m];
    loom__reduce(LOOM_F32, LOOM_SUM, 5, inputs, COUNT, whole);
    for (int first = 0; first < COUNT; first += 333) {
        int n = COUNT - first < 333 ? COUNT - first : 333;
        for (int m = 0; m < 5; m++)
            inputs[m] = &x[m][first];
        loom__reduce(LOOM_F32, LOOM_SUM, 5, inputs, n, part);
        assert_memory_equal(part, whole + first, (size_t)n * sizeof *part);
    }
}

static void the_output_may_be_an_input(void **state) {
    (void)state;
    static double x[3][COUNT], expected[COUNT];
    const void *inputs[3] = {x[0], x[1], x[2]};
    for (int m = 0; m < 3; m++)
        for (int i = 0; i < COUNT; i++)
            x[m][i] = (double)value(m, i) / 3;
    loom__reduce(LOOM_F64, LOOM_SUM, 3, inputs, COUNT, expected);
    loom__reduce(LOOM_F64, LOOM_SUM, 3, inputs, COUNT, x[2]);
    assert_memory_equal(x[2], expected, sizeof expected);
}

static void a_maximum_keeps_a_nan_of_any_member(void **state) {
    (void)state;
    for (int who = 0; who < 20; who++) {
        float x[20];
        double d[20];
        uint16_t b[20];
        const void *f32[20], *f64[20], *bf16[20];
        for (int m = 0; m < 20; m++) {
            x[m] = m == who ? NAN : (float)m;
            d[m] = m == who ? (double)NAN : m;
            b[m] = loom_f32_to_bf16(x[m]);
            f32[m] = &x[m];
            f64[m] = &d[m];
            bf16[m] = &b[m];
        }
        float y = 0;
        double z = 0;
        uint16_t w = 0;
        loom__reduce(LOOM_F32, LOOM_MAX, 20, f32, 1, &y);
        loom__reduce(LOOM_F64, LOOM_MAX, 20, f64, 1, &z);
        loom__reduce(LOOM_BF16, LOOM_MAX, 20, bf16, 1, &w);
        assert_true(isnan(y) && isnan(z) && isnan(loom_bf16_to_f32(w)));
    }
}

static void maxima_and_integer_sums_are_exact(void **state) {
    (void)state;
    int64_t a[3] = {INT64_MAX, -5, INT64_MIN}, b[3] = {1, -7, -1}, sum[3], max[3];
    const void *inputs[2] = {a, b};
    loom__reduce(LOOM_I64, LOOM_SUM, 2, inputs, 3, sum);
    loom__reduce(LOOM_I64, LOOM_MAX, 2, inputs, 3, max);
    assert_true(sum[0] == INT64_MIN && sum[1] == -12 && sum[2] == INT64_MAX);
    assert_true(max[0] == INT64_MAX && max[1] == -5 && max[2] == -1);
}

static void negative_zero_survives_a_sum_of_zeros(void **state) {
    (void)state;
    float minus = -0.0f, y = 1;
    const void *inputs[3] = {&minus, &minus, &minus};
    loom__reduce(LOOM_F32, LOOM_SUM, 3, inputs, 1, &y);
    assert_true(y == 0 && signbit(y));
}

static void parts_cover_the_whole_and_differ_by_at_most_one(void **state) {
    (void)state;
    int64_t counts[] = {0, 1, 2, 7, 1000, INT64_MAX};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        for (int size = 1; size < 20; size++) {
            assert_true(loom__part_begin(counts[c], size, 0) == 0);
            assert_true(loom__part_begin(counts[c], size, size) == counts[c]);
            for (int p = 0; p < size; p++) {
                int64_t part = loom__part_begin(counts[c], size, p + 1) - loom__part_begin(counts[c], size, p);
                assert_true(part == counts[c] / size || part == counts[c] / size + 1);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f32_sums_in_group_order_with_blocks_of_16),
        cmocka_unit_test(bf16_is_rounded_once_at_the_end),
        cmocka_unit_test(the_length_of_the_array_does_not_change_a_sum),
        cmocka_unit_test(the_output_may_be_an_input),
        cmocka_unit_test(a_maximum_keeps_a_nan_of_any_member),
        cmocka_unit_test(maxima_and_integer_sums_are_exact),
        cmocka_unit_test(negative_zero_survives_a_sum_of_zeros),
        cmocka_unit_test(parts_cover_the_whole_and_differ_by_at_most_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
