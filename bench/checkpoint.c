/* Saving and loading against the disk. In each round, in turn: the disk's own sequential write (blocks of 8 MiB past
 * the page cache, flushed), a save, the disk's own sequential read, a load (whose files were dropped from the page
 * cache), a copy of the state in memory, and what an asynchronous save keeps its caller waiting. Medians are compared.
 * The state is made directly: TENSORS tensors a rank of fp32, of which each rank holds others.
 *
 *   bench_checkpoint [--mib N] [--ranks N] [--writers N] [--rounds N] [--folder DIR]     (2048, 1, 2, 3, .)
 */
#include "measure.h"
#include "state/chunks.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <megaloom/megaloom.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TENSORS = 24, ROUNDS_MAX = 100, BLOCK = 8 << 20 };
enum { DISK_WRITE, SAVE, DISK_READ, LOAD, COPY, PAUSE, FIRST_PAUSE, KINDS };

typedef struct bench {
    int64_t mib, ranks, writers, rounds;
    const char *folder;
    double seconds[KINDS][ROUNDS_MAX];
    int64_t done;
} bench;

static loom_status failed(const char *path) {
    return loom_fail(LOOM_ERR_IO, "%s: %s", path, strerror(errno));
}

/* ---- the disk by itself */

static loom_status disk(const char *path, int64_t bytes, double *write_seconds, double *read_seconds) {
    char *block = aligned_alloc(4096, BLOCK);
    if (!block)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for a block");
    memset(block, 0x5a, BLOCK);
    double start = seconds_of(CLOCK_MONOTONIC);
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_DIRECT, 0666);
    loom_status status = file < 0 ? failed(path) : LOOM_OK;
    for (int64_t at = 0; at < bytes && !status; at += BLOCK)
        if (write(file, block, BLOCK) != BLOCK)
            status = failed(path);
    if (!status && fsync(file) != 0)
        status = failed(path);
    *write_seconds = seconds_of(CLOCK_MONOTONIC) - start;
    start = seconds_of(CLOCK_MONOTONIC);
    for (int64_t at = 0; at < bytes && !status; at += BLOCK)
        if (pread(file, block, BLOCK, at) != BLOCK)
            status = failed(path);
    *read_seconds = seconds_of(CLOCK_MONOTONIC) - start;
    if (file >= 0)
        close(file);
    unlink(path);
    free(block);
    return status;
}

static void drop_caches(const char *path) {
    DIR *folder = opendir(path);
    for (const struct dirent *entry; folder && (entry = readdir(folder));) {
        int file = openat(dirfd(folder), entry->d_name, O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
            (void)posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
            close(file);
        }
    }
    if (folder)
        closedir(folder);
}

/* ---- one rank */

typedef struct part {
    loom_fabric *fabric;
    char keys[TENSORS][32];
    loom_checkpoint_shard shards[TENSORS];
    loom_checkpoint_content content;
    float *values, *copy; /* [TENSORS][elements] */
    int64_t elements;
} part;

static loom_status make_part(const bench *b, loom_rank *rank, part *p, loom_value_pool *pool) {
    loom_value *common = NULL;
    p->elements = b->mib * (1 << 20) / (b->ranks * TENSORS * (int64_t)sizeof(float));
    p->values = malloc((size_t)(p->elements * TENSORS) * sizeof(float));
    p->copy = malloc((size_t)(p->elements * TENSORS) * sizeof(float));
    if (!p->values || !p->copy)
        return loom_fail(LOOM_ERR_MEMORY, "no memory for a state of %lld MiB", (long long)b->mib);
    for (int64_t i = 0; i < p->elements * TENSORS; i++)
        p->values[i] = p->copy[i] = (float)(i % 1048583);
    for (int64_t i = 0; i < TENSORS; i++) {
        snprintf(p->keys[i], sizeof p->keys[i], "rank%d.tensor%02lld", loom_rank_index(rank), (long long)i);
        p->shards[i] = (loom_checkpoint_shard){.key = p->keys[i],
            .main = true,
            .dtype = LOOM_F32,
            .dims = 1,
            .shape = {p->elements},
            .sizes = {p->elements},
            .data = p->values + i * p->elements};
    }
    LOOM_TRY(loom_value_dict(pool, &common));
    p->content = (loom_checkpoint_content){.shards = p->shards, .shard_count = TENSORS, .common = common};
    return LOOM_OK;
}

