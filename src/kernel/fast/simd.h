/* Sixteen float lanes on either instruction set: one AVX-512 register or two AVX2 ones. All fast kernels are written
 * for these, once, and compiled for each set; every operation is correctly rounded or exact and lanes are always added
 * in the same tree, so both builds give the same bits. Loads and stores take the number of elements left: a short
 * vector is the same code with lanes switched off (zeros in, nothing out), never a scalar tail. */
#ifndef KERNEL_FAST_SIMD_H
#define KERNEL_FAST_SIMD_H

#include <immintrin.h>
#include <megaloom/kernels.h>

/* The name of a function of this build: FAST(add) is loom__avx512_add. */
#define LOOM__PASTE2(isa, name) loom__##isa##_##name
#define LOOM__PASTE(isa, name) LOOM__PASTE2(isa, name)
#define FAST(name) LOOM__PASTE(LOOM_ISA, name)

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };

#if defined(__AVX512F__)

typedef __m512 vf;
typedef __m512i vi; /* 16 x 32 bits */
typedef __mmask16 vm;

INLINE vm v_lanes(int64_t left) {
    return (vm)((1u << left) - 1u);
}

INLINE vf v_load(const float *p, int64_t left) {
    return left >= LANES ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(v_lanes(left), p);
}
INLINE void v_store(float *p, int64_t left, vf x) {
    if (left >= LANES)
        _mm512_storeu_ps(p, x);
    else
        _mm512_mask_storeu_ps(p, v_lanes(left), x);
}
/* x in the lanes that are left, 0 in the others */
INLINE vf v_keep(int64_t left, vf x) {
    return left >= LANES ? x : _mm512_maskz_mov_ps(v_lanes(left), x);
}
INLINE vf v_set(float x) {
    return _mm512_set1_ps(x);
}
INLINE vf v_zero(void) {
    return _mm512_setzero_ps();
}
INLINE vf v_add(vf a, vf b) {
    return _mm512_add_ps(a, b);
}
INLINE vf v_sub(vf a, vf b) {
    return _mm512_sub_ps(a, b);
}
INLINE vf v_mul(vf a, vf b) {
    return _mm512_mul_ps(a, b);
}
INLINE vf v_div(vf a, vf b) {
    return _mm512_div_ps(a, b);
}
INLINE vf v_sqrt(vf a) {
    return _mm512_sqrt_ps(a);
}
/* a b + c, and c - a b, rounded once */
INLINE vf v_fma(vf a, vf b, vf c) {
    return _mm512_fmadd_ps(a, b, c);
}
INLINE vf v_fnma(vf a, vf b, vf c) {
    return _mm512_fnmadd_ps(a, b, c);
}
/* b where either is NaN */
INLINE vf v_max(vf a, vf b) {
    return _mm512_max_ps(a, b);
}
INLINE vf v_min(vf a, vf b) {
    return _mm512_min_ps(a, b);
}
INLINE vf v_abs(vf a) {
    return _mm512_abs_ps(a);
}
INLINE vf v_round(vf a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* x 2^n, n whole */
INLINE vf v_scale2(vf x, vf n) {
    return _mm512_scalef_ps(x, n);
}

INLINE vm v_less(vf a, vf b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
INLINE vm v_equal(vf a, vf b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
INLINE vf v_select(vm m, vf yes, vf no) {
    return _mm512_mask_blend_ps(m, no, yes);
}
INLINE vm vm_and(vm a, vm b) {
    return a & b;
}
INLINE bool vm_any(vm a) {
    return a != 0;
}

INLINE vi vi_set(uint32_t x) {
    return _mm512_set1_epi32((int)x);
}
INLINE vi vi_load(const void *p) {
    return _mm512_loadu_si512(p);
}
INLINE vi vi_xor(vi a, vi b) {
    return _mm512_xor_si512(a, b);
}
INLINE vi vi_and(vi a, vi b) {
    return _mm512_and_si512(a, b);
}
INLINE vm vi_greater(vi a, vi b) {
    return _mm512_cmpgt_epi32_mask(a, b);
} /* signed */
INLINE vm vi_equal(vi a, vi b) {
    return _mm512_cmpeq_epi32_mask(a, b);
}
INLINE vm vi_below(vi a, vi b) {
    return _mm512_cmplt_epu32_mask(a, b);
} /* unsigned */
INLINE vi vi_bits(vf a) {
    return _mm512_castps_si512(a);
}
/* the low and high halves of the 64-bit products */
INLINE void vi_multiply(vi a, vi b, vi *low, vi *high) {
    __m512i even = _mm512_mul_epu32(a, b);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    *low = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
    *high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
}

INLINE __m256 v_half0(vf a) {
    return _mm512_castps512_ps256(a);
}
INLINE __m256 v_half1(vf a) {
    return _mm512_extractf32x8_ps(a, 1);
}

#else

typedef struct vf {
    __m256 a, b;
} vf;
typedef struct vi {
    __m256i a, b;
} vi;
typedef vi vm; /* a lane is all ones or all zeros */

INLINE vm v_lanes(int64_t left) {
    __m256i wanted = _mm256_set1_epi32((int)left);
    return (vm){_mm256_cmpgt_epi32(wanted, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
        _mm256_cmpgt_epi32(wanted, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}

INLINE vf v_load(const float *p, int64_t left) {
    if (left >= LANES)
        return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
    vm lanes = v_lanes(left);
    return (vf){_mm256_maskload_ps(p, lanes.a), _mm256_maskload_ps(p + 8, lanes.b)};
}
INLINE void v_store(float *p, int64_t left, vf x) {
    if (left >= LANES) {
        _mm256_storeu_ps(p, x.a);
        _mm256_storeu_ps(p + 8, x.b);
    } else {
        vm lanes = v_lanes(left);
        _mm256_maskstore_ps(p, lanes.a, x.a);
        _mm256_maskstore_ps(p + 8, lanes.b, x.b);
    }
}
/* x in the lanes that are left, 0 in the others */
INLINE vf v_keep(int64_t left, vf x) {
    if (left >= LANES)
        return x;
    vm lanes = v_lanes(left);
    return (vf){_mm256_and_ps(x.a, _mm256_castsi256_ps(lanes.a)), _mm256_and_ps(x.b, _mm256_castsi256_ps(lanes.b))};
}
INLINE vf v_set(float x) {
    return (vf){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
INLINE vf v_zero(void) {
    return (vf){_mm256_setzero_ps(), _mm256_setzero_ps()};
}
INLINE vf v_add(vf a, vf b) {
    return (vf){_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)};
}
INLINE vf v_sub(vf a, vf b) {
    return (vf){_mm256_sub_ps(a.a, b.a), _mm256_sub_ps(a.b, b.b)};
}
INLINE vf v_mul(vf a, vf b) {
    return (vf){_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)};
}
INLINE vf v_div(vf a, vf b) {
    return (vf){_mm256_div_ps(a.a, b.a), _mm256_div_ps(a.b, b.b)};
}
INLINE vf v_sqrt(vf a) {
    return (vf){_mm256_sqrt_ps(a.a), _mm256_sqrt_ps(a.b)};
}
/* a b + c, and c - a b, rounded once */
INLINE vf v_fma(vf a, vf b, vf c) {
    return (vf){_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
}
INLINE vf v_fnma(vf a, vf b, vf c) {
    return (vf){_mm256_fnmadd_ps(a.a, b.a, c.a), _mm256_fnmadd_ps(a.b, b.b, c.b)};
}
/* b where either is NaN */
INLINE vf v_max(vf a, vf b) {
    return (vf){_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)};
}
INLINE vf v_min(vf a, vf b) {
    return (vf){_mm256_min_ps(a.a, b.a), _mm256_min_ps(a.b, b.b)};
}
INLINE vf v_abs(vf a) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return (vf){_mm256_andnot_ps(sign, a.a), _mm256_andnot_ps(sign, a.b)};
}
INLINE vf v_round(vf a) {
    return (vf){_mm256_round_ps(a.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
        _mm256_round_ps(a.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
/* x 2^n in two exact factors, so that results below the normal range round once */
INLINE __m256 v_scale2_half(__m256 x, __m256 n) {
    __m256i whole = _mm256_cvtps_epi32(n), first = _mm256_srai_epi32(whole, 1), second = _mm256_sub_epi32(whole, first);
    __m256i bias = _mm256_set1_epi32(127);
    x = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23)));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23)));
}
/* x 2^n, n whole and within -252 … 254 */
INLINE vf v_scale2(vf x, vf n) {
    return (vf){v_scale2_half(x.a, n.a), v_scale2_half(x.b, n.b)};
}

INLINE vm v_less(vf a, vf b) {
    return (vm){_mm256_castps_si256(_mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
        _mm256_castps_si256(_mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
INLINE vm v_equal(vf a, vf b) {
    return (vm){_mm256_castps_si256(_mm256_cmp_ps(a.a, b.a, _CMP_EQ_OQ)),
        _mm256_castps_si256(_mm256_cmp_ps(a.b, b.b, _CMP_EQ_OQ))};
}
INLINE vf v_select(vm m, vf yes, vf no) {
    return (vf){_mm256_blendv_ps(no.a, yes.a, _mm256_castsi256_ps(m.a)),
        _mm256_blendv_ps(no.b, yes.b, _mm256_castsi256_ps(m.b))};
}
INLINE vm vm_and(vm a, vm b) {
    return (vm){_mm256_and_si256(a.a, b.a), _mm256_and_si256(a.b, b.b)};
}
INLINE bool vm_any(vm a) {
    return _mm256_movemask_epi8(_mm256_or_si256(a.a, a.b)) != 0;
}

INLINE vi vi_set(uint32_t x) {
    return (vi){_mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x)};
}
INLINE vi vi_load(const void *p) {
    return (vi){_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i_u *)p + 1)};
}
INLINE vi vi_xor(vi a, vi b) {
    return (vi){_mm256_xor_si256(a.a, b.a), _mm256_xor_si256(a.b, b.b)};
}
INLINE vi vi_and(vi a, vi b) {
    return (vi){_mm256_and_si256(a.a, b.a), _mm256_and_si256(a.b, b.b)};
}
INLINE vm vi_greater(vi a, vi b) { /* signed */
    return (vm){_mm256_cmpgt_epi32(a.a, b.a), _mm256_cmpgt_epi32(a.b, b.b)};
}
INLINE vm vi_equal(vi a, vi b) {
    return (vm){_mm256_cmpeq_epi32(a.a, b.a), _mm256_cmpeq_epi32(a.b, b.b)};
}
INLINE vm vi_below(vi a, vi b) { /* unsigned: flipping the top bit makes it a signed comparison */
    vi top = vi_set(0x80000000u);
    return vi_greater(vi_xor(b, top), vi_xor(a, top));
}
INLINE vi vi_bits(vf a) {
    return (vi){_mm256_castps_si256(a.a), _mm256_castps_si256(a.b)};
}
INLINE void vi_multiply_half(__m256i a, __m256i b, __m256i *low, __m256i *high) {
    __m256i even = _mm256_mul_epu32(a, b);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
/* the low and high halves of the 64-bit products */
INLINE void vi_multiply(vi a, vi b, vi *low, vi *high) {
    vi_multiply_half(a.a, b.a, &low->a, &high->a);
    vi_multiply_half(a.b, b.b, &low->b, &high->b);
}

INLINE __m256 v_half0(vf a) {
    return a.a;
}
INLINE __m256 v_half1(vf a) {
    return a.b;
}

#endif

/* The sum of all lanes: halves, quarters, pairs. */
INLINE float v_sum(vf x) {
    __m256 eight = _mm256_add_ps(v_half0(x), v_half1(x));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* The largest lane. No lane may be NaN. */
INLINE float v_largest(vf x) {
    __m256 eight = _mm256_max_ps(v_half0(x), v_half1(x));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#endif
