/* Selects the float build of what follows. */
#include "kernel/ref/unset.h"

#define REAL float
#define REF(name) loom__ref_##name
#define ELEMENT REAL
#define LOAD(x) (x)
#define STORE(place, value) ((place) = (value))
