/* The verbs of `megaloom data`, one file each. Each takes its own argv (argv[0] is "megaloom data <verb>") and returns
 * the exit status of a command. */
#ifndef CLI_DATA_H
#define CLI_DATA_H

#include "commands.h"

int loom_cli_data_preprocess(int argc, char **argv);
int loom_cli_data_merge(int argc, char **argv);
int loom_cli_data_show(int argc, char **argv);
int loom_cli_data_verify(int argc, char **argv);
int loom_cli_data_stats(int argc, char **argv);
int loom_cli_data_samples(int argc, char **argv);
int loom_cli_data_batches(int argc, char **argv);

/* The folder that PREFIX lies in is made where it is missing. */
loom_status loom_cli_make_folder_of(const char *prefix);

/* A name of the format's dtypes as Megatron-Core has them: "uint16"; and their code in the file. */
const char *loom_cli_dtype_name(loom_dtype dtype);
int loom_cli_dtype_code(loom_dtype dtype);

/* A text as JSON has it, with its quotes; bytes that are no UTF-8 become U+FFFD. */
void loom_cli_print_json_text(const char *text, size_t bytes);

/* The options by which a file of text is taken apart, shared by the commands that read some. */
enum { LOOM_CLI_FORMAT = 'f', LOOM_CLI_SEPARATOR = 0x100, LOOM_CLI_KEYS = 'k' };
#define LOOM_CLI_TEXT_OPTIONS                                                                                          \
    {"format", LOOM_CLI_FORMAT, "FORMAT", 0,                                                                           \
        "What a document is: json (a line of JSON lines), file, line, or separator; auto, the default: json in files " \
        "that end in .jsonl, .json or .ndjson, else file",                                                             \
        0},                                                                                                            \
        {"json-keys", LOOM_CLI_KEYS, "KEY", 0, "Member of a JSON line that holds the text; text when not given", 0}, { \
        "separator", LOOM_CLI_SEPARATOR, "TEXT", 0,                                                                    \
            "What divides documents (\\n, \\t, \\r and \\\\ are understood); implies --format=separator", 0            \
    }

typedef struct loom_cli_text_arguments {
    loom_text_format format;
    char *separator; /* in argv */
    const char *keys[64];
    int64_t key_count;
} loom_cli_text_arguments;

/* Takes one of these options in; ARGP_ERR_UNKNOWN for another. */
error_t loom_cli_parse_text_option(
    loom_cli_text_arguments *arguments, int key, char *value, const struct argp_state *state);

/* The line of progress on a terminal, and the messages about what was skipped. */
typedef struct loom_cli_progress {
    bool terminal;
    double started, shown; /* seconds */
    int64_t first_done;    /* bytes that were done when it started; -1 = not yet known */
    int64_t told;          /* messages */
} loom_cli_progress;

loom_cli_progress loom_cli_progress_begin(void);
void loom_cli_progress_show(void *context, int64_t documents, int64_t done, int64_t total); /* a loom_data_progress */
void loom_cli_progress_skipped(void *context, const char *message);                         /* a loom_data_skipped */
void loom_cli_progress_end(const loom_cli_progress *progress);

#endif
