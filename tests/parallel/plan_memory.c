/* The plan's memory against what runs allocate: for some forty layouts each rank's buffers of weights, gradients and
 * optimizer state, and the high-water mark of its allocator, within 5 % of what the plan says of its stage; where one
 * stage has the whole model, what waits for a backward, too. */
#include "ddp/ddp.h"
#include "parallel/plan_support.h"
#include "strategy/strategy.h"
#include <math.h>

/* Padded to their capacity, experts get rows as evenly as the plan has them. */
#define EXPERTS                                                                                                        \
    "model.num_moe_experts=4", "model.moe_ffn_hidden_size=352", "model.moe_expert_capacity_factor=1",                  \
        "model.moe_pad_expert_input_to_capacity=true"

#define BIASES "model.add_bias_linear=true"

static const char *const common[] = {"steps=2", "model.architecture=llama", "model.num_layers=8",
    "model.hidden_size=128", "model.ffn_hidden_size=352", "model.num_attention_heads=8", "model.num_query_groups=4",
    "model.seq_length=128", "model.vocab_size=1000", "data.kind=mock", "data.micro_batch_size=2", "optim.lr=1e-3",
    "export=false"};
enum { COMMON = sizeof common / sizeof *common };

static const planned_case cases[] = {
    {"one rank", {"ranks=1"}},
    {"tensor", {"ranks=2", "strategy.tensor_model_parallel_size=2"}},
    {"sequence", {"ranks=2", "strategy.tensor_model_parallel_size=2", "strategy.sequence_parallel=true"}},
    {"pipeline", {"ranks=2", "strategy.pipeline_model_parallel_size=2", "data.global_batch_size=16"}},
    {"interleaved", {"ranks=2", "strategy.pipeline_model_parallel_size=2",
                        "strategy.virtual_pipeline_model_parallel_size=2", "data.global_batch_size=16"}},
    {"zero-bubble",
        {"ranks=4", "strategy.pipeline_model_parallel_size=4", "data.global_batch_size=16", "schedule=zero-bubble"}},
    {"data", {"ranks=4", "data.global_batch_size=16", "strategy.ddp.overlap_grad_reduce=true"}},
    {"distributed optimizer", {"ranks=4", "strategy.ddp.use_distributed_optimizer=true",
                                  "strategy.ddp.overlap_grad_reduce=true", "strategy.ddp.overlap_param_gather=true"}},
    {"full recomputation", {"ranks=2", "strategy.tensor_model_parallel_size=2", "strategy.sequence_parallel=true",
                               "model.recompute=full"}},
    {"selective recomputation", {"ranks=1", "model.recompute=selective"}},
    {"bf16", {"ranks=2", "precision=bf16-mixed", "strategy.ddp.use_distributed_optimizer=true",
                 "precision.grad_reduce_in_fp32=false"}},
    {"all of it",
        {"ranks=8", "precision=bf16-mixed", "strategy.tensor_model_parallel_size=2", "strategy.sequence_parallel=true",
            "strategy.pipeline_model_parallel_size=2", "strategy.virtual_pipeline_model_parallel_size=2",
            "strategy.ddp.use_distributed_optimizer=true", "data.global_batch_size=32", "model.hidden_dropout=0.1"}},
    {"gpt2, dropout", {"ranks=2", "strategy.tensor_model_parallel_size=2", "model.architecture=gpt2",
                          "model.num_query_groups=8", "model.hidden_dropout=0.1", "model.attention_dropout=0.1"}},
    {"context, ring", {"ranks=2", "strategy.context_parallel_size=2"}},
    {"context, gathered, bf16",
        {"ranks=2", "strategy.context_parallel_size=2", "model.cp_comm_type=all_gather", "precision=bf16-mixed"}},
    {"context, a way of each layer", {"ranks=4", "strategy.context_parallel_size=4", "model.num_layers=6",
                                         "model.cp_comm_type=[p2p, a2a, all_gather, p2p, a2a+p2p, a2a]",
                                         "model.hierarchical_context_parallel_sizes=[2, 2]"}},
    {"context, a way of each layer, gathers first, in halves",
        {"ranks=4", "strategy.context_parallel_size=2", "strategy.pipeline_model_parallel_size=2", "model.num_layers=6",
            "schedule=zero-bubble", "model.cp_comm_type=[all_gather, a2a, a2a, p2p, all_gather, a2a]"}},
    {"context, the worst moment in an early layer",
        {"ranks=8", "strategy.context_parallel_size=8", "model.num_layers=2", "model.num_query_groups=8",
            "model.vocab_size=64", "model.cp_comm_type=[all_gather, p2p]"}},
    {"context, by heads", {"ranks=2", "strategy.context_parallel_size=2", "model.cp_comm_type=a2a"}},
    {"context, ring, bf16, selective recomputation",
        {"ranks=2", "strategy.context_parallel_size=2", "precision=bf16-mixed", "model.recompute=selective"}},
    {"context in two levels with tensor and pipeline",
        {"ranks=16", "strategy.context_parallel_size=4", "model.cp_comm_type=a2a+p2p",
            "model.hierarchical_context_parallel_sizes=[2, 2]", "strategy.tensor_model_parallel_size=2",
            "strategy.sequence_parallel=true", "strategy.pipeline_model_parallel_size=2", "data.global_batch_size=16"}},
    {"experts on one rank", {"ranks=1", EXPERTS}},
    {"experts over 2", {"ranks=2", EXPERTS, "strategy.expert_model_parallel_size=2"}},
    {"slices of experts", {"ranks=2", EXPERTS, "strategy.expert_tensor_parallel_size=2"}},
    {"tensor x experts",
        {"ranks=4", EXPERTS, "strategy.tensor_model_parallel_size=2", "strategy.sequence_parallel=true",
            "strategy.expert_model_parallel_size=2", "strategy.ddp.use_distributed_optimizer=true"}},
    {"experts in bf16, a shared one, layers without, recomputed",
        {"ranks=4", EXPERTS, "strategy.expert_model_parallel_size=2", "precision=bf16-mixed", "model.moe_layer_freq=2",
            "model.moe_shared_expert_intermediate_size=352", "model.recompute=full"}},
    {"a gated shared expert in some layers",
        {"ranks=2", EXPERTS, "strategy.tensor_model_parallel_size=2", "strategy.sequence_parallel=true",
            "model.moe_layer_freq=([0]*1+[1]*2+[0])*2", "model.moe_shared_expert_intermediate_size=352",
            "model.moe_shared_expert_gate=true"}},
    {"a gated shared expert under the messages",
        {"ranks=4", EXPERTS, "strategy.tensor_model_parallel_size=2", "strategy.sequence_parallel=true",
            "strategy.expert_model_parallel_size=2", "model.moe_shared_expert_intermediate_size=352",
            "model.moe_shared_expert_gate=true", "model.moe_token_dispatcher_type=alltoall",
            "model.moe_shared_expert_overlap=true", "model.num_layers=2", "model.vocab_size=64"}},
    {"a shared expert under the messages, recomputed, in bf16",
        {"ranks=4", EXPERTS, "strategy.expert_model_parallel_size=4", "model.moe_shared_expert_intermediate_size=704",
            "model.moe_token_dispatcher_type=alltoall", "model.moe_shared_expert_overlap=true", "model.num_layers=1",
            "model.vocab_size=64", "model.recompute=full", "precision=bf16-mixed"}},
    {"a gated shared expert in bf16",
        {"ranks=2", EXPERTS, "strategy.expert_model_parallel_size=2", "precision=bf16-mixed",
            "model.moe_shared_expert_intermediate_size=352", "model.moe_shared_expert_gate=true"}},
    {"experts over 8, gathered",
        {"ranks=8", EXPERTS, "model.num_moe_experts=8", "strategy.expert_model_parallel_size=8",
            "model.moe_token_dispatcher_type=allgather", "model.num_layers=1", "model.vocab_size=64"}},
    {"experts over 4, by all-to-all, recomputed",
        {"ranks=4", EXPERTS, "strategy.expert_model_parallel_size=4", "model.moe_token_dispatcher_type=alltoall",
            "model.num_layers=2", "model.vocab_size=64", "model.recompute=full"}},
    {"experts over 2, with a shared one, recomputed without the rest of their layers",
        {"ranks=2", EXPERTS, "strategy.expert_model_parallel_size=2", "model.moe_shared_expert_intermediate_size=352",
            "model.moe_layer_recompute=true"}},
    {"experts in slices of all ranks",
        {"ranks=2", EXPERTS, "strategy.expert_model_parallel_size=2", "strategy.moe_extended_tp=true"}},
    {"experts with biases, in slices",
        {"ranks=4", EXPERTS, BIASES, "strategy.expert_model_parallel_size=2", "strategy.expert_tensor_parallel_size=2",
            "strategy.ddp.use_distributed_optimizer=true"}},
    {"the same in bf16, with a shared expert",
        {"ranks=2", EXPERTS, BIASES, "strategy.expert_model_parallel_size=2", "precision=bf16-mixed",
            "model.moe_shared_expert_intermediate_size=352", "model.hidden_dropout=0.1"}},
    {"the same in bf16, with a gated one",
        {"ranks=2", EXPERTS, BIASES, "strategy.tensor_model_parallel_size=2", "strategy.sequence_parallel=true",
            "precision=bf16-mixed", "model.moe_shared_expert_intermediate_size=352",
            "model.moe_shared_expert_gate=true"}},
    {"qwen3 in bf16, deep", {"ranks=1", "model.architecture=qwen3", "precision=bf16-mixed", "model.num_layers=12"}},
};
enum { CASES = sizeof cases / sizeof *cases };

