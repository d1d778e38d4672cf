/* The timeline of a run: what each rank computed, what it waited for, and when. Every rank records into memory of its
 * own, which is bounded, so that a long run loses its later steps from the record and not its memory; at the end the
 * records come together on rank 0. Ranks wait differently often, so that their memory is full in different steps.
 * Invariant: times are those of one clock, or of clocks that were set to zero behind one barrier. */
#include "strategy/strategy.h"
#include <megaloom/timeline.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    PATH_BYTES = 4096,
    MOST_ROWS = 64, /* ranks in trace.json: all their records lie on rank 0 at once */
    ROW_BYTES = 96
};

loom_status loom_parallel_trace_begin(loom_parallel *parallel, int64_t capacity) {
    loom_rank *rank = parallel->fabric->rank;
    loom__trace *trace = &parallel->trace;
    loom_status status = LOOM_OK;
    loom__trace_free(parallel);
    if (capacity < 1 || capacity > INT32_MAX)
        status = loom_fail(
            LOOM_ERR_ARGUMENT, "events of a trace: found %lld, expected 1 to %d", (long long)capacity, INT32_MAX);
    if (!status) {
        trace->record.events = calloc((size_t)capacity, sizeof *trace->record.events);
        trace->steps = calloc((size_t)capacity, sizeof *trace->steps); /* each has an event */
        trace->spans.spans = calloc((size_t)capacity, sizeof *trace->spans.spans);
        if (!trace->record.events || !trace->steps || !trace->spans.spans)
            status = loom_fail(LOOM_ERR_MEMORY, "out of memory for a trace of %lld events", (long long)capacity);
    }
    status = loom_agree(loom_rank_world(rank), status);
    if (status) {
        loom__trace_free(parallel);
        return status;
    }
    trace->record.capacity = trace->spans.capacity = capacity;
    LOOM_TRY(loom_barrier(loom_rank_world(rank)));
    int64_t zero = (int64_t)loom__clock();
    /* The ranks of one machine share a clock, which is better than a barrier. */
    if (loom_rank_local_count(rank) == loom_rank_count(rank))
        LOOM_TRY(loom_broadcast(loom_rank_world(rank), &zero, 1, LOOM_I64, 0));
    trace->zero = (uint64_t)zero;
    loom__pipeline_set_record(parallel->pipeline, &trace->record);
    rank->spans = &trace->spans;
    return LOOM_OK;
}

void loom__trace_free(loom_parallel *parallel) {
    if (parallel->pipeline)
        loom__pipeline_set_record(parallel->pipeline, NULL);
    /* Another module's trace may have begun since. */
    if (parallel->fabric->rank->spans == &parallel->trace.spans)
        parallel->fabric->rank->spans = NULL;
    free(parallel->trace.spans.spans);
    free(parallel->trace.record.events);
    free(parallel->trace.steps);
    parallel->trace = (loom__trace){0};
}

void loom__trace_step_begins(loom_parallel *parallel) {
    parallel->trace.open = parallel->trace.record.count;
}

/* A step that did not fit is not shown: half of it would look like a bubble. */
void loom__trace_step_ends(loom_parallel *parallel, const loom_step *step) {
    loom__trace *trace = &parallel->trace;
    if (step->mode != LOOM_TRAINING || trace->record.dropped > 0 || trace->record.count == trace->open)
        return;
    trace->steps[trace->step_count++] =
        (loom__trace_step){step->number + 1, step->num_microbatches, trace->open, trace->record.count - trace->open};
}

/* The last step that all stages hold; one of no events where there is none. Collective over the stages. */
static loom_status last_step(const loom_parallel *parallel, loom__trace_step *step) {
    const loom__trace *trace = &parallel->trace;
    int64_t most = -trace->step_count; /* the least of the stages is the most of its negative */
    LOOM_TRY(loom_all_reduce(parallel->fabric->groups[LOOM_GROUP_PP], &most, &most, 1, LOOM_I64, LOOM_MAX));
    *step = most < 0 ? trace->steps[-most - 1] : (loom__trace_step){0};
    return LOOM_OK;
}

static double milliseconds(const loom__trace *trace, uint64_t time) {
    return (double)((int64_t)time - (int64_t)trace->zero) * 1e-6;
}

/* The members' bytes one after the other, on the first of the group; for free(). Elsewhere NULL and 0. Collective over
 * the group. */
