/* megaloom generate: text that a model on the disk writes behind a prompt, on any tensor-parallel layout. Rank 0
 * writes it as it comes. */
#include "commands.h"
#include <argp.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- the arguments ---- */

typedef struct arguments {
    loom_cli_model_source model;
    const char *prompt, *tokens;
    loom_generate_options options;
    bool stop_given;
    loom_cli_run_arguments run;
} arguments;

enum { KEY_TOP_K = 256, KEY_TOP_P, KEY_STOP };

static double real_of(const char *option, const char *text, const struct argp_state *state) {
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end)
        argp_error(state, "%s: found %s, expected a number", option, text);
    return value;
}

static error_t take(int key, char *text, struct argp_state *state) {
    arguments *to = state->input;
    switch (key) {
    case 'p':
        to->prompt = text;
        return 0;
    case 't':
        to->tokens = text;
        return 0;
    case 'n':
        to->options.max_tokens = loom_cli_integer("--max-tokens", text, INT64_MIN, INT64_MAX, state);
        return 0;
    case 'T':
        to->options.temperature = real_of("--temperature", text, state);
        return 0;
    case 's':
        to->options.seed = (uint64_t)loom_cli_integer("--seed", text, INT64_MIN, INT64_MAX, state);
        return 0;
    case KEY_TOP_K:
        to->options.top_k = loom_cli_integer("--top-k", text, INT64_MIN, INT64_MAX, state);
        return 0;
    case KEY_TOP_P:
        to->options.top_p = real_of("--top-p", text, state);
        return 0;
    case KEY_STOP:
        to->options.stop_token = loom_cli_integer("--stop", text, INT64_MIN, INT64_MAX, state);
        to->stop_given = true;
        return 0;
    case ARGP_KEY_ARG:
        if (!strchr(text, '='))
            argp_error(state, "found %s, expected FIELD=VALUE", text);
        loom_cli_run_argument(&to->run, text, state);
        return 0;
    case ARGP_KEY_END:
        loom_cli_model_source_check(&to->model, state);
        if (!to->prompt == !to->tokens)
            argp_error(state, "one of --prompt and --tokens must be given");
        return 0;
    default:
        return loom_cli_take_model(&to->model, key, text);
    }
}

/* ---- the prompt ---- */

/* "1,2,3" */
static loom_status read_tokens(const char *text, int64_t *tokens, int64_t *count) {
    for (const char *at = text;; at++) {
        char *end;
        errno = 0;
        tokens[(*count)++] = strtoll(at, &end, 10);
        if (errno || end == at || (*end != ',' && *end != '\0'))
            return loom_fail(LOOM_ERR_ARGUMENT, "--tokens: found \"%.40s\", expected integers with commas between", at);
        if (*end == '\0')
            return LOOM_OK;
        at = end;
    }
}

/* The directory's own tokenizer; without one, bytes for a vocabulary that is theirs. */
static loom_status find_tokenizer(const char *directory, int64_t vocabulary, loom_tokenizer **tokenizer) {
    loom_status status = loom_tokenizer_open(directory, tokenizer);
    if (status == LOOM_ERR_NOT_FOUND && vocabulary == loom_tokenizer_byte()->vocab_size)
        status = loom_tokenizer_open("byte", tokenizer);
    if (status == LOOM_ERR_NOT_FOUND)
        return loom_fail(LOOM_ERR_NOT_FOUND,
            "%s/tokenizer.json is not there, and a vocabulary of %lld is not the byte tokenizer's; give the prompt by "
            "--tokens",
            directory, (long long)vocabulary);
    LOOM_TRY(status);
    if ((*tokenizer)->vocab_size <= vocabulary)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_CONFIG, "%s has %lld tokens, the model's vocabulary %lld", (*tokenizer)->name,
        (long long)(*tokenizer)->vocab_size, (long long)vocabulary);
}

