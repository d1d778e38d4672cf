/* Two runs beside each other. The verdict is about the losses, step by step: rounding begins small, and grows out of
 * what is there, or as it does in runs that differ by rounding alone; and about the gradient norm of a first step,
 * whose weights are the same (run.h says the bounds). Invariant: what is beyond the bound once stays the answer,
 * however the runs go on. */
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

/* Of the precisions of two runs the one with the larger unit roundoff; "32" where a run does not tell its own. */
static const char *coarser_precision(const loom_run_record *a, const loom_run_record *b, bool *known) {
    const char *of_a = a->config ? a->config->precision.precision : NULL;
    const char *of_b = b->config ? b->config->precision.precision : NULL;
    *known = of_a && of_b;
    if (!of_a || !of_b)
        return "32";
    return unit_roundoff(of_a) >= unit_roundoff(of_b) ? of_a : of_b;
}

/* ---- step by step ---- */

/* A walk over the steps that both have, in order. */
typedef struct common_steps {
    const loom_run_record *a, *b;
    int64_t i, j;
} common_steps;

static bool next_common(common_steps *at, const loom_step_report **x, const loom_step_report **y) {
    while (at->i < at->a->count && at->j < at->b->count) {
        *x = &at->a->reports[at->i];
        *y = &at->b->reports[at->j];
        int64_t s = (*x)->step, t = (*y)->step;
        at->i += s <= t;
        at->j += t <= s;
        if (s == t)
            return true;
    }
    return false;
}

static loom_status no_common(const loom_run_record *a, const loom_run_record *b) {
    return loom_fail(LOOM_ERR_ARGUMENT, "%s and %s have no step in common: found steps %lld to %lld, and %lld to %lld",
        a->folder, b->folder, (long long)(a->count ? a->reports[0].step : 0),
        (long long)(a->count ? a->reports[a->count - 1].step : 0), (long long)(b->count ? b->reports[0].step : 0),
        (long long)(b->count ? b->reports[b->count - 1].step : 0));
}

/* Bounds that one measured run allows; where another allows more they stay. */
static void allow(loom__step_apart *steps, int64_t count, const loom_run_record *a, const loom_run_record *noise) {
    common_steps walk = {.a = a, .b = noise};
    const loom_step_report *x, *y;
    double most = NAN; /* nothing is known before the first step of the measure */
    int64_t at = 0;
    while (next_common(&walk, &x, &y)) {
        for (; at < count && steps[at].step < x->step; at++)
            steps[at].bound = fmax(steps[at].bound, LOOM_NOISE_FACTOR * most);
        most = fmax(most, relative(x->loss, y->loss));
        if (at < count && steps[at].step == x->step) {
            steps[at].bound = fmax(steps[at].bound, LOOM_NOISE_FACTOR * most);
            at++;
        }
    }
}

loom_status loom__runs_apart(const loom_run_record *a, const loom_run_record *b, const loom_run_record *const *noise,
    int64_t noise_count, loom__step_apart **out, int64_t *out_count) {
    int64_t shorter = a->count < b->count ? a->count : b->count, count = 0;
    loom__step_apart *steps = calloc((size_t)shorter + 1, sizeof *steps);
    const loom_step_report *x, *y;
    bool known;
    const char *precision = coarser_precision(a, b, &known);
    double largest = 0;
    if (!steps)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for %lld steps", (long long)shorter);
    for (common_steps walk = {.a = a, .b = b}; next_common(&walk, &x, &y);) {
        bool norms = isfinite(x->grad_norm) && isfinite(y->grad_norm);
        loom__step_apart *made = &steps[count++];
        *made = (loom__step_apart){.step = x->step,
            .loss = relative(x->loss, y->loss),
            .norm = norms ? relative(x->grad_norm, y->grad_norm) : 0,
            .bound = noise_count ? NAN : loom_run_noise_bound(precision, largest),
            .equal = x->loss == y->loss};
        largest = fmax(largest, fmax(made->loss, made->norm));
    }
    for (int64_t k = 0; k < noise_count; k++)
        allow(steps, count, a, noise[k]);
    for (int64_t i = 0; i < count && noise_count; i++)
        steps[i].bound =
            isnan(steps[i].bound) ? NAN : fmax(steps[i].bound, LOOM_NOISE_FLOOR * unit_roundoff(precision));
    *out = steps;
    *out_count = count;
    return LOOM_OK;
}

static loom_status check_noise(const loom_run_record *a, const loom_run_record *const *noise, int64_t noise_count) {
    const loom_step_report *x, *y;
    for (int64_t k = 0; k < noise_count; k++)
        if (!next_common(&(common_steps){.a = a, .b = noise[k]}, &x, &y))
            return no_common(a, noise[k]);
    return LOOM_OK;
}

static void find_beyond(loom_run_difference *d, int64_t step, double apart, double bound, bool of_norm) {
    if (!(apart > bound) || d->beyond > 0)
        return;
    d->beyond = step;
    d->at = apart;
    d->allowed = bound;
    d->of_norm = of_norm;
}

loom_status loom_runs_compare(const loom_run_record *a, const loom_run_record *b, const loom_run_record *const *noise,
    int64_t noise_count, loom_run_difference *difference) {
    loom_run_difference d = {.largest = -1}; /* so that the first step is the largest, also without a difference */
    loom__step_apart *steps;
    const char *precision = coarser_precision(a, b, &d.precision_known);
    LOOM_TRY(check_noise(a, noise, noise_count));
    LOOM_TRY(loom__runs_apart(a, b, noise, noise_count, &steps, &d.common));
    for (int64_t i = 0; i < d.common; i++) {
        const loom__step_apart *at = &steps[i];
        d.equal += at->equal;
        if (at->loss > d.largest) {
            d.largest = at->loss;
            d.largest_step = at->step;
        }
        if (!isnan(at->bound))
            d.judged = at->step;
        find_beyond(&d, at->step, at->loss, at->bound, false);
        if (at->step == 1)
            find_beyond(&d, 1, at->norm, LOOM_NOISE_NORM_UNITS * unit_roundoff(precision), true);
    }
    if (d.common > 0) {
        d.first = steps[0].step;
        d.last = steps[d.common - 1].step;
        d.begin = steps[0].loss;
    }
    free(steps);
    if (d.common == 0)
        return no_common(a, b);
    if (d.judged == 0)
        return loom_fail(LOOM_ERR_ARGUMENT,
            "%s and %s have steps %lld to %lld in common, of which no run that measures rounding has one", a->folder,
            b->folder, (long long)d.first, (long long)d.last);
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
