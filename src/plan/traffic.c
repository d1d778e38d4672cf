/* Bytes that move in a step. A collective over n ranks is counted as a ring has it, which is also what the definition
 * of sums here takes: a gather or a scatter of x bytes sends (n-1)/n x from each rank, an all-reduce twice that.
 * Whether they leave a node follows from the ranks of a group as the layout has them, nodes being runs of consecutive
 * ranks. */
#include "plan/sizes.h"

/* How the members of a group exchange. */
typedef enum way { RING, CHAIN, PAIRS } way;

static const struct flow {
    loom_plan_traffic_kind kind;
    loom_group_kind group;
    way way;
} flows[LOOM__FLOWS] = {
    [LOOM__FLOW_TENSOR] = {LOOM_PLAN_TENSOR, LOOM_GROUP_TP, RING},
    [LOOM__FLOW_CONTEXT_RING] = {LOOM_PLAN_CONTEXT, LOOM_GROUP_CP, RING},
    [LOOM__FLOW_CONTEXT_HEADS] = {LOOM_PLAN_CONTEXT, LOOM_GROUP_CP, PAIRS},
    [LOOM__FLOW_CONTEXT_OUTER_RING] = {LOOM_PLAN_CONTEXT, LOOM_GROUP_HCP_L1, RING},
    [LOOM__FLOW_CONTEXT_INNER_HEADS] = {LOOM_PLAN_CONTEXT, LOOM_GROUP_HCP_L0, PAIRS},
    [LOOM__FLOW_EXPERTS] = {LOOM_PLAN_EXPERT, LOOM_GROUP_EP, PAIRS},
    [LOOM__FLOW_EXPERT_SLICES] = {LOOM_PLAN_EXPERT, LOOM_GROUP_ETP, RING},
    [LOOM__FLOW_PIPELINE] = {LOOM_PLAN_PIPELINE, LOOM_GROUP_PP, CHAIN},
    [LOOM__FLOW_GRADIENTS] = {LOOM_PLAN_GRADIENTS, LOOM_GROUP_DP_CP, RING},
    [LOOM__FLOW_EXPERT_GRADIENTS] = {LOOM_PLAN_GRADIENTS, LOOM_GROUP_EDP, RING},
    [LOOM__FLOW_PARAMETERS] = {LOOM_PLAN_PARAMETERS, LOOM_GROUP_DP_CP, RING},
    [LOOM__FLOW_EXPERT_PARAMETERS] = {LOOM_PLAN_PARAMETERS, LOOM_GROUP_EDP, RING},
    [LOOM__FLOW_EMBEDDING] = {LOOM_PLAN_EMBEDDING, LOOM_GROUP_EMBD, RING},
};

/* As this layout and this model have it. */
static struct flow flow_of(const loom__plan_sizes *sizes, loom__plan_flow number) {
    struct flow made = flows[number];
    bool instances = sizes->config->strategy.num_distributed_optimizer_instances > 1;
    if (number == LOOM__FLOW_EXPERTS && loom__plan_gathers_experts(sizes))
        made.way = RING;
    if (number == LOOM__FLOW_PARAMETERS && instances)
        made.group = LOOM_GROUP_INTRA_DP_CP;
    if (number == LOOM__FLOW_EXPERT_PARAMETERS && instances)
        made.group = LOOM_GROUP_INTRA_EDP;
    return made;
}

loom_plan_traffic_kind loom__plan_flow_kind(loom__plan_flow flow) {
    return flows[flow].kind;
}

