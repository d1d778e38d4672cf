/* Memory for the copy of an asynchronous save, and the copying. */
#include "checkpoint/copy.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

enum { ROOM = 1 << 10, HUGE_PAGE = 1 << 21, PAGE = 4096 };

static void exactly_the_bytes_are_copied_whatever_their_number_and_place(void **state) {
    static _Alignas(16) unsigned char from[2 * ROOM], to[ROOM];
    (void)state;
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (unsigned char)(i % 251);
    for (size_t bytes = 0; bytes < 300; bytes++)
        for (size_t shift = 0; shift < 20; shift++) {
            memset(to, 0xee, sizeof to);
            loom__copy_past_caches(to, from + shift, bytes);
            assert_memory_equal(to, from + shift, bytes);
            for (size_t i = bytes; i < sizeof to; i++)
                assert_int_equal(to[i], 0xee);
        }
}

static int64_t pages_there(const loom__copy_memory *memory) {
    size_t pages = memory->bytes / PAGE;
    unsigned char *there = calloc(pages, 1);
    int64_t count = 0;
    assert_non_null(there);
    assert_int_equal(mincore(memory->data, memory->bytes, there), 0);
    for (size_t i = 0; i < pages; i++)
        count += there[i] & 1;
    free(there);
    return count;
}

static void prepared_memory_has_its_pages(void **state) {
    loom__copy_memory memory = {0};
    (void)state;
    loom__copy_memory_prepare(&memory, NULL, 3 * HUGE_PAGE - 5);
    loom__copy_memory_prepare(&memory, NULL, 2 * HUGE_PAGE);
    assert_int_equal(memory.bytes, 5 * HUGE_PAGE);
    assert_int_equal(loom__task_wait(&memory.touch), LOOM_OK);
    assert_int_equal(pages_there(&memory), 5 * HUGE_PAGE / PAGE);
    assert_int_equal(loom__copy_memory_reserve(&memory, "a save", HUGE_PAGE), LOOM_OK);
    assert_int_equal(memory.bytes, 5 * HUGE_PAGE);
    assert_int_equal(loom__copy_memory_reserve(&memory, "a save", 7 * HUGE_PAGE + 1), LOOM_OK);
    assert_int_equal(memory.bytes, 8 * HUGE_PAGE);
    assert_int_equal((uintptr_t)memory.data % HUGE_PAGE, 0);
    memset(memory.data, 1, memory.bytes);
    loom__copy_memory_free(&memory);
    loom__copy_memory_free(&memory);
    assert_null(memory.data);
}

static void a_copy_that_comes_early_stops_the_thread(void **state) {
    (void)state;
    for (int i = 0; i < 20; i++) {
        loom__copy_memory memory = {0};
        loom__copy_memory_prepare(&memory, NULL, 8 * HUGE_PAGE);
        if (i % 2) {
            assert_int_equal(loom__copy_memory_reserve(&memory, "a save", 8 * HUGE_PAGE), LOOM_OK);
            memset(memory.data, 1, memory.bytes);
        }
        loom__copy_memory_free(&memory);
    }
}

static void memory_that_cannot_be_had_is_an_error_of_the_save_alone(void **state) {
    loom__copy_memory memory = {0};
    (void)state;
    loom__copy_memory_prepare(&memory, NULL, SIZE_MAX / 2);
    assert_null(memory.data);
    assert_int_equal(loom__copy_memory_reserve(&memory, "there/iter_0000002", SIZE_MAX / 2), LOOM_ERR_MEMORY);
    assert_non_null(strstr(loom_error_message(), "there/iter_0000002: no memory for a copy of"));
    assert_int_equal(loom__copy_memory_reserve(&memory, "a save", SIZE_MAX - 1), LOOM_ERR_MEMORY);
    assert_int_equal(loom__copy_memory_reserve(&memory, "a save", PAGE), LOOM_OK);
    loom__copy_memory_free(&memory);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(exactly_the_bytes_are_copied_whatever_their_number_and_place),
        cmocka_unit_test(prepared_memory_has_its_pages), cmocka_unit_test(a_copy_that_comes_early_stops_the_thread),
        cmocka_unit_test(memory_that_cannot_be_had_is_an_error_of_the_save_alone)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
