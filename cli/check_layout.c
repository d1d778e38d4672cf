/* megaloom check-layout: a few steps on one rank and on the layout of a run file, compared tensor by tensor. */
#include "commands.h"
#include "layout_check.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

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

static bool is_scaled(const loom_run_config *config) {
    return strncmp(config->precision.precision, "16", 2) == 0;
}

/* The log of a training run is not this command's: under a launcher failures go through it. */
static void log_failure(void *context, loom_log_level level, const char *line) {
    if (level == LOOM_LOG_ERROR)
        loom_cli_log(context, level, line);
}

static void print_finding(const loom_cli_layout_finding *found, int64_t steps) {
    if (found->beyond > 0)
        printf("step %" PRId64 ": %s is the first to differ beyond noise: by %.2g of its size, noise explains %.2g\n"
               "%" PRId64 " of %" PRId64 " quantities differ beyond noise\n",
            found->step, found->what, found->apart, found->allowed, found->beyond, found->compared);
    else
        printf("none of %" PRId64 " quantities of %" PRId64 " step%s differs beyond noise\n"
               "nearest to it: step %" PRId64 ", %s: by %.2g of its size, noise explains %.2g\n",
            found->compared, steps + found->skipped, steps + found->skipped == 1 ? "" : "s", found->step, found->what,
            found->apart, found->allowed);
    if (found->skipped > 0)
        printf("%" PRId64 " of the steps skipped by the loss scale\n", found->skipped);
    if (found->overflowed > 0)
        printf("%" PRId64 " of the quantities are no finite numbers on one rank\n", found->overflowed);
}

/* What is of a rank's own tokens by definition is another computation where they are others. */
static loom_status check_comparable(const loom_run_config *config) {
    const loom_megatron_strategy_config *s = &config->strategy;
    const char *field = loom_cli_routes_by_rank(config), *shared = loom_cli_goes_by_data_ranks(config);
    int64_t data = loom_cli_data_parallel_size(config, config->ranks);
    if (shared && data > 1)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "check-layout with %" PRId64
            " data-parallel ranks is not supported with %s: one rank computes another step; with the other values the "
            "rest can be checked",
            data, shared);
    if (!field || s->tensor_model_parallel_size * s->context_parallel_size == 1)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_UNSUPPORTED,
        "check-layout of %s with strategy.tensor_model_parallel_size %" PRId64 " x context_parallel_size %" PRId64
        " is not supported: %s go by the tokens that a rank has, so one rank routes otherwise; without them the rest "
        "can be checked",
        field, s->tensor_model_parallel_size, s->context_parallel_size,
        strcmp(field, "model.moe_expert_capacity_factor") == 0 ? "capacities" : "choices of sinkhorn");
}

/* *told: the error has been, by the run. */
static loom_status check(loom_run_config *config, int64_t steps, bool *told, bool *beyond) {
    loom_tokenizer *tokenizer = NULL;
    loom_cli_layout_finding found = {0};
    int world;
    bool mpi = loom_mpi_launched(&world);
    if (mpi)
        config->ranks = world;
    LOOM_TRY(loom_run_config_check(config, config->ranks));
    LOOM_TRY(check_comparable(config));
    LOOM_TRY(loom_cli_complete_model(config));
    LOOM_TRY(loom_cli_open_tokenizer(config, &tokenizer));
    loom_cli_layout_check given = {
        .config = config, .tokenizer = tokenizer, .steps = steps, .say = say, .log = log_failure};
    loom_status status = loom_cli_check_layout_run(&given, &found);
    loom_tokenizer_destroy(tokenizer);
    *told = mpi;
    LOOM_TRY(status);
    *beyond = found.beyond > 0;
    if (loom_cli_process() == 0)
        print_finding(&found, steps);
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
        "last bit: a distance up to 16 times that, or up to 16 unit roundoffs (1 in bf16 and fp16), is rounding. Under "
        "mpirun the layout's ranks are its processes, and the first of them trains on one rank beforehand. Nothing is "
        "written. Exit status 1: something differs.",
        NULL, NULL, NULL};
    arguments given = {.steps = STEPS};
    loom_run_config *config = NULL;
    bool beyond = false, told = false;
    loom_status status = loom_cli_run_arguments_create(argc, &given.run);
    if (status)
        return loom_cli_fail(status);
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    status = loom_run_config_load(given.run.path, given.run.overrides, given.run.override_count, &config);
    loom_cli_run_arguments_free(&given.run);
    if (!status) {
        int64_t least = given.steps + (is_scaled(config) ? LOOM_CLI_MOST_SKIPPED : 0);
        config->steps = config->steps < least ? least : config->steps;
        status = check(config, given.steps, &told, &beyond);
    }
    loom_run_config_destroy(config);
    if (status)
        return told ? loom_cli_exit_status(status) : loom_cli_fail(status);
    return beyond;
}
