/* What the parts of megaloom schedule share: the schedule that was asked for, simulated. */
#ifndef CLI_SCHEDULE_H
#define CLI_SCHEDULE_H

#include <megaloom/schedule.h>

typedef struct loom_cli_schedule_data {
    loom_schedule_config config;
    loom_schedule_list *lists; /* [stages] */
    loom_schedule_result result;
} loom_cli_schedule_data;

/* "1F1B", "interleaved 1F1B", "zero-bubble 1F1B", "forward-only", … */
const char *loom_cli_schedule_name(const loom_schedule_config *config);

/* A table of the stages, and their work in order; long lists are shown at their ends. */
loom_status loom_cli_schedule_text(const loom_cli_schedule_data *schedule);
/* One object, with the keys of the golden order and tables. */
loom_status loom_cli_schedule_json(const loom_cli_schedule_data *schedule);

#endif
