/* The norm counts each element of the model once: a shard by its holder, what several ranks hold alike by one of them.
 * Sums of squares are in double, so that no gradient that fits fp32 overflows or underflows; the order is that of the
 * buffer, then of the ranks. Invariant: a NaN anywhere, on a rank that counts it or not, makes every rank's norm NaN.
 */
#include "optim/norm.h"
#include <math.h>

double loom__norm_partial(loom_rank *rank, const loom__ddp_view *view, const int64_t *counted) {
    const loom_kernels *kernels = loom_rank_kernels(rank);
    loom_team *team = loom_rank_team(rank);
    double sum = 0.0;
    bool bad = false;
    for (int64_t place = 0; place < view->place_count; place++) {
        const loom__ddp_place *at = &view->places[place];
        const float *grad = view->grad + at->start;
        if (counted[place] > 0)
            sum += kernels->sum_of_squares(team, counted[place], grad);
        if (counted[place] < at->count)
            bad = bad || kernels->has_nonfinite(team, at->count - counted[place], grad + counted[place]);
    }
    return bad ? (double)NAN : sum;
}

loom_status loom__norm_global(loom_comm *group, double partial, double factor, double *norm) {
    double sum = partial;
    if (loom_comm_size(group) > 1)
        LOOM_TRY(loom_all_reduce(group, &partial, &sum, 1, LOOM_F64, LOOM_SUM));
    *norm = (double)(float)(fabs(factor) * sqrt(sum));
    return LOOM_OK;
}

double loom__clip_factor(double clip, double norm) {
    double factor = clip / (norm + 1e-6);
    return clip > 0.0 && factor < 1.0 ? factor : 1.0;
}

loom_status loom__norm_blame(loom_rank *rank, const loom__ddp_view *view, int64_t step) {
    const loom_kernels *kernels = loom_rank_kernels(rank);
    for (int64_t place = view->place_count - 1; place >= 0; place--)
        if (kernels->has_nonfinite(
                loom_rank_team(rank), view->places[place].count, view->grad + view->places[place].start))
            return loom_fail(LOOM_ERR_NUMERIC, "step %lld: the gradient of %s has a NaN or an infinity (rank %d)",
                (long long)step, view->parameters[place]->name, loom_rank_index(rank));
    return LOOM_OK;
}
