/* Broken configurations give all their faults in one go when a run is planned: each case is what it changes of a sound
 * one, and the whole message. What is only not built is none. */
#include <megaloom/config.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { FIELDS = 8 };

static const char *const sound[] = {"steps=100", "model.architecture=llama", "model.num_layers=8",
    "model.hidden_size=64", "model.ffn_hidden_size=128", "model.num_attention_heads=8", "model.num_query_groups=4",
    "model.seq_length=64", "model.vocab_size=256", "data.kind=mock"};
enum { SOUND = sizeof sound / sizeof *sound };

static loom_status load(const char *const *fields, loom_run_config **config, char **not_built) {
    const char *all[SOUND + FIELDS];
    int64_t count = SOUND;
    const loom_plan_check check = {.world_size = 0};
    memcpy(all, sound, sizeof sound);
    for (int i = 0; i < FIELDS && fields[i]; i++)
        all[count++] = fields[i];
    return loom_run_config_load_planned(NULL, all, count, &check, config, not_built);
}

static const struct {
    const char *fields[FIELDS];
    const char *message;
} broken[] = {
    {{"ranks=8", "strategy.context_parallel_size=8", "model.hierarchical_context_parallel_sizes=[2, 2]"},
        "model.hierarchical_context_parallel_sizes: found a product of 4, expected context_parallel_size, 8; nearest "
        "legal context_parallel_size 4"},
    {{"ranks=8", "strategy.tensor_model_parallel_size=3"},
        "strategy.tensor_model_parallel_size 3 does not divide num_attention_heads 8; nearest legal "
        "tensor_model_parallel_size 2 or 4\n"
        "strategy.tensor_model_parallel_size 3 does not divide ffn_hidden_size 128; nearest legal "
        "tensor_model_parallel_size 2 or 4\n"
        "strategy.tensor_model_parallel_size 3 does not divide num_query_groups 4; nearest legal "
        "tensor_model_parallel_size 2 or 4\n"
        "strategy.tensor_model_parallel_size 3 x pipeline_model_parallel_size 1 x context_parallel_size 1 = 3 does not "
        "divide world_size 8; nearest legal tensor_model_parallel_size 2 or 4"},
    {{"ranks=8", "strategy.tensor_model_parallel_size=8"},
        "strategy.tensor_model_parallel_size 8 does not divide num_query_groups 4 (replicate_query_groups would let "
        "ranks share one); nearest legal tensor_model_parallel_size 4, num_query_groups 8, or replicate_query_groups "
        "true"},
    {{"ranks=6", "strategy.tensor_model_parallel_size=4", "data.global_batch_size=7"},
        "strategy.tensor_model_parallel_size 4 x pipeline_model_parallel_size 1 x context_parallel_size 1 = 4 does not "
        "divide world_size 6; nearest legal world_size 4 or 28"},
    {{"ranks=4", "strategy.pipeline_model_parallel_size=3"},
        "strategy.tensor_model_parallel_size 1 x pipeline_model_parallel_size 3 x context_parallel_size 1 = 3 does not "
        "divide world_size 4; nearest legal pipeline_model_parallel_size 2 or 4\n"
        "model.num_layers 8 is not a multiple of pipeline_model_parallel_size 3 (balanced_pipeline_split would make "
        "them 3, 3, 2); nearest legal pipeline_model_parallel_size 2 or 4"},
    {{"ranks=3", "strategy.pipeline_model_parallel_size=3"},
        "model.num_layers 8 is not a multiple of pipeline_model_parallel_size 3 (balanced_pipeline_split would make "
        "them 3, 3, 2); nearest legal num_layers 6 or 9, pipeline_model_parallel_size 1, or balanced_pipeline_split "
        "true"},
    {{"ranks=2", "strategy.pipeline_model_parallel_size=2", "strategy.virtual_pipeline_model_parallel_size=3",
         "data.global_batch_size=8"},
        "model.num_layers 8 is not a multiple of pipeline_model_parallel_size 2 x virtual_pipeline_model_parallel_size "
        "3 = 6 chunks (balanced_pipeline_split would make them 2, 2, 1, 1, 1, 1); nearest legal num_layers 6 or 12, "
        "virtual_pipeline_model_parallel_size 2 or 4, or balanced_pipeline_split true"},
    {{"ranks=4", "strategy.pipeline_model_parallel_size=4", "strategy.virtual_pipeline_model_parallel_size=2",
         "data.global_batch_size=10"},
        "10 microbatches in groups of 4 (microbatch_group_size_per_vp_stage) leave a last group of 2: expected none, "
        "or at least pipeline_model_parallel_size 4 (data.global_batch_size 10, data.micro_batch_size 1, 1 "
        "data-parallel rank); nearest legal global_batch_size 8 or 12"},
    {{"ranks=2", "strategy.virtual_pipeline_model_parallel_size=2"},
        "strategy.virtual_pipeline_model_parallel_size is 2, but pipeline_model_parallel_size is 1: expected at least "
        "2 pipeline stages, or no virtual ones; nearest legal virtual_pipeline_model_parallel_size null"},
    {{"ranks=2", "data.micro_batch_size=2", "data.global_batch_size=10"},
        "data.global_batch_size: found 10, expected a multiple of 4 (data.micro_batch_size 2 times 2 data-parallel "
        "ranks); nearest legal global_batch_size 8 or 12, or micro_batch_size 1 or 5"},
    {{"ranks=4", "data.micro_batch_size=3", "data.global_batch_size=10", "steps=null"},
        "steps: missing, expected an integer >= 1\n"
        "data.global_batch_size: found 10, expected a multiple of 12 (data.micro_batch_size 3 times 4 data-parallel "
        "ranks); nearest legal global_batch_size 12"},
    {{"strategy.sequence_parallel=true", "optim.lr=-1"},
        "override: optim.lr: found -1, expected a number > 0\n"
        "strategy.sequence_parallel: found true with strategy.tensor_model_parallel_size 1, expected at least 2 tensor "
        "ranks to share rows; nearest legal sequence_parallel false"},
    {{"ranks=2", "strategy.tensor_model_parallel_size=2", "strategy.sequence_parallel=true", "model.seq_length=63"},
        "model.seq_length 63 is not divisible by tensor_model_parallel_size 2, as sequence_parallel asks; nearest "
        "legal seq_length 62 or 64, or sequence_parallel false"},
    {{"ranks=2", "strategy.context_parallel_size=2", "model.seq_length=14"},
        "model.seq_length 14 cannot be cut into 2 chunks for each of the 2 ranks of context_parallel_size: expected a "
        "multiple of 4; nearest legal seq_length 12 or 16, or context_parallel_size 1"},
    {{"ranks=8", "strategy.context_parallel_size=2", "strategy.tensor_model_parallel_size=4", "model.seq_length=20",
         "strategy.sequence_parallel=true"},
        "model.seq_length 20 cannot be cut into 2 chunks for each of the 2 ranks of context_parallel_size and rows for "
        "each rank of tensor_model_parallel_size, as sequence_parallel asks: expected a multiple of 8; nearest legal "
        "seq_length 16 or 24, context_parallel_size 1, tensor_model_parallel_size 2, or sequence_parallel false"},
    {{"ranks=4", "strategy.context_parallel_size=4", "model.cp_comm_type=a2a", "model.num_query_groups=2"},
        "model.cp_comm_type a2a: the 4 ranks of context_parallel_size cannot share the 8 heads and 2 query groups of a "
        "tensor rank (num_attention_heads 8 and num_query_groups 2 over tensor_model_parallel_size 1); p2p and "
        "all_gather can; nearest legal context_parallel_size 2, or num_query_groups 4"},
    {{"ranks=3", "strategy.expert_model_parallel_size=3", "model.num_moe_experts=8"},
        "strategy.expert_model_parallel_size 3 does not divide num_moe_experts 8; nearest legal "
        "expert_model_parallel_size 1, or num_moe_experts 6 or 9"},
    {{"ranks=9", "strategy.expert_model_parallel_size=3", "strategy.expert_tensor_parallel_size=3",
         "model.num_moe_experts=8"},
        "strategy.expert_model_parallel_size 3 does not divide num_moe_experts 8; nearest legal "
        "expert_model_parallel_size 1, or num_moe_experts 6 or 9\n"
        "strategy.expert_tensor_parallel_size 3 does not divide moe_ffn_hidden_size 128; nearest legal "
        "expert_tensor_parallel_size 1, or moe_ffn_hidden_size 126 or 129"},
    {{"ranks=2", "strategy.tensor_model_parallel_size=2", "strategy.sequence_parallel=true", "model.num_moe_experts=4",
         "model.moe_shared_expert_intermediate_size=33"},
        "model.moe_shared_expert_intermediate_size 33 is not divisible by tensor_model_parallel_size 2; nearest legal "
        "moe_shared_expert_intermediate_size 32 or 34"},
    {{"ranks=4", "strategy.context_parallel_size=2", "strategy.tensor_model_parallel_size=3", "model.num_moe_experts=4",
         "model.hidden_size=-1"},
        "override: model.hidden_size: found -1, expected an integer >= 1, or null\n"
        "strategy.expert_tensor_parallel_size 3 does not divide moe_ffn_hidden_size 128; nearest legal "
        "expert_tensor_parallel_size 2 or 4, or moe_ffn_hidden_size 126 or 129\n"
        "strategy.tensor_model_parallel_size 3 x pipeline_model_parallel_size 1 x context_parallel_size 2 = 6 is more "
        "than world_size 4; nearest legal tensor_model_parallel_size 1\n"
        "model.num_moe_experts 4 with tensor_model_parallel_size 3 needs sequence_parallel true: each tensor rank "
        "routes rows of its own; nearest legal tensor_model_parallel_size 1\n"
        "strategy.tensor_model_parallel_size 3 does not divide num_attention_heads 8; nearest legal "
        "tensor_model_parallel_size 1\n"
        "strategy.tensor_model_parallel_size 3 does not divide ffn_hidden_size 128; nearest legal "
        "tensor_model_parallel_size 1\n"
        "strategy.tensor_model_parallel_size 3 does not divide num_query_groups 4; nearest legal "
        "tensor_model_parallel_size 1"},
    {{"ranks=2", "strategy.expert_model_parallel_size=2"},
        "strategy.expert_model_parallel_size: found 2, expected 1 for a model without experts (num_moe_experts); "
        "nearest legal expert_model_parallel_size 1"},
    {{"model.num_moe_experts=4", "model.moe_router_topk=5"},
        "model.moe_router_topk is 5: expected 1 to the 4 of num_moe_experts; nearest legal moe_router_topk 4, or "
        "num_moe_experts 5"},
    {{"ranks=2", "strategy.tensor_model_parallel_size=2", "model.num_moe_experts=4",
         "strategy.expert_tensor_parallel_size=1"},
        "model.num_moe_experts 4 with tensor_model_parallel_size 2 needs sequence_parallel true: each tensor rank "
        "routes rows of its own; nearest legal num_moe_experts null, tensor_model_parallel_size 1, or "
        "sequence_parallel true"},
    {{"model.num_moe_experts=4", "model.moe_layer_recompute=true", "model.recompute=full"},
        "model.moe_layer_recompute: found true with recompute full, which makes whole layers again: expected false, or "
        "recompute none or selective; nearest legal moe_layer_recompute false"},
    {{"model.architecture=mixtral"},
        "model.num_moe_experts: missing, expected an integer >= 1 with model.architecture mixtral"},
    {{"model.hidden_size=65", "model.num_query_groups=3"},
        "model.num_query_groups 3 does not divide num_attention_heads 8; nearest legal num_query_groups 2 or 4, or "
        "num_attention_heads 6 or 15\n"
        "model.hidden_size 65 is not divisible by num_attention_heads 8, and kv_channels is not given; nearest legal "
        "hidden_size 64 or 80, or kv_channels 6 or 8"},
    {{"model.hiden_size=64", "model.num_layers=0", "optim.lr=0"},
        "override: model.hiden_size: unknown field; did you mean model.hidden_size?\n"
        "override: model.num_layers: found 0, expected an integer >= 1, or null\n"
        "override: optim.lr: found 0, expected a number > 0"},
    {{"strategy.tensor_parallel_size=2", "precision=bf17", "data.kind=mok"},
        "override: strategy.tensor_parallel_size: unknown field; did you mean strategy.tensor_model_parallel_size?\n"
        "override: precision: found \"bf17\", expected one of 32, bf16-mixed, 16-mixed, or a mapping of its fields; "
        "did you mean bf16?\n"
        "override: data.kind: found \"mok\", expected one of gpt, fixed, mock, finetune; did you mean mock?"},
    {{"model.num_layers=many", "strategy.sequence_parallel=perhaps"},
        "override: model.num_layers: found \"many\", expected an integer >= 1, or null\n"
        "override: strategy.sequence_parallel: found \"perhaps\", expected true or false"},
    {{"ranks=4", "strategy.pipeline_model_parallel_size=4", "strategy.microbatch_group_size_per_vp_stage=2",
         "strategy.virtual_pipeline_model_parallel_size=2", "data.global_batch_size=8"},
        "strategy.microbatch_group_size_per_vp_stage: found 2, expected at least strategy.pipeline_model_parallel_size "
        "4, or null; nearest legal microbatch_group_size_per_vp_stage 4, or pipeline_model_parallel_size 2"},
    {{"ranks=2", "strategy.pipeline_model_parallel_size=2", "model.pipeline_model_parallel_layout=E|t*7|L"},
        "model.pipeline_model_parallel_layout: 'E|t*7|L' has 3 stages, expected a multiple of "
        "pipeline_model_parallel_size 2"},
    {{"ranks=2", "strategy.pipeline_model_parallel_size=2", "model.pipeline_model_parallel_layout=Et*4|t*4L",
         "model.balanced_pipeline_split=true"},
        "model.balanced_pipeline_split: found together with pipeline_model_parallel_layout, expected one way to cut "
        "the layers; nearest legal balanced_pipeline_split false"},
    {{"ranks=4", "strategy.pipeline_model_parallel_size=4", "model.num_layers_in_first_pipeline_stage=9"},
        "model.num_layers 8 with num_layers_in_first_pipeline_stage 9 on pipeline_model_parallel_size 4: expected "
        "besides these 9 a positive multiple of 3 for the other stages; nearest legal num_layers 12, or "
        "num_layers_in_first_pipeline_stage 5"},
    {{"ranks=8", "strategy.pipeline_model_parallel_size=2", "data.global_batch_size=16",
         "data.rampup_batch_size=[2, 4, 48]"},
        "data.rampup_batch_size: [2, 4, 48] on world_size 8: rampup_batch_size goes from 2 in steps of 4, expected "
        "that they reach global_batch_size 16; nearest legal rampup_batch_size [4, 4, 48]"},
    {{"data.rampup_batch_size=[4, 4]", "data.global_batch_size=16"},
        "data.rampup_batch_size: found 2 numbers, expected three: the first batch size, the increment, and the samples "
        "that the increments take"},
    {{"ranks=4", "strategy.num_distributed_optimizer_instances=2"},
        "strategy.num_distributed_optimizer_instances: found 2, expected 1 without "
        "strategy.ddp.use_distributed_optimizer; nearest legal num_distributed_optimizer_instances 1"},
    {{"ranks=4", "strategy.num_distributed_optimizer_instances=3", "strategy.ddp.use_distributed_optimizer=true"},
        "strategy.num_distributed_optimizer_instances is 3: expected a divisor of data x context parallel size 4 and "
        "of the expert data parallel size 4 of world_size 4; nearest legal num_distributed_optimizer_instances 2 or 4, "
        "or world_size 3 or 6"},
    {{"strategy.ddp.overlap_param_gather=true", "strategy.bucket_cap_mb=25"},
        "strategy.ddp.overlap_param_gather: found true without strategy.ddp.use_distributed_optimizer, which gathers "
        "parameters; expected false\n"
        "strategy.bucket_cap_mb: only strategy.ddp pytorch uses it"},
    {{"precision=bf16-mixed", "precision.loss_scale=2", "precision.params_dtype=fp16"},
        "precision.params_dtype: found fp16 with precision bf16-mixed, expected fp32 or bf16\n"
        "precision.loss_scale: used only by precision 16-mixed"},
    {{"optim.min_lr=1", "optim.amsgrad=true", "optim.optimizer=sgd"},
        "optim.amsgrad: used only by optim.optimizer adam\n"
        "optim.min_lr: found 1, expected at most optim.lr, 0.001"},
    {{"optim.schedule=NoamAnnealing", "optim.warmup_steps=5", "optim.warmup_ratio=0.1"},
        "optim.warmup_ratio: found together with optim.warmup_steps, expected one of them\n"
        "optim.d_model: missing, schedule NoamAnnealing needs it"},
    {{"optim.schedule=megatron-WSD", "optim.warmup_steps=200"},
        "optim.warmup_steps: found 200, expected less than the 100 steps of the schedule\n"
        "optim.wsd_decay_steps: missing, schedule megatron-WSD needs it"},
    {{"data.kind=gpt", "data.pack_sequences=true", "validation.every=10"},
        "data.pack_sequences: only data.kind finetune packs, found gpt; nearest legal pack_sequences false\n"
        "data.path: missing, expected a prefix, or weights and prefixes in turn\n"
        "data.valid_path: missing, expected a prefix to validate with, since data.path is not given"},
    {{"model.kv_channels=7", "model.rotary_percent=1.0", "model.hidden_dropout=1.5"},
        "override: model.hidden_dropout: found 1.5, expected a number from 0 to below 1 in fp32\n"
        "model.kv_channels 7 with rotary_percent 1: rotary positions turn pairs, so that an even number of channels is "
        "needed; nearest legal kv_channels 6 or 8"},
    {{"model.vocab_size=1000", "model.padded_vocab_size=999", "ranks=2", "strategy.tensor_model_parallel_size=2"},
        "model.padded_vocab_size: found 999, expected an integer from 1000 to 2147483648; nearest legal "
        "padded_vocab_size 1000\n"
        "model.padded_vocab_size 999 is not divisible by tensor_model_parallel_size 2; nearest legal padded_vocab_size "
        "1000"},
    {{"seed=-1", "threads=0", "output=3", "log.every=0"},
        "override: threads: found 0, expected an integer from 1 to 4096, or null\n"
        "override: seed: found -1, expected an integer from 0 to 4294967295\n"
        "override: log.every: found 0, expected an integer >= 1"},
    {{"ranks=8", "strategy.tensor_model_parallel_size=5", "strategy.pipeline_model_parallel_size=3",
         "strategy.context_parallel_size=2", "model.seq_length=10"},
        "strategy.tensor_model_parallel_size 5 does not divide num_attention_heads 8; nearest legal "
        "tensor_model_parallel_size 4\n"
        "strategy.tensor_model_parallel_size 5 does not divide ffn_hidden_size 128; nearest legal "
        "tensor_model_parallel_size 4\n"
        "strategy.tensor_model_parallel_size 5 does not divide num_query_groups 4; nearest legal "
        "tensor_model_parallel_size 4\n"
        "model.seq_length 10 cannot be cut into 2 chunks for each of the 2 ranks of context_parallel_size: expected a "
        "multiple of 4; nearest legal seq_length 8 or 12, or context_parallel_size 1 or 5\n"
        "strategy.tensor_model_parallel_size 5 x pipeline_model_parallel_size 3 x context_parallel_size 2 = 30 is more "
        "than world_size 8; nearest legal world_size 30\n"
        "model.num_layers 8 is not a multiple of pipeline_model_parallel_size 3 (balanced_pipeline_split would make "
        "them 3, 3, 2); nearest legal num_layers 6 or 9, pipeline_model_parallel_size 2 or 4, or "
        "balanced_pipeline_split true"},
    {{"model.architecture=lama", "model.num_attention_heads=6", "model.num_query_groups=6", "ranks=4",
         "strategy.tensor_model_parallel_size=4"},
        "override: model.architecture: found \"lama\", expected one of gpt2, llama, mistral, mixtral, qwen2, qwen3, "
        "qwen2_moe, qwen3_moe, gemma, or null; did you mean llama?\n"
        "model.hidden_size 64 is not divisible by num_attention_heads 6, and kv_channels is not given; nearest legal "
        "hidden_size 60 or 72, or kv_channels 8 or 10\n"
        "strategy.tensor_model_parallel_size 4 does not divide num_attention_heads 6; nearest legal "
        "tensor_model_parallel_size 2\n"
        "strategy.tensor_model_parallel_size 4 does not divide num_query_groups 6; nearest legal "
        "tensor_model_parallel_size 2"},
    {{"ranks=8", "model.num_moe_experts=6", "model.moe_router_topk=9", "strategy.expert_model_parallel_size=4",
         "strategy.context_parallel_size=8", "model.seq_length=100"},
        "model.moe_router_topk is 9: expected 1 to the 6 of num_moe_experts; nearest legal num_moe_experts 12\n"
        "model.seq_length 100 cannot be cut into 2 chunks for each of the 8 ranks of context_parallel_size: expected a "
        "multiple of 16; nearest legal seq_length 96 or 112, or context_parallel_size 2\n"
        "strategy.expert_model_parallel_size 4 does not divide num_moe_experts 6; nearest legal num_moe_experts 12"},
    {{"model.num_layers=many", "model.hidden_size=0", "ranks=4", "strategy.tensor_model_parallel_size=3",
         "strategy.context_parallel_size=4", "model.seq_length=20", "data.global_batch_size=0"},
        "override: model.num_layers: found \"many\", expected an integer >= 1, or null\n"
        "override: model.hidden_size: found 0, expected an integer >= 1, or null\n"
        "override: data.global_batch_size: found 0, expected an integer >= 1, or null\n"
        "model.seq_length 20 cannot be cut into 2 chunks for each of the 4 ranks of context_parallel_size: expected a "
        "multiple of 8; nearest legal seq_length 16 or 24, or context_parallel_size 2 or 5\n"
        "strategy.tensor_model_parallel_size 3 x pipeline_model_parallel_size 1 x context_parallel_size 4 = 12 is more "
        "than world_size 4; nearest legal tensor_model_parallel_size 1\n"
        "strategy.tensor_model_parallel_size 3 does not divide num_attention_heads 8; nearest legal "
        "tensor_model_parallel_size 1\n"
        "strategy.tensor_model_parallel_size 3 does not divide ffn_hidden_size 128; nearest legal "
        "tensor_model_parallel_size 1\n"
        "strategy.tensor_model_parallel_size 3 does not divide num_query_groups 4; nearest legal "
        "tensor_model_parallel_size 1"},
    {{"model.hidden_size=9007199254740992", "model.ffn_hidden_size=null"},
        "model.hidden_size: found 9007199254740992, expected an integer from 1 to 67108864; nearest legal hidden_size "
        "524288"},
};
enum { BROKEN = sizeof broken / sizeof *broken };
_Static_assert(BROKEN >= 40, "forty broken configurations");

