/* Element types and small shared types. */
#ifndef MEGALOOM_TYPES_H
#define MEGALOOM_TYPES_H

#include <megaloom/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, bytes an element, safetensors spelling). Tensors are F32, BF16 or F16 where they are computed with; whatever
 * the dtype, sums are fp32. F32 is first: what was only zeroed is F32. */
#define LOOM_DTYPE_LIST(X)                                                                                             \
    X(F32, 4, "F32")                                                                                                   \
    X(F64, 8, "F64")                                                                                                   \
    X(F16, 2, "F16")                                                                                                   \
    X(BF16, 2, "BF16")                                                                                                 \
    X(I64, 8, "I64")                                                                                                   \
    X(I32, 4, "I32")                                                                                                   \
    X(I16, 2, "I16")                                                                                                   \
    X(U16, 2, "U16")                                                                                                   \
    X(I8, 1, "I8")                                                                                                     \
    X(U8, 1, "U8")                                                                                                     \
    X(BOOL, 1, "BOOL")

typedef enum loom_dtype {
#define LOOM_DTYPE_ENUM(name, bytes, spelling) LOOM_##name,
    LOOM_DTYPE_LIST(LOOM_DTYPE_ENUM)
#undef LOOM_DTYPE_ENUM
        LOOM_DTYPE_COUNT
} loom_dtype;

/* Bytes of one element; 0 for a number that is no dtype. */
LOOM_API size_t loom_dtype_size(loom_dtype dtype);
/* The safetensors spelling ("F32"); "?" for a number that is no dtype. */
LOOM_API const char *loom_dtype_name(loom_dtype dtype);
/* The dtype of a safetensors spelling, or LOOM_DTYPE_COUNT. */
LOOM_API loom_dtype loom_dtype_from_name(const char *name);

/* bf16 <-> fp32, round to nearest even; NaN stays NaN. */
static inline float loom_bf16_to_f32(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline uint16_t loom_f32_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
/* IEEE half precision <-> fp32, round to nearest even; NaN stays NaN. */
LOOM_API float loom_f16_to_f32(uint16_t x);
LOOM_API uint16_t loom_f32_to_f16(float x);

/* The dtypes of 16 bits in which activations and weights may be kept. */
static inline bool loom_dtype_is_narrow(loom_dtype dtype) {
    return dtype == LOOM_BF16 || dtype == LOOM_F16;
}

typedef enum loom_log_level { LOOM_LOG_DEBUG, LOOM_LOG_INFO, LOOM_LOG_WARNING, LOOM_LOG_ERROR } loom_log_level;
/* Receives one line without a newline. May be called from any rank's thread at once. */
typedef void (*loom_log_function)(void *context, loom_log_level level, const char *line);

#ifdef __cplusplus
}
#endif
#endif
