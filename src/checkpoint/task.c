/* One thread for one piece of work. The invariant: status and message are the thread's until `finished`, and the
 * owner's after the join. */
#include "checkpoint/task.h"
#include "base/team.h"
#include <stdlib.h>

static void carry_out(loom__task *task) {
    task->status = task->run(task->argument);
    task->message = task->status ? strdup(loom_error_message()) : NULL;
    atomic_store_explicit(&task->finished, true, memory_order_release);
}

static void *thread_main(void *context) {
    loom__task *task = context;
    loom__team_unbind_thread(task->team);
    carry_out(task);
    return NULL;
}

static void set_up(loom__task *task, loom_status (*run)(void *argument), void *argument) {
    *task = (loom__task){.run = run, .argument = argument};
}

void loom__task_run(loom__task *task, loom_status (*run)(void *argument), void *argument) {
    set_up(task, run, argument);
    carry_out(task);
}

void loom__task_start(loom__task *task, const loom_team *team, loom_status (*run)(void *argument), void *argument) {
    set_up(task, run, argument);
    task->team = team;
    task->started = pthread_create(&task->thread, NULL, thread_main, task) == 0;
    if (!task->started)
        carry_out(task);
}

bool loom__task_finished(const loom__task *task) {
    return !task->run || atomic_load_explicit(&task->finished, memory_order_acquire);
}

static void join(loom__task *task) {
    if (task->started)
        pthread_join(task->thread, NULL);
    task->started = false;
}

loom_status loom__task_wait(loom__task *task) {
    join(task);
    loom_status status = task->status;
    if (status)
        status = loom_fail(status, "%s", task->message ? task->message : loom_status_text(status));
    loom__task_drop(task);
    return status;
}

void loom__task_drop(loom__task *task) {
    join(task);
    free(task->message);
    *task = (loom__task){0};
}
