/* What stages did, drawn: an SVG for people, a Chrome trace for Perfetto and its kin. Both take the events of a
 * simulation (schedule.h) as well as those of a measured run. */
#ifndef MEGALOOM_TIMELINE_H
#define MEGALOOM_TIMELINE_H

#include <megaloom/schedule.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a row does beside its computations. */
typedef enum loom_span_kind {
    LOOM_SPAN_GRADIENT_REDUCTION, /* of a bucket, from when it is handed to the communication until it is complete */
    LOOM_SPAN_PARAMETER_GATHER,   /* the same of the bucket's parameters, under a distributed optimizer */
    LOOM_SPAN_OPTIMIZER_STEP,
    LOOM_SPAN_KEY_EXCHANGE,      /* of context parallelism: keys and values come from the member before in the ring */
    LOOM_SPAN_GRADIENT_EXCHANGE, /* the same of their gradients */
    LOOM_SPAN_ATTENTION          /* of the rank's queries to the keys of one member, forward or backward; 0 bytes */
} loom_span_kind;

typedef struct loom_timeline_span {
    int64_t row; /* 0 to stages - 1 */
    loom_span_kind kind;
    int64_t bucket; /* of the row's gradient buffer; -1 where it is of none */
    int64_t bytes;  /* of the bucket, or of what comes from the member before */
    double start, end;
} loom_timeline_span;

typedef struct loom_timeline {
    const char *title;                 /* one line, UTF-8; NULL = none */
    const char *unit;                  /* what one of the events' time is, for the axis ("ms"); NULL = none */
    int64_t stages;                    /* rows */
    int64_t chunks;                    /* of a stage; 0 and 1: colours tell no chunks */
    const loom_schedule_event *events; /* in any order; borrowed */
    int64_t event_count;
    const char *const *rows;         /* [stages] names of the rows in a trace; NULL: "stage 0", "stage 1", … */
    const loom_timeline_span *spans; /* in any order, may overlap; borrowed. In a trace only */
    int64_t span_count;
} loom_timeline;

/* Share of the time from the first begin to the last end in which stages do not compute; 0 without computations. */
LOOM_API double loom_timeline_bubble(const loom_timeline *timeline);

/* A picture of the computations: a row for each stage, forwards, backwards and their halves in colours by chunk with
 * the microbatch's number inside, what is idle hatched and told in percent, a legend; readable on light and dark. Other
 * kinds of events are not drawn. LOOM_ERR_ARGUMENT: an event lies outside the stages and chunks, or ends before it
 * begins; LOOM_ERR_IO: the file. */
LOOM_API loom_status loom_timeline_write_svg(FILE *out, const loom_timeline *timeline);
/* All events and spans in the JSON that chrome://tracing and Perfetto read: a thread for each row, with the optimizer's
 * steps and the parts of ring attention, and beside it a process "<row>: communication" for all others, which overlap
 * each other. `seconds` is one unit of the events' time. Errors as above, also for a span that lies outside the rows,
 * or ends before it begins. */
LOOM_API loom_status loom_timeline_write_trace(FILE *out, const loom_timeline *timeline, double seconds);

#ifdef __cplusplus
}
#endif
#endif
