/* Small matrix products inside the cache, for attention's tiles: C[m,n] (+)= A B with B and C row-major and n a
 * multiple of LANES, and A read one element at a time with any strides (so that A may be transposed for nothing). Each
 * element of C is one chain of fused multiply-adds over k in order, whatever the registers' blocking, so every build
 * gives the same bits. */
#ifndef KERNEL_FAST_TILE_H
#define KERNEL_FAST_TILE_H

#include "kernel/fast/simd.h"

#if defined(__AVX512F__)
enum { TILE_ROWS = 8, TILE_VECTORS = 2 };
#else
enum { TILE_ROWS = 6, TILE_VECTORS = 1 };
#endif

/* rows and vectors are constants wherever this is used. */
INLINE void tile_step(int rows, int vectors, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b,
    int64_t ldb, bool add, float *c, int64_t ldc) {
    vf sum[TILE_ROWS][TILE_VECTORS];
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++)
            sum[i][j] = add ? v_load(c + i * ldc + j * LANES, LANES) : v_zero();
    }
    for (int64_t l = 0; l < k; l++) {
        vf right[TILE_VECTORS];
        UNROLL
        for (int j = 0; j < vectors; j++)
            right[j] = v_load(b + l * ldb + j * LANES, LANES);
        UNROLL
        for (int i = 0; i < rows; i++) {
            vf left = v_set(a[i * a_row + l * a_k]);
            UNROLL
            for (int j = 0; j < vectors; j++)
                sum[i][j] = v_fma(left, right[j], sum[i][j]);
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++)
            v_store(c + i * ldc + j * LANES, LANES, sum[i][j]);
    }
}

INLINE void tile_column(int vectors, int64_t m, int64_t k, const float *a, int64_t a_row, int64_t a_k, const float *b,
    int64_t ldb, bool add, float *c, int64_t ldc) {
    int64_t i = 0;
    for (; i + TILE_ROWS <= m; i += TILE_ROWS)
        tile_step(TILE_ROWS, vectors, k, a + i * a_row, a_row, a_k, b, ldb, add, c + i * ldc, ldc);
    for (; i + 4 <= m; i += 4)
        tile_step(4, vectors, k, a + i * a_row, a_row, a_k, b, ldb, add, c + i * ldc, ldc);
    for (; i < m; i++)
        tile_step(1, vectors, k, a + i * a_row, a_row, a_k, b, ldb, add, c + i * ldc, ldc);
}

static inline void tile_product(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_k,
    const float *b, int64_t ldb, bool add, float *c, int64_t ldc) {
    int64_t j = 0;
    for (; j + TILE_VECTORS * LANES <= n; j += TILE_VECTORS * LANES)
        tile_column(TILE_VECTORS, m, k, a, a_row, a_k, b + j, ldb, add, c + j, ldc);
    for (; j < n; j += LANES)
        tile_column(1, m, k, a, a_row, a_k, b + j, ldb, add, c + j, ldc);
}

INLINE void transpose_square(const float *from, int64_t ld_from, float *to, int64_t ld_to) {
    __m128 x0 = _mm_loadu_ps(from), x1 = _mm_loadu_ps(from + ld_from);
    __m128 x2 = _mm_loadu_ps(from + 2 * ld_from), x3 = _mm_loadu_ps(from + 3 * ld_from);
    _MM_TRANSPOSE4_PS(x0, x1, x2, x3);
    _mm_storeu_ps(to, x0);
    _mm_storeu_ps(to + ld_to, x1);
    _mm_storeu_ps(to + 2 * ld_to, x2);
    _mm_storeu_ps(to + 3 * ld_to, x3);
}

INLINE void transpose_rest(
    int64_t r, int64_t r_end, int64_t c, int64_t c_end, const float *from, int64_t ld_from, float *to, int64_t ld_to) {
    for (; r < r_end; r++)
        for (int64_t i = c; i < c_end; i++)
            to[i * ld_to + r] = from[r * ld_from + i];
}

/* to[c][r] = from[r][c], for r < rows, c < cols; reads a row of `from` whole before the next, which is what rows that
 * lie far apart want. */
static inline void transpose_from_rows(
    int64_t rows, int64_t cols, const float *from, int64_t ld_from, float *to, int64_t ld_to) {
    int64_t whole_rows = rows / 4 * 4, whole_cols = cols / 4 * 4;
    for (int64_t r = 0; r < whole_rows; r += 4) {
        for (int64_t c = 0; c < whole_cols; c += 4)
            transpose_square(from + r * ld_from + c, ld_from, to + c * ld_to + r, ld_to);
        transpose_rest(r, r + 4, whole_cols, cols, from, ld_from, to, ld_to);
    }
    transpose_rest(whole_rows, rows, 0, cols, from, ld_from, to, ld_to);
}

/* The same, writing a row of `to` whole before the next. */
static inline void transpose_to_rows(
    int64_t rows, int64_t cols, const float *from, int64_t ld_from, float *to, int64_t ld_to) {
    int64_t whole_rows = rows / 4 * 4, whole_cols = cols / 4 * 4;
    for (int64_t c = 0; c < whole_cols; c += 4) {
        for (int64_t r = 0; r < whole_rows; r += 4)
            transpose_square(from + r * ld_from + c, ld_from, to + c * ld_to + r, ld_to);
        transpose_rest(whole_rows, rows, c, c + 4, from, ld_from, to, ld_to);
    }
    transpose_rest(0, rows, whole_cols, cols, from, ld_from, to, ld_to);
}

#endif
