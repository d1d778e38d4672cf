/* Selects the double build of what follows. */
#include "kernel/ref/unset.h"

#define REAL double
#define REF(name) loom__ref64_##name
#define ELEMENT REAL
#define LOAD(x) (x)
#define STORE(place, value) ((place) = (value))
