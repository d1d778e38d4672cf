/* The collectives on MPI ranks, by the very body that thread ranks run. Start it with mpirun; alone it is a world of
 * one. An argument limits the bytes of one MPI message, so that every operation goes in several. */
#include "parallel/comm_cases.h"
#include "runtime/rank.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

static size_t chunk_bytes;

static loom_status long_message(loom_comm *world) {
    unsigned char out[2500], in[2500];
    int me = loom_comm_rank(world), n = loom_comm_size(world);
    for (int i = 0; i < 2500; i++)
        out[i] = (unsigned char)(i * 7 + me);
    if (n == 1)
        return LOOM_OK;
    loom_request *request;
    LOOM_TRY(loom_send_start(world, out, 2500, LOOM_U8, (me + 1) % n, 0, &request));
    LOOM_TRY(loom_receive(world, in, 2500, LOOM_U8, (me + n - 1) % n, 0));
    LOOM_TRY(loom_wait(request));
    for (int i = 0; i < 2500; i++)
        CHECK(in[i] == (unsigned char)(i * 7 + (me + n - 1) % n), "byte %d of 2500", i);
    return LOOM_OK;
}

static loom_status nan_stays(loom_comm *world) {
    float x = loom_comm_rank(world) == loom_comm_size(world) - 1 ? NAN : 1.0f, y = 0;
    LOOM_TRY(loom_all_reduce(world, &x, &y, 1, LOOM_F32, LOOM_MAX));
    CHECK(isnan(y), "the NaN of the last rank vanished");
    return LOOM_OK;
}

/* A broadcast beyond the limit of the direct one. */
static loom_status large_broadcast(loom_comm *world) {
    comm_case c = {.comm = world,
        .size = loom_comm_size(world),
        .me = loom_comm_rank(world),
        .dtype = LOOM_F32,
        .element = 4,
        .count = 100003};
    for (int i = 0; i < c.size; i++)
        c.list[i] = i;
    c.out = malloc((size_t)c.count * c.element);
    c.expected = malloc((size_t)c.count * c.element);
    loom_status status = c.out && c.expected ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory");
    for (int root = 0; root < c.size && status == LOOM_OK; root++)
        status = comm_case_broadcast(&c, root);
    free(c.out);
    free(c.expected);
    return status;
}

static loom_status everything(loom_rank *rank, void *argument) {
    loom_comm *world = loom_rank_world(rank);
    LOOM_TRY(comm_cases(rank, argument));
    LOOM_TRY(long_message(world));
    LOOM_TRY(nan_stays(world));
    LOOM_TRY(large_broadcast(world));
    if (loom_comm_size(world) > 1)
        LOOM_TRY(comm_agreement(rank, argument));
    return LOOM_OK;
}

static void collectives_on_mpi_ranks_are_bit_exact(void **state) {
    (void)state;
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.timeout = 60;
    loom_status status = loom__run_mpi(everything, NULL, &options, &(loom__mpi_options){.chunk_bytes = chunk_bytes});
#if MEGALOOM_MPI
    if (status != LOOM_OK)
        fail_msg("%s", loom_error_message());
#else
    assert_int_equal(status, LOOM_ERR_UNSUPPORTED);
    assert_non_null(strstr(loom_error_message(), "MEGALOOM_MPI"));
#endif
}

int main(int argc, char **argv) {
    if (argc > 1)
        chunk_bytes = (size_t)strtoull(argv[1], NULL, 10);
    const struct CMUnitTest tests[] = {cmocka_unit_test(collectives_on_mpi_ranks_are_bit_exact)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
