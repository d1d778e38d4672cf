/* The product of 16-bit elements. C is cut into the tiles of the fp32 product. A tile is computed from panels of A and
 * B that are widened into the worker's scratch, DEPTH of k at a time, with the fp32 product adding them up in fp32; a
 * tile that is kept in 16 bits is rounded once, when it is whole. So no more than two panels and a tile are ever wide.
 * Where the provider multiplies bf16 itself the tile is one call of it. Cut, depth and choice are functions of the
 * shape and the machine: the bits do not depend on the team. */
#include "kernel/gemm16.h"
#include "kernel/gemm.h"
#include <string.h>

enum {
    DEPTH = 512,
    SKEW = 16 /* floats behind each row of a panel: rows a power of two apart would share their places in the caches */
};

typedef struct call {
    const loom__narrow_form *form;
    loom_team *team;
    bool trans_a, trans_b, native, wide; /* wide: C is fp32 */
    int64_t lda, ldb, ldc;
    float alpha;
    const loom_product *products;
    loom__gemm_group cut;
} call;

/* A tile of one product. */
typedef struct part {
    int64_t m, n, k;
    const uint16_t *a, *b;
    uint16_t *c; /* NULL where C is fp32 */
    float *c32;
    bool accumulate;
} part;

static int64_t smaller(int64_t x, int64_t y) {
    return x < y ? x : y;
}

static void widen_panel(const call *g, int64_t rows, int64_t cols, const uint16_t *from, int64_t ld, float *to) {
    for (int64_t r = 0; r < rows; r++)
        g->form->widen(cols, from + r * ld, to + r * (cols + SKEW));
}

/* False, with nothing done, when there is no scratch or the provider gives up at once. */
static bool from_panels(const call *g, const part *p, int worker) {
    int64_t depth = smaller(DEPTH, p->k), m = p->m, n = p->n;
    int64_t a_floats = (m + SKEW) * (depth + SKEW), b_floats = (n + SKEW) * (depth + SKEW);
    float *panel_a =
        loom_team_scratch(g->team, worker, (size_t)(a_floats + b_floats + (p->c ? m * (n + SKEW) : 0)) * sizeof(float));
    if (!panel_a)
        return false;
    float *panel_b = panel_a + a_floats, *sum = p->c ? panel_b + b_floats : p->c32;
    int64_t ld_sum = p->c ? n + SKEW : g->ldc;
    for (int64_t r = 0; p->c && p->accumulate && r < m; r++)
        g->form->widen(n, p->c + r * g->ldc, sum + r * ld_sum);
    for (int64_t first = 0; first < p->k; first += depth) {
        int64_t k = smaller(depth, p->k - first);
        if (g->trans_a)
            widen_panel(g, k, m, p->a + first * g->lda, g->lda, panel_a);
        else
            widen_panel(g, m, k, p->a + first, g->lda, panel_a);
        if (g->trans_b)
            widen_panel(g, n, k, p->b + first, g->ldb, panel_b);
        else
            widen_panel(g, k, n, p->b + first * g->ldb, g->ldb, panel_b);
        if (!loom__sgemm(g->trans_a, g->trans_b, m, n, k, g->alpha, panel_a, (g->trans_a ? m : k) + SKEW, panel_b,
                (g->trans_b ? k : n) + SKEW, p->accumulate || first > 0, sum, ld_sum))
            return false;
    }
    for (int64_t r = 0; p->c && r < m; r++)
        g->form->narrow(n, sum + r * ld_sum, p->c + r * g->ldc);
    return true;
}

static void set_to_zero(const call *g, const part *p) {
    for (int64_t r = 0; r < p->m; r++)
        if (p->c)
            memset(p->c + r * g->ldc, 0, (size_t)p->n * sizeof *p->c);
        else
            memset(p->c32 + r * g->ldc, 0, (size_t)p->n * sizeof *p->c32);
}

static void run_tile(void *argument, int64_t item, int worker) {
    const call *g = argument;
    loom__gemm_tile tile;
    const loom_product *of = loom__gemm_tile_of(&g->cut, g->products, item, &tile);
    const int64_t at = tile.row * g->ldc + tile.column;
    const part p = {tile.m, tile.n, of->k, (const uint16_t *)of->a + (g->trans_a ? tile.row : tile.row * g->lda),
        (const uint16_t *)of->b + (g->trans_b ? tile.column * g->ldb : tile.column),
        g->wide ? NULL : (uint16_t *)of->c + at, g->wide ? (float *)of->c + at : NULL, of->accumulate};
    if (p.k <= 0) {
        if (!p.accumulate)
            set_to_zero(g, &p);
        return;
    }
    if (g->native && loom__gemm_bf16(g->trans_a, g->trans_b, p.m, p.n, p.k, g->alpha, p.a, g->lda, p.b, g->ldb,
                         p.accumulate, p.c, p.c32, g->ldc))
        return;
    if (from_panels(g, &p, worker))
        return;
    if (p.c)
        g->form->gemm(
            NULL, g->trans_a, g->trans_b, p.m, p.n, p.k, g->alpha, p.a, g->lda, p.b, g->ldb, p.accumulate, p.c, g->ldc);
    else
        g->form->gemm_f32(NULL, g->trans_a, g->trans_b, p.m, p.n, p.k, g->alpha, p.a, g->lda, p.b, g->ldb, p.accumulate,
            p.c32, g->ldc);
}

void loom__gemm16_grouped(loom_team *team, const loom__narrow_form *form, bool trans_a, bool trans_b, float alpha,
    int64_t count, const loom_product *products, int64_t lda, int64_t ldb, bool wide, int64_t ldc) {
    bool native = form->native && loom__gemm_bf16_is_native();
    call g = {form, team, trans_a, trans_b, native, wide, lda, ldb, ldc, alpha, products,
        loom__gemm_group_of(count, products)};
    loom_team_run(team, run_tile, &g, g.cut.tiles);
}

void loom__gemm16(loom_team *team, const loom__narrow_form *form, bool trans_a, bool trans_b, int64_t m, int64_t n,
    int64_t k, float alpha, const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, bool accumulate,
    uint16_t *c, float *c32, int64_t ldc) {
    const loom_product p = {m, n, k, a, b, c ? (void *)c : (void *)c32, accumulate};
    loom__gemm16_grouped(team, form, trans_a, trans_b, alpha, 1, &p, lda, ldb, !c, ldc);
}
