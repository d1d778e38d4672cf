/* Choosing a token: greedy, and drawing with temperature, top_k and top_p. Frequencies are of fixed seeds, so a test
 * gives the same numbers each time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/random.h"
#include "generate/sample.h"
#include <math.h>
#include <string.h>

enum { V = 6, DRAWS = 20000 };

static const float logits_of_six[V] = {1.0f, 3.0f, -2.0f, 2.5f, 0.0f, 2.5f};

static loom_generate_options options_of(double temperature, int64_t top_k, double top_p) {
    loom_generate_options options = loom_generate_options_default();
    options.temperature = temperature;
    options.top_k = top_k;
    options.top_p = top_p;
    return options;
}

static int64_t sample(const loom_generate_options *options, const float *logits, int64_t row, int64_t position) {
    loom__candidate candidates[V];
    int64_t token = -1;
    assert_int_equal(loom__sample_token(options, logits, V, row, position, candidates, &token), LOOM_OK);
    assert_in_range(token, 0, V - 1);
    return token;
}

static void count(const loom_generate_options *options, int64_t counts[V]) {
    memset(counts, 0, V * sizeof *counts);
    for (int64_t i = 0; i < DRAWS; i++)
        counts[sample(options, logits_of_six, i % 4, i / 4)]++;
}

/* Chi-square of the counts against softmax(logits / temperature) over the allowed tokens; others must not occur. The
 * bound is that of one case in ten thousand for five degrees of freedom. */
static void must_follow(const int64_t counts[V], double temperature, const bool allowed[V]) {
    double sum = 0, distance = 0;
    for (int i = 0; i < V; i++)
        sum += allowed[i] ? exp((double)logits_of_six[i] / temperature) : 0;
    for (int i = 0; i < V; i++) {
        double wanted = allowed[i] ? DRAWS * exp((double)logits_of_six[i] / temperature) / sum : 0;
        if (!allowed[i])
            assert_int_equal(counts[i], 0);
        else
            distance += ((double)counts[i] - wanted) * ((double)counts[i] - wanted) / wanted;
    }
    if (distance > 25.7)
        fail_msg("chi-square %g of the draws, expected at most 25.7", distance);
}

static void greedy_takes_the_largest_and_of_equal_ones_the_first(void **state) {
    (void)state;
    loom_generate_options greedy = options_of(0, 3, 0.1);
    assert_int_equal(sample(&greedy, logits_of_six, 0, 0), 1);
    const float tied[V] = {-1.0f, -3.0f, 0.5f, 0.5f, 0.25f, 0.5f};
    assert_int_equal(sample(&greedy, tied, 9, 100), 2);
}

static void draws_have_the_softmax_distribution_at_any_temperature(void **state) {
    (void)state;
    const bool all[V] = {true, true, true, true, true, true};
    const double temperatures[] = {0.7, 1, 2.5};
    for (int i = 0; i < 3; i++) {
        loom_generate_options options = options_of(temperatures[i], 0, 1);
        int64_t counts[V];
        count(&options, counts);
        must_follow(counts, temperatures[i], all);
    }
}

static void a_temperature_near_zero_is_greedy(void **state) {
    (void)state;
    loom_generate_options options = options_of(1e-300, 0, 1);
    for (int64_t i = 0; i < 100; i++)
        assert_int_equal(sample(&options, logits_of_six, 0, i), 1);
}

/* Tokens 3 and 5 are equal: the cut goes through them, and the smaller id stays. */
static void top_k_draws_among_the_k_best(void **state) {
    (void)state;
    loom_generate_options options = options_of(1, 2, 1);
    const bool two[V] = {false, true, false, true, false, false}, four[V] = {true, true, false, true, false, true};
    int64_t counts[V];
    count(&options, counts);
    must_follow(counts, 1, two);
    options.top_k = 4;
    count(&options, counts);
    must_follow(counts, 1, four);
    options.top_k = 1;
    count(&options, counts);
    assert_int_equal(counts[1], DRAWS);
}

