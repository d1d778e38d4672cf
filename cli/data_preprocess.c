/* megaloom data preprocess, and megaloom data merge: the verbs that write datasets. */
#include "data.h"
#include <stdio.h>
#include <stdlib.h>

typedef struct arguments {
    const char **inputs; /* [argc] */
    int64_t input_count;
    loom_cli_text_arguments text;
    const char *output_prefix, *suffix, *tokenizer;
    bool append_eod, strict;
    int64_t workers;
} arguments;

enum { OPTION_STRICT = 0x200 };

static const struct argp_option preprocess_options[] = {
    {"input", 'i', "PATH", 0,
        "A file of text or JSON lines, a pattern such as 'a/*.jsonl', or a directory to search; more PATHs may follow",
        0},
    {"output-prefix", 'o', "PREFIX", 0, "Write PREFIX.bin and PREFIX.idx; of several keys PREFIX_KEY_document", 0},
    {"suffix", 's', "SUFFIX", 0, "Of a directory take only the files that end so, such as .pod", 0},
    {"tokenizer", 't', "NAME", 0,
        "byte (the default): bytes are tokens, 256 ends a document; or the path of a tokenizer.json, vocab.json or "
        "tokenizer.model (tiktoken's, or SentencePiece's), or of its directory",
        0},
    {"append-eod", 'e', 0, 0, "Put the tokenizer's end of document behind each document", 0},
    LOOM_CLI_TEXT_OPTIONS,
    {"workers", 'w', "N", 0, "Threads that tokenize; as many as there are cores when not given", 0},
    {"strict", OPTION_STRICT, 0, 0, "Stop at the first document that is wrong; otherwise it is skipped and counted", 0},
    {0},
};

static error_t parse_preprocess(int key, char *value, struct argp_state *state) {
    arguments *given = state->input;
    switch (key) {
    case 'i':
    case ARGP_KEY_ARG: /* further paths after --input */
        given->inputs[given->input_count++] = value;
        return 0;
    case 'o':
        given->output_prefix = value;
        return 0;
    case 's':
        given->suffix = value;
        return 0;
    case 't':
        given->tokenizer = value;
        return 0;
    case 'e':
        given->append_eod = true;
        return 0;
    case OPTION_STRICT:
        given->strict = true;
        return 0;
    case 'w':
        given->workers = loom_cli_integer("--workers", value, 1, 1024, state);
        return 0;
    case ARGP_KEY_END:
        if (given->input_count == 0)
            argp_error(state, "--input is missing: name a text file or a directory");
        if (!given->output_prefix)
            argp_error(state, "--output-prefix is missing: name the dataset to write");
        return 0;
    default:
        return loom_cli_parse_text_option(&given->text, key, value, state);
    }
}

static void print_result(const arguments *given, const loom_data_preprocess_result *result) {
    bool files = given->text.format == LOOM_TEXT_AUTO || given->text.format == LOOM_TEXT_FILE;
    if (result->discarded_bytes > 0)
        fprintf(stderr,
            "megaloom: begun anew: a run that was stopped had done %lld bytes of text with another tokenizer, other "
            "options or other input files\n",
            (long long)result->discarded_bytes);
    printf("%s: %lld document%s, %lld token%s (%s), %lld bytes of text", given->output_prefix,
        (long long)result->documents, result->documents == 1 ? "" : "s", (long long)result->tokens,
        result->tokens == 1 ? "" : "s", loom_dtype_name(result->dtype), (long long)result->bytes);
    if (result->resumed_bytes > 0)
        printf(", %lld of them by a run that was stopped", (long long)result->resumed_bytes);
    if (result->invalid > 0)
        printf(", %lld invalid document%s skipped", (long long)result->invalid, result->invalid == 1 ? "" : "s");
    if (result->empty > 0)
        printf(", %lld empty %s%s skipped", (long long)result->empty, files ? "file" : "document",
            result->empty == 1 ? "" : "s");
    putchar('\n');
}

