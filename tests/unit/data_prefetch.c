/* Reading ahead: how far, what comes out where reading fails or does not come back, and that it ends. */
#include <megaloom/data.h>

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

/* Samples that may be read: the reader waits at the gate before the others. */
typedef struct gate {
    pthread_mutex_t mutex;
    pthread_cond_t moved;
    int64_t open, read; /* samples */
    int64_t broken;     /* this one cannot be read; -1 = none */
} gate;

static loom_status gated_get(void *context, int64_t index, const loom_sample_row *row) {
    gate *own = context;
    pthread_mutex_lock(&own->mutex);
    while (index >= own->open)
        pthread_cond_wait(&own->moved, &own->mutex);
    bool broken = index == own->broken;
    own->read++;
    pthread_cond_broadcast(&own->moved);
    pthread_mutex_unlock(&own->mutex);
    row->tokens[0] = row->labels[0] = index;
    row->loss_mask[0] = 1.0f;
    row->position_ids[0] = 0;
    return broken ? loom_fail(LOOM_ERR_IO, "the disk is gone") : LOOM_OK;
}

static void gated_locate(void *context, int64_t index, char *text, size_t bytes) {
    (void)context;
    snprintf(text, bytes, "corpus.bin, byte %lld", (long long)index * 4096);
}

static void open_gate(gate *own, int64_t samples) {
    pthread_mutex_lock(&own->mutex);
    own->open = samples;
    pthread_cond_broadcast(&own->moved);
    pthread_mutex_unlock(&own->mutex);
}

static void wait_read(gate *own, int64_t samples) {
    pthread_mutex_lock(&own->mutex);
    while (own->read < samples)
        pthread_cond_wait(&own->moved, &own->mutex);
    pthread_mutex_unlock(&own->mutex);
}

static gate new_gate(int64_t open, int64_t broken) {
    gate made = {.open = open, .broken = broken};
    pthread_mutex_init(&made.mutex, NULL);
    pthread_cond_init(&made.moved, NULL);
    return made;
}

static loom_data_loader open_loader(const loom_dataset *dataset, int64_t depth, double timeout) {
    loom_data_loader_config config = loom_data_loader_config_default();
    loom_data_loader plain, loader;
    const loom_data_prefetch_config ahead = {depth, timeout, 5};
    assert_int_equal(loom_data_loader_create(dataset, &config, &plain), LOOM_OK);
    assert_int_equal(loom_data_loader_prefetch(&plain, &ahead, &loader), LOOM_OK);
    return loader;
}

static loom_dataset gated(gate *own, int64_t length) {
    return (loom_dataset){
        .context = own, .length = length, .sequence_length = 1, .get = gated_get, .locate = gated_locate};
}

/* The reader stands at the gate, and yet as many as are read ahead can be taken. */
static void as_many_as_asked_are_read_ahead(void **state) {
    (void)state;
    gate own = new_gate(4, -1);
    loom_dataset dataset = gated(&own, 20);
    loom_data_loader loader = open_loader(&dataset, 4, 60);
    loom_batch *batch;
    assert_int_equal(loom_batch_create(1, 1, false, &batch), LOOM_OK);
    wait_read(&own, 4);
    for (int64_t i = 0; i < 4; i++) {
        assert_int_equal(loader.consumed_samples(loader.context), i);
        assert_int_equal(loader.remaining(loader.context), 20 - i);
        assert_int_equal(loader.next(loader.context, batch), LOOM_OK);
        assert_int_equal(batch->tokens[0], i);
    }
    assert_int_equal(loader.consumed_samples(loader.context), 4);
    open_gate(&own, 20);
    for (int64_t i = 4; i < 20; i++) {
        assert_int_equal(loader.next(loader.context, batch), LOOM_OK);
        assert_int_equal(batch->index[0], i);
    }
    assert_int_equal(loader.next(loader.context, batch), LOOM_END);
    assert_int_equal(loader.next(loader.context, batch), LOOM_END);
    loom_batch_destroy(batch);
    loom_data_loader_destroy(&loader);
}

