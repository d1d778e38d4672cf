/* megaloom data: makes indexed datasets out of text, joins them, and looks into them. This file finds the verb, and
 * holds what the verbs share. */
#include "data.h"
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct verb {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *usage;
} verb;

static const verb verbs[] = {
    {"preprocess", loom_cli_data_preprocess, "--input PATH… --output-prefix PREFIX [--tokenizer NAME] [--append-eod]"},
    {"merge", loom_cli_data_merge, "--output-prefix PREFIX INPUT…"},
    {"show", loom_cli_data_show, "PREFIX [--document N] [--json]"},
    {"verify", loom_cli_data_verify, "PREFIX… [--tokenizer NAME] [--json]"},
    {"stats", loom_cli_data_stats, "PREFIX… [--json]"},
    {"samples", loom_cli_data_samples, "[WEIGHT] PREFIX… --seq-length N [--sample K] [--json]"},
    {"batches", loom_cli_data_batches, "--total N --micro-batch-size N [--dataloader-type KIND] [--json]"},
};

enum { VERBS = sizeof verbs / sizeof *verbs };

int loom_cli_data(int argc, char **argv) {
    argp_err_exit_status = 2;
    for (int i = 0; argc >= 2 && i < VERBS; i++)
        if (strcmp(argv[1], verbs[i].name) == 0) {
            char name[64];
            snprintf(name, sizeof name, "megaloom data %s", verbs[i].name);
            argv[1] = name;
            return verbs[i].run(argc - 1, argv + 1);
        }
    bool help = argc >= 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-?") == 0);
    FILE *out = help ? stdout : stderr;
    if (!help)
        fprintf(out, "megaloom: data: %s%s%s\n", argc < 2 ? "a verb is missing" : "there is no verb '",
            argc < 2 ? "" : argv[1], argc < 2 ? "" : "'");
    for (int i = 0; i < VERBS; i++)
        fprintf(out, "%s megaloom data %s %s\n", i == 0 ? "Usage:" : "      ", verbs[i].name, verbs[i].usage);
    return help ? 0 : 2;
}

loom_status loom_cli_make_folder_of(const char *prefix) {
    char folder[4096];
    const char *slash = strrchr(prefix, '/');
    if (!slash || slash == prefix)
        return LOOM_OK;
    if (snprintf(folder, sizeof folder, "%.*s", (int)(slash - prefix), prefix) >= (int)sizeof folder)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the output is too long");
    return loom_cli_make_directories(folder);
}

/* ---- dtypes, JSON ---- */

static const loom_dtype dtypes[] = {LOOM_U8, LOOM_I8, LOOM_I16, LOOM_I32, LOOM_I64, LOOM_F64, LOOM_F32, LOOM_U16};
static const char *const dtype_names[] = {
    "uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16", "?"};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

static int place_of(loom_dtype dtype) {
    int i = 0;
    while (i < DTYPES && dtypes[i] != dtype)
        i++;
    return i;
}

const char *loom_cli_dtype_name(loom_dtype dtype) {
    return dtype_names[place_of(dtype)];
}

int loom_cli_dtype_code(loom_dtype dtype) {
    return place_of(dtype) + 1;
}

/* The bytes of the character that text begins with; 0 where it is no UTF-8. */
static size_t character(const unsigned char *text, size_t bytes) {
    static const unsigned least[5] = {0, 0, 0x80, 0x800, 0x10000};
    size_t length = text[0] < 0x80                      ? 1
                    : text[0] >= 0xc2 && text[0] < 0xe0 ? 2
                    : text[0] >= 0xe0 && text[0] < 0xf0 ? 3
                    : text[0] >= 0xf0 && text[0] < 0xf5 ? 4
                                                        : 0;
    if (length == 0 || length > bytes)
        return 0;
    unsigned letter = length == 1 ? text[0] : text[0] & (0x7fu >> length);
    for (size_t i = 1; i < length; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return 0;
        letter = letter << 6 | (text[i] & 0x3f);
    }
    bool legal = letter >= least[length] && letter <= 0x10ffff && (letter < 0xd800 || letter > 0xdfff);
    return legal ? length : 0;
}

