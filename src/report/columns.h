/* The numbers of a step by name: one list that metrics.jsonl, the event files and the reader of runs go by. */
#ifndef REPORT_COLUMNS_H
#define REPORT_COLUMNS_H

#include <megaloom/report.h>
#include <stddef.h>

/* X(member, name): a double, or with I an integer, of loom_step_report behind `step`, in the order of a line. */
#define LOOM__COLUMN_LIST(X, I)                                                                                        \
    X(loss, "loss")                                                                                                    \
    X(grad_norm, "grad_norm")                                                                                          \
    X(learning_rate, "learning_rate")                                                                                  \
    X(tokens_per_second, "tokens_per_second")                                                                          \
    I(consumed_samples, "consumed_samples")                                                                            \
    X(seconds, "step_seconds")                                                                                         \
    X(gemm_share, "gemm_share")                                                                                        \
    X(validation_loss, "validation_loss")                                                                              \
    X(loss_scale, "loss_scale")                                                                                        \
    I(skipped_steps, "skipped_steps")                                                                                  \
    X(num_zeros_in_grad, "num_zeros_in_grad")                                                                          \
    I(memory_bytes, "memory_bytes")

typedef struct loom__column {
    const char *name;
    size_t offset;
    bool integer;
} loom__column;

enum { LOOM__COLUMNS = 12 };
extern const loom__column loom__columns[LOOM__COLUMNS];

static inline double loom__column_value(const loom__column *column, const loom_step_report *report) {
    const char *at = (const char *)report + column->offset;
    return column->integer ? (double)*(const int64_t *)(const void *)at : *(const double *)(const void *)at;
}

static inline void loom__column_set(const loom__column *column, loom_step_report *report, double value) {
    char *at = (char *)report + column->offset;
    if (column->integer)
        *(int64_t *)(void *)at = (int64_t)value;
    else
        *(double *)(void *)at = value;
}

#endif
