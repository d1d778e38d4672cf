/* What a run shows and writes down while it goes on: the progress line, metrics.jsonl, TensorBoard's event files, and
 * the machine's own GEMM rate as a yardstick. run.h reads it back. */
#ifndef MEGALOOM_REPORT_H
#define MEGALOOM_REPORT_H

#include <megaloom/rank.h>
#include <megaloom/router.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Best of two or three sgemm of 2048³ with this rank's team while the other ranks do the same, summed
 * over `comm`: floating point operations a second of all its ranks together. Collective; takes about a second. */
LOOM_API loom_status loom_measure_gemm_rate(loom_rank *rank, loom_comm *comm, double *flops_per_second);

/* One training step, as reported. Values that were not measured are NaN and left out. */
typedef struct loom_step_report {
    int64_t step; /* from 1 */
    double loss, grad_norm, learning_rate;
    double tokens_per_second;
    /* Of the machine's GEMM rate, 0 … 1; above 1 the rate was measured beside busy neighbours, and the progress line
     * leaves it out. */
    double gemm_share;
    double seconds;         /* this step took */
    double validation_loss; /* NaN where this step had no validation */
    int64_t consumed_samples;
    double loss_scale;        /* 1 without one */
    double num_zeros_in_grad; /* over the whole model */
    int64_t skipped_steps;    /* so far, because of overflows */
    int64_t memory_bytes;     /* most that the allocator of the reporting rank has handed out at once so far */
    /* Of a model with experts (borrowed; NULL: none): adds the numbers of its routers, of all layers together, and with
     * router_layers those of each layer. */
    const loom_router_statistics *router;
    bool router_layers;
} loom_step_report;

/* metrics.jsonl: one JSON object a line. */
typedef struct loom_metrics loom_metrics;
/* Creates the file; one that is there and not empty is renamed to path.old. LOOM_ERR_STATE: another run is writing it.
 */
LOOM_API loom_status loom_metrics_open(const char *path, loom_metrics **metrics);
/* The same for a run that goes on after step `last`: the new file begins with the lines of the steps up to it. */
LOOM_API loom_status loom_metrics_continue(const char *path, int64_t last, loom_metrics **metrics);
/* Writes the line and flushes it, so that it can be followed. NaN is left out, an infinity is written as null. The
 * numbers of routers are "expert_load" (choices of the busiest expert over the mean, in the layer where that is most)
 * and "expert_load_mean" (over the layers); where experts have a capacity "dropped_choices" and "dropped_share", 0 … 1
 * of all choices; and the losses by the names of loom_router_loss_name, means over the layers. With router_layers also
 * "moe/NAME_layer_N" of each layer N of the model that has experts, counted from 0: NAME is expert_load, dropped_share
 * or a loss. */
LOOM_API loom_status loom_metrics_write(loom_metrics *metrics, const loom_step_report *report);
/* The line of a test after step `step`: "step", "test_loss" (written as a loss above) and "test_tokens", those that the
 * loss is the mean of. */
LOOM_API loom_status loom_metrics_write_test(loom_metrics *metrics, int64_t step, double loss, double tokens);
LOOM_API void loom_metrics_close(loom_metrics *metrics); /* NULL is accepted */

/* An event file that TensorBoard reads: the numbers of each step as scalars, under the names of metrics.jsonl. */
typedef struct loom_events loom_events;
/* Makes the folder, not those above it, and a new file in it. Earlier files of the folder stay; TensorBoard drops what
 * they hold of first_step and later steps, as a run that goes on from a checkpoint does them again. */
LOOM_API loom_status loom_events_open(const char *folder, int64_t first_step, loom_events **events);
/* Appends one event and flushes it. NaN, which was not measured, is left out; an infinity is written. */
LOOM_API loom_status loom_events_write(loom_events *events, const loom_step_report *report);
LOOM_API void loom_events_close(loom_events *events); /* NULL is accepted */

/* The progress line: rewritten in place on a terminal, else one line every `every` steps. */
typedef struct loom_progress loom_progress;
LOOM_API loom_status loom_progress_create(
    FILE *out, bool terminal, int64_t steps, int64_t every, loom_progress **progress);
LOOM_API void loom_progress_step(loom_progress *progress, const loom_step_report *report);
/* A line of its own between the progress ("validation loss 2.31 at step 100"). */
LOOM_API void loom_progress_note(loom_progress *progress, const char *format, ...) LOOM_PRINTF(2, 3);
/* Ends the line and frees; NULL is accepted. */
LOOM_API void loom_progress_destroy(loom_progress *progress);

#ifdef __cplusplus
}
#endif
#endif
