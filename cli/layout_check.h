/* Whether a layout computes what one rank computes: the engine of `megaloom check-layout`. */
#ifndef CLI_LAYOUT_CHECK_H
#define CLI_LAYOUT_CHECK_H

#include <megaloom/megaloom.h>

typedef struct loom_cli_layout_check {
    const loom_run_config *config; /* ranks are threads: config->ranks of them */
    const loom_tokenizer *tokenizer;
    int64_t steps;
    const loom_kernels *kernels; /* of the layout's own run; NULL = loom_kernels_fast(), as the others have */
    void (*say)(void *context, const char *line); /* what is run now; NULL = nobody listens */
    void *context;
} loom_cli_layout_check;

typedef struct loom_cli_layout_finding {
    int64_t compared; /* quantities, all steps together */
    int64_t beyond;   /* of them beyond noise */
    /* The first one beyond noise in the order of the computation, or, without one, the nearest to it: */
    int64_t step;
    char what[192];        /* "gradient of decoder.layers.0.mlp.linear_fc1.weight" */
    double apart, allowed; /* relative distances */
} loom_cli_layout_finding;

/* Runs one rank, one rank from weights that differ in their last bit (twice), and the layout. Not from a rank. */
loom_status loom_cli_check_layout_run(const loom_cli_layout_check *check, loom_cli_layout_finding *finding);

#endif