static loom_status gather_bytes(loom_comm *group, const void *mine, int64_t bytes, void **all, int64_t *all_bytes) {
    int size = loom_comm_size(group);
    int64_t *given = calloc((size_t)size, sizeof *given), *taken = calloc((size_t)size, sizeof *taken), total = 0;
    void *together = NULL;
    loom_status status = given && taken ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for a trace");
    status = loom_agree(group, status);
    if (!status)
        status = loom_all_gather(group, &bytes, taken, 1, LOOM_I64);
    bool receives = loom_comm_rank(group) == 0;
    for (int i = 0; !status && i < size; i++) {
        taken[i] = receives ? taken[i] : 0;
        total += taken[i];
    }
    if (!status) {
        given[0] = bytes;
        together = receives ? malloc((size_t)total + 1) : NULL;
        status = loom_agree(
            group, together || !receives
                       ? LOOM_OK
                       : loom_fail(LOOM_ERR_MEMORY, "out of memory for a trace of %lld bytes", (long long)total));
    }
    if (!status)
        status = loom_all_to_all_v(group, mine, given, together, taken, LOOM_U8);
    free(given);
    loom_comm_free(group, taken);
    if (status) {
        loom_comm_free(group, together);
        return status;
    }
    *all = together;
    *all_bytes = total;
    return LOOM_OK;
}

/* Events first … first+count-1 of this rank's record, which may be others there, of all members of the group, on its
 * first; for free(). Elsewhere NULL and 0. `row` is this rank's in the timeline. Collective over the group. */
