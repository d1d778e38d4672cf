/* The rank's allocator: blocks never overlap, a repeated step repeats its memory, impossible sizes are refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "runtime/allocator.h"
#include <string.h>

enum { LIVE = 200, CALLS = 20000 };

typedef struct piece {
    unsigned char *memory;
    size_t bytes;
    unsigned char pattern;
} piece;

static uint32_t next(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Mostly small, some of megabytes. */
static size_t some_size(uint32_t *state) {
    uint32_t kind = next(state) % 16;
    size_t limit = kind == 0 ? (size_t)3 << 20 : kind < 4 ? (size_t)100 << 10 : 2000;
    return next(state) % limit;
}

static int start(void **state) {
    loom__allocator *allocator;
    if (loom__allocator_create(&allocator))
        return -1;
    *state = allocator;
    return 0;
}

static int stop(void **state) {
    loom__allocator_destroy(*state);
    return 0;
}

/* Ends and middle of the block: whoever wrote into it would have to write there. */
static void mark(const piece *p) {
    if (p->bytes) {
        memset(p->memory, p->pattern, p->bytes < 64 ? p->bytes : 64);
        p->memory[p->bytes / 2] = p->pattern;
        memset(p->memory + p->bytes - (p->bytes < 64 ? p->bytes : 64), p->pattern, p->bytes < 64 ? p->bytes : 64);
    }
}

static int is_marked(const piece *p) {
    size_t edge = p->bytes < 64 ? p->bytes : 64;
    for (size_t i = 0; i < edge; i++)
        if (p->memory[i] != p->pattern || p->memory[p->bytes - 1 - i] != p->pattern)
            return 0;
    return !p->bytes || p->memory[p->bytes / 2] == p->pattern;
}

static void random_calls_never_hand_out_a_byte_twice(void **state) {
    loom__allocator *allocator = *state;
    piece pieces[LIVE] = {{0}};
    uint32_t seed = 42;
    for (int call = 0; call < CALLS; call++) {
        piece *p = &pieces[next(&seed) % LIVE];
        if (p->memory) {
            assert_true(is_marked(p));
            loom__release(allocator, p->memory);
            *p = (piece){0};
            continue;
        }
        *p = (piece){.bytes = some_size(&seed), .pattern = (unsigned char)(call % 251 + 1)};
        void *memory;
        assert_int_equal(loom__allocate(allocator, p->bytes, &memory), LOOM_OK);
        assert_int_equal((uintptr_t)memory % 64, 0);
        p->memory = memory;
        mark(p);
    }
    for (int i = 0; i < LIVE; i++) {
        if (pieces[i].memory)
            assert_true(is_marked(&pieces[i]));
        loom__release(allocator, pieces[i].memory);
    }
    loom_memory memory = loom__allocator_memory(allocator);
    assert_int_equal(memory.in_use, 0);
    assert_true(memory.high_water > 0);
}

static void step(loom__allocator *allocator, void **blocks) {
    uint32_t seed = 7;
    for (int i = 0; i < LIVE; i++) {
        assert_int_equal(loom__allocate(allocator, some_size(&seed) * 20, &blocks[i]), LOOM_OK);
        if (i % 3 == 2) {
            loom__release(allocator, blocks[i - 1]);
            blocks[i - 1] = NULL;
        }
    }
    for (int i = LIVE - 1; i >= 0; i--)
        loom__release(allocator, blocks[i]);
}

static void a_repeated_step_takes_no_more_memory(void **state) {
    loom__allocator *allocator = *state;
    void *blocks[LIVE];
    step(allocator, blocks);
    loom_memory first = loom__allocator_memory(allocator);
    for (int i = 0; i < 20; i++)
        step(allocator, blocks);
    loom_memory last = loom__allocator_memory(allocator);
    assert_int_equal(last.high_water, first.high_water);
    assert_int_equal(last.reserved, first.reserved);
    assert_int_equal(last.in_use, 0);
}

static void freed_neighbours_become_one_block(void **state) {
    loom__allocator *allocator = *state;
    void *parts[16], *whole;
    for (int i = 0; i < 16; i++)
        assert_int_equal(loom__allocate(allocator, (size_t)1 << 20, &parts[i]), LOOM_OK);
    size_t reserved = loom__allocator_memory(allocator).reserved;
    for (int i = 0; i < 16; i++)
        loom__release(allocator, parts[i % 2 ? 15 - i / 2 : i / 2]);
    assert_int_equal(loom__allocate(allocator, (size_t)24 << 20, &whole), LOOM_OK);
    assert_int_equal(loom__allocator_memory(allocator).reserved, reserved);
    loom__release(allocator, whole);
}

static void size_zero_gives_blocks_of_their_own(void **state) {
    loom__allocator *allocator = *state;
    void *a, *b;
    assert_int_equal(loom__allocate(allocator, 0, &a), LOOM_OK);
    assert_int_equal(loom__allocate(allocator, 0, &b), LOOM_OK);
    assert_ptr_not_equal(a, b);
    loom__release(allocator, a);
    loom__release(allocator, b);
    loom__release(allocator, NULL);
    assert_int_equal(loom__allocator_memory(allocator).in_use, 0);
}

static void a_block_larger_than_a_segment_is_given(void **state) {
    loom__allocator *allocator = *state;
    size_t bytes = (size_t)100 << 20;
    void *memory;
    assert_int_equal(loom__allocate(allocator, bytes, &memory), LOOM_OK);
    ((char *)memory)[0] = ((char *)memory)[bytes - 1] = 1;
    assert_true(loom__allocator_memory(allocator).in_use >= bytes);
    loom__release(allocator, memory);
}

/* AddressSanitizer ends the program where malloc would return NULL, so there only the size that is refused unasked. */
static void impossible_sizes_are_refused_and_change_nothing(void **state) {
    loom__allocator *allocator = *state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    const size_t sizes[] = {SIZE_MAX, SIZE_MAX - 63, SIZE_MAX / 2 + 1};
#else
    const size_t sizes[] = {SIZE_MAX, SIZE_MAX - 63, SIZE_MAX / 2 + 1, SIZE_MAX / 2, (size_t)1 << 60};
#endif
    loom_memory before = loom__allocator_memory(allocator);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *memory = &before;
        assert_int_equal(loom__allocate(allocator, sizes[i], &memory), LOOM_ERR_MEMORY);
        assert_ptr_equal(memory, &before);
        assert_non_null(strstr(loom_error_message(), "out of memory"));
    }
    loom_memory after = loom__allocator_memory(allocator);
    assert_memory_equal(&before, &after, sizeof before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(random_calls_never_hand_out_a_byte_twice, start, stop),
        cmocka_unit_test_setup_teardown(a_repeated_step_takes_no_more_memory, start, stop),
        cmocka_unit_test_setup_teardown(freed_neighbours_become_one_block, start, stop),
        cmocka_unit_test_setup_teardown(size_zero_gives_blocks_of_their_own, start, stop),
        cmocka_unit_test_setup_teardown(a_block_larger_than_a_segment_is_given, start, stop),
        cmocka_unit_test_setup_teardown(impossible_sizes_are_refused_and_change_nothing, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
