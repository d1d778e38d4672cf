/* What happens to a token's rows where the token is: one for each of its experts, in the order (expert, token). Each
 * function works with the rank's team and gives the same bits whatever its size. F32, BF16 or F16, sums in fp32. */
#ifndef PARALLEL_EXPERT_ROWS_H
#define PARALLEL_EXPERT_ROWS_H

#include "parallel/experts.h"

/* rows [r->rows, h] = the rows of x [tokens, h] that go to experts. */
void loom__copy_rows(loom_tape *tape, const loom__routed *r, const loom_tensor *x, loom_tensor *rows);
/* out [tokens, h] = for each token the sum over its rows, by expert, of probs [tokens, experts] F32 times the row;
 * probs NULL: weights of 1. */
loom_status loom__sum_rows(
    loom_tape *tape, const loom__routed *r, const loom_tensor *rows, const loom_tensor *probs, loom_tensor *out);
/* d_probs [tokens, experts] F32: of each row the gradient of its token times the row, summed in double, and 0 where
 * there is no row; d_rows [r->rows, h] = probs times the gradient of the row's token. */
loom_status loom__sum_rows_backward(loom_tape *tape, const loom__routed *r, const loom_tensor *rows,
    const loom_tensor *probs, const loom_tensor *d_out, loom_tensor *d_probs, loom_tensor *d_rows);

#endif
