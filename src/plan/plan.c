/* A plan, put together: sizes, parameters, memory, traffic, time, and the line that says what binds. */
#include "plan/sizes.h"
#include <stdio.h>
#include <stdlib.h>

/* ---- machines ---- */

/* Dense bf16 and bandwidths a direction as the makers publish them; efficiency as large runs are reported. */
static const loom_plan_machine machines[] = {
    {.name = "cpu", .flops = 80e9, .efficiency = 0.8, .node_bandwidth = 10e9, .network_bandwidth = 1.25e9},
    {.name = "a100",
        .flops = 312e12,
        .efficiency = 0.6,
        .node_bandwidth = 300e9,
        .network_bandwidth = 25e9,
        .memory = 80.0 * 1073741824.0,
        .ranks_per_node = 8},
    {.name = "h100",
        .flops = 989e12,
        .efficiency = 0.55,
        .node_bandwidth = 450e9,
        .network_bandwidth = 50e9,
        .memory = 80.0 * 1073741824.0,
        .ranks_per_node = 8},
    {.name = "b200",
        .flops = 2250e12,
        .efficiency = 0.5,
        .node_bandwidth = 900e9,
        .network_bandwidth = 50e9,
        .memory = 180.0 * 1073741824.0,
        .ranks_per_node = 8},
};

enum { MACHINES = sizeof machines / sizeof *machines };

bool loom_plan_machine_find(const char *name, loom_plan_machine *machine) {
    for (int i = 0; i < MACHINES; i++)
        if (strcmp(machines[i].name, name) == 0) {
            *machine = machines[i];
            return true;
        }
    return false;
}

const char *const *loom_plan_machine_names(void) {
    static const char *const names[] = {"cpu", "a100", "h100", "b200", NULL};
    return names;
}

loom_plan_options loom_plan_options_default(void) {
    return (loom_plan_options){.machine = machines[0]};
}

/* ---- what binds ---- */

static const struct part {
    const char *name, *help;
    size_t offset;
} memory_parts[] = {
    {"weights", "a larger tensor or pipeline size", offsetof(loom_plan_memory, weights)},
    {"gradients", "a larger tensor or pipeline size", offsetof(loom_plan_memory, gradients)},
    {"optimizer state", "strategy.ddp.use_distributed_optimizer, a larger tensor or pipeline size",
        offsetof(loom_plan_memory, optimizer)},
    {"activations", "model.recompute=full, strategy.sequence_parallel, a smaller data.micro_batch_size",
        offsetof(loom_plan_memory, activations)},
    {"buffers", "a smaller data.micro_batch_size", offsetof(loom_plan_memory, buffers)},
    {"logits", "a larger tensor size, a smaller data.micro_batch_size", offsetof(loom_plan_memory, logits)},
};

static double part_of(const loom_plan_memory *memory, const struct part *part) {
    double value;
    memcpy(&value, (const char *)memory + part->offset, sizeof value);
    return value;
}

/* What is in use already does not help. */
static const char *help_with(const loom__plan_sizes *sizes, const struct part *part) {
    if (sizes->sharded && part->offset == offsetof(loom_plan_memory, optimizer))
        return "more data-parallel ranks, a larger tensor or pipeline size";
    if (part->offset != offsetof(loom_plan_memory, activations))
        return part->help;
    if (sizes->model.recompute == LOOM_RECOMPUTE_FULL)
        return "a larger tensor size, a smaller data.micro_batch_size";
    return sizes->sequence_parallel ? "model.recompute=full, a larger tensor size, a smaller data.micro_batch_size"
                                    : part->help;
}

static void memory_binds(const loom__plan_sizes *sizes, loom_plan *plan) {
    const double gibi = 1073741824.0;
    const loom_plan_memory *memory = &plan->stages[plan->worst].memory;
    const struct part *largest = &memory_parts[0];
    for (size_t i = 1; i < sizeof memory_parts / sizeof *memory_parts; i++)
        if (part_of(memory, &memory_parts[i]) > part_of(memory, largest))
            largest = &memory_parts[i];
    snprintf(plan->binds, sizeof plan->binds,
        "memory: a rank of stage %lld needs %.1f of %.1f GiB, %.1f of them %s; what helps: %s", (long long)plan->worst,
        memory->total / gibi, plan->memory_limit / gibi, part_of(memory, largest) / gibi, largest->name,
        help_with(sizes, largest));
}