static int run_preprocess(const arguments *given) {
    loom_tokenizer *tokenizer = NULL;
    loom_status status = loom_tokenizer_open(given->tokenizer, &tokenizer);
    if (status == LOOM_OK)
        status = loom_cli_make_folder_of(given->output_prefix);
    if (status != LOOM_OK) {
        loom_tokenizer_destroy(tokenizer);
        return loom_cli_fail(status);
    }
    loom_cli_progress progress = loom_cli_progress_begin();
    const loom_data_preprocess_config config = {.inputs = given->inputs,
        .input_count = given->input_count,
        .suffix = given->suffix,
        .format = given->text.format,
        .separator = given->text.separator,
        .json_keys = given->text.keys,
        .json_key_count = given->text.key_count,
        .tokenizer = tokenizer,
        .append_eod = given->append_eod,
        .strict = given->strict,
        .workers = given->workers,
        .output_prefix = given->output_prefix,
        .progress = loom_cli_progress_show,
        .skipped = loom_cli_progress_skipped,
        .progress_context = &progress};
    loom_data_preprocess_result result;
    status = loom_data_preprocess_text(&config, &result);
    loom_tokenizer_destroy(tokenizer);
    loom_cli_progress_end(&progress);
    if (status != LOOM_OK)
        return loom_cli_fail(status);
    print_result(given, &result);
    return 0;
}

static int parse_and_run(const struct argp *parser, int (*run)(const arguments *given), int argc, char **argv) {
    arguments given = {.inputs = calloc((size_t)argc, sizeof *given.inputs), .tokenizer = "byte"};
    if (!given.inputs)
        return loom_cli_fail(loom_fail(LOOM_ERR_MEMORY, "out of memory for the arguments"));
    int result = argp_parse(parser, argc, argv, 0, NULL, &given) == 0 ? run(&given) : 2;
    free(given.inputs);
    return result;
}

int loom_cli_data_preprocess(int argc, char **argv) {
    static const struct argp parser = {.options = preprocess_options,
        .parser = parse_preprocess,
        .args_doc = "--input PATH… --output-prefix PREFIX",
        .doc = "Turns text into an indexed dataset (PREFIX.bin, PREFIX.idx). A run that was stopped goes on where it "
               "was when the same command is given again."};
    return parse_and_run(&parser, run_preprocess, argc, argv);
}

/* ---- merge ---- */

static const struct argp_option merge_options[] = {
    {"output-prefix", 'o', "PREFIX", 0, "Write PREFIX.bin and PREFIX.idx", 0},
    {0},
};

static error_t parse_merge(int key, char *value, struct argp_state *state) {
    arguments *given = state->input;
    switch (key) {
    case 'o':
        given->output_prefix = value;
        return 0;
    case ARGP_KEY_ARG:
        given->inputs[given->input_count++] = value;
        return 0;
    case ARGP_KEY_END:
        if (given->input_count == 0)
            argp_error(state, "INPUT is missing: name datasets without .bin or .idx");
        if (!given->output_prefix)
            argp_error(state, "--output-prefix is missing: name the dataset to write");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int run_merge(const arguments *given) {
    loom_indexed *set = NULL;
    loom_status status = loom_cli_make_folder_of(given->output_prefix);
    if (status == LOOM_OK)
        status = loom_indexed_merge(given->inputs, given->input_count, given->output_prefix);
    if (status == LOOM_OK)
        status = loom_indexed_open(given->output_prefix, &set);
    if (status != LOOM_OK)
        return loom_cli_fail(status);
    printf("%s: %lld datasets, %lld documents, %lld sequences, %lld tokens (%s)\n", given->output_prefix,
        (long long)given->input_count, (long long)loom_indexed_documents(set), (long long)loom_indexed_sequences(set),
        (long long)loom_indexed_tokens(set), loom_dtype_name(loom_indexed_dtype(set)));
    loom_indexed_close(set);
    return 0;
}

int loom_cli_data_merge(int argc, char **argv) {
    static const struct argp parser = {.options = merge_options,
        .parser = parse_merge,
        .args_doc = "--output-prefix PREFIX INPUT…",
        .doc = "Joins indexed datasets of one dtype: the documents of each INPUT, in the order given."};
    return parse_and_run(&parser, run_merge, argc, argv);
}
