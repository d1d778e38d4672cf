/* What `megaloom train` leaves in its output beside the model: metrics, events, facts, configuration, the page. */
#ifndef CLI_TRAIN_REPORT_H
#define CLI_TRAIN_REPORT_H

#include <megaloom/megaloom.h>

/* Files are rank 0's; on the others they stay NULL. */
typedef struct loom_cli_train_report {
    const loom_run_config *config;
    loom_rank *rank;
    loom_metrics *metrics;
    loom_events *events;
    loom_run_facts facts;
    loom_run_session *sessions; /* those of earlier starts, and this one */
} loom_cli_train_report;

/* Opens what is written while the run goes on. `continues`: the output holds the same run's earlier steps. Not
 * collective. */
loom_status loom_cli_report_open(
    loom_rank *rank, const loom_run_config *config, int64_t first_step, bool continues, loom_cli_train_report *report);
/* The run begins: its configuration and its facts. Not collective. */
loom_status loom_cli_report_begin(loom_cli_train_report *report, double gemm_rate, double flops_per_token);
loom_status loom_cli_report_step(loom_cli_train_report *report, const loom_step_report *step);
/* The run is over, with `status`: its last facts and the page. Returns `status`, with the error record as it was, or
 * why the ranks could not come together. layout: of the run, read where status is LOOM_OK, as the
 * two behind it are. message: why it stopped; NULL = it did not. What cannot be written is a
 * warning. Collective over the world where status is LOOM_OK. */
loom_status loom_cli_report_end(loom_cli_train_report *report, const loom_layout *layout, loom_parallel *parallel,
    const loom_optimizer *optimizer, const char *message, loom_status status);
void loom_cli_report_close(loom_cli_train_report *report);

/* Makes FOLDER/report.html, or `path` where it is not NULL, of what is in the folder. */
loom_status loom_cli_write_report(const char *folder, const char *path, int64_t points);

#endif
