/* megaloom tokenizer: learns byte-level BPE from text, and turns text into tokens and back. */
#include "data.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct arguments {
    const char **inputs; /* [argc] files to learn from; or the text, or tokens, to work on */
    int64_t input_count;
    loom_cli_text_arguments text;
    const char *suffix, *output, *tokenizer;
    const char **special; /* [argc] */
    int64_t special_count, vocab_size;
    loom_tokenizer_pattern pattern;
    bool json;
} arguments;

enum { OPTION_SPECIAL = 0x200, OPTION_PATTERN };

static int parse_and_run(const struct argp *parser, int (*run)(const arguments *given), int argc, char **argv) {
    arguments given = {.inputs = calloc((size_t)argc, sizeof *given.inputs),
        .special = calloc((size_t)argc, sizeof *given.special),
        .tokenizer = "byte"};
    int result = 2;
    if (!given.inputs || !given.special)
        result = loom_cli_fail(loom_fail(LOOM_ERR_MEMORY, "out of memory for the arguments"));
    else if (argp_parse(parser, argc, argv, 0, NULL, &given) == 0)
        result = run(&given);
    free(given.inputs);
    free(given.special);
    return result;
}

/* ---- train ---- */

static const struct argp_option train_options[] = {
    {"input", 'i', "PATH", 0,
        "A file of text or JSON lines, a pattern such as 'a/*.jsonl', or a directory to search; more PATHs may follow",
        0},
    {"suffix", 's', "SUFFIX", 0, "Of a directory take only the files that end so, such as .pod", 0},
    {"vocab-size", 'v', "N", 0, "Tokens of the vocabulary: special ones, 256 bytes, and what is learned", 0},
    {"output", 'o', "FILE", 0, "The file to write; tokenizer.json when not given", 0},
    {"special-token", OPTION_SPECIAL, "TEXT", 0,
        "A special token, with the first free id; may be given again. <|endoftext|>, which ends a document, when not "
        "given",
        0},
    {"pattern", OPTION_PATTERN, "NAME", 0, "How text is cut into words: gpt2 (the default) or llama3", 0},
    LOOM_CLI_TEXT_OPTIONS,
    {0},
};

static error_t parse_train(int key, char *value, struct argp_state *state) {
    arguments *given = state->input;
    switch (key) {
    case 'i':
    case ARGP_KEY_ARG:
        given->inputs[given->input_count++] = value;
        return 0;
    case 's':
        given->suffix = value;
        return 0;
    case 'v':
        given->vocab_size = loom_cli_integer("--vocab-size", value, 257, INT64_MAX, state);
        return 0;
    case 'o':
        given->output = value;
        return 0;
    case OPTION_SPECIAL:
        given->special[given->special_count++] = value;
        return 0;
    case OPTION_PATTERN:
        given->pattern = strcmp(value, "llama3") == 0 ? LOOM_PATTERN_LLAMA3 : LOOM_PATTERN_GPT2;
        if (given->pattern == LOOM_PATTERN_GPT2 && strcmp(value, "gpt2") != 0)
            argp_error(state, "--pattern is '%s', expected gpt2 or llama3", value);
        return 0;
    case ARGP_KEY_END:
        if (given->input_count == 0)
            argp_error(state, "--input is missing: name a text file or a directory");
        if (given->vocab_size == 0)
            argp_error(state, "--vocab-size is missing: a number from 257");
        return 0;
    default:
        return loom_cli_parse_text_option(&given->text, key, value, state);
    }
}

static int run_train(const arguments *given) {
    const char *output = given->output ? given->output : "tokenizer.json";
    loom_status status = loom_cli_make_folder_of(output);
    if (status != LOOM_OK)
        return loom_cli_fail(status);
    loom_cli_progress progress = loom_cli_progress_begin();
    const loom_tokenizer_train_config config = {.inputs = given->inputs,
        .input_count = given->input_count,
        .suffix = given->suffix,
        .format = given->text.format,
        .separator = given->text.separator,
        .json_keys = given->text.keys,
        .json_key_count = given->text.key_count,
        .vocab_size = given->vocab_size,
        .special_tokens = given->special,
        .special_token_count = given->special_count,
        .pattern = given->pattern,
        .output = output,
        .progress = loom_cli_progress_show,
        .skipped = loom_cli_progress_skipped,
        .progress_context = &progress};
    loom_tokenizer_train_result result;
    status = loom_tokenizer_train(&config, &result);
    loom_cli_progress_end(&progress);
    if (status != LOOM_OK)
        return loom_cli_fail(status);
    printf("%s: %lld tokens, learned from %lld documents, %lld different words, %lld bytes of text", output,
        (long long)result.vocab_size, (long long)result.documents, (long long)result.words, (long long)result.bytes);
    if (result.invalid > 0)
        printf(", %lld invalid documents skipped", (long long)result.invalid);
    putchar('\n');
    if (result.vocab_size < given->vocab_size)
        printf("%s: the text has no more pairs to join: %lld tokens fewer than asked\n", output,
            (long long)(given->vocab_size - result.vocab_size));
    return 0;
}

