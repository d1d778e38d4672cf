/* MT19937 (Matsumoto and Nishimura, 1998) with the one-number seeding, and numpy's legacy shuffle over it. The shuffle
 * draws by masked rejection, 32 bits at a time while the range allows it: any other way of drawing is as random but
 * gives another order than Megatron's. */
#include "data/mt19937.h"

enum { WORDS = 624, SHIFT = 397 };

void loom__mt19937_seed(loom__mt19937 *generator, uint32_t seed) {
    generator->state[0] = seed;
    for (uint32_t i = 1; i < WORDS; i++) {
        uint32_t last = generator->state[i - 1];
        generator->state[i] = 1812433253u * (last ^ last >> 30) + i;
    }
    generator->place = WORDS;
}

static void refill(loom__mt19937 *generator) {
    uint32_t *state = generator->state;
    for (int i = 0; i < WORDS; i++) {
        uint32_t mixed = (state[i] & 0x80000000u) | (state[(i + 1) % WORDS] & 0x7fffffffu);
        state[i] = state[(i + SHIFT) % WORDS] ^ mixed >> 1 ^ (mixed & 1u ? 0x9908b0dfu : 0u);
    }
    generator->place = 0;
}

uint32_t loom__mt19937_next(loom__mt19937 *generator) {
    if (generator->place == WORDS)
        refill(generator);
    uint32_t word = generator->state[generator->place++];
    word ^= word >> 11;
    word ^= word << 7 & 0x9d2c5680u;
    word ^= word << 15 & 0xefc60000u;
    return word ^ word >> 18;
}

/* Uniform in [0, most]. */
static uint64_t draw(loom__mt19937 *generator, uint64_t most) {
    uint64_t mask = most;
    for (int shift = 1; shift < 64; shift *= 2)
        mask |= mask >> shift;
    uint64_t value;
    do {
        value = loom__mt19937_next(generator);
        if (most > UINT32_MAX)
            value = value << 32 | loom__mt19937_next(generator);
        value &= mask;
    } while (value > most);
    return value;
}

void loom__mt19937_shuffle(loom__mt19937 *generator, int64_t *values, int64_t count) {
    for (int64_t i = count - 1; i > 0; i--) {
        int64_t j = (int64_t)draw(generator, (uint64_t)i), kept = values[i];
        values[i] = values[j];
        values[j] = kept;
    }
}
