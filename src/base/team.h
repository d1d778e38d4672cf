/* Creating and ending teams; the public part is <megaloom/team.h>. */
#ifndef BASE_TEAM_H
#define BASE_TEAM_H

#include <megaloom/team.h>
#include <sched.h>

/* Starts threads-1 workers beside the calling thread, which becomes the owner. Each runs with denormals flushed to zero
 * (also the owner until destroy). cpus: threads logical CPU numbers to bind to (the owner too, until destroy), or NULL
 * for no binding. */
loom_status loom__team_create(int threads, const int *cpus, loom_team **team);
/* Ends the workers, gives the owner back its floating-point control and its CPUs, frees all; NULL is accepted. Owner
 * only. */
void loom__team_destroy(loom_team *team);

/* The CPUs that the calling thread may use, however many the machine has; *bytes is the size of the set. NULL, with
 * errno, when the system does not say. Free with CPU_FREE. */
cpu_set_t *loom__cpus_of_thread(size_t *bytes);

/* progress(context) is called by the owner between its items and while it waits for the workers; it moves communication
 * on. */
void loom__team_set_progress(loom_team *team, void (*progress)(void *context), void *context);

/* Gives the calling thread, which is none of the team's, the CPUs that the owner had before it was bound: a thread that
 * the owner starts would share the one of the owner. */
void loom__team_unbind_thread(const loom_team *team);

/* A pointer that a wrapped kernel finds by its team, since a kernel gets nothing else of its rank. NULL at first. */
void loom__team_set_watcher(loom_team *team, void *watcher);
void *loom__team_watcher(const loom_team *team);

#endif
