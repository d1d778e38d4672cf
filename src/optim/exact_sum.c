/* A finite fp32 number is m * 2^(e-150) with a whole m below 2^24, so its square is m^2 * 2^(2e-300), and all terms of
 * one exponent add up as whole numbers. A block of terms goes into one bin for each exponent; behind the block the bins
 * go, shifted, into one wide number. Invariant: nothing is ever rounded before loom__exact_sum_value, and a bin never
 * overflows: a lane of a block has 2^14 terms below 2^48. */
#include "optim/exact_sum.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 4, EXPONENTS = 256, BLOCK = LANES << 14 };

static void add_shifted(uint64_t value, int shift, int64_t *limbs) {
    unsigned __int128 wide = (unsigned __int128)value << (shift % 32);
    for (int64_t *limb = limbs + shift / 32; wide; wide >>= 32)
        *limb++ += (int64_t)(uint32_t)wide;
}

static void carry(int64_t *limbs) {
    for (int i = 0; i + 1 < LOOM__EXACT_LIMBS; i++) {
        limbs[i + 1] += limbs[i] >> 32;
        limbs[i] &= 0xffffffff;
    }
}

/* One term into its bin; whether it is a zero. */
static inline int64_t add_term(bool squares, float x, uint64_t *bins) {
    uint32_t bits, exponent;
    memcpy(&bits, &x, sizeof bits);
    exponent = bits >> 23 & 255;
    uint64_t m = (bits & 0x7fffffu) | (uint32_t)(exponent != 0) << 23;
    bins[exponent] += squares ? m * m : m;
    return m == 0;
}

/* Four tables, because the same bin again and again would wait for its own store. */
static void add_block(bool squares, int64_t count, const float *x, loom__exact_sum *sum) {
    uint64_t bins[LANES][EXPONENTS];
    int64_t whole = count / LANES * LANES;
    memset(bins, 0, sizeof bins);
    for (int64_t i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            sum->zeros += add_term(squares, x[i + lane], bins[lane]);
    for (int64_t i = whole; i < count; i++)
        sum->zeros += add_term(squares, x[i], bins[i - whole]);
    for (int exponent = 0; exponent < EXPONENTS; exponent++) {
        uint64_t total = 0;
        for (int lane = 0; lane < LANES; lane++)
            total += bins[lane][exponent];
        int place = exponent > 1 ? exponent - 1 : 0; /* numbers below the normal ones share their exponent */
        if (total && exponent == EXPONENTS - 1)
            sum->nonfinite++;
        else if (total)
            add_shifted(total, squares ? 2 * place : place, sum->limbs);
    }
    carry(sum->limbs);
}

typedef struct job {
    bool squares;
    int64_t count;
    const float *x;
    loom__exact_sum *sums; /* of each worker */
} job;

static void add_item(void *argument, int64_t item, int worker) {
    const job *p = argument;
    int64_t first = item * BLOCK, left = p->count - first;
    add_block(p->squares, left < BLOCK ? left : BLOCK, p->x + first, &p->sums[worker]);
}

static void add_sum(const loom__exact_sum *from, loom__exact_sum *to) {
    for (int i = 0; i < LOOM__EXACT_LIMBS; i++)
        to->limbs[i] += from->limbs[i];
    carry(to->limbs);
    to->nonfinite += from->nonfinite;
    to->zeros += from->zeros;
}

loom_status loom__exact_sum_add(loom_team *team, bool squares, int64_t count, const float *x, loom__exact_sum *sum) {
    if (count <= BLOCK) {
        add_block(squares, count, x, sum);
        return LOOM_OK;
    }
    int workers = loom_team_size(team);
    job p = {squares, count, x, calloc((size_t)workers, sizeof *p.sums)};
    if (!p.sums)
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for the sums of %d threads", workers);
    loom_team_run(team, add_item, &p, (count + BLOCK - 1) / BLOCK);
    for (int worker = 0; worker < workers; worker++)
        add_sum(&p.sums[worker], sum);
    free(p.sums);
    return LOOM_OK;
}

double loom__exact_sum_value(const loom__exact_sum *sum, bool squares) {
    loom__exact_sum carried = *sum;
    double value = 0.0;
    carry(carried.limbs);
    for (int i = LOOM__EXACT_LIMBS - 1; i >= 0; i--)
        value += ldexp((double)carried.limbs[i], 32 * i - (squares ? 298 : 149));
    return value;
}
