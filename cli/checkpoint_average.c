/* megaloom checkpoint average: the mean of the weights of several checkpoints. */
#include "checkpoint.h"
#include "commands.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct arguments {
    const char **paths; /* room for argc */
    double *weights;    /* the same */
    int64_t count, weight_count;
    const char *out;
    bool json;
} arguments;

static void read_weights(arguments *to, const char *text, const struct argp_state *state) {
    to->weight_count = 0;
    for (const char *at = text;; at++) {
        char *end;
        errno = 0;
        double weight = strtod(at, &end);
        if (end == at || errno || !isfinite(weight) || (*end != ',' && *end != '\0') || to->weight_count >= state->argc)
            argp_error(state, "--weights: found %s, expected a number for each checkpoint, with commas between", text);
        to->weights[to->weight_count++] = weight;
        if (*end == '\0')
            return;
        at = end;
    }
}

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case 'o':
        to->out = text;
        return 0;
    case 'w':
        read_weights(to, text, state);
        return 0;
    case 'j':
        to->json = true;
        return 0;
    case ARGP_KEY_ARG:
        to->paths[to->count++] = text;
        return 0;
    case ARGP_KEY_END:
        if (to->count < 2)
            argp_error(state, "at least two checkpoints must be given");
        if (!to->out)
            argp_error(state, "--output must be given");
        if (to->weight_count && to->weight_count != to->count)
            argp_error(state, "--weights: found %lld numbers, expected one for each of the %lld checkpoints",
                (long long)to->weight_count, (long long)to->count);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int loom_cli_checkpoint_average(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"output", 'o', "OUT", 0, "Where the mean is written; nothing may be there", 0},
        {"weights", 'w', "W,W,...", 0, "One for each checkpoint; their sum counts as 1 (default: all the same)", 0},
        {"json", 'j', NULL, 0, "JSON", 0}, {0}};
    static const struct argp argp = {options, take, "A B...",
        "Writes the mean of the weights of checkpoints, element by element.\v"
        "All must have the same tensors, shapes and dtypes; every difference is named. The mean is computed in double "
        "and rounded once. The state of the optimizer is left out; all else is that of the first. Safetensors files "
        "and "
        "Hugging Face directories give the same.",
        NULL, NULL, NULL};
    arguments given = {
        .paths = calloc((size_t)argc + 1, sizeof(char *)), .weights = calloc((size_t)argc + 1, sizeof(double))};
    loom_tool_outcome outcome;
    loom_status status =
        given.paths && given.weights ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for the arguments");
    if (!status) {
        argp_parse(&argp, argc, argv, 0, NULL, &given);
        loom_cli_bar bar = loom_cli_bar_begin();
        loom_average_options how = {given.weight_count ? given.weights : NULL, {loom_cli_bar_report, &bar}};
        status = loom_checkpoint_average(given.paths, given.count, given.out, &how, &outcome);
        loom_cli_bar_end(&bar);
    }
    free(given.paths);
    free(given.weights);
    return status ? loom_cli_fail(status) : loom_cli_print_outcome(given.out, &outcome, given.json);
}
