/* Checkpoints of `megaloom train`: saving what a run needs to go on, going on from it, and the signals that ask for a
 * save. */
#include "train_state.h"
#include <signal.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

loom_status loom_cli_checkpoints_path(const loom_run_config *config, char *path, size_t bytes) {
    if (snprintf(path, bytes, "%s/checkpoints", config->output) >= (int)bytes)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the output is too long");
    return LOOM_OK;
}

bool loom_cli_has_checkpoint(const char *folder) {
    char path[4096 + 64];
    snprintf(path, sizeof path, "%s/latest_checkpointed_iteration.txt", folder);
    return access(path, F_OK) == 0;
}

static loom_status int_value(loom_value_pool *pool, int64_t of, const loom_value **value) {
    loom_value *made = NULL;
    LOOM_TRY(loom_value_int(pool, of, &made));
    *value = made;
    return LOOM_OK;
}

static loom_status save(const loom_cli_saved *saved, const char *folder, const loom_keep *keep, loom_value_pool *pool) {
    loom_state_item items[] = {{.key = "state_dict", .module = saved->parallel},
        {.key = "optimizer", .optimizer = saved->optimizer}, {.key = "iteration"}, {.key = "consumed_train_samples"}};
    loom_state state = {items, sizeof items / sizeof *items};
    LOOM_TRY(int_value(pool, saved->step, &items[2].value));
    LOOM_TRY(int_value(pool, saved->consumed_samples, &items[3].value));
    return loom_fabric_save_and_keep(saved->fabric, folder, saved->step, keep, &state);
}

loom_status loom_cli_save(const loom_cli_saved *saved, const char *folder, const loom_keep *keep) {
    loom_value_pool *pool = NULL;
    LOOM_TRY(loom_value_pool_create(&pool));
    loom_status status = save(saved, folder, keep, pool);
    loom_value_pool_destroy(pool);
    return status;
}

/* Megatron-LM keeps the number in its arguments; without one each step took a global batch. */
static int64_t consumed_samples(const loom_load_report *report, int64_t global_batch_size) {
    const loom_value *found = loom_value_get(report->leftover, "consumed_train_samples");
    if (!found)
        found = loom_value_get(loom_value_get(report->leftover, "args"), "consumed_train_samples");
    return found && found->kind == LOOM_VALUE_INT && found->integer >= 0 ? found->integer
                                                                         : report->iteration * global_batch_size;
}

loom_status loom_cli_resume(loom_cli_saved *saved, const char *path, int64_t global_batch_size) {
    loom_state_item items[] = {
        {.key = "state_dict", .module = saved->parallel}, {.key = "optimizer", .optimizer = saved->optimizer}};
    loom_state state = {items, sizeof items / sizeof *items};
    loom_load_report report = {0};
    LOOM_TRY(loom_fabric_load(saved->fabric, path, &state, true, &report));
    loom_status status = LOOM_OK;
    if (report.iteration < 0)
        status = loom_fail(LOOM_ERR_FORMAT, "%s does not say after which step it was saved (iteration)", path);
    saved->step = report.iteration;
    saved->consumed_samples = status ? 0 : consumed_samples(&report, global_batch_size);
    loom_load_report_free(&report);
    return status;
}

/* SIGTERM is left alone under a launcher, which sends it when a rank has died. */
static void wanted_signals(sigset_t *signals) {
    sigemptyset(signals);
    sigaddset(signals, SIGUSR1);
    if (!loom_mpi_launched(NULL))
        sigaddset(signals, SIGTERM);
}

void loom_cli_hold_signals(void) {
    sigset_t signals;
    wanted_signals(&signals);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
}

/* A save that nobody has seen yet is taken to need a tenth of the limit, or a minute where that is less. */
bool loom_cli_time_is_up(const loom_cli_clock *clock, double now, double limit) {
    double guess = limit / 10 < 60 ? limit / 10 : 60;
    double save = clock->longest_save > 0 ? clock->longest_save : guess;
    return limit > 0 && now - clock->begin + clock->longest_step + save >= limit;
}

loom_status loom_cli_ask_signals(loom_rank *rank, loom_cli_signal mine, loom_cli_signal *asked) {
    const struct timespec none = {0};
    sigset_t signals;
    int64_t found = mine, most = LOOM_CLI_GO_ON;
    wanted_signals(&signals);
    for (int number; (number = sigtimedwait(&signals, NULL, &none)) > 0;)
        if (number == SIGTERM && found < LOOM_CLI_SAVE_AND_STOP)
            found = LOOM_CLI_SAVE_AND_STOP;
        else if (found == LOOM_CLI_GO_ON)
            found = LOOM_CLI_SAVE;
    LOOM_TRY(loom_all_reduce(loom_rank_world(rank), &found, &most, 1, LOOM_I64, LOOM_MAX));
    *asked = (loom_cli_signal)most;
    return LOOM_OK;
}
