/* Samplers, loaders and batches: which samples a rank gets, from where, and in what numbers. */
#include <megaloom/data.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

/* A dataset whose tokens are the sample's number. */
static loom_status count_get(void *context, int64_t index, const loom_sample_row *row) {
    (void)context;
    for (int64_t i = 0; i < 2; i++) {
        row->tokens[i] = row->labels[i] = index < 0 ? 0 : index;
        row->loss_mask[i] = 1.0f; /* on purpose for padding rows too: the loader masks them */
        row->position_ids[i] = i;
    }
    return LOOM_OK;
}

static loom_dataset counting(int64_t length) {
    return (loom_dataset){.length = length, .sequence_length = 2, .get = count_get};
}

static loom_data_loader_config sizes(int64_t global, int64_t micro, int64_t rank, int64_t ranks) {
    loom_data_loader_config config = loom_data_loader_config_default();
    config.global_batch_size = global;
    config.micro_batch_size = micro;
    config.data_parallel_rank = rank;
    config.data_parallel_size = ranks;
    return config;
}

/* Reads up to `most` samples of a loader; returns how many came before its end. */
static int64_t drain(const loom_dataset *dataset, const loom_data_loader_config *config, int64_t most, int64_t *tokens,
    int64_t *samples, int64_t *consumed) {
    loom_data_loader loader;
    loom_batch *batch;
    assert_int_equal(loom_data_loader_create(dataset, config, &loader), LOOM_OK);
    assert_int_equal(loom_batch_create(config->micro_batch_size, 2, false, &batch), LOOM_OK);
    int64_t found = 0;
    while (found < most) {
        int64_t left = loader.remaining(loader.context);
        loom_status status = loader.next(loader.context, batch);
        assert_int_equal(left == 0, status == LOOM_END);
        if (status == LOOM_END)
            break;
        assert_int_equal(status, LOOM_OK);
        for (int64_t row = 0; row < batch->b; row++) {
            tokens[found] = batch->index[row];
            samples[found++] = batch->sample[row];
            assert_int_equal(batch->tokens[2 * row + 1], batch->index[row] < 0 ? 0 : batch->index[row]);
            assert_true(batch->loss_mask[2 * row] == (batch->index[row] < 0 ? 0.0f : 1.0f));
        }
    }
    *consumed = loader.consumed_samples(loader.context);
    loom_batch_destroy(batch);
    loom_data_loader_destroy(&loader);
    return found;
}

static void ten_samples_by_two_on_two_ranks_are_two_batches(void **state) {
    (void)state;
    loom_dataset dataset = counting(10);
    int64_t got[16], samples[16], consumed;
    static const int64_t wanted[2][4] = {{0, 1, 4, 5}, {2, 3, 6, 7}};
    for (int64_t rank = 0; rank < 2; rank++) {
        loom_data_loader_config config = sizes(4, 2, rank, 2);
        assert_int_equal(drain(&dataset, &config, 16, got, samples, &consumed), 4);
        assert_memory_equal(got, wanted[rank], sizeof wanted[rank]);
        assert_int_equal(consumed, 8);
    }
}

static void three_rows_in_batches_of_four_are_one_batch_with_a_pad_row(void **state) {
    (void)state;
    loom_dataset dataset = counting(3);
    loom_data_loader_config config = sizes(4, 4, 0, 1);
    config.drop_last = false;
    config.pad_samples_to_global_batch_size = true;
    int64_t got[8], samples[8], consumed;
    static const int64_t wanted[4] = {0, 1, 2, -1};
    assert_int_equal(drain(&dataset, &config, 8, got, samples, &consumed), 4);
    assert_memory_equal(got, wanted, sizeof wanted);
    assert_int_equal(consumed, 4);
}

static void the_last_incomplete_batch_can_be_kept(void **state) {
    (void)state;
    loom_dataset dataset = counting(5);
    loom_data_loader_config config = sizes(4, 2, 0, 1);
    config.drop_last = false;
    int64_t got[8], samples[8], consumed;
    assert_int_equal(drain(&dataset, &config, 8, got, samples, &consumed), 5);
    assert_int_equal(got[4], 4);
    assert_int_equal(consumed, 5);
}

static void no_step_begins_that_cannot_be_finished(void **state) {
    (void)state;
    loom_dataset dataset = counting(14); /* one global batch of 8, and three microbatches of 2 that make no second */
    loom_data_loader_config config = sizes(8, 2, 0, 1);
    int64_t got[16], samples[16], consumed;
    assert_int_equal(drain(&dataset, &config, 16, got, samples, &consumed), 8);
    assert_int_equal(consumed, 8);
}

