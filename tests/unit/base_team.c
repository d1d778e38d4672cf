/* Teams: every item runs once, whatever the size of the team. */
#include "base/team.h"
#include <fenv.h>
#include <float.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

typedef struct work {
    _Atomic int done[1000];
    _Atomic int workers[64];
    _Atomic int bad;
    int size;
} work;

static void count_item(void *argument, int64_t item, int worker) {
    work *w = argument;
    if (worker < 0 || worker >= w->size)
        atomic_store(&w->bad, 1);
    else
        atomic_fetch_add(&w->workers[worker], 1);
    atomic_fetch_add(&w->done[item], 1);
}

static void every_item_runs_once_for_any_size(void **state) {
    (void)state;
    for (int size = 1; size <= 5; size++) {
        loom_team *team;
        assert_int_equal(loom__team_create(size, NULL, &team), LOOM_OK);
        assert_int_equal(loom_team_size(team), size);
        for (int64_t items = 0; items <= 1000; items = items * 3 + 1) {
            static work w;
            memset(&w, 0, sizeof w);
            w.size = size;
            loom_team_run(team, count_item, &w, items);
            assert_int_equal(w.bad, 0);
            for (int64_t i = 0; i < 1000; i++)
                assert_int_equal(w.done[i], i < items ? 1 : 0);
        }
        loom__team_destroy(team);
    }
}

static void no_team_runs_in_the_caller_in_order(void **state) {
    (void)state;
    static work w = {.size = 1};
    loom_team_run(NULL, count_item, &w, 7);
    assert_int_equal(w.workers[0], 7);
    assert_int_equal(loom_team_size(NULL), 1);
    loom__team_destroy(NULL);
}

static void many_short_runs_follow_each_other(void **state) {
    (void)state;
    loom_team *team;
    static work w = {.size = 3};
    assert_int_equal(loom__team_create(3, NULL, &team), LOOM_OK);
    for (int run = 0; run < 2000; run++)
        loom_team_run(team, count_item, &w, 3);
    for (int i = 0; i < 3; i++)
        assert_int_equal(w.done[i], 2000);
    loom__team_destroy(team);
}

static void a_team_of_no_threads_is_refused(void **state) {
    (void)state;
    loom_team *team;
    assert_int_equal(loom__team_create(0, NULL, &team), LOOM_ERR_ARGUMENT);
}

static void use_scratch(void *argument, int64_t item, int worker) {
    loom_team *team = argument;
    size_t bytes = (size_t)(item % 5 + 1) * 1000;
    unsigned char *scratch = loom_team_scratch(team, worker, bytes);
    if (scratch && (uintptr_t)scratch % 64 == 0)
        memset(scratch, worker, bytes);
    else
        abort();
}

static void scratch_is_aligned_grows_and_never_shrinks(void **state) {
    (void)state;
    loom_team *team;
    assert_int_equal(loom__team_create(2, NULL, &team), LOOM_OK);
    loom_team_run(team, use_scratch, team, 50);
    void *large = loom_team_scratch(team, 0, 100000);
    assert_ptr_equal(loom_team_scratch(team, 0, 10), large);
    assert_ptr_equal(loom_team_scratch(team, 0, 100000), large);
    loom__team_destroy(team);
    void *own = loom_team_scratch(NULL, 0, 100);
    assert_non_null(own);
    assert_ptr_equal(loom_team_scratch(NULL, 0, 50), own);
}

static void make_denormal(void *argument, int64_t item, int worker) {
    (void)item;
    (void)worker;
    volatile float small = FLT_MIN;
    float half = small * 0.5f;
    if (half != 0)
        atomic_fetch_add((_Atomic int *)argument, 1);
}

static void denormals_are_flushed_while_the_team_lives(void **state) {
    (void)state;
#if defined(__x86_64__)
    loom_team *team;
    _Atomic int kept = 0;
    assert_int_equal(loom__team_create(2, NULL, &team), LOOM_OK);
    loom_team_run(team, make_denormal, &kept, 20);
    assert_int_equal(kept, 0);
    loom__team_destroy(team);
    make_denormal(&kept, 0, 0);
    assert_int_equal(kept, 1);
#else
    skip();
#endif
}

