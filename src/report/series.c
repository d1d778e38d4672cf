/* Series: what a line of metrics.jsonl says beyond loom_step_report, which not every run has. Only what is there takes
 * memory, so that no file can ask for more than a small multiple of its own size. Invariant: series are in the order of
 * their names, the steps of each ascend. */
#include "report/series.h"
#include "report/columns.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Beyond as many names a file tells no run of ours. */
enum { MOST_SERIES = 1 << 14 };

static bool is_column(const char *name) {
    for (int i = 0; i < LOOM__COLUMNS; i++)
        if (strcmp(loom__columns[i].name, name) == 0)
            return true;
    return strcmp(name, "step") == 0;
}

/* The first series whose name does not come before this one. */
static int64_t place_of(const loom_run_record *run, const char *name) {
    int64_t low = 0, high = run->series_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (strcmp(run->series[middle].name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

const loom_run_series *loom_run_find_series(const loom_run_record *run, const char *name) {
    int64_t at = place_of(run, name);
    return at < run->series_count && strcmp(run->series[at].name, name) == 0 ? &run->series[at] : NULL;
}

/* Room doubles at each power of two: there is never less than the count says, also after it has fallen. */
static bool is_full(int64_t count) {
    return (count & (count - 1)) == 0;
}

static loom_status out_of_memory(const char *name) {
    return loom_fail(LOOM_ERR_MEMORY, "out of memory for the numbers \"%.64s\" of a run", name);
}

static loom_status insert(loom_run_record *run, int64_t at, const char *name) {
    if (is_full(run->series_count)) {
        size_t room = run->series_count ? 2 * (size_t)run->series_count : 1;
        loom_run_series *grown = realloc(run->series, room * sizeof *grown);
        if (!grown)
            return out_of_memory(name);
        run->series = grown;
    }
    char *copy = strdup(name);
    if (!copy)
        return out_of_memory(name);
    memmove(run->series + at + 1, run->series + at, (size_t)(run->series_count - at) * sizeof *run->series);
    run->series[at] = (loom_run_series){.name = copy};
    run->series_count++;
    return LOOM_OK;
}

static loom_status append(loom_run_series *series, int64_t step, double value) {
    if (is_full(series->count)) {
        size_t room = series->count ? 2 * (size_t)series->count : 1;
        int64_t *steps = realloc(series->steps, room * sizeof *steps);
        if (!steps)
            return out_of_memory(series->name);
        series->steps = steps;
        double *values = realloc(series->values, room * sizeof *values);
        if (!values)
            return out_of_memory(series->name);
        series->values = values;
    }
    series->steps[series->count] = step;
    series->values[series->count++] = value;
    return LOOM_OK;
}

loom_status loom__series_take(loom_run_record *run, int64_t step, const json_t *line) {
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)line, name, value) {
        if ((!json_is_number(value) && !json_is_null(value)) || is_column(name))
            continue;
        int64_t at = place_of(run, name);
        bool is_new = at == run->series_count || strcmp(run->series[at].name, name) != 0;
        if (is_new && run->series_count == MOST_SERIES)
            continue;
        if (is_new)
            LOOM_TRY(insert(run, at, name));
        LOOM_TRY(append(&run->series[at], step, json_is_null(value) ? INFINITY : json_number_value(value)));
    }
    return LOOM_OK;
}

void loom__series_cut(loom_run_record *run, int64_t step) {
    for (int64_t i = 0; i < run->series_count; i++) {
        loom_run_series *series = &run->series[i];
        while (series->count > 0 && series->steps[series->count - 1] >= step)
            series->count--;
    }
}

void loom__series_free(loom_run_record *run) {
    for (int64_t i = 0; i < run->series_count; i++) {
        free(run->series[i].name);
        free(run->series[i].steps);
        free(run->series[i].values);
    }
    free(run->series);
}
