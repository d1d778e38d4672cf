/* The product of 16-bit elements. C is cut into the tiles of the fp32 product. A tile is computed from panels of A and
 * B that are widened into the worker's scratch, DEPTH of k at a time, with the fp32 product adding them up in fp32; a
 * tile that is kept in 16 bits is rounded once, when it is whole. So no more than two panels and a tile are ever wide.
 * Where the provider multiplies bf16 itself the tile is one call of it. Cut, depth and choice are functions of the
 * shape and the machine: the bits do not depend on the team. */
#include "kernel/gemm16.h"
#include "kernel/gemm.h"

enum {
    DEPTH = 512,
    SKEW = 16 /* floats behind each row of a panel: rows a power of two apart would share their places in the caches */
};

typedef struct product {
    const loom__narrow_form *form;
    loom_team *team;
    bool trans_a, trans_b, accumulate, native;
    int64_t k, lda, ldb, ldc;
    float alpha;
    const uint16_t *a, *b;
    uint16_t *c;
    float *c32;
    loom__gemm_cut cut;
} product;

static int64_t smaller(int64_t x, int64_t y) {
    return x < y ? x : y;
}

static void widen_panel(const product *p, int64_t rows, int64_t cols, const uint16_t *from, int64_t ld, float *to) {
    for (int64_t r = 0; r < rows; r++)
        p->form->widen(cols, from + r * ld, to + r * (cols + SKEW));
}

/* False, with nothing done, when there is no scratch or the provider gives up at once. */
static bool from_panels(
    const product *p, const loom__gemm_tile *tile, const uint16_t *a, const uint16_t *b, int worker) {
    int64_t depth = smaller(DEPTH, p->k), m = tile->m, n = tile->n, at = tile->row * p->ldc + tile->column;
    int64_t a_floats = (m + SKEW) * (depth + SKEW), b_floats = (n + SKEW) * (depth + SKEW);
    float *panel_a =
        loom_team_scratch(p->team, worker, (size_t)(a_floats + b_floats + (p->c ? m * (n + SKEW) : 0)) * sizeof(float));
    if (!panel_a)
        return false;
    float *panel_b = panel_a + a_floats, *sum = p->c ? panel_b + b_floats : p->c32 + at;
    int64_t ld_sum = p->c ? n + SKEW : p->ldc;
    for (int64_t r = 0; p->c && p->accumulate && r < m; r++)
        p->form->widen(n, p->c + at + r * p->ldc, sum + r * ld_sum);
    for (int64_t first = 0; first < p->k; first += depth) {
        int64_t k = smaller(depth, p->k - first);
        if (p->trans_a)
            widen_panel(p, k, m, a + first * p->lda, p->lda, panel_a);
        else
            widen_panel(p, m, k, a + first, p->lda, panel_a);
        if (p->trans_b)
            widen_panel(p, n, k, b + first, p->ldb, panel_b);
        else
            widen_panel(p, k, n, b + first * p->ldb, p->ldb, panel_b);
        if (!loom__sgemm(p->trans_a, p->trans_b, m, n, k, p->alpha, panel_a, (p->trans_a ? m : k) + SKEW, panel_b,
                (p->trans_b ? k : n) + SKEW, p->accumulate || first > 0, sum, ld_sum))
            return false;
    }
    for (int64_t r = 0; p->c && r < m; r++)
        p->form->narrow(n, sum + r * ld_sum, p->c + at + r * p->ldc);
    return true;
}

static void run_tile(void *argument, int64_t item, int worker) {
    const product *p = argument;
    loom__gemm_tile tile = loom__gemm_tile_of(&p->cut, item);
    const uint16_t *a = p->a + (p->trans_a ? tile.row : tile.row * p->lda);
    const uint16_t *b = p->b + (p->trans_b ? tile.column * p->ldb : tile.column);
    uint16_t *c = p->c ? p->c + tile.row * p->ldc + tile.column : NULL;
    float *c32 = p->c32 ? p->c32 + tile.row * p->ldc + tile.column : NULL;
    if (p->native && loom__gemm_bf16(p->trans_a, p->trans_b, tile.m, tile.n, p->k, p->alpha, a, p->lda, b, p->ldb,
                         p->accumulate, c, c32, p->ldc))
        return;
    if (from_panels(p, &tile, a, b, worker))
        return;
    if (c)
        p->form->gemm(NULL, p->trans_a, p->trans_b, tile.m, tile.n, p->k, p->alpha, a, p->lda, b, p->ldb, p->accumulate,
            c, p->ldc);
    else
        p->form->gemm_f32(NULL, p->trans_a, p->trans_b, tile.m, tile.n, p->k, p->alpha, a, p->lda, b, p->ldb,
            p->accumulate, c32, p->ldc);
}

void loom__gemm16(loom_team *team, const loom__narrow_form *form, bool trans_a, bool trans_b, int64_t m, int64_t n,
    int64_t k, float alpha, const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, bool accumulate,
    uint16_t *c, float *c32, int64_t ldc) {
    if (m <= 0 || n <= 0)
        return;
    if (k <= 0) {
        for (int64_t i = 0; !accumulate && i < m; i++)
            for (int64_t j = 0; j < n; j++)
                if (c)
                    c[i * ldc + j] = 0;
                else
                    c32[i * ldc + j] = 0;
        return;
    }
    bool native = form->native && loom__gemm_bf16_is_native();
    product p = {form, team, trans_a, trans_b, accumulate, native, k, lda, ldb, ldc, alpha, a, b, c, c32,
        loom__gemm_cut_of(m, n)};
    loom_team_run(team, run_tile, &p, p.cut.tiles);
}
