/* numpy.random.RandomState: the generator behind Megatron's document and sample orders. Nothing else should use it: new
 * random numbers come from base/random.h. */
#ifndef DATA_MT19937_H
#define DATA_MT19937_H

#include <megaloom/types.h>

typedef struct loom__mt19937 {
    uint32_t state[624];
    int place; /* of the next word; 624 = make new ones */
} loom__mt19937;

void loom__mt19937_seed(loom__mt19937 *generator, uint32_t seed);
uint32_t loom__mt19937_next(loom__mt19937 *generator);
/* values[0, count) into RandomState.shuffle's order. */
void loom__mt19937_shuffle(loom__mt19937 *generator, int64_t *values, int64_t count);

#endif
