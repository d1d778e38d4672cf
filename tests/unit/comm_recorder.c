/* The recorder's pages: what they remember and what they say. */
#include "comm/recorder.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static loom__board *new_board(int pages) {
    loom__board *board = aligned_alloc(64, loom__board_bytes(pages));
    assert_non_null(board);
    memset(board, 0, loom__board_bytes(pages));
    board->pages = pages;
    return board;
}

static void expect(const loom__page *page, const char *part) {
    char text[512];
    loom__page_describe(page, text, sizeof text);
    if (!strstr(text, part))
        fail_msg("\"%s\" is missing in: %s", part, text);
}

static void a_page_tells_the_last_finished_and_the_current_operation(void **state) {
    (void)state;
    loom__board *board = new_board(1);
    loom__page *page = &board->page[0];
    loom__page_open(page, 3);
    expect(page, "last finished operation: none; current: between operations");
    int slot = loom__page_add_group(page, 77);
    loom__page_begin(page, slot, 77, "tp", LOOM__ALL_REDUCE, 16, 4096);
    loom__page_finish(page, 77, "tp", LOOM__ALL_REDUCE, 16, 4096);
    loom__page_begin(page, slot, 77, "tp", LOOM__BARRIER, 17, 0);
    expect(page, "last finished operation: all_reduce #16 of group tp (4096 bytes), 0.0 s ago");
    loom__page_note(page, "reading a batch");
    expect(page, "current: reading a batch");
    loom__page_wait(page, 77, "tp", LOOM__BARRIER, 17, 0);
    expect(page, "current: barrier #17 of group tp (0 bytes), for 0.0 s, while reading a batch");
    loom__page_wait_end(page);
    loom__page_note(page, NULL);
    expect(page, "current: between operations");
    assert_int_equal(loom__page_started(page, 77), 17);
    assert_int_equal(loom__page_started(page, 78), -1);
    free(board);
}

static void a_description_is_cut_to_its_room(void **state) {
    (void)state;
    loom__board *board = new_board(1);
    char text[9] = "########";
    assert_int_equal(loom__page_describe(&board->page[0], text, 8), 7);
    assert_memory_equal(text, "last fi", 8);
    char longest[200];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    loom__page_note(&board->page[0], longest);
    expect(&board->page[0], "xxxx");
    free(board);
}

typedef struct lines {
    int count;
    char first[256], last[256];
} lines;

static void take_line(void *context, const char *text) {
    lines *to = context;
    strncpy(to->count++ == 0 ? to->first : to->last, text, 255);
}

static void the_ring_keeps_the_last_64_operations(void **state) {
    (void)state;
    loom__board *board = new_board(1);
    loom__page *page = &board->page[0];
    loom__page_open(page, 2);
    for (uint64_t i = 1; i <= 100; i++) {
        loom__page_begin(page, -1, 5, "dp", LOOM__ALL_GATHER, i, 8 * i);
        if (i < 100)
            loom__page_finish(page, 5, "dp", LOOM__ALL_GATHER, i, 8 * i);
    }
    lines got = {0};
    loom__page_dump(page, 1000, take_line, &got);
    assert_int_equal(got.count, LOOM__RECORDS);
    assert_non_null(strstr(got.first, "rank 2: all_gather #37 of group dp (296 bytes) finished"));
    assert_non_null(strstr(got.last, "rank 2: all_gather #100 of group dp (800 bytes) started"));
    got = (lines){0};
    loom__page_dump(page, 3, take_line, &got);
    assert_int_equal(got.count, 3);
    assert_non_null(strstr(got.first, "all_gather #98"));
    assert_null(loom__page_find(page, 5, 36));
    assert_non_null(loom__page_find(page, 5, 37));
    free(board);
}

static void a_full_page_follows_no_more_groups(void **state) {
    (void)state;
    loom__board *board = new_board(1);
    loom__page *page = &board->page[0];
    for (int i = 0; i < LOOM__PAGE_GROUPS; i++)
        assert_int_equal(loom__page_add_group(page, (uint64_t)i + 1), i);
    assert_int_equal(loom__page_add_group(page, 1000), -1);
    loom__page_remove_group(page, 9);
    assert_int_equal(loom__page_add_group(page, 1000), 9);
    free(board);
}

