/* Two runs beside each other. The verdict is about the losses alone, step by step: rounding begins small, and grows out
 * of what is there (run.h says the bound). Invariant: what is beyond the bound once stays the answer, however the runs
 * go on. */
#include "base/yaml.h"
#include "report/run.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Units of bf16 and fp16 for one of fp32: a loss is the mean of many tokens in fp32, whose roundings are independent.
 */
#define NARROW_UNITS 0.04

static double unit_roundoff(const char *precision) {
    if (strncmp(precision, "bf16", 4) == 0)
        return NARROW_UNITS * ldexp(1, -8);
    if (strncmp(precision, "16", 2) == 0)
        return NARROW_UNITS * ldexp(1, -11);
    return ldexp(1, -24);
}

double loom_run_noise_bound(const char *precision, double largest) {
    return fmax(LOOM_NOISE_UNITS * unit_roundoff(precision), LOOM_NOISE_GROWTH * largest);
}

static double relative(double a, double b) {
    if (!isfinite(a) || !isfinite(b))
        return INFINITY;
    double largest = fmax(fabs(a), fabs(b));
    return largest > 0 ? fabs(a - b) / largest : 0;
}

const char *loom__coarser_precision(const loom_run_record *a, const loom_run_record *b, bool *known) {
    const char *of_a = a->config ? a->config->precision.precision : NULL;
    const char *of_b = b->config ? b->config->precision.precision : NULL;
    *known = of_a && of_b;
    if (!of_a || !of_b)
        return "32";
    return unit_roundoff(of_a) >= unit_roundoff(of_b) ? of_a : of_b;
}

loom_status loom_runs_compare(const loom_run_record *a, const loom_run_record *b, loom_run_difference *difference) {
    loom_run_difference d = {.largest = -1}; /* so that the first step is the largest, also without a difference */
    const char *precision = loom__coarser_precision(a, b, &d.precision_known);
    for (int64_t i = 0, j = 0; i < a->count && j < b->count;) {
        const loom_step_report *x = &a->reports[i], *y = &b->reports[j];
        if (x->step != y->step) {
            i += x->step < y->step;
            j += y->step < x->step;
            continue;
        }
        double e = relative(x->loss, y->loss);
        if (d.common++ == 0) {
            d.first = x->step;
            d.begin = e;
        }
        double bound = loom_run_noise_bound(precision, fmax(d.largest, 0));
        d.last = x->step;
        d.equal += x->loss == y->loss;
        if (e > d.largest) {
            d.largest = e;
            d.largest_step = x->step;
        }
        if (e > bound && d.beyond == 0) {
            d.beyond = x->step;
            d.at = e;
            d.allowed = bound;
        }
        i++;
        j++;
    }
    if (d.common == 0)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "%s and %s have no step in common: found steps %lld to %lld, and %lld to %lld", a->folder, b->folder,
            (long long)(a->count ? a->reports[0].step : 0), (long long)(a->count ? a->reports[a->count - 1].step : 0),
            (long long)(b->count ? b->reports[0].step : 0), (long long)(b->count ? b->reports[b->count - 1].step : 0));
    *difference = d;
    return LOOM_OK;
}

/* ---- configurations ---- */

enum { FIELD_BYTES = 256, VALUE_BYTES = 256, MOST_FIELDS = 2048 };
typedef struct field {
    char name[FIELD_BYTES], value[VALUE_BYTES];
} field;

typedef struct fields {
    const loom__yaml *yaml;
    field *list; /* [MOST_FIELDS] */
    int64_t count;
} fields;

static void append_text(char *to, size_t bytes, const char *text) {
    size_t length = strlen(to);
    if (length < bytes - 1)
        snprintf(to + length, bytes - length, "%s", text);
}

/* A sequence is one value, as a mapping in one is. */
static void flow(const fields *of, const loom__yaml_node *node, char *to) {
    if (node->kind == LOOM__YAML_SCALAR) {
        append_text(to, VALUE_BYTES, node->text);
        return;
    }
    int64_t items = node->kind == LOOM__YAML_MAPPING ? 2 * node->count : node->count;
    append_text(to, VALUE_BYTES, "[");
    for (int64_t i = 0; i < items; i++) {
        append_text(to, VALUE_BYTES, i ? ", " : "");
        flow(of, loom__yaml_at(of->yaml, node->items[i]), to);
    }
    append_text(to, VALUE_BYTES, "]");
}

static void collect(fields *of, const loom__yaml_node *node, const char *name) {
    if (node->kind != LOOM__YAML_MAPPING) {
        if (of->count < MOST_FIELDS) {
            field *made = &of->list[of->count++];
            snprintf(made->name, sizeof made->name, "%s", name);
            flow(of, node, made->value);
        }
        return;
    }
    for (int64_t i = 0; i < node->count; i++) {
        char longer[FIELD_BYTES];
        snprintf(longer, sizeof longer, "%.*s%s%s", FIELD_BYTES / 2, name, *name ? "." : "",
            loom__yaml_at(of->yaml, node->items[2 * i])->text);
        collect(of, loom__yaml_at(of->yaml, node->items[2 * i + 1]), longer);
    }
}

static loom_status fields_of(const loom_run_record *run, fields *of) {
    loom__yaml *yaml = NULL;
    if (!run->config_text)
        return loom_fail(LOOM_ERR_NOT_FOUND, "%s: there is no run.yaml, which tells its configuration", run->folder);
    LOOM_TRY(loom__yaml_parse(run->folder, run->config_text, strlen(run->config_text), &yaml));
    of->list = calloc(MOST_FIELDS, sizeof *of->list);
    of->yaml = yaml;
    if (of->list && loom__yaml_root(yaml))
        collect(of, loom__yaml_root(yaml), "");
    loom__yaml_destroy(yaml);
    return of->list ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for the fields of a configuration");
}

static const field *find(const fields *in, const char *name) {
    for (int64_t i = 0; i < in->count; i++)
        if (strcmp(in->list[i].name, name) == 0)
            return &in->list[i];
    return NULL;
}

static loom_status tell(const fields *of_a, const fields *of_b, loom_run_field_function function, void *context) {
    for (int64_t i = 0; i < of_a->count; i++) {
        const field *x = &of_a->list[i], *y = find(of_b, x->name);
        if (!y || strcmp(x->value, y->value) != 0)
            LOOM_TRY(function(context, x->name, x->value, y ? y->value : NULL));
    }
    for (int64_t i = 0; i < of_b->count; i++)
        if (!find(of_a, of_b->list[i].name))
            LOOM_TRY(function(context, of_b->list[i].name, NULL, of_b->list[i].value));
    return LOOM_OK;
}

loom_status loom_runs_compare_config(
    const loom_run_record *a, const loom_run_record *b, loom_run_field_function function, void *context) {
    fields of_a = {0}, of_b = {0};
    loom_status status = fields_of(a, &of_a);
    if (!status)
        status = fields_of(b, &of_b);
    if (!status)
        status = tell(&of_a, &of_b, function, context);
    free(of_a.list);
    free(of_b.list);
    return status;
}
