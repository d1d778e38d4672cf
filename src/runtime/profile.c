/* The profiler of a rank: one clock, read wherever the rank goes from one operation to another; what has passed goes to
 * the operation that was left. Invariant: each moment since begin belongs to exactly one entry. The kernels are watched
 * by a table of wrappers, one for every kernel, which know their counts of operations and bytes; as a kernel gets only
 * a team, that is where a wrapper finds its profiler. */
#include "base/team.h"
#include "runtime/rank.h"
#include <stdlib.h>
#include <string.h>

typedef struct loom__profiler profiler;

struct loom__profiler {
    const loom_kernels *kernels; /* those that do the work */
    loom__comm_watch watch;
    loom_profile_phase phase;
    loom_profile_entry *entries;
    int64_t count, capacity;
    int64_t current; /* entry that the time goes to */
    int64_t outer;   /* the one before the collective that is entered */
    uint64_t began, last;
};

enum { REST = 0 }; /* the first LOOM_PROFILE_PHASE_COUNT entries are the rests of the phases */

const char *loom_profile_phase_name(loom_profile_phase phase) {
    static const char *const names[] = {
#define NAME(name, text) text,
        LOOM_PROFILE_PHASE_LIST(NAME)
#undef NAME
    };
    return phase >= 0 && phase < LOOM_PROFILE_PHASE_COUNT ? names[phase] : "?";
}

/* ---- the clock ---- */

static int64_t go_to(profiler *p, int64_t entry) {
    uint64_t now = loom__clock();
    int64_t before = p->current;
    p->entries[before].seconds += (double)(now - p->last) * 1e-9;
    p->last = now;
    p->current = entry;
    return before;
}

/* The entry of an operation in this phase. One that finds no memory is counted with the rest. Operations' names are
 * constants, so that they are the same when their addresses are. */
static int64_t entry_of(profiler *p, const char *operation, const char *group) {
    for (int64_t i = 0; i < p->count; i++)
        if (p->entries[i].operation == operation && p->entries[i].phase == p->phase &&
            strcmp(p->entries[i].group, group) == 0)
            return i;
    if (p->count == p->capacity) {
        void *grown = realloc(p->entries, (size_t)(2 * p->capacity) * sizeof *p->entries);
        if (!grown)
            return REST + (int64_t)p->phase;
        p->entries = grown;
        p->capacity *= 2;
    }
    loom_profile_entry *made = &p->entries[p->count];
    *made = (loom_profile_entry){.phase = p->phase, .operation = operation};
    strncpy(made->group, group, sizeof made->group - 1);
    return p->count++;
}

static void count_call(profiler *p, int64_t entry, double flops, double bytes) {
    p->entries[entry].calls++;
    p->entries[entry].flops += flops;
    p->entries[entry].bytes += bytes;
}

loom_profile_phase loom__profile_phase(loom_rank *rank, loom_profile_phase phase) {
    profiler *p = rank->profiler;
    if (!p)
        return LOOM_PROFILE_OTHER;
    loom_profile_phase before = p->phase;
    p->phase = phase;
    go_to(p, REST + (int64_t)phase);
    return before;
}

/* ---- kernels ---- */

static double product(int64_t x, int64_t y) {
    return (double)x * (double)y;
}

/* 4-byte elements that are read or written. */
static double floats(double count) {
    return 4.0 * count;
}

/* Moments are read and written; bf16 ones are half as wide. */
static double adamw_bytes(int64_t count, const loom_adamw *adamw, const float *v_max) {
    double width = 3 + (adamw->bf16_m ? 1 : 2) + (adamw->bf16_v ? 1 : 2) + (v_max ? 2 : 0);
    return floats(width * (double)count);
}

/* Pairs of a query and a key that may see each other, over all heads; documents and windows take away more, so that
 * with them the rate is what it would be without. */
static double pairs(const loom_attention_block *block) {
    double all = product(block->s_q, block->s_kv);
    if (block->causal && block->q_offset == block->kv_offset && block->s_q == block->s_kv)
        all = product(block->s_q, block->s_q + 1) / 2;
    return all * product(block->b, block->n);
}

/* Elements of the queries and of the output; of the keys and values. */
static double query_elements(const loom_attention_block *block) {
    return product(block->b, block->n) * product(block->s_q, block->d);
}

