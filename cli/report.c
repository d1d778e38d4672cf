/* megaloom report: the page of a run, made of what is in its folder. */
#include "commands.h"
#include "train_report.h"
#include <stdio.h>

typedef struct arguments {
    const char *folder, *output;
    int64_t points;
} arguments;

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case 'o':
        to->output = text;
        return 0;
    case 'p':
        to->points = loom_cli_integer("--points", text, 2, 100000, state);
        return 0;
    case ARGP_KEY_ARG:
        if (to->folder)
            argp_error(state, "more than one run: %s and %s", to->folder, text);
        to->folder = text;
        return 0;
    case ARGP_KEY_END:
        if (!to->folder)
            argp_error(state, "give the output folder of a run");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int loom_cli_report(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"output", 'o', "FILE", 0, "Where the page goes; RUN/report.html when not given", 0},
        {"points", 'p', "N", 0, "Stretches a curve of more steps is drawn of (1000)", 0}, {0}};
    static const struct argp argp = {options, take, "RUN",
        "Makes one page of a run's output folder, also while the run goes on.\v"
        "The page has curves, memory, the pipeline's timeline (with trace=true), the rank map, the configuration and "
        "warnings. Script and style are in it: it works offline. `megaloom train` makes it at its end.",
        NULL, NULL, NULL};
    arguments given = {0};
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    loom_status status = loom_cli_write_report(given.folder, given.output, given.points);
    if (status)
        return loom_cli_fail(status);
    printf("%s%s\n", given.output ? given.output : given.folder, given.output ? "" : "/report.html");
    return 0;
}
