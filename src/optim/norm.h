/* The global norm of the gradients and the clip factor. */
#ifndef OPTIM_NORM_H
#define OPTIM_NORM_H

#include "ddp/ddp.h"

/* Sum over this rank of g^2 in double, place by place: of place p the first counted[p] elements. NaN or infinite when
 * any element, counted or not, is. */
double loom__norm_partial(loom_rank *rank, const loom__ddp_view *view, const int64_t *counted);

/* |factor| * sqrt(sum of the partial sums, in rank order), rounded to fp32. Collective over the group. */
loom_status loom__norm_global(loom_comm *group, double partial, double factor, double *norm);

/* min(1, clip/(norm + 1e-6)); 1 for clip 0. */
double loom__clip_factor(double clip, double norm);

/* LOOM_ERR_NUMERIC naming the first parameter, in model order, with a NaN or an infinity; LOOM_OK when there is none.
 */
loom_status loom__norm_blame(loom_rank *rank, const loom__ddp_view *view, int64_t step);

#endif