static double key_elements(const loom_attention_block *block) {
    return 2.0 * product(block->b, block->g) * product(block->s_kv, block->d);
}

static int64_t width(loom_activation act, int64_t f) {
    return loom_activation_is_gated(act) ? 2 * f : f;
}

static double flops_of(int64_t count, const loom_product *products) {
    double flops = 0;
    for (const loom_product *p = products; p < products + count; p++)
        flops += 2.0 * product(p->m, p->n) * (double)p->k;
    return flops;
}

static double bytes_of(int64_t count, const loom_product *products, double factor_bytes, double c_bytes) {
    double bytes = 0;
    for (const loom_product *p = products; p < products + count; p++)
        bytes += factor_bytes * (product(p->m, p->k) + product(p->k, p->n)) +
                 c_bytes * (p->accumulate ? 2.0 : 1.0) * product(p->m, p->n);
    return bytes;
}

/* X(kernel, parameters, arguments, floating point operations, bytes): what a call must compute and move at least.
 * Operations are counted where they are matrix products, bytes where the memory sets the pace. Those of both tables
 * first, with their element; then those of fp32 alone and of 16 bits alone. */
#define KERNELS(X, ELEMENT)                                                                                            \
    X(gemm,                                                                                                            \
        (loom_team * team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const ELEMENT *a, \
            int64_t lda, const ELEMENT *b, int64_t ldb, bool accumulate, ELEMENT *c, int64_t ldc),                     \
        (team, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, accumulate, c, ldc), 2.0 * product(m, n) * (double)k, \
        (double)sizeof(ELEMENT) * (product(m, k) + product(k, n) + (accumulate ? 2.0 : 1.0) * product(m, n)))          \
    X(gemm_grouped,                                                                                                    \
        (loom_team * team, bool trans_a, bool trans_b, int64_t count, const loom_product *products, int64_t lda,       \
            int64_t ldb, int64_t ldc),                                                                                 \
        (team, trans_a, trans_b, count, products, lda, ldb, ldc), flops_of(count, products),                           \
        bytes_of(count, products, (double)sizeof(ELEMENT), (double)sizeof(ELEMENT)))                                   \
    X(bias_add, (loom_team * team, int64_t rows, int64_t cols, const ELEMENT *x, const float *bias, ELEMENT *y),       \
        (team, rows, cols, x, bias, y), 0, (double)sizeof(ELEMENT) * (2 * product(rows, cols)))                        \
    X(bias_gradient,                                                                                                   \
        (loom_team * team, int64_t rows, int64_t cols, const ELEMENT *d_y, bool accumulate, float *d_bias),            \
        (team, rows, cols, d_y, accumulate, d_bias), 0, (double)sizeof(ELEMENT) * (product(rows, cols)))               \
    X(add, (loom_team * team, int64_t count, const ELEMENT *x, ELEMENT *y), (team, count, x, y), 0,                    \
        (double)sizeof(ELEMENT) * (3 * (double)count))                                                                 \
    X(scale, (loom_team * team, int64_t count, float factor, const ELEMENT *x, ELEMENT *y),                            \
        (team, count, factor, x, y), 0, (double)sizeof(ELEMENT) * (2 * (double)count))                                 \
    X(layernorm,                                                                                                       \
        (loom_team * team, int64_t rows, int64_t h, float eps, const ELEMENT *x, const float *weight,                  \
            const float *bias, ELEMENT *y, float *mean, float *rstd),                                                  \
        (team, rows, h, eps, x, weight, bias, y, mean, rstd), 0, (double)sizeof(ELEMENT) * (2 * product(rows, h)))     \
    X(layernorm_backward_input,                                                                                        \
        (loom_team * team, int64_t rows, int64_t h, const ELEMENT *x, const float *weight, const float *mean,          \
            const float *rstd, const ELEMENT *d_y, ELEMENT *d_x),                                                      \
        (team, rows, h, x, weight, mean, rstd, d_y, d_x), 0, (double)sizeof(ELEMENT) * (3 * product(rows, h)))         \
    X(layernorm_backward_weight,                                                                                       \
        (loom_team * team, int64_t rows, int64_t h, const ELEMENT *x, const float *mean, const float *rstd,            \
            const ELEMENT *d_y, bool accumulate, float *d_weight, float *d_bias),                                      \
        (team, rows, h, x, mean, rstd, d_y, accumulate, d_weight, d_bias), 0,                                          \
        (double)sizeof(ELEMENT) * (2 * product(rows, h)))                                                              \
    X(rmsnorm,                                                                                                         \
        (loom_team * team, int64_t rows, int64_t h, float eps, const ELEMENT *x, const float *weight, ELEMENT *y,      \
            float *rstd),                                                                                              \
        (team, rows, h, eps, x, weight, y, rstd), 0, (double)sizeof(ELEMENT) * (2 * product(rows, h)))                 \
    X(rmsnorm_backward_input,                                                                                          \
        (loom_team * team, int64_t rows, int64_t h, const ELEMENT *x, const float *weight, const float *rstd,          \
            const ELEMENT *d_y, ELEMENT *d_x),                                                                         \
        (team, rows, h, x, weight, rstd, d_y, d_x), 0, (double)sizeof(ELEMENT) * (3 * product(rows, h)))               \
    X(rmsnorm_backward_weight,                                                                                         \
        (loom_team * team, int64_t rows, int64_t h, const ELEMENT *x, const float *rstd, const ELEMENT *d_y,           \
            bool accumulate, float *d_weight),                                                                         \
        (team, rows, h, x, rstd, d_y, accumulate, d_weight), 0, (double)sizeof(ELEMENT) * (2 * product(rows, h)))      \
    X(activation,                                                                                                      \
        (loom_team * team, loom_activation act, int64_t rows, int64_t f, const ELEMENT *x, const float *bias,          \
            ELEMENT *y),                                                                                               \
        (team, act, rows, f, x, bias, y), 0, (double)sizeof(ELEMENT) * (product(rows, width(act, f) + f)))             \
    X(activation_backward,                                                                                             \
        (loom_team * team, loom_activation act, int64_t rows, int64_t f, const ELEMENT *x, const float *bias,          \
            const ELEMENT *d_y, ELEMENT *d_x),                                                                         \
        (team, act, rows, f, x, bias, d_y, d_x), 0, (double)sizeof(ELEMENT) * (product(rows, 2 * width(act, f) + f)))  \
    X(bias_dropout_add,                                                                                                \
        (loom_team * team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout, const ELEMENT *x, \
            const float *bias, const ELEMENT *residual, ELEMENT *y),                                                   \
        (team, rows, h, dropout, x, bias, residual, y), 0,                                                             \
        (double)sizeof(ELEMENT) * ((residual ? 3.0 : 2.0) * product(rows->s, rows->b) * (double)h))                    \
    X(dropout_backward,                                                                                                \
        (loom_team * team, const loom_row_coordinates *rows, int64_t h, const loom_dropout *dropout,                   \
            const ELEMENT *d_y, ELEMENT *d_x),                                                                         \
        (team, rows, h, dropout, d_y, d_x), 0, (double)sizeof(ELEMENT) * (2 * product(rows->s, rows->b) * (double)h))  \
    X(embedding,                                                                                                       \
        (loom_team * team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row, int64_t table_rows,      \
            const ELEMENT *table, ELEMENT *y),                                                                         \
        (team, rows, h, tokens, first_row, table_rows, table, y), 0, (double)sizeof(ELEMENT) * (2 * product(rows, h))) \
    X(embedding_backward,                                                                                              \
        (loom_team * team, int64_t rows, int64_t h, const int64_t *tokens, int64_t first_row, int64_t table_rows,      \
            const ELEMENT *d_y, bool accumulate, float *d_table),                                                      \
        (team, rows, h, tokens, first_row, table_rows, d_y, accumulate, d_table), 0,                                   \
        (double)sizeof(ELEMENT) * (3 * product(rows, h) + (accumulate ? 0 : product(table_rows, h))))                  \
    X(rope,                                                                                                            \
        (loom_team * team, int64_t s, int64_t b, int64_t stride, int64_t groups, int64_t heads_per_group,              \
            int64_t group_stride, int64_t d, int64_t rotary_d, const float *cosine, const float *sine,                 \
            const int32_t *positions, int64_t position_offset, bool inverse, ELEMENT *x),                              \
        (team, s, b, stride, groups, heads_per_group, group_stride, d, rotary_d, cosine, sine, positions,              \
            position_offset, inverse, x),                                                                              \
        0, (double)sizeof(ELEMENT) * (2 * product(s, b) * product(groups, heads_per_group) * (double)rotary_d))        \
    X(cross_entropy_local,                                                                                             \
        (loom_team * team, int64_t rows, int64_t v_local, int64_t v_valid, const ELEMENT *logits,                      \
            const int64_t *targets, int64_t first_column, float *maximum, float *sum, float *target_logit),            \
        (team, rows, v_local, v_valid, logits, targets, first_column, maximum, sum, target_logit), 0,                  \
        (double)sizeof(ELEMENT) * (product(rows, v_local)))                                                            \
    X(cross_entropy_backward,                                                                                          \
        (loom_team * team, int64_t rows, int64_t v_local, int64_t v_valid, ELEMENT * logits, const int64_t *targets,   \
            int64_t first_column, const float *maximum, const float *sum, const float *row_scale),                     \
        (team, rows, v_local, v_valid, logits, targets, first_column, maximum, sum, row_scale), 0,                     \
        (double)sizeof(ELEMENT) * (2 * product(rows, v_local)))                                                        \
    X(attention_block,                                                                                                 \
        (loom_team * team, const loom_attention_block *block, const ELEMENT *q, const ELEMENT *k, const ELEMENT *v,    \
            float *accumulator, float *maximum, float *sum),                                                           \
        (team, block, q, k, v, accumulator, maximum, sum), 4.0 * pairs(block) * (double)block->d,                      \
        (double)sizeof(ELEMENT) * (3 * query_elements(block) + key_elements(block)))                                   \
    X(attention_finish,                                                                                                \
        (loom_team * team, const loom_attention_block *block, const float *accumulator, const float *maximum,          \
            const float *sum, ELEMENT *out, int64_t out_stride, float *log_sum_exp),                                   \
        (team, block, accumulator, maximum, sum, out, out_stride, log_sum_exp), 0,                                     \
        (double)sizeof(ELEMENT) * (2 * query_elements(block)))                                                         \
    X(attention_delta,                                                                                                 \
        (loom_team * team, const loom_attention_block *block, const ELEMENT *out, const ELEMENT *d_out,                \
            int64_t out_stride, float *delta),                                                                         \
        (team, block, out, d_out, out_stride, delta), 0, (double)sizeof(ELEMENT) * (2 * query_elements(block)))        \
    X(attention_block_backward,                                                                                        \
        (loom_team * team, const loom_attention_block *block, const ELEMENT *q, const ELEMENT *k, const ELEMENT *v,    \
            const ELEMENT *d_out, int64_t out_stride, const float *log_sum_exp, const float *delta, bool accumulate_q, \
            bool accumulate_kv, ELEMENT *d_q, ELEMENT *d_k, ELEMENT *d_v),                                             \
        (team, block, q, k, v, d_out, out_stride, log_sum_exp, delta, accumulate_q, accumulate_kv, d_q, d_k, d_v),     \
        10.0 * pairs(block) * (double)block->d,                                                                        \
        (double)sizeof(ELEMENT) * (3 * query_elements(block) + 2 * key_elements(block)))                               \
    X(attention,                                                                                                       \
        (loom_team * team, const loom_attention_block *block, const ELEMENT *q, const ELEMENT *k, const ELEMENT *v,    \
            ELEMENT *out, int64_t out_stride, float *log_sum_exp),                                                     \
        (team, block, q, k, v, out, out_stride, log_sum_exp), 4.0 * pairs(block) * (double)block->d,                   \
        (double)sizeof(ELEMENT) * (2 * query_elements(block) + key_elements(block)))
