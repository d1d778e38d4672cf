/* The norm counts each element of the model once: a shard by its holder, what several ranks hold alike by one of them.
 * The sum is exact, so its bits depend neither on the order of the buffer nor on which rank holds which range of it: a
 * sharded optimizer has the norm of one that is not. Invariant: a NaN or an infinity anywhere, on a rank that counts it
 * or not, is known to every rank of the group.
 */
#include "optim/norm.h"
#include <math.h>
#include <string.h>

static int64_t largest_bits(int64_t count, const float *x) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Of the part that this rank updates, the leading elements that count. */
static int64_t counted_of(const loom__ddp_place *place, const loom__ddp_part *part, int64_t counted) {
    int64_t left = counted - (part->start - place->start);
    return left < 0 ? 0 : left < part->count ? left : part->count;
}

loom__norm loom__norm_partial(
    loom_rank *rank, const loom__ddp_view *view, const int64_t *counted, loom__norm_type type, bool experts) {
    const loom_kernels *kernels = loom_rank_kernels(rank);
    loom_team *team = loom_rank_team(rank);
    loom__norm made = {.type = type};
    for (int64_t place = 0; place < view->place_count; place++) {
        if (view->buckets[view->places[place].bucket].expert != experts)
            continue;
        const loom__ddp_part *part = &view->parts[place];
        const float *grad = view->grad + part->start;
        int64_t count = counted_of(&view->places[place], part, counted[place]);
        kernels->exact_sum(team, type == LOOM__NORM_2 ? 2 : 1, count, grad, &made.sum);
        if (count < part->count)
            made.sum.nonfinite += kernels->has_nonfinite(team, part->count - count, grad + count);
        if (type == LOOM__NORM_INF) {
            int64_t largest = largest_bits(count, grad);
            made.largest = largest > made.largest ? largest : made.largest;
        }
    }
    return made;
}

loom_status loom__norm_gather(loom_comm *group, loom__norm *norm) {
    loom__norm all = {.type = norm->type};
    int64_t numbers = sizeof norm->sum / sizeof(int64_t);
    if (loom_comm_size(group) == 1)
        return LOOM_OK;
    LOOM_TRY(loom_all_reduce(group, &norm->sum, &all.sum, numbers, LOOM_I64, LOOM_SUM));
    if (norm->type == LOOM__NORM_INF)
        LOOM_TRY(loom_all_reduce(group, &norm->largest, &all.largest, 1, LOOM_I64, LOOM_MAX));
    *norm = all;
    return LOOM_OK;
}

void loom__norm_add(loom__norm *norm, const loom__norm *other) {
    int64_t numbers = sizeof norm->sum / sizeof(int64_t), *to = (int64_t *)&norm->sum;
    const int64_t *from = (const int64_t *)&other->sum;
    for (int64_t i = 0; i < numbers; i++)
        to[i] += from[i];
    norm->largest = other->largest > norm->largest ? other->largest : norm->largest;
}

double loom__norm_value(const loom__norm *norm, double factor) {
    double value;
    if (norm->sum.nonfinite)
        return NAN;
    if (norm->type == LOOM__NORM_INF) {
        uint32_t bits = (uint32_t)norm->largest;
        float largest;
        memcpy(&largest, &bits, sizeof largest);
        value = (double)largest;
    } else {
        value = loom_exact_sum_value(&norm->sum, norm->type == LOOM__NORM_2 ? 2 : 1);
        if (norm->type == LOOM__NORM_2)
            value = sqrt(value);
    }
    return (double)(float)(fabs(factor) * value);
}

double loom__clip_factor(double clip, double norm) {
    double factor = clip / (norm + 1e-6);
    return clip > 0.0 && factor < 1.0 ? factor : 1.0;
}

loom_status loom__norm_blame(loom_rank *rank, const loom__ddp_view *view, const char *why) {
    const loom_kernels *kernels = loom_rank_kernels(rank);
    for (int64_t place = view->place_count - 1; place >= 0; place--)
        if (kernels->has_nonfinite(
                loom_rank_team(rank), view->parts[place].count, view->grad + view->parts[place].start))
            return loom_fail(LOOM_ERR_NUMERIC, "%sthe gradient of %s has a NaN or an infinity (rank %d)", why,
                view->parameters[place]->name, loom_rank_index(rank));
    return LOOM_OK;
}
