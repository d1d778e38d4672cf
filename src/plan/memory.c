/* The memory of the ranks of each stage: what stays, from the parameters, and the worst moment of a step, by going
 * through the very list of instructions that the stage carries out, receives as early as the strategy posts them. A
 * message that was sent is thought to stay until the second computation after it: then the other side has taken it. */
#include "config/precision.h"
#include "plan/sizes.h"
#include <stdlib.h>
#include <string.h>

/* Computations between a receive and its reader, as the strategy has it. */
enum { RECEIVES_AHEAD = 2 };

/* Chunks that are alike have one ledger. */
typedef struct book {
    int64_t count, capacity;
    struct entry {
        int64_t layers, experts, behind, up_to[LOOM__CONTEXT_TYPES];
        bool embedding, loss;
        loom__plan_ledger ledger;
    } * entries;
} book;

static loom_status find_ledger(
    const loom__plan_sizes *sizes, book *all, const loom_stage *chunk, const loom__plan_ledger **out) {
    int64_t experts, layers = loom__plan_count_layers(sizes, chunk, &experts);
    int64_t behind = loom__plan_layers_behind_experts(sizes, chunk);
    int64_t up_to[LOOM__CONTEXT_TYPES];
    for (int type = 0; type < LOOM__CONTEXT_TYPES; type++)
        up_to[type] = loom__plan_layers_up_to(sizes, chunk, (loom__context_type)type);
    for (int64_t i = 0; i < all->count; i++) {
        const struct entry *known = &all->entries[i];
        if (known->layers == layers && known->experts == experts && known->embedding == chunk->embedding &&
            known->loss == chunk->loss && known->behind == behind && memcmp(known->up_to, up_to, sizeof up_to) == 0) {
            *out = &known->ledger;
            return LOOM_OK;
        }
    }
    if (all->count == all->capacity)
        return loom_fail(LOOM_ERR_INTERNAL, "a plan has more kinds of chunks than chunks");
    struct entry *made = &all->entries[all->count];
    *made = (struct entry){
        .layers = layers, .experts = experts, .behind = behind, .embedding = chunk->embedding, .loss = chunk->loss};
    memcpy(made->up_to, up_to, sizeof up_to);
    bool split = sizes->schedule.kind == LOOM_SCHEDULE_ZERO_BUBBLE;
    LOOM_TRY(loom__plan_ledger_make(sizes, chunk, split, &made->ledger));
    all->count++;
    *out = &made->ledger;
    return LOOM_OK;
}

/* ---- what stays ---- */

static double buffer(int64_t elements, int64_t width) {
    return (double)elements * (double)width;
}

static int64_t dtype_bytes(const char *name) {
    return (int64_t)loom_dtype_size(loom__dtype_called(name, LOOM_F32));
}

static double optimizer_bytes(const loom__plan_sizes *sizes, int64_t state) {
    const loom_optimizer_config *optim = &sizes->config->optim;
    double bytes = sizes->width < 4 ? buffer(state, 4) : 0;
    if (optim->optimizer && strcmp(optim->optimizer, "sgd") == 0)
        return bytes + (optim->sgd_momentum > 0 ? buffer(state, 4) : 0);
    bytes += buffer(state, dtype_bytes(optim->exp_avg_dtype)) + buffer(state, dtype_bytes(optim->exp_avg_sq_dtype));
    return bytes + (optim->amsgrad ? buffer(state, 4) : 0);
}

static loom_plan_memory lasting(const loom__plan_sizes *sizes, const loom__plan_parameters *held) {
    const loom_precision_config *precision = &sizes->config->precision;
    int64_t dense = held->buffer - held->expert_buffer;
    int64_t state = dense / sizes->shards + held->expert_buffer / sizes->expert_shards;
    loom_plan_memory memory = {.weights = buffer(held->buffer, sizes->width),
        .gradients = buffer(held->buffer, 4),
        .optimizer = optimizer_bytes(sizes, state),
        .buffers = 4.0 * (double)held->partial};
    if (sizes->width < 4 && !precision->grad_reduce_in_fp32 && sizes->dp * sizes->cp > 1)
        memory.buffers += buffer(held->buffer, sizes->width);
    memory.reductions = memory.buffers;
    return memory;
}

