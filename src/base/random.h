/* Counter-based random numbers: every draw is a pure function of a key and a counter, so that neither the layout, nor
 * the thread, nor the order of calls can change it. Philox-4x32-10 (Salmon et al., SC 2011). */
#ifndef BASE_RANDOM_H
#define BASE_RANDOM_H

#include <megaloom/types.h>

typedef struct loom__philox {
    uint32_t word[4];
} loom__philox;

static inline loom__philox loom__philox4x32(
    uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (loom__philox){{c0, c1, c2, c3}};
}

/* The dropout rule, for all kernels: the element with channel (or key position) c of the row with key (k0, k1) is kept
 * iff word[c & 3] of loom__dropout_words(row, c >> 2) is >= loom__dropout_threshold(probability). */
typedef struct loom__dropout_row {
    uint32_t k0, k1;     /* the key of the site */
    uint32_t c1, c2, c3; /* the counter words that do not change along the row */
} loom__dropout_row;

/* The row of `position` of `sample`, and of `head` (0 for activations; attention has one row a head and query). */
loom__dropout_row loom__dropout_row_make(
    uint64_t seed, uint32_t layer, uint32_t site, int64_t sample, int64_t position, int64_t head);

static inline uint32_t loom__dropout_threshold(float probability) {
    double t = (double)probability * 4294967296.0;
    return t >= 4294967295.0 ? 4294967295u : (uint32_t)t;
}

/* The four words for channels 4*quad .. 4*quad+3 of the row; a channel is kept iff its word >= threshold. */
static inline loom__philox loom__dropout_words(const loom__dropout_row *row, uint32_t quad) {
    return loom__philox4x32(quad, row->c1, row->c2, row->c3, row->k0, row->k1);
}

/* FNV-1a: goes on from `hash`, which is LOOM__HASH_BEGIN at first. */
#define LOOM__HASH_BEGIN UINT64_C(0xcbf29ce484222325)
static inline uint64_t loom__hash_bytes(uint64_t hash, const void *data, size_t bytes) {
    const unsigned char *at = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* 64-bit hash of a string (FNV-1a followed by a finalizer): the key of a parameter's name. */
uint64_t loom__hash_name(const char *name);

/* out[i] = mean + std * z(seed, name hash, first + i), z standard normal from our own polynomials (no libm), for
 * i in [0, count): element `first + i` of the canonical tensor, whatever rank asks. */
void loom__normal_fill(
    uint64_t seed, uint64_t name_hash, int64_t first, int64_t count, float mean, float std, float *out);

/* A standard Gumbel number, -ln(-ln u) with u uniform in (0, 1): the noise of `token` in the draw for `position` of row
 * `row`. */
double loom__gumbel(uint64_t seed, int64_t row, int64_t position, int64_t token);

#endif
