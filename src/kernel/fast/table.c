/* The table of one build. That of fp32 leads to those of the same instruction set's 16-bit elements. */
#include "kernel/fast/fast.h"
#include "kernel/gemm.h"

#define TEXT2(isa) #isa
#define TEXT(isa) TEXT2(isa)
/* The table of this instruction set and another element. */
#define OTHER2(isa, element) loom__##isa##_##element##_kernels
#define OTHER(isa, element) OTHER2(isa, element)

/* What every element has. */
#define ENTRIES                                                                                                        \
    .bias_add = FAST(bias_add), .bias_gradient = FAST(bias_gradient), .add = FAST(add), .scale = FAST(scale),          \
    .layernorm = FAST(layernorm), .layernorm_backward_input = FAST(layernorm_backward_input),                          \
    .layernorm_backward_weight = FAST(layernorm_backward_weight), .rmsnorm = FAST(rmsnorm),                            \
    .rmsnorm_backward_input = FAST(rmsnorm_backward_input), .rmsnorm_backward_weight = FAST(rmsnorm_backward_weight),  \
    .activation = FAST(activation), .activation_backward = FAST(activation_backward),                                  \
    .bias_dropout_add = FAST(bias_dropout_add), .dropout_backward = FAST(dropout_backward),                            \
    .embedding = FAST(embedding), .embedding_backward = FAST(embedding_backward), .rope = FAST(rope),                  \
    .cross_entropy_local = FAST(cross_entropy_local), .cross_entropy_backward = FAST(cross_entropy_backward),          \
    .attention_block = FAST(attention_block), .attention_finish = FAST(attention_finish),                              \
    .attention_delta = FAST(attention_delta), .attention_block_backward = FAST(attention_block_backward),              \
    .attention = FAST(attention), .has_nonfinite = FAST(has_nonfinite)

#ifdef LOOM_NARROW

const loom_kernels16 FAST(kernels) = {
    ENTRIES,
    .widen = FAST(widen),
    .narrow = FAST(narrow),
    .gemm = FAST(gemm),
    .gemm_f32 = FAST(gemm_f32),
    .gemm_grouped = FAST(gemm_grouped),
    .gemm_grouped_f32 = FAST(gemm_grouped_f32),
};

#else

extern const loom_kernels16 OTHER(LOOM_ISA, bf16), OTHER(LOOM_ISA, f16);

const loom_kernels FAST(kernels) = {
    .name = TEXT(LOOM_ISA),
    .bf16 = &OTHER(LOOM_ISA, bf16),
    .f16 = &OTHER(LOOM_ISA, f16),
    .gemm = loom__gemm,
    .gemm_grouped = loom__gemm_grouped,
    ENTRIES,
    .attention_begin = FAST(attention_begin),
    .attention_merge = FAST(attention_merge),
    .exact_sum = FAST(exact_sum),
    .adamw = FAST(adamw),
    .sgd = FAST(sgd),
};

#endif