/* A checkpoint has its tokenizer in its context. */
static loom_status open_tokenizer(const loom_cli_model_source *model, int64_t vocabulary, loom_tokenizer **tokenizer) {
    loom_checkpoint *checkpoint = NULL;
    if (model->hf)
        return find_tokenizer(model->hf, vocabulary, tokenizer);
    LOOM_TRY(loom_checkpoint_open(model->checkpoint, &checkpoint));
    const char *context = loom_checkpoint_get_info(checkpoint)->context;
    loom_status status = find_tokenizer(context ? context : model->checkpoint, vocabulary, tokenizer);
    loom_checkpoint_close(checkpoint);
    return status;
}

typedef struct generation_run {
    const loom_run_config *config;
    const loom_generate_options *options;
    loom_tokenizer *tokenizer; /* NULL: tokens in, tokens out */
    loom_prompt prompt;
    loom_text_stream *text; /* of rank 0; NULL: tokens out */
    bool begun;
} generation_run;

/* *memory is to be freed, also after an error. */
static loom_status read_prompt(arguments *given, generation_run *run, int64_t **memory) {
    const char *text = given->prompt ? given->prompt : given->tokens;
    size_t length = strlen(text), filled = 0;
    if (!given->tokens)
        LOOM_TRY(open_tokenizer(&given->model, run->config->model.config.vocab_size, &run->tokenizer));
    size_t room = given->tokens ? length + 1 : loom_tokenizer_room(run->tokenizer, length) + 1;
    int64_t *tokens = malloc(room * sizeof *tokens), count = 0;
    *memory = tokens;
    if (!tokens)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a prompt of %zu bytes", length);
    if (given->tokens) {
        LOOM_TRY(read_tokens(text, tokens, &count));
    } else {
        LOOM_TRY(run->tokenizer->encode(run->tokenizer->context, text, length, tokens, room, &filled));
        count = (int64_t)filled;
        if (count == 0)
            return loom_fail(LOOM_ERR_ARGUMENT, "--prompt is empty: there is nothing to continue");
        if (!given->stop_given)
            given->options.stop_token = run->tokenizer->eod;
    }
    run->prompt = (loom_prompt){tokens, count};
    return run->tokenizer ? loom_text_stream_create(run->tokenizer, tokens, (size_t)count, &run->text) : LOOM_OK;
}

/* ---- the run ---- */

static loom_status write_token(void *context, int64_t rows, const int64_t *tokens) {
    generation_run *run = context;
    const char *text = NULL;
    size_t bytes = 0;
    (void)rows;
    if (run->text) {
        LOOM_TRY(loom_text_stream_put(run->text, tokens[0], &text, &bytes));
        fwrite(text, 1, bytes, stdout);
    } else {
        printf("%s%lld", run->begun ? "," : "", (long long)tokens[0]);
    }
    run->begun = true;
    return fflush(stdout) == 0 ? LOOM_OK : loom_fail(LOOM_ERR_IO, "standard output cannot be written: %m");
}

static loom_status write_end(generation_run *run) {
    const char *text = "";
    size_t bytes = 0;
    loom_status status = run->text ? loom_text_stream_end(run->text, &text, &bytes) : LOOM_OK;
    fwrite(text, 1, bytes, stdout);
    putchar('\n');
    return status;
}

static loom_status write_nothing(void *context, int64_t rows, const int64_t *tokens) {
    (void)context;
    (void)rows;
    (void)tokens;
    return LOOM_OK;
}

static loom_status generate(loom_rank *rank, void *argument) {
    generation_run *run = argument;
    loom_fabric *fabric;
    loom_parallel *parallel = NULL;
    LOOM_TRY(loom_cli_check_same(rank, run->config));
    LOOM_TRY(loom_cli_fabric(rank, run->config, &fabric));
    loom_status status = loom_cli_model(fabric, run->config, false, &parallel);
    bool writes = loom_rank_index(rank) == 0;
    if (!status)
        status = loom_generate(parallel, &run->prompt, 1, run->options, writes ? write_token : write_nothing, run);
    if (writes && run->begun) {
        loom_status ended = write_end(run);
        status = status ? status : ended;
    }
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    return status;
}

