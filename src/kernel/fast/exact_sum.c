/* Exact sums, a block at a time, in double. A constant that is added to a term and taken off again leaves of it the
 * multiple of a grid, and the rest is exact as well: with the grid put where the block's largest number says, both
 * halves add up without rounding. Numbers that are too small for the grid come in another round. Invariant: in units of
 * its last place no lane's sum exceeds 2^53. A lane gets 2^9 terms below 2^p(e-126), e being the largest exponent
 * and p the power, so the grid is 2^(p(e-126)-43); the rests, each at most half of it, are multiples of
 * 2^p(e-RANGE-150). */
#include "kernel/exact_sum.h"
#include "kernel/fast/work.h"
#include <math.h>
#include <string.h>

#ifndef LOOM_NARROW

enum { BLOCK = 4096, WIDE = 8, RANGE = 19, INFINITE = 255 };

typedef struct scan {
    uint32_t largest, least; /* bits of the sizes; the least is that of what is not zero, less 1 */
    int64_t zeros;
} scan;

static scan scan_block(const float *x, int64_t count) {
    __m256i largest = _mm256_setzero_si256(), least = _mm256_set1_epi32(-1), zeros = _mm256_setzero_si256();
    __m256i size = _mm256_set1_epi32(0x7fffffff), one = _mm256_set1_epi32(1);
    uint32_t lanes[3][WIDE];
    scan found = {.least = UINT32_MAX};
    for (int64_t i = 0; i < count; i += WIDE) {
        __m256i bits = _mm256_and_si256(_mm256_loadu_si256((const __m256i_u *)(x + i)), size);
        largest = _mm256_max_epu32(largest, bits);
        least = _mm256_min_epu32(least, _mm256_sub_epi32(bits, one));
        zeros = _mm256_sub_epi32(zeros, _mm256_cmpeq_epi32(bits, _mm256_setzero_si256()));
    }
    _mm256_storeu_si256((__m256i_u *)lanes[0], largest);
    _mm256_storeu_si256((__m256i_u *)lanes[1], least);
    _mm256_storeu_si256((__m256i_u *)lanes[2], zeros);
    for (int lane = 0; lane < WIDE; lane++) {
        found.largest = lanes[0][lane] > found.largest ? lanes[0][lane] : found.largest;
        found.least = lanes[1][lane] < found.least ? lanes[1][lane] : found.least;
        found.zeros += lanes[2][lane];
    }
    return found;
}

/* What a lane adds up: multiples of the grid, and rests. */
typedef struct halves {
    __m256d whole, rest;
} halves;

INLINE halves add_term(int power, __m128 x, __m256d grid, halves to) {
    __m256d wide = _mm256_cvtps_pd(x);
    __m256d term = power == 2 ? _mm256_mul_pd(wide, wide) : _mm256_andnot_pd(_mm256_set1_pd(-0.0), wide);
    __m256d whole = _mm256_sub_pd(_mm256_add_pd(term, grid), grid);
    return (halves){_mm256_add_pd(to.whole, whole), _mm256_add_pd(to.rest, _mm256_sub_pd(term, whole))};
}

/* Sums of a block are multiples of the unit, though a double's last place may lie below it. */
static void add_lanes(int power, __m256d lanes, loom_exact_sum *sum) {
    double values[4];
    _mm256_storeu_pd(values, lanes);
    for (int lane = 0; lane < 4; lane++) {
        uint64_t bits;
        memcpy(&bits, &values[lane], sizeof bits);
        uint64_t m = (bits & ((1ull << 52) - 1)) | 1ull << 52;
        int shift = (int)(bits >> 52 & 0x7ff) - 1075 + 149 * power;
        if (values[lane] < 0 || values[lane] > 0)
            loom__exact_sum_shifted(shift < 0 ? m >> -shift : m, shift < 0 ? 0 : shift, bits >> 63, sum);
    }
}

