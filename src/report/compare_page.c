/* The page of two runs: each curve of both over the other, and the difference of their losses beside the bound. */
#include "report/page.h"
#include "report/run.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct common {
    loom__step_apart *steps;
    loom_step_report *reports; /* of the same steps, which is all that a curve asks of them */
    int64_t count;
} common;

static double difference_value(const void *context, int64_t i) {
    double value = ((const common *)context)->steps[i].loss;
    return value > 0 ? value : NAN; /* equal bits have no place on a logarithmic scale */
}

static double bound_value(const void *context, int64_t i) {
    return ((const common *)context)->steps[i].bound;
}

static loom_status common_of(const loom_run_record *a, const loom_run_record *b, const loom_run_record *const *noise,
    int64_t noise_count, common *out) {
    LOOM_TRY(loom__runs_apart(a, b, noise, noise_count, &out->steps, &out->count));
    out->reports = calloc((size_t)out->count + 1, sizeof *out->reports);
    if (!out->reports) {
        free(out->steps);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a page");
    }
    for (int64_t i = 0; i < out->count; i++)
        out->reports[i].step = out->steps[i].step;
    return LOOM_OK;
}

static loom_status add_row(void *context, const char *name, const char *a, const char *b) {
    json_t *row = json_array();
    json_array_append_new(row, loom__html_string(name));
    json_array_append_new(row, loom__html_string(a ? a : "–"));
    json_array_append_new(row, loom__html_string(b ? b : "–"));
    json_array_append_new(context, row);
    return LOOM_OK;
}

static json_t *charts_of(const loom_run_record *a, const loom_run_record *b, const common *both, int64_t points) {
    static const struct {
        const char *column, *title;
        bool from_zero, log;
    } overlaid[] = {{"loss", "Loss", false, false}, {"validation_loss", "Validation loss", false, false},
        {"grad_norm", "Gradient norm", false, true}, {"learning_rate", "Learning rate", true, false},
        {"tokens_per_second", "Throughput, tokens/s", true, false}};
    json_t *charts = json_array();
    for (size_t i = 0; i < sizeof overlaid / sizeof *overlaid; i++) {
        json_t *curves[] = {loom__column_curve(a, overlaid[i].column, a->folder, 0, points),
            loom__column_curve(b, overlaid[i].column, b->folder, 1, points)};
        /* Where they lie on each other, the first is seen between the dashes of the second. */
        json_object_set_new(curves[1], "dashed", json_true());
        loom__charts_add(charts, overlaid[i].title, "", overlaid[i].from_zero, overlaid[i].log, curves, 2, NULL);
        if (i > 0)
            continue;
        loom__curve difference = {"difference", 3, false, difference_value, both};
        loom__curve bound = {"bound of rounding", 4, true, bound_value, both};
        json_t *apart[] = {loom__curve_json(&difference, both->reports, both->count, points),
            loom__curve_json(&bound, both->reports, both->count, points)};
        loom__charts_add(charts, "Relative difference of the losses", "", false, true, apart, 2, NULL);
    }
    return charts;
}

static json_t *facts_of(const loom_run_difference *d) {
    json_t *facts = json_array();
    json_array_append_new(facts, json_pack("[s, o, o]", "Common steps", loom__html_format("%" PRId64, d->common),
                                     loom__html_format("%" PRId64 " to %" PRId64, d->first, d->last)));
    json_array_append_new(facts, json_pack("[s, o, o]", "Equal bits", loom__html_format("%" PRId64, d->equal),
                                     loom__html_format("of %" PRId64 " losses", d->common)));
    json_array_append_new(facts, json_pack("[s, o, o]", "First difference", loom__html_format("%.3g", d->begin),
                                     loom__html_format("relative, step %" PRId64, d->first)));
    json_array_append_new(facts, json_pack("[s, o, o]", "Largest difference", loom__html_format("%.3g", d->largest),
                                     loom__html_format("relative, step %" PRId64, d->largest_step)));
    return facts;
}

loom_status loom_runs_write_html(FILE *out, const loom_run_record *a, const loom_run_record *b,
    const loom_run_record *const *noise, int64_t noise_count, const loom_run_difference *difference, const char *note,
    int64_t points) {
    points = points > 0 ? points : LOOM__PAGE_POINTS;
    common both;
    LOOM_TRY(common_of(a, b, noise, noise_count, &both));
    bool equal = difference->equal == difference->common, beyond = difference->beyond > 0;
    json_t *rows = json_array();
    (void)add_row(rows, "field", a->folder, b->folder);
    if (a->config_text && b->config_text && loom_runs_compare_config(a, b, add_row, rows) != LOOM_OK)
        json_array_clear(rows);
    if (json_array_size(rows) == 1)
        json_array_clear(rows);
    json_t *data = json_pack("{s:o, s:{s:s, s:s}, s:o, s:o, s:o, s:s, s:o}", "title",
        loom__html_format("%s and %s", a->folder, b->folder), "badge", "text",
        beyond  ? "beyond rounding"
        : equal ? "bit for bit equal"
                : "within rounding",
        "tone", beyond ? "bad" : "good", "facts", facts_of(difference), "charts", charts_of(a, b, &both, points),
        "rows", rows, "rowsTitle", "Where the configurations differ", "footer",
        loom__html_format("Made by megaloom compare."));
    if (data && note)
        json_object_set_new(data, "lead", loom__html_string(note));
    free(both.reports);
    free(both.steps);
    loom__html_begin(out, "Two runs");
    return loom__html_end(out, data);
}
