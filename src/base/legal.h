/* The nearest legal numbers to one that is not, as text for messages. */
#ifndef BASE_LEGAL_H
#define BASE_LEGAL_H

#include <stddef.h>
#include <stdint.h>

/* Text such as "2 or 4". */
typedef struct loom__legal {
    char text[48];
} loom__legal;

/* "below or above"; one that is not positive is left out. */
loom__legal loom__nearest_pair(int64_t below, int64_t above);
/* The divisors of n >= 1 next to v, which is none. */
loom__legal loom__nearest_divisors(int64_t n, int64_t v);
/* The positive multiples of unit >= 1 next to v >= 0. */
loom__legal loom__nearest_multiples(int64_t unit, int64_t v);

/* Appends "; nearest legal <name> <values>" (or ", <name> <values>" after the first) for a size v that shares n with
 * `others`. Appends nothing where v is not at fault, or where no v can help. */
void loom__suggest_size(char *text, size_t bytes, const char *name, int64_t n, int64_t others, int64_t v);

#endif