/* What each rank has between the forward and the backward of a microbatch, at most; no more than MOST_RANKS. */
enum { MOST_RANKS = 16 };
typedef struct watch {
    loom_loss_reduction reduction;
    loom_rank *rank;
    double waiting;
} watch;

static loom_status look_and_reduce(void *context, const loom_batch *batch, const loom_tensor *losses, float seed,
    double *sum, double *weight, loom_tensor *d_losses) {
    watch *w = context;
    double now = (double)loom_rank_memory(w->rank).in_use;
    const loom_loss_reduction *usual = loom_loss_reduction_masked_token();
    w->waiting = now > w->waiting ? now : w->waiting;
    return usual->forward(usual->context, batch, losses, seed, sum, weight, d_losses);
}

static loom_status usual_reduce(void *context, loom_comm *group, double *sum, double *weight, double *loss) {
    (void)context;
    const loom_loss_reduction *usual = loom_loss_reduction_masked_token();
    return usual->reduce(usual->context, group, sum, weight, loss);
}

static loom_status watch_losses(planned_run *run, loom_rank *rank, loom_parallel *parallel) {
    watch *w = (watch *)run->context + loom_rank_index(rank);
    *w = (watch){.rank = rank};
    w->reduction = (loom_loss_reduction){w, look_and_reduce, usual_reduce};
    loom_parallel_set_loss_reduction(parallel, &w->reduction);
    return LOOM_OK;
}

