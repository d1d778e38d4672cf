/* Bytes that move in a step. A collective over n ranks is counted as a ring has it, which is also what the definition
 * of sums here takes: a gather or a scatter of x bytes sends (n-1)/n x from each rank, an all-reduce twice that.
 * Whether they leave a node follows from the ranks of a group as the layout has them, nodes being runs of consecutive
 * ranks. */
#include "plan/sizes.h"

static const loom_group_kind groups_of[LOOM_PLAN_TRAFFIC_KINDS] = {
    [LOOM_PLAN_TENSOR] = LOOM_GROUP_TP,
    [LOOM_PLAN_CONTEXT] = LOOM_GROUP_CP,
    [LOOM_PLAN_EXPERT] = LOOM_GROUP_ETP_EP,
    [LOOM_PLAN_PIPELINE] = LOOM_GROUP_PP,
    [LOOM_PLAN_GRADIENTS] = LOOM_GROUP_DP_CP,
    [LOOM_PLAN_PARAMETERS] = LOOM_GROUP_DP_CP,
    [LOOM_PLAN_EMBEDDING] = LOOM_GROUP_EMBD,
};

const char *loom_plan_traffic_name(loom_plan_traffic_kind kind) {
    static const char *const names[] = {
        "tensor", "context", "expert", "pipeline", "gradients", "parameters", "embedding"};
    return kind >= 0 && kind < LOOM_PLAN_TRAFFIC_KINDS ? names[kind] : "?";
}

/* Of x bytes that n ranks gather or scatter, what each sends. */
static double share(double bytes, int64_t ranks) {
    return bytes * (double)(ranks - 1) / (double)ranks;
}

static double tokens(int64_t rows, int64_t elements, int64_t width) {
    return (double)rows * (double)elements * (double)width;
}

double loom__plan_message(const loom__plan_sizes *sizes) {
    return tokens(sizes->own_rows, sizes->model.hidden_size, sizes->wire);
}

/* Keys and values go round the ring, or are gathered; in the backward again, and their gradients, in fp32, go a whole
 * turn, or are scattered. Heads are exchanged for rows before and behind. */
static void add_context(const loom__plan_sizes *sizes, double layers, loom__plan_chunk_traffic *to) {
    const loom_model_config *model = &sizes->model;
    int64_t groups = model->num_query_groups / sizes->tp, heads = model->num_attention_heads / sizes->tp;
    groups = groups > 0 ? groups : 1;
    bool levels = loom__context_type_is(model, "a2a+p2p"), by_heads = levels || loom__context_type_is(model, "a2a");
    int64_t inner = levels ? model->parallel.hierarchical_context_parallel_sizes[0] : by_heads ? sizes->cp : 1;
    int64_t members = sizes->cp / inner, elements = 2 * groups * model->kv_channels;
    double keys = (double)(members - 1) * tokens(sizes->rows, elements, sizes->width);
    double turns = loom__context_type_is(model, "all_gather") || members == 1 ? (double)(members - 1) : (double)members;
    double exchanged = share(tokens(sizes->rows, (2 * heads + 2 * groups) * model->kv_channels, sizes->width), inner);
    double moved = keys + exchanged, again = model->recompute == LOOM_RECOMPUTE_NONE ? 0 : moved;
    to->forward[LOOM_PLAN_CONTEXT] += layers * moved;
    to->backward[LOOM_PLAN_CONTEXT] += layers * (moved + turns * tokens(sizes->rows, elements, 4) + again);
}

/* Rows to their experts and back, spread evenly: over expert ranks by an all-to-all, over those that share an expert by
 * a gather there and a scatter back. */
static void add_experts(const loom__plan_sizes *sizes, double layers, loom__plan_chunk_traffic *to) {
    const loom_model_config *model = &sizes->model;
    double rows = tokens(loom__plan_routed_rows(sizes), model->hidden_size, sizes->width);
    double one_way = share(rows, sizes->ep) + rows * (double)(sizes->etp - 1);
    bool again = model->recompute == LOOM_RECOMPUTE_FULL || model->moe.moe_layer_recompute;
    to->forward[LOOM_PLAN_EXPERT] += layers * 2 * one_way;
    to->backward[LOOM_PLAN_EXPERT] += layers * (again ? 4 : 2) * one_way;
}

loom__plan_chunk_traffic loom__plan_chunk_traffic_of(const loom__plan_sizes *sizes, const loom_stage *chunk) {
    loom__plan_chunk_traffic made = {{0}, {0}};
    int64_t experts, layers = loom__plan_count_layers(sizes, chunk, &experts);
    bool scatters = sizes->sequence_parallel, again = sizes->model.recompute == LOOM_RECOMPUTE_FULL;
    double unit = share(tokens(sizes->rows, sizes->model.hidden_size, sizes->width), sizes->tp);
    /* Pairs of a column- and a row-parallel region: attention, and MLP or shared expert. */
    double pairs = (double)(2 * layers - experts);
    if (sizes->model.moe.moe_shared_expert_intermediate_size > 0)
        pairs += (double)experts;
    double *forward = made.forward, *backward = made.backward;
    forward[LOOM_PLAN_TENSOR] = 2 * pairs * unit;
    backward[LOOM_PLAN_TENSOR] = (scatters ? 3 : 2) * pairs * unit + (again ? forward[LOOM_PLAN_TENSOR] : 0);
    if (chunk->embedding) {
        forward[LOOM_PLAN_TENSOR] += (scatters ? 1 : 2) * unit;
        backward[LOOM_PLAN_TENSOR] += scatters ? unit : 0;
    }
    if (chunk->loss) {
        forward[LOOM_PLAN_TENSOR] += (scatters ? unit : 0) + 3 * 2 * share(tokens(sizes->rows, 1, 4), sizes->tp);
        backward[LOOM_PLAN_TENSOR] += 2 * unit;
    }
    if (sizes->cp > 1)
        add_context(sizes, (double)layers, &made);
    add_experts(sizes, (double)experts, &made);
    forward[LOOM_PLAN_PIPELINE] = chunk->loss ? 0 : loom__plan_message(sizes);
    backward[LOOM_PLAN_PIPELINE] = chunk->embedding ? 0 : loom__plan_message(sizes);
    return made;
}

