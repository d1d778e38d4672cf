/* The pickle reader: what becomes of each kind of value, what is refused by name, and that nothing in a pickle can make
 * it run, loop or grow. */
#include "format/pickle.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

static loom_value_pool *pool;

static int setup(void **state) {
    (void)state;
    return loom_value_pool_create(&pool) == LOOM_OK ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    loom_value_pool_destroy(pool);
    return 0;
}

static loom_status read(const void *data, size_t bytes, const loom_value **root) {
    loom__pickled pickled = {0};
    loom_status status = loom__pickle_read("test", data, bytes, pool, &pickled);
    if (status == LOOM_OK)
        *root = pickled.root;
    return status;
}

/* The bytes of a literal, without its zero. */
#define READ(text, root) read(text, sizeof(text) - 1, root)

static void check_json(const loom_value *value, const char *wanted) {
    char *text = NULL;
    assert_int_equal(loom_value_to_json(value, 0, &text), LOOM_OK);
    assert_string_equal(text, wanted);
    free(text);
}

static void values_become_what_they_are(void **state) {
    (void)state;
    const loom_value *root = NULL;
    assert_int_equal(
        READ("\x80\x02]q\0(K\x05J\xff\xff\xff\xff\x8a\x02\x00\x80N\x88X\x02\0\0\0\xc3\xa4G\x3f\xf8\0\0\0\0\0\0e.",
            &root),
        LOOM_OK);
    check_json(root, "[5, -1, -32768, null, true, \"\xc3\xa4\", 1.5]");
    assert_int_equal(
        READ("\x80\x04\x95\x20\0\0\0\0\0\0\0}\x94(\x8c\x01\x61\x94K\x01K\x02\x86u.", &root), LOOM_ERR_FORMAT);
    assert_int_equal(READ("\x80\x04}\x94(\x8c\x01\x61\x94K\x01K\x02\x86u.", &root), LOOM_OK);
    check_json(root, "{\"a\": {\"__tuple__\": [1, 2]}}");
    assert_int_equal(READ("\x80\x02}K\x01N\x73.", &root), LOOM_OK);
    check_json(root, "{\"__dict__\": [[1, null]]}");
    assert_int_equal(READ("\x80\x02"
                          "c_codecs\nencode\nX\x03\0\0\0\xc3\xbf\x41X\x06\0\0\0latin1\x86R.",
                         &root),
        LOOM_OK);
    assert_int_equal(root->kind, LOOM_VALUE_BYTES);
    assert_int_equal(root->count, 2);
    assert_memory_equal(root->text, "\xff\x41", 2);
}

static void a_call_is_data(void **state) {
    (void)state;
    const loom_value *root = NULL;
    assert_int_equal(READ("\x80\x02"
                          "cposix\nsystem\nX\x04\0\0\0true\x85R.",
                         &root),
        LOOM_OK);
    assert_int_equal(root->kind, LOOM_VALUE_OBJECT);
    assert_string_equal(root->object->name, "posix.system");
    assert_true(root->object->called);
    check_json(root, "{\"__object__\": \"posix.system\", \"arguments\": {\"__tuple__\": [\"true\"]}}");
    assert_int_equal(READ("\x80\x02"
                          "ctorch\nSize\nK\x02K\x03\x86\x85R.",
                         &root),
        LOOM_OK);
    check_json(root, "{\"__tuple__\": [2, 3]}");
}

static void check_refused(const char *data, size_t bytes, loom_status wanted, const char *said) {
    const loom_value *root = NULL;
    assert_int_equal(read(data, bytes, &root), wanted);
    if (!strstr(loom_error_message(), said))
        fail_msg("expected '%s' in: %s", said, loom_error_message());
}

#define REFUSED(text, status, said) check_refused(text, sizeof(text) - 1, status, said)

static void what_is_wrong_is_named(void **state) {
    (void)state;
    REFUSED("", LOOM_ERR_FORMAT, "ends at byte 0");
    REFUSED("\x80\x02", LOOM_ERR_FORMAT, "ends at byte 2");
    REFUSED("\x80\x06N.", LOOM_ERR_UNSUPPORTED, "protocol 6");
    REFUSED("\x80\x02I1\n.", LOOM_ERR_UNSUPPORTED, "opcode 0x49 at byte 2");
    REFUSED("\x80\x02NN.", LOOM_ERR_FORMAT, "2 values");
    REFUSED("\x80\x02N.N", LOOM_ERR_FORMAT, "1 more bytes");
    REFUSED("\x80\x02t.", LOOM_ERR_FORMAT, "needs a mark");
    REFUSED("\x80\x02(N\x85\x85R.", LOOM_ERR_FORMAT, "takes 2 values, 1 are there");
    REFUSED("\x80\x02h\x07.", LOOM_ERR_FORMAT, "memo number 7");
    REFUSED("\x80\x02Nr\xff\xff\xff\xff.", LOOM_ERR_FORMAT, "memo number 4294967295");
    REFUSED("\x80\x02X\xff\xff\xff\xff"
            "a.",
        LOOM_ERR_FORMAT, "4294967295 more are needed");
    REFUSED("\x80\x02X\x01\0\0\0\xff.", LOOM_ERR_FORMAT, "not UTF-8");
    REFUSED("\x80\x02\x8a\x09\x01\x01\x01\x01\x01\x01\x01\x01\x01.", LOOM_ERR_UNSUPPORTED, "whole number of 9 bytes");
    REFUSED("\x80\x02NNb.", LOOM_ERR_FORMAT, "goes to a None");
    REFUSED("\x80\x02N]a.", LOOM_ERR_FORMAT, "go into a None");
}

