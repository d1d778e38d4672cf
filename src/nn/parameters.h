/* This rank's parameters: a part of a model, made from its spec. */
#ifndef NN_PARAMETERS_H
#define NN_PARAMETERS_H

#include "spec/part.h"
#include <megaloom/tensor.h>

/* A rank among those that cut the tensors of a model. */
typedef struct loom__tensor_place {
    int tp, tp_rank;
    int etp, etp_rank; /* the same for tensors of experts; 0 = as tp */
    bool sequence_parallel;
} loom__tensor_place;

typedef struct loom__parameter_set {
    const loom__model_spec *spec; /* borrowed, as is the part */
    const loom__part *part;
    int64_t count;              /* the part's */
    int64_t module_buffers;     /* the part's, behind the parameters: F32, never with a gradient */
    loom_parameter *parameters; /* one an entry of the part, in its order */
    loom_parameter **list;      /* pointers to them */
    loom__tensor_place at;
    loom_comm *experts; /* the ranks that have one copy of all experts between them, over expert-tensor and expert
                           ranks; NULL: this rank has them all. Borrowed; set by whoever knows it */
} loom__parameter_set;

/* Shapes, flags and zeroed data of the rank at that place; no grad. */
loom_status loom__parameter_set_create(
    const loom__model_spec *spec, const loom__part *part, const loom__tensor_place *at, loom__parameter_set **set);
void loom__parameter_set_destroy(loom__parameter_set *set);
/* Fills every parameter (F32: narrowing comes later) with its initial values: a function of (seed, canonical name,
 * canonical element) alone. */
loom_status loom__parameter_set_initialize(loom__parameter_set *set, uint64_t seed);
/* The parameter, or module buffer, of that name, or NULL. */
loom_parameter *loom__parameter_set_find(const loom__parameter_set *set, const char *name);

/* Which array of a parameter: its values or its gradient. */
typedef enum loom__parameter_array { LOOM__PARAMETER_DATA, LOOM__PARAMETER_GRAD } loom__parameter_array;

/* The canonical (whole, unpadded) tensor of parameter `index` of the set, not a copy, in fp32 whatever it is kept in,
 * the same on every rank of the tensor group (of an expert: of set->experts, whether it is here or not). canonical has
 * shape[0]*shape[1] elements. Collective over tp; tp may be NULL for one rank. */
loom_status loom__parameter_gather(
    const loom__parameter_set *set, int64_t index, loom__parameter_array array, loom_comm *tp, float *canonical);
/* Calls body(context, number, canonical) for every parameter of the spec in order, with its canonical tensor times
 * factor, on every rank: the stage that holds it gathers it and gives it to the others. One parameter is held at a
 * time. Collective over tp and over pp; either may be NULL for one rank. */
typedef loom_status (*loom__parameter_body)(void *context, int64_t number, const float *canonical);
loom_status loom__parameter_set_visit(const loom__parameter_set *set, loom__parameter_array array, loom_comm *tp,
    loom_comm *pp, float factor, loom__parameter_body body, void *context);
/* Takes this rank's shard out of a canonical tensor, rounded to the parameter's dtype; padding rows become zero. */
loom_status loom__parameter_scatter(loom__parameter_set *set, int64_t index, const float *canonical);

#endif
