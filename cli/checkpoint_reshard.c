/* megaloom checkpoint reshard: the same state, as a run of another layout would have written it. */
#include "checkpoint.h"
#include "commands.h"
#include <stdio.h>
#include <string.h>

enum { KEY_FORM = 256, KEY_HF };

typedef struct arguments {
    loom_cli_rewrite_arguments paths;
    loom_reshard_options options;
    loom_cli_run_arguments run;
} arguments;

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case KEY_FORM:
        to->options.optimizer_form = text;
        return 0;
    case KEY_HF:
        to->options.hf = text;
        return 0;
    case ARGP_KEY_ARG:
        if (!to->paths.out)
            return loom_cli_take_rewrite(&to->paths, key, text, state);
        if (!strchr(text, '='))
            argp_error(state, "found %s, expected FIELD=VALUE", text);
        loom_cli_run_argument(&to->run, text, state);
        return 0;
    default:
        return loom_cli_take_rewrite(&to->paths, key, text, state);
    }
}

int loom_cli_checkpoint_reshard(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"optimizer-form", KEY_FORM, "FORM", 0,
            "dp_reshardable, fully_reshardable, whole or none (default: what a run of the new layout writes)", 0},
        {"hf", KEY_HF, "DIR", 0, "Hugging Face directory of the model, for a checkpoint without a context", 0},
        {"json", 'j', NULL, 0, "JSON", 0}, {0}};
    static const struct argp argp = {options, take, "IN OUT [FIELD=VALUE...]",
        "Rewrites a checkpoint for another layout, without ranks.\v"
        "The fields are those of a run file: strategy.tensor_model_parallel_size=4, "
        "strategy.pipeline_model_parallel_size=2, strategy.ddp.use_distributed_optimizer=true and the like; ranks=N is "
        "the number of ranks, by default as many as keep the data-parallel size. What is not given stays as the "
        "checkpoint's context has it. OUT holds what a run of that layout would have written, bit for bit, the state "
        "of "
        "the optimizer included. It is written as OUT.tmp and renamed at the end; nothing may be at OUT.",
        NULL, NULL, NULL};
    arguments given = {0};
    loom_tool_outcome outcome;
    loom_status status = loom_cli_run_arguments_create(argc, &given.run);
    if (status)
        return loom_cli_fail(status);
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    loom_cli_bar bar = loom_cli_bar_begin();
    given.options.progress = (loom_tool_progress){loom_cli_bar_report, &bar};
    status = loom_checkpoint_reshard(
        given.paths.in, given.paths.out, given.run.overrides, given.run.override_count, &given.options, &outcome);
    loom_cli_bar_end(&bar);
    loom_cli_run_arguments_free(&given.run);
    return status ? loom_cli_fail(status) : loom_cli_print_outcome(given.paths.out, &outcome, given.paths.json);
}
