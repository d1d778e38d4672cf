/* Blends beyond the golden cases: what is refused, who owns the parts, long lists of weights. */
#include "data/blend.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct part {
    int number, destroyed;
} part;

static loom_status part_get(void *context, int64_t index, const loom_sample_row *row) {
    row->tokens[0] = ((part *)context)->number;
    row->labels[0] = index;
    row->loss_mask[0] = index < 0 ? 0.0f : 1.0f;
    row->position_ids[0] = 0;
    return LOOM_OK;
}

static void part_locate(void *context, int64_t index, char *text, size_t bytes) {
    snprintf(text, bytes, "part %d, sample %lld", ((part *)context)->number, (long long)index);
}

static void part_destroy(void *context) {
    ((part *)context)->destroyed++;
}

static loom_dataset dataset_of(part *own, int64_t length) {
    return (loom_dataset){.context = own,
        .length = length,
        .sequence_length = 1,
        .get = part_get,
        .locate = part_locate,
        .destroy = part_destroy};
}

static void parts_are_read_through_the_blend_and_destroyed_with_it(void **state) {
    (void)state;
    part parts[2] = {{1, 0}, {2, 0}};
    const loom_dataset datasets[2] = {dataset_of(&parts[0], 3), dataset_of(&parts[1], 6)};
    loom_dataset blend;
    assert_int_equal(loom_blended_dataset_create(datasets, NULL, 2, -1, &blend), LOOM_OK);
    assert_int_equal(blend.length, 9);
    int read[3] = {0};
    for (int64_t i = 0; i < 9; i++) {
        int64_t token, label, position;
        float mask;
        char where[64], expected[64];
        const loom_sample_row row = {&token, &label, &mask, &position, NULL};
        assert_int_equal(blend.get(blend.context, i, &row), LOOM_OK);
        assert_int_equal(label, read[token]++);
        blend.locate(blend.context, i, where, sizeof where);
        snprintf(expected, sizeof expected, "part %d, sample %lld", (int)token, (long long)label);
        assert_string_equal(where, expected);
        assert_int_equal(blend.get(blend.context, -1, &row), LOOM_OK);
        assert_true(mask == 0.0f);
    }
    assert_int_equal(read[1], 3);
    assert_int_equal(read[2], 6);
    loom_dataset_destroy(&blend);
    assert_int_equal(parts[0].destroyed, 1);
    assert_int_equal(parts[1].destroyed, 1);
}

static void assert_refused(
    const loom_dataset *datasets, const double *weights, int64_t count, int64_t size, const char *message) {
    loom_dataset blend;
    assert_int_equal(loom_blended_dataset_create(datasets, weights, count, size, &blend), LOOM_ERR_CONFIG);
    if (!strstr(loom_error_message(), message))
        fail_msg("%s: %s", message, loom_error_message());
}

static void a_blend_that_cannot_be_is_refused_and_leaves_the_parts(void **state) {
    (void)state;
    part own = {0};
    loom_dataset datasets[2] = {dataset_of(&own, 3), dataset_of(&own, 6)};
    assert_refused(datasets, (double[]){0.5, 0.5}, 2, 10,
        "asks 5 samples of its dataset 0, which has 3: ask for a larger surplus");
    assert_refused(datasets, (double[]){0.5, 0.0}, 2, 4, "weight 1 of the blend is 0, expected a number above 0");
    assert_refused(datasets, (double[]){0.5, NAN}, 2, 4, "weight 1 of the blend is ");
    assert_refused(datasets, (double[]){0.5, 0.5}, 2, -1, "needs a number of samples");
    assert_refused(datasets, NULL, 0, 4, "a blend of 0 datasets, expected 1 to 32767");
    datasets[1].length = 0;
    assert_refused(datasets, NULL, 2, -1, "dataset 1 of the blend has no sample");
    datasets[1] = dataset_of(&own, 6);
    datasets[1].sequence_length = 2;
    assert_refused(datasets, NULL, 2, -1, "number 1 has sequences of 2, number 0 of 1");
    assert_int_equal(own.destroyed, 0);
    loom_gpt_blend_config config = loom_gpt_blend_config_default();
    loom_dataset blend;
    assert_int_equal(loom_gpt_blend_create(&config, &blend), LOOM_ERR_CONFIG);
    config.prefixes = (const char *const[]){"/nowhere/at/all", "/nor/here"};
    config.count = 2;
    config.gpt.sequence_length = 4;
    assert_int_equal(loom_gpt_blend_create(&config, &blend), LOOM_ERR_NOT_FOUND);
    assert_non_null(strstr(loom_error_message(), "/nowhere/at/all"));
}

/* Shares of all sizes, more than numpy sums in one block, add up to one and are kept. */
static void many_weights_are_kept(void **state) {
    (void)state;
    enum { COUNT = 300, SIZE = 30000 };
    static double weights[COUNT];
    static int16_t dataset[SIZE];
    static int64_t sample[SIZE];
    int64_t given[COUNT] = {0};
    double sum = 0;
    for (int i = 0; i < COUNT; i++)
        weights[i] = 1 + i % 17;
    loom_data_blend_normalize(weights, COUNT);
    for (int i = 0; i < COUNT; i++)
        sum += weights[i];
    assert_true(fabs(sum - 1) < 1e-12);
    assert_int_equal(loom_data_blend_by_weight(weights, COUNT, SIZE, dataset, sample), LOOM_OK);
    for (int i = 0; i < SIZE; i++)
        assert_int_equal(sample[i], given[dataset[i]]++);
    for (int i = 0; i < COUNT; i++)
        assert_true(fabs((double)given[i] - weights[i] * SIZE) < 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_are_read_through_the_blend_and_destroyed_with_it),
        cmocka_unit_test(a_blend_that_cannot_be_is_refused_and_leaves_the_parts),
        cmocka_unit_test(many_weights_are_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
