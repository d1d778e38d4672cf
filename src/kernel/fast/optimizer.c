/* The update of the optimizers: a single pass that reads gradient, weight and state once and writes weight and state
 * once, so that memory alone limits it. What a run has or has not (bf16 moments, a largest moment) is decided outside
 * the loop, which is compiled once for each case. */
#include "kernel/fast/bf16.h"
#include "kernel/fast/work.h"
#include <math.h>

#ifndef LOOM_NARROW

typedef struct adamw_job {
    int64_t count;
    float grad_scale, keep, coupled, step, beta1, rest1, beta2, rest2, root, eps;
    const float *d_w;
    float *w, *v_max;
    void *m, *v;
    bool bf16_m, bf16_v;
} adamw_job;

INLINE void adamw_range(const adamw_job *job, int64_t first, int64_t end, bool bf16_m, bool bf16_v, bool has_max) {
    const adamw_job p = *job;
    for (int64_t i = first; i < end; i += LANES) {
        int64_t left = end - i;
        vf w = v_load(p.w + i, left);
        vf g = v_fma(v_set(p.coupled), w, v_mul(v_load(p.d_w + i, left), v_set(p.grad_scale)));
        vf m = bf16_m ? v_load_bf16((uint16_t *)p.m + i, left) : v_load((float *)p.m + i, left);
        vf v = bf16_v ? v_load_bf16((uint16_t *)p.v + i, left) : v_load((float *)p.v + i, left);
        m = v_fma(v_set(p.beta1), m, v_mul(v_set(p.rest1), g));
        v = v_fma(v_set(p.beta2), v, v_mul(v_mul(v_set(p.rest2), g), g));
        if (bf16_m)
            v_store_bf16((uint16_t *)p.m + i, left, m);
        else
            v_store((float *)p.m + i, left, m);
        if (bf16_v)
            v_store_bf16((uint16_t *)p.v + i, left, v);
        else
            v_store((float *)p.v + i, left, v);
        if (has_max) {
            v = v_max(v_load(p.v_max + i, left), v);
            v_store(p.v_max + i, left, v);
        }
        vf denominator = v_add(v_div(v_sqrt(v), v_set(p.root)), v_set(p.eps));
        v_store(p.w + i, left, v_sub(v_mul(w, v_set(p.keep)), v_div(v_mul(v_set(p.step), m), denominator)));
    }
}

static void adamw_item(void *argument, int64_t item, int worker) {
    const adamw_job *p = argument;
    int64_t first = item * ITEM_ELEMENTS, end = smaller(first + ITEM_ELEMENTS, p->count);
    (void)worker;
    switch ((p->v_max ? 4 : 0) + (p->bf16_m ? 2 : 0) + (p->bf16_v ? 1 : 0)) {
    case 0:
        adamw_range(p, first, end, false, false, false);
        break;
    case 1:
        adamw_range(p, first, end, false, true, false);
        break;
    case 2:
        adamw_range(p, first, end, true, false, false);
        break;
    case 3:
        adamw_range(p, first, end, true, true, false);
        break;
    default:
        adamw_range(p, first, end, p->bf16_m, p->bf16_v, true);
    }
}

void FAST(adamw)(loom_team *team, int64_t count, const loom_adamw *adamw, const float *d_w, float *w, void *m, void *v,
    float *v_max) {
    bool coupled = adamw->coupled_decay;
    adamw_job p = {
        .count = count,
        .grad_scale = adamw->grad_scale,
        .keep = (float)(1 - (coupled ? 0 : adamw->lr * adamw->weight_decay)),
        .coupled = (float)(coupled ? adamw->weight_decay : 0),
        .step = (float)(adamw->lr / adamw->bias_correction1),
        .beta1 = (float)adamw->beta1,
        .rest1 = (float)(1 - adamw->beta1),
        .beta2 = (float)adamw->beta2,
        .rest2 = (float)(1 - adamw->beta2),
        .root = (float)sqrt(adamw->bias_correction2),
        .eps = (float)adamw->eps,
        .d_w = d_w,
        .w = w,
        .v_max = v_max,
        .m = m,
        .v = v,
        .bf16_m = adamw->bf16_m,
        .bf16_v = adamw->bf16_v,
    };
    loom_team_run(team, adamw_item, &p, parts_of(count, ITEM_ELEMENTS));
}

typedef struct sgd_job {
    int64_t count;
    float grad_scale, decay, lr, keep, rest;
    const float *d_w;
    float *w, *momentum;
} sgd_job;

static void sgd_item(void *argument, int64_t item, int worker) {
    const sgd_job p = *(const sgd_job *)argument;
    (void)worker;
    for (int64_t i = item * ITEM_ELEMENTS; i < smaller((item + 1) * ITEM_ELEMENTS, p.count); i += LANES) {
        int64_t left = p.count - i;
        vf w = v_load(p.w + i, left);
        vf g = v_fma(v_set(p.decay), w, v_mul(v_load(p.d_w + i, left), v_set(p.grad_scale)));
        if (p.momentum) {
            g = v_fma(v_set(p.keep), v_load(p.momentum + i, left), v_mul(v_set(p.rest), g));
            v_store(p.momentum + i, left, g);
        }
        v_store(p.w + i, left, v_fnma(v_set(p.lr), g, w));
    }
}

void FAST(sgd)(loom_team *team, int64_t count, const loom_sgd *sgd, const float *d_w, float *w, float *momentum) {
    sgd_job p = {
        .count = count,
        .grad_scale = sgd->grad_scale,
        .decay = (float)sgd->weight_decay,
        .lr = (float)sgd->lr,
        .keep = (float)(sgd->first ? 0 : sgd->momentum),
        .rest = (float)(sgd->first ? 1 : 1 - sgd->dampening),
        .d_w = d_w,
        .w = w,
        .momentum = momentum,
    };
    loom_team_run(team, sgd_item, &p, parts_of(count, ITEM_ELEMENTS));
}

#endif
