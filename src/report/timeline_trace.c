/* Events as the JSON of Chrome's trace viewer: complete events in microseconds, a thread for each row, and pairs of
 * asynchronous ones for what goes on beside it. Times are written as whole nanoseconds, since printf's decimal point is
 * the locale's. */
#include <inttypes.h>
#include <math.h>

#include "report/timeline.h"

static void put_time(FILE *out, const char *name, double microseconds) {
    int64_t nanoseconds = llround(microseconds * 1e3);
    fprintf(out, ",\"%s\":%" PRId64 ".%03d", name, nanoseconds / 1000, (int)(nanoseconds % 1000));
}

static const char *const span_names[] = {"gradient reduction", "parameter gather", "optimizer step", "key exchange",
    "key gradient exchange", "attention of a piece"};

/* These are computations, which lie inside of those of the schedule or between them. */
static bool nests(loom_span_kind kind) {
    return kind == LOOM_SPAN_OPTIMIZER_STEP || kind == LOOM_SPAN_ATTENTION;
}

static loom_status check_spans(const loom_timeline *timeline, loom__timeline_extent *extent) {
    for (int64_t i = 0; i < timeline->span_count; i++) {
        const loom_timeline_span *at = &timeline->spans[i];
        if (at->row < 0 || at->row >= timeline->stages || (unsigned)at->kind > LOOM_SPAN_ATTENTION ||
            !isfinite(at->start) || !isfinite(at->end) || at->end < at->start)
            return loom_fail(LOOM_ERR_ARGUMENT,
                "span %" PRId64 " (kind %d of row %" PRId64 ", from %g to %g) does not fit a timeline of %" PRId64
                " rows: expected one of them, a kind from 0 to %d, and an end not before the begin",
                i, (int)at->kind, at->row, at->start, at->end, timeline->stages, (int)LOOM_SPAN_ATTENTION);
        bool first = i == 0 && timeline->event_count == 0;
        extent->begin = first || at->start < extent->begin ? at->start : extent->begin;
        extent->end = first || at->end > extent->end ? at->end : extent->end;
    }
    return LOOM_OK;
}

static void put_row_name(FILE *out, const loom_timeline *timeline, int64_t row) {
    if (timeline->rows)
        fputs(timeline->rows[row], out);
    else
        fprintf(out, "stage %" PRId64, row);
}

/* Viewers let spans of one thread only nest: what overlaps otherwise is a pair of asynchronous events, which have a
 * process for each row, since threads do not tell them apart. */
static void put_span(FILE *out, const loom_timeline *timeline, int64_t number, double begin, double factor) {
    const loom_timeline_span *at = &timeline->spans[number];
    const char *name = span_names[at->kind];
    if (nests(at->kind)) {
        fprintf(out, ",\n{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":0,\"tid\":%" PRId64, name, name, at->row);
        put_time(out, "ts", (at->start - begin) * factor);
        put_time(out, "dur", (at->end - at->start) * factor);
        fputs("}", out);
        return;
    }
    for (int side = 0; side < 2; side++) {
        fprintf(out, ",\n{\"name\":\"%s", name);
        if (at->bucket >= 0)
            fprintf(out, ", bucket %" PRId64, at->bucket);
        fprintf(out, "\",\"cat\":\"%s\",\"ph\":\"%s\",\"id\":\"%" PRId64 "\",\"pid\":%" PRId64 ",\"tid\":0", name,
            side == 0 ? "b" : "e", number, 1 + at->row);
        put_time(out, "ts", ((side == 0 ? at->start : at->end) - begin) * factor);
        fputs(",\"args\":{", out);
        if (at->bucket >= 0)
            fprintf(out, "\"bucket\":%" PRId64 ",", at->bucket);
        fprintf(out, "\"bytes\":%" PRId64 "}}", at->bytes);
    }
}

static void name_communication(FILE *out, const loom_timeline *timeline) {
    for (int64_t row = 0; row < timeline->stages; row++) {
        bool communicates = false;
        for (int64_t i = 0; i < timeline->span_count && !communicates; i++)
            communicates = timeline->spans[i].row == row && !nests(timeline->spans[i].kind);
        if (!communicates)
            continue;
        fprintf(out, ",\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%" PRId64 ",\"args\":{\"name\":\"", 1 + row);
        put_row_name(out, timeline, row);
        fputs(": communication\"}}", out);
    }
}

loom_status loom_timeline_write_trace(FILE *out, const loom_timeline *timeline, double seconds) {
    loom__timeline_extent extent;
    LOOM_TRY(loom__timeline_check(timeline, &extent));
    LOOM_TRY(check_spans(timeline, &extent));
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
        put_row_name(out, timeline, row);
        fputs("\"}}", out);
    }
    name_communication(out, timeline);
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
    for (int64_t i = 0; i < timeline->span_count; i++)
        put_span(out, timeline, i, extent.begin, factor);
    fputs("\n]}\n", out);
    return ferror(out) ? loom_fail(LOOM_ERR_IO, "the trace cannot be written: %m") : LOOM_OK;
}
