/* megaloom plan, for programs: every number, bytes as integers as long as these can hold them. */
#include "plan.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* An integer where 64 bits hold it. */
static json_t *bytes(double value) {
    return value < 9e18 ? json_integer((json_int_t)value) : json_real(value);
}

static json_t *memory_json(const loom_plan_memory *m) {
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "weights", bytes(m->weights), "gradients",
        bytes(m->gradients), "optimizer", bytes(m->optimizer), "activations", bytes(m->activations), "buffers",
        bytes(m->buffers), "logits", bytes(m->logits), "total", bytes(m->total));
}

static json_t *stages_json(const loom_plan *p) {
    json_t *all = json_array();
    for (int64_t i = 0; i < p->stage_count; i++) {
        const loom_plan_stage *s = &p->stages[i];
        json_array_append_new(all,
            json_pack("{s:I, s:b, s:b, s:I, s:I, s:f, s:I, s:f, s:o, s:o}", "layers", (json_int_t)s->layers,
                "embedding", s->embedding, "loss", s->loss, "parameters", (json_int_t)s->parameters, "rank_parameters",
                (json_int_t)s->rank_parameters, "flops", s->flops, "microbatches", (json_int_t)s->microbatches, "idle",
                s->idle, "memory", memory_json(&s->memory), "reduction_buffers", bytes(s->memory.reductions)));
    }
    return all;
}

static json_t *traffic_json(const loom_plan *p) {
    json_t *all = json_object();
    for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++) {
        const loom_plan_traffic *t = &p->traffic[kind];
        json_object_set_new(all, loom_plan_traffic_name((loom_plan_traffic_kind)kind),
            json_pack("{s:I, s:o, s:o, s:o, s:f}", "ranks", (json_int_t)t->group, "rank", bytes(t->rank), "inside",
                bytes(t->inside), "across", bytes(t->across), "exposed_seconds", p->exposed_seconds[kind]));
    }
    return all;
}

static json_t *lines_json(const char *lines) {
    json_t *all = json_array();
    for (const char *next; *lines; lines = next) {
        size_t length = strcspn(lines, "\n");
        json_array_append_new(all, json_stringn(lines, length));
        next = lines + length + (lines[length] == '\n');
    }
    return all;
}

static json_t *search_json(const loom_plan_search *s) {
    static const char *const recomputes[] = {"none", "selective", "full"};
    json_t *fits = json_array(), *falls = json_array();
    for (int64_t i = 0; i < s->count; i++) {
        const loom_plan_candidate *c = &s->candidates[i];
        json_array_append_new(
            fits, json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:s, s:o, s:f, s:f, s:f, s:f}", "tp",
                      (json_int_t)c->tensor, "cp", (json_int_t)c->context, "ep", (json_int_t)c->expert, "dp",
                      (json_int_t)c->data, "pp", (json_int_t)c->pipeline, "vp", (json_int_t)c->chunks,
                      "micro_batch_size", (json_int_t)c->micro_batch_size, "microbatches", (json_int_t)c->microbatches,
                      "sequence_parallel", c->sequence_parallel, "recompute", recomputes[c->recompute], "memory",
                      bytes(c->memory), "bubble", c->bubble, "step_seconds", c->step_seconds, "tokens_per_second",
                      c->tokens_per_second, "utilization", c->utilization));
    }
    for (int64_t i = 0; i < s->fall_count; i++)
        json_array_append_new(falls, json_pack("{s:s, s:I, s:s}", "reason", s->falls[i].reason, "count",
                                         (json_int_t)s->falls[i].count, "example", s->falls[i].example));
    return json_pack("{s:I, s:o, s:o}", "tried", (json_int_t)s->tried, "fits", fits, "falls", falls);
}

/* What the times rest on. */
static json_t *assumed_json(const loom_plan_machine *m) {
    return json_pack("{s:f, s:f, s:f, s:f, s:I}", "flops", m->flops, "efficiency", m->efficiency, "node_bandwidth",
        m->node_bandwidth, "network_bandwidth", m->network_bandwidth, "ranks_per_node", (json_int_t)m->ranks_per_node);
}

loom_status loom_cli_plan_json(const loom_cli_plan_facts *facts) {
    const loom_plan *p = facts->plan;
    const loom_plan_stage *worst = &p->stages[p->worst];
    bool fits = !(p->memory_limit > 0) || worst->memory.total <= p->memory_limit;
    json_t *layout = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "world_size", (json_int_t)p->world, "nodes",
        (json_int_t)p->nodes, "tp", (json_int_t)p->tensor, "cp", (json_int_t)p->context, "ep", (json_int_t)p->expert,
        "dp", (json_int_t)p->data, "pp", (json_int_t)p->pipeline, "vp", (json_int_t)p->chunks);
    json_t *step = json_pack("{s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:b, s:f, s:f}",
        "global_batch_size", (json_int_t)p->global_batch_size, "micro_batch_size", (json_int_t)p->micro_batch_size,
        "microbatches", (json_int_t)p->microbatches, "seq_length", (json_int_t)p->seq_length, "flops_per_token",
        p->flops_per_token, "flops_per_token_full_attention", p->flops_per_token_full_attention, "flops_per_step",
        p->flops_per_step, "recompute_flops_per_step", p->recompute_flops_per_step, "seconds", p->step_seconds,
        "compute_seconds", p->compute_seconds, "bubble", p->bubble, "bubble_simulated", p->bubble_simulated,
        "bubble_seconds", p->bubble_seconds, "utilization", p->utilization);
    json_t *root = json_pack("{s:s, s:s, s:o, s:o, s:I, s:I, s:o, s:o, s:I, s:o, s:o, s:b, s:o, s:s, s:o, s:o, s:o*}",
        "name", facts->name, "machine", facts->options->machine.name, "assumed", assumed_json(&facts->options->machine),
        "layout", layout, "parameters", (json_int_t)p->parameters, "active_parameters",
        (json_int_t)p->active_parameters, "step", step, "stages", stages_json(p), "worst_stage", (json_int_t)p->worst,
        "memory_setup", bytes(p->memory_setup), "memory_limit",
        p->memory_limit > 0 ? bytes(p->memory_limit) : json_null(), "fits", fits, "traffic", traffic_json(p), "binds",
        p->binds, "not_built", lines_json(facts->not_built), "left_out", lines_json(facts->left_out), "search",
        facts->search ? search_json(facts->search) : NULL);
    char *text = root ? json_dumps(root, JSON_INDENT(1) | JSON_REAL_PRECISION(10)) : NULL;
    json_decref(root);
    if (!text)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the JSON of a plan");
    puts(text);
    free(text);
    return LOOM_OK;
}
