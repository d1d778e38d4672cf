/* The map of the gradient buffer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "ddp/map.h"

enum { MAX = 64 };

static loom__ddp_place places[MAX];
static loom__ddp_bucket buckets[MAX];
static int64_t bucket_count, elements;

static void map(const int64_t *counts, int64_t count, int64_t bucket_size) {
    memset(places, 0, sizeof places);
    memset(buckets, 0, sizeof buckets);
    assert_int_equal(
        loom__ddp_map(counts, NULL, count, bucket_size, places, buckets, &bucket_count, &elements), LOOM_OK);
}

static void buckets_hold_the_parameters_that_megatron_puts_there(void **state) {
    (void)state;
    /* Megatron-Core 0.16.1, plain DDP: bucket of each parameter in model order. */
    const int64_t counts[] = {100, 64, 7, 300, 1, 128, 50}, of_200[] = {1, 1, 1, 0, 0, 0, 0};
    map(counts, 7, 200);
    assert_int_equal(bucket_count, 2);
    for (int i = 0; i < 7; i++) {
        assert_int_equal(places[6 - i].bucket, of_200[i]);
        assert_int_equal(places[6 - i].count, counts[i]);
    }
    map(counts, 7, 0);
    assert_int_equal(bucket_count, 1);
    map(counts, 7, 2000);
    assert_int_equal(bucket_count, 1);
    map(counts, 7, 1);
    assert_int_equal(bucket_count, 7);
}

static void every_element_lies_in_one_aligned_place_of_one_bucket(void **state) {
    (void)state;
    const int64_t sizes[] = {0, 1, 3, 16, 17, 31, 64, 100, 1000};
    uint32_t random = 12345;
    for (int round = 0; round < 2000; round++) {
        int64_t counts[MAX];
        random = random * 1664525u + 1013904223u;
        int64_t count = random >> 26; /* 0 to 63 */
        for (int64_t i = 0; i < count; i++) {
            random = random * 1664525u + 1013904223u;
            counts[i] = sizes[(random >> 16) % 9];
        }
        random = random * 1664525u + 1013904223u;
        int64_t bucket_size = (random >> 16) % 500;
        map(counts, count, bucket_size);
        int64_t at = 0, place = 0;
        for (int64_t b = 0; b < bucket_count; b++) {
            int64_t held = 0;
            assert_int_equal(buckets[b].start, at);
            assert_int_equal(buckets[b].first_place, place);
            assert_true(buckets[b].places > 0);
            for (int64_t end = place + buckets[b].places; place < end; place++) {
                /* Only the last parameter of a bucket makes it full. */
                assert_true(bucket_size == 0 || held < bucket_size);
                assert_int_equal(places[place].start % LOOM__DDP_ALIGNMENT, 0);
                assert_true(places[place].start >= at);
                assert_int_equal(places[place].count, counts[count - 1 - place]);
                assert_int_equal(places[place].bucket, b);
                at = places[place].start + places[place].count;
                held += places[place].count;
            }
            assert_true(buckets[b].end >= at && buckets[b].end - at < LOOM__DDP_ALIGNMENT);
            assert_true(b == bucket_count - 1 || held >= bucket_size);
            at = buckets[b].end;
        }
        assert_int_equal(place, count);
        assert_int_equal(elements, at);
        assert_int_equal(bucket_count == 0, count == 0);
    }
}

static void the_default_bucket_size_is_megatrons(void **state) {
    (void)state;
    assert_int_equal(loom__ddp_default_bucket_size(1), 40000000);
    assert_int_equal(loom__ddp_default_bucket_size(40), 40000000);
    assert_int_equal(loom__ddp_default_bucket_size(41), 41000000);
}

static void a_bucket_holds_parameters_of_one_chunk_and_only_the_first_chunk_is_cut(void **state) {
    (void)state;
    const int64_t counts[] = {100, 64, 7, 300, 1, 128, 50}, chunks[] = {0, 0, 0, 0, 1, 1, 2};
    /* Model order; the buffer goes backwards: chunk 2, chunk 1, then chunk 0 in buckets of 200. */
    const int64_t of_200[] = {3, 3, 3, 2, 1, 1, 0}, of_all[] = {2, 2, 2, 2, 1, 1, 0};
    for (int64_t bucket_size = 200; bucket_size >= 0; bucket_size -= 200) {
        memset(places, 0, sizeof places);
        memset(buckets, 0, sizeof buckets);
        assert_int_equal(
            loom__ddp_map(counts, chunks, 7, bucket_size, places, buckets, &bucket_count, &elements), LOOM_OK);
        assert_int_equal(bucket_count, bucket_size ? 4 : 3);
        for (int i = 0; i < 7; i++)
            assert_int_equal(places[6 - i].bucket, bucket_size ? of_200[i] : of_all[i]);
    }
}

static void sizes_that_cannot_be_are_refused(void **state) {
    (void)state;
    const int64_t negative[] = {3, -1}, huge[] = {INT64_MAX / 8, INT64_MAX / 8, 5};
    assert_int_equal(loom__ddp_map(negative, NULL, 2, 0, places, buckets, &bucket_count, &elements), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "parameter 1 of 2 has -1 elements"));
    assert_int_equal(loom__ddp_map(huge, NULL, 3, 0, places, buckets, &bucket_count, &elements), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "parameter 0 of 3"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(buckets_hold_the_parameters_that_megatron_puts_there),
        cmocka_unit_test(every_element_lies_in_one_aligned_place_of_one_bucket),
        cmocka_unit_test(a_bucket_holds_parameters_of_one_chunk_and_only_the_first_chunk_is_cut),
        cmocka_unit_test(the_default_bucket_size_is_megatrons),
        cmocka_unit_test(sizes_that_cannot_be_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
