/* Self-contained pages: what they share. A page is its style, JSON and a script that builds the rest from it. */
#ifndef REPORT_PAGE_H
#define REPORT_PAGE_H

#include <jansson.h>
#include <megaloom/run.h>

/* Ended by a 0. Made by cmake/embed.cmake from page/page.js and page/page.css. */
extern const unsigned char loom__page_script[], loom__page_style[];

/* A JSON string of any bytes: what is no UTF-8 becomes question marks. */
json_t *loom__html_string(const char *text);
/* printf into one. */
json_t *loom__html_format(const char *format, ...) LOOM_PRINTF(1, 2);

/* The page up to its body; then markup may follow; then the data, whose reference is taken, also by an error. Keys are
 * those that page.js reads: "title", "badge", "lead", "facts", "warnings", "charts", "memory", "timeline", "rank",
 * "rows" and "rowsTitle", "config", "footer". */
void loom__html_begin(FILE *out, const char *title);
loom_status loom__html_end(FILE *out, json_t *data);

/* A curve of a chart: the values of one column over the steps, of at most `points` stretches; NULL where no report has
 * a number. Stretches have "mean", and where they have more than one step "low" and "high"; "last" is the last step
 * with its own value. */
typedef struct loom__curve {
    const char *name;
    int colour; /* of the style's palette, from 0 */
    bool dashed;
    double (*value)(const void *context, int64_t i); /* of report i; NaN = none */
    const void *context;
} loom__curve;
json_t *loom__curve_json(const loom__curve *curve, const loom_step_report *reports, int64_t count, int64_t points);
/* The same of a column by its name in metrics.jsonl. */
json_t *loom__column_curve(
    const loom_run_record *run, const char *column, const char *name, int colour, int64_t points);
/* Adds a chart of those curves that are not NULL, whose references are taken; adds none where all are. `marks` may be
 * NULL; its reference is taken. */
void loom__charts_add(json_t *charts, const char *title, const char *unit, bool from_zero, bool log,
    json_t *const *curves, int count, json_t *marks);

enum { LOOM__PAGE_POINTS = 1000 };

#endif
