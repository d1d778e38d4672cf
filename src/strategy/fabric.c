/* The fabric: a validated configuration, then ranks and groups, then modules. Nothing here computes; it decides who
 * belongs to whom and hands the parts to each other in the order that strategy-wide contracts fix. */
#include "base/faults.h"
#include "config/sizes.h"
#include "strategy/strategy.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The groups that are communicated in so far; the layout knows all of them. */
static const loom_group_kind used_groups[] = {LOOM_GROUP_TP, LOOM_GROUP_DP, LOOM_GROUP_DP_CP, LOOM_GROUP_TP_PP,
    LOOM_GROUP_PP, LOOM_GROUP_EMBD, LOOM_GROUP_CP, LOOM_GROUP_TP_CP, LOOM_GROUP_TP_DP_CP, LOOM_GROUP_INTRA_DP_CP,
    LOOM_GROUP_INTRA_DIST_OPT, LOOM_GROUP_EP, LOOM_GROUP_ETP, LOOM_GROUP_ETP_EP, LOOM_GROUP_ETP_EP_PP, LOOM_GROUP_EDP,
    LOOM_GROUP_INTRA_EDP};

static loom_status copy_callbacks(loom_fabric *fabric) {
    LOOM_TRY(loom_callbacks_create(&fabric->callbacks));
    return fabric->config.megatron_callbacks
               ? loom_callbacks_merge(fabric->callbacks, fabric->config.megatron_callbacks)
               : LOOM_OK;
}

/* Every fault at once: of the fields, of the precision, and of the sizes for the ranks that there are. */
static loom_status check(
    loom_rank *rank, const loom_megatron_strategy_config *config, const loom_precision_config *precision) {
    loom__faults faults;
    loom_layout layout;
    loom__faults_begin(&faults);
    loom__faults_add_record(&faults, loom_megatron_strategy_config_check(config));
    if (precision)
        loom__faults_add_record(&faults, loom_precision_config_check(precision));
    if (faults.count == 0) {
        loom_parallel_sizes sizes = loom__strategy_sizes(config, loom_rank_count(rank));
        loom__faults_add_record(&faults, loom_layout_init(&sizes, &layout));
    }
    return loom__faults_end(&faults);
}

loom_status loom_fabric_create(loom_rank *rank, const loom_megatron_strategy_config *config,
    const loom_precision_config *precision, loom_fabric **out) {
    LOOM_TRY(check(rank, config, precision));
    loom_fabric *fabric = calloc(1, sizeof *fabric);
    if (!fabric)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a fabric");
    fabric->rank = rank;
    fabric->config = *config;
    fabric->pytorch_ddp = config->ddp && strcmp(config->ddp, "pytorch") == 0;
    if (fabric->pytorch_ddp)
        fabric->config.ddp_config = (loom_ddp_config){0};
    /* The reference's constructor turns it off with pytorch, whatever it is given. */
    fabric->no_ddp_communication_hook = config->no_ddp_communication_hook && !fabric->pytorch_ddp;
    loom__precision_make(precision, &fabric->precision);
    fabric->precision_plugin = config->precision ? config->precision : &fabric->precision.plugin;
    fabric->pipeline_dtype = config->pipeline_dtype ? config->pipeline_dtype : "fp32";
    if (config->precision)
        fabric->precision.has_scaler = false; /* whoever brings a plugin sets its scaler up */
    else if (fabric->precision.wire_given || !config->pipeline_dtype)
        fabric->pipeline_dtype = fabric->precision.wire;
    fabric->accelerator = config->accelerator ? config->accelerator : loom_accelerator_cpu();
    fabric->environment = config->cluster_environment ? config->cluster_environment : loom_cluster_environment_rank();
    fabric->sampler = config->data_sampler;
    fabric->seed = 1234;
    fabric->perform_initialization = true;
    loom_status status = copy_callbacks(fabric);
    if (!status)
        status = loom__fabric_open_io(fabric);
    if (status) {
        loom_fabric_destroy(fabric);
        return status;
    }
    *out = fabric;
    return LOOM_OK;
}

static void destroy_groups(loom_fabric *fabric) {
    for (int kind = 0; kind < LOOM_GROUP_KIND_COUNT; kind++) {
        loom_group_destroy(fabric->groups[kind]);
        fabric->groups[kind] = NULL;
    }
}

