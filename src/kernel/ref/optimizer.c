/* The update of the optimizers: each element's gradient, weight and state, once. Compiled twice (ref.h). A bf16 moment
 * is widened, used, and rounded to the nearest, ties to even. */
#ifndef REAL
#include "kernel/ref/ref.h"
#include <tgmath.h>

#include "kernel/ref/real32.h"

#include "kernel/ref/optimizer.c"

#include "kernel/ref/real64.h"

#include "kernel/ref/optimizer.c"
#else

void REF(adamw)(
    loom_team *team, int64_t count, const loom_adamw *adamw, const REAL *d_w, REAL *w, void *m, void *v, REAL *v_max) {
    (void)team;
    REAL beta1 = (REAL)adamw->beta1, rest1 = (REAL)(1 - adamw->beta1);
    REAL beta2 = (REAL)adamw->beta2, rest2 = (REAL)(1 - adamw->beta2);
    REAL keep = (REAL)(1 - (adamw->coupled_decay ? 0 : adamw->lr * adamw->weight_decay));
    REAL coupled = (REAL)(adamw->coupled_decay ? adamw->weight_decay : 0);
    REAL step = (REAL)(adamw->lr / adamw->bias_correction1);
    REAL root = (REAL)sqrt(adamw->bias_correction2), eps = (REAL)adamw->eps;
    for (int64_t i = 0; i < count; i++) {
        REAL g = d_w[i] * adamw->grad_scale + coupled * w[i];
        REAL first = adamw->bf16_m ? (REAL)loom_bf16_to_f32(((uint16_t *)m)[i]) : ((REAL *)m)[i];
        REAL second = adamw->bf16_v ? (REAL)loom_bf16_to_f32(((uint16_t *)v)[i]) : ((REAL *)v)[i];
        first = beta1 * first + rest1 * g;
        second = beta2 * second + rest2 * g * g;
        if (adamw->bf16_m)
            ((uint16_t *)m)[i] = loom_f32_to_bf16((float)first);
        else
            ((REAL *)m)[i] = first;
        if (adamw->bf16_v)
            ((uint16_t *)v)[i] = loom_f32_to_bf16((float)second);
        else
            ((REAL *)v)[i] = second;
        if (v_max)
            second = v_max[i] = v_max[i] > second ? v_max[i] : second;
        w[i] = w[i] * keep - step * first / (sqrt(second) / root + eps);
    }
}

void REF(sgd)(loom_team *team, int64_t count, const loom_sgd *sgd, const REAL *d_w, REAL *w, REAL *momentum) {
    (void)team;
    REAL decay = (REAL)sgd->weight_decay, lr = (REAL)sgd->lr, keep = (REAL)(sgd->first ? 0 : sgd->momentum);
    REAL rest = (REAL)(sgd->first ? 1 : 1 - sgd->dampening);
    for (int64_t i = 0; i < count; i++) {
        REAL g = d_w[i] * sgd->grad_scale + decay * w[i];
        if (momentum)
            g = momentum[i] = keep * momentum[i] + rest * g;
        w[i] -= lr * g;
    }
}

#endif
