/* megaloom data show: the counts of an indexed dataset and the text of a document, or all of its index as JSON, with
 * the names that Megatron-Core's reader has. The arrays are written as they are walked over, whatever their size. */
#include "data.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct arguments {
    const char *prefix, *tokenizer;
    int64_t document; /* -1 = not given */
    bool json;
} arguments;

static const struct argp_option options[] = {
    {"document", 'd', "N", 0, "Show document N; the first when not given, with --json none", 0},
    {"tokenizer", 't', "NAME", 0, "byte (the default) or a path: how tokens become text", 0},
    {"json", 'j', 0, 0, "JSON: header, lengths, pointers, document indices, modes; the sequences of document N", 0},
    {0},
};

static error_t parse(int key, char *value, struct argp_state *state) {
    arguments *given = state->input;
    switch (key) {
    case 'd':
        given->document = loom_cli_integer("--document", value, 0, INT64_MAX, state);
        return 0;
    case 't':
        given->tokenizer = value;
        return 0;
    case 'j':
        given->json = true;
        return 0;
    case ARGP_KEY_ARG:
        if (given->prefix)
            argp_error(state, "one PREFIX expected, '%s' is a second", value);
        given->prefix = value;
        return 0;
    case ARGP_KEY_END:
        if (!given->prefix)
            argp_error(state, "PREFIX is missing: name a dataset without .bin or .idx");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static bool has_tokens(const loom_indexed *set) {
    return loom_indexed_dtype(set) != LOOM_F32 && loom_indexed_dtype(set) != LOOM_F64;
}

static loom_status check_document(const loom_indexed *set, int64_t document) {
    if (document < loom_indexed_documents(set))
        return LOOM_OK;
    return loom_fail(LOOM_ERR_ARGUMENT, "--document is %lld, %s has %lld: expected 0 to %lld", (long long)document,
        loom_indexed_prefix(set), (long long)loom_indexed_documents(set), (long long)loom_indexed_documents(set) - 1);
}

/* ---- for people ---- */

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

static loom_status read_sequence(const loom_indexed *set, int64_t sequence, int64_t **tokens, int64_t *count) {
    int64_t length = loom_indexed_length(set, sequence);
    int64_t *read = malloc((size_t)length * sizeof *read + 1);
    if (!read)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for a sequence of %lld tokens", (long long)length);
    loom_status status = loom_indexed_read(set, sequence, 0, length, read);
    if (status != LOOM_OK) {
        free(read);
        return status;
    }
    *tokens = read;
    *count = length;
    return LOOM_OK;
}

/* The text of a sequence, or, where the tokens are not the tokenizer's, their numbers. */
static loom_status print_sequence(
    const loom_indexed *set, const loom_tokenizer *tokenizer, int64_t sequence, bool *ends_line) {
    int64_t *tokens = NULL, count = 0;
    LOOM_TRY(read_sequence(set, sequence, &tokens, &count));
    size_t bytes = 0;
    loom_status status = LOOM_OK;
    if (tokenizer->decode(tokenizer->context, tokens, (size_t)count, NULL, 0, &bytes) == LOOM_OK) {
        char *text = malloc(bytes + 1);
        status = text ? tokenizer->decode(tokenizer->context, tokens, (size_t)count, text, bytes, &bytes)
                      : loom_fail(LOOM_ERR_MEMORY, "no memory for %zu bytes of text", bytes);
        if (status == LOOM_OK) {
            fwrite(text, 1, bytes, stdout);
            *ends_line = bytes > 0 ? text[bytes - 1] == '\n' : *ends_line;
        }
        free(text);
    } else {
        for (int64_t i = 0; i < count; i++)
            printf("%lld%s", (long long)tokens[i], i + 1 < count ? " " : "\n");
        *ends_line = true;
    }
    free(tokens);
    return status;
}

static loom_status show_text(const loom_indexed *set, const loom_tokenizer *tokenizer, const arguments *given) {
    int64_t document = given->document < 0 ? 0 : given->document;
    print_header(set);
    if (!has_tokens(set) || (loom_indexed_documents(set) == 0 && given->document < 0))
        return LOOM_OK;
    LOOM_TRY(check_document(set, document));
    int64_t first = loom_indexed_document(set, document), end = loom_indexed_document(set, document + 1);
    printf("\ndocument %lld: %lld sequence%s\n", (long long)document, (long long)(end - first),
        end - first == 1 ? "" : "s");
    bool ends_line = true;
    for (int64_t i = first; i < end; i++)
        LOOM_TRY(print_sequence(set, tokenizer, i, &ends_line));
    if (!ends_line)
        putchar('\n');
    return LOOM_OK;
}

/* ---- JSON ---- */

static void print_array(const char *name, const loom_indexed *set, int64_t count,
    int64_t (*element)(const loom_indexed *set, int64_t index)) {
    printf(",\n\"%s\":[", name);
    for (int64_t i = 0; i < count; i++)
        printf("%s%lld", i ? "," : "", (long long)element(set, i));
    putchar(']');
}

static int64_t mode_of(const loom_indexed *set, int64_t sequence) {
    return loom_indexed_mode(set, sequence);
}

static void print_elements(const loom_indexed *set, int64_t sequence) {
    const char *data = loom_indexed_data(set, sequence);
    for (int64_t i = 0; i < loom_indexed_length(set, sequence); i++) {
        double value;
        float narrow;
        int64_t token = 0;
        if (loom_indexed_dtype(set) == LOOM_F64) {
            memcpy(&value, data + 8 * i, 8);
        } else if (loom_indexed_dtype(set) == LOOM_F32) {
            memcpy(&narrow, data + 4 * i, 4);
            value = narrow;
        } else if (loom_indexed_read(set, sequence, i, 1, &token) == LOOM_OK) {
            printf("%s%lld", i ? "," : "", (long long)token);
            continue;
        }
        printf("%s%.17g", i ? "," : "", value);
    }
}

static loom_status show_json(const loom_indexed *set, const loom_tokenizer *tokenizer, const arguments *given) {
    (void)tokenizer;
    int64_t sequences = loom_indexed_sequences(set), documents = loom_indexed_documents(set);
    bool modes = loom_indexed_multimodal(set);
    if (given->document >= 0)
        LOOM_TRY(check_document(set, given->document));
    fputs("{\"file\":", stdout);
    loom_cli_print_json_text(loom_indexed_prefix(set), strlen(loom_indexed_prefix(set)));
    printf(",\"dtype\":\"%s\",\"dtype_code\":%d,\"multimodal\":%d,\n", loom_cli_dtype_name(loom_indexed_dtype(set)),
        loom_cli_dtype_code(loom_indexed_dtype(set)), modes);
    printf("\"document_count\":%lld,\"sequence_count\":%lld,\"tokens\":%lld,\"idx_bytes\":%lld,\"bin_bytes\":%lld",
        (long long)documents, (long long)sequences, (long long)loom_indexed_tokens(set),
        (long long)(34 + 12 * sequences + 8 * (documents + 1) + (modes ? sequences : 0)),
        (long long)loom_indexed_bin_bytes(set));
    print_array("sequence_lengths", set, sequences, loom_indexed_length);
    print_array("sequence_pointers", set, sequences, loom_indexed_pointer);
    print_array("document_indices", set, documents + 1, loom_indexed_document);
    if (modes)
        print_array("modes", set, sequences, mode_of);
    if (given->document >= 0) {
        int64_t first = loom_indexed_document(set, given->document);
        printf(",\n\"document\":%lld,\"documents\":[[", (long long)given->document);
        for (int64_t i = first; i < loom_indexed_document(set, given->document + 1); i++) {
            fputs(i > first ? ",[" : "[", stdout);
            print_elements(set, i);
            putchar(']');
        }
        fputs("]]", stdout);
    }
    puts("}");
    return LOOM_OK;
}

static int run(const arguments *given) {
    loom_tokenizer *tokenizer = NULL;
    loom_indexed *set = NULL;
    loom_status status = loom_tokenizer_open(given->tokenizer, &tokenizer);
    if (status == LOOM_OK)
        status = loom_indexed_open(given->prefix, &set);
    if (status == LOOM_OK)
        status = given->json ? show_json(set, tokenizer, given) : show_text(set, tokenizer, given);
    fflush(stdout);
    loom_indexed_close(set);
    loom_tokenizer_destroy(tokenizer);
    return status == LOOM_OK ? 0 : loom_cli_fail(status);
}

int loom_cli_data_show(int argc, char **argv) {
    static const struct argp parser = {.options = options,
        .parser = parse,
        .args_doc = "PREFIX",
        .doc = "Shows the counts of an indexed dataset and the text of a document."};
    arguments given = {.tokenizer = "byte", .document = -1};
    return argp_parse(&parser, argc, argv, 0, NULL, &given) == 0 ? run(&given) : 2;
}