/* Initial weights are made in fp32 beside the buffers that they are moved into. */
static double setup_bytes(const loom__plan_sizes *sizes, const loom__plan_parameters *held, const loom_plan_memory *m) {
    int64_t state = (held->buffer - held->expert_buffer) / sizes->shards + held->expert_buffer / sizes->expert_shards;
    double masters = sizes->width < 4 ? buffer(state, 4) : 0;
    return 4.0 * (double)held->rank + m->weights + m->gradients + masters;
}

/* ---- the worst moment of a step ---- */

typedef struct moment {
    loom__plan_bytes now, worst;
    double sending[2]; /* sent before the last computation, and since */
    int64_t live, most_live;
} moment;

static void add(loom__plan_bytes *to, const loom__plan_bytes *bytes, double sign) {
    to->activations += sign * bytes->activations;
    to->buffers += sign * bytes->buffers;
    to->logits += sign * bytes->logits;
}

static void look(moment *m, const loom__plan_bytes *more) {
    loom__plan_bytes all = m->now;
    add(&all, more, 1);
    if (loom__plan_bytes_sum(&all) > loom__plan_bytes_sum(&m->worst))
        m->worst = all;
}

static void begin_computation(moment *m) {
    m->now.buffers -= m->sending[0];
    m->sending[0] = m->sending[1];
    m->sending[1] = 0;
}

static void carry_out(const loom__plan_sizes *sizes, const loom__plan_ledger *ledger, int64_t stage,
    const loom_instruction *at, moment *m) {
    double wire = (double)(sizes->own_rows * sizes->model.hidden_size * sizes->wire);
    double own = (double)(sizes->own_rows * sizes->model.hidden_size * sizes->width);
    bool begins = loom_schedule_model_begins(stage, at->chunk);
    bool ends = loom_schedule_model_ends(sizes->pp, sizes->chunks, stage, at->chunk);
    switch (at->kind) {
    case LOOM_INSTRUCTION_RECEIVE_PREVIOUS:
    case LOOM_INSTRUCTION_RECEIVE_NEXT:
        m->now.buffers += wire;
        break;
    case LOOM_INSTRUCTION_SEND_NEXT:
    case LOOM_INSTRUCTION_SEND_PREVIOUS:
        m->now.buffers += wire - own;
        m->sending[1] += wire;
        break;
    case LOOM_INSTRUCTION_FORWARD:
        begin_computation(m);
        m->now.buffers -= begins ? 0 : wire;
        look(m, &ledger->forward);
        add(&m->now, &ledger->kept, 1);
        m->now.buffers += ends ? 0 : own;
        m->live++;
        m->most_live = m->live > m->most_live ? m->live : m->most_live;
        break;
    case LOOM_INSTRUCTION_BACKWARD:
    case LOOM_INSTRUCTION_BACKWARD_INPUT:
        begin_computation(m);
        m->now.buffers -= ends ? 0 : wire;
        add(&m->now, &ledger->kept, -1);
        look(m, &ledger->backward);
        if (at->kind == LOOM_INSTRUCTION_BACKWARD_INPUT) {
            add(&m->now, &ledger->halfway, 1);
            break;
        }
        m->now.buffers += begins ? 0 : own;
        m->live--;
        break;
    case LOOM_INSTRUCTION_BACKWARD_WEIGHT:
        begin_computation(m);
        add(&m->now, &ledger->halfway, -1);
        look(m, &ledger->weights);
        m->live--;
        break;
    default:
        break;
    }
}

