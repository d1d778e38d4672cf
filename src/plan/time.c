/* Operations and time. Operations are those of the matrix products, counted from the shapes; time is operations over
 * the machine's rate and bytes over its bandwidth, put into the simulator that proves schedules. What a rate cannot
 * tell (small products, memory traffic, jitter) is in the machine's efficiency; estimates are for comparing layouts. */
#include "plan/sizes.h"
#include <stdlib.h>

loom__plan_flops loom__plan_flops_of(const loom__plan_sizes *sizes) {
    const loom_model_config *model = &sizes->model;
    const loom_moe_config *moe = &model->moe;
    double h = (double)model->hidden_size, n = (double)model->num_attention_heads, d = (double)model->kv_channels;
    double g = (double)model->num_query_groups, f = (double)model->ffn_hidden_size, s = (double)model->seq_length;
    double gates = loom_activation_is_gated(model->activation) ? 2 : 1;
    bool windowed = model->window_size > 0 && model->window_size < model->seq_length;
    double seen = windowed ? (double)model->window_size : (s + 1) / 2;
    double projections = 2 * (h * (n + 2 * g) * d + n * d * h), mlp = 2 * (gates + 1) * h;
    double routed = (double)moe->moe_router_topk * (double)moe->moe_ffn_hidden_size +
                    (double)moe->moe_shared_expert_intermediate_size;
    loom__plan_flops made = {.attention = 4 * seen * n * d, .head = 2 * h * (double)model->vocab_size};
    made.full = 4 * (s - seen) * n * d;
    made.layer = projections + made.attention + mlp * f;
    if (moe->num_moe_experts > 0) {
        made.expert_mlp = mlp * routed + 2 * h * ((double)moe->num_moe_experts + (moe->moe_shared_expert_gate ? 1 : 0));
        made.expert_layer = projections + made.attention + made.expert_mlp;
    }
    return made;
}

bool loom__plan_short_schedule(const loom__plan_sizes *sizes, loom_schedule_config *schedule) {
    loom_schedule_config made = sizes->schedule;
    int64_t group = made.group > 0 ? made.group : made.stages, chunks = made.chunks > 0 ? made.chunks : 1;
    int64_t most = sizes->most_forwards / made.stages / chunks, least = 3 * group + made.microbatches % group;
    if (made.microbatches > most) {
        if (least > most)
            return false;
        /* Full groups can be left out: between warm-up and cool-down they are alike. */
        int64_t left = made.microbatches - (most - group);
        made.microbatches -= (left + group - 1) / group * group;
    }
    *schedule = made;
    return true;
}

/* ---- what a chunk costs ---- */

typedef struct chunk_cost {
    double forward, input, weight; /* seconds of a microbatch on a rank */
    double compute;                /* of these, in products */
    double traffic[LOOM_PLAN_TRAFFIC_KINDS];
    double flops, again; /* of a rank: with recomputation, and of it alone */
} chunk_cost;

typedef struct pace {
    const loom__plan_sizes *sizes;
    const loom__plan_links *links;
    loom__plan_flops flops;
    double rate; /* operations a second */
} pace;

static bool blocks(int kind) {
    return kind == LOOM_PLAN_TENSOR || kind == LOOM_PLAN_CONTEXT || kind == LOOM_PLAN_EXPERT;
}

static double lesser(double a, double b) {
    return a < b ? a : b;
}

/* Takes off what of the exchanges of rows passes under the shared expert: each way under one half of it, in the
 * backward under that half's gradients. */
static void hide_exchanges(
    const pace *p, const loom__plan_chunk_traffic *traffic, double expert_layers, chunk_cost *made) {
    const loom__plan_sizes *sizes = p->sizes;
    const loom_model_config *model = &sizes->model;
    const loom_moe_config *moe = &model->moe;
    if (!moe->moe_shared_expert_overlap || expert_layers == 0)
        return;
    double rows = (double)sizes->rows / (double)sizes->tp;
    double narrow = rows * 2 * (double)model->hidden_size * (double)moe->moe_shared_expert_intermediate_size / p->rate;
    double wide = loom_activation_is_gated(model->activation) ? 2 * narrow : narrow;
    double seconds = traffic->forward[LOOM__FLOW_EXPERTS] / p->links->bandwidth[LOOM__FLOW_EXPERTS];
    double one_way = seconds / 2 / expert_layers, gradients = sizes->schedule.kind == LOOM_SCHEDULE_ZERO_BUBBLE ? 1 : 2;
    double forward = expert_layers * (lesser(one_way, wide) + lesser(one_way, narrow));
    double backward = expert_layers * (lesser(one_way, gradients * wide) + lesser(one_way, gradients * narrow));
    if (model->recompute == LOOM_RECOMPUTE_FULL || moe->moe_layer_recompute)
        backward += forward;
    made->forward -= forward;
    made->input -= backward;
    made->traffic[LOOM_PLAN_EXPERT] -= forward + backward;
}

