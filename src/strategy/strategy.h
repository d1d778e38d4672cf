/* The objects of the strategy room. */
#ifndef STRATEGY_STRATEGY_H
#define STRATEGY_STRATEGY_H

#include "ddp/ddp.h"
#include "moe/statistics.h"
#include "pipeline/pipeline.h"
#include "runtime/spans.h"
#include "strategy/precision.h"
#include <megaloom/stages.h>
#include <megaloom/strategy.h>

/* What follows a save once it is whole; free() ends it. */
typedef struct loom__save_end {
    loom_status (*finish)(const struct loom__save_end *end, loom_fabric *fabric); /* collective over the world */
    char what[64];                                                                /* the save, in messages */
} loom__save_end;

struct loom_fabric {
    loom_rank *rank;
    loom_megatron_strategy_config config;
    const loom_precision_plugin *precision_plugin;
    loom__precision precision;  /* the plugin points to it where the configuration brings none */
    const char *pipeline_dtype; /* that messages between stages have */
    const loom_accelerator *accelerator;
    const loom_cluster_environment *environment;
    const loom_data_sampler *sampler;
    loom_callbacks *callbacks;
    uint64_t seed;
    bool launched;
    bool device_ready;           /* the accelerator has been set up */
    bool tuned;                  /* all ranks' accelerators were set up, and this rank's was tuned */
    loom__limit limit;           /* on the rank's waits, from the launch to the end */
    bool perform_initialization; /* false inside megatron_context */
    bool pytorch_ddp;            /* strategy.ddp is pytorch: the configuration's ddp_config is all off */
    bool no_ddp_communication_hook;
    int64_t modules; /* set up and not destroyed yet */
    loom_layout layout;
    loom_stage_split split; /* of the model created last; its layout is borrowed */
    loom_comm *groups[LOOM_GROUP_KIND_COUNT];
    struct loom_checkpoint_io *io; /* [io_count], each around the next; io_ready of them, from the end, are set up */
    int io_count, io_ready;
    loom__save_end *save_end; /* what follows the save that goes on; NULL: nothing */
};

/* The list of this stage for steps of one size. */
typedef struct loom__step_schedule {
    loom_schedule_config config; /* stages 0 = none has been made */
    loom_schedule_list list;
} loom__step_schedule;

/* A training step whose events are all in the record. */
typedef struct loom__trace_step {
    int64_t number, microbatches;
    int64_t first, count; /* events */
} loom__trace_step;

typedef struct loom__trace {
    loom__pipeline_record record; /* its memory is NULL while nothing is recorded */
    loom__spans spans;            /* what the rank did beside its computations */
    uint64_t zero;                /* of the clock */
    int64_t open;                 /* first event of the step now */
    loom__trace_step *steps;      /* in order; the same ones on all stages, but that one may hold more of them */
    int64_t step_count;
} loom__trace;

struct loom_parallel {
    loom_fabric *fabric;
    loom_module *module;
    bool is_gpt;                        /* made by loom_gpt_create */
    bool inference;                     /* set up without gradients */
    int64_t stage, stages, chunk_count; /* of the pipeline; chunks of this stage */
    loom_schedule_kind schedule;
    loom__pipeline *pipeline;
    loom__step_schedule training, evaluation;
    loom__trace trace;
    loom_forward_observer observer; /* NULL = none */
    void *observer_context;
    loom__ddp *ddp; /* NULL for inference */
    loom_loss_reduction reduction;
    loom_parameter *const *parameters;
    int64_t parameter_count;
    loom_parameter **partial; /* those whose gradient must be summed over the tensor ranks */
    int64_t partial_count, partial_elements;
    float *partial_buffer;
    loom_optimizer *optimizer;
    loom__router_collector *router_collector;        /* NULL: nobody asks for statistics of routers */
    const loom_router_statistics *router_statistics; /* the collector's, of the last training step; NULL before */
    int64_t steps[LOOM_PREDICT + 1];                 /* of each mode so far */
    double token_factor;                             /* expected / valid tokens of the last training step */
    double loss_scale;       /* by which the gradients of the last training step are too large */
    uint16_t *narrow_values; /* of all parameters, where they have 16 bits and no gradient buffer; or NULL */
};