static loom_status walk_list(
    const loom__plan_sizes *sizes, const loom_schedule_config *schedule, book *all, int64_t stage, moment *m) {
    loom_schedule_list list, early;
    LOOM_TRY(loom_schedule_make(schedule, stage, &list));
    loom_status status = loom_schedule_post_receives_early(schedule, &list, RECEIVES_AHEAD, &early);
    loom_schedule_list_free(&list);
    LOOM_TRY(status);
    for (int64_t i = 0; i < early.count && !status; i++) {
        const loom_instruction *at = &early.instructions[i];
        const loom__plan_ledger *ledger = NULL;
        if (loom_instruction_computes(at->kind))
            status = find_ledger(sizes, all, loom__plan_chunk_of(sizes, stage, at->chunk), &ledger);
        if (!status)
            carry_out(sizes, ledger, stage, at, m);
    }
    loom_schedule_list_free(&early);
    return status;
}

/* Without a list: as many forwards wait as the schedule counts, and the worst chunk goes backward. */
static loom_status count_only(const loom__plan_sizes *sizes, book *all, int64_t stage, moment *m) {
    loom_schedule_counts counts;
    loom_schedule_count(&sizes->schedule, stage, &counts);
    int64_t live = counts.all_in_warmup ? counts.total : counts.warmup + 1;
    for (int64_t c = 0; c < sizes->chunks; c++) {
        const loom__plan_ledger *ledger;
        LOOM_TRY(find_ledger(sizes, all, loom__plan_chunk_of(sizes, stage, c), &ledger));
        loom__plan_bytes others = {0};
        add(&others, &ledger->kept, (double)(live - 1));
        m->now = others;
        look(m, &ledger->backward);
    }
    m->most_live = live;
    return LOOM_OK;
}

static loom_status plan_stage(const loom__plan_sizes *sizes, const loom__plan_model *model,
    const loom_schedule_config *schedule, book *all, int64_t stage, loom_plan *plan) {
    loom_plan_stage *out = &plan->stages[stage];
    loom__plan_parameters held = loom__plan_stage_parameters(sizes, model, stage);
    moment m = {0};
    LOOM_TRY(schedule ? walk_list(sizes, schedule, all, stage, &m) : count_only(sizes, all, stage, &m));
    for (int64_t c = 0; c < sizes->chunks; c++) {
        const loom_stage *chunk = loom__plan_chunk_of(sizes, stage, c);
        out->layers += chunk->layers;
        out->embedding = out->embedding || chunk->embedding;
        out->loss = out->loss || chunk->loss;
    }
    out->parameters = held.whole;
    out->rank_parameters = held.rank;
    out->microbatches = m.most_live;
    out->memory = lasting(sizes, &held);
    double setup = setup_bytes(sizes, &held, &out->memory);
    out->memory.activations = m.worst.activations;
    out->memory.buffers += m.worst.buffers;
    out->memory.logits = m.worst.logits;
    loom_plan_memory *t = &out->memory;
    t->total = t->weights + t->gradients + t->optimizer + t->activations + t->buffers + t->logits;
    plan->memory_setup = setup > plan->memory_setup ? setup : plan->memory_setup;
    if (t->total > plan->stages[plan->worst].memory.total)
        plan->worst = stage;
    return LOOM_OK;
}

loom_status loom__plan_memory_make(const loom__plan_sizes *sizes, const loom__plan_model *model,
    const loom_schedule_config *schedule, loom_plan *plan) {
    book all = {.capacity = sizes->pp * sizes->chunks};
    all.entries = calloc((size_t)all.capacity, sizeof *all.entries);
    if (!all.entries)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory to plan %lld stages", (long long)sizes->pp);
    loom_status status = LOOM_OK;
    for (int64_t stage = 0; stage < sizes->pp && !status; stage++)
        status = plan_stage(sizes, model, schedule, &all, stage, plan);
    free(all.entries);
    return status;
}
