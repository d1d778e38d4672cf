/* A folder for one test, and files in it. */
#ifndef UNIT_FORMAT_SCRATCH_H
#define UNIT_FORMAT_SCRATCH_H

#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct scratch {
    char path[64];
} scratch;

static inline scratch scratch_make(void) {
    scratch made;
    snprintf(made.path, sizeof made.path, "/tmp/loom-test-XXXXXX");
    if (!mkdtemp(made.path))
        abort();
    return made;
}

/* path/name; the result lives until the fourth next call. */
static inline const char *scratch_file(const scratch *folder, const char *name) {
    static char paths[4][512];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder->path, name);
    return path;
}

static inline const char *scratch_write(const scratch *folder, const char *name, const void *data, size_t bytes) {
    const char *path = scratch_file(folder, name);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0)
        abort();
    return path;
}

static inline long scratch_size(const scratch *folder, const char *name) {
    struct stat status;
    return stat(scratch_file(folder, name), &status) == 0 ? (long)status.st_size : -1;
}

/* From now on no file may grow beyond `bytes`, as on a full disk; 0 lifts that. */
static inline void scratch_limit(size_t bytes) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0)
        abort();
    limit.rlim_cur = bytes ? bytes : limit.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
        abort();
}

static inline int scratch_remove_entry(const char *path, const struct stat *status, int type, struct FTW *place) {
    (void)status, (void)type, (void)place;
    return remove(path);
}

static inline void scratch_remove(const scratch *folder) {
    nftw(folder->path, scratch_remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

#endif
