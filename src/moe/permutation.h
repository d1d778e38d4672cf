/* The order in which tokens lie when those of one expert lie together: by expert, then by token. */
#ifndef MOE_PERMUTATION_H
#define MOE_PERMUTATION_H

#include <megaloom/status.h>
#include <stdbool.h>
#include <stdint.h>

/* counts [experts] = rows of each expert; token [sum of counts] = which token a row is of. With capacity > 0 each
 * expert has that many rows: its tokens first, then the first that are not its own (their weight is 0). Returns the
 * rows. token may be NULL, to count alone. */
int64_t loom__permutation(
    int64_t tokens, int64_t experts, const uint8_t *map, int64_t capacity, int64_t *counts, int64_t *token);

/* Makes the number of tokens of each expert a multiple by giving it the first tokens that are not its own; an expert
 * that has too few of those keeps its remainder. */
void loom__pad_routing_map(int64_t tokens, int64_t experts, int64_t multiple, uint8_t *map);

/* Chunks of rows in another order: out = chunk[order[0]], chunk[order[1]], …; sizes [chunks] in rows of `row` elements.
 */
void loom__sort_chunks(
    int64_t chunks, const int64_t *sizes, const int64_t *order, int64_t row, const float *in, float *out);

#endif
