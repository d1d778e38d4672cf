/* Whether a layout computes what one rank computes: the engine of `megaloom check-layout`. */
#ifndef CLI_LAYOUT_CHECK_H
#define CLI_LAYOUT_CHECK_H

#include <megaloom/megaloom.h>

/* Steps that a dynamic loss scale may skip, beside those that are asked for: there must be data for them. */
enum { LOOM_CLI_MOST_SKIPPED = 100 };

typedef struct loom_cli_layout_check {
    /* Of config->ranks ranks, for which it has been checked: threads, or under a launcher its processes. */
    const loom_run_config *config;
    const loom_tokenizer *tokenizer;
    int64_t steps;               /* updates; those that a loss scale skips come on top */
    const loom_kernels *kernels; /* of the layout's own run; NULL = loom_kernels_fast(), as the others have */
    void (*say)(void *context, const char *line); /* what is run now; NULL = nobody listens */
    void *context;
    loom_log_function log; /* of failures under a launcher, which have been told when the run returns; may be NULL */
} loom_cli_layout_check;

typedef struct loom_cli_layout_finding {
    int64_t compared; /* quantities, all steps together */
    int64_t beyond;   /* of them beyond noise */
    /* Of them no finite numbers on one rank; such a one is beyond noise where the layout's is finite. */
    int64_t overflowed;
    int64_t skipped; /* steps, on one rank */
    /* The first one beyond noise in the order of the computation, or, without one, the nearest to it: */
    int64_t step;
    char what[192];        /* "gradient of decoder.layers.0.mlp.linear_fc1.weight" */
    double apart, allowed; /* relative distances */
} loom_cli_layout_finding;

/* Runs one rank, one rank from weights that differ in their last bit (twice), and the layout. Not from a rank. Under a
 * launcher by all processes; the first one makes the plain runs and listens to `say`, all get the finding. */
loom_status loom_cli_check_layout_run(const loom_cli_layout_check *check, loom_cli_layout_finding *finding);

#endif
