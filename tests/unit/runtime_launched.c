/* Which environments mean that an MPI launcher started us. */
#include <megaloom/rank.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "SLURM_PROCID",
    "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_JOB_NAME"};

static int clean(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unsetenv(names[i]);
    return 0;
}

/* The size that the environment tells, 0 when nobody launched us. */
static int launched(void) {
    int size = -1;
    return loom_mpi_launched(&size) ? size : 0;
}

static void nothing_is_no_launcher(void **state) {
    (void)state;
    assert_int_equal(launched(), 0);
    assert_false(loom_mpi_launched(NULL));
}

static void mpirun_tells_its_size(void **state) {
    (void)state;
    setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
    assert_int_equal(launched(), 4);
    setenv("OMPI_COMM_WORLD_SIZE", "four", 1);
    assert_int_equal(launched(), 0);
}

static void hydra_tells_its_size(void **state) {
    (void)state;
    setenv("PMI_RANK", "1", 1);
    setenv("PMI_SIZE", "8", 1);
    assert_int_equal(launched(), 8);
}

static void a_task_of_a_slurm_step_is_launched(void **state) {
    (void)state;
    setenv("SLURM_PROCID", "0", 1);
    setenv("SLURM_STEP_ID", "0", 1);
    setenv("SLURM_STEP_NUM_TASKS", "6", 1);
    assert_int_equal(launched(), 6);
}

static void a_shell_in_a_slurm_allocation_is_not_launched(void **state) {
    (void)state;
    setenv("SLURM_NTASKS", "6", 1);
    assert_int_equal(launched(), 0);
    setenv("SLURM_PROCID", "0", 1);
    assert_int_equal(launched(), 0);
    setenv("SLURM_STEP_ID", "0", 1);
    setenv("SLURM_JOB_NAME", "interactive", 1);
    assert_int_equal(launched(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(nothing_is_no_launcher, clean),
        cmocka_unit_test_setup(mpirun_tells_its_size, clean),
        cmocka_unit_test_setup(hydra_tells_its_size, clean),
        cmocka_unit_test_setup(a_task_of_a_slurm_step_is_launched, clean),
        cmocka_unit_test_setup(a_shell_in_a_slurm_allocation_is_not_launched, clean),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
