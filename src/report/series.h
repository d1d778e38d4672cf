/* Numbers of a run that are no member of loom_step_report, by their names in metrics.jsonl. */
#ifndef REPORT_SERIES_H
#define REPORT_SERIES_H

#include <jansson.h>
#include <megaloom/run.h>

/* Takes the numbers of a line that no column of loom_step_report is for. Steps ascend: see `cut`. LOOM_ERR_MEMORY. */
loom_status loom__series_take(loom_run_record *run, int64_t step, const json_t *line);
/* Forgets what was told of this step and of later ones. */
void loom__series_cut(loom_run_record *run, int64_t step);
void loom__series_free(loom_run_record *run);

#endif
