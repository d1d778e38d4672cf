/* megaloom export: the model of a run as a new Hugging Face directory, in another dtype or other shards. It is loaded
 * and written by the calls that training uses, on one rank. */
#include "commands.h"
#include <argp.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

typedef struct arguments {
    const char *run, *out;
    loom_hf_save_options options;
} arguments;

typedef struct job {
    const loom_run_config *config;
    const arguments *given;
} job;

static bool read_dtype(const char *text, loom_dtype *dtype) {
    static const struct {
        const char *name;
        loom_dtype dtype;
    } names[] = {{"fp32", LOOM_F32}, {"float32", LOOM_F32}, {"bf16", LOOM_BF16}, {"bfloat16", LOOM_BF16},
        {"fp16", LOOM_F16}, {"float16", LOOM_F16}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i].name, text) == 0) {
            *dtype = names[i].dtype;
            return true;
        }
    return false;
}

static loom_status rewrite(loom_rank *rank, void *argument) {
    const job *from = argument;
    loom_fabric *fabric;
    loom_parallel *parallel = NULL;
    LOOM_TRY(loom_cli_fabric(rank, from->config, &fabric));
    loom_status status = loom_cli_model(fabric, from->config, false, &parallel);
    if (!status)
        status = loom_gpt_save_hf(parallel, from->given->out, &from->given->options);
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    return status;
}

/* The run's folder has its model in it; a Hugging Face directory is taken as it is. */
static loom_status find_model(const char *run, char *path, size_t bytes) {
    static const char *const places[] = {"/model", ""};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char config[4200];
        if (snprintf(path, bytes, "%s%s", run, places[i]) >= (int)bytes)
            return loom_fail(LOOM_ERR_ARGUMENT, "the path of the run is too long");
        snprintf(config, sizeof config, "%s/config.json", path);
        if (access(config, F_OK) == 0)
            return LOOM_OK;
    }
    return loom_fail(LOOM_ERR_NOT_FOUND,
        "%s: has neither model/config.json nor config.json: expected the output folder of a run that has ended, or a "
        "Hugging Face directory",
        run);
}

/* The folders above OUT. */
static loom_status make_parents(const char *out) {
    char parents[4096];
    if (snprintf(parents, sizeof parents, "%s", out) >= (int)sizeof parents)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the output is too long");
    size_t length = strlen(parents);
    while (length > 1 && parents[length - 1] == '/')
        parents[--length] = '\0';
    char *slash = strrchr(parents, '/');
    if (!slash || slash == parents)
        return LOOM_OK;
    *slash = '\0';
    return loom_cli_make_directories(parents);
}

static int run(arguments *given) {
    char model[4096], hf[4200];
    const char *overrides[] = {hf, "steps=1", "optim.lr=1", "data.kind=mock", "ranks=1"};
    loom_run_config *config = NULL;
    loom_status status = find_model(given->run, model, sizeof model);
    if (!status)
        status = loom_hf_check_output(given->out);
    if (!status)
        status = make_parents(given->out);
    if (!status)
        status = loom_cli_model_override(&(loom_cli_model_source){.hf = model}, hf, sizeof hf);
    if (!status) {
        given->options.source = model;
        status = loom_run_config_load(NULL, overrides, sizeof overrides / sizeof *overrides, &config);
    }
    if (status)
        return loom_cli_fail(status);
    job from = {config, given};
    int code = loom_cli_run(config, rewrite, &from);
    loom_run_config_destroy(config);
    if (code == 0 && loom_cli_process() == 0)
        printf("%s: %s, as %s\n", given->out, model, loom_dtype_name(given->options.dtype));
    return code;
}

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case 'd':
        if (!read_dtype(text, &to->options.dtype))
            argp_error(state, "--dtype: found %s, expected fp32, bf16 or fp16", text);
        return 0;
    case 's':
        to->options.max_shard_bytes = loom_cli_read_bytes(text);
        if (to->options.max_shard_bytes < 0)
            argp_error(state, "--max-shard-size: found %s, expected bytes, such as 2GB, 512MiB or 70000", text);
        return 0;
    case ARGP_KEY_ARG:
        if (!to->run)
            to->run = text;
        else if (!to->out)
            to->out = text;
        else
            argp_error(state, "more than RUN and OUT: %s", text);
        return 0;
    case ARGP_KEY_END:
        if (!to->out)
            argp_error(state, "RUN and OUT must be given");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int loom_cli_export(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"dtype", 'd', "DTYPE", 0, "Of the weights: fp32 (default), bf16, fp16", 0},
        {"max-shard-size", 's', "BYTES", 0, "Of the tensors in one file, e.g. 2GB or 512MiB (default 5GB)", 0}, {0}};
    static const struct argp argp = {options, take, "RUN OUT",
        "Writes the model of a run as a Hugging Face directory OUT.\v"
        "RUN is the output folder of `megaloom train`, or a Hugging Face directory. OUT is made, or replaced when an "
        "export wrote it and nobody put other files into it. It is written as OUT.tmp, and what it replaces stands at "
        "OUT.old meanwhile: nothing else may be there. Tokenizer and token ids go along.",
        NULL, NULL, NULL};
    arguments given = {.options = loom_hf_save_options_default()};
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    return run(&given);
}
