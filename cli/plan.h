/* What the files of `megaloom plan` share. */
#ifndef CLI_PLAN_H
#define CLI_PLAN_H

#include <megaloom/plan.h>

typedef struct loom_cli_plan_facts {
    const char *name; /* of the configuration */
    const loom_run_config *config;
    const loom_plan_options *options;
    const loom_plan *plan;
    const loom_plan_search *search; /* NULL = none was asked for */
    const char *not_built;          /* lines; "" = all is built */
    const char *left_out;           /* lines about arguments of other programs that have no field here */
} loom_cli_plan_facts;

/* To standard output, for people: at most 100 columns. */
void loom_cli_plan_text(const loom_cli_plan_facts *facts);
/* To standard output. LOOM_ERR_MEMORY. */
loom_status loom_cli_plan_json(const loom_cli_plan_facts *facts);

#endif
