/* Sixteen bf16 numbers in memory as fp32 lanes, and back: to the nearest, ties to even; a NaN stays one. */
#ifndef KERNEL_FAST_BF16_H
#define KERNEL_FAST_BF16_H

#include "kernel/fast/simd.h"
#include <string.h>

INLINE vf bf16_widen(const uint16_t *p) {
#if defined(__AVX512F__)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)p)), 16));
#else
    __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i_u *)p));
    __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i_u *)p + 1));
    return (vf){_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
#endif
}

#if !defined(__AVX512F__)
INLINE __m256i bf16_rounded_half(__m256 x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
}
#endif

INLINE void bf16_narrow(uint16_t *p, vf x) {
#if defined(__AVX512F__)
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i_u *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
#else
    __m256i packed = _mm256_packus_epi32(bf16_rounded_half(x.a), bf16_rounded_half(x.b));
    _mm256_storeu_si256((__m256i_u *)p, _mm256_permute4x64_epi64(packed, 0xd8));
#endif
}

/* As v_load and v_store: a short vector goes through a copy of full length. */
INLINE vf v_load_bf16(const uint16_t *p, int64_t left) {
    if (left >= LANES)
        return bf16_widen(p);
    uint16_t copy[LANES] = {0};
    memcpy(copy, p, (size_t)left * sizeof *p);
    return bf16_widen(copy);
}
INLINE void v_store_bf16(uint16_t *p, int64_t left, vf x) {
    if (left >= LANES) {
        bf16_narrow(p, x);
        return;
    }
    uint16_t copy[LANES];
    bf16_narrow(copy, x);
    memcpy(p, copy, (size_t)left * sizeof *p);
}

#endif
