/* A team of threads that share one counter of items. Between runs the workers spin briefly and then sleep on a futex;
 * the generation number is what they wait for. Invariant: a worker touches a run's fields only between seeing its
 * generation and counting itself finished, and the owner changes them only when all have finished. */
#include "base/team.h"
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { SPINS = 2000, SCRATCH_ALIGNMENT = 64, LARGEST_SET = 1 << 16 };

typedef struct scratch_block {
    void *memory;
    size_t bytes;
} scratch_block;

typedef struct team_worker {
    loom_team *team;
    int index;
    pthread_t thread;
    scratch_block scratch;
    char apart[64]; /* keeps two workers' scratch fields off one cache line */
} team_worker;

struct loom_team {
    int size;
    team_worker *workers;
    loom_team_function function;
    void *argument;
    int64_t items;
    void (*progress)(void *context);
    void *progress_context;
    void *watcher;
    uint32_t saved_control;
    cpu_set_t *saved_cpus; /* of the owner, when the team has bound it */
    size_t saved_cpus_bytes;
    _Alignas(64) _Atomic int64_t next;
    _Alignas(64) _Atomic uint32_t generation;
    _Alignas(64) _Atomic uint32_t running; /* workers that have not finished this run */
    _Alignas(64) _Atomic uint32_t sleepers;
    _Atomic bool ending;
};

static _Thread_local struct teamless { scratch_block scratch; } teamless;

static pthread_key_t teamless_key;
static pthread_once_t teamless_once = PTHREAD_ONCE_INIT;

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

/* Denormals cost a hundred times a normal operation and carry nothing a training run needs. */
static uint32_t flush_denormals(void) {
#if defined(__x86_64__)
    uint32_t saved = _mm_getcsr();
    _mm_setcsr(saved | 0x8040u);
    return saved;
#else
    return 0;
#endif
}

static void restore_control(uint32_t saved) {
#if defined(__x86_64__)
    _mm_setcsr(saved);
#else
    (void)saved;
#endif
}

static void take_items(loom_team *team, int index) {
    for (;;) {
        int64_t item = atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed);
        if (item >= team->items)
            return;
        team->function(team->argument, item, index);
        if (index == 0 && team->progress)
            team->progress(team->progress_context);
    }
}

static void *worker_main(void *argument) {
    team_worker *self = argument;
    loom_team *team = self->team;
    uint32_t seen = 0;
    flush_denormals();
    for (;;) {
        uint32_t now;
        for (int spin = 0; (now = atomic_load_explicit(&team->generation, memory_order_acquire)) == seen; spin++) {
            if (spin < SPINS) {
                relax();
            } else {
                atomic_fetch_add_explicit(&team->sleepers, 1, memory_order_seq_cst);
                if (atomic_load_explicit(&team->generation, memory_order_seq_cst) == seen)
                    futex_wait(&team->generation, seen);
                atomic_fetch_sub_explicit(&team->sleepers, 1, memory_order_seq_cst);
            }
        }
        seen = now;
        if (atomic_load_explicit(&team->ending, memory_order_relaxed))
            return NULL;
        take_items(team, self->index);
        atomic_fetch_sub_explicit(&team->running, 1, memory_order_release);
    }
}

static void new_generation(loom_team *team) {
    atomic_fetch_add_explicit(&team->generation, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&team->sleepers, memory_order_seq_cst) > 0)
        futex_wake_all(&team->generation);
}

cpu_set_t *loom__cpus_of_thread(size_t *bytes) {
    for (int cpus = 1024; cpus <= LARGEST_SET; cpus *= 2) {
        cpu_set_t *set = CPU_ALLOC((size_t)cpus);
        if (!set)
            return NULL;
        *bytes = CPU_ALLOC_SIZE((size_t)cpus);
        CPU_ZERO_S(*bytes, set);
        if (sched_getaffinity(0, *bytes, set) == 0)
            return set;
        int error = errno;
        CPU_FREE(set);
        errno = error;
        if (error != EINVAL)
            return NULL;
    }
    return NULL;
}

/* A binding that the system refuses costs speed, not correctness. */
static void bind_thread(pthread_t thread, int cpu) {
    cpu_set_t *set = CPU_ALLOC((size_t)cpu + 1);
    size_t bytes = CPU_ALLOC_SIZE((size_t)cpu + 1);
    if (!set)
        return;
    CPU_ZERO_S(bytes, set);
    CPU_SET_S((size_t)cpu, bytes, set);
    (void)pthread_setaffinity_np(thread, bytes, set);
    CPU_FREE(set);
}