static chunk_cost cost_of(const pace *p, const loom_stage *chunk) {
    const loom__plan_sizes *sizes = p->sizes;
    int64_t experts, layers = loom__plan_count_layers(sizes, chunk, &experts);
    double share = (double)sizes->rows / (double)sizes->tp;
    double dense = (double)(layers - experts), routed = (double)experts;
    double of_layers = share * (dense * p->flops.layer + routed * p->flops.expert_layer);
    double forward = of_layers + (chunk->loss ? share * p->flops.head : 0), again = 0;
    if (sizes->model.recompute == LOOM_RECOMPUTE_FULL)
        again = of_layers;
    else if (sizes->model.recompute == LOOM_RECOMPUTE_SELECTIVE)
        again = share * (double)layers * p->flops.attention;
    if (sizes->model.moe.moe_layer_recompute)
        again += share * routed * p->flops.expert_mlp;
    /* Attention has no weights: both its products' gradients are of the input half. */
    double attention = share * (double)layers * p->flops.attention;
    chunk_cost made = {.flops = 3 * forward + again, .again = again};
    made.forward = forward / p->rate;
    made.input = (forward + attention + again) / p->rate;
    made.weight = (forward - attention) / p->rate;
    made.compute = made.forward + made.input + made.weight;
    loom__plan_chunk_traffic traffic = loom__plan_chunk_traffic_of(sizes, chunk);
    for (int flow = 0; flow < LOOM__FLOWS; flow++) {
        loom_plan_traffic_kind kind = loom__plan_flow_kind((loom__plan_flow)flow);
        if (!blocks(kind))
            continue;
        made.forward += traffic.forward[flow] / p->links->bandwidth[flow];
        made.input += traffic.backward[flow] / p->links->bandwidth[flow];
        made.traffic[kind] += (traffic.forward[flow] + traffic.backward[flow]) / p->links->bandwidth[flow];
    }
    hide_exchanges(p, &traffic, routed, &made);
    return made;
}

/* ---- the schedule ---- */

typedef struct table {
    double *forward, *input, *weight; /* [stages, chunks] */
} table;

static loom_status simulate(
    const loom_schedule_config *schedule, const table *costs, double message, loom_schedule_result *result) {
    loom_schedule_list *lists = calloc((size_t)schedule->stages, sizeof *lists);
    if (!lists)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory to simulate %lld stages", (long long)schedule->stages);
    const loom_schedule_costs given = {costs->forward, costs->input, costs->weight, message};
    loom_status status = LOOM_OK;
    for (int64_t stage = 0; stage < schedule->stages && !status; stage++) {
        loom_schedule_list plain;
        status = loom_schedule_make(schedule, stage, &plain);
        if (status)
            break;
        status = loom_schedule_post_receives_early(schedule, &plain, 2, &lists[stage]);
        loom_schedule_list_free(&plain);
    }
    if (!status)
        status = loom_schedule_simulate(schedule, lists, &given, false, result);
    for (int64_t stage = 0; stage < schedule->stages; stage++)
        loom_schedule_list_free(&lists[stage]);
    free(lists);
    return status;
}

/* The time of all microbatches: what the short schedule takes, and for each group that it leaves out what its slowest
 * stage computes. */
static loom_status play(const loom__plan_sizes *sizes, const loom_schedule_config *schedule, const table *costs,
    double message, double *busy, double *makespan) {
    int64_t stages = sizes->pp, chunks = sizes->chunks, left = sizes->schedule.microbatches;
    double slowest = 0, longest = 0, through = 0;
    for (int64_t stage = 0; stage < stages; stage++) {
        double one = 0;
        for (int64_t at = stage * chunks; at < (stage + 1) * chunks; at++) {
            one += costs->forward[at] + costs->input[at] + costs->weight[at];
            longest = costs->forward[at] + costs->input[at] + costs->weight[at] > longest
                          ? costs->forward[at] + costs->input[at] + costs->weight[at]
                          : longest;
        }
        busy[stage] = one * (double)sizes->schedule.microbatches;
        slowest = one > slowest ? one : slowest;
    }
    if (schedule) {
        loom_schedule_result result;
        LOOM_TRY(simulate(schedule, costs, message, &result));
        through = result.makespan;
        left -= schedule->microbatches;
        loom_schedule_result_free(&result);
    } else {
        through = (double)(stages - 1) * (longest + 2 * message);
    }
    *makespan = through + (double)left * slowest;
    return LOOM_OK;
}

/* ---- the whole ---- */

static void add_model_flops(const loom__plan_sizes *sizes, const loom__plan_flops *flops, loom_plan *plan) {
    const loom_stage whole = {.layers = sizes->model.num_layers, .embedding = true, .loss = true};
    int64_t experts, layers = loom__plan_count_layers(sizes, &whole, &experts);
    plan->flops_per_token =
        3 * ((double)(layers - experts) * flops->layer + (double)experts * flops->expert_layer + flops->head);
    plan->flops_per_token_full_attention = plan->flops_per_token + 3 * (double)layers * flops->full;
    plan->flops_per_step = plan->flops_per_token * (double)plan->global_batch_size * (double)plan->seq_length;
}

