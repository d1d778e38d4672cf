/* The chain of checkpoint I/Os of a rank, and saves that it does in the background. Each link is the fabric's copy, and
 * points to the next one, so that wrappers which are shared by the ranks of a process still lead each rank to its own
 * Megatron I/O. The invariant: links [0, io_ready) from the end have been set up, and those are torn down, outermost
 * first. */
#include "optim/optim.h"
#include "strategy/megatron_io.h"
#include <megaloom/checkpoint_io.h>
#include <megaloom/state.h>
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

loom_status loom_fabric_finalize_saves(loom_fabric *fabric, bool blocking, bool *pending) {
    loom_status status = loom_checkpoint_io_finalize(loom_fabric_checkpoint_io(fabric), blocking, pending);
    if (!status && *pending)
        return LOOM_OK;
    loom__save_end *end = fabric->save_end;
    fabric->save_end = NULL;
    *pending = false;
    if (!status && end)
        status = end->finish(end, fabric);
    else if (status && end)
        status = loom_fail_context(status, "%s has failed: ", end->what);
    free(end);
    return status;
}

/* What one of `holders` ranks that have the same writes of it: its share, or the first one all of it. */
static size_t part_of(bool shared, int64_t rank, int64_t holders, size_t bytes) {
    return shared ? bytes / (size_t)holders : rank < 1 ? bytes : 0;
}

/* Bytes of what an optimizer has of a parameter, an element: its arrays, and the values that it updates. */
static size_t state_size(const loom__ddp_view *view, const loom__optimizer_state *state) {
    size_t bytes = view->master || view->sharded ? sizeof *view->master : 0;
    for (int i = 0; i < state->count; i++)
        bytes += loom_dtype_size(state->arrays[i].dtype);
    return bytes;
}

/* Of the elements that an optimizer has of a place, those before `owned`. */
static int64_t owned_of_part(const loom__ddp_place *place, const loom__ddp_part *part, int64_t owned) {
    int64_t left = place->start + owned - part->start;
    return left < 0 ? 0 : left < part->count ? left : part->count;
}

size_t loom__expected_save(const loom_parallel *parallel, const loom_optimizer *optimizer, bool shared) {
    const loom__ddp_view *view = loom__ddp_view_of(parallel->ddp);
    size_t weight = loom_dtype_size(view->dtype), state = state_size(view, loom__optimizer_state_of(optimizer));
    size_t bytes = 0;
    for (int64_t i = 0; i < view->place_count; i++) {
        const loom_parameter *parameter = view->parameters[i];
        const loom__ddp_share *share = &view->share[parameter->expert_parallel ? LOOM__DDP_EXPERT : LOOM__DDP_DENSE];
        int64_t rank = loom_comm_rank(share->group), replicas = loom_comm_size(share->group);
        int64_t updated = owned_of_part(&view->places[i], &view->parts[i], parameter->owned);
        bytes += part_of(shared, rank, replicas, (size_t)parameter->owned * weight);
        bytes += part_of(shared, rank / share->shards, replicas / share->shards, (size_t)updated * state);
    }
    return bytes;
}

void loom__fabric_expect_save(loom_fabric *fabric, const loom_parallel *parallel, const loom_optimizer *optimizer) {
    const loom_checkpoint_io *io = loom_fabric_unwrapped_checkpoint_io(fabric);
    const loom_checkpoint_io_config *config = loom__megatron_io_config(io);
    if (!config || !config->async_save)
        return;
    size_t bytes = loom__expected_save(parallel, optimizer, config->parallel_save);
    /* Whole chunks are shared out, so that some rank has more than its part. */
    loom__megatron_io_prepare(io, bytes + bytes / 16);
}
