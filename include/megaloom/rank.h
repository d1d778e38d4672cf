/* Ranks: how a function is run on n ranks, and what a rank is.
 *
 * A rank is an object, not a process. loom_run_local runs `function` on n threads of this process (no launcher;
 * debuggers and sanitizers work); loom_run_mpi runs it on the processes that mpirun started. Same code, same numbers.
 */
#ifndef MEGALOOM_RANK_H
#define MEGALOOM_RANK_H

#include <megaloom/comm.h>
#include <megaloom/kernels.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct loom_rank loom_rank;

/* Runs on each rank, in the thread that owns the rank. What it returns is the rank's status; the first failure aborts
 * the world. All requests must have been given to loom_wait when it returns LOOM_OK. The return counts as an operation
 * of all ranks: one that comes more than `timeout` after the first is named and ends the run. */
typedef loom_status (*loom_rank_function)(loom_rank *rank, void *argument);

typedef struct loom_run_options {
    int threads;                 /* compute threads a rank; 0 = allowed cores / ranks that share them, at least 1 */
    double timeout;              /* seconds a wait may take before the run is ended, > 0; default 1800 */
    double grace;                /* seconds an aborted rank has to come back before it is abandoned, >= 0; default 10 */
    const loom_kernels *kernels; /* NULL = loom_kernels_fast() */
    loom_log_function log; /* NULL = nothing is logged; after a hang it also gets the last operations of every rank */
    void *log_context;
    bool beside_mpi; /* loom_run_local in an MPI run: this process means ranks of its own, beside the run's */
} loom_run_options;

/* threads 0, timeout 1800, grace 10, the fast kernels, no log, not beside an MPI run. */
LOOM_API loom_run_options loom_run_options_default(void);

/* Runs function on n thread ranks and waits for all. Where the allowed CPUs suffice for n * threads, each rank's team
 * is bound to its own. Returns LOOM_OK, or the status of the first failing rank (that of the rank that failed by
 * itself, where the first to return had only heard of it), with a message that names the rank, its last finished and
 * current operation and the group. LOOM_ERR_STUCK: a rank did not come back within the grace period; it is abandoned,
 * its memory stays allocated, and the process should leave by _exit. Inside an MPI run of several processes it is
 * refused without options->beside_mpi, as each of them would start n ranks. options may be NULL. */
LOOM_API loom_status loom_run_local(
    int n, loom_rank_function function, void *argument, const loom_run_options *options);
/* Initialises MPI when nobody has (with MPI_THREAD_FUNNELED), runs function on this process as one rank of
 * MPI_COMM_WORLD, and finalises what it initialised. To be called by all processes, once in the life of a process, from
 * its main thread. A failure is logged as an error, once a machine; a rank that cannot start fails all, and is logged
 * once. When all ranks come back with a status soon (they failed together), that status is returned, LOOM_ERR_ABORTED
 * for the ranks that were good; else the run is ended with MPI_Abort after the message was logged, unless the caller
 * had initialised MPI, who then only gets the error. While it runs, SIGTERM (which mpirun sends when a process has
 * died) writes what each rank of the machine was doing to stderr before the process ends; a caller with a SIGTERM
 * handler of its own keeps that instead. LOOM_ERR_UNSUPPORTED in a build without MPI. options may be NULL. */
LOOM_API loom_status loom_run_mpi(loom_rank_function function, void *argument, const loom_run_options *options);
/* True when this process was started by an MPI launcher (mpirun, mpiexec, srun with PMI); its number of processes in
 * *size (may be NULL). */
LOOM_API bool loom_mpi_launched(int *size);

LOOM_API int loom_rank_index(const loom_rank *rank);       /* global rank */
LOOM_API int loom_rank_count(const loom_rank *rank);       /* world size */
LOOM_API int loom_rank_local_index(const loom_rank *rank); /* place among the ranks of this machine */
LOOM_API int loom_rank_local_count(const loom_rank *rank); /* ranks on this machine */
LOOM_API loom_comm *loom_rank_world(loom_rank *rank);      /* the group of all ranks; owned by the rank */
LOOM_API loom_team *loom_rank_team(loom_rank *rank);
LOOM_API const loom_kernels *loom_rank_kernels(const loom_rank *rank);
/* One line through the run's log callback. */
LOOM_API void loom_rank_log(loom_rank *rank, loom_log_level level, const char *format, ...) LOOM_PRINTF(3, 4);

/* What the rank does now ("reading a batch"), for the messages about ranks that do not come; NULL or "" when it is
 * over. Cut after 63 bytes. Costs a few stores. */
LOOM_API void loom_rank_note(loom_rank *rank, const char *text);
/* Writes the rank's last operations through the log: up to 64, oldest first; name, number, group, bytes, state, age. */
LOOM_API void loom_rank_dump(loom_rank *rank, loom_log_level level);

/* A group of the given global ranks, in that order, which must contain the caller; members are the only callers, and
 * all of them call with the same list and name. Many groups of one name that partition the world are made at once by
 * every rank naming its own. Collective over the members. The rank owns it: freed with the rank, or by
 * loom_group_destroy. */
LOOM_API loom_status loom_group_create(
    loom_rank *rank, const char *name, const int *ranks, int count, loom_comm **comm);
/* Collective over the members, in the same order as the group's other calls; with no operation of the group open. NULL
 * is accepted, and the world, which stays until its rank ends. */
LOOM_API void loom_group_destroy(loom_comm *comm);

#ifdef __cplusplus
}
#endif
#endif
