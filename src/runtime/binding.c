/* The CPUs we may use are those of the scheduler's mask, not those of the machine: a launcher or a container may have
 * given us a part. hwloc tells which of them share a core. Invariant: two ranks never get the same CPU, and a second
 * hardware thread of a core is given out only when every core has work. */
#include "runtime/binding.h"
#include "base/random.h"
#include "base/team.h"
#include <errno.h>
#include <hwloc.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* For CPUs in the order of their numbers: which place the CPU has in its core (0 for the first we may use). */
static bool places_in_cores(const loom__cpus *cpus, int *place) {
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology) != 0)
        return false;
    hwloc_topology_set_all_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_NONE);
    hwloc_topology_set_type_filter(topology, HWLOC_OBJ_CORE, HWLOC_TYPE_FILTER_KEEP_ALL);
    bool good = hwloc_topology_load(topology) == 0;
    for (int i = 0; good && i < cpus->count; i++) {
        hwloc_obj_t unit = hwloc_get_pu_obj_by_os_index(topology, (unsigned)cpus->cpu[i]);
        hwloc_obj_t core = unit ? hwloc_get_ancestor_obj_by_type(topology, HWLOC_OBJ_CORE, unit) : NULL;
        place[i] = 0;
        for (int j = 0; core && j < i; j++)
            if (hwloc_bitmap_isset(core->cpuset, (unsigned)cpus->cpu[j]))
                place[i]++;
    }
    hwloc_topology_destroy(topology);
    return good;
}

loom_status loom__cpus_allowed(loom__cpus *out) {
    size_t bytes;
    cpu_set_t *mask = loom__cpus_of_thread(&bytes);
    if (!mask)
        return loom_fail(LOOM_ERR_IO, "the CPUs that this process may use cannot be read: %s", strerror(errno));
    loom__cpus cpus = {.count = CPU_COUNT_S(bytes, mask), .online = (int)sysconf(_SC_NPROCESSORS_ONLN)};
    cpus.cpu = malloc((size_t)cpus.count * sizeof *cpus.cpu);
    int *place = malloc((size_t)cpus.count * sizeof *place), *ordered = malloc((size_t)cpus.count * sizeof *ordered);
    if (!cpus.cpu || !place || !ordered) {
        CPU_FREE(mask);
        free(cpus.cpu);
        free(place);
        free(ordered);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a list of %d CPUs", cpus.count);
    }
    cpus.hash = LOOM__HASH_BEGIN;
    for (int cpu = 0, n = 0; n < cpus.count; cpu++) {
        if (!CPU_ISSET_S((size_t)cpu, bytes, mask))
            continue;
        cpus.cpu[n++] = cpu;
        cpus.hash = loom__hash_bytes(cpus.hash, &cpu, sizeof cpu);
    }
    CPU_FREE(mask);
    if (!places_in_cores(&cpus, place))
        memset(place, 0, (size_t)cpus.count * sizeof *place);
    int filled = 0;
    for (int level = 0; filled < cpus.count; level++) {
        for (int i = 0; i < cpus.count; i++)
            if (place[i] == level)
                ordered[filled++] = cpus.cpu[i];
        if (level == 0)
            cpus.cores = filled;
    }
    free(place);
    free(cpus.cpu);
    cpus.cpu = ordered;
    *out = cpus;
    return LOOM_OK;
}

void loom__cpus_free(loom__cpus *cpus) {
    free(cpus->cpu);
    cpus->cpu = NULL;
}

const int *loom__cpus_of_rank(const loom__cpus *cpus, int ranks, int place, int threads) {
    if ((int64_t)ranks * threads > cpus->count)
        return NULL;
    return cpus->cpu + (int64_t)place * threads;
}

int loom__cpus_default_threads(const loom__cpus *cpus, int ranks) {
    return cpus->cores / ranks > 1 ? cpus->cores / ranks : 1;
}