static void a_resumed_stream_equals_the_uninterrupted_one(void **state) {
    (void)state;
    loom_dataset dataset = counting(10);
    loom_data_loader_config config = sizes(4, 2, 0, 1);
    config.cycle = true;
    int64_t whole[24], numbers[24], consumed;
    assert_int_equal(drain(&dataset, &config, 24, whole, numbers, &consumed), 24); /* three epochs of 8 */
    assert_int_equal(consumed, 24);
    for (int64_t i = 0; i < 24; i++) {
        assert_int_equal(whole[i], i % 8);
        assert_int_equal(numbers[i], i);
    }
    static const int64_t stops[] = {4, 8, 20};
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) {
        int64_t rest[24], rest_numbers[24], left = 24 - stops[i];
        config.consumed_samples = stops[i];
        assert_int_equal(drain(&dataset, &config, left, rest, rest_numbers, &consumed), left);
        assert_memory_equal(rest, whole + stops[i], (size_t)left * sizeof *rest);
        assert_memory_equal(rest_numbers, numbers + stops[i], (size_t)left * sizeof *rest);
    }
}

static void seeking_equals_starting_there(void **state) {
    (void)state;
    loom_dataset dataset = counting(20);
    loom_data_loader_config config = sizes(4, 2, 1, 2);
    loom_data_loader loader;
    loom_batch *batch;
    assert_int_equal(loom_data_loader_create(&dataset, &config, &loader), LOOM_OK);
    assert_int_equal(loom_batch_create(2, 2, false, &batch), LOOM_OK);
    assert_int_equal(loader.seek(loader.context, 12), LOOM_OK);
    assert_int_equal(loader.remaining(loader.context), 2);
    assert_int_equal(loader.next(loader.context, batch), LOOM_OK);
    assert_int_equal(batch->index[0], 14);
    assert_int_equal(loader.consumed_samples(loader.context), 16);
    assert_int_equal(loader.seek(loader.context, 20), LOOM_OK);
    assert_int_equal(loader.next(loader.context, batch), LOOM_END);
    assert_int_equal(loader.seek(loader.context, -1), LOOM_ERR_CONFIG);
    loom_batch_destroy(batch);
    loom_data_loader_destroy(&loader);
    loom_data_loader_destroy(&loader);
}

static void every_layout_hands_out_the_same_samples_under_the_same_numbers(void **state) {
    (void)state;
    static const int64_t layouts[][2] = {{1, 1}, {1, 2}, {1, 4}, {1, 12}, {2, 1}, {2, 2}, {3, 4}, {4, 3}, {12, 1}};
    loom_dataset dataset = counting(36);
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        int64_t seen[36];
        memset(seen, -1, sizeof seen);
        for (int64_t rank = 0; rank < layouts[l][0]; rank++) {
            loom_data_loader_config config = sizes(12, layouts[l][1], rank, layouts[l][0]);
            int64_t got[36], samples[36], consumed, count;
            count = drain(&dataset, &config, 36, got, samples, &consumed);
            assert_int_equal(count, 36 / layouts[l][0]);
            for (int64_t i = 0; i < count; i++) {
                assert_int_equal(got[i], samples[i]);
                /* sample n belongs to step n / 12, which each rank reads as its share of that step */
                assert_int_equal(samples[i] / 12, i / (12 / layouts[l][0]));
                seen[samples[i]]++;
            }
        }
        for (int64_t i = 0; i < 36; i++)
            assert_int_equal(seen[i], 0);
    }
}

static void a_global_batch_of_10_on_2x2_is_refused_naming_8_and_12(void **state) {
    (void)state;
    int64_t microbatches;
    assert_int_equal(loom_data_microbatches(10, 2, 2, &microbatches), LOOM_ERR_CONFIG);
    assert_non_null(strstr(loom_error_message(), "global_batch_size is 10"));
    assert_non_null(strstr(loom_error_message(), "nearest legal 8 or 12"));
    assert_int_equal(loom_data_microbatches(3, 2, 2, &microbatches), LOOM_ERR_CONFIG);
    assert_non_null(strstr(loom_error_message(), "nearest legal 4"));
    assert_int_equal(loom_data_microbatches(12, 2, 2, &microbatches), LOOM_OK);
    assert_int_equal(microbatches, 3);
    assert_int_equal(loom_data_microbatches(0, 2, 2, &microbatches), LOOM_ERR_CONFIG);
    assert_int_equal(loom_data_microbatches(8, 0, 2, &microbatches), LOOM_ERR_CONFIG);
    assert_int_equal(loom_data_microbatches(8, 2, -1, &microbatches), LOOM_ERR_CONFIG);
    assert_int_equal(loom_data_microbatches(8, INT64_MAX, 2, &microbatches), LOOM_ERR_CONFIG);
}

