/* The table of one instruction set. */
#include "kernel/fast/fast.h"
#include "kernel/gemm.h"

#define TEXT2(isa) #isa
#define TEXT(isa) TEXT2(isa)

const loom_kernels FAST(kernels) = {
    .name = TEXT(LOOM_ISA),
    .gemm = loom__gemm,
    .bias_add = FAST(bias_add),
    .bias_gradient = FAST(bias_gradient),
    .add = FAST(add),
    .scale = FAST(scale),
    .layernorm = FAST(layernorm),
    .layernorm_backward_input = FAST(layernorm_backward_input),
    .layernorm_backward_weight = FAST(layernorm_backward_weight),
    .rmsnorm = FAST(rmsnorm),
    .rmsnorm_backward_input = FAST(rmsnorm_backward_input),
    .rmsnorm_backward_weight = FAST(rmsnorm_backward_weight),
    .activation = FAST(activation),
    .activation_backward = FAST(activation_backward),
    .bias_dropout_add = FAST(bias_dropout_add),
    .dropout_backward = FAST(dropout_backward),
    .embedding = FAST(embedding),
    .embedding_backward = FAST(embedding_backward),
    .rope = FAST(rope),
    .cross_entropy_local = FAST(cross_entropy_local),
    .cross_entropy_backward = FAST(cross_entropy_backward),
    .attention_begin = FAST(attention_begin),
    .attention_block = FAST(attention_block),
    .attention_merge = FAST(attention_merge),
    .attention_finish = FAST(attention_finish),
    .attention_delta = FAST(attention_delta),
    .attention_block_backward = FAST(attention_block_backward),
    .attention = FAST(attention),
    .exact_sum = FAST(exact_sum),
    .has_nonfinite = FAST(has_nonfinite),
    .adamw = FAST(adamw),
    .sgd = FAST(sgd),
};