INLINE void add_vectors(int power, int largest, const float *x, int64_t count, loom_exact_sum *sum) {
    __m256d grid = _mm256_set1_pd(ldexp(1.5, 52 + power * (largest - 126) - 43));
    halves first = {_mm256_setzero_pd(), _mm256_setzero_pd()}, second = first;
    for (int64_t i = 0; i < count; i += WIDE) {
        __m256 both = _mm256_loadu_ps(x + i);
        first = add_term(power, _mm256_castps256_ps128(both), grid, first);
        second = add_term(power, _mm256_extractf128_ps(both, 1), grid, second);
    }
    add_lanes(power, first.whole, sum);
    add_lanes(power, first.rest, sum);
    add_lanes(power, second.whole, sum);
    add_lanes(power, second.rest, sum);
}

/* Parts the numbers of x by size: below `end` they go to rest, else to kept, each with zeros in place of the others. */
static void part(const float *x, int64_t count, uint32_t end, float *kept, float *rest) {
    __m256i size = _mm256_set1_epi32(0x7fffffff), last = _mm256_set1_epi32((int)(end - 1));
    for (int64_t i = 0; i < count; i += WIDE) {
        __m256i both = _mm256_loadu_si256((const __m256i_u *)(x + i));
        __m256i large = _mm256_cmpgt_epi32(_mm256_and_si256(both, size), last);
        _mm256_storeu_si256((__m256i_u *)(kept + i), _mm256_and_si256(both, large));
        _mm256_storeu_si256((__m256i_u *)(rest + i), _mm256_andnot_si256(large, both));
    }
}

static void add_elements(int power, const float *x, int64_t count, loom_exact_sum *sum) {
    for (int64_t i = 0; i < count; i++)
        loom__exact_sum_element(power, x[i], sum);
}

static void add_block(int power, const float *x, int64_t count, loom_exact_sum *sum) {
    float kept[BLOCK], rest[BLOCK];
    int64_t padded = round_up(count, WIDE);
    if (padded > count) {
        memcpy(rest, x, (size_t)count * sizeof *x);
        memset(rest + count, 0, (size_t)(padded - count) * sizeof *x);
        x = rest;
    }
    scan found = scan_block(x, padded);
    int64_t zeros = sum->zeros + found.zeros - (padded - count);
    for (bool more = true; more;) {
        int largest = (int)(found.largest >> 23);
        uint32_t end = (uint32_t)(largest > RANGE ? largest - RANGE : 1) << 23;
        /* The processor may take numbers below the normal ones for zeros, and NaNs must be counted. */
        if (largest == 0 || largest == INFINITE) {
            if (found.largest)
                add_elements(power, x, count, sum);
            break;
        }
        more = found.least + 1 < end && found.least != UINT32_MAX;
        if (more)
            part(x, padded, end, kept, rest);
        if (power == 2)
            add_vectors(2, largest, more ? kept : x, padded, sum);
        else
            add_vectors(1, largest, more ? kept : x, padded, sum);
        if (more) {
            x = rest;
            found = scan_block(x, padded);
        }
    }
    sum->zeros = zeros;
    loom__exact_sum_carry(sum);
}

typedef struct sum_job {
    int power;
    int64_t count;
    const float *x;
    loom_exact_sum *sums; /* of each worker */
} sum_job;

static void sum_item(void *argument, int64_t item, int worker) {
    const sum_job *p = argument;
    int64_t end = smaller((item + 1) * ITEM_ELEMENTS, p->count);
    for (int64_t i = item * ITEM_ELEMENTS; i < end; i += BLOCK)
        add_block(p->power, p->x + i, smaller(BLOCK, end - i), &p->sums[worker]);
}

void FAST(exact_sum)(loom_team *team, int power, int64_t count, const float *x, loom_exact_sum *sum) {
    size_t bytes = (size_t)loom_team_size(team) * sizeof *sum;
    scratch s;
    if (count <= ITEM_ELEMENTS || !scratch_reserve(&s, team, bytes, 0)) {
        for (int64_t i = 0; i < count; i += BLOCK)
            add_block(power, x + i, smaller(BLOCK, count - i), sum);
        return;
    }
    sum_job p = {power, count, x, s.shared};
    memset(p.sums, 0, bytes);
    loom_team_run(team, sum_item, &p, parts_of(count, ITEM_ELEMENTS));
    for (int worker = 0; worker < loom_team_size(team); worker++)
        loom__exact_sum_join(&p.sums[worker], sum);
}

#endif
