/* This rank's parameters, made from a model's spec. */
#ifndef NN_PARAMETERS_H
#define NN_PARAMETERS_H

#include "spec/parameter.h"
#include <megaloom/tensor.h>

typedef struct loom__parameter_set {
    const loom__model_spec *spec; /* borrowed */
    int64_t count;
    loom_parameter *parameters; /* one a descriptor, in spec order */
    loom_parameter **list;      /* pointers to them */
    int tp, tp_rank;
} loom__parameter_set;

/* Shapes, flags and zeroed data of rank tp_rank of tp; no grad. */
loom_status loom__parameter_set_create(
    const loom__model_spec *spec, int tp, int tp_rank, bool sequence_parallel, loom__parameter_set **set);
void loom__parameter_set_destroy(loom__parameter_set *set);
/* Fills every parameter (F32: narrowing comes later) with its initial values: a function of (seed, name, canonical
 * element) alone. */
loom_status loom__parameter_set_initialize(loom__parameter_set *set, uint64_t seed);
/* The parameter of that name, or NULL. */
loom_parameter *loom__parameter_set_find(const loom__parameter_set *set, const char *name);

/* Which array of a parameter: its values or its gradient. */
typedef enum loom__parameter_array { LOOM__PARAMETER_DATA, LOOM__PARAMETER_GRAD } loom__parameter_array;

/* The canonical (whole, unpadded) tensor of a parameter, in fp32 whatever it is kept in, the same on every rank of the
 * tensor group. canonical has shape[0]*shape[1] elements. Collective over tp; tp may be NULL for one rank. */
loom_status loom__parameter_gather(
    const loom__parameter_set *set, int64_t index, loom__parameter_array array, loom_comm *tp, float *canonical);
/* Calls body(context, index, canonical) for every parameter in order, with its canonical tensor times factor, on every
 * rank. Collective over tp. */
typedef loom_status (*loom__parameter_body)(void *context, int64_t index, const float *canonical);
loom_status loom__parameter_set_visit(const loom__parameter_set *set, loom__parameter_array array, loom_comm *tp,
    float factor, loom__parameter_body body, void *context);
/* Takes this rank's shard out of a canonical tensor, rounded to the parameter's dtype; padding rows become zero. */
loom_status loom__parameter_scatter(loom__parameter_set *set, int64_t index, const float *canonical);

#endif