static double exposed(double seconds, bool overlapped, double behind) {
    if (!overlapped)
        return seconds;
    return seconds > behind ? seconds - behind : 0;
}

typedef struct stage_cost {
    chunk_cost sum; /* of the chunks of a stage, one microbatch */
    double first_forward, last_backward;
} stage_cost;

/* exposed_seconds come in as what the bytes of each kind take. */
static void find_times(const loom__plan_sizes *sizes, const stage_cost *slow, double makespan,
    const loom_plan_machine *machine, loom_plan *plan) {
    const loom_ddp_config *ddp = &sizes->config->strategy.ddp_config;
    const char *wrapper = sizes->config->strategy.ddp;
    bool overlap = ddp->overlap_grad_reduce || (wrapper && strcmp(wrapper, "pytorch") == 0);
    double m = (double)sizes->schedule.microbatches, *out = plan->exposed_seconds;
    plan->compute_seconds = m * slow->sum.compute;
    for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++)
        if (blocks(kind))
            out[kind] = m * slow->sum.traffic[kind];
    plan->bubble_seconds = makespan - plan->compute_seconds;
    for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++)
        plan->bubble_seconds -= blocks(kind) ? out[kind] : 0;
    /* Its messages travel beside the computations; what of them is waited for is in the simulated time. */
    out[LOOM_PLAN_PIPELINE] = 0;
    out[LOOM_PLAN_GRADIENTS] = exposed(out[LOOM_PLAN_GRADIENTS], overlap, slow->last_backward);
    out[LOOM_PLAN_PARAMETERS] = exposed(out[LOOM_PLAN_PARAMETERS], ddp->overlap_param_gather, slow->first_forward);
    plan->step_seconds = makespan + out[LOOM_PLAN_GRADIENTS] + out[LOOM_PLAN_PARAMETERS] + out[LOOM_PLAN_EMBEDDING];
    plan->utilization = plan->flops_per_step / (plan->step_seconds * (double)plan->world * machine->flops);
}

static loom_status fill(const loom__plan_sizes *sizes, const loom_plan_machine *machine, const loom__plan_links *links,
    const loom_schedule_config *schedule, double *memory, loom_plan *plan) {
    const pace p = {sizes, links, loom__plan_flops_of(sizes), machine->flops * machine->efficiency};
    int64_t stages = sizes->pp, chunks = sizes->chunks, places = stages * chunks;
    table costs = {memory, memory + places, memory + 2 * places};
    double *busy = memory + 3 * places, makespan, m = (double)sizes->schedule.microbatches, again = 0;
    stage_cost slow = {.first_forward = 0};
    for (int64_t stage = 0; stage < stages; stage++) {
        stage_cost all = {.first_forward = 0};
        for (int64_t c = 0; c < chunks; c++) {
            int64_t at = stage * chunks + c;
            chunk_cost one = cost_of(&p, loom__plan_chunk_of(sizes, stage, c));
            costs.forward[at] = one.forward;
            costs.input[at] = one.input;
            costs.weight[at] = one.weight;
            all.first_forward += one.forward;
            all.last_backward += one.input + one.weight;
            all.sum.compute += one.compute;
            for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++)
                all.sum.traffic[kind] += one.traffic[kind];
            plan->stages[stage].flops += m * one.flops;
            again += m * one.again * (double)plan->world / (double)stages;
        }
        if (all.first_forward + all.last_backward > slow.first_forward + slow.last_backward)
            slow = all;
    }
    const double message = loom__plan_message(sizes) / links->bandwidth[LOOM__FLOW_PIPELINE];
    LOOM_TRY(play(sizes, schedule, &costs, message, busy, &makespan));
    double busy_all = 0;
    for (int64_t stage = 0; stage < stages; stage++) {
        plan->stages[stage].idle = makespan > 0 ? 1 - busy[stage] / makespan : 0;
        busy_all += busy[stage];
    }
    plan->bubble = makespan > 0 ? 1 - busy_all / ((double)stages * makespan) : 0;
    plan->bubble = plan->bubble > 0 ? plan->bubble : 0;
    plan->bubble_simulated = schedule != NULL;
    plan->recompute_flops_per_step = again;
    add_model_flops(sizes, &p.flops, plan);
    find_times(sizes, &slow, makespan, machine, plan);
    return LOOM_OK;
}

loom_status loom__plan_time_make(const loom__plan_sizes *sizes, const loom_plan_machine *machine,
    const loom__plan_links *links, const loom_schedule_config *schedule, loom_plan *plan) {
    double *memory = calloc((size_t)(sizes->pp * (3 * sizes->chunks + 1)), sizeof *memory);
    if (!memory)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory to time %lld stages", (long long)sizes->pp);
    loom_status status = fill(sizes, machine, links, schedule, memory, plan);
    free(memory);
    return status;
}
