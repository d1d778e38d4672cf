/* A folder of checkpoints. The pointer file moves after a checkpoint is whole, and old ones go after the pointer has
 * moved: at every instant it names a checkpoint that is whole. What follows a save that goes on in the background waits
 * with the fabric until it is. */
#include "checkpoint/writer.h"
#include "format/torch_file.h"
#include "state/save.h"
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <megaloom/checkpoint_io.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { PATH_BYTES = 4096 };

/* What follows a save into a folder. */
typedef struct folder_end {
    loom__save_end of; /* first: the fabric keeps its address */
    char folder[PATH_BYTES];
    int64_t iteration;
    loom_keep keep;
} folder_end;

typedef struct kept {
    int64_t iteration;
    double loss; /* NaN where it has none */
    bool wanted;
} kept;

static loom_status path_of(const char *folder, int64_t iteration, char path[PATH_BYTES]) {
    if (snprintf(path, PATH_BYTES, "%s/iter_%07lld", folder, (long long)iteration) >= PATH_BYTES)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of the checkpoints is too long: %.100s…", folder);
    return LOOM_OK;
}

/* ---- what the folder has */

/* One whose common state cannot be read is no better than one without a loss. */
static double loss_of(const char *path) {
    loom__mapping file = {0};
    loom_value_pool *pool = NULL;
    const loom_value *common = NULL, *loss = NULL;
    double found = NAN;
    char *name = loom__path_join(path, "/", "common.pt");
    if (name && !loom__map_file(name, &file) && !loom_value_pool_create(&pool) &&
        !loom__torch_read(name, file.data, file.bytes, LOOM__TORCH_TRUST, pool, &common))
        loss = loom_value_get(common, "validation_loss");
    if (loss && loss->kind == LOOM_VALUE_FLOAT)
        found = loss->number;
    loom_value_pool_destroy(pool);
    loom__unmap_file(&file);
    free(name);
    loom_error_clear();
    return found;
}

static loom_status add(kept **list, int64_t *count, const char *folder, int64_t iteration) {
    char path[PATH_BYTES];
    LOOM_TRY(path_of(folder, iteration, path));
    kept *grown = realloc(*list, (size_t)(*count + 1) * sizeof *grown);
    if (!grown)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory for the list of its checkpoints", folder);
    *list = grown;
    grown[(*count)++] = (kept){.iteration = iteration, .loss = loss_of(path)};
    return LOOM_OK;
}

static loom_status list_folder(const char *folder, kept **list, int64_t *count) {
    DIR *entries = opendir(folder);
    loom_status status = LOOM_OK;
    if (!entries)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be opened: %s", folder, strerror(errno));
    for (const struct dirent *entry; !status && (entry = readdir(entries));) {
        long long iteration = 0;
        int end = 0;
        if (sscanf(entry->d_name, "iter_%lld%n", &iteration, &end) == 1 && entry->d_name[end] == '\0' && iteration >= 0)
            status = add(list, count, folder, iteration);
    }
    closedir(entries);
    return status;
}

/* ---- what of it is kept */

static int by_newest(const void *a, const void *b) {
    const kept *x = a, *y = b;
    return (x->iteration < y->iteration) - (x->iteration > y->iteration);
}

/* The best first; those without a loss last. */
static int by_best(const void *a, const void *b) {
    const kept *x = a, *y = b;
    if (isnan(x->loss) || isnan(y->loss))
        return isnan(x->loss) - isnan(y->loss);
    return x->loss != y->loss ? (x->loss > y->loss) - (x->loss < y->loss) : by_newest(b, a);
}

static void choose(kept *list, int64_t count, const folder_end *end) {
    qsort(list, (size_t)count, sizeof *list, by_newest);
    for (int64_t i = 0; i < count; i++)
        list[i].wanted = end->keep.last == 0 || i < end->keep.last || list[i].iteration == end->iteration;
    qsort(list, (size_t)count, sizeof *list, by_best);
    for (int64_t i = 0; i < count && i < end->keep.best; i++)
        list[i].wanted |= !isnan(list[i].loss);
}

static loom_status point(const folder_end *end, kept **list, int64_t *count) {
    LOOM_TRY(loom__checkpoint_set_latest(end->folder, end->iteration));
    LOOM_TRY(list_folder(end->folder, list, count));
    if (*count == 0)
        return LOOM_OK;
    choose(*list, *count, end);
    return isnan((*list)[0].loss) ? LOOM_OK : loom__checkpoint_set_best(end->folder, (*list)[0].iteration);
}

