/* Statistics of routers over the ranks of a step. Each rank adds up what it routes; at the end of a training step one
 * sum over the world makes those of the global batch of it. Invariant: every rank enters that sum with rows for all
 * layers of the model, so that stages and ranks without experts are no case of their own. */
#include "spec/parameter.h"
#include "strategy/strategy.h"
#include <stdlib.h>

static loom_status create(const loom_model_config *config, loom__router_collector **collector) {
    int64_t count = 0, *layers = malloc((size_t)config->num_layers * sizeof *layers + 1);
    if (!layers)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a list of %lld layers", (long long)config->num_layers);
    for (int64_t i = 0; i < config->num_layers; i++)
        if (loom__layer_has_experts(config, i))
            layers[count++] = i;
    loom_status status = LOOM_OK;
    if (count > 0)
        status = loom__router_collector_create(
            layers, count, config->moe.num_moe_experts, config->moe.moe_expert_capacity_factor > 0, collector);
    free(layers);
    return status;
}

loom_status loom_parallel_collect_router_statistics(loom_parallel *parallel, bool on) {
    const loom_model_config *config = loom_parallel_model_config(parallel);
    if (on == (parallel->router_collector != NULL) || !parallel->is_gpt || config->moe.num_moe_experts == 0)
        return LOOM_OK;
    if (on)
        return create(config, &parallel->router_collector);
    loom__routers_forget(parallel);
    return LOOM_OK;
}

const loom_router_statistics *loom_parallel_router_statistics(const loom_parallel *parallel) {
    return parallel->router_statistics;
}

void loom__routers_forget(loom_parallel *parallel) {
    /* The sums are the collector's own, and MPI may have a use for them after a failure. */
    if (!parallel->fabric->rank->endpoint->lent)
        loom__router_collector_destroy(parallel->router_collector);
    parallel->router_collector = NULL;
    parallel->router_statistics = NULL;
}

void loom__routers_begin_step(loom_parallel *parallel) {
    if (parallel->router_collector)
        loom__router_collector_clear(parallel->router_collector);
}

loom_status loom__routers_end_step(loom_parallel *parallel) {
    const loom_fabric *fabric = parallel->fabric;
    int64_t count, sharers = loom_comm_size(fabric->groups[LOOM_GROUP_TP_CP]);
    if (!parallel->router_collector)
        return LOOM_OK;
    double *sums = loom__router_collector_sums(parallel->router_collector, &count);
    LOOM_TRY(loom_all_reduce(loom_rank_world(fabric->rank), sums, sums, count, LOOM_F64, LOOM_SUM));
    parallel->router_statistics = loom__router_collector_finish(parallel->router_collector, sharers);
    return LOOM_OK;
}
