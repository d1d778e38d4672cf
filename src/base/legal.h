/* The nearest legal numbers to one that is not, as text for messages. */
#ifndef BASE_LEGAL_H
#define BASE_LEGAL_H

#include <stddef.h>
#include <stdint.h>

/* Text such as "2 or 4". */
typedef struct loom__legal {
    char text[48];
} loom__legal;

/* The divisors of n >= 1 next to v, which is none. */
loom__legal loom__nearest_divisors(int64_t n, int64_t v);
#endif
