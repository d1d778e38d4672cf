/* The verbs of `megaloom checkpoint`. Each takes argv with its verb's words as argv[0]. */
#ifndef CLI_CHECKPOINT_H
#define CLI_CHECKPOINT_H

#include <megaloom/checkpoint_tools.h>

int loom_cli_checkpoint_inspect(int argc, char **argv);
int loom_cli_checkpoint_verify(int argc, char **argv);
int loom_cli_checkpoint_diff(int argc, char **argv);
int loom_cli_checkpoint_reshard(int argc, char **argv);
int loom_cli_checkpoint_convert(int argc, char **argv);
int loom_cli_checkpoint_average(int argc, char **argv);

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