static void all_faults_of_a_broken_configuration_come_at_once(void **state) {
    (void)state;
    for (int i = 0; i < BROKEN; i++) {
        loom_run_config *config = NULL;
        char *not_built = NULL;
        loom_status status = load(broken[i].fields, &config, &not_built);
        assert_int_equal(status, LOOM_ERR_CONFIG);
        assert_string_equal(loom_error_message(), broken[i].message);
        assert_null(config);
    }
}

static void what_is_not_built_is_told_and_no_fault(void **state) {
    static const char *const fields[FIELDS] = {"ranks=8", "precision.fp8=hybrid", "precision.fp4=e2m1"};
    loom_run_config *config = NULL;
    char *not_built = NULL;
    (void)state;
    assert_int_equal(load(fields, &config, &not_built), LOOM_OK);
    assert_string_equal(not_built, "not supported yet: precision.fp4=e2m1 (fp4); only null works\n"
                                   "not supported yet: precision.fp8=hybrid (fp8); only null works");
    assert_string_equal(config->precision.fp8, "hybrid");
    free(not_built);
    loom_run_config_destroy(config);
}

static void a_model_with_parts_that_are_not_built_is_completed(void **state) {
    static const char *const fields[FIELDS] = {"ranks=2", "model.num_moe_experts=4",
        "model.moe_token_dispatcher_type=flex", "strategy.context_parallel_size=2", "model.cp_comm_type=a2a"};
    loom_run_config *config = NULL;
    char *not_built = NULL;
    (void)state;
    assert_int_equal(load(fields, &config, &not_built), LOOM_OK);
    assert_string_equal(not_built,
        "not supported yet: moe_token_dispatcher_type flex; what works: alltoall, allgather\n"
        "not supported yet: Hugging Face files of a llama model with experts (export=false trains without writing it)");
    free(not_built);
    loom_run_config_destroy(config);
}