/* Ranks between which a kind moves; of the largest of its groups. */
static int64_t group_size(const loom__plan_sizes *sizes, loom_plan_traffic_kind kind) {
    static const loom_group_kind groups[LOOM_PLAN_TRAFFIC_KINDS] = {
        [LOOM_PLAN_TENSOR] = LOOM_GROUP_TP,
        [LOOM_PLAN_CONTEXT] = LOOM_GROUP_CP,
        [LOOM_PLAN_EXPERT] = LOOM_GROUP_ETP_EP,
        [LOOM_PLAN_PIPELINE] = LOOM_GROUP_PP,
        [LOOM_PLAN_GRADIENTS] = LOOM_GROUP_DP_CP,
        [LOOM_PLAN_PARAMETERS] = LOOM_GROUP_DP_CP,
        [LOOM_PLAN_EMBEDDING] = LOOM_GROUP_EMBD,
    };
    return kind == LOOM_PLAN_PARAMETERS && sizes->sharded ? sizes->shards
                                                          : loom_layout_group_size(&sizes->layout, groups[kind], 0);
}

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
static void add_context(
    const loom__plan_sizes *sizes, loom__context_type type, double layers, loom__plan_chunk_traffic *to) {
    const loom_model_config *model = &sizes->model;
    int64_t groups = model->num_query_groups / sizes->tp, heads = model->num_attention_heads / sizes->tp;
    groups = groups > 0 ? groups : 1;
    loom__plan_flow ring = LOOM__FLOW_CONTEXT_RING, exchange = LOOM__FLOW_CONTEXT_HEADS;
    if (type == LOOM__CONTEXT_LEVELS) {
        ring = LOOM__FLOW_CONTEXT_OUTER_RING;
        exchange = LOOM__FLOW_CONTEXT_INNER_HEADS;
    }
    int64_t inner = loom__plan_heads_exchanged_by(sizes, type), members = sizes->cp / inner,
            elements = 2 * groups * model->kv_channels;
    double keys = (double)(members - 1) * tokens(sizes->rows, elements, sizes->width);
    double turns = type == LOOM__CONTEXT_ALL_GATHER || members == 1 ? (double)(members - 1) : (double)members;
    double exchanged = share(tokens(sizes->rows, (2 * heads + 2 * groups) * model->kv_channels, sizes->width), inner);
    double times = model->recompute == LOOM_RECOMPUTE_NONE ? 1 : 2;
    to->forward[ring] += layers * keys;
    to->forward[exchange] += layers * exchanged;
    to->backward[ring] += layers * (times * keys + turns * tokens(sizes->rows, elements, 4));
    to->backward[exchange] += layers * times * exchanged;
}

/* Rows to their experts and back, spread evenly: over expert ranks by an all-to-all, or by a gather of all rows there
 * and a scatter back, as the dispatcher is; over those that share an expert by a gather and a scatter. */
static void add_experts(const loom__plan_sizes *sizes, double layers, loom__plan_chunk_traffic *to) {
    const loom_model_config *model = &sizes->model;
    double rows = tokens(loom__plan_routed_rows(sizes), model->hidden_size, sizes->width);
    double over_ep = loom__plan_gathers_experts(sizes) ? rows * (double)(sizes->ep - 1) : share(rows, sizes->ep);
    double over_slices = rows * (double)(sizes->etp - 1);
    double back = model->recompute == LOOM_RECOMPUTE_FULL || model->moe.moe_layer_recompute ? 4 : 2;
    to->forward[LOOM__FLOW_EXPERTS] += layers * 2 * over_ep;
    to->backward[LOOM__FLOW_EXPERTS] += layers * back * over_ep;
    to->forward[LOOM__FLOW_EXPERT_SLICES] += layers * 2 * over_slices;
    to->backward[LOOM__FLOW_EXPERT_SLICES] += layers * back * over_slices;
}

