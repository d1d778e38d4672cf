/* The numbers of routers in what a run writes down, and in its page. */
#ifndef REPORT_ROUTER_H
#define REPORT_ROUTER_H

#include <jansson.h>
#include <megaloom/run.h>

/* Calls function(context, name, value, is_count) for each of them, in the order of a line; none without
 * report->router. The first error ends it. */
typedef loom_status (*loom__number_function)(void *context, const char *name, double value, bool is_count);
loom_status loom__router_numbers(const loom_step_report *report, loom__number_function function, void *context);

/* Adds the charts of a run that has such numbers; `marks` is borrowed. */
void loom__router_charts(const loom_run_record *run, int64_t points, json_t *charts, json_t *marks);

#endif