/* Rank 0 says which. */
static loom_status remove_unwanted(loom_fabric *fabric, const folder_end *end, const kept *list, int64_t count) {
    for (int64_t i = 0;; i++) {
        char path[PATH_BYTES];
        int64_t iteration = -1;
        while (i < count && list[i].wanted)
            i++;
        if (i < count)
            iteration = list[i].iteration;
        LOOM_TRY(loom_broadcast(loom_rank_world(fabric->rank), &iteration, 1, LOOM_I64, 0));
        if (iteration < 0)
            return LOOM_OK;
        LOOM_TRY(path_of(end->folder, iteration, path));
        LOOM_TRY(loom_checkpoint_io_remove(loom_fabric_checkpoint_io(fabric), path));
    }
}

static loom_status finish(const loom__save_end *of, loom_fabric *fabric) {
    const folder_end *end = (const folder_end *)of;
    kept *list = NULL;
    int64_t count = 0;
    bool first = loom_rank_index(fabric->rank) == 0;
    loom_status status = loom_agree(loom_rank_world(fabric->rank), first ? point(end, &list, &count) : LOOM_OK);
    if (!status)
        status = remove_unwanted(fabric, end, list, count);
    free(list);
    return status;
}

/* ---- saving */

static loom_status make_folder(const char *folder) {
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be made: %s", folder, strerror(errno));
    return LOOM_OK;
}

static loom_status make_end(const char *folder, int64_t iteration, const loom_keep *keep, folder_end **out) {
    folder_end *end = calloc(1, sizeof *end);
    if (!end)
        return loom_fail(LOOM_ERR_MEMORY, "%s: no memory to save into it", folder);
    end->of.finish = finish;
    snprintf(end->of.what, sizeof end->of.what, "the save of iteration %lld", (long long)iteration);
    snprintf(end->folder, sizeof end->folder, "%s", folder);
    end->iteration = iteration;
    end->keep = *keep;
    *out = end;
    return LOOM_OK;
}

/* The state, and the loss that it was found to have. */
static loom_status start_save(loom_fabric *fabric, const char *path, const loom_state *state, double loss) {
    if (isnan(loss))
        return loom__fabric_start_save(fabric, path, state, NULL, 0);
    loom_value value = {.kind = LOOM_VALUE_FLOAT, .number = loss};
    loom_state with = {.items = calloc((size_t)state->count + 1, sizeof *with.items), .count = state->count + 1};
    loom_status status = with.items ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "%s: no memory to save into it", path);
    if (!(status = loom_agree(loom_rank_world(fabric->rank), status))) {
        if (state->count > 0)
            memcpy(with.items, state->items, (size_t)state->count * sizeof *with.items);
        with.items[state->count] = (loom_state_item){.key = "validation_loss", .value = &value};
        status = loom__fabric_start_save(fabric, path, &with, NULL, 0);
    }
    free(with.items);
    return status;
}

loom_status loom_fabric_save_and_keep(
    loom_fabric *fabric, const char *folder, int64_t iteration, const loom_keep *keep, const loom_state *state) {
    loom_comm *world = loom_rank_world(fabric->rank);
    folder_end *end = NULL;
    char path[PATH_BYTES];
    bool pending;
    if (iteration < 0 || keep->last < 0 || keep->best < 0)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "save: found iteration %lld, keep_last %lld and keep_best %lld, expected numbers from 0",
            (long long)iteration, (long long)keep->last, (long long)keep->best);
    LOOM_TRY(path_of(folder, iteration, path));
    LOOM_TRY(loom_fabric_finalize_saves(fabric, true, &pending));
    LOOM_TRY(loom_agree(world, loom_rank_index(fabric->rank) == 0 ? make_folder(folder) : LOOM_OK));
    LOOM_TRY(loom_agree(world, make_end(folder, iteration, keep, &end)));
    loom_status status = start_save(fabric, path, state, keep->validation_loss);
    if (status) {
        free(end);
        return status;
    }
    fabric->save_end = &end->of;
    return loom_fabric_finalize_saves(fabric, false, &pending);
}

loom_status loom_fabric_save_iteration(
    loom_fabric *fabric, const char *folder, int64_t iteration, int64_t keep_last, const loom_state *state) {
    loom_keep keep = {.last = keep_last, .validation_loss = NAN};
    return loom_fabric_save_and_keep(fabric, folder, iteration, &keep, state);
}