static int train(int argc, char **argv) {
    static const struct argp parser = {.options = train_options,
        .parser = parse_train,
        .args_doc = "--vocab-size N --input PATH…",
        .doc = "Learns a byte-level BPE tokenizer from text and writes it as a Hugging Face tokenizer.json."};
    return parse_and_run(&parser, run_train, argc, argv);
}

/* ---- encode, decode ---- */

static const struct argp_option use_options[] = {
    {"tokenizer", 't', "NAME", 0, "byte (the default) or the path of a tokenizer", 0},
    {"json", 'j', 0, 0, "JSON: the text and its ids", 0},
    {0},
};

static error_t parse_use(int key, char *value, struct argp_state *state) {
    arguments *given = state->input;
    switch (key) {
    case 't':
        given->tokenizer = value;
        return 0;
    case 'j':
        given->json = true;
        return 0;
    case ARGP_KEY_ARG:
        given->inputs[given->input_count++] = value;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

typedef struct bytes {
    char *data;
    size_t count, capacity;
} bytes;

static loom_status append(bytes *to, const char *data, size_t count) {
    if (count > to->capacity - to->count) {
        size_t capacity = 2 * to->capacity + count + 4096;
        char *grown = realloc(to->data, capacity);
        if (!grown)
            return loom_fail(LOOM_ERR_MEMORY, "no memory for %zu bytes of text", capacity);
        to->data = grown;
        to->capacity = capacity;
    }
    if (count > 0)
        memcpy(to->data + to->count, data, count);
    to->count += count;
    return LOOM_OK;
}

/* The arguments with blanks between, or, without any, what comes in on standard input. */
static loom_status collect(const arguments *given, bytes *text) {
    for (int64_t i = 0; i < given->input_count; i++) {
        LOOM_TRY(append(text, " ", i > 0));
        LOOM_TRY(append(text, given->inputs[i], strlen(given->inputs[i])));
    }
    char part[1 << 16];
    size_t got;
    while (given->input_count == 0 && (got = fread(part, 1, sizeof part, stdin)) > 0)
        LOOM_TRY(append(text, part, got));
    if (given->input_count == 0 && ferror(stdin))
        return loom_fail(LOOM_ERR_IO, "standard input cannot be read: %m");
    return append(text, "", 1); /* a NUL behind it, for decode */
}

static void print_ids(const int64_t *tokens, size_t count, const char *between) {
    for (size_t i = 0; i < count; i++)
        printf("%s%lld", i ? between : "", (long long)tokens[i]);
}

static void print_json(const char *text, size_t length, const int64_t *tokens, size_t count) {
    fputs("{\"text\":", stdout);
    loom_cli_print_json_text(text, length);
    fputs(",\"ids\":[", stdout);
    print_ids(tokens, count, ",");
    puts("]}");
}

static loom_status encode_text(const arguments *given, const loom_tokenizer *tokenizer, const bytes *text) {
    size_t length = text->count - 1, room = loom_tokenizer_room(tokenizer, length), count = 0;
    int64_t *tokens = room < PTRDIFF_MAX / sizeof *tokens ? malloc((room + 1) * sizeof *tokens) : NULL;
    if (!tokens)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for %zu tokens", room);
    loom_status status = tokenizer->encode(tokenizer->context, text->data, length, tokens, room, &count);
    if (status == LOOM_OK && given->json) {
        print_json(text->data, length, tokens, count);
    } else if (status == LOOM_OK) {
        print_ids(tokens, count, " ");
        putchar('\n');
    }
    free(tokens);
    return status;
}

/* Numbers with anything but digits and a minus between; decode refuses those that are no tokens. */
static loom_status parse_ids(const bytes *text, int64_t **tokens, size_t *count) {
    int64_t *parsed = malloc(text->count * sizeof *parsed);
    if (!parsed)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for tokens");
    *count = 0;
    for (char *at = text->data, *end; *(at += strspn(at, " \t\r\n,[]")); at = end) {
        errno = 0;
        parsed[*count] = strtoll(at, &end, 10);
        if (end == at || errno != 0) {
            free(parsed);
            return loom_fail(LOOM_ERR_ARGUMENT, "token %zu is '%.40s', expected a number", *count, at);
        }
        ++*count;
    }
    *tokens = parsed;
    return LOOM_OK;
}

static loom_status decode_ids(const arguments *given, const loom_tokenizer *tokenizer, const bytes *text) {
    int64_t *tokens = NULL;
    size_t count = 0, wanted = 0;
    LOOM_TRY(parse_ids(text, &tokens, &count));
    char *decoded = NULL;
    loom_status status = tokenizer->decode(tokenizer->context, tokens, count, NULL, 0, &wanted);
    if (status == LOOM_OK) {
        decoded = malloc(wanted + 1);
        status = decoded ? tokenizer->decode(tokenizer->context, tokens, count, decoded, wanted, &wanted)
                         : loom_fail(LOOM_ERR_MEMORY, "no memory for %zu bytes of text", wanted);
    }
    if (status == LOOM_OK && given->json)
        print_json(decoded, wanted, tokens, count);
    else if (status == LOOM_OK)
        fwrite(decoded, 1, wanted, stdout);
    free(decoded);
    free(tokens);
    return status;
}

static int use(const arguments *given,
    loom_status (*work)(const arguments *given, const loom_tokenizer *tokenizer, const bytes *text)) {
    loom_tokenizer *tokenizer = NULL;
    bytes text = {0};
    loom_status status = loom_tokenizer_open(given->tokenizer, &tokenizer);
    if (status == LOOM_OK)
        status = collect(given, &text);
    if (status == LOOM_OK)
        status = work(given, tokenizer, &text);
    free(text.data);
    loom_tokenizer_destroy(tokenizer);
    fflush(stdout);
    return status == LOOM_OK ? 0 : loom_cli_fail(status);
}

static int run_encode(const arguments *given) {
    return use(given, encode_text);
}

static int run_decode(const arguments *given) {
    return use(given, decode_ids);
}

static int encode(int argc, char **argv) {
    static const struct argp parser = {.options = use_options,
        .parser = parse_use,
        .args_doc = "[TEXT…]",
        .doc = "The tokens of TEXT, or, without it, of standard input as it is."};
    return parse_and_run(&parser, run_encode, argc, argv);
}

static int decode(int argc, char **argv) {
    static const struct argp parser = {.options = use_options,
        .parser = parse_use,
        .args_doc = "[TOKEN…]",
        .doc = "The text of the tokens, or, without any, of those on standard input, with blanks or commas between."};
    return parse_and_run(&parser, run_decode, argc, argv);
}

int loom_cli_tokenizer(int argc, char **argv) {
    static const struct {
        const char *name;
        int (*run)(int argc, char **argv);
        const char *usage;
    } verbs[] = {
        {"train", train, "--vocab-size N --input PATH… [--output FILE]"},
        {"encode", encode, "[--tokenizer NAME] [TEXT…]"},
        {"decode", decode, "[--tokenizer NAME] [TOKEN…]"},
    };
    argp_err_exit_status = 2;
    for (int i = 0; argc >= 2 && i < 3; i++)
        if (strcmp(argv[1], verbs[i].name) == 0) {
            char name[64];
            snprintf(name, sizeof name, "megaloom tokenizer %s", verbs[i].name);
            argv[1] = name;
            return verbs[i].run(argc - 1, argv + 1);
        }
    bool help = argc >= 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-?") == 0);
    FILE *out = help ? stdout : stderr;
    if (!help)
        fprintf(out, "megaloom: tokenizer: %s%s%s\n", argc < 2 ? "a verb is missing" : "there is no verb '",
            argc < 2 ? "" : argv[1], argc < 2 ? "" : "'");
    for (int i = 0; i < 3; i++)
        fprintf(out, "%s megaloom tokenizer %s %s\n", i == 0 ? "Usage:" : "      ", verbs[i].name, verbs[i].usage);
    return help ? 0 : 2;
}
