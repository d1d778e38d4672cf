/* How a process becomes a rank of an MPI run: communicators of its own, the board that the ranks of a machine share,
 * the groups that every rank has. Invariant: a rank may fail here by itself, so before each collective call all agree
 * whether to go on; nobody waits for one that has gone. */
#include "comm/mpi_world.h"

#if MEGALOOM_MPI
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static loom_status fail(int error) {
    char reason[MPI_MAX_ERROR_STRING];
    int length;
    MPI_Error_string(error, reason, &length);
    return loom_fail(LOOM_ERR_COMM, "MPI reports: %s", reason);
}

/* LOOM_OK when all members bring that; what the others get is said at loom__endpoint_create_mpi. */
static loom_status agree(MPI_Comm comm, loom_status mine, bool *speaks) {
    int rank = 0, size = 1;
    char text[LOOM__MESSAGE] = "";
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    int lowest = size, own = mine == LOOM_OK ? size : rank;
    int error = MPI_Allreduce(&own, &lowest, 1, MPI_INT, MPI_MIN, comm);
    *speaks = error != MPI_SUCCESS || lowest == rank;
    if (error == MPI_SUCCESS && lowest == size)
        return LOOM_OK;
    if (lowest == rank)
        snprintf(text, sizeof text, "%s", loom_error_message());
    if (error == MPI_SUCCESS)
        error = MPI_Bcast(text, (int)sizeof text, MPI_CHAR, lowest, comm);
    if (mine != LOOM_OK)
        return mine;
    return error != MPI_SUCCESS ? fail(error)
                                : loom_fail(LOOM_ERR_ABORTED, "rank %d could not start: %s", lowest, text);
}

static loom_status make_communicators(loom__mpi_world *world, MPI_Comm *node) {
    int error = MPI_Comm_dup(MPI_COMM_WORLD, &world->world);
    if (error == MPI_SUCCESS)
        error = MPI_Comm_set_errhandler(world->world, MPI_ERRORS_RETURN);
    if (error == MPI_SUCCESS)
        error = MPI_Comm_dup(world->world, &world->end);
    if (error == MPI_SUCCESS)
        error = MPI_Comm_split_type(world->world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, node);
    return error == MPI_SUCCESS ? LOOM_OK : fail(error);
}

/* Memory that the ranks of this machine share: a file in memory, which has no name any more when this returns, so that
 * nothing is left behind however the run ends. NULL when a rank of the machine could not have it. */
static loom__board *share_board(MPI_Comm node, int local_rank, size_t bytes) {
    char path[96] = "";
    int file = -1;
    static const char *const folders[] = {"/dev/shm", "/tmp"};
    for (int i = 0; local_rank == 0 && file < 0 && i < 2; i++) {
        snprintf(
            path, sizeof path, "%s/megaloom-%ld-%llx", folders[i], (long)getpid(), (unsigned long long)loom__clock());
        file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        /* Space that is promised now cannot be missing at the first write. */
        if (file >= 0 && posix_fallocate(file, 0, (off_t)bytes) != 0) {
            close(file);
            unlink(path);
            file = -1;
        }
    }
    int error = MPI_Bcast(path, (int)sizeof path, MPI_CHAR, 0, node);
    if (local_rank != 0 && error == MPI_SUCCESS)
        file = open(path, O_RDWR | O_CLOEXEC);
    void *memory = file < 0 ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    int good = memory != MAP_FAILED && error == MPI_SUCCESS, all = 0;
    if (MPI_Allreduce(&good, &all, 1, MPI_INT, MPI_MIN, node) != MPI_SUCCESS)
        all = 0;
    if (file >= 0)
        close(file);
    if (local_rank == 0 && file >= 0)
        unlink(path);
    if (!all && memory != MAP_FAILED)
        munmap(memory, bytes);
    return all ? memory : NULL;
}

/* page_of[rank], by what the ranks of the node are called in the world; names has room for twice the node. */
static loom_status map_pages(const loom__mpi_world *world, MPI_Comm node, int size, int local_size, int *names) {
    MPI_Group node_group, world_group;
    for (int i = 0; i < size; i++)
        world->page_of[i] = -1;
    for (int i = 0; i < local_size; i++)
        names[i] = i;
    int error = MPI_Comm_group(node, &node_group);
    if (error != MPI_SUCCESS)
        return fail(error);
    error = MPI_Comm_group(world->world, &world_group);
    if (error == MPI_SUCCESS) {
        error = MPI_Group_translate_ranks(node_group, local_size, names, world_group, names + local_size);
        MPI_Group_free(&world_group);
    }
    MPI_Group_free(&node_group);
    for (int i = 0; error == MPI_SUCCESS && i < local_size; i++)
        world->page_of[names[local_size + i]] = i;
    return error == MPI_SUCCESS ? LOOM_OK : fail(error);
}

