/* megaloom generate: text that a model on the disk writes behind prompts, on any layout of tensor and expert ranks. The
 * first data rank's prompts are all there are; other data ranks lend their experts. Rank 0 writes the text of the first
 * prompt as it comes, and what comes behind the others meanwhile when it is their turn. */
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
    const char **prompts; /* as given; all of one kind */
    int64_t prompt_count;
    bool are_texts, are_tokens;
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
    case 't':
        to->prompts[to->prompt_count++] = text;
        to->are_texts = to->are_texts || key == 'p';
        to->are_tokens = to->are_tokens || key == 't';
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
        if (to->are_texts == to->are_tokens)
            argp_error(
                state, "one of --prompt and --tokens must be given, found %s", to->are_texts ? "both" : "neither");
        return 0;
    default:
        return loom_cli_take_model(&to->model, key, text);
    }
}

/* ---- the prompt ---- */

/* "1,2,3" of prompt `number` */
static loom_status read_tokens(const char *text, int64_t number, int64_t *tokens, int64_t *count) {
    for (const char *at = text;; at++) {
        char *end;
        errno = 0;
        tokens[(*count)++] = strtoll(at, &end, 10);
        if (errno || end == at || (*end != ',' && *end != '\0'))
            return loom_fail(LOOM_ERR_ARGUMENT,
                "prompt %lld, --tokens: found \"%.40s\", expected integers with commas between", (long long)number, at);
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

/* A prompt, and what comes behind it. */
typedef struct row {
    int64_t *memory;
    loom_prompt prompt;
    loom_text_stream *text;     /* NULL: tokens out */
    int64_t *late, count, room; /* tokens that came before its turn */
    int64_t written;
    bool ended;
} row;

typedef struct generation_run {
    const loom_run_config *config;
    const loom_generate_options *options;
    loom_tokenizer *tokenizer; /* NULL: tokens in, tokens out */
    row *rows;                 /* [count] */
    loom_prompt *prompts;      /* [count] */
    int64_t count;
    int64_t turn; /* the row that is written */
    bool begun;
} generation_run;

static void free_run(generation_run *run) {
    for (int64_t j = 0; run->rows && j < run->count; j++) {
        loom_text_stream_destroy(run->rows[j].text);
        free(run->rows[j].memory);
        free(run->rows[j].late);
    }
    free(run->rows);
    free(run->prompts);
    loom_tokenizer_destroy(run->tokenizer);
}

static loom_status read_prompt(const loom_tokenizer *tokenizer, const char *text, int64_t number, row *to) {
    size_t length = strlen(text), filled = 0;
    size_t room = tokenizer ? loom_tokenizer_room(tokenizer, length) + 1 : length + 1;
    int64_t *tokens = malloc(room * sizeof *tokens), count = 0;
    to->memory = tokens;
    if (!tokens)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a prompt of %zu bytes", length);
    if (!tokenizer) {
        LOOM_TRY(read_tokens(text, number, tokens, &count));
        to->prompt = (loom_prompt){tokens, count};
        return LOOM_OK;
    }
    LOOM_TRY(tokenizer->encode(tokenizer->context, text, length, tokens, room, &filled));
    if (filled == 0)
        return loom_fail(LOOM_ERR_ARGUMENT, "prompt %lld is empty: there is nothing to continue", (long long)number);
    to->prompt = (loom_prompt){tokens, (int64_t)filled};
    return loom_text_stream_create(tokenizer, tokens, filled, &to->text);
}

static loom_status read_prompts(arguments *given, generation_run *run) {
    if (given->are_texts)
        LOOM_TRY(open_tokenizer(&given->model, run->config->model.config.vocab_size, &run->tokenizer));
    if (given->are_texts && !given->stop_given)
        given->options.stop_token = run->tokenizer->eod;
    run->count = given->prompt_count;
    run->rows = calloc((size_t)run->count, sizeof *run->rows);
    run->prompts = calloc((size_t)run->count, sizeof *run->prompts);
    if (!run->rows || !run->prompts)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld prompts", (long long)run->count);
    for (int64_t j = 0; j < run->count; j++) {
        LOOM_TRY(read_prompt(run->tokenizer, given->prompts[j], j, &run->rows[j]));
        run->prompts[j] = run->rows[j].prompt;
    }
    return LOOM_OK;
}

/* ---- the text ---- */

static loom_status write_token(row *of, int64_t token) {
    const char *text = NULL;
    size_t bytes = 0;
    if (of->text) {
        LOOM_TRY(loom_text_stream_put(of->text, token, &text, &bytes));
        fwrite(text, 1, bytes, stdout);
    } else {
        printf("%s%lld", of->written > 0 ? "," : "", (long long)token);
    }
    of->written++;
    return LOOM_OK;
}

static loom_status keep_token(row *of, int64_t token) {
    if (of->count == of->room) {
        int64_t room = of->room ? 2 * of->room : 64;
        int64_t *grown = realloc(of->late, (size_t)room * sizeof *grown);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld tokens", (long long)room);
        of->late = grown;
        of->room = room;
    }
    of->late[of->count++] = token;
    return LOOM_OK;
}

/* Texts may be of several lines, so that each of several has its heading; tokens are a line. */
static loom_status begin_turn(generation_run *run) {
    row *of = &run->rows[run->turn];
    if (of->text && run->count > 1)
        printf("%s==> prompt %lld <==\n", run->turn > 0 ? "\n" : "", (long long)run->turn);
    for (int64_t i = 0; i < of->count; i++)
        LOOM_TRY(write_token(of, of->late[i]));
    return LOOM_OK;
}

static loom_status end_turn(generation_run *run) {
    const char *text = "";
    size_t bytes = 0;
    row *of = &run->rows[run->turn++];
    loom_status status = of->text ? loom_text_stream_end(of->text, &text, &bytes) : LOOM_OK;
    fwrite(text, 1, bytes, stdout);
    putchar('\n');
    return !status && run->turn < run->count ? begin_turn(run) : status;
}

static loom_status write_step(void *context, int64_t rows, const int64_t *tokens) {
    generation_run *run = context;
    if (!run->begun)
        LOOM_TRY(begin_turn(run));
    run->begun = true;
    for (int64_t j = run->turn; j < rows; j++) {
        row *of = &run->rows[j];
        of->ended = tokens[j] < 0;
        if (!of->ended)
            LOOM_TRY(j == run->turn ? write_token(of, tokens[j]) : keep_token(of, tokens[j]));
    }
    while (run->turn < rows && run->rows[run->turn].ended)
        LOOM_TRY(end_turn(run));
    return fflush(stdout) == 0 ? LOOM_OK : loom_fail(LOOM_ERR_IO, "standard output cannot be written: %m");
}

static loom_status write_nothing(void *context, int64_t rows, const int64_t *tokens) {
    (void)context;
    (void)rows;
    (void)tokens;
    return LOOM_OK;
}

/* ---- the run ---- */

static loom_status generate(loom_rank *rank, void *argument) {
    generation_run *run = argument;
    loom_fabric *fabric;
    loom_parallel *parallel = NULL;
    LOOM_TRY(loom_cli_check_same(rank, run->config));
    LOOM_TRY(loom_cli_fabric(rank, run->config, &fabric));
    loom_status status = loom_cli_model(fabric, run->config, false, &parallel);
    bool writes = loom_rank_index(rank) == 0;
    int64_t rows = loom_comm_rank(loom_fabric_group(fabric, LOOM_GROUP_DP)) == 0 ? run->count : 0;
    if (!status)
        status = loom_generate(parallel, run->prompts, rows, run->options, writes ? write_step : write_nothing, run);
    while (writes && run->begun && run->turn < run->count) {
        loom_status ended = end_turn(run);
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

/* Asked before weights are read, which may take minutes. */
static loom_status check_layout(const loom_megatron_strategy_config *strategy) {
    if (strategy->pipeline_model_parallel_size > 1)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: strategy.pipeline_model_parallel_size=%lld (generation on pipeline stages); only 1 "
            "works",
            (long long)strategy->pipeline_model_parallel_size);
    if (strategy->context_parallel_size > 1)
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: strategy.context_parallel_size=%lld (generation with a cache cut over ranks); only 1 "
            "works, and a checkpoint loads at any layout",
            (long long)strategy->context_parallel_size);
    return LOOM_OK;
}

static int run_arguments(arguments *given) {
    loom_run_config *config = NULL;
    generation_run run = {.options = &given->options};
    loom_status status = load(given, &config);
    if (!status)
        status = loom_cli_complete_model(config);
    run.config = config;
    if (!status)
        status = read_prompts(given, &run);
    if (!status)
        status = check_layout(&config->strategy);
    if (!status)
        status = loom_generate_check(&config->model.config, run.prompts, run.count, run.options);
    int code = status ? loom_cli_fail(status) : loom_cli_run(config, generate, &run);
    free_run(&run);
    loom_run_config_destroy(config);
    return code;
}

int loom_cli_generate(int argc, char **argv) {
    static const struct argp_option options[] = {LOOM_CLI_MODEL_OPTIONS,
        {"prompt", 'p', "TEXT", 0,
            "Text to continue, by the directory's tokenizer.json, or without one as bytes for the byte vocabulary of "
            "257 tokens; may be given several times",
            0},
        {"tokens", 't', "N,N,...", 0,
            "Tokens to continue; then tokens are written, not text; may be given several times", 0},
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
        "Continues texts and writes what comes, without the prompts: of one prompt as it comes; of several in their "
        "order, tokens a line each, texts under a heading. FIELD=VALUE as in a run file, e.g. ranks=2 "
        "strategy.tensor_model_parallel_size=2: the text is the same.",
        NULL, NULL, NULL};
    arguments given = {.options = loom_generate_options_default()};
    loom_status status = loom_cli_run_arguments_create(argc, &given.run);
    if (status)
        return loom_cli_fail(status);
    given.prompts = calloc((size_t)argc + 1, sizeof *given.prompts);
    if (!given.prompts) {
        loom_cli_run_arguments_free(&given.run);
        return loom_cli_fail(loom_fail(LOOM_ERR_MEMORY, "out of memory"));
    }
    argp_err_exit_status = 2;
    argp_parse(&argp, argc, argv, 0, NULL, &given);
    int code = run_arguments(&given);
    free(given.prompts);
    loom_cli_run_arguments_free(&given.run);
    return code;
}