#define KERNELS32(X)                                                                                                   \
    X(attention_begin,                                                                                                 \
        (loom_team * team, const loom_attention_block *block, float *accumulator, float *maximum, float *sum),         \
        (team, block, accumulator, maximum, sum), 0, floats(query_elements(block)))                                    \
    X(attention_merge,                                                                                                 \
        (loom_team * team, const loom_attention_block *block, const float *other_accumulator,                          \
            const float *other_maximum, const float *other_sum, float *accumulator, float *maximum, float *sum),       \
        (team, block, other_accumulator, other_maximum, other_sum, accumulator, maximum, sum), 0,                      \
        floats(3 * query_elements(block)))                                                                             \
    X(adamw,                                                                                                           \
        (loom_team * team, int64_t count, const loom_adamw *adamw, const float *d_w, float *w, void *m, void *v,       \
            float *v_max),                                                                                             \
        (team, count, adamw, d_w, w, m, v, v_max), 0, adamw_bytes(count, adamw, v_max))                                \
    X(sgd, (loom_team * team, int64_t count, const loom_sgd *sgd, const float *d_w, float *w, float *momentum),        \
        (team, count, sgd, d_w, w, momentum), 0, floats((momentum ? 5 : 3) * (double)count))                           \
    X(exact_sum, (loom_team * team, int power, int64_t count, const float *x, loom_exact_sum *sum),                    \
        (team, power, count, x, sum), 0, floats((double)count))
