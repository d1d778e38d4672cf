/* Pipeline schedules as data: what each stage does, in order, as a list of instructions. A pure generator makes the
 * lists, a simulator proves them, the strategy interprets them. "No pipeline" is the schedule of one stage.
 *
 * A stage holds `chunks` chunks of the model (one without interleaving). Activations go from a chunk to the same chunk
 * of the next stage, and from the last stage to the next chunk of the first. Orders equal Megatron-Core's
 * (golden/pipeline/order.json); the zero-bubble schedule is ZB-H1 of Qi et al. 2023. */
#ifndef MEGALOOM_SCHEDULE_H
#define MEGALOOM_SCHEDULE_H

#include <megaloom/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum loom_schedule_kind {
    LOOM_SCHEDULE_1F1B, /* interleaved where there are chunks */
    /* 1F1B with the backward in two halves, without chunks: as many activations at worst as 1F1B on the stage that has
     * most, weight halves in the order of microbatches. With at least as many microbatches as stages, and a weight half
     * no longer than a forward, (stages - 1) times (forward + input half - weight half) are lost instead of
     * (stages - 1) times (forward + backward). */
    LOOM_SCHEDULE_ZERO_BUBBLE
} loom_schedule_kind;

typedef struct loom_schedule_config {
    int64_t stages;       /* pipeline_model_parallel_size */
    int64_t chunks;       /* virtual_pipeline_model_parallel_size; 0 and 1 = none */
    int64_t microbatches; /* of a step */
    int64_t group;        /* microbatch_group_size_per_vp_stage, of use with chunks alone; 0 = stages */
    loom_schedule_kind kind;
    bool forward_only; /* evaluation */
    /* The reductions of all stages start at the same time, by GRAD_SYNC, and the gathers by PARAM_SYNC, as the
     * reference does with align_grad_reduce and align_param_gather. Otherwise each chunk's reduction may start with its
     * last backward (SYNC_ON), and neither instruction occurs. */
    bool align_sync;
} loom_schedule_config;

/* Whether the model begins, or ends, in this chunk of this stage: there nothing is received, or sent, that way. */
static inline bool loom_schedule_model_begins(int64_t stage, int64_t chunk) {
    return stage == 0 && chunk == 0;
}
static inline bool loom_schedule_model_ends(int64_t stages, int64_t chunks, int64_t stage, int64_t chunk) {
    return stage == stages - 1 && chunk == (chunks > 0 ? chunks : 1) - 1;
}

/* What an instruction is about is (microbatch, chunk) of the stage whose list it is in: a send's are those of the
 * computation that made what is sent, a receive's those of the one that will use it. Sends and receives start, and do
 * not block: a computation waits for what it reads, and a buffer that is sent is freed when the send is done. */
typedef enum loom_instruction_kind {
    LOOM_INSTRUCTION_FORWARD,
    LOOM_INSTRUCTION_BACKWARD,         /* both halves */
    LOOM_INSTRUCTION_BACKWARD_INPUT,   /* gradients of activations */
    LOOM_INSTRUCTION_BACKWARD_WEIGHT,  /* gradients of parameters, of an earlier BACKWARD_INPUT */
    LOOM_INSTRUCTION_SEND_NEXT,        /* the output, to the next stage */
    LOOM_INSTRUCTION_SEND_PREVIOUS,    /* the gradient of the input, to the previous stage */
    LOOM_INSTRUCTION_RECEIVE_PREVIOUS, /* the input, from the previous stage */
    LOOM_INSTRUCTION_RECEIVE_NEXT,     /* the gradient of the output, from the next stage */
    LOOM_INSTRUCTION_SYNC_OFF,         /* from here on gradients are only accumulated */
    LOOM_INSTRUCTION_SYNC_ON,    /* the backwards (weight halves) that follow are the last ones: reductions may start */
    LOOM_INSTRUCTION_GRAD_SYNC,  /* the gradients of the chunk are complete on this rank: start their reduction */
    LOOM_INSTRUCTION_PARAM_SYNC, /* start to gather the parameters of the chunk */
    LOOM_INSTRUCTION_KINDS
} loom_instruction_kind;

typedef struct loom_instruction {
    loom_instruction_kind kind;
    int32_t chunk;      /* 0 … chunks-1 */
    int64_t microbatch; /* -1 where it is about none: SYNC_OFF and all below it */
    int64_t exchange; /* sends and receives with the same number start together (one call of the reference); else -1 */
} loom_instruction;

typedef struct loom_schedule_list {
    int64_t count;
    loom_instruction *instructions;
} loom_schedule_list;

/* Whether the sizes make a schedule; all faults at once, each with the field, what was found and the nearest legal
 * values. What the reference refuses is refused: a group outside [stages, microbatches], a last group of fewer
 * microbatches than stages, chunks with one stage. */
LOOM_API loom_status loom_schedule_config_check(const loom_schedule_config *config);
/* The list of one stage; linear in its length. loom_schedule_list_free. */
LOOM_API loom_status loom_schedule_make(const loom_schedule_config *config, int64_t stage, loom_schedule_list *list);
LOOM_API void loom_schedule_list_free(loom_schedule_list *list);