/* Training is refused at the begin where the model could not be written at the end. */
static void a_model_that_cannot_be_written_is_told(void **state) {
    static const char *const cases[][FIELDS] = {
        {"model.rotary_percent=0.5"}, {"model.rotary_percent=0.5", "export=false"}, {"model.rotary_percent=1.0"}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        loom_run_config *config = NULL;
        char *not_built = NULL;
        assert_int_equal(load(cases[i], &config, &not_built), LOOM_OK);
        assert_string_equal(not_built,
            i > 0 ? ""
                  : "not supported yet: Hugging Face files of a llama model with rotary_percent below 1 (export=false "
                    "trains without writing it)");
        free(not_built);
        loom_run_config_destroy(config);
    }
}

/* A plan takes more ranks than threads; beyond 2^31 they are no ranks. */
static void more_ranks_than_threads_are_planned(void **state) {
    loom_run_config *config = NULL;
    char *not_built = NULL;
    (void)state;
    assert_int_equal(
        load((const char *const[FIELDS]){"ranks=16384", "data.global_batch_size=16384"}, &config, &not_built), LOOM_OK);
    assert_int_equal(config->ranks, 16384);
    assert_string_equal(not_built, "not supported yet: ranks=16384 (threads of one process); what works: a launcher "
                                   "such as mpirun, or at most 4096");
    free(not_built);
    loom_run_config_destroy(config);
    assert_int_equal(load((const char *const[FIELDS]){"ranks=16384", "data.global_batch_size=10"}, &config, &not_built),
        LOOM_ERR_CONFIG);
    assert_string_equal(loom_error_message(),
        "data.global_batch_size: found 10, expected a multiple of 16384 (data.micro_batch_size 1 "
        "times 16384 data-parallel ranks); nearest legal global_batch_size 16384");
    assert_int_equal(load((const char *const[FIELDS]){"ranks=2147483648"}, &config, &not_built), LOOM_ERR_CONFIG);
    assert_string_equal(loom_error_message(), "override: ranks: found 2147483648, expected an integer from 1 to 4096");
}

