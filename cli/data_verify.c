/* megaloom data verify and megaloom data stats: what can be said about datasets without knowing what they are for. */
#include "data.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct arguments {
    const char **prefixes; /* [argc] */
    int64_t count;
    const char *tokenizer; /* NULL = not given */
    bool json;
} arguments;

static const struct argp_option verify_options[] = {
    {"tokenizer", 't', "NAME", 0, "Every token must be one of this tokenizer: byte or a path", 0},
    {"json", 'j', 0, 0, "JSON", 0},
    {0},
};

static const struct argp_option stats_options[] = {
    {"json", 'j', 0, 0, "JSON", 0},
    {0},
};

static error_t parse(int key, char *value, struct argp_state *state) {
    arguments *given = state->input;
    switch (key) {
    case 't':
        given->tokenizer = value;
        return 0;
    case 'j':
        given->json = true;
        return 0;
    case ARGP_KEY_ARG:
        given->prefixes[given->count++] = value;
        return 0;
    case ARGP_KEY_END:
        if (given->count == 0)
            argp_error(state, "PREFIX is missing: name datasets without .bin or .idx");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int parse_and_run(const struct argp *parser, int (*run)(const arguments *given), int argc, char **argv) {
    arguments given = {.prefixes = calloc((size_t)argc, sizeof *given.prefixes)};
    if (!given.prefixes)
        return loom_cli_fail(loom_fail(LOOM_ERR_MEMORY, "out of memory for the arguments"));
    int result = argp_parse(parser, argc, argv, 0, NULL, &given) == 0 ? run(&given) : 2;
    free(given.prefixes);
    return result;
}

static void begin_json_case(int64_t index, const char *prefix) {
    fputs(index ? ",\n{\"file\":" : "{\"cases\":[\n{\"file\":", stdout);
    loom_cli_print_json_text(prefix, strlen(prefix));
}

/* ---- verify ---- */

typedef struct findings {
    int64_t unused_bytes; /* of the .bin, behind the last byte that a sequence has */
    int64_t displaced;    /* sequences that do not begin where the one before ends */
    int64_t without_eod;  /* documents that do not end with the tokenizer's end of document; -1 = not asked */
} findings;

enum { TOKENS_AT_ONCE = 1 << 16 };

static loom_status check_tokens(const loom_indexed *set, const loom_tokenizer *tokenizer) {
    static const loom_dtype floats[] = {LOOM_F32, LOOM_F64};
    for (size_t i = 0; i < 2; i++)
        if (loom_indexed_dtype(set) == floats[i])
            return loom_fail(LOOM_ERR_FORMAT, "%s.idx: dtype is %s, expected an integer type for tokens",
                loom_indexed_prefix(set), loom_dtype_name(floats[i]));
    int64_t *tokens = malloc(TOKENS_AT_ONCE * sizeof *tokens);
    loom_status status = tokens ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "no memory for tokens");
    for (int64_t i = 0; i < loom_indexed_sequences(set) && status == LOOM_OK; i++) {
        int64_t length = loom_indexed_length(set, i);
        for (int64_t first = 0; first < length && status == LOOM_OK; first += TOKENS_AT_ONCE) {
            int64_t count = length - first < TOKENS_AT_ONCE ? length - first : TOKENS_AT_ONCE;
            status = loom_indexed_read(set, i, first, count, tokens);
            for (int64_t t = 0; t < count && status == LOOM_OK; t++)
                if (tokens[t] < 0 || tokens[t] >= tokenizer->vocab_size)
                    status = loom_fail(LOOM_ERR_FORMAT,
                        "%s.bin: token %lld of sequence %lld is %lld, expected 0 to %lld, the tokens of %s",
                        loom_indexed_prefix(set), (long long)(first + t), (long long)i, (long long)tokens[t],
                        (long long)tokenizer->vocab_size - 1, tokenizer->name);
        }
    }
    free(tokens);
    return status;
}

static loom_status count_eods(const loom_indexed *set, int64_t eod, int64_t *without) {
    *without = 0;
    for (int64_t d = 0; d < loom_indexed_documents(set); d++) {
        int64_t last = loom_indexed_document(set, d + 1) - 1, token = -1;
        if (last >= loom_indexed_document(set, d) && loom_indexed_length(set, last) > 0)
            LOOM_TRY(loom_indexed_read(set, last, loom_indexed_length(set, last) - 1, 1, &token));
        *without += token != eod;
    }
    return LOOM_OK;
}

static loom_status find(const loom_indexed *set, const loom_tokenizer *tokenizer, findings *found) {
    int64_t end = 0, furthest = 0, size = (int64_t)loom_dtype_size(loom_indexed_dtype(set));
    *found = (findings){.without_eod = -1};
    for (int64_t i = 0; i < loom_indexed_sequences(set); i++) {
        found->displaced += loom_indexed_pointer(set, i) != end;
        end = loom_indexed_pointer(set, i) + size * loom_indexed_length(set, i);
        furthest = end > furthest ? end : furthest;
    }
    found->unused_bytes = loom_indexed_bin_bytes(set) - furthest;
    if (!tokenizer)
        return LOOM_OK;
    LOOM_TRY(check_tokens(set, tokenizer));
    return tokenizer->eod >= 0 ? count_eods(set, tokenizer->eod, &found->without_eod) : LOOM_OK;
}

static void print_good(const loom_indexed *set, const findings *found, bool json) {
    long long documents = loom_indexed_documents(set), sequences = loom_indexed_sequences(set),
              tokens = loom_indexed_tokens(set);
    if (json) {
        printf(",\"error\":0,\"dtype\":\"%s\",\"document_count\":%lld,\"sequence_count\":%lld,\"tokens\":%lld,"
               "\"unused_bytes\":%lld,\"displaced_sequences\":%lld",
            loom_cli_dtype_name(loom_indexed_dtype(set)), documents, sequences, tokens, (long long)found->unused_bytes,
            (long long)found->displaced);
        if (found->without_eod >= 0)
            printf(",\"documents_without_eod\":%lld", (long long)found->without_eod);
        putchar('}');
        return;
    }
    printf("%s: whole: %lld documents, %lld sequences, %lld tokens (%s)\n", loom_indexed_prefix(set), documents,
        sequences, tokens, loom_dtype_name(loom_indexed_dtype(set)));
    if (found->unused_bytes > 0)
        printf("%s: note: %lld bytes at the end of the .bin belong to no sequence\n", loom_indexed_prefix(set),
            (long long)found->unused_bytes);
    if (found->displaced > 0)
        printf("%s: note: %lld sequences do not begin where the one before ends\n", loom_indexed_prefix(set),
            (long long)found->displaced);
    if (found->without_eod > 0)
        printf("%s: note: %lld documents do not end with the tokenizer's end of document\n", loom_indexed_prefix(set),
            (long long)found->without_eod);
}

static int run_verify(const arguments *given) {
    loom_tokenizer *tokenizer = NULL;
    int result = 0;
    if (given->tokenizer && loom_tokenizer_open(given->tokenizer, &tokenizer) != LOOM_OK)
        return loom_cli_fail(LOOM_ERR_FORMAT);
    for (int64_t i = 0; i < given->count; i++) {
        loom_indexed *set = NULL;
        findings found;
        loom_status status = loom_indexed_open(given->prefixes[i], &set);
        if (status == LOOM_OK)
            status = find(set, tokenizer, &found);
        if (given->json)
            begin_json_case(i, given->prefixes[i]);
        if (status == LOOM_OK) {
            print_good(set, &found, given->json);
        } else {
            if (given->json) {
                fputs(",\"error\":1,\"reason\":", stdout);
                loom_cli_print_json_text(loom_error_message(), strlen(loom_error_message()));
                putchar('}');
            }
            fflush(stdout);
            int code = loom_cli_fail(status);
            result = code > result ? code : result;
        }
        loom_indexed_close(set);
    }
    if (given->json)
        puts("\n]}");
    loom_tokenizer_destroy(tokenizer);
    return result;
}

int loom_cli_data_verify(int argc, char **argv) {
    static const struct argp parser = {.options = verify_options,
        .parser = parse,
        .args_doc = "PREFIX…",
        .doc = "Checks every rule of the format: header, counts, lengths, pointers, order of documents, sizes of both "
               "files; with --tokenizer the tokens, too. The exit status is 0 only if all datasets are whole."};
    return parse_and_run(&parser, run_verify, argc, argv);
}

/* ---- stats ---- */

enum { BUCKETS = 64, BAR_CELLS = 40 };

/* Bucket 0 is empty documents, bucket k those of 2^(k-1) to 2^k - 1 tokens. */
typedef struct lengths {
    int64_t *sorted; /* [documents] tokens of each */
    int64_t documents[BUCKETS], tokens[BUCKETS];
    int first, last; /* buckets that have documents */
} lengths;

static int bucket_of(int64_t length) {
    return length == 0 ? 0 : 64 - __builtin_clzll((unsigned long long)length);
}

static int compare(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static loom_status measure(const loom_indexed *set, lengths *made) {
    int64_t count = loom_indexed_documents(set);
    *made = (lengths){.sorted = malloc((size_t)count * sizeof *made->sorted + 1), .first = BUCKETS};
    if (!made->sorted)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for the lengths of %lld documents", (long long)count);
    for (int64_t d = 0; d < count; d++) {
        int64_t length = 0;
        for (int64_t i = loom_indexed_document(set, d); i < loom_indexed_document(set, d + 1); i++)
            length += loom_indexed_length(set, i);
        int bucket = bucket_of(length);
        made->sorted[d] = length;
        made->documents[bucket]++;
        made->tokens[bucket] += length;
        made->first = bucket < made->first ? bucket : made->first;
        made->last = bucket > made->last ? bucket : made->last;
    }
    qsort(made->sorted, (size_t)count, sizeof *made->sorted, compare);
    return LOOM_OK;
}

/* The length that at least this share of the documents does not exceed. */
static long long quantile(const lengths *made, int64_t count, int percent) {
    int64_t at = (count * percent + 99) / 100;
    return count == 0 ? 0 : made->sorted[at > 0 ? at - 1 : 0];
}

static int64_t least_of(int bucket) {
    return bucket == 0 ? 0 : (int64_t)1 << (bucket - 1);
}

static int64_t most_of(int bucket) {
    return bucket == 0 ? 0 : least_of(bucket) * 2 - 1;
}

static double share(int64_t part, int64_t whole) {
    return whole > 0 ? 100.0 * (double)part / (double)whole : 0;
}

static void print_histogram(const loom_indexed *set, const lengths *made) {
    int64_t count = loom_indexed_documents(set), tokens = loom_indexed_tokens(set), most = 1;
    for (int b = made->first; b <= made->last; b++)
        most = made->documents[b] > most ? made->documents[b] : most;
    int width = snprintf(NULL, 0, "%lld", (long long)most_of(made->last));
    width = width < 4 ? 4 : width;
    printf("\n%*s  %*s %8s %8s\n", 2 * width + 3, "tokens", 11, "documents", "share", "of all");
    for (int b = made->first; b <= made->last; b++) {
        int cells = (int)(made->documents[b] * BAR_CELLS / most);
        if (cells == 0 && made->documents[b] > 0)
            cells = 1;
        printf("%*lld - %*lld  %11lld %7.2f%% %7.2f%%  %.*s\n", width, (long long)least_of(b), width,
            (long long)most_of(b), (long long)made->documents[b], share(made->documents[b], count),
            share(made->tokens[b], tokens), cells, "########################################");
    }
}

static void print_stats(const loom_indexed *set, const lengths *made) {
    int64_t count = loom_indexed_documents(set), tokens = loom_indexed_tokens(set);
    printf("%s: %lld documents, %lld sequences, %lld tokens (%s)\n", loom_indexed_prefix(set), (long long)count,
        (long long)loom_indexed_sequences(set), (long long)tokens, loom_dtype_name(loom_indexed_dtype(set)));
    if (count == 0)
        return;
    printf("tokens a document: mean %.1f, median %lld, 90%% %lld, 99%% %lld, %lld to %lld; %lld empty\n",
        (double)tokens / (double)count, quantile(made, count, 50), quantile(made, count, 90), quantile(made, count, 99),
        quantile(made, count, 0), quantile(made, count, 100), (long long)made->documents[0]);
    print_histogram(set, made);
}

static void print_stats_json(const loom_indexed *set, const lengths *made) {
    int64_t count = loom_indexed_documents(set);
    printf(",\"dtype\":\"%s\",\"document_count\":%lld,\"sequence_count\":%lld,\"tokens\":%lld,\"empty\":%lld,"
           "\"least\":%lld,\"median\":%lld,\"p90\":%lld,\"p99\":%lld,\"most\":%lld,\n\"histogram\":[",
        loom_cli_dtype_name(loom_indexed_dtype(set)), (long long)count, (long long)loom_indexed_sequences(set),
        (long long)loom_indexed_tokens(set), (long long)made->documents[0], quantile(made, count, 0),
        quantile(made, count, 50), quantile(made, count, 90), quantile(made, count, 99), quantile(made, count, 100));
    for (int b = made->first; b <= made->last; b++)
        printf("%s{\"from\":%lld,\"to\":%lld,\"document_count\":%lld,\"tokens\":%lld}", b > made->first ? "," : "",
            (long long)least_of(b), (long long)most_of(b), (long long)made->documents[b], (long long)made->tokens[b]);
    fputs("]}", stdout);
}

static int run_stats(const arguments *given) {
    loom_status status = LOOM_OK;
    for (int64_t i = 0; i < given->count && status == LOOM_OK; i++) {
        loom_indexed *set = NULL;
        lengths made = {0};
        status = loom_indexed_open(given->prefixes[i], &set);
        if (status == LOOM_OK)
            status = measure(set, &made);
        if (status == LOOM_OK && given->json) {
            begin_json_case(i, given->prefixes[i]);
            print_stats_json(set, &made);
        } else if (status == LOOM_OK) {
            fputs(i ? "\n" : "", stdout);
            print_stats(set, &made);
        }
        free(made.sorted);
        loom_indexed_close(set);
    }
    if (status != LOOM_OK) {
        fflush(stdout);
        return loom_cli_fail(status);
    }
    if (given->json)
        puts("\n]}");
    return 0;
}

int loom_cli_data_stats(int argc, char **argv) {
    static const struct argp parser = {.options = stats_options,
        .parser = parse,
        .args_doc = "PREFIX…",
        .doc = "How long the documents of indexed datasets are, in tokens, and how many there are of each length."};
    return parse_and_run(&parser, run_stats, argc, argv);
}
