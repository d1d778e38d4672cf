/* From a configuration to the sizes that everything else here is computed from. The layout, the split of the layers and
 * the schedule are asked of the rooms that training asks. */
#include "plan/sizes.h"
#include "config/precision.h"
#include "config/sizes.h"
#include <stdlib.h>
#include <string.h>

static loom_status complete(const loom_run_config *config, loom_model_config *model) {
    const loom_megatron_strategy_config *strategy = &config->strategy;
    *model = config->model.config;
    const char *name = model->architecture;
    if (strategy->encoder_pipeline_model_parallel_size > 0 || (name && strcmp(name, "t5") == 0))
        return loom_fail(LOOM_ERR_UNSUPPORTED,
            "not supported yet: a plan of encoder-decoder models (%s); what works: decoder-only models",
            strategy->encoder_pipeline_model_parallel_size > 0 ? "strategy.encoder_pipeline_model_parallel_size"
                                                               : "model.architecture=t5");
    return loom__model_config_complete_planned(
        model, strategy->tensor_model_parallel_size, strategy->sequence_parallel);
}

static loom_status make_schedule(loom__plan_sizes *sizes) {
    const loom_run_config *config = sizes->config;
    int64_t unit = config->data.micro_batch_size * sizes->dp, global = config->data.global_batch_size;
    int64_t microbatches = global ? global / unit : 1;
    sizes->schedule = (loom_schedule_config){.stages = sizes->pp,
        .chunks = sizes->chunks > 1 ? sizes->chunks : 0,
        .microbatches = microbatches > 0 ? microbatches : 1,
        .group = sizes->chunks > 1 ? config->strategy.microbatch_group_size_per_vp_stage : 0,
        .kind = loom__strategy_schedule(&config->strategy)};
    return loom_schedule_config_check(&sizes->schedule);
}

static void find_shards(loom__plan_sizes *sizes) {
    const loom_megatron_strategy_config *strategy = &sizes->config->strategy;
    bool pytorch = strategy->ddp && strcmp(strategy->ddp, "pytorch") == 0;
    int64_t instances = strategy->num_distributed_optimizer_instances;
    sizes->sharded = strategy->ddp_config.use_distributed_optimizer && !pytorch;
    sizes->shards = sizes->sharded ? sizes->dp * sizes->cp / instances : 1;
    sizes->expert_shards = sizes->sharded ? sizes->edp / instances : 1;
}

/* Sums and products of sizes stay far below 2^63 from here on. */
static loom_status check_products(const loom__plan_sizes *sizes) {
    const loom_model_config *model = &sizes->model;
    const loom_moe_config *moe = &model->moe;
    const double most = 0x1p59, micro = (double)sizes->config->data.micro_batch_size;
    double rows = micro * (double)model->seq_length, h = (double)model->hidden_size, d = (double)model->kv_channels;
    double experts = (double)moe->num_moe_experts, width = 2 * (double)moe->moe_ffn_hidden_size;
    double shared = 3 * (double)moe->moe_shared_expert_intermediate_size, f = 2 * (double)model->ffn_hidden_size;
    double heads = (double)(model->num_attention_heads + 2 * model->num_query_groups),
           v = (double)model->padded_vocab_size;
    double routed = experts > 0 ? (double)moe->moe_router_topk * (double)sizes->etp * (width > h ? width : h) : 0;
    const double widths[] = {h, f, shared, heads * d, v, experts, routed};
    double widest = 0;
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        widest = widths[i] > widest ? widths[i] : widest;
    double layer = h * (heads * d + f + shared + experts * width) * 2;
    if (rows * widest * 8 < most && layer * (double)model->num_layers + h * v < most &&
        micro * (double)sizes->dp < most)
        return LOOM_OK;
    return loom_fail(LOOM_ERR_CONFIG,
        "the model and data.micro_batch_size are too large to plan: tensors of %.3g elements, %.3g parameters; "
        "expected "
        "less than 7e16 and 5e17",
        rows * widest, layer * (double)model->num_layers + h * v);
}

