/* Attention over a sequence that several ranks share (context parallelism). Each rank has the rows of its own chunks
 * (loom_layout_context_chunks) of every activation; only attention looks beyond them.
 *
 * Two ways, which may be combined:
 * - a ring: keys and values go round while the previous ones are computed with, or are gathered at once; every rank
 * keeps all of its heads;
 * - heads for rows: an all-to-all gives each rank all rows of its group for a part of the heads, and back. */
#ifndef PARALLEL_CONTEXT_H
#define PARALLEL_CONTEXT_H

#include <megaloom/tensor.h>

/* The members of a ring, each with `chunks` chunks of `rows` rows: local row i*rows + t of member m is at position
 * begin[m*chunks + i] + t, ascending in i. */
typedef struct loom__ring {
    loom_comm *comm;
    bool gather; /* keys and values are gathered at once instead of going round */
    int64_t chunks, rows;
    const int64_t *begin; /* [members, chunks], copied */
} loom__ring;

/* As loom_attention on the whole sequence: qkv [chunks*rows, b, g*(n/g+2)*d], output [chunks*rows, b, n*d].
 * options->document_start is of the local rows, [b, chunks*rows]. F32, BF16 and F16; sums over blocks are in fp32.
 * Memory beyond inputs and output: two pieces of keys and values, with `gather` those of the whole sequence; the
 * backward twice that in fp32. Collective over ring->comm. */
loom_status loom__ring_attention(loom_tape *tape, loom_tensor *qkv, const loom_attention_options *options,
    const loom__ring *ring, loom_tensor **output);

/* x [s, b, w] of `size` members, each with two chunks, to [size*s, b, w/size]: all their rows, in the order of their
 * positions, with this rank's part of the columns. w/size columns are whole heads, or whole query groups of a fused
 * qkv. */
loom_status loom__heads_for_rows(loom_tape *tape, loom_tensor *x, loom_comm *comm, loom_tensor **output);
/* The way back: x [size*s, b, w/size] to [s, b, w]. */
loom_status loom__rows_for_heads(loom_tape *tape, loom_tensor *x, loom_comm *comm, loom_tensor **output);

#endif
