/* The 16-bit tables that belong to "reference" and to "portable". */
#ifndef KERNEL_PORTABLE16_H
#define KERNEL_PORTABLE16_H

#include <megaloom/kernels.h>

extern const loom_kernels16 loom__reference_bf16_kernels, loom__reference_f16_kernels;
extern const loom_kernels16 loom__portable_bf16_kernels, loom__portable_f16_kernels;

#endif
