/* The plan's traffic against what runs send: for layouts of each kind the bytes of a step's collectives and messages,
 * as the profile of each rank counts their operands and as rings move them, summed over ranks and of the busiest rank.
 * Numbers that the plan leaves out (counts of rows, losses, norms) are few bytes. */
#include "parallel/plan_support.h"
#include <math.h>
#include <string.h>

#define TENSOR "strategy.tensor_model_parallel_size=2"
#define SEQUENCE TENSOR, "strategy.sequence_parallel=true"
#define STAGES "strategy.pipeline_model_parallel_size=2"
#define CONTEXT "strategy.context_parallel_size=2"
#define SHARDED "strategy.ddp.use_distributed_optimizer=true"
/* Padded to their capacity, experts get rows as evenly as the plan has them. */
#define EXPERTS                                                                                                        \
    "model.num_moe_experts=4", "model.moe_ffn_hidden_size=96", "model.moe_expert_capacity_factor=1",                   \
        "model.moe_pad_expert_input_to_capacity=true"
#define ALL_TO_ALL "model.moe_token_dispatcher_type=alltoall"
#define GATHERED "model.moe_token_dispatcher_type=allgather"

static const char *const common[] = {"steps=2", "model.architecture=llama", "model.num_layers=4",
    "model.hidden_size=64", "model.ffn_hidden_size=128", "model.num_attention_heads=4", "model.num_query_groups=2",
    "model.seq_length=64", "model.vocab_size=256", "data.kind=mock", "data.micro_batch_size=2",
    "data.global_batch_size=16", "optim.lr=1e-3", "export=false"};
enum { COMMON = sizeof common / sizeof *common, MOST_RANKS = 8 };

static const planned_case cases[] = {
    {"tensor", {"ranks=2", TENSOR}},
    {"sequence, bf16", {"ranks=2", SEQUENCE, "precision=bf16-mixed"}},
    {"sequence, recomputed", {"ranks=2", SEQUENCE, "model.recompute=full"}},
    {"tied ends, data", {"ranks=8", TENSOR, STAGES, "model.architecture=gpt2", "model.num_query_groups=4"}},
    {"two chunks", {"ranks=2", STAGES, "strategy.virtual_pipeline_model_parallel_size=2", "model.recompute=full"}},
    {"zero-bubble", {"ranks=4", "strategy.pipeline_model_parallel_size=4", "schedule=zero-bubble"}},
    {"shards, bf16 gradients", {"ranks=4", SHARDED, "precision=bf16-mixed", "precision.grad_reduce_in_fp32=false"}},
    {"shards in two instances", {"ranks=4", SHARDED, "strategy.num_distributed_optimizer_instances=2"}},
    {"ring", {"ranks=4", "strategy.context_parallel_size=4", "precision=bf16-mixed"}},
    {"ring, recomputed", {"ranks=2", CONTEXT, "model.recompute=selective"}},
    {"keys gathered", {"ranks=2", CONTEXT, "model.cp_comm_type=all_gather"}},
    {"heads", {"ranks=2", CONTEXT, "model.cp_comm_type=a2a"}},
    {"two levels", {"ranks=4", "strategy.context_parallel_size=4", "model.cp_comm_type=a2a+p2p",
                       "model.hierarchical_context_parallel_sizes=[2, 2]"}},
    {"a way of each layer, stages",
        {"ranks=8", "strategy.context_parallel_size=4", STAGES, "model.recompute=full",
            "model.cp_comm_type=[a2a+p2p, p2p, all_gather, a2a]", "model.hierarchical_context_parallel_sizes=[2, 2]",
            "model.num_query_groups=4", "precision=bf16-mixed"}},
    {"experts, all-to-all", {"ranks=4", EXPERTS, ALL_TO_ALL, "strategy.expert_model_parallel_size=4"}},
    {"experts, gathered", {"ranks=4", EXPERTS, GATHERED, "strategy.expert_model_parallel_size=4"}},
    {"experts, gathered, recomputed, shards",
        {"ranks=4", EXPERTS, GATHERED, "strategy.expert_model_parallel_size=2", "model.recompute=full", SHARDED}},
    {"slices of experts", {"ranks=4", EXPERTS, ALL_TO_ALL, "strategy.expert_model_parallel_size=2",
                              "strategy.expert_tensor_parallel_size=2"}},
    {"sequence, experts, a shared one",
        {"ranks=4", EXPERTS, GATHERED, SEQUENCE, "strategy.expert_model_parallel_size=2",
            "strategy.expert_tensor_parallel_size=1", "model.moe_shared_expert_intermediate_size=96"}},
    {"the same, layers of experts recomputed",
        {"ranks=4", EXPERTS, GATHERED, SEQUENCE, "strategy.expert_model_parallel_size=2",
            "strategy.expert_tensor_parallel_size=1", "model.moe_shared_expert_intermediate_size=96",
            "model.moe_layer_recompute=true"}},
    {"sequence, experts with biases, a gated shared one",
        {"ranks=4", EXPERTS, GATHERED, SEQUENCE, "strategy.expert_model_parallel_size=2",
            "strategy.expert_tensor_parallel_size=1", "model.moe_shared_expert_intermediate_size=96",
            "model.moe_shared_expert_gate=true", "model.add_bias_linear=true"}},
    {"a shared expert under the messages",
        {"ranks=4", EXPERTS, ALL_TO_ALL, SEQUENCE, "strategy.expert_model_parallel_size=2",
            "strategy.expert_tensor_parallel_size=1", "model.moe_shared_expert_intermediate_size=96",
            "model.moe_shared_expert_overlap=true"}},
    {"experts in slices of all ranks", {"ranks=4", EXPERTS, GATHERED, SEQUENCE, "strategy.expert_model_parallel_size=2",
                                           "strategy.moe_extended_tp=true"}},
};
enum { CASES = sizeof cases / sizeof *cases };

