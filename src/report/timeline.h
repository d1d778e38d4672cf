/* What the writers of a timeline share. */
#ifndef REPORT_TIMELINE_H
#define REPORT_TIMELINE_H

#include <megaloom/timeline.h>

/* The events' range in time, and the mean length of the computations. */
typedef struct loom__timeline_extent {
    double begin, end, mean;
    int64_t computations;
} loom__timeline_extent;

/* LOOM_ERR_ARGUMENT names the first event that cannot be drawn. */
loom_status loom__timeline_check(const loom_timeline *timeline, loom__timeline_extent *extent);

#endif
