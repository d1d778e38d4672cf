/* The end of a rank: its memory outlives everybody who may still read or write it. */
#include "runtime/allocator.h"
#include "runtime/rank.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { BYTES = 1000 };

/* A rank of a world of two with a request that the other member never comes to; its buffers are the allocator's. The
 * backend is the one of thread ranks, but for the function under test. */
typedef struct scene {
    loom__thread_world *world;
    loom_rank rank;
    loom__backend backend;
    unsigned char *memory;
} scene;

static void begin(scene *s) {
    loom__endpoint_options waits = {.timeout = 60};
    loom_run_options options = loom_run_options_default();
    loom__endpoint *endpoint;
    loom__allocator *allocator;
    loom_request *request;
    void *memory;
    assert_int_equal(loom__thread_world_create(2, &s->world), LOOM_OK);
    assert_int_equal(loom__endpoint_create_thread(s->world, 0, &waits, &endpoint), LOOM_OK);
    assert_int_equal(loom__rank_open(&s->rank, endpoint, 0, 2, 1, NULL, &options), LOOM_OK);
    assert_int_equal(loom__rank_allocator(&s->rank, &allocator), LOOM_OK);
    assert_int_equal(loom__allocate(allocator, 2 * BYTES, &memory), LOOM_OK);
    s->memory = memset(memory, 1, 2 * BYTES);
    assert_int_equal(
        loom_all_reduce_start(endpoint->world, s->memory, s->memory + BYTES, 10, LOOM_F32, LOOM_SUM, &request),
        LOOM_OK);
    s->backend = *endpoint->backend;
    endpoint->backend = &s->backend;
    endpoint->world->backend = &s->backend;
    loom__endpoint_fail(endpoint, LOOM_ERR_NUMERIC, "the loss is NaN");
}

static scene *looked_at;

static void read_what_the_rank_posted(loom__endpoint *endpoint) {
    (void)endpoint;
    for (int i = 0; i < 2 * BYTES; i++)
        assert_int_equal(looked_at->memory[i], 1);
    loom__release(looked_at->rank.allocator, looked_at->memory); /* which a sanitizer's build does not leave to close */
}

static void a_rank_that_fails_keeps_its_memory_until_nobody_reads_it(void **state) {
    (void)state;
    scene s;
    begin(&s);
    looked_at = &s;
    s.backend.quiesce = read_what_the_rank_posted;
    loom__rank_close(&s.rank);
    assert_null(s.rank.allocator);
    loom__thread_world_destroy(s.world);
}

static void (*release_of_threads)(loom_request *request);

/* As under MPI, where a message may still come into the buffers. */
static void release_what_may_be_written(loom_request *request) {
    request->comm->endpoint->lent = true;
    release_of_threads(request);
}

static void memory_that_mpi_may_still_write_to_is_not_freed(void **state) {
    (void)state;
    scene s;
    begin(&s);
    release_of_threads = s.backend.release;
    s.backend.release = release_what_may_be_written;
    loom__allocator *allocator = s.rank.allocator;
    loom__rank_close(&s.rank);
    memset(s.memory, 2, 2 * BYTES); /* the late message */
    assert_int_equal(s.memory[2 * BYTES - 1], 2);
    loom__release(allocator, s.memory);
    loom__allocator_destroy(allocator);
    loom__thread_world_destroy(s.world);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_that_fails_keeps_its_memory_until_nobody_reads_it),
        cmocka_unit_test(memory_that_mpi_may_still_write_to_is_not_freed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