typedef struct loom__source {
    loom_data_loader loader;
    int64_t start;                  /* consumed samples at its beginning */
    int64_t before;                 /* samples of the passes that a shorter source has behind it */
    int64_t length;                 /* microbatches of one pass; −1 = unknown */
    loom_data_loader_config config; /* as it was cut; micro_batch_size 0 for a source that was taken as it is */
} loom__source;

struct loom_batches {
    loom__source *sources;
    int64_t source_count;
    loom_batch **buffers; /* one a source */
    int64_t fetched, length;
    bool done;
    int64_t last_loader, last_batch;
    bool output_data_idx;
    bool stop_when_size_changes;
    int64_t last_microbatches;   /* of the last training step; 0 = there was none */
    loom_data_step_config sizes; /* of several loaders' steps in ramp-up, which the loaders do not know; else cleared */
};

/* The chain of the configuration's checkpoint_io, with the Megatron one inside. */
loom_status loom__fabric_open_io(loom_fabric *fabric);
void loom__fabric_close_io(loom_fabric *fabric);
/* Bytes that this rank will write of a module and its optimizer, about: its share of what several ranks have (shared),
 * or all of it on the first of them. Not collective. */
size_t loom__expected_save(const loom_parallel *parallel, const loom_optimizer *optimizer, bool shared);
/* Tells it to the Megatron I/O where that saves in the background. Not collective. */
void loom__fabric_expect_save(loom_fabric *fabric, const loom_parallel *parallel, const loom_optimizer *optimizer);

/* A copy of the filled rows, of the positions that this rank of the context group has, or of all (NULL);
 * loom_batch_destroy. */
loom_status loom__batch_cut(const loom_batch *batch, const loom_comm *context, loom_batch **part);
/* LOOM_OK where the module has gradients; else LOOM_ERR_STATE, in which `who` wants them. */
loom_status loom__parallel_check_gradients(const loom_parallel *parallel, const char *who);
/* Fills in the sizes of a step that nobody has given, as far as its loader knows them. */
void loom__infer_sizes(loom_step *step);
/* Finds the parallel's place in the pipeline and makes its executor. *chunks [chunk_count] are this stage's parts of
 * the model, for free(); NULL with one stage. Errors: LOOM_ERR_CONFIG; LOOM_ERR_UNSUPPORTED for a module that cannot be
 * cut, and for a schedule that has no chunks. Not collective. */
loom_status loom__parallel_cut(loom_parallel *parallel, loom_stage **chunks);
/* Whether schedules of training say when all stages start the reductions of a chunk. Not collective. */
bool loom__aligns_reductions(const loom_parallel *parallel);
/* All microbatches of a step through this rank's chunks, in the order of the schedule. seed is that of the loss
 * gradient; receive may be NULL. LOOM_END when the data end before the first. Collective over the stages and tensor
 * ranks. */
loom_status loom__run_microbatches(
    loom_parallel *parallel, loom_step *step, float seed, loom_logits_function receive, void *receive_context);
/* The statistics of routers, where somebody asks for them: before the microbatches of a training step, and behind them.
 * The second is collective over the world. */
void loom__routers_begin_step(loom_parallel *parallel);
loom_status loom__routers_end_step(loom_parallel *parallel);
/* Nobody asks for them any more: they are freed, but for what MPI may still use after a failure. Not collective. */
void loom__routers_forget(loom_parallel *parallel);
/* Around the microbatches of a step, for the trace, if there is one. */
void loom__trace_step_begins(loom_parallel *parallel);
void loom__trace_step_ends(loom_parallel *parallel, const loom_step *step);
void loom__trace_free(loom_parallel *parallel);
/* Everything after the last backward: buckets, partial sums over tensor ranks, replicas, the two ends of the pipeline.
 * Collective. */
loom_status loom__parallel_finish_gradients(loom_parallel *parallel, const loom_step *step);

#endif
