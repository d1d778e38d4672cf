/* A finite fp32 number is m * 2^(e-150) with a whole m below 2^24, so that its size and its square are whole multiples
 * of 2^-149 and 2^-298, and any sum of them is a whole number of some hundred bits. Invariant: nothing is rounded
 * before loom_exact_sum_value. */
#include "kernel/exact_sum.h"
#include <math.h>
#include <string.h>

enum { INFINITE = 255 };

void loom__exact_sum_shifted(uint64_t value, int shift, bool negative, loom_exact_sum *sum) {
    unsigned __int128 wide = (unsigned __int128)value << (shift % 32);
    for (int64_t *limb = sum->limbs + shift / 32; wide; wide >>= 32)
        *limb++ += negative ? -(int64_t)(uint32_t)wide : (int64_t)(uint32_t)wide;
}

void loom__exact_sum_carry(loom_exact_sum *sum) {
    for (int i = 0; i + 1 < LOOM_EXACT_LIMBS; i++) {
        sum->limbs[i + 1] += sum->limbs[i] >> 32;
        sum->limbs[i] &= 0xffffffff;
    }
}

void loom__exact_sum_element(int power, float x, loom_exact_sum *sum) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 23 & 255);
    uint64_t m = (bits & 0x7fffffu) | (uint32_t)(exponent != 0) << 23;
    int place = exponent > 1 ? exponent - 1 : 0; /* numbers below the normal ones share their exponent */
    if (exponent == INFINITE)
        sum->nonfinite++;
    else if (m == 0)
        sum->zeros++;
    else
        loom__exact_sum_shifted(power == 2 ? m * m : m, power * place, false, sum);
}

void loom__exact_sum_join(const loom_exact_sum *from, loom_exact_sum *to) {
    for (int i = 0; i < LOOM_EXACT_LIMBS; i++)
        to->limbs[i] += from->limbs[i];
    loom__exact_sum_carry(to);
    to->nonfinite += from->nonfinite;
    to->zeros += from->zeros;
}

double loom_exact_sum_value(const loom_exact_sum *sum, int power) {
    loom_exact_sum carried = *sum;
    double value = 0.0;
    loom__exact_sum_carry(&carried);
    for (int i = LOOM_EXACT_LIMBS - 1; i >= 0; i--)
        value += ldexp((double)carried.limbs[i], 32 * i - 149 * power);
    return value;
}
