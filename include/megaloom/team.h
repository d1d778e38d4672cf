/* A team: the compute threads of one rank.
 *
 * Work is handed out as items whose number and size depend on the shape alone, never on the number of threads: so the
 * same numbers come out for any team size. The thread that owns the team (the rank's own) takes part in the work. */
#ifndef MEGALOOM_TEAM_H
#define MEGALOOM_TEAM_H

#include <megaloom/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct loom_team loom_team;

/* Work of one item. `worker` is in [0, size) and 0 is the owner. Must not call loom_team_run on the same team. */
typedef void (*loom_team_function)(void *argument, int64_t item, int worker);

/* Runs function(argument, item, worker) for every item in [0, items); returns when all are done. Items are taken from a
 * shared counter, in order. Only the owner may call it. A team of NULL runs the items in the calling thread. */
LOOM_API void loom_team_run(loom_team *team, loom_team_function function, void *argument, int64_t items);

/* Threads of the team, the owner counted; 1 for NULL. */
LOOM_API int loom_team_size(const loom_team *team);

/* At least `bytes` of 64-byte aligned scratch of this worker, contents undefined, valid until the worker's next call.
 * It grows as needed and never shrinks. For a NULL team it is the calling thread's own. NULL when memory is out. */
LOOM_API void *loom_team_scratch(loom_team *team, int worker, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
