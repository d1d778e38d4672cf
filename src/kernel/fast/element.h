/* What an activation or a matrix is kept in: float, or 16 bits of bf16 (LOOM_ELEMENT_BF16) or fp16 (LOOM_ELEMENT_F16).
 * The kernels are written once over elements; a load widens exactly, a store rounds to nearest even, all between is
 * fp32. bf16 is rounded with integer operations on every instruction set: the processors' own conversion makes zeros of
 * subnormal numbers, and rounding hides behind the memory anyway. */
#ifndef KERNEL_FAST_ELEMENT_H
#define KERNEL_FAST_ELEMENT_H

#include "kernel/fast/simd.h"
#include <string.h>

#if !defined(LOOM_ELEMENT_BF16) && !defined(LOOM_ELEMENT_F16)

typedef float element;

/* The reference kernel of this build. */
#define SLOW(name) loom__ref_##name

INLINE vf e_load(const element *p, int64_t left) {
    return v_load(p, left);
}
INLINE void e_store(element *p, int64_t left, vf x) {
    v_store(p, left, x);
}
INLINE float e_widen(element x) {
    return x;
}

#else

#define LOOM_NARROW 1

typedef uint16_t element;

#if defined(LOOM_ELEMENT_BF16)
#define SLOW(name) loom__ref_bf16_##name
#else
#define SLOW(name) loom__ref_f16_##name
#endif

INLINE float e_widen(element x) {
#if defined(LOOM_ELEMENT_BF16)
    return loom_bf16_to_f32(x);
#else
    return loom_f16_to_f32(x);
#endif
}

#if defined(__AVX512F__)

INLINE vf e_load(const element *p, int64_t left) {
    __m256i x = left >= LANES ? _mm256_loadu_si256((const void *)p) : _mm256_maskz_loadu_epi16(v_lanes(left), p);
#if defined(LOOM_ELEMENT_BF16)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
#else
    return _mm512_cvtph_ps(x);
#endif
}

INLINE void e_store(element *p, int64_t left, vf x) {
#if defined(LOOM_ELEMENT_BF16)
    __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    __m512i half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(high, _mm512_set1_epi32(1)));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), high, _mm512_set1_epi32(0x40));
    __m256i y = _mm512_cvtepi32_epi16(rounded);
#else
    __m256i y = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
    if (left >= LANES)
        _mm256_storeu_si256((void *)p, y);
    else
        _mm256_mask_storeu_epi16(p, v_lanes(left), y);
}

#else

INLINE __m256 e_widen_half(__m128i x) {
#if defined(LOOM_ELEMENT_BF16)
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
#else
    return _mm256_cvtph_ps(x);
#endif
}

INLINE vf e_load_whole(const element *p) {
    return (vf){e_widen_half(_mm_loadu_si128((const void *)p)), e_widen_half(_mm_loadu_si128((const void *)(p + 8)))};
}

INLINE vf e_load(const element *p, int64_t left) {
    if (left >= LANES)
        return e_load_whole(p);
    element lanes[LANES] = {0};
    memcpy(lanes, p, (size_t)left * sizeof *p);
    return e_load_whole(lanes);
}

#if defined(LOOM_ELEMENT_BF16)
INLINE __m256i e_round_half(__m256 x) {
    __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(high, _mm256_set1_epi32(1)));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
#endif

INLINE void e_store_whole(element *p, vf x) {
#if defined(LOOM_ELEMENT_BF16)
    __m256i y = _mm256_permute4x64_epi64(_mm256_packus_epi32(e_round_half(x.a), e_round_half(x.b)), 0xd8);
    _mm256_storeu_si256((void *)p, y);
#else
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((void *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
#endif
}

INLINE void e_store(element *p, int64_t left, vf x) {
    if (left >= LANES) {
        e_store_whole(p, x);
        return;
    }
    element lanes[LANES];
    e_store_whole(lanes, x);
    memcpy(p, lanes, (size_t)left * sizeof *p);
}

#endif
#endif
#endif
