/* The chain of checkpoint I/Os of a rank. Each link is the fabric's copy, and points to the next one, so that wrappers
 * which are shared by the ranks of a process still lead each rank to its own Megatron I/O. The invariant: links [0,
 * io_ready) from the end have been set up, and those are torn down, outermost first. */
#include "strategy/strategy.h"
#include <megaloom/checkpoint_io.h>
#include <stdlib.h>

enum { LINKS_MAX = 16 };

static loom_status check_link(const loom_checkpoint_io *io) {
    const char *lacks = NULL;
    if (!io->wraps)
        lacks = !io->save ? "save" : !io->load ? "load" : !io->remove ? "remove" : NULL;
    if (lacks)
        return loom_fail(LOOM_ERR_CONFIG,
            "strategy.checkpoint_io: %s has no function %s, which only a wrapper may leave out",
            io->name ? io->name : "(no name)", lacks);
    if (!io->wraps && io->checkpoint_io)
        return loom_fail(LOOM_ERR_CONFIG,
            "strategy.checkpoint_io: %s has a checkpoint_io inside but wraps is false; expected true",
            io->name ? io->name : "(no name)");
    return LOOM_OK;
}

/* One behind another in `links`, the last of which wraps nothing. */
static loom_status list_links(const loom_checkpoint_io *given, loom_checkpoint_io links[LINKS_MAX], int *count) {
    bool more = true;
    for (*count = 0; more; ++*count) {
        if (*count == LINKS_MAX)
            return loom_fail(LOOM_ERR_CONFIG,
                "strategy.checkpoint_io: found more than %d wrappers around each other, or one inside of itself",
                LINKS_MAX - 1);
        links[*count] = given ? *given : loom_checkpoint_io_megatron(NULL);
        LOOM_TRY(check_link(&links[*count]));
        more = links[*count].wraps;
        given = links[*count].checkpoint_io;
    }
    return LOOM_OK;
}

loom_status loom__fabric_open_io(loom_fabric *fabric) {
    loom_checkpoint_io links[LINKS_MAX];
    int count = 0;
    LOOM_TRY(list_links(fabric->config.checkpoint_io, links, &count));
    fabric->io = calloc((size_t)count, sizeof *fabric->io);
    if (!fabric->io)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a checkpoint I/O");
    fabric->io_count = count;
    fabric->config.checkpoint_io = NULL; /* copied, and not the caller's any more */
    for (int i = 0; i < count; i++) {
        fabric->io[i] = links[i];
        fabric->io[i].checkpoint_io = i + 1 < count ? &fabric->io[i + 1] : NULL;
    }
    for (int i = count - 1; i >= 0; i--) {
        if (fabric->io[i].setup)
            LOOM_TRY(fabric->io[i].setup(&fabric->io[i], fabric));
        fabric->io_ready++;
    }
    return LOOM_OK;
}

void loom__fabric_close_io(loom_fabric *fabric) {
    for (int i = fabric->io_count - fabric->io_ready; i < fabric->io_count; i++)
        if (fabric->io[i].teardown)
            fabric->io[i].teardown(&fabric->io[i]);
    free(fabric->io);
    fabric->io = NULL;
    fabric->io_count = fabric->io_ready = 0;
}

const loom_checkpoint_io *loom_fabric_checkpoint_io(const loom_fabric *fabric) {
    return &fabric->io[0];
}

const loom_checkpoint_io *loom_fabric_unwrapped_checkpoint_io(const loom_fabric *fabric) {
    return &fabric->io[fabric->io_count - 1];
}

loom_status loom_checkpoint_io_save(
    const loom_checkpoint_io *io, const char *path, const loom_checkpoint_content *content) {
    while (!io->save)
        io = io->checkpoint_io;
    return io->save(io, path, content);
}

loom_status loom_checkpoint_io_finalize(const loom_checkpoint_io *io, bool blocking, bool *pending) {
    while (io && !io->finalize)
        io = io->checkpoint_io;
    *pending = false;
    return io ? io->finalize(io, blocking, pending) : LOOM_OK;
}

loom_status loom_checkpoint_io_load(const loom_checkpoint_io *io, const char *path, loom_checkpoint **checkpoint) {
    while (!io->load)
        io = io->checkpoint_io;
    return io->load(io, path, checkpoint);
}

loom_status loom_checkpoint_io_remove(const loom_checkpoint_io *io, const char *path) {
    while (!io->remove)
        io = io->checkpoint_io;
    return io->remove(io, path);
}
