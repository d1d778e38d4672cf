/* The pieces that exact sums are made of; loom_exact_sum says what they mean. */
#ifndef KERNEL_EXACT_SUM_H
#define KERNEL_EXACT_SUM_H

#include <megaloom/kernels.h>

/* Adds value * 2^shift units, or takes them off; shift + 64 is at most 600. At most 2^20 of these before a carry. */
void loom__exact_sum_shifted(uint64_t value, int shift, bool negative, loom_exact_sum *sum);
void loom__exact_sum_carry(loom_exact_sum *sum);
/* Adds the term of one number. */
void loom__exact_sum_element(int power, float x, loom_exact_sum *sum);
/* Adds all of one sum to another, and carries. */
void loom__exact_sum_join(const loom_exact_sum *from, loom_exact_sum *to);

#endif