static void a_failing_reader_is_named_where_its_microbatch_is_taken(void **state) {
    (void)state;
    gate own = new_gate(20, 2);
    loom_dataset dataset = gated(&own, 20);
    loom_data_loader loader = open_loader(&dataset, 4, 60);
    loom_batch *batch;
    assert_int_equal(loom_batch_create(1, 1, false, &batch), LOOM_OK);
    assert_int_equal(loader.next(loader.context, batch), LOOM_OK);
    assert_int_equal(loader.next(loader.context, batch), LOOM_OK);
    for (int i = 0; i < 2; i++) {
        loom_error_clear();
        assert_int_equal(loader.next(loader.context, batch), LOOM_ERR_IO);
        assert_string_equal(
            loom_error_message(), "data-parallel rank 0, sample 2, corpus.bin, byte 8192: the disk is gone");
    }
    assert_int_equal(loader.seek(loader.context, 3), LOOM_OK); /* behind it all is well */
    assert_int_equal(loader.next(loader.context, batch), LOOM_OK);
    assert_int_equal(batch->tokens[0], 3);
    loom_batch_destroy(batch);
    loom_data_loader_destroy(&loader);
}

static void a_reader_that_does_not_come_back_is_named(void **state) {
    (void)state;
    gate own = new_gate(1, -1);
    loom_dataset dataset = gated(&own, 20);
    loom_data_loader loader = open_loader(&dataset, 2, 0.2);
    loom_batch *batch;
    assert_int_equal(loom_batch_create(1, 1, false, &batch), LOOM_OK);
    assert_int_equal(loader.next(loader.context, batch), LOOM_OK);
    assert_int_equal(loader.next(loader.context, batch), LOOM_ERR_TIMEOUT);
    assert_string_equal(loom_error_message(), "rank 5: the reader of the data has not given a microbatch within 0.2 s; "
                                              "it is reading sample 1, corpus.bin, byte 4096");
    assert_int_equal(loader.seek(loader.context, 0), LOOM_ERR_TIMEOUT);
    assert_non_null(strstr(loom_error_message(), "has not stopped within 0.2 s"));
    open_gate(&own, 20); /* the reader comes back in the end, so that the test can free everything */
    assert_int_equal(loader.seek(loader.context, 7), LOOM_OK);
    assert_int_equal(loader.next(loader.context, batch), LOOM_OK);
    assert_int_equal(batch->tokens[0], 7);
    loom_batch_destroy(batch);
    loom_data_loader_destroy(&loader);
}

static void a_loader_is_destroyed_wherever_its_reader_is(void **state) {
    (void)state;
    for (int taken = 0; taken < 6; taken++) {
        gate own = new_gate(20, taken == 5 ? 3 : -1);
        loom_dataset dataset = gated(&own, 20);
        loom_data_loader loader = open_loader(&dataset, 1 + taken % 3, 60);
        loom_batch *batch;
        assert_int_equal(loom_batch_create(1, 1, false, &batch), LOOM_OK);
        for (int i = 0; i < taken; i++)
            (void)loader.next(loader.context, batch);
        loom_batch_destroy(batch);
        loom_data_loader_destroy(&loader);
    }
}

static void illegal_depths_and_batches_are_refused(void **state) {
    (void)state;
    gate own = new_gate(20, -1);
    loom_dataset dataset = gated(&own, 20);
    loom_data_loader_config config = loom_data_loader_config_default();
    loom_data_loader plain, loader;
    assert_int_equal(loom_data_loader_create(&dataset, &config, &plain), LOOM_OK);
    const loom_data_prefetch_config none = {0, 1, -1}, negative = {1, -1, -1}, ahead = {1, 60, -1};
    assert_int_equal(loom_data_loader_prefetch(&plain, &none, &loader), LOOM_ERR_CONFIG);
    assert_int_equal(loom_data_loader_prefetch(&plain, &negative, &loader), LOOM_ERR_CONFIG);
    assert_int_equal(loom_data_loader_prefetch(&plain, &ahead, &loader), LOOM_OK);
    loom_batch *wide;
    assert_int_equal(loom_batch_create(1, 2, false, &wide), LOOM_OK);
    assert_int_equal(loader.next(loader.context, wide), LOOM_ERR_ARGUMENT);
    loom_batch_destroy(wide);
    loom_data_loader_destroy(&loader);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_many_as_asked_are_read_ahead),
        cmocka_unit_test(a_failing_reader_is_named_where_its_microbatch_is_taken),
        cmocka_unit_test(a_reader_that_does_not_come_back_is_named),
        cmocka_unit_test(a_loader_is_destroyed_wherever_its_reader_is),
        cmocka_unit_test(illegal_depths_and_batches_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
