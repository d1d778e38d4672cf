/* Numbers of routers by name. One list says what they are called as a whole, in each layer and in the page; who writes
 * them and who draws them goes by it. A chart is of the layers where the run has told of them, else of the model. */
#include "report/router.h"
#include "report/page.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_BYTES = 80, LAYERS_SHOWN = 128, MOST_DIGITS = 9, COLOURS = 5 };

static const char *const load_name = "expert_load", *const share_name = "dropped_share";

static double share_of(int64_t dropped, int64_t choices) {
    return choices > 0 ? (double)dropped / (double)choices : NAN;
}

/* ---- what is written ---- */

static loom_status give_whole(const loom_router_statistics *of, loom__number_function function, void *context) {
    LOOM_TRY(function(context, load_name, of->load, false));
    LOOM_TRY(function(context, "expert_load_mean", of->mean_load, false));
    if (of->limited) {
        LOOM_TRY(function(context, "dropped_choices", (double)of->dropped, true));
        LOOM_TRY(function(context, share_name, share_of(of->dropped, of->choices), false));
    }
#define GIVE(loss, name) LOOM_TRY(function(context, name, of->losses[LOOM_ROUTER_##loss], false));
    LOOM_ROUTER_LOSS_LIST(GIVE)
#undef GIVE
    return LOOM_OK;
}

static loom_status give_one(
    const loom_router_layer *layer, const char *what, double value, loom__number_function function, void *context) {
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "moe/%s_layer_%" PRId64, what, layer->layer);
    return function(context, name, value, false);
}

static loom_status give_layer(
    const loom_router_layer *layer, bool limited, loom__number_function function, void *context) {
    LOOM_TRY(give_one(layer, load_name, layer->load, function, context));
    if (limited)
        LOOM_TRY(give_one(layer, share_name, share_of(layer->dropped, layer->choices), function, context));
#define GIVE(loss, name) LOOM_TRY(give_one(layer, name, layer->losses[LOOM_ROUTER_##loss], function, context));
    LOOM_ROUTER_LOSS_LIST(GIVE)
#undef GIVE
    return LOOM_OK;
}

loom_status loom__router_numbers(const loom_step_report *report, loom__number_function function, void *context) {
    const loom_router_statistics *of = report->router;
    if (!of)
        return LOOM_OK;
    LOOM_TRY(give_whole(of, function, context));
    for (int64_t i = 0; report->router_layers && i < of->layer_count; i++)
        LOOM_TRY(give_layer(&of->layers[i], of->limited, function, context));
    return LOOM_OK;
}

/* ---- what is drawn ---- */

typedef struct drawing {
    const loom_run_record *run;
    int64_t points;
    double *values; /* [reports] of the curve at work */
} drawing;

static double value_at(const void *context, int64_t i) {
    return ((const double *)context)[i];
}

/* Reports and series both ascend, and each number of a series is of a report. */
static json_t *curve_of(const drawing *d, const loom_run_series *series, const char *name, int colour, bool dashed) {
    if (!series)
        return NULL;
    for (int64_t i = 0, j = 0; i < d->run->count; i++) {
        const bool is_told = j < series->count && series->steps[j] == d->run->reports[i].step;
        d->values[i] = is_told ? series->values[j++] : NAN;
    }
    const loom__curve curve = {name, colour, dashed, value_at, d->values};
    return loom__curve_json(&curve, d->run->reports, d->run->count, d->points);
}

typedef struct layer_series {
    int64_t layer;
    const loom_run_series *series;
} layer_series;

static int by_layer(const void *a, const void *b) {
    int64_t x = ((const layer_series *)a)->layer, y = ((const layer_series *)b)->layer;
    return (x > y) - (x < y);
}

/* "moe/NAME_layer_N", by N. */
static int find_layers(const loom_run_record *run, const char *name, layer_series found[LAYERS_SHOWN]) {
    char prefix[NAME_BYTES];
    int count = 0, length = snprintf(prefix, sizeof prefix, "moe/%s_layer_", name);
    for (int64_t i = 0; i < run->series_count && count < LAYERS_SHOWN; i++) {
        const loom_run_series *series = &run->series[i];
        if (strncmp(series->name, prefix, (size_t)length) != 0)
            continue;
        const char *digits = series->name + length;
        size_t count_of_digits = strspn(digits, "0123456789");
        if (count_of_digits > 0 && count_of_digits <= MOST_DIGITS && !digits[count_of_digits])
            found[count++] = (layer_series){strtol(digits, NULL, 10), series};
    }
    qsort(found, (size_t)count, sizeof *found, by_layer);
    return count;
}

typedef struct quantity {
    const char *title, *name, *whole; /* whole: what the number of the model is of */
    const char *second, *second_whole;
} quantity;

static void add_chart(const drawing *d, const quantity *of, json_t *charts, json_t *marks) {
    layer_series layers[LAYERS_SHOWN] = {{0, NULL}};
    json_t *curves[LAYERS_SHOWN];
    int count = find_layers(d->run, of->name, layers);
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "layer %" PRId64, layers[i].layer);
        curves[i] = curve_of(d, layers[i].series, name, i % COLOURS, i / COLOURS % 2 != 0);
    }
    if (count == 0) {
        curves[count++] = curve_of(d, loom_run_find_series(d->run, of->name), of->whole, 0, false);
        if (of->second)
            curves[count++] = curve_of(d, loom_run_find_series(d->run, of->second), of->second_whole, 1, false);
    }
    loom__charts_add(charts, of->title, "", false, false, curves, count, json_incref(marks));
}

void loom__router_charts(const loom_run_record *run, int64_t points, json_t *charts, json_t *marks) {
    static const quantity quantities[] = {
        {"Busiest expert over the mean", "expert_load", "most uneven layer", "expert_load_mean", "mean of the layers"},
        {"Share of choices dropped", "dropped_share", "all layers", NULL, NULL},
        {"Load-balancing loss", "load_balancing_loss", "mean of the layers", NULL, NULL},
        {"Load-balancing loss of sequences", "seq_load_balancing_loss", "mean of the layers", NULL, NULL},
        {"Load-balancing loss of the global batch", "global_load_balancing_loss", "mean of the layers", NULL, NULL},
        {"Z loss of the routers", "z_loss", "mean of the layers", NULL, NULL}};
    drawing d = {run, points, run->series_count > 0 ? calloc((size_t)run->count + 1, sizeof *d.values) : NULL};
    for (size_t i = 0; d.values && i < sizeof quantities / sizeof *quantities; i++)
        add_chart(&d, &quantities[i], charts, marks);
    free(d.values);
}
