/* Callbacks: what runs at the eight events of a step.
 *
 * A connector (loom_callbacks) holds callbacks in the order in which they were added; connectors can be merged. A
 * strategy has one connector: its own, with the user's, the sampler's and the optimizers' merged in. Events of a step
 * come on every rank, in the same order; a callback may communicate if it does so on all ranks of a group. The two of a
 * microbatch come around each forward of a microbatch through a chunk of this rank, in the order of its schedule: other
 * stages are elsewhere then, and backwards come before, between and after. */
#ifndef MEGALOOM_CALLBACKS_H
#define MEGALOOM_CALLBACKS_H

#include <megaloom/data.h>
#include <megaloom/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(ENUM, name): the events, in the order of a step. */
#define LOOM_EVENT_LIST(X)                                                                                             \
    X(STEP_START, "on_megatron_step_start")                                                                            \
    X(MICROBATCHES_START, "on_megatron_microbatches_start")                                                            \
    X(MICROBATCH_START, "on_megatron_microbatch_start")                                                                \
    X(MICROBATCH_END, "on_megatron_microbatch_end")                                                                    \
    X(MICROBATCHES_END, "on_megatron_microbatches_end")                                                                \
    X(REDUCE_MICROBATCHES_START, "on_megatron_reduce_microbatches_start")                                              \
    X(REDUCE_MICROBATCHES_END, "on_megatron_reduce_microbatches_end")                                                  \
    X(STEP_END, "on_megatron_step_end")

typedef enum loom_event {
#define LOOM_EVENT_ENUM(name, text) LOOM_EVENT_##name,
    LOOM_EVENT_LIST(LOOM_EVENT_ENUM)
#undef LOOM_EVENT_ENUM
        LOOM_EVENT_COUNT
} loom_event;

/* "on_megatron_step_start", …; "?" for a number that is none. */
LOOM_API const char *loom_event_name(loom_event event);

typedef enum loom_step_mode { LOOM_TRAINING, LOOM_VALIDATION, LOOM_TEST, LOOM_PREDICT } loom_step_mode;

struct loom_batches;

/* A step, as its callbacks see it. At STEP_START every size may be 0 (still to be inferred) and a callback may change
 * any field or replace the whole step by assigning to *step; from MICROBATCHES_START on the sizes are final and only
 * `stop` may be changed. */
typedef struct loom_step {
    loom_step_mode mode;
    int64_t number; /* steps of this mode before this one */
    struct loom_batches *batches;
    int64_t micro_batch_size;
    int64_t seq_length;
    int64_t num_microbatches;
    bool stop;                /* set by a callback: the loop should end (ramp-up has just changed the batch size) */
    int64_t microbatch;       /* of the microbatch events */
    const loom_batch *batch;  /* of the microbatch events; else NULL */
    double loss_sum, tokens;  /* so far on this rank; over the whole group at REDUCE_MICROBATCHES_END */
    double loss;              /* from REDUCE_MICROBATCHES_END on */
    int64_t consumed_samples; /* at STEP_END: over all data-parallel ranks, this step included */
    int64_t global_batch_size;
} loom_step;

/* A callback: functions for the events it wants; the others stay NULL. An error ends the step. */
typedef struct loom_callback {
    void *context;
    loom_status (*event[LOOM_EVENT_COUNT])(void *context, loom_step *step);
} loom_callback;

typedef struct loom_callbacks loom_callbacks;

/* An empty connector; loom_callbacks_destroy. */
LOOM_API loom_status loom_callbacks_create(loom_callbacks **callbacks);
LOOM_API void loom_callbacks_destroy(loom_callbacks *callbacks); /* NULL is accepted; contexts are the callers' */
/* Copies the struct. Adding the same context and functions again changes nothing. */
LOOM_API loom_status loom_callbacks_add(loom_callbacks *callbacks, const loom_callback *callback);
/* Adds all of `other` behind those of `callbacks`. */
LOOM_API loom_status loom_callbacks_merge(loom_callbacks *callbacks, const loom_callbacks *other);
/* Takes out the callback with the same context and functions, if it is there. */
LOOM_API void loom_callbacks_remove(loom_callbacks *callbacks, const loom_callback *callback);
LOOM_API int64_t loom_callbacks_count(const loom_callbacks *callbacks);
/* Calls the event's functions in order; the first error ends it and is returned, with the event's name before its
 * message. */
LOOM_API loom_status loom_callbacks_call(const loom_callbacks *callbacks, loom_event event, loom_step *step);

#ifdef __cplusplus
}
#endif
#endif
