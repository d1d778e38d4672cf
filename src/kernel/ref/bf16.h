/* Selects the build of what follows that keeps elements in bf16 and computes in float. */
#include "kernel/ref/unset.h"

#define REAL float
#define REF(name) loom__ref_bf16_##name
#define NARROW 1
#define ELEMENT uint16_t
#define LOAD(x) loom_bf16_to_f32(x)
#define STORE(place, value) ((place) = loom_f32_to_bf16(value))