static void values_that_hold_themselves_are_refused(void **state) {
    (void)state;
    REFUSED("\x80\x02]q\0h\0a.", LOOM_ERR_FORMAT, "or themselves");
    char deep[512] = "\x80\x02";
    size_t at = 2;
    memset(deep + at, ']', 120);
    at += 120;
    memset(deep + at, 'a', 119);
    at += 119;
    deep[at++] = '.';
    check_refused(deep, at, LOOM_ERR_FORMAT, "100 deep");
}

/* [x, x] of [x, x] of …: 2^60 values in some 400 bytes. */
static void a_value_that_doubles_at_every_level_is_refused(void **state) {
    (void)state;
    char text[1024] = "\x80\x02N";
    size_t at = 3;
    for (int i = 0; i < 60; i++) {
        memcpy(text + at, "2\x86", 2);
        at += 2;
    }
    text[at++] = '.';
    check_refused(text, at, LOOM_ERR_FORMAT, "more than 64 times");
}

#define TENSOR(kind, elements, offset, size, stride)                                                                   \
    "\x80\x02"                                                                                                         \
    "ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\n" kind "\nX\x01\0\0\0"                             \
    "0X\x03\0\0\0"                                                                                                     \
    "cpuK" elements "tQK" offset "K" size "\x85K" stride "\x85\x89"                                                    \
    "ccollections\nOrderedDict\n)RtR."

static void tensors_stay_inside_their_storage(void **state) {
    (void)state;
    const loom_value *root = NULL;
    assert_int_equal(READ(TENSOR("FloatStorage", "\x06", "\x01", "\x05", "\x01"), &root), LOOM_OK);
    assert_int_equal(root->kind, LOOM_VALUE_TENSOR);
    assert_int_equal(root->tensor->dtype, LOOM_F32);
    assert_int_equal(root->tensor->shape[0], 5);
    REFUSED(TENSOR("FloatStorage", "\x06", "\x02", "\x05", "\x01"), LOOM_ERR_FORMAT, "number 6 of a storage of 6");
    REFUSED(TENSOR("FloatStorage", "\x06", "\x00", "\x03", "\x03"), LOOM_ERR_FORMAT, "number 6 of a storage of 6");
    REFUSED(TENSOR("FloatStorage", "\x06", "\x00", "\x40", "\x00"), LOOM_ERR_FORMAT, "64 elements");
    REFUSED(TENSOR("QUInt8Storage", "\x06", "\x00", "\x05", "\x01"), LOOM_ERR_UNSUPPORTED, "torch.QUInt8Storage");
}

static void what_is_written_is_read_back(void **state) {
    (void)state;
    static const int64_t numbers[] = {0, 255, 256, 65536, -1, INT64_MIN, INT64_MAX};
    static const int64_t shape[] = {2, 0};
    loom_value *dict = NULL, *value = NULL, *arguments = NULL;
    assert_int_equal(loom_value_dict(pool, &dict), LOOM_OK);
    assert_int_equal(loom_value_ints(pool, true, numbers, 7, &value), LOOM_OK);
    assert_int_equal(loom_value_set(pool, dict, "numbers", value), LOOM_OK);
    assert_int_equal(loom_value_bytes(pool, "\0\x7f\x80\xff", 4, &value), LOOM_OK);
    assert_int_equal(loom_value_set(pool, dict, "bytes", value), LOOM_OK);
    assert_int_equal(loom_value_tensor_copy(pool, LOOM_BF16, 2, shape, NULL, &value), LOOM_OK);
    assert_int_equal(loom_value_set(pool, dict, "empty", value), LOOM_OK);
    assert_int_equal(loom_value_ints(pool, true, numbers, 1, &arguments), LOOM_OK);
    assert_int_equal(loom_value_object_create(pool, "a.b.C", false, arguments, dict, &value), LOOM_OK);
    loom__buffer buffer = {0};
    loom__tensor_list tensors = {0};
    const loom_value *back = NULL;
    assert_int_equal(loom__pickle_write(value, &tensors, &buffer), LOOM_OK);
    assert_int_equal(tensors.count, 1);
    assert_int_equal(read(buffer.bytes, buffer.count, &back), LOOM_OK);
    assert_int_equal(loom_value_get(back, "bytes")->count, 4);
    assert_memory_equal(loom_value_get(back, "bytes")->text, "\0\x7f\x80\xff", 4);
    for (int i = 0; i < 7; i++)
        assert_true(loom_value_get(back, "numbers")->items[i]->integer == numbers[i]);
    char *one = NULL, *two = NULL;
    assert_int_equal(loom_value_to_json(value, 0, &one), LOOM_OK);
    assert_int_equal(loom_value_to_json(back, 0, &two), LOOM_OK);
    assert_string_equal(one, two);
    free(one);
    free(two);
    free(buffer.bytes);
    free((void *)tensors.items);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(values_become_what_they_are, setup, teardown),
        cmocka_unit_test_setup_teardown(a_call_is_data, setup, teardown),
        cmocka_unit_test_setup_teardown(what_is_wrong_is_named, setup, teardown),
        cmocka_unit_test_setup_teardown(values_that_hold_themselves_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(a_value_that_doubles_at_every_level_is_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(tensors_stay_inside_their_storage, setup, teardown),
        cmocka_unit_test_setup_teardown(what_is_written_is_read_back, setup, teardown),
    };
    return cmocka_run_group_tests_name("pickles", tests, NULL, NULL);
}