static loom_status open_board(
    loom__endpoint *endpoint, MPI_Comm node, uint64_t affinity, int *names, loom__mpi_place *place) {
    loom__mpi_world *world = endpoint->state;
    MPI_Comm_rank(node, &place->local_rank);
    MPI_Comm_size(node, &place->local_size);
    world->board_bytes = loom__board_bytes(place->local_size);
    endpoint->board = share_board(node, place->local_rank, world->board_bytes);
    if (!endpoint->board)
        return loom_fail(
            LOOM_ERR_IO, "the ranks of this machine could not share %zu bytes in /dev/shm or /tmp", world->board_bytes);
    LOOM_TRY(map_pages(world, node, endpoint->size, place->local_size, names));
    endpoint->page_of = world->page_of;
    endpoint->page = &endpoint->board->page[place->local_rank];
    if (place->local_rank == 0)
        endpoint->board->pages = place->local_size;
    loom__page_open(endpoint->page, endpoint->rank);
    atomic_store_explicit(&endpoint->page->affinity, affinity, memory_order_relaxed);
    return LOOM_OK;
}

static bool all_have(const loom__board *board, int pages, uint64_t affinity) {
    for (int i = 0; i < pages; i++)
        if (atomic_load_explicit(&board->page[i].affinity, memory_order_relaxed) != affinity)
            return false;
    return true;
}

static loom_status make_groups(loom__endpoint *endpoint, int *all) {
    for (int i = 0; i < endpoint->size; i++)
        all[i] = i;
    LOOM_TRY(loom__group_create(endpoint, "world", all, endpoint->size, &endpoint->world));
    return loom__group_create(endpoint, "end of the run", all, endpoint->size, &endpoint->end);
}

loom_status loom__endpoint_create_mpi(const loom__endpoint_options *options, loom_status mine, size_t chunk_bytes,
    uint64_t affinity, loom__mpi_place *place, bool *speaks, loom__endpoint **out) {
    int rank = 0, size = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm node = MPI_COMM_NULL;
    loom__endpoint *endpoint = calloc(1, sizeof *endpoint);
    loom__mpi_world *world = calloc(1, sizeof *world);
    int *page_of = malloc((size_t)size * sizeof *page_of), *names = malloc(2 * (size_t)size * sizeof *names);
    bool room = endpoint && world && page_of && names;
    if (mine == LOOM_OK && !room)
        mine = loom_fail(LOOM_ERR_MEMORY, "out of memory for the start of MPI");
    loom_status status = agree(MPI_COMM_WORLD, mine, speaks);
    if (!room || status != LOOM_OK) {
        free(endpoint);
        free(world);
        free(page_of);
        free(names);
        return status;
    }
    /* An odd limit would cut elements, which is harmless: messages are bytes. */
    *world = (loom__mpi_world){.world = MPI_COMM_NULL,
        .end = MPI_COMM_NULL,
        .chunk = chunk_bytes > 0 && chunk_bytes < (size_t)INT_MAX ? chunk_bytes : (size_t)1 << 30,
        .page_of = page_of};
    *endpoint = (loom__endpoint){.rank = rank,
        .size = size,
        .backend = &loom__mpi_backend,
        .timeout = options->timeout,
        .limit = options->timeout,
        .oversubscribed = options->oversubscribed,
        .state = world};
    status = agree(MPI_COMM_WORLD, make_communicators(world, &node), speaks);
    if (status != LOOM_OK) /* not all have them: nobody frees them */
        world->world = world->end = node = MPI_COMM_NULL;
    else
        status = agree(world->world, open_board(endpoint, node, affinity, names, place), speaks);
    if (status == LOOM_OK) {
        place->same_cores = all_have(endpoint->board, place->local_size, affinity);
        status = agree(world->world, make_groups(endpoint, names), speaks);
    }
    if (node != MPI_COMM_NULL)
        MPI_Comm_free(&node);
    free(names);
    if (status != LOOM_OK) {
        loom__endpoint_destroy(endpoint);
        return status;
    }
    *out = endpoint;
    return LOOM_OK;
}

#else

loom_status loom__endpoint_create_mpi(const loom__endpoint_options *options, loom_status mine, size_t chunk_bytes,
    uint64_t affinity, loom__mpi_place *place, bool *speaks, loom__endpoint **endpoint) {
    (void)options;
    (void)mine;
    (void)chunk_bytes;
    (void)affinity;
    (void)place;
    (void)speaks;
    (void)endpoint;
    return loom_fail(LOOM_ERR_UNSUPPORTED, "this build of Megaloom has no MPI (configure with -DMEGALOOM_MPI=ON)");
}

#endif
