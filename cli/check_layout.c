/* megaloom check-layout: a few steps on one rank and on the layout of a run file, compared tensor by tensor. */
#include "commands.h"
#include "layout_check.h"
#include <inttypes.h>
#include <stdio.h>

enum { STEPS = 3, MOST_STEPS = 1000 };

typedef struct arguments {
    loom_cli_run_arguments run;
    int64_t steps;
} arguments;

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case 'n':
        to->steps = loom_cli_integer("--steps", text, 1, MOST_STEPS, state);
        return 0;
    case ARGP_KEY_ARG:
        loom_cli_run_argument(&to->run, text, state);
        return 0;
    case ARGP_KEY_END:
        if (!to->run.path)
            argp_error(state, "give a run file");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static void say(void *context, const char *line) {
    (void)context;
    puts(line);
    fflush(stdout);
}

static loom_status check(loom_run_config *config, int64_t steps, bool *beyond) {
    loom_tokenizer *tokenizer = NULL;
    loom_cli_layout_finding found;
    if (loom_mpi_launched(NULL))
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "check-layout runs one rank beside the layout's: not supported yet under a launcher; without one its ranks "
            "are threads (field `ranks`)");
    LOOM_TRY(loom_cli_open_tokenizer(config, &tokenizer));
    loom_cli_layout_check given = {.config = config, .tokenizer = tokenizer, .steps = steps, .say = say};
    loom_status status = loom_cli_check_layout_run(&given, &found);
    loom_tokenizer_destroy(tokenizer);
    LOOM_TRY(status);
    *beyond = found.beyond > 0;
    if (*beyond)
        printf("step %" PRId64 ": %s is the first to differ beyond noise: by %.2g of its size, noise explains %.2g\n"
               "%" PRId64 " of %" PRId64 " quantities differ beyond noise\n",
            found.step, found.what, found.apart, found.allowed, found.beyond, found.compared);
    else
        printf("none of %" PRId64 " quantities of %" PRId64 " step%s differs beyond noise\n"
               "nearest to it: step %" PRId64 ", %s: by %.2g of its size, noise explains %.2g\n",
            found.compared, steps, steps == 1 ? "" : "s", found.step, found.what, found.apart, found.allowed);
    return LOOM_OK;
}

int loom_cli_check_layout(int argc, char **argv) {
    static const struct argp_option options[] = {{"steps", 'n', "N", 0, "Steps of each run (3)", 0}, {0}};
    static const struct argp argp = {options, take, "RUN.yaml [FIELD=VALUE...]",
        "Runs a few steps on one rank and on the configured layout, and names the first tensor that differs beyond "
        "noise.\v"
        "Compared are the activations of each layer, the loss, each gradient, its norm and each updated weight, as "
        "whole "
        "tensors. Noise is what one rank shows when it runs again, twice, from weights that differ at random in their "
        "last bit: a distance up to 16 times that, or up to 16 unit roundoffs (1 in bf16 and fp16), is rounding. The "
        "ranks are threads. Nothing is written. Exit status 1: something differs.",
        NULL, NULL, NULL};
    arguments given = {.steps = STEPS};
    loom_run_config *config = NULL;
    bool beyond = false;
    loom_status status = loom_cli_run_arguments_create(argc, &given.run);
    if (status)
        return loom_cli_fail(status);
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    status = loom_run_config_load(given.run.path, given.run.overrides, given.run.override_count, &config);
    loom_cli_run_arguments_free(&given.run);
    if (!status) {
        if (config->steps == 0)
            config->steps = given.steps;
        status = check(config, given.steps, &beyond);
    }
    loom_run_config_destroy(config);
    return status ? loom_cli_fail(status) : beyond;
}
