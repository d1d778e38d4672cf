/* The verbs of `megaloom checkpoint`. Each takes argv with its verb's words as argv[0]. */
#ifndef CLI_CHECKPOINT_H
#define CLI_CHECKPOINT_H

int loom_cli_checkpoint_inspect(int argc, char **argv);
int loom_cli_checkpoint_verify(int argc, char **argv);
int loom_cli_checkpoint_diff(int argc, char **argv);

/* "1.5 MiB" in a buffer of 32 bytes, which is returned. */
char *loom_cli_bytes(double bytes, char text[32]);

#endif