static loom_status load(const arguments *given, loom_run_config **config) {
    enum { OWN = 4 };
    char hf[4200];
    LOOM_TRY(loom_cli_model_override(&given->model, hf, sizeof hf));
    const char **list = calloc((size_t)given->run.override_count + OWN, sizeof *list);
    if (!list)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory");
    list[0] = hf;
    /* A run file's must; they have no part in generation. */
    list[1] = "data.kind=mock";
    list[2] = "steps=1";
    list[3] = "optim.lr=1";
    memcpy(list + OWN, given->run.overrides, (size_t)given->run.override_count * sizeof *list);
    loom_status status = loom_run_config_load(NULL, list, given->run.override_count + OWN, config);
    free(list);
    return status;
}

static int run_arguments(arguments *given) {
    loom_run_config *config = NULL;
    int64_t *tokens = NULL;
    generation_run run = {.options = &given->options};
    loom_status status = load(given, &config);
    if (!status)
        status = loom_cli_complete_model(config);
    run.config = config;
    if (!status)
        status = read_prompt(given, &run, &tokens);
    /* Loading may take minutes. */
    if (!status && config->strategy.pipeline_model_parallel_size > 1)
        status = loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: strategy.pipeline_model_parallel_size=%lld (generation on pipeline stages); only 1 "
            "works",
            (long long)config->strategy.pipeline_model_parallel_size);
    if (!status)
        status = loom_generate_check(&config->model.config, &run.prompt, 1, run.options);
    int code = status ? loom_cli_fail(status) : loom_cli_run(config, generate, &run);
    free(tokens);
    loom_text_stream_destroy(run.text);
    loom_tokenizer_destroy(run.tokenizer);
    loom_run_config_destroy(config);
    return code;
}

int loom_cli_generate(int argc, char **argv) {
    static const struct argp_option options[] = {LOOM_CLI_MODEL_OPTIONS,
        {"prompt", 'p', "TEXT", 0,
            "Text to continue, by the directory's tokenizer.json, or without one as bytes for the byte vocabulary of "
            "257 "
            "tokens",
            0},
        {"tokens", 't', "N,N,...", 0, "Tokens to continue; then tokens are written, not text", 0},
        {"max-tokens", 'n', "N", 0, "Most tokens to write; 64 when not given", 0},
        {"temperature", 'T', "X", 0, "0, the default: always the most likely token; above: drawn, the higher the freer",
            0},
        {"top-k", KEY_TOP_K, "K", 0, "Draw among the K most likely tokens; 0, the default: all", 0},
        {"top-p", KEY_TOP_P, "P", 0, "Draw among the fewest tokens that reach this share; 1, the default: all", 0},
        {"seed", 's', "N", 0, "Of the draws; 1234 when not given", 0},
        {"stop", KEY_STOP, "TOKEN", 0,
            "Token to end with; -1: none; with --prompt, the end of a document when not given", 0},
        {0}};
    static const struct argp argp = {options, take,
        "(--hf DIR | --checkpoint DIR) (--prompt TEXT | --tokens N,N,...) [FIELD=VALUE...]",
        "Continues a text and writes what comes, without the prompt. FIELD=VALUE as in a run file, e.g. ranks=2 "
        "strategy.tensor_model_parallel_size=2: the text is the same.",
        NULL, NULL, NULL};
    arguments given = {.options = loom_generate_options_default()};
    loom_status status = loom_cli_run_arguments_create(argc, &given.run);
    if (status)
        return loom_cli_fail(status);
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    int code = run_arguments(&given);
    loom_cli_run_arguments_free(&given.run);
    return code;
}
