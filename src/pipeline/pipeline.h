/* The executor of pipeline schedules: it interprets instruction lists (<megaloom/schedule.h>) and nothing else. What a
 * forward computes, and what must happen when gradients may be reduced, it is told by a struct of functions.
 *
 * One tape lives for each (microbatch, chunk) between its forward and the end of its backward. Activations and their
 * gradients travel over the group of the stages. */
#ifndef PIPELINE_PIPELINE_H
#define PIPELINE_PIPELINE_H

#include <megaloom/schedule.h>
#include <megaloom/tensor.h>

typedef struct loom__pipeline loom__pipeline;

/* What a rank did, and for how long; nanoseconds of loom__clock. */
typedef struct loom__pipeline_event {
    loom_instruction_kind kind; /* of the computation, or of the receive that was waited for */
    int32_t chunk;
    int64_t microbatch;
    uint64_t start, end;
} loom__pipeline_event;

/* A bounded record; the memory is its owner's. What finds no place is counted. */
typedef struct loom__pipeline_record {
    loom__pipeline_event *events; /* [capacity] */
    int64_t count, capacity, dropped;
} loom__pipeline_record;

/* What instructions stand for. All are called by the rank's own thread; an error ends the run of the list. */
typedef struct loom__pipeline_work {
    void *context;
    /* One forward. input is a leaf of the tape; NULL where the model begins. *output: activations (in the dtype of the
     * options) for the chunk after, or, where the model ends, what its backward starts from, whose gradient is
     * *d_output (of the same shape; asked for in training only). The executor takes both references. */
    loom_status (*forward)(void *context, int64_t microbatch, int64_t chunk, loom_tape *tape, loom_tensor *input,
        loom_tensor **output, loom_tensor **d_output);
    /* The last computation of the microbatch on this stage is over: its batch is not needed any more. */
    void (*finished)(void *context, int64_t microbatch);
    void (*sync)(void *context, bool on); /* SYNC_ON, SYNC_OFF */
    /* GRAD_SYNC and PARAM_SYNC, which schedules with align_sync have; NULL: nothing starts by them. */
    void (*grad_sync)(void *context, int64_t chunk);
    void (*param_sync)(void *context, int64_t chunk);
    /* loom_tape_options of the same names. */
    void (*parameter_ready)(void *context, loom_parameter *parameter);
    void *ready_context;
} loom__pipeline_work;

/* One run of a list. */
typedef struct loom__pipeline_run {
    const loom_schedule_list *list; /* of this stage; borrowed. Receives may stand early */
    int64_t microbatches;
    int64_t group;       /* microbatch_group_size_per_vp_stage; the number of stages without chunks */
    bool training;       /* false: a forward-only list, tapes record nothing */
    bool split_backward; /* the list has the two halves of backwards apart */
    int dims;            /* of the activations of every microbatch; unused with variable shapes */
    int64_t shape[LOOM_MAX_DIMS];
} loom__pipeline_run;

typedef struct loom__pipeline_options {
    int64_t chunks;         /* of the model, on this stage; at least 1 */
    loom_dtype activations; /* F32, BF16 or F16: what chunks take and give, and their gradients */
    loom_dtype wire;        /* F32, BF16 or F16: what travels */
    bool variable_shapes;   /* every message is preceded by its shape; else all of a run have one */
} loom__pipeline_options;

/* What a run has shown. */
typedef struct loom__pipeline_counts {
    int64_t live;  /* most tapes that were alive at once: activations of as many (microbatch, chunk) */
    int64_t sends; /* most sends under way at once */
} loom__pipeline_counts;

/* `group` holds the stages in order, this rank's own place is its stage; it and the rank are borrowed. Errors:
 * LOOM_ERR_CONFIG for more chunks than there are tags for. Not collective. */
loom_status loom__pipeline_create(
    loom_rank *rank, loom_comm *group, const loom__pipeline_options *options, loom__pipeline **pipeline);
void loom__pipeline_destroy(loom__pipeline *pipeline); /* NULL is accepted */

/* Carries out the list. Returns when every computation is over and every message has arrived. Collective over the
 * group. An error of this rank ends the whole run when messages were under way. Errors: LOOM_ERR_STATE when the list
 * asks for what cannot be (a backward before its forward, say); those of the work and of the communication. */
loom_status loom__pipeline_execute(
    loom__pipeline *pipeline, const loom__pipeline_run *run, const loom__pipeline_work *work);
loom__pipeline_counts loom__pipeline_counts_of(const loom__pipeline *pipeline);

/* Says again, for messages about ranks that do not come, which instruction is carried out (loom_rank_note): for work
 * that has said something else meanwhile. */
void loom__pipeline_note(const loom__pipeline *pipeline);

/* From now on computations and waits are recorded there; NULL ends it. Borrowed. */
void loom__pipeline_set_record(loom__pipeline *pipeline, loom__pipeline_record *record);

#endif
