/* The tables, and the choice among them by what the machine can do. The build is portable: the fast sources are
 * compiled once for each instruction set, and only a table whose set the processor has is ever handed out. A machine
 * without any of them gets the reference loops with the BLAS library's matrix product. */
#include "kernel/gemm.h"
#include "kernel/portable16.h"
#include "kernel/ref/ref.h"
#include <string.h>

#define REFERENCE_ENTRIES                                                                                              \
    .bias_add = loom__ref_bias_add, .bias_gradient = loom__ref_bias_gradient, .add = loom__ref_add,                    \
    .scale = loom__ref_scale, .layernorm = loom__ref_layernorm,                                                        \
    .layernorm_backward_input = loom__ref_layernorm_backward_input,                                                    \
    .layernorm_backward_weight = loom__ref_layernorm_backward_weight, .rmsnorm = loom__ref_rmsnorm,                    \
    .rmsnorm_backward_input = loom__ref_rmsnorm_backward_input,                                                        \
    .rmsnorm_backward_weight = loom__ref_rmsnorm_backward_weight, .activation = loom__ref_activation,                  \
    .activation_backward = loom__ref_activation_backward, .bias_dropout_add = loom__ref_bias_dropout_add,              \
    .dropout_backward = loom__ref_dropout_backward, .embedding = loom__ref_embedding,                                  \
    .embedding_backward = loom__ref_embedding_backward, .rope = loom__ref_rope,                                        \
    .cross_entropy_local = loom__ref_cross_entropy_local, .cross_entropy_backward = loom__ref_cross_entropy_backward,  \
    .attention_begin = loom__ref_attention_begin, .attention_block = loom__ref_attention_block,                        \
    .attention_merge = loom__ref_attention_merge, .attention_finish = loom__ref_attention_finish,                      \
    .attention_delta = loom__ref_attention_delta, .attention_block_backward = loom__ref_attention_block_backward,      \
    .attention = loom__ref_attention, .exact_sum = loom__ref_exact_sum, .has_nonfinite = loom__ref_has_nonfinite,      \
    .adamw = loom__ref_adamw, .sgd = loom__ref_sgd

static const loom_kernels reference = {.name = "reference",
    .bf16 = &loom__reference_bf16_kernels,
    .f16 = &loom__reference_f16_kernels,
    .gemm = loom__ref_gemm,
    .gemm_grouped = loom__ref_gemm_grouped,
    REFERENCE_ENTRIES};
static const loom_kernels portable = {.name = "portable",
    .bf16 = &loom__portable_bf16_kernels,
    .f16 = &loom__portable_f16_kernels,
    .gemm = loom__gemm,
    .gemm_grouped = loom__gemm_grouped,
    REFERENCE_ENTRIES};

#if defined(MEGALOOM_KERNELS_X86)
#include <cpuid.h>

extern const loom_kernels loom__avx2_kernels, loom__avx512_kernels;

/* Not every compiler's __builtin_cpu_supports knows it by name. */
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

const loom_kernels *loom_kernels_reference(void) {
    return &reference;
}

const loom_kernels *loom_kernels_fast(void) {
    loom__gemm_prepare();
#if defined(MEGALOOM_KERNELS_X86)
    if (has_avx512())
        return &loom__avx512_kernels;
    if (has_avx2())
        return &loom__avx2_kernels;
#endif
    return &portable;
}

const loom_kernels *loom_kernels_find(const char *name) {
    if (strcmp(name, "reference") == 0)
        return &reference;
    loom__gemm_prepare();
    if (strcmp(name, "portable") == 0)
        return &portable;
    if (strcmp(name, "fast") == 0)
        return loom_kernels_fast();
#if defined(MEGALOOM_KERNELS_X86)
    if (strcmp(name, "avx2") == 0)
        return has_avx2() ? &loom__avx2_kernels : NULL;
    if (strcmp(name, "avx512") == 0)
        return has_avx512() ? &loom__avx512_kernels : NULL;
#endif
    return NULL;
}
