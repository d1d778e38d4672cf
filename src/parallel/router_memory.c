/* What routers keep beyond a microbatch: how many tokens each expert has got in a step, and what follows from that when
 * the step ends. The invariant: counts are whole numbers, so that their sum over ranks is exact in any order, and every
 * rank moves its copy of a bias to the same bits. */
#include "parallel/common.h"
#include "parallel/experts.h"
#include <stdlib.h>
#include <string.h>

loom_status loom__router_memory_create(int64_t experts, float *bias, bool global, loom__router_memory **out) {
    loom__router_memory *made = calloc(1, sizeof *made);
    if (made && bias)
        made->tokens = calloc((size_t)experts, sizeof *made->tokens);
    if (made && global)
        made->load = calloc((size_t)experts, sizeof *made->load);
    if (!made || (bias && !made->tokens) || (global && !made->load)) {
        loom__router_memory_destroy(made);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the router of %lld experts", (long long)experts);
    }
    made->experts = experts;
    made->bias = bias;
    *out = made;
    return LOOM_OK;
}

void loom__router_memory_destroy(loom__router_memory *memory) {
    if (!memory)
        return;
    free(memory->tokens);
    free(memory->load);
    free(memory);
}

void loom__router_memory_count(loom__router_memory *memory, int64_t tokens, const uint8_t *map) {
    for (int64_t t = 0; memory->tokens && t < tokens; t++)
        for (int64_t e = 0; e < memory->experts; e++)
            memory->tokens[e] += map[t * memory->experts + e];
}

/* One reduction for all layers. */
static loom_status move_biases(
    loom__router_memory *const *memories, int64_t count, loom_comm *group, double rate, double *sums) {
    const int64_t experts = memories[0]->experts;
    for (int64_t i = 0; i < count; i++)
        memcpy(sums + i * experts, memories[i]->tokens, (size_t)experts * sizeof *sums);
    if (loom__group_size(group) > 1)
        LOOM_TRY(loom_all_reduce(group, sums, sums, count * experts, LOOM_F64, LOOM_SUM));
    for (int64_t i = 0; i < count; i++)
        loom__expert_bias_update(experts, sums + i * experts, rate, memories[i]->bias);
    return LOOM_OK;
}

loom_status loom__router_memories_end_step(
    loom__router_memory *const *memories, int64_t count, loom_comm *group, double rate) {
    if (count == 0)
        return LOOM_OK;
    const int64_t experts = memories[0]->experts;
    if (memories[0]->bias) {
        double *sums = malloc((size_t)(count * experts) * sizeof *sums);
        if (!sums)
            return loom_fail(LOOM_ERR_MEMORY, "out of memory for the counts of %lld routers", (long long)count);
        loom_status status = move_biases(memories, count, group, rate, sums);
        loom_comm_free(group, sums);
        LOOM_TRY(status);
    }
    for (int64_t i = 0; i < count; i++) {
        if (memories[i]->tokens)
            memset(memories[i]->tokens, 0, (size_t)experts * sizeof *memories[i]->tokens);
        if (memories[i]->load)
            memset(memories[i]->load, 0, (size_t)experts * sizeof *memories[i]->load);
        memories[i]->calls = 0;
    }
    return LOOM_OK;
}
