/* megaloom checkpoint: the verbs, and the one that reads everything and tells what is damaged. */
#include "checkpoint.h"
#include "commands.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

char *loom_cli_bytes(double bytes, char text[32]) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    size_t unit = 0;
    while (bytes >= 1024 && unit + 1 < sizeof units / sizeof *units) {
        bytes /= 1024;
        unit++;
    }
    snprintf(text, 32, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return text;
}

/* The library's message names the file already where the fault was found with its path at hand. */
static void print_fault(void *context, const char *file, const char *message) {
    (void)context;
    printf("%s%s%s\n", file, *file ? ": " : "", message);
}

static error_t take_path(int key, char *text, struct argp_state *state) {
    const char **path = state->input;
    if (key == ARGP_KEY_ARG && !*path) {
        *path = text;
        return 0;
    }
    if (key == ARGP_KEY_ARG)
        argp_error(state, "more than one checkpoint: %s and %s", *path, text);
    if (key == ARGP_KEY_END && !*path)
        argp_error(state, "DIR must be given");
    return key == ARGP_KEY_END ? 0 : ARGP_ERR_UNKNOWN;
}

int loom_cli_checkpoint_verify(int argc, char **argv) {
    static const struct argp argp = {NULL, take_path, "DIR",
        "Reads all of a checkpoint: its structure, every checksum, and that all values are finite numbers.\v"
        "Each fault is a line that begins with the name of the damaged file. The exit status is 0 when there is none, "
        "1 "
        "when there is one, and 2 when DIR cannot be opened as a checkpoint at all. Values in the padded buckets of "
        "dp_reshardable optimizers that another program wrote are not looked at: between parameters they hold "
        "anything.",
        NULL, NULL, NULL};
    const char *path = NULL;
    char size[32];
    loom_checkpoint_verified found = {0};
    argp_parse(&argp, argc, argv, 0, NULL, &path);
    loom_status status = loom_checkpoint_verify(path, print_fault, NULL, &found);
    if (status && found.faults == 0)
        return loom_cli_fail(status);
    printf("%s: %" PRId64 " tensors in %" PRId64 " chunks, %" PRId64 " objects, %" PRId64 " files, %s: ", path,
        found.tensors, found.chunks, found.objects, found.files, loom_cli_bytes((double)found.bytes, size));
    if (found.faults == 0)
        printf("sound\n");
    else
        printf("%" PRId64 " fault%s in %" PRId64 " file%s\n", found.faults, found.faults == 1 ? "" : "s",
            found.damaged_files, found.damaged_files == 1 ? "" : "s");
    if (found.not_compared > 0)
        printf("%" PRId64 " padded buckets: whether their values are finite was not looked at\n", found.not_compared);
    return found.faults > 0;
}

int loom_cli_checkpoint(int argc, char **argv) {
    static const struct {
        const char *verb;
        char name[40];
        int (*run)(int argc, char **argv);
    } verbs[] = {{"inspect", "megaloom checkpoint inspect", loom_cli_checkpoint_inspect},
        {"verify", "megaloom checkpoint verify", loom_cli_checkpoint_verify},
        {"diff", "megaloom checkpoint diff", loom_cli_checkpoint_diff},
        {"reshard", "megaloom checkpoint reshard", loom_cli_checkpoint_reshard},
        {"convert", "megaloom checkpoint convert", loom_cli_checkpoint_convert},
        {"average", "megaloom checkpoint average", loom_cli_checkpoint_average}};
    argp_err_exit_status = 2;
    for (size_t i = 0; argc >= 2 && i < sizeof verbs / sizeof *verbs; i++)
        if (strcmp(argv[1], verbs[i].verb) == 0) {
            char name[sizeof verbs[i].name];
            memcpy(name, verbs[i].name, sizeof name);
            argv[1] = name;
            return verbs[i].run(argc - 1, argv + 1);
        }
    bool help = argc >= 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-?") == 0);
    if (argc < 2)
        fputs("megaloom: checkpoint: a verb is missing\n", stderr);
    else if (!help)
        fprintf(stderr,
            "megaloom: checkpoint: unknown verb '%s': expected inspect, verify, diff, reshard, convert or average\n",
            argv[1]);
    fprintf(help ? stdout : stderr, "Usage: megaloom checkpoint inspect DIR [--json]\n"
                                    "       megaloom checkpoint verify DIR\n"
                                    "       megaloom checkpoint diff A B [--tolerance DIFFERENCE]\n"
                                    "       megaloom checkpoint reshard IN OUT [FIELD=VALUE...]\n"
                                    "       megaloom checkpoint convert IN OUT [--to FORM] [--dtype DTYPE]\n"
                                    "       megaloom checkpoint average A B... --output OUT\n");
    return help ? 0 : 2;
}
