/* Who started us, told by the variables that launchers leave: Open MPI's mpirun, Hydra (MPICH, Intel MPI), Slurm's
 * srun. Invariant: a shell inside an allocation, which has Slurm's variables but is no task of a step, is not a
 * launched rank. */
#include <errno.h>
#include <limits.h>
#include <megaloom/rank.h>
#include <stdlib.h>
#include <string.h>

/* The number in a variable, or -1. */
static int number_in(const char *name) {
    const char *text = getenv(name);
    if (!text || !*text)
        return -1;
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    return errno || *end || value < 0 || value > INT_MAX ? -1 : (int)value;
}

/* Tasks of the step we are a task of, or -1. */
static int slurm_step_tasks(void) {
    const char *job = getenv("SLURM_JOB_NAME");
    if (number_in("SLURM_PROCID") < 0 || number_in("SLURM_STEP_ID") < 0)
        return -1;
    if (job && (strcmp(job, "bash") == 0 || strcmp(job, "interactive") == 0))
        return -1;
    int tasks = number_in("SLURM_STEP_NUM_TASKS");
    return tasks > 0 ? tasks : number_in("SLURM_NTASKS");
}

bool loom_mpi_launched(int *size) {
    int found = number_in("OMPI_COMM_WORLD_SIZE");
    if (found < 1 && number_in("PMI_RANK") >= 0)
        found = number_in("PMI_SIZE");
    if (found < 1)
        found = slurm_step_tasks();
    /* A PMIx server that does not say how many we are: a launcher all the same. */
    if (found < 1 && number_in("PMIX_RANK") >= 0)
        found = 1;
    if (found < 1)
        return false;
    if (size)
        *size = found;
    return true;
}
