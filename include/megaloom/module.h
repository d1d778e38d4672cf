/* Modules: what the strategy trains. A module is a struct of functions over the caller's own data; GPT is the one that
 * comes with the library (loom_gpt_create), a user may bring another. */
#ifndef MEGALOOM_MODULE_H
#define MEGALOOM_MODULE_H

#include <megaloom/data.h>
#include <megaloom/model.h>
#include <megaloom/stages.h>
#include <megaloom/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Where and how a module is to come into being. */
typedef struct loom_module_environment {
    loom_rank *rank;
    loom_comm *tensor_group; /* the tensor-parallel group; of one member without tensor parallelism */
    /* Of experts: who has which of them, and who shares one; each of one member where nothing is cut. A parameter that
     * is expert_parallel is the same on the members of the expert-data-parallel group. */
    loom_comm *expert_group, *expert_tensor_group;
    loom_comm *experts_group; /* both together: between them they have one copy of all experts */
    loom_comm
        *balance_group;    /* the ranks that have the positions of the same samples: a balance loss is of all of them */
    loom_comm *step_group; /* the ranks that have the same chunks and between them all positions of a step; NULL: this
                              one alone */
    bool sequence_parallel;
    uint64_t seed;               /* of initial weights and dropout */
    bool perform_initialization; /* false: parameters stay zero until somebody loads them */
    /* This rank's part of the pipeline: its chunks of the model in order of depth, one without interleaving. With one
     * stage it is the whole model (stages is 1, and the chunk has embedding and loss). */
    int64_t stage, stages;
    int64_t chunk_count;
    const loom_stage *chunks;  /* [chunk_count], borrowed for the call; NULL with one stage */
    loom_comm *pipeline_group; /* the stages, in order; of one member with one stage */
    loom_comm *context_group;  /* the ranks that share a sequence (context parallelism), each with its rows of a batch;
                                  NULL, or of one member: none */
} loom_module_environment;

/* One forward of one microbatch through one chunk. */
typedef struct loom_forward {
    const loom_batch *batch; /* this rank's rows of it under context parallelism; borrowed until the tape has been
                                walked or destroyed; the same on every stage */
    int64_t chunk;           /* of loom_module_environment.chunks; 0 without interleaving */
    loom_tensor *input;      /* activations of the chunk before, a leaf of the tape; NULL where the model begins */
    bool training;           /* dropout is on */
    /* The weight of a loss of the module's own (which is a mean over the positions of a microbatch): its gradient is
     * multiplied by this. 0 without a backward. */
    double own_loss_scale;
    /* Where the routers of a module of loom_gpt_create add what they decide (loom_parallel_collect_router_statistics);
     * NULL: nowhere. */
    struct loom__router_collector *router_collector;
    loom_tensor *
        *logits; /* not NULL: the last stage also hands out its logits [s, b, v/tp]; the caller releases them */
} loom_forward;

typedef struct loom_module {
    void *context;
    /* Makes this rank's parameters (shapes were known before). Collective over the tensor group. May be called once. */
    loom_status (*materialize)(void *context, const loom_module_environment *environment);
    /* The parameters of this rank in model order (loom_parameter.chunk says whose), borrowed; after materialize. Over
     * the tensor group, of expert parameters the expert tensor group, each must be owned by somebody
     * (loom_parameter.owned), or it would not count in the norm: then setup_module refuses it. */
    loom_status (*parameters)(void *context, loom_parameter *const **parameters, int64_t *count);
    /* The chunk with the loss gives token losses [s, b] (not masked, not averaged), others activations. */
    loom_status (*forward)(void *context, loom_tape *tape, const loom_forward *forward, loom_tensor **output);
    /* The shape of the activations that go from a chunk to the next one for a batch of b rows of s positions; they are
     * kept in the dtype of the parameters.
     * NULL: the module cannot be cut into stages, and more than one is refused. After materialize. */
    loom_status (*activation_shape)(void *context, int64_t b, int64_t s, int *dims, int64_t shape[LOOM_MAX_DIMS]);
    /* After the last backward of a training step, also of one whose update will be skipped: sums that go beyond
     * data-parallel reduction and partial parameters (sequence_partial, tensor_partial), e.g. of replicated query
     * groups, and what a module counts in a step; may be NULL. Under the distributed optimizer a gradient has been
     * reduced only where this rank updates, at the same elements on all tensor ranks: sums of whole gradients over
     * tensor ranks are right there. Collective over the tensor group, or step_group. */
    loom_status (*finalize_gradients)(void *context);
    /* The model's configuration, for pushing parallel fields into it; NULL where there is none. */
    loom_model_config *(*config)(void *context);
    void (*destroy)(void *context);
} loom_module;

#ifdef __cplusplus
}
#endif
#endif
