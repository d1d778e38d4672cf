/* Work that a thread of its own does while its owner goes on. The thread has the error record of its own; what it says
 * is the owner's at the wait. */
#ifndef CHECKPOINT_TASK_H
#define CHECKPOINT_TASK_H

#include <megaloom/team.h>
#include <pthread.h>
#include <stdatomic.h>

typedef struct loom__task {
    loom_status (*run)(void *argument);
    void *argument;
    const loom_team *team; /* of the owner, whose CPUs before it was bound are the thread's; may be NULL */
    pthread_t thread;
    bool started; /* and not waited for */
    atomic_bool finished;
    loom_status status;
    char *message;
} loom__task;

/* The task must stay where it is until the wait. Where no thread can be had the work is done at once. */
void loom__task_start(loom__task *task, const loom_team *team, loom_status (*run)(void *argument), void *argument);
/* In the calling thread. */
void loom__task_run(loom__task *task, loom_status (*run)(void *argument), void *argument);
/* Whether a wait would return at once. */
bool loom__task_finished(const loom__task *task);
/* What the work returned, its message in this thread's record. A task that was never started is LOOM_OK, and so is one
 * that was waited for. */
loom_status loom__task_wait(loom__task *task);
/* Waits, and forgets what it returned. */
void loom__task_drop(loom__task *task);

#endif
