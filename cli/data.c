/* megaloom data: makes indexed datasets out of text, and shows them. */
#include "commands.h"
#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STATUS_FAILED = 1, STATUS_USAGE = 2 };

/* ---- data preprocess ---- */

typedef struct preprocess_arguments {
    const char **inputs;
    int64_t input_count;
    const char *output_prefix, *suffix, *tokenizer;
} preprocess_arguments;

enum { OPTION_INPUT = 'i', OPTION_OUTPUT = 'o', OPTION_SUFFIX = 's', OPTION_TOKENIZER = 't', OPTION_DOCUMENT = 'd' };

static const struct argp_option preprocess_options[] = {
    {"input", OPTION_INPUT, "PATH", 0, "A text file, or a directory to search; more PATHs may follow", 0},
    {"output-prefix", OPTION_OUTPUT, "PREFIX", 0, "Write PREFIX.bin and PREFIX.idx", 0},
    {"suffix", OPTION_SUFFIX, "SUFFIX", 0, "Of a directory take only the files that end so, such as .pod", 0},
    {"tokenizer", OPTION_TOKENIZER, "NAME", 0,
        "byte (the default): bytes are tokens, 256 ends a document; or the path of a tokenizer.json, or its directory",
        0},
    {0},
};

static error_t parse_preprocess(int key, char *value, struct argp_state *state) {
    preprocess_arguments *arguments = state->input;
    switch (key) {
    case OPTION_INPUT:
    case ARGP_KEY_ARG: /* further paths after --input */
        arguments->inputs[arguments->input_count++] = value;
        return 0;
    case OPTION_OUTPUT:
        arguments->output_prefix = value;
        return 0;
    case OPTION_SUFFIX:
        arguments->suffix = value;
        return 0;
    case OPTION_TOKENIZER:
        arguments->tokenizer = value;
        return 0;
    case ARGP_KEY_END:
        if (arguments->input_count == 0)
            argp_error(state, "--input is missing: name a text file or a directory");
        if (!arguments->output_prefix)
            argp_error(state, "--output-prefix is missing: name the dataset to write");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static void show_progress(void *context, int64_t documents, int64_t done, int64_t total) {
    (void)context;
    fprintf(stderr, "\r%lld documents, %.1f of %.1f MB", (long long)documents, (double)done / 1e6, (double)total / 1e6);
}

/* The folder that PREFIX lies in is made where it is missing. */
static loom_status make_folder_of(const char *prefix) {
    char folder[4096];
    const char *slash = strrchr(prefix, '/');
    if (!slash || slash == prefix)
        return LOOM_OK;
    if (snprintf(folder, sizeof folder, "%.*s", (int)(slash - prefix), prefix) >= (int)sizeof folder)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the output is too long");
    return loom_cli_make_directories(folder);
}

static int run_preprocess(const preprocess_arguments *arguments) {
    loom_tokenizer *tokenizer = NULL;
    loom_status status = loom_tokenizer_open(arguments->tokenizer, &tokenizer);
    if (status == LOOM_OK)
        status = make_folder_of(arguments->output_prefix);
    if (status != LOOM_OK) {
        loom_tokenizer_destroy(tokenizer);
        return loom_cli_fail(status);
    }
    bool terminal = isatty(fileno(stderr));
    const loom_data_preprocess_config config = {.inputs = arguments->inputs,
        .input_count = arguments->input_count,
        .suffix = arguments->suffix,
        .tokenizer = tokenizer,
        .output_prefix = arguments->output_prefix,
        .progress = terminal ? show_progress : NULL};
    loom_data_preprocess_result result;
    status = loom_data_preprocess_text(&config, &result);
    loom_tokenizer_destroy(tokenizer);
    if (terminal)
        fprintf(stderr, "\n");
    if (status != LOOM_OK)
        return loom_cli_fail(status);
    printf("%s: %lld documents, %lld tokens (%s), %lld bytes of text, %lld empty files skipped\n",
        arguments->output_prefix, (long long)result.documents, (long long)result.tokens, loom_dtype_name(result.dtype),
        (long long)result.bytes, (long long)result.empty);
    return 0;
}

static int preprocess(int argc, char **argv) {
    static const struct argp parser = {.options = preprocess_options,
        .parser = parse_preprocess,
        .args_doc = "--input PATH… --output-prefix PREFIX",
        .doc = "Turns text into an indexed dataset (PREFIX.bin, PREFIX.idx): one file is one document."};
    preprocess_arguments arguments = {.inputs = calloc((size_t)argc, sizeof *arguments.inputs), .tokenizer = "byte"};
    if (!arguments.inputs) {
        fprintf(stderr, "megaloom: out of memory\n");
        return STATUS_FAILED;
    }
    static char name[] = "megaloom data preprocess";
    argv[0] = name;
    int result = argp_parse(&parser, argc, argv, 0, NULL, &arguments) == 0 ? run_preprocess(&arguments) : STATUS_USAGE;
    free(arguments.inputs);
    return result;
}

/* ---- data show ---- */

typedef struct show_arguments {
    const char *prefix, *tokenizer;
    long long document;
} show_arguments;

static const struct argp_option show_options[] = {
    {"document", OPTION_DOCUMENT, "N", 0, "Print document N (default 0)", 0},
    {"tokenizer", OPTION_TOKENIZER, "NAME", 0, "byte (the default) or a path: how tokens become text", 0},
    {0},
};

static error_t parse_show(int key, char *value, struct argp_state *state) {
    show_arguments *arguments = state->input;
    char *end;
    switch (key) {
    case OPTION_DOCUMENT:
        arguments->document = strtoll(value, &end, 10);
        if (end == value || *end || arguments->document < 0)
            argp_error(state, "--document is '%s', expected a number from 0", value);
        return 0;
    case OPTION_TOKENIZER:
        arguments->tokenizer = value;
        return 0;
    case ARGP_KEY_ARG:
        if (arguments->prefix)
            argp_error(state, "one PREFIX expected, '%s' is a second", value);
        arguments->prefix = value;
        return 0;
    case ARGP_KEY_END:
        if (!arguments->prefix)
            argp_error(state, "PREFIX is missing: name a dataset without .bin or .idx");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static void print_header(const loom_indexed *set) {
    int64_t sequences = loom_indexed_sequences(set), shortest = 0, longest = 0;
    for (int64_t i = 0; i < sequences; i++) {
        int64_t length = loom_indexed_length(set, i);
        shortest = i == 0 || length < shortest ? length : shortest;
        longest = length > longest ? length : longest;
    }
    printf("prefix      %s\n", loom_indexed_prefix(set));
    printf("dtype       %s\n", loom_dtype_name(loom_indexed_dtype(set)));
    printf("documents   %lld\n", (long long)loom_indexed_documents(set));
    printf("sequences   %lld (%lld to %lld tokens)\n", (long long)sequences, (long long)shortest, (long long)longest);
    printf("tokens      %lld\n", (long long)loom_indexed_tokens(set));
    printf("multimodal  %s\n", loom_indexed_multimodal(set) ? "yes" : "no");
}

/* The text of a sequence, or, where the tokens are not the tokenizer's, their numbers. */
static loom_status print_sequence(const loom_indexed *set, const loom_tokenizer *tokenizer, int64_t sequence) {
    int64_t count = loom_indexed_length(set, sequence);
    int64_t *tokens = malloc((size_t)count * sizeof *tokens + 1);
    size_t bytes = 0;
    char *text = NULL;
    loom_status status = tokens
                             ? loom_indexed_read(set, sequence, 0, count, tokens)
                             : loom_fail(LOOM_ERR_MEMORY, "no memory for a sequence of %lld tokens", (long long)count);
    if (status == LOOM_OK && tokenizer->decode(tokenizer->context, tokens, (size_t)count, NULL, 0, &bytes) == LOOM_OK) {
        text = malloc(bytes + 1);
        status = text ? tokenizer->decode(tokenizer->context, tokens, (size_t)count, text, bytes, &bytes)
                      : loom_fail(LOOM_ERR_MEMORY, "no memory for %zu bytes of text", bytes);
        if (status == LOOM_OK)
            fwrite(text, 1, bytes, stdout);
    } else if (status == LOOM_OK) {
        for (int64_t i = 0; i < count; i++)
            printf("%lld%s", (long long)tokens[i], i + 1 < count ? " " : "\n");
    }
    free(text);
    free(tokens);
    return status;
}

static loom_status print_document(const loom_indexed *set, const loom_tokenizer *tokenizer, int64_t document) {
    if (document >= loom_indexed_documents(set))
        return loom_fail(LOOM_ERR_ARGUMENT, "--document is %lld, %s has %lld: expected 0 to %lld", (long long)document,
            loom_indexed_prefix(set), (long long)loom_indexed_documents(set),
            (long long)loom_indexed_documents(set) - 1);
    int64_t first = loom_indexed_document(set, document), end = loom_indexed_document(set, document + 1);
    printf("\ndocument %lld: %lld sequences\n", (long long)document, (long long)(end - first));
    for (int64_t i = first; i < end; i++)
        LOOM_TRY(print_sequence(set, tokenizer, i));
    return LOOM_OK;
}

static int run_show(const show_arguments *arguments) {
    loom_tokenizer *tokenizer = NULL;
    loom_indexed *set;
    loom_status status = loom_tokenizer_open(arguments->tokenizer, &tokenizer);
    if (status == LOOM_OK)
        status = loom_indexed_open(arguments->prefix, &set);
    if (status != LOOM_OK) {
        loom_tokenizer_destroy(tokenizer);
        return loom_cli_fail(status);
    }
    print_header(set);
    bool has_text = loom_indexed_dtype(set) != LOOM_F32 && loom_indexed_dtype(set) != LOOM_F64;
    if (has_text && (loom_indexed_documents(set) > 0 || arguments->document > 0))
        status = print_document(set, tokenizer, arguments->document);
    fflush(stdout);
    loom_indexed_close(set);
    loom_tokenizer_destroy(tokenizer);
    return status == LOOM_OK ? 0 : loom_cli_fail(status);
}

static int show(int argc, char **argv) {
    static const struct argp parser = {.options = show_options,
        .parser = parse_show,
        .args_doc = "PREFIX",
        .doc = "Shows the counts of an indexed dataset and the text of a document."};
    show_arguments arguments = {.tokenizer = "byte"};
    static char name[] = "megaloom data show";
    argv[0] = name;
    return argp_parse(&parser, argc, argv, 0, NULL, &arguments) == 0 ? run_show(&arguments) : STATUS_USAGE;
}

int loom_cli_data(int argc, char **argv) {
    argp_err_exit_status = STATUS_USAGE;
    if (argc >= 2 && strcmp(argv[1], "preprocess") == 0)
        return preprocess(argc - 1, argv + 1);
    if (argc >= 2 && strcmp(argv[1], "show") == 0)
        return show(argc - 1, argv + 1);
    if (argc >= 2 && strcmp(argv[1], "samples") == 0)
        return loom_cli_data_samples(argc - 1, argv + 1);
    if (argc >= 2 && strcmp(argv[1], "batches") == 0)
        return loom_cli_data_batches(argc - 1, argv + 1);
    bool help = argc >= 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-?") == 0);
    fprintf(help ? stdout : stderr,
        "%sUsage: megaloom data preprocess --input PATH… --output-prefix PREFIX [--suffix .pod] [--tokenizer "
        "byte|PATH]\n"
        "       megaloom data show PREFIX [--document N]\n"
        "       megaloom data samples [WEIGHT] PREFIX… --seq-length N [--sample K] [--json]\n"
        "       megaloom data batches --total N --micro-batch-size N [--dataloader-type KIND] [--json]\n",
        help       ? ""
        : argc < 2 ? "megaloom: data: a verb is missing\n"
                   : "megaloom: data: unknown verb\n");
    return help ? 0 : STATUS_USAGE;
}
