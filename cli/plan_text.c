/* megaloom plan, for people: tables of at most 100 columns. Neighbouring stages with the same numbers share a line. */
#include "plan.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { COLUMNS = 100, STAGES_SHOWN = 24, LAYOUTS_SHOWN = 12 };

/* In which memory is printed. */
typedef struct memory_unit {
    const char *name;
    double bytes;
} memory_unit;

static memory_unit unit_of(const loom_plan *p) {
    bool small = p->stages[p->worst].memory.total < 2147483648.0;
    return small ? (memory_unit){"MiB", 1048576.0} : (memory_unit){"GiB", 1073741824.0};
}

/* Three digits and a prefix: "1.23 T". */
static const char *scaled(double value, char text[24]) {
    static const char *const prefixes[] = {"", " k", " M", " G", " T", " P", " E", " Z", " Y"};
    int step = 0;
    for (; value >= 999.5 && step < 8; step++)
        value /= 1000;
    snprintf(text, 24, "%.*f%s", value >= 99.95 || step == 0 ? 0 : value >= 9.995 ? 1 : 2, value, prefixes[step]);
    return text;
}

/* Folds a text behind a label of 14 columns. */
static void print_folded(const char *label, const char *text) {
    printf("%-14s", label);
    size_t used = 14;
    for (const char *at = text; *at;) {
        size_t word = strcspn(at, " "), space = used > 14;
        if (space && used + 1 + word > COLUMNS) {
            printf("\n%14s", "");
            used = 14;
            space = 0;
        }
        printf("%s%.*s", space ? " " : "", (int)word, at);
        used += word + space;
        at += word;
        at += strspn(at, " ");
    }
    printf("\n");
}

static void print_lines(const char *label, const char *lines) {
    char line[1024];
    for (const char *next; *lines; lines = next) {
        size_t length = strcspn(lines, "\n");
        snprintf(line, sizeof line, "%.*s", (int)length, lines);
        print_folded(label, line);
        label = "";
        next = lines + length + (lines[length] == '\n');
    }
}

/* "not supported yet: PATH=VALUE (REASON); …": the path and the reason; false for a line of another form. */
static bool take_apart(const char *line, char path[160], char reason[160]) {
    static const char prefix[] = "not supported yet: ";
    if (strncmp(line, prefix, sizeof prefix - 1) != 0)
        return false;
    line += sizeof prefix - 1;
    size_t end = strcspn(line, "\n"), equals = strcspn(line, "=\n");
    const char *open = memchr(line, '(', end), *close = open ? memchr(open, ')', end - (size_t)(open - line)) : NULL;
    if (!close || equals >= end || line + equals > open || memchr(line, ' ', equals))
        return false;
    snprintf(path, 160, "%.*s", (int)equals, line);
    snprintf(reason, 160, "%.*s", (int)(close - open - 1), open + 1);
    return true;
}

static const char *next_line(const char *line) {
    line += strcspn(line, "\n");
    return *line ? line + 1 : line;
}

/* What training refuses, by the part that is missing: "fp8: precision.fp8, …". */
static void print_not_built(const char *lines) {
    char path[160], reason[160], other_path[160], other[160], text[2048];
    const char *label = "not built yet";
    for (const char *line = lines; *line; line = next_line(line)) {
        bool apart = take_apart(line, path, reason), told = false;
        for (const char *before = lines; apart && before < line; before = next_line(before))
            told = told || (take_apart(before, other_path, other) && strcmp(reason, other) == 0);
        if (told)
            continue;
        if (!apart)
            snprintf(text, sizeof text, "%.*s", (int)strcspn(line, "\n"), line);
        else
            snprintf(text, sizeof text, "%s: %s", reason, path);
        for (const char *after = next_line(line); apart && *after; after = next_line(after))
            if (take_apart(after, other_path, other) && strcmp(reason, other) == 0)
                snprintf(text + strlen(text), sizeof text - strlen(text), ", %s", other_path);
        print_folded(label, text);
        label = "";
    }
}

static void print_heading(const loom_cli_plan_facts *facts) {
    const loom_plan *p = facts->plan;
    char count[24], active[24], batch[24];
    printf("%s\n\n", facts->name);
    printf("%-14s%" PRId64 " = tp %" PRId64 " x cp %" PRId64 " x dp %" PRId64 " x pp %" PRId64, "ranks", p->world,
        p->tensor, p->context, p->data, p->pipeline);
    if (p->chunks > 1)
        printf(" (%" PRId64 " chunks a stage)", p->chunks);
    if (p->expert > 1)
        printf(", experts over %" PRId64, p->expert);
    if (p->nodes > 1)
        printf(", on %" PRId64 " nodes of %" PRId64, p->nodes, facts->options->machine.ranks_per_node);
    printf("\n%-14s%s (%" PRId64 ")", "parameters", scaled((double)p->parameters, count), p->parameters);
    if (p->active_parameters != p->parameters)
        printf(", %s of them for a token", scaled((double)p->active_parameters, active));
    printf("\n%-14s%" PRId64 " samples of %" PRId64 " tokens (%s tokens): %" PRId64 " microbatch%s of %" PRId64
           " sample%s\n",
        "step", p->global_batch_size, p->seq_length,
        scaled((double)p->global_batch_size * (double)p->seq_length, batch), p->microbatches,
        p->microbatches == 1 ? "" : "es", p->micro_batch_size, p->micro_batch_size == 1 ? "" : "s");
}