static void a_group_that_has_ended_is_still_counted(void **state) {
    (void)state;
    loom__board *board = new_board(1);
    loom__page *page = &board->page[0];
    int slot = loom__page_add_group(page, 77);
    loom__page_begin(page, slot, 77, "tp", LOOM__BARRIER, 5, 0);
    loom__page_remove_group(page, slot);
    assert_int_equal(loom__page_started(page, 77), 5);
    assert_int_not_equal(loom__page_add_group(page, 78), slot); /* while there are places that nobody had */
    assert_int_equal(loom__page_started(page, 77), 5);
    free(board);
}

static void a_page_that_was_full_does_not_say_that_a_group_was_never_made(void **state) {
    (void)state;
    loom__board *board = new_board(2);
    loom__page *page = &board->page[0], *other = &board->page[1];
    for (int i = 0; i < LOOM__PAGE_GROUPS; i++) {
        loom__page_add_group(page, (uint64_t)i + 1);
        loom__page_add_group(other, (uint64_t)i + 1);
    }
    assert_int_equal(loom__page_started(page, 1000), -1);
    loom__page_add_group(page, 1000); /* finds no place */
    assert_true(loom__page_started(page, 1000) == LOOM__STARTED_UNKNOWN);
    assert_int_equal(loom__page_started(page, 3), 0);
    loom__page_remove_group(other, 2);
    assert_int_equal(loom__page_started(other, 3), 0);
    loom__page_add_group(other, 1000); /* takes the place of 3 */
    assert_int_equal(loom__page_started(other, 1000), 0);
    assert_true(loom__page_started(other, 3) == LOOM__STARTED_UNKNOWN);
    free(board);
}

static void the_first_abort_stays(void **state) {
    (void)state;
    loom__board *board = new_board(1);
    assert_false(loom__board_aborted(board));
    assert_true(loom__board_abort(board, 4, LOOM_ERR_IO, "first"));
    assert_false(loom__board_abort(board, 5, LOOM_ERR_COMM, "second"));
    assert_true(loom__board_aborted(board));
    assert_int_equal(board->rank, 4);
    assert_int_equal(board->status, LOOM_ERR_IO);
    assert_string_equal(board->message, "first");
    assert_int_equal(loom__board_teller(board), 0);
    assert_true(loom__board_claim_report(board));
    assert_false(loom__board_claim_report(board));
    assert_int_equal(loom__board_teller(board), getpid());
    loom__board_told(board);
    assert_int_equal(loom__board_teller(board), 0);
    assert_false(loom__board_claim_report(board));
    free(board);
}

static void a_process_is_dead_when_killed_even_before_its_parent_looked(void **state) {
    (void)state;
    loom__board *board = new_board(1);
    loom__page *page = &board->page[0];
    loom__page_open(page, 0);
    assert_false(loom__page_process_is_dead(page));
    pid_t child = fork();
    if (child == 0) {
        pause();
        _exit(0);
    }
    atomic_store(&page->pid, (int32_t)child);
    assert_false(loom__page_process_is_dead(page));
    kill(child, SIGKILL);
    siginfo_t info;
    waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT);
    assert_true(loom__page_process_is_dead(page)); /* a zombie */
    waitpid(child, NULL, 0);
    assert_true(loom__page_process_is_dead(page)); /* gone */
    atomic_store(&page->pid_space, atomic_load(&page->pid_space) + 1);
    assert_false(loom__page_process_is_dead(page)); /* another namespace: not known */
    free(board);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_page_tells_the_last_finished_and_the_current_operation),
        cmocka_unit_test(a_description_is_cut_to_its_room),
        cmocka_unit_test(the_ring_keeps_the_last_64_operations),
        cmocka_unit_test(a_full_page_follows_no_more_groups),
        cmocka_unit_test(a_group_that_has_ended_is_still_counted),
        cmocka_unit_test(a_page_that_was_full_does_not_say_that_a_group_was_never_made),
        cmocka_unit_test(the_first_abort_stays),
        cmocka_unit_test(a_process_is_dead_when_killed_even_before_its_parent_looked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