loom_status loom__team_create(int threads, const int *cpus, loom_team **out) {
    if (threads < 1)
        return loom_fail(LOOM_ERR_ARGUMENT, "threads of a team: found %d, expected at least 1", threads);
    loom_team *team = aligned_alloc(64, (sizeof *team + 63) / 64 * 64);
    team_worker *workers = calloc((size_t)threads, sizeof *workers);
    if (!team || !workers) {
        free(team);
        free(workers);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a team of %d threads", threads);
    }
    memset(team, 0, sizeof *team);
    team->size = threads;
    team->workers = workers;
    for (int i = 0; i < threads; i++) {
        workers[i].team = team;
        workers[i].index = i;
    }
    /* Before anything can fail: destroy puts it back. */
    team->saved_control = flush_denormals();
    for (int i = 1; i < threads; i++) {
        int error = pthread_create(&workers[i].thread, NULL, worker_main, &workers[i]);
        if (error) {
            team->size = i;
            loom__team_destroy(team);
            return loom_fail(
                LOOM_ERR_MEMORY, "thread %d of a team of %d could not be started: %s", i, threads, strerror(error));
        }
        if (cpus)
            bind_thread(workers[i].thread, cpus[i]);
    }
    /* An owner that could not be given its CPUs back is not bound. */
    if (cpus)
        team->saved_cpus = loom__cpus_of_thread(&team->saved_cpus_bytes);
    if (team->saved_cpus)
        bind_thread(pthread_self(), cpus[0]);
    *out = team;
    return LOOM_OK;
}

void loom__team_destroy(loom_team *team) {
    if (!team)
        return;
    atomic_store_explicit(&team->ending, true, memory_order_relaxed);
    new_generation(team);
    for (int i = 1; i < team->size; i++)
        pthread_join(team->workers[i].thread, NULL);
    for (int i = 0; i < team->size; i++)
        free(team->workers[i].scratch.memory);
    restore_control(team->saved_control);
    if (team->saved_cpus)
        (void)pthread_setaffinity_np(pthread_self(), team->saved_cpus_bytes, team->saved_cpus);
    CPU_FREE(team->saved_cpus);
    free(team->workers);
    free(team);
}

void loom__team_unbind_thread(const loom_team *team) {
    if (team && team->saved_cpus)
        (void)pthread_setaffinity_np(pthread_self(), team->saved_cpus_bytes, team->saved_cpus);
}

void loom__team_set_progress(loom_team *team, void (*progress)(void *context), void *context) {
    team->progress = progress;
    team->progress_context = context;
}

void loom__team_set_watcher(loom_team *team, void *watcher) {
    team->watcher = watcher;
}

void *loom__team_watcher(const loom_team *team) {
    return team->watcher;
}

void loom_team_run(loom_team *team, loom_team_function function, void *argument, int64_t items) {
    if (!team) {
        for (int64_t item = 0; item < items; item++)
            function(argument, item, 0);
        return;
    }
    team->function = function;
    team->argument = argument;
    team->items = items;
    atomic_store_explicit(&team->next, 0, memory_order_relaxed);
    if (team->size == 1 || items < 2) {
        take_items(team, 0);
        return;
    }
    atomic_store_explicit(&team->running, (uint32_t)team->size - 1, memory_order_relaxed);
    new_generation(team);
    take_items(team, 0);
    for (int spin = 0; atomic_load_explicit(&team->running, memory_order_acquire) > 0; spin++) {
        if (team->progress)
            team->progress(team->progress_context);
        if (spin < SPINS)
            relax();
        else
            sched_yield();
    }
}

int loom_team_size(const loom_team *team) {
    return team ? team->size : 1;
}

static void *scratch_of(scratch_block *scratch, size_t bytes) {
    if (bytes > scratch->bytes) {
        size_t rounded = (bytes + SCRATCH_ALIGNMENT - 1) / SCRATCH_ALIGNMENT * SCRATCH_ALIGNMENT;
        void *memory = rounded >= bytes ? aligned_alloc(SCRATCH_ALIGNMENT, rounded) : NULL;
        if (!memory)
            return NULL;
        free(scratch->memory);
        scratch->memory = memory;
        scratch->bytes = rounded;
    }
    return scratch->memory;
}

static void free_teamless(void *memory) {
    (void)memory;
    free(teamless.scratch.memory);
    teamless.scratch = (scratch_block){0};
}

static void free_teamless_at_exit(void) {
    free_teamless(NULL);
}

static void make_teamless_key(void) {
    pthread_key_create(&teamless_key, free_teamless);
    atexit(free_teamless_at_exit);
}

void *loom_team_scratch(loom_team *team, int worker, size_t bytes) {
    if (team)
        return scratch_of(&team->workers[worker].scratch, bytes);
    pthread_once(&teamless_once, make_teamless_key);
    pthread_setspecific(teamless_key, &teamless);
    return scratch_of(&teamless.scratch, bytes);
}
