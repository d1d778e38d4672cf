/* megaloom config: the run file of all defaults, or a run file as it is understood. What is printed loads again, so it
 * can be kept beside a run's results. */
#include "commands.h"
#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct arguments {
    bool defaults;
    loom_cli_run_arguments run;
} arguments;

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case 'd':
        to->defaults = true;
        return 0;
    case ARGP_KEY_ARG:
        loom_cli_run_argument(&to->run, text, state);
        return 0;
    case ARGP_KEY_END:
        if (to->defaults && (to->run.path || to->run.override_count))
            argp_error(state, "--defaults takes no run file and no overrides");
        if (!to->defaults && !to->run.path && !to->run.override_count)
            argp_error(state, "give a run file, overrides, or --defaults");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static loom_status put(void *to, const char *text, size_t length) {
    if (fwrite(text, 1, length, to) != length || fflush(to) != 0)
        return loom_fail(LOOM_ERR_IO, "writing to standard output failed");
    return LOOM_OK;
}

static loom_status show(const arguments *given) {
    if (given->defaults)
        return loom_run_config_print_defaults(put, stdout);
    loom_run_config *config = NULL;
    LOOM_TRY(loom_run_config_load(given->run.path, given->run.overrides, given->run.override_count, &config));
    loom_tokenizer *tokenizer = NULL;
    loom_status found = loom_cli_open_tokenizer(config, &tokenizer);
    loom_tokenizer_destroy(tokenizer);
    /* Shown also when its fields do not go together: what is understood helps to see why. */
    loom_status status = loom_run_config_print(config, put, stdout);
    if (!status)
        status = found ? found : loom_run_config_check(config, config->ranks);
    loom_run_config_destroy(config);
    return status;
}

int loom_cli_config(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"defaults", 'd', NULL, 0, "Print a run file of all defaults, with a comment for each field", 0}, {0}};
    static const struct argp argp = {options, take, "[RUN.yaml] [FIELD=VALUE...]",
        "Prints the run file as Megaloom understands it: defaults, the file's values, then the overrides.", NULL, NULL,
        NULL};
    arguments given = {0};
    loom_status status = loom_cli_run_arguments_create(argc, &given.run);
    if (status)
        return loom_cli_fail(status);
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    status = show(&given);
    loom_cli_run_arguments_free(&given.run);
    return status == LOOM_OK ? 0 : loom_cli_fail(status);
}
