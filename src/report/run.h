/* What the writers and readers of a run's folder share. */
#ifndef REPORT_RUN_H
#define REPORT_RUN_H

#include <megaloom/run.h>

enum { LOOM__RUN_PATH_BYTES = 4096 };

extern const char *const loom__run_memory_names[LOOM_RUN_MEMORY_KINDS];
extern const char *const loom__run_state_names[LOOM_RUN_STATE_COUNT];

/* "FOLDER/NAME". */
loom_status loom__run_path(const char *folder, const char *name, char path[LOOM__RUN_PATH_BYTES]);
/* The text of a run.json, called `name` in messages; also after an error the facts are to be freed. */
loom_status loom__run_parse_facts(const char *name, const char *text, size_t length, loom_run_facts *facts);
void loom__run_free_facts(loom_run_facts *facts);
/* A line of metrics.jsonl. A number that is null was infinite, one that is missing was not measured. False: it is none.
 */
bool loom__run_parse_line(const char *line, size_t length, loom_step_report *report);
/* A line of a test in metrics.jsonl, which is of no step of its own. False, with nothing written: it is none. */
bool loom__run_parse_test(const char *line, size_t length, int64_t *step, double *loss);

/* Of one step that two runs have: relative differences of the losses and of the gradient norms (0 where one was not
 * measured), and what rounding may do to the loss (NaN where nobody can say). */
typedef struct loom__step_apart {
    int64_t step;
    double loss, norm, bound;
    bool equal; /* bits of the losses */
} loom__step_apart;
/* Of all common steps, which ascend; *steps for free(). */
loom_status loom__runs_apart(const loom_run_record *a, const loom_run_record *b, const loom_run_record *const *noise,
    int64_t noise_count, loom__step_apart **steps, int64_t *count);

#endif
