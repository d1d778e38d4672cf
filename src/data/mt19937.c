/* MT19937 (Matsumoto and Nishimura, 1998) with the one-number seeding, and over it numpy's legacy shuffle and torch's
 * randperm. How they draw decides the order, so it is theirs: numpy by masked rejection from the end, torch by a
 * remainder from the front. A shuffle's places do not depend on its values, so they are drawn some way ahead and
 * fetched into the cache: nearly all of a large shuffle's time is waiting for memory. */
#include "data/mt19937.h"

enum { WORDS = LOOM__MT19937_WORDS, SHIFT = 397, AHEAD = 64 };

void loom__mt19937_seed(loom__mt19937 *generator, uint32_t seed) {
    generator->state[0] = seed;
    for (uint32_t i = 1; i < WORDS; i++) {
        uint32_t last = generator->state[i - 1];
        generator->state[i] = 1812433253u * (last ^ last >> 30) + i;
    }
    generator->place = WORDS;
}

static inline uint32_t twist(uint32_t high, uint32_t low, uint32_t far) {
    uint32_t mixed = (high & 0x80000000u) | (low & 0x7fffffffu);
    return far ^ mixed >> 1 ^ (-(mixed & 1u) & 0x9908b0dfu);
}

/* Without remainders in the places, so that several words can be taken at once; a word is read again no sooner than
 * WORDS - SHIFT words later. */
static void refill(loom__mt19937 *generator) {
    uint32_t *state = generator->state;
#pragma omp simd safelen(16)
    for (int i = 0; i < WORDS - SHIFT; i++)
        state[i] = twist(state[i], state[i + 1], state[i + SHIFT]);
#pragma omp simd safelen(16)
    for (int i = WORDS - SHIFT; i < WORDS - 1; i++)
        state[i] = twist(state[i], state[i + 1], state[i + SHIFT - WORDS]);
    state[WORDS - 1] = twist(state[WORDS - 1], state[0], state[SHIFT - 1]);
#pragma omp simd
    for (int i = 0; i < WORDS; i++) {
        uint32_t word = state[i];
        word ^= word >> 11;
        word ^= word << 7 & 0x9d2c5680u;
        word ^= word << 15 & 0xefc60000u;
        generator->words[i] = word ^ word >> 18;
    }
    generator->place = 0;
}

uint32_t loom__mt19937_next(loom__mt19937 *generator) {
    if (generator->place == WORDS)
        refill(generator);
    return generator->words[generator->place++];
}

static uint64_t next64(loom__mt19937 *generator) {
    uint64_t high = loom__mt19937_next(generator);
    return high << 32 | loom__mt19937_next(generator);
}

/* targets[k] uniform in [0, last - k], k in [0, count): a word is drawn and kept if it is no more than the limit. */
static void draw_wide(loom__mt19937 *generator, int64_t last, int64_t count, uint64_t *targets) {
    int64_t found = 0;
    while (found < count) {
        uint64_t most = (uint64_t)(last - found), mask = UINT64_MAX >> __builtin_clzll(most);
        targets[found] = (most > UINT32_MAX ? next64(generator) : loom__mt19937_next(generator)) & mask;
        found += targets[found] <= most;
    }
}

/* The same where all limits have 32 bits, of which the highest is the same one: then so is the mask. Whether a word
 * will be kept cannot be predicted, so it is written down first and there is no branch. */
static void draw(loom__mt19937 *generator, int64_t last, int64_t count, uint64_t *targets) {
    uint64_t first_limit = (uint64_t)last, last_limit = (uint64_t)(last - count + 1);
    if (first_limit > UINT32_MAX || __builtin_clzll(first_limit) != __builtin_clzll(last_limit)) {
        draw_wide(generator, last, count, targets);
        return;
    }
    uint64_t mask = UINT64_MAX >> __builtin_clzll(first_limit);
    int64_t found = 0;
    while (found < count) {
        if (generator->place == WORDS)
            refill(generator);
        int64_t ready = WORDS - generator->place, some = ready < count - found ? ready : count - found;
        const uint32_t *words = generator->words + generator->place;
        for (int64_t k = 0; k < some; k++) {
            uint64_t target = words[k] & mask;
            targets[found] = target;
            found += target <= first_limit - (uint64_t)found;
        }
        generator->place += (int)some;
    }
}

#define SHUFFLE(type)                                                                                                  \
    uint64_t targets[AHEAD];                                                                                           \
    for (int64_t last = count - 1; last > 0;) {                                                                        \
        int64_t block = last < AHEAD ? last : AHEAD;                                                                   \
        draw(generator, last, block, targets);                                                                         \
        for (int64_t k = 0; k < block; k++)                                                                            \
            __builtin_prefetch(&values[targets[k]], 1);                                                                \
        for (int64_t k = 0; k < block; k++, last--) {                                                                  \
            type kept = values[last];                                                                                  \
            values[last] = values[targets[k]];                                                                         \
            values[targets[k]] = kept;                                                                                 \
        }                                                                                                              \
    }

void loom__mt19937_shuffle(loom__mt19937 *generator, int64_t *values, int64_t count) {
    SHUFFLE(int64_t)
}

void loom__mt19937_shuffle_u32(loom__mt19937 *generator, uint32_t *values, int64_t count) {
    SHUFFLE(uint32_t)
}

void loom__torch_randperm(uint64_t seed, int64_t count, int64_t *values) {
    loom__mt19937 generator;
    loom__mt19937_seed(&generator, (uint32_t)seed);
    for (int64_t i = 0; i < count; i++)
        values[i] = i;
    /* torch takes 64 bits where 32 would favour small numbers by more than a twentieth. */
    bool wide = count >= UINT32_MAX / 20;
    for (int64_t i = 0; i + 1 < count; i++) {
        uint64_t word = wide ? next64(&generator) : loom__mt19937_next(&generator);
        int64_t other = i + (int64_t)(word % (uint64_t)(count - i)), kept = values[i];
        values[i] = values[other];
        values[other] = kept;
    }
}
