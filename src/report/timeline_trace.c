/* Events as the JSON of Chrome's trace viewer: complete events in microseconds, a thread for each row. Times are
 * written as whole nanoseconds, since printf's decimal point is the locale's. */
#include <inttypes.h>
#include <math.h>

#include "report/timeline.h"

static void put_time(FILE *out, const char *name, double microseconds) {
    int64_t nanoseconds = llround(microseconds * 1e3);
    fprintf(out, ",\"%s\":%" PRId64 ".%03d", name, nanoseconds / 1000, (int)(nanoseconds % 1000));
}

loom_status loom_timeline_write_trace(FILE *out, const loom_timeline *timeline, double seconds) {
    loom__timeline_extent extent;
    LOOM_TRY(loom__timeline_check(timeline, &extent));
    double factor = seconds * 1e6;
    if (!(seconds > 0.0) || !((extent.end - extent.begin) * factor < 9e15))
        return loom_fail(LOOM_ERR_ARGUMENT,
            "a unit of time of %g seconds: expected a length above 0 with which the trace is shorter than 285 years",
            seconds);
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
          "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":0,\"args\":{\"name\":\"pipeline\"}}",
        out);
    for (int64_t row = 0; row < timeline->stages; row++) {
        fprintf(
            out, ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":0,\"tid\":%" PRId64 ",\"args\":{\"name\":\"", row);
        if (timeline->rows)
            fputs(timeline->rows[row], out);
        else
            fprintf(out, "stage %" PRId64, row);
        fputs("\"}}", out);
    }
    for (int64_t i = 0; i < timeline->event_count; i++) {
        const loom_schedule_event *at = &timeline->events[i];
        const char *name = loom_instruction_name(at->kind);
        fprintf(out, ",\n{\"name\":\"%s", name);
        if (at->microbatch >= 0)
            fprintf(out, " %" PRId64, at->microbatch);
        if (at->microbatch >= 0 && timeline->chunks > 1)
            fprintf(out, ".%d", at->chunk);
        fprintf(out, "\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":0,\"tid\":%" PRId64, name, at->stage);
        put_time(out, "ts", (at->start - extent.begin) * factor);
        put_time(out, "dur", (at->end - at->start) * factor);
        fprintf(out, ",\"args\":{\"microbatch\":%" PRId64 ",\"chunk\":%d}}", at->microbatch, at->chunk);
    }
    fputs("\n]}\n", out);
    return ferror(out) ? loom_fail(LOOM_ERR_IO, "the trace cannot be written: %m") : LOOM_OK;
}
