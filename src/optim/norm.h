/* The global norm of the gradients and the clip factor. */
#ifndef OPTIM_NORM_H
#define OPTIM_NORM_H

#include "ddp/ddp.h"
#include <megaloom/kernels.h>

typedef enum loom__norm_type { LOOM__NORM_1, LOOM__NORM_2, LOOM__NORM_INF } loom__norm_type;

/* One rank's part: sums and a maximum of integers, so that any cut of the buffer gives the same whole. */
typedef struct loom__norm {
    loom__norm_type type;
    loom_exact_sum sum; /* of the elements that count; nonfinite of all */
    int64_t largest;    /* the bits of the largest absolute value that counts */
} loom__norm;

/* Of place p the first counted[p] elements count, as far as they lie in this rank's part of it: of the dense
 * parameters, or of the expert ones. */
loom__norm loom__norm_partial(
    loom_rank *rank, const loom__ddp_view *view, const int64_t *counted, loom__norm_type type, bool experts);
/* Both together. */
void loom__norm_add(loom__norm *norm, const loom__norm *other);

/* The parts of all members together. Collective over the group. */
loom_status loom__norm_gather(loom_comm *group, loom__norm *norm);

/* |factor| times the norm, rounded to fp32; NaN where an element was NaN or infinite. */
double loom__norm_value(const loom__norm *norm, double factor);

/* min(1, clip/(norm + 1e-6)); 1 for clip 0. */
double loom__clip_factor(double clip, double norm);

/* LOOM_ERR_NUMERIC naming the first parameter, in model order, with a NaN or an infinity, behind `why`; LOOM_OK when
 * there is none. */
loom_status loom__norm_blame(loom_rank *rank, const loom__ddp_view *view, const char *why);

#endif
