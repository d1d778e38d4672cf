/* Where the time of a training run goes: one entry for every operation of every phase.
 *
 * While a rank is measured, each moment of its own thread belongs to exactly one entry: a kernel, a collective of a
 * group, or what remains of the phase ("rest": copies, bookkeeping, allocation, what the user's loop does). So the
 * seconds of all entries add up to the time that passed. Communication that moves on in the background of a kernel is
 * the kernel's time; a collective's time is what its start and its wait take. Nothing is measured, and nothing costs
 * time, on a rank that did not begin. */
#ifndef MEGALOOM_PROFILE_H
#define MEGALOOM_PROFILE_H

#include <megaloom/rank.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(ENUM, name): the parts of a step. */
#define LOOM_PROFILE_PHASE_LIST(X)                                                                                     \
    X(OTHER, "other") /* outside the steps */                                                                          \
    X(DATA, "data")   /* the next microbatch */                                                                        \
    X(FORWARD, "forward")                                                                                              \
    X(LOSS, "loss")                     /* the loss reduction of a microbatch */                                       \
    X(INPUT_GRADIENT, "input gradient") /* backward: the gradients of inputs */                                        \
    X(WEIGHT_GRADIENT, "weight gradient")                                                                              \
    X(REDUCTION, "reduction") /* after the last backward: buckets, partial gradients, the loss */                      \
    X(OPTIMIZER, "optimizer")

typedef enum loom_profile_phase {
#define LOOM_PROFILE_PHASE_ENUM(name, text) LOOM_PROFILE_##name,
    LOOM_PROFILE_PHASE_LIST(LOOM_PROFILE_PHASE_ENUM)
#undef LOOM_PROFILE_PHASE_ENUM
        LOOM_PROFILE_PHASE_COUNT
} loom_profile_phase;

/* "forward", …; "?" for a number that is none. */
LOOM_API const char *loom_profile_phase_name(loom_profile_phase phase);

typedef struct loom_profile_entry {
    loom_profile_phase phase;
    const char *operation; /* "gemm", "all_gather", "rest", …; a constant */
    char group[32];        /* of a collective; "" otherwise */
    int64_t calls;
    double seconds;
    double flops; /* floating point operations of the calls; 0 where they are not counted */
    double bytes; /* of memory that the kernels must read and write, or that a collective's operand has; 0 likewise */
} loom_profile_entry;

typedef struct loom_profile {
    loom_profile_entry *entries; /* the longest first; owned */
    int64_t count;
    double seconds; /* from begin to end */
} loom_profile;

/* Measures this rank from now on. Its kernel table (loom_rank_kernels) becomes one that measures and calls the former.
 * LOOM_ERR_STATE when it is measured already. Not collective. */
LOOM_API loom_status loom_profile_begin(loom_rank *rank);
/* Ends that and hands the result out; free it with loom_profile_free. LOOM_ERR_STATE when nothing is measured. A rank
 * that ends without it forgets what was measured. Not collective. */
LOOM_API loom_status loom_profile_end(loom_rank *rank, loom_profile *profile);
LOOM_API void loom_profile_free(loom_profile *profile); /* NULL is accepted */

/* Share of the seconds that lies in named operations, 0 … 1: all but the "rest" of the phases. */
LOOM_API double loom_profile_named_share(const loom_profile *profile);
/* The table for people, the longest first; entries below a thousandth are joined in the last line. steps: of the
 * measured time, for the milliseconds a step. */
LOOM_API void loom_profile_print(FILE *out, const loom_profile *profile, int64_t steps);
/* The same of every rank as one JSON file, which the group's first member writes: {"steps", "ranks": [{"rank",
 * "seconds", "named_share", "entries": [{"phase", "operation", "group", "calls", "seconds", "share",
 * "flops_per_second", "bytes_per_second"}]}]}; rates that are not known are left out. Collective over the group. */
LOOM_API loom_status loom_profile_write(const char *path, loom_comm *comm, const loom_profile *profile, int64_t steps);

#ifdef __cplusplus
}
#endif
#endif
