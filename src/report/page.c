/* Pages that ask for nothing: style, data and script are in them, and a policy in their head forbids everything else,
 * so that a page shows the same offline and online. A text of a run never becomes markup: it travels as JSON in which
 * no
 * "<" stands, and enters the page by the script's textContent. */
#include "report/page.h"
#include "base/text.h"
#include "report/columns.h"
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

json_t *loom__html_string(const char *text) {
    json_t *plain = json_string(text);
    char *copy = plain ? NULL : strdup(text);
    if (!copy)
        return plain;
    for (char *at = copy; *at; at++)
        if ((unsigned char)*at >= 0x80)
            *at = '?';
    plain = json_string(copy);
    free(copy);
    return plain;
}

json_t *loom__html_format(const char *format, ...) {
    char *text = NULL;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&text, format, arguments);
    va_end(arguments);
    if (length < 0)
        return NULL;
    json_t *made = loom__html_string(text);
    free(text);
    return made;
}

static void put_escaped(FILE *out, const char *text) {
    bool whole = loom__is_utf8(text);
    for (; *text; text++) {
        if (*text == '<')
            fputs("&lt;", out);
        else if (*text == '&')
            fputs("&amp;", out);
        else
            fputc((unsigned char)*text >= 0x80 && !whole ? '?' : *text, out);
    }
}

void loom__html_begin(FILE *out, const char *title) {
    fputs("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
          "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
          "script-src 'unsafe-inline'; img-src data:\">\n<link rel=\"icon\" href=\"data:,\">\n<title>",
        out);
    put_escaped(out, title);
    fputs("</title>\n<style>\n", out);
    fputs((const char *)loom__page_style, out);
    fputs("</style>\n</head>\n<body>\n<main><noscript>This page is drawn by the script in it, which is switched off "
          "here.</noscript></main>\n",
        out);
}

loom_status loom__html_end(FILE *out, json_t *data) {
    char *text = data ? json_dumps(data, JSON_COMPACT | JSON_REAL_PRECISION(7)) : NULL;
    json_decref(data);
    if (!text)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a page");
    fputs("<script type=\"application/json\" id=\"data\">", out);
    for (const char *at = text; *at; at++)
        if (*at == '<')
            fputs("\\u003c", out);
        else
            fputc(*at, out);
    free(text);
    fputs("</script>\n<script>\n", out);
    fputs((const char *)loom__page_script, out);
    fputs("</script>\n</body>\n</html>\n", out);
    return ferror(out) ? loom_fail(LOOM_ERR_IO, "the page cannot be written: %m") : LOOM_OK;
}

/* ---- curves ---- */

typedef struct stretch {
    double mean, low, high;
    int64_t middle, values;
} stretch;

/* Reports begin … end-1; infinities and NaN are told apart by nobody who looks at a curve. */
static stretch stretch_of(
    const loom__curve *curve, const loom_step_report *reports, const int64_t *places, int64_t begin, int64_t end) {
    stretch of = {.low = INFINITY, .high = -INFINITY, .middle = reports[places[begin + (end - 1 - begin) / 2]].step};
    double sum = 0;
    for (int64_t i = begin; i < end; i++) {
        double value = curve->value(curve->context, places[i]);
        if (!isfinite(value))
            continue;
        sum += value;
        of.values++;
        of.low = fmin(of.low, value);
        of.high = fmax(of.high, value);
    }
    of.mean = of.values ? sum / (double)of.values : NAN;
    return of;
}

/* The reports in which the curve has a place. What was never measured is sparse (validation), and then the steps
 * between are no holes; a NaN among measured ones is. */
static int64_t find_places(const loom__curve *curve, int64_t count, int64_t *places, bool *any) {
    int64_t measured = 0, found = 0;
    for (int64_t i = 0; i < count; i++)
        measured += isfinite(curve->value(curve->context, i));
    *any = measured > 0;
    for (int64_t i = 0; i < count; i++)
        if (2 * measured > count || isfinite(curve->value(curve->context, i)))
            places[found++] = i;
    return found;
}

static json_t *real_or_null(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

json_t *loom__curve_json(const loom__curve *curve, const loom_step_report *reports, int64_t count, int64_t points) {
    int64_t *places = calloc((size_t)count + 1, sizeof *places);
    bool any = false;
    int64_t found = places ? find_places(curve, count, places, &any) : 0;
    if (!any) {
        free(places);
        return NULL;
    }
    int64_t stretches = found < points ? found : points;
    json_t *x = json_array(), *mean = json_array(), *low = json_array(), *high = json_array();
    for (int64_t i = 0; i < stretches; i++) {
        stretch of = stretch_of(curve, reports, places, found * i / stretches, found * (i + 1) / stretches);
        json_array_append_new(x, json_integer((json_int_t)of.middle));
        json_array_append_new(mean, real_or_null(of.mean));
        json_array_append_new(low, real_or_null(of.low));
        json_array_append_new(high, real_or_null(of.high));
    }
    json_t *last = json_pack("[I, o]", (json_int_t)reports[places[found - 1]].step,
        real_or_null(curve->value(curve->context, places[found - 1])));
    free(places);
    json_t *object = json_pack("{s:s, s:i, s:b, s:o, s:o, s:o}", "name", curve->name, "colour", curve->colour, "dashed",
        curve->dashed, "x", x, "mean", mean, "last", last);
    if (found > stretches) {
        json_object_set(object, "low", low);
        json_object_set(object, "high", high);
    }
    json_decref(low);
    json_decref(high);
    return object;
}

typedef struct column_context {
    const loom_run_record *run;
    const loom__column *column;
} column_context;

static double column_value(const void *context, int64_t i) {
    const column_context *of = context;
    double value = loom__column_value(of->column, &of->run->reports[i]);
    return of->column->integer && value == 0 ? NAN : value;
}

json_t *loom__column_curve(
    const loom_run_record *run, const char *column, const char *name, int colour, int64_t points) {
    column_context context = {.run = run};
    for (int i = 0; i < LOOM__COLUMNS; i++)
        if (strcmp(loom__columns[i].name, column) == 0)
            context.column = &loom__columns[i];
    loom__curve curve = {.name = name, .colour = colour, .value = column_value, .context = &context};
    return loom__curve_json(&curve, run->reports, run->count, points);
}

void loom__charts_add(json_t *charts, const char *title, const char *unit, bool from_zero, bool log,
    json_t *const *curves, int count, json_t *marks) {
    json_t *list = json_array();
    for (int i = 0; i < count; i++)
        if (curves[i])
            json_array_append_new(list, curves[i]);
    if (json_array_size(list) == 0) {
        json_decref(list);
        json_decref(marks);
        return;
    }
    json_t *chart = json_pack(
        "{s:s, s:s, s:b, s:b, s:o}", "title", title, "unit", unit, "zero", from_zero, "log", log, "curves", list);
    if (marks)
        json_object_set_new(chart, "marks", marks);
    json_array_append_new(charts, chart);
}