/* Once a step, of one rank of the stage. */
static void add_reductions(const loom__plan_sizes *sizes, const loom__plan_model *model, int64_t stage, double *to) {
    const loom_run_config *config = sizes->config;
    loom__plan_parameters held = loom__plan_stage_parameters(sizes, model, stage);
    double dense = (double)(held.buffer - held.expert_buffer), expert = (double)held.expert_buffer;
    double width = config->precision.grad_reduce_in_fp32 ? 4 : (double)sizes->width;
    int64_t replicas = sizes->dp * sizes->cp;
    double times = sizes->sharded && sizes->shards == replicas ? 1 : 2;
    to[LOOM_PLAN_TENSOR] += 2 * share(4.0 * (double)held.partial, sizes->tp);
    to[LOOM_PLAN_GRADIENTS] += times * width * (share(dense, replicas) + share(expert, sizes->edp));
    if (sizes->sharded)
        to[LOOM_PLAN_PARAMETERS] +=
            (double)sizes->width * (share(dense, sizes->shards) + share(expert, sizes->expert_shards));
    if (model->tied_head.rank > 0 && sizes->pp > 1 && (stage == 0 || stage == sizes->pp - 1))
        to[LOOM_PLAN_EMBEDDING] += 2 * share(4.0 * (double)model->tied_head.rank, 2);
}

/* ---- nodes ---- */

/* Of all tokens that a member sends to all others. */
static double across_all(const loom_layout *layout, loom_group_kind kind, int64_t index, int64_t node) {
    int64_t size = loom_layout_group_size(layout, kind, index), apart = 0;
    int64_t first = loom_layout_group_member(layout, kind, index, 0);
    for (int64_t place = 1; place < size; place++)
        apart += loom_layout_group_member(layout, kind, index, place) / node != first / node;
    return size > 1 ? (double)apart / (double)(size - 1) : 0;
}

/* Of the steps of a ring, or of a chain. */
static double across_ring(const loom_layout *layout, loom_group_kind kind, int64_t index, int64_t node, bool closed) {
    int64_t size = loom_layout_group_size(layout, kind, index), apart = 0, steps = closed ? size : size - 1;
    for (int64_t place = 0; place < steps; place++)
        apart += loom_layout_group_member(layout, kind, index, place) / node !=
                 loom_layout_group_member(layout, kind, index, (place + 1) % size) / node;
    return steps > 0 ? (double)apart / (double)steps : 0;
}

double loom__plan_across(const loom__plan_sizes *sizes, loom_plan_traffic_kind kind, int64_t ranks_per_node) {
    /* Groups of a kind are alike but for where nodes begin; so many tell of all. */
    enum { GROUPS_ASKED = 64, MEMBERS_ASKED = 1 << 16 };
    const loom_layout *layout = &sizes->layout;
    loom_group_kind group = groups_of[kind];
    int64_t count = loom_layout_group_count(layout, group), size = loom_layout_group_size(layout, group, 0);
    if (ranks_per_node < 1 || count < 1 || size < 2)
        return 0;
    int64_t asked = MEMBERS_ASKED / size;
    asked = asked < 1 ? 1 : asked > GROUPS_ASKED ? GROUPS_ASKED : asked;
    asked = asked > count ? count : asked;
    double sum = 0;
    for (int64_t i = 0; i < asked; i++) {
        int64_t index = i * (count / asked);
        bool closed = kind != LOOM_PLAN_PIPELINE || sizes->chunks > 1;
        sum += kind == LOOM_PLAN_EXPERT ? across_all(layout, group, index, ranks_per_node)
                                        : across_ring(layout, group, index, ranks_per_node, closed);
    }
    return sum / (double)asked;
}

/* ---- the whole ---- */

void loom__plan_traffic_make(
    const loom__plan_sizes *sizes, const loom__plan_model *model, const loom_plan_machine *machine, loom_plan *plan) {
    double microbatches = (double)sizes->schedule.microbatches;
    double ranks = (double)loom_layout_world_size(&sizes->layout) / (double)sizes->pp;
    double all[LOOM_PLAN_TRAFFIC_KINDS] = {0}, most[LOOM_PLAN_TRAFFIC_KINDS] = {0};
    for (int64_t stage = 0; stage < sizes->pp; stage++) {
        double sent[LOOM_PLAN_TRAFFIC_KINDS] = {0};
        for (int64_t c = 0; c < sizes->chunks; c++) {
            loom__plan_chunk_traffic one = loom__plan_chunk_traffic_of(sizes, loom__plan_chunk_of(sizes, stage, c));
            for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++)
                sent[kind] += microbatches * (one.forward[kind] + one.backward[kind]);
        }
        add_reductions(sizes, model, stage, sent);
        for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++) {
            all[kind] += ranks * sent[kind];
            most[kind] = sent[kind] > most[kind] ? sent[kind] : most[kind];
        }
    }
    for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++) {
        double across = loom__plan_across(sizes, (loom_plan_traffic_kind)kind, machine->ranks_per_node);
        plan->traffic[kind] = (loom_plan_traffic){
            .group = loom_layout_group_size(&sizes->layout, groups_of[kind], 0),
            .rank = most[kind],
            .inside = (1 - across) * all[kind],
            .across = across * all[kind],
        };
    }
}