loom__plan_chunk_traffic loom__plan_chunk_traffic_of(const loom__plan_sizes *sizes, const loom_stage *chunk) {
    loom__plan_chunk_traffic made = {{0}, {0}};
    int64_t experts, layers = loom__plan_count_layers(sizes, chunk, &experts);
    bool scatters = sizes->sequence_parallel, again = sizes->model.recompute == LOOM_RECOMPUTE_FULL;
    double unit = share(tokens(sizes->rows, sizes->model.hidden_size, sizes->width), sizes->tp);
    /* Pairs of a column- and a row-parallel region: attention, and MLP or shared expert. */
    double shared = sizes->model.moe.moe_shared_expert_intermediate_size > 0 ? (double)experts : 0;
    double pairs = (double)(2 * layers - experts) + shared;
    double repeated = again ? pairs : sizes->model.moe.moe_layer_recompute ? shared : 0;
    double *forward = made.forward, *backward = made.backward;
    forward[LOOM__FLOW_TENSOR] = 2 * pairs * unit;
    backward[LOOM__FLOW_TENSOR] = ((scatters ? 3 : 2) * pairs + 2 * repeated) * unit;
    if (chunk->embedding) {
        forward[LOOM__FLOW_TENSOR] += (scatters ? 1 : 2) * unit;
        backward[LOOM__FLOW_TENSOR] += scatters ? unit : 0;
    }
    if (chunk->loss) {
        forward[LOOM__FLOW_TENSOR] += (scatters ? unit : 0) + 3 * 2 * share(tokens(sizes->rows, 1, 4), sizes->tp);
        backward[LOOM__FLOW_TENSOR] += 2 * unit;
    }
    for (int type = 0; sizes->cp > 1 && type < LOOM__CONTEXT_TYPES; type++) {
        int64_t alike =
            loom__context_layers(&sizes->model, (loom__context_type)type, chunk->first_layer, chunk->layers);
        if (alike > 0)
            add_context(sizes, (loom__context_type)type, (double)alike, &made);
    }
    add_experts(sizes, (double)experts, &made);
    forward[LOOM__FLOW_PIPELINE] = chunk->loss ? 0 : loom__plan_message(sizes);
    backward[LOOM__FLOW_PIPELINE] = chunk->embedding ? 0 : loom__plan_message(sizes);
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
    to[LOOM__FLOW_TENSOR] += 2 * share(4.0 * (double)held.partial, sizes->tp);
    to[LOOM__FLOW_GRADIENTS] += times * width * share(dense, replicas);
    to[LOOM__FLOW_EXPERT_GRADIENTS] += times * width * share(expert, sizes->edp);
    if (sizes->sharded) {
        to[LOOM__FLOW_PARAMETERS] += (double)sizes->width * share(dense, sizes->shards);
        to[LOOM__FLOW_EXPERT_PARAMETERS] += (double)sizes->width * share(expert, sizes->expert_shards);
    }
    if (model->tied_head.rank > 0 && sizes->pp > 1 && (stage == 0 || stage == sizes->pp - 1))
        to[LOOM__FLOW_EMBEDDING] += 2 * share(4.0 * (double)model->tied_head.rank, 2);
}

/* ---- nodes ---- */

enum { MEMBERS_ASKED = 1 << 12 };

typedef struct steps {
    double all, apart; /* in units of one message between two members; those between nodes */
} steps;

/* Every member with every other. Members ascend, so that those of a node are a run. */
static steps of_pairs(const loom_layout *layout, loom_group_kind kind, int64_t index, int64_t node) {
    int64_t size = loom_layout_group_size(layout, kind, index), run = 0, before = -1;
    double n = (double)size, inside = 0;
    for (int64_t place = 0; place <= size; place++) {
        int64_t now = place < size ? loom_layout_group_member(layout, kind, index, place) / node : -1;
        if (now != before)
            inside += (double)run * (double)(run - 1);
        run = now == before ? run + 1 : 1;
        before = now;
    }
    return (steps){n * (n - 1), n * (n - 1) - inside};
}

/* Every member to the next, the last one to the first `closes` times for one of each other step. Of a long ring the
 * beginning speaks for the whole: its members lie on the nodes in a pattern that soon repeats. */
static steps of_ring(const loom_layout *layout, loom_group_kind kind, int64_t index, int64_t node, double closes) {
    int64_t size = loom_layout_group_size(layout, kind, index), seen = size < MEMBERS_ASKED ? size : MEMBERS_ASKED;
    int64_t first = loom_layout_group_member(layout, kind, index, 0) / node, before = first;
    steps made = {(double)(seen - 1) + closes, 0};
    for (int64_t place = 1; place < seen; place++) {
        int64_t now = loom_layout_group_member(layout, kind, index, place) / node;
        made.apart += now != before;
        before = now;
    }
    made.apart += loom_layout_group_member(layout, kind, index, size - 1) / node != first ? closes : 0;
    return made;
}