static loom_status open_fabric(const bench *b, loom_rank *rank, bool async, part *p) {
    loom_megatron_strategy_config config = loom_megatron_strategy_config_default();
    loom_checkpoint_io_config io_config = loom_checkpoint_io_config_default();
    io_config.storage_writers_per_rank = b->writers;
    io_config.async_save = async;
    loom_checkpoint_io io = loom_checkpoint_io_megatron(&io_config);
    config.checkpoint_io = &io;
    LOOM_TRY(loom_fabric_create(rank, &config, NULL, &p->fabric));
    return loom_fabric_launch(p->fabric);
}

static loom_status take(void *context, int64_t wish, const float *values) {
    const part *p = context;
    memcpy(p->copy + wish * p->elements, values, (size_t)p->elements * sizeof *values);
    return LOOM_OK;
}

static loom_status load(const char *path, part *p) {
    loom_checkpoint *checkpoint = NULL;
    loom__chunk_wish wishes[TENSORS];
    LOOM_TRY(loom_checkpoint_io_load(loom_fabric_checkpoint_io(p->fabric), path, &checkpoint));
    int64_t count = loom_checkpoint_get_info(checkpoint)->tensors, found = 0;
    for (int64_t i = 0; i < count && found < TENSORS; i++)
        if (strcmp(loom_checkpoint_tensor_at(checkpoint, i)->name, p->keys[found]) == 0)
            wishes[found++].tensor = i;
    for (int64_t i = 0; i < TENSORS; i++)
        wishes[i].chunk = 0;
    loom__chunk_source source = {.checkpoint = checkpoint, .direct = true};
    loom_status status = loom__chunks_read(&source, LOOM_OK, wishes, found, take, p);
    loom_checkpoint_close(checkpoint);
    return status;
}

static loom_status compare(const part *p) {
    if (memcmp(p->copy, p->values, (size_t)(p->elements * TENSORS) * sizeof *p->copy) != 0)
        return loom_fail(LOOM_ERR_INTERNAL, "what was loaded is not what was saved");
    return LOOM_OK;
}

/* The time of all ranks together, from when the first begins until the last is done. */
static loom_status timed(loom_comm *world, double *start, double *seconds) {
    LOOM_TRY(loom_barrier(world));
    if (seconds)
        *seconds = seconds_of(CLOCK_MONOTONIC) - *start;
    *start = seconds_of(CLOCK_MONOTONIC);
    return LOOM_OK;
}

static loom_status round_of(bench *b, loom_rank *rank, part *p, const char *path, double seconds[KINDS]) {
    loom_comm *world = loom_rank_world(rank);
    bool first = loom_rank_index(rank) == 0;
    char file[4096];
    double start;
    snprintf(file, sizeof file, "%s/disk-%d", b->folder, (int)getpid());
    LOOM_TRY(loom_agree(world, first ? disk(file, b->mib << 20, &seconds[DISK_WRITE], &seconds[DISK_READ]) : LOOM_OK));
    LOOM_TRY(timed(world, &start, NULL));
    LOOM_TRY(loom_checkpoint_io_save(loom_fabric_checkpoint_io(p->fabric), path, &p->content));
    LOOM_TRY(timed(world, &start, &seconds[SAVE]));
    if (first)
        drop_caches(path);
    LOOM_TRY(timed(world, &start, NULL));
    LOOM_TRY(load(path, p));
    LOOM_TRY(timed(world, &start, &seconds[LOAD]));
    LOOM_TRY(loom_agree(world, compare(p)));
    return loom_checkpoint_io_remove(loom_fabric_checkpoint_io(p->fabric), path);
}

static loom_status pause_of(loom_rank *rank, part *p, const char *path, double *copy, double *seconds) {
    loom_comm *world = loom_rank_world(rank);
    const loom_checkpoint_io *io = loom_fabric_checkpoint_io(p->fabric);
    double start;
    bool pending;
    LOOM_TRY(timed(world, &start, NULL));
    memcpy(p->copy, p->values, (size_t)(p->elements * TENSORS) * sizeof *p->copy);
    LOOM_TRY(timed(world, &start, copy));
    LOOM_TRY(loom_checkpoint_io_save(io, path, &p->content));
    LOOM_TRY(timed(world, &start, seconds));
    LOOM_TRY(loom_checkpoint_io_finalize(io, true, &pending));
    return loom_checkpoint_io_remove(io, path);
}