static loom_status compare(const planned_run *run, int64_t stage, const char *what, double found, double planned) {
    double off = planned > 0 ? found / planned - 1 : found;
    CHECK(fabs(off) <= 0.05, "%s, stage %lld: %s take %.0f bytes, the plan says %.0f", run->name, (long long)stage,
        what, found, planned);
    return LOOM_OK;
}

static loom_status compare_all(planned_run *run, loom_rank *rank, loom_parallel *parallel, loom_optimizer *optimizer) {
    const loom__ddp_view *view = loom__ddp_view_of(parallel->ddp);
    const loom_plan_memory *m = &run->plan->stages[parallel->stage].memory;
    const watch *w = (const watch *)run->context + loom_rank_index(rank);
    double elements = (double)view->elements, width = (double)loom_dtype_size(view->dtype);
    double lasting = 4.0 * (double)parallel->partial_elements;
    if (view->dtype != LOOM_F32 && !run->config->precision.grad_reduce_in_fp32)
        lasting += elements * width;
    LOOM_TRY(compare(run, parallel->stage, "weights", elements * width, m->weights));
    LOOM_TRY(compare(run, parallel->stage, "gradients", elements * 4, m->gradients));
    LOOM_TRY(compare(run, parallel->stage, "optimizer", (double)loom_optimizer_state_bytes(optimizer), m->optimizer));
    LOOM_TRY(compare(run, parallel->stage, "activations, buffers and logits", (double)loom_rank_memory(rank).high_water,
        m->activations + m->buffers + m->logits - lasting));
    /* Recomputation keeps more within the backward than waits for it; without logits some is given back already. */
    if (run->plan->pipeline > 1 || run->config->model.config.recompute != LOOM_RECOMPUTE_NONE || !(m->logits > 0))
        return LOOM_OK;
    return compare(run, parallel->stage, "activations and logits", w->waiting, m->activations + m->logits);
}

static void the_plan_is_within_5_percent_of_what_a_run_allocates(void **state) {
    (void)state;
    for (int i = 0; i < CASES; i++) {
        watch watches[MOST_RANKS];
        planned_run run = {.context = watches, .prepare = watch_losses, .inspect = compare_all};
        run_planned(common, COMMON, &cases[i], &run);
        forget_planned(&run);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_plan_is_within_5_percent_of_what_a_run_allocates)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