void loom_fabric_destroy(loom_fabric *fabric) {
    if (!fabric)
        return;
    loom__fabric_close_io(fabric);
    free(fabric->save_end);
    destroy_groups(fabric);
    loom__rank_lift_limit(fabric->rank, &fabric->limit);
    if (fabric->device_ready && fabric->accelerator->teardown)
        fabric->accelerator->teardown(fabric->accelerator->context, fabric->rank);
    loom_callbacks_destroy(fabric->callbacks);
    free(fabric);
}

static loom_status compute_layout(loom_fabric *fabric) {
    const loom_cluster_environment *environment = fabric->environment;
    int world = environment->world_size(environment->context, fabric->rank);
    int index = environment->global_rank(environment->context, fabric->rank);
    if (world != loom_rank_count(fabric->rank) || index != loom_rank_index(fabric->rank))
        return loom_fail(LOOM_ERR_CONFIG, "cluster environment %s says rank %d of %d, but this is rank %d of %d",
            environment->name, index, world, loom_rank_index(fabric->rank), loom_rank_count(fabric->rank));
    loom_parallel_sizes sizes = loom__strategy_sizes(&fabric->config, world);
    return loom_layout_init(&sizes, &fabric->layout);
}

static loom_status create_group(loom_fabric *fabric, loom_group_kind kind) {
    int64_t index, place, me = loom_rank_index(fabric->rank);
    if (!loom_layout_group_of(&fabric->layout, kind, me, &index, &place))
        return LOOM_OK;
    int64_t size = loom_layout_group_size(&fabric->layout, kind, index);
    int *ranks = malloc((size_t)size * sizeof *ranks);
    if (!ranks)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a group of %lld ranks", (long long)size);
    for (int64_t i = 0; i < size; i++)
        ranks[i] = (int)loom_layout_group_member(&fabric->layout, kind, index, i);
    loom_status status =
        loom_group_create(fabric->rank, loom_layout_kind_name(kind), ranks, (int)size, &fabric->groups[kind]);
    free(ranks);
    if (!status && loom_comm_rank(fabric->groups[kind]) != place)
        status = loom_fail(LOOM_ERR_INTERNAL, "rank %lld has place %d in its group %s, the layout says %lld",
            (long long)me, loom_comm_rank(fabric->groups[kind]), loom_layout_kind_name(kind), (long long)place);
    return status;
}

static loom_status tune(loom_fabric *fabric) {
    const loom_accelerator *accelerator = fabric->accelerator;
    char text[256] = "";
    if (accelerator->tune)
        LOOM_TRY(accelerator->tune(accelerator->context, fabric->rank, text, sizeof text));
    if (text[0] && loom_rank_index(fabric->rank) == 0)
        loom_rank_log(fabric->rank, LOOM_LOG_INFO, "%s", text);
    return LOOM_OK;
}

static loom_status setup_device(loom_fabric *fabric) {
    const loom_accelerator *accelerator = fabric->accelerator;
    const loom_cluster_environment *environment = fabric->environment;
    int local = environment->local_rank(environment->context, fabric->rank);
    if (local < 0 || local >= loom_rank_local_count(fabric->rank))
        return loom_fail(LOOM_ERR_CONFIG, "cluster environment %s says local rank %d of rank %d, expected 0 to %d",
            environment->name, local, loom_rank_index(fabric->rank), loom_rank_local_count(fabric->rank) - 1);
    if (accelerator->setup_device)
        LOOM_TRY(accelerator->setup_device(accelerator->context, fabric->rank, local));
    fabric->device_ready = true;
    return LOOM_OK;
}

/* What a rank does by itself before it meets the others in their groups. */
static loom_status prepare(loom_fabric *fabric) {
    LOOM_TRY(compute_layout(fabric));
    loom__rank_set_limit(fabric->rank, &fabric->limit, fabric->config.timeout);
    return fabric->device_ready ? LOOM_OK : setup_device(fabric);
}

loom_status loom_fabric_launch(loom_fabric *fabric) {
    if (fabric->modules > 0)
        return loom_fail(LOOM_ERR_STATE, "launch: %lld module(s) still use the groups of the first launch",
            (long long)fabric->modules);
    const loom_cluster_environment *environment = fabric->environment;
    fabric->launched = false; /* until all groups stand again */
    destroy_groups(fabric);
    LOOM_TRY(loom_agree(loom_rank_world(fabric->rank), prepare(fabric)));
    for (size_t i = 0; i < sizeof used_groups / sizeof *used_groups; i++)
        LOOM_TRY(create_group(fabric, used_groups[i]));
    if (!fabric->tuned) {
        LOOM_TRY(loom_agree(loom_rank_world(fabric->rank), tune(fabric)));
        if (loom_rank_index(fabric->rank) == 0 &&
            !environment->creates_processes_externally(environment->context, fabric->rank))
            loom_rank_log(fabric->rank, LOOM_LOG_DEBUG,
                "the ranks are threads of this process: start_method %s has nothing to start",
                fabric->config.start_method);
        fabric->tuned = true;
    }
    fabric->launched = true;
    return LOOM_OK;
}

