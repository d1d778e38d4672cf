/* megaloom: finds the command and hands the arguments over. */
#include "commands.h"
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *text;
} command;

static const command commands[] = {
    {"train", loom_cli_train, "train a model as a run file says"},
    {"eval", loom_cli_eval, "the loss of given tokens; logits and gradients into a file"},
    {"export", loom_cli_export, "a run's model as a Hugging Face directory of another dtype or shard size"},
    {"describe", loom_cli_describe, "the parameters and the memory of a Hugging Face model, and how it can be cut"},
    {"generate", loom_cli_generate, "text that a model writes behind a prompt"},
    {"plan", loom_cli_plan, "memory, time and faults of a run before it starts, and the layouts that fit"},
    {"topology", loom_cli_topology, "who is in which group, for any number of ranks"},
    {"schedule", loom_cli_schedule, "what each stage of a pipeline does when, proved, simulated and drawn"},
    {"lr", loom_cli_lr, "the learning rate of each step, as numbers and as a drawing"},
    {"report", loom_cli_report, "a run as one page: curves, memory, timeline, ranks"},
    {"compare", loom_cli_compare, "two runs over each other, and whether rounding explains the difference"},
    {"check-layout", loom_cli_check_layout, "whether a layout computes what one rank computes, tensor by tensor"},
    {"config", loom_cli_config, "the run file's fields, or a run file as it is understood"},
    {"checkpoint", loom_cli_checkpoint, "look into checkpoints, verify and compare them"},
    {"data", loom_cli_data, "turn text into a dataset, and look into one"},
    {"tokenizer", loom_cli_tokenizer, "learn a tokenizer from text, and use one"},
};

enum { COMMANDS = sizeof commands / sizeof *commands };

static void usage(FILE *out) {
    fputs("Usage: megaloom COMMAND [ARGUMENT...]\n\n"
          "Trains transformer language models with Megatron-style model parallelism.\n\nCommands:\n",
        out);
    for (int i = 0; i < COMMANDS; i++)
        fprintf(out, "  %-12s %s\n", commands[i].name, commands[i].text);
    fputs("\n'megaloom COMMAND --help' tells more about one of them.\n", out);
}

/* A file that is opened must not land on a standard stream that the caller closed: messages would go into it. */
static void keep_standard_streams(void) {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) == -1 && open("/dev/null", O_RDWR) == -1)
            _exit(1);
}

/* Half an output must not look like a whole one, whichever command wrote it. */
static int written(int code) {
    if (code != 0 || (fflush(stdout) == 0 && !ferror(stdout)))
        return code;
    fputs("megaloom: standard output cannot be written\n", stderr);
    return 1;
}

int main(int argc, char **argv) {
    keep_standard_streams();
    loom_cli_name_shortened_files();
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        usage(stdout);
        return written(0);
    }
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-V") == 0) {
        puts("megaloom " MEGALOOM_VERSION);
        return written(0);
    }
    for (int i = 0; i < COMMANDS; i++)
        if (strcmp(argv[1], commands[i].name) == 0) {
            char name[64];
            snprintf(name, sizeof name, "megaloom %s", commands[i].name);
            argv[1] = name;
            return written(commands[i].run(argc - 1, argv + 1));
        }
    fprintf(stderr, "megaloom: there is no command '%s'; 'megaloom --help' lists them\n", argv[1]);
    return 2;
}