/* "forward", "backward (weights)", "send to next", …; short, for notes and traces; "unknown instruction" for a number
 * that is none. */
LOOM_API const char *loom_instruction_name(loom_instruction_kind kind);
/* Whether it is a forward, a backward or a half of one: what takes a stage's time. */
LOOM_API bool loom_instruction_computes(loom_instruction_kind kind);

/* A virtual microbatch is one microbatch in one chunk of a stage. Stages go through chunk 0 with `group` microbatches,
 * then through chunk 1 with the same, …; after the last chunk come the next `group`. This is number `index` (from 0) of
 * the forwards, or of the backwards, whose chunks are in reverse. Sizes need not make a schedule; they are positive. */
LOOM_API void loom_schedule_virtual_microbatch(
    const loom_schedule_config *config, int64_t index, bool backward, int64_t *microbatch, int32_t *chunk);

typedef struct loom_schedule_counts {
    int64_t total;      /* virtual microbatches of the stage */
    int64_t warmup;     /* forwards before the first backward, less the one that it follows in the steady state */
    int64_t remaining;  /* of the steady state: one forward, one backward */
    bool all_in_warmup; /* there is no steady state */
} loom_schedule_counts;
/* How a stage divides its work, in the numbers of the reference's get_pp_rank_microbatches (one stage counts a warm-up
 * of one). Sizes need not make a schedule; they are positive. */
LOOM_API void loom_schedule_count(const loom_schedule_config *config, int64_t stage, loom_schedule_counts *counts);

/* The list in the notation of the golden files: F3.1 forward of microbatch 3 in chunk 1 (F3 without chunks), B backward
 * or its input half, W weight half; with `messages` s> s< r< r> joined as they are exchanged, with `syncs` -sync +sync
 * G0 P0. The caller frees the text. */
LOOM_API loom_status loom_schedule_notation(
    const loom_schedule_config *config, const loom_schedule_list *list, bool messages, bool syncs, char **text);

/* A copy of a list whose receives stand earlier, so that messages travel while the stage computes: each at least
 * `depth` computations before the one that reads it (at the begin where there are not so many), never later than it
 * stood. So at most depth + 1 of those that were moved are posted at a time. A receive that moved is an exchange of its
 * own (exchange -1): such a list is for stages that do not block. loom_schedule_list_free. */
LOOM_API loom_status loom_schedule_post_receives_early(
    const loom_schedule_config *config, const loom_schedule_list *list, int64_t depth, loom_schedule_list *early);

/* What instructions take, in one unit of time, whichever. Arrays are [stages, chunks], row by row, borrowed; NULL
 * stands for 1 everywhere. A whole backward takes both halves. */
typedef struct loom_schedule_costs {
    const double *forward, *backward_input, *backward_weight;
    double message; /* from the moment when both its send and its receive have started */
} loom_schedule_costs;

/* Something that a stage did, or would do. */
typedef struct loom_schedule_event {
    int64_t stage;
    loom_instruction_kind kind;
    int32_t chunk;
    int64_t microbatch;
    double start, end;
} loom_schedule_event;

typedef struct loom_schedule_stage_result {
    double busy;         /* time in computations */
    int64_t activations; /* at worst: forwards begun whose backward, or weight half, has not ended; forward-only 1 */
    int64_t receives;    /* at worst: receives started that no computation has read yet */
} loom_schedule_stage_result;

typedef struct loom_schedule_result {
    double makespan; /* when the last computation ends */
    double bubble;   /* share of stages * makespan in which a stage does not compute */
    int64_t stages;
    loom_schedule_stage_result *stage;
    int64_t event_count;
    loom_schedule_event *events; /* the computations, each stage's in its order, stage after stage */
} loom_schedule_result;

/* Plays the lists of all stages ([stages], borrowed) against each other, with sends that end when the receive has
 * started, and proves them first: every (microbatch, chunk) goes forward and backward exactly once, its input and
 * gradient are received before they are read and sent after they are made, messages match by (direction, chunk,
 * microbatch), gradients of a chunk are accumulated in the order of microbatches (so that sums do not depend on the
 * schedule) and their reduction starts exactly once, when they are complete. With `blocking` each exchange is waited
 * for before the next instruction, as the reference's calls are. costs NULL: 1 each, messages take no time.
 * LOOM_ERR_ARGUMENT names stage, instruction (from 0) and what is wrong; a deadlock is told as the cycle of those that
 * wait for each other. Time and memory are linear in the number of instructions. loom_schedule_result_free. */
LOOM_API loom_status loom_schedule_simulate(const loom_schedule_config *config, const loom_schedule_list *lists,
    const loom_schedule_costs *costs, bool blocking, loom_schedule_result *result);
LOOM_API void loom_schedule_result_free(loom_schedule_result *result);

#ifdef __cplusplus
}
#endif
#endif
