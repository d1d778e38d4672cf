/* The matrix product of the optimized tables: provider tiles run by the team. */
#ifndef KERNEL_GEMM_H
#define KERNEL_GEMM_H

#include <megaloom/kernels.h>

/* Once before the first product: called wherever a table with loom__gemm is handed out, which is before the ranks of a
 * run start. Switches OpenBLAS's own threading off for the process. */
void loom__gemm_prepare(void);
void loom__gemm(loom_team *team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
    const float *a, int64_t lda, const float *b, int64_t ldb, bool accumulate, float *c, int64_t ldc);
void loom__gemm_grouped(loom_team *team, bool trans_a, bool trans_b, int64_t count, const loom_product *products,
    int64_t lda, int64_t ldb, int64_t ldc);

/* One product in the calling thread; false, with nothing done, where the provider cannot. */
bool loom__sgemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
    const float *b, int64_t ldb, bool accumulate, float *c, int64_t ldc);

#if defined(MEGALOOM_GEMM_DNNL)
/* Around calls of oneDNN: one thread of OpenMP, and what it was before. */
int loom__gemm_begin_alone(void);
void loom__gemm_end_alone(int before);
#endif

/* How the C of a group of products are cut into tiles: a function of their shapes alone. */
typedef struct loom__gemm_group {
    int64_t tile_m, tile_n; /* the longest sides */
    int64_t tiles;          /* of all products */
} loom__gemm_group;

typedef struct loom__gemm_tile {
    int64_t row, column, m, n;
} loom__gemm_tile;

loom__gemm_group loom__gemm_group_of(int64_t count, const loom_product *products);
/* Tile `item` of the group, and whose it is. */
const loom_product *loom__gemm_tile_of(
    const loom__gemm_group *group, const loom_product *products, int64_t item, loom__gemm_tile *tile);

#endif