void loom_fabric_seed_everything(loom_fabric *fabric, uint64_t seed) {
    fabric->seed = seed;
}

loom_status loom_fabric_set_no_ddp_communication_hook(loom_fabric *fabric, bool on) {
    if (on && !fabric->pytorch_ddp)
        return loom_fail(LOOM_ERR_CONFIG,
            "no_ddp_communication_hook: found true with strategy.ddp megatron, which has no such hook; expected ddp "
            "pytorch");
    fabric->no_ddp_communication_hook = on;
    return LOOM_OK;
}

loom_parallelism loom_fabric_parallelism(const loom_fabric *fabric) {
    const loom_megatron_strategy_config *config = &fabric->config;
    return (loom_parallelism){
        .tensor_model_parallel_size = config->tensor_model_parallel_size,
        .pipeline_model_parallel_size = config->pipeline_model_parallel_size,
        .virtual_pipeline_model_parallel_size = config->virtual_pipeline_model_parallel_size,
        .microbatch_group_size_per_vp_stage = config->microbatch_group_size_per_vp_stage
                                                  ? config->microbatch_group_size_per_vp_stage
                                                  : config->pipeline_model_parallel_size,
        .context_parallel_size = config->context_parallel_size,
        .sequence_parallel = config->sequence_parallel,
        .expert_model_parallel_size = config->expert_model_parallel_size,
        .expert_tensor_parallel_size = config->expert_tensor_parallel_size ? config->expert_tensor_parallel_size
                                                                           : config->tensor_model_parallel_size,
        .moe_extended_tp = config->moe_extended_tp,
        .encoder_tensor_model_parallel_size = config->encoder_tensor_model_parallel_size,
        .encoder_pipeline_model_parallel_size = config->encoder_pipeline_model_parallel_size,
        .pipeline_dtype = config->pipeline_dtype,
        .num_layers_in_first_pipeline_stage = fabric->split.num_layers_in_first_pipeline_stage,
        .num_layers_in_last_pipeline_stage = fabric->split.num_layers_in_last_pipeline_stage,
        .account_for_embedding_in_pipeline_split = fabric->split.account_for_embedding_in_pipeline_split,
        .account_for_loss_in_pipeline_split = fabric->split.account_for_loss_in_pipeline_split,
        .pipeline_model_parallel_layout = fabric->split.pipeline_model_parallel_layout,
        .balanced_pipeline_split = fabric->split.balanced_pipeline_split,
    };
}

loom_rank *loom_fabric_rank(const loom_fabric *fabric) {
    return fabric->rank;
}
const loom_layout *loom_fabric_layout(const loom_fabric *fabric) {
    return &fabric->layout;
}
loom_comm *loom_fabric_group(const loom_fabric *fabric, loom_group_kind kind) {
    return kind >= 0 && kind < LOOM_GROUP_KIND_COUNT ? fabric->groups[kind] : NULL;
}
loom_callbacks *loom_fabric_callbacks(loom_fabric *fabric) {
    return fabric->callbacks;
}

loom_status loom_fabric_megatron_context(loom_fabric *fabric, loom_context_body body, void *argument) {
    bool before = fabric->perform_initialization;
    fabric->perform_initialization = false;
    loom_status status = body(argument);
    fabric->perform_initialization = before;
    return status;
}

loom_status loom_fabric_module_init_context(
    loom_fabric *fabric, bool empty_init, loom_context_body body, void *argument) {
    return empty_init ? loom_fabric_megatron_context(fabric, body, argument) : body(argument);
}

loom_status loom_fabric_process_datamodule(loom_fabric *fabric, const loom_datamodule *datamodule) {
    if (datamodule->setup)
        LOOM_TRY(datamodule->setup(datamodule->context));
    if (!fabric->sampler && datamodule->data_sampler)
        fabric->sampler = datamodule->data_sampler(datamodule->context);
    return LOOM_OK;
}
