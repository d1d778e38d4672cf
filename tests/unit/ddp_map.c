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

/* chunks NULL: all are of chunk 0. */
static loom_status try_chunks(
    const int64_t *counts, const int64_t *chunks, int64_t count, const loom__ddp_map_options *options) {
    loom__ddp_entry entries[MAX] = {0};
    for (int64_t i = 0; i < count; i++)
        entries[i] = (loom__ddp_entry){.count = counts[i], .chunk = chunks ? chunks[i] : 0};
    memset(places, 0, sizeof places);
    memset(buckets, 0, sizeof buckets);
    return loom__ddp_map(entries, count, options, places, buckets, &bucket_count, &elements);
}

static loom_status try_map(const int64_t *counts, int64_t count, const loom__ddp_map_options *options) {
    return try_chunks(counts, NULL, count, options);
}

static void map(const int64_t *counts, int64_t count, int64_t bucket_size) {
    const loom__ddp_map_options options = {.bucket_size = bucket_size, .alignment = LOOM__DDP_ALIGNMENT};
    assert_int_equal(try_map(counts, count, &options), LOOM_OK);
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
    map(counts, 7, -1);
    assert_int_equal(bucket_count, 1);
    map(counts, 7, 0);
    assert_int_equal(bucket_count, 7);
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
        int64_t bucket_size = (int64_t)((random >> 16) % 500) - 1;
        map(counts, count, bucket_size);
        int64_t at = 0, place = 0;
        for (int64_t b = 0; b < bucket_count; b++) {
            int64_t held = 0;
            assert_int_equal(buckets[b].start, at);
            assert_int_equal(buckets[b].first_place, place);
            assert_true(buckets[b].places > 0);
            for (int64_t end = place + buckets[b].places; place < end; place++) {
                /* Only the last parameter of a bucket makes it full. */
                assert_true(bucket_size < 0 || held == 0 || held < bucket_size);
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

static void the_shards_of_a_bucket_are_equal_and_hold_each_element_once(void **state) {
    (void)state;
    const int64_t counts[] = {1, 700, 3, 0, 128, 5000, 17, 64, 1};
    for (int64_t shards = 1; shards <= 7; shards++)
        for (int64_t bucket_size = -1; bucket_size < 6000; bucket_size += 1500) {
            const loom__ddp_map_options options = {.bucket_size = bucket_size, .shards = shards};
            int64_t held[9] = {0}, states = 0;
            assert_int_equal(try_map(counts, 9, &options), LOOM_OK);
            assert_int_equal(elements % shards, 0);
            for (int64_t shard = 0; shard < shards; shard++) {
                int64_t state_end = 0;
                for (int64_t place = 0; place < 9; place++) {
                    loom__ddp_part part =
                        loom__ddp_part_of(&places[place], &buckets[places[place].bucket], shards, shard);
                    assert_true(part.start >= places[place].start);
                    assert_true(part.start + part.count <= places[place].start + places[place].count);
                    if (part.count == 0)
                        continue;
                    /* Parts lie where the shard's earlier ones end, gaps apart. */
                    assert_true(part.state >= state_end);
                    state_end = part.state + part.count;
                    held[place] += part.count;
                }
                assert_true(state_end <= elements / shards);
                states += state_end > 0;
            }
            for (int64_t place = 0; place < 9; place++)
                assert_int_equal(held[place], places[place].count);
            assert_int_equal(states, shards);
        }
}

static void the_first_bucket_of_the_pytorch_rule_is_smaller(void **state) {
    (void)state;
    const int64_t counts[] = {400, 100, 600, 30, 30, 30, 30};
    const loom__ddp_map_options options = {.bucket_size = 500, .first_bucket_size = 50, .alignment = 16};
    const int64_t wanted[] = {0, 0, 1, 1, 1, 2, 2};
    assert_int_equal(try_map(counts, 7, &options), LOOM_OK);
    for (int64_t place = 0; place < 7; place++)
        assert_int_equal(places[place].bucket, wanted[place]);
    assert_int_equal(bucket_count, 3);
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
    for (int cut = 0; cut < 2; cut++) {
        const loom__ddp_map_options options = {.bucket_size = cut ? 200 : -1, .alignment = LOOM__DDP_ALIGNMENT};
        assert_int_equal(try_chunks(counts, chunks, 7, &options), LOOM_OK);
        assert_int_equal(bucket_count, cut ? 4 : 3);
        for (int i = 0; i < 7; i++)
            assert_int_equal(places[6 - i].bucket, cut ? of_200[i] : of_all[i]);
    }
}

static void sizes_that_cannot_be_are_refused(void **state) {
    (void)state;
    const int64_t negative[] = {3, -1}, huge[] = {INT64_MAX / 8, INT64_MAX / 8, 5};
    const loom__ddp_map_options plain = {.bucket_size = -1, .alignment = 16}, unaligned = {.bucket_size = -1},
                                many = {.shards = INT64_MAX / 2};
    assert_int_equal(try_map(negative, 2, &plain), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "parameter 1 of 2 has -1 elements"));
    assert_int_equal(try_map(huge, 3, &plain), LOOM_ERR_ARGUMENT);
    assert_non_null(strstr(loom_error_message(), "parameter 0 of 3"));
    assert_int_equal(try_map(huge, 1, &unaligned), LOOM_ERR_ARGUMENT);
    assert_int_equal(try_map(huge, 1, &many), LOOM_ERR_ARGUMENT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(buckets_hold_the_parameters_that_megatron_puts_there),
        cmocka_unit_test(every_element_lies_in_one_aligned_place_of_one_bucket),
        cmocka_unit_test(a_bucket_holds_parameters_of_one_chunk_and_only_the_first_chunk_is_cut),
        cmocka_unit_test(the_shards_of_a_bucket_are_equal_and_hold_each_element_once),
        cmocka_unit_test(the_first_bucket_of_the_pytorch_rule_is_smaller),
        cmocka_unit_test(the_default_bucket_size_is_megatrons),
        cmocka_unit_test(sizes_that_cannot_be_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
