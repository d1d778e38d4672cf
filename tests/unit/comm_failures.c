/* What is left of a rank's communication after a failure, at moments that a run meets too rarely to be tested there. */
#include "comm/comm.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

typedef struct scene {
    loom__thread_world *world;
    _Atomic int stage;
    bool started, published;
} scene;

enum { BEGUN = 1, FAILING, RETURNED };

static void *fail_with_an_open_request(void *argument) {
    scene *s = argument;
    loom__endpoint_options options = {.timeout = 60};
    loom__endpoint *endpoint;
    loom_request *request;
    static int64_t x[2], y[2];
    if (loom__endpoint_create_thread(s->world, 1, &options, &endpoint) != LOOM_OK)
        return NULL;
    s->started = loom_all_reduce_start(endpoint->world, x, y, 2, LOOM_I64, LOOM_SUM, &request) == LOOM_OK;
    atomic_store(&s->stage, BEGUN);
    while (atomic_load(&s->stage) != FAILING)
        sched_yield();
    if (s->started)
        loom_cancel(request, loom_fail(LOOM_ERR_NUMERIC, "the loss is NaN"));
    /* From here on x and y may be freed, so no reader may begin any more. */
    s->published = loom__board_aborted(endpoint->board);
    atomic_store(&s->stage, RETURNED);
    loom__endpoint_destroy(endpoint);
    return NULL;
}

static void a_rank_that_fails_second_keeps_its_buffers_until_the_first_failure_is_published(void **state) {
    (void)state;
    scene s = {0};
    pthread_t thread;
    assert_int_equal(loom__thread_world_create(2, &s.world), LOOM_OK);
    loom__board *board = loom__thread_world_board(s.world);
    assert_int_equal(pthread_create(&thread, NULL, fail_with_an_open_request, &s), 0);
    while (atomic_load(&s.stage) != BEGUN)
        sched_yield();
    /* The other rank is in the middle of writing its message. */
    atomic_store(&board->claimed, 1);
    atomic_store(&s.stage, FAILING);
    for (int i = 0; i < 50 && atomic_load(&s.stage) != RETURNED; i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    atomic_store(&board->aborted, 1);
    pthread_join(thread, NULL);
    loom__thread_world_destroy(s.world);
    assert_true(s.started);
    assert_true(s.published);
}

static void after_a_failure_every_start_returns_it_and_a_finished_request_stays_good(void **state) {
    (void)state;
    loom__thread_world *world;
    loom__endpoint *endpoint;
    loom__endpoint_options options = {.timeout = 60};
    loom_request *request;
    loom_comm *group;
    float x[2] = {1, 2}, y[2];
    const int alone[1] = {0};
    assert_int_equal(loom__thread_world_create(1, &world), LOOM_OK);
    assert_int_equal(loom__endpoint_create_thread(world, 0, &options, &endpoint), LOOM_OK);
    assert_int_equal(loom_all_reduce_start(endpoint->world, x, y, 2, LOOM_F32, LOOM_SUM, &request), LOOM_OK);
    loom__endpoint_fail(endpoint, LOOM_ERR_TIMEOUT, "rank 3 has not come");
    assert_int_equal(loom_all_reduce(endpoint->world, x, y, 2, LOOM_F32, LOOM_SUM), LOOM_ERR_TIMEOUT);
    loom_error_clear();
    /* Calls that would be refused otherwise. */
    assert_int_equal(loom_all_reduce(endpoint->world, x, y, 2, (loom_dtype)99, LOOM_SUM), LOOM_ERR_TIMEOUT);
    assert_string_equal(loom_error_message(), "rank 3 has not come");
    assert_int_equal(loom_all_gather_v(endpoint->world, x, y, NULL, LOOM_F32), LOOM_ERR_TIMEOUT);
    assert_int_equal(loom_send(endpoint->world, x, 2, LOOM_F32, 0, -1), LOOM_ERR_TIMEOUT);
    assert_int_equal(loom__group_create(endpoint, "", alone, 1, &group), LOOM_ERR_TIMEOUT);
    assert_int_equal(loom_wait(request), LOOM_OK);
    assert_true(y[0] == 1 && y[1] == 2);
    assert_true(loom__endpoint_destroy(endpoint));
    assert_true(loom__endpoint_destroy(NULL));
    loom__thread_world_destroy(world);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_that_fails_second_keeps_its_buffers_until_the_first_failure_is_published),
        cmocka_unit_test(after_a_failure_every_start_returns_it_and_a_finished_request_stays_good),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
