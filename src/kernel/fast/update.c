/* What is done to gradients, moments and weights in fp32, whatever activations are kept in: the sum of squares of a
 * norm, and the optimizer's update. Sums are made of chunks that are added in order. */
#include "kernel/fast/work.h"
#include <math.h>

#ifndef LOOM_NARROW

enum { SUM_CHUNK = 4096, CHUNKS_PER_ITEM = 8 };

typedef struct squares_job {
    int64_t count;
    const float *x;
    double *partial; /* one for each chunk */
} squares_job;

static double chunk_of_squares(const float *x, int64_t count) {
    __m256d sum[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    for (int64_t i = 0; i < count; i += LANES) {
        vf v = v_load(x + i, count - i);
        __m128 quarter[4] = {_mm256_castps256_ps128(v_half0(v)), _mm256_extractf128_ps(v_half0(v), 1),
            _mm256_castps256_ps128(v_half1(v)), _mm256_extractf128_ps(v_half1(v), 1)};
        UNROLL
        for (int q = 0; q < 4; q++) {
            __m256d wide = _mm256_cvtps_pd(quarter[q]);
            sum[q] = _mm256_fmadd_pd(wide, wide, sum[q]);
        }
    }
    double lanes[4];
    _mm256_storeu_pd(lanes, _mm256_add_pd(_mm256_add_pd(sum[0], sum[1]), _mm256_add_pd(sum[2], sum[3])));
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

static void squares_item(void *argument, int64_t item, int worker) {
    const squares_job *p = argument;
    (void)worker;
    for (int64_t chunk = item * CHUNKS_PER_ITEM; chunk < (item + 1) * CHUNKS_PER_ITEM && chunk * SUM_CHUNK < p->count;
         chunk++)
        p->partial[chunk] =
            chunk_of_squares(p->x + chunk * SUM_CHUNK, smaller(SUM_CHUNK, p->count - chunk * SUM_CHUNK));
}

double FAST(sum_of_squares)(loom_team *team, int64_t count, const float *x) {
    int64_t chunks = parts_of(count, SUM_CHUNK);
    scratch s;
    if (!scratch_reserve(&s, team, (size_t)chunks * sizeof(double), 0))
        return loom__ref_sum_of_squares(team, count, x);
    squares_job p = {count, x, s.shared};
    loom_team_run(team, squares_item, &p, parts_of(chunks, CHUNKS_PER_ITEM));
    double total = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        total += p.partial[chunk];
    return total;
}

typedef struct adamw_job {
    int64_t count;
    float grad_scale, keep, step, beta1, rest1, beta2, rest2, root, eps;
    const float *d_w;
    float *w, *m, *v;
} adamw_job;

static void adamw_item(void *argument, int64_t item, int worker) {
    const adamw_job p = *(const adamw_job *)argument;
    (void)worker;
    for (int64_t i = item * ITEM_ELEMENTS; i < smaller((item + 1) * ITEM_ELEMENTS, p.count); i += LANES) {
        int64_t left = p.count - i;
        vf g = v_mul(v_load(p.d_w + i, left), v_set(p.grad_scale));
        vf m = v_fma(v_set(p.beta1), v_load(p.m + i, left), v_mul(v_set(p.rest1), g));
        vf v = v_fma(v_set(p.beta2), v_load(p.v + i, left), v_mul(v_mul(v_set(p.rest2), g), g));
        vf denominator = v_add(v_div(v_sqrt(v), v_set(p.root)), v_set(p.eps));
        vf w = v_mul(v_load(p.w + i, left), v_set(p.keep));
        v_store(p.m + i, left, m);
        v_store(p.v + i, left, v);
        v_store(p.w + i, left, v_sub(w, v_div(v_mul(v_set(p.step), m), denominator)));
    }
}

void FAST(adamw)(
    loom_team *team, int64_t count, const loom_adamw *adamw, const float *d_w, float *w, float *m, float *v) {
    adamw_job p = {
        .count = count,
        .grad_scale = adamw->grad_scale,
        .keep = (float)(1 - adamw->lr * adamw->weight_decay),
        .step = (float)(adamw->lr / adamw->bias_correction1),
        .beta1 = (float)adamw->beta1,
        .rest1 = (float)(1 - adamw->beta1),
        .beta2 = (float)adamw->beta2,
        .rest2 = (float)(1 - adamw->beta2),
        .root = (float)sqrt(adamw->bias_correction2),
        .eps = (float)adamw->eps,
        .d_w = d_w,
        .w = w,
        .m = m,
        .v = v,
    };
    loom_team_run(team, adamw_item, &p, parts_of(count, ITEM_ELEMENTS));
}

#endif
