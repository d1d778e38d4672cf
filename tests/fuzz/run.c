/* Fuzzes what is read of a run's folder: run.json, lines of metrics.jsonl with whatever series, and the page that is
 * made of both. */
#include "report/run.h"
#include "report/series.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { REPORTS = 8 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const char *text = (const char *)data, *end = text + bytes;
    loom_step_report reports[REPORTS];
    loom_run_record run = {.folder = (char *)"fuzz", .reports = reports};
    bool good = loom__run_parse_facts("fuzz", text, bytes, &run.facts) == LOOM_OK;
    for (const char *line = text; line < end && run.count < REPORTS;) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        stop = stop ? stop : end;
        if (!loom__run_parse_test(line, (size_t)(stop - line), &run.test_step, &run.test_loss) &&
            loom__run_parse_line(line, (size_t)(stop - line), &reports[run.count])) {
            json_t *object = json_loadb(line, (size_t)(stop - line), 0, NULL);
            loom__series_cut(&run, reports[run.count].step);
            (void)loom__series_take(&run, reports[run.count++].step, object);
            json_decref(object);
        }
        line = stop + 1;
    }
    FILE *out = good || run.count > 0 ? fopen("/dev/null", "w") : NULL;
    if (out) {
        (void)loom_run_write_html(out, &run, 3);
        fclose(out);
    }
    loom__series_free(&run);
    loom__run_free_facts(&run.facts);
    return 0;
}
