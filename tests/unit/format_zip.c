/* The zip reader on archives put together by hand: sizes of 64 bits, several archives in one file, methods and flags
 * that are refused by name, and sizes that cannot be. What the writer makes is read in the tests of checkpoints. */
#include "format/zip.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

typedef struct archive {
    unsigned char bytes[512];
    size_t count;
} archive;

typedef struct options {
    unsigned method, flags;
    uint32_t stored, unpacked, crc;
    bool wide; /* the entry has all ones, and the sizes in a field of their own */
    int wide_fields;
} options;

static void put(archive *to, uint64_t number, size_t width) {
    memcpy(to->bytes + to->count, &number, width);
    to->count += width;
}

/* One record "a/x" with the bytes "hello". */
static archive make(options with) {
    archive made = {.count = 0};
    put(&made, 0x04034b50, 4);
    memset(made.bytes + made.count, 0, 22);
    made.count += 22;
    put(&made, 3, 2);
    put(&made, 0, 2);
    memcpy(made.bytes + made.count, "a/xhello", 8);
    made.count += 8;
    size_t directory = made.count;
    put(&made, 0x02014b50, 4);
    put(&made, 0, 4);
    put(&made, with.flags, 2);
    put(&made, with.method, 2);
    put(&made, 0, 4);
    put(&made, with.crc, 4);
    put(&made, with.wide ? UINT32_MAX : with.stored, 4);
    put(&made, with.wide ? UINT32_MAX : with.unpacked, 4);
    put(&made, 3, 2);
    put(&made, with.wide_fields ? 4u + 8u * (unsigned)with.wide_fields : 0, 2);
    put(&made, 0, 8);
    put(&made, 0, 2);
    put(&made, with.wide ? UINT32_MAX : 0, 4);
    memcpy(made.bytes + made.count, "a/x", 3);
    made.count += 3;
    const uint64_t wide[] = {with.unpacked, with.stored, 0};
    if (with.wide_fields) {
        put(&made, 1, 2);
        put(&made, 8u * (unsigned)with.wide_fields, 2);
    }
    for (int i = 0; i < with.wide_fields; i++)
        put(&made, wide[i], 8);
    size_t bytes = made.count - directory;
    put(&made, 0x06054b50, 4);
    put(&made, 0, 4);
    put(&made, 1, 2);
    put(&made, 1, 2);
    put(&made, bytes, 4);
    put(&made, directory, 4);
    put(&made, 0, 2);
    return made;
}

enum { HELLO = 0x3610a686 };

static void check_hello(const void *data, size_t bytes) {
    loom__zip zip;
    const loom__zip_record *record = NULL;
    if (loom__zip_open("test", data, bytes, &zip))
        fail_msg("%s", loom_error_message());
    assert_int_equal(loom__zip_get(&zip, "x", &record), LOOM_OK);
    assert_int_equal(record->bytes, 5);
    assert_memory_equal(record->stored, "hello", 5);
    assert_int_equal(loom__zip_check(&zip, record, record->stored), LOOM_OK);
    assert_int_equal(loom__zip_check(&zip, record, "jello"), LOOM_ERR_FORMAT);
    assert_null(loom__zip_find(&zip, "y"));
    loom__zip_close(&zip);
}

static void sizes_may_have_64_bits(void **state) {
    (void)state;
    archive plain = make((options){.stored = 5, .unpacked = 5, .crc = HELLO});
    archive wide = make((options){.stored = 5, .unpacked = 5, .crc = HELLO, .wide = true, .wide_fields = 3});
    check_hello(plain.bytes, plain.count);
    check_hello(wide.bytes, wide.count);
}

static void archives_lie_one_behind_another(void **state) {
    (void)state;
    archive one = make((options){.stored = 5, .unpacked = 5, .crc = HELLO});
    unsigned char both[1024];
    memcpy(both, one.bytes, one.count);
    memcpy(both + one.count, one.bytes, one.count);
    check_hello(both, one.count);
    check_hello(both + one.count, one.count);
    loom__zip zip;
    assert_int_equal(loom__zip_open("test", both, one.count + 10, &zip), LOOM_ERR_FORMAT);
}

static void check_refused(options with, loom_status wanted, const char *said) {
    archive made = make(with);
    loom__zip zip;
    assert_int_equal(loom__zip_open("test", made.bytes, made.count, &zip), wanted);
    if (!strstr(loom_error_message(), said))
        fail_msg("expected '%s' in: %s", said, loom_error_message());
}

static void what_cannot_be_is_refused_by_name(void **state) {
    (void)state;
    check_refused(
        (options){.method = 12, .stored = 5, .unpacked = 5}, LOOM_ERR_UNSUPPORTED, "'a/x' is packed by method 12");
    check_refused((options){.flags = 1, .stored = 5, .unpacked = 5}, LOOM_ERR_UNSUPPORTED, "'a/x' is encrypted");
    check_refused((options){.stored = 5, .unpacked = 6}, LOOM_ERR_FORMAT, "6 bytes, but 5 are stored");
    check_refused((options){.stored = 6, .unpacked = 6}, LOOM_ERR_FORMAT, "reach into the zip directory");
    check_refused((options){.stored = UINT32_MAX - 1, .unpacked = UINT32_MAX - 1}, LOOM_ERR_FORMAT, "4294967294 bytes");
    check_refused((options){.method = 8, .stored = 5, .unpacked = 1 << 20}, LOOM_ERR_FORMAT, "1048576 bytes");
    check_refused((options){.stored = 5, .unpacked = 5, .wide = true}, LOOM_ERR_FORMAT, "no field for them");
    check_refused((options){.stored = 5, .unpacked = 5, .wide = true, .wide_fields = 1}, LOOM_ERR_FORMAT, "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_may_have_64_bits),
        cmocka_unit_test(archives_lie_one_behind_another),
        cmocka_unit_test(what_cannot_be_is_refused_by_name),
    };
    return cmocka_run_group_tests_name("zip archives", tests, NULL, NULL);
}
