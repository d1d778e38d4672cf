/* A file that is shortened while it is mapped. The kernel's own list of mappings tells which one holds the address that
 * could not be read, so nothing is kept for this. In the handler nothing takes a lock or memory; the environment is
 * only read, and nobody changes it. */
#include "commands.h"
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* "begin-end rwxp offset device inode      path", the numbers in hexadecimal. */
static const char *path_where(const char *line, uintptr_t address, uint64_t *offset) {
    char *at = NULL;
    uintptr_t begin = strtoull(line, &at, 16);
    if (*at != '-' || address < begin || address >= strtoull(at + 1, &at, 16) || !(at = strchr(at + 1, ' ')))
        return NULL;
    *offset = strtoull(at, NULL, 16) + (address - begin);
    return strchr(line, '/');
}

static void say(const char *text) {
    ssize_t written = write(STDERR_FILENO, text, strlen(text));
    (void)written;
}

static void say_number(uint64_t number) {
    char digits[24], *at = digits + sizeof digits;
    *--at = '\0';
    do
        *--at = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    say(at);
}

static void say_path(uintptr_t address) {
    char line[PATH_MAX + 128], part[1024];
    uint64_t offset = 0;
    size_t length = 0;
    ssize_t got = 0;
    const char *path = NULL;
    int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    while (maps >= 0 && !path && (got = read(maps, part, sizeof part)) > 0)
        for (ssize_t i = 0; i < got && !path; i++) {
            if (part[i] != '\n') {
                if (length + 1 < sizeof line)
                    line[length++] = part[i];
                continue;
            }
            line[length] = '\0';
            length = 0;
            path = path_where(line, address, &offset);
        }
    say(path ? path : "a dataset or weight file");
    if (path) {
        say(" at byte ");
        say_number(offset);
    }
}

static void on_bus_error(int signal_number, siginfo_t *info, void *context) {
    static const char *const ranks[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"};
    const char *rank = NULL;
    (void)context;
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks && !rank; i++)
        rank = getenv(ranks[i]);
    say("megaloom: ");
    if (rank) {
        say("rank ");
        say(rank);
        say(": ");
    }
    say_path((uintptr_t)info->si_addr);
    say(" was shortened, or cannot be read, while it was in use (SIGBUS), expected the file as it was opened\n");
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

void loom_cli_name_shortened_files(void) {
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}
