/* Which CPUs this process may use, and how ranks share them. */
#ifndef RUNTIME_BINDING_H
#define RUNTIME_BINDING_H

#include <megaloom/types.h>

typedef struct loom__cpus {
    int count;     /* logical CPUs that the process may use */
    int cores;     /* cores they belong to */
    int online;    /* logical CPUs of the machine */
    int *cpu;      /* [count] numbers; one of each core first, then the second of each, … */
    uint64_t hash; /* of the set */
} loom__cpus;

/* Free with loom__cpus_free. */
loom_status loom__cpus_allowed(loom__cpus *cpus);
void loom__cpus_free(loom__cpus *cpus);

/* The CPUs of team thread 0, 1, … of the rank at `place` among `ranks` that share the CPUs, `threads` each; NULL when
 * they do not suffice for all: then nobody is bound. */
const int *loom__cpus_of_rank(const loom__cpus *cpus, int ranks, int place, int threads);

/* Threads a rank when nobody said: cores / ranks, at least 1. */
int loom__cpus_default_threads(const loom__cpus *cpus, int ranks);

#endif
