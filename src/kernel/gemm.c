/* A matrix product is cut into tiles of C, each one single-threaded call of the BLAS that the build chose, run as an
 * item of the team. The cut is a function of (m, n) alone and k is never cut, so the bits do not depend on the team.
 * Products of a group are cut alike, into so many tiles together as one has alone, and all their tiles are one run: a
 * thread waits for the others once and not behind each product, and small products have large tiles.
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
#include <string.h>

enum {
    TILE = 512,     /* a side of the largest tile: the provider is at its best from 256 on */
    TILE_MIN = 128, /* a side is not halved below this */
    TILES = 16      /* tiles wanted before sides stop shrinking: work for every thread of a team */
};

typedef struct call {
    bool trans_a, trans_b;
    int64_t lda, ldb, ldc;
    float alpha;
    const loom_product *products;
    loom__gemm_group cut;
} call;

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

/* How one C [m, n] is cut. */
typedef struct cut {
    int64_t m, n, tile_m, tile_n, tiles_n, tiles;
} cut;

static int64_t tiles_of(int64_t size, int64_t tile) {
    return (size + tile - 1) / tile;
}

/* Tiles of equal size rather than full ones and a narrow rest; multiples of 16 suit every vector width. */
static int64_t even_tile(int64_t size, int64_t tile) {
    int64_t even = tiles_of(size, tiles_of(size, tile));
    return (even + 15) / 16 * 16;
}

static cut cut_of(const loom__gemm_group *group, const loom_product *p) {
    cut made = {.m = p->m, .n = p->n};
    if (p->m <= 0 || p->n <= 0)
        return made;
    made.tile_m = even_tile(p->m, group->tile_m);
    made.tile_n = even_tile(p->n, group->tile_n);
    made.tiles_n = tiles_of(p->n, made.tile_n);
    made.tiles = tiles_of(p->m, made.tile_m) * made.tiles_n;
    return made;
}

loom__gemm_group loom__gemm_group_of(int64_t count, const loom_product *products) {
    loom__gemm_group group = {TILE, TILE, 0};
    int64_t m = 0, n = 0;
    for (int64_t i = 0; i < count; i++) {
        m = products[i].m > m ? products[i].m : m;
        n = products[i].n > n ? products[i].n : n;
    }
    for (;;) {
        int64_t tiles = 0;
        for (int64_t i = 0; i < count; i++)
            tiles += products[i].m > 0 && products[i].n > 0
                         ? tiles_of(products[i].m, group.tile_m) * tiles_of(products[i].n, group.tile_n)
                         : 0;
        if (tiles >= TILES || (smaller(m, group.tile_m) <= TILE_MIN && smaller(n, group.tile_n) <= TILE_MIN))
            break;
        if (smaller(m, group.tile_m) >= smaller(n, group.tile_n))
            group.tile_m /= 2;
        else
            group.tile_n /= 2;
    }
    for (int64_t i = 0; i < count; i++)
        group.tiles += cut_of(&group, &products[i]).tiles;
    return group;
}

const loom_product *loom__gemm_tile_of(
    const loom__gemm_group *group, const loom_product *products, int64_t item, loom__gemm_tile *tile) {
    cut now = cut_of(group, products);
    for (; item >= now.tiles; now = cut_of(group, products)) {
        item -= now.tiles;
        products++;
    }
    int64_t row = item / now.tiles_n * now.tile_m, column = item % now.tiles_n * now.tile_n;
    *tile = (loom__gemm_tile){row, column, smaller(now.tile_m, now.m - row), smaller(now.tile_n, now.n - column)};
    return products;
}

static void run_tile(void *argument, int64_t item, int worker) {
    const call *g = argument;
    loom__gemm_tile tile;
    const loom_product *p = loom__gemm_tile_of(&g->cut, g->products, item, &tile);
    (void)worker;
    float *c = (float *)p->c + tile.row * g->ldc + tile.column;
    if (p->k <= 0) {
        for (int64_t i = 0; !p->accumulate && i < tile.m; i++)
            memset(c + i * g->ldc, 0, (size_t)tile.n * sizeof *c);
        return;
    }
    const float *a = (const float *)p->a + (g->trans_a ? tile.row : tile.row * g->lda);
    const float *b = (const float *)p->b + (g->trans_b ? tile.column * g->ldb : tile.column);
    if (!loom__sgemm(
            g->trans_a, g->trans_b, tile.m, tile.n, p->k, g->alpha, a, g->lda, b, g->ldb, p->accumulate, c, g->ldc))
        loom__ref_gemm(NULL, g->trans_a, g->trans_b, tile.m, tile.n, p->k, g->alpha, a, g->lda, b, g->ldb,
            p->accumulate, c, g->ldc);
}

void loom__gemm_grouped(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
    int64_t lda, int64_t ldb, int64_t ldc) {
    call g = {trans_a, trans_b, lda, ldb, ldc, 1, products, loom__gemm_group_of(count, products)};
    loom_team_run(team, run_tile, &g, g.cut.tiles);
}

void loom__gemm(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
    const float *a, int64_t lda, const float *b, int64_t ldb, bool accumulate, float *c, int64_t ldc) {
    const loom_product p = {m, n, k, a, b, c, accumulate};
    call g = {trans_a, trans_b, lda, ldb, ldc, alpha, &p, loom__gemm_group_of(1, &p)};
    loom_team_run(team, run_tile, &g, g.cut.tiles);
}
