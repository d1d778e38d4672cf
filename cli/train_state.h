/* Checkpoints of `megaloom train`. */
#ifndef CLI_TRAIN_STATE_H
#define CLI_TRAIN_STATE_H

#include <megaloom/megaloom.h>

/* What a run goes on from; step and consumed samples are those so far. */
typedef struct loom_cli_saved {
    loom_fabric *fabric;
    loom_parallel *parallel;
    loom_optimizer *optimizer;
    int64_t step, consumed_samples;
} loom_cli_saved;

/* OUTPUT/checkpoints. */
loom_status loom_cli_checkpoints_path(const loom_run_config *config, char *path, size_t bytes);
/* Whether a run has left one there. */
bool loom_cli_has_checkpoint(const char *folder);

/* Collective over all ranks, as is what follows. */
loom_status loom_cli_save(const loom_cli_saved *saved, const char *folder, const loom_keep *keep);
/* Fills in step and consumed samples. */
loom_status loom_cli_resume(loom_cli_saved *saved, const char *path, int64_t global_batch_size);

/* SIGUSR1, and without a launcher SIGTERM, wait from now on until they are asked for. Before any thread is made. */
void loom_cli_hold_signals(void);
typedef enum loom_cli_signal {
    LOOM_CLI_GO_ON,
    LOOM_CLI_SAVE,
    LOOM_CLI_SAVE_AND_STOP, /* SIGTERM */
    LOOM_CLI_TIME_IS_UP     /* the same, because of checkpoint.time_limit */
} loom_cli_signal;
/* What the signals that any process got since the last call ask for, or `mine`, which a rank asks for by itself. */
loom_status loom_cli_ask_signals(loom_rank *rank, loom_cli_signal mine, loom_cli_signal *asked);

/* How long the parts of a run have taken, so that it can end before a limit; seconds. */
typedef struct loom_cli_clock {
    double begin;        /* of the run */
    double longest_step; /* validation included */
    double longest_save; /* 0 = there was none */
} loom_cli_clock;
/* Whether the next step, and a save behind it, might not end before `limit` (0 = none). */
bool loom_cli_time_is_up(const loom_cli_clock *clock, double now, double limit);

#endif