static void loaders_refuse_what_they_cannot_do(void **state) {
    (void)state;
    loom_dataset dataset = counting(3);
    loom_data_loader loader;
    loom_data_loader_config config = sizes(4, 2, 0, 2);
    assert_int_equal(loom_data_loader_create(&dataset, &config, &loader), LOOM_ERR_CONFIG); /* no whole global batch */
    dataset = counting(0);
    config.drop_last = false;
    assert_int_equal(loom_data_loader_create(&dataset, &config, &loader), LOOM_ERR_CONFIG);
    dataset = counting(8);
    config.data_parallel_rank = 2;
    assert_int_equal(loom_data_loader_create(&dataset, &config, &loader), LOOM_ERR_CONFIG);
    config.data_parallel_rank = 1;
    assert_int_equal(loom_data_loader_create(&dataset, &config, &loader), LOOM_OK);
    loom_batch *small;
    assert_int_equal(loom_batch_create(1, 2, false, &small), LOOM_OK);
    assert_int_equal(loader.next(loader.context, small), LOOM_ERR_ARGUMENT);
    loom_batch_destroy(small);
    assert_int_equal(loom_batch_create(2, 3, false, &small), LOOM_OK);
    assert_int_equal(loader.next(loader.context, small), LOOM_ERR_ARGUMENT);
    loom_batch_destroy(small);
    loom_batch_destroy(NULL);
    loom_data_loader_destroy(&loader);
    assert_int_equal(loom_batch_create(0, 3, false, &small), LOOM_ERR_ARGUMENT);
    assert_int_equal(loom_batch_create(INT64_MAX, 3, false, &small), LOOM_ERR_ARGUMENT);
}

/* The user's own: every rank reads backwards. */
static loom_status backwards_length(void *context, const loom_data_sampler_config *config, int64_t *batches) {
    ++*(int *)context;
    return loom_data_sampler_single()->length(NULL, config, batches);
}

static loom_status backwards_batch(
    void *context, const loom_data_sampler_config *config, int64_t batch, int64_t *samples, int64_t *count) {
    (void)context;
    loom_status status = loom_data_sampler_single()->batch(NULL, config, batch, samples, count);
    for (int64_t i = 0; status == LOOM_OK && i < *count; i++)
        samples[i] = config->total_samples - 1 - samples[i];
    return status;
}

static void users_bring_their_own_sampler(void **state) {
    (void)state;
    int calls = 0;
    const loom_data_sampler backwards = {
        .name = "backwards", .context = &calls, .length = backwards_length, .batch = backwards_batch};
    loom_dataset dataset = counting(6);
    loom_data_loader_config config = sizes(2, 2, 0, 1);
    config.sampler = &backwards;
    int64_t got[8], samples[8], consumed;
    static const int64_t wanted[6] = {5, 4, 3, 2, 1, 0};
    assert_int_equal(drain(&dataset, &config, 8, got, samples, &consumed), 6);
    assert_memory_equal(got, wanted, sizeof wanted);
    assert_int_equal(samples[5], 5); /* numbers in the stream stay in order */
    assert_true(calls > 0);
}

static void samplers_are_found_by_name(void **state) {
    (void)state;
    const loom_data_sampler *sampler;
    assert_int_equal(loom_data_sampler_find("single", &sampler), LOOM_OK);
    assert_ptr_equal(sampler, loom_data_sampler_single());
    static const char *const names[] = {"single", "cyclic", "batch", "random_batch"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        assert_int_equal(loom_data_sampler_find(names[i], &sampler), LOOM_OK);
        assert_string_equal(sampler->name, names[i]);
    }
    assert_int_equal(loom_data_sampler_find("singel", &sampler), LOOM_ERR_CONFIG);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ten_samples_by_two_on_two_ranks_are_two_batches),
        cmocka_unit_test(three_rows_in_batches_of_four_are_one_batch_with_a_pad_row),
        cmocka_unit_test(the_last_incomplete_batch_can_be_kept),
        cmocka_unit_test(no_step_begins_that_cannot_be_finished),
        cmocka_unit_test(a_resumed_stream_equals_the_uninterrupted_one),
        cmocka_unit_test(seeking_equals_starting_there),
        cmocka_unit_test(every_layout_hands_out_the_same_samples_under_the_same_numbers),
        cmocka_unit_test(a_global_batch_of_10_on_2x2_is_refused_naming_8_and_12),
        cmocka_unit_test(loaders_refuse_what_they_cannot_do),
        cmocka_unit_test(users_bring_their_own_sampler),
        cmocka_unit_test(samplers_are_found_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