typedef struct sent {
    double bytes[LOOM_PLAN_TRAFFIC_KINDS];
} sent;

/* Which kind a group's operations are of, and between how many ranks; false for what a plan leaves out. */
static bool find_kind(const planned_run *run, const loom_profile_entry *entry, int *kind, double *ranks) {
    const loom_plan *p = run->plan;
    const char *group = entry->group;
    const int64_t *levels = run->config->model.config.parallel.hierarchical_context_parallel_sizes;
    const loom_megatron_strategy_config *strategy = &run->config->strategy;
    int64_t instances = strategy->num_distributed_optimizer_instances, slices = strategy->expert_tensor_parallel_size;
    slices = slices > 0 ? slices : p->tensor * (strategy->moe_extended_tp ? strategy->expert_model_parallel_size : 1);
    bool gathers = strncmp(entry->operation, "all_gather", 10) == 0;
    const struct {
        const char *group;
        int kind;
        int64_t ranks;
    } known[] = {
        {"tp", LOOM_PLAN_TENSOR, p->tensor},
        {"cp", LOOM_PLAN_CONTEXT, p->context},
        {"hcp_l0", LOOM_PLAN_CONTEXT, levels[0]},
        {"hcp_l1", LOOM_PLAN_CONTEXT, levels[1]},
        {"ep", LOOM_PLAN_EXPERT, p->expert},
        {"etp", LOOM_PLAN_EXPERT, slices},
        {"pp", LOOM_PLAN_PIPELINE, p->pipeline},
        {"embd", LOOM_PLAN_EMBEDDING, 2},
        {"dp_cp", gathers ? LOOM_PLAN_PARAMETERS : LOOM_PLAN_GRADIENTS, p->data * p->context},
        {"intra_dp_cp", gathers ? LOOM_PLAN_PARAMETERS : LOOM_PLAN_GRADIENTS, p->data * p->context / instances},
        {"edp", gathers ? LOOM_PLAN_PARAMETERS : LOOM_PLAN_GRADIENTS, p->world / p->pipeline / p->expert / slices},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].group, group) == 0) {
            *kind = known[i].kind;
            *ranks = (double)known[i].ranks;
            return true;
        }
    return false;
}

static loom_status begin(planned_run *run, loom_rank *rank, loom_parallel *parallel) {
    (void)run;
    (void)parallel;
    return loom_profile_begin(rank);
}

static loom_status end(planned_run *run, loom_rank *rank, loom_parallel *parallel, loom_optimizer *optimizer) {
    sent *all = (sent *)run->context + loom_rank_index(rank);
    loom_profile profile;
    (void)parallel;
    (void)optimizer;
    LOOM_TRY(loom_profile_end(rank, &profile));
    *all = (sent){{0}};
    for (int64_t i = 0; i < profile.count; i++) {
        const loom_profile_entry *entry = &profile.entries[i];
        int kind;
        double ranks, part;
        if (!entry->group[0] || !find_kind(run, entry, &kind, &ranks) || strncmp(entry->operation, "receive", 7) == 0)
            continue;
        part = (ranks - 1) / ranks;
        part = strncmp(entry->operation, "send", 4) == 0 ? 1 : part;
        part = strncmp(entry->operation, "all_reduce", 10) == 0 ? 2 * part : part;
        all->bytes[kind] += part * entry->bytes;
    }
    loom_profile_free(&profile);
    return LOOM_OK;
}

static void compare(const planned_run *run, const char *what, int kind, double found, double planned) {
    if (fabs(found - planned) > 0.002 * planned + 1024)
        fail_msg("%s: %s traffic of %s is %.0f bytes, the plan says %.0f", run->name,
            loom_plan_traffic_name((loom_plan_traffic_kind)kind), what, found, planned);
}

static void the_plan_says_what_a_run_sends(void **state) {
    int seen[LOOM_PLAN_TRAFFIC_KINDS] = {0};
    (void)state;
    for (int i = 0; i < CASES; i++) {
        sent ranks[MOST_RANKS];
        planned_run run = {.context = ranks, .prepare = begin, .inspect = end};
        run_planned(common, COMMON, &cases[i], &run);
        for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++) {
            const loom_plan_traffic *t = &run.plan->traffic[kind];
            double sum = 0, most = 0;
            for (int64_t rank = 0; rank < run.config->ranks; rank++) {
                sum += ranks[rank].bytes[kind];
                most = ranks[rank].bytes[kind] > most ? ranks[rank].bytes[kind] : most;
            }
            compare(&run, "all ranks", kind, sum, t->inside + t->across);
            compare(&run, "the busiest rank", kind, most, t->rank);
            seen[kind] += t->rank > 10240;
        }
        forget_planned(&run);
    }
    for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++)
        assert_true(seen[kind] > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_plan_says_what_a_run_sends)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