/* ---- memory ---- */

static bool same_numbers(const loom_plan_stage *a, const loom_plan_stage *b, double resolution) {
    const double x[] = {a->memory.weights, a->memory.gradients, a->memory.optimizer, a->memory.activations,
        a->memory.buffers, a->memory.logits};
    const double y[] = {b->memory.weights, b->memory.gradients, b->memory.optimizer, b->memory.activations,
        b->memory.buffers, b->memory.logits};
    for (size_t i = 0; i < sizeof x / sizeof *x; i++)
        if (fabs(x[i] - y[i]) > resolution)
            return false;
    return a->layers == b->layers && a->microbatches == b->microbatches && a->embedding == b->embedding &&
           a->loss == b->loss && a->rank_parameters == b->rank_parameters;
}

static void print_stage(const loom_plan *p, int64_t first, int64_t last, double unit_bytes) {
    const loom_plan_stage *s = &p->stages[first];
    const loom_plan_memory *m = &s->memory;
    char range[48], layers[32], held[24];
    if (first == last)
        snprintf(range, sizeof range, "%" PRId64, first);
    else
        snprintf(range, sizeof range, "%" PRId64 "-%" PRId64, first, last);
    snprintf(layers, sizeof layers, "%s%" PRId64 "%s", s->embedding ? "E+" : "", s->layers, s->loss ? "+L" : "");
    bool worst = p->worst >= first && p->worst <= last;
    printf("%-8s %7s %9s %6" PRId64 " %8.2f %9.2f %9.2f %11.2f %7.2f %6.2f %8.2f%s\n", range, layers,
        scaled((double)s->rank_parameters, held), s->microbatches, m->weights / unit_bytes, m->gradients / unit_bytes,
        m->optimizer / unit_bytes, m->activations / unit_bytes, m->buffers / unit_bytes, m->logits / unit_bytes,
        m->total / unit_bytes, worst ? " <" : "");
}

static void print_memory(const loom_plan *p) {
    const memory_unit unit = unit_of(p);
    printf("\nmemory of a rank, %s\n", unit.name);
    printf("%-8s %7s %9s %6s %8s %9s %9s %11s %7s %6s %8s\n", "stage", "layers", "params", "waits", "weights",
        "gradients", "optimizer", "activations", "buffers", "logits", "total");
    int64_t lines = 0, hidden = 0;
    for (int64_t first = 0, last; first < p->stage_count; first = last + 1) {
        last = first;
        while (last + 1 < p->stage_count && same_numbers(&p->stages[first], &p->stages[last + 1], 5e-4 * unit.bytes))
            last++;
        bool shown = lines < STAGES_SHOWN - 1 || last == p->stage_count - 1 || (p->worst >= first && p->worst <= last);
        lines++;
        if (!shown) {
            hidden += last - first + 1;
            continue;
        }
        if (hidden > 0)
            printf("… %" PRId64 " stages between\n", hidden);
        hidden = 0;
        print_stage(p, first, last, unit.bytes);
    }
    printf("at most %.2f", p->stages[p->worst].memory.total / unit.bytes);
    if (p->memory_limit > 0)
        printf(" of %.2f (%.0f %%)", p->memory_limit / unit.bytes,
            100 * p->stages[p->worst].memory.total / p->memory_limit);
    printf(" in a step, %.2f while it is set up\n", p->memory_setup / unit.bytes);
}

/* ---- traffic and time ---- */

static void print_traffic(const loom_plan *p) {
    bool any = false;
    char a[24], b[24], c[24];
    for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++) {
        const loom_plan_traffic *t = &p->traffic[kind];
        if (!(t->rank > 0))
            continue;
        if (!any)
            printf("\n%-14s %8s %16s %16s %16s\n", "traffic, bytes", "ranks", "a rank sends", "within nodes",
                "across nodes");
        any = true;
        printf("%-14s %8" PRId64 " %16s %16s %16s\n", loom_plan_traffic_name((loom_plan_traffic_kind)kind), t->group,
            scaled(t->rank, a), scaled(t->inside, b), scaled(t->across, c));
    }
}

