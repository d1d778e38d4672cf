/* The nearest of a list of names to a word that is none of them. */
#ifndef BASE_NEAREST_H
#define BASE_NEAREST_H

#include <stdint.h>

/* Edits (insert, delete, replace, swap of neighbours) from a to b, at most `limit` + 1. Names longer than 95 bytes
 * count as too far. */
int loom__edit_distance(const char *a, const char *b, int limit);

/* Offer each name; `best` is then the first one with the fewest edits, NULL when none is near enough to be meant (about
 * a third of the word may differ). */
typedef struct loom__nearest {
    const char *word;
    const char *best;
    int distance; /* of best; one more than allowed before there is one */
} loom__nearest;

void loom__nearest_begin(loom__nearest *nearest, const char *word);
void loom__nearest_offer(loom__nearest *nearest, const char *name);

#endif