#define KERNELS16(X)                                                                                                   \
    X(widen, (loom_team * team, int64_t count, const uint16_t *x, float *y), (team, count, x, y), 0,                   \
        6 * (double)count)                                                                                             \
    X(narrow, (loom_team * team, int64_t count, const float *x, uint16_t *y), (team, count, x, y), 0,                  \
        6 * (double)count)                                                                                             \
    X(gemm_f32,                                                                                                        \
        (loom_team * team, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,                   \
            const uint16_t *a, int64_t lda, const uint16_t *b, int64_t ldb, bool accumulate, float *c, int64_t ldc),   \
        (team, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, accumulate, c, ldc), 2.0 * product(m, n) * (double)k, \
        2.0 * (product(m, k) + product(k, n)) + floats((accumulate ? 2.0 : 1.0) * product(m, n)))                      \
    X(gemm_grouped_f32,                                                                                                \
        (loom_team * team, bool trans_a, bool trans_b, int64_t count, const loom_product *products, int64_t lda,       \
            int64_t ldb, int64_t ldc),                                                                                 \
        (team, trans_a, trans_b, count, products, lda, ldb, ldc), flops_of(count, products),                           \
        bytes_of(count, products, 2.0, 4.0))

typedef struct visit {
    profiler *profiler;
    int64_t before; /* the entry that gets the time again afterwards */
} visit;