static void print_time(const loom_cli_plan_facts *facts) {
    const loom_plan *p = facts->plan;
    char a[24], b[24], c[24], text[640];
    size_t used = (size_t)snprintf(text, sizeof text, "%sFLOP a token (%sFLOP with whole attention), %sFLOP a step",
        scaled(p->flops_per_token, a), scaled(p->flops_per_token_full_attention, b), scaled(p->flops_per_step, c));
    if (p->recompute_flops_per_step > 0)
        snprintf(text + used, sizeof text - used, ", %.1f %% again by recomputation",
            100 * p->recompute_flops_per_step / p->flops_per_step);
    printf("\n");
    print_folded("operations", text);
    printf("%-14s%.1f %% of the stages' time, by %s\n", "bubble", 100 * p->bubble,
        p->bubble_simulated ? "simulation" : "the formula");
    double tokens = (double)p->global_batch_size * (double)p->seq_length / p->step_seconds;
    printf("%-14s%.3g s on %s: %s tokens/s, %sFLOP/s a rank, %.0f %% of its peak\n", "a step", p->step_seconds,
        facts->options->machine.name, scaled(tokens, a),
        scaled(p->flops_per_step / p->step_seconds / (double)p->world, b), 100 * p->utilization);
    used = (size_t)snprintf(text, sizeof text, "%.0f %% computation", 100 * p->compute_seconds / p->step_seconds);
    for (int kind = 0; kind < LOOM_PLAN_TRAFFIC_KINDS; kind++)
        if (p->exposed_seconds[kind] > 0.0005 * p->step_seconds)
            used += (size_t)snprintf(text + used, sizeof text - used, ", %.1f %% %s",
                100 * p->exposed_seconds[kind] / p->step_seconds, loom_plan_traffic_name((loom_plan_traffic_kind)kind));
    if (p->bubble_seconds > 0.0005 * p->step_seconds)
        snprintf(text + used, sizeof text - used, ", %.1f %% waiting", 100 * p->bubble_seconds / p->step_seconds);
    print_folded("of which", text);
    const loom_plan_machine *machine = &facts->options->machine;
    used = (size_t)snprintf(text, sizeof text, "%sFLOP/s a rank, of which products reach %.0f %%; %sB/s within a node",
        scaled(machine->flops, a), 100 * machine->efficiency, scaled(machine->node_bandwidth, b));
    if (p->nodes > 1)
        used += (size_t)snprintf(
            text + used, sizeof text - used, ", %sB/s to another", scaled(machine->network_bandwidth, c));
    snprintf(text + used, sizeof text - used, ": nothing of it is measured, and times compare layouts");
    print_folded("assumed", text);
}

/* ---- search ---- */

static void print_candidate(const loom_plan_candidate *c, double unit_bytes) {
    static const char *const recomputes[] = {"none", "selective", "full"};
    char tokens[24];
    printf("%3" PRId64 " %4" PRId64 " %3" PRId64 " %3" PRId64 " %5" PRId64 " %5" PRId64 " %7" PRId64
           "  %-9s %7.2f %6.1f %% %7.3g s %8s %3.0f %%\n",
        c->tensor, c->pipeline, c->chunks, c->expert, c->data, c->micro_batch_size, c->microbatches,
        recomputes[c->recompute], c->memory / unit_bytes, 100 * c->bubble, c->step_seconds,
        scaled(c->tokens_per_second, tokens), 100 * c->utilization);
}

static void print_search(const loom_plan_search *s, memory_unit unit) {
    printf("\n%" PRId64 " of %" PRId64 " layouts fit%s\n", s->count, s->tried,
        s->count > LAYOUTS_SHOWN ? "; the fastest:"
        : s->count > 0           ? ":"
                                 : "");
    if (s->count > 0)
        printf("%3s %4s %3s %3s %5s %5s %7s  %-9s %7s %8s %9s %8s %5s\n", "tp", "pp", "vp", "ep", "dp", "micro",
            "batches", "recompute", unit.name, "bubble", "step", "tokens/s", "peak");
    for (int64_t i = 0; i < s->count && i < LAYOUTS_SHOWN; i++)
        print_candidate(&s->candidates[i], unit.bytes);
    if (s->fall_count > 0)
        printf("\nwhy the others fall\n");
    for (int64_t i = 0; i < s->fall_count; i++)
        printf("%6" PRId64 "  %s (%s)\n", s->falls[i].count, s->falls[i].reason, s->falls[i].example);
}

void loom_cli_plan_text(const loom_cli_plan_facts *facts) {
    print_heading(facts);
    print_memory(facts->plan);
    print_traffic(facts->plan);
    print_time(facts);
    printf("\n");
    print_folded("binds", facts->plan->binds);
    print_not_built(facts->not_built);
    print_lines("left out", facts->left_out);
    if (facts->search)
        print_search(facts->search, unit_of(facts->plan));
}