static double across(const loom__plan_sizes *sizes, loom__plan_flow number, int64_t node) {
    const struct flow flow = flow_of(sizes, number);
    const loom_layout *layout = &sizes->layout;
    int64_t count = loom_layout_group_count(layout, flow.group), size = loom_layout_group_size(layout, flow.group, 0);
    if (node < 1 || count < 1 || size < 2)
        return 0;
    int64_t asked = MEMBERS_ASKED / size, stride;
    asked = asked < 1 ? 1 : asked > count ? count : asked;
    stride = count / asked;
    /* A chunk behind another goes from the last stage to the first. */
    double closes = flow.way == CHAIN ? (double)(sizes->chunks - 1) / (double)sizes->chunks : 1;
    steps sum = {0, 0};
    for (int64_t i = 0; i < asked; i++) {
        /* Where nodes begin within groups comes round after a few groups; the offset meets all of these places. */
        int64_t index = i * stride + i % stride;
        steps one = flow.way == PAIRS ? of_pairs(layout, flow.group, index, node)
                                      : of_ring(layout, flow.group, index, node, closes);
        sum.all += one.all;
        sum.apart += one.apart;
    }
    return sum.apart / sum.all;
}

loom__plan_links loom__plan_links_of(const loom__plan_sizes *sizes, const loom_plan_machine *machine) {
    loom__plan_links made;
    for (int flow = 0; flow < LOOM__FLOWS; flow++) {
        made.across[flow] = across(sizes, (loom__plan_flow)flow, machine->ranks_per_node);
        made.bandwidth[flow] = made.across[flow] > 0 ? machine->network_bandwidth : machine->node_bandwidth;
    }
    return made;
}

/* ---- the whole ---- */

static void add_stage(const loom__plan_links *links, const double sent[LOOM__FLOWS], double ranks, loom_plan *plan) {
    double rank[LOOM_PLAN_TRAFFIC_KINDS] = {0}, seconds[LOOM_PLAN_TRAFFIC_KINDS] = {0};
    for (int flow = 0; flow < LOOM__FLOWS; flow++) {
        loom_plan_traffic_kind kind = flows[flow].kind;
        rank[kind] += sent[flow];
        seconds[kind] += sent[flow] / links->bandwidth[flow];
        plan->traffic[kind].inside += (1 - links->across[flow]) * ranks * sent[flow];
        plan->traffic[kind].across += links->across[flow] * ranks * sent[flow];
    }
    for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++) {
        loom_plan_traffic *t = &plan->traffic[kind];
        t->rank = rank[kind] > t->rank ? rank[kind] : t->rank;
        plan->exposed_seconds[kind] =
            seconds[kind] > plan->exposed_seconds[kind] ? seconds[kind] : plan->exposed_seconds[kind];
    }
}

void loom__plan_traffic_make(
    const loom__plan_sizes *sizes, const loom__plan_model *model, const loom__plan_links *links, loom_plan *plan) {
    double microbatches = (double)sizes->schedule.microbatches;
    double ranks = (double)loom_layout_world_size(&sizes->layout) / (double)sizes->pp;
    for (int64_t stage = 0; stage < sizes->pp; stage++) {
        double sent[LOOM__FLOWS] = {0};
        for (int64_t c = 0; c < sizes->chunks; c++) {
            loom__plan_chunk_traffic one = loom__plan_chunk_traffic_of(sizes, loom__plan_chunk_of(sizes, stage, c));
            for (int flow = 0; flow < LOOM__FLOWS; flow++)
                sent[flow] += microbatches * (one.forward[flow] + one.backward[flow]);
        }
        add_reductions(sizes, model, stage, sent);
        add_stage(links, sent, ranks, plan);
    }
    for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++)
        plan->traffic[kind].group = group_size(sizes, (loom_plan_traffic_kind)kind);
}
