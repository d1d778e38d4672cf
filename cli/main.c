/* megaloom: finds the command and hands the arguments over. */
#include "commands.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *text;
} command;

static const command commands[] = {
    {"train", loom_cli_train, "train a model as a run file says"},
    {"eval", loom_cli_eval, "the loss of given tokens; logits and gradients into a file"},
    {"topology", loom_cli_topology, "who is in which group, for any number of ranks"},
    {"config", loom_cli_config, "the run file's fields, or a run file as it is understood"},
    {"data", loom_cli_data, "turn text into a dataset, and look into one"},
};

enum { COMMANDS = sizeof commands / sizeof *commands };

static void usage(FILE *out) {
    fputs("Usage: megaloom COMMAND [ARGUMENT...]\n\n"
          "Trains transformer language models with Megatron-style model parallelism.\n\nCommands:\n",
        out);
    for (int i = 0; i < COMMANDS; i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].text);
    fputs("\n'megaloom COMMAND --help' tells more about one of them.\n", out);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        usage(stdout);
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-V") == 0) {
        puts("megaloom " MEGALOOM_VERSION);
        return 0;
    }
    for (int i = 0; i < COMMANDS; i++)
        if (strcmp(argv[1], commands[i].name) == 0) {
            char name[64];
            snprintf(name, sizeof name, "megaloom %s", commands[i].name);
            argv[1] = name;
            return commands[i].run(argc - 1, argv + 1);
        }
    fprintf(stderr, "megaloom: there is no command '%s'; 'megaloom --help' lists them\n", argv[1]);
    return 2;
}
