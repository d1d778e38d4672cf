/* Counter-based random numbers and the 16-bit formats: known answers, distribution, independence of any cut. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/random.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void assert_words(loom__philox found, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    assert_int_equal(found.word[0], a);
    assert_int_equal(found.word[1], b);
    assert_int_equal(found.word[2], c);
    assert_int_equal(found.word[3], d);
}

/* kat_vectors of Random123: philox 4x32, 10 rounds. */
static void philox_gives_the_published_answers(void **state) {
    (void)state;
    assert_words(loom__philox4x32(0, 0, 0, 0, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
    assert_words(loom__philox4x32(0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff), 0x408f276d,
        0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
    assert_words(loom__philox4x32(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0), 0xd16cfe09,
        0x94fdcceb, 0x5001e420, 0x24126ea1);
}

/* Of n = 1e6 draws the mean has deviation 1e-3, the variance sqrt(2/n), skewness sqrt(6/n), kurtosis sqrt(24/n), the
 * correlation of neighbours 1e-3. The stream is fixed, so five deviations are no gamble. */
static void normals_have_the_moments_of_a_normal(void **state) {
    (void)state;
    enum { N = 1000000 };
    float *z = malloc(N * sizeof *z);
    assert_non_null(z);
    loom__normal_fill(1234, loom__hash_name("decoder.layers.0.mlp.linear_fc1.weight"), 0, N, 0, 1, z);
    double moment[5] = {0}, neighbours = 0;
    int64_t beyond_three = 0;
    for (int64_t i = 0; i < N; i++) {
        double x = (double)z[i], power = 1;
        for (int k = 0; k < 5; k++, power *= x)
            moment[k] += power / N;
        if (i)
            neighbours += x * (double)z[i - 1] / N;
        beyond_three += fabs(x) > 3;
    }
    free(z);
    assert_true(fabs(moment[1]) < 5e-3);
    assert_true(fabs(moment[2] - 1) < 5 * sqrt(2.0 / N));
    assert_true(fabs(moment[3]) < 5 * sqrt(15.0 / N));
    assert_true(fabs(moment[4] - 3) < 5 * sqrt(96.0 / N));
    assert_true(fabs(neighbours) < 5e-3);
    double expected = 0.0026998 * N;
    assert_true(fabs((double)beyond_three - expected) < 5 * sqrt(expected));
}

static void mean_and_deviation_shift_and_scale_the_same_draws(void **state) {
    (void)state;
    float z[64], y[64];
    loom__normal_fill(7, 8, 5, 64, 0, 1, z);
    loom__normal_fill(7, 8, 5, 64, 3, 0.5f, y);
    for (int i = 0; i < 64; i++)
        assert_true(fabsf(y[i] - (3 + 0.5f * z[i])) <= 4e-7f);
}

static void any_cut_of_a_range_gives_the_same_bits(void **state) {
    (void)state;
    enum { N = 1000 };
    float whole[N], parts[N];
    int64_t far = ((int64_t)1 << 40) + 1; /* odd, and beyond 32 bits */
    for (int start = 0; start < 2; start++) {
        int64_t first = start ? far : 0;
        loom__normal_fill(99, 5, first, N, 0, 0.02f, whole);
        for (int64_t width = 1; width < 40; width += 3) {
            memset(parts, 0, sizeof parts);
            for (int64_t i = 0; i < N; i += width)
                loom__normal_fill(99, 5, first + i, i + width < N ? width : N - i, 0, 0.02f, parts + i);
            assert_memory_equal(whole, parts, sizeof whole);
        }
    }
}

static void seeds_and_names_give_different_streams(void **state) {
    (void)state;
    float a[8], b[8], c[8];
    loom__normal_fill(1, loom__hash_name("a.weight"), 0, 8, 0, 1, a);
    loom__normal_fill(2, loom__hash_name("a.weight"), 0, 8, 0, 1, b);
    loom__normal_fill(1, loom__hash_name("b.weight"), 0, 8, 0, 1, c);
    for (int i = 0; i < 8; i++) {
        assert_true(a[i] != b[i]);
        assert_true(a[i] != c[i]);
    }
}

/* A row's mask depends on every coordinate, and drops its share of n = 200000 channels. */
static void dropout_rows_differ_in_every_coordinate_and_drop_their_share(void **state) {
    (void)state;
    const loom__dropout_row rows[] = {
        loom__dropout_row_make(1, 2, 3, 4, 5, 6),
        loom__dropout_row_make(0, 2, 3, 4, 5, 6),
        loom__dropout_row_make(1, 0, 3, 4, 5, 6),
        loom__dropout_row_make(1, 2, 0, 4, 5, 6),
        loom__dropout_row_make(1, 2, 3, 0, 5, 6),
        loom__dropout_row_make(1, 2, 3, 4, 0, 6),
        loom__dropout_row_make(1, 2, 3, 4, 5, 0),
    };
    loom__philox first = loom__dropout_words(&rows[0], 0);
    for (size_t i = 1; i < sizeof rows / sizeof *rows; i++) {
        loom__philox other = loom__dropout_words(&rows[i], 0);
        assert_memory_not_equal(&first, &other, sizeof first);
    }
    uint32_t threshold = loom__dropout_threshold(0.1f);
    int dropped = 0;
    for (uint32_t quad = 0; quad < 50000; quad++) {
        loom__philox words = loom__dropout_words(&rows[0], quad);
        for (int i = 0; i < 4; i++)
            dropped += words.word[i] < threshold;
    }
    assert_true(fabs(dropped - 20000.0) < 5 * sqrt(200000 * 0.09));
    assert_int_equal(loom__dropout_threshold(0), 0);
    assert_int_equal(loom__dropout_threshold(1), UINT32_MAX);
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static void every_f16_goes_to_f32_and_back(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 65536; i++) {
        float x = loom_f16_to_f32((uint16_t)i);
        uint16_t back = loom_f32_to_f16(x);
        if ((i & 0x7c00) == 0x7c00 && (i & 0x3ff)) {
            assert_true(isnan(x));
            assert_true((back & 0x7c00) == 0x7c00 && (back & 0x3ff));
            continue;
        }
        assert_int_equal(back, i);
        double value = ldexp((i & 0x3ff) + ((i & 0x7c00) ? 1024 : 0), (int)((i >> 10 & 31) ? i >> 10 & 31 : 1) - 25);
        if ((i & 0x7c00) != 0x7c00)
            assert_true((double)x == (i & 0x8000 ? -value : value));
    }
}

/* Between two neighbours the nearer wins, and the even one in the middle. */
static void f16_rounds_to_nearest_even(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 0x7bff; i++) {
        double low = (double)loom_f16_to_f32((uint16_t)i), high = (double)loom_f16_to_f32((uint16_t)(i + 1));
        float middle = (float)(0.5 * (low + high));
        assert_int_equal(loom_f32_to_f16(middle), i + (i & 1));
        assert_int_equal(loom_f32_to_f16(nextafterf(middle, 0)), i);
        assert_int_equal(loom_f32_to_f16(nextafterf(middle, INFINITY)), i + 1);
    }
    assert_int_equal(loom_f32_to_f16(65519.0f), 0x7bff);
    assert_int_equal(loom_f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(loom_f32_to_f16(-INFINITY), 0xfc00);
    assert_int_equal(loom_f32_to_f16(-0.0f), 0x8000);
}

static void bf16_rounds_to_nearest_even_and_keeps_nan(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 65536; i++) {
        float x = loom_bf16_to_f32((uint16_t)i);
        assert_int_equal(bits_of(x), i << 16);
        uint16_t back = loom_f32_to_bf16(x);
        if (isnan(x)) {
            assert_true((back & 0x7f80) == 0x7f80 && (back & 0x7f));
            continue;
        }
        assert_int_equal(back, i);
        if ((i & 0x7f80) == 0x7f80)
            continue;
        uint32_t half = (i << 16) + 0x8000;
        float middle, below, above;
        memcpy(&middle, &half, sizeof middle);
        half--;
        memcpy(&below, &half, sizeof below);
        half += 2;
        memcpy(&above, &half, sizeof above);
        assert_int_equal(loom_f32_to_bf16(below), i);
        assert_int_equal(loom_f32_to_bf16(middle), i + (i & 1));
        assert_int_equal(loom_f32_to_bf16(above), i + 1);
    }
}

static void dtypes_are_found_by_their_names(void **state) {
    (void)state;
    for (int i = 0; i < LOOM_DTYPE_COUNT; i++) {
        assert_int_equal(loom_dtype_from_name(loom_dtype_name((loom_dtype)i)), i);
        assert_true(loom_dtype_size((loom_dtype)i) > 0);
    }
    assert_int_equal(loom_dtype_from_name("F31"), LOOM_DTYPE_COUNT);
    assert_int_equal(loom_dtype_size(LOOM_DTYPE_COUNT), 0);
    assert_string_equal(loom_dtype_name(LOOM_DTYPE_COUNT), "?");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_published_answers),
        cmocka_unit_test(normals_have_the_moments_of_a_normal),
        cmocka_unit_test(mean_and_deviation_shift_and_scale_the_same_draws),
        cmocka_unit_test(any_cut_of_a_range_gives_the_same_bits),
        cmocka_unit_test(seeds_and_names_give_different_streams),
        cmocka_unit_test(dropout_rows_differ_in_every_coordinate_and_drop_their_share),
        cmocka_unit_test(every_f16_goes_to_f32_and_back),
        cmocka_unit_test(f16_rounds_to_nearest_even),
        cmocka_unit_test(bf16_rounds_to_nearest_even_and_keeps_nan),
        cmocka_unit_test(dtypes_are_found_by_their_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
