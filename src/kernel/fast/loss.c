/* The local part of the vocabulary-parallel cross-entropy. One pass over memory: a row is taken in blocks that stay in
 * the first-level cache, each first for its maximum and then for its exponentials, with the running sum brought to the
 * new maximum in between. */
#include "kernel/fast/math.h"
#include "kernel/fast/work.h"

enum { BLOCK = 1024 };

typedef struct job {
    int64_t rows, v_local, v_valid, first_column, rows_per_item;
    const int64_t *targets;
    const element *logits;
    const float *maximum_in, *sum_in, *row_scale;
    element *gradient;
    float *maximum, *sum, *target_logit;
} job;

static void loss_rows(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    for (int64_t r = item * p->rows_per_item; r < smaller((item + 1) * p->rows_per_item, p->rows); r++) {
        const element *row = p->logits + r * p->v_local;
        int64_t target = p->targets[r] - p->first_column;
        float maximum = -INFINITY;
        vf sum = v_zero();
        for (int64_t first = 0; first < p->v_valid; first += BLOCK) {
            int64_t last = smaller(first + BLOCK, p->v_valid);
            vf highest = v_set(-INFINITY);
            for (int64_t c = first; c < last; c += LANES) {
                vf x = e_load(row + c, last - c);
                if (last - c < LANES)
                    x = v_select(v_lanes(last - c), x, v_set(-INFINITY));
                highest = v_max(x, highest);
            }
            float block = v_largest(highest);
            if (block > maximum) {
                sum = v_mul(sum, v_exp(v_set(maximum - block)));
                maximum = block;
            }
            vf base = v_set(maximum == -INFINITY ? 0.0f : maximum);
            for (int64_t c = first; c < last; c += LANES)
                sum = v_add(sum, v_keep(last - c, v_exp(v_sub(e_load(row + c, last - c), base))));
        }
        p->maximum[r] = maximum;
        p->sum[r] = v_sum(sum);
        p->target_logit[r] = target >= 0 && target < p->v_valid ? e_widen(row[target]) : 0.0f;
    }
}

void FAST(cross_entropy_local)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, const element *logits,
    const int64_t *targets, int64_t first_column, float *maximum, float *sum, float *target_logit) {
    job p = {.rows = rows,
        .v_local = v_local,
        .v_valid = v_valid,
        .first_column = first_column,
        .rows_per_item = rows_per_item(v_local),
        .targets = targets,
        .logits = logits,
        .maximum = maximum,
        .sum = sum,
        .target_logit = target_logit};
    loom_team_run(team, loss_rows, &p, parts_of(rows, p.rows_per_item));
}

static void loss_backward_rows(void *argument, int64_t item, int worker) {
    const job *p = argument;
    (void)worker;
    for (int64_t r = item * p->rows_per_item; r < smaller((item + 1) * p->rows_per_item, p->rows); r++) {
        element *row = p->gradient + r * p->v_local;
        int64_t target = p->targets[r] - p->first_column, valid = p->row_scale[r] == 0.0f ? 0 : p->v_valid;
        vf maximum = v_set(p->maximum_in[r]), sum = v_set(p->sum_in[r]), scale = v_set(p->row_scale[r]);
        for (int64_t c = 0; c < valid; c += LANES) {
            vf x = v_div(v_exp(v_sub(e_load(row + c, valid - c), maximum)), sum);
            if (target >= c && target < c + LANES) {
                float lanes[LANES];
                v_store(lanes, LANES, x);
                lanes[target - c] -= 1.0f;
                x = v_load(lanes, LANES);
            }
            e_store(row + c, valid - c, v_mul(x, scale));
        }
        for (int64_t c = valid; c < p->v_local; c += LANES)
            e_store(row + c, p->v_local - c, v_zero());
    }
}

void FAST(cross_entropy_backward)(loom_team *team, int64_t rows, int64_t v_local, int64_t v_valid, element *logits,
    const int64_t *targets, int64_t first_column, const float *maximum, const float *sum, const float *row_scale) {
    job p = {.rows = rows,
        .v_local = v_local,
        .v_valid = v_valid,
        .first_column = first_column,
        .rows_per_item = rows_per_item(v_local),
        .targets = targets,
        .gradient = logits,
        .maximum_in = maximum,
        .sum_in = sum,
        .row_scale = row_scale};
    loom_team_run(team, loss_backward_rows, &p, parts_of(rows, p.rows_per_item));
}