static visit begin_kernel(const loom_team *team, const char *name, double flops, double bytes) {
    profiler *p = loom__team_watcher(team);
    int64_t entry = entry_of(p, name, "");
    count_call(p, entry, flops, bytes);
    return (visit){p, go_to(p, entry)};
}

static void end_kernel(const visit *v) {
    go_to(v->profiler, v->before);
}

#define WRAPPER_OF(prefix, table, kernel, parameters, arguments, flops, bytes)                                         \
    static void prefix##_##kernel parameters {                                                                         \
        visit inside = begin_kernel(team, #kernel, flops, bytes);                                                      \
        inside.profiler->kernels->table kernel arguments;                                                              \
        end_kernel(&inside);                                                                                           \
    }
#define WRAPPER(...) WRAPPER_OF(watched, , __VA_ARGS__)
#define WRAPPER_BF16(...) WRAPPER_OF(watched_bf16, bf16->, __VA_ARGS__)
#define WRAPPER_F16(...) WRAPPER_OF(watched_f16, f16->, __VA_ARGS__)
KERNELS(WRAPPER, float)
KERNELS32(WRAPPER)
KERNELS(WRAPPER_BF16, uint16_t)
KERNELS16(WRAPPER_BF16)
KERNELS(WRAPPER_F16, uint16_t)
KERNELS16(WRAPPER_F16)
#undef WRAPPER
#undef WRAPPER_BF16
#undef WRAPPER_F16

#define NONFINITE(prefix, table, element)                                                                              \
    static bool prefix##_has_nonfinite(loom_team *team, int64_t count, const element *x) {                             \
        visit inside = begin_kernel(team, "has_nonfinite", 0, (double)sizeof(element) * (double)count);                \
        bool found = inside.profiler->kernels->table has_nonfinite(team, count, x);                                    \
        end_kernel(&inside);                                                                                           \
        return found;                                                                                                  \
    }
NONFINITE(watched, , float)
NONFINITE(watched_bf16, bf16->, uint16_t)
NONFINITE(watched_f16, f16->, uint16_t)
#undef NONFINITE

