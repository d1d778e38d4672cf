/* Operations that contain communication over the tensor-parallel group. Shapes: s sequence, b microbatch; a tensor that
 * is sharded over the sequence has s/tp rows on each rank. Every function is collective over `tp` (which may have one
 * member) and differentiable; `sequence_parallel` must be false for a group of one. Outputs may have communication
 * pending. F32, BF16 or F16 as the local operations are: inputs, parameters and outputs of one dtype; losses are F32.
 */
#ifndef PARALLEL_PARALLEL_H
#define PARALLEL_PARALLEL_H

#include <megaloom/tensor.h>

/* y [s, b, o/tp] = x W^T + bias, x [s, b, h] or [s/tp, b, h] (sequence_parallel: gathered first), W [o/tp, h], bias
 * [o/tp] or NULL. Backward: d_x is summed over tp (scattered over the sequence with sequence_parallel). */
loom_status loom__column_linear(loom_tape *tape, loom_tensor *x, loom_parameter *weight, loom_parameter *bias,
    loom_comm *tp, bool sequence_parallel, loom_tensor **output);

/* y [s, b, o] or [s/tp, b, o] = sum over tp of x W^T, x [s, b, i/tp], W [o, i/tp]. A bias belongs behind the sum: see
 * loom_bias_dropout_add. */
loom_status loom__row_linear(loom_tape *tape, loom_tensor *x, loom_parameter *weight, loom_comm *tp,
    bool sequence_parallel, loom_tensor **output);

/* y [s, b, h] or [s/tp, b, h]: row tokens[j*s + t] of the table whose rows first_row … first_row + v/tp − 1 this rank
 * holds. tokens [b, s] are borrowed for the call. A token outside [0, vocabulary) is an error naming it. */
loom_status loom__vocab_embedding(loom_tape *tape, const int64_t *tokens, int64_t b, int64_t s, loom_parameter *table,
    int64_t first_row, int64_t vocabulary, loom_comm *tp, bool sequence_parallel, loom_tensor **output);

/* y = x + table[positions]: x [s_local, b, h]; positions [b, s_local] or NULL for position_offset + t. Local. */
loom_status loom__position_embedding(loom_tape *tape, loom_tensor *x, loom_parameter *table, const int64_t *positions,
    int64_t position_offset, loom_tensor **output);

/* Token losses [s, b] = log sum exp(logits) − logits[label], logits [s, b, v/tp] with the columns first_column … of the
 * vocabulary; local columns >= valid are padding. labels [b, s] are borrowed; a label outside [0, vocabulary) gives
 * loss 0 and no gradient; whoever takes the mean must not count it. */
loom_status loom__vocab_cross_entropy(loom_tape *tape, loom_tensor *logits, const int64_t *labels, int64_t first_column,
    int64_t valid, int64_t vocabulary, loom_comm *tp, loom_tensor **losses);

/* The whole logits, out [b, s, vocabulary] on every rank, from this rank's [s, b, v/tp]; padding columns are left out.
 * Not differentiable. */
loom_status loom__gather_logits(loom_tensor *logits, int64_t vocabulary, loom_comm *tp, float *out);

#endif