static void count_progress(void *context) {
    ++*(int *)context;
}

static void sleep_in_worker(void *argument, int64_t item, int worker) {
    (void)argument;
    (void)item;
    (void)worker;
    struct timespec rest = {0, 1000000};
    nanosleep(&rest, NULL);
}

static void progress_is_called_between_items_and_in_the_wait(void **state) {
    (void)state;
    loom_team *team;
    int calls = 0;
    assert_int_equal(loom__team_create(2, NULL, &team), LOOM_OK);
    loom__team_set_progress(team, count_progress, &calls);
    loom_team_run(team, sleep_in_worker, NULL, 9);
    assert_true(calls >= 1);
    loom__team_destroy(team);
    calls = 0;
    assert_int_equal(loom__team_create(1, NULL, &team), LOOM_OK);
    loom__team_set_progress(team, count_progress, &calls);
    loom_team_run(team, sleep_in_worker, NULL, 5);
    assert_int_equal(calls, 5);
    loom__team_destroy(team);
}

static void look_at_cpu(void *argument, int64_t item, int worker) {
    (void)item;
    int *cpus = argument;
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) == 0 && CPU_COUNT(&mask) == 1 && CPU_ISSET((size_t)cpus[0], &mask))
        cpus[1 + worker] = 1;
    struct timespec rest = {0, 2000000};
    nanosleep(&rest, NULL);
}

static void threads_are_bound_where_they_are_told_while_the_team_lives(void **state) {
    (void)state;
    cpu_set_t before;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    int cpu = 0;
    while (!CPU_ISSET((size_t)cpu, &before))
        cpu++;
    int both[2] = {cpu, cpu}, seen[3] = {cpu, 0, 0};
    loom_team *team;
    assert_int_equal(loom__team_create(2, both, &team), LOOM_OK);
    loom_team_run(team, look_at_cpu, seen, 20);
    loom__team_destroy(team);
    assert_int_equal(seen[1], 1);
    assert_int_equal(seen[2], 1);
    cpu_set_t after;
    assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
    sched_setaffinity(0, sizeof before, &before);
    assert_true(CPU_EQUAL(&before, &after)); /* the owner may run where it could before */
}

static void a_team_that_cannot_be_started_leaves_its_owner_as_it_was(void **state) {
    (void)state;
    pthread_attr_t usual, endless;
    assert_int_equal(pthread_getattr_default_np(&usual), 0);
    assert_int_equal(pthread_attr_init(&endless), 0);
    assert_int_equal(pthread_attr_setstacksize(&endless, (size_t)1 << 50), 0);
    assert_int_equal(pthread_setattr_default_np(&endless), 0);
    loom_team *team;
    fenv_t before, after;
    fegetenv(&before);
    loom_status status = loom__team_create(3, NULL, &team);
    fegetenv(&after);
    fesetenv(&before);
    assert_int_equal(pthread_setattr_default_np(&usual), 0);
    pthread_attr_destroy(&endless);
    pthread_attr_destroy(&usual);
    assert_int_equal(status, LOOM_ERR_MEMORY);
    assert_non_null(strstr(loom_error_message(), "thread 1 of a team of 3"));
#if defined(__x86_64__)
    assert_int_equal(after.__mxcsr & 0xffc0u, before.__mxcsr & 0xffc0u); /* all but the sticky flags */
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_item_runs_once_for_any_size),
        cmocka_unit_test(no_team_runs_in_the_caller_in_order),
        cmocka_unit_test(many_short_runs_follow_each_other),
        cmocka_unit_test(a_team_of_no_threads_is_refused),
        cmocka_unit_test(scratch_is_aligned_grows_and_never_shrinks),
        cmocka_unit_test(denormals_are_flushed_while_the_team_lives),
        cmocka_unit_test(progress_is_called_between_items_and_in_the_wait),
        cmocka_unit_test(threads_are_bound_where_they_are_told_while_the_team_lives),
        cmocka_unit_test(a_team_that_cannot_be_started_leaves_its_owner_as_it_was),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
