/* The error record: what does not fit is cut where a reader can go on. */
#include "base/faults.h"
#include "base/record.h"
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <wchar.h>

#include <cmocka.h>

/* A text of `bytes` bytes in which every character has the size of "…". */
static void fill(char *text, size_t bytes, size_t ascii) {
    memset(text, 'a', ascii);
    for (size_t at = ascii; at + 3 <= bytes; at += 3)
        memcpy(text + at, "…", 4);
}

static void assert_whole(const char *text) {
    size_t length = strlen(text);
    assert_int_equal(loom__whole_characters(text, length), length);
}

static void a_cut_never_divides_a_character(void **state) {
    (void)state;
    const char *text = "a\u00e9\u2026\U0001F600b"; /* 1, 2, 3, 4 and 1 bytes */
    const size_t expected[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 11};
    for (size_t length = 0; length <= strlen(text); length++)
        assert_int_equal(loom__whole_characters(text, length), expected[length]);
    assert_int_equal(loom__whole_characters("\x80\x80\x80\x80\x80", 5), 5); /* no UTF-8: nothing to keep whole */
}

static void a_message_longer_than_the_record_ends_with_a_whole_character(void **state) {
    (void)state;
    static char text[LOOM__RECORD_BYTES + 100];
    for (size_t ascii = 0; ascii < 3; ascii++) {
        fill(text, sizeof text - 3, ascii);
        assert_int_equal(loom_fail(LOOM_ERR_IO, "%s", text), LOOM_ERR_IO);
        assert_true(strlen(loom_error_message()) + 4 > LOOM__RECORD_BYTES);
        assert_whole(loom_error_message());
        assert_int_equal(loom_fail_context(LOOM_ERR_IO, "ab"), LOOM_ERR_IO);
        assert_memory_equal(loom_error_message(), "ab", 2);
        assert_whole(loom_error_message());
    }
}

static void a_fault_longer_than_its_line_ends_with_a_whole_character(void **state) {
    (void)state;
    static char text[3000];
    for (size_t ascii = 0; ascii < 3; ascii++) {
        static loom__faults faults;
        fill(text, sizeof text - 3, ascii);
        loom__faults_begin(&faults);
        loom__faults_add(&faults, LOOM_ERR_CONFIG, "%s", text);
        assert_int_equal(loom__faults_end(&faults), LOOM_ERR_CONFIG);
        assert_true(strlen(loom_error_message()) > 2000);
        assert_whole(loom_error_message());
    }
}

static void a_message_that_cannot_be_written_leaves_an_empty_record(void **state) {
    (void)state;
    const wchar_t wrong[] = {(wchar_t)0x7fffffff, 0}; /* no character of any locale */
    loom_fail(LOOM_ERR_IO, "before");
    assert_int_equal(loom_fail(LOOM_ERR_ARGUMENT, "the name %ls", wrong), LOOM_ERR_ARGUMENT);
    assert_string_equal(loom_error_message(), "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_cut_never_divides_a_character),
        cmocka_unit_test(a_message_longer_than_the_record_ends_with_a_whole_character),
        cmocka_unit_test(a_fault_longer_than_its_line_ends_with_a_whole_character),
        cmocka_unit_test(a_message_that_cannot_be_written_leaves_an_empty_record),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
