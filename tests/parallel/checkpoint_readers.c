/* One open checkpoint, read by many threads at once: each finds what a single reader finds, also where the first read
 * of a chunk compares its checksum; under ThreadSanitizer this is the test that nothing there is written unguarded. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <megaloom/checkpoint.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { READERS = 6 };

typedef struct reader {
    pthread_t thread;
    const loom_checkpoint *checkpoint;
    int64_t first; /* begins with this tensor, so that readers meet and cross */
    uint64_t sum;
    int64_t values; /* read whole */
    loom_status status;
    char message[256];
} reader;

/* In the order of the tensors, wherever the reader began. */
static uint64_t mix(uint64_t number, const unsigned char *bytes, size_t count) {
    uint64_t sum = number * UINT64_C(0x9e3779b97f4a7c15);
    for (size_t i = 0; i < count; i++)
        sum = (sum ^ bytes[i]) * UINT64_C(0x100000001b3);
    return sum;
}

static loom_status read_tensor(reader *r, int64_t number) {
    const loom_checkpoint_tensor *tensor = loom_checkpoint_tensor_at(r->checkpoint, number);
    const int64_t origin[LOOM_CHECKPOINT_MAX_DIMS] = {0};
    size_t bytes = (size_t)tensor->elements * loom_dtype_size(tensor->dtype);
    unsigned char *data = malloc(bytes + 1);
    if (!data)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %s", tensor->name);
    loom_status status = loom_checkpoint_read(r->checkpoint, tensor, origin, tensor->shape, tensor->dtype, data);
    if (!status)
        r->sum += mix((uint64_t)number + 1, data, bytes);
    free(data);
    return status;
}

static loom_status read_object(reader *r, int64_t number) {
    const loom_checkpoint_object *object = loom_checkpoint_object_at(r->checkpoint, number);
    loom_value_pool *pool = NULL;
    const loom_value *value = NULL;
    LOOM_TRY(loom_value_pool_create(&pool));
    loom_status status = loom_checkpoint_read_object(r->checkpoint, object, pool, &value);
    if (!status)
        r->values += 1 + value->count;
    loom_value_pool_destroy(pool);
    return status;
}

static loom_status read_all(reader *r) {
    const loom_checkpoint_info *info = loom_checkpoint_get_info(r->checkpoint);
    for (int64_t i = 0; i < info->tensors; i++)
        LOOM_TRY(read_tensor(r, (r->first + i) % info->tensors));
    for (int64_t i = 0; i < info->objects; i++)
        LOOM_TRY(read_object(r, i));
    return LOOM_OK;
}

static void *reader_main(void *argument) {
    reader *r = argument;
    r->status = read_all(r);
    snprintf(r->message, sizeof r->message, "%s", r->status ? loom_error_message() : "");
    return NULL;
}

static void read_together(const char *path) {
    reader readers[READERS] = {{.first = 0}}, alone = {.first = 0};
    loom_checkpoint *checkpoint = NULL, *again = NULL;
    if (loom_checkpoint_open(path, &checkpoint) || loom_checkpoint_open(path, &again))
        fail_msg("%s", loom_error_message());
    alone.checkpoint = again;
    reader_main(&alone);
    assert_int_equal(alone.status, LOOM_OK);
    for (int i = 0; i < READERS; i++) {
        readers[i].checkpoint = checkpoint;
        readers[i].first = i * loom_checkpoint_get_info(checkpoint)->tensors / READERS;
        assert_int_equal(pthread_create(&readers[i].thread, NULL, reader_main, &readers[i]), 0);
    }
    for (int i = 0; i < READERS; i++)
        assert_int_equal(pthread_join(readers[i].thread, NULL), 0);
    for (int i = 0; i < READERS; i++) {
        if (readers[i].status)
            fail_msg("%s, reader %d: %s", path, i, readers[i].message);
        if (readers[i].sum != alone.sum || readers[i].values != alone.values)
            fail_msg("%s, reader %d has read other values than a single reader", path, i);
    }
    assert_true(alone.sum != 0);
    loom_checkpoint_close(checkpoint);
    loom_checkpoint_close(again);
}

static void readers_of_one_checkpoint_find_what_one_reader_finds(void **state) {
    static const char *const names[] = {
        "tp2_pp2_fully_reshardable", "tp2_pp1_dp2_dp_reshardable", "nemo_tp2_pp2_dp1", "dcp_single_file/dcp"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/golden/ckpt/%s", MEGALOOM_TESTS, names[i]);
        read_together(path);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(readers_of_one_checkpoint_find_what_one_reader_finds),
    };
    return cmocka_run_group_tests_name("parallel.checkpoint_readers", tests, NULL, NULL);
}
