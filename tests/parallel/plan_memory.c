/* The plan's memory against what runs allocate: for two dozen layouts each rank's buffers of weights, gradients and
 * optimizer state, and the high-water mark of its allocator, within 5 % of what the plan says of its stage. */
#include "ddp/ddp.h"
#include "parallel/support.h"
#include "strategy/strategy.h"
#include <math.h>
#include <megaloom/plan.h>
#include <stdlib.h>

enum { FIELDS = 16, STEPS = 2 };
/* Padded to their capacity, experts get rows as evenly as the plan has them. */
#define EXPERTS                                                                                                        \
    "model.num_moe_experts=4", "model.moe_ffn_hidden_size=352", "model.moe_expert_capacity_factor=1",                  \
        "model.moe_pad_expert_input_to_capacity=true"

static const char *const common[] = {"steps=2", "model.architecture=llama", "model.num_layers=8",
    "model.hidden_size=128", "model.ffn_hidden_size=352", "model.num_attention_heads=8", "model.num_query_groups=4",
    "model.seq_length=128", "model.vocab_size=1000", "data.kind=mock", "data.micro_batch_size=2", "optim.lr=1e-3"};
enum { COMMON = sizeof common / sizeof *common };

typedef struct memory_case {
    const char *name;
    const char *fields[FIELDS];
} memory_case;

static const memory_case cases[] = {
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
    {"a gated shared expert in bf16",
        {"ranks=2", EXPERTS, "strategy.expert_model_parallel_size=2", "precision=bf16-mixed",
            "model.moe_shared_expert_intermediate_size=352", "model.moe_shared_expert_gate=true"}},
    {"qwen3 in bf16, deep", {"ranks=1", "model.architecture=qwen3", "precision=bf16-mixed", "model.num_layers=12"}},
};
enum { CASES = sizeof cases / sizeof *cases };

typedef struct work {
    const loom_run_config *config;
    const loom_plan *plan;
    const char *name;
} work;

static loom_status compare(const work *w, int64_t stage, const char *what, double found, double planned) {
    double off = planned > 0 ? found / planned - 1 : found;
    CHECK(fabs(off) <= 0.05, "%s, stage %lld: %s take %.0f bytes, the plan says %.0f", w->name, (long long)stage, what,
        found, planned);
    return LOOM_OK;
}

static loom_status compare_all(const work *w, loom_rank *rank, loom_parallel *parallel, loom_optimizer *optimizer) {
    const loom__ddp_view *view = loom__ddp_view_of(parallel->ddp);
    const loom_plan_memory *m = &w->plan->stages[parallel->stage].memory;
    double elements = (double)view->elements, width = (double)loom_dtype_size(view->dtype);
    double lasting = 4.0 * (double)parallel->partial_elements;
    if (view->dtype != LOOM_F32 && !w->config->precision.grad_reduce_in_fp32)
        lasting += elements * width;
    LOOM_TRY(compare(w, parallel->stage, "weights", elements * width, m->weights));
    LOOM_TRY(compare(w, parallel->stage, "gradients", elements * 4, m->gradients));
    LOOM_TRY(compare(w, parallel->stage, "optimizer", (double)loom_optimizer_state_bytes(optimizer), m->optimizer));
    return compare(w, parallel->stage, "activations", (double)loom_rank_memory(rank).high_water,
        m->activations + m->buffers + m->logits - lasting);
}

static loom_status train(loom_rank *rank, void *argument) {
    const work *w = argument;
    const loom_run_config *config = w->config;
    loom_fabric *fabric = NULL;
    loom_module *module = NULL;
    loom_parallel *parallel = NULL;
    loom_optimizer *optimizer = NULL;
    loom_batches *batches = NULL;
    loom_dataset dataset = {0};
    LOOM_TRY(loom_fabric_create(rank, &config->strategy, &config->precision, &fabric));
    LOOM_TRY(loom_fabric_launch(fabric));
    LOOM_TRY(loom_gpt_create(fabric, &config->model.config, &module));
    LOOM_TRY(loom_fabric_setup_module(fabric, module, &parallel));
    LOOM_TRY(loom_fabric_setup_megatron_optimizer(fabric, parallel, &config->optim, NULL, &optimizer));
    LOOM_TRY(
        loom_mock_dataset_create(config->model.config.seq_length, config->model.config.vocab_size, 3, 256, &dataset));
    loom_dataloader loader = {.dataset = &dataset,
        .mode = LOOM_TRAINING,
        .micro_batch_size = config->data.micro_batch_size,
        .global_batch_size = config->data.global_batch_size};
    LOOM_TRY(loom_fabric_setup_dataloader(fabric, &loader, &batches));
    for (int step = 0; step < STEPS; step++) {
        double loss;
        loom_optimizer_outcome outcome;
        LOOM_TRY(loom_parallel_training_step(parallel, batches, &loss));
        LOOM_TRY(loom_optimizer_step(optimizer, &outcome));
    }
    loom_status status = compare_all(w, rank, parallel, optimizer);
    loom_batches_destroy(batches);
    loom_parallel_destroy(parallel);
    loom_fabric_destroy(fabric);
    loom_dataset_destroy(&dataset);
    return status;
}

static void the_plan_is_within_5_percent_of_what_a_run_allocates(void **state) {
    (void)state;
    for (int i = 0; i < CASES; i++) {
        const char *fields[COMMON + FIELDS];
        char *not_built = NULL;
        loom_run_config *config = NULL;
        loom_plan *plan = NULL;
        int64_t count = COMMON;
        memcpy(fields, common, sizeof common);
        for (int f = 0; f < FIELDS && cases[i].fields[f]; f++)
            fields[count++] = cases[i].fields[f];
        const loom_plan_check check = {0};
        if (loom_run_config_load_planned(NULL, fields, count, &check, &config, &not_built))
            fail_msg("%s: %s", cases[i].name, loom_error_message());
        assert_string_equal(not_built, "");
        const loom_plan_options options = loom_plan_options_default();
        if (loom_plan_make(config, &options, &plan))
            fail_msg("%s: %s", cases[i].name, loom_error_message());
        work w = {config, plan, cases[i].name};
        must_run((int)config->ranks, train, &w);
        loom_plan_destroy(plan);
        loom_run_config_destroy(config);
        free(not_built);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_plan_is_within_5_percent_of_what_a_run_allocates)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
