/* Creating and ending teams; the public part is <megaloom/team.h>. */
#ifndef BASE_TEAM_H
#define BASE_TEAM_H

#include <megaloom/team.h>

/* Starts threads-1 workers beside the calling thread, which becomes the owner. Each runs with denormals flushed to zero
 * (also the owner until destroy). cpus: threads logical CPU numbers to bind to, or NULL for no binding. */
loom_status loom__team_create(int threads, const int *cpus, loom_team **team);
/* Ends the workers and frees all; NULL is accepted. Owner only. */
void loom__team_destroy(loom_team *team);

/* progress(context) is called by the owner between its items and while it waits for the workers; it moves communication
 * on. */
void loom__team_set_progress(loom_team *team, void (*progress)(void *context), void *context);

#endif
