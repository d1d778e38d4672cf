/* The rank object, and what the launchers share. */
#ifndef RUNTIME_RANK_H
#define RUNTIME_RANK_H

#include "comm/comm.h"
#include <megaloom/profile.h>

struct loom__profiler;  /* of profile.c in this room */
struct loom__allocator; /* of the allocator in this room; made on first use, ended with the rank */
struct loom__spans;     /* of spans.h in this room */

/* A limit on the rank's waits that lives as long as its owner. */
typedef struct loom__limit {
    double seconds;
    struct loom__limit *next;
} loom__limit;

struct loom_rank {
    int index, count;
    int local_index, local_count;
    loom__endpoint *endpoint;
    loom_team *team;
    const loom_kernels *kernels;
    struct loom__allocator *allocator;
    struct loom__profiler *profiler; /* NULL = not measured */
    struct loom__spans *spans;       /* its owner's; NULL = not recorded */
    int64_t tapes;                   /* made so far: the number of the newest */
    loom__limit *limits;             /* that live now, besides the launcher's */
    loom_run_options options;
};

/* Gives the rank its team (bound to cpus, or not bound when NULL) in the calling thread, which owns it from now on. The
 * endpoint becomes the rank's, also on failure. */
loom_status loom__rank_open(loom_rank *rank, loom__endpoint *endpoint, int local_index, int local_count, int threads,
    const int *cpus, const loom_run_options *options);
/* Frees what the rank owns: groups, endpoint, allocator, team; but not memory that MPI may still write to. */
void loom__rank_close(loom_rank *rank);

/* Moves the rank's outstanding operations on; to be called now and then in long computations. */
void loom__rank_progress(loom_rank *rank);

/* The rank's waits end after the shortest of the launcher's limit and those set now, whatever the order they go in.
 * A limit is its owner's memory; setting it again changes it, lifting one that is not set changes nothing. */
void loom__rank_set_limit(loom_rank *rank, loom__limit *limit, double seconds);
void loom__rank_lift_limit(loom_rank *rank, loom__limit *limit);
/* From now on the rank's time is the phase's; returns the phase before, which the caller sets again at its end. */
loom_profile_phase loom__profile_phase(loom_rank *rank, loom_profile_phase phase);
/* Ends the measurement, if there is one, and frees it. */
void loom__profile_drop(loom_rank *rank);

/* Runs the rank's function and looks for forgotten requests; then publishes that the rank has ended. On failure *text
 * (LOOM__MESSAGE bytes) says which rank, what it had finished, and what it was doing. */
loom_status loom__rank_run(loom_rank *rank, loom_rank_function function, void *argument, char *text);

/* options, or the defaults for NULL, checked. */
loom_status loom__run_options_resolve(const loom_run_options *given, loom_run_options *options);

/* What only tests ask of an MPI run. */
typedef struct loom__mpi_options {
    size_t chunk_bytes;                /* limits one MPI message; 0 = as large as MPI can */
    void (*returned)(loom_rank *rank); /* called when the rank's function has returned, before it meets the others */
} loom__mpi_options;

/* loom_run_mpi with them; NULL = none. */
loom_status loom__run_mpi(
    loom_rank_function function, void *argument, const loom_run_options *options, const loom__mpi_options *mpi);

#endif