void loom_cli_print_json_text(const char *text, size_t bytes) {
    const unsigned char *at = (const unsigned char *)text, *end = at + bytes;
    putchar('"');
    while (at < end) {
        size_t length = character(at, (size_t)(end - at));
        if (length == 0)
            fputs("\xef\xbf\xbd", stdout);
        else if (*at == '"' || *at == '\\')
            printf("\\%c", *at);
        else if (*at < 0x20 || *at == 0x7f)
            printf("\\u%04x", (unsigned)*at);
        else
            fwrite(at, 1, length, stdout);
        at += length ? length : 1;
    }
    putchar('"');
}

/* ---- options of text ---- */

static char unescaped(char letter) {
    switch (letter) {
    case 'n':
        return '\n';
    case 't':
        return '\t';
    case 'r':
        return '\r';
    default:
        return letter;
    }
}

static void unescape(char *text) {
    char *out = text;
    for (const char *in = text; *in; in++)
        *out++ = *in == '\\' && in[1] ? unescaped(*++in) : *in;
    *out = '\0';
}

static loom_text_format parse_format(const char *name, const struct argp_state *state) {
    static const char *const names[] = {"auto", "json", "file", "line", "separator"};
    for (int i = 0; i < 5; i++)
        if (strcmp(name, names[i]) == 0)
            return (loom_text_format)i;
    argp_error(state, "--format is '%s', expected auto, json, file, line or separator", name);
    return LOOM_TEXT_AUTO;
}

error_t loom_cli_parse_text_option(
    loom_cli_text_arguments *arguments, int key, char *value, const struct argp_state *state) {
    switch (key) {
    case LOOM_CLI_FORMAT:
        arguments->format = parse_format(value, state);
        return 0;
    case LOOM_CLI_SEPARATOR:
        unescape(value);
        arguments->separator = value;
        arguments->format = LOOM_TEXT_SEPARATOR;
        return 0;
    case LOOM_CLI_KEYS:
        for (char *rest = value, *name; (name = strsep(&rest, ",")) != NULL;) {
            if (arguments->key_count == (int64_t)(sizeof arguments->keys / sizeof *arguments->keys))
                argp_error(state, "--json-keys: more than 64 keys");
            arguments->keys[arguments->key_count++] = name;
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- progress ---- */

enum { MOST_TOLD = 10, BAR_CELLS = 24 };

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

loom_cli_progress loom_cli_progress_begin(void) {
    return (loom_cli_progress){.terminal = isatty(STDERR_FILENO), .started = now(), .first_done = -1};
}

static void clear_line(const loom_cli_progress *progress) {
    if (progress->terminal && progress->shown > 0)
        fputs("\r\033[K", stderr);
}

void loom_cli_progress_show(void *context, int64_t documents, int64_t done, int64_t total) {
    loom_cli_progress *progress = context;
    double time = now();
    if (progress->first_done < 0) /* the first report comes behind the first block, which is little */
        progress->first_done = done;
    if (!progress->terminal || (done < total && time - progress->shown < 0.1))
        return;
    progress->shown = time;
    double share = total > 0 ? (double)done / (double)total : 1;
    double rate = (double)(done - progress->first_done) / (time - progress->started + 1e-9);
    char bar[BAR_CELLS + 1];
    memset(bar, '.', BAR_CELLS);
    bar[BAR_CELLS] = '\0';
    memset(bar, '#', (size_t)(share * BAR_CELLS));
    fprintf(stderr, "\r\033[K[%s] %3.0f%%  %.1f of %.1f MB  %lld documents  %.1f MB/s", bar, 100 * share,
        (double)done / 1e6, (double)total / 1e6, (long long)documents, rate / 1e6);
    if (rate > 0 && done < total) {
        long long left = (long long)((double)(total - done) / rate);
        fprintf(stderr, "  %lld:%02lld:%02lld left", left / 3600, left / 60 % 60, left % 60);
    }
    fflush(stderr);
}

void loom_cli_progress_skipped(void *context, const char *message) {
    loom_cli_progress *progress = context;
    if (progress->told++ >= MOST_TOLD)
        return;
    clear_line(progress);
    fprintf(stderr, "megaloom: skipped: %s\n", message);
    if (progress->told == MOST_TOLD)
        fputs("megaloom: skipped: further ones are counted only\n", stderr);
}

void loom_cli_progress_end(const loom_cli_progress *progress) {
    clear_line(progress);
    fflush(stderr);
}
