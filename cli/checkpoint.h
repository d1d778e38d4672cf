/* The verbs of `megaloom checkpoint`. Each takes argv with its verb's words as argv[0]. */
#ifndef CLI_CHECKPOINT_H
#define CLI_CHECKPOINT_H

#include <argp.h>
#include <megaloom/checkpoint_tools.h>

int loom_cli_checkpoint_inspect(int argc, char **argv);
int loom_cli_checkpoint_verify(int argc, char **argv);
int loom_cli_checkpoint_diff(int argc, char **argv);
int loom_cli_checkpoint_reshard(int argc, char **argv);
int loom_cli_checkpoint_convert(int argc, char **argv);
int loom_cli_checkpoint_average(int argc, char **argv);

/* What the verbs that rewrite one checkpoint are given alike; borrowed from argv. */
typedef struct loom_cli_rewrite_arguments {
    const char *in, *out;
    bool json;
} loom_cli_rewrite_arguments;
/* Takes --json (j), IN and OUT in; ARGP_ERR_UNKNOWN for another option, and for an argument behind OUT. */
error_t loom_cli_take_rewrite(
    loom_cli_rewrite_arguments *arguments, int key, const char *text, const struct argp_state *state);

/* A bar on standard error, redrawn as it grows; none where that is no terminal. */
typedef struct loom_cli_bar {
    bool shows;
    int percent; /* drawn */
} loom_cli_bar;
loom_cli_bar loom_cli_bar_begin(void);
/* Its context is the bar. */
void loom_cli_bar_report(void *context, uint64_t done, uint64_t all);
/* Leaves an empty line where it was drawn. */
void loom_cli_bar_end(loom_cli_bar *bar);

/* What a tool has written to `out`, as a line, or with `json` as an object. Gives the exit status. */
int loom_cli_print_outcome(const char *out, const loom_tool_outcome *outcome, bool json);

/* "1.5 MiB" in a buffer of 32 bytes, which is returned. */
char *loom_cli_bytes(double bytes, char text[32]);

#endif
