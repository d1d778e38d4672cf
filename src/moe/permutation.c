/* Permutations are lists of row numbers: whoever moves rows reads the list, whoever sums weighted rows back reads it
 * the other way. Stable by token within an expert. */
#include "moe/permutation.h"
#include <string.h>

int64_t loom__permutation(
    int64_t tokens, int64_t experts, const uint8_t *map, int64_t capacity, int64_t *counts, int64_t *token) {
    int64_t rows = 0;
    for (int64_t e = 0; e < experts; e++) {
        int64_t begin = rows, most = capacity > 0 ? capacity : tokens;
        /* A second walk fills up with tokens of others where each expert has the same number of rows. */
        for (int own = 1; own >= (capacity > 0 ? 0 : 1); own--)
            for (int64_t t = 0; t < tokens && rows - begin < most; t++) {
                if (map[t * experts + e] != own)
                    continue;
                if (token)
                    token[rows] = t;
                rows++;
            }
        counts[e] = rows - begin;
    }
    return rows;
}

void loom__pad_routing_map(int64_t tokens, int64_t experts, int64_t multiple, uint8_t *map) {
    for (int64_t e = 0; e < experts; e++) {
        int64_t count = 0;
        for (int64_t t = 0; t < tokens; t++)
            count += map[t * experts + e];
        int64_t wanted = (multiple - count % multiple) % multiple;
        for (int64_t t = 0; t < tokens && wanted > 0; t++)
            if (!map[t * experts + e]) {
                map[t * experts + e] = 1;
                wanted--;
            }
    }
}

void loom__sort_chunks(
    int64_t chunks, const int64_t *sizes, const int64_t *order, int64_t row, const float *in, float *out) {
    for (int64_t i = 0; i < chunks; i++) {
        int64_t begin = 0;
        for (int64_t c = 0; c < order[i]; c++)
            begin += sizes[c];
        memcpy(out, in + begin * row, (size_t)(sizes[order[i]] * row) * sizeof(float));
        out += sizes[order[i]] * row;
    }
}
