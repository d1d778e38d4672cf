/* Modules: what the strategy trains. A module is a struct of functions over the caller's own data; GPT is the one that
 * comes with the library (loom_gpt_create), a user may bring another. */
#ifndef MEGALOOM_MODULE_H
#define MEGALOOM_MODULE_H

#include <megaloom/data.h>
#include <megaloom/model.h>
#include <megaloom/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Where and how a module is to come into being. */
typedef struct loom_module_environment {
    loom_rank *rank;
    loom_comm *tensor_group; /* the tensor-parallel group; of one member without tensor parallelism */
    bool sequence_parallel;
    uint64_t seed;               /* of initial weights and dropout */
    bool perform_initialization; /* false: parameters stay zero until somebody loads them */
} loom_module_environment;

/* One forward of one microbatch. */
typedef struct loom_forward {
    const loom_batch *batch; /* borrowed until the tape has been walked or destroyed */
    loom_tensor *input;      /* activations of the stage before; NULL on the first stage */
    bool training;           /* dropout is on */
    loom_tensor *
        *logits; /* not NULL: the last stage also hands out its logits [s, b, v/tp]; the caller releases them */
} loom_forward;

typedef struct loom_module {
    void *context;
    /* Makes this rank's parameters (shapes were known before). Collective over the tensor group. May be called once. */
    loom_status (*materialize)(void *context, const loom_module_environment *environment);
    /* The parameters of this rank in model order, borrowed; after materialize. Over the tensor group each must be owned
     * by somebody (loom_parameter.owned), or it would not count in the norm: then setup_module refuses it. */
    loom_status (*parameters)(void *context, loom_parameter *const **parameters, int64_t *count);
    /* The last stage gives token losses [s, b] (not masked, not averaged), others activations. */
    loom_status (*forward)(void *context, loom_tape *tape, const loom_forward *forward, loom_tensor **output);
    /* Sums that go beyond data-parallel reduction and partial parameters (sequence_partial, tensor_partial), e.g. of
     * replicated query groups; may be NULL. Collective over the tensor group. */
    loom_status (*finalize_gradients)(void *context);
    /* The model's configuration, for pushing parallel fields into it; NULL where there is none. */
    loom_model_config *(*config)(void *context);
    void (*destroy)(void *context);
} loom_module;

#ifdef __cplusplus
}
#endif
#endif
