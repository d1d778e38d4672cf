/* Philox streams: dropout rows and normal numbers. Only additions, multiplications and correctly rounded square roots
 * are used, so that every machine draws the same bits. */
#include "base/random.h"
#include <math.h>
#include <string.h>

static uint64_t mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint64_t loom__hash_name(const char *name) {
    return mix(loom__hash_bytes(LOOM__HASH_BEGIN, name, strlen(name)));
}

loom__dropout_row loom__dropout_row_make(
    uint64_t seed, uint32_t layer, uint32_t site, int64_t sample, int64_t position, int64_t head) {
    uint64_t key = mix(seed ^ mix((uint64_t)layer << 32 | site));
    uint64_t place = mix((uint64_t)sample ^ mix((uint64_t)head + 0x9e3779b97f4a7c15u));
    return (loom__dropout_row){
        .k0 = (uint32_t)key,
        .k1 = (uint32_t)(key >> 32),
        .c1 = (uint32_t)position,
        .c2 = (uint32_t)place,
        .c3 = (uint32_t)(place >> 32),
    };
}

/* ln x for normal x > 0: x = m 2^e with m in [sqrt(1/2), sqrt 2), then 2 atanh((m-1)/(m+1)) as an odd series. */
static double own_log(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 52) - 1022;
    bits = (bits & 0x000fffffffffffffu) | 0x3fe0000000000000u; /* m in [1/2, 1) */
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m < 0.70710678118654752440) {
        m *= 2;
        exponent--;
    }
    double t = (m - 1) / (m + 1), t2 = t * t;
    double series = 0;
    for (int k = 19; k >= 1; k -= 2)
        series = series * t2 + 1.0 / k;
    return 2 * t * series + exponent * 0.69314718055994530942;
}

/* sin and cos of 2 pi u, u in [0, 1): folded to an eighth of the circle, Taylor series there. */
static void own_sincos(double u, double *sine, double *cosine) {
    int octant = (int)(u * 8);
    double x = (u - (octant + 1) / 2 * 0.25) * 6.28318530717958647693, x2 = x * x;
    double s = 0, c = 0;
    for (int k = 17; k >= 1; k -= 2)
        s = 1 - s * x2 / ((k + 1) * (double)(k + 2));
    s *= x;
    for (int k = 16; k >= 0; k -= 2)
        c = 1 - c * x2 / ((k + 1) * (double)(k + 2));
    switch ((octant + 1) / 2 & 3) {
    case 0:
        *sine = s;
        *cosine = c;
        break;
    case 1:
        *sine = c;
        *cosine = -s;
        break;
    case 2:
        *sine = -s;
        *cosine = -c;
        break;
    default:
        *sine = -c;
        *cosine = s;
    }
}

void loom__normal_fill(
    uint64_t seed, uint64_t name_hash, int64_t first, int64_t count, float mean, float std, float *out) {
    uint64_t key = mix(seed ^ mix(name_hash));
    double pair[2] = {0, 0};
    int64_t drawn = -1; /* the pair that `pair` holds */
    for (int64_t i = 0; i < count; i++) {
        int64_t at = first + i, wanted = at / 2;
        if (wanted != drawn) {
            loom__philox words = loom__philox4x32((uint32_t)wanted, (uint32_t)((uint64_t)wanted >> 32), 0x6e6f726du, 0,
                (uint32_t)key, (uint32_t)(key >> 32));
            uint64_t a = (uint64_t)words.word[0] << 32 | words.word[1],
                     b = (uint64_t)words.word[2] << 32 | words.word[3];
            double u = ((double)(a >> 12) + 1) * 0x1p-52; /* (0, 1] */
            double v = (double)(b >> 12) * 0x1p-52;       /* [0, 1) */
            double radius = sqrt(-2 * own_log(u)), s, c;
            own_sincos(v, &s, &c);
            pair[0] = radius * c;
            pair[1] = radius * s;
            drawn = wanted;
        }
        out[i] = (float)((double)mean + (double)std * pair[at & 1]);
    }
}

double loom__gumbel(uint64_t seed, int64_t row, int64_t position, int64_t token) {
    static const uint64_t stream = 0x67756d62656cu; /* apart from those of weights and dropout */
    uint64_t key = mix(seed ^ mix((uint64_t)row ^ mix(stream)));
    loom__philox words = loom__philox4x32((uint32_t)token, (uint32_t)((uint64_t)token >> 32), (uint32_t)position,
        (uint32_t)((uint64_t)position >> 32), (uint32_t)key, (uint32_t)(key >> 32));
    uint64_t bits = (uint64_t)words.word[0] << 32 | words.word[1];
    double u = ((double)(bits >> 12) + 0.5) * 0x1p-52; /* in (0, 1), both ends left out */
    return -own_log(-own_log(u));
}