static void a_mixtral_has_the_defaults_of_a_llama(void **state) {
    static const char *const fields[FIELDS] = {"model.architecture=mixtral", "model.num_moe_experts=8"};
    loom_run_config *config = NULL;
    char *not_built = NULL;
    (void)state;
    assert_int_equal(load(fields, &config, &not_built), LOOM_OK);
    assert_int_equal(config->model.config.normalization, LOOM_RMSNORM);
    assert_int_equal(config->model.config.activation, LOOM_SWIGLU);
    assert_false(config->model.config.share_embeddings_and_output_weights);
    free(not_built);
    loom_run_config_destroy(config);
}

static loom_status fill_vocabulary(void *context, loom_run_config *config) {
    config->model.config.vocab_size = *(int64_t *)context;
    return LOOM_OK;
}

static loom_status fail_to_fill(void *context, loom_run_config *config) {
    (void)context;
    (void)config;
    return loom_fail(LOOM_ERR_CONFIG, "data.tokenizer: there is none");
}

static void what_is_filled_in_between_counts(void **state) {
    int64_t vocabulary = 777;
    const char *fields[SOUND];
    loom_run_config *config = NULL;
    char *not_built = NULL;
    (void)state;
    memcpy(fields, sound, sizeof sound);
    fields[8] = "model.vocab_size=null"; /* in place of the vocabulary */
    loom_plan_check check = {.prepare = fill_vocabulary, .context = &vocabulary};
    assert_int_equal(loom_run_config_load_planned(NULL, fields, SOUND, &check, &config, &not_built), LOOM_OK);
    assert_int_equal(config->model.config.vocab_size, 777);
    free(not_built);
    loom_run_config_destroy(config);
    check.prepare = fail_to_fill;
    assert_int_equal(loom_run_config_load_planned(NULL, fields, SOUND, &check, &config, &not_built), LOOM_ERR_CONFIG);
    assert_non_null(strstr(loom_error_message(), "data.tokenizer: there is none"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_faults_of_a_broken_configuration_come_at_once),
        cmocka_unit_test(what_is_not_built_is_told_and_no_fault),
        cmocka_unit_test(a_model_with_parts_that_are_not_built_is_completed),
        cmocka_unit_test(a_model_that_cannot_be_written_is_told),
        cmocka_unit_test(more_ranks_than_threads_are_planned),
        cmocka_unit_test(a_mixtral_has_the_defaults_of_a_llama),
        cmocka_unit_test(what_is_filled_in_between_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
