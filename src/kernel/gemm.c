/* A matrix product is cut into tiles of C, each one single-threaded call of the BLAS that the build chose, run as an
 * item of the team. The cut is a function of (m, n) alone and k is never cut, so the bits do not depend on the team.
 * The provider's own threading is off. OpenMP's setting is the thread's own: it is changed around each call of oneDNN
 * and put back, since the caller may have uses for it. OpenBLAS has one setting for the process, which no team thread
 * may touch: it is set when a table is chosen, and stays. */
#include "kernel/gemm.h"
#include "kernel/ref/ref.h"
#if defined(MEGALOOM_GEMM_DNNL)
#include <dnnl.h>
#else
#include <cblas.h>
#endif
#include <limits.h>

enum {
    TILE = 512,     /* a side of the largest tile: the provider is at its best from 256 on */
    TILE_MIN = 128, /* a side is not halved below this */
    TILES = 16      /* tiles wanted before sides stop shrinking: work for every thread of a team */
};

typedef struct product {
    bool trans_a, trans_b, accumulate;
    int64_t k, lda, ldb, ldc;
    float alpha;
    const float *a, *b;
    float *c;
    loom__gemm_cut cut;
} product;

#if defined(MEGALOOM_GEMM_DNNL)
/* oneDNN may be built on any OpenMP runtime or on none; these are null then. */
extern int omp_get_max_threads(void) __attribute__((weak));
extern void omp_set_num_threads(int threads) __attribute__((weak));

void loom__gemm_prepare(void) {}

int loom__gemm_begin_alone(void) {
    int before = omp_get_max_threads && omp_set_num_threads ? omp_get_max_threads() : 0;
    if (before > 1)
        omp_set_num_threads(1);
    return before;
}

void loom__gemm_end_alone(int before) {
    if (before > 1)
        omp_set_num_threads(before);
}

bool loom__sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
    const float *b, int64_t ldb, bool accumulate, float *c, int64_t ldc) {
    int before = loom__gemm_begin_alone();
    dnnl_status_t status = dnnl_sgemm(
        trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', m, n, k, alpha, a, lda, b, ldb, accumulate ? 1.0f : 0.0f, c, ldc);
    loom__gemm_end_alone(before);
    return status == dnnl_success;
}
#else
extern int openblas_get_num_threads(void);
extern void openblas_set_num_threads(int threads);

void loom__gemm_prepare(void) {
    if (openblas_get_num_threads() != 1)
        openblas_set_num_threads(1);
}

bool loom__sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
    const float *b, int64_t ldb, bool accumulate, float *c, int64_t ldc) {
    if (k > INT_MAX || lda > INT_MAX || ldb > INT_MAX || ldc > INT_MAX)
        return false;
    cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans, trans_b ? CblasTrans : CblasNoTrans, (int)m, (int)n,
        (int)k, alpha, a, (int)lda, b, (int)ldb, accumulate ? 1.0f : 0.0f, c, (int)ldc);
    return true;
}
#endif

static int64_t smaller(int64_t x, int64_t y) {
    return x < y ? x : y;
}

static int64_t tiles_of(int64_t size, int64_t tile) {
    return (size + tile - 1) / tile;
}

/* Tiles of equal size rather than full ones and a narrow rest; multiples of 16 suit every vector width. */
static int64_t even_tile(int64_t size, int64_t tile) {
    int64_t even = tiles_of(size, tiles_of(size, tile));
    return (even + 15) / 16 * 16;
}

loom__gemm_cut loom__gemm_cut_of(int64_t m, int64_t n) {
    int64_t tile_m = TILE, tile_n = TILE;
    while (tiles_of(m, tile_m) * tiles_of(n, tile_n) < TILES &&
           (smaller(m, tile_m) > TILE_MIN || smaller(n, tile_n) > TILE_MIN)) {
        if (smaller(m, tile_m) >= smaller(n, tile_n))
            tile_m /= 2;
        else
            tile_n /= 2;
    }
    loom__gemm_cut cut = {m, n, even_tile(m, tile_m), even_tile(n, tile_n), 0, 0};
    cut.tiles_n = tiles_of(n, cut.tile_n);
    cut.tiles = tiles_of(m, cut.tile_m) * cut.tiles_n;
    return cut;
}

loom__gemm_tile loom__gemm_tile_of(const loom__gemm_cut *cut, int64_t item) {
    int64_t row = item / cut->tiles_n * cut->tile_m, column = item % cut->tiles_n * cut->tile_n;
    return (loom__gemm_tile){row, column, smaller(cut->tile_m, cut->m - row), smaller(cut->tile_n, cut->n - column)};
}

static void run_tile(void *argument, int64_t item, int worker) {
    const product *p = argument;
    loom__gemm_tile tile = loom__gemm_tile_of(&p->cut, item);
    (void)worker;
    const float *a = p->a + (p->trans_a ? tile.row : tile.row * p->lda);
    const float *b = p->b + (p->trans_b ? tile.column * p->ldb : tile.column);
    float *c = p->c + tile.row * p->ldc + tile.column;
    if (!loom__sgemm(
            p->trans_a, p->trans_b, tile.m, tile.n, p->k, p->alpha, a, p->lda, b, p->ldb, p->accumulate, c, p->ldc))
        loom__ref_gemm(NULL, p->trans_a, p->trans_b, tile.m, tile.n, p->k, p->alpha, a, p->lda, b, p->ldb,
            p->accumulate, c, p->ldc);
}

void loom__gemm(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
    const float *a, int64_t lda, const float *b, int64_t ldb, bool accumulate, float *c, int64_t ldc) {
    if (m <= 0 || n <= 0)
        return;
    if (k <= 0) {
        for (int64_t i = 0; !accumulate && i < m; i++)
            for (int64_t j = 0; j < n; j++)
                c[i * ldc + j] = 0;
        return;
    }
    product p = {trans_a, trans_b, accumulate, k, lda, ldb, ldc, alpha, a, b, c, loom__gemm_cut_of(m, n)};
    loom_team_run(team, run_tile, &p, p.cut.tiles);
}
