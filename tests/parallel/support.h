/* Running a rank function in a test: ranks return their first failed check, only the main thread asserts. */
#ifndef TESTS_PARALLEL_SUPPORT_H
#define TESTS_PARALLEL_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <megaloom/megaloom.h>

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return loom_fail(LOOM_ERR_INTERNAL, __VA_ARGS__);                                                          \
    } while (0)

static inline loom_run_options test_options(void) {
    loom_run_options options = loom_run_options_default();
    options.threads = 1;
    options.timeout = 60;
#if defined(__SANITIZE_THREAD__)
    options.kernels = loom_kernels_reference(); /* a library's GEMM is not instrumented */
#endif
    return options;
}

static inline void must_run(int ranks, loom_rank_function function, void *argument) {
    loom_run_options options = test_options();
    if (loom_run_local(ranks, function, argument, &options))
        fail_msg("%d ranks: %s", ranks, loom_error_message());
}

#endif