static loom_status gather(const loom_parallel *parallel, loom_comm *group, int64_t row, int64_t first, int64_t count,
    loom_schedule_event **all, int64_t *all_count) {
    const loom__trace *trace = &parallel->trace;
    loom_schedule_event *mine = calloc((size_t)count + 1, sizeof *mine);
    void *events = NULL;
    int64_t bytes = 0;
    loom_status status = loom_agree(group, mine ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for a trace"));
    for (int64_t i = 0; !status && i < count; i++) {
        const loom__pipeline_event *event = &trace->record.events[first + i];
        mine[i] = (loom_schedule_event){row, event->kind, event->chunk, event->microbatch,
            milliseconds(trace, event->start), milliseconds(trace, event->end)};
    }
    if (!status)
        status = gather_bytes(group, mine, count * (int64_t)sizeof *mine, &events, &bytes);
    loom_comm_free(group, mine);
    LOOM_TRY(status);
    *all = events;
    *all_count = bytes / (int64_t)sizeof **all;
    return LOOM_OK;
}

/* The same of what went on beside the computations, on the first rank of the world. Collective over the world. */
static loom_status gather_spans(
    const loom_parallel *parallel, int64_t count, loom_timeline_span **all, int64_t *all_count) {
    const loom__trace *trace = &parallel->trace;
    loom_rank *rank = parallel->fabric->rank;
    loom_timeline_span *mine = calloc((size_t)count + 1, sizeof *mine);
    void *spans = NULL;
    int64_t bytes = 0;
    loom_status status =
        loom_agree(loom_rank_world(rank), mine ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for a trace"));
    for (int64_t i = 0; !status && i < count; i++) {
        const loom__span *span = &trace->spans.spans[i];
        mine[i] = (loom_timeline_span){loom_rank_index(rank), span->kind, span->bucket, span->bytes,
            milliseconds(trace, span->start), milliseconds(trace, span->end)};
    }
    if (!status)
        status = gather_bytes(loom_rank_world(rank), mine, count * (int64_t)sizeof *mine, &spans, &bytes);
    loom_comm_free(loom_rank_world(rank), mine);
    LOOM_TRY(status);
    *all = spans;
    *all_count = bytes / (int64_t)sizeof **all;
    return LOOM_OK;
}

/* Where the first ranks of the world stand, as names of their rows; for free(). Collective over the world. */
static loom_status name_rows(const loom_parallel *parallel, int64_t rows, char (**names)[ROW_BYTES]) {
    enum { STAGE, TENSOR, DATA, PLACES };
    loom_comm *const *groups = parallel->fabric->groups, *world = loom_rank_world(parallel->fabric->rank);
    int64_t mine[PLACES] = {
        parallel->stage, loom_comm_rank(groups[LOOM_GROUP_TP]), loom_comm_rank(groups[LOOM_GROUP_DP])};
    int64_t *places = calloc((size_t)loom_comm_size(world), sizeof mine);
    char(*made)[ROW_BYTES] = calloc((size_t)rows, sizeof *made);
    loom_status status =
        loom_agree(world, places && made ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for a trace"));
    if (!status)
        status = loom_all_gather(world, mine, places, PLACES, LOOM_I64);
    for (int64_t i = 0; !status && i < rows; i++)
        snprintf(made[i], sizeof made[i], "rank %lld: stage %lld, tensor %lld, data %lld", (long long)i,
            (long long)places[i * PLACES + STAGE], (long long)places[i * PLACES + TENSOR],
            (long long)places[i * PLACES + DATA]);
    loom_comm_free(world, places);
    if (status) {
        free(made);
        return status;
    }
    *names = made;
    return LOOM_OK;
}

typedef loom_status (*writer)(FILE *out, const loom_timeline *timeline);

static loom_status put_trace(FILE *out, const loom_timeline *timeline) {
    return loom_timeline_write_trace(out, timeline, 1e-3);
}

static loom_status write_file(const char *directory, const char *name, writer put, const loom_timeline *timeline) {
    char path[PATH_BYTES];
    if (snprintf(path, sizeof path, "%s/%s", directory, name) >= (int)sizeof path)
        return loom_fail(LOOM_ERR_ARGUMENT, "the path of %s is too long", name);
    FILE *file = fopen(path, "w");
    if (!file)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    loom_status status = put(file, timeline);
    if (fclose(file) != 0 && !status)
        return loom_fail(LOOM_ERR_IO, "%s: cannot be written: %m", path);
    return status ? loom_fail_context(status, "%s: ", path) : LOOM_OK;
}

/* The bubble that the schedule has by itself, when every computation takes what its kind takes on average in its chunk
 * of its stage: what is more in a measured step comes from elsewhere. */
static loom_status simulate(const loom_parallel *parallel, int64_t microbatches, const loom_schedule_event *events,
    int64_t count, double *bubble) {
    enum { FORWARD, INPUT, WEIGHT, PARTS };
    loom_schedule_config config = parallel->training.config;
    config.microbatches = microbatches; /* steps behind the shown one may have had others */
    int64_t stages = parallel->stages, chunks = stages * parallel->chunk_count;
    double *means = calloc((size_t)(PARTS * chunks), sizeof *means);
    int64_t *times = calloc((size_t)(PARTS * chunks), sizeof *times);
    loom_schedule_list *lists = calloc((size_t)stages, sizeof *lists);
    loom_schedule_result result = {0};
    loom_status status = means && times && lists ? LOOM_OK : loom_fail(LOOM_ERR_MEMORY, "out of memory for a trace");
    for (int64_t i = 0; !status && i < count; i++) {
        const loom_schedule_event *event = &events[i];
        bool computes = event->kind <= LOOM_INSTRUCTION_BACKWARD_WEIGHT;
        int part = event->kind == LOOM_INSTRUCTION_FORWARD           ? FORWARD
                   : event->kind == LOOM_INSTRUCTION_BACKWARD_WEIGHT ? WEIGHT
                                                                     : INPUT;
        int64_t at = part * chunks + event->stage * parallel->chunk_count + event->chunk;
        means[at] += computes ? event->end - event->start : 0;
        times[at] += computes;
    }
    for (int64_t i = 0; !status && i < PARTS * chunks; i++)
        means[i] /= times[i] ? (double)times[i] : 1;
    for (int64_t i = 0; !status && i < stages; i++)
        status = loom_schedule_make(&config, i, &lists[i]);
    loom_schedule_costs costs = {means, means + INPUT * chunks, means + WEIGHT * chunks, 0};
    if (!status)
        status = loom_schedule_simulate(&config, lists, &costs, false, &result);
    *bubble = result.bubble;
    loom_schedule_result_free(&result);
    for (int64_t i = 0; lists && i < stages; i++)
        loom_schedule_list_free(&lists[i]);
    free(lists);
    free(times);
    free(means);
    return status;
}

/* Rank 0's picture of its own pipeline. The times of the step's events begin anew at 0. */
static loom_status draw(const loom_parallel *parallel, const char *directory, const loom__trace_step *step,
    loom_schedule_event *shown, int64_t shown_count) {
    loom_rank *rank = parallel->fabric->rank;
    if (shown_count == 0)
        return LOOM_OK;
    const char *plural = parallel->stages == 1 ? "" : "s";
    char title[160];
    double begin = shown[0].start;
    for (int64_t i = 0; i < shown_count; i++)
        begin = shown[i].start < begin ? shown[i].start : begin;
    for (int64_t i = 0; i < shown_count; i++) {
        shown[i].start -= begin;
        shown[i].end -= begin;
    }
    snprintf(title, sizeof title, "Step %lld, measured: %lld microbatch%s on %lld stage%s", (long long)step->number,
        (long long)step->microbatches, step->microbatches == 1 ? "" : "es", (long long)parallel->stages, plural);
    loom_timeline timeline = {.title = title,
        .unit = "ms",
        .stages = parallel->stages,
        .chunks = parallel->chunk_count,
        .events = shown,
        .event_count = shown_count};
    LOOM_TRY(write_file(directory, "timeline.svg", loom_timeline_write_svg, &timeline));
    double expected;
    LOOM_TRY(simulate(parallel, step->microbatches, shown, shown_count, &expected));
    loom_rank_log(rank, LOOM_LOG_INFO,
        "bubble of step %lld: %.1f %% of the time of %lld stage%s, %.1f %% by the schedule with the mean time of each "
        "stage's computations; %s/timeline.svg",
        (long long)step->number, 100 * loom_timeline_bubble(&timeline), (long long)parallel->stages, plural,
        100 * expected, directory);
    return LOOM_OK;
}

/* trace.json: a row for each rank. Collective over the world; rank 0 writes. */
static loom_status write_all(const loom_parallel *parallel, const char *directory) {
    const loom__trace *trace = &parallel->trace;
    loom_rank *rank = parallel->fabric->rank;
    loom_comm *world = loom_rank_world(rank);
    int64_t ranks = loom_rank_count(rank), rows = ranks < MOST_ROWS ? ranks : MOST_ROWS, count = 0, span_count = 0;
    int64_t dropped = trace->record.dropped + trace->spans.dropped;
    char(*names)[ROW_BYTES] = NULL;
    loom_schedule_event *events = NULL;
    loom_timeline_span *spans = NULL;
    LOOM_TRY(loom_all_reduce(world, &dropped, &dropped, 1, LOOM_I64, LOOM_SUM));
    LOOM_TRY(name_rows(parallel, rows, &names));
    bool shown = loom_rank_index(rank) < rows;
    loom_status status =
        gather(parallel, world, loom_rank_index(rank), 0, shown ? trace->record.count : 0, &events, &count);
    if (!status)
        status = gather_spans(parallel, shown ? trace->spans.count : 0, &spans, &span_count);
    if (!status && loom_rank_index(rank) == 0) {
        const char *row_names[MOST_ROWS];
        for (int64_t i = 0; i < rows; i++)
            row_names[i] = names[i];
        loom_timeline timeline = {.unit = "ms",
            .stages = rows,
            .chunks = parallel->chunk_count,
            .events = events,
            .event_count = count,
            .rows = ranks > parallel->stages ? row_names : NULL,
            .spans = spans,
            .span_count = span_count};
        status = write_file(directory, "trace.json", put_trace, &timeline);
        if (dropped > 0)
            loom_rank_log(rank, LOOM_LOG_WARNING, "the trace is full: the last %lld events of all ranks are not in it",
                (long long)dropped);
        if (ranks > rows)
            loom_rank_log(rank, LOOM_LOG_WARNING, "the trace shows the first %lld of %lld ranks", (long long)rows,
                (long long)ranks);
    }
    free(names);
    free(events);
    free(spans);
    return status;
}

loom_status loom_parallel_trace_end(loom_parallel *parallel, const char *directory) {
    const loom__trace *trace = &parallel->trace;
    loom_comm *world = loom_rank_world(parallel->fabric->rank);
    loom_schedule_event *shown = NULL;
    loom__trace_step step = {0};
    int64_t shown_count = 0;
    if (!trace->record.events)
        return loom_fail(LOOM_ERR_STATE, "trace_end: no trace has been begun");
    loom_status status = loom_agree(world, write_all(parallel, directory));
    if (!status)
        status = last_step(parallel, &step);
    if (!status)
        status = gather(parallel, parallel->fabric->groups[LOOM_GROUP_PP], parallel->stage, step.first, step.count,
            &shown, &shown_count);
    if (!status && loom_rank_index(parallel->fabric->rank) == 0)
        status = draw(parallel, directory, &step, shown, shown_count);
    status = loom_agree(world, status);
    free(shown);
    loom__trace_free(parallel);
    return status;
}
