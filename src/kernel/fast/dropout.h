/* The dropout rule of base/random.h on sixteen counters at once: the same words, hence the same masks, as the scalar
 * one. */
#ifndef KERNEL_FAST_DROPOUT_H
#define KERNEL_FAST_DROPOUT_H

#include "base/random.h"
#include "kernel/fast/simd.h"

/* words[i] of lane l is word i of philox4x32(c0[l], c1[l], c2[l], c3[l], k0, k1). */
INLINE void v_philox(vi c0, vi c1, vi c2, vi c3, uint32_t k0, uint32_t k1, vi words[4]) {
    for (int round = 0; round < 10; round++) {
        vi low0, high0, low2, high2;
        vi_multiply(c0, vi_set(0xD2511F53u), &low0, &high0);
        vi_multiply(c2, vi_set(0xCD9E8D57u), &low2, &high2);
        c0 = vi_xor(vi_xor(high2, c1), vi_set(k0));
        c2 = vi_xor(vi_xor(high0, c3), vi_set(k1));
        c1 = low2;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

/* What an element with this word is multiplied by. */
INLINE vf v_dropout_factor(vi word, float probability) {
    return v_select(
        vi_below(word, vi_set(loom__dropout_threshold(probability))), v_zero(), v_set(1.0f / (1.0f - probability)));
}

#endif
