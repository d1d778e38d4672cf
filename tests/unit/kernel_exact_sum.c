/* The exact sum: any order, any cut, any table, any team, and the right number at both ends of fp32. */
#include "kernel_support.h"
#include <float.h>

enum { COUNT = 200003 };

static loom_exact_sum summed(const char *table, loom_team *team, int power, int64_t count, const float *x) {
    loom_exact_sum sum = {0};
    loom_kernels_find(table)->exact_sum(team, power, count, x, &sum);
    return sum;
}

static double sum_of(const char *table, int power, int64_t count, const float *x) {
    loom_exact_sum sum = summed(table, NULL, power, count, x);
    assert_int_equal(sum.nonfinite, 0);
    return loom_exact_sum_value(&sum, power);
}

/* Numbers whose exponents lie in a range of this width; 255: all of them. Half have the largest significand. */
static float *scattered(uint32_t width) {
    float *x = room_for(COUNT * sizeof *x);
    uint32_t state = width, lowest = width == 255 ? 0 : 90;
    for (int64_t i = 0; i < COUNT; i++) {
        state = state * 1664525u + 1013904223u;
        uint32_t bits = (state & 0x807fffffu) | (lowest + (state >> 8 ^ state >> 20) % width) << 23;
        bits |= state & 0x80u ? 0x7fffffu : 0;
        memcpy(&x[i], &bits, sizeof bits);
        if (i % 1000 == 0)
            x[i] = 0.0f;
    }
    return x;
}

static void check_numbers(int power, const float *x, const float *reversed) {
    loom_exact_sum whole = summed("reference", NULL, power, COUNT, x);
    assert_int_equal(whole.zeros, 201);
    for (int t = 0; t < TABLES; t++) {
        const loom_kernels *table = loom_kernels_find(table_names[t]);
        if (!table)
            continue;
        loom_exact_sum cut = {0}, backwards = summed(table_names[t], NULL, power, COUNT, reversed);
        assert_memory_equal(&backwards, &whole, sizeof whole);
        for (int64_t at = 0, length = 1; at < COUNT; at += length, length = length * 3 % 7919 + 1) {
            length = length < COUNT - at ? length : COUNT - at;
            table->exact_sum(NULL, power, length, x + at, &cut);
        }
        assert_memory_equal(&cut, &whole, sizeof whole);
        for (int threads = 1; threads < TEAMS; threads++) {
            loom_exact_sum together = summed(table_names[t], teams[threads], power, COUNT, x);
            assert_memory_equal(&together, &whole, sizeof whole);
        }
    }
}

/* Widths below, at and above what one grid takes. */
static void any_order_cut_table_and_team_give_the_same_bits(void **state) {
    (void)state;
    const uint32_t widths[] = {1, 3, 20, 21, 40, 255};
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
        float *x = scattered(widths[w]), *reversed = room_for(COUNT * sizeof *x);
        for (int64_t i = 0; i < COUNT; i++)
            reversed[i] = x[COUNT - 1 - i];
        for (int power = 1; power <= 2; power++)
            check_numbers(power, x, reversed);
        free(x);
        free(reversed);
    }
}

static void the_sum_is_right_at_both_ends_of_fp32(void **state) {
    (void)state;
    const float small[] = {3, -4, 12}, far[] = {0x1p60f, 1, -1, 0x1p-60f};
    float *many = room_for(COUNT * sizeof *many);
    const double largest = (double)FLT_MAX;
    for (int t = 0; t < TABLES; t++) {
        const char *table = table_names[t];
        if (!loom_kernels_find(table))
            continue;
        for (int64_t i = 0; i < COUNT; i++)
            many[i] = -FLT_MAX;
        assert_true(fabs(sum_of(table, 2, COUNT, many) / (COUNT * largest * largest) - 1) < 1e-15);
        assert_true(fabs(sum_of(table, 1, COUNT, many) / (COUNT * largest) - 1) < 1e-15);
        for (int64_t i = 0; i < COUNT; i++)
            many[i] = 0x1p-149f;
        assert_true(sum_of(table, 2, COUNT, many) == COUNT * 0x1p-298);
        assert_true(sum_of(table, 1, COUNT, many) == COUNT * 0x1p-149);
        assert_true(sum_of(table, 2, 3, small) == 169 && sum_of(table, 1, 3, small) == 19);
        assert_true(sum_of(table, 1, 4, far) == 0x1p60 && sum_of(table, 1, 3, far + 1) == 2);
        assert_true(sum_of(table, 2, 0, small) == 0);
    }
    free(many);
}

static void a_nan_and_an_infinity_are_counted_apart(void **state) {
    (void)state;
    float x[40] = {1, NAN, -INFINITY, 2, -0.0f, 0x1p-140f};
    for (int t = 0; t < TABLES; t++) {
        if (!loom_kernels_find(table_names[t]))
            continue;
        loom_exact_sum sum = summed(table_names[t], NULL, 2, 40, x);
        assert_true(sum.nonfinite == 2 && sum.zeros == 35);
        assert_true(loom_exact_sum_value(&sum, 2) == 5);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_order_cut_table_and_team_give_the_same_bits),
        cmocka_unit_test(the_sum_is_right_at_both_ends_of_fp32),
        cmocka_unit_test(a_nan_and_an_infinity_are_counted_apart),
    };
    return cmocka_run_group_tests(tests, start_teams, stop_teams);
}
