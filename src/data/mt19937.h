/* numpy.random.RandomState and torch's CPU generator: one Mersenne twister, from which Megatron's document and sample
 * orders (numpy) and NeMo's shuffled samplers (torch) draw. Nothing else should use it: new random numbers come from
 * base/random.h. */
#ifndef DATA_MT19937_H
#define DATA_MT19937_H

#include <megaloom/types.h>

enum { LOOM__MT19937_WORDS = 624 };

typedef struct loom__mt19937 {
    uint32_t state[LOOM__MT19937_WORDS];
    uint32_t words[LOOM__MT19937_WORDS]; /* of the state, ready to be handed out */
    int place;                           /* of the next word; 624 = make new ones */
} loom__mt19937;

void loom__mt19937_seed(loom__mt19937 *generator, uint32_t seed);
uint32_t loom__mt19937_next(loom__mt19937 *generator);
/* values[0, count) into RandomState.shuffle's order; the order depends on count alone. */
void loom__mt19937_shuffle(loom__mt19937 *generator, int64_t *values, int64_t count);
void loom__mt19937_shuffle_u32(loom__mt19937 *generator, uint32_t *values, int64_t count);
/* values[0, count) = torch.randperm(count) of a generator with this seed (of which 32 bits count). */
void loom__torch_randperm(uint64_t seed, int64_t count, int64_t *values);

#endif