static void time_binds(const loom__plan_sizes *sizes, loom_plan *plan) {
    static const char *const helps[LOOM_PLAN_TRAFFIC_KINDS] = {
        [LOOM_PLAN_TENSOR] = "a smaller tensor size, within a node",
        [LOOM_PLAN_CONTEXT] = "a smaller context size",
        [LOOM_PLAN_EXPERT] = "a smaller expert size, within a node",
        [LOOM_PLAN_PIPELINE] = "larger microbatches",
        [LOOM_PLAN_GRADIENTS] = "strategy.ddp.overlap_grad_reduce, a larger data.global_batch_size",
        [LOOM_PLAN_PARAMETERS] = "strategy.ddp.overlap_param_gather, a larger data.global_batch_size",
        [LOOM_PLAN_EMBEDDING] = "an untied head",
    };
    const char *name = "computation", *help = "more ranks";
    double most = plan->compute_seconds;
    if (plan->bubble_seconds > most) {
        most = plan->bubble_seconds;
        name = "waiting in the pipeline";
        help = sizes->chunks > 1 ? "a larger data.global_batch_size, fewer stages"
                                 : "a larger data.global_batch_size, virtual stages, schedule=zero-bubble";
    }
    for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++)
        if (plan->exposed_seconds[kind] > most) {
            most = plan->exposed_seconds[kind];
            name = loom_plan_traffic_name((loom_plan_traffic_kind)kind);
            help = helps[kind];
        }
    bool computes = strcmp(name, "computation") == 0, waits = strncmp(name, "waiting", 7) == 0;
    snprintf(plan->binds, sizeof plan->binds, "%s%s: %.0f %% of the step; what helps: %s", name,
        computes || waits ? "" : " traffic", 100 * most / plan->step_seconds, help);
}

void loom__plan_binds(const loom__plan_sizes *sizes, loom_plan *plan) {
    if (plan->memory_limit > 0 && plan->stages[plan->worst].memory.total > plan->memory_limit)
        memory_binds(sizes, plan);
    else
        time_binds(sizes, plan);
}

/* ---- the whole ---- */

static void describe(const loom__plan_sizes *sizes, const loom_plan_machine *machine, loom_plan *plan) {
    int64_t world = loom_layout_world_size(&sizes->layout), node = machine->ranks_per_node;
    plan->world = world;
    plan->nodes = node > 0 ? (world + node - 1) / node : 1;
    plan->tensor = sizes->tp;
    plan->context = sizes->cp;
    plan->expert = sizes->ep;
    plan->data = sizes->dp;
    plan->pipeline = sizes->pp;
    plan->chunks = sizes->chunks;
    plan->microbatches = sizes->schedule.microbatches;
    plan->micro_batch_size = sizes->b;
    plan->global_batch_size = sizes->schedule.microbatches * sizes->b * sizes->dp;
    plan->seq_length = sizes->model.seq_length;
    plan->memory_limit = machine->memory;
}

static void count_parameters(const loom__plan_sizes *sizes, const loom__plan_model *model, loom_plan *plan) {
    const loom_stage whole = {.layers = sizes->model.num_layers};
    int64_t experts, layers = loom__plan_count_layers(sizes, &whole, &experts);
    plan->parameters = model->embedding.whole + model->head.whole + (layers - experts) * model->layer.whole +
                       experts * model->expert_layer.whole;
    plan->active_parameters = model->embedding.active + model->head.active + (layers - experts) * model->layer.active +
                              experts * model->expert_layer.active;
}

static loom_status fill(const loom__plan_sizes *sizes, const loom_plan_machine *machine, loom_plan *plan) {
    loom__plan_model model;
    loom_schedule_config schedule;
    LOOM_TRY(loom__plan_parameters_make(sizes, &model));
    describe(sizes, machine, plan);
    count_parameters(sizes, &model, plan);
    const loom_schedule_config *played = loom__plan_short_schedule(sizes, &schedule) ? &schedule : NULL;
    LOOM_TRY(loom__plan_memory_make(sizes, &model, played, plan));
    const loom__plan_links links = loom__plan_links_of(sizes, machine);
    loom__plan_traffic_make(sizes, &model, &links, plan);
    LOOM_TRY(loom__plan_time_make(sizes, machine, &links, played, plan));
    loom__plan_binds(sizes, plan);
    return LOOM_OK;
}

loom_status loom__plan_make(
    const loom_run_config *config, const loom_plan_options *options, int64_t most_forwards, loom_plan **out) {
    loom__plan_sizes sizes;
    LOOM_TRY(loom__plan_sizes_make(config, options->world_size, &sizes));
    sizes.most_forwards = most_forwards;
    loom_plan *plan = calloc(1, sizeof *plan);
    loom_status status = LOOM_OK;
    if (plan) {
        plan->stage_count = sizes.pp;
        plan->stages = calloc((size_t)sizes.pp, sizeof *plan->stages);
    }
    if (!plan || !plan->stages)
        status = loom_fail(LOOM_ERR_MEMORY, "out of memory to plan %lld stages", (long long)sizes.pp);
    if (!status)
        status = fill(&sizes, &options->machine, plan);
    loom__plan_sizes_free(&sizes);
    if (status) {
        loom_plan_destroy(plan);
        return status;
    }
    *out = plan;
    return LOOM_OK;
}

loom_status loom_plan_make(const loom_run_config *config, const loom_plan_options *options, loom_plan **plan) {
    enum { FORWARDS = 1 << 16 }; /* a few tenths of a second */
    return loom__plan_make(config, options, FORWARDS, plan);
}

void loom_plan_destroy(loom_plan *plan) {
    if (!plan)
        return;
    free(plan->stages);
    free(plan);
}
