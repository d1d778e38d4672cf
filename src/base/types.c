/* The dtype list made into look-ups, and half precision, which no C17 compiler is bound to have. */
#include <megaloom/types.h>
#include <string.h>

size_t loom_dtype_size(loom_dtype dtype) {
    switch (dtype) {
#define CASE(name, bytes, spelling)                                                                                    \
    case LOOM_##name:                                                                                                  \
        return bytes;
        LOOM_DTYPE_LIST(CASE)
#undef CASE
    case LOOM_DTYPE_COUNT:
        break;
    }
    return 0;
}

const char *loom_dtype_name(loom_dtype dtype) {
    switch (dtype) {
#define CASE(name, bytes, spelling)                                                                                    \
    case LOOM_##name:                                                                                                  \
        return spelling;
        LOOM_DTYPE_LIST(CASE)
#undef CASE
    case LOOM_DTYPE_COUNT:
        break;
    }
    return "?";
}

loom_dtype loom_dtype_from_name(const char *name) {
#define COMPARE(dtype, bytes, spelling)                                                                                \
    if (strcmp(name, spelling) == 0)                                                                                   \
        return LOOM_##dtype;
    LOOM_DTYPE_LIST(COMPARE)
#undef COMPARE
    return LOOM_DTYPE_COUNT;
}

typedef union bits32 {
    float f;
    uint32_t u;
} bits32;

float loom_f16_to_f32(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, exponent = (x >> 10) & 31u, mantissa = x & 1023u;
    if (exponent == 31u)
        return (bits32){.u = sign | 0x7f800000u | mantissa << 13}.f;
    if (exponent != 0)
        return (bits32){.u = sign | (exponent + 112u) << 23 | mantissa << 13}.f;
    float magnitude = (float)mantissa * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

uint16_t loom_f32_to_f16(float x) {
    bits32 v = {.f = x};
    uint32_t sign = v.u >> 16 & 0x8000u, magnitude = v.u & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) { /* below 2^-14: the sum places the rounded mantissa in the low bits */
        bits32 shifted = {.f = (bits32){.u = magnitude}.f + 0.5f};
        return (uint16_t)(sign | (shifted.u - 0x3f000000u));
    }
    uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | (rounded - 0x38000000u) >> 13);
}