#define ENTRY(kernel, parameters, arguments, flops, bytes) .kernel = watched_##kernel,
#define ENTRY_BF16(kernel, parameters, arguments, flops, bytes) .kernel = watched_bf16_##kernel,
#define ENTRY_F16(kernel, parameters, arguments, flops, bytes) .kernel = watched_f16_##kernel,

static const loom_kernels16 watched_bf16 = {
    KERNELS(ENTRY_BF16, uint16_t) KERNELS16(ENTRY_BF16).has_nonfinite = watched_bf16_has_nonfinite};
static const loom_kernels16 watched_f16 = {
    KERNELS(ENTRY_F16, uint16_t) KERNELS16(ENTRY_F16).has_nonfinite = watched_f16_has_nonfinite};

/* One for each set of tables that the measured one may have. */
#define WATCHED(of_bf16, of_f16)                                                                                       \
    {                                                                                                                  \
        .name = "profiled", .bf16 = (of_bf16), .f16 = (of_f16),                                                        \
        KERNELS(ENTRY, float) KERNELS32(ENTRY).has_nonfinite = watched_has_nonfinite                                   \
    }
static const loom_kernels watched[2][2] = {
    {WATCHED(NULL, NULL), WATCHED(NULL, &watched_f16)},
    {WATCHED(&watched_bf16, NULL), WATCHED(&watched_bf16, &watched_f16)},
};
#undef WATCHED
#undef ENTRY
#undef ENTRY_BF16
#undef ENTRY_F16

/* ---- collectives ---- */

static void enter_operation(void *context, const loom_request *request, bool starts) {
    profiler *p = context;
    int64_t entry = entry_of(p, loom__operation_name(request->operation), request->comm->name);
    if (starts)
        count_call(p, entry, 0, (double)request->bytes);
    p->outer = go_to(p, entry);
}

static void leave_operation(void *context) {
    profiler *p = context;
    go_to(p, p->outer);
}

/* ---- begin and end ---- */

loom_status loom_profile_begin(loom_rank *rank) {
    if (rank->profiler)
        return loom_fail(LOOM_ERR_STATE, "rank %d is measured already", rank->index);
    profiler *p = calloc(1, sizeof *p);
    loom_profile_entry *entries = calloc(64, sizeof *entries);
    if (!p || !entries) {
        free(p);
        free(entries);
        return loom_fail(LOOM_ERR_MEMORY, "out of memory for a profile");
    }
    for (int i = 0; i < LOOM_PROFILE_PHASE_COUNT; i++)
        entries[REST + i] = (loom_profile_entry){.phase = (loom_profile_phase)i, .operation = "rest"};
    *p = (profiler){.kernels = rank->kernels,
        .watch = {p, enter_operation, leave_operation},
        .entries = entries,
        .count = LOOM_PROFILE_PHASE_COUNT,
        .capacity = 64,
        .began = loom__clock()};
    p->last = p->began;
    rank->profiler = p;
    rank->kernels = &watched[p->kernels->bf16 != NULL][p->kernels->f16 != NULL];
    rank->endpoint->watch = &p->watch;
    loom__team_set_watcher(rank->team, p);
    return LOOM_OK;
}

void loom__profile_drop(loom_rank *rank) {
    profiler *p = rank->profiler;
    if (!p)
        return;
    rank->kernels = p->kernels;
    rank->endpoint->watch = NULL;
    loom__team_set_watcher(rank->team, NULL);
    rank->profiler = NULL;
    free(p->entries);
    free(p);
}

static int by_time(const void *a, const void *b) {
    const loom_profile_entry *x = a, *y = b;
    return x->seconds < y->seconds ? 1 : x->seconds > y->seconds ? -1 : 0;
}

loom_status loom_profile_end(loom_rank *rank, loom_profile *out) {
    profiler *p = rank->profiler;
    if (!p)
        return loom_fail(LOOM_ERR_STATE, "rank %d is not measured", rank->index);
    go_to(p, REST + LOOM_PROFILE_OTHER);
    loom_profile profile = {p->entries, p->count, (double)(p->last - p->began) * 1e-9};
    p->entries = NULL;
    loom__profile_drop(rank);
    qsort(profile.entries, (size_t)profile.count, sizeof *profile.entries, by_time);
    *out = profile;
    return LOOM_OK;
}

void loom_profile_free(loom_profile *profile) {
    if (!profile)
        return;
    free(profile->entries);
    *profile = (loom_profile){0};
}
