/* Sums of squares, or of absolute values, of fp32 numbers without any rounding: the order of the terms, who adds them
 * and where arrays are cut make no difference. */
#ifndef OPTIM_EXACT_SUM_H
#define OPTIM_EXACT_SUM_H

#include <megaloom/rank.h>

enum { LOOM__EXACT_LIMBS = 20 };

/* All members are sums, so that the sum of two of these, member by member, is that of both arrays. 2^31 of them may be
 * added up before one is carried. */
typedef struct loom__exact_sum {
    int64_t limbs[LOOM__EXACT_LIMBS]; /* digits to the base 2^32, the least first, in units of the least term */
    int64_t nonfinite;                /* NaNs and infinities, which the digits leave out */
    int64_t zeros;
} loom__exact_sum;

/* Adds the terms of x[count]: squares, or absolute values. Uses the team. LOOM_ERR_MEMORY. */
loom_status loom__exact_sum_add(loom_team *team, bool squares, int64_t count, const float *x, loom__exact_sum *sum);

/* The sum as a double, which is the same for the same sum; `squares` as when it was made. */
double loom__exact_sum_value(const loom__exact_sum *sum, bool squares);

#endif