/* Shares: token 1 0.409, tokens 3 and 5 0.248 each, token 0 0.055, token 4 0.020, token 2 0.003. */
static void top_p_draws_among_the_fewest_that_reach_p(void **state) {
    (void)state;
    const bool one[V] = {false, true}, three[V] = {false, true, false, true, false, true};
    int64_t counts[V];
    loom_generate_options options = options_of(1, 0, 0.40);
    count(&options, counts);
    must_follow(counts, 1, one);
    options.top_p = 0.90;
    count(&options, counts);
    must_follow(counts, 1, three);
    options.top_p = 1e-12;
    count(&options, counts);
    must_follow(counts, 1, one);
}

/* Of the two best, 0.622 and 0.378, the first alone reaches 0.6; of all it would not. */
static void top_p_counts_shares_of_what_top_k_left(void **state) {
    (void)state;
    loom_generate_options options = options_of(1, 2, 0.6);
    int64_t counts[V];
    count(&options, counts);
    assert_int_equal(counts[1], DRAWS);
}

static void a_draw_is_a_function_of_seed_row_and_position(void **state) {
    (void)state;
    loom_generate_options options = options_of(5, 0, 1);
    int differ[3] = {0};
    for (int64_t i = 0; i < 200; i++) {
        int64_t token = sample(&options, logits_of_six, 1, i);
        assert_int_equal(token, sample(&options, logits_of_six, 1, i));
        differ[0] += token != sample(&options, logits_of_six, 2, i);
        differ[1] += token != sample(&options, logits_of_six, 1, i + 200);
        loom_generate_options other = options;
        other.seed++;
        differ[2] += token != sample(&other, logits_of_six, 1, i);
    }
    for (int i = 0; i < 3; i++)
        assert_true(differ[i] > 80);
}

static void noise_below_a_millionth_rarely_changes_a_draw(void **state) {
    (void)state;
    loom_generate_options options = options_of(1, 0, 0.95);
    int changed = 0;
    for (int64_t i = 0; i < DRAWS; i++) {
        float noisy[V];
        for (int c = 0; c < V; c++)
            noisy[c] = logits_of_six[c] * (1 + ((i + c) % 3 == 0 ? 3e-7f : -3e-7f));
        changed += sample(&options, logits_of_six, 0, i) != sample(&options, noisy, 0, i);
    }
    assert_in_range(changed, 0, 2);
}

static void a_logit_that_is_not_finite_is_named(void **state) {
    (void)state;
    const float bad[] = {NAN, INFINITY, -INFINITY};
    loom__candidate candidates[V];
    for (int i = 0; i < 3; i++) {
        float logits[V];
        int64_t token = -7;
        loom_generate_options options = options_of(i, 0, 1);
        memcpy(logits, logits_of_six, sizeof logits);
        logits[4] = bad[i];
        assert_int_equal(loom__sample_token(&options, logits, V, 3, 21, candidates, &token), LOOM_ERR_NUMERIC);
        assert_non_null(strstr(loom_error_message(), "token 4 at position 21 of row 3"));
        assert_int_equal(token, -7);
    }
}

/* Mean 0.57722 (Euler's constant), variance pi^2 / 6; the bounds are five standard deviations of 40000 draws. */
static void gumbel_numbers_have_their_moments(void **state) {
    (void)state;
    enum { COUNT = 40000 };
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < COUNT; i++) {
        double x = loom__gumbel(5, 0, i / 200, i % 200);
        assert_true(isfinite(x));
        sum += x;
        squares += x * x;
    }
    double mean = sum / COUNT, variance = squares / COUNT - mean * mean;
    assert_true(fabs(mean - 0.5772156649) < 0.032);
    assert_true(fabs(variance - 1.6449340668) < 0.087);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_largest_and_of_equal_ones_the_first),
        cmocka_unit_test(draws_have_the_softmax_distribution_at_any_temperature),
        cmocka_unit_test(a_temperature_near_zero_is_greedy),
        cmocka_unit_test(top_k_draws_among_the_k_best),
        cmocka_unit_test(top_p_draws_among_the_fewest_that_reach_p),
        cmocka_unit_test(top_p_counts_shares_of_what_top_k_left),
        cmocka_unit_test(a_draw_is_a_function_of_seed_row_and_position),
        cmocka_unit_test(noise_below_a_millionth_rarely_changes_a_draw),
        cmocka_unit_test(a_logit_that_is_not_finite_is_named),
        cmocka_unit_test(gumbel_numbers_have_their_moments),
    };
    return cmocka_run_group_tests_name("generate.sample", tests, NULL, NULL);
}