static loom_status fill(loom__plan_sizes *sizes, int64_t world_size) {
    const loom_run_config *config = sizes->config;
    const loom_megatron_strategy_config *strategy = &config->strategy;
    LOOM_TRY(complete(config, &sizes->model));
    loom_parallel_sizes parallel = loom__strategy_sizes(strategy, world_size > 0 ? world_size : config->ranks);
    if (parallel.context > 1 &&
        loom__context_layers(&sizes->model, LOOM__CONTEXT_LEVELS, 0, sizes->model.num_layers) > 0) {
        const int64_t *levels = sizes->model.parallel.hierarchical_context_parallel_sizes;
        while (parallel.hierarchical_levels < LOOM_LAYOUT_HCP_LEVELS && levels[parallel.hierarchical_levels] > 0) {
            parallel.hierarchical_context[parallel.hierarchical_levels] = levels[parallel.hierarchical_levels];
            parallel.hierarchical_levels++;
        }
    }
    LOOM_TRY(loom_layout_init(&parallel, &sizes->layout));
    const loom_parallel_sizes *made = &sizes->layout.sizes;
    sizes->tp = made->tensor;
    sizes->cp = made->context;
    sizes->ep = made->expert;
    sizes->etp = made->expert_tensor;
    sizes->pp = made->pipeline;
    sizes->dp = loom_layout_data_parallel_size(&sizes->layout);
    sizes->edp = loom_layout_expert_data_parallel_size(&sizes->layout);
    sizes->sequence_parallel = strategy->sequence_parallel;
    LOOM_TRY(check_products(sizes));
    find_shards(sizes);
    loom_dtype dtype = loom__precision_dtype(&config->precision);
    const char *wire = config->precision.pipeline_dtype ? config->precision.pipeline_dtype : strategy->pipeline_dtype;
    sizes->width = (int64_t)loom_dtype_size(dtype);
    sizes->wire = (int64_t)loom_dtype_size(loom__dtype_called(wire, dtype == LOOM_BF16 ? LOOM_BF16 : LOOM_F32));
    sizes->b = config->data.micro_batch_size;
    sizes->s = sizes->model.seq_length / sizes->cp;
    sizes->rows = sizes->b * sizes->s;
    sizes->own_rows = sizes->sequence_parallel ? sizes->rows / sizes->tp : sizes->rows;
    loom_stage_split split = loom_stage_split_of(strategy, &sizes->model);
    LOOM_TRY(loom_stage_split_chunks(&split, &sizes->chunks));
    sizes->stages = calloc((size_t)(sizes->chunks * sizes->pp), sizeof *sizes->stages);
    if (!sizes->stages)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory to plan %lld stages", (long long)sizes->pp);
    LOOM_TRY(loom_stage_split_make(&split, sizes->stages));
    return make_schedule(sizes);
}

loom_status loom__plan_sizes_make(const loom_run_config *config, int64_t world_size, loom__plan_sizes *out) {
    loom__plan_sizes sizes = {.config = config};
    loom_status status = fill(&sizes, world_size);
    if (status) {
        loom__plan_sizes_free(&sizes);
        return status;
    }
    *out = sizes;
    return LOOM_OK;
}

void loom__plan_sizes_free(loom__plan_sizes *sizes) {
    free(sizes->stages);
    sizes->stages = NULL;
}

const loom_stage *loom__plan_chunk_of(const loom__plan_sizes *sizes, int64_t stage, int64_t chunk) {
    return &sizes->stages[chunk * sizes->pp + stage];
}

int64_t loom__plan_count_layers(const loom__plan_sizes *sizes, const loom_stage *chunk, int64_t *with_experts) {
    *with_experts = 0;
    for (int64_t i = 0; i < chunk->layers; i++)
        *with_experts += loom__layer_has_experts(&sizes->model, chunk->first_layer + i);
    return chunk->layers;
}

int64_t loom__plan_layers_behind_experts(const loom__plan_sizes *sizes, const loom_stage *chunk) {
    int64_t behind = 0;
    while (behind < chunk->layers &&
           !loom__layer_has_experts(&sizes->model, chunk->first_layer + chunk->layers - 1 - behind))
        behind++;
    return behind;
}

int64_t loom__plan_routed_rows(const loom__plan_sizes *sizes) {
    const loom_moe_config *moe = &sizes->model.moe;
    int64_t choices = sizes->own_rows * moe->moe_router_topk;
    double factor = moe->moe_expert_capacity_factor;
    bool limited = factor > 0 && (factor < 1 || moe->moe_pad_expert_input_to_capacity);
    if (!limited)
        return choices;
    int64_t capacity = loom__expert_capacity(choices, moe->num_moe_experts, factor, 0);
    capacity = capacity < sizes->own_rows ? capacity : sizes->own_rows;
    return capacity * moe->num_moe_experts;
}

int64_t loom__plan_layers_up_to(const loom__plan_sizes *sizes, const loom_stage *chunk, loom__context_type type) {
    int64_t layers = chunk->layers;
    while (layers > 0 && loom__context_type_of(&sizes->model, chunk->first_layer + layers - 1) != type)
        layers--;
    return layers;
}

int64_t loom__plan_heads_exchanged_by(const loom__plan_sizes *sizes, loom__context_type type) {
    if (type == LOOM__CONTEXT_LEVELS && sizes->cp > 1)
        return sizes->model.parallel.hierarchical_context_parallel_sizes[0];
    return type == LOOM__CONTEXT_A2A ? sizes->cp : 1;
}

bool loom__plan_gathers_experts(const loom__plan_sizes *sizes) {
    const char *type = sizes->model.moe.moe_token_dispatcher_type;
    return type && strcmp(type, "allgather") == 0;
}