static loom_status measure(bench *b, loom_rank *rank, part *p, loom_value_pool *pool) {
    char path[4096];
    bool first = loom_rank_index(rank) == 0;
    double seconds[KINDS][ROUNDS_MAX], one[KINDS];
    snprintf(path, sizeof path, "%s/bench-checkpoint-%d", b->folder, (int)getpid());
    LOOM_TRY(make_part(b, rank, p, pool));
    LOOM_TRY(open_fabric(b, rank, false, p));
    for (int64_t i = 0; i < b->rounds; i++) {
        LOOM_TRY(round_of(b, rank, p, path, one));
        for (int k = DISK_WRITE; k <= LOAD; k++)
            seconds[k][i] = one[k];
    }
    loom_fabric_destroy(p->fabric);
    p->fabric = NULL;
    LOOM_TRY(open_fabric(b, rank, true, p));
    for (int64_t i = -1; i < b->rounds; i++) {
        LOOM_TRY(pause_of(rank, p, path, &one[COPY], &one[PAUSE]));
        int64_t at = i < 0 ? 0 : i;
        seconds[COPY][at] = one[COPY];
        seconds[i < 0 ? FIRST_PAUSE : PAUSE][at] = one[PAUSE];
    }
    if (first)
        memcpy(b->seconds, seconds, sizeof seconds);
    return LOOM_OK;
}

static loom_status body(loom_rank *rank, void *argument) {
    part p = {0};
    loom_value_pool *pool = NULL;
    loom_status status = loom_value_pool_create(&pool);
    if (!status)
        status = measure(argument, rank, &p, pool);
    loom_fabric_destroy(p.fabric);
    loom_value_pool_destroy(pool);
    free(p.values);
    free(p.copy);
    return status;
}

/* ---- the table */

static void print(bench *b) {
    double m[KINDS], rate = (double)b->mib * 1.048576;
    for (int k = 0; k < FIRST_PAUSE; k++)
        m[k] = median(b->seconds[k], b->rounds);
    m[FIRST_PAUSE] = b->seconds[FIRST_PAUSE][0];
    printf("%lld MiB, %lld rank(s) of %lld writer(s), medians of %lld rounds\n", (long long)b->mib, (long long)b->ranks,
        (long long)b->writers, (long long)b->rounds);
    printf("disk, sequential write %8.0f MB/s\n", rate / m[DISK_WRITE]);
    printf("save                   %8.0f MB/s  %3.0f%% of the disk  %.2f s\n", rate / m[SAVE],
        100 * m[DISK_WRITE] / m[SAVE], m[SAVE]);
    printf("disk, sequential read  %8.0f MB/s\n", rate / m[DISK_READ]);
    printf("load                   %8.0f MB/s  %3.0f%% of the disk  %.2f s\n", rate / m[LOAD],
        100 * m[DISK_READ] / m[LOAD], m[LOAD]);
    printf("copy in memory         %8.0f MB/s  %.3f s\n", rate / m[COPY], m[COPY]);
    printf("pause of an asynchronous save %.3f s: %.1f%% of the save, %.2f of a copy; the first %.3f s\n", m[PAUSE],
        100 * m[PAUSE] / m[SAVE], m[PAUSE] / m[COPY], m[FIRST_PAUSE]);
}

static int64_t *number_of(bench *b, const char *name) {
    return strcmp(name, "--mib") == 0       ? &b->mib
           : strcmp(name, "--ranks") == 0   ? &b->ranks
           : strcmp(name, "--writers") == 0 ? &b->writers
           : strcmp(name, "--rounds") == 0  ? &b->rounds
                                            : NULL;
}

int main(int argc, char **argv) {
    bench b = {.mib = 2048, .ranks = 1, .writers = 2, .rounds = 3, .folder = "."};
    for (int i = 1; i < argc; i += 2) {
        int64_t *to = number_of(&b, argv[i]);
        if (i + 1 < argc && to)
            *to = atoll(argv[i + 1]);
        else if (i + 1 < argc && strcmp(argv[i], "--folder") == 0)
            b.folder = argv[i + 1];
        else
            return fprintf(stderr, "bench_checkpoint: %s: expected --mib, --ranks, --writers, --rounds or --folder\n",
                       argv[i]),
                   2;
    }
    if (b.mib < 8 || b.mib % 8 || b.ranks < 1 || b.writers < 1 || b.rounds < 1 || b.rounds > ROUNDS_MAX)
        return fprintf(stderr,
                   "bench_checkpoint: expected MiB in multiples of 8, ranks, writers and rounds (at most "
                   "%d) from 1\n",
                   ROUNDS_MAX),
               2;
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    loom_status status = loom_run_local((int)b.ranks, body, &b, &options);
    if (status)
        return fprintf(stderr, "bench_checkpoint: %s\n", loom_error_message()), 1;
    print(&b);
    return 0;
}
