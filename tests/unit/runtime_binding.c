/* Which CPUs ranks get. */
#include "runtime/binding.h"
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void the_allowed_cpus_are_those_of_the_mask(void **state) {
    (void)state;
    cpu_set_t mask, one;
    loom__cpus cpus, bound;
    assert_int_equal(sched_getaffinity(0, sizeof mask, &mask), 0);
    assert_int_equal(loom__cpus_allowed(&cpus), LOOM_OK);
    assert_int_equal(cpus.count, CPU_COUNT(&mask));
    assert_true(cpus.cores >= 1 && cpus.cores <= cpus.count && cpus.online >= cpus.count);
    cpu_set_t seen;
    CPU_ZERO(&seen);
    for (int i = 0; i < cpus.count; i++) {
        assert_true(CPU_ISSET((size_t)cpus.cpu[i], &mask));
        assert_false(CPU_ISSET((size_t)cpus.cpu[i], &seen));
        CPU_SET((size_t)cpus.cpu[i], &seen);
    }
    CPU_ZERO(&one);
    CPU_SET((size_t)cpus.cpu[cpus.count - 1], &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(loom__cpus_allowed(&bound), LOOM_OK);
    assert_int_equal(bound.count, 1);
    assert_int_equal(bound.cores, 1);
    assert_int_equal(bound.cpu[0], cpus.cpu[cpus.count - 1]);
    assert_true(cpus.count == 1 || bound.hash != cpus.hash);
    sched_setaffinity(0, sizeof mask, &mask);
    loom__cpus_free(&cpus);
    loom__cpus_free(&bound);
}

static void ranks_get_cpus_of_their_own_or_none(void **state) {
    (void)state;
    int list[] = {0, 2, 4, 6, 1, 3, 5, 7};
    loom__cpus cpus = {.count = 8, .cores = 4, .online = 8, .cpu = list};
    assert_ptr_equal(loom__cpus_of_rank(&cpus, 4, 0, 2), list);
    assert_ptr_equal(loom__cpus_of_rank(&cpus, 4, 3, 2), list + 6);
    assert_ptr_equal(loom__cpus_of_rank(&cpus, 2, 1, 3), list + 3);
    assert_null(loom__cpus_of_rank(&cpus, 4, 0, 3));
    assert_null(loom__cpus_of_rank(&cpus, 9, 0, 1));
}

static void default_threads_share_the_cores_and_are_at_least_one(void **state) {
    (void)state;
    loom__cpus cpus = {.count = 16, .cores = 8, .online = 16};
    assert_int_equal(loom__cpus_default_threads(&cpus, 1), 8);
    assert_int_equal(loom__cpus_default_threads(&cpus, 3), 2);
    assert_int_equal(loom__cpus_default_threads(&cpus, 8), 1);
    assert_int_equal(loom__cpus_default_threads(&cpus, 100), 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_allowed_cpus_are_those_of_the_mask),
        cmocka_unit_test(ranks_get_cpus_of_their_own_or_none),
        cmocka_unit_test(default_threads_share_the_cores_and_are_at_least_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
