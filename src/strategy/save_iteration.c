/* A folder of checkpoints. The pointer file moves after a checkpoint is whole, and old ones go after the pointer has
 * moved: at every instant it names a checkpoint that is whole. */
#include "checkpoint/writer.h"
#include "strategy/strategy.h"
#include <dirent.h>
#include <errno.h>
#include <megaloom/state.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { PATH_BYTES = 4096 };

static loom_status path_of(const char *folder, int64_t iteration, char path[PATH_BYTES]) {
    if (snprintf(path, PATH_BYTES, "%s/iter_%07lld", folder, (long long)iteration) >= PATH_BYTES)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the checkpoints is too long: %.100s…", folder);
    return LOOM_OK;
}

/* The lowest iteration of a checkpoint in the folder, and how many there are. */
static loom_status look(const char *folder, int64_t except, int64_t *oldest, int64_t *count) {
    DIR *entries = opendir(folder);
    if (!entries)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be opened: %s", folder, strerror(errno));
    *count = 0;
    *oldest = -1;
    for (const struct dirent *entry; (entry = readdir(entries));) {
        long long iteration = 0;
        int end = 0;
        if (sscanf(entry->d_name, "iter_%lld%n", &iteration, &end) != 1 || entry->d_name[end] != '\0' || iteration < 0)
            continue;
        ++*count;
        if (iteration != except && (*oldest < 0 || iteration < *oldest))
            *oldest = iteration;
    }
    closedir(entries);
    return LOOM_OK;
}

static loom_status remove_old(const char *folder, int64_t keep, int64_t newest) {
    for (;;) {
        int64_t oldest = -1, count = 0;
        char path[PATH_BYTES];
        LOOM_TRY(look(folder, newest, &oldest, &count));
        if (count <= keep || oldest < 0)
            return LOOM_OK;
        LOOM_TRY(path_of(folder, oldest, path));
        LOOM_TRY(loom__checkpoint_remove(path));
    }
}

static loom_status make_folder(const char *folder) {
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be made: %s", folder, strerror(errno));
    return LOOM_OK;
}

static loom_status point(const char *folder, int64_t iteration, int64_t keep_last) {
    LOOM_TRY(loom__checkpoint_set_latest(folder, iteration));
    return keep_last > 0 ? remove_old(folder, keep_last, iteration) : LOOM_OK;
}

loom_status loom_fabric_save_iteration(
    loom_fabric *fabric, const char *folder, int64_t iteration, int64_t keep_last, const loom_state *state) {
    loom_comm *world = loom_rank_world(fabric->rank);
    bool first = loom_rank_index(fabric->rank) == 0;
    char path[PATH_BYTES];
    if (iteration < 0 || keep_last < 0)
        return loom_fail(LOOM_ERR_ARGUMENT, "save: found iteration %lld and keep_last %lld, expected numbers from 0",
            (long long)iteration, (long long)keep_last);
    LOOM_TRY(path_of(folder, iteration, path));
    LOOM_TRY(loom_agree(world, first ? make_folder(folder) : LOOM_OK));
    LOOM_TRY(loom_fabric_save(fabric, path, state, NULL, 0));
    return loom_agree(world, first ? point(folder, iteration, keep_last) : LOOM_OK);
}
