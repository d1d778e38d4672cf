/* megaloom checkpoint convert: weights from a checkpoint to a Hugging Face directory, the way back, and tensors as they
 * are for other programs. */
#include "checkpoint.h"
#include "commands.h"
#include <stdio.h>

enum { KEY_TO = 256, KEY_HF };

typedef struct arguments {
    loom_cli_rewrite_arguments paths;
    loom_convert_options options;
} arguments;

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case KEY_TO:
        to->options.to = text;
        return 0;
    case KEY_HF:
        to->options.hf = text;
        return 0;
    case 'd':
        to->options.dtype = text;
        return 0;
    case 's':
        to->options.max_shard_bytes = loom_cli_read_bytes(text);
        if (to->options.max_shard_bytes < 0)
            argp_error(state, "--max-shard-size: found %s, expected bytes, such as 2GB, 512MiB or 70000", text);
        return 0;
    case ARGP_KEY_ARG:
        if (to->paths.out)
            argp_error(state, "more than IN and OUT: %s", text);
        return loom_cli_take_rewrite(&to->paths, key, text, state);
    default:
        return loom_cli_take_rewrite(&to->paths, key, text, state);
    }
}

int loom_cli_checkpoint_convert(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"to", KEY_TO, "FORM", 0,
            "hf, torch_dist, dcp or safetensors (default: torch_dist of a Hugging Face directory, hf of a checkpoint)",
            0},
        {"dtype", 'd', "DTYPE", 0, "Of the weights: fp32, bf16, fp16 (default: as they are)", 0},
        {"hf", KEY_HF, "DIR", 0,
            "Hugging Face directory of the model: for a checkpoint without a context, and for its tokenizer files", 0},
        {"max-shard-size", 's', "BYTES", 0, "Of the tensors in one file of a Hugging Face directory (default 5GB)", 0},
        {"json", 'j', NULL, 0, "JSON", 0}, {0}};
    static const struct argp argp = {options, take, "IN OUT",
        "Rewrites the weights of a checkpoint or of a Hugging Face directory in another form.\v"
        "hf is a Hugging Face directory, without the padding rows of the vocabulary and without the optimizer; "
        "torch_dist "
        "a checkpoint with a context, into which the tokenizer files go; dcp what torch.distributed.checkpoint reads; "
        "safetensors one file. The last two hold all tensors of a checkpoint under their names. OUT is written as "
        "OUT.tmp "
        "and renamed at the end; nothing may be at OUT.",
        NULL, NULL, NULL};
    arguments given = {0};
    loom_tool_outcome outcome;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    loom_cli_bar bar = loom_cli_bar_begin();
    given.options.progress = (loom_tool_progress){loom_cli_bar_report, &bar};
    loom_status status = loom_checkpoint_convert(given.paths.in, given.paths.out, &given.options, &outcome);
    loom_cli_bar_end(&bar);
    return status ? loom_cli_fail(status) : loom_cli_print_outcome(given.paths.out, &outcome, given.paths.json);
}
