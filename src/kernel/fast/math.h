/* Elementary functions on sixteen lanes, from polynomials fitted for this purpose (Chebyshev interpolation in double,
 * rounded to float). NaN in gives NaN out; infinities give the limits. */
#ifndef KERNEL_FAST_MATH_H
#define KERNEL_FAST_MATH_H

#include "kernel/fast/simd.h"
#include <math.h>

/* e^x within 2 ulp; 0 below -104, infinity above 88.72. x = n ln 2 + r with |r| <= ln(2)/2; ln 2 is split so that n
 * times its upper part is exact. The clamps keep x as their second operand, which passes NaN on. */
INLINE vf v_exp(vf x) {
    x = v_min(v_set(89.0f), v_max(v_set(-105.0f), x));
    vf n = v_round(v_mul(x, v_set(0x1.715476p+0f)));
    vf r = v_fnma(n, v_set(0x1.62e400p-1f), x);
    r = v_fnma(n, v_set(0x1.7f7d1cp-20f), r);
    vf p = v_fma(v_set(1.393365035e-3f), r, v_set(8.363180122e-3f));
    p = v_fma(p, r, v_set(4.166646491e-2f));
    p = v_fma(p, r, v_set(1.666657698e-1f));
    p = v_fma(p, r, v_set(5.000000013e-1f));
    p = v_fma(v_mul(r, r), p, r);
    return v_scale2(v_add(p, v_set(1.0f)), n);
}

/* 1/(1 + e^-x) */
INLINE vf v_sigmoid(vf x) {
    return v_div(v_set(1.0f), v_add(v_set(1.0f), v_exp(v_sub(v_zero(), x))));
}

/* The normal distribution function within 1e-7, and its density's numerator e^(-x^2/2). With t = |x|/sqrt(2) and
 * u = 1/(1 + 0.4 t), the tail erfc(t)/2 is e^(-t^2) times a polynomial in u. */
INLINE vf v_normal_below(vf x, vf *bell) {
    vf t = v_mul(v_abs(x), v_set(0.70710678f));
    vf u = v_div(v_set(1.0f), v_fma(v_set(0.4f), t, v_set(1.0f)));
    vf p = v_fma(v_set(4.228083893e-2f), u, v_set(-2.240000708e-1f));
    p = v_fma(p, u, v_set(4.019000160e-1f));
    p = v_fma(p, u, v_set(-2.616390613e-1f));
    p = v_fma(p, u, v_set(2.614317760e-1f));
    p = v_fma(p, u, v_set(4.261867109e-2f));
    p = v_fma(p, u, v_set(1.261197568e-1f));
    p = v_fma(p, u, v_set(1.112005510e-1f));
    p = v_fma(p, u, v_set(8.752294287e-5f));
    *bell = v_exp(v_mul(v_mul(x, x), v_set(-0.5f)));
    vf tail = v_mul(p, *bell);
    return v_select(v_less(x, v_zero()), tail, v_sub(v_set(1.0f), tail));
}

#endif
